//! Random operations on two real [`Link`]s against a small oracle: every call ends exactly once
//! with the right bytes, requests arrive in order exactly once, held payloads stay intact, and from
//! any state a fair schedule ends every call (liveness). The fabric's own checks are in `sim`.
//!
//! `COPYRPC_TEST_SCALE=n` runs n times as many operations; `COPYRPC_TEST_SEED=s` runs one seed.

use std::collections::{HashMap, VecDeque};

use crate::sim::{End, Ended, OnFailure, execute};
use copyrpc::Stats;
use copyrpc::error::{CallError, CallFailure, CloseReason};
use copyrpc::link::{Event, LinkConfig, Request, Window};
use copyrpc::ring::RingSize;

/// A call the application wants to make.
#[derive(Clone, Copy)]
struct Wish {
    len: usize,
    allowance: usize,
}

/// A call that was taken and has not ended.
struct Taken {
    wish: Wish,
    /// What the responder answered, once it has.
    answer: Option<Ended>,
}

struct Held {
    request: Request,
    serial: u64,
    number: usize,
}

/// What one side's application knows. Serials number the calls of a side.
#[derive(Default)]
struct App {
    next_serial: u64,
    taken: HashMap<u64, Taken>,
    /// Calls the other side has not received yet, in order.
    in_order: VecDeque<u64>,
    refused: VecDeque<Wish>,
    held: Vec<Held>,
    received: usize,
    ended: u64,
}

struct World {
    ends: [End; 2],
    apps: [App; 2],
    rng: fastrand::Rng,
    limits: RingSize,
    mood: Mood,
}

/// Habits of one run, so that runs differ in kind and not only in detail.
struct Mood {
    small_messages: bool,
    hold_percent: u8,
    defer_percent: u8,
    weights: [u32; 8],
}

impl Mood {
    fn random(rng: &mut fastrand::Rng) -> Self {
        Self {
            small_messages: rng.bool(),
            hold_percent: [0, 30, 80, 98][rng.usize(..4)],
            defer_percent: [0, 0, 20, 60][rng.usize(..4)],
            weights: std::array::from_fn(|_| rng.u32(1..20)),
        }
    }
}

fn bytes_of(side: usize, serial: u64, reply: bool, len: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(serial << 2 | (side as u64) << 1 | u64::from(reply));
    std::iter::repeat_with(|| rng.u8(..)).take(len).collect()
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let size = RingSize::new([2, 2, 4, 4, 8, 16, 64][rng.usize(..7)] << 10).unwrap();
        let starts: [u64; 2] = std::array::from_fn(|_| rng.u64(..1 << 40) & !31);
        let credits: [u64; 2] = std::array::from_fn(|_| match rng.u8(..4) {
            0 => 0,
            1 => rng.u64(..=size.max_reservation()) & !31,
            _ => size.max_reservation(),
        });
        let batches: [u32; 2] = std::array::from_fn(|_| [1, 2, 3, 8, 64][rng.usize(..5)]);
        let windows: [Window; 2] = std::array::from_fn(|_| {
            let (batches, exempt_bytes) = (rng.u32(1..4), [32, 256, 4096, u64::MAX][rng.usize(..4)]);
            match rng.u8(..3) {
                0 => Window::Off,
                1 => Window::Completion { batches, exempt_bytes },
                _ => Window::Consumption { batches, exempt_bytes },
            }
        });
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
                window: windows[side],
            };
            End::new(size, &config)
        });
        let mood = Mood::random(&mut rng);
        Self { ends, apps: Default::default(), rng, limits: size, mood }
    }

    fn wish(&mut self) -> Wish {
        let (max_len, max_allowance) = (self.limits.max_payload() as usize, self.limits.max_response_allowance() as usize);
        let mut pick = |max: usize| match self.rng.u8(..8) {
            0 => 0,
            1 if !self.mood.small_messages => max,
            2 | 3 if !self.mood.small_messages => self.rng.usize(..=max),
            4 => self.rng.usize(..8) * 32 + 20,
            5 => self.rng.usize(..8) * 32 + 21,
            _ => self.rng.usize(..100),
        };
        Wish { len: pick(max_len).min(max_len), allowance: pick(max_allowance).min(max_allowance) }
    }

    /// Makes the call or remembers the wish; whether it was taken.
    fn call(&mut self, side: usize, wish: Wish) -> bool {
        let app = &mut self.apps[side];
        let serial = app.next_serial;
        let payload = bytes_of(side, serial, false, wish.len);
        match self.ends[side].link.call(&payload, serial, wish.allowance) {
            Ok(_) => {
                app.next_serial += 1;
                app.taken.insert(serial, Taken { wish, answer: None });
                app.in_order.push_back(serial);
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
        let app = &mut self.apps[side];
        self.ends[side].poll(max, burst, |serial, ended| {
            let call = app.taken.remove(&serial).expect("a call ended twice");
            let answer = call.answer.expect("a call ended before its answer");
            assert_eq!(ended, answer, "call {serial} of side {side}");
            app.ended += 1;
        })
    }

    /// Takes one request and checks that it is the next one, unharmed.
    fn recv(&mut self, side: usize) -> bool {
        let Some(request) = self.ends[side].inbox.pop_front() else {
            return false;
        };
        let caller = &mut self.apps[1 - side];
        let serial = caller.in_order.pop_front().expect("a request from nowhere");
        let wish = caller.taken[&serial].wish;
        assert!(request.max_reply() >= wish.allowance);
        let number = self.apps[side].received;
        self.apps[side].received += 1;
        let held = Held { request, serial, number };
        self.check_payload(side, &held);
        self.apps[side].held.push(held);
        true
    }

    fn check_payload(&self, side: usize, held: &Held) {
        let len = self.apps[1 - side].taken[&held.serial].wish.len;
        let expected = bytes_of(1 - side, held.serial, false, len);
        let found = self.ends[side].payload(&held.request).to_vec();
        assert_eq!(found, expected, "request {} of side {side}", held.serial);
    }

    /// Answers a random held request.
    fn answer(&mut self, side: usize) -> bool {
        if self.apps[side].held.is_empty() {
            return false;
        }
        let pick = self.rng.usize(..self.apps[side].held.len());
        let held = self.apps[side].held.swap_remove(pick);
        self.check_payload(side, &held);
        let call = self.apps[1 - side].taken.get_mut(&held.serial).unwrap();
        let link = &mut self.ends[side].link;
        call.answer = Some(match self.rng.u8(..10) {
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
                let len = if kind < 6 { max } else { self.rng.usize(..=max) };
                let payload = bytes_of(side, held.serial, true, len);
                link.reply(held.request, &payload).unwrap();
                Ok(payload)
            }
        });
        self.ends[side].forget_request(held.number);
        true
    }

    fn flush(&mut self, side: usize, defer_percent: u8) {
        let rng = &mut self.rng;
        let _deferred = self.ends[side].flush(|| rng.u8(..100) >= defer_percent);
    }

    fn random_step(&mut self) {
        let side = self.rng.usize(..2);
        let mut roll = self.rng.u32(..self.mood.weights.iter().sum::<u32>());
        let mut op = 0;
        while roll >= self.mood.weights[op] {
            roll -= self.mood.weights[op];
            op += 1;
        }
        let many = self.rng.usize(1..6);
        match op {
            0 => {
                for _ in 0..many {
                    let wish = self.wish();
                    if !self.call(side, wish) {
                        self.apps[side].refused.push_back(wish);
                    }
                }
            }
            1 => {
                let burst = self.rng.usize(1..4);
                self.poll(side, many, burst);
            }
            2 => (0..many).for_each(|_| _ = self.recv(side)),
            3 => {
                if self.rng.u8(..100) >= self.mood.hold_percent {
                    (0..many).for_each(|_| _ = self.answer(side));
                }
            }
            4 => self.flush(side, self.mood.defer_percent),
            5 => (0..many).for_each(|_| _ = execute(&mut self.ends, side)),
            6 => {
                self.ends[side].read_if_wanted(0);
                self.ends[side].take_send_completions();
            }
            _ => self.ends[side].publish(),
        }
        self.check_invariants();
    }

    /// S1 and R1, seen from outside.
    fn check_invariants(&self) {
        for end in &self.ends {
            let link = &end.link;
            assert!(link.in_flight() + 2 * link.reserved() <= self.limits.bytes());
            assert!(link.reserved() <= self.limits.max_reservation());
            assert!(link.credit_balance() <= self.limits.max_reservation());
            assert_eq!(link.closed(), None);
        }
    }

    /// One round of a fair schedule: whatever can happen, happens. Returns how much did.
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
            self.ends[side].take_send_completions();
            while self.recv(side) {}
            while self.answer(side) {
                progress += 1;
            }
            self.flush(side, 0);
            self.ends[side].read_if_wanted(0);
            self.ends[side].publish();
            while execute(&mut self.ends, side) {}
            self.check_invariants();
        }
        progress
    }

    /// Liveness: a fair schedule ends every call, also those refused before.
    fn drain(&mut self) {
        let mut idle_rounds = 0;
        while self.apps.iter().any(|app| !app.taken.is_empty() || !app.refused.is_empty()) {
            idle_rounds = if self.fair_round() == 0 { idle_rounds + 1 } else { 0 };
            assert!(idle_rounds < 20, "stuck: {:#?}", self.ends[0].link);
        }
    }

    /// Every pending call ends once with the reason, and nothing can be sent any more.
    fn disconnect(&mut self, side: usize) {
        let (end, app) = (&mut self.ends[side], &mut self.apps[side]);
        let reason = CloseReason::Disconnected;
        end.link.close(reason);
        while let Some(event) = end.link.next_event() {
            let Event::Ended { user_data, outcome } = event else { panic!("a request on a closed link") };
            assert_eq!(outcome, Err(CallFailure::Closed(reason)));
            assert!(app.taken.remove(&user_data).is_some(), "a call ended twice");
        }
        assert!(app.taken.is_empty(), "a call never ended");
        let refused = end.link.call(&[], 7, 0);
        let expected = CallError::Closed { user_data: 7, reason };
        assert_eq!(refused, Err(expected));
        assert!(end.link.is_quiet());
    }
}

fn run(seed: u64, steps: usize) -> Stats {
    let _on_failure = OnFailure(format!("COPYRPC_TEST_SEED={seed}"));
    let mut world = World::new(seed);
    for _ in 0..steps {
        world.random_step();
    }
    if world.rng.u8(..8) == 0 {
        let side = world.rng.usize(..2);
        world.disconnect(side);
    } else {
        world.drain();
        // An idle link must take the largest call again, however it got here.
        for side in 0..2 {
            world.apps[side]
                .refused
                .push_back(Wish { len: world.limits.max_payload() as usize, allowance: world.limits.max_response_allowance() as usize });
        }
        world.drain();
    }
    let mut stats = *world.ends[0].link.stats();
    stats += *world.ends[1].link.stats();
    stats
}

fn env_number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|value| value.parse().ok())
}

#[test]
fn random_operations_lose_nothing_overwrite_nothing_and_never_get_stuck() {
    const STEPS: usize = 400;
    if let Some(seed) = env_number("COPYRPC_TEST_SEED") {
        run(seed, STEPS);
        return;
    }
    let runs = 1_500 * env_number("COPYRPC_TEST_SCALE").unwrap_or(1);
    let mut total = Stats::default();
    for seed in 0..runs {
        total += run(seed, STEPS);
    }
    // The paths that matter were taken.
    assert!(total.calls > runs * 50, "{total:#?}");
    for taken in
        [total.wraps, total.reads, total.metadata_only, total.batch_stalls, total.window_stalls, total.ring_full, total.insufficient_credit]
    {
        assert!(taken > runs, "{total:#?}");
    }
    assert_eq!(total.stale_responses, 0);
}
