//! The ring of a completion queue as the driver reads it: plain CQEs in place, compressed sessions one CQE at a time.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::rc::Rc;

use shm::cache::prefetch;

use crate::address::DeviceKind;
use crate::completions::cq_object::{CqEntries, CqObject, is_written};
use crate::completions::cqe::{Beside, Cqe};
use crate::config::CqConfig;
use crate::error::CreateError;
use crate::mmio::udma_from_device_barrier;
use crate::provider::control::Control;
use crate::provider::control::Hook;
use crate::wire::{
    CQ_DBREC_ARM, CQE_BYTES, CQE128_OFFSET, CqArm, CqeFormat, CqeOpcode, MINI_CQES_PER_ARRAY, MiniCqe, OP_OWN_OFFSET, OP_OWN_UNTOUCHED,
    ResponderCqe, TitleCqe, cq_consumer_record, is_solicited, mini_array_offset,
};

/// The ring of one completion queue.
pub(crate) struct CqRing {
    entries: CqEntries,
    /// The last entry's CQE.
    last: NonNull<u8>,
    /// CQEs consumed. While a session is open, those before its title.
    consumer: u32,
    /// The entry of `consumer`, and the owner bit that it gets. While callbacks run, an earlier entry. Between polls, while a session is open,
    /// [`OPEN`], which is always written.
    head: NonNull<u8>,
    owner: u8,
    record: NonNull<AtomicU32>,
    session: Session,
    polls_without_hook: u32,
    /// Kind of the device, for its errors.
    kind: DeviceKind,
    /// The soft device, which makes progress in empty polls.
    hook: Option<Hook>,
    object: Rc<CqObject>,
}

/// A compressed session that is being handed out.
struct Session {
    /// Number of its CQEs; 0 when no session is open.
    count: u32,
    /// Number of CQEs handed out. While it is a multiple of an array's length, the next array is in the ring.
    next: u32,
    /// WQE counter of the first CQE.
    wqe_counter: u16,
    /// The title and the current array of a session that a poll left before its end: the device may have reused their entries.
    title: [u8; CQE_BYTES],
    array: [[u8; MiniCqe::LEN]; MINI_CQES_PER_ARRAY],
}

/// The entry that stands for the CQEs of an open session: written, as its opcode is valid and its owner bit that of `head`.
static OPEN: [u8; CQE_BYTES] = [0; CQE_BYTES];

/// Number of polls that find something before the device makes progress all the same.
const POLLS_PER_HOOK: u32 = 16;

impl CqRing {
    pub(crate) fn create(control: &Control, config: &CqConfig) -> Result<Self, CreateError> {
        let object = Rc::new(CqObject::new(&control.create_cq(config)?, control));
        let session = Session { count: 0, next: 0, wqe_counter: 0, title: [0; CQE_BYTES], array: [[0; MiniCqe::LEN]; MINI_CQES_PER_ARRAY] };
        let entries = object.entries;
        Ok(Self {
            entries,
            last: entries.place(entries.mask),
            consumer: 0,
            head: entries.first,
            owner: 0,
            record: object.record,
            session,
            polls_without_hook: 0,
            kind: control.kind(),
            hook: control.hook().cloned(),
            object,
        })
    }

    pub(crate) fn entries(&self) -> u32 {
        self.entries.count()
    }

    pub(crate) fn object(&self) -> &Rc<CqObject> {
        &self.object
    }

    /// Starts as if `counter` CQEs had already been written and consumed.
    #[cfg(test)]
    pub(crate) fn start_at(&mut self, counter: u32, null: &crate::provider::null::Null) {
        let CqObject { cqn, record, session_end, .. } = &*self.object;
        null.start_cq_at(*cqn, counter);
        // SAFETY: the record lives as long as `object`.
        unsafe { record.as_ref() }.store(cq_consumer_record(counter), Ordering::Release);
        session_end.set(counter);
        self.consumer = counter;
        self.seek();
    }

    /// Sets `head` and `owner` to the entry of `consumer`, or to the open session.
    #[inline(always)]
    fn seek(&mut self) {
        if self.session.count == 0 {
            self.head = self.entries.place(self.consumer);
            self.owner = self.entries.owner(self.consumer);
        } else {
            self.head = NonNull::from(&OPEN).cast();
            self.owner = OPEN[OP_OWN_OFFSET] & 1;
        }
    }

    /// Returns the number of entries from that of `counter` to the end of the ring.
    #[inline(always)]
    fn to_end(&self, counter: u32) -> u32 {
        self.entries() - (counter & self.entries.mask)
    }

    /// Returns the address in the ring of the array with the open session's mini CQE `entry`.
    #[inline(always)]
    fn array_place(&self, entry: u32) -> NonNull<[u8; MiniCqe::LEN]> {
        self.entries.place(self.consumer.wrapping_add(mini_array_offset(entry))).cast()
    }

    /// Makes the CQE at the consumer, the title of a compressed session, the open session.
    #[inline(always)]
    fn open_session(&mut self, title: &[u8; CQE_BYTES]) {
        let parsed = TitleCqe::parse(title);
        self.session.count = self.entries.session_count(&parsed);
        self.session.next = 0;
        self.session.wqe_counter = parsed.wqe_counter;
        self.object.session_qpn.set(ResponderCqe::parse(title).qpn);
        self.object.session_end.set(self.consumer.wrapping_add(self.session.count));
    }

    /// Hands out up to `max` CQEs of the open session, and closes it after the last.
    #[inline(always)]
    fn take_session<L: Copy>(&mut self, max: usize, find: &impl Fn(u32) -> L, f: &mut impl FnMut(L, Cqe<'_>)) -> usize {
        let Session { count, next: from, wqe_counter, .. } = self.session;
        // A copy: no store below can change it, so that a callback's reads of it are consistent.
        let title: [u8; CQE_BYTES] = if from == 0 {
            // SAFETY: a CQE inside the buffer. Until a CQE of the session is handed out, the driver owns its entry, which is as the device
            // wrote it.
            unsafe { self.entries.place(self.consumer).cast().read() }
        } else {
            self.session.title
        };
        let is_send = CqeOpcode::from_op_own(title[OP_OWN_OFFSET]) == Some(CqeOpcode::Requester);
        // Not the title's QPN: the queue pair may have been destroyed since an earlier poll, or be destroyed in a callback of this one.
        let queue = find(self.object.session_qpn.get());
        let kind = self.kind;
        let taken = (count - from).min(u32::try_from(max).unwrap_or(u32::MAX));
        let end = from + taken;
        let mut leaving = Leaving { ring: self, from, next: from };
        while leaving.next != end {
            let (next, ring) = (leaving.next, &*leaving.ring);
            let in_array = next % MINI_CQES_PER_ARRAY as u32;
            let array = if in_array == 0 { ring.array_place(next) } else { NonNull::from(&ring.session.array).cast() };
            let hand_out = |i: u32| {
                // SAFETY: inside the array. An array in the ring belongs to the driver and is as the device wrote it: the title's owner bit
                // published the whole session, and entries are given back when `leaving` is dropped, or later.
                let mini = MiniCqe::parse(&unsafe { array.add(i as usize).read() });
                let wqe_counter = if is_send { mini.wqe_counter() } else { wqe_counter.wrapping_add(leaving.next as u16) };
                // Before the callback: if it panics, the entry is not handed out again.
                leaving.next += 1;
                let beside = Beside::Mini { byte_count: mini.byte_count, wqe_counter };
                f(queue, Cqe::new(NonNull::from(&title), ring.object.session_qpn.get(), beside, kind));
            };
            let after = (in_array + (end - next)).min(MINI_CQES_PER_ARRAY as u32);
            if in_array == 0 && after == MINI_CQES_PER_ARRAY as u32 {
                // The usual case. The compiler unrolls it if the callback is short.
                (0..MINI_CQES_PER_ARRAY as u32).for_each(hand_out);
            } else {
                (in_array..after).for_each(hand_out);
            }
        }
        taken as usize
    }

    /// Leaves the open session after its CQEs `from..next` were handed out: closes it after its last CQE, or keeps the data that is still
    /// needed. Marks the entries of the handed-out CQEs as untouched.
    #[inline(never)]
    fn leave_session(&mut self, from: u32, next: u32) {
        let start = self.consumer.wrapping_add(from);
        if next == self.session.count {
            self.consumer = self.consumer.wrapping_add(next);
            self.session.count = 0;
            self.session.next = 0;
        } else {
            self.keep_session(from, next);
        }
        self.seek();
        let (entries, to_end) = (next - from, self.to_end(start));
        self.make_untouched(start, entries.min(to_end));
        if entries > to_end {
            rarely();
            self.make_untouched(0, entries - to_end);
        }
    }

    /// Keeps the data of the open session that is still needed when the device gets the entries of its CQEs `from..next` back.
    #[inline(never)]
    fn keep_session(&mut self, from: u32, next: u32) {
        self.session.next = next;
        if from == 0 {
            // SAFETY: as in `take_session`.
            self.session.title = unsafe { self.entries.place(self.consumer).cast().read() };
        }
        // The array may have been kept since an earlier poll.
        if next & !(MINI_CQES_PER_ARRAY as u32 - 1) >= from {
            // SAFETY: a CQE inside the buffer, the driver's and as the device wrote it.
            self.session.array = unsafe { self.array_place(next).cast().read() };
        }
    }

    /// Marks `entries` entries from that of `counter` on as untouched, as the device first found them. They must not cross the end of the
    /// ring.
    ///
    /// The device wrote no owner bit into a session's entries except the title's. The old bytes there, of an array or of a former lap,
    /// could be taken for an owner bit on the next lap.
    #[inline(always)]
    fn make_untouched(&mut self, counter: u32, mut entries: u32) {
        const AT_ONCE: u32 = MINI_CQES_PER_ARRAY as u32;
        let mut op_own = self.entries.place(counter).as_ptr().wrapping_add(OP_OWN_OFFSET);
        while entries >= AT_ONCE && self.entries.stride == CQE_BYTES {
            for i in 0..AT_ONCE as usize {
                // SAFETY: inside the buffer (caller); the entries are the driver's until the consumer record passes them.
                unsafe { op_own.add(i * CQE_BYTES).write(OP_OWN_UNTOUCHED) };
            }
            op_own = op_own.wrapping_add(AT_ONCE as usize * CQE_BYTES);
            entries -= AT_ONCE;
        }
        for _ in 0..entries {
            // SAFETY: as above.
            unsafe { op_own.write(OP_OWN_UNTOUCHED) };
            op_own = op_own.wrapping_add(self.entries.stride);
        }
    }

    /// Returns whether there is a CQE to hand out. This is the whole cost of an empty poll.
    #[inline(always)]
    pub(crate) fn has_any(&self) -> bool {
        is_written(op_own_at(self.head), self.owner)
    }

    /// Gives a soft device time to run if the queue is empty, and returns whether there is a CQE to hand out.
    ///
    /// A soft device makes progress when a queue is found empty (the second of its two hooks). A queue that is never found empty must not
    /// starve the rest of the device.
    #[inline(always)]
    pub(crate) fn progress(&mut self) -> bool {
        if !self.has_any() {
            // The call returns whether there may be new CQEs. Hardware makes progress by itself.
            return self.hook.as_ref().is_some_and(|device| device.empty_poll()) && self.has_any();
        }
        self.polls_without_hook += 1;
        if self.polls_without_hook == POLLS_PER_HOOK {
            self.polls_without_hook = 0;
            if let Some(device) = &self.hook {
                device.empty_poll();
            }
        }
        true
    }

    /// Returns the bytes of the entry at `place`, and the rest of its CQE.
    ///
    /// # Safety
    /// The entry is written: the owner bit, read with Acquire, says that the device has finished it. The device will not write it again
    /// before the consumer record passes it, which happens after the borrow ends.
    #[inline(always)]
    unsafe fn parts<'a>(&self, place: NonNull<u8>, stride: usize) -> (NonNull<[u8; CQE_BYTES]>, Beside<'a>) {
        udma_from_device_barrier();
        let is_large = stride != CQE_BYTES;
        // SAFETY: guaranteed by the caller. The other half of a large entry lies before it.
        let beside = if is_large { Beside::Half(unsafe { place.sub(CQE128_OFFSET).cast().as_ref() }) } else { Beside::Nothing };
        (place.cast(), beside)
    }

    /// Returns the place and the owner bit of the entry after that at `place`. No session is open.
    #[inline(always)]
    fn after(&self, place: NonNull<u8>, owner: u8, CqEntries { first, stride, .. }: &CqEntries, last: NonNull<u8>) -> (NonNull<u8>, u8) {
        let (next, owner) = if place == last {
            rarely();
            // `session_end` must not seem to be ahead when the 24 bits of the record have wrapped.
            self.object.session_end.set(self.consumer.wrapping_add(1));
            (*first, owner ^ 1)
        } else {
            // SAFETY: this is not the last entry.
            (unsafe { place.add(*stride) }, owner)
        };
        prefetch(next.addr().get());
        (next, owner)
    }

    /// Hands out up to `max` plain CQEs and counts them in `n`. Stops at the title of a compressed session, and returns it.
    #[inline(always)]
    fn take_plain<'a, L: Copy>(
        &mut self,
        max: usize,
        n: &mut usize,
        find: &impl Fn(u32) -> L,
        f: &mut impl FnMut(L, Cqe<'_>),
    ) -> Option<&'a [u8; CQE_BYTES]> {
        let (entries, last) = (self.entries, self.last);
        let (mut place, mut owner) = (self.head, self.owner);
        while *n < max {
            let op_own = op_own_at(place);
            if !is_written(op_own, owner) {
                break;
            }
            // SAFETY: it is written.
            let (bytes, beside) = unsafe { self.parts(place, entries.stride) };
            if CqeFormat::from_op_own(op_own) == CqeFormat::Compressed {
                // `leave_session` looks for the next entry at the end of the session.
                // SAFETY: as above. No queue pair is destroyed before it is read.
                return Some(unsafe { bytes.as_ref() });
            }
            // SAFETY: as above.
            let qpn = ResponderCqe::parse(unsafe { bytes.as_ref() }).qpn;
            let cqe = Cqe::new(bytes, qpn, beside, self.kind);
            (place, owner) = self.after(place, owner, &entries, last);
            // Before the callback: if it panics, the entry is not handed out again.
            self.consumer = self.consumer.wrapping_add(1);
            f(find(qpn), cqe);
            *n += 1;
        }
        (self.head, self.owner) = (place, owner);
        None
    }

    /// Tells the device which entries it may reuse.
    #[inline(always)]
    fn tell_consumed(&self) {
        // Release: the device may overwrite the entries once it sees this.
        // SAFETY: the record lives as long as `object`.
        unsafe { self.record.as_ref() }.store(cq_consumer_record(self.handed_out()), Ordering::Release);
    }

    /// Returns the number of CQEs handed out.
    #[inline(always)]
    fn handed_out(&self) -> u32 {
        self.consumer.wrapping_add(self.session.next)
    }

    /// Hands out up to `max` CQEs, each with the result of `find` for its QPN. `find` is called once for the CQEs of a session, which have
    /// one QPN.
    #[inline(always)]
    fn take<L: Copy>(&mut self, max: usize, find: &impl Fn(u32) -> L, f: &mut impl FnMut(L, Cqe<'_>)) -> usize {
        let mut n = 0;
        let before = self.handed_out();
        let mut taking = Taking { ring: self, before, is_unwinding: true };
        loop {
            if taking.ring.session.count != 0 {
                n += taking.ring.take_session(max - n, find, f);
            }
            match taking.ring.take_plain(max, &mut n, find, f) {
                Some(title) => taking.ring.open_session(title),
                None => {
                    taking.is_unwinding = false;
                    return n;
                }
            }
        }
    }

    /// Like [`take`](Self::take), for a queue that [has any](Self::has_any): costs the least if that is one CQE, and plain.
    #[inline(always)]
    pub(crate) fn take_known<L: Copy>(&mut self, max: usize, find: &impl Fn(u32) -> L, f: &mut impl FnMut(L, Cqe<'_>)) -> usize {
        let place = self.head;
        let op_own = op_own_at(place);
        if self.session.count != 0 || CqeFormat::from_op_own(op_own) == CqeFormat::Compressed || max == 0 {
            return self.take_more(max, find, f);
        }
        // SAFETY: it is written, and no session is open.
        let (bytes, beside) = unsafe { self.parts(place, self.entries.stride) };
        // SAFETY: as above.
        let qpn = ResponderCqe::parse(unsafe { bytes.as_ref() }).qpn;
        let cqe = Cqe::new(bytes, qpn, beside, self.kind);
        (self.head, self.owner) = self.after(place, self.owner, &self.entries, self.last);
        // Before the callback: if it panics, the entry is not handed out again.
        self.consumer = self.consumer.wrapping_add(1);
        let consumed = Consumed(self);
        f(find(qpn), cqe);
        let ring = &mut *consumed.0;
        if max > 1 && ring.has_any() {
            return 1 + ring.take_more(max - 1, find, f);
        }
        1
    }

    #[inline(never)]
    fn take_more<L: Copy>(&mut self, max: usize, find: &impl Fn(u32) -> L, f: &mut impl FnMut(L, Cqe<'_>)) -> usize {
        self.take(max, find, f)
    }

    /// Asks for an event at the first CQE that is not consumed, even if it is already in the queue. A device gives no second event for a
    /// CQE, so the driver checks for such CQEs itself.
    pub(crate) fn arm(&mut self, solicited_only: bool) {
        let consumed = self.consumer.wrapping_add(self.session.next);
        // SAFETY: the arm word follows the consumer word, in the same record, which lives as long as `object`.
        let word = unsafe { self.record.add(CQ_DBREC_ARM).as_ref() };
        let CqObject { cqn, control, .. } = &*self.object;
        let command = CqArm { sequence: control.events_taken(*cqn), solicited_only, consumed };
        word.store(command.record(), Ordering::Release);
        control.armed(*cqn, &command);
        // After the command: every later CQE gives an event.
        if !matches!(self.hook, Some(Hook::Soft(_))) && self.holds(solicited_only) {
            control.holds_what_was_armed_for();
        }
    }

    /// Returns whether there is a CQE that is not consumed; with `solicited_only`, one that is solicited or an error, or a compressed
    /// session, which may contain such CQEs.
    fn holds(&self, solicited_only: bool) -> bool {
        if !solicited_only || self.session.count != 0 {
            return self.has_any();
        }
        for ahead in 0..self.entries.count() {
            let counter = self.consumer.wrapping_add(ahead);
            let place = self.entries.place(counter);
            // SAFETY: inside the buffer; the device writes this byte last, and only whole.
            let op_own = unsafe { place.add(OP_OWN_OFFSET).cast::<AtomicU8>().as_ref() }.load(Ordering::Acquire);
            if !is_written(op_own, self.entries.owner(counter)) {
                return false;
            }
            let is_error = matches!(CqeOpcode::from_op_own(op_own), Some(CqeOpcode::RequesterError | CqeOpcode::ResponderError));
            if is_error || is_solicited(op_own) || CqeFormat::from_op_own(op_own) == CqeFormat::Compressed {
                return true;
            }
        }
        false
    }

    /// Gives a soft device time to run if the queue is empty, then hands out CQEs as [`take`](Self::take) does.
    #[inline(always)]
    pub(crate) fn poll<L: Copy>(&mut self, max: usize, find: impl Fn(u32) -> L, mut f: impl FnMut(L, Cqe<'_>)) -> usize {
        if self.progress() { self.take(max, &find, &mut f) } else { 0 }
    }
}

/// A guard while CQEs are being handed out. When it is dropped, also by a panic of the callback, the device learns which entries it may
/// reuse.
struct Taking<'a> {
    ring: &'a mut CqRing,
    /// Number of CQEs handed out when the guard was made.
    before: u32,
    /// Whether a panicking callback drops the guard.
    is_unwinding: bool,
}

impl Drop for Taking<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.ring.handed_out() != self.before {
            if self.is_unwinding {
                self.ring.seek();
            }
            self.ring.tell_consumed();
        }
    }
}

/// A guard after a CQE was consumed. When it is dropped, also by a panic of the callback, the device learns of it.
struct Consumed<'a>(&'a mut CqRing);

impl Drop for Consumed<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.tell_consumed();
    }
}

/// A guard while CQEs of the open session are being handed out. When it is dropped, also by a panic of the callback, the session is left.
struct Leaving<'a> {
    ring: &'a mut CqRing,
    /// Number of the session's CQEs that had been handed out when the guard was made, and that are handed out now.
    from: u32,
    next: u32,
}

impl Drop for Leaving<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.ring.leave_session(self.from, self.next);
    }
}

/// Returns the `op_own` byte of the entry at `place`, in the buffer or [`OPEN`].
#[inline(always)]
fn op_own_at(place: NonNull<u8>) -> u8 {
    // SAFETY: inside the buffer, where the device writes this byte last, and only whole; or in `OPEN`, which nothing writes.
    unsafe { place.add(OP_OWN_OFFSET).cast::<AtomicU8>().as_ref() }.load(Ordering::Acquire)
}

/// Marks its caller's branch as the unlikely one.
#[cold]
fn rarely() {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::null;
    use crate::wire::{ResponderCqe, op_own};

    /// Makes a ring whose device has not written anything; its op_own bytes are `op_own`.
    fn untouched(config: CqConfig, op_own: u8) -> CqRing {
        let ring = CqRing::create(&null().1, &config).unwrap();
        for i in 0..ring.entries() {
            // SAFETY: inside the buffer, and nobody writes it.
            unsafe { ring.entries.place(i).add(OP_OWN_OFFSET).write(op_own) };
        }
        ring
    }

    #[test]
    fn untouched_entries_are_no_completions_on_either_lap_however_a_device_marks_them() {
        for cqe_bytes in [64, 128] {
            // libmlx5 and DPDK fill 0xf0, the kernel's Ethernet driver and this crate's device 0xf1.
            for mark in [0xf0, 0xf1] {
                let config = CqConfig { cqe_bytes, compression: true, ..CqConfig::from(4) };
                let mut ring = untouched(config, mark);
                for lap in [0u8, 1, 2] {
                    assert_eq!(ring.poll(9, |_| (), |(), _| {}), 0, "{mark:#x}, lap {lap}");
                    for i in 0..4 {
                        let cqe = ResponderCqe { wqe_counter: i, ..Default::default() }.emit();
                        // SAFETY: as above.
                        unsafe { ring.entries.place(i.into()).cast().write(cqe) };
                        // SAFETY: as above.
                        unsafe { ring.entries.place(i.into()).add(OP_OWN_OFFSET).write(op_own(CqeOpcode::ResponderSend, lap & 1 != 0)) };
                        assert_eq!(ring.poll(9, |_| (), |(), cqe| assert_eq!(cqe.wqe_counter(), i)), 1);
                        // SAFETY: as above. A device never does this; the ring's next lap begins untouched again.
                        unsafe { ring.entries.place(i.into()).add(OP_OWN_OFFSET).write(mark) };
                    }
                }
            }
        }
    }

    #[test]
    fn a_title_with_an_impossible_count_makes_the_driver_read_no_more_than_the_ring() {
        for (count, taken) in [(0u32, 1), (u32::MAX, 4)] {
            let mut ring = untouched(CqConfig { compression: true, ..CqConfig::from(4) }, OP_OWN_UNTOUCHED);
            let mut title = ResponderCqe::default().emit();
            TitleCqe { count, wqe_counter: 0 }.emit_into(&mut title);
            title[OP_OWN_OFFSET] = (CqeFormat::Compressed as u8) << 2;
            // SAFETY: inside the buffer.
            unsafe { ring.entries.place(0).cast().write(title) };
            assert_eq!(ring.poll(9, |_| (), |(), _| {}), taken);
            assert_eq!(ring.poll(9, |_| (), |(), _| {}), 0);
        }
    }
}
