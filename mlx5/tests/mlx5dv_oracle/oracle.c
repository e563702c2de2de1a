/*
 * Answers questions about the mlx5 formats with the structs and inline functions of infiniband/mlx5dv.h (package libibverbs-dev), so that
 * tests/mlx5dv_oracle can compare them with the crate's. One question per line on stdin, one answer per line on stdout; numbers are
 * hexadecimal. What the header leaves unset in a structure is printed as "..".
 *
 * An argument "x86" takes the header's SSE variants of its functions.
 */
#include <inttypes.h>
#include <stddef.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <infiniband/mlx5_api.h>
#include <infiniband/mlx5dv.h>

static bool use_x86;

_Noreturn static void die(const char *what, const char *line)
{
	fprintf(stderr, "oracle: %s: %s\n", what, line);
	exit(1);
}

/* Segments are aligned to 16 bytes in a queue; the SSE functions rely on it. */
union wqe {
	uint8_t bytes[1024];
	__attribute__((aligned(64))) uint8_t align;
};

typedef size_t (*builder)(uint8_t *to, const char *line);

/* Builds twice, over different fillings: a byte that follows the filling was not set. */
static void answer(builder build, const char *line)
{
	union wqe one, two;
	size_t len, i;

	memset(&one, 0xa5, sizeof(one));
	memset(&two, 0x5a, sizeof(two));
	len = build(one.bytes, line);
	if (build(two.bytes, line) != len)
		die("two lengths", line);
	for (i = 0; i < len; i++) {
		if (one.bytes[i] == two.bytes[i])
			printf("%02x", one.bytes[i]);
		else
			printf("..");
	}
	putchar('\n');
}

static void set_ctrl(void *seg, uint16_t pi, uint8_t opcode, uint32_t qpn, uint8_t fm_ce_se, uint8_t ds, uint32_t imm)
{
#ifdef __SSE3__
	if (use_x86) {
		mlx5dv_x86_set_ctrl_seg(seg, pi, opcode, 0, qpn, fm_ce_se, ds, 0, htobe32(imm));
		return;
	}
#endif
	mlx5dv_set_ctrl_seg(seg, pi, opcode, 0, qpn, fm_ce_se, ds, 0, htobe32(imm));
}

static void set_data(void *seg, uint32_t len, uint32_t lkey, uint64_t addr)
{
#ifdef __SSE3__
	if (use_x86) {
		mlx5dv_x86_set_data_seg(seg, len, lkey, addr);
		return;
	}
#endif
	mlx5dv_set_data_seg(seg, len, lkey, addr);
}

enum header { NONE, REMOTE, ATOMIC, DATAGRAM };

static const struct verb {
	const char *name;
	uint8_t opcode;
	enum header header;
} verbs[] = {
	{ "write", MLX5_OPCODE_RDMA_WRITE, REMOTE },
	{ "write_imm", MLX5_OPCODE_RDMA_WRITE_IMM, REMOTE },
	{ "send", MLX5_OPCODE_SEND, NONE },
	{ "send_imm", MLX5_OPCODE_SEND_IMM, NONE },
	{ "read", MLX5_OPCODE_RDMA_READ, REMOTE },
	{ "compare_swap", MLX5_OPCODE_ATOMIC_CS, ATOMIC },
	{ "fetch_add", MLX5_OPCODE_ATOMIC_FA, ATOMIC },
	{ "ud_send", MLX5_OPCODE_SEND, DATAGRAM },
	{ "ud_send_imm", MLX5_OPCODE_SEND_IMM, DATAGRAM },
};

static const struct verb *find_verb(const char *name)
{
	size_t i;

	for (i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++)
		if (!strcmp(verbs[i].name, name))
			return &verbs[i];
	die("no such verb", name);
}

/* dgram qkey qpn stat_rate_sl fl_mlid rlid rmac tclass hop_limit grh_gid_fl rgid_high rgid_low */
static size_t build_dgram(uint8_t *to, const char *line)
{
	uint32_t qkey, qpn, stat_rate_sl, fl_mlid, rlid, tclass, hop_limit, grh_gid_fl;
	uint64_t rmac, high, low;
	uint8_t rgid[16];

	if (sscanf(line, "dgram %x %x %x %x %x %" SCNx64 " %x %x %x %" SCNx64 " %" SCNx64, &qkey, &qpn, &stat_rate_sl, &fl_mlid, &rlid,
		   &rmac, &tclass, &hop_limit, &grh_gid_fl, &high, &low) != 11)
		die("cannot read", line);
	rmac = htobe64(rmac);
	high = htobe64(high);
	low = htobe64(low);
	memcpy(rgid, &high, 8);
	memcpy(rgid + 8, &low, 8);
	/* The key has 64 bits; a Q_Key is the first 32 of them. */
	mlx5dv_set_dgram_seg((void *)to, (uint64_t)qkey << 32, qpn, 1, stat_rate_sl, fl_mlid, rlid, (uint8_t *)&rmac + 2, tclass,
			     hop_limit, grh_gid_fl, rgid);
	return sizeof(struct mlx5_wqe_datagram_seg);
}

/*
 * wqe VERB index qpn flags imm raddr rkey swap_add compare inline_len sge_len lkey addr, and the question for the datagram segment behind it
 * if there is one; inline byte i is 7 * i + 1.
 */
static size_t build_wqe(uint8_t *wqe, const char *line)
{
	char name[32], flags[8];
	uint32_t index, qpn, imm, rkey, inline_len, sge_len, lkey;
	uint64_t raddr, swap_add, compare, addr;
	const struct verb *verb;
	uint8_t fm_ce_se = 0;
	uint8_t *at = wqe + sizeof(struct mlx5_wqe_ctrl_seg);
	uint32_t i;
	int rest;

	if (sscanf(line, "wqe %31s %x %x %7s %x %" SCNx64 " %x %" SCNx64 " %" SCNx64 " %x %x %x %" SCNx64 " %n", name, &index, &qpn,
		   flags, &imm, &raddr, &rkey, &swap_add, &compare, &inline_len, &sge_len, &lkey, &addr, &rest) != 13)
		die("cannot read", line);
	verb = find_verb(name);
	if (verb->header == DATAGRAM)
		at += build_dgram(at, line + rest);
	if (verb->header == REMOTE || verb->header == ATOMIC) {
		struct mlx5_wqe_raddr_seg *seg = (void *)at;

		seg->raddr = htobe64(raddr);
		seg->rkey = htobe32(rkey);
		at += sizeof(*seg);
	}
	if (verb->header == ATOMIC) {
		struct mlx5_wqe_atomic_seg *seg = (void *)at;

		seg->swap_add = htobe64(swap_add);
		seg->compare = htobe64(compare);
		at += sizeof(*seg);
	}
	if (inline_len) {
		struct mlx5_wqe_inl_data_seg *seg = (void *)at;
		uint8_t *data = (uint8_t *)(seg + 1);

		seg->byte_count = htobe32(inline_len | MLX5_INLINE_SEG);
		for (i = 0; i < inline_len; i++)
			data[i] = 7 * i + 1;
		at += (sizeof(*seg) + inline_len + 15) / 16 * 16;
	}
	if (sge_len) {
		set_data(at, sge_len, lkey, addr);
		at += sizeof(struct mlx5_wqe_data_seg);
	}
	if (strchr(flags, 'c'))
		fm_ce_se |= MLX5_WQE_CTRL_CQ_UPDATE;
	if (strchr(flags, 's'))
		fm_ce_se |= MLX5_WQE_CTRL_SOLICITED;
	if (strchr(flags, 'f'))
		fm_ce_se |= MLX5_WQE_CTRL_FENCE;
	set_ctrl(wqe, index, verb->opcode, qpn, fm_ce_se, (at - wqe) / 16, imm);
	return at - wqe;
}

/* data len lkey addr */
static size_t build_data(uint8_t *to, const char *line)
{
	uint32_t len, lkey;
	uint64_t addr;

	if (sscanf(line, "data %x %x %" SCNx64, &len, &lkey, &addr) != 3)
		die("cannot read", line);
	set_data(to, len, lkey, addr);
	return sizeof(struct mlx5_wqe_data_seg);
}

/* srq_next index */
static size_t build_srq_next(uint8_t *to, const char *line)
{
	struct mlx5_wqe_srq_next_seg *seg = (void *)to;
	uint32_t index;

	if (sscanf(line, "srq_next %x", &index) != 1)
		die("cannot read", line);
	seg->next_wqe_index = htobe16(index);
	return sizeof(*seg);
}

/* arm sequence solicited_only consumed cqn: the doorbell, whose first half is the record's word */
static size_t build_arm(uint8_t *to, const char *line)
{
	uint32_t sequence, solicited_only, consumed, cqn;
	uint64_t doorbell;

	if (sscanf(line, "arm %x %x %x %x", &sequence, &solicited_only, &consumed, &cqn) != 4)
		die("cannot read", line);
	doorbell = (sequence & 3) << 28 | (solicited_only ? MLX5_CQ_DB_REQ_NOT_SOL : MLX5_CQ_DB_REQ_NOT) | (consumed & 0xffffff);
	doorbell = htobe64(doorbell << 32 | cqn);
	memcpy(to, &doorbell, sizeof(doorbell));
	return sizeof(doorbell);
}

/* make_cqe opcode format solicited owner flags_rqpn srqn imm byte_cnt sop_drop_qpn wqe_counter */
static size_t build_cqe(uint8_t *to, const char *line)
{
	struct mlx5_cqe64 *cqe = (void *)to;
	uint32_t opcode, format, solicited, owner, flags_rqpn, srqn, imm, byte_cnt, sop_drop_qpn, wqe_counter;

	if (sscanf(line, "make_cqe %x %x %x %x %x %x %x %x %x %x", &opcode, &format, &solicited, &owner, &flags_rqpn, &srqn, &imm,
		   &byte_cnt, &sop_drop_qpn, &wqe_counter) != 10)
		die("cannot read", line);
	cqe->flags_rqpn = htobe32(flags_rqpn);
	cqe->srqn_uidx = htobe32(srqn);
	cqe->imm_inval_pkey = htobe32(imm);
	cqe->byte_cnt = htobe32(byte_cnt);
	cqe->sop_drop_qpn = htobe32(sop_drop_qpn);
	cqe->wqe_counter = htobe16(wqe_counter);
	cqe->op_own = opcode << 4 | format << 2 | solicited << 1;
	mlx5dv_set_cqe_owner(cqe, owner);
	return sizeof(*cqe);
}

/* make_err_cqe srqn vendor syndrome s_wqe_opcode_qpn wqe_counter */
static size_t build_err_cqe(uint8_t *to, const char *line)
{
	struct mlx5_err_cqe *cqe = (void *)to;
	uint32_t srqn, vendor, syndrome, s_wqe_opcode_qpn, wqe_counter;

	if (sscanf(line, "make_err_cqe %x %x %x %x %x", &srqn, &vendor, &syndrome, &s_wqe_opcode_qpn, &wqe_counter) != 5)
		die("cannot read", line);
	cqe->srqn = htobe32(srqn);
	cqe->vendor_err_synd = vendor;
	cqe->syndrome = syndrome;
	cqe->s_wqe_opcode_qpn = htobe32(s_wqe_opcode_qpn);
	cqe->wqe_counter = htobe16(wqe_counter);
	cqe->op_own = MLX5_CQE_REQ_ERR << 4;
	return sizeof(*cqe);
}

/* read_cqe BYTES: the fields of both structs */
static void read_cqe(const char *line)
{
	union {
		uint8_t bytes[64];
		struct mlx5_cqe64 ok;
		struct mlx5_err_cqe err;
	} cqe;
	size_t i;

	line += strlen("read_cqe ");
	for (i = 0; i < sizeof(cqe); i++)
		if (sscanf(line + 2 * i, "%2hhx", &cqe.bytes[i]) != 1)
			die("cannot read", line);
	printf("opcode %x format %x solicited %x owner %x flags_rqpn %x srqn %x imm %x byte_cnt %x sop_drop_qpn %x wqe_counter %x",
	       mlx5dv_get_cqe_opcode(&cqe.ok), mlx5dv_get_cqe_format(&cqe.ok), mlx5dv_get_cqe_se(&cqe.ok), mlx5dv_get_cqe_owner(&cqe.ok),
	       be32toh(cqe.ok.flags_rqpn), be32toh(cqe.ok.srqn_uidx), be32toh(cqe.ok.imm_inval_pkey), be32toh(cqe.ok.byte_cnt),
	       be32toh(cqe.ok.sop_drop_qpn), be16toh(cqe.ok.wqe_counter));
	printf(" vendor %x syndrome %x s_wqe_opcode_qpn %x err_wqe_counter %x\n", cqe.err.vendor_err_synd, cqe.err.syndrome,
	       be32toh(cqe.err.s_wqe_opcode_qpn), be16toh(cqe.err.wqe_counter));
}

#define VALUE(name) printf(#name " %" PRIx64 " ", (uint64_t)(uint32_t)(name))
#define SIZE(type) printf("sizeof(" #type ") %zx ", sizeof(struct type))
#define OFFSET(type, field) printf(#type "." #field " %zx ", offsetof(struct type, field))

/* libraries: the same for the names that the test has listed in verbs.inc */
static void libraries(void)
{
#include "verbs.inc"
	printf("\n");
}

/* constants: one line of NAME VALUE pairs */
static void constants(void)
{
	VALUE(MLX5_OPCODE_NOP);
	VALUE(MLX5_OPCODE_RDMA_WRITE);
	VALUE(MLX5_OPCODE_RDMA_WRITE_IMM);
	VALUE(MLX5_OPCODE_SEND);
	VALUE(MLX5_OPCODE_SEND_IMM);
	VALUE(MLX5_OPCODE_RDMA_READ);
	VALUE(MLX5_OPCODE_ATOMIC_CS);
	VALUE(MLX5_OPCODE_ATOMIC_FA);
	VALUE(MLX5_WQE_CTRL_CQ_UPDATE);
	VALUE(MLX5_WQE_CTRL_SOLICITED);
	VALUE(MLX5_WQE_CTRL_FENCE);
	VALUE(MLX5_WQE_CTRL_INITIATOR_SMALL_FENCE);
	VALUE(MLX5_INLINE_SEG);
	VALUE(MLX5_INVALID_LKEY);
	VALUE(MLX5_EXTENDED_UD_AV);
	VALUE(MLX5_SEND_WQE_BB);
	VALUE(MLX5_RCV_DBR);
	VALUE(MLX5_SND_DBR);
	VALUE(MLX5_CQ_DOORBELL);
	VALUE(MLX5_CQ_DB_REQ_NOT_SOL);
	VALUE(MLX5_CQ_DB_REQ_NOT);
	VALUE(MLX5_INLINE_SCATTER_32);
	VALUE(MLX5_INLINE_SCATTER_64);
	VALUE(MLX5_CQE_OWNER_MASK);
	VALUE(MLX5_CQE_REQ);
	VALUE(MLX5_CQE_RESP_WR_IMM);
	VALUE(MLX5_CQE_RESP_SEND);
	VALUE(MLX5_CQE_RESP_SEND_IMM);
	VALUE(MLX5_CQE_RESP_SEND_INV);
	VALUE(MLX5_CQE_RESIZE_CQ);
	VALUE(MLX5_CQE_REQ_ERR);
	VALUE(MLX5_CQE_RESP_ERR);
	VALUE(MLX5_CQE_INVALID);
	VALUE(MLX5_CQE_SYNDROME_LOCAL_LENGTH_ERR);
	VALUE(MLX5_CQE_SYNDROME_LOCAL_QP_OP_ERR);
	VALUE(MLX5_CQE_SYNDROME_LOCAL_PROT_ERR);
	VALUE(MLX5_CQE_SYNDROME_WR_FLUSH_ERR);
	VALUE(MLX5_CQE_SYNDROME_MW_BIND_ERR);
	VALUE(MLX5_CQE_SYNDROME_BAD_RESP_ERR);
	VALUE(MLX5_CQE_SYNDROME_LOCAL_ACCESS_ERR);
	VALUE(MLX5_CQE_SYNDROME_REMOTE_INVAL_REQ_ERR);
	VALUE(MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR);
	VALUE(MLX5_CQE_SYNDROME_REMOTE_OP_ERR);
	VALUE(MLX5_CQE_SYNDROME_TRANSPORT_RETRY_EXC_ERR);
	VALUE(MLX5_CQE_SYNDROME_RNR_RETRY_EXC_ERR);
	VALUE(MLX5_CQE_SYNDROME_REMOTE_ABORTED_ERR);
	SIZE(mlx5_wqe_ctrl_seg);
	SIZE(mlx5_wqe_data_seg);
	SIZE(mlx5_wqe_raddr_seg);
	SIZE(mlx5_wqe_atomic_seg);
	SIZE(mlx5_wqe_inl_data_seg);
	SIZE(mlx5_wqe_datagram_seg);
	SIZE(mlx5_wqe_srq_next_seg);
	SIZE(mlx5_cqe64);
	SIZE(mlx5_err_cqe);
	OFFSET(mlx5_wqe_ctrl_seg, opmod_idx_opcode);
	OFFSET(mlx5_wqe_ctrl_seg, qpn_ds);
	OFFSET(mlx5_wqe_ctrl_seg, fm_ce_se);
	OFFSET(mlx5_wqe_ctrl_seg, imm);
	OFFSET(mlx5_wqe_data_seg, byte_count);
	OFFSET(mlx5_wqe_data_seg, lkey);
	OFFSET(mlx5_wqe_data_seg, addr);
	OFFSET(mlx5_wqe_raddr_seg, raddr);
	OFFSET(mlx5_wqe_raddr_seg, rkey);
	OFFSET(mlx5_wqe_atomic_seg, swap_add);
	OFFSET(mlx5_wqe_atomic_seg, compare);
	OFFSET(mlx5_wqe_srq_next_seg, next_wqe_index);
	OFFSET(mlx5_wqe_av, key);
	OFFSET(mlx5_wqe_av, dqp_dct);
	OFFSET(mlx5_wqe_av, stat_rate_sl);
	OFFSET(mlx5_wqe_av, fl_mlid);
	OFFSET(mlx5_wqe_av, rlid);
	OFFSET(mlx5_wqe_av, rmac);
	OFFSET(mlx5_wqe_av, tclass);
	OFFSET(mlx5_wqe_av, hop_limit);
	OFFSET(mlx5_wqe_av, grh_gid_fl);
	OFFSET(mlx5_wqe_av, rgid);
	OFFSET(mlx5_cqe64, flags_rqpn);
	OFFSET(mlx5_cqe64, srqn_uidx);
	OFFSET(mlx5_cqe64, imm_inval_pkey);
	OFFSET(mlx5_cqe64, byte_cnt);
	OFFSET(mlx5_cqe64, sop_drop_qpn);
	OFFSET(mlx5_cqe64, wqe_counter);
	OFFSET(mlx5_cqe64, op_own);
	OFFSET(mlx5_err_cqe, srqn);
	OFFSET(mlx5_err_cqe, vendor_err_synd);
	OFFSET(mlx5_err_cqe, syndrome);
	OFFSET(mlx5_err_cqe, s_wqe_opcode_qpn);
	OFFSET(mlx5_err_cqe, wqe_counter);
	putchar('\n');
}

static bool starts(const char *line, const char *word)
{
	return !strncmp(line, word, strlen(word));
}

int main(int argc, char **argv)
{
	static char line[1024];

	use_x86 = argc > 1 && !strcmp(argv[1], "x86");
#ifndef __SSE3__
	if (use_x86)
		die("compiled without SSE", argv[1]);
#endif
	while (fgets(line, sizeof(line), stdin)) {
		if (starts(line, "wqe "))
			answer(build_wqe, line);
		else if (starts(line, "dgram "))
			answer(build_dgram, line);
		else if (starts(line, "data "))
			answer(build_data, line);
		else if (starts(line, "srq_next "))
			answer(build_srq_next, line);
		else if (starts(line, "arm "))
			answer(build_arm, line);
		else if (starts(line, "make_cqe "))
			answer(build_cqe, line);
		else if (starts(line, "make_err_cqe "))
			answer(build_err_cqe, line);
		else if (starts(line, "read_cqe "))
			read_cqe(line);
		else if (starts(line, "constants"))
			constants();
		else if (starts(line, "libraries"))
			libraries();
		else
			die("no such question", line);
	}
	return 0;
}
