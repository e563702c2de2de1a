//! The constants of `infiniband/verbs.h` and `infiniband/mlx5dv.h` that this crate uses, under the
//! names they have there. A test compares them with the installed headers.

use core::ffi::c_int;

/// Declares constants, and lists them for the comparison with the headers.
macro_rules! numbers {
    ($($name:ident: $type:ty = $value:expr;)*) => {
        $(pub(crate) const $name: $type = $value;)*
        #[cfg(test)]
        #[allow(dead_code, reason = "that test includes this file")]
        pub(crate) const NUMBERS: &[(&str, u64)] = &[$((stringify!($name), $value as u64)),*];
    };
}

numbers! {
    IBV_PORT_ACTIVE: c_int = 4;
    IBV_LINK_LAYER_ETHERNET: u8 = 2;
    IBV_QPF_GRH_REQUIRED: u8 = 1;
    IBV_GID_TYPE_IB: u32 = 0;
    IBV_GID_TYPE_ROCE_V1: u32 = 1;
    IBV_GID_TYPE_ROCE_V2: u32 = 2;
    IBV_EVENT_CQ_ERR: c_int = 0;
    IBV_EVENT_QP_FATAL: c_int = 1;
    IBV_EVENT_QP_REQ_ERR: c_int = 2;
    IBV_EVENT_QP_ACCESS_ERR: c_int = 3;
    IBV_EVENT_DEVICE_FATAL: c_int = 8;
    IBV_EVENT_PORT_ACTIVE: c_int = 9;
    IBV_EVENT_PORT_ERR: c_int = 10;
    IBV_EVENT_QP_LAST_WQE_REACHED: c_int = 16;
    IBV_MTU_256: c_int = 1;
    IBV_MTU_4096: c_int = 5;
    IBV_QPT_RC: c_int = 2;
    IBV_QPT_UD: c_int = 4;
    IBV_QPS_INIT: c_int = 1;
    IBV_QPS_RTR: c_int = 2;
    IBV_QPS_RTS: c_int = 3;
    IBV_QPS_ERR: c_int = 6;
    IBV_QP_STATE: c_int = 1;
    IBV_QP_ACCESS_FLAGS: c_int = 1 << 3;
    IBV_QP_PKEY_INDEX: c_int = 1 << 4;
    IBV_QP_PORT: c_int = 1 << 5;
    IBV_QP_QKEY: c_int = 1 << 6;
    IBV_QP_AV: c_int = 1 << 7;
    IBV_QP_PATH_MTU: c_int = 1 << 8;
    IBV_QP_TIMEOUT: c_int = 1 << 9;
    IBV_QP_RETRY_CNT: c_int = 1 << 10;
    IBV_QP_RNR_RETRY: c_int = 1 << 11;
    IBV_QP_RQ_PSN: c_int = 1 << 12;
    IBV_QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    IBV_QP_MIN_RNR_TIMER: c_int = 1 << 15;
    IBV_QP_SQ_PSN: c_int = 1 << 16;
    IBV_QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    IBV_QP_DEST_QPN: c_int = 1 << 20;
    IBV_QP_INIT_ATTR_PD: u32 = 1;
    IBV_TRANSPORT_IWARP: c_int = 1;
    IBV_WR_RDMA_WRITE: c_int = 0;
    IBV_WR_RDMA_WRITE_WITH_IMM: c_int = 1;
    IBV_WR_SEND: c_int = 2;
    IBV_WR_SEND_WITH_IMM: c_int = 3;
    IBV_WR_RDMA_READ: c_int = 4;
    IBV_WR_ATOMIC_CMP_AND_SWP: c_int = 5;
    IBV_WR_ATOMIC_FETCH_AND_ADD: c_int = 6;
    IBV_SEND_FENCE: u32 = 1;
    IBV_SEND_SIGNALED: u32 = 1 << 1;
    IBV_SEND_SOLICITED: u32 = 1 << 2;
    IBV_SEND_INLINE: u32 = 1 << 3;
    IBV_WC_SUCCESS: c_int = 0;
    IBV_WC_LOC_LEN_ERR: c_int = 1;
    IBV_WC_LOC_PROT_ERR: c_int = 4;
    IBV_WC_WR_FLUSH_ERR: c_int = 5;
    IBV_WC_MW_BIND_ERR: c_int = 6;
    IBV_WC_BAD_RESP_ERR: c_int = 7;
    IBV_WC_LOC_ACCESS_ERR: c_int = 8;
    IBV_WC_REM_INV_REQ_ERR: c_int = 9;
    IBV_WC_REM_ACCESS_ERR: c_int = 10;
    IBV_WC_REM_OP_ERR: c_int = 11;
    IBV_WC_RETRY_EXC_ERR: c_int = 12;
    IBV_WC_RNR_RETRY_EXC_ERR: c_int = 13;
    IBV_WC_REM_ABORT_ERR: c_int = 16;
    IBV_WC_RECV_RDMA_WITH_IMM: c_int = 129;
    IBV_WC_GRH: u32 = 1;
    IBV_WC_WITH_IMM: u32 = 2;
    MLX5DV_CONTEXT_MASK_CQE_COMPRESION: u64 = 1;
    MLX5DV_CONTEXT_FLAGS_CQE_V1: u64 = 1;
    MLX5DV_CONTEXT_FLAGS_CQE_128B_COMP: u64 = 1 << 4;
    MLX5DV_CQ_INIT_ATTR_MASK_COMPRESSED_CQE: u64 = 1;
    MLX5DV_CQ_INIT_ATTR_MASK_CQE_SIZE: u64 = 1 << 2;
    MLX5DV_CQE_RES_FORMAT_HASH: u32 = 1;
    MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS: u64 = 1;
    MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE: u32 = 1 << 3;
    MLX5DV_SRQ_MASK_SRQN: u64 = 1;
    MLX5DV_OBJ_QP: u64 = 1;
    MLX5DV_OBJ_CQ: u64 = 1 << 1;
    MLX5DV_OBJ_SRQ: u64 = 1 << 2;
    MLX5DV_OBJ_AH: u64 = 1 << 5;
    MLX5DV_OBJ_PD: u64 = 1 << 6;
}
