//! No call allocates once the maximum number has been outstanding: not at the caller, not at the
//! server, not in the device below.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test"
)]

#[path = "../../mlx5/tests/support/counting.rs"]
mod counting;
mod support;

use std::cell::Cell;
use std::time::Duration;

use copyrpc::{CallFailure, EndpointConfig, Outcome};
use counting::calls_of;
use support::{Pair, small};

const LONG: Duration = Duration::from_secs(3_600);

/// The kind of a round's calls.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Plain,
    /// Calls have a deadline, and end before it.
    Deadline,
    /// Calls of which every other one is over when it is made, and every third is cancelled.
    GivenUp,
}

/// The outcomes of a round's calls.
#[derive(Default, Debug)]
struct Tally {
    taken: u64,
    refused: u64,
    ended: u64,
}

/// Calls until `depth` are made or one is refused, and steps until all have ended; the server
/// answers the requests it holds last first.
fn round(pair: &Pair, kind: Kind, depth: usize, bytes: &mut [u8], tally: &mut Tally) {
    let (mut taken, ended) = (0, Cell::new(0));
    for at in 0..depth {
        let (payload, allowance) = (&bytes[..at * 13 % 60], 40);
        let call = match kind {
            Kind::Plain => pair.to_server.call(payload, at as u64, allowance),
            Kind::Deadline => pair
                .to_server
                .call_within(payload, at as u64, allowance, LONG),
            Kind::GivenUp => pair.to_server.call_within(
                payload,
                at as u64,
                allowance,
                if at % 2 == 0 { Duration::ZERO } else { LONG },
            ),
        };
        let Ok(token) = call else {
            tally.refused += 1;
            break;
        };
        taken += 1;
        if matches!(kind, Kind::GivenUp) && at % 3 == 0 {
            ended.set(ended.get() + u64::from(pair.to_server.cancel(token).is_some()));
        }
    }
    // Calls that were given up are answered too.
    let answered = pair.server.stats().replies + taken;
    support::step_until(
        || ended.get() == taken && pair.server.stats().replies == answered,
        || {
            let on_response = |_: u64, outcome: Outcome<'_>| {
                assert!(
                    matches!(outcome, Ok(_) | Err(CallFailure::TimedOut)),
                    "{outcome:?}"
                );
                ended.set(ended.get() + 1);
            };
            pair.client.poll(on_response).unwrap();
            pair.server.poll_quietly();
            let mut held = [const { None }; 64];
            held.iter_mut()
                .for_each(|place| *place = pair.server.recv());
            for request in held.into_iter().rev().flatten() {
                let len = request.data().copy_to(&mut bytes[64..104]);
                request.reply(&bytes[64..64 + len.min(40)]).unwrap();
            }
        },
    );
    tally.taken += taken;
    tally.ended += ended.get();
}

/// Returns the number of allocator calls of many rounds, after some warm-up rounds, and the work of
/// the rounds.
fn calls_of_rounds(config: &EndpointConfig, kind: Kind, depth: usize) -> (u64, Tally, Pair) {
    let pair = Pair::new(|builder| builder, config);
    let (mut bytes, mut tally) = ([7; 128], Tally::default());
    for _ in 0..200 {
        round(&pair, kind, depth, &mut bytes, &mut tally);
    }
    tally = Tally::default();
    let calls =
        calls_of(|| (0..1_000).for_each(|_| round(&pair, kind, depth, &mut bytes, &mut tally)));
    (calls, tally, pair)
}

#[test]
fn calls_and_replies_allocate_nothing_at_any_depth_with_and_without_deadlines() {
    assert_eq!(
        calls_of(|| drop(std::hint::black_box(Box::new(1)))),
        2,
        "the counter counts"
    );
    let large = EndpointConfig {
        ring_size: 64 << 10,
        ..small()
    };
    for kind in [Kind::Plain, Kind::Deadline, Kind::GivenUp] {
        for depth in [1, 64] {
            let (calls, tally, pair) = calls_of_rounds(&large, kind, depth);
            assert_eq!(calls, 0, "{kind:?}, depth {depth}");
            assert_eq!(
                (tally.taken, tally.ended, tally.refused),
                (1_000 * depth as u64, 1_000 * depth as u64, 0),
                "{kind:?}"
            );
            assert!(pair.client.stats().wraps > 0);
        }
    }
}

/// A small ring, which wraps all the time, refuses calls, and makes the caller READ its peer's
/// record.
#[test]
fn wraps_refusals_and_reads_allocate_nothing() {
    for kind in [Kind::Plain, Kind::Deadline, Kind::GivenUp] {
        let (calls, tally, pair) = calls_of_rounds(&small(), kind, 64);
        assert_eq!(calls, 0, "{kind:?}");
        let stats = pair.client.stats();
        assert!(
            tally.refused >= 1_000 && stats.wraps > 100 && stats.reads > 300,
            "{tally:?} {stats:?}"
        );
    }
}
