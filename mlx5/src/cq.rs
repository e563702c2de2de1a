//! Completion queues: the ring, the CQE as the device wrote it, and the ordinary [`Cq`].

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::fmt;
use std::rc::Rc;

use crate::control::{Control, CqParts, CreateError};
use crate::wire::{CQE_BYTES, CqeOpcode, ErrorCqe, OP_OWN_OFFSET, RequesterCqe, ResponderCqe, Syndrome, cq_consumer_record};

/// A CQE in the queue, read in place; it stays as it is until the poll that hands it out returns.
#[derive(Clone, Copy)]
pub struct Cqe<'a> {
    bytes: &'a [u8; CQE_BYTES],
}

/// Why a completion is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{syndrome} (syndrome {raw:#04x}, vendor {vendor:#04x})")]
pub struct CompletionError {
    /// The typed status.
    pub syndrome: Syndrome,
    /// The syndrome byte.
    pub raw: u8,
    /// The vendor's detail.
    pub vendor: u8,
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

impl Cqe<'_> {
    /// What happened; `None` for an opcode this crate does not know.
    #[must_use]
    #[inline(always)]
    pub fn opcode(&self) -> Option<CqeOpcode> {
        CqeOpcode::from_op_own(self.bytes[OP_OWN_OFFSET])
    }

    /// The queue pair.
    #[must_use]
    #[inline(always)]
    pub fn qpn(&self) -> u32 {
        ResponderCqe::parse(self.bytes).qpn
    }

    /// The WQE: first WQEBB of a send, index of a receive.
    #[must_use]
    #[inline(always)]
    pub fn wqe_counter(&self) -> u16 {
        ResponderCqe::parse(self.bytes).wqe_counter
    }

    /// The sender's immediate, host order. Meaningful when the opcode says so.
    #[must_use]
    #[inline(always)]
    pub fn imm(&self) -> u32 {
        ResponderCqe::parse(self.bytes).imm
    }

    /// Bytes received or read.
    #[must_use]
    #[inline(always)]
    pub fn byte_count(&self) -> u32 {
        RequesterCqe::parse(self.bytes).byte_count
    }

    /// Success, or the typed error.
    ///
    /// # Errors
    /// The completion's status.
    #[inline(always)]
    pub fn result(&self) -> Result<(), CompletionError> {
        match self.opcode() {
            Some(CqeOpcode::Requester | CqeOpcode::ResponderWriteImm) => Ok(()),
            _ => Err(self.error()),
        }
    }

    #[cold]
    fn error(&self) -> CompletionError {
        let cqe = ErrorCqe::parse(self.bytes);
        CompletionError { syndrome: cqe.syndrome(), raw: cqe.raw_syndrome, vendor: cqe.vendor_syndrome }
    }
}

/// The device's object, kept alive by everything that names it.
pub(crate) struct CqObject {
    pub(crate) cqn: u32,
    pub(crate) control: Rc<Control>,
}

impl Drop for CqObject {
    fn drop(&mut self) {
        self.control.destroy_cq(self.cqn);
    }
}

/// The ring as the driver reads it.
pub(crate) struct CqRing {
    buffer: NonNull<u8>,
    log_entries: u32,
    consumer: u32,
    record: NonNull<AtomicU32>,
    polls_without_hook: u32,
    /// The soft device, which makes progress in empty polls.
    hook: Option<Rc<Control>>,
    object: Rc<CqObject>,
}

/// Polls that may find something before the device makes progress all the same.
const POLLS_PER_HOOK: u32 = 16;

impl CqRing {
    pub(crate) fn create(control: &Rc<Control>, entries: u32) -> Result<Self, CreateError> {
        let CqParts { buffer, entries, record, cqn } = control.create_cq(entries)?;
        let object = Rc::new(CqObject { cqn, control: Rc::clone(control) });
        Ok(Self { buffer, log_entries: entries.trailing_zeros(), consumer: 0, record, polls_without_hook: 0, hook: control.hook(), object })
    }

    pub(crate) fn entries(&self) -> u32 {
        1 << self.log_entries
    }

    pub(crate) fn object(&self) -> &Rc<CqObject> {
        &self.object
    }

    /// The next CQE if the device has written it: its opcode is valid and its owner bit is that of this lap.
    #[inline(always)]
    fn peek<'a>(&self) -> Option<Cqe<'a>> {
        let index = (self.consumer & (self.entries() - 1)) as usize;
        // SAFETY: the buffer holds `entries` CQEs and lives as long as `object`.
        let cqe = unsafe { self.buffer.as_ptr().add(index * CQE_BYTES) };
        // SAFETY: as above; the device writes this byte last, and only whole.
        let op_own = unsafe { &*cqe.add(OP_OWN_OFFSET).cast::<AtomicU8>() }.load(Ordering::Acquire);
        let lap = (self.consumer >> self.log_entries) as u8 & 1;
        if op_own & 1 != lap || op_own >> 4 == CqeOpcode::Invalid as u8 {
            return None;
        }
        // SAFETY: the owner bit, read with Acquire, says that the device is done with the entry; it will not touch it again before
        // the consumer record passes it, which happens after the borrow ends.
        Some(Cqe { bytes: unsafe { &*cqe.cast::<[u8; CQE_BYTES]>() } })
    }

    #[inline(always)]
    fn prefetch_next(&self) {
        #[cfg(target_arch = "x86_64")]
        {
            use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let index = (self.consumer.wrapping_add(1) & (self.entries() - 1)) as usize;
            // SAFETY: a prefetch of an address inside the buffer.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.buffer.as_ptr().add(index * CQE_BYTES).cast()) };
        }
    }

    #[inline(always)]
    fn take(&mut self, max: usize, mut f: impl FnMut(Cqe<'_>)) -> usize {
        let mut n = 0;
        while n < max {
            let Some(cqe) = self.peek() else { break };
            self.prefetch_next();
            // Before the callback: should it panic, the entry is not handed out again.
            self.consumer = self.consumer.wrapping_add(1);
            f(cqe);
            n += 1;
        }
        if n > 0 {
            // Release: the device may overwrite the entries once it sees this.
            // SAFETY: the record lives as long as `object`.
            unsafe { self.record.as_ref() }.store(cq_consumer_record(self.consumer), Ordering::Release);
        }
        n
    }

    /// Hands out up to `max` CQEs. A queue found empty is where a soft device makes progress (the second of its two hooks); one that is
    /// never found empty at once must not starve the rest of the device.
    #[inline(always)]
    pub(crate) fn poll(&mut self, max: usize, mut f: impl FnMut(Cqe<'_>)) -> usize {
        let n = self.take(max, &mut f);
        if n > 0 {
            self.polls_without_hook += 1;
            if self.polls_without_hook < POLLS_PER_HOOK {
                return n;
            }
        }
        self.polls_without_hook = 0;
        match &self.hook {
            Some(device) if device.empty_poll() && n == 0 => self.take(max, &mut f),
            _ => n,
        }
    }
}

/// A completion queue for any mix of queues. Poll it from the thread that made it.
pub struct Cq {
    ring: CqRing,
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq").field("entries", &self.ring.entries()).finish_non_exhaustive()
    }
}

impl Cq {
    pub(crate) fn create(control: &Rc<Control>, entries: u32) -> Result<Self, CreateError> {
        Ok(Self { ring: CqRing::create(control, entries)? })
    }

    /// Entries the device really gave, a power of two.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.ring.entries()
    }

    pub(crate) fn object(&self) -> &Rc<CqObject> {
        self.ring.object()
    }

    /// Completion queue number, 24 bits.
    #[must_use]
    pub fn cqn(&self) -> u32 {
        self.object().cqn
    }

    /// Hands up to `max` completions to `f` in the order the device wrote them, and returns how many. Their entries are free again when
    /// this returns: what `f` posts must find room for its completions beside them.
    #[inline(always)]
    pub fn poll(&mut self, max: usize, f: impl FnMut(Cqe<'_>)) -> usize {
        self.ring.poll(max, f)
    }
}
