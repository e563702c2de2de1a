//! `rdma/mlx5-abi.h`: the part of a request that libmlx5 appends, and the part of a response that
//! it expects.

use super::structures;

/// `MLX5_IB_ALLOC_UCTX_DEVX` in `AllocUcontextReq::flags`.
pub(crate) const ALLOC_UCTX_DEVX: u32 = 1 << 0;
pub(crate) const QP_FLAG_SIGNATURE: u32 = 1 << 0;
pub(crate) const QP_FLAG_SCATTER_CQE: u32 = 1 << 1;
/// `MLX5_QP_FLAG_BFREG_INDEX`: the driver chooses the register, and passes its index.
pub(crate) const QP_FLAG_BFREG_INDEX: u32 = 1 << 3;
/// `MLX5_QP_FLAG_UAR_PAGE_INDEX`: the driver chooses the register, and passes its page's index.
pub(crate) const QP_FLAG_UAR_PAGE_INDEX: u32 = 1 << 10;
pub(crate) const SRQ_FLAG_SIGNATURE: u32 = 1 << 0;

structures! {
    struct AllocUcontextReq = "mlx5_ib_alloc_ucontext_req_v2": 32 {
        0 total_num_bfregs: u32, 4 num_low_latency_bfregs: u32, 8 flags: u32, 12 comp_mask: u32, 16 max_cqe_version: u8, 17 reserved0: u8,
        18 reserved1: u16, 20 reserved2: u32, 24 lib_caps: u64,
    }
    struct AllocUcontextResp = "mlx5_ib_alloc_ucontext_resp": 72 {
        0 qp_tab_size: u32, 4 bf_reg_size: u32, 8 tot_bfregs: u32, 12 cache_line_size: u32, 16 max_sq_desc_sz: u16, 18 max_rq_desc_sz: u16,
        20 max_send_wqebb: u32, 24 max_recv_wr: u32, 28 max_srq_recv_wr: u32, 32 num_ports: u16, 34 flow_action_flags: u16,
        36 comp_mask: u32, 40 response_length: u32, 44 cqe_version: u8, 45 cmds_supp_uhw: u8, 46 eth_min_inline: u8,
        47 clock_info_versions: u8, 48 hca_core_clock_offset: u64, 56 log_uar_size: u32, 60 num_uars_per_page: u32, 64 num_dyn_bfregs: u32,
        68 dump_fill_mkey: u32,
    }
    struct AllocPdResp = "mlx5_ib_alloc_pd_resp": 4 { 0 pdn: u32 }
    struct CreateAhResp = "mlx5_ib_create_ah_resp": 16 { 0 response_length: u32, 4 dmac: [u8; 6], 10 reserved: [u8; 6] }
    struct QueryDeviceResp = "mlx5_ib_query_device_resp": 104 {
        0 comp_mask: u32, 4 response_length: u32, 8 tso_caps: [u32; 2], 16 rss_caps: [u64; 2], 32 cqe_comp_caps: [u32; 2],
        40 packet_pacing_caps: [u32; 4], 56 mlx5_ib_support_multi_pkt_send_wqes: u32, 60 flags: u32, 64 sw_parsing_caps: [u32; 2],
        72 striding_rq_caps: [u32; 6], 96 tunnel_offloads_caps: u32, 100 dci_streams_caps: [u8; 2], 102 reserved: u16,
    }
    struct CreateCq = "mlx5_ib_create_cq": 32 {
        0 buf_addr: u64, 8 db_addr: u64, 16 cqe_size: u32, 20 cqe_comp_en: u8, 21 cqe_comp_res_format: u8, 22 flags: u16,
        24 uar_page_index: u16, 26 reserved0: u16, 28 reserved1: u32,
    }
    struct CreateCqResp = "mlx5_ib_create_cq_resp": 8 { 0 cqn: u32, 4 reserved: u32 }
    struct CreateSrq = "mlx5_ib_create_srq": 32 {
        0 buf_addr: u64, 8 db_addr: u64, 16 flags: u32, 20 reserved0: u32, 24 uidx: u32, 28 reserved1: u32,
    }
    struct CreateSrqResp = "mlx5_ib_create_srq_resp": 8 { 0 srqn: u32, 4 reserved: u32 }
    struct CreateQp = "mlx5_ib_create_qp": 56 {
        0 buf_addr: u64, 8 db_addr: u64, 16 sq_wqe_count: u32, 20 rq_wqe_count: u32, 24 rq_wqe_shift: u32, 28 flags: u32, 32 uidx: u32,
        36 bfreg_index: u32, 40 sq_buf_addr: u64, 48 ece_options: u32, 52 dci_streams: [u8; 2], 54 reserved: u16,
    }
    struct CreateQpResp = "mlx5_ib_create_qp_resp": 40 {
        0 bfreg_index: u32, 4 ece_options: u32, 8 comp_mask: u32, 12 tirn: u32, 16 tisn: u32, 20 rqn: u32, 24 sqn: u32, 28 reserved1: u32,
        32 tir_icm_addr: u64,
    }
    struct ModifyQpResp = "mlx5_ib_modify_qp_resp": 16 { 0 response_length: u32, 4 dctn: u32, 8 ece_options: u32, 12 reserved: u32 }
}
