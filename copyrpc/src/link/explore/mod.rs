//! All that can happen to two links.

mod coder;
mod graph;
mod names;
mod state;
mod world;

pub(super) use coder::{Coder, RESTORED_AT};
use graph::Graph;
use names::Kind;
use world::Setup;

use crate::ring::RingSize;

fn setup() -> Setup {
    let ring = RingSize::new(RingSize::CORE_MIN).unwrap();
    Setup {
        ring,
        kinds: [Kind { len: 0, allowance: 0 }, Kind { len: ring.max_payload() as u32, allowance: ring.max_response_allowance() as usize }],
        calls: [1, 1],
        total: None,
        batches: [1, 1],
        credit: ring.max_reservation(),
        defers: false,
        delays_reads: false,
        short_replies: false,
    }
}

fn number(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |v| v.parse().unwrap())
}

#[test]
fn probe() {
    let started = std::time::Instant::now();
    let s = Setup {
        calls: [number("CA", 1), number("CB", 1)],
        batches: [number("BA", 1) as u32, number("BB", 1) as u32],
        defers: number("DEFER", 0) > 0,
        delays_reads: number("DELAY", 0) > 0,
        short_replies: number("SHORT", 0) > 0,
        total: if number("TA", 0) + number("TB", 0) > 0 { Some([number("TA", 0) as u32, number("TB", 0) as u32]) } else { None },
        ..setup()
    };
    let report = Graph::new(s, [[number("OA", 0) as u64 * 32, number("OB", 0) as u64 * 32]].into_iter()).explore(number("MOST", 1_000_000));
    println!("{s:?}\n{report:?} {:?}", started.elapsed());
}
