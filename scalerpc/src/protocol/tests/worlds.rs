//! Worlds in which a seed decides the next event: many clients, deep slots, counters at any value.
//! Some calls time out, and the server and clients are absent for longer than the timeout. Clients
//! die, and new clients get their numbers; workers die that have requests.

use std::cell::RefCell;
use std::rc::Rc;

use super::world::{Counters, World, small};
use crate::protocol::{Handlers, HeldRequest, ServerConfig};

const CLIENTS: usize = 12;
/// Number of entries of some servers: several times the number of entries that a poll checks in
/// addition to the entries of two groups.
const MANY_ENTRIES: usize = 200;
const STEPS: usize = 20_000;
/// Maximum length of a step, in ns.
const MAX_STEP_NS: u64 = 20;
/// Maximum number of calls of a client: payloads have one byte for it.
const MAX_CALLS: usize = 250;
/// A timeout that no call of these tests reaches, in ns.
const PATIENCE_NS: u64 = 1 << 40;
const MAX_ROUNDS: usize = 500;
const BUFFERS: usize = 16;

/// Durations, in ns.
#[derive(Clone, Copy)]
struct Times {
    /// Timeout of every other client; the others have no timeout.
    timeout: u64,
    /// Length of an absence of the server, and of a client.
    away: u64,
    /// Time before an absent client is evicted.
    drain: u64,
    /// Length of a rest of a client, which ends before with its next call.
    rest: u64,
}

/// No timeout, no absence and no rest.
const ENDLESS: Times = Times {
    timeout: PATIENCE_NS,
    away: 0,
    drain: PATIENCE_NS,
    rest: 0,
};

fn config(seed: u64, depth: u32, times: Times) -> ServerConfig {
    ServerConfig {
        max_clients: if seed % 5 == 0 { MANY_ENTRIES } else { CLIENTS } as u32,
        depth,
        group_size: 3,
        response_buffers: BUFFERS as u32,
        drain_ns: times.drain,
        ..small()
    }
}

/// Makes a world in which everything happens in the order that a seed gives, and then runs the rest
/// in turn.
fn random_world(seed: u64, times: Times, counters: Counters) -> World {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut world = World::counting_from(&config(seed, rng.u32(1..4), times), CLIENTS, counters);
    world
        .sides
        .iter_mut()
        .step_by(2)
        .for_each(|side| side.client.set_timeout_ns(times.timeout));
    let mut server_back_ns = 0;
    let mut back_ns = [0; CLIENTS];
    let mut rest_ns = [0; CLIENTS];
    for _ in 0..STEPS {
        let nth = rng.usize(..CLIENTS);
        world.now_ns += rng.u64(..MAX_STEP_NS);
        let is_here = world.sides[nth].is_alive && world.now_ns >= back_ns[nth];
        let has_calls = world.sides[nth].client.outstanding() > 0;
        let is_awake = !world.is_resting(nth) || has_calls || world.now_ns >= rest_ns[nth];
        let is_served = world.now_ns >= server_back_ns;
        match rng.u8(..9) {
            0 if is_here && world.sides[nth].made < MAX_CALLS => drop(world.call(nth)),
            1 | 2 => drop(world.deliver_to_server(nth)),
            3 | 4 if is_served => drop(world.deliver_to_client(nth)),
            5 if is_here && times.rest != 0 && !has_calls && rng.bool() => {
                world.rest(nth);
                rest_ns[nth] = world.now_ns + rng.u64(..times.rest);
            }
            5 if is_here && is_awake => world.look(nth),
            8 if is_here => while world.take_completion(nth).is_some() {},
            6 if is_served => world.poll_server(),
            7 if is_served => match rng.u8(..11) {
                0..=3 => drop(world.take()),
                4..=7 => drop(world.reply()),
                8 => drop(world.die()),
                _ => world.hold(),
            },
            _ => {}
        }
        if times.away != 0 && rng.u16(..1_000) == 0 {
            let until_ns = world.now_ns + rng.u64(..times.away);
            if rng.bool() {
                server_back_ns = until_ns
            } else {
                back_ns[nth] = until_ns
            }
        }
    }
    world.clone().lose_server();
    assert!(
        world.settle(MAX_ROUNDS) < MAX_ROUNDS,
        "seed {seed}: calls do not end, or their slots are lost"
    );
    world.server.check_consistency();
    let made: usize = world.sides.iter().map(|side| side.made).sum();
    // If clients are absent until they are evicted, there may be few calls and slices; the test of
    // such clients counts the calls and slices of all seeds.
    let stats = world.server.stats();
    assert!(
        made > 50 && stats.slices > 10 || times.drain < PATIENCE_NS,
        "seed {seed}: {made} calls, {stats:?}"
    );
    world
}

/// The `rpc_type` of requests that are kept, and answered later.
const KEPT: u16 = 8;

/// A server's handlers, and a worker that keeps requests.
struct Desk {
    handlers: Handlers<'static>,
    /// Payloads of the handlers' runs, until the world has counted them.
    ran: Rc<RefCell<Vec<Vec<u8>>>>,
    kept: Rc<RefCell<Vec<HeldRequest>>>,
}

impl Desk {
    fn new(max_payload: usize) -> Self {
        let ran = Rc::<RefCell<Vec<Vec<u8>>>>::default();
        let kept = Rc::<RefCell<Vec<HeldRequest>>>::default();
        let mut handlers = Handlers::new(max_payload);
        let runs = ran.clone();
        handlers.insert(7, move |request: &[u8], response: &mut [u8]| {
            runs.borrow_mut().push(request.to_vec());
            response[..request.len()].copy_from_slice(request);
            Ok(request.len())
        });
        let (runs, keep) = (ran.clone(), kept.clone());
        handlers.insert_held(KEPT, move |request| {
            runs.borrow_mut().push(request.payload().to_vec());
            keep.borrow_mut().push(request);
        });
        Self {
            handlers,
            ran,
            kept,
        }
    }

    fn step(&mut self, world: &mut World, budget: usize) {
        world.step_handlers(&mut self.handlers, budget, &self.ran);
    }

    /// Answers a random kept request, in some cases from another thread.
    fn answer(&self, rng: &mut fastrand::Rng) {
        let mut kept = self.kept.borrow_mut();
        if kept.is_empty() {
            return;
        }
        let nth = rng.usize(..kept.len());
        let request = kept.swap_remove(nth);
        let response = request.payload().to_vec();
        let answer = move || request.reply(response).unwrap();
        if rng.u8(..32) == 0 {
            std::thread::spawn(answer).join().unwrap()
        } else {
            answer()
        }
    }

    /// Lets the worker die with all requests that it has.
    fn die(&self) {
        self.kept.take();
    }
}

/// A guard that prints the seed of a world that fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            println!(
                "seed {}: COPYRPC_TEST_FIRST_SEED={} begins with it",
                self.0, self.0
            );
        }
    }
}

/// The counts of all worlds of a test.
#[derive(Debug, Default)]
struct Sums {
    calls: usize,
    expired: usize,
    kept: usize,
    lost_by_workers: usize,
    vanished: usize,
    joined: usize,
    evictions: u64,
    slices: u64,
}

impl Sums {
    /// Makes a world of everything that may go wrong, runs it, and checks it. Adds its counts.
    fn add_world(&mut self, seed: u64) {
        let _named_if_it_fails = Seed(seed);
        let mut rng = fastrand::Rng::with_seed(seed);
        let timeout = *rng.choice(&[3_000, 20_000, PATIENCE_NS]).unwrap();
        let away = *rng.choice(&[0, 20_000, 40_000]).unwrap();
        let times = Times {
            timeout,
            away,
            drain: if rng.u8(..4) == 0 {
                10_000
            } else {
                PATIENCE_NS
            },
            rest: 0,
        };
        let counters = match rng.choice(&[0, 16, 24, 31, 32, 48, 63]).unwrap() {
            0 => Counters::default(),
            bits => Counters::before_wrap(*bits, rng.u32(..8)),
        };
        let mut world =
            World::counting_from(&config(seed, rng.u32(1..4), times), CLIENTS, counters);
        world
            .sides
            .iter_mut()
            .step_by(2)
            .for_each(|side| side.client.set_timeout_ns(times.timeout));
        let mut desk = Desk::new(world.server.layout().max_payload());
        for _ in 0..STEPS {
            world.now_ns += rng.u64(..MAX_STEP_NS);
            self.turn(&mut world, &mut desk, &mut rng, &times);
        }
        world.clone().lose_server();
        self.calm_down(&mut world, &mut desk, seed);
        check_slots(&mut world, seed);
    }

    /// Lets one random event happen.
    fn turn(&mut self, world: &mut World, desk: &mut Desk, rng: &mut fastrand::Rng, times: &Times) {
        let nth = rng.usize(..world.sides.len());
        let (is_alive, has_left) = (world.sides[nth].is_alive, world.sides[nth].has_left);
        match rng.u8(..10) {
            0 if is_alive && world.sides[nth].made < MAX_CALLS => {
                world.call_type(nth, if rng.bool() { 7 } else { KEPT });
            }
            1 | 2 if is_alive => drop(world.deliver_to_server(nth)),
            3 | 4 if is_alive => drop(world.deliver_to_client(nth)),
            5 if is_alive => world.look(nth),
            6 if is_alive => while world.take_completion(nth).is_some() {},
            7 => world.poll_server(),
            8 => match rng.u8(..6) {
                0 => drop(world.take()),
                1 => drop(world.reply()),
                2 => world.hold(),
                _ => desk.step(world, rng.usize(1..4)),
            },
            9 => match rng.u16(..400) {
                0 if is_alive => {
                    world.vanish(nth);
                    self.vanished += 1;
                }
                1..=40 if !is_alive && !has_left => world.leave(nth),
                41..=80
                    if world.sides.iter().filter(|side| !side.has_left).count() < CLIENTS
                        && world.sides.len() < 100 =>
                {
                    world.join();
                    self.joined += 1;
                }
                81 => {
                    self.lost_by_workers += desk.kept.borrow().len();
                    desk.die();
                }
                82 => drop(world.die()),
                83 if times.away > 0 => world.now_ns += rng.u64(..times.away),
                // Requests are answered seldom, so that some outlive their clients, and new clients
                // with the same numbers call meanwhile.
                84..=130 => {
                    self.kept += usize::from(!desk.kept.borrow().is_empty());
                    desk.answer(rng);
                }
                _ => {}
            },
            _ => {}
        }
    }

    /// Ends everything that was begun. Asserts that nothing is lost or left behind.
    fn calm_down(&mut self, world: &mut World, desk: &mut Desk, seed: u64) {
        let mut rng = fastrand::Rng::with_seed(seed);
        for round in 0.. {
            while !desk.kept.borrow().is_empty() {
                desk.answer(&mut rng);
            }
            desk.step(world, 64);
            if desk.handlers.held() == 0 && world.settle(MAX_ROUNDS) < MAX_ROUNDS {
                break;
            }
            assert!(
                round < MAX_ROUNDS,
                "seed {seed}: {} kept requests, or calls, do not end",
                desk.handlers.held()
            );
            world.settle(1);
        }
        // The last responses, to clients that are gone, are answered too.
        world.settle(1);
        world.server.check_consistency();
        assert_eq!(
            world.server.free_buffers(),
            BUFFERS,
            "seed {seed}: a response buffer is lost"
        );
        let stats = world.server.stats();
        assert_eq!(
            stats.garbage, 0,
            "seed {seed}: a correct client's message is garbage"
        );
        for (nth, side) in world.sides.iter().enumerate() {
            let ends_without_deadline = nth % 2 == 1 || nth >= CLIENTS;
            let lost = side.ended.iter().filter(|count| **count == 0).count();
            assert!(
                lost == 0 || !side.is_alive || !ends_without_deadline,
                "seed {seed}: client {nth} has {lost} calls without an answer"
            );
            self.expired += if side.is_alive { lost } else { 0 };
            self.calls += side.made;
        }
        (self.evictions, self.slices) =
            (self.evictions + stats.evictions, self.slices + stats.slices);
    }
}

/// Timeouts, absences, evictions, answers that come late, workers and clients that die, clients
/// that take their numbers, counters near their wraps: all in one world.
#[test]
fn worlds_in_which_everything_goes_wrong_lose_and_repeat_and_leak_nothing() {
    let (first, seeds) = (number("COPYRPC_TEST_FIRST_SEED", 0), 500 * scale());
    let mut sums = Sums::default();
    (first..first + seeds).for_each(|seed| sums.add_world(seed));
    println!(
        "random worlds: {seeds} seeds, {} calls made, {sums:?}",
        sums.calls
    );
    let Sums {
        calls,
        expired,
        kept,
        lost_by_workers,
        vanished,
        joined,
        evictions,
        slices,
    } = sums;
    let of_each = [
        calls / 50,
        expired,
        kept,
        4 * lost_by_workers,
        vanished,
        joined,
        10 * evictions as usize,
        slices as usize / 10,
    ];
    assert!(
        of_each.into_iter().all(|count| count > seeds as usize),
        "{of_each:?}"
    );
}

/// Asserts that every slot of each living client works.
fn check_slots(world: &mut World, seed: u64) {
    for round in 0..3 {
        for nth in 0..world.sides.len() {
            let side = &mut world.sides[nth];
            if !side.is_alive {
                continue;
            }
            side.client.set_timeout_ns(PATIENCE_NS);
            side.made = 0;
            side.executed.clear();
            side.ended.clear();
            while world.call(nth).is_some() {}
        }
        assert!(
            world.settle(MAX_ROUNDS) < MAX_ROUNDS,
            "seed {seed}, round {round}: calls do not end"
        );
        let alive = world.sides.iter().filter(|side| side.is_alive);
        assert!(
            alive
                .flat_map(|side| side.executed.iter().chain(&side.ended))
                .all(|count| *count == 1),
            "seed {seed}, round {round}"
        );
    }
    assert_eq!(
        world.server.stats().garbage,
        0,
        "seed {seed}: a correct client's message is garbage"
    );
}

/// Returns the factor of the number of seeds: `COPYRPC_TEST_SCALE`.
pub(super) fn scale() -> u64 {
    number("COPYRPC_TEST_SCALE", 1)
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable)
        .ok()
        .and_then(|number| number.parse().ok())
        .unwrap_or(default)
}

#[test]
fn random_orders_of_many_clients_lose_and_repeat_nothing() {
    for seed in 0..40 * scale() {
        let mut world = random_world(seed, ENDLESS, Counters::default());
        assert!(
            world.sides.iter().map(|side| side.made).sum::<usize>() > 150,
            "seed {seed}"
        );
        assert!(
            world.sides.iter().all(|side| side
                .executed
                .iter()
                .chain(&side.ended)
                .all(|count| *count == 1)),
            "seed {seed}"
        );
        check_slots(&mut world, seed);
    }
}

#[test]
fn every_slot_works_after_calls_that_ran_out_of_time_while_the_server_or_their_client_was_away() {
    let mut expired = 0;
    for seed in 0..100 * scale() {
        let mut world = random_world(
            seed,
            Times {
                timeout: 3_000,
                away: 20_000,
                ..ENDLESS
            },
            Counters::default(),
        );
        assert_eq!(world.server.stats().evictions, 0);
        expired += world
            .sides
            .iter()
            .flat_map(|side| &side.ended)
            .filter(|count| **count == 0)
            .count();
        check_slots(&mut world, seed);
    }
    assert!(expired > 1_000, "{expired} calls ran out of time");
}

#[test]
fn clients_that_are_evicted_while_they_are_away_harm_nobody() {
    let mut evictions = 0;
    let mut calls = 0;
    let mut slices = 0;
    let seeds = 40 * scale();
    for seed in 0..seeds {
        let mut world = random_world(
            seed,
            Times {
                timeout: 3_000,
                away: 40_000,
                drain: 10_000,
                ..ENDLESS
            },
            Counters::default(),
        );
        evictions += world.server.stats().evictions;
        slices += world.server.stats().slices;
        calls += world.sides.iter().map(|side| side.made as u64).sum::<u64>();
        check_slots(&mut world, seed);
    }
    let enough = [(evictions, 1), (calls, 50), (slices, 10)]
        .into_iter()
        .all(|(count, of_each)| count > of_each * seeds);
    assert!(
        enough,
        "{evictions} evictions, {calls} calls, {slices} slices of {seeds} seeds"
    );
}

/// A client that rests is evicted by no server, however short the timeout of the clients that are
/// awake. It may make calls before it is polled again.
#[test]
fn clients_that_rest_for_any_time_lose_their_zones_and_nothing_else() {
    let (mut taken_back, seeds) = (0, 60 * scale());
    for seed in 0..seeds {
        let counters = if seed % 3 == 0 {
            Counters::before_wrap(32, seed as u32 % 8)
        } else {
            Counters::default()
        };
        let times = Times {
            rest: [2_000, 10_000, 100_000][seed as usize / 3 % 3],
            drain: 20_000,
            ..ENDLESS
        };
        let mut world = random_world(seed, times, counters);
        let stats = *world.server.stats();
        assert_eq!((stats.evictions, stats.garbage), (0, 0), "seed {seed}");
        taken_back += stats.taken_back;
        assert!(
            world.sides.iter().all(|side| side
                .executed
                .iter()
                .chain(&side.ended)
                .all(|count| *count == 1)),
            "seed {seed}"
        );
        check_slots(&mut world, seed);
    }
    assert!(
        taken_back > 10 * seeds,
        "{taken_back} zones of {seeds} seeds"
    );
}

/// Clients rest and are absent, calls time out, and clients that are absent and do not rest are
/// evicted.
#[test]
fn clients_that_rest_beside_clients_that_are_evicted_harm_nobody() {
    let mut taken_back = 0;
    let mut evictions = 0;
    let seeds = 40 * scale();
    for seed in 0..seeds {
        let times = Times {
            timeout: 3_000,
            away: 40_000,
            drain: 10_000,
            rest: 20_000,
        };
        let mut world = random_world(seed, times, Counters::default());
        let stats = *world.server.stats();
        (taken_back, evictions) = (taken_back + stats.taken_back, evictions + stats.evictions);
        check_slots(&mut world, seed);
    }
    assert!(
        taken_back > seeds && evictions > seeds,
        "{taken_back} zones, {evictions} evictions of {seeds} seeds"
    );
}

/// A counter wraps, or is shortly before its wrap, during a use of a client, a slot or the server.
#[test]
fn counters_near_every_wrap_change_nothing() {
    for seed in 0..60 * scale() {
        for bits in [16, 24, 31, 32, 48, 63] {
            let counters = Counters::before_wrap(bits, fastrand::Rng::with_seed(seed).u32(..8));
            let times = if seed % 2 == 0 {
                ENDLESS
            } else {
                Times {
                    timeout: 3_000,
                    away: 20_000,
                    ..ENDLESS
                }
            };
            check_slots(&mut random_world(seed, times, counters), seed);
        }
    }
}

/// At any epoch, a client that joins is served, and so is a client that was idle for any number of
/// slices.
#[test]
fn clients_are_served_after_any_number_of_idle_slices() {
    let starts = [16, 24, 30, 31, 32, 33, 47, 48, 63].map(|bits| 1_u64 << bits);
    for epoch in starts
        .into_iter()
        .flat_map(|start| [start - 4, start - 1, start, start + 1, 3 * (start / 2)])
    {
        for idle in starts
            .into_iter()
            .flat_map(|idle| [idle - 1, idle, idle + 1])
            .chain([0, epoch])
            .filter(|idle| *idle <= epoch)
        {
            let config = ServerConfig {
                slice_ns: 1_000,
                ..small()
            };
            let mut world = World::of_two_groups(
                &config,
                Counters {
                    epoch,
                    idle,
                    ..Counters::default()
                },
            );
            for call in 0..4 {
                world.call_all();
                assert!(
                    world.run(MAX_ROUNDS) < MAX_ROUNDS,
                    "epoch {epoch:#x}, idle for {idle:#x}: call {call} does not end"
                );
            }
            assert!(world.server.scheduler().epoch() > epoch + 2, "{epoch:#x}");
        }
    }
}
