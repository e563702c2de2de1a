//! The structures of libibverbs and of `driver.c`.

use std::ffi::c_void;
use std::sync::atomic::AtomicU32;

use mlx5::Sge;

/// `enum ibv_wr_opcode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum WrOpcode {
    Write = 0,
    WriteImm = 1,
    Send = 2,
    SendImm = 3,
    Read = 4,
    CompareSwap = 5,
    FetchAdd = 6,
}

/// `enum ibv_send_flags`.
pub(crate) const SEND_FENCE: u32 = 1;
pub(crate) const SEND_SIGNALED: u32 = 2;
pub(crate) const SEND_SOLICITED: u32 = 4;
pub(crate) const SEND_INLINE: u32 = 8;

/// `struct ibv_sge`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct IbvSge {
    pub(crate) addr: u64,
    pub(crate) length: u32,
    pub(crate) lkey: u32,
}

impl From<Sge> for IbvSge {
    fn from(sge: Sge) -> Self {
        Self {
            addr: sge.addr,
            length: sge.len,
            lkey: sge.lkey,
        }
    }
}

/// `struct ibv_wc`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct IbvWc {
    pub(crate) wr_id: u64,
    pub(crate) status: u32,
    pub(crate) opcode: u32,
    pub(crate) vendor_err: u32,
    pub(crate) byte_len: u32,
    /// Big-endian.
    pub(crate) imm_data: u32,
    pub(crate) qp_num: u32,
    pub(crate) src_qp: u32,
    pub(crate) wc_flags: u32,
    pub(crate) pkey_index: u16,
    pub(crate) slid: u16,
    pub(crate) sl: u8,
    pub(crate) dlid_path_bits: u8,
}

/// `struct lv_op`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Op {
    pub(crate) wr_id: u64,
    pub(crate) opcode: WrOpcode,
    pub(crate) flags: u32,
    pub(crate) imm: u32,
    pub(crate) rkey: u32,
    pub(crate) raddr: u64,
    pub(crate) compare_add: u64,
    pub(crate) swap: u64,
    pub(crate) ah: *mut c_void,
    pub(crate) qpn: u32,
    pub(crate) qkey: u32,
    pub(crate) sge: *mut IbvSge,
    pub(crate) sges: u32,
}

/// `struct lv_path`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct IbvPath {
    pub(crate) gid: [u8; 16],
    pub(crate) flow_label: u32,
    pub(crate) lid: u16,
    pub(crate) service_level: u8,
    pub(crate) path_bits: u8,
    pub(crate) static_rate: u8,
    pub(crate) is_global: u8,
    pub(crate) source_gid_index: u8,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
}

/// `struct lv_cq`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CqParts {
    pub(crate) cq: *mut c_void,
    pub(super) buffer: *mut u8,
    pub(super) record: *mut [AtomicU32; 2],
    pub(super) uar: *mut u8,
    pub(super) channel: *mut c_void,
    pub(crate) entries: u32,
    pub(crate) cqe_bytes: u32,
    pub(crate) cqn: u32,
}

/// `struct lv_srq`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct SrqParts {
    pub(crate) srq: *mut c_void,
    pub(super) buffer: *mut u8,
    pub(super) record: *mut AtomicU32,
    pub(crate) stride: u32,
    pub(crate) head: u32,
    pub(crate) tail: u32,
    pub(crate) srqn: u32,
}

/// `struct lv_qp`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct QpParts {
    pub(crate) qp: *mut c_void,
    pub(super) record: *mut [AtomicU32; 2],
    pub(super) sq: *mut u8,
    pub(super) rq: *mut u8,
    pub(super) bf: *mut u8,
    pub(crate) sq_blocks: u32,
    pub(crate) rq_wqes: u32,
    pub(crate) rq_stride: u32,
    /// Length of half a BlueFlame register, in bytes.
    pub(crate) bf_bytes: u32,
    pub(crate) qpn: u32,
    pub(crate) max_inline: u32,
}

/// `struct lv_qp_request`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct QpRequest {
    pub(crate) send_cq: *mut c_void,
    pub(crate) recv_cq: *mut c_void,
    /// The shared receive queue. Null: receives of its own.
    pub(crate) srq: *mut c_void,
    pub(crate) is_datagram: u32,
    pub(crate) send_wr: u32,
    pub(crate) send_sge: u32,
    pub(crate) inline_bytes: u32,
    pub(crate) recv_wr: u32,
    pub(crate) recv_sge: u32,
}
