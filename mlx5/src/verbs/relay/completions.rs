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
use crate::wire::{CqeOpcode, ErrorCqe, Opcode, RequesterCqe, ResponderCqe, Syndrome};

/// Work completions that one call takes.
const BATCH: usize = 16;

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
            // SAFETY: the memory is kept beside the ring.
            ring: unsafe { SoftCq::new(&place.cq) },
            _place: place,
        }
    }

    /// Returns the number of CQEs that the ring has room for. A work completion for which it has
    /// none stays with the device.
    fn room(&self) -> usize {
        self.ring.room() as usize
    }

    /// Takes work completions and writes their CQEs. Returns whether there was one.
    pub(super) fn relay(&mut self, calls: &ibv_context_ops, sends: &mut Slab<SendRing>) -> bool {
        let mut any = false;
        loop {
            let mut completions = [ibv_wc::default(); BATCH];
            let most = self.room().min(BATCH);
            // SAFETY: a queue of this device, and room for as many completions.
            let taken = unsafe {
                (calls.poll_cq)(self.cq.as_ptr(), most as c_int, completions.as_mut_ptr())
            };
            let taken = usize::try_from(taken).unwrap_or(0).min(most);
            for completion in &completions[..taken] {
                any |= self.write(completion, sends);
            }
            if taken < BATCH {
                return any;
            }
        }
    }

    /// Writes the CQE of a work completion, but not of a send whose queue pair is gone.
    fn write(&mut self, wc: &ibv_wc, sends: &mut Slab<SendRing>) -> bool {
        let id = Id(wc.wr_id);
        let is_receive = id.is_receive();
        let wqe_opcode = id.wqe_opcode();
        let wqe_counter = id.wqe_counter();
        if !is_receive
            && !sends
                .get_mut(id.place().into())
                .is_some_and(|ring| ring.completed(id))
        {
            return false;
        }
        let qpn = wc.qp_num;
        let written = match (wc.status, is_receive) {
            (IBV_WC_SUCCESS, true) => {
                let has_imm = wc.wc_flags & IBV_WC_WITH_IMM != 0;
                let opcode = match wc.opcode {
                    IBV_WC_RECV_RDMA_WITH_IMM => CqeOpcode::ResponderWriteImm,
                    _ if has_imm => CqeOpcode::ResponderSendImm,
                    _ => CqeOpcode::ResponderSend,
                };
                let imm = if has_imm {
                    u32::from_be(wc.imm_data)
                } else {
                    0
                };
                let grh = wc.wc_flags & IBV_WC_GRH != 0;
                let (source_qpn, slid) = (wc.src_qp, wc.slid);
                let cqe = ResponderCqe {
                    qpn,
                    srqn: 0,
                    imm,
                    byte_count: wc.byte_len,
                    wqe_counter,
                    source_qpn,
                    slid,
                    grh,
                    sl: wc.sl,
                };
                self.ring.write(cqe.emit(), opcode)
            }
            (IBV_WC_SUCCESS, false) => {
                let byte_count = match Opcode::from_repr(wqe_opcode) {
                    Some(Opcode::RdmaRead) => wc.byte_len,
                    // Some devices say 0.
                    Some(Opcode::AtomicCompareSwap | Opcode::AtomicFetchAdd) => {
                        size_of::<u64>() as u32
                    }
                    _ => 0,
                };
                self.ring.write(
                    RequesterCqe {
                        wqe_opcode,
                        qpn,
                        wqe_counter,
                        byte_count,
                        user_index: 0,
                    }
                    .emit(),
                    CqeOpcode::Requester,
                )
            }
            (status, _) => {
                let vendor_syndrome = wc.vendor_err as u8;
                let cqe = ErrorCqe {
                    raw_syndrome: syndrome(status) as u8,
                    vendor_syndrome,
                    wqe_opcode,
                    qpn,
                    wqe_counter,
                    user_index: 0,
                };
                self.ring.write(
                    cqe.emit(),
                    if is_receive {
                        CqeOpcode::ResponderError
                    } else {
                        CqeOpcode::RequesterError
                    },
                )
            }
        };
        written.is_ok()
    }

    /// Writes the CQE of a send that the device never got. Returns whether there was room.
    pub(super) fn fail_send(&mut self, cqe: &ErrorCqe) -> bool {
        self.room() > 0
            && self
                .ring
                .write(cqe.emit(), CqeOpcode::RequesterError)
                .is_ok()
    }
}

/// Returns what mlx5 devices say of a failure (the reverse of libmlx5's `handle_error_cqe`).
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
