/*
 * The data path: what infiniband/verbs.h has as inline functions. A part of driver.c.
 */

/* An operation, for either way to post one. */
struct lv_op {
	uint64_t wr_id;
	/* enum ibv_wr_opcode, enum ibv_send_flags */
	uint32_t opcode;
	uint32_t flags;
	uint32_t imm;
	uint32_t rkey;
	uint64_t raddr;
	uint64_t compare_add;
	uint64_t swap;
	struct ibv_ah *ah;
	uint32_t qpn;
	uint32_t qkey;
	struct ibv_sge *sge;
	uint32_t sges;
};

enum { MOST_OPS = 16 };

/* All at once, through ibv_post_send. */
int lv_post_send(struct ibv_qp *qp, const struct lv_op *ops, uint32_t count)
{
	struct ibv_send_wr wrs[MOST_OPS], *bad;
	uint32_t i;
	int error;

	memset(wrs, 0, sizeof(wrs));
	for (i = 0; i < count && i < MOST_OPS; i++) {
		const struct lv_op *op = &ops[i];
		struct ibv_send_wr *wr = &wrs[i];

		wr->wr_id = op->wr_id;
		wr->next = i + 1 < count ? wr + 1 : NULL;
		wr->sg_list = op->sge;
		wr->num_sge = op->sges;
		wr->opcode = op->opcode;
		wr->send_flags = op->flags;
		wr->imm_data = htobe32(op->imm);
		if (op->ah) {
			wr->wr.ud.ah = op->ah;
			wr->wr.ud.remote_qpn = op->qpn;
			wr->wr.ud.remote_qkey = op->qkey;
		} else if (op->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || op->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
			wr->wr.atomic.remote_addr = op->raddr;
			wr->wr.atomic.rkey = op->rkey;
			wr->wr.atomic.compare_add = op->compare_add;
			wr->wr.atomic.swap = op->swap;
		} else {
			wr->wr.rdma.remote_addr = op->raddr;
			wr->wr.rdma.rkey = op->rkey;
		}
	}
	error = ibv_post_send(qp, wrs, &bad);
	return error ? fail(error, "ibv_post_send") : 0;
}

static int set_data(struct ibv_qp_ex *qp, const struct lv_op *op)
{
	struct ibv_data_buf bufs[32];
	uint32_t i;

	if (!(op->flags & IBV_SEND_INLINE)) {
		if (op->sges == 1)
			ibv_wr_set_sge(qp, op->sge->lkey, op->sge->addr, op->sge->length);
		else
			ibv_wr_set_sge_list(qp, op->sges, op->sge);
		return 0;
	}
	if (op->sges == 1) {
		ibv_wr_set_inline_data(qp, (void *)op->sge->addr, op->sge->length);
		return 0;
	}
	if (op->sges > 32)
		return fail(EINVAL, "%u inline buffers", op->sges);
	for (i = 0; i < op->sges; i++) {
		bufs[i].addr = (void *)op->sge[i].addr;
		bufs[i].length = op->sge[i].length;
	}
	ibv_wr_set_inline_data_list(qp, op->sges, bufs);
	return 0;
}

/* All at once, through ibv_wr_start and its like. */
int lv_wr(struct ibv_qp *base, const struct lv_op *ops, uint32_t count)
{
	struct ibv_qp_ex *qp = ibv_qp_to_qp_ex(base);
	uint32_t i;
	int error;

	ibv_wr_start(qp);
	for (i = 0; i < count; i++) {
		const struct lv_op *op = &ops[i];

		qp->wr_id = op->wr_id;
		qp->wr_flags = op->flags;
		switch (op->opcode) {
		case IBV_WR_RDMA_WRITE:
			ibv_wr_rdma_write(qp, op->rkey, op->raddr);
			break;
		case IBV_WR_RDMA_WRITE_WITH_IMM:
			ibv_wr_rdma_write_imm(qp, op->rkey, op->raddr, htobe32(op->imm));
			break;
		case IBV_WR_SEND:
			ibv_wr_send(qp);
			break;
		case IBV_WR_SEND_WITH_IMM:
			ibv_wr_send_imm(qp, htobe32(op->imm));
			break;
		case IBV_WR_RDMA_READ:
			ibv_wr_rdma_read(qp, op->rkey, op->raddr);
			break;
		case IBV_WR_ATOMIC_CMP_AND_SWP:
			ibv_wr_atomic_cmp_swp(qp, op->rkey, op->raddr, op->compare_add, op->swap);
			break;
		case IBV_WR_ATOMIC_FETCH_AND_ADD:
			ibv_wr_atomic_fetch_add(qp, op->rkey, op->raddr, op->compare_add);
			break;
		default:
			return fail(EINVAL, "opcode %u", op->opcode);
		}
		if (op->ah)
			ibv_wr_set_ud_addr(qp, op->ah, op->qpn, op->qkey);
		if (set_data(qp, op))
			return -1;
	}
	error = ibv_wr_complete(qp);
	return error ? fail(error, "ibv_wr_complete") : 0;
}

/* One receive, to the SRQ if there is one. */
int lv_post_receive(struct ibv_qp *qp, struct ibv_srq *srq, uint64_t wr_id, struct ibv_sge *sge, uint32_t sges)
{
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = sge, .num_sge = sges }, *bad;
	int error = srq ? ibv_post_srq_recv(srq, &wr, &bad) : ibv_post_recv(qp, &wr, &bad);

	return error ? fail(error, "posting a receive") : 0;
}

/* Through ibv_poll_cq: how many, or less than 0. */
int lv_poll(struct ibv_cq *cq, int most, struct ibv_wc *wcs)
{
	return ibv_poll_cq(cq, most, wcs);
}

/* One, through ibv_start_poll, with all that it reads: 1, 0, or less than 0. */
int lv_start_poll(struct ibv_cq *base, struct ibv_wc *wc)
{
	struct ibv_poll_cq_attr attr = { 0 };
	struct ibv_cq_ex *cq = (struct ibv_cq_ex *)base;
	int error = ibv_start_poll(cq, &attr);

	if (error == ENOENT)
		return 0;
	if (error)
		return -error;
	memset(wc, 0, sizeof(*wc));
	wc->wr_id = cq->wr_id;
	wc->status = cq->status;
	wc->qp_num = ibv_wc_read_qp_num(cq);
	wc->vendor_err = ibv_wc_read_vendor_err(cq);
	if (cq->status == IBV_WC_SUCCESS) {
		wc->opcode = ibv_wc_read_opcode(cq);
		wc->byte_len = ibv_wc_read_byte_len(cq);
		wc->wc_flags = ibv_wc_read_wc_flags(cq);
		wc->imm_data = ibv_wc_read_imm_data(cq);
		wc->src_qp = ibv_wc_read_src_qp(cq);
	}
	ibv_end_poll(cq);
	return 1;
}

int lv_arm(struct ibv_cq *cq, int solicited_only)
{
	int error = ibv_req_notify_cq(cq, solicited_only);

	return error ? fail(error, "ibv_req_notify_cq") : 0;
}

/* The function behind ibv_poll_cq, which every program calls through a table. */
void *lv_poll_function(struct ibv_cq *cq)
{
	return cq->context->ops.poll_cq;
}
