//! The conversion of batches to WRITEs.

use mlx5::{
    BlueflameBatch, Inline, Mr, Payload, PostError, RcOperation, RcQp, Sge, Signal, WriteImm,
};

use crate::control::ControlMemory;
use crate::link::{EasyBatch, Emit, Poster};
use crate::wire::{METADATA_SPAN, padded};

/// Maximum inline bytes of a WQE of four WQEBBs without an SGE.
pub(super) const INLINE_MAX: u64 = 220;
/// Inline bytes of a WQE of four WQEBBs that also has an SGE for the rest of the batch.
const HYBRID_INLINE: u64 = 204;

/// The kind of a WQE, in the word that its completion returns.
pub(super) const WRITE: u64 = 0;
pub(super) const READ: u64 = 1;
pub(super) const RAW: u64 = 2;
/// A WRITE whose completion the window waits for.
pub(super) const WINDOWED_WRITE: u64 = 3;
/// The READ after everything else that a connection sends when its context is dropped.
pub(super) const LAST: u64 = 4;
/// The READ of the activity of the peer's context.
pub(super) const ACTIVITY: u64 = 5;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Remote {
    pub(crate) ring_addr: u64,
    pub(crate) ring_rkey: u32,
    pub(crate) published_addr: u64,
    pub(crate) published_rkey: u32,
    pub(crate) activity_addr: u64,
    pub(crate) activity_rkey: u32,
    pub(crate) path_mtu: u16,
}

/// A queue pair, or a [`BlueflameBatch`] of its operations, which the device gets together.
pub(super) trait Posts {
    fn post(&mut self, op: &impl RcOperation, signal: Signal, user: u64) -> Result<(), PostError>;

    /// Rings the doorbell for the posted operations. Does nothing in a [`BlueflameBatch`], whose
    /// end announces all of its operations.
    fn ring(&mut self) {}

    /// Posts an operation, and announces it as [`ring`](Self::ring) does.
    fn post_and_ring(
        &mut self,
        op: &impl RcOperation,
        signal: Signal,
        user: u64,
    ) -> Result<(), PostError> {
        self.post(op, signal, user)
    }
}

impl Posts for RcQp {
    #[inline(always)]
    fn post(&mut self, op: &impl RcOperation, signal: Signal, user: u64) -> Result<(), PostError> {
        self.post(op, signal, user)
    }

    #[inline(always)]
    fn ring(&mut self) {
        self.ring();
    }

    #[inline(always)]
    fn post_and_ring(
        &mut self,
        op: &impl RcOperation,
        signal: Signal,
        user: u64,
    ) -> Result<(), PostError> {
        self.post_and_ring(op, signal, user)
    }
}

impl Posts for BlueflameBatch<'_> {
    fn post(&mut self, op: &impl RcOperation, signal: Signal, user: u64) -> Result<(), PostError> {
        self.post(op, signal, user)
    }
}

pub(super) struct Batches<'a, Q> {
    pub(super) qp: &'a mut Q,
    pub(super) send_ring: &'a Mr,
    pub(super) remote: &'a Remote,
    pub(super) to_peer: u64,
    /// Maximum length in bytes of a batch that is completely inline.
    pub(super) inline_limit: u64,
    pub(super) control: &'a ControlMemory,
}

impl<Q: Posts> Poster for Batches<'_, Q> {
    type Error = PostError;

    #[inline(never)]
    fn post(&mut self, emit: Emit) -> Result<(), PostError> {
        if emit.bytes <= self.inline_limit {
            let payload = Inline(head(self.send_ring, emit, emit.bytes));
            write(self.qp, self.remote, emit, payload)?;
        } else {
            self.post_long(emit)?;
        }
        if emit.is_last {
            self.qp.ring();
        }
        Ok(())
    }

    #[inline(always)]
    fn post_easy(&mut self, batch: &EasyBatch<'_>) -> Result<(), PostError> {
        // The flow-control words are published before the post, while they are in registers.
        self.control.publish(batch.words());
        let bytes = batch.bytes();
        if bytes > self.inline_limit {
            // A second `Batches` is made here, so that the common case needs no `Batches` in
            // memory.
            let mut batches = Batches {
                qp: &mut *self.qp,
                ..*self
            };
            return batches.post(batch.write_out());
        }
        let (start, metadata) = (batch.start(), batch.metadata());
        // SAFETY: an easy batch has its metadata and one message at least, so `bytes` is not less
        // than the lengths of these, and its messages are in the ring after the metadata. Nothing
        // writes the send ring while the slice lives: only the link that lends the batch does.
        let messages = unsafe {
            core::hint::assert_unchecked(bytes >= METADATA_SPAN + padded(0));
            std::slice::from_raw_parts(
                start.add(metadata.len()).as_ptr(),
                bytes as usize - metadata.len(),
            )
        };
        let write = WriteImm {
            addr: self.to_peer.wrapping_add(start.addr().get() as u64),
            rkey: self.remote.ring_rkey,
            imm: batch.imm(),
            payload: (Inline(&metadata[..]), Inline(messages)),
        };
        self.qp.post_and_ring(&write, Signal::Reclaim, WRITE)
    }
}

#[inline(always)]
fn head(send_ring: &Mr, emit: Emit, len: u64) -> &[u8] {
    // SAFETY: the link emits ranges inside the ring, and nothing writes the send ring while the
    // slice lives: only that link does.
    unsafe {
        std::slice::from_raw_parts(
            send_ring.as_ptr().add(emit.offset as usize).as_ptr(),
            len as usize,
        )
    }
}

impl<Q: Posts> Batches<'_, Q> {
    /// Posts a batch that is longer than the inline limit. The device gathers the bytes that are
    /// not inline.
    fn post_long(&mut self, emit: Emit) -> Result<(), PostError> {
        let inline = if self.inline_limit >= HYBRID_INLINE {
            HYBRID_INLINE
        } else {
            0
        };
        let rest = Sge {
            addr: self.send_ring.addr() + emit.offset + inline,
            len: (emit.bytes - inline) as u32,
            lkey: self.send_ring.lkey(),
        };
        let payload = (Inline(head(self.send_ring, emit, inline)), rest);
        write(self.qp, self.remote, emit, payload)
    }
}

#[inline(always)]
fn write(
    qp: &mut impl Posts,
    remote: &Remote,
    emit: Emit,
    payload: impl Payload,
) -> Result<(), PostError> {
    let write = WriteImm {
        addr: remote.ring_addr + emit.offset,
        rkey: remote.ring_rkey,
        imm: emit.imm,
        payload,
    };
    let (signal, user) = if emit.signal {
        (Signal::Always, WINDOWED_WRITE)
    } else {
        (Signal::Reclaim, WRITE)
    };
    qp.post(&write, signal, user)
}
