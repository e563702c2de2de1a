//! The CQE as the device wrote it.

use core::ptr::NonNull;
use std::fmt;

use crate::address::DeviceKind;
use crate::wire::{
    CQE_BYTES, CQE128_OFFSET, CqeFormat, CqeOpcode, ErrorCqe, OP_OWN_OFFSET, RequesterCqe, ResponderCqe, Syndrome, is_solicited,
};

/// A CQE in the queue, read in place; it stays as it is until the poll that hands it out returns.
#[derive(Clone, Copy)]
pub struct Cqe<'a> {
    /// No reference: the bytes of the QPN change when the queue pair is destroyed meanwhile.
    bytes: NonNull<[u8; CQE_BYTES]>,
    /// As it was when the poll came to this CQE.
    qpn: u32,
    beside: Beside<'a>,
    kind: DeviceKind,
}

/// What belongs to a CQE beside its own bytes. The poll that made it is inlined, so what is not asked for costs nothing.
#[derive(Clone, Copy)]
pub(crate) enum Beside<'a> {
    Nothing,
    /// The first half of a large entry.
    Half(&'a [u8; CQE128_OFFSET]),
    /// The CQE is the title of a compressed session; this is what the completion has of its own.
    Mini {
        byte_count: u32,
        wqe_counter: u16,
    },
}

/// Why a completion is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CompletionError {
    /// The typed status.
    pub syndrome: Syndrome,
    /// The syndrome byte.
    pub raw: u8,
    /// The vendor's detail.
    pub vendor: u8,
    /// What kind of device says so.
    pub kind: DeviceKind,
}

impl CompletionError {
    /// What the vendor's detail means, as the software HCA gives it; `None` if it gave none. A NIC's details are its own, and not public.
    #[must_use]
    pub fn vendor_text(&self) -> Option<&'static str> {
        match self.kind {
            #[cfg(feature = "soft")]
            DeviceKind::Soft => mlx5_hca::vendor_text(self.vendor),
            _ => None,
        }
    }
}

impl fmt::Display for CompletionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (syndrome {:#04x}, vendor {:#04x}", self.syndrome, self.raw, self.vendor)?;
        self.vendor_text().map_or(Ok(()), |text| write!(f, ": {text}"))?;
        f.write_str(")")
    }
}

impl std::error::Error for CompletionError {}

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
    /// The CQE at `bytes`, of queue pair `qpn`.
    ///
    /// The bytes stay where they are, and those that are not the QPN as they are, for `'a`.
    #[inline(always)]
    pub(crate) fn new(bytes: NonNull<[u8; CQE_BYTES]>, qpn: u32, beside: Beside<'a>, kind: DeviceKind) -> Self {
        Self { bytes, qpn, beside, kind }
    }

    /// The CQE itself, or the title of its session.
    #[inline(always)]
    fn bytes(&self) -> &[u8; CQE_BYTES] {
        // SAFETY: it stays where it is for `'a`, and is not written while it is looked at: destroying a queue pair, which writes, cannot happen
        // in a function of this type, and no public one returns the reference.
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

    /// What happened; `None` for an opcode this crate does not know.
    #[must_use]
    #[inline(always)]
    pub fn opcode(&self) -> Option<CqeOpcode> {
        CqeOpcode::from_op_own(self.op_own())
    }

    /// Whether it completes a receive, with success or not; else a send.
    #[inline(always)]
    pub(crate) fn is_receive(&self) -> bool {
        const RECEIVES: u16 = 1 << CqeOpcode::ResponderWriteImm as u8
            | 1 << CqeOpcode::ResponderSend as u8
            | 1 << CqeOpcode::ResponderSendImm as u8
            | 1 << CqeOpcode::ResponderSendInvalidate as u8
            | 1 << CqeOpcode::ResponderError as u8;
        RECEIVES >> (self.op_own() >> 4) & 1 != 0
    }

    /// The queue pair; [`NO_QPN`](crate::wire::NO_QPN) if it was destroyed since: its number may be another's by now.
    #[must_use]
    #[inline(always)]
    pub fn qpn(&self) -> u32 {
        self.qpn
    }

    /// The WQE: first WQEBB of a send, index of a receive.
    #[must_use]
    #[inline(always)]
    pub fn wqe_counter(&self) -> u16 {
        match self.beside {
            Beside::Mini { wqe_counter, .. } => wqe_counter,
            _ => ResponderCqe::parse(self.bytes()).wqe_counter,
        }
    }

    /// The sender's immediate, host order. Meaningful when the opcode says so.
    #[must_use]
    #[inline(always)]
    pub fn imm(&self) -> u32 {
        ResponderCqe::parse(self.bytes()).imm
    }

    /// Bytes received or read.
    #[must_use]
    #[inline(always)]
    pub fn byte_count(&self) -> u32 {
        match self.beside {
            Beside::Mini { byte_count, .. } => byte_count,
            _ => RequesterCqe::parse(self.bytes()).byte_count,
        }
    }

    /// The queue pair that sent the message, 24 bits. Meaningful for receives of unreliable datagrams.
    #[must_use]
    #[inline(always)]
    pub fn source_qpn(&self) -> u32 {
        ResponderCqe::parse(self.bytes()).source_qpn
    }

    /// Whether the first 40 bytes of the receive hold the message's GRH. Meaningful for receives of unreliable datagrams.
    #[must_use]
    #[inline(always)]
    pub fn has_grh(&self) -> bool {
        ResponderCqe::parse(self.bytes()).grh
    }

    /// Whether the sender asked for an event.
    #[must_use]
    #[inline(always)]
    pub fn is_solicited(&self) -> bool {
        is_solicited(self.op_own())
    }

    /// The received bytes, if the device put them here (scatter to CQE) and not into the buffers of the receive: at most 32, or 64 in a
    /// queue of 128-byte entries. [`source_qpn`](Self::source_qpn) and [`has_grh`](Self::has_grh) mean nothing then.
    #[must_use]
    #[inline(always)]
    pub fn inline_data(&self) -> Option<&'a [u8]> {
        let room: &[u8] = match (CqeFormat::from_op_own(self.op_own()), self.beside) {
            // SAFETY: the first half of the CQE stays as it is for `'a`; the QPN is in the second.
            (CqeFormat::Inline32, _) => unsafe { self.bytes.cast::<[u8; CQE_BYTES / 2]>().as_ref() },
            (CqeFormat::Inline64, Beside::Half(half)) => half,
            _ => return None,
        };
        room.get(..self.byte_count() as usize)
    }

    /// Success, or the typed error.
    ///
    /// # Errors
    /// The completion's status.
    #[inline(always)]
    pub fn result(&self) -> Result<(), CompletionError> {
        match self.opcode() {
            None | Some(CqeOpcode::RequesterError | CqeOpcode::ResponderError | CqeOpcode::Invalid) => Err(error(self.bytes(), self.kind)),
            Some(_) => Ok(()),
        }
    }
}

/// What the error CQE says. It takes the bytes, so that a `Cqe` need not be in memory for a call that is hardly ever made.
#[cold]
fn error(bytes: &[u8; CQE_BYTES], kind: DeviceKind) -> CompletionError {
    let cqe = ErrorCqe::parse(bytes);
    CompletionError { syndrome: cqe.syndrome(), raw: cqe.raw_syndrome, vendor: cqe.vendor_syndrome, kind }
}
