//! Servers that stop in whatever state (S27).

use super::world::{Counters, World, small};
use super::worlds::scale;
use crate::protocol::{CloseReason, ServerConfig, State};

const CLIENTS: usize = 6;

/// Makes a world in which a server stops after `steps`, in an order that a seed gives. Every call
/// ends once: with the response of its only run, or not sent and never run.
fn stop(seed: u64, steps: usize) -> [usize; 2] {
    let mut rng = fastrand::Rng::with_seed(seed);
    let config = ServerConfig {
        max_clients: CLIENTS as u32,
        depth: rng.u32(1..4),
        group_size: 2,
        response_buffers: 3,
        ..small()
    };
    let counters = if rng.bool() {
        Counters::before_wrap(32, rng.u32(..8))
    } else {
        Counters::default()
    };
    let mut world = World::counting_from(&config, CLIENTS, counters);
    for step in 0..2 * steps {
        if step == steps {
            world.server.close();
        }
        let nth = rng.usize(..CLIENTS);
        world.now_ns += rng.u64(..40);
        match rng.u8(..10) {
            0 | 1 if world.sides[nth].made < 200 => drop(world.call(nth)),
            2 => drop(world.deliver_to_server(nth)),
            3 | 4 => drop(world.deliver_to_client(nth)),
            5 => world.poll_client(nth),
            6 if step < steps => world.poll_server(),
            6 => world.dismiss(),
            7 => drop(world.take()),
            8 => drop(world.reply()),
            9 if rng.bool() => world.hold(),
            9 if world.sides[nth].client.outstanding() == 0 => drop(world.rest(nth)),
            _ => {}
        }
    }
    while !world.server.has_dismissed_all() {
        while world.take() {}
        while world.reply() {}
        world.dismiss();
        for nth in 0..CLIENTS {
            while world.deliver_to_client(nth) {}
        }
    }
    let mut counts = [0; 2];
    for nth in 0..CLIENTS {
        while world.deliver_to_server(nth) || world.deliver_to_client(nth) {}
        world.call(nth);
        world.poll_client(nth);
        let side = &world.sides[nth];
        assert_eq!(
            side.client.state(),
            State::Closed(CloseReason::ServerStopped),
            "seed {seed}"
        );
        assert!(
            side.open.is_empty(),
            "seed {seed}: a call of client {nth} does not end"
        );
        let answered = side.ended.iter().filter(|ended| **ended == 1).count();
        counts[0] += answered;
        counts[1] += side.made - answered;
    }
    // `take` asserts that no remaining request runs a second time, or after its call has ended as
    // not sent.
    while world.take() {}
    counts
}

#[test]
fn each_call_is_answered_or_not_sent_when_a_server_stops_in_whatever_state() {
    let mut sums = [0; 2];
    for seed in 0..400 * scale() {
        let counts = stop(seed, 50 + seed as usize % 1_500);
        sums = [sums[0] + counts[0], sums[1] + counts[1]];
    }
    assert!(
        sums.iter().all(|sum| *sum > 1_000),
        "{sums:?} calls were answered, and not sent"
    );
}
