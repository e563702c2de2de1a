//! Worlds in which a seed decides the next event: many clients, both transports of the response, deep slots, counters at any value. With
//! time: calls that run out of it, and a server and clients that are absent for longer than that.

use super::world::{Counters, World, small};
use crate::protocol::{ReplyMode, ServerConfig};

const CLIENTS: usize = 12;
const STEPS: usize = 20_000;
/// Maximum length of a step, in ns.
const MAX_STEP_NS: u64 = 20;
/// Maximum number of calls of a client: payloads have one byte for it.
const MAX_CALLS: usize = 250;
/// A timeout that no call of these tests reaches, in ns.
const PATIENCE_NS: u64 = 1 << 40;
const MAX_ROUNDS: usize = 500;

/// Durations, in ns.
#[derive(Clone, Copy)]
struct Times {
    /// Timeout of every other client; the others have no timeout.
    timeout: u64,
    /// Length of an absence of the server, and of a client.
    away: u64,
    /// Time before an absent client is evicted.
    drain: u64,
}

/// No timeout and no absence.
const ENDLESS: Times = Times { timeout: PATIENCE_NS, away: 0, drain: PATIENCE_NS };

fn config(seed: u64, depth: u32, times: Times) -> ServerConfig {
    let reply_mode = if seed % 2 == 0 { ReplyMode::ServerWrites } else { ReplyMode::ClientReads };
    ServerConfig { max_clients: CLIENTS as u32, depth, group_size: 3, response_buffers: 16, reply_mode, drain_ns: times.drain, ..small() }
}

/// Makes a world in which everything happens in the order that a seed gives, and then runs the rest in turn.
fn random_world(seed: u64, times: Times, counters: Counters) -> World {
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut world = World::counting_from(&config(seed, rng.u32(1..4), times), CLIENTS, counters);
    world.sides.iter_mut().step_by(2).for_each(|side| side.client.set_timeout_ns(times.timeout));
    let (mut server_back_ns, mut back_ns) = (0, [0; CLIENTS]);
    for _ in 0..STEPS {
        let nth = rng.usize(..CLIENTS);
        world.now_ns += rng.u64(..MAX_STEP_NS);
        let is_here = world.sides[nth].is_alive && world.now_ns >= back_ns[nth];
        let is_served = world.now_ns >= server_back_ns;
        match rng.u8(..9) {
            0 if is_here && world.sides[nth].made < MAX_CALLS => drop(world.call(nth)),
            1 | 2 => drop(world.deliver_to_server(nth)),
            3 | 4 if is_served => drop(world.deliver_to_client(nth)),
            5 if is_here => world.look(nth),
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
            if rng.bool() { server_back_ns = until_ns } else { back_ns[nth] = until_ns }
        }
    }
    assert!(world.settle(MAX_ROUNDS) < MAX_ROUNDS, "seed {seed}: calls do not end, or their slots are lost");
    world.server.check_consistency();
    let made: usize = world.sides.iter().map(|side| side.made).sum();
    // If clients are absent until they are evicted, there may be few calls and slices; that test counts those of all seeds.
    let stats = world.server.stats();
    assert!(made > 50 && stats.slices > 10 || times.drain < PATIENCE_NS, "seed {seed}: {made} calls, {stats:?}");
    world
}

/// Asserts that every slot of each living client works.
fn check_slots(world: &mut World, seed: u64) {
    for round in 0..3 {
        for nth in 0..CLIENTS {
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
        assert!(world.settle(MAX_ROUNDS) < MAX_ROUNDS, "seed {seed}, round {round}: calls do not end");
        let alive = world.sides.iter().filter(|side| side.is_alive);
        assert!(alive.flat_map(|side| side.executed.iter().chain(&side.ended)).all(|count| *count == 1), "seed {seed}, round {round}");
    }
    assert_eq!(world.server.stats().garbage, 0, "seed {seed}: a correct client's message is garbage");
}

/// Returns the factor of the number of seeds: `COPYRPC_TEST_SCALE`.
fn scale() -> u64 {
    std::env::var("COPYRPC_TEST_SCALE").ok().and_then(|scale| scale.parse().ok()).unwrap_or(1)
}

#[test]
fn random_orders_of_many_clients_lose_and_repeat_nothing() {
    for seed in 0..40 * scale() {
        let mut world = random_world(seed, ENDLESS, Counters::default());
        assert!(world.sides.iter().map(|side| side.made).sum::<usize>() > 150, "seed {seed}");
        assert!(world.sides.iter().all(|side| side.executed.iter().chain(&side.ended).all(|count| *count == 1)), "seed {seed}");
        check_slots(&mut world, seed);
    }
}

#[test]
fn every_slot_works_after_calls_that_ran_out_of_time_while_the_server_or_their_client_was_away() {
    let mut expired = 0;
    for seed in 0..100 * scale() {
        let mut world = random_world(seed, Times { timeout: 3_000, away: 20_000, drain: PATIENCE_NS }, Counters::default());
        assert_eq!(world.server.stats().evictions, 0);
        expired += world.sides.iter().flat_map(|side| &side.ended).filter(|count| **count == 0).count();
        check_slots(&mut world, seed);
    }
    assert!(expired > 1_000, "{expired} calls ran out of time");
}

#[test]
fn clients_that_are_evicted_while_they_are_away_harm_nobody() {
    let (mut evictions, mut calls, mut slices) = (0, 0, 0);
    let seeds = 40 * scale();
    for seed in 0..seeds {
        let mut world = random_world(seed, Times { timeout: 3_000, away: 40_000, drain: 10_000 }, Counters::default());
        evictions += world.server.stats().evictions;
        slices += world.server.stats().slices;
        calls += world.sides.iter().map(|side| side.made as u64).sum::<u64>();
        check_slots(&mut world, seed);
    }
    let enough = [(evictions, 1), (calls, 50), (slices, 10)].into_iter().all(|(count, of_each)| count > of_each * seeds);
    assert!(enough, "{evictions} evictions, {calls} calls, {slices} slices of {seeds} seeds");
}

/// A counter wraps, or is shortly before its wrap, during a use of a client, a slot or the server.
#[test]
fn counters_near_every_wrap_change_nothing() {
    for seed in 0..60 * scale() {
        for bits in [16, 24, 31, 32, 48, 63] {
            let counters = Counters::before_wrap(bits, fastrand::Rng::with_seed(seed).u32(..8));
            let times = if seed % 2 == 0 { ENDLESS } else { Times { timeout: 3_000, away: 20_000, drain: PATIENCE_NS } };
            check_slots(&mut random_world(seed, times, counters), seed);
        }
    }
}

/// At any epoch, a client that joins is served, and so is a client that was idle for any number of slices.
#[test]
fn clients_are_served_after_any_number_of_idle_slices() {
    let starts = [16, 24, 30, 31, 32, 33, 47, 48, 63].map(|bits| 1_u64 << bits);
    for epoch in starts.into_iter().flat_map(|start| [start - 4, start - 1, start, start + 1, 3 * (start / 2)]) {
        for idle in starts.into_iter().flat_map(|idle| [idle - 1, idle, idle + 1]).chain([0, epoch]).filter(|idle| *idle <= epoch) {
            let config = ServerConfig { slice_ns: 1_000, ..small() };
            let mut world = World::of_two_groups(&config, Counters { epoch, idle, ..Counters::default() });
            for call in 0..4 {
                world.call_all();
                assert!(world.run(MAX_ROUNDS) < MAX_ROUNDS, "epoch {epoch:#x}, idle for {idle:#x}: call {call} does not end");
            }
            assert!(world.server.scheduler().epoch() > epoch + 2, "{epoch:#x}");
        }
    }
}
