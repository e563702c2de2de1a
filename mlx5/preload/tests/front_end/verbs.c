/* Two queue pairs of one program whose ends do not agree, a refused access, the limit of a shared
   receive queue, and the end of its use: prints the completions and events, as a NIC shows them.
   usage: verbs same|mtu|psn|reads|format|qkey|access|unread|limit|last|late|buffer */
#include <infiniband/verbs.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OK(x) do { if (!(x)) { fprintf(stderr, "%d: " #x "\n", __LINE__); exit(1); } } while (0)
enum { LEN = 8192, READS = 3 };

static const char *mode;
static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_srq *srq;
static struct ibv_mr *mr;
static struct ibv_port_attr port;
static char *memory;

static int is(const char *name) { return !strcmp(mode, name); }
static int is_roce(void) { return port.link_layer == IBV_LINK_LAYER_ETHERNET; }

static struct ibv_ah_attr path(int gid_index) {
    struct ibv_ah_attr at = {.port_num = 1, .dlid = port.lid, .is_global = is_roce()};
    at.grh.sgid_index = gid_index, at.grh.hop_limit = 1;
    OK(!ibv_query_gid(ctx, 1, gid_index, &at.grh.dgid));
    return at;
}

static struct ibv_qp *create(enum ibv_qp_type type, unsigned qkey) {
    struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .srq = srq, .qp_type = type, .cap = {8, 8, 1, 1, 0}};
    struct ibv_qp *qp = ibv_create_qp(pd, &init);
    OK(qp);
    struct ibv_qp_attr at = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = qkey,
        .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ};
    OK(!ibv_modify_qp(qp, &at, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | (qkey ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)));
    return qp;
}

static void connect_qp(struct ibv_qp *qp, struct ibv_qp *to, int is_responder) {
    struct ibv_qp_attr at = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = to->qp_num, .rq_psn = 7,
        .max_dest_rd_atomic = 16, .min_rnr_timer = 12, .ah_attr = path(is_roce())};
    if (is_responder && is("mtu")) at.path_mtu = IBV_MTU_4096;
    if (is_responder && is("psn")) at.rq_psn = 9;
    if (is_responder && is("reads")) at.max_dest_rd_atomic = 1;
    if (is_responder && is("format")) at.ah_attr.grh.sgid_index = 0;
    OK(!ibv_modify_qp(qp, &at, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    at.qp_state = IBV_QPS_RTS, at.timeout = 8, at.retry_cnt = 1, at.rnr_retry = 7, at.sq_psn = 7, at.max_rd_atomic = 16;
    OK(!ibv_modify_qp(qp, &at, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
        IBV_QP_MAX_QP_RD_ATOMIC));
}

static void receive(struct ibv_qp *qp) {
    struct ibv_sge sge = {(uintptr_t)memory, 128, mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = 100, .sg_list = &sge, .num_sge = 1}, *bad;
    OK(!(srq ? ibv_post_srq_recv(srq, &wr, &bad) : ibv_post_recv(qp, &wr, &bad)));
}

static void report(int count) {
    struct ibv_wc wc = {0};
    while (count--) {
        while (!ibv_poll_cq(cq, 1, &wc)) ;
        printf("%s: %s\n", wc.wr_id == 100 ? "received" : "sent", ibv_wc_status_str(wc.status));
    }
}

static void event(void) {
    struct ibv_async_event it;
    struct pollfd fd = {.fd = ctx->async_fd, .events = POLLIN};
    if (poll(&fd, 1, 200) != 1) return (void)puts("no event");
    OK(!ibv_get_async_event(ctx, &it));
    printf("event: %s\n", ibv_event_type_str(it.event_type));
    ibv_ack_async_event(&it);
}

static void ready_for_datagrams(struct ibv_qp *qp) {
    struct ibv_qp_attr at = {.qp_state = IBV_QPS_RTR};
    OK(!ibv_modify_qp(qp, &at, IBV_QP_STATE));
    at.qp_state = IBV_QPS_RTS;
    OK(!ibv_modify_qp(qp, &at, IBV_QP_STATE | IBV_QP_SQ_PSN));
}

int main(int argc, char **argv) {
    struct ibv_sge sge[READS];
    struct ibv_send_wr wr[READS] = {{0}}, *bad;
    struct ibv_device **list = ibv_get_device_list(NULL);
    OK(argc == 2 && list && list[0] && (ctx = ibv_open_device(list[0])) && (pd = ibv_alloc_pd(ctx)));
    mode = argv[1];
    OK(!ibv_query_port(ctx, 1, &port) && (memory = calloc(2, LEN)) && (mr = ibv_reg_mr(pd, memory, 2 * LEN, 7)));
    OK((cq = ibv_create_cq(ctx, 16, NULL, NULL, 0)));
    struct ibv_srq_init_attr of_srq = {.attr = {.max_wr = 8, .max_sge = 1}};
    if (is("limit") || is("last")) OK((srq = ibv_create_srq(pd, &of_srq)));
    int is_datagram = is("qkey"), n = is("reads") ? READS : 1;
    enum ibv_qp_type type = is_datagram ? IBV_QPT_UD : IBV_QPT_RC;
    struct ibv_qp *a = create(type, is_datagram ? 5 : 0), *b = create(type, is_datagram ? 6 : 0);
    if (is_datagram) ready_for_datagrams(a), ready_for_datagrams(b);
    else connect_qp(a, b, 0), connect_qp(b, a, 1);
    receive(b), receive(b);
    if (is("limit")) {
        struct ibv_srq_attr limit = {.srq_limit = 2};
        OK(!ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT) && !ibv_query_srq(srq, &limit));
        printf("limit %u\n", limit.srq_limit);
        event();
    }
    for (int i = 0; i < n; i++) {
        sge[i] = (struct ibv_sge){(uintptr_t)memory, srq || is_datagram ? 64 : LEN, mr->lkey};
        wr[i] = (struct ibv_send_wr){.wr_id = i, .next = i + 1 < n ? wr + i + 1 : NULL, .sg_list = sge + i, .num_sge = 1,
            .opcode = srq || is_datagram ? IBV_WR_SEND : n > 1 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED};
        wr[i].wr.rdma.remote_addr = (uintptr_t)memory + LEN, wr[i].wr.rdma.rkey = mr->rkey + (is("access") || is("unread") ? 0x5500 : 0);
    }
    if (is_datagram) {
        struct ibv_ah_attr at = path(is_roce());
        wr->wr.ud.remote_qpn = b->qp_num, wr->wr.ud.remote_qkey = 5;
        OK((wr->wr.ud.ah = ibv_create_ah(pd, &at)));
    }
    if (is("late")) wr->opcode = IBV_WR_SEND, sge->length = 64;
    OK(!ibv_post_send(a, wr, &bad));
    if (is("buffer")) usleep(10000), memory[0] = 1;
    report(is("access") || is("unread") ? 3 : is("reads") || is("late") || srq ? 2 : 1);
    if (is("last")) {
        struct ibv_qp_attr error = {.qp_state = IBV_QPS_ERR};
        OK(!ibv_modify_qp(b, &error, IBV_QP_STATE));
    }
    if (is("unread")) {
        struct pollfd fd = {.fd = ctx->async_fd, .events = POLLIN};
        OK(poll(&fd, 1, 2000) == 1 && !ibv_destroy_qp(a) && !ibv_destroy_qp(b));
        event();
        return 0;
    }
    event();
    if (is("limit")) {
        struct ibv_srq_attr limit;
        OK(!ibv_query_srq(srq, &limit));
        printf("limit %u\n", limit.srq_limit);
    }
    struct ibv_qp_attr at;
    struct ibv_qp_init_attr init;
    OK(!ibv_query_qp(b, &at, IBV_QP_STATE, &init));
    printf("responder: %s\n", at.qp_state == IBV_QPS_ERR ? "failed" : "alive");
    OK(!ibv_destroy_qp(a) && !ibv_destroy_qp(b) && !(srq && ibv_destroy_srq(srq)));
    puts("end");
    return 0;
}
