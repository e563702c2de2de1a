//! Deadlines, cancelled calls and stalled peers through the driver, both ends in one thread, in
//! virtual time. The rules are tested in `protocol`.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use copyrpc::{
    CallFailure, CloseReason, Context, ContextBuilder, Endpoint, EndpointConfig, Outcome,
};
use mlx5::{Clock, DeviceSpec, FabricSpec, LocalFabric, SoftOptions, Timing};

const NS: Duration = Duration::from_nanos(1);
const SHORT: Duration = Duration::from_millis(2);
const LONG: Duration = Duration::from_secs(3600);

type Ended = Vec<(u64, Result<Vec<u8>, CallFailure>)>;

struct World {
    net: Net,
    client: Context<u64>,
    server: Context<u64>,
    config: EndpointConfig,
}

/// The fabric on which the contexts of a test meet, and their clock.
#[derive(Default)]
struct Net {
    fabric: LocalFabric,
    now_ns: Arc<AtomicU64>,
}

impl Net {
    fn context(&self) -> Context<u64> {
        let (fabric, clock) = (
            FabricSpec::Local(self.fabric.clone()),
            Clock::Manual(Arc::clone(&self.now_ns)),
        );
        ContextBuilder::new(DeviceSpec::Soft(SoftOptions {
            fabric,
            clock,
            ..SoftOptions::default()
        }))
        .build()
        .unwrap()
    }
}

impl World {
    fn new(config: EndpointConfig) -> Self {
        let net = Net::default();
        Self {
            client: net.context(),
            server: net.context(),
            net,
            config,
        }
    }

    fn pass(&self, time: Duration) {
        self.net
            .now_ns
            .fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    fn connect(&self, server: &Context<u64>) -> (Endpoint<u64>, Endpoint<u64>) {
        let (a, b) = (
            self.client.create_endpoint(&self.config).unwrap(),
            server.create_endpoint(&self.config).unwrap(),
        );
        let (record_a, record_b) = (a.local_info(), b.local_info());
        (a.connect(&record_b).unwrap(), b.connect(&record_a).unwrap())
    }
}

fn small() -> EndpointConfig {
    EndpointConfig {
        ring_size: 4096,
        ..EndpointConfig::default()
    }
}

/// Steps until `is_done`. Operations are executed at once, so few steps are enough.
fn step_until(mut is_done: impl FnMut() -> bool, mut step: impl FnMut()) {
    for _ in 0..1_000 {
        if is_done() {
            return;
        }
        step();
    }
    panic!("nothing came of it");
}

fn collect(ended: &RefCell<Ended>) -> impl FnMut(u64, Outcome<'_>) {
    |serial, outcome| {
        ended
            .borrow_mut()
            .push((serial, outcome.map(|bytes| bytes.to_vec())))
    }
}

fn echo_all(server: &Context<u64>) {
    server.poll(|_, _| ()).unwrap();
    while let Some(request) = server.recv() {
        let data = request.data().to_vec();
        request.reply(&data).unwrap();
    }
    server.flush_endpoints().unwrap();
}

const EXCEEDED: Result<Vec<u8>, CallFailure> = Err(CallFailure::TimedOut);

#[test]
fn a_call_without_a_reply_ends_with_its_deadline_once_and_its_late_reply_nowhere() {
    let world = World::new(small());
    let (endpoint, _peer) = world.connect(&world.server);
    let ended = RefCell::new(Vec::new());
    endpoint.call_within(b"first", 1, 10, LONG).unwrap();
    endpoint.call_within(b"second", 2, 10, SHORT).unwrap();
    endpoint
        .call_within(b"third", 3, 10, Duration::MAX)
        .unwrap();
    let poll = || {
        world.client.poll(collect(&ended)).unwrap();
    };
    world.pass(SHORT + NS);
    step_until(|| !ended.borrow().is_empty(), poll);
    assert_eq!(ended.take(), [(2, EXCEEDED)]);
    assert_eq!(endpoint.outstanding_calls(), 2);
    step_until(
        || ended.borrow().len() == 2,
        || {
            echo_all(&world.server);
            poll();
        },
    );
    assert_eq!(
        ended.take(),
        [(1, Ok(b"first".to_vec())), (3, Ok(b"third".to_vec()))]
    );
    let stats = world.client.stats();
    assert_eq!(
        (
            stats.deadlines_exceeded,
            stats.late_responses,
            stats.stale_responses
        ),
        (1, 1, 0)
    );
}

/// A drain sends nothing, but reads the clock.
#[test]
fn deadlines_pass_also_in_drains_alone() {
    let world = World::new(small());
    let (endpoint, _peer) = world.connect(&world.server);
    let ended = RefCell::new(Vec::new());
    for serial in 0..3 {
        endpoint.call_within(b"", serial, 0, SHORT).unwrap();
    }
    let mut moved = 0;
    world.pass(SHORT + NS);
    step_until(
        || ended.borrow().len() == 3,
        || moved += world.client.drain(collect(&ended)).unwrap(),
    );
    assert_eq!(moved, 3, "an ended call is something that moved");
    assert_eq!(world.client.stats().batches_sent, 0);
}

#[test]
fn a_reply_that_is_there_when_the_deadline_has_passed_wins() {
    let world = World::new(small());
    let (endpoint, _peer) = world.connect(&world.server);
    let ended = RefCell::new(Vec::new());
    endpoint.call_within(b"x", 1, 10, SHORT).unwrap();
    world.client.flush_endpoints().unwrap();
    echo_all(&world.server);
    world.pass(2 * SHORT);
    step_until(
        || !ended.borrow().is_empty(),
        || assert!(world.client.poll(collect(&ended)).is_ok()),
    );
    assert_eq!(ended.take(), [(1, Ok(b"x".to_vec()))]);
}

/// The time between the last poll and the call does not count.
#[test]
fn a_deadline_counts_from_the_call() {
    let world = World::new(small());
    let (endpoint, _peer) = world.connect(&world.server);
    let ended = RefCell::new(Vec::new());
    world.client.poll(|_, _| ()).unwrap();
    world.pass(LONG);
    endpoint.call_within(b"", 1, 0, SHORT).unwrap();
    world.pass(SHORT);
    for _ in 0..100 {
        world.client.poll(collect(&ended)).unwrap();
    }
    assert_eq!(ended.take(), [], "a deadline is never early");
    world.pass(NS);
    world.client.poll(collect(&ended)).unwrap();
    assert_eq!(ended.take(), [(1, EXCEEDED)]);
}

/// In real time the deadline is an hour away.
#[test]
fn a_sleeper_wakes_for_a_deadline_that_has_passed_on_its_devices_clock() {
    let (done, is_done) = mpsc::channel();
    let (start, is_started) = mpsc::channel::<Arc<AtomicU64>>();
    std::thread::spawn(move || {
        let now_ns = is_started.recv().unwrap();
        // Usually the other thread sleeps by now; if it does not yet sleep, it finds the deadline
        // passed.
        std::thread::sleep(SHORT);
        now_ns.fetch_add((LONG + NS).as_nanos() as u64, Ordering::Relaxed);
    });
    std::thread::spawn(move || {
        let world = World::new(small());
        let (endpoint, _peer) = world.connect(&world.server);
        let ended = RefCell::new(Vec::new());
        endpoint.call_within(b"", 1, 0, LONG).unwrap();
        world.client.flush_endpoints().unwrap();
        start.send(Arc::clone(&world.net.now_ns)).unwrap();
        while ended.borrow().is_empty() {
            world.client.wait(None).unwrap();
            world.client.poll(collect(&ended)).unwrap();
        }
        done.send(ended.take()).unwrap();
    });
    // A hang ends here.
    assert_eq!(
        is_done.recv_timeout(Duration::from_secs(100)),
        Ok(vec![(1, EXCEEDED)])
    );
}

#[test]
fn a_call_may_be_made_and_cancelled_from_the_callback_of_one_that_ran_out_of_time() {
    let world = World::new(small());
    let (endpoint, _peer) = world.connect(&world.server);
    let token = endpoint.call_within(b"", 100, 0, SHORT).unwrap();
    endpoint.call_within(b"", 0, 0, Duration::ZERO).unwrap();
    let mut ended = Vec::new();
    let mut polls = 0;
    while ended.len() < 10 {
        let before = ended.len();
        let on_response = |serial: u64, outcome: Outcome<'_>| {
            assert!(matches!(outcome, Err(CallFailure::TimedOut)));
            assert_eq!(endpoint.cancel(token), (serial == 0).then_some(100));
            ended.push(serial);
            endpoint
                .call_within(b"", serial + 1, 0, Duration::ZERO)
                .unwrap();
        };
        world.pass(NS);
        world.client.poll(on_response).unwrap();
        assert!(
            ended.len() <= before + 1,
            "a call made in a callback has its end in a later poll"
        );
        polls += 1;
        assert!(polls < 100_000);
    }
    assert_eq!(ended, (0..10).collect::<Vec<_>>());
}

#[test]
fn a_callback_that_panics_in_an_expiry_loses_no_other_deadline() {
    let world = World::new(small());
    let (first, _peer) = world.connect(&world.server);
    let (second, _peer) = world.connect(&world.server);
    for serial in 0..4 {
        first.call_within(b"", serial, 0, SHORT).unwrap();
        second.call_within(b"", 10 + serial, 0, SHORT).unwrap();
    }
    let ended = RefCell::new(Vec::new());
    let drain = || {
        let on_response = |serial, _: Outcome<'_>| {
            ended.borrow_mut().push(serial);
            std::panic::resume_unwind(Box::new(serial));
        };
        let _ = catch_unwind(AssertUnwindSafe(|| world.client.drain(on_response)));
    };
    world.pass(SHORT + NS);
    step_until(|| ended.borrow().len() == 8, drain);
    let mut ended = ended.take();
    ended.sort_unstable();
    assert_eq!(ended, [0, 1, 2, 3, 10, 11, 12, 13]);
}

#[test]
fn a_token_ends_the_call_of_its_own_endpoint_only() {
    let world = World::new(small());
    let (first, _peer) = world.connect(&world.server);
    let (second, _peer) = world.connect(&world.server);
    let (a, b) = (
        first.call(b"a", 1, 10).unwrap(),
        second.call(b"b", 2, 10).unwrap(),
    );
    assert_ne!(a, b);
    assert_eq!(
        (second.cancel(a), first.cancel(a), first.cancel(a)),
        (None, Some(1), None)
    );
    let ended = RefCell::new(Vec::new());
    let step = || {
        world.client.poll(collect(&ended)).unwrap();
        echo_all(&world.server);
    };
    step_until(
        || world.client.stats().late_responses == 1 && !ended.borrow().is_empty(),
        step,
    );
    assert_eq!(ended.take(), [(2, Ok(b"b".to_vec()))]);
    assert_eq!(second.cancel(b), None);
}

/// A context that is not polled is a process that is stopped. The other server holds a request for
/// much longer than the timeout.
#[test]
fn a_stalled_peer_is_given_up_and_one_that_holds_a_request_is_not() {
    const STALL: Duration = Duration::from_millis(200);
    const STEP: Duration = Duration::from_millis(1);
    let config = EndpointConfig {
        keepalive: Duration::from_millis(5),
        stall_timeout: STALL,
        ..small()
    };
    let world = World::new(config);
    let stopped = world.net.context();
    let (dead, _peer) = world.connect(&stopped);
    let (alive, _peer) = world.connect(&world.server);
    let (ended, mut held) = (RefCell::new(Vec::new()), None);
    alive.call(b"held", 1, 10).unwrap();
    dead.call(b"", 2, 10).unwrap();
    dead.call(b"", 3, 10).unwrap();
    let step = |held: &mut Option<_>| {
        world.pass(STEP);
        world.client.poll(collect(&ended)).unwrap();
        world.server.poll(|_, _| ()).unwrap();
        if let Some(request) = world.server.recv() {
            *held = Some(request);
        }
    };
    let start_ns = world.client.device().now_ns();
    step_until(|| ended.borrow().len() == 2, || step(&mut held));
    let took = Duration::from_nanos(world.client.device().now_ns() - start_ns);
    // Connections are checked every 10 ms.
    assert!(
        (STALL..STALL + Duration::from_millis(30)).contains(&took),
        "{took:?}"
    );
    let mut stalled = ended.take();
    stalled.sort_by_key(|(serial, _)| *serial);
    let failure = Err(CallFailure::Closed(CloseReason::PeerStalled));
    assert_eq!(stalled, [(2, failure.clone()), (3, failure)]);
    for _ in 0..4 * STALL.as_millis() / STEP.as_millis() {
        step(&mut held);
    }
    assert_eq!(
        (alive.closed(), dead.closed()),
        (None, Some(CloseReason::PeerStalled))
    );
    held.unwrap().reply(b"at last").unwrap();
    step_until(|| !ended.borrow().is_empty(), || step(&mut None));
    assert_eq!(ended.take(), [(1, Ok(b"at last".to_vec()))]);
    // A new endpoint to the same process, which runs again.
    let (again, _peer) = world.connect(&stopped);
    again.call(b"again", 4, 10).unwrap();
    let step = || {
        world.client.poll(collect(&ended)).unwrap();
        echo_all(&stopped);
    };
    step_until(|| !ended.borrow().is_empty(), step);
    assert_eq!(ended.take(), [(4, Ok(b"again".to_vec()))]);
}

#[test]
fn a_reply_arrives_though_its_context_is_dropped_as_soon_as_it_was_given() {
    let fabric = LocalFabric::new();
    let context = || {
        let (fabric, timing) = (
            FabricSpec::Local(fabric.clone()),
            Timing::Delay { ns: 1_000_000 },
        );
        ContextBuilder::new(DeviceSpec::Soft(SoftOptions {
            fabric,
            timing,
            ..SoftOptions::default()
        }))
        .build::<u64>()
        .unwrap()
    };
    let (client, server) = (context(), context());
    let (a, b) = [&client, &server]
        .map(|context| context.create_endpoint(&small()).unwrap())
        .into();
    let (record_a, record_b) = (a.local_info(), b.local_info());
    let (endpoint, _peer) = (a.connect(&record_b).unwrap(), b.connect(&record_a).unwrap());
    endpoint.call(b"ping", 1, 10).unwrap();

    let ended = RefCell::new(Vec::new());
    let poll = || client.poll(collect(&ended)).unwrap();
    let request = within_a_minute(|| {
        poll();
        server.poll(|_, _| ()).unwrap();
        server.recv()
    });
    request.reply(b"pong").unwrap();
    drop(server);
    within_a_minute(|| (poll() > 0 && !ended.borrow().is_empty()).then_some(()));
    assert_eq!(ended.take(), [(1, Ok(b"pong".to_vec()))]);
}

#[test]
fn a_context_that_is_dropped_does_not_wait_for_peers_that_take_nothing() {
    let world = World::new(small());
    let pending = world.client.create_endpoint(&world.config).unwrap();
    let nowhere = world.server.create_endpoint(&world.config).unwrap();
    // The peer's queue pair is never connected: a WRITE to it is retried.
    let endpoint = pending.connect(&nowhere.local_info()).unwrap();
    endpoint.call(b"ping", 1, 10).unwrap();
    let start = Instant::now();
    drop(world.client);
    assert!(
        start.elapsed() < Duration::from_secs(10),
        "it took {:?}",
        start.elapsed()
    );
}

/// Repeats `attempt` until it returns a value, at most for a minute of system time.
fn within_a_minute<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = attempt() {
            return value;
        }
        assert!(
            start.elapsed() < Duration::from_secs(60),
            "nothing came of it"
        );
    }
}
