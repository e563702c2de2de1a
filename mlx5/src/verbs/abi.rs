//! The structs of `infiniband/verbs.h` and `infiniband/mlx5dv.h` that this crate uses, under the
//! names they have there.
//!
//! Structs that the libraries allocate are declared up to the last field that this crate reads.
//! Structs that this crate allocates are complete, or the libraries write further fields only if
//! `comp_mask` requests them. Sizes and offsets are asserted for 64-bit Linux; a test compares all
//! of them with the installed headers.

#![allow(non_camel_case_types, reason = "the names of the C headers")]

use core::ffi::{c_char, c_int, c_uint, c_void};

/// Declares structs whose fields only their library reads.
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
    ibv_pd;
    ibv_cq;
    ibv_srq;
    ibv_ah;
}

/// Declares structs with the sizes and offsets of the C structs, and lists them for the comparison
/// with the headers. `whole` is a whole struct, `prefix` is a struct up to the last field that is
/// read here, and `unnamed` is a struct that has no name in the headers.
macro_rules! structs {
    ($($(#[$meta:meta])* $kind:ident $name:ident: $size:literal {
        $($(#[$doc:meta])* $offset:literal $field:ident: $ty:ty),* $(,)?
    })*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[allow(dead_code, reason = "the struct is the library's, whichever of its fields are read here")]
            pub(crate) struct $name {
                $($(#[$doc])* pub(crate) $field: $ty,)*
            }
            const _: () = {
                assert!(size_of::<$name>() == $size);
                $(assert!(core::mem::offset_of!($name, $field) == $offset);)*
            };
        )*
        /// Kind, name, size, and fields with their offsets, of each struct.
        #[cfg(test)]
        #[allow(dead_code, reason = "that test includes this file")]
        pub(crate) const LAYOUTS: &[Layout] =
            &[$((stringify!($kind), stringify!($name), $size, &[$((stringify!($field), $offset)),*])),*];
    };
}

#[cfg(test)]
#[allow(dead_code, reason = "as the list")]
pub(crate) type Layout = (
    &'static str,
    &'static str,
    usize,
    &'static [(&'static str, usize)],
);

structs! {
    whole ibv_device: 664 {
        0 _ops: [*const c_void; 2], 16 node_type: c_int, 20 transport_type: c_int, 24 name: [c_char; 64], 88 dev_name: [c_char; 64],
        152 dev_path: [c_char; 256], 408 ibdev_path: [c_char; 256],
    }
    /// The calls of the data path, which the inline functions of the header make through this
    /// table. A null `post_srq_recv` means that the device has no shared receive queues.
    #[derive(Clone, Copy)]
    whole ibv_context_ops: 256 {
        0 _compat_query_device: [*const c_void; 11], 88 poll_cq: unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int,
        96 req_notify_cq: unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int, 104 _compat_cq_event: [*const c_void; 7],
        160 post_srq_recv: Option<unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
        168 _compat_create_qp: [*const c_void; 4],
        200 post_send: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int,
        208 post_recv: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
        216 _compat_create_ah: [*const c_void; 5],
    }
    prefix ibv_context: 280 {
        0 device: *mut ibv_device, 8 ops: ibv_context_ops, 264 cmd_fd: c_int, 268 async_fd: c_int, 272 num_comp_vectors: c_int,
    }
    whole ibv_async_event: 16 { 0 element: ibv_async_event_element, 8 event_type: c_int }
    prefix ibv_qp: 56 {
        0 context: *mut ibv_context, 8 qp_context: *mut c_void, 16 pd: *mut ibv_pd, 24 send_cq: *mut ibv_cq, 32 recv_cq: *mut ibv_cq,
        40 srq: *mut ibv_srq, 48 handle: u32, 52 qp_num: u32,
    }
    whole ibv_mr: 48 {
        0 context: *mut ibv_context, 8 pd: *mut ibv_pd, 16 addr: *mut c_void, 24 length: usize, 32 handle: u32, 36 lkey: u32,
        40 rkey: u32,
    }
    whole ibv_comp_channel: 16 { 0 context: *mut ibv_context, 8 fd: c_int, 12 refcnt: c_int }
    #[derive(Clone)]
    whole ibv_device_attr: 232 {
        0 fw_ver: [c_char; 64], 64 node_guid: u64, 72 sys_image_guid: u64, 80 max_mr_size: u64, 88 page_size_cap: u64, 96 vendor_id: u32,
        100 vendor_part_id: u32, 104 hw_ver: u32, 108 max_qp: c_int, 112 max_qp_wr: c_int, 116 device_cap_flags: c_uint,
        120 max_sge: c_int, 124 max_sge_rd: c_int, 128 max_cq: c_int, 132 max_cqe: c_int, 136 max_mr: c_int, 140 max_pd: c_int,
        144 max_qp_rd_atom: c_int, 148 max_ee_rd_atom: c_int, 152 max_res_rd_atom: c_int, 156 max_qp_init_rd_atom: c_int,
        160 max_ee_init_rd_atom: c_int, 164 atomic_cap: c_int, 168 _unused: [c_int; 11], 212 max_srq: c_int, 216 max_srq_wr: c_int,
        220 max_srq_sge: c_int, 224 max_pkeys: u16, 226 local_ca_ack_delay: u8, 227 phys_port_cnt: u8,
    }
    #[derive(Clone, Default)]
    whole ibv_port_attr: 52 {
        0 state: c_int, 4 max_mtu: c_int, 8 active_mtu: c_int, 12 gid_tbl_len: c_int, 16 port_cap_flags: u32, 20 max_msg_sz: u32,
        24 bad_pkey_cntr: u32, 28 qkey_viol_cntr: u32, 32 pkey_tbl_len: u16, 34 lid: u16, 36 sm_lid: u16, 38 lmc: u8, 39 max_vl_num: u8,
        40 sm_sl: u8, 41 subnet_timeout: u8, 42 init_type_reply: u8, 43 active_width: u8, 44 active_speed: u8, 45 phys_state: u8,
        46 link_layer: u8, 47 flags: u8, 48 port_cap_flags2: u16,
    }
    /// An entry of a port's GID table; `gid_type` is an `enum ibv_gid_type`.
    #[derive(Clone, Default)]
    whole ibv_gid_entry: 32 { 0 gid: [u64; 2], 16 gid_index: u32, 20 port_num: u32, 24 gid_type: u32, 28 ndev_ifindex: u32 }
    #[derive(Clone, Copy, Default)]
    whole ibv_global_route: 24 {
        /// `union ibv_gid`, 8-aligned.
        0 dgid: [u64; 2], 16 flow_label: u32, 20 sgid_index: u8, 21 hop_limit: u8, 22 traffic_class: u8,
    }
    #[derive(Clone, Copy, Default)]
    whole ibv_ah_attr: 32 {
        0 grh: ibv_global_route, 24 dlid: u16, 26 sl: u8, 27 src_path_bits: u8, 28 static_rate: u8, 29 is_global: u8, 30 port_num: u8,
    }
    #[derive(Clone, Copy, Default)]
    whole ibv_qp_cap: 20 { 0 max_send_wr: u32, 4 max_recv_wr: u32, 8 max_send_sge: u32, 12 max_recv_sge: u32, 16 max_inline_data: u32 }
    #[derive(Clone, Copy, Default)]
    whole ibv_qp_attr: 144 {
        0 qp_state: c_int, 4 cur_qp_state: c_int, 8 path_mtu: c_int, 12 path_mig_state: c_int, 16 qkey: u32, 20 rq_psn: u32,
        24 sq_psn: u32, 28 dest_qp_num: u32, 32 qp_access_flags: c_uint, 36 cap: ibv_qp_cap, 56 ah_attr: ibv_ah_attr,
        88 alt_ah_attr: ibv_ah_attr, 120 pkey_index: u16, 122 alt_pkey_index: u16, 124 en_sqd_async_notify: u8, 125 sq_draining: u8,
        126 max_rd_atomic: u8, 127 max_dest_rd_atomic: u8, 128 min_rnr_timer: u8, 129 port_num: u8, 130 timeout: u8, 131 retry_cnt: u8,
        132 rnr_retry: u8, 133 alt_port_num: u8, 134 alt_timeout: u8, 136 rate_limit: u32,
    }
    whole ibv_cq_init_attr_ex: 56 {
        0 cqe: u32, 8 cq_context: *mut c_void, 16 channel: *mut ibv_comp_channel, 24 comp_vector: u32, 32 wc_flags: u64,
        40 comp_mask: u32, 44 flags: u32,
        /// The field is read only if `comp_mask` has its bit.
        48 parent_domain: *mut ibv_pd,
    }
    #[derive(Clone, Copy, Default)]
    whole ibv_sge: 16 { 0 addr: u64, 8 length: u32, 12 lkey: u32 }
    #[derive(Clone, Copy)]
    whole ibv_send_wr: 128 {
        0 wr_id: u64, 8 next: *mut ibv_send_wr, 16 sg_list: *mut ibv_sge, 24 num_sge: c_int, 28 opcode: c_int, 32 send_flags: c_uint,
        /// Big-endian.
        36 imm_data: u32,
        40 wr: ibv_send_wr_operands, 72 qp_type: [u64; 7],
    }
    #[derive(Clone, Copy)]
    whole ibv_recv_wr: 32 { 0 wr_id: u64, 8 next: *mut ibv_recv_wr, 16 sg_list: *mut ibv_sge, 24 num_sge: c_int }
    #[derive(Clone, Copy, Default)]
    whole ibv_wc: 48 {
        0 wr_id: u64, 8 status: c_int, 12 opcode: c_int, 16 vendor_err: u32, 20 byte_len: u32,
        /// Big-endian.
        24 imm_data: u32,
        28 qp_num: u32, 32 src_qp: u32, 36 wc_flags: c_uint, 40 pkey_index: u16, 42 slid: u16, 44 sl: u8, 45 dlid_path_bits: u8,
    }
    #[derive(Clone, Copy)]
    whole ibv_qp_init_attr: 64 {
        0 qp_context: *mut c_void, 8 send_cq: *mut ibv_cq, 16 recv_cq: *mut ibv_cq, 24 srq: *mut ibv_srq, 32 cap: ibv_qp_cap,
        52 qp_type: c_int, 56 sq_sig_all: c_int,
    }
    whole ibv_srq_attr: 12 { 0 max_wr: u32, 4 max_sge: u32, 8 srq_limit: u32 }
    whole ibv_srq_init_attr: 24 { 0 srq_context: *mut c_void, 8 attr: ibv_srq_attr }
    /// `struct ibv_rx_hash_conf`: not used here.
    whole ibv_rx_hash_conf: 24 { 0 rx_hash_function: u8, 1 rx_hash_key_len: u8, 8 rx_hash_key: *mut u8, 16 rx_hash_fields_mask: u64 }
    whole ibv_qp_init_attr_ex: 136 {
        0 qp_context: *mut c_void, 8 send_cq: *mut ibv_cq, 16 recv_cq: *mut ibv_cq, 24 srq: *mut ibv_srq, 32 cap: ibv_qp_cap,
        52 qp_type: c_int, 56 sq_sig_all: c_int, 60 comp_mask: u32, 64 pd: *mut ibv_pd, 72 xrcd: *mut c_void, 80 create_flags: u32,
        84 max_tso_header: u16, 88 rwq_ind_tbl: *mut c_void, 96 rx_hash_conf: ibv_rx_hash_conf, 120 source_qpn: u32,
        128 send_ops_flags: u64,
    }
    #[derive(Clone, Copy, Default)]
    whole mlx5dv_cqe_comp_caps: 8 { 0 max_num: u32, 4 supported_format: u32 }
    /// Fields up to the last field that is read here; later fields are written only if `comp_mask`
    /// has their bits.
    #[derive(Clone, Copy, Default)]
    prefix mlx5dv_context: 32 { 0 version: u8, 8 flags: u64, 16 comp_mask: u64, 24 cqe_comp_caps: mlx5dv_cqe_comp_caps }
    whole mlx5dv_cq_init_attr: 24 { 0 comp_mask: u64, 8 cqe_comp_res_format: u8, 12 flags: u32, 16 cqe_size: u16 }
    whole mlx5dv_qp_init_attr: 40 {
        0 comp_mask: u64, 8 create_flags: u32,
        /// `struct mlx5dv_dc_init_attr`: not used here.
        16 dc_init_attr: [u64; 2], 32 send_ops_flags: u64,
    }
    /// A ring in `mlx5dv_qp`.
    unnamed mlx5dv_wq: 16 { 0 buf: *mut c_void, 8 wqe_cnt: u32, 12 stride: u32 }
    /// The BlueFlame register in `mlx5dv_qp`.
    unnamed mlx5dv_bf: 16 { 0 reg: *mut c_void, 8 size: u32 }
    /// Fields up to the last field that is read here; later fields are written only if `comp_mask`
    /// has their bits.
    prefix mlx5dv_qp: 96 { 0 dbrec: *mut u32, 8 sq: mlx5dv_wq, 24 rq: mlx5dv_wq, 40 bf: mlx5dv_bf, 56 comp_mask: u64, 64 _rest: [u64; 4] }
    whole mlx5dv_cq: 48 {
        0 buf: *mut c_void, 8 dbrec: *mut u32, 16 cqe_cnt: u32, 20 cqe_size: u32, 24 cq_uar: *mut c_void, 32 cqn: u32, 40 comp_mask: u64,
    }
    whole mlx5dv_srq: 48 {
        0 buf: *mut c_void, 8 dbrec: *mut u32, 16 stride: u32, 20 head: u32, 24 tail: u32, 32 comp_mask: u64, 40 srqn: u32,
    }
    whole mlx5dv_ah: 16 {
        /// A `struct mlx5_wqe_av` of 48 bytes.
        0 av: *const [u8; 48], 8 comp_mask: u64,
    }
    whole mlx5dv_pd: 16 { 0 pdn: u32, 8 comp_mask: u64 }
    /// The pairs of this struct are in the order of the bits `MLX5DV_OBJ_*`.
    whole mlx5dv_obj: 112 {
        0 qp: Pair, 16 cq: Pair, 32 srq: Pair, 48 rwq: Pair, 64 dm: Pair, 80 ah: Pair, 96 pd: Pair,
    }
}

#[repr(C)]
pub(crate) union ibv_async_event_element {
    pub(crate) cq: *mut ibv_cq,
    pub(crate) qp: *mut ibv_qp,
    pub(crate) port_num: c_int,
}

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

/// An object to open, and the memory to which `mlx5dv_init_obj` writes the answer.
#[repr(C)]
pub(crate) struct Pair {
    pub(crate) from: *mut c_void,
    pub(crate) to: *mut c_void,
}
