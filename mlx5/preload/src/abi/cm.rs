//! Requests and responses of the commands to `/dev/infiniband/rdma_cm`: the structures of
//! `rdma/rdma_user_cm.h`, with the structures of `rdma/ib_user_verbs.h` and `rdma/ib_user_sa.h`
//! that they contain.

use super::structures;
use crate::abi::verbs::AhAttr;

/// Numbers of the supported commands (`RDMA_USER_CM_CMD_*`), and of the refused command `BIND`, by
/// which librdmacm asks for InfiniBand's own addresses.
pub(crate) mod number {
    pub(crate) const CREATE_ID: u32 = 0;
    pub(crate) const DESTROY_ID: u32 = 1;
    pub(crate) const BIND_IP: u32 = 2;
    pub(crate) const RESOLVE_IP: u32 = 3;
    pub(crate) const RESOLVE_ROUTE: u32 = 4;
    pub(crate) const QUERY_ROUTE: u32 = 5;
    pub(crate) const CONNECT: u32 = 6;
    pub(crate) const LISTEN: u32 = 7;
    pub(crate) const ACCEPT: u32 = 8;
    pub(crate) const REJECT: u32 = 9;
    pub(crate) const DISCONNECT: u32 = 10;
    pub(crate) const INIT_QP_ATTR: u32 = 11;
    pub(crate) const GET_EVENT: u32 = 12;
    pub(crate) const SET_OPTION: u32 = 14;
    pub(crate) const NOTIFY: u32 = 15;
    pub(crate) const MIGRATE_ID: u32 = 18;
    pub(crate) const BIND: u32 = 20;
}

/// Names of all commands, by number.
pub(crate) const NAMES: &str = "create_id destroy_id bind_ip resolve_ip resolve_route query_route connect listen accept reject disconnect \
    init_qp_attr get_event get_option set_option notify join_ip_mcast leave_mcast migrate_id query bind resolve_addr join_mcast";

/// Bytes of a `struct sockaddr_in6`; for IPv4, bytes of a `struct sockaddr_in`, followed by zeros.
pub(crate) type SockAddr = [u8; 28];

structures! {
    struct CreateId = "rdma_ucm_create_id": 24 { 0 uid: u64, 8 response: u64, 16 ps: u16, 18 qp_type: u8, 19 reserved: [u8; 5] }
    struct CreateIdResp = "rdma_ucm_create_id_resp": 4 { 0 id: u32 }
    struct DestroyId = "rdma_ucm_destroy_id": 16 { 0 response: u64, 8 id: u32, 12 reserved: u32 }
    struct DestroyIdResp = "rdma_ucm_destroy_id_resp": 4 { 0 events_reported: u32 }
    struct BindIp = "rdma_ucm_bind_ip": 40 { 0 response: u64, 8 addr: SockAddr, 36 id: u32 }
    struct ResolveIp = "rdma_ucm_resolve_ip": 64 { 0 src_addr: SockAddr, 28 dst_addr: SockAddr, 56 id: u32, 60 timeout_ms: u32 }
    struct ResolveRoute = "rdma_ucm_resolve_route": 8 { 0 id: u32, 4 timeout_ms: u32 }
    struct Query = "rdma_ucm_query": 16 { 0 response: u64, 8 id: u32, 12 option: u32 }
    struct PathRec = "ib_user_path_rec": 64 {
        0 dgid: [u8; 16], 16 sgid: [u8; 16], 32 dlid: [u8; 2], 34 slid: [u8; 2], 36 raw_traffic: u32, 40 flow_label: u32, 44 reversible: u32,
        48 mtu: u32, 52 pkey: [u8; 2], 54 hop_limit: u8, 55 traffic_class: u8, 56 numb_path: u8, 57 sl: u8, 58 mtu_selector: u8,
        59 rate_selector: u8, 60 rate: u8, 61 packet_life_time_selector: u8, 62 packet_life_time: u8, 63 preference: u8,
    }
    struct QueryRouteResp = "rdma_ucm_query_route_resp": 208 {
        0 node_guid: [u8; 8], 8 ib_route: [PathRec; 2], 136 src_addr: SockAddr, 164 dst_addr: SockAddr, 192 num_paths: u32, 196 port_num: u8,
        197 reserved: [u8; 3], 200 ibdev_index: u32, 204 reserved1: u32,
    }
    struct ConnParam = "rdma_ucm_conn_param": 272 {
        0 qp_num: u32, 4 qkey: u32, 8 private_data: [u8; 256], 264 private_data_len: u8, 265 srq: u8, 266 responder_resources: u8,
        267 initiator_depth: u8, 268 flow_control: u8, 269 retry_count: u8, 270 rnr_retry_count: u8, 271 valid: u8,
    }
    struct UdParam = "rdma_ucm_ud_param": 304 {
        0 qp_num: u32, 4 qkey: u32, 8 ah_attr: AhAttr, 40 private_data: [u8; 256], 296 private_data_len: u8, 297 reserved: [u8; 7],
    }
    struct Ece = "rdma_ucm_ece": 8 { 0 vendor_id: u32, 4 attr_mod: u32 }
    struct Connect = "rdma_ucm_connect": 288 { 0 conn_param: ConnParam, 272 id: u32, 276 reserved: u32, 280 ece: Ece }
    struct Listen = "rdma_ucm_listen": 8 { 0 id: u32, 4 backlog: u32 }
    struct Accept = "rdma_ucm_accept": 296 { 0 uid: u64, 8 conn_param: ConnParam, 280 id: u32, 284 reserved: u32, 288 ece: Ece }
    struct Reject = "rdma_ucm_reject": 264 {
        0 id: u32, 4 private_data_len: u8, 5 reason: u8, 6 reserved: [u8; 2], 8 private_data: [u8; 256],
    }
    struct Disconnect = "rdma_ucm_disconnect": 4 { 0 id: u32 }
    struct InitQpAttr = "rdma_ucm_init_qp_attr": 16 { 0 response: u64, 8 id: u32, 12 qp_state: u32 }
    struct QpAttr = "ib_uverbs_qp_attr": 144 {
        0 qp_attr_mask: u32, 4 qp_state: u32, 8 cur_qp_state: u32, 12 path_mtu: u32, 16 path_mig_state: u32, 20 qkey: u32, 24 rq_psn: u32,
        28 sq_psn: u32, 32 dest_qp_num: u32, 36 qp_access_flags: u32, 40 ah_attr: AhAttr, 72 alt_ah_attr: AhAttr, 104 max_send_wr: u32,
        108 max_recv_wr: u32, 112 max_send_sge: u32, 116 max_recv_sge: u32, 120 max_inline_data: u32, 124 pkey_index: u16,
        126 alt_pkey_index: u16, 128 en_sqd_async_notify: u8, 129 sq_draining: u8, 130 max_rd_atomic: u8, 131 max_dest_rd_atomic: u8,
        132 min_rnr_timer: u8, 133 port_num: u8, 134 timeout: u8, 135 retry_cnt: u8, 136 rnr_retry: u8, 137 alt_port_num: u8,
        138 alt_timeout: u8, 139 reserved: [u8; 5],
    }
    struct Notify = "rdma_ucm_notify": 8 { 0 id: u32, 4 event: u32 }
    struct GetEvent = "rdma_ucm_get_event": 8 { 0 response: u64 }
    struct SetOption = "rdma_ucm_set_option": 24 { 0 optval: u64, 8 id: u32, 12 level: u32, 16 optname: u32, 20 optlen: u32 }
    struct MigrateId = "rdma_ucm_migrate_id": 16 { 0 response: u64, 8 id: u32, 12 fd: u32 }
    /// An event. The union `param` holds a [`UdParam`], or a [`ConnParam`] followed by zeros.
    struct EventResp = "rdma_ucm_event_resp": 336 {
        0 uid: u64, 8 id: u32, 12 event: u32, 16 status: i32, 20 param: [u8; 304], 324 reserved: u32, 328 ece: Ece,
    }
}
