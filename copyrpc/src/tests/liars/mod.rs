//! Peers that break the protocol, at the binding: a raw queue pair that exchanges a record,
//! sometimes a damaged one, and then sends wrong data. Such a peer, a liar, runs the real core, so
//! that it can lie in every state of a connection, and changes the core's output: batches, words,
//! messages, immediates, its record, the place of a WRITE. A liar also repeats batches, sends
//! operations that copyrpc never sends, and stops in the middle. At the same time, an honest client
//! has calls answered by the same server.
//!
//! Checked: nothing panics or hangs; each call of the honest client is answered correctly; each
//! call to a liar ends once, with an answer that fits the call or a typed failure; the connection
//! to a liar ends for a known reason, at the latest with `PeerStalled`; no rule of the device is
//! broken, and every resource that an endpoint took is returned. Time is virtual: no test sleeps.
//!
//! `COPYRPC_TEST_SCALE=n` makes n times as many connections; `COPYRPC_TEST_SEED=s` makes connection
//! s alone.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests"
)]

mod liar;
mod victim;

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{CloseReason, ExchangeRecord, ProtocolError};
use liar::{Home, Liar};
use mlx5::{Clock, DeviceSpec, FabricSpec, LocalFabric, SoftOptions};
use victim::{End, Server};

/// Connections in CI.
const CONNECTIONS: u64 = 10_000;
/// Steps of one connection before it is ended by force.
const MOST_STEPS: usize = 120;

/// Prints the variable that repeats a failed connection.
struct OnFailure(u64);

impl Drop for OnFailure {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed run: COPYRPC_TEST_SEED={}", self.0);
        }
    }
}

fn env_number(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap())
}

/// The virtual clock that all devices of a test share.
#[derive(Clone, Default)]
struct Time(Arc<AtomicU64>);

impl Time {
    fn pass_us(&self, us: u64) {
        self.0.fetch_add(us * 1_000, Ordering::Relaxed);
    }
}

/// The reasons that ended the connections, and the number of connections that each ended.
#[derive(Default)]
struct Ends(BTreeMap<String, u64>);

impl Ends {
    fn count(&mut self, end: &End) {
        let name = match end {
            End::Refused(error) => format!("refused: {}", first_word(&format!("{error:?}"))),
            End::Closed(CloseReason::Protocol(ProtocolError::Overrun { span: 0, .. })) => {
                "Overrun of nothing".to_owned()
            }
            End::Closed(CloseReason::Protocol(error)) => {
                first_word(&format!("{error:?}")).to_owned()
            }
            End::Closed(reason) => first_word(&format!("{reason:?}")).to_owned(),
        };
        *self.0.entry(name).or_default() += 1;
    }
}

/// Returns the name of an enum's variant from its `Debug` text.
fn first_word(debug: &str) -> &str {
    debug.split(|c: char| !c.is_alphanumeric()).next().unwrap()
}

/// Runs a connection of a liar, from its record to its end.
fn run(server: &Server, home: &mut Home, time: &Time, seed: u64) -> End {
    let _on_failure = OnFailure(seed);
    let mut rng = fastrand::Rng::with_seed(seed);
    let pending = server.pending(&mut rng);
    let mut liar = Liar::new(home, &pending.local_info(), &mut rng);
    let mut record = liar.record(home).encode();
    if rng.u8(..4) == 0 {
        liar::damage_record(&mut record, &mut rng);
    }
    let connected = ExchangeRecord::decode(&record).and_then(|record| pending.connect(&record));
    let mut victim = match connected {
        Err(reason) => return End::Refused(reason),
        Ok(endpoint) => server.victim(endpoint),
    };
    for _ in 0..rng.usize(1..=MOST_STEPS) {
        match rng.u8(..8) {
            0..=3 => liar.step(home, &mut rng),
            4 => server.call(&victim, &mut rng),
            5..=6 => server.step(&mut victim, &mut rng),
            _ => time.pass_us(rng.u64(..2_000)),
        }
        if victim.is_closed() {
            break;
        }
    }
    server.check_honest(&mut victim);
    // Half of the liars are gone now; the other half stay and do nothing.
    let staying = rng.bool().then_some(liar);
    let reason = server.end(victim, time, &mut rng);
    drop(staying);
    home.forget();
    End::Closed(reason)
}

#[test]
fn liars_end_their_own_connections_only_and_every_call_ends_once() {
    let (time, fabric) = (Time::default(), LocalFabric::new());
    let spec = || {
        DeviceSpec::Soft(SoftOptions {
            fabric: FabricSpec::Local(fabric.clone()),
            arena_bytes: 1 << 30,
            clock: Clock::Manual(Arc::clone(&time.0)),
            strict: true,
            ..SoftOptions::default()
        })
    };
    let (server, mut home) = (Server::new(&spec), Home::new(&spec()));
    if let Some(seed) = env_number("COPYRPC_TEST_SEED") {
        run(&server, &mut home, &time, seed);
        return;
    }
    let connections = CONNECTIONS * env_number("COPYRPC_TEST_SCALE").unwrap_or(1);
    let mut ends = Ends::default();
    for seed in 0..connections {
        ends.count(&run(&server, &mut home, &time, seed));
    }
    server.finish();
    // `println` is not used: its output is not shown for a test that passes.
    std::io::stderr()
        .write_all(format!("liars: seeds 0..{connections}: {:?}\n", ends.0).as_bytes())
        .unwrap();
    // Each rule was broken, and each reason ended a connection.
    let rules = [
        "Overrun",
        "Overrun of nothing",
        "TooManyBatches",
        "Misplaced",
        "MessageCount",
        "ReservedNotZero",
        "MessageTooLong",
        "TrailingBytes",
        "ConsumerPosition",
        "Credit",
        "BatchesReceived",
        "RequestTooLarge",
        "Allowance",
        "ResponseTooLarge",
        "UnknownStatus",
    ];
    let others = [
        "Disconnected",
        "Transport",
        "PeerStalled",
        "ClosedHere",
        "ClosedByPeer",
    ];
    let missing: Vec<_> = rules
        .into_iter()
        .chain(others)
        .filter(|name| !ends.0.contains_key(*name))
        .collect();
    assert!(missing.is_empty(), "{missing:?} of {:?}", ends.0);
}
