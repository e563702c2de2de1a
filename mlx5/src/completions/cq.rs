//! The completion queue, [`Cq`]. Plain CQEs are read in place. The CQEs of a compressed session,
//! which consists of a title CQE and mini CQEs, are decoded one at a time.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};
use std::fmt;
use std::rc::Rc;

use copyrpc_shm::cache::prefetch;

use crate::address::DeviceKind;
use crate::completions::cq_object::{CqEntries, CqObject, is_written, op_own_at};
use crate::completions::cqe::{Beside, Cqe};
use crate::config::CqConfig;
use crate::control::{Control, Hook};
use crate::error::CreateError;
use crate::mmio::udma_from_device_barrier;
use crate::wire::{
    CQ_DBREC_ARM, CQE_BYTES, CQE128_OFFSET, CqArm, CqeFormat, CqeOpcode, MINI_CQES_PER_ARRAY,
    MiniCqe, NO_QPN, OP_OWN_OFFSET, OP_OWN_UNTOUCHED, ResponderCqe, TitleCqe, cq_consumer_record,
    is_solicited, mini_array_offset,
};

/// A completion queue for any mix of send and receive queues. Completions of one queue pair's sends
/// arrive in posting order. Completions of different queue pairs arrive in any order, and so do
/// completions of sends relative to completions of receives.
///
/// It is not `Send`:
/// ```compile_fail,E0277
/// fn send<T: Send>() {}
/// send::<mlx5::Cq>();
/// ```
pub struct Cq {
    entries: CqEntries,
    last: NonNull<u8>,
    /// Number of CQEs consumed.
    consumer: u32,
    /// Address of the CQE at `consumer` (`head`), and the owner bit of its lap (`owner`). While
    /// callbacks run, both may belong to an earlier entry.
    head: NonNull<u8>,
    owner: u8,
    record: NonNull<AtomicU32>,
    polls_without_hook: u32,
    kind: DeviceKind,
    hook: Hook,
    object: Rc<CqObject>,
}

/// A poll that finds the queue empty lets the device run. A busy queue may never be found empty, so
/// every 16th poll that finds a completion lets the device run too.
const POLLS_PER_HOOK: u32 = 16;

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq")
            .field("entries", &self.entries())
            .finish_non_exhaustive()
    }
}

impl Cq {
    pub(crate) fn create(control: &Control, config: &CqConfig) -> Result<Self, CreateError> {
        let object = CqObject::create(control, config)?;
        let entries = object.entries;
        Ok(Self {
            entries,
            last: entries.place(entries.mask),
            consumer: 0,
            head: entries.first,
            owner: 0,
            record: object.record,
            polls_without_hook: 0,
            kind: control.kind(),
            hook: control.hook().clone(),
            object,
        })
    }

    /// Returns the number of entries that the device created, a power of two.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.entries.count()
    }

    pub(crate) fn object(&self) -> &Rc<CqObject> {
        &self.object
    }

    /// Returns the completion queue number, 24 bits.
    #[must_use]
    pub fn cqn(&self) -> u32 {
        self.object.cqn
    }

    /// Starts as if `counter` CQEs had already been written and consumed.
    #[cfg(test)]
    pub(crate) fn start_at(&mut self, counter: u32, null: &crate::NullDevice) {
        null.with_cq(self.cqn(), |cq| cq.start_at(counter));
        self.consumer = counter;
        self.publish_consumer();
        self.seek();
    }

    #[inline(always)]
    fn seek(&mut self) {
        self.head = self.entries.place(self.consumer);
        self.owner = self.entries.owner(self.consumer);
    }

    /// Returns the address of the array that holds mini CQE `entry` of the session at the consumer.
    #[inline(always)]
    fn array_place(&self, entry: u32) -> NonNull<[u8; CQE_BYTES]> {
        self.entries
            .place(self.consumer.wrapping_add(mini_array_offset(entry)))
            .cast()
    }

    /// Hands out all CQEs of the compressed session at the consumer. If they are more than `max`,
    /// hands out none, and expands the session to plain CQEs.
    #[inline(always)]
    fn take_session<L: Copy>(
        &mut self,
        max: usize,
        find: &impl Fn(u32) -> L,
        f: &mut impl FnMut(L, Cqe<'_>),
    ) -> usize {
        udma_from_device_barrier();
        // The title is a copy: no store below can change it, so a callback's reads of it are
        // consistent. SAFETY: the place is a CQE inside the buffer. Until a CQE of the session is
        // handed out, the driver owns the title's entry, unchanged since the device wrote it.
        let title: [u8; CQE_BYTES] = unsafe { self.entries.place(self.consumer).cast().read() };
        let parsed = TitleCqe::parse(&title);
        let count = self.entries.session_count(&parsed);
        if count as usize > max {
            self.expand(0, count);
            self.seek();
            return 0;
        }
        let qpn = ResponderCqe::parse(&title).qpn;
        self.object.session_qpn.set(qpn);
        let (queue, kind) = (find(qpn), self.kind);
        let is_send = CqeOpcode::from_op_own(title[OP_OWN_OFFSET]) == Some(CqeOpcode::Requester);
        let mut leaving = Leaving {
            cq: self,
            count,
            next: 0,
        };
        while leaving.next != count {
            let (next, cq) = (leaving.next, &*leaving.cq);
            let array: NonNull<[u8; MiniCqe::LEN]> = cq.array_place(next).cast();
            let hand_out = |i: u32| {
                // SAFETY: the mini CQE is inside the array, which belongs to the driver and has the
                // bytes that the device wrote: the title's owner bit published the whole session,
                // and the entries are returned to the device only when `leaving` is dropped.
                let mini = MiniCqe::parse(&unsafe { array.add(i as usize).read() });
                let wqe_counter = if is_send {
                    mini.wqe_counter()
                } else {
                    parsed.wqe_counter.wrapping_add(leaving.next as u16)
                };
                // The increment is before the callback, so that the entry is not handed out again
                // if the callback panics.
                leaving.next += 1;
                let beside = Beside::Mini {
                    byte_count: mini.byte_count,
                    wqe_counter,
                };
                // The QPN is `session_qpn` and not the title's: it becomes `NO_QPN` if a callback
                // destroys the queue pair.
                f(
                    queue,
                    Cqe::new(
                        NonNull::from(&title),
                        cq.object.session_qpn.get(),
                        beside,
                        kind,
                    ),
                );
            };
            if count - next >= MINI_CQES_PER_ARRAY as u32 {
                // A full array is the usual case. Its constant length lets the compiler unroll the
                // loop if the callback is short.
                (0..MINI_CQES_PER_ARRAY as u32).for_each(hand_out);
            } else {
                (0..count - next).for_each(hand_out);
            }
        }
        count as usize
    }

    /// Writes the CQEs `from..count` of the session at the consumer to their entries, as plain
    /// CQEs.
    #[cold]
    #[inline(never)]
    fn expand(&mut self, from: u32, count: u32) {
        // SAFETY: the place is a CQE inside the buffer. The driver owns the CQE, and only the QPN
        // of a destroyed queue pair has changed since the device wrote it.
        let title: [u8; CQE_BYTES] = unsafe { self.entries.place(self.consumer).cast().read() };
        let is_send = CqeOpcode::from_op_own(title[OP_OWN_OFFSET]) == Some(CqeOpcode::Requester);
        let first = TitleCqe::parse(&title).wqe_counter;
        let mut array = [0; CQE_BYTES];
        for entry in from..count {
            if entry == from || entry as usize % MINI_CQES_PER_ARRAY == 0 {
                // SAFETY: the array is inside the buffer, and the driver owns it like the title. It
                // lies in the entry of the first CQE that it describes or in the next entry, so no
                // CQE was written over it.
                array = unsafe { self.array_place(entry).read() };
            }
            let (mini, mut cqe) = (MiniCqe::of_array(&array, entry), title);
            if is_send {
                mini.expand_send(&mut cqe);
            } else {
                mini.expand_receive(&mut cqe, first.wrapping_add(entry as u16));
            }
            let counter = self.consumer.wrapping_add(entry);
            // The byte gets the format of a plain CQE, and the owner bit of the lap.
            cqe[OP_OWN_OFFSET] = cqe[OP_OWN_OFFSET] & !0b1101 | self.entries.owner(counter);
            // SAFETY: the place is an entry of the session, inside the buffer, and the driver owns
            // it.
            unsafe { self.entries.place(counter).cast().write(cqe) };
        }
    }

    /// Ends the session at the consumer after `count` of its CQEs were handed out. These CQEs must
    /// not be read again.
    ///
    /// The device wrote no owner bit into a session's entries except the title's. The old bytes
    /// there, of an array or of a former lap, could be taken for an owner bit on the next lap. So
    /// the entries become untouched, as the device first found them.
    #[inline(never)]
    fn end_session(&mut self, count: u32) {
        let start = self.consumer;
        self.consumer = start.wrapping_add(count);
        let to_end = self.entries() - (start & self.entries.mask);
        self.make_untouched(start, count.min(to_end));
        if count > to_end {
            rarely();
            self.make_untouched(0, count - to_end);
        }
        self.object.session_qpn.set(NO_QPN);
        self.seek();
        // The record is published now: `disown` searches from the consumer in the record, and would
        // stop at an untouched entry.
        self.publish_consumer();
    }

    /// Marks `entries` entries as untouched, beginning with the entry of `counter`. They must not
    /// cross the end of the ring.
    #[inline(always)]
    fn make_untouched(&mut self, counter: u32, mut entries: u32) {
        const AT_ONCE: u32 = MINI_CQES_PER_ARRAY as u32;
        let mut op_own = self
            .entries
            .place(counter)
            .as_ptr()
            .wrapping_add(OP_OWN_OFFSET);
        while entries >= AT_ONCE && self.entries.stride == CQE_BYTES {
            for i in 0..AT_ONCE as usize {
                // SAFETY: the byte is inside the buffer (guaranteed by the caller); the driver owns
                // the entry until the consumer record passes it.
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

    /// Returns whether a poll would hand out a completion now. On hardware this check is the whole
    /// cost of an empty poll. Unlike an empty poll, this call gives a software device no time to
    /// run, so a loop must also poll some queue of the device.
    #[must_use]
    #[inline(always)]
    pub fn has_completion(&self) -> bool {
        is_written(op_own_at(self.head), self.owner)
    }

    /// Gives a software device time to run if the queue is empty, and returns whether there is a
    /// completion: the first half of a [`poll`](Self::poll).
    #[must_use]
    #[inline(always)]
    pub fn progress(&mut self) -> bool {
        if !self.has_completion() {
            return self.hook.empty_poll() && self.has_completion();
        }
        // A queue that is never found empty must not keep the device from its other work.
        self.polls_without_hook += 1;
        if self.polls_without_hook == POLLS_PER_HOOK {
            self.polls_without_hook = 0;
            self.hook.empty_poll();
        }
        true
    }

    /// Returns the CQE at `place`, of a plain entry of `stride` bytes.
    ///
    /// # Safety
    /// The entry is complete: the owner bit, read with Acquire, shows that the device has finished
    /// it. Until `'a` ends, the caller must not publish a consumer record that passes the entry, so
    /// the device does not write it again.
    #[inline(always)]
    unsafe fn plain<'a>(&self, place: NonNull<u8>, stride: usize) -> Cqe<'a> {
        udma_from_device_barrier();
        let beside = if stride != CQE_BYTES {
            // SAFETY: the caller guarantees that the entry is complete. The other half of a large
            // entry lies before its CQE.
            Beside::Half(unsafe { place.sub(CQE128_OFFSET).cast().as_ref() })
        } else {
            Beside::Nothing
        };
        let bytes: NonNull<[u8; CQE_BYTES]> = place.cast();
        // SAFETY: guaranteed by the caller.
        let qpn = ResponderCqe::parse(unsafe { bytes.as_ref() }).qpn;
        Cqe::new(bytes, qpn, beside, self.kind)
    }

    /// Returns the place and the owner bit of the entry that follows the entry at `place`, whose
    /// owner bit is `owner`.
    #[inline(always)]
    fn after(
        &self,
        place: NonNull<u8>,
        owner: u8,
        CqEntries { first, stride, .. }: &CqEntries,
        last: NonNull<u8>,
    ) -> (NonNull<u8>, u8) {
        let (next, owner) = if place == last {
            rarely();
            (*first, owner ^ 1)
        } else {
            // SAFETY: `place` is not in the last entry, so the next entry is inside the buffer.
            (unsafe { place.add(*stride) }, owner)
        };
        prefetch(next.addr().get());
        (next, owner)
    }

    /// Hands out up to `max` plain CQEs and counts them in `n`. Returns whether it stopped because
    /// the next CQE is the title of a compressed session.
    #[inline(always)]
    fn take_plain<L: Copy>(
        &mut self,
        max: usize,
        n: &mut usize,
        find: &impl Fn(u32) -> L,
        f: &mut impl FnMut(L, Cqe<'_>),
    ) -> bool {
        let (entries, last) = (self.entries, self.last);
        let (mut place, mut owner) = (self.head, self.owner);
        while *n < max {
            let op_own = op_own_at(place);
            if !is_written(op_own, owner) {
                break;
            }
            if CqeFormat::from_op_own(op_own) == CqeFormat::Compressed {
                return true;
            }
            // SAFETY: the owner bit shows that the device has finished the entry. The device does
            // not write it again before the consumer record is published, after the callback.
            let cqe = unsafe { self.plain(place, entries.stride) };
            (place, owner) = self.after(place, owner, &entries, last);
            // The consumer advances first, so no panic of the callback hands out the entry twice.
            self.consumer = self.consumer.wrapping_add(1);
            f(find(cqe.qpn()), cqe);
            *n += 1;
        }
        (self.head, self.owner) = (place, owner);
        false
    }

    #[inline(always)]
    fn publish_consumer(&self) {
        // Release: the device may overwrite the entries once it sees this.
        // SAFETY: the record lives as long as `object`.
        unsafe { self.record.as_ref() }.store(cq_consumer_record(self.consumer), Ordering::Release);
    }

    /// Hands out up to `max` CQEs, each with the result of `find` for its QPN. `find` is called
    /// once for the CQEs of a session, which have one QPN.
    #[inline(always)]
    fn take<L: Copy>(
        &mut self,
        max: usize,
        find: &impl Fn(u32) -> L,
        f: &mut impl FnMut(L, Cqe<'_>),
    ) -> usize {
        let mut taking = Taking {
            before: self.consumer,
            cq: self,
            is_unwinding: true,
        };
        let mut n = 0;
        while taking.cq.take_plain(max, &mut n, find, f) {
            n += taking.cq.take_session(max - n, find, f);
        }
        taking.is_unwinding = false;
        n
    }

    /// Like [`take`](Self::take), but the caller has found that the queue [has a
    /// completion](Self::has_completion). This is the cheapest way to take a single plain CQE.
    #[inline(always)]
    pub(crate) fn take_known<L: Copy>(
        &mut self,
        max: usize,
        find: &impl Fn(u32) -> L,
        f: &mut impl FnMut(L, Cqe<'_>),
    ) -> usize {
        let place = self.head;
        let op_own = op_own_at(place);
        if CqeFormat::from_op_own(op_own) == CqeFormat::Compressed || max == 0 {
            return self.take_more(max, find, f);
        }
        // SAFETY: the caller has found the entry complete (`has_completion`). The device does not
        // write it again before the consumer record is published, after the callback.
        let cqe = unsafe { self.plain(place, self.entries.stride) };
        (self.head, self.owner) = self.after(place, self.owner, &self.entries, self.last);
        // The consumer advances first, as in `take_plain`.
        self.consumer = self.consumer.wrapping_add(1);
        let consumed = Consumed(self);
        f(find(cqe.qpn()), cqe);
        let cq = &mut *consumed.0;
        if max > 1 && cq.has_completion() {
            return 1 + cq.take_more(max - 1, find, f);
        }
        1
    }

    #[inline(never)]
    fn take_more<L: Copy>(
        &mut self,
        max: usize,
        find: &impl Fn(u32) -> L,
        f: &mut impl FnMut(L, Cqe<'_>),
    ) -> usize {
        self.take(max, find, f)
    }

    /// Arms the queue: [`Device::wait`](crate::Device::wait) returns once the queue holds a
    /// completion that was not polled; with `solicited_only`, once it holds a solicited completion
    /// or an error. To sleep without losing a completion, poll until the queue is empty, arm, then
    /// wait; a completion that arrives in between ends the wait at once.
    pub fn arm(&mut self, solicited_only: bool) {
        // SAFETY: the arm word follows the consumer word, in the same record, which lives as long
        // as `object`.
        let word = unsafe { self.record.add(CQ_DBREC_ARM).as_ref() };
        let CqObject { cqn, control, .. } = &*self.object;
        let command = CqArm {
            sequence: control.events_taken(*cqn),
            solicited_only,
            consumed: self.consumer,
        };
        word.store(command.record(), Ordering::Release);
        let holds = |solicited_only| self.holds(solicited_only);
        control.queues().armed(*cqn, &command, &holds);
    }

    /// Returns whether there is a CQE that is not consumed; with `solicited_only`, a CQE that is
    /// solicited or an error, or a compressed session, which may contain such CQEs.
    fn holds(&self, solicited_only: bool) -> bool {
        if !solicited_only {
            return self.has_completion();
        }
        for ahead in 0..self.entries.count() {
            let counter = self.consumer.wrapping_add(ahead);
            let place = self.entries.place(counter);
            let op_own = op_own_at(place);
            if !is_written(op_own, self.entries.owner(counter)) {
                return false;
            }
            let is_error = matches!(
                CqeOpcode::from_op_own(op_own),
                Some(CqeOpcode::RequesterError | CqeOpcode::ResponderError)
            );
            if is_error
                || is_solicited(op_own)
                || CqeFormat::from_op_own(op_own) == CqeFormat::Compressed
            {
                return true;
            }
        }
        false
    }

    /// Hands up to `max` completions to `f` in the order in which the device wrote them, and
    /// returns their number. Their entries become free only when this call returns, so operations
    /// that `f` posts need further entries for their completions.
    #[inline(always)]
    pub fn poll(&mut self, max: usize, mut f: impl FnMut(Cqe<'_>)) -> usize {
        self.poll_each(max, |_| (), |(), cqe| f(cqe))
    }

    /// Gives a soft device time to run if the queue is empty, then hands out CQEs as
    /// [`take`](Self::take) does.
    #[inline(always)]
    pub(crate) fn poll_each<L: Copy>(
        &mut self,
        max: usize,
        find: impl Fn(u32) -> L,
        mut f: impl FnMut(L, Cqe<'_>),
    ) -> usize {
        if self.progress() {
            self.take(max, &find, &mut f)
        } else {
            0
        }
    }
}

/// A guard while CQEs are being handed out. When it is dropped, even by a panic of the callback,
/// the consumer record shows the device which entries it may reuse.
struct Taking<'a> {
    cq: &'a mut Cq,
    before: u32,
    is_unwinding: bool,
}

impl Drop for Taking<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.cq.consumer != self.before {
            if self.is_unwinding {
                self.cq.seek();
            }
            self.cq.publish_consumer();
        }
    }
}

/// A guard after a CQE was consumed. When it is dropped, even by a panic of the callback, the
/// consumer record shows the device that it may reuse the entry.
struct Consumed<'a>(&'a mut Cq);

impl Drop for Consumed<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.publish_consumer();
    }
}

/// A guard while CQEs of a session are being handed out. When it is dropped, the session ends; the
/// CQEs that were not handed out because a callback panicked become plain.
struct Leaving<'a> {
    cq: &'a mut Cq,
    /// Number of the session's CQEs (`count`), and of the CQEs that were handed out (`next`).
    count: u32,
    next: u32,
}

impl Drop for Leaving<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.next != self.count {
            self.cq.expand(self.next, self.count);
        }
        self.cq.end_session(self.next);
    }
}

/// Marks a branch that calls this function as unlikely, for the compiler.
#[cold]
fn rarely() {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::null;
    use crate::wire::{ResponderCqe, op_own};

    fn untouched(config: CqConfig, op_own: u8) -> Cq {
        let ring = Cq::create(&null().1, &config).unwrap();
        for i in 0..ring.entries() {
            // SAFETY: the byte is inside the buffer, and no device writes it.
            unsafe { ring.entries.place(i).add(OP_OWN_OFFSET).write(op_own) };
        }
        ring
    }

    #[test]
    fn untouched_entries_are_no_completions_on_either_lap_however_a_device_marks_them() {
        for cqe_bytes in [64, 128] {
            // libmlx5 and DPDK fill untouched entries with 0xf0, the kernel's Ethernet driver and
            // this crate's device with 0xf1.
            for mark in [0xf0, 0xf1] {
                let config = CqConfig {
                    cqe_bytes,
                    compression: true,
                    ..CqConfig::from(4)
                };
                let mut ring = untouched(config, mark);
                for lap in [0u8, 1, 2] {
                    assert_eq!(ring.poll(9, |_| {}), 0, "{mark:#x}, lap {lap}");
                    for i in 0..4 {
                        let cqe = ResponderCqe {
                            wqe_counter: i,
                            ..Default::default()
                        }
                        .emit();
                        // SAFETY: as above.
                        unsafe { ring.entries.place(i.into()).cast().write(cqe) };
                        // SAFETY: as above.
                        unsafe {
                            ring.entries
                                .place(i.into())
                                .add(OP_OWN_OFFSET)
                                .write(op_own(CqeOpcode::ResponderSend, lap & 1 != 0))
                        };
                        assert_eq!(ring.poll(9, |cqe| assert_eq!(cqe.wqe_counter(), i)), 1);
                        // SAFETY: as above. The test marks the entry as untouched for the next lap,
                        // which a device never does.
                        unsafe { ring.entries.place(i.into()).add(OP_OWN_OFFSET).write(mark) };
                    }
                }
            }
        }
    }

    #[test]
    fn a_title_with_an_impossible_count_makes_the_driver_read_no_more_than_the_ring() {
        for (count, taken) in [(0u32, 1), (u32::MAX, 4)] {
            let mut ring = untouched(
                CqConfig {
                    compression: true,
                    ..CqConfig::from(4)
                },
                OP_OWN_UNTOUCHED,
            );
            let mut title = ResponderCqe::default().emit();
            TitleCqe {
                count,
                wqe_counter: 0,
            }
            .emit_into(&mut title);
            title[OP_OWN_OFFSET] = (CqeFormat::Compressed as u8) << 2;
            // SAFETY: the entry is inside the buffer, and no device writes it.
            unsafe { ring.entries.place(0).cast().write(title) };
            assert_eq!(ring.poll(9, |_| {}), taken);
            assert_eq!(ring.poll(9, |_| {}), 0);
        }
    }
}
