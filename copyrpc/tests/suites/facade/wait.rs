//! A context that sleeps: it wakes when it has work, and at no other time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use copyrpc::{
    CallFailure, CloseReason, Context, ContextBuilder, Endpoint, EndpointConfig, ExchangeRecord,
    Reentrant,
};
use copyrpc_testing::limits;
use mlx5::LocalFabric;

use super::{WATCHDOG, builder, connect, next_request, small, step_until};

/// Spins for a time that differs from round to round, so that it ends at every step of the other
/// thread's way to sleep.
fn stagger(round: u64) {
    for _ in 0..round.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 53 {
        std::hint::spin_loop();
    }
}

/// A server in a thread of its own, which sleeps whenever there is nothing to do.
struct Server {
    polls: Arc<AtomicU64>,
    thread: std::thread::JoinHandle<()>,
}

impl Server {
    /// Serves until the request "stop" arrives.
    fn start(
        builder: ContextBuilder,
        client: &Context<u64>,
        config: &EndpointConfig,
    ) -> (Self, Endpoint<u64>) {
        let polls = Arc::new(AtomicU64::new(0));
        let (count, config) = (Arc::clone(&polls), config.clone());
        let pending = client.create_endpoint(&config).unwrap();
        let (record, (to_client, from_server)) = (pending.local_info().encode(), channel());
        let thread = std::thread::spawn(move || {
            let context: Context<()> = builder.build().unwrap();
            let pending = context.create_endpoint(&config).unwrap();
            to_client.send(pending.local_info().encode()).unwrap();
            let _endpoint = pending
                .connect(&ExchangeRecord::decode(&record).unwrap())
                .unwrap();
            let mut is_done = false;
            while !is_done {
                context.wait(None).unwrap();
                context.poll(|(), _| ()).unwrap();
                count.fetch_add(1, Ordering::Relaxed);
                while let Some(request) = context.recv() {
                    let data = request.data().to_vec();
                    is_done = data == b"stop";
                    request.reply(&data).unwrap();
                }
            }
            // The last reply is on its way.
            while Arc::strong_count(&count) > 1 {
                context.poll(|(), _| ()).unwrap();
            }
        });
        let endpoint = pending
            .connect(&ExchangeRecord::decode(&from_server.recv().unwrap()).unwrap())
            .unwrap();
        (Self { polls, thread }, endpoint)
    }

    fn polls(&self) -> u64 {
        self.polls.load(Ordering::Relaxed)
    }

    /// Waits for the end of the server, which has got the request to stop.
    fn join(self) {
        drop(self.polls);
        self.thread.join().unwrap();
    }
}

/// Sleeps and polls until a call ends. Returns the number of polls.
fn sleep_until_end(
    context: &Context<u64>,
    mut on_end: impl FnMut(u64, Result<Vec<u8>, CallFailure>),
) -> u64 {
    let (mut polls, mut has_ended) = (0, false);
    while !has_ended {
        context.wait(None).unwrap();
        polls += 1;
        let end = |user, outcome: copyrpc::Outcome<'_>| {
            has_ended = true;
            on_end(user, outcome.map(|bytes| bytes.to_vec()));
        };
        context.poll(end).unwrap();
    }
    polls
}

#[test]
fn sleepers_on_both_sides_wake_for_every_message_and_an_idle_server_for_nothing() {
    // The device of libibverbs is slow.
    let rounds = if std::env::var_os("MLX5_TEST_DEVICE").is_some() {
        2_000
    } else {
        100_000
    };
    limits::watchdog(WATCHDOG);
    let fabric = LocalFabric::new();
    let client: Context<u64> = builder(&fabric).build().unwrap();
    // A probe of an idle peer wakes as well.
    let config = EndpointConfig {
        idle_keepalive: None,
        ..small()
    };
    let (server, endpoint) = Server::start(builder(&fabric), &client, &config);
    let mut polls = 0;
    for round in 0..rounds {
        stagger(round);
        endpoint.call(&round.to_le_bytes(), round, 8).unwrap();
        polls += sleep_until_end(&client, |user, outcome| {
            assert_eq!((user, outcome), (round, Ok(round.to_le_bytes().to_vec())))
        });
    }
    // The server wakes for each request and for some completions of its own WRITEs; checks by the
    // clock may add some wake-ups.
    assert!(
        server.polls() <= 2 * rounds,
        "{} polls of the server",
        server.polls()
    );
    assert!(polls <= 4 * rounds, "{polls} polls of the client");
    // Nothing arrives, so the server does not poll. Its last polls may still be under way on a
    // loaded machine.
    let mut before = u64::MAX;
    step_until(|| {
        let is_idle = server.polls() == before;
        before = server.polls();
        if !is_idle {
            std::thread::sleep(Duration::from_millis(300));
        }
        is_idle
    });
    endpoint.call(b"stop", 0, 8).unwrap();
    sleep_until_end(&client, |_, outcome| {
        assert_eq!(outcome, Ok(b"stop".to_vec()))
    });
    server.join();
}

#[test]
fn a_wait_posts_what_gathered_and_does_not_sleep_over_a_request() {
    limits::watchdog(WATCHDOG);
    let fabric = LocalFabric::new();
    let (near, far): (Context<u64>, Context<u64>) = (
        builder(&fabric).build().unwrap(),
        builder(&fabric).build().unwrap(),
    );
    let (endpoint, _peer) = connect(&near, &far, &small());
    endpoint.call(b"one", 1, 8).unwrap();
    let second = endpoint.call(b"two", 2, 8).unwrap();
    near.wait(Some(Duration::from_millis(1))).unwrap();
    let one = next_request(&far);
    // The other request came in the same batch: it is parsed, and not yet received.
    assert_eq!(far.wait(None), Ok(true));
    let two = far.recv().unwrap();
    // All requests were received, although `recv` was not called once more.
    step_until(|| !far.wait(Some(Duration::ZERO)).unwrap());
    one.reply(b"first").unwrap();
    far.wait(Some(Duration::ZERO)).unwrap();
    let on_end = |user: u64, outcome: Result<Vec<u8>, CallFailure>| {
        assert_eq!((user, outcome), (1, Ok(b"first".to_vec())))
    };
    sleep_until_end(&near, on_end);
    endpoint.cancel(second).unwrap();
    two.reply(b"").unwrap();
    endpoint.call(b"", 4, 0).unwrap();
    near.flush_endpoints().unwrap();
    next_request(&far).reply(b"").unwrap();
    far.flush_endpoints().unwrap();
    let mut nested = None;
    step_until(|| {
        near.poll(|_, _| nested = Some(near.wait(None))).unwrap();
        nested.is_some()
    });
    assert_eq!(nested, Some(Err(Reentrant)));
}

#[test]
fn a_waker_ends_a_sleep_from_another_thread() {
    limits::watchdog(WATCHDOG);
    let context: Context<u64> = builder(&LocalFabric::new()).build().unwrap();
    let (waker, is_set) = (context.waker(), Arc::new(AtomicBool::new(false)));
    let set = Arc::clone(&is_set);
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        set.store(true, Ordering::Release);
        waker.wake();
    });
    while !is_set.load(Ordering::Acquire) {
        context.wait(None).unwrap();
    }
    thread.join().unwrap();
}

/// Nothing arrives: the completion alone wakes the sleeper.
#[test]
fn a_sleeper_wakes_for_the_end_of_a_one_sided_operation() {
    limits::watchdog(WATCHDOG);
    let fabric = LocalFabric::new();
    let (near, far): (Context<u64>, Context<u64>) = (
        builder(&fabric).build().unwrap(),
        builder(&fabric).build().unwrap(),
    );
    let (endpoint, _peer) = connect(&near, &far, &small());
    let (local, remote) = (near.alloc(8).unwrap(), far.alloc(8).unwrap());
    endpoint
        .rdma_write(&local, 0, &remote.remote(), 0, 8, 3)
        .unwrap();
    sleep_until_end(&near, |user, outcome| {
        assert_eq!((user, outcome), (3, Ok(Vec::new())))
    });
}

#[test]
fn a_sleeper_wakes_for_deadlines_dead_peers_and_stalled_ones() {
    limits::watchdog(WATCHDOG);
    let fabric = LocalFabric::new();
    let config = EndpointConfig {
        keepalive: Duration::from_millis(10),
        stall_timeout: Duration::from_millis(100),
        ..small()
    };
    let near: Context<u64> = builder(&fabric).build().unwrap();
    let (silent, doomed): (Context<u64>, Context<u64>) = (
        builder(&fabric).build().unwrap(),
        builder(&fabric).build().unwrap(),
    );
    let (to_silent, _peer) = connect(&near, &silent, &config);
    let (to_doomed, _peer) = connect(&near, &doomed, &config);
    to_silent
        .call_within(b"", 1, 0, Duration::from_millis(15))
        .unwrap();
    let polls = sleep_until_end(&near, |user, outcome| {
        assert_eq!((user, outcome), (1, Err(CallFailure::TimedOut)))
    });
    assert!(polls < 100, "{polls}");
    to_silent.call(b"", 2, 0).unwrap();
    let stalled = Err(CallFailure::Closed(CloseReason::PeerStalled));
    let polls = sleep_until_end(&near, |user, outcome| {
        assert_eq!((user, outcome), (2, stalled.clone()))
    });
    assert!(polls < 1_000, "{polls}");
    to_doomed.call(b"", 3, 0).unwrap();
    near.wait(Some(Duration::ZERO)).unwrap();
    // The server has the request, so it is not known whether it executed it; otherwise the call
    // would end as refused (G5).
    let _held = next_request(&doomed);
    drop(doomed);
    let dead = Err(CallFailure::Closed(CloseReason::Disconnected));
    sleep_until_end(&near, |user, outcome| {
        assert_eq!((user, outcome), (3, dead.clone()))
    });
}

/// Under load, deadlines are checked every 64 drains; a context that sleeps between drains makes
/// few.
#[test]
fn arrivals_between_sleeps_do_not_put_a_deadline_off() {
    limits::watchdog(WATCHDOG);
    let fabric = LocalFabric::new();
    let (near, far): (Context<u64>, Context<u64>) = (
        builder(&fabric).build().unwrap(),
        builder(&fabric).build().unwrap(),
    );
    let (endpoint, _peer) = connect(&near, &far, &small());
    near.poll(|_, _| ()).unwrap();
    endpoint.call_within(b"", 1, 0, Duration::ZERO).unwrap();
    endpoint.call(b"", 2, 0).unwrap();
    near.flush_endpoints().unwrap();
    let _held = next_request(&far);
    next_request(&far).reply(b"").unwrap();
    far.flush_endpoints().unwrap();
    while !near.wait(None).unwrap() {}
    let mut ended = Vec::new();
    near.poll(|user, outcome| ended.push((user, outcome.is_ok())))
        .unwrap();
    assert_eq!(ended, [(2, true), (1, false)]);
}

/// The heartbeat of a sleeping server must continue: only a peer that does nothing is given up.
#[test]
fn a_server_that_sleeps_over_a_held_request_is_not_called_stalled() {
    limits::watchdog(WATCHDOG);
    let fabric = LocalFabric::new();
    let config = EndpointConfig {
        keepalive: Duration::from_millis(20),
        stall_timeout: Duration::from_secs(1),
        ..small()
    };
    let client: Context<u64> = builder(&fabric).build().unwrap();
    let pending = client.create_endpoint(&config).unwrap();
    let (record, (to_client, from_server)) = (pending.local_info().encode(), channel());
    let is_done = Arc::new(AtomicBool::new(false));
    let done = Arc::clone(&is_done);
    let server_builder = builder(&fabric);
    let server_config = config.clone();
    let thread = std::thread::spawn(move || {
        let context: Context<()> = server_builder.build().unwrap();
        let pending = context.create_endpoint(&server_config).unwrap();
        to_client.send(pending.local_info().encode()).unwrap();
        let _endpoint = pending
            .connect(&ExchangeRecord::decode(&record).unwrap())
            .unwrap();
        let mut held = Vec::new();
        while !done.load(Ordering::Relaxed) {
            context.wait(None).unwrap();
            context.poll(|(), _| ()).unwrap();
            held.extend(context.recv());
        }
        held.into_iter()
            .for_each(|request| request.reply(b"late").unwrap());
        while Arc::strong_count(&done) > 1 {
            context.poll(|(), _| ()).unwrap();
        }
    });
    let endpoint = pending
        .connect(&ExchangeRecord::decode(&from_server.recv().unwrap()).unwrap())
        .unwrap();
    endpoint.call(b"", 1, 4).unwrap();
    let end = std::time::Instant::now() + Duration::from_millis(2_000);
    while std::time::Instant::now() < end {
        client.wait(Some(Duration::from_millis(20))).unwrap();
        client
            .poll(|_, outcome| panic!("{:?}", outcome.map(|bytes| bytes.to_vec())))
            .unwrap();
    }
    is_done.store(true, Ordering::Relaxed);
    sleep_until_end(&client, |_, outcome| {
        assert_eq!(outcome, Ok(b"late".to_vec()))
    });
    drop(is_done);
    thread.join().unwrap();
}

/// The peer holds all calls for which there is credit. Nothing arrives but its heartbeats, in its
/// record.
#[test]
fn a_caller_without_credit_sleeps() {
    limits::watchdog(WATCHDOG);
    let fabric = LocalFabric::new();
    let client: Context<u64> = builder(&fabric).build().unwrap();
    let pending = client.create_endpoint(&small()).unwrap();
    let (record, (to_client, from_server)) = (pending.local_info().encode(), channel());
    let (done, is_done) = channel::<()>();
    let server_builder = builder(&fabric);
    let thread = std::thread::spawn(move || {
        let context: Context<()> = server_builder.build().unwrap();
        let pending = context.create_endpoint(&small()).unwrap();
        to_client.send(pending.local_info().encode()).unwrap();
        let _endpoint = pending
            .connect(&ExchangeRecord::decode(&record).unwrap())
            .unwrap();
        let mut held = Vec::new();
        while is_done.try_recv().is_err() {
            context.wait(Some(Duration::from_millis(10))).unwrap();
            context.poll(|(), _| ()).unwrap();
            held.extend(context.recv());
        }
        held.pop().unwrap().reply(b"room").unwrap();
        while held
            .iter()
            .any(|request| request.endpoint().closed().is_none())
        {
            context.poll(|(), _| ()).unwrap();
        }
    });
    let endpoint = pending
        .connect(&ExchangeRecord::decode(&from_server.recv().unwrap()).unwrap())
        .unwrap();
    while endpoint.call(b"held", 1, 400).is_ok() {}
    let mut polls = 0_u64;
    let mut idle_polls = 0;
    let spins = 64;
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_millis(1_000) {
        assert!(endpoint.call(b"waits", 2, 400).is_err());
        let moved = client
            .poll(|_, outcome| panic!("{:?}", outcome.map(|bytes| bytes.to_vec())))
            .unwrap();
        polls += 1;
        idle_polls = if moved > 0 { 0 } else { idle_polls + 1 };
        if idle_polls > spins {
            client.wait(Some(Duration::from_secs(60))).unwrap();
        }
    }
    let (ms, reads) = (start.elapsed().as_millis() as u64, endpoint.stats().reads);
    assert!(polls < 4 * spins + ms / 2, "{polls} polls, {reads} READs");
    assert!(reads < 20 + ms / 8, "{reads} READs");
    // The reply frees room, and wakes the client.
    done.send(()).unwrap();
    while endpoint.call(b"waits", 2, 400).is_err() {
        client.wait(None).unwrap();
        client.poll(|_, _| ()).unwrap();
    }
    drop(client);
    thread.join().unwrap();
}
