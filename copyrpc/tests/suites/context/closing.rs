//! The end of a connection on purpose: gracefully, by either side or both, and at once. The rules
//! are tested in `protocol`.

use std::cell::Cell;

use copyrpc::{CallError, CallFailure, CloseReason, Outcome, SetupError};

use crate::support::{Ended, Net, Pair, join, payload, small, step_a_while, step_until};

const PARTED: [Option<CloseReason>; 2] = [
    Some(CloseReason::ClosedHere),
    Some(CloseReason::ClosedByPeer),
];

/// Returns the reasons why the client's end and the server's end closed.
fn reasons(pair: &Pair) -> [Option<CloseReason>; 2] {
    [pair.to_server.closed(), pair.to_client.closed()]
}

fn failed(reason: CloseReason) -> Ended {
    Err(CallFailure::from(reason))
}

fn sorted(mut ended: Vec<(u64, Ended)>) -> Vec<(u64, Ended)> {
    ended.sort_by_key(|(serial, _)| *serial);
    ended
}

#[test]
fn both_ends_part_when_all_is_answered_and_not_before() {
    let pair = Pair::small();
    pair.to_client.call(b"held", 2, 8).unwrap();
    pair.to_server.call(b"held", 1, 8).unwrap();
    let mut held = pair.receive(1);
    let more = std::cell::RefCell::new(None);
    step_until(
        || more.borrow().is_some(),
        || pair.poll_and(|| drop(more.replace(pair.client.recv()))),
    );
    held.extend(more.take());
    pair.to_server.close();
    let refused = |endpoint: &copyrpc::Endpoint<u64>| endpoint.call(b"", 9, 0).unwrap_err();
    assert_eq!(
        refused(&pair.to_server),
        CallError::Closed {
            user_data: 9,
            reason: CloseReason::ClosedHere
        }
    );
    step_until(
        || pair.client.stats().metadata_only > 0 && pair.server.stats().metadata_only > 0,
        || pair.poll(),
    );
    step_a_while(|| pair.poll());
    assert_eq!(
        (reasons(&pair), pair.ended.borrow().len()),
        ([None, None], 0)
    );
    assert_eq!(
        refused(&pair.to_client),
        CallError::Closed {
            user_data: 9,
            reason: CloseReason::ClosedByPeer
        }
    );
    for request in held {
        assert_eq!(request.data().to_vec(), b"held");
        request.reply(b"answer").unwrap();
    }
    step_until(|| reasons(&pair) == PARTED, || pair.poll());
    assert_eq!(
        sorted(pair.ended.take()),
        [(1, Ok(b"answer".to_vec())), (2, Ok(b"answer".to_vec()))]
    );
}

/// If the refused requests counted as work, an owner that sleeps until there is work would not
/// sleep before the last held request is answered.
#[test]
fn requests_that_an_end_refuses_are_no_work() {
    let pair = Pair::small();
    pair.to_server.call(b"", 0, 8).unwrap();
    let held = pair.receive(1);
    for serial in 1..4 {
        pair.to_server.call(b"", serial, 8).unwrap();
    }
    step_a_while(|| pair.poll());
    assert!(pair.server.has_work(), "three wait to be received");
    pair.to_client.close();
    step_until(|| pair.ended.borrow().len() == 3, || pair.poll());
    step_a_while(|| pair.poll());
    assert!(!pair.server.has_work());
    for request in held {
        request.reply(b"answer").unwrap();
    }
    step_until(
        || reasons(&pair).iter().all(Option::is_some),
        || pair.poll(),
    );
}

/// Requests that were received are answered; requests that wait to be received, or are on the way,
/// are refused; none is lost.
#[test]
fn whoever_closes_with_calls_of_both_sides_under_way_every_call_ends_once() {
    for [client_closes, server_closes] in [[true, false], [false, true], [true, true]] {
        let pair = Pair::small();
        let (mut held, mut taken) = (Vec::new(), Vec::new());
        for serial in 0..8 {
            let [to_server, to_client] = [
                (2 * serial, &pair.to_server),
                (2 * serial + 1, &pair.to_client),
            ]
            .map(|(serial, endpoint)| {
                taken.extend(
                    endpoint
                        .call(&payload(serial, 20), serial, 20)
                        .is_ok()
                        .then_some(serial),
                );
                endpoint
            });
            pair.poll();
            if serial % 2 == 0 {
                held.extend(
                    [pair.server.recv(), pair.client.recv()]
                        .into_iter()
                        .flatten(),
                );
            }
            if serial == 5 {
                [(client_closes, to_server), (server_closes, to_client)]
                    .iter()
                    .filter(|(closes, _)| *closes)
                    .for_each(|(_, end)| end.close());
            }
        }
        let received = held.len();
        for request in held {
            let data = request.data().to_vec();
            request.reply(&data).unwrap();
        }
        step_until(
            || reasons(&pair).iter().all(Option::is_some),
            || pair.poll(),
        );
        let by = |closes| {
            if closes {
                CloseReason::ClosedHere
            } else {
                CloseReason::ClosedByPeer
            }
        };
        assert_eq!(
            reasons(&pair),
            [Some(by(client_closes)), Some(by(server_closes))]
        );
        let ended = sorted(pair.ended.take());
        assert_eq!(
            ended.iter().map(|(serial, _)| *serial).collect::<Vec<_>>(),
            taken
        );
        let is_answered = |(serial, outcome): &&(u64, Ended)| *outcome == Ok(payload(*serial, 20));
        assert_eq!(ended.iter().filter(is_answered).count(), received);
        let others = ended.iter().filter(|end| !is_answered(end));
        for (serial, outcome) in others {
            assert_eq!(*outcome, failed(CloseReason::ClosedByPeer), "call {serial}");
        }
        assert!(taken.len() < 16 && pair.server.recv().is_none() && pair.client.recv().is_none());
    }
}

#[test]
fn a_request_that_nobody_received_is_refused() {
    let pair = Pair::small();
    pair.to_client.call(b"late", 1, 8).unwrap();
    pair.to_server.close();
    step_until(|| reasons(&pair) == PARTED, || pair.poll());
    assert_eq!(pair.ended.take(), [(1, failed(CloseReason::ClosedByPeer))]);
    assert!(pair.client.recv().is_none());
}

/// The peer does nothing after its close; a device that sends packets is silent then.
#[test]
fn a_call_behind_a_goodbye_ends_when_that_is_heard_and_waits_for_no_answer() {
    let pair = Pair::small();
    pair.to_client.close();
    step_until(
        || pair.server.stats().metadata_only > 0,
        || pair.server.poll_quietly(),
    );
    step_a_while(|| pair.server.poll_quietly());
    pair.to_server.call(b"", 1, 8).unwrap();
    pair.client.flush_endpoints().unwrap();
    step_until(
        || !pair.ended.borrow().is_empty(),
        || pair.client.poll_into(&pair.ended),
    );
    assert_eq!(
        (pair.ended.take(), pair.to_server.closed()),
        (vec![(1, failed(CloseReason::ClosedByPeer))], None)
    );
    step_until(|| reasons(&pair) == [PARTED[1], PARTED[0]], || pair.poll());
    assert_eq!(
        (
            pair.ended.take(),
            pair.client.stats().late_responses,
            pair.server.recv().is_none()
        ),
        (vec![], 1, true)
    );
}

/// The peer sees an abort as it would see a death.
#[test]
fn an_abort_ends_all_at_once_also_what_a_graceful_end_waits_for() {
    for is_closing in [false, true] {
        let pair = Pair::small();
        pair.to_server.call(b"held", 1, 8).unwrap();
        pair.to_client.call(b"mine", 2, 8).unwrap();
        let held = pair.receive(1);
        if is_closing {
            pair.to_server.close();
            // The server has received the goodbye, and acknowledges it in a separate batch.
            step_until(|| pair.server.stats().metadata_only > 0, || pair.poll());
            step_a_while(|| pair.poll());
            assert_eq!(reasons(&pair), [None, None]);
        }
        pair.to_server.abort();
        assert_eq!(pair.to_server.closed(), Some(CloseReason::ClosedHere));
        pair.client
            .drain(|serial, outcome| {
                pair.ended
                    .borrow_mut()
                    .push((serial, outcome.map(|bytes| bytes.to_vec())))
            })
            .unwrap();
        assert_eq!(
            pair.ended.borrow().last(),
            Some(&(1, failed(CloseReason::ClosedHere)))
        );
        // An end does not check its peer because of a held request, but because of its answer.
        for request in held {
            request.reply(b"").unwrap();
        }
        step_until(|| pair.to_client.closed().is_some(), || pair.poll());
        // A server that is closing too has nothing outstanding then, so its close completes.
        let reason = if is_closing {
            CloseReason::ClosedByPeer
        } else {
            CloseReason::Disconnected
        };
        assert_eq!(pair.to_client.closed(), Some(reason));
        step_until(|| pair.ended.borrow().len() == 2, || pair.poll());
        assert_eq!(
            sorted(pair.ended.take()),
            [(1, failed(CloseReason::ClosedHere)), (2, failed(reason))]
        );
    }
}

/// Callbacks close and abort connections of the drain that calls them.
#[test]
fn a_callback_may_close_and_abort_its_own_connection_and_others() {
    let pair = Pair::small();
    let (second, second_peer) = join(&pair.client, &pair.server, &small());
    let (third, _peer) = join(&pair.client, &pair.server, &small());
    for serial in 0..4 {
        pair.to_server.call(b"", serial, 0).unwrap();
        second.call(b"", 10 + serial, 0).unwrap();
        third.call(b"", 20 + serial, 0).unwrap();
    }
    let ended = Cell::new(0);
    let on_response = |serial: u64, outcome: Outcome<'_>| {
        ended.set(ended.get() + 1);
        if serial < 4 {
            // The answers of any connection may arrive first: the answers of the third connection
            // abort this connection too.
            assert_eq!(
                outcome.is_err(),
                pair.to_server.closed().is_some(),
                "{serial}"
            );
            pair.to_server.abort();
            second.close();
        } else if serial < 20 {
            assert!(outcome.is_ok(), "{serial}");
        } else {
            third.close();
            pair.to_server.abort();
        }
    };
    let is_over = || {
        [&second, &third, &second_peer]
            .iter()
            .all(|endpoint| endpoint.closed().is_some())
            && ended.get() == 12
    };
    step_until(is_over, || {
        pair.client.poll(on_response).unwrap();
        pair.server.poll_quietly();
        while let Some(request) = pair.server.recv() {
            // The request may be of the connection that was aborted.
            let _answered = request.reply(b"");
        }
    });
    assert_eq!(
        [&pair.to_server, &second, &third].map(|endpoint| endpoint.closed()),
        [Some(CloseReason::ClosedHere); 3]
    );
}

/// 100 rounds, in contexts with room for few endpoints: the shares of the queues are returned in
/// each round, while another connection of the same contexts continues.
#[test]
fn an_end_gives_its_share_back_at_once_and_the_two_connect_again() {
    let net = Net::new();
    let [client, server] = [(); 2].map(|()| net.build(|builder| builder.srq_size(96).cq_size(128)));
    let (other, _other_peer) = join(&client, &server, &small());
    let answered = Cell::new(0);
    for round in 0..100 {
        let (to_server, to_client) = join(&client, &server, &small());
        assert!(matches!(
            client.create_endpoint(&small()),
            Err(SetupError::Full(_))
        ));
        to_server.call(b"", round, 0).unwrap();
        other.call(b"", 1_000 + round, 0).unwrap();
        let is_graceful = round % 3 != 0;
        let step = || {
            client
                .poll(|serial, outcome| {
                    answered.set(answered.get() + u64::from(outcome.is_ok() || serial < 1_000))
                })
                .unwrap();
            server.poll_quietly();
            // One request per step, as a server may; the next step finds that there is no other.
            if let Some(request) = server.recv() {
                let _answered = request.reply(b"");
            }
        };
        if !is_graceful {
            [&to_server, &to_client][round as usize % 2].abort();
        }
        to_server.close();
        let has_ended = || to_server.closed().is_some() && answered.get() == 2 * (round + 1);
        step_until(
            || has_ended() && (to_client.closed().is_some() || !is_graceful),
            step,
        );
        to_client.abort();
        step();
        assert_eq!(other.closed(), None);
    }
}
