//! The ring of a completion queue as the driver reads it: plain CQEs in place, compressed sessions one CQE at a time.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::rc::Rc;

use crate::control::{Control, CqParts, CreateError};
use crate::cq::{CqConfig, CqObject, Cqe};
use crate::wire::{
    CQE_BYTES, CQE128_OFFSET, CqeFormat, CqeOpcode, MINI_CQES_PER_ARRAY, MiniCqe, OP_OWN_OFFSET, OP_OWN_UNTOUCHED, TitleCqe,
    cq_consumer_record, mini_array_offset,
};

/// The ring.
pub(crate) struct CqRing {
    /// The first entry's CQE, which is the last 64 bytes of the entry.
    first: NonNull<u8>,
    /// Bytes of an entry, 64 or 128.
    stride: usize,
    log_entries: u32,
    /// CQEs consumed. While a session is open, those before its title.
    consumer: u32,
    record: NonNull<AtomicU32>,
    session: Session,
    polls_without_hook: u32,
    /// The soft device, which makes progress in empty polls.
    hook: Option<Rc<Control>>,
    object: Rc<CqObject>,
}

/// A compressed session that is being handed out. Copies: the device may have its entries back as they are consumed, and the last one of
/// a poll may be in the middle of an array.
struct Session {
    /// The title made a plain CQE, with the fields of the last entry handed out.
    cqe: [u8; CQE_BYTES],
    array: [u8; CQE_BYTES],
    /// Its CQEs; 0 when no session is open.
    count: u32,
    /// Those handed out.
    next: u32,
    /// Of the first.
    wqe_counter: u16,
}

/// Polls that may find something before the device makes progress all the same.
const POLLS_PER_HOOK: u32 = 16;

impl CqRing {
    pub(crate) fn create(control: &Rc<Control>, config: &CqConfig) -> Result<Self, CreateError> {
        let CqParts { buffer, entries, stride, record, cqn } = control.create_cq(config)?;
        let object = Rc::new(CqObject { cqn, control: Rc::clone(control) });
        let session = Session { cqe: [0; CQE_BYTES], array: [0; CQE_BYTES], count: 0, next: 0, wqe_counter: 0 };
        Ok(Self {
            // SAFETY: the buffer holds entries of `stride` bytes, 64 or 128.
            first: unsafe { buffer.add(stride - CQE_BYTES) },
            stride,
            log_entries: entries.trailing_zeros(),
            consumer: 0,
            record,
            session,
            polls_without_hook: 0,
            hook: control.hook(),
            object,
        })
    }

    pub(crate) fn entries(&self) -> u32 {
        1 << self.log_entries
    }

    pub(crate) fn object(&self) -> &Rc<CqObject> {
        &self.object
    }

    /// The CQE of an entry; the buffer lives as long as `object`.
    #[inline(always)]
    fn place(&self, counter: u32) -> NonNull<u8> {
        let index = (counter & (self.entries() - 1)) as usize;
        // SAFETY: the buffer holds `entries` entries of `stride` bytes.
        unsafe { self.first.add(index * self.stride) }
    }

    /// The next CQE if the device has written it: its opcode is valid and its owner bit is that of this lap.
    #[inline(always)]
    fn peek<'a>(&self) -> Option<Cqe<'a>> {
        let cqe = self.place(self.consumer);
        // SAFETY: inside the buffer (`place`); the device writes this byte last, and only whole.
        let op_own = unsafe { cqe.add(OP_OWN_OFFSET).cast::<AtomicU8>().as_ref() }.load(Ordering::Acquire);
        let lap = (self.consumer >> self.log_entries) as u8 & 1;
        if op_own & 1 != lap || op_own >> 4 == CqeOpcode::Invalid as u8 {
            return None;
        }
        let is_large = self.stride != CQE_BYTES;
        // SAFETY: the owner bit, read with Acquire, says that the device is done with the entry; it will not touch it again before
        // the consumer record passes it, which happens after the borrow ends. The other half of a large entry is in front.
        unsafe {
            let before = is_large.then(|| cqe.sub(CQE128_OFFSET).cast().as_ref());
            Some(Cqe::new(cqe.cast().as_ref(), before))
        }
    }

    #[inline(always)]
    fn prefetch_next(&self) {
        #[cfg(target_arch = "x86_64")]
        {
            use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch of an address inside the buffer.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.place(self.consumer.wrapping_add(1)).as_ptr().cast()) };
        }
    }

    /// Makes the CQE at the consumer, the title of a compressed session, the open session.
    #[inline(never)]
    fn open_session(&mut self, title: Cqe<'_>) {
        self.session.cqe = *title.bytes();
        // A plain CQE's format is 0.
        self.session.cqe[OP_OWN_OFFSET] &= !((CqeFormat::Compressed as u8) << 2);
        let TitleCqe { count, wqe_counter } = TitleCqe::parse(title.bytes());
        // A device writes no other counts; one that did may not make the driver read what is not there.
        self.session.count = count.clamp(1, self.entries());
        self.session.next = 0;
        self.session.wqe_counter = wqe_counter;
    }

    /// Copies the array of the session's next entries, and makes their places untouched: the device wrote no owner bit there, and what was
    /// there before would be taken for one on the next lap.
    #[inline(never)]
    fn load_array(&mut self) {
        let Session { count, next, .. } = self.session;
        let array = self.place(self.consumer.wrapping_add(mini_array_offset(next))).cast();
        // SAFETY: a CQE inside the buffer. The title's owner bit published the whole session, and the consumer record has not passed it.
        self.session.array = unsafe { array.read() };
        let start = self.consumer.wrapping_add(next);
        let places = (count - next).min(MINI_CQES_PER_ARRAY as u32);
        let before_end = places.min(self.entries() - (start & (self.entries() - 1)));
        for (from, n) in [(start, before_end), (start.wrapping_add(before_end), places - before_end)] {
            let mut op_own = self.place(from).as_ptr().wrapping_add(OP_OWN_OFFSET);
            for _ in 0..n {
                // SAFETY: `n` entries from `from` on are inside the buffer and not wrapped; they are the driver's until the record passes
                // them. All of this array was read, and no later one is among them.
                unsafe { op_own.write(OP_OWN_UNTOUCHED) };
                op_own = op_own.wrapping_add(self.stride);
            }
        }
    }

    /// Hands out up to `max` CQEs of the open session, and closes it behind its last.
    #[inline(always)]
    fn take_session<L: Copy>(&mut self, max: usize, find: &impl Fn(u32) -> L, f: &mut impl FnMut(L, Cqe<'_>)) -> usize {
        let mut n = 0;
        let plain = Cqe::new(&self.session.cqe, None);
        let (queue, is_send) = (find(plain.qpn()), plain.opcode() == Some(CqeOpcode::Requester));
        while n < max && self.session.next < self.session.count {
            let next = self.session.next;
            if next % MINI_CQES_PER_ARRAY as u32 == 0 {
                self.load_array();
            }
            let session = &mut self.session;
            // Before the callback: should it panic, the entry is not handed out again.
            session.next = next + 1;
            let mini = MiniCqe::of_array(&session.array, next);
            if is_send {
                mini.expand_send(&mut session.cqe);
            } else {
                mini.expand_receive(&mut session.cqe, session.wqe_counter.wrapping_add(next as u16));
            }
            f(queue, Cqe::new(&session.cqe, None));
            n += 1;
        }
        if self.session.next == self.session.count {
            self.consumer = self.consumer.wrapping_add(self.session.count);
            self.session.count = 0;
            self.session.next = 0;
        }
        n
    }

    /// Hands out up to `max` CQEs, each with what `find` says of its QPN.
    #[inline(always)]
    fn take<L: Copy>(&mut self, max: usize, find: &impl Fn(u32) -> L, f: &mut impl FnMut(L, Cqe<'_>)) -> usize {
        let mut n = 0;
        loop {
            if self.session.count != 0 {
                n += self.take_session(max - n, find, f);
            }
            let mut found_title = false;
            while n < max {
                let Some(cqe) = self.peek() else { break };
                self.prefetch_next();
                if cqe.format() == CqeFormat::Compressed {
                    self.open_session(cqe);
                    found_title = true;
                    break;
                }
                // Before the callback, as above.
                self.consumer = self.consumer.wrapping_add(1);
                f(find(cqe.qpn()), cqe);
                n += 1;
            }
            if !found_title {
                break;
            }
        }
        if n > 0 {
            // Release: the device may overwrite the entries once it sees this.
            // SAFETY: the record lives as long as `object`.
            unsafe { self.record.as_ref() }.store(cq_consumer_record(self.consumer.wrapping_add(self.session.next)), Ordering::Release);
        }
        n
    }

    /// Hands out up to `max` CQEs, each with what `find` says of its QPN; it is asked once for the CQEs of a session, which have one QPN.
    ///
    /// A queue found empty is where a soft device makes progress (the second of its two hooks); one that is never found empty at once must
    /// not starve the rest of the device.
    #[inline(always)]
    pub(crate) fn poll<L: Copy>(&mut self, max: usize, find: impl Fn(u32) -> L, mut f: impl FnMut(L, Cqe<'_>)) -> usize {
        let n = self.take(max, &find, &mut f);
        if n > 0 {
            self.polls_without_hook += 1;
            if self.polls_without_hook < POLLS_PER_HOOK {
                return n;
            }
        }
        self.polls_without_hook = 0;
        match &self.hook {
            Some(device) if device.empty_poll() && n == 0 => self.take(max, &find, &mut f),
            _ => n,
        }
    }
}
