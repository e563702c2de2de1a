//! Contexts that end, on purpose or not: every call ends, and other connections lose nothing.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use copyrpc::{
    CallError, CallFailure, CloseReason, EndpointConfig, Outcome, ReplyError, SetupError,
};
use mlx5::{AsyncEvent, ConnectOptions};

use crate::support::{Net, Pair, join, small, step_a_while, step_until};

#[test]
fn a_context_may_move_and_when_it_is_dropped_both_ends_know() {
    let mut pair = Pair::small();
    let moved = Box::new(std::mem::replace(&mut pair.server, pair.net.context()));
    pair.to_server.call(b"hello", 1, 10).unwrap();
    let held = RefCell::new(None);
    let step = || {
        pair.client.poll_quietly();
        moved.poll_quietly();
        held.replace(moved.recv());
    };
    step_until(|| held.borrow().is_some(), step);
    let held = held.take().unwrap();
    pair.to_server.call(b"never answered", 2, 10).unwrap();
    drop(moved);
    assert_eq!(
        held.data().to_vec(),
        b"hello",
        "the bytes outlive the context"
    );
    assert!(matches!(
        held.reply(b""),
        Err(ReplyError::Closed(CloseReason::ClosedHere))
    ));
    let closed = CallError::Closed {
        user_data: 9,
        reason: CloseReason::ClosedHere,
    };
    assert_eq!(pair.to_client.call(b"", 9, 0), Err(closed));
    step_until(|| pair.ended.borrow().len() == 2, || pair.poll());
    let ended = pair.ended.take();
    assert!(
        ended.iter().all(|(_, outcome)| matches!(
            outcome,
            Err(CallFailure::Closed(_) | CallFailure::NotSent)
        )),
        "{ended:?}"
    );
    assert!(pair.to_server.closed().is_some());
    assert_eq!(
        pair.client.stats().calls,
        2,
        "counters of closed connections are kept"
    );
}

/// Checks that the keep-alive READ detects the death of a peer when this end has nothing to post.
fn notice_a_silent_death(step: impl Fn(&Pair)) {
    let pair = Pair::new(
        |builder| builder,
        &EndpointConfig {
            keepalive: Duration::from_millis(1),
            ..small()
        },
    );
    pair.to_server.call(b"never answered", 1, 10).unwrap();
    let held = pair.receive(1);
    // An abort sends the peer nothing, like a death.
    pair.to_client.abort();
    pair.server.poll_quietly();
    drop(held);
    step_until(|| !pair.ended.borrow().is_empty(), || step(&pair));
    assert!(matches!(
        pair.ended.take()[..],
        [(1, Err(CallFailure::Closed(CloseReason::Disconnected)))]
    ));
    assert!(pair.client.stats().reads > 0);
}

#[test]
fn a_peer_that_dies_silently_is_noticed_by_polls() {
    notice_a_silent_death(Pair::poll);
}

#[test]
fn a_peer_that_dies_silently_is_noticed_by_drains_and_flushes() {
    notice_a_silent_death(|pair| {
        let push = |serial, outcome: Outcome<'_>| {
            pair.ended
                .borrow_mut()
                .push((serial, outcome.map(|bytes| bytes.to_vec())))
        };
        pair.client.drain(push).unwrap();
        pair.client.flush_endpoints().unwrap();
    });
}

/// The caller's calls are refused all the time, so it has a READ in flight in every poll, if a READ
/// takes longer than a poll.
#[test]
fn a_peer_that_does_nothing_is_given_up_by_a_caller_that_never_stops_calling() {
    let (keepalive, stall_timeout) = (Duration::from_millis(5), Duration::from_millis(100));
    let pair = Pair::new(
        |builder| builder,
        &EndpointConfig {
            keepalive,
            stall_timeout,
            ..small()
        },
    );
    let taken = Cell::new(0);
    let call_and_poll = || {
        while pair.to_server.call(b"never answered", 1, 10).is_ok() {
            taken.set(taken.get() + 1);
        }
        pair.client.poll_into(&pair.ended);
    };
    step_until(|| pair.to_server.closed().is_some(), call_and_poll);
    assert_eq!(pair.to_server.closed(), Some(CloseReason::PeerStalled));
    step_until(
        || pair.ended.borrow().len() == taken.get(),
        || pair.client.poll_into(&pair.ended),
    );
    let stalled = |(_, outcome): &(u64, crate::support::Ended)| {
        *outcome == Err(CallFailure::Closed(CloseReason::PeerStalled))
    };
    assert!(taken.get() > 0 && pair.ended.take().iter().all(stalled));
}

/// Drains release the share: otherwise an owner that only drains could never replace an endpoint
/// whose peer died.
#[test]
fn a_drain_gives_back_the_share_of_an_endpoint_that_ended() {
    let net = Net::new();
    let (client, server) = (net.build(|builder| builder.srq_size(48)), net.context());
    let (endpoint, _peer) = join(&client, &server, &small());
    endpoint.call(b"never answered", 1, 0).unwrap();
    client.flush_endpoints().unwrap();
    assert!(matches!(
        client.create_endpoint(&small()),
        Err(SetupError::Full(_))
    ));
    drop(server);
    endpoint.call(b"never sent", 2, 0).unwrap();
    client.flush_endpoints().unwrap();
    let ended = Cell::new(0);
    let drain = || {
        client
            .drain(|_, outcome| ended.set(ended.get() + u32::from(outcome.is_err())))
            .unwrap();
    };
    step_until(|| ended.get() == 2, drain);
    drop(endpoint);
    client.create_endpoint(&small()).unwrap();
}

/// A queue pair that fails gives a completion for everything posted. The peers allow 32 batches in
/// flight, this end's queue only 1 each.
#[test]
fn peers_that_die_with_everything_in_flight_overrun_no_completion_queue() {
    let net = Net::new();
    let client = net.build(|builder| builder.srq_size(48).cq_size(64));
    let server = net.context();
    let doomed = net.context();
    let mine = EndpointConfig {
        batches_in_flight: 1,
        ..small()
    };
    let to = |peer: &copyrpc::Context<u64>| {
        crate::support::connect(
            client.create_endpoint(&mine).unwrap(),
            peer.create_endpoint(&small()).unwrap(),
        )
    };
    let (alive, _peer) = to(&server);
    let (dead, peers): (Vec<_>, Vec<_>) = (0..6).map(|_| to(&doomed)).unzip();
    // An abort sends no closing message.
    peers.iter().for_each(copyrpc::Endpoint::abort);
    drop(doomed);
    let mut taken = 0;
    for _ in 0..32 {
        for endpoint in &dead {
            taken += usize::from(endpoint.call(b"", 0, 0).is_ok());
        }
        client.flush_endpoints().unwrap();
    }
    let (failed, answered) = (Cell::new(0), Cell::new(0));
    let poll = || {
        let on_response = |_, outcome: Outcome<'_>| {
            let count = if outcome.is_ok() { &answered } else { &failed };
            count.set(count.get() + 1);
        };
        client.poll(on_response).unwrap();
        server.poll_quietly();
        server.echo_all();
    };
    step_until(|| failed.get() == taken, poll);
    assert!(dead.iter().all(|endpoint| endpoint.closed().is_some()));
    // More calls than the send queue of the living connection has room for, so that its completions
    // must still arrive.
    for call in 1..=1_000 {
        alive.call(b"", 0, 0).unwrap();
        step_until(|| answered.get() == call, poll);
    }
    assert_eq!((failed.get(), answered.get()), (taken, 1_000));
}

/// Nothing is outstanding, and neither end sends anything: the peer's words are READ from time to
/// time.
#[test]
fn an_idle_peer_that_dies_is_noticed_and_one_that_lives_is_kept() {
    let interval = Duration::from_millis(1);
    let pair = Pair::new(
        |builder| builder,
        &EndpointConfig {
            idle_keepalive: Some(interval),
            ..small()
        },
    );
    let (other, _other_peer) = join(
        &pair.client,
        &pair.server,
        &EndpointConfig {
            idle_keepalive: None,
            ..small()
        },
    );
    pair.to_server.call(b"", 1, 0).unwrap();
    other.call(b"", 2, 0).unwrap();
    assert_eq!(pair.finish(2).len(), 2);
    let reads = pair.to_server.stats().reads;
    step_until(|| pair.to_server.stats().reads >= reads + 3, || pair.poll());
    assert_eq!(
        (pair.to_server.closed(), pair.client.endpoints()),
        (None, 2)
    );
    pair.to_client.abort();
    step_until(|| pair.to_server.closed().is_some(), || pair.poll());
    assert_eq!(
        (pair.to_server.closed(), pair.client.endpoints()),
        (Some(CloseReason::Disconnected), 1)
    );
    assert_eq!(
        (other.closed(), other.stats().reads),
        (None, 0),
        "switched off"
    );
}

#[test]
fn an_endpoint_that_is_idle_for_too_long_closes() {
    let timeout = Duration::from_millis(1);
    let pair = Pair::new(
        |builder| builder,
        &EndpointConfig {
            idle_timeout: Some(timeout),
            idle_keepalive: None,
            ..small()
        },
    );
    let is_over = || {
        [&pair.to_server, &pair.to_client]
            .iter()
            .all(|endpoint| endpoint.closed().is_some())
    };
    step_until(is_over, || pair.poll());
    let reasons = [&pair.to_server, &pair.to_client].map(|endpoint| endpoint.closed().unwrap());
    assert!(reasons.contains(&CloseReason::IdleTimeout), "{reasons:?}");
    assert!(
        reasons
            .iter()
            .all(|reason| matches!(reason, CloseReason::IdleTimeout | CloseReason::ClosedByPeer)),
        "{reasons:?}"
    );
}

/// Both ends of the connection free all their resources, although the application keeps the handle.
#[test]
fn an_end_gives_everything_back_while_its_endpoint_is_kept() {
    let net = Net::new();
    let (client, server) = (net.context(), net.build(|builder| builder.srq_size(48)));
    let (to_server, to_client) = join(&client, &server, &small());
    to_server.call(b"held", 1, 8).unwrap();
    let held = RefCell::new(None);
    step_until(
        || held.borrow().is_some(),
        || {
            client.poll_quietly();
            server.poll_quietly();
            held.replace(server.recv());
        },
    );
    to_client.abort();
    server.poll_quietly();
    assert_eq!(server.endpoints(), 0);
    let _next = server.create_endpoint(&small()).unwrap();
    let mut held = held.take().unwrap();
    assert_eq!(
        held.data().to_vec(),
        b"held",
        "the bytes of a request that the application has stay"
    );
    held.release_data();
    assert_eq!(held.data().len(), 0);
    drop(held);
    assert_eq!(to_client.closed(), Some(CloseReason::ClosedHere));
}

/// A handle taken from a request counts as a handle, and so does a clone.
#[test]
fn the_last_handle_of_an_endpoint_closes_it_when_all_is_answered() {
    let mut pair = Pair::small();
    let (to_server, clone) = (pair.to_server.clone(), pair.to_server.clone());
    // The endpoint of the pair is replaced by an endpoint of another connection, so that no handle
    // of the first connection is left in the pair.
    let (spare, _spare_peer) = join(&pair.client, &pair.server, &small());
    pair.to_server = spare;
    to_server.call(b"held", 1, 8).unwrap();
    let mut held = pair.receive(1);
    drop(held[0].endpoint());
    drop(to_server);
    crate::support::step_a_while(|| pair.poll());
    assert_eq!(
        (pair.to_client.closed(), pair.ended.borrow().len()),
        (None, 0)
    );
    assert!(pair.to_client.call(b"", 9, 0).is_ok(), "it is not closing");
    drop(clone);
    step_until(|| pair.to_client.call(b"", 9, 0).is_err(), || pair.poll());
    assert_eq!(
        (pair.to_client.closed(), pair.client.endpoints()),
        (None, 2),
        "a reply is owed"
    );
    held.remove(0).reply(b"answer").unwrap();
    step_until(
        || pair.to_client.closed().is_some() && pair.client.endpoints() == 1,
        || pair.poll(),
    );
    assert_eq!(pair.to_client.closed(), Some(CloseReason::ClosedByPeer));
    assert!(pair.ended.borrow().contains(&(1, Ok(b"answer".to_vec()))));
}

/// The peer of a dropped context receives the closing message in a poll, with nothing outstanding
/// and without a probe.
#[test]
fn a_context_that_is_dropped_says_so() {
    let mut pair = Pair::new(
        |builder| builder,
        &EndpointConfig {
            idle_keepalive: None,
            ..small()
        },
    );
    pair.to_server.call(b"", 1, 0).unwrap();
    assert_eq!(pair.finish(1).len(), 1);
    let _kept = pair.to_client.clone();
    pair.server = pair.net.context();
    if crate::support::mode() == crate::support::Mode::Immediate {
        step_until(|| pair.to_server.closed().is_some(), || pair.poll());
        assert_eq!(pair.to_server.closed(), Some(CloseReason::ClosedByPeer));
    }
}

#[test]
fn a_device_that_breaks_down_ends_its_connections_and_no_others() {
    let pair = Pair::small();
    let third = pair.net.context();
    let (beside, _peer) = join(&third, &pair.server, &small());
    pair.to_server.call(b"never answered", 1, 10).unwrap();
    let held = pair.receive(1);
    pair.client.device().soft().unwrap().break_down();
    step_until(|| !pair.ended.borrow().is_empty(), || pair.poll());
    let reason = CloseReason::Device(AsyncEvent::DeviceFatal);
    assert_eq!(pair.ended.take(), [(1, Err(CallFailure::Closed(reason)))]);
    assert_eq!(pair.to_server.closed(), Some(reason));
    assert!(matches!(
        pair.client.create_endpoint(&small()),
        Err(SetupError::Broken(AsyncEvent::DeviceFatal))
    ));
    drop(held);
    beside.call(b"still there", 2, 20).unwrap();
    let step = || {
        third.poll_into(&pair.ended);
        pair.server.poll_into(&pair.ended);
        pair.server.echo_all();
    };
    step_until(|| !pair.ended.borrow().is_empty(), step);
    assert_eq!(pair.ended.take(), [(2, Ok(b"still there".to_vec()))]);
}

#[test]
fn calls_go_on_when_the_port_comes_up_again_soon() {
    // The retries are used up after half a minute, so an earlier end was caused by the closing
    // message.
    let connect = ConnectOptions {
        timeout: 20,
        ..small().connect
    };
    let pair = Pair::new(|builder| builder, &EndpointConfig { connect, ..small() });
    let soft = pair.client.device().soft().unwrap();
    for serial in 0..10 {
        soft.set_port_up(false);
        pair.to_server
            .call(&[serial as u8; 40], serial, 40)
            .unwrap();
        // The port is down for longer than a queue pair waits for a peer that is gone.
        (0..2).for_each(|_| step_a_while(|| pair.client.poll_quietly()));
        soft.set_port_up(true);
        assert_eq!(pair.finish(1), [(serial, Ok(vec![serial as u8; 40]))]);
    }
    assert_eq!(pair.to_server.closed(), None);
}
