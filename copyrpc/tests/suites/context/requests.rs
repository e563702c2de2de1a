//! Requests may be held, answered in any order, refused and dropped; every answer reaches its own
//! call.

use std::cell::Cell;
use std::collections::HashMap;

use copyrpc::{CallFailure, RecvHandle, ReplyError};

use crate::support::{Ended, Pair, payload, step_until};

#[test]
fn replies_in_any_order_and_after_a_long_hold_reach_their_calls() {
    let pair = Pair::small();
    for serial in 0..8 {
        pair.to_server
            .call(&payload(serial, 40), serial, 40)
            .unwrap();
    }
    let mut later = pair.receive(8);
    let first = later.remove(0);
    while let Some(request) = later.pop() {
        let data = request.data().to_vec();
        request.reply(&data).unwrap();
    }
    let ended = pair.finish(7);
    assert_eq!(
        ended.iter().map(|(serial, _)| *serial).collect::<Vec<_>>(),
        [7, 6, 5, 4, 3, 2, 1]
    );
    // The first request is held while other requests arrive and are answered, until the ring after
    // it is full.
    let mut refused = 0;
    for serial in 8..200 {
        if pair
            .to_server
            .call(&payload(serial, 40), serial, 40)
            .is_ok()
        {
            assert_eq!(pair.finish(1), [(serial, Ok(payload(serial, 40)))]);
        } else {
            refused += 1;
        }
    }
    assert!(
        refused > 0,
        "the ring behind a held request must not be reused"
    );
    assert_eq!(first.data().to_vec(), payload(0, 40));
    first.reply(b"late").unwrap();
    assert_eq!(pair.finish(1), [(0, Ok(b"late".to_vec()))]);
    pair.to_server.call(b"", 1, 0).unwrap();
    assert_eq!(pair.finish(1).len(), 1);
}

#[test]
fn requests_whose_bytes_are_given_up_stop_no_other_however_long_they_are_held() {
    let pair = Pair::small();
    for serial in 0..4 {
        pair.to_server
            .call(&payload(serial, 40), serial, 40)
            .unwrap();
    }
    let mut held = pair.receive(4);
    for (serial, request) in (0..).zip(&mut held) {
        assert_eq!(request.data().to_vec(), payload(serial, 40));
        let max_reply = request.max_reply();
        for _again in 0..2 {
            request.release_data();
            assert_eq!((request.data().len(), request.max_reply()), (0, max_reply));
        }
    }
    // The requests have many times the bytes of the ring.
    for serial in 4..1_000 {
        step_until(
            || {
                pair.to_server
                    .call(&payload(serial, 40), serial, 40)
                    .is_ok()
            },
            || pair.poll(),
        );
        assert_eq!(pair.finish(1), [(serial, Ok(payload(serial, 40)))]);
    }
    let endings: Vec<Ended> = (0..4)
        .zip(held)
        .map(|(how, request)| answer(request, how))
        .collect();
    let mut ended = pair.finish(4);
    ended.sort_by_key(|(serial, _)| *serial);
    assert_eq!(ended, (0..4).zip(endings).collect::<Vec<_>>());
    assert_eq!(ended[3].1, Ok(Vec::new()), "a reply");
}

/// Answers a request in the way `how`. Returns the outcome with which its call must end.
fn answer(handle: RecvHandle<u64>, how: u64) -> Ended {
    match how {
        0 => {
            drop(handle);
            Err(CallFailure::Dropped)
        }
        1 => {
            handle.refuse().unwrap();
            Err(CallFailure::Refused)
        }
        _ => {
            let mut reply = handle.data().to_vec();
            reply.resize(reply.len() * (how as usize % 5) / 4, how as u8);
            reply.reverse();
            handle.reply(&reply).unwrap();
            Ok(reply)
        }
    }
}

/// Both sides call until they are refused, and hold the requests that they receive. They answer in
/// a random order, some requests at once and some in later rounds.
#[test]
fn at_full_depth_in_random_order_every_held_request_is_intact_and_every_call_gets_its_own_answer() {
    let pair = Pair::small();
    let mut rng = fastrand::Rng::with_seed(7);
    let next = Cell::new(0_u64);
    let mut refused = 0;
    let mut deepest = 0;
    let (mut held, mut expected) = (Vec::new(), HashMap::new());
    let round = || {
        for endpoint in [&pair.to_server, &pair.to_client] {
            // Held requests may keep the ring full for some rounds.
            loop {
                let sent = payload(next.get(), 8 + rng.usize(..120));
                match endpoint.call(
                    &[&next.get().to_le_bytes(), &sent[..]].concat(),
                    next.get(),
                    2 * sent.len(),
                ) {
                    Ok(_) => next.set(next.get() + 1),
                    Err(error) if error.is_retryable() => break refused += 1,
                    Err(error) => panic!("{error}"),
                }
            }
        }
        deepest = deepest.max(pair.to_server.outstanding_calls());
        pair.poll();
        for context in [&pair.client, &pair.server] {
            held.extend(std::iter::from_fn(|| context.recv()));
        }
        rng.shuffle(&mut held);
        for _ in 0..held.len() / 2 {
            let handle: RecvHandle<u64> = held.pop().unwrap();
            let data = handle.data().to_vec();
            let serial = u64::from_le_bytes(data[..8].try_into().unwrap());
            assert_eq!(
                data[8..],
                payload(serial, data.len() - 8),
                "request {serial}, held for a while"
            );
            assert!(
                expected
                    .insert(serial, answer(handle, rng.u64(..8)))
                    .is_none(),
                "request {serial} came twice"
            );
        }
    };
    step_until(|| next.get() >= 2_500, round);
    let total = next.get() as usize;
    let mut ended = pair.ended.take();
    let step = || {
        pair.poll();
        for handle in held
            .drain(..)
            .chain(std::iter::from_fn(|| pair.client.recv()))
            .chain(std::iter::from_fn(|| pair.server.recv()))
        {
            let serial = u64::from_le_bytes(handle.data().to_vec()[..8].try_into().unwrap());
            assert!(
                expected.insert(serial, answer(handle, 2)).is_none(),
                "request {serial} came twice"
            );
        }
    };
    step_until(|| ended.len() + pair.ended.borrow().len() >= total, step);
    ended.append(&mut pair.ended.borrow_mut());
    assert_eq!(
        (ended.len(), expected.len()),
        (total, total),
        "each call ends once, each request comes once"
    );
    for (serial, outcome) in ended {
        assert_eq!(
            expected.remove(&serial).as_ref(),
            Some(&outcome),
            "call {serial}"
        );
    }
    assert!(
        refused > 100 && deepest >= 8,
        "{refused} refused, {deepest} deep"
    );
}

#[test]
fn a_reply_above_the_allowance_gives_the_handle_back() {
    let pair = Pair::small();
    pair.to_server.call(b"", 3, 4).unwrap();
    let handle = pair.receive(1).remove(0);
    assert!(handle.endpoint() == pair.to_client);
    let too_long = vec![0; handle.max_reply() + 1];
    let error = handle.reply(&too_long).unwrap_err();
    assert_eq!(
        error.to_string(),
        "reply of 21 bytes, the caller allowed 20"
    );
    let ReplyError::TooLarge {
        request,
        len: 21,
        max: 20,
    } = error
    else {
        panic!("{error}")
    };
    request.refuse().unwrap();
    assert_eq!(pair.finish(1), [(3, Err(CallFailure::Refused))]);
}

#[test]
fn requests_that_are_dropped_are_answered_with_an_error() {
    let pair = Pair::small();
    for serial in 0..8 {
        pair.to_server.call(b"x", serial, 0).unwrap();
    }
    drop(pair.receive(8));
    let mut ended = pair.finish(8);
    ended.sort_by_key(|(serial, _)| *serial);
    assert_eq!(
        ended,
        (0..8)
            .map(|serial| (serial, Err(CallFailure::Dropped)))
            .collect::<Vec<_>>()
    );
}
