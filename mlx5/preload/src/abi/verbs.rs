//! `rdma/ib_user_verbs.h`: headers, requests and responses of the write() commands.

use super::structures;

/// Numbers of the supported commands (`enum ib_uverbs_write_cmds`).
pub(crate) mod number {
    pub(crate) const GET_CONTEXT: u8 = 0;
    pub(crate) const QUERY_DEVICE: u8 = 1;
    pub(crate) const QUERY_PORT: u8 = 2;
    pub(crate) const ALLOC_PD: u8 = 3;
    pub(crate) const DEALLOC_PD: u8 = 4;
    pub(crate) const CREATE_AH: u8 = 5;
    pub(crate) const DESTROY_AH: u8 = 8;
    pub(crate) const REG_MR: u8 = 9;
    pub(crate) const REREG_MR: u8 = 11;
    pub(crate) const DEREG_MR: u8 = 13;
    pub(crate) const CREATE_COMP_CHANNEL: u8 = 17;
    pub(crate) const CREATE_CQ: u8 = 18;
    pub(crate) const DESTROY_CQ: u8 = 20;
    pub(crate) const CREATE_QP: u8 = 24;
    pub(crate) const QUERY_QP: u8 = 25;
    pub(crate) const MODIFY_QP: u8 = 26;
    pub(crate) const DESTROY_QP: u8 = 27;
    pub(crate) const CREATE_SRQ: u8 = 32;
    pub(crate) const MODIFY_SRQ: u8 = 33;
    pub(crate) const QUERY_SRQ: u8 = 34;
    pub(crate) const DESTROY_SRQ: u8 = 35;
    pub(crate) const CREATE_XSRQ: u8 = 39;
}

structures! {
    /// Header at the start of every command, with lengths in words of 4 bytes, or of 8 in an
    /// extended command.
    struct CommandHeader = "ib_uverbs_cmd_hdr": 8 { 0 command: u32, 4 in_words: u16, 6 out_words: u16 }
    /// Second header, of an extended command.
    struct ExtendedHeader = "ib_uverbs_ex_cmd_hdr": 16 {
        0 response: u64, 8 provider_in_words: u16, 10 provider_out_words: u16, 12 cmd_hdr_reserved: u32,
    }
    struct CompEvent = "ib_uverbs_comp_event_desc": 8 { 0 cq_handle: u64 }
    struct AsyncEventDesc = "ib_uverbs_async_event_desc": 16 { 0 element: u64, 8 event_type: u32, 12 reserved: u32 }

    struct GetContext = "ib_uverbs_get_context": 8 { 0 response: u64 }
    struct GetContextResp = "ib_uverbs_get_context_resp": 8 { 0 async_fd: u32, 4 num_comp_vectors: u32 }

    struct QueryDevice = "ib_uverbs_query_device": 8 { 0 response: u64 }
    struct QueryDeviceResp = "ib_uverbs_query_device_resp": 176 {
        0 fw_ver: u64, 8 node_guid: [u8; 8], 16 sys_image_guid: [u8; 8], 24 max_mr_size: u64, 32 page_size_cap: u64, 40 vendor_id: u32,
        44 vendor_part_id: u32, 48 hw_ver: u32, 52 max_qp: u32, 56 max_qp_wr: u32, 60 device_cap_flags: u32, 64 max_sge: u32,
        68 max_sge_rd: u32, 72 max_cq: u32, 76 max_cqe: u32, 80 max_mr: u32, 84 max_pd: u32, 88 max_qp_rd_atom: u32, 92 max_ee_rd_atom: u32,
        96 max_res_rd_atom: u32, 100 max_qp_init_rd_atom: u32, 104 max_ee_init_rd_atom: u32, 108 atomic_cap: u32, 112 max_ee: u32,
        116 max_rdd: u32, 120 max_mw: u32, 124 max_raw_ipv6_qp: u32, 128 max_raw_ethy_qp: u32, 132 max_mcast_grp: u32,
        136 max_mcast_qp_attach: u32, 140 max_total_mcast_qp_attach: u32, 144 max_ah: u32, 148 max_fmr: u32, 152 max_map_per_fmr: u32,
        156 max_srq: u32, 160 max_srq_wr: u32, 164 max_srq_sge: u32, 168 max_pkeys: u16, 170 local_ca_ack_delay: u8, 171 phys_port_cnt: u8,
        172 reserved: [u8; 4],
    }
    struct ExQueryDevice = "ib_uverbs_ex_query_device": 8 { 0 comp_mask: u32, 4 reserved: u32 }
    struct ExQueryDeviceResp = "ib_uverbs_ex_query_device_resp": 304 {
        0 base: QueryDeviceResp, 176 comp_mask: u32, 180 response_length: u32, 184 odp_caps: [u8; 24], 208 timestamp_mask: u64,
        216 hca_core_clock: u64, 224 device_cap_flags_ex: u64, 232 rss_caps: [u32; 4], 248 max_wq_type_rq: u32, 252 raw_packet_caps: u32,
        256 tm_caps: [u32; 6], 280 cq_moderation_caps: [u16; 4], 288 max_dm_size: u64, 296 xrc_odp_caps: u32, 300 reserved: u32,
    }

    struct QueryPort = "ib_uverbs_query_port": 16 { 0 response: u64, 8 port_num: u8, 9 reserved: [u8; 7] }
    struct QueryPortResp = "ib_uverbs_query_port_resp": 40 {
        0 port_cap_flags: u32, 4 max_msg_sz: u32, 8 bad_pkey_cntr: u32, 12 qkey_viol_cntr: u32, 16 gid_tbl_len: u32, 20 pkey_tbl_len: u16,
        22 lid: u16, 24 sm_lid: u16, 26 state: u8, 27 max_mtu: u8, 28 active_mtu: u8, 29 lmc: u8, 30 max_vl_num: u8, 31 sm_sl: u8,
        32 subnet_timeout: u8, 33 init_type_reply: u8, 34 active_width: u8, 35 active_speed: u8, 36 phys_state: u8, 37 link_layer: u8,
        38 flags: u8, 39 reserved: u8,
    }

    struct AllocPd = "ib_uverbs_alloc_pd": 8 { 0 response: u64 }
    struct AllocPdResp = "ib_uverbs_alloc_pd_resp": 4 { 0 pd_handle: u32 }
    struct DeallocPd = "ib_uverbs_dealloc_pd": 4 { 0 pd_handle: u32 }

    struct RegMr = "ib_uverbs_reg_mr": 40 {
        0 response: u64, 8 start: u64, 16 length: u64, 24 hca_va: u64, 32 pd_handle: u32, 36 access_flags: u32,
    }
    struct RegMrResp = "ib_uverbs_reg_mr_resp": 12 { 0 mr_handle: u32, 4 lkey: u32, 8 rkey: u32 }
    struct ReregMr = "ib_uverbs_rereg_mr": 48 {
        0 response: u64, 8 mr_handle: u32, 12 flags: u32, 16 start: u64, 24 length: u64, 32 hca_va: u64, 40 pd_handle: u32,
        44 access_flags: u32,
    }
    struct ReregMrResp = "ib_uverbs_rereg_mr_resp": 8 { 0 lkey: u32, 4 rkey: u32 }
    struct DeregMr = "ib_uverbs_dereg_mr": 4 { 0 mr_handle: u32 }

    struct CreateCompChannel = "ib_uverbs_create_comp_channel": 8 { 0 response: u64 }
    struct CreateCompChannelResp = "ib_uverbs_create_comp_channel_resp": 4 { 0 fd: u32 }

    struct CreateCq = "ib_uverbs_create_cq": 32 {
        0 response: u64, 8 user_handle: u64, 16 cqe: u32, 20 comp_vector: u32, 24 comp_channel: i32, 28 reserved: u32,
    }
    struct CreateCqResp = "ib_uverbs_create_cq_resp": 8 { 0 cq_handle: u32, 4 cqe: u32 }
    struct ExCreateCq = "ib_uverbs_ex_create_cq": 32 {
        0 user_handle: u64, 8 cqe: u32, 12 comp_vector: u32, 16 comp_channel: i32, 20 comp_mask: u32, 24 flags: u32, 28 reserved: u32,
    }
    struct ExCreateCqResp = "ib_uverbs_ex_create_cq_resp": 16 { 0 base: CreateCqResp, 8 comp_mask: u32, 12 response_length: u32 }
    struct DestroyCq = "ib_uverbs_destroy_cq": 16 { 0 response: u64, 8 cq_handle: u32, 12 reserved: u32 }
    struct DestroyCqResp = "ib_uverbs_destroy_cq_resp": 8 { 0 comp_events_reported: u32, 4 async_events_reported: u32 }

    struct GlobalRoute = "ib_uverbs_global_route": 24 {
        0 dgid: [u8; 16], 16 flow_label: u32, 20 sgid_index: u8, 21 hop_limit: u8, 22 traffic_class: u8, 23 reserved: u8,
    }
    struct AhAttr = "ib_uverbs_ah_attr": 32 {
        0 grh: GlobalRoute, 24 dlid: u16, 26 sl: u8, 27 src_path_bits: u8, 28 static_rate: u8, 29 is_global: u8, 30 port_num: u8,
        31 reserved: u8,
    }
    struct CreateAh = "ib_uverbs_create_ah": 56 {
        0 response: u64, 8 user_handle: u64, 16 pd_handle: u32, 20 reserved: u32, 24 attr: AhAttr,
    }
    struct CreateAhResp = "ib_uverbs_create_ah_resp": 4 { 0 ah_handle: u32 }
    struct DestroyAh = "ib_uverbs_destroy_ah": 4 { 0 ah_handle: u32 }

    struct CreateQp = "ib_uverbs_create_qp": 56 {
        0 response: u64, 8 user_handle: u64, 16 pd_handle: u32, 20 send_cq_handle: u32, 24 recv_cq_handle: u32, 28 srq_handle: u32,
        32 max_send_wr: u32, 36 max_recv_wr: u32, 40 max_send_sge: u32, 44 max_recv_sge: u32, 48 max_inline_data: u32, 52 sq_sig_all: u8,
        53 qp_type: u8, 54 is_srq: u8, 55 reserved: u8,
    }
    struct CreateQpResp = "ib_uverbs_create_qp_resp": 32 {
        0 qp_handle: u32, 4 qpn: u32, 8 max_send_wr: u32, 12 max_recv_wr: u32, 16 max_send_sge: u32, 20 max_recv_sge: u32,
        24 max_inline_data: u32, 28 reserved: u32,
    }
    struct ExCreateQp = "ib_uverbs_ex_create_qp": 64 {
        0 user_handle: u64, 8 pd_handle: u32, 12 send_cq_handle: u32, 16 recv_cq_handle: u32, 20 srq_handle: u32, 24 max_send_wr: u32,
        28 max_recv_wr: u32, 32 max_send_sge: u32, 36 max_recv_sge: u32, 40 max_inline_data: u32, 44 sq_sig_all: u8, 45 qp_type: u8,
        46 is_srq: u8, 47 reserved: u8, 48 comp_mask: u32, 52 create_flags: u32, 56 rwq_ind_tbl_handle: u32, 60 source_qpn: u32,
    }
    struct ExCreateQpResp = "ib_uverbs_ex_create_qp_resp": 40 { 0 base: CreateQpResp, 32 comp_mask: u32, 36 response_length: u32 }
    struct QpDest = "ib_uverbs_qp_dest": 32 {
        0 dgid: [u8; 16], 16 flow_label: u32, 20 dlid: u16, 22 reserved: u16, 24 sgid_index: u8, 25 hop_limit: u8, 26 traffic_class: u8,
        27 sl: u8, 28 src_path_bits: u8, 29 static_rate: u8, 30 is_global: u8, 31 port_num: u8,
    }
    struct QueryQp = "ib_uverbs_query_qp": 16 { 0 response: u64, 8 qp_handle: u32, 12 attr_mask: u32 }
    struct QueryQpResp = "ib_uverbs_query_qp_resp": 128 {
        0 dest: QpDest, 32 alt_dest: QpDest, 64 max_send_wr: u32, 68 max_recv_wr: u32, 72 max_send_sge: u32, 76 max_recv_sge: u32,
        80 max_inline_data: u32, 84 qkey: u32, 88 rq_psn: u32, 92 sq_psn: u32, 96 dest_qp_num: u32, 100 qp_access_flags: u32,
        104 pkey_index: u16, 106 alt_pkey_index: u16, 108 qp_state: u8, 109 cur_qp_state: u8, 110 path_mtu: u8, 111 path_mig_state: u8,
        112 sq_draining: u8, 113 max_rd_atomic: u8, 114 max_dest_rd_atomic: u8, 115 min_rnr_timer: u8, 116 port_num: u8, 117 timeout: u8,
        118 retry_cnt: u8, 119 rnr_retry: u8, 120 alt_port_num: u8, 121 alt_timeout: u8, 122 sq_sig_all: u8, 123 reserved: [u8; 5],
    }
    struct ModifyQp = "ib_uverbs_modify_qp": 112 {
        0 dest: QpDest, 32 alt_dest: QpDest, 64 qp_handle: u32, 68 attr_mask: u32, 72 qkey: u32, 76 rq_psn: u32, 80 sq_psn: u32,
        84 dest_qp_num: u32, 88 qp_access_flags: u32, 92 pkey_index: u16, 94 alt_pkey_index: u16, 96 qp_state: u8, 97 cur_qp_state: u8,
        98 path_mtu: u8, 99 path_mig_state: u8, 100 en_sqd_async_notify: u8, 101 max_rd_atomic: u8, 102 max_dest_rd_atomic: u8,
        103 min_rnr_timer: u8, 104 port_num: u8, 105 timeout: u8, 106 retry_cnt: u8, 107 rnr_retry: u8, 108 alt_port_num: u8,
        109 alt_timeout: u8, 110 reserved: [u8; 2],
    }
    struct ExModifyQp = "ib_uverbs_ex_modify_qp": 120 { 0 base: ModifyQp, 112 rate_limit: u32, 116 reserved: u32 }
    struct ExModifyQpResp = "ib_uverbs_ex_modify_qp_resp": 8 { 0 comp_mask: u32, 4 response_length: u32 }
    struct DestroyQp = "ib_uverbs_destroy_qp": 16 { 0 response: u64, 8 qp_handle: u32, 12 reserved: u32 }
    struct DestroyQpResp = "ib_uverbs_destroy_qp_resp": 4 { 0 events_reported: u32 }

    struct CreateSrq = "ib_uverbs_create_srq": 32 {
        0 response: u64, 8 user_handle: u64, 16 pd_handle: u32, 20 max_wr: u32, 24 max_sge: u32, 28 srq_limit: u32,
    }
    struct CreateXsrq = "ib_uverbs_create_xsrq": 48 {
        0 response: u64, 8 user_handle: u64, 16 srq_type: u32, 20 pd_handle: u32, 24 max_wr: u32, 28 max_sge: u32, 32 srq_limit: u32,
        36 max_num_tags: u32, 40 xrcd_handle: u32, 44 cq_handle: u32,
    }
    struct CreateSrqResp = "ib_uverbs_create_srq_resp": 16 { 0 srq_handle: u32, 4 max_wr: u32, 8 max_sge: u32, 12 srqn: u32 }
    struct ModifySrq = "ib_uverbs_modify_srq": 16 { 0 srq_handle: u32, 4 attr_mask: u32, 8 max_wr: u32, 12 srq_limit: u32 }
    struct QuerySrq = "ib_uverbs_query_srq": 16 { 0 response: u64, 8 srq_handle: u32, 12 reserved: u32 }
    struct QuerySrqResp = "ib_uverbs_query_srq_resp": 16 { 0 max_wr: u32, 4 max_sge: u32, 8 srq_limit: u32, 12 reserved: u32 }
    struct DestroySrq = "ib_uverbs_destroy_srq": 16 { 0 response: u64, 8 srq_handle: u32, 12 reserved: u32 }
    struct DestroySrqResp = "ib_uverbs_destroy_srq_resp": 4 { 0 events_reported: u32 }
}
