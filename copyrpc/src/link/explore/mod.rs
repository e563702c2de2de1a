//! Every state that two real links can reach, in the smallest ring: no overrun (S2 of
//! docs/copyrpc-protocol.md), no missing receive (B1), each call in one place and ended once (C2),
//! no state from which the calls cannot end (L1..L5).
//!
//! A `World` is two links and the memory between them. A state of a world is kept as bytes, without
//! the parts that have no effect. Counters that only grow are relative to the other side's
//! knowledge, calls are numbered in the order in which a walk through the state meets them,
//! payloads are dropped, and a state and its mirror image are one. So runs of any length have
//! finitely many states, and `Graph` finds them all. Nothing is a model: each step restores two
//! links, does one action on them, and saves them.
//!
//! There are still too many states for three calls a side with all events in any order. So there
//! are four explorations, and the bound of each is in its name and its comment.

mod coder;
mod graph;
mod names;
pub(crate) mod past;
mod state;
mod world;

use std::io::Write;

pub(super) use coder::{Coder, RESTORED_AT};
use graph::Graph;
use names::Kind;
use world::{Action, EITHER, LARGE, SMALL, Script, Setup, Step, World};

use crate::ring::RingSize;

/// A limit above the number of states of every exploration.
const MOST_STATES: usize = 100_000_000;

/// Returns a setup with two kinds of call: the smallest, and the largest with the largest response.
fn setup() -> Setup {
    let ring = RingSize::new(RingSize::CORE_MIN).unwrap();
    let largest = Kind {
        len: ring.max_payload() as u32,
        allowance: ring.max_response_allowance() as usize,
    };
    Setup {
        ring,
        kinds: [
            Kind {
                len: 0,
                allowance: 0,
            },
            largest,
        ],
        calls: [3, 3],
        scripts: None,
        batches: [1, 1],
        credit: ring.max_reservation(),
        drains: false,
        delays_reads: false,
        defers: false,
        short_replies: false,
        abandons: false,
    }
}

/// Returns the factor by which `COPYRPC_TEST_SCALE` multiplies the number of starts; 1 by default.
fn scale() -> usize {
    std::env::var("COPYRPC_TEST_SCALE").map_or(1, |scale| scale.parse().unwrap())
}

/// Returns the start positions of the two directions. For `nth` 0, the largest request and the
/// largest response just fail to fit before the ring's end, so that a wrap skips the maximum number
/// of bytes; the other starts are spread over the ring.
fn start(nth: usize) -> [u64; 2] {
    let blocks = RingSize::CORE_MIN / 32;
    let nth = nth as u64;
    [
        (55 + 37 * nth) % blocks * 32,
        (52 + 29 * nth + nth / blocks) % blocks * 32,
    ]
}

/// Explores all states, and writes the report to standard error: a passing test shows no `println`.
fn explore(setup: Setup, start: [u64; 2]) {
    let report = Graph::new(setup, start).explore(MOST_STATES);
    assert!(report.is_complete);
    let Setup {
        calls,
        scripts,
        batches,
        ..
    } = setup;
    let what = format!(
        "{calls:?} calls outstanding (scripts {scripts:?}), {batches:?} batches, start {start:?}"
    );
    std::io::stderr()
        .write_all(format!("explored {what}: {report:?}\n").as_bytes())
        .unwrap();
}

/// Runs of any length, which go round both rings and reach all pairs of offsets. One side calls,
/// one call at a time. The fabric and the driver show all behaviours: delayed completions, delayed
/// READs, deferred posts, two batches in flight, short replies.
#[test]
fn one_call_at_a_time_for_ever_at_every_offset_is_safe_and_ends() {
    explore(
        Setup {
            calls: [1, 0],
            batches: [2, 1],
            delays_reads: true,
            defers: true,
            short_replies: true,
            ..setup()
        },
        [0, 0],
    );
}

/// Time as an event: each call may pass its deadline, or be cancelled, before it is sent, on its
/// way, while its request is held, while its answer is on its way, or never. One side calls, from
/// several offsets.
#[test]
fn calls_that_end_early_at_any_moment_leave_nothing_behind() {
    for nth in 0..2 * scale() {
        let scripts: [Script; 2] = [&[EITHER, EITHER, SMALL], &[]];
        explore(
            Setup {
                calls: [2, 0],
                scripts: Some(scripts),
                abandons: true,
                delays_reads: true,
                ..setup()
            },
            start(nth),
        );
    }
}

/// Both sides call, from several pairs of offsets: three calls in all, each of either kind, in any
/// order, with delayed completions and READs.
#[test]
fn two_calls_against_one_in_every_order_are_safe_and_end() {
    for nth in 0..scale() {
        let scripts: [Script; 2] = [&[EITHER, EITHER], &[EITHER]];
        // The largest call needs more than 224 bytes of credit, so with this credit, in every
        // second run, it waits for a grant.
        let credit = [224, setup().credit][nth % 2];
        explore(
            Setup {
                scripts: Some(scripts),
                credit,
                delays_reads: true,
                ..setup()
            },
            start(nth),
        );
    }
}

/// Each side has three calls outstanding at once, of both kinds in a given order: replies in any
/// order, calls and replies batched in any way, polls in any order. A poll takes everything that
/// the peer posted before, as with a device that executes operations at once.
#[test]
#[ignore = "takes a core for a minute: .ci/run"]
fn three_calls_of_two_sizes_a_side_are_safe_and_end() {
    const LARGE_FIRST: Script = &[LARGE, SMALL, SMALL];
    const SMALL_FIRST: Script = &[SMALL, LARGE, SMALL];
    const SMALL_ONLY: Script = &[SMALL, SMALL, SMALL];
    let pairs = [
        [LARGE_FIRST, LARGE_FIRST],
        [SMALL_FIRST, SMALL_FIRST],
        [SMALL_ONLY, SMALL_ONLY],
        [LARGE_FIRST, SMALL_ONLY],
    ];
    for nth in 0..scale() {
        let setup = Setup {
            scripts: Some(pairs[nth % pairs.len()]),
            drains: true,
            ..setup()
        };
        explore(setup, start(nth / pairs.len()));
    }
}

/// The parts left out of a saved state have no effect: a world that is saved and restored before
/// each step goes through the same states as a world that never is.
#[test]
fn a_restored_state_goes_on_as_the_one_that_was_saved() {
    for seed in 0..50 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let setup = Setup {
            batches: [3, 2],
            delays_reads: true,
            defers: true,
            short_replies: true,
            abandons: true,
            ..setup()
        };
        let (mut saved, mut other) = (Vec::new(), Vec::new());
        let mut world = World::new(setup, start(seed as usize));
        let mut restored = World::new(setup, [0, 0]);
        world.save(&mut saved);
        for _ in 0..2_000 {
            restored.restore(&saved);
            let side = rng.usize(..2);
            let action = match rng.u8(..7) {
                0 => Action::Call { kind: rng.u8(..2) },
                1 => Action::Reply {
                    nth: rng.usize(..3),
                    is_short: rng.bool(),
                },
                2 => Action::Serve {
                    room: rng.usize(..4),
                },
                3 => Action::TakeBatch,
                4 => Action::ExecuteRead,
                // The calls of a restored world may be in other slots. So with several calls `nth`
                // would name another call there.
                5 if world.links[side].outstanding_calls() == 1 => Action::Abandon { nth: 0 },
                _ => Action::TakeRead,
            };
            let step = world.apply(side, action);
            assert_eq!(restored.apply(side, action), step, "seed {seed}");
            if step != Step::Disabled {
                world.save(&mut saved);
                restored.save(&mut other);
                assert_eq!(saved, other, "seed {seed}");
            }
        }
    }
}
