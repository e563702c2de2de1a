//! Arbitrary bytes in the receive ring, the immediate and the record, on two real links with calls
//! outstanding and requests held. Each link gets the batches of the other link, some of them
//! changed. Then both links continue, whatever state each assumes of the other.
//!
//! Checked: nothing panics and nothing outside of the rings is accessed (each ring is one page
//! between two inaccessible pages); a link keeps S1 and R1 whatever it receives; it closes for a
//! protocol error or a regular close; each call ends exactly once, with its data.
//!
//! `COPYRPC_TEST_SCALE=n` runs n times as many seeds, from seed `COPYRPC_TEST_FIRST_SEED` on;
//! `COPYRPC_TEST_SEED=s` runs one seed.

use std::collections::{HashSet, VecDeque};
use std::ptr::NonNull;

use crate::error::CloseReason;
use crate::link::{CallKey, Emit, Event, Link, LinkConfig, Request, Window};
use crate::ring::{RingSize, RingView};
use crate::wire::{CallId, FLOW_METADATA_SIZE, FlowWords, Header, PublishedRecord};

use super::sim::OnFailure;
use super::{env_number, say, scale};

/// A page, so that guard pages lie at both of its ends.
const C: u64 = 4096;
const PAGE: usize = C as usize;

/// A ring between two pages that cannot be read or written.
struct GuardedRing(NonNull<u8>);

impl GuardedRing {
    fn new() -> Self {
        let (flags, none) = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, libc::PROT_NONE);
        // SAFETY: a new mapping where nothing is; its middle page is made accessible.
        let base = unsafe {
            let base = libc::mmap(std::ptr::null_mut(), 3 * PAGE, none, flags, -1, 0);
            assert_ne!(base, libc::MAP_FAILED);
            let ring = base.cast::<u8>().add(PAGE);
            assert_eq!(
                libc::mprotect(ring.cast(), PAGE, libc::PROT_READ | libc::PROT_WRITE),
                0
            );
            ring
        };
        Self(NonNull::new(base).unwrap())
    }

    fn view(&self) -> RingView {
        // SAFETY: one page, mapped until `self` is dropped, which is after the links (field order
        // of `Pair`); reached by copy only.
        unsafe { RingView::new(self.0, RingSize::new(C).unwrap()) }
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) {
        assert!(offset as usize + bytes.len() <= PAGE);
        // SAFETY: the range was checked; `bytes` is other memory.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.0.as_ptr().add(offset as usize),
                bytes.as_mut_ptr(),
                bytes.len(),
            )
        }
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        assert!(offset as usize + bytes.len() <= PAGE);
        // SAFETY: the range was checked; `bytes` is other memory.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                self.0.as_ptr().add(offset as usize),
                bytes.len(),
            )
        }
    }
}

impl Drop for GuardedRing {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, given back once.
        unsafe { libc::munmap(self.0.as_ptr().sub(PAGE).cast(), 3 * PAGE) };
    }
}

/// The rings of a run, mapped once; every pair of links starts with the bytes that the last pair
/// wrote there.
struct Rings {
    send: [GuardedRing; 2],
    recv: [GuardedRing; 2],
}

/// An end, and the state of its application.
struct Side {
    link: Link<u64>,
    /// Data of the calls that were taken and did not end.
    open: HashSet<u64>,
    cancellable: Vec<(CallKey, u64)>,
    held: Vec<Request>,
    record: PublishedRecord,
    /// The batches that the peer posted and that are not polled yet: place, length and immediate.
    arrived: VecDeque<Emit>,
    is_read_posted: bool,
    /// Number of batches whose completions the window asked for and that were not taken.
    written: usize,
}

struct Pair<'a> {
    sides: [Side; 2],
    rings: &'a Rings,
    rng: fastrand::Rng,
    next_call: u64,
    /// Number of changes of batches and records.
    changed: u64,
    now_ns: u64,
}

fn side(rings: &Rings, side: usize, starts: [u64; 2], batches: u32, window: Window) -> Side {
    let config = LinkConfig {
        local_credit: C / 4,
        peer_credit: C / 4,
        local_batches: batches,
        peer_batches: batches,
        send_start: starts[side],
        recv_start: starts[1 - side],
        keepalive_ns: 1_000,
        stall_ns: u64::MAX,
        idle_keepalive_ns: u64::MAX,
        idle_timeout_ns: u64::MAX,
        reads_whole_words: true,
        window,
    };
    Side {
        link: Link::new(rings.send[side].view(), rings.recv[side].view(), &config),
        open: HashSet::new(),
        cancellable: Vec::new(),
        held: Vec::new(),
        record: PublishedRecord {
            words: FlowWords {
                consumer_pos: config.recv_start,
                credit: config.local_credit,
                batches_received: 0,
            },
            heartbeat: 0,
            batches_taken: 0,
        },
        arrived: VecDeque::new(),
        is_read_posted: false,
        written: 0,
    }
}

impl<'a> Pair<'a> {
    fn new(rings: &'a Rings, seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let starts: [u64; 2] = std::array::from_fn(|_| rng.u64(..1 << 40) & !31);
        let batches = rng.u32(1..6);
        let window = match rng.u8(..3) {
            0 => Window::Off,
            1 => Window::Completion {
                batches: 1,
                exempt_bytes: 256,
            },
            _ => Window::Consumption {
                batches: 2,
                exempt_bytes: 256,
            },
        };
        Self {
            sides: [0, 1].map(|index| side(rings, index, starts, batches, window)),
            rings,
            rng,
            next_call: 0,
            changed: 0,
            now_ns: 0,
        }
    }

    fn step(&mut self) {
        let index = self.rng.usize(..2);
        match self.rng.u8(..12) {
            0..=2 => self.call(index),
            3..=4 => self.answer(index),
            5..=6 => self.serve(index),
            7..=9 => self.take_batch(index),
            10 => self.take_completions(index),
            _ => self.end_early(index),
        }
        for side in &self.sides {
            let link = &side.link;
            assert!(link.in_flight() + 2 * link.reserved() <= C, "S1");
            assert!(link.reserved() <= C / 4, "R1");
            assert_eq!(link.outstanding_calls(), side.open.len());
        }
    }

    fn call(&mut self, index: usize) {
        let (len, allowance) = match self.rng.u8(..4) {
            0 => (self.rng.usize(..=500), self.rng.usize(..=724)),
            _ => (self.rng.usize(..40), self.rng.usize(..40)),
        };
        let deadline = if self.rng.bool() {
            u64::MAX
        } else {
            self.now_ns + self.rng.u64(..2_000)
        };
        let data = self.next_call;
        let side = &mut self.sides[index];
        if let Ok(key) = side
            .link
            .call_until(&[7; PAGE][..len], data, allowance, deadline)
        {
            self.next_call += 1;
            assert!(side.open.insert(data));
            side.cancellable.push((key, data));
        }
    }

    fn answer(&mut self, index: usize) {
        let side = &mut self.sides[index];
        if side.held.is_empty() {
            return;
        }
        let request = side.held.swap_remove(self.rng.usize(..side.held.len()));
        let mut payload = [0; PAGE];
        let len = request.payload().len();
        assert!(len <= 500 && request.max_reply() <= 724);
        let found = self.rings.recv[index]
            .view()
            .bytes(request.payload())
            .copy_to(&mut payload);
        assert_eq!(found, len);
        let max = request.max_reply();
        if self.rng.u8(..4) == 0 {
            let request = side.link.without_bytes(request);
            assert_eq!((request.payload().len(), request.max_reply()), (0, max));
            side.held.push(request);
            return;
        }
        let answered = match self.rng.u8(..8) {
            0 => side.link.refuse(request),
            1 => side.link.abandon(request),
            _ => side.link.reply(request, &payload[..self.rng.usize(..=max)]),
        };
        assert!(answered.is_ok() || side.link.closed().is_some());
    }

    /// Flushes, READs and publishes. Posted batches reach the peer's memory at once.
    fn serve(&mut self, index: usize) {
        let (send, recv) = (&self.rings.send[index], &self.rings.recv[1 - index]);
        let [first, second] = &mut self.sides;
        let (side, peer) = if index == 0 {
            (first, second)
        } else {
            (second, first)
        };
        let room = self.rng.usize(..6);
        let (mut posted, mut written) = (0, 0);
        let _deferred: Result<(), ()> = side.link.flush(|emit: Emit| {
            posted += 1;
            if posted > room {
                return Err(());
            }
            let mut bytes = [0; PAGE];
            let bytes = &mut bytes[..emit.bytes as usize];
            send.read(emit.offset, bytes);
            recv.write(emit.offset, bytes);
            peer.arrived.push_back(emit);
            written += usize::from(emit.signal);
            Ok(())
        });
        side.written += written;
        if side.link.poll_read(self.now_ns) {
            side.link.read_posted();
            side.is_read_posted = true;
        }
        if let Some(words) = side.link.publish() {
            side.record.words = words;
        }
    }

    /// Changes a batch that arrived: in most cases a byte or a word.
    fn tamper(&mut self, index: usize, emit: &mut Emit) {
        let recv = &self.rings.recv[index];
        let rng = &mut self.rng;
        let at = |rng: &mut fastrand::Rng, below: u64| {
            emit.offset + rng.u64(..below.clamp(1, emit.bytes))
        };
        match rng.u8(..16) {
            // A byte of its metadata, a byte of its first header, any byte of the batch.
            kind @ (0 | 1 | 10..) => {
                let at = match kind {
                    0 => at(rng, 32),
                    1 => (emit.offset + 32 + rng.u64(..12)).min(C - 1),
                    _ => at(rng, u64::MAX),
                };
                let mut byte = [0];
                recv.read(at, &mut byte);
                let change = if rng.bool() {
                    1 << rng.u8(..8)
                } else {
                    rng.u8(1..)
                };
                recv.write(at, &[byte[0] ^ change]);
            }
            // A flow-control word of the metadata, by a typical error.
            2..=3 => {
                let at = emit.offset + [0, 8, 24][rng.usize(..3)];
                let mut word = [0; 8];
                recv.read(at, &mut word);
                let off = [32, !31, 1, !0, 1 << 63, C, C / 4][rng.usize(..7)];
                recv.write(
                    at,
                    &u64::from_le_bytes(word).wrapping_add(off).to_le_bytes(),
                );
            }
            // A well-formed header of a message that was not sent.
            4 => {
                let id = CallId::new(rng.u32(..8), rng.u32(..4));
                let header = Header {
                    call_id: if rng.bool() {
                        id.to_request()
                    } else {
                        id.to_response()
                    },
                    piggyback: rng.u32(..26),
                    len: [0, 20, 21, 500, 501, 724, 4064, u32::MAX][rng.usize(..8)],
                };
                recv.write(
                    emit.offset + if emit.offset + 44 <= C { 32 } else { 0 },
                    &header.encode(),
                );
            }
            5 => recv.write(
                emit.offset + 16,
                &[rng.u32(..4), u32::MAX, u32::MAX - 1][rng.usize(..3)].to_le_bytes(),
            ),
            6 => {
                emit.imm = [
                    0,
                    1,
                    emit.imm + 1,
                    emit.imm.wrapping_sub(1),
                    (C / 32) as u32,
                    u32::MAX,
                ][rng.usize(..6)]
            }
            7 => emit.imm = rng.u32(..2 * (C / 32) as u32),
            8 => (0..emit.bytes).for_each(|at| recv.write(emit.offset + at, &[rng.u8(..)])),
            // All bytes of the ring.
            9 => (0..C).for_each(|at| recv.write(at, &[rng.u8(..)])),
        }
        self.changed += 1;
    }

    fn take_batch(&mut self, index: usize) {
        let Some(mut emit) = self.sides[index].arrived.pop_front() else {
            return;
        };
        match self.rng.u8(..32) {
            0..=3 => self.tamper(index, &mut emit),
            // The batch is announced twice.
            4 => {
                self.sides[index].link.on_imm(emit.imm);
                self.changed += 1;
            }
            _ => {}
        }
        self.sides[index].link.on_imm(emit.imm);
        self.take_events(index);
    }

    fn take_events(&mut self, index: usize) {
        let side = &mut self.sides[index];
        while let Some(event) = side.link.next_event() {
            match event {
                Event::Requests(count) => side
                    .held
                    .extend((0..count).map_while(|_| side.link.next_request())),
                Event::Ended { user_data, outcome } => {
                    assert!(
                        side.open.remove(&user_data),
                        "a call ended that was not outstanding"
                    );
                    if let Ok(payload) = outcome {
                        assert!(payload.len() <= 724);
                        let mut bytes = [0; PAGE];
                        self.rings.recv[index]
                            .view()
                            .bytes(payload)
                            .copy_to(&mut bytes);
                    }
                }
            }
        }
    }

    /// Takes the completions of batches and of a READ.
    fn take_completions(&mut self, index: usize) {
        let side = &mut self.sides[index];
        for _ in 0..std::mem::take(&mut side.written) {
            side.link.on_write_done();
        }
        if !std::mem::take(&mut self.sides[index].is_read_posted) {
            return;
        }
        let mut record: [u8; FLOW_METADATA_SIZE] = self.sides[1 - index].record.encode();
        if self.rng.u8(..4) == 0 {
            let at = self.rng.usize(..record.len());
            record[at] ^= 1 << self.rng.u8(..8);
            self.changed += 1;
        }
        self.sides[index].link.on_read_done(&record);
        self.take_events(index);
    }

    /// Time passes, a call is cancelled, and sometimes an end closes.
    fn end_early(&mut self, index: usize) {
        if self.rng.u8(..32) == 0 {
            self.sides[index].link.shut_down();
        }
        self.now_ns += self.rng.u64(..500);
        let side = &mut self.sides[index];
        while let Some(data) = side.link.expire(self.now_ns) {
            assert!(
                side.open.remove(&data),
                "a deadline fired for a call that was not outstanding"
            );
        }
        if !side.cancellable.is_empty() && self.rng.bool() {
            let (key, data) = side
                .cancellable
                .swap_remove(self.rng.usize(..side.cancellable.len()));
            let is_open = side.open.remove(&data);
            assert_eq!(side.link.cancel(key), is_open.then_some(data));
        }
    }

    /// Returns whether either side has closed.
    fn is_over(&self) -> bool {
        self.sides.iter().any(|side| side.link.closed().is_some())
    }

    /// Closes the links that are not closed, and asserts that each link ends all its calls. Returns
    /// whether a link had found a lie.
    fn finish(&mut self) -> bool {
        let reasons = self.sides.each_ref().map(|side| side.link.closed());
        for reason in reasons.into_iter().flatten() {
            let is_known = matches!(
                reason,
                CloseReason::Protocol(_) | CloseReason::ClosedHere | CloseReason::ClosedByPeer
            );
            assert!(is_known, "{reason:?}");
        }
        for index in [0, 1] {
            self.sides[index].link.close(CloseReason::Disconnected);
            self.take_events(index);
            let side = &mut self.sides[index];
            assert!(side.open.is_empty(), "a call never ended");
            assert_eq!(side.link.outstanding_calls(), 0);
            assert!(side.link.call(&[], u64::MAX, 0).is_err());
            while let Some(request) = side.held.pop() {
                assert!(side.link.reply(request, &[]).is_err());
            }
        }
        reasons
            .into_iter()
            .flatten()
            .any(|reason| matches!(reason, CloseReason::Protocol(_)))
    }
}

/// Runs one pair of links. Returns the number of changes, and whether a link found one.
fn run(rings: &Rings, seed: u64) -> (u64, bool) {
    let _on_failure = OnFailure(format!("COPYRPC_TEST_SEED={seed}"));
    let mut pair = Pair::new(rings, seed);
    for _ in 0..300 {
        pair.step();
        if pair.is_over() {
            break;
        }
    }
    let found = pair.finish();
    (pair.changed, found)
}

#[test]
fn arbitrary_bytes_in_the_ring_touch_nothing_outside_and_each_call_still_ends_once() {
    let rings = Rings {
        send: [GuardedRing::new(), GuardedRing::new()],
        recv: [GuardedRing::new(), GuardedRing::new()],
    };
    if let Some(seed) = env_number("COPYRPC_TEST_SEED") {
        run(&rings, seed);
        return;
    }
    let target = 500_000 * scale();
    let first = env_number("COPYRPC_TEST_FIRST_SEED").unwrap_or(0);
    let mut changed = 0;
    let mut runs = 0;
    let mut found = 0;
    while changed < target {
        let (more, was_found) = run(&rings, first + runs);
        changed += more;
        found += u64::from(was_found);
        runs += 1;
    }
    say(&format!(
        "garbage: {changed} batches and records changed, {runs} pairs of links, {found} of them closed by what they found"
    ));
    assert!(found > runs / 4 && found < runs, "{found} of {runs}");
}
