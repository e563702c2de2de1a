/*
 * Prints sizes, offsets and constants of infiniband/mlx5dv.h (package libibverbs-dev), so that tests/mlx5dv_oracle can compare them with the
 * crate's: one line of NAME VALUE pairs, hexadecimal. The argument is "constants" or "libraries".
 */
#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <infiniband/mlx5_api.h>
#include <infiniband/mlx5dv.h>

#define VALUE(name) printf(#name " %" PRIx64 " ", (uint64_t)(uint32_t)(name))
#define SIZE(type) printf("sizeof(" #type ") %zx ", sizeof(struct type))
#define OFFSET(type, field) printf(#type "." #field " %zx ", offsetof(struct type, field))

/* The names that the test has listed in verbs.inc */
static void libraries(void)
{
#include "verbs.inc"
	printf("\n");
}

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

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "constants"))
		constants();
	else
		libraries();
	return 0;
}
