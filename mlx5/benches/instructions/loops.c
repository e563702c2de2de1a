/*
 * What a program does that uses libibverbs, in the same loops as the operations of main.rs beside this file. Only what is in functions whose
 * names start with "measured_" is counted.
 */
#include "../../tests/support/libmlx5/driver.c"

enum {
	/* WQEBBs between two completions of a post loop, as in main.rs. */
	RECLAIM_EVERY = 1024,
	/* CQEs of a poll loop, of which as many are polled as asked for, and receives of a post loop. */
	CQES = 1 << 14,
	AT_ONCE = 16,
	MOST_QPS = 4,
};

struct bench {
	struct lv_device *device;
	struct lv_cq cq;
	struct lv_srq srq;
	struct lv_qp qps[MOST_QPS];
	uint32_t produced;
	uint8_t data[1024];
};

static void must(int error)
{
	if (!error)
		return;
	fprintf(stderr, "libmlx5: %s\n", problem);
	exit(1);
}

/* A queue pair (or more), ready as far as the driver knows. Its device never hears of that, so nobody executes what is posted. */
static void set_up(struct bench *b, int single_threaded, uint32_t cqes, int extended, uint32_t blocks, uint32_t inline_bytes, int is_shared,
		   int qps)
{
	struct lv_qp_request request = {
		.send_wr = blocks ? blocks : 1,
		.send_sge = 1,
		.inline_bytes = inline_bytes,
		.recv_wr = is_shared ? 0 : CQES,
		.recv_sge = is_shared ? 0 : 1,
	};
	int i;

	memset(b, 0, sizeof(*b));
	b->device = lv_open("mlx5_0", single_threaded);
	must(!b->device);
	must(lv_create_cq(b->device, cqes, 64, extended, 0, &b->cq));
	if (is_shared)
		must(lv_create_srq(b->device, CQES - 1, 1, &b->srq));
	request.send_cq = request.recv_cq = b->cq.cq;
	request.srq = b->srq.srq;
	for (i = 0; i < qps; i++) {
		must(lv_create_qp(b->device, &request, &b->qps[i]));
		must(lv_to_init(b->qps[i].qp));
		must(lv_pretend_ready(b->qps[i].qp));
	}
}

/* The device's side: the next CQE. libmlx5 numbers its queue pairs 0, 1, ... by user index. */
static void write_cqe(struct bench *b, int qp, uint8_t opcode, uint32_t word, uint16_t wqe_counter)
{
	uint32_t index = b->produced & (b->cq.entries - 1);
	struct mlx5_cqe64 *cqe = (void *)(b->cq.buffer + 64 * index);

	cqe->srqn_uidx = htobe32(qp);
	cqe->imm_inval_pkey = htobe32(word);
	cqe->byte_cnt = htobe32(64);
	cqe->sop_drop_qpn = htobe32((uint32_t)(opcode == MLX5_CQE_REQ ? MLX5_OPCODE_RDMA_WRITE_IMM : 0) << 24 | b->qps[qp].qpn);
	cqe->wqe_counter = htobe16(wqe_counter);
	cqe->op_own = opcode << 4 | !!(b->produced & b->cq.entries);
	b->produced++;
}

/* RECLAIM_EVERY WQEBBs more were posted, in WQEs of `blocks`. */
static __attribute__((noinline)) void reclaim(struct bench *b, uint16_t *posted, uint16_t blocks)
{
	struct ibv_wc wc;

	*posted += RECLAIM_EVERY;
	write_cqe(b, 0, MLX5_CQE_REQ, 0, *posted - blocks);
	must(ibv_poll_cq(b->cq.cq, 1, &wc) != 1 || wc.status != IBV_WC_SUCCESS);
}

struct post {
	enum ibv_wr_opcode opcode;
	uint32_t bytes;
	int is_inline;
	/* To a doorbell. */
	int batch;
	/* WQEBBs of a WQE. */
	uint16_t blocks;
};

__attribute__((noinline)) void measured_post_send(struct bench *b, const struct post *post, uint32_t n)
{
	struct ibv_sge sge = { .addr = (uintptr_t)b->data, .length = post->bytes, .lkey = 0x1234 };
	struct ibv_send_wr wrs[8], *bad;
	uint16_t posted = 0;
	uint32_t i = 0;
	int k;

	memset(wrs, 0, sizeof(wrs));
	for (k = 0; k < post->batch; k++) {
		wrs[k].next = k + 1 < post->batch ? &wrs[k + 1] : NULL;
		wrs[k].sg_list = &sge;
		wrs[k].num_sge = 1;
		wrs[k].opcode = post->opcode;
		wrs[k].send_flags = post->is_inline ? IBV_SEND_INLINE : 0;
		wrs[k].wr.rdma.remote_addr = 0x1000;
		wrs[k].wr.rdma.rkey = 0x4321;
	}
	while (i < n) {
		uint32_t round = i + RECLAIM_EVERY / post->blocks;

		while (i != round) {
			for (k = 0; k < post->batch; k++, i++) {
				wrs[k].wr_id = i;
				wrs[k].imm_data = htobe32(i);
			}
			if (ibv_post_send(b->qps[0].qp, wrs, &bad))
				abort();
		}
		reclaim(b, &posted, post->blocks);
	}
}

__attribute__((noinline)) void measured_wr(struct bench *b, const struct post *post, uint32_t n)
{
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(b->qps[0].qp);
	const int is_send = post->opcode == IBV_WR_SEND, is_inline = post->is_inline, batch = post->batch;
	const uint32_t bytes = post->bytes;
	uint16_t posted = 0;
	uint32_t i = 0;
	int k;

	while (i < n) {
		uint32_t round = i + RECLAIM_EVERY / post->blocks;

		while (i != round) {
			ibv_wr_start(qp);
			for (k = 0; k < batch; k++, i++) {
				qp->wr_id = i;
				qp->wr_flags = 0;
				if (is_send)
					ibv_wr_send(qp);
				else
					ibv_wr_rdma_write_imm(qp, 0x4321, 0x1000, htobe32(i));
				if (is_inline)
					ibv_wr_set_inline_data(qp, b->data, bytes);
				else
					ibv_wr_set_sge(qp, 0x1234, (uintptr_t)b->data, bytes);
			}
			if (ibv_wr_complete(qp))
				abort();
		}
		reclaim(b, &posted, post->blocks);
	}
}

__attribute__((noinline)) void measured_post_receive(struct bench *b, int is_shared, int batch, uint32_t n)
{
	struct ibv_sge sge = { .addr = (uintptr_t)b->data, .length = 64, .lkey = 0x1234 };
	struct ibv_recv_wr wrs[8], *bad;
	uint32_t i = 0;
	int k;

	for (k = 0; k < batch; k++)
		wrs[k] = (struct ibv_recv_wr){ .next = k + 1 < batch ? &wrs[k + 1] : NULL, .sg_list = &sge, .num_sge = 1 };
	while (i < n) {
		for (k = 0; k < batch; k++, i++)
			wrs[k].wr_id = i;
		if (is_shared ? ibv_post_srq_recv(b->srq.srq, wrs, &bad) : ibv_post_recv(b->qps[0].qp, wrs, &bad))
			abort();
	}
}

__attribute__((noinline)) uint64_t measured_poll_cq(struct bench *b, uint32_t n, int is_receive)
{
	struct ibv_wc wcs[AT_ONCE];
	uint64_t sum = 0;
	uint32_t polled = 0;

	while (polled < n) {
		int got = ibv_poll_cq(b->cq.cq, AT_ONCE, wcs), k;

		if (got <= 0)
			abort();
		for (k = 0; k < got; k++) {
			if (wcs[k].status != IBV_WC_SUCCESS)
				abort();
			sum += wcs[k].wr_id;
			if (is_receive)
				sum += be32toh(wcs[k].imm_data);
		}
		polled += got;
	}
	return sum;
}

__attribute__((noinline)) uint64_t measured_start_poll(struct bench *b, uint32_t n, int is_receive)
{
	struct ibv_cq_ex *cq = (void *)b->cq.cq;
	struct ibv_poll_cq_attr attr = { 0 };
	uint64_t sum = 0;
	uint32_t polled = 0;

	while (polled < n) {
		int k = 0;

		if (ibv_start_poll(cq, &attr))
			abort();
		do {
			if (cq->status != IBV_WC_SUCCESS)
				abort();
			sum += cq->wr_id;
			if (is_receive)
				sum += be32toh(ibv_wc_read_imm_data(cq));
		} while (++k < AT_ONCE && !ibv_next_poll(cq));
		ibv_end_poll(cq);
		polled += k;
	}
	return sum;
}

__attribute__((noinline)) void measured_empty_poll_cq(struct bench *b, uint32_t n)
{
	struct ibv_wc wcs[AT_ONCE];

	while (n--)
		if (ibv_poll_cq(b->cq.cq, AT_ONCE, wcs))
			abort();
}

__attribute__((noinline)) void measured_empty_start_poll(struct bench *b, uint32_t n)
{
	struct ibv_cq_ex *cq = (void *)b->cq.cq;
	struct ibv_poll_cq_attr attr = { 0 };

	while (n--)
		if (ibv_start_poll(cq, &attr) != ENOENT)
			abort();
}

/* CQES posts that give a completion each, and these. */
static void fill(struct bench *b, enum ibv_wc_opcode opcode, int qps)
{
	struct ibv_sge sge = { .addr = (uintptr_t)b->data, .length = 64, .lkey = 0x1234 };
	struct ibv_send_wr send = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED }, *bad_send;
	uint32_t i;

	for (i = 0; i < CQES; i++) {
		send.wr_id = i;
		if (opcode == IBV_WC_RDMA_WRITE) {
			must(ibv_post_send(b->qps[0].qp, &send, &bad_send));
			write_cqe(b, 0, MLX5_CQE_REQ, 0, i);
		} else if (i < CQES - 1) {
			must(lv_post_receive(b->qps[0].qp, b->srq.srq, i, &sge, 1));
			write_cqe(b, i % qps, MLX5_CQE_RESP_WR_IMM, i, i);
		}
	}
}

static void run_poll(int single_threaded, int extended, enum ibv_wc_opcode opcode, int is_shared, uint32_t n)
{
	const int qps = is_shared ? MOST_QPS : 1, is_receive = opcode != IBV_WC_RDMA_WRITE;
	uint64_t want = (uint64_t)n * (n - 1) / 2, sum;
	struct bench b;

	set_up(&b, single_threaded, CQES, extended, CQES, 0, is_shared, qps);
	fill(&b, opcode, qps);
	sum = extended ? measured_start_poll(&b, n, is_receive) : measured_poll_cq(&b, n, is_receive);
	must(sum != (is_receive ? 2 * want : want));
}

static void run_post(int single_threaded, int is_wr, const struct post *post, uint32_t n)
{
	struct bench b;

	/* libmlx5 counts WQEs of the largest size, so that a queue of as many WQEBBs is asked for with fewer. */
	set_up(&b, single_threaded, 64, 0, 4 * RECLAIM_EVERY / post->blocks, 220, 1, 1);
	if (is_wr)
		measured_wr(&b, post, n);
	else
		measured_post_send(&b, post, n);
}

static void run_post_receive(int single_threaded, int is_shared, int batch, uint32_t n)
{
	struct bench b;

	set_up(&b, single_threaded, 64, 0, 1, 0, is_shared, 1);
	measured_post_receive(&b, is_shared, batch, n);
}

static void run_empty(int single_threaded, int extended, uint32_t n)
{
	struct bench b;

	set_up(&b, single_threaded, 64, extended, 1, 0, 1, 1);
	if (extended)
		measured_empty_start_poll(&b, n);
	else
		measured_empty_poll_cq(&b, n);
}

/* Does operation `name` `n` times, through an API. Other than 0: there is no such thing. */
int run(const char *name, const char *api, int single_threaded, uint32_t n)
{
	static const struct {
		const char *name;
		struct post post;
	} posts[] = {
		{ "post_inline28", { IBV_WR_RDMA_WRITE_WITH_IMM, 28, 1, 1, 1 } },
		{ "post_batch8_inline28", { IBV_WR_RDMA_WRITE_WITH_IMM, 28, 1, 8, 1 } },
		{ "post_inline220", { IBV_WR_RDMA_WRITE_WITH_IMM, 220, 1, 1, 4 } },
		{ "post_sge1024", { IBV_WR_RDMA_WRITE_WITH_IMM, 1024, 0, 1, 1 } },
		{ "post_send_inline28", { IBV_WR_SEND, 28, 1, 1, 1 } },
	};
	const int is_wr = !strcmp(api, "ibv_wr_*"), extended = !strcmp(api, "ibv_start_poll");
	size_t i;

	for (i = 0; i < sizeof(posts) / sizeof(posts[0]); i++)
		if (!strcmp(name, posts[i].name)) {
			run_post(single_threaded, is_wr, &posts[i].post, n);
			return 0;
		}
	if (!strcmp(name, "post_receive_rq"))
		run_post_receive(single_threaded, 0, 1, n);
	else if (!strcmp(name, "post_receive_srq"))
		run_post_receive(single_threaded, 1, 1, n);
	else if (!strcmp(name, "post_receive8_rq"))
		run_post_receive(single_threaded, 0, 8, n);
	else if (!strcmp(name, "post_receive8_srq"))
		run_post_receive(single_threaded, 1, 8, n);
	else if (!strcmp(name, "poll_send"))
		run_poll(single_threaded, extended, IBV_WC_RDMA_WRITE, 0, n);
	else if (!strcmp(name, "poll_receive_rq"))
		run_poll(single_threaded, extended, IBV_WC_RECV_RDMA_WITH_IMM, 0, n);
	else if (!strcmp(name, "poll_receive_srq"))
		run_poll(single_threaded, extended, IBV_WC_RECV_RDMA_WITH_IMM, 1, n);
	else if (!strcmp(name, "poll_empty"))
		run_empty(single_threaded, extended, n);
	else
		return -1;
	return 0;
}
