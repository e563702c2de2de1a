//! A completion queue, into which work completions are written as CQEs.

use core::ffi::c_int;
use core::ptr::NonNull;

use mlx5_hca::cq::SoftCq;
use slab::Slab;

use super::super::abi::*;
use super::super::numbers::*;
use super::Id;
use super::sends::SendRing;
use crate::provider::private::CqPlace;
use crate::wire::{
    ATOMIC_BYTES, CqeOpcode, ErrorCqe, Opcode, RequesterCqe, ResponderCqe, Syndrome,
};

/// Maximum number of work completions that one call of `ibv_poll_cq` takes.
pub(super) const BATCH: usize = 16;

/// A completion queue of the device, and the ring that the driver polls.
pub(super) struct CompletionRing {
    cq: NonNull<ibv_cq>,
    ring: SoftCq,
    _place: CqPlace,
}

impl CompletionRing {
    pub(super) fn new(cq: NonNull<ibv_cq>, place: CqPlace) -> Self {
        Self {
            cq,
            // SAFETY: the next field, `_place`, keeps the memory as long as the ring exists.
            ring: unsafe { SoftCq::new(&place.cq) },
            _place: place,
        }
    }

    /// Returns the number of CQEs that the ring has room for. The device keeps a work completion
    /// for which the ring has no room.
    fn room(&self) -> usize {
        self.ring.room() as usize
    }

    /// Takes work completions and writes their CQEs. Returns whether it wrote a CQE.
    pub(super) fn relay(
        &mut self,
        calls: &ibv_context_ops,
        sends: &mut Slab<SendRing>,
        taken: &mut [ibv_wc; BATCH],
    ) -> bool {
        let mut any = false;
        loop {
            let most = self.room().min(BATCH);
            // SAFETY: `cq` is a queue of this device, and `taken` has room for `most` completions.
            let count =
                unsafe { (calls.poll_cq)(self.cq.as_ptr(), most as c_int, taken.as_mut_ptr()) };
            let count = usize::try_from(count).unwrap_or(0).min(most);
            for completion in &taken[..count] {
                any |= self.write(completion, sends);
            }
            if count < BATCH {
                return any;
            }
        }
    }

    /// Writes the CQE of a work completion. Writes none for a send whose queue pair was destroyed,
    /// and none for a marker, the request that `sends` posts after a refused WQE. Returns whether
    /// it wrote a CQE.
    #[inline(always)]
    fn write(&mut self, wc: &ibv_wc, sends: &mut Slab<SendRing>) -> bool {
        let id = Id(wc.wr_id);
        if id.is_receive() {
            return self.write_receive(wc);
        }
        let ring = sends.get_mut(id.place().into());
        if !ring.is_some_and(|ring| ring.completed(id)) {
            return false;
        }
        if wc.status != IBV_WC_SUCCESS {
            return self.write_error(wc, CqeOpcode::RequesterError);
        }
        const READ: u8 = Opcode::RdmaRead as u8;
        const SWAP: u8 = Opcode::AtomicCompareSwap as u8;
        const ADD: u8 = Opcode::AtomicFetchAdd as u8;
        let cqe = RequesterCqe {
            wqe_opcode: id.wqe_opcode(),
            qpn: wc.qp_num,
            wqe_counter: id.wqe_counter(),
            byte_count: match id.wqe_opcode() {
                READ => wc.byte_len,
                // Some devices report a length of 0 for atomics.
                SWAP | ADD => ATOMIC_BYTES,
                _ => 0,
            },
            user_index: 0,
        };
        self.ring.write(cqe.emit(), CqeOpcode::Requester).is_ok()
    }

    #[inline(never)]
    fn write_receive(&mut self, wc: &ibv_wc) -> bool {
        if wc.status != IBV_WC_SUCCESS {
            return self.write_error(wc, CqeOpcode::ResponderError);
        }
        let has_imm = wc.wc_flags & IBV_WC_WITH_IMM != 0;
        let opcode = match wc.opcode {
            IBV_WC_RECV_RDMA_WITH_IMM => CqeOpcode::ResponderWriteImm,
            _ if has_imm => CqeOpcode::ResponderSendImm,
            _ => CqeOpcode::ResponderSend,
        };
        let cqe = ResponderCqe {
            qpn: wc.qp_num,
            srqn: 0,
            imm: if has_imm {
                u32::from_be(wc.imm_data)
            } else {
                0
            },
            byte_count: wc.byte_len,
            wqe_counter: Id(wc.wr_id).wqe_counter(),
            source_qpn: wc.src_qp,
            slid: wc.slid,
            grh: wc.wc_flags & IBV_WC_GRH != 0,
            sl: wc.sl,
        };
        self.ring.write(cqe.emit(), opcode).is_ok()
    }

    #[cold]
    fn write_error(&mut self, wc: &ibv_wc, opcode: CqeOpcode) -> bool {
        let cqe = ErrorCqe {
            raw_syndrome: syndrome(wc.status) as u8,
            vendor_syndrome: wc.vendor_err as u8,
            wqe_opcode: Id(wc.wr_id).wqe_opcode(),
            qpn: wc.qp_num,
            wqe_counter: Id(wc.wr_id).wqe_counter(),
            user_index: 0,
        };
        self.ring.write(cqe.emit(), opcode).is_ok()
    }

    /// Writes the CQE of a send that the device never received. Returns whether the ring had room.
    pub(super) fn fail_send(&mut self, cqe: &ErrorCqe) -> bool {
        let (bytes, opcode) = (cqe.emit(), CqeOpcode::RequesterError);
        self.room() > 0 && self.ring.write(bytes, opcode).is_ok()
    }
}

/// Returns the syndrome that mlx5 devices report for a failure (the reverse of libmlx5's
/// `handle_error_cqe`).
fn syndrome(status: c_int) -> Syndrome {
    match status {
        IBV_WC_LOC_LEN_ERR => Syndrome::LocalLength,
        IBV_WC_LOC_PROT_ERR => Syndrome::LocalProtection,
        IBV_WC_WR_FLUSH_ERR => Syndrome::WorkRequestFlushed,
        IBV_WC_MW_BIND_ERR => Syndrome::MemoryWindowBind,
        IBV_WC_BAD_RESP_ERR => Syndrome::BadResponse,
        IBV_WC_LOC_ACCESS_ERR => Syndrome::LocalAccess,
        IBV_WC_REM_INV_REQ_ERR => Syndrome::RemoteInvalidRequest,
        IBV_WC_REM_ACCESS_ERR => Syndrome::RemoteAccess,
        IBV_WC_REM_OP_ERR => Syndrome::RemoteOperation,
        IBV_WC_RETRY_EXC_ERR => Syndrome::TransportRetryExceeded,
        IBV_WC_RNR_RETRY_EXC_ERR => Syndrome::RnrRetryExceeded,
        IBV_WC_REM_ABORT_ERR => Syndrome::RemoteAborted,
        _ => Syndrome::LocalQpOperation,
    }
}
