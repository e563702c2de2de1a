//! Random operations on two real [`Link`](crate::link::Link)s against a small oracle: every call
//! ends exactly once with the right bytes, by its answer, its deadline, a cancellation or the end
//! of the connection; requests arrive in order exactly once; held payloads stay intact; and from
//! any state a fair schedule ends every call (liveness), or a graceful end both sides. The fabric's
//! own checks are in `sim`.
//!
//! `COPYRPC_TEST_SCALE=n` runs n times as many operations, from seed `COPYRPC_TEST_FIRST_SEED` on;
//! `COPYRPC_TEST_SEED=s` runs one seed.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use super::sim::{End, Ended, OnFailure, execute};
use super::{env_number, say, scale};
use crate::Stats;
use crate::error::{CallError, CallFailure, CloseReason};
use crate::link::past::{Past, Traffic};
use crate::link::{CallKey, LinkConfig, Request, Window};
use crate::ring::RingSize;

/// The end of a call whose request a closing peer did not take.
const REFUSED: Ended = Err(CallFailure::NotSent);

/// A call the application wants to make.
#[derive(Clone, Copy)]
struct Wish {
    len: usize,
    allowance: usize,
}

/// A call that was taken and has not ended.
struct Taken {
    key: CallKey,
    deadline_ns: u64,
    /// The responder's answer, once it has answered.
    answer: Option<Ended>,
}

/// A request, for as long as it is not answered.
#[derive(Clone, Copy)]
struct Sent {
    serial: u64,
    wish: Wish,
}

struct Held {
    request: Request,
    sent: Sent,
    number: usize,
    has_bytes: bool,
}

/// The state of one side's application. Serials number the calls of a side.
#[derive(Default)]
struct App {
    next_serial: u64,
    taken: HashMap<u64, Taken>,
    /// Serials of the calls that may be cancelled; some of these calls have ended.
    cancellable: Vec<u64>,
    /// Calls the other side has not received yet, in order.
    in_order: VecDeque<Sent>,
    refused: VecDeque<Wish>,
    held: Vec<Held>,
    received: usize,
}

struct World {
    ends: [End; 2],
    apps: [App; 2],
    rng: fastrand::Rng,
    limits: RingSize,
    mood: Mood,
    /// Number of further steps in which a side does nothing, as if its process were stopped.
    away: [u32; 2],
    now_ns: u64,
    operations: u64,
}

/// Habits of one run, so that runs differ in kind and not only in detail.
struct Mood {
    small_messages: bool,
    hold_percent: u8,
    copy_percent: u8,
    defer_percent: u8,
    /// Steps in a thousand that begin an absence.
    away_permille: u16,
    weights: [u32; 10],
}

impl Mood {
    fn random(rng: &mut fastrand::Rng) -> Self {
        Self {
            small_messages: rng.bool(),
            hold_percent: [0, 30, 80, 98][rng.usize(..4)],
            copy_percent: [0, 10, 50][rng.usize(..3)],
            defer_percent: [0, 0, 20, 60][rng.usize(..4)],
            away_permille: [0, 0, 10, 50][rng.usize(..4)],
            weights: std::array::from_fn(|_| rng.u32(1..20)),
        }
    }
}

fn bytes_of(side: usize, serial: u64, reply: bool, len: usize) -> Vec<u8> {
    let seed =
        (serial << 2 | (side as u64) << 1 | u64::from(reply)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut bytes = Vec::with_capacity(len + 8);
    for word in 0..len.div_ceil(8) as u64 {
        bytes.extend_from_slice(&(seed ^ word.wrapping_mul(0xd1b5_4a32_d192_ed03)).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Returns a number just below the maximum of a counter of some width, so that the counter wraps
/// during the run. A counter of 64 bits does not wrap in practice: its number is 2^40 below the
/// maximum.
fn large_number(rng: &mut fastrand::Rng) -> u64 {
    let ends = [
        1 << 11,
        1 << 16,
        1 << 31,
        1 << 32,
        1 << 37,
        1 << 63,
        u64::MAX - (1 << 40),
    ];
    ends[rng.usize(..ends.len())] - rng.u64(..1 << 11)
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let size = RingSize::new(RingSize::CORE_MIN << rng.u32(..10)).unwrap();
        let starts: [u64; 2] = std::array::from_fn(|_| large_number(&mut rng) & !31);
        let traffic: [Traffic; 2] = std::array::from_fn(|_| Traffic {
            batches: large_number(&mut rng),
            credit: large_number(&mut rng) & !31,
            requests: large_number(&mut rng),
        });
        let credits: [u64; 2] = std::array::from_fn(|_| match rng.u8(..4) {
            0 => 0,
            1 => rng.u64(..=size.max_reservation()) & !31,
            _ => size.max_reservation(),
        });
        let batches: [u32; 2] = std::array::from_fn(|_| [1, 2, 3, 8, 64][rng.usize(..5)]);
        let windows: [Window; 2] = std::array::from_fn(|_| {
            let (batches, exempt_bytes) =
                (rng.u32(1..4), [32, 256, 4096, u64::MAX][rng.usize(..4)]);
            match rng.u8(..3) {
                0 => Window::Off,
                1 => Window::Completion {
                    batches,
                    exempt_bytes,
                },
                _ => Window::Consumption {
                    batches,
                    exempt_bytes,
                },
            }
        });
        let reads_whole_words = rng.bool();
        let ends = [0, 1].map(|side| {
            let config = LinkConfig {
                local_credit: credits[side],
                peer_credit: credits[1 - side],
                local_batches: batches[side],
                peer_batches: batches[1 - side],
                send_start: starts[side],
                recv_start: starts[1 - side],
                keepalive_ns: u64::MAX,
                stall_ns: u64::MAX,
                idle_keepalive_ns: u64::MAX,
                idle_timeout_ns: u64::MAX,
                reads_whole_words,
                window: windows[side],
            };
            let past = Past {
                sent: traffic[side],
                received: traffic[1 - side],
                slots: rng.u32(..4),
                generation: large_number(&mut rng) as u32,
                heartbeat: u32::MAX - rng.u32(..4),
            };
            End::with_past(size, &config, &past)
        });
        let mood = Mood::random(&mut rng);
        Self {
            ends,
            apps: Default::default(),
            rng,
            limits: size,
            mood,
            away: [0; 2],
            now_ns: 0,
            operations: 0,
        }
    }

    fn wish(&mut self) -> Wish {
        let max_len = self.limits.max_payload() as usize;
        let max_allowance = self.limits.max_response_allowance() as usize;
        let mut pick = |max: usize| match self.rng.u8(..8) {
            0 => 0,
            1 if !self.mood.small_messages => max,
            2 | 3 if !self.mood.small_messages => {
                self.rng.usize(..=max) >> self.rng.u32(..=max.ilog2())
            }
            4 => self.rng.usize(..8) * 32 + 20,
            5 => self.rng.usize(..8) * 32 + 21,
            _ => self.rng.usize(..100),
        };
        Wish {
            len: pick(max_len).min(max_len),
            allowance: pick(max_allowance).min(max_allowance),
        }
    }

    /// Makes the call. Returns whether it was taken.
    fn call(&mut self, side: usize, wish: Wish) -> bool {
        let deadline_ns = if self.rng.u8(..4) == 0 {
            self.now_ns + self.rng.u64(..5_000)
        } else {
            u64::MAX
        };
        let app = &mut self.apps[side];
        let serial = app.next_serial;
        let payload = bytes_of(side, serial, false, wish.len);
        match self.ends[side]
            .link
            .call_until(&payload, serial, wish.allowance, deadline_ns)
        {
            Ok(key) => {
                app.next_serial += 1;
                app.taken.insert(
                    serial,
                    Taken {
                        key,
                        deadline_ns,
                        answer: None,
                    },
                );
                app.cancellable.push(serial);
                app.in_order.push_back(Sent { serial, wish });
                true
            }
            Err(error) => {
                assert!(error.is_retryable(), "{error:?}");
                assert_eq!(error.into_user_data(), serial);
                false
            }
        }
    }

    fn poll(&mut self, side: usize, max: usize, burst: usize) -> usize {
        let unreceived = self.unreceived(side);
        let peer = &self.ends[1 - side].link;
        let is_peer_closing = peer.is_closing() || peer.closed().is_some();
        let app = &mut self.apps[side];
        let end = &mut self.ends[side];
        let taken = end.poll(max, burst, |serial, ended| {
            let call = app
                .taken
                .remove(&serial)
                .expect("a call ended twice, or after its early end");
            if is_peer_closing && ended == REFUSED {
                assert!(
                    unreceived.contains(&serial),
                    "a call was refused whose request was received"
                );
                return;
            }
            let answer = call.answer.expect("a call ended before its answer");
            assert_eq!(ended, answer, "call {serial} of side {side}");
        });
        end.take_send_completions();
        taken
    }

    /// Returns the serials of the calls of a side whose requests the application of the other side
    /// has not received.
    fn unreceived(&self, side: usize) -> HashSet<u64> {
        self.apps[side]
            .in_order
            .iter()
            .skip(self.ends[1 - side].inbox.len())
            .map(|sent| sent.serial)
            .collect()
    }

    /// Cancels a call, or finds that it has ended.
    fn cancel(&mut self, side: usize) {
        let app = &mut self.apps[side];
        if app.cancellable.is_empty() {
            return;
        }
        let serial = app
            .cancellable
            .swap_remove(self.rng.usize(..app.cancellable.len()));
        if let Some(call) = app.taken.remove(&serial) {
            assert_eq!(self.ends[side].link.cancel(call.key), Some(serial));
            assert_eq!(
                self.ends[side].link.cancel(call.key),
                None,
                "cancelled twice"
            );
        }
    }

    /// Time passes: exactly the calls end whose deadline has passed.
    fn pass_time(&mut self, side: usize) {
        self.now_ns += self.rng.u64(..200);
        let (app, link) = (&mut self.apps[side], &mut self.ends[side].link);
        while let Some(serial) = link.expire(self.now_ns) {
            let call = app
                .taken
                .remove(&serial)
                .expect("a deadline of a call that has ended");
            assert!(call.deadline_ns < self.now_ns);
        }
        let next = app
            .taken
            .values()
            .map(|call| call.deadline_ns)
            .filter(|deadline| *deadline != u64::MAX)
            .min();
        assert_eq!(link.next_deadline(), next);
        assert!(
            next.is_none_or(|deadline| deadline >= self.now_ns),
            "a deadline did not fire"
        );
    }

    /// Takes one request and checks that it is the next request, with the right bytes.
    fn recv(&mut self, side: usize) -> bool {
        let Some(request) = self.ends[side].inbox.pop_front() else {
            return false;
        };
        let sent = self.apps[1 - side]
            .in_order
            .pop_front()
            .expect("a request from nowhere");
        assert!(request.max_reply() >= sent.wish.allowance);
        let number = self.apps[side].received;
        self.apps[side].received += 1;
        let held = Held {
            request,
            sent,
            number,
            has_bytes: true,
        };
        self.check_payload(side, &held);
        self.apps[side].held.push(held);
        true
    }

    fn check_payload(&self, side: usize, held: &Held) {
        let Sent { serial, wish } = held.sent;
        let expected = bytes_of(1 - side, serial, false, wish.len);
        let found = self.ends[side].payload(&held.request).to_vec();
        assert!(found == expected, "request {serial} to side {side}");
    }

    /// Answers a random held request.
    fn answer(&mut self, side: usize) -> bool {
        if self.apps[side].held.is_empty() {
            return false;
        }
        let pick = self.rng.usize(..self.apps[side].held.len());
        let held = self.apps[side].held.swap_remove(pick);
        if held.has_bytes {
            self.check_payload(side, &held);
            self.ends[side].forget_request(held.number);
        }
        let serial = held.sent.serial;
        let link = &mut self.ends[side].link;
        if link.held(held.request.name()).is_given_up() {
            assert!(
                !self.apps[1 - side].taken.contains_key(&serial),
                "a call is said to be given up, and its caller waits"
            );
        }
        let answer = match self.rng.u8(..10) {
            0 => {
                link.refuse(held.request).unwrap();
                Err(CallFailure::Refused)
            }
            1 => {
                link.abandon(held.request).unwrap();
                Err(CallFailure::Dropped)
            }
            kind => {
                let max = held.request.max_reply();
                let len = if kind < 6 {
                    max
                } else {
                    self.rng.usize(..=max)
                };
                let payload = bytes_of(side, serial, true, len);
                link.reply(held.request, &payload).unwrap();
                Ok(payload)
            }
        };
        // No caller waits for the answer if the call was cancelled or ran out of time.
        if let Some(call) = self.apps[1 - side].taken.get_mut(&serial) {
            call.answer = Some(answer);
        }
        true
    }

    /// Releases the bytes of a random held request, which stays held.
    fn copy(&mut self, side: usize) -> bool {
        if self.apps[side].held.is_empty() {
            return false;
        }
        let pick = self.rng.usize(..self.apps[side].held.len());
        let mut held = self.apps[side].held.swap_remove(pick);
        let max_reply = held.request.max_reply();
        if held.has_bytes {
            self.check_payload(side, &held);
            self.ends[side].forget_request(held.number);
        }
        held.has_bytes = false;
        held.request = self.ends[side].link.without_bytes(held.request);
        assert_eq!(
            (held.request.payload().len(), held.request.max_reply()),
            (0, max_reply)
        );
        self.apps[side].held.push(held);
        true
    }

    fn flush(&mut self, side: usize, defer_percent: u8) {
        let rng = &mut self.rng;
        let _deferred = self.ends[side].flush(|| rng.u8(..100) >= defer_percent);
    }

    fn random_step(&mut self) {
        let side = self.rng.usize(..2);
        if self.away[side] > 0 {
            // The fabric continues.
            self.away[side] -= 1;
            execute(&mut self.ends, side);
            return;
        }
        if self.rng.u16(..1_000) < self.mood.away_permille {
            self.away[side] = self.rng.u32(..300);
            // Some absences end long after every deadline.
            self.now_ns += self.rng.u64(..20_000);
        }
        let mut roll = self.rng.u32(..self.mood.weights.iter().sum::<u32>());
        let mut op = 0;
        while roll >= self.mood.weights[op] {
            roll -= self.mood.weights[op];
            op += 1;
        }
        let many = self.rng.usize(1..6);
        let times = if matches!(op, 0 | 2 | 3 | 5) { many } else { 1 };
        let mut done = 0;
        for _ in 0..times {
            done += usize::from(match op {
                0 => {
                    let wish = self.wish();
                    let is_taken = self.call(side, wish);
                    if !is_taken {
                        self.apps[side].refused.push_back(wish);
                    }
                    true
                }
                1 => {
                    let burst = self.rng.usize(1..4);
                    self.poll(side, many, burst);
                    true
                }
                2 => self.recv(side),
                3 if self.rng.u8(..100) < self.mood.copy_percent => self.copy(side),
                3 => self.rng.u8(..100) >= self.mood.hold_percent && self.answer(side),
                5 => execute(&mut self.ends, side),
                _ => {
                    match op {
                        4 => self.flush(side, self.mood.defer_percent),
                        6 => _ = self.ends[side].read_if_wanted(self.now_ns),
                        7 => self.ends[side].publish(),
                        8 => self.cancel(side),
                        _ => self.pass_time(side),
                    }
                    true
                }
            });
        }
        // An operation that failed is not counted.
        self.operations += done as u64;
        self.check_invariants();
    }

    /// S1 and R1, seen from outside.
    fn check_invariants(&self) {
        for (end, app) in self.ends.iter().zip(&self.apps) {
            let link = &end.link;
            assert!(link.in_flight() + 2 * link.reserved() <= self.limits.bytes());
            assert!(link.reserved() <= self.limits.max_reservation());
            assert!(link.credit_balance() <= self.limits.max_reservation());
            assert_eq!(link.outstanding_calls(), app.taken.len());
            assert!(link.closed().is_none() || link.is_quiet());
        }
    }

    /// Does one round of a fair schedule: everything that can happen, happens. Returns the number
    /// of events.
    fn fair_round(&mut self) -> usize {
        let mut progress = 0;
        for side in 0..2 {
            while let Some(wish) = self.apps[side].refused.pop_front() {
                if !self.call(side, wish) {
                    self.apps[side].refused.push_front(wish);
                    break;
                }
                progress += 1;
            }
            progress += self.poll(side, usize::MAX, 1);
            while self.recv(side) {}
            while self.answer(side) {
                progress += 1;
            }
            self.flush(side, 0);
            self.ends[side].read_if_wanted(self.now_ns);
            self.ends[side].publish();
            while execute(&mut self.ends, side) {}
            self.check_invariants();
        }
        progress
    }

    fn fair_rounds_until(&mut self, is_done: impl Fn(&Self) -> bool) {
        let mut idle_rounds = 0;
        while !is_done(self) {
            idle_rounds = if self.fair_round() == 0 {
                idle_rounds + 1
            } else {
                0
            };
            // The longest pause between READs (L5) is 64 polls.
            assert!(idle_rounds < 84, "stuck: {:#?}", self.ends[0].link);
        }
    }

    /// Liveness: a fair schedule ends every call, also those refused before, and answers every
    /// request.
    fn drain(&mut self) {
        self.fair_rounds_until(|world| {
            let is_idle = |app: &App| app.taken.is_empty() && app.refused.is_empty();
            world.apps.iter().all(is_idle)
                && world
                    .ends
                    .iter()
                    .all(|end| end.link.unanswered_requests() == 0)
        });
        assert!(self.ends.iter().all(|end| end.link.closed().is_none()));
    }

    /// Asserts that an idle link takes the largest call, whatever happened before.
    fn drain_largest(&mut self) {
        let limits = self.limits;
        for app in &mut self.apps {
            app.refused.push_back(Wish {
                len: limits.max_payload() as usize,
                allowance: limits.max_response_allowance() as usize,
            });
        }
        self.drain();
        for end in &self.ends {
            let stats = end.link.stats();
            assert_eq!(
                stats.late_responses,
                stats.cancelled + stats.deadlines_exceeded,
                "each is answered, to nobody"
            );
        }
    }

    /// Ends one side or both gracefully while calls are outstanding: these are answered, then both
    /// ends close.
    fn shut_down(&mut self) {
        let closers: &[usize] = [&[0][..], &[1], &[0, 1]][self.rng.usize(..3)];
        closers
            .iter()
            .for_each(|side| self.ends[*side].link.shut_down());
        self.apps.iter_mut().for_each(|app| app.refused.clear());
        self.fair_rounds_until(|world| world.ends.iter().all(|end| end.link.closed().is_some()));
        for side in [0, 1] {
            let expected = if closers.contains(&side) {
                CloseReason::ClosedHere
            } else {
                CloseReason::ClosedByPeer
            };
            assert_eq!(self.ends[side].link.closed(), Some(expected));
            assert!(self.apps[side].taken.is_empty() && self.apps[side].held.is_empty());
        }
    }

    /// A side announces that it closes, and disappears before all calls have ended. No call of the
    /// other side that ended as refused reached the application of this side (G5). Returns the
    /// number of calls without an answer.
    fn leave(&mut self, side: usize) -> u64 {
        let (other, reason) = (1 - side, CloseReason::Disconnected);
        let given_up = |ends: &[End; 2]| {
            (ends[other].link.unanswered_requests() - ends[other].link.outstanding_calls()) as u64
        };
        let given_up_before = given_up(&self.ends);
        self.apps.iter_mut().for_each(|app| app.refused.clear());
        // The other side may continue to call until it receives the announcement.
        self.ends[side].link.shut_down();
        for _ in 0..self.rng.usize(..60) {
            let at = self.rng.usize(..2);
            if self.ends.iter().any(|end| end.link.closed().is_some()) {
                return 0;
            }
            match self.rng.u8(..8) {
                0 | 1 if !self.ends[at].link.is_closing() => {
                    let wish = self.wish();
                    self.call(at, wish);
                }
                2 => _ = self.poll(at, 2, 1),
                3 => _ = self.recv(at),
                4 => _ = self.answer(at),
                5 => self.flush(at, 20),
                6 => _ = execute(&mut self.ends, at),
                _ => _ = self.ends[at].read_if_wanted(self.now_ns),
            }
        }
        self.ends[side].link.close(reason);
        // Messages on their way arrive.
        if self.rng.bool() {
            self.poll(other, usize::MAX, 1);
        }
        self.ends[other].link.close(reason);
        let unreceived = self.unreceived(other);
        // Some calls ended when the closing mark was received.
        let mut refused = given_up(&self.ends).saturating_sub(given_up_before);
        while let Some(event) = self.ends[other].link.next_event() {
            let crate::link::Event::Ended { user_data, outcome } = event else {
                panic!("a request on a closed link")
            };
            assert!(
                self.apps[other].taken.remove(&user_data).is_some(),
                "a call ended twice"
            );
            if outcome == Err(CallFailure::NotSent) {
                assert!(
                    unreceived.contains(&user_data),
                    "call {user_data} was received, and can be made again"
                );
                refused += 1;
            } else {
                assert_eq!(outcome, Err(CallFailure::Closed(reason)));
            }
        }
        assert!(self.apps[other].taken.is_empty(), "a call never ended");
        refused
    }

    /// A peer dies in the middle of its work, and the other end detects this by its own WRITEs and
    /// READs: every call that waits ends once with the reason.
    fn disconnect(&mut self, side: usize) {
        let reason = CloseReason::Disconnected;
        self.ends[side].link.close(reason);
        let survivor = &mut self.ends[1 - side];
        if self.rng.bool() {
            let _deferred = survivor.flush(|| true);
            survivor.read_if_wanted(self.now_ns);
            execute(&mut self.ends, 1 - side);
            self.ends[1 - side].take_send_completions();
        }
        self.ends[1 - side].link.close(reason);
        for (end, app) in self.ends.iter_mut().zip(&mut self.apps) {
            while let Some(event) = end.link.next_event() {
                let crate::link::Event::Ended { user_data, outcome } = event else {
                    panic!("a request on a closed link")
                };
                assert_eq!(outcome, Err(CallFailure::Closed(reason)));
                assert!(app.taken.remove(&user_data).is_some(), "a call ended twice");
            }
            assert!(app.taken.is_empty(), "a call never ended");
            let expected = CallError::Closed {
                user_data: 7,
                reason,
            };
            assert_eq!(end.link.call(&[], 7, 0), Err(expected));
            assert!(
                app.held
                    .drain(..)
                    .all(|held| end.link.reply(held.request, &[]).is_err())
            );
            assert!(end.link.is_quiet());
        }
    }
}

/// Runs one seed. Returns its counters, the number of its operations, and the number of calls after
/// a goodbye that ended as refused.
fn run(seed: u64) -> (Stats, u64, u64) {
    let _on_failure = OnFailure(format!("COPYRPC_TEST_SEED={seed}"));
    let mut world = World::new(seed);
    let steps = 400 * u64::from((world.limits.bytes() / RingSize::CORE_MIN).ilog2() + 1);
    for _ in 0..steps {
        world.random_step();
    }
    let mut refused = 0;
    match world.rng.u8(..8) {
        0 => {
            let side = world.rng.usize(..2);
            world.disconnect(side);
        }
        1 => world.shut_down(),
        2 => {
            let side = world.rng.usize(..2);
            refused = world.leave(side);
        }
        _ => {
            world.drain();
            world.drain_largest();
        }
    }
    let mut stats = world.ends[0].link.stats();
    stats += world.ends[1].link.stats();
    (stats, world.operations, refused)
}

/// Runs seeds one after the other on two threads until there were enough operations.
#[test]
fn random_operations_lose_nothing_overwrite_nothing_and_never_get_stuck() {
    if let Some(seed) = env_number("COPYRPC_TEST_SEED") {
        run(seed);
        return;
    }
    let target = 5_000_000 * scale();
    let first = env_number("COPYRPC_TEST_FIRST_SEED").unwrap_or(0);
    let next_seed = AtomicU64::new(first);
    let operations = AtomicU64::new(0);
    let all_refused = AtomicU64::new(0);
    let total = Mutex::new(Stats::default());
    std::thread::scope(|scope| {
        let work = || {
            while operations.load(Ordering::Relaxed) < target {
                let (stats, more, refused) = run(next_seed.fetch_add(1, Ordering::Relaxed));
                all_refused.fetch_add(refused, Ordering::Relaxed);
                operations.fetch_add(more, Ordering::Relaxed);
                *total.lock().unwrap() += stats;
            }
        };
        scope.spawn(work);
        scope.spawn(work);
    });
    let runs = next_seed.into_inner() - first;
    let total = total.into_inner().unwrap();
    let operations = operations.into_inner();
    say(&format!(
        "oracle: {operations} operations in {runs} runs: {total:?}"
    ));
    // The paths that matter were taken.
    assert!(
        all_refused.into_inner() > runs / 16,
        "calls behind a goodbye"
    );
    assert!(total.calls > runs * 50, "{total:#?}");
    let flow = [
        total.wraps,
        total.reads,
        total.metadata_only,
        total.batch_stalls,
        total.window_stalls,
    ];
    let endings = [
        total.ring_full,
        total.insufficient_credit,
        total.cancelled,
        total.deadlines_exceeded,
        total.late_responses,
        total.notices,
    ];
    assert!(
        flow.into_iter().chain(endings).all(|taken| taken > runs),
        "{total:#?}"
    );
    assert_eq!(total.stale_responses, 0);
}
