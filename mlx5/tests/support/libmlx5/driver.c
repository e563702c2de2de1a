/*
 * libibverbs and libmlx5 for the Rust of this package: what infiniband/verbs.h has as inline functions, and where the queues are
 * (mlx5dv_init_obj). The Rust beside it compiles it when a test runs, and describes the structures again.
 *
 * A function that returns a pointer returns NULL, and one that returns an int a number other than 0, if it fails; lv_problem() says why.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>

static char problem[256];

const char *lv_problem(void)
{
	return problem;
}

static int fail(int error, const char *format, ...)
{
	va_list list;
	int n;

	va_start(list, format);
	n = vsnprintf(problem, sizeof(problem), format, list);
	va_end(list);
	if (n > 0 && (size_t)n < sizeof(problem))
		snprintf(problem + n, sizeof(problem) - n, ": %s", strerror(error));
	return error ? error : -1;
}

struct lv_device {
	struct ibv_context *context;
	struct ibv_pd *pd;
	/* With a thread domain: of it, in pd; the others are locked. */
	struct ibv_pd *own_pd;
	struct ibv_td *td;
};

/* Its queues belong to one thread and have no locks if single_threaded. */
struct lv_device *lv_open(const char *name, int single_threaded)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct lv_device *device = calloc(1, sizeof(*device));
	int i;

	if (!list || !device) {
		fail(errno, "no device list");
		return NULL;
	}
	for (i = 0; list[i] && strcmp(ibv_get_device_name(list[i]), name); i++)
		;
	if (!list[i]) {
		fail(ENODEV, "no device %s: is this running under mlx5-run", name);
		return NULL;
	}
	device->context = ibv_open_device(list[i]);
	ibv_free_device_list(list);
	if (!device->context) {
		fail(errno, "ibv_open_device");
		return NULL;
	}
	device->own_pd = ibv_alloc_pd(device->context);
	if (!device->own_pd) {
		fail(errno, "ibv_alloc_pd");
		return NULL;
	}
	device->pd = device->own_pd;
	if (single_threaded) {
		struct ibv_td_init_attr td_attr = { 0 };
		struct ibv_parent_domain_init_attr attr = { .pd = device->own_pd };

		device->td = ibv_alloc_td(device->context, &td_attr);
		attr.td = device->td;
		device->pd = device->td ? ibv_alloc_parent_domain(device->context, &attr) : NULL;
		if (!device->pd) {
			fail(errno, "no thread domain");
			return NULL;
		}
	}
	return device;
}

struct lv_cq {
	struct ibv_cq *cq;
	uint8_t *buffer;
	uint32_t *record;
	uint8_t *uar;
	struct ibv_comp_channel *channel;
	uint32_t entries;
	uint32_t cqe_bytes;
	uint32_t cqn;
};

/* Entries of 128 bytes come from mlx5dv_create_cq, others from ibv_create_cq_ex if extended, else from ibv_create_cq. */
int lv_create_cq(struct lv_device *device, uint32_t entries, uint32_t cqe_bytes, int extended, int with_channel, struct lv_cq *out)
{
	struct ibv_cq_init_attr_ex attr = { .cqe = entries, .wc_flags = IBV_WC_STANDARD_FLAGS };
	struct mlx5dv_cq_init_attr dv_attr = { .comp_mask = MLX5DV_CQ_INIT_ATTR_MASK_CQE_SIZE, .cqe_size = cqe_bytes };
	struct mlx5dv_cq dv = { 0 };
	struct mlx5dv_obj obj = { 0 };
	int error;

	out->channel = with_channel ? ibv_create_comp_channel(device->context) : NULL;
	if (with_channel && !out->channel)
		return fail(errno, "ibv_create_comp_channel");
	attr.channel = out->channel;
	if (device->td) {
		attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD;
		attr.flags = IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
		attr.parent_domain = device->pd;
	}
	if (cqe_bytes == 128)
		out->cq = ibv_cq_ex_to_cq(mlx5dv_create_cq(device->context, &attr, &dv_attr));
	else if (extended || device->td)
		out->cq = ibv_cq_ex_to_cq(ibv_create_cq_ex(device->context, &attr));
	else
		out->cq = ibv_create_cq(device->context, entries, NULL, out->channel, 0);
	if (!out->cq)
		return fail(errno, "creating a CQ of %u entries of %u bytes", entries, cqe_bytes);
	obj.cq.in = out->cq;
	obj.cq.out = &dv;
	error = mlx5dv_init_obj(&obj, MLX5DV_OBJ_CQ);
	if (error)
		return fail(error, "mlx5dv_init_obj of a CQ");
	out->buffer = dv.buf;
	out->record = (uint32_t *)dv.dbrec;
	out->uar = dv.cq_uar;
	out->entries = dv.cqe_cnt;
	out->cqe_bytes = dv.cqe_size;
	out->cqn = dv.cqn;
	return 0;
}

struct lv_srq {
	struct ibv_srq *srq;
	uint8_t *buffer;
	uint32_t *record;
	uint32_t stride;
	uint32_t head;
	uint32_t tail;
	uint32_t srqn;
};

int lv_create_srq(struct lv_device *device, uint32_t receives, uint32_t sges, struct lv_srq *out)
{
	struct ibv_srq_init_attr attr = { .attr = { .max_wr = receives, .max_sge = sges } };
	struct mlx5dv_srq dv = { .comp_mask = MLX5DV_SRQ_MASK_SRQN };
	struct mlx5dv_obj obj = { 0 };
	int error;

	out->srq = ibv_create_srq(device->pd, &attr);
	if (!out->srq)
		return fail(errno, "ibv_create_srq of %u receives of %u buffers", receives, sges);
	obj.srq.in = out->srq;
	obj.srq.out = &dv;
	error = mlx5dv_init_obj(&obj, MLX5DV_OBJ_SRQ);
	if (error)
		return fail(error, "mlx5dv_init_obj of an SRQ");
	out->buffer = dv.buf;
	out->record = (uint32_t *)dv.dbrec;
	out->stride = dv.stride;
	out->head = dv.head;
	out->tail = dv.tail;
	out->srqn = dv.srqn;
	return 0;
}

struct lv_qp {
	struct ibv_qp *qp;
	uint32_t *record;
	uint8_t *sq;
	uint8_t *rq;
	uint8_t *bf;
	uint32_t sq_blocks;
	uint32_t rq_wqes;
	uint32_t rq_stride;
	uint32_t bf_bytes;
	uint32_t qpn;
	uint32_t max_inline;
};

struct lv_qp_request {
	struct ibv_cq *send_cq;
	struct ibv_cq *recv_cq;
	/* NULL: receives of its own. */
	struct ibv_srq *srq;
	uint32_t is_datagram;
	uint32_t send_wr;
	uint32_t send_sge;
	uint32_t inline_bytes;
	uint32_t recv_wr;
	uint32_t recv_sge;
};

/* A queue pair in RESET. */
int lv_create_qp(struct lv_device *device, const struct lv_qp_request *request, struct lv_qp *out)
{
	const uint64_t both = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
	const uint64_t connected = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |
				   IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
	struct ibv_qp_init_attr_ex attr = {
		.send_cq = request->send_cq,
		.recv_cq = request->recv_cq,
		.srq = request->srq,
		.cap = {
			.max_send_wr = request->send_wr,
			.max_send_sge = request->send_sge,
			.max_inline_data = request->inline_bytes,
			.max_recv_wr = request->recv_wr,
			.max_recv_sge = request->recv_sge,
		},
		.qp_type = request->is_datagram ? IBV_QPT_UD : IBV_QPT_RC,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = device->pd,
		.send_ops_flags = request->is_datagram ? both : both | connected,
	};
	struct mlx5dv_qp dv = { 0 };
	struct mlx5dv_obj obj = { 0 };
	int error;

	out->qp = ibv_create_qp_ex(device->context, &attr);
	if (!out->qp)
		return fail(errno, "ibv_create_qp_ex");
	obj.qp.in = out->qp;
	obj.qp.out = &dv;
	error = mlx5dv_init_obj(&obj, MLX5DV_OBJ_QP);
	if (error)
		return fail(error, "mlx5dv_init_obj of a QP");
	out->record = (uint32_t *)dv.dbrec;
	out->sq = dv.sq.buf;
	out->rq = dv.rq.buf;
	out->bf = dv.bf.reg;
	out->sq_blocks = dv.sq.wqe_cnt;
	out->rq_wqes = dv.rq.wqe_cnt;
	out->rq_stride = dv.rq.stride;
	out->bf_bytes = dv.bf.size;
	out->qpn = out->qp->qp_num;
	out->max_inline = attr.cap.max_inline_data;
	return 0;
}

enum {
	LV_ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
	LV_QKEY = 0x1234,
};

/* Receives may be posted from INIT on. Nothing is sent in this state. */
int lv_to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = LV_QKEY, .qp_access_flags = LV_ACCESS };
	int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
	int error = ibv_modify_qp(qp, &attr, mask | (qp->qp_type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS));

	return error ? fail(error, "ibv_modify_qp to INIT") : 0;
}

/*
 * The driver takes the queue pair for ready to send, which its device knows nothing of: the command goes to /dev/null. So everything can be
 * posted, and nobody executes it.
 */
int lv_pretend_ready(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTS };
	int device_fd = qp->context->cmd_fd;
	int error;

	qp->context->cmd_fd = open("/dev/null", O_WRONLY | O_CLOEXEC);
	error = qp->context->cmd_fd < 0 ? errno : ibv_modify_qp(qp, &attr, IBV_QP_STATE);
	if (qp->context->cmd_fd >= 0)
		close(qp->context->cmd_fd);
	qp->context->cmd_fd = device_fd;
	return error ? fail(error, "ibv_modify_qp to RTS") : 0;
}

/* From INIT to RTS, connected to a queue pair of this port, with one retry of either kind and the shortest times; or for datagrams. */
int lv_connect(struct ibv_qp *qp, uint32_t remote_qpn)
{
	const int is_datagram = qp->qp_type == IBV_QPT_UD;
	struct ibv_port_attr port;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR };
	int error = ibv_query_port(qp->context, 1, &port);

	if (error)
		return fail(error, "ibv_query_port");
	attr.path_mtu = IBV_MTU_4096;
	attr.dest_qp_num = remote_qpn;
	attr.max_dest_rd_atomic = 16;
	attr.min_rnr_timer = 1;
	attr.ah_attr = (struct ibv_ah_attr){ .dlid = port.lid, .port_num = 1 };
	error = ibv_modify_qp(qp, &attr, IBV_QP_STATE | (is_datagram ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
			      IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	if (error)
		return fail(error, "ibv_modify_qp to RTR");
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 8, .retry_cnt = 1, .rnr_retry = 1, .max_rd_atomic = 16 };
	error = ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | (is_datagram ? 0 : IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			      IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC));
	return error ? fail(error, "ibv_modify_qp to RTS") : 0;
}

/* Registers memory for everything; its key, local and remote, or 0. */
uint32_t lv_register(struct lv_device *device, void *addr, size_t bytes)
{
	struct ibv_mr *mr = ibv_reg_mr(device->own_pd, addr, bytes, LV_ACCESS);

	if (!mr)
		fail(errno, "ibv_reg_mr");
	return mr ? mr->lkey : 0;
}

struct lv_path {
	uint8_t gid[16];
	uint32_t flow_label;
	uint16_t lid;
	uint8_t service_level;
	uint8_t path_bits;
	uint8_t static_rate;
	uint8_t is_global;
	uint8_t source_gid_index;
	uint8_t hop_limit;
	uint8_t traffic_class;
};

struct ibv_ah *lv_create_ah(struct lv_device *device, const struct lv_path *path)
{
	struct ibv_ah_attr attr = {
		.dlid = path->lid,
		.sl = path->service_level,
		.src_path_bits = path->path_bits,
		.static_rate = path->static_rate,
		.is_global = path->is_global,
		.port_num = 1,
		.grh = {
			.flow_label = path->flow_label,
			.sgid_index = path->source_gid_index,
			.hop_limit = path->hop_limit,
			.traffic_class = path->traffic_class,
		},
	};
	struct ibv_ah *ah;

	memcpy(attr.grh.dgid.raw, path->gid, sizeof(path->gid));
	ah = ibv_create_ah(device->own_pd, &attr);
	if (!ah)
		fail(errno, "ibv_create_ah");
	return ah;
}

#include "operations.h"
