//! A server and its clients on the software HCA, in one thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::books::handlers;
use crate::support::caller::{Caller, call_sync};
use crate::support::connect;
use crate::support::plan::{SLOT_BYTES, WORK, request, response};
use scalerpc::mlx5::{AsyncEvent, Clock, Device, DeviceSpec, Rule, SoftOptions, Timing};
use scalerpc::protocol::DEFAULT_TIMEOUT_NS;
use scalerpc::rdma::{PendingClient, RdmaOptions};
use scalerpc::{
    CallFailure, CloseReason, Grouping, HandlerError, Handlers, RdmaServer, ServerConfig, State,
};

/// A further type of requests in some tests, in addition to [`WORK`].
const FAILS: u16 = 2;
/// Calls of each client.
const QUOTA: u64 = 300;
const WATCHDOG: Duration = Duration::from_secs(60);

/// Returns a configuration of two groups of four for eight clients, so that slices end all the
/// time.
fn config() -> ServerConfig {
    let base = ServerConfig {
        max_clients: 8,
        depth: 4,
        slot_bytes: SLOT_BYTES,
        ..ServerConfig::default()
    };
    ServerConfig {
        group_size: 4,
        slice_ns: 20_000,
        ..base
    }
}

/// Runs until each caller has made `quota` calls, each of which got its response.
fn run(server: &mut RdmaServer, handlers: &mut Handlers, callers: &mut [Caller], quota: u64) {
    let start = Instant::now();
    while callers
        .iter()
        .any(|caller| caller.made() < quota || caller.outstanding() > 0)
    {
        assert!(
            start.elapsed() < WATCHDOG,
            "{} under way, {:?}",
            server.under_way(),
            server.stats()
        );
        for caller in &mut *callers {
            caller.step(quota);
        }
        server.step(handlers, 16);
    }
    callers
        .iter()
        .for_each(|caller| assert_eq!(caller.failures, []));
}

/// Lets eight clients make all their calls, each of which gets its response.
fn eight_clients(device: &DeviceSpec, config: &ServerConfig) -> (RdmaServer, Vec<Caller>) {
    let mut server = RdmaServer::new(device, config).unwrap();
    let (mut handlers, books) = handlers(&server);
    let mut callers: Vec<_> = (0..8)
        .map(|name| Caller::new(connect(device, &mut server), name))
        .collect();
    assert_eq!(server.groups(), 8 / config.group_size as usize);
    run(&mut server, &mut handlers, &mut callers, QUOTA);
    callers
        .iter()
        .for_each(|caller| books.borrow_mut().close(caller.name, QUOTA));
    let stats = server.stats();
    assert_eq!((stats.accepted, stats.garbage), (8 * QUOTA, 0));
    assert!(stats.slices > 3, "{stats:?}");
    let direct: u64 = callers
        .iter()
        .map(|caller| caller.client.stats().direct)
        .sum();
    assert!(
        direct > 100,
        "requests are written in PROCESS: {direct} of {}",
        8 * QUOTA
    );
    (server, callers)
}

/// If the client slept before its call is announced, the server would never wake it.
#[test]
fn a_client_does_not_sleep_on_a_call_that_no_poll_has_sent() {
    let device = DeviceSpec::default();
    let mut server = RdmaServer::new(&device, &config()).unwrap();
    let (mut handlers, _) = handlers(&server);
    let offered = server.offer().unwrap();
    let own = Device::open(device).unwrap();
    let client = PendingClient::on(
        &own,
        offered.record(),
        &RdmaOptions {
            sleeps: true,
            ..RdmaOptions::default()
        },
    )
    .unwrap();
    let admission = server.admit(offered, &client.record()).unwrap();
    let mut client = client.admitted(&admission);
    client.poll();
    assert!(
        !client.wait(Some(Duration::from_millis(1))),
        "there is nothing to do"
    );
    client.call(WORK, &request(0, 0)).unwrap();
    assert!(client.wait(None), "the time ran out");
    let start = Instant::now();
    while client.poll_completion(&mut []).is_none() {
        assert!(start.elapsed() < WATCHDOG);
        client.poll();
        server.step(&mut handlers, 16);
    }
}

#[test]
fn eight_clients_of_two_groups_get_every_response_written() {
    eight_clients(&DeviceSpec::default(), &config());
}

#[test]
fn groups_of_one_client_take_turns() {
    eight_clients(
        &DeviceSpec::default(),
        &ServerConfig {
            group_size: 1,
            ..config()
        },
    );
}

/// Buffers are gathered late, and results arrive late: a buffer that is reused too early would send
/// wrong bytes, and the check names it. A staging slot is reused when its response arrived, which
/// may be before the completion of the request's WRITE (S21). No other buffer is.
#[test]
fn no_buffer_is_reused_while_the_device_may_still_read_it() {
    let options = SoftOptions {
        timing: Timing::Delay { ns: 3_000 },
        strict: true,
        ..SoftOptions::default()
    };
    let (server, callers) = eight_clients(&DeviceSpec::Soft(options), &config());
    assert_eq!(server.device().soft().unwrap().take_violations(), []);
    for caller in &callers {
        let violations = caller.client.device().soft().unwrap().take_violations();
        assert!(
            violations
                .iter()
                .all(|violation| violation.rule == Rule::SourceChanged),
            "{violations:?}"
        );
    }
}

#[test]
fn a_synchronous_call_ends_with_its_response_or_says_why() {
    let mut server = RdmaServer::new(&DeviceSpec::default(), &config()).unwrap();
    let (mut handlers, _books) = handlers(&server);
    handlers.insert(FAILS, |_: &[u8], _: &mut [u8]| Err(HandlerError));
    let mut client = connect(&DeviceSpec::default(), &mut server);
    let mut bytes = [0; SLOT_BYTES as usize];
    let mut serve = || {
        server.step(&mut handlers, 1);
    };
    let max = client.max_payload();
    for number in 0..10 {
        let ended = call_sync(
            &mut client,
            WORK,
            &request(1, number),
            &mut bytes,
            &mut serve,
        );
        let len = ended.unwrap().unwrap();
        assert_eq!(bytes[..len], response(1, number));
        // These failures do not block the next call.
        let failure = call_sync(&mut client, 99, &[], &mut bytes, &mut serve);
        assert_eq!(failure, Ok(Err(CallFailure::UnknownType)));
        let failure = call_sync(&mut client, FAILS, &[], &mut bytes, &mut serve);
        assert_eq!(failure, Ok(Err(CallFailure::Refused)));
        let long = vec![0; max + 1];
        let refused = call_sync(&mut client, WORK, &long, &mut bytes, &mut serve);
        let len = max + 1;
        assert_eq!(refused, Err(CallFailure::TooLarge { len, max }));
    }
}

/// S25: operations that ask for no completion hold buffers, and entries of the completion queue.
/// Even if there are few of both, enough are free for later clients: no client waits for the probe
/// of another.
#[test]
fn few_buffers_and_few_completions_stop_nobody() {
    let clock = Clock::Manual(Arc::default());
    let device = DeviceSpec::Soft(SoftOptions {
        clock,
        ..SoftOptions::default()
    });
    for (buffers, cq_size) in [(1, 4096), (2, 4096), (8, 4096), (8, 8), (448, 8)] {
        let config = config();
        let config = ServerConfig {
            response_buffers: buffers,
            grouping: Grouping::Off,
            ..config
        };
        let options = RdmaOptions {
            cq_size,
            ..RdmaOptions::default()
        };
        let mut server =
            RdmaServer::on(&Device::open(&device).unwrap(), &config, &options).unwrap();
        let (mut handlers, _books) = handlers(&server);
        let mut callers: Vec<_> = (0..8)
            .map(|name| Caller::new(connect(&device, &mut server), name))
            .collect();
        run(&mut server, &mut handlers, &mut callers, QUOTA);
    }
}

/// S25, S20: the last responses to a client that calls no more have no completion, and a client
/// that disappears then is noticed nevertheless.
#[test]
fn a_client_that_vanishes_after_its_last_response_is_noticed_in_seconds() {
    const STEP_NS: u64 = 1_000_000;
    let now_ns = Arc::new(AtomicU64::new(0));
    let device = DeviceSpec::Soft(SoftOptions {
        clock: Clock::Manual(Arc::clone(&now_ns)),
        ..SoftOptions::default()
    });
    let mut server = RdmaServer::new(&device, &config()).unwrap();
    let (mut handlers, _books) = handlers(&server);
    let mut callers = [Caller::new(connect(&device, &mut server), 1)];
    run(&mut server, &mut handlers, &mut callers, 5);
    assert!(
        server.under_way() > 0,
        "the responses asked for no completion"
    );
    for _ in 0..3_000 {
        now_ns.fetch_add(STEP_NS, Ordering::Relaxed);
        server.step(&mut handlers, 16);
        callers[0].poll();
    }
    assert_eq!(
        (server.under_way(), server.clients()),
        (0, 1),
        "a probe completes them"
    );
    run(&mut server, &mut handlers, &mut callers, 10);
    assert!(server.under_way() > 0);
    drop(callers);
    for _ in 0..3_000 {
        now_ns.fetch_add(STEP_NS, Ordering::Relaxed);
        server.step(&mut handlers, 16);
    }
    assert_eq!((server.under_way(), server.clients()), (0, 0));
}

/// S25: a server that ends gets the completions of its last responses without a probe, and before
/// its time for this is over.
#[test]
fn everything_completes_once_a_server_settles() {
    let device = DeviceSpec::Soft(SoftOptions {
        clock: Clock::Manual(Arc::default()),
        ..SoftOptions::default()
    });
    let mut server = RdmaServer::new(&device, &config()).unwrap();
    let (mut handlers, _books) = handlers(&server);
    let mut callers = [Caller::new(connect(&device, &mut server), 1)];
    run(&mut server, &mut handlers, &mut callers, 5);
    assert!(server.under_way() > 0);
    server.settle();
    // Later responses complete too.
    for quota in [5, 10] {
        run(&mut server, &mut handlers, &mut callers, quota);
        let start = Instant::now();
        while server.under_way() > 0 {
            assert!(start.elapsed() < WATCHDOG);
            server.step(&mut handlers, 16);
        }
    }
}

/// The server does nothing until all calls have ended by their deadline. The calls of the first
/// round were announced, later calls were written into the pool. Their responses arrive afterwards
/// and end no call, but each gives its slot back.
#[test]
fn late_responses_end_no_call_and_give_the_slots_back() {
    const STEP_NS: u64 = 10_000;
    const TIMEOUT_NS: u64 = 100 * STEP_NS;
    let now_ns = Arc::new(AtomicU64::new(0));
    let device = DeviceSpec::Soft(SoftOptions {
        clock: Clock::Manual(Arc::clone(&now_ns)),
        ..SoftOptions::default()
    });
    let config = config();
    let mut server = RdmaServer::new(&device, &config).unwrap();
    let (mut handlers, books) = handlers(&server);
    let mut caller = Caller::new(connect(&device, &mut server), 1);
    caller.client.set_timeout_ns(TIMEOUT_NS);
    let depth = config.depth as usize;
    for round in 1..=5 {
        assert_eq!(
            caller.step(u64::MAX),
            depth,
            "calls are made, and none has ended"
        );
        assert_eq!(matches!(caller.state(), State::Process { .. }), round > 1);
        now_ns.fetch_add(TIMEOUT_NS, Ordering::Relaxed);
        assert_eq!(caller.poll(), depth);
        assert_eq!(
            (caller.failures.len(), caller.call()),
            (round * depth, false),
            "no slot is free before the late responses"
        );
        while caller.client.free_slots() < depth {
            server.step(&mut handlers, 16);
            assert_eq!(caller.poll(), 0, "a late response ends no call");
            assert!(
                now_ns.fetch_add(STEP_NS, Ordering::Relaxed) < 100 * TIMEOUT_NS,
                "the responses do not come"
            );
        }
    }
    assert!(
        caller
            .failures
            .iter()
            .all(|failure| *failure == CallFailure::TimedOut),
        "{:?}",
        caller.failures
    );
    // All requests ran, though late.
    books.borrow_mut().close(1, 5 * u64::from(config.depth));
}

/// The server is absent for longer than the timeout of calls. The first call was announced; the
/// others wait in the client's slots and are never offered. All slots work when the server is back,
/// and again after the next absence.
#[test]
fn every_slot_works_after_the_server_was_away_for_longer_than_calls_may_take() {
    const STEP_NS: u64 = 10_000;
    let now_ns = Arc::new(AtomicU64::new(0));
    let device = DeviceSpec::Soft(SoftOptions {
        clock: Clock::Manual(Arc::clone(&now_ns)),
        ..SoftOptions::default()
    });
    let config = config();
    let depth = config.depth as usize;
    let mut server = RdmaServer::new(&device, &config).unwrap();
    let (mut handlers, _books) = handlers(&server);
    let mut caller = Caller::new(connect(&device, &mut server), 1);
    // With two groups, the caller leaves PROCESS when it has no calls.
    let mut others: Vec<_> = (2..8)
        .map(|name| Caller::new(connect(&device, &mut server), name))
        .collect();
    for round in 0..10 {
        let failed = caller.failures.len();
        assert!(caller.call());
        caller.poll();
        assert_eq!(caller.step(u64::MAX), depth - 1, "round {round}");
        let mut ended = 0;
        for _ in 0..100 {
            now_ns.fetch_add(DEFAULT_TIMEOUT_NS / 100, Ordering::Relaxed);
            ended += caller.poll();
            for other in &mut others {
                other.poll();
            }
        }
        assert_eq!((ended, caller.failures.len()), (depth, failed + depth));
        // Each slot is used many times.
        let end = caller.made() + 20 * depth as u64;
        let limit_ns = now_ns.load(Ordering::Relaxed) + DEFAULT_TIMEOUT_NS;
        while caller.made() < end
            || caller.client.free_slots() < depth
            || caller.state() != State::Idle
        {
            assert!(
                now_ns.fetch_add(STEP_NS, Ordering::Relaxed) < limit_ns,
                "round {round}: the responses do not come"
            );
            caller.step(end);
            for other in &mut others {
                other.step(u64::MAX);
            }
            server.step(&mut handlers, 16);
        }
        assert_eq!(
            (caller.failures.len(), server.stats().garbage),
            (failed + depth, 0),
            "round {round}"
        );
    }
}

/// S26: clients that wait for each call are polled in their calls only. There are more of them than
/// zones, and they pause for longer than a client that is awake may take to release its zone.
#[test]
fn more_clients_than_zones_pause_between_calls_and_none_is_evicted() {
    const STEP_NS: u64 = 1_000;
    const CLIENTS: u64 = 9;
    let now_ns = Arc::new(AtomicU64::new(0));
    let device = DeviceSpec::Soft(SoftOptions {
        clock: Clock::Manual(Arc::clone(&now_ns)),
        ..SoftOptions::default()
    });
    let config = ServerConfig {
        group_size: 2,
        spare_zones: 0,
        drain_ns: 100_000,
        ..config()
    };
    let config = ServerConfig {
        max_clients: CLIENTS as u32,
        ..config
    };
    assert!(CLIENTS as usize > 2 * config.layout().unwrap().zones);
    let mut server = RdmaServer::new(&device, &config).unwrap();
    let (mut handlers, books) = handlers(&server);
    let mut clients: Vec<_> = (0..CLIENTS)
        .map(|_| connect(&device, &mut server))
        .collect();
    let mut serve = |server: &mut RdmaServer| {
        now_ns.fetch_add(STEP_NS, Ordering::Relaxed);
        server.step(&mut handlers, 16);
    };
    let mut bytes = [0; SLOT_BYTES as usize];
    for round in 0..20 {
        for (client, name) in clients.iter_mut().zip(0..) {
            client.set_timeout_ns(config.drain_ns);
            // The second call finds the client with its zone.
            for number in [2 * round, 2 * round + 1] {
                let ended = call_sync(client, WORK, &request(name, number), &mut bytes, || {
                    serve(&mut server)
                });
                let len = ended.unwrap().unwrap();
                assert_eq!(
                    bytes[..len],
                    response(name, number),
                    "round {round}, client {name}"
                );
            }
            assert_eq!(client.state(), State::Resting);
        }
        (0..round % 4 * config.drain_ns / STEP_NS).for_each(|_| serve(&mut server));
    }
    let stats = server.stats();
    assert_eq!((stats.evictions, stats.garbage), (0, 0), "{stats:?}");
    assert!(stats.taken_back > 100, "{stats:?}");
    // Clients that died in their sleep are noticed by the probe (S20).
    clients.truncate(3);
    for _ in 0..3_000 {
        now_ns.fetch_add(1_000_000, Ordering::Relaxed);
        serve(&mut server);
    }
    assert_eq!((server.clients(), server.stats().evictions), (3, 0));
    (0..CLIENTS).for_each(|name| books.borrow_mut().close(name, 40));
}

#[test]
fn a_client_whose_server_is_gone_is_disconnected() {
    let mut server = RdmaServer::new(&DeviceSpec::default(), &config()).unwrap();
    let mut caller = Caller::new(connect(&DeviceSpec::default(), &mut server), 1);
    caller.call();
    drop(server);
    let start = Instant::now();
    while caller.state() != State::Closed(CloseReason::Disconnected) {
        assert!(start.elapsed() < WATCHDOG);
        caller.poll();
    }
    caller.poll();
    assert_eq!(
        (caller.outstanding(), &caller.failures[..]),
        (0, &[CallFailure::Closed(CloseReason::Disconnected)][..])
    );
}

/// No completion reports the failure of a device. Both clients are on one device, and each gets
/// every event.
#[test]
fn a_device_that_breaks_down_ends_its_clients_and_one_queue_pair_only_its_own() {
    let mut server = RdmaServer::new(&DeviceSpec::default(), &config()).unwrap();
    let (mut handlers, _books) = handlers(&server);
    let device = Device::open(DeviceSpec::default()).unwrap();
    let (mut qpns, mut own_qpns) = (Vec::new(), Vec::new());
    let mut join = || {
        let offered = server.offer().unwrap();
        qpns.push(offered.record().address.qpn);
        let client = PendingClient::on(&device, offered.record(), &RdmaOptions::default()).unwrap();
        own_qpns.push(client.record().address.qpn);
        let admission = server.admit(offered, &client.record()).unwrap();
        Caller::new(client.admitted(&admission), 1)
    };
    let mut callers = [join(), join()];
    let mut refused = [join(), join(), join()];
    let events = |qpns: &[u32]| {
        [
            AsyncEvent::QpFatal { qpn: qpns[2] },
            AsyncEvent::QpRequestError { qpn: qpns[3] },
            AsyncEvent::QpAccessError { qpn: qpns[4] },
        ]
    };
    for (caller, event) in refused.iter_mut().zip(events(&own_qpns)) {
        assert!(!caller.client.heed(event));
        assert_eq!(caller.state(), State::Closed(CloseReason::Device));
    }
    for (left, event) in (2..5).rev().zip(events(&qpns)) {
        assert_eq!((server.heed(event), server.clients()), (false, left));
    }
    assert!(
        !server.heed(AsyncEvent::CqError { cqn: u32::MAX }) && server.heed(AsyncEvent::DeviceFatal)
    );
    callers[0].call();
    assert!(!callers[0].client.heed(AsyncEvent::PortActive { port: 1 }));
    assert!(
        !callers[0]
            .client
            .heed(AsyncEvent::QpFatal { qpn: u32::MAX })
            && !callers[0]
                .client
                .heed(AsyncEvent::CqError { cqn: u32::MAX })
    );
    run(&mut server, &mut handlers, &mut callers[..1], 1);
    assert!(callers.iter_mut().all(Caller::call));
    device.soft().unwrap().break_down();
    let mut events = Vec::new();
    while let Some(event) = device.take_async_event() {
        callers
            .iter_mut()
            .for_each(|caller| assert!(caller.client.heed(event)));
        events.push(event);
    }
    assert_eq!(events, [AsyncEvent::DeviceFatal]);
    let reason = CloseReason::Device;
    // The first client has a zone. The call of the second client was never announced.
    for (caller, failure) in callers
        .iter_mut()
        .zip([CallFailure::Closed(reason), CallFailure::NotSent])
    {
        caller.poll();
        assert_eq!(
            (caller.state(), caller.outstanding(), &caller.failures[..]),
            (State::Closed(reason), 0, &[failure][..])
        );
    }
}
