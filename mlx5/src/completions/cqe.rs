//! The CQE, as the device wrote it.

use core::ptr::NonNull;
use std::fmt;

use crate::address::DeviceKind;
use crate::wire::{
    CQE_BYTES, CQE128_OFFSET, CqeFormat, CqeOpcode, ErrorCqe, OP_OWN_OFFSET, RequesterCqe,
    ResponderCqe, Syndrome, is_solicited,
};

/// A CQE in the queue, read in place. Its fields do not change until the poll that hands it out
/// returns.
#[derive(Clone, Copy)]
pub struct Cqe<'a> {
    /// Pointer to the CQE: not a reference, because the bytes of the QPN change if the queue pair
    /// is destroyed meanwhile.
    bytes: NonNull<[u8; CQE_BYTES]>,
    /// QPN at the time when the poll reached this CQE.
    qpn: u32,
    beside: Beside<'a>,
    kind: DeviceKind,
}

/// Data of a completion outside the CQE's own bytes. The poll that makes this value is inlined, so
/// unread data costs nothing.
#[derive(Clone, Copy)]
pub(crate) enum Beside<'a> {
    Nothing,
    /// The first half of a large entry.
    Half(&'a [u8; CQE128_OFFSET]),
    /// The CQE is the title of a compressed session. These fields come from this completion's mini
    /// CQE.
    Mini {
        byte_count: u32,
        wqe_counter: u16,
    },
}

/// The error of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{syndrome} (syndrome {raw:#04x}, vendor {vendor:#04x}{})", self.vendor_text().map_or(String::new(), |text| format!(": {text}")))]
pub struct CompletionError {
    /// The typed status.
    pub syndrome: Syndrome,
    /// The syndrome byte as the device wrote it.
    pub raw: u8,
    /// The vendor's own error code.
    pub vendor: u8,
    /// Kind of the device that reported the error: `Soft` for every software HCA, even one with a
    /// port for packets.
    pub kind: DeviceKind,
}

impl CompletionError {
    /// Returns the meaning of `vendor` on the software HCA; `None` if there is none. The codes of a
    /// NIC are not public.
    #[must_use]
    pub fn vendor_text(&self) -> Option<&'static str> {
        match self.kind {
            DeviceKind::Soft => mlx5_hca::vendor_text(self.vendor),
            _ => None,
        }
    }
}

impl fmt::Debug for Cqe<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cqe")
            .field("opcode", &self.opcode())
            .field("qpn", &self.qpn())
            .field("wqe_counter", &self.wqe_counter())
            .finish_non_exhaustive()
    }
}

impl<'a> Cqe<'a> {
    /// Makes the CQE at `bytes`, of queue pair `qpn`.
    ///
    /// During `'a` the caller must not move the bytes, and only the bytes of the QPN may change.
    #[inline(always)]
    pub(crate) fn new(
        bytes: NonNull<[u8; CQE_BYTES]>,
        qpn: u32,
        beside: Beside<'a>,
        kind: DeviceKind,
    ) -> Self {
        Self {
            bytes,
            qpn,
            beside,
            kind,
        }
    }

    /// Returns the CQE itself; for a completion of a compressed session, the title of the session.
    #[inline(always)]
    fn bytes(&self) -> &[u8; CQE_BYTES] {
        // SAFETY: the CQE is not moved for `'a`, and not written while the reference exists. Only
        // destroying a queue pair writes it, which cannot happen in a function of this type, and no
        // public function returns the reference.
        unsafe { self.bytes.as_ref() }
    }

    #[cfg(test)]
    pub(crate) fn title_bytes(&self) -> &[u8; CQE_BYTES] {
        self.bytes()
    }

    #[inline(always)]
    fn op_own(&self) -> u8 {
        self.bytes()[OP_OWN_OFFSET]
    }

    /// Returns the kind of the completion; `None` for an opcode that this crate does not know.
    #[must_use]
    #[inline(always)]
    pub fn opcode(&self) -> Option<CqeOpcode> {
        CqeOpcode::from_op_own(self.op_own())
    }

    /// Returns whether this CQE completes a receive, successfully or not; otherwise it completes a
    /// send.
    #[inline(always)]
    pub(crate) fn is_receive(&self) -> bool {
        const RECEIVES: u16 = 1 << CqeOpcode::ResponderWriteImm as u8
            | 1 << CqeOpcode::ResponderSend as u8
            | 1 << CqeOpcode::ResponderSendImm as u8
            | 1 << CqeOpcode::ResponderSendInvalidate as u8
            | 1 << CqeOpcode::ResponderError as u8;
        RECEIVES >> (self.op_own() >> 4) & 1 != 0
    }

    /// Returns the queue pair number; [`NO_QPN`](crate::wire::NO_QPN) if the queue pair has been
    /// destroyed, because another queue pair may have the number by now.
    #[must_use]
    #[inline(always)]
    pub fn qpn(&self) -> u32 {
        self.qpn
    }

    /// Returns the counter of the WQE. For a send, this is the number of its first WQEBB. For a
    /// receive of a shared queue, it is the index of the receive. For a receive of a queue pair's
    /// own queue, its low bits are that index.
    #[must_use]
    #[inline(always)]
    pub fn wqe_counter(&self) -> u16 {
        match self.beside {
            Beside::Mini { wqe_counter, .. } => wqe_counter,
            _ => ResponderCqe::parse(self.bytes()).wqe_counter,
        }
    }

    /// Returns the sender's immediate, in host order. The value is valid only if the opcode belongs
    /// to a message with an immediate.
    #[must_use]
    #[inline(always)]
    pub fn imm(&self) -> u32 {
        ResponderCqe::parse(self.bytes()).imm
    }

    /// Returns the number of bytes received, or fetched by a READ or an atomic; 0 for other sends.
    #[must_use]
    #[inline(always)]
    pub fn byte_count(&self) -> u32 {
        match self.beside {
            Beside::Mini { byte_count, .. } => byte_count,
            _ => RequesterCqe::parse(self.bytes()).byte_count,
        }
    }

    /// Returns the number of the queue pair that sent the message, 24 bits. The value is valid for
    /// receives of unreliable datagrams.
    #[must_use]
    #[inline(always)]
    pub fn source_qpn(&self) -> u32 {
        ResponderCqe::parse(self.bytes()).source_qpn
    }

    /// Returns whether the first 40 bytes of the receive hold the message's GRH. The value is valid
    /// for receives of unreliable datagrams.
    #[must_use]
    #[inline(always)]
    pub fn has_grh(&self) -> bool {
        ResponderCqe::parse(self.bytes()).grh
    }

    /// Returns whether the sender asked for a solicited event.
    #[must_use]
    #[inline(always)]
    pub fn is_solicited(&self) -> bool {
        is_solicited(self.op_own())
    }

    /// Returns the received bytes if the device put them into the CQE (scatter to CQE) and not into
    /// the buffers of the receive: at most 32 bytes, or 64 bytes in a queue of 128-byte entries.
    /// [`source_qpn`](Self::source_qpn) and [`has_grh`](Self::has_grh) are not valid then.
    #[must_use]
    #[inline(always)]
    pub fn inline_data(&self) -> Option<&'a [u8]> {
        let room: &[u8] = match (CqeFormat::from_op_own(self.op_own()), self.beside) {
            // SAFETY: the first half of the CQE does not change for `'a`: the QPN, which may
            // change, is in the second half.
            (CqeFormat::Inline32, _) => unsafe {
                self.bytes.cast::<[u8; CQE_BYTES / 2]>().as_ref()
            },
            (CqeFormat::Inline64, Beside::Half(half)) => half,
            _ => return None,
        };
        room.get(..self.byte_count() as usize)
    }

    /// Returns success, or the typed error.
    ///
    /// # Errors
    /// The completion reports an error.
    #[inline(always)]
    pub fn result(&self) -> Result<(), CompletionError> {
        match self.opcode() {
            None
            | Some(CqeOpcode::RequesterError | CqeOpcode::ResponderError | CqeOpcode::Invalid) => {
                Err(error(self.bytes(), self.kind))
            }
            Some(_) => Ok(()),
        }
    }
}

/// Decodes an error CQE. The parameter is the CQE's bytes and not a [`Cqe`], so that a `Cqe` need
/// not be in memory for this rare call.
#[cold]
fn error(bytes: &[u8; CQE_BYTES], kind: DeviceKind) -> CompletionError {
    let cqe = ErrorCqe::parse(bytes);
    CompletionError {
        syndrome: cqe.syndrome(),
        raw: cqe.raw_syndrome,
        vendor: cqe.vendor_syndrome,
        kind,
    }
}
