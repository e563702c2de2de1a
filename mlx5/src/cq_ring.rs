//! The ring of a completion queue as the driver reads it: plain CQEs in place, compressed sessions one CQE at a time.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::rc::Rc;

use crate::control::{Control, CqParts, CreateError};
use crate::cq::{Beside, CqConfig, CqObject, Cqe};
use crate::wire::{
    CQ_DBREC_ARM, CQE_BYTES, CQE128_OFFSET, CqArm, CqeFormat, CqeOpcode, MINI_CQES_PER_ARRAY, MiniCqe, OP_OWN_OFFSET, OP_OWN_UNTOUCHED,
    TitleCqe, cq_consumer_record, mini_array_offset,
};

/// The ring.
pub(crate) struct CqRing {
    /// The first entry's CQE, which is the last 64 bytes of the entry; and the last entry's.
    first: NonNull<u8>,
    last: NonNull<u8>,
    /// Bytes of an entry, 64 or 128.
    stride: usize,
    log_entries: u32,
    mask: u32,
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
    title: [u8; CQE_BYTES],
    /// The mini CQEs now being handed out.
    array: [[u8; MiniCqe::LEN]; MINI_CQES_PER_ARRAY],
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
        let session = Session { title: [0; CQE_BYTES], array: [[0; MiniCqe::LEN]; MINI_CQES_PER_ARRAY], count: 0, next: 0, wqe_counter: 0 };
        // SAFETY: the buffer holds `entries` entries of `stride` bytes, 64 or 128.
        let (first, last) = unsafe { (buffer.add(stride - CQE_BYTES), buffer.add(entries as usize * stride - CQE_BYTES)) };
        Ok(Self {
            first,
            last,
            stride,
            log_entries: entries.trailing_zeros(),
            mask: entries - 1,
            consumer: 0,
            record,
            session,
            polls_without_hook: 0,
            hook: control.hook(),
            object,
        })
    }

    pub(crate) fn entries(&self) -> u32 {
        self.mask + 1
    }

    pub(crate) fn object(&self) -> &Rc<CqObject> {
        &self.object
    }

    /// The CQE of an entry; the buffer lives as long as `object`.
    #[inline(always)]
    fn place(&self, counter: u32) -> NonNull<u8> {
        let index = (counter & self.mask) as usize;
        // SAFETY: the buffer holds `entries` entries of `stride` bytes.
        unsafe { self.first.add(index * self.stride) }
    }

    /// Entries from that of `counter` to the end of the ring.
    #[inline(always)]
    fn to_end(&self, counter: u32) -> u32 {
        self.entries() - (counter & self.mask)
    }

    /// Makes the CQE at the consumer, the title of a compressed session, the open session.
    #[inline(never)]
    fn open_session(&mut self, title: &[u8; CQE_BYTES]) {
        self.session.title = *title;
        let TitleCqe { count, wqe_counter } = TitleCqe::parse(title);
        // A device writes no other counts; one that did may not make the driver read what is not there.
        self.session.count = count.clamp(1, self.entries());
        self.session.next = 0;
        self.session.wqe_counter = wqe_counter;
    }

    /// Makes `entries` entries from that of `counter` on as the device first found them. The ring does not end among them.
    ///
    /// The device wrote no owner bit into a session's entries but the title's; what is there, of an array or of a former lap, could be
    /// taken for one on the next lap.
    #[inline(always)]
    fn make_untouched(&mut self, counter: u32, entries: u32) {
        let op_own = self.place(counter).as_ptr().wrapping_add(OP_OWN_OFFSET);
        if entries == MINI_CQES_PER_ARRAY as u32 && self.stride == CQE_BYTES {
            for i in 0..MINI_CQES_PER_ARRAY {
                // SAFETY: inside the buffer (caller); the entries are the driver's until the consumer record passes them.
                unsafe { op_own.add(i * CQE_BYTES).write(OP_OWN_UNTOUCHED) };
            }
        } else {
            // SAFETY: as above.
            unsafe { make_untouched_one_by_one(op_own, self.stride, entries) };
        }
    }

    /// Hands out up to `max` CQEs of the open session, and closes it behind its last.
    #[inline(always)]
    fn take_session<L: Copy>(&mut self, max: usize, find: &impl Fn(u32) -> L, f: &mut impl FnMut(L, Cqe<'_>)) -> usize {
        // Copied once more: nothing that is written below can change it, so what a callback reads of it is read once.
        let title = self.session.title;
        let first = Cqe::new(&title, Beside::Nothing);
        let (queue, is_send) = (find(first.qpn()), first.opcode() == Some(CqeOpcode::Requester));
        let count = self.session.count;
        let mut left = (count - self.session.next).min(u32::try_from(max).unwrap_or(u32::MAX));
        let taken = left as usize;
        while left > 0 {
            let next = self.session.next;
            let start = self.consumer.wrapping_add(next);
            let in_array = next % MINI_CQES_PER_ARRAY as u32;
            if in_array == 0 {
                let array = self.place(self.consumer.wrapping_add(mini_array_offset(next))).cast();
                // SAFETY: a CQE inside the buffer. The title's owner bit published the whole session, and the consumer record has not
                // passed it; nor was it made untouched, which comes next.
                self.session.array = unsafe { array.read() };
            }
            // As far as the array, the ring, and the session or the caller allow.
            let entries = left.min(MINI_CQES_PER_ARRAY as u32 - in_array).min(self.to_end(start));
            left -= entries;
            self.make_untouched(start, entries);
            let Session { array, next: handed_out, wqe_counter, .. } = &mut self.session;
            // Counted when the callback returns or panics: that entry is not handed out again.
            let mut handed_out = Counter { to: handed_out, now: next };
            for mini in &array[in_array as usize..][..entries as usize] {
                let mini = MiniCqe::parse(mini);
                let wqe_counter = if is_send { mini.wqe_counter() } else { wqe_counter.wrapping_add(handed_out.now as u16) };
                handed_out.now += 1;
                f(queue, Cqe::new(&title, Beside::Mini { byte_count: mini.byte_count, wqe_counter }));
            }
        }
        if self.session.next == count {
            self.consumer = self.consumer.wrapping_add(count);
            self.session.count = 0;
            self.session.next = 0;
        }
        taken
    }

    /// Hands out up to `max` plain CQEs and counts them in `n`. The title of a compressed session ends them and is returned.
    ///
    /// The device has written an entry if its opcode is valid and its owner bit is that of this lap.
    #[inline(always)]
    fn take_plain<'a, L: Copy>(
        &mut self,
        max: usize,
        n: &mut usize,
        find: &impl Fn(u32) -> L,
        f: &mut impl FnMut(L, Cqe<'_>),
    ) -> Option<&'a [u8; CQE_BYTES]> {
        let (first, last, stride) = (self.first, self.last, self.stride);
        let mut place = self.place(self.consumer);
        let mut owner = (self.consumer >> self.log_entries) as u8;
        while *n < max {
            // SAFETY: inside the buffer; the device writes this byte last, and only whole.
            let op_own = unsafe { place.add(OP_OWN_OFFSET).cast::<AtomicU8>().as_ref() }.load(Ordering::Acquire);
            if (op_own ^ owner) & 1 != 0 || op_own >> 4 == CqeOpcode::Invalid as u8 {
                break;
            }
            // SAFETY: the owner bit, read with Acquire, says that the device is done with the entry; it will not touch it again before
            // the consumer record passes it, which happens after the borrow ends. The other half of a large entry is in front.
            let (bytes, beside) = unsafe {
                let is_large = stride != CQE_BYTES;
                (place.cast().as_ref(), if is_large { Beside::Half(place.sub(CQE128_OFFSET).cast().as_ref()) } else { Beside::Nothing })
            };
            if CqeFormat::from_op_own(op_own) == CqeFormat::Compressed {
                return Some(bytes);
            }
            let cqe = Cqe::new(bytes, beside);
            if place == last {
                rarely();
                place = first;
                owner = !owner;
            } else {
                // SAFETY: there is an entry behind it.
                place = unsafe { place.add(stride) };
            }
            prefetch(place);
            // Before the callback: should it panic, the entry is not handed out again.
            self.consumer = self.consumer.wrapping_add(1);
            f(find(cqe.qpn()), cqe);
            *n += 1;
        }
        None
    }

    /// CQEs handed out.
    #[inline(always)]
    fn handed_out(&self) -> u32 {
        self.consumer.wrapping_add(self.session.next)
    }

    /// Hands out up to `max` CQEs, each with what `find` says of its QPN.
    #[inline(always)]
    fn take<L: Copy>(&mut self, max: usize, find: &impl Fn(u32) -> L, f: &mut impl FnMut(L, Cqe<'_>)) -> usize {
        let mut n = 0;
        let before = self.handed_out();
        let taking = Taking { ring: self, before };
        loop {
            if taking.ring.session.count != 0 {
                n += taking.ring.take_session(max - n, find, f);
            }
            match taking.ring.take_plain(max, &mut n, find, f) {
                Some(title) => taking.ring.open_session(title),
                None => return n,
            }
        }
    }

    /// Asks for an event at the first CQE that is not consumed yet, also if it is there already.
    pub(crate) fn arm(&mut self, solicited_only: bool) {
        let consumed = self.consumer.wrapping_add(self.session.next);
        // SAFETY: the arm word follows the consumer word, in the same record, which lives as long as `object`.
        let word = unsafe { self.record.add(CQ_DBREC_ARM).as_ref() };
        word.store(CqArm { sequence: 0, solicited_only, consumed }.record(), Ordering::Release);
    }

    /// Hands out up to `max` CQEs, each with what `find` says of its QPN; it is asked once for the CQEs of a session, which have one QPN.
    ///
    /// A queue found empty is where a soft device makes progress (the second of its two hooks); one that is never found empty at once must
    /// not starve the rest of the device.
    #[inline(always)]
    pub(crate) fn poll<L: Copy>(&mut self, max: usize, find: impl Fn(u32) -> L, mut f: impl FnMut(L, Cqe<'_>)) -> usize {
        let mut is_second = false;
        loop {
            let n = self.take(max, &find, &mut f);
            if is_second {
                return n;
            }
            if n > 0 {
                self.polls_without_hook += 1;
                if self.polls_without_hook < POLLS_PER_HOOK {
                    return n;
                }
            }
            self.polls_without_hook = 0;
            is_second = matches!(&self.hook, Some(device) if device.empty_poll()) && n == 0;
            if !is_second {
                return n;
            }
        }
    }
}

/// Kept apart so that the usual case stays short at every poll.
///
/// # Safety
/// `op_own` is the op_own byte of the first of `entries` entries that the driver may write, `stride` bytes each.
#[inline(never)]
unsafe fn make_untouched_one_by_one(mut op_own: *mut u8, stride: usize, entries: u32) {
    for _ in 0..entries {
        // SAFETY: the caller's.
        unsafe { op_own.write(OP_OWN_UNTOUCHED) };
        op_own = op_own.wrapping_add(stride);
    }
}

/// CQEs are being handed out. When that ends, also by a panic of the callback, the device learns which entries it may have back.
struct Taking<'a> {
    ring: &'a mut CqRing,
    /// CQEs handed out when it began.
    before: u32,
}

impl Drop for Taking<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        let now = self.ring.handed_out();
        if now != self.before {
            // Release: the device may overwrite the entries once it sees this.
            // SAFETY: the record lives as long as `object`.
            unsafe { self.ring.record.as_ref() }.store(cq_consumer_record(now), Ordering::Release);
        }
    }
}

/// A counter that is written back when it goes away, also by a panic.
struct Counter<'a> {
    to: &'a mut u32,
    now: u32,
}

impl Drop for Counter<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        *self.to = self.now;
    }
}

/// Marks its caller's branch as the unlikely one.
#[cold]
fn rarely() {}

#[inline(always)]
fn prefetch(place: NonNull<u8>) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch of any address has no effect but on the cache.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(place.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::soft::{Hca, LocalFabric};
    use crate::wire::{ResponderCqe, op_own};
    use crate::{FabricSpec, SoftOptions};

    /// A ring whose device has not written anything, its op_own bytes set to `op_own`.
    fn untouched(config: CqConfig, op_own: u8) -> CqRing {
        let options = SoftOptions { fabric: FabricSpec::Local(LocalFabric::new()), arena_bytes: 4096, ..Default::default() };
        let ring = CqRing::create(&Rc::new(Hca::open(&options, Some(&crate::NullOptions::default())).unwrap()), &config).unwrap();
        for i in 0..ring.entries() {
            // SAFETY: inside the buffer, and nobody writes it.
            unsafe { ring.place(i).add(OP_OWN_OFFSET).write(op_own) };
        }
        ring
    }

    #[test]
    fn untouched_entries_are_no_completions_on_either_lap_however_a_device_marks_them() {
        for cqe_bytes in [64, 128] {
            // libmlx5 and DPDK fill 0xf0, the kernel's Ethernet driver and this crate's device 0xf1.
            for mark in [0xf0, 0xf1] {
                let config = CqConfig { entries: 4, cqe_bytes, compression: true };
                let mut ring = untouched(config, mark);
                for lap in [0u8, 1, 2] {
                    assert_eq!(ring.poll(9, |_| (), |(), _| {}), 0, "{mark:#x}, lap {lap}");
                    for i in 0..4 {
                        let cqe = ResponderCqe { wqe_counter: i, ..Default::default() }.emit();
                        // SAFETY: as above.
                        unsafe { ring.place(i.into()).cast().write(cqe) };
                        // SAFETY: as above.
                        unsafe { ring.place(i.into()).add(OP_OWN_OFFSET).write(op_own(CqeOpcode::ResponderSend, lap & 1 != 0)) };
                        assert_eq!(ring.poll(9, |_| (), |(), cqe| assert_eq!(cqe.wqe_counter(), i)), 1);
                        // SAFETY: as above. A device never does this; the ring's next lap begins untouched again.
                        unsafe { ring.place(i.into()).add(OP_OWN_OFFSET).write(mark) };
                    }
                }
            }
        }
    }

    #[test]
    fn a_title_with_an_impossible_count_makes_the_driver_read_no_more_than_the_ring() {
        for (count, taken) in [(0u32, 1), (u32::MAX, 4)] {
            let mut ring = untouched(CqConfig { entries: 4, cqe_bytes: 64, compression: true }, OP_OWN_UNTOUCHED);
            let mut title = ResponderCqe::default().emit();
            TitleCqe { count, wqe_counter: 0 }.emit_into(&mut title);
            title[OP_OWN_OFFSET] = (CqeFormat::Compressed as u8) << 2;
            // SAFETY: inside the buffer.
            unsafe { ring.place(0).cast().write(title) };
            assert_eq!(ring.poll(9, |_| (), |(), _| {}), taken);
            assert_eq!(ring.poll(9, |_| (), |(), _| {}), 0);
        }
    }
}
