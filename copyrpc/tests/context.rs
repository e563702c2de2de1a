//! The binding on the software HCA, both ends in one thread. The protocol itself is tested in `protocol`.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests"
)]

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use copyrpc::{
    CallError, CallFailure, CloseReason, ConnectFailure, Context, ContextBuilder, CreateEndpointError, Endpoint, EndpointConfig,
    ExchangeError, Outcome, PendingEndpoint, PollError, ReplyError,
};
use mlx5::{DeviceSpec, FabricSpec, LocalFabric, SoftOptions};

type Ended = Result<Vec<u8>, CallFailure>;

fn device(fabric: &LocalFabric) -> DeviceSpec {
    DeviceSpec::Soft(SoftOptions { fabric: FabricSpec::Local(fabric.clone()), ..SoftOptions::default() })
}

fn small() -> EndpointConfig {
    EndpointConfig { ring_size: 4096, raw_operations: 0, ..EndpointConfig::default() }
}

fn connect(a: PendingEndpoint<u64>, b: PendingEndpoint<u64>) -> (Endpoint<u64>, Endpoint<u64>) {
    let (record_a, record_b) = (a.local_info(), b.local_info());
    (a.connect(&record_b).unwrap(), b.connect(&record_a).unwrap())
}

/// Steps until `is_done`, far longer than any of these tests needs; its caller asserts what came of it.
fn step_until(mut is_done: impl FnMut() -> bool, mut step: impl FnMut()) {
    let watchdog = Instant::now() + Duration::from_secs(20);
    while !is_done() && Instant::now() < watchdog {
        step();
    }
}

/// Two contexts and a connection between them.
struct Pair {
    client: Context<u64>,
    server: Context<u64>,
    to_server: Endpoint<u64>,
    to_client: Endpoint<u64>,
    ended: RefCell<Vec<(u64, Ended)>>,
}

impl Pair {
    fn new(builder: impl Fn(DeviceSpec) -> ContextBuilder, config: &EndpointConfig) -> Self {
        let fabric = LocalFabric::new();
        let (client, server) = (builder(device(&fabric)).build().unwrap(), builder(device(&fabric)).build().unwrap());
        let (to_server, to_client) = connect(client.create_endpoint(config).unwrap(), server.create_endpoint(config).unwrap());
        Self { client, server, to_server, to_client, ended: RefCell::default() }
    }

    fn small() -> Self {
        Self::new(ContextBuilder::new, &small())
    }

    fn poll(&self) {
        for context in [&self.client, &self.server] {
            let push = |serial, outcome: Outcome<'_>| {
                self.ended.borrow_mut().push((serial, outcome.map(|bytes| bytes.to_vec())));
            };
            context.poll(push).unwrap();
        }
    }

    fn echo_all(&self) {
        while let Some(request) = self.server.recv() {
            let data = request.data().to_vec();
            request.reply(&data).unwrap();
        }
    }

    /// Polls until `calls` calls have ended, and returns them; fails when nothing moves any more.
    fn finish(&self, calls: usize) -> Vec<(u64, Ended)> {
        for _ in 0..10_000 {
            if self.ended.borrow().len() >= calls {
                return self.ended.take();
            }
            self.poll();
            self.echo_all();
        }
        panic!("{} of {calls} calls ended; {:?}", self.ended.borrow().len(), self.to_server);
    }
}

fn payload(serial: u64, len: usize) -> Vec<u8> {
    (0..len).map(|at| (serial as usize * 7 + at) as u8).collect()
}

/// Every way a batch can travel: inline alone (up to 220 B), inline and gathered, and at every alignment in the ring.
#[test]
fn every_payload_size_comes_back_unchanged() {
    let pair = Pair::small();
    assert_eq!((pair.to_server.max_payload(), pair.to_server.max_response_allowance()), (500, 724));
    for round in 0..3 {
        for len in 0..=500 {
            let serial = round * 1000 + len as u64;
            let sent = payload(serial, len);
            pair.to_server.call(&sent, serial, len).unwrap();
            assert_eq!(pair.finish(1), [(serial, Ok(sent))]);
        }
    }
    assert!(pair.client.stats().wraps > 10);
}

#[test]
fn nothing_leaves_before_a_flush_and_then_all_in_one_write() {
    let pair = Pair::small();
    for serial in 0..8 {
        pair.to_server.call(b"x", serial, 0).unwrap();
    }
    pair.client.drain(|_, _| panic!("no call can have ended")).unwrap();
    pair.server.poll(|_, _| ()).unwrap();
    assert!(pair.server.recv().is_none());
    assert_eq!(pair.client.stats().batches_sent, 0);
    pair.client.flush_endpoints().unwrap();
    pair.server.poll(|_, _| ()).unwrap();
    assert_eq!((pair.client.stats().batches_sent, pair.client.stats().messages_sent), (1, 8));
    let requests: Vec<_> = std::iter::from_fn(|| pair.server.recv()).collect();
    assert_eq!(requests.len(), 8);
    // Dropped without a reply.
    drop(requests);
    assert!(pair.finish(8).iter().all(|(_, outcome)| *outcome == Err(CallFailure::Dropped)));
}

#[test]
fn far_more_calls_than_receives_and_send_entries_lose_nothing() {
    let config = EndpointConfig { batches_in_flight: 2, max_send_wr: 8, ..small() };
    let pair = Pair::new(|device| ContextBuilder::new(device).srq_size(3), &config);
    let (mut next, mut ended) = (0, Vec::new());
    for _ in 0..100_000 {
        if ended.len() == 5_000 {
            break;
        }
        while next < 5_000 {
            match pair.to_server.call(&payload(next, next as usize % 300), next, 300) {
                Ok(_) => next += 1,
                Err(error) if error.is_retryable() => break,
                Err(error) => panic!("{error}"),
            }
        }
        pair.poll();
        pair.echo_all();
        ended.append(&mut pair.ended.borrow_mut());
    }
    assert_eq!(ended.len(), 5_000);
    for (at, (serial, outcome)) in ended.iter().enumerate() {
        assert_eq!((*serial, outcome), (at as u64, &Ok(payload(*serial, at % 300))));
    }
    let stats = pair.client.stats();
    assert!(stats.reads > 0 && stats.wraps > 0 && stats.ring_full + stats.insufficient_credit > 0, "{stats:?}");
}

#[test]
fn replies_in_any_order_and_after_a_long_hold_reach_their_calls() {
    let pair = Pair::small();
    for serial in 0..8 {
        pair.to_server.call(&payload(serial, 40), serial, 40).unwrap();
    }
    pair.poll();
    pair.poll();
    let first = pair.server.recv().unwrap();
    let mut later: Vec<_> = std::iter::from_fn(|| pair.server.recv()).collect();
    while let Some(request) = later.pop() {
        let data = request.data().to_vec();
        request.reply(&data).unwrap();
    }
    let ended = pair.finish(7);
    assert_eq!(ended.iter().map(|(serial, _)| *serial).collect::<Vec<_>>(), [7, 6, 5, 4, 3, 2, 1]);
    // The first is held while others come and go, until the ring behind it is full.
    let mut refused = 0;
    for serial in 8..200 {
        if pair.to_server.call(&payload(serial, 40), serial, 40).is_ok() {
            assert_eq!(pair.finish(1), [(serial, Ok(payload(serial, 40)))]);
        } else {
            refused += 1;
        }
    }
    assert!(refused > 0, "the ring behind a held request must not be reused");
    assert_eq!(first.data().to_vec(), payload(0, 40));
    first.reply(b"late").unwrap();
    assert_eq!(pair.finish(1), [(0, Ok(b"late".to_vec()))]);
    pair.to_server.call(b"", 1, 0).unwrap();
    assert_eq!(pair.finish(1).len(), 1);
}

#[test]
fn a_reply_above_the_allowance_gives_the_handle_back() {
    let pair = Pair::small();
    pair.to_server.call(b"", 3, 4).unwrap();
    pair.poll();
    pair.poll();
    let handle = pair.server.recv().unwrap();
    assert!(handle.endpoint() == pair.to_client);
    let too_long = vec![0; handle.max_reply() + 1];
    let Err(ReplyError::TooLarge { request, len: 21, max: 20 }) = handle.reply(&too_long) else { panic!("taken") };
    request.refuse().unwrap();
    assert_eq!(pair.finish(1), [(3, Err(CallFailure::Refused))]);
}

#[test]
fn a_callback_may_call_reply_and_receive_but_not_poll() {
    let pair = Pair::small();
    pair.to_server.call(b"first", 0, 100).unwrap();
    let mut ended = 0;
    for _ in 0..100 {
        let on_response = |serial: u64, outcome: Outcome<'_>| {
            ended += 1;
            assert!(outcome.is_ok());
            assert_eq!(pair.client.poll(|_, _| ()), Err(PollError::Reentrant));
            assert_eq!(pair.client.drain(|_, _| ()), Err(PollError::Reentrant));
            assert_eq!(pair.client.flush_endpoints(), Err(PollError::Reentrant));
            assert!(matches!(pair.client.create_endpoint(&small()), Err(CreateEndpointError::Reentrant)));
            assert!(pair.client.stats().calls > 0 && pair.client.recv().is_none());
            if serial < 9 {
                pair.to_server.call(b"next", serial + 1, 100).unwrap();
            }
        };
        pair.client.poll(on_response).unwrap();
        pair.server.poll(|_, _| ()).unwrap();
        pair.echo_all();
    }
    assert_eq!(ended, 10);
}

#[test]
fn calls_of_both_sides_at_once_all_end() {
    let pair = Pair::small();
    for round in 0..500 {
        pair.to_server.call(&payload(round, 100), round, 100).unwrap();
        pair.to_client.call(&payload(round, 50), 1_000 + round, 60).unwrap();
        for _ in 0..100 {
            pair.poll();
            pair.echo_all();
            while let Some(request) = pair.client.recv() {
                request.reply(&[1; 60]).unwrap();
            }
            if pair.ended.borrow().len() == 2 {
                break;
            }
        }
        let mut ended = pair.ended.take();
        ended.sort_by_key(|(serial, _)| *serial);
        assert_eq!(ended, [(round, Ok(payload(round, 100))), (1_000 + round, Ok(vec![1; 60]))]);
    }
}

#[test]
fn a_context_may_move_and_when_it_is_dropped_both_ends_know() {
    let mut pair = Pair::small();
    let moved = Box::new(std::mem::replace(&mut pair.server, ContextBuilder::new(device(&LocalFabric::new())).build().unwrap()));
    pair.to_server.call(b"hello", 1, 10).unwrap();
    pair.client.poll(|_, _| ()).unwrap();
    moved.poll(|_, _| ()).unwrap();
    let held = moved.recv().unwrap();
    pair.to_server.call(b"never answered", 2, 10).unwrap();
    drop(moved);
    assert_eq!(held.data().to_vec(), b"hello", "the bytes outlive the context");
    assert!(matches!(held.reply(b""), Err(ReplyError::Closed(CloseReason::ClosedHere))));
    let closed = CallError::Closed { user_data: 9, reason: CloseReason::ClosedHere };
    assert_eq!(pair.to_client.call(b"", 9, 0), Err(closed));
    step_until(|| pair.ended.borrow().len() == 2, || pair.poll());
    let ended = pair.ended.take();
    assert_eq!(ended.len(), 2);
    assert!(ended.iter().all(|(_, outcome)| matches!(outcome, Err(CallFailure::Closed(_)))), "{ended:?}");
    assert!(pair.to_server.closed().is_some());
    assert_eq!(pair.client.stats().calls, 2, "counters of closed connections are kept");
}

/// With nothing left to post, only the keep-alive READ can notice.
fn notice_a_silent_death(step: impl Fn(&Pair)) {
    let mut pair = Pair::new(ContextBuilder::new, &EndpointConfig { keepalive: Duration::from_millis(1), ..small() });
    pair.to_server.call(b"never answered", 1, 10).unwrap();
    pair.client.poll(|_, _| ()).unwrap();
    pair.server.poll(|_, _| ()).unwrap();
    let held = pair.server.recv().unwrap();
    pair.server = ContextBuilder::new(device(&LocalFabric::new())).build().unwrap();
    drop(held);
    step_until(|| !pair.ended.borrow().is_empty(), || step(&pair));
    assert!(matches!(pair.ended.take()[..], [(1, Err(CallFailure::Closed(CloseReason::Disconnected)))]));
    assert!(pair.client.stats().reads > 0);
}

#[test]
fn a_peer_that_dies_silently_is_noticed_by_polls() {
    notice_a_silent_death(Pair::poll);
}

#[test]
fn a_peer_that_dies_silently_is_noticed_by_drains_and_flushes() {
    notice_a_silent_death(|pair| {
        let push = |serial, outcome: Outcome<'_>| pair.ended.borrow_mut().push((serial, outcome.map(|bytes| bytes.to_vec())));
        pair.client.drain(push).unwrap();
        pair.client.flush_endpoints().unwrap();
    });
}

/// Else an owner that drains could never replace an endpoint whose peer died.
#[test]
fn a_drain_gives_back_the_share_of_an_endpoint_that_ended() {
    let fabric = LocalFabric::new();
    let client: Context<u64> = ContextBuilder::new(device(&fabric)).srq_size(48).build().unwrap();
    let server: Context<u64> = ContextBuilder::new(device(&fabric)).build().unwrap();
    let (endpoint, _peer) = connect(client.create_endpoint(&small()).unwrap(), server.create_endpoint(&small()).unwrap());
    endpoint.call(b"never answered", 1, 0).unwrap();
    client.flush_endpoints().unwrap();
    assert!(matches!(client.create_endpoint(&small()), Err(CreateEndpointError::SrqTooSmall { .. })));
    drop(server);
    endpoint.call(b"never sent", 2, 0).unwrap();
    client.flush_endpoints().unwrap();
    let ended = RefCell::new(0);
    let drain = || {
        client.drain(|_, outcome| *ended.borrow_mut() += u32::from(outcome.is_err())).unwrap();
    };
    step_until(|| *ended.borrow() == 2, drain);
    assert_eq!(*ended.borrow(), 2);
    drop(endpoint);
    client.create_endpoint(&small()).unwrap();
}

/// The dead connection is ahead of the living one on the list of those to be served, and has more calls than one panic ends.
#[test]
fn a_callback_that_panics_loses_no_connection_and_no_call() {
    let fabric = LocalFabric::new();
    let client: Context<u64> = ContextBuilder::new(device(&fabric)).build().unwrap();
    let server: Context<u64> = ContextBuilder::new(device(&fabric)).build().unwrap();
    let doomed: Context<u64> = ContextBuilder::new(device(&fabric)).build().unwrap();
    let (dead, _peer) = connect(client.create_endpoint(&small()).unwrap(), doomed.create_endpoint(&small()).unwrap());
    let (alive, _peer) = connect(client.create_endpoint(&small()).unwrap(), server.create_endpoint(&small()).unwrap());
    drop(doomed);
    for serial in 0..4 {
        dead.call(b"", serial, 0).unwrap();
    }
    let (failed, answered) = (RefCell::new(Vec::new()), RefCell::new(Vec::new()));
    let poll = || {
        let on_response = |serial, outcome: Outcome<'_>| match outcome {
            Ok(_) => answered.borrow_mut().push(serial),
            Err(_) => {
                failed.borrow_mut().push(serial);
                // As `panic!`, without its message.
                std::panic::resume_unwind(Box::new(serial));
            }
        };
        let _ = catch_unwind(AssertUnwindSafe(|| client.poll(on_response)));
        server.poll(|_, _| ()).unwrap();
        while let Some(request) = server.recv() {
            request.reply(b"").unwrap();
        }
    };
    step_until(|| !failed.borrow().is_empty(), poll);
    alive.call(b"", 10, 0).unwrap();
    step_until(|| failed.borrow().len() == 4 && answered.borrow().len() == 1, poll);
    alive.call(b"", 11, 0).unwrap();
    step_until(|| answered.borrow().len() == 2, poll);
    failed.borrow_mut().sort_unstable();
    assert_eq!((failed.take(), answered.take()), (vec![0, 1, 2, 3], vec![10, 11]));
    assert_eq!(dead.closed(), Some(CloseReason::Disconnected));
}

/// Four responses and a request arrive in one batch; each response's callback panics.
#[test]
fn a_callback_that_panics_loses_nothing_of_the_batch_it_came_in() {
    let pair = Pair::small();
    for serial in 0..4 {
        pair.to_server.call(b"", serial, 0).unwrap();
    }
    pair.client.poll(|_, _| ()).unwrap();
    pair.server.drain(|_, _| ()).unwrap();
    pair.echo_all();
    pair.to_client.call(b"behind", 9, 0).unwrap();
    pair.server.flush_endpoints().unwrap();
    let mut answered = Vec::new();
    for _ in 0..10 {
        let on_response = |serial, _: Outcome<'_>| {
            answered.push(serial);
            std::panic::resume_unwind(Box::new(serial));
        };
        let _ = catch_unwind(AssertUnwindSafe(|| pair.client.drain(on_response)));
    }
    assert_eq!(answered, [0, 1, 2, 3]);
    assert_eq!(pair.client.recv().unwrap().data().to_vec(), b"behind");
}

/// A queue pair that fails gives a completion for everything posted. The peers allow 32 batches in flight, this end's queue only 1 each.
#[test]
fn peers_that_die_with_everything_in_flight_overrun_no_completion_queue() {
    let fabric = LocalFabric::new();
    let client: Context<u64> = ContextBuilder::new(device(&fabric)).srq_size(48).cq_size(64).build().unwrap();
    let server: Context<u64> = ContextBuilder::new(device(&fabric)).build().unwrap();
    let doomed: Context<u64> = ContextBuilder::new(device(&fabric)).build().unwrap();
    let mine = EndpointConfig { batches_in_flight: 1, ..small() };
    let to = |peer: &Context<u64>| connect(client.create_endpoint(&mine).unwrap(), peer.create_endpoint(&small()).unwrap()).0;
    let alive = to(&server);
    let dead: Vec<_> = (0..6).map(|_| to(&doomed)).collect();
    drop(doomed);
    let mut taken = 0;
    for _ in 0..32 {
        for endpoint in &dead {
            taken += usize::from(endpoint.call(b"", 0, 0).is_ok());
        }
        client.flush_endpoints().unwrap();
    }
    let (failed, answered) = (RefCell::new(0), RefCell::new(0));
    let poll = || {
        let on_response = |_, outcome: Outcome<'_>| *if outcome.is_ok() { &answered } else { &failed }.borrow_mut() += 1;
        client.poll(on_response).unwrap();
        server.poll(|_, _| ()).unwrap();
        while let Some(request) = server.recv() {
            request.reply(b"").unwrap();
        }
    };
    step_until(|| *failed.borrow() == taken, poll);
    assert_eq!(*failed.borrow(), taken);
    assert!(dead.iter().all(|endpoint| endpoint.closed().is_some()));
    // More than the living connection's queue holds, so that its completions must still come.
    for call in 1..=1_000 {
        alive.call(b"", 0, 0).unwrap();
        step_until(|| *answered.borrow() == call, poll);
    }
    assert_eq!(*answered.borrow(), 1_000);
}

#[test]
fn endpoints_beyond_the_queues_are_refused_with_the_size_needed() {
    let fabric = LocalFabric::new();
    let context: Context<u64> = ContextBuilder::new(device(&fabric)).srq_size(100).build().unwrap();
    let config = EndpointConfig { batches_in_flight: 50, ..small() };
    let first = context.create_endpoint(&config).unwrap();
    match context.create_endpoint(&config) {
        Err(CreateEndpointError::SrqTooSmall { wanted: 50, needed: 150, depth }) => assert!((100..150).contains(&depth)),
        other => panic!("{other:?}"),
    }
    drop(first);
    let _again = context.create_endpoint(&config).unwrap();
    let none = EndpointConfig { batches_in_flight: 0, ..small() };
    assert!(matches!(context.create_endpoint(&none), Err(CreateEndpointError::SrqTooSmall { wanted: 0, .. })));
    // One completion per batch in flight and 8, but never more than the send queue has entries.
    let few: Context<u64> = ContextBuilder::new(device(&fabric)).srq_size(63).cq_size(64).build().unwrap();
    let config = EndpointConfig { batches_in_flight: 14, ..small() };
    let (first, _second) = (few.create_endpoint(&config).unwrap(), few.create_endpoint(&config).unwrap());
    assert!(matches!(few.create_endpoint(&config), Err(CreateEndpointError::CqTooSmall { needed: 66, entries: 64 })));
    let _shallow = few.create_endpoint(&EndpointConfig { max_send_wr: 16, ..config.clone() }).unwrap();
    drop(first);
    let _again = few.create_endpoint(&config).unwrap();
    assert!(ContextBuilder::new(device(&fabric)).srq_size(100).cq_size(8).build::<u64>().is_err());
}

#[test]
fn illegal_configurations_are_refused() {
    let fabric = LocalFabric::new();
    let context: Context<u64> = ContextBuilder::new(device(&fabric)).build().unwrap();
    for ring_size in [0, 2048, 5000, 1 << 40] {
        let config = EndpointConfig { ring_size, ..small() };
        let error = context.create_endpoint(&config).unwrap_err();
        assert!(matches!(error, CreateEndpointError::RingSize(_)));
        assert!(error.to_string().contains("4096 to 268435456"), "{error}");
    }
    for credit in [1025, 1056, 16] {
        let config = EndpointConfig { initial_credit: Some(credit), ..small() };
        assert!(matches!(context.create_endpoint(&config), Err(CreateEndpointError::InitialCredit { max: 1024, .. })));
    }
}

#[test]
fn endpoints_that_cannot_talk_refuse_and_come_back() {
    let fabric = LocalFabric::new();
    let context: Context<u64> = ContextBuilder::new(device(&fabric)).build().unwrap();
    let a = context.create_endpoint(&small()).unwrap();
    let large = context.create_endpoint(&EndpointConfig { ring_size: 8192, ..small() }).unwrap();
    let error = a.connect(&large.local_info()).unwrap_err();
    assert!(matches!(error.reason, ConnectFailure::Exchange(ExchangeError::RingSize { local: 4096, remote: 8192 })));
    let a = error.endpoint;
    let mut nowhere = a.local_info();
    nowhere.address.qpn = 0xff_ffff;
    let error = a.connect(&nowhere).unwrap_err();
    assert!(matches!(error.reason, ConnectFailure::Qp(_)), "{error}");
    let a = error.endpoint;
    let mut overflowing = large.local_info();
    (overflowing.ring_size, overflowing.recv_ring_addr) = (a.local_info().ring_size, u64::MAX - 1024);
    let error = a.connect(&overflowing).unwrap_err();
    assert!(matches!(error.reason, ConnectFailure::Exchange(ExchangeError::Field { field: "receive ring address", .. })), "{error}");
    let a = error.endpoint;
    let b = context.create_endpoint(&small()).unwrap();
    let (a, _b) = connect(a, b);
    a.call(b"still usable", 1, 20).unwrap();
    let mut answers = 0;
    for _ in 0..100 {
        context.poll(|_, outcome| answers += usize::from(outcome.is_ok())).unwrap();
        while let Some(request) = context.recv() {
            request.reply(b"yes").unwrap();
        }
    }
    assert_eq!(answers, 1);
    let orphan = context.create_endpoint(&small()).unwrap();
    let record = orphan.local_info();
    drop(context);
    assert!(matches!(orphan.connect(&record).unwrap_err().reason, ConnectFailure::ContextGone));
}

#[test]
fn ends_of_unequal_mtus_use_the_smaller_one() {
    let fabric = LocalFabric::new();
    let context: Context<u64> = ContextBuilder::new(device(&fabric)).build().unwrap();
    let (a, b) = (context.create_endpoint(&small()).unwrap(), context.create_endpoint(&small()).unwrap());
    let (record_a, mut record_b) = (a.local_info(), b.local_info());
    record_b.address.mtu = 1024;
    let (a, b) = (a.connect(&record_b).unwrap(), b.connect(&record_a).unwrap());
    assert_eq!((a.path_mtu(), b.path_mtu()), (1024, 4096));
}

/// A peer that is no copyrpc: its garbage ends its own connection, the other goes on.
#[test]
fn a_peer_that_talks_garbage_ends_its_own_connection_only() {
    let pair = Pair::small();
    // Replace the good records by one that points into the middle of the victim's ring, so all that this peer writes is misplaced.
    let victim = pair.server.create_endpoint(&small()).unwrap();
    let liar = pair.client.create_endpoint(&small()).unwrap();
    let mut wrong_place = victim.local_info();
    wrong_place.published_addr = wrong_place.recv_ring_addr;
    wrong_place.published_rkey = wrong_place.recv_ring_rkey;
    let record = liar.local_info();
    let victim = victim.connect(&record).unwrap();
    let mut shifted = wrong_place;
    shifted.recv_ring_addr += 1024;
    let liar = liar.connect(&shifted).unwrap();
    victim.call(b"waiting", 77, 0).unwrap();
    pair.server.flush_endpoints().unwrap();
    // The victim finds no batch where it looks: zero bytes, so a batch without messages that is not empty.
    liar.call(&[0xff; 100], 1, 0).unwrap();
    pair.client.flush_endpoints().unwrap();
    let mut failures = Vec::new();
    for _ in 0..10 {
        pair.server.poll(|serial, outcome| failures.push((serial, outcome.map(|bytes| bytes.to_vec())))).unwrap();
    }
    assert!(matches!(victim.closed(), Some(CloseReason::Protocol(_))), "{:?}", victim.closed());
    assert!(matches!(failures[..], [(77, Err(CallFailure::Closed(CloseReason::Protocol(_))))]), "{failures:?}");
    pair.to_server.call(b"unharmed", 5, 20).unwrap();
    let ended = pair.finish(1);
    assert!(ended.contains(&(5, Ok(b"unharmed".to_vec()))), "{ended:?}");
}
