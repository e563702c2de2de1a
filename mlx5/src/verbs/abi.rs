//! The structs of `infiniband/verbs.h` and `infiniband/mlx5dv.h` that this crate uses, under the names they have there.
//!
//! Structs that the libraries allocate are declared up to the last field read here. Structs that this crate allocates are whole. Sizes and
//! offsets are asserted for 64-bit Linux; a test compares all of them with the installed headers.

#![allow(non_camel_case_types, reason = "the names of the C headers")]

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::mem::offset_of;

/// A struct whose fields only its library reads.
macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident;)*) => { $(
        $(#[$doc])*
        #[repr(C)]
        pub(crate) struct $name {
            _private: [u8; 0],
        }
    )* };
}

opaque! {
    /// A protection domain.
    ibv_pd;
    /// A completion queue.
    ibv_cq;
    /// A shared receive queue.
    ibv_srq;
    /// An address handle.
    ibv_ah;
}

/// Asserts the size of a struct and the offsets of fields, and lists them for the comparison with the headers.
macro_rules! layouts {
    ($($name:ident ($size:expr) { $($field:ident @ $offset:expr),* $(,)? })* ; $($prefix:ident { $($read:ident @ $at:expr),* })*) => {
        $(const _: () = {
            assert!(size_of::<$name>() == $size);
            $(assert!(offset_of!($name, $field) == $offset);)*
        };)*
        $(const _: () = { $(assert!(offset_of!($prefix, $read) == $at);)* };)*
        /// The structs asserted here: name, size (`None` for structs that are not whole), and offsets of fields.
        #[cfg(test)]
        #[allow(dead_code, reason = "that test includes this file")]
        pub(crate) const LAYOUTS: &[Layout] = &[
            $((stringify!($name), Some($size), &[$((stringify!($field), $offset)),*]),)*
            $((stringify!($prefix), None, &[$((stringify!($read), $at)),*]),)*
        ];
    };
}

/// A struct's name, its size if it is whole, and offsets of its fields.
#[cfg(test)]
#[allow(dead_code, reason = "as the list")]
pub(crate) type Layout = (&'static str, Option<usize>, &'static [(&'static str, usize)]);

#[repr(C)]
pub(crate) struct ibv_device {
    _ops: [*const c_void; 2],
    pub(crate) node_type: c_int,
    pub(crate) transport_type: c_int,
    pub(crate) name: [c_char; 64],
    pub(crate) dev_name: [c_char; 64],
    pub(crate) dev_path: [c_char; 256],
    pub(crate) ibdev_path: [c_char; 256],
}

/// The calls of the data path, which the inline functions of the header make through this table.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_context_ops {
    _before_poll: [*const c_void; 11],
    pub(crate) poll_cq: unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int,
    pub(crate) req_notify_cq: unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int,
    _before_srq: [*const c_void; 7],
    /// `None` where a device has no shared receive queues.
    pub(crate) post_srq_recv: Option<unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
    _before_send: [*const c_void; 4],
    pub(crate) post_send: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int,
    pub(crate) post_recv: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
    _rest: [*const c_void; 5],
}

/// An open device, up to the last field read here.
#[repr(C)]
pub(crate) struct ibv_context {
    device: *mut ibv_device,
    pub(crate) ops: ibv_context_ops,
    cmd_fd: c_int,
    pub(crate) async_fd: c_int,
    pub(crate) num_comp_vectors: c_int,
}

/// The element is a pointer of the union above, or the number of a port.
#[repr(C)]
pub(crate) struct ibv_async_event {
    pub(crate) element: ibv_async_event_element,
    pub(crate) event_type: c_int,
}

#[repr(C)]
pub(crate) union ibv_async_event_element {
    pub(crate) cq: *mut ibv_cq,
    pub(crate) qp: *mut ibv_qp,
    pub(crate) port_num: c_int,
}

/// A queue pair, up to the last field read here.
#[repr(C)]
pub(crate) struct ibv_qp {
    context: *mut ibv_context,
    qp_context: *mut c_void,
    pd: *mut ibv_pd,
    send_cq: *mut ibv_cq,
    recv_cq: *mut ibv_cq,
    srq: *mut ibv_srq,
    handle: u32,
    pub(crate) qp_num: u32,
}

#[repr(C)]
pub(crate) struct ibv_mr {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    handle: u32,
    pub(crate) lkey: u32,
    pub(crate) rkey: u32,
}

#[repr(C)]
pub(crate) struct ibv_comp_channel {
    context: *mut ibv_context,
    pub(crate) fd: c_int,
    refcnt: c_int,
}

#[repr(C)]
#[derive(Clone)]
pub(crate) struct ibv_device_attr {
    pub(crate) fw_ver: [c_char; 64],
    pub(crate) node_guid: u64,
    sys_image_guid: u64,
    max_mr_size: u64,
    page_size_cap: u64,
    vendor_id: u32,
    vendor_part_id: u32,
    hw_ver: u32,
    pub(crate) max_qp: c_int,
    pub(crate) max_qp_wr: c_int,
    device_cap_flags: c_uint,
    pub(crate) max_sge: c_int,
    max_sge_rd: c_int,
    pub(crate) max_cq: c_int,
    pub(crate) max_cqe: c_int,
    pub(crate) max_mr: c_int,
    max_pd: c_int,
    pub(crate) max_qp_rd_atom: c_int,
    max_ee_rd_atom: c_int,
    max_res_rd_atom: c_int,
    pub(crate) max_qp_init_rd_atom: c_int,
    max_ee_init_rd_atom: c_int,
    pub(crate) atomic_cap: c_int,
    _unused: [c_int; 11],
    max_srq: c_int,
    pub(crate) max_srq_wr: c_int,
    pub(crate) max_srq_sge: c_int,
    max_pkeys: u16,
    local_ca_ack_delay: u8,
    pub(crate) phys_port_cnt: u8,
}

#[repr(C)]
#[derive(Clone, Default)]
pub(crate) struct ibv_port_attr {
    pub(crate) state: c_int,
    max_mtu: c_int,
    pub(crate) active_mtu: c_int,
    pub(crate) gid_tbl_len: c_int,
    port_cap_flags: u32,
    max_msg_sz: u32,
    bad_pkey_cntr: u32,
    qkey_viol_cntr: u32,
    pub(crate) pkey_tbl_len: u16,
    pub(crate) lid: u16,
    sm_lid: u16,
    lmc: u8,
    max_vl_num: u8,
    sm_sl: u8,
    subnet_timeout: u8,
    init_type_reply: u8,
    active_width: u8,
    active_speed: u8,
    phys_state: u8,
    pub(crate) link_layer: u8,
    pub(crate) flags: u8,
    port_cap_flags2: u16,
}

/// An entry of a port's GID table; `gid_type` is an `enum ibv_gid_type`.
#[repr(C)]
#[derive(Clone, Default)]
pub(crate) struct ibv_gid_entry {
    pub(crate) gid: [u64; 2],
    pub(crate) gid_index: u32,
    pub(crate) port_num: u32,
    pub(crate) gid_type: u32,
    ndev_ifindex: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_global_route {
    /// `union ibv_gid`, 8-aligned.
    pub(crate) dgid: [u64; 2],
    pub(crate) flow_label: u32,
    pub(crate) sgid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_ah_attr {
    pub(crate) grh: ibv_global_route,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) src_path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_qp_cap {
    pub(crate) max_send_wr: u32,
    pub(crate) max_recv_wr: u32,
    pub(crate) max_send_sge: u32,
    pub(crate) max_recv_sge: u32,
    pub(crate) max_inline_data: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_qp_attr {
    pub(crate) qp_state: c_int,
    pub(crate) cur_qp_state: c_int,
    pub(crate) path_mtu: c_int,
    pub(crate) path_mig_state: c_int,
    pub(crate) qkey: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) dest_qp_num: u32,
    pub(crate) qp_access_flags: c_uint,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) ah_attr: ibv_ah_attr,
    pub(crate) alt_ah_attr: ibv_ah_attr,
    pub(crate) pkey_index: u16,
    pub(crate) alt_pkey_index: u16,
    pub(crate) en_sqd_async_notify: u8,
    pub(crate) sq_draining: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) min_rnr_timer: u8,
    pub(crate) port_num: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) alt_port_num: u8,
    pub(crate) alt_timeout: u8,
    pub(crate) rate_limit: u32,
}

#[repr(C)]
pub(crate) struct ibv_cq_init_attr_ex {
    pub(crate) cqe: u32,
    pub(crate) cq_context: *mut c_void,
    pub(crate) channel: *mut ibv_comp_channel,
    pub(crate) comp_vector: u32,
    pub(crate) wc_flags: u64,
    pub(crate) comp_mask: u32,
    pub(crate) flags: u32,
    /// Read only if `comp_mask` says so.
    pub(crate) parent_domain: *mut ibv_pd,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_sge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

/// The operands of a work request: `rdma`, `atomic` or `ud` of the header's union.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union ibv_send_wr_operands {
    pub(crate) rdma: ibv_send_rdma,
    pub(crate) atomic: ibv_send_atomic,
    pub(crate) ud: ibv_send_ud,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_send_rdma {
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_send_atomic {
    pub(crate) remote_addr: u64,
    pub(crate) compare_add: u64,
    pub(crate) swap: u64,
    pub(crate) rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_send_ud {
    pub(crate) ah: *mut ibv_ah,
    pub(crate) remote_qpn: u32,
    pub(crate) remote_qkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_send_wr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut ibv_send_wr,
    pub(crate) sg_list: *mut ibv_sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: c_int,
    pub(crate) send_flags: c_uint,
    /// Big-endian.
    pub(crate) imm_data: u32,
    pub(crate) wr: ibv_send_wr_operands,
    /// `qp_type`, and the union of memory windows and segmentation: not used here.
    _rest: [u64; 7],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ibv_recv_wr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut ibv_recv_wr,
    pub(crate) sg_list: *mut ibv_sge,
    pub(crate) num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ibv_wc {
    pub(crate) wr_id: u64,
    pub(crate) status: c_int,
    pub(crate) opcode: c_int,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    /// Big-endian.
    pub(crate) imm_data: u32,
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    pub(crate) wc_flags: c_uint,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
}

#[repr(C)]
pub(crate) struct ibv_qp_init_attr {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut ibv_cq,
    pub(crate) recv_cq: *mut ibv_cq,
    pub(crate) srq: *mut ibv_srq,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) qp_type: c_int,
    pub(crate) sq_sig_all: c_int,
}

#[repr(C)]
pub(crate) struct ibv_srq_attr {
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) srq_limit: u32,
}

#[repr(C)]
pub(crate) struct ibv_srq_init_attr {
    pub(crate) srq_context: *mut c_void,
    pub(crate) attr: ibv_srq_attr,
}

/// `struct ibv_rx_hash_conf`: not used here.
#[repr(C)]
pub(crate) struct ibv_rx_hash_conf {
    rx_hash_function: u8,
    rx_hash_key_len: u8,
    rx_hash_key: *mut u8,
    rx_hash_fields_mask: u64,
}

#[repr(C)]
pub(crate) struct ibv_qp_init_attr_ex {
    pub(crate) qp_context: *mut c_void,
    pub(crate) send_cq: *mut ibv_cq,
    pub(crate) recv_cq: *mut ibv_cq,
    pub(crate) srq: *mut ibv_srq,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) qp_type: c_int,
    pub(crate) sq_sig_all: c_int,
    pub(crate) comp_mask: u32,
    pub(crate) pd: *mut ibv_pd,
    xrcd: *mut c_void,
    create_flags: u32,
    max_tso_header: u16,
    rwq_ind_tbl: *mut c_void,
    rx_hash_conf: ibv_rx_hash_conf,
    source_qpn: u32,
    send_ops_flags: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct mlx5dv_cqe_comp_caps {
    pub(crate) max_num: u32,
    pub(crate) supported_format: u32,
}

/// Up to the last field read here; later fields are written only if `comp_mask` asks for them.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct mlx5dv_context {
    pub(crate) version: u8,
    pub(crate) flags: u64,
    pub(crate) comp_mask: u64,
    pub(crate) cqe_comp_caps: mlx5dv_cqe_comp_caps,
}

#[repr(C)]
pub(crate) struct mlx5dv_cq_init_attr {
    pub(crate) comp_mask: u64,
    pub(crate) cqe_comp_res_format: u8,
    pub(crate) flags: u32,
    pub(crate) cqe_size: u16,
}

#[repr(C)]
pub(crate) struct mlx5dv_qp_init_attr {
    pub(crate) comp_mask: u64,
    pub(crate) create_flags: u32,
    /// `struct mlx5dv_dc_init_attr`: not used here.
    dc_init_attr: [u64; 2],
    send_ops_flags: u64,
}

/// A ring in `mlx5dv_qp`.
#[repr(C)]
pub(crate) struct mlx5dv_wq {
    pub(crate) buf: *mut c_void,
    pub(crate) wqe_cnt: u32,
    pub(crate) stride: u32,
}

/// The BlueFlame register in `mlx5dv_qp`.
#[repr(C)]
pub(crate) struct mlx5dv_bf {
    pub(crate) reg: *mut c_void,
    pub(crate) size: u32,
}

/// Up to the last field read here; later fields are written only if `comp_mask` asks for them.
#[repr(C)]
pub(crate) struct mlx5dv_qp {
    pub(crate) dbrec: *mut u32,
    pub(crate) sq: mlx5dv_wq,
    pub(crate) rq: mlx5dv_wq,
    pub(crate) bf: mlx5dv_bf,
    pub(crate) comp_mask: u64,
    _rest: [u64; 4],
}

#[repr(C)]
pub(crate) struct mlx5dv_cq {
    pub(crate) buf: *mut c_void,
    pub(crate) dbrec: *mut u32,
    pub(crate) cqe_cnt: u32,
    pub(crate) cqe_size: u32,
    pub(crate) cq_uar: *mut c_void,
    pub(crate) cqn: u32,
    pub(crate) comp_mask: u64,
}

#[repr(C)]
pub(crate) struct mlx5dv_srq {
    pub(crate) buf: *mut c_void,
    pub(crate) dbrec: *mut u32,
    pub(crate) stride: u32,
    pub(crate) head: u32,
    pub(crate) tail: u32,
    pub(crate) comp_mask: u64,
    pub(crate) srqn: u32,
}

#[repr(C)]
pub(crate) struct mlx5dv_ah {
    /// A `struct mlx5_wqe_av` of 48 bytes.
    pub(crate) av: *const [u8; 48],
    pub(crate) comp_mask: u64,
}

#[repr(C)]
pub(crate) struct mlx5dv_pd {
    pub(crate) pdn: u32,
    pub(crate) comp_mask: u64,
}

/// An object to open, and the place for the answer.
#[repr(C)]
pub(crate) struct Pair<I, O> {
    pub(crate) from: *mut I,
    pub(crate) to: *mut O,
}

impl<I, O> Pair<I, O> {
    pub(crate) const NONE: Self = Self { from: core::ptr::null_mut(), to: core::ptr::null_mut() };
}

#[repr(C)]
pub(crate) struct mlx5dv_obj {
    pub(crate) qp: Pair<ibv_qp, mlx5dv_qp>,
    pub(crate) cq: Pair<ibv_cq, mlx5dv_cq>,
    pub(crate) srq: Pair<ibv_srq, mlx5dv_srq>,
    pub(crate) rwq: Pair<c_void, c_void>,
    pub(crate) dm: Pair<c_void, c_void>,
    pub(crate) ah: Pair<ibv_ah, mlx5dv_ah>,
    pub(crate) pd: Pair<ibv_pd, mlx5dv_pd>,
}

impl mlx5dv_obj {
    pub(crate) const NONE: Self =
        Self { qp: Pair::NONE, cq: Pair::NONE, srq: Pair::NONE, rwq: Pair::NONE, dm: Pair::NONE, ah: Pair::NONE, pd: Pair::NONE };
}

layouts! {
    ibv_async_event (16) { element @ 0, event_type @ 8 }
    ibv_device (664) { node_type @ 16, transport_type @ 20, name @ 24, dev_name @ 88, dev_path @ 152, ibdev_path @ 408 }
    ibv_mr (48) { addr @ 16, length @ 24, handle @ 32, lkey @ 36, rkey @ 40 }
    ibv_comp_channel (16) { fd @ 8, refcnt @ 12 }
    ibv_device_attr (232) {
        fw_ver @ 0, node_guid @ 64, max_qp @ 108, max_qp_wr @ 112, max_sge @ 120, max_cq @ 128, max_cqe @ 132, max_mr @ 136,
        max_qp_rd_atom @ 144, max_qp_init_rd_atom @ 156, atomic_cap @ 164, max_srq @ 212, max_srq_wr @ 216, max_srq_sge @ 220,
        max_pkeys @ 224, phys_port_cnt @ 227,
    }
    ibv_port_attr (52) {
        state @ 0, active_mtu @ 8, gid_tbl_len @ 12, pkey_tbl_len @ 32, lid @ 34, link_layer @ 46, flags @ 47, port_cap_flags2 @ 48,
    }
    ibv_gid_entry (32) { gid @ 0, gid_index @ 16, port_num @ 20, gid_type @ 24, ndev_ifindex @ 28 }
    ibv_global_route (24) { dgid @ 0, flow_label @ 16, sgid_index @ 20, hop_limit @ 21, traffic_class @ 22 }
    ibv_ah_attr (32) { grh @ 0, dlid @ 24, sl @ 26, src_path_bits @ 27, static_rate @ 28, is_global @ 29, port_num @ 30 }
    ibv_qp_cap (20) { max_send_wr @ 0, max_recv_wr @ 4, max_send_sge @ 8, max_recv_sge @ 12, max_inline_data @ 16 }
    ibv_qp_attr (144) {
        qp_state @ 0, path_mtu @ 8, qkey @ 16, rq_psn @ 20, sq_psn @ 24, dest_qp_num @ 28, qp_access_flags @ 32, cap @ 36, ah_attr @ 56,
        alt_ah_attr @ 88, pkey_index @ 120, max_rd_atomic @ 126, max_dest_rd_atomic @ 127, min_rnr_timer @ 128, port_num @ 129,
        timeout @ 130, retry_cnt @ 131, rnr_retry @ 132, rate_limit @ 136,
    }
    ibv_cq_init_attr_ex (56) {
        cqe @ 0, cq_context @ 8, channel @ 16, comp_vector @ 24, wc_flags @ 32, comp_mask @ 40, flags @ 44, parent_domain @ 48,
    }
    ibv_sge (16) { addr @ 0, length @ 8, lkey @ 12 }
    ibv_send_wr (128) { wr_id @ 0, next @ 8, sg_list @ 16, num_sge @ 24, opcode @ 28, send_flags @ 32, imm_data @ 36, wr @ 40 }
    ibv_recv_wr (32) { wr_id @ 0, next @ 8, sg_list @ 16, num_sge @ 24 }
    ibv_wc (48) {
        wr_id @ 0, status @ 8, opcode @ 12, vendor_err @ 16, byte_len @ 20, imm_data @ 24, qp_num @ 28, src_qp @ 32, wc_flags @ 36,
        pkey_index @ 40, slid @ 42, sl @ 44, dlid_path_bits @ 45,
    }
    ibv_context_ops (256) { poll_cq @ 88, req_notify_cq @ 96, post_srq_recv @ 160, post_send @ 200, post_recv @ 208 }
    ibv_qp_init_attr (64) { qp_context @ 0, send_cq @ 8, recv_cq @ 16, srq @ 24, cap @ 32, qp_type @ 52, sq_sig_all @ 56 }
    ibv_srq_attr (12) { max_wr @ 0, max_sge @ 4, srq_limit @ 8 }
    ibv_srq_init_attr (24) { srq_context @ 0, attr @ 8 }
    ibv_qp_init_attr_ex (136) {
        qp_context @ 0, send_cq @ 8, recv_cq @ 16, srq @ 24, cap @ 32, qp_type @ 52, sq_sig_all @ 56, comp_mask @ 60, pd @ 64, xrcd @ 72,
        create_flags @ 80, max_tso_header @ 84, rwq_ind_tbl @ 88, rx_hash_conf @ 96, source_qpn @ 120, send_ops_flags @ 128,
    }
    mlx5dv_cq_init_attr (24) { comp_mask @ 0, cqe_comp_res_format @ 8, flags @ 12, cqe_size @ 16 }
    mlx5dv_qp_init_attr (40) { comp_mask @ 0, create_flags @ 8, dc_init_attr @ 16, send_ops_flags @ 32 }
    mlx5dv_cq (48) { buf @ 0, dbrec @ 8, cqe_cnt @ 16, cqe_size @ 20, cq_uar @ 24, cqn @ 32, comp_mask @ 40 }
    mlx5dv_srq (48) { buf @ 0, dbrec @ 8, stride @ 16, head @ 20, tail @ 24, comp_mask @ 32, srqn @ 40 }
    mlx5dv_ah (16) { av @ 0, comp_mask @ 8 }
    mlx5dv_pd (16) { pdn @ 0, comp_mask @ 8 }
    mlx5dv_obj (112) { qp @ 0, cq @ 16, srq @ 32, rwq @ 48, dm @ 64, ah @ 80, pd @ 96 }
    mlx5dv_cqe_comp_caps (8) { max_num @ 0, supported_format @ 4 }
    ;
    ibv_context { async_fd @ 268, num_comp_vectors @ 272 }
    ibv_qp { qp_num @ 52 }
    mlx5dv_context { version @ 0, flags @ 8, comp_mask @ 16, cqe_comp_caps @ 24 }
    mlx5dv_qp { dbrec @ 0, sq @ 8, rq @ 24, bf @ 40, comp_mask @ 56 }
}
