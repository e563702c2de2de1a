//! Requests answered where they are parsed, and those that are held, refused, dropped or left by a
//! panic instead.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use copyrpc::{CallFailure, CloseReason, Outcome, RecvBytes, RecvHandle, Reply, ReplyError};

use crate::support::{Ended, Pair, payload, step_until};

/// Polls the client, and adds the calls that ended to `ended`.
fn poll_client(pair: &Pair) {
    pair.client.poll_into(&pair.ended);
}

/// Calls of random sizes until the ring is full, each answered in one of the possible ways; held
/// requests are answered some rounds later, in any order.
#[test]
fn each_request_is_handed_out_once_in_order_and_each_call_gets_its_own_answer() {
    let pair = Pair::small();
    let rng = RefCell::new(fastrand::Rng::with_seed(3));
    let made = Cell::new(0_u64);
    let served = Cell::new(0_u64);
    let expected = RefCell::new(HashMap::<u64, Ended>::new());
    let held: RefCell<Vec<(u64, RecvHandle<u64>)>> = RefCell::default();
    let round = || {
        while made.get() < 3_000 {
            let serial = made.get();
            let len = rng.borrow_mut().usize(..100);
            match pair.to_server.call(
                &[&serial.to_le_bytes(), &payload(serial, len)[..]].concat(),
                serial,
                len,
            ) {
                Ok(_) => made.set(serial + 1),
                Err(error) if error.is_retryable() => break,
                Err(error) => panic!("{error}"),
            }
        }
        let on_request = |request: RecvBytes<'_>, reply: Reply<'_, u64>| {
            let data = request.to_vec();
            let serial = u64::from_le_bytes(data[..8].try_into().unwrap());
            assert_eq!(
                serial,
                served.replace(serial + 1),
                "in the order of the calls"
            );
            assert_eq!(data[8..], payload(serial, data.len() - 8));
            let expect = |ended| assert!(expected.borrow_mut().insert(serial, ended).is_none());
            match rng.borrow_mut().u8(..8) {
                0 => {
                    expect(Err(CallFailure::Dropped));
                    drop(reply);
                }
                1 => {
                    expect(Err(CallFailure::Refused));
                    reply.refuse().unwrap();
                }
                2 | 3 => held.borrow_mut().push((serial, reply.hold())),
                _ => {
                    expect(Ok(data[8..].to_vec()));
                    reply.send(&data[8..]).unwrap();
                }
            }
        };
        pair.server.serve(on_request, |_, _| ()).unwrap();
        rng.borrow_mut().shuffle(&mut held.borrow_mut());
        let left = held.borrow().len() / 2;
        for (serial, handle) in held.borrow_mut().drain(left..) {
            let data = handle.data().to_vec();
            assert_eq!(
                data[8..],
                payload(serial, data.len() - 8),
                "request {serial}, held for a while"
            );
            assert!(
                expected
                    .borrow_mut()
                    .insert(serial, Ok(data[8..].to_vec()))
                    .is_none()
            );
            handle.reply(&data[8..]).unwrap();
        }
        poll_client(&pair);
    };
    step_until(|| pair.ended.borrow().len() == 3_000, round);
    for (serial, ended) in pair.ended.take() {
        assert_eq!(
            expected.borrow_mut().remove(&serial),
            Some(ended),
            "call {serial}"
        );
    }
    assert_eq!(
        (expected.borrow().len(), pair.to_client.stats().replies),
        (0, 3_000)
    );
}

#[test]
fn requests_that_a_drain_queued_are_served_before_later_ones() {
    let pair = Pair::small();
    let order = RefCell::new(Vec::new());
    for serial in 0..3 {
        pair.to_server.call(&[serial as u8], serial, 8).unwrap();
    }
    let first = RefCell::new(None);
    let receive = || {
        poll_client(&pair);
        pair.server.drain(|_, _| ()).unwrap();
        first.replace(pair.server.recv());
    };
    step_until(|| first.borrow().is_some(), receive);
    for serial in 3..6 {
        pair.to_server.call(&[serial as u8], serial, 8).unwrap();
    }
    let serve = || {
        poll_client(&pair);
        let on_request = |request: RecvBytes<'_>, reply: Reply<'_, u64>| {
            order.borrow_mut().extend(request.to_vec());
            reply.send(b"").unwrap();
        };
        pair.server.serve(on_request, |_, _| ()).unwrap();
    };
    step_until(|| pair.ended.borrow().len() == 5, serve);
    assert_eq!(order.take(), [1, 2, 3, 4, 5]);
    assert_eq!(first.take().unwrap().data().to_vec(), [0]);
}

/// The replies are to requests that an earlier drain queued, and to later requests.
#[test]
fn replies_of_a_drain_wait_for_the_flush() {
    let pair = Pair::small();
    let call = |serial: u64| assert!(pair.to_server.call(&[serial as u8], serial, 8).is_ok());
    let poll_both = || {
        poll_client(&pair);
        pair.server.drain(|_, _| ()).unwrap();
    };
    (0..4).for_each(call);
    step_until(|| pair.to_client.stats().messages_received == 4, poll_both);
    let batches_sent = pair.to_client.stats().batches_sent;
    (4..6).for_each(call);
    let order = RefCell::new(Vec::new());
    let serve = || {
        poll_client(&pair);
        let on_request = |request: RecvBytes<'_>, reply: Reply<'_, u64>| {
            order.borrow_mut().extend(request.to_vec());
            reply.send(b"").unwrap();
        };
        pair.server.drain_serving(on_request, |_, _| ()).unwrap();
    };
    step_until(|| order.borrow().len() == 6, serve);
    assert_eq!(
        (order.take(), pair.to_client.stats().batches_sent),
        ((0..6).collect(), batches_sent)
    );
    pair.server.flush_endpoints().unwrap();
    step_until(|| pair.ended.borrow().len() == 6, || poll_client(&pair));
}

/// In total, several times as many requests as a ring has room for.
#[test]
fn requests_that_a_drain_queued_can_be_held() {
    let pair = Pair::small();
    let (made, held) = (Cell::new(0_u64), RefCell::new(Vec::new()));
    let round = || {
        if made.get() < 500
            && pair
                .to_server
                .call(&made.get().to_le_bytes(), made.get(), 8)
                .is_ok()
        {
            made.set(made.get() + 1);
        }
        poll_client(&pair);
        pair.server.drain(|_, _| ()).unwrap();
        pair.server
            .serve(|_, reply| held.borrow_mut().push(reply.hold()), |_, _| ())
            .unwrap();
        held.borrow_mut()
            .drain(..)
            .for_each(|handle: RecvHandle<u64>| handle.reply(b"").unwrap());
    };
    step_until(|| pair.ended.borrow().len() == 500, round);
}

/// Six requests come in one batch; every second handler panics.
#[test]
fn a_handler_that_panics_loses_its_own_request_only() {
    let pair = Pair::small();
    for serial in 0..6 {
        pair.to_server.call(&[serial as u8], serial, 8).unwrap();
    }
    let serve = || {
        poll_client(&pair);
        let on_request = |request: RecvBytes<'_>, reply: Reply<'_, u64>| {
            if request.to_vec()[0] % 2 == 1 {
                // As `panic!`, without its message.
                std::panic::resume_unwind(Box::new(()));
            }
            reply.send(&request.to_vec()).unwrap();
        };
        let _ = catch_unwind(AssertUnwindSafe(|| {
            pair.server.serve(on_request, |_, _| ())
        }));
    };
    step_until(|| pair.ended.borrow().len() == 6, serve);
    let mut ended = pair.ended.take();
    ended.sort_by_key(|(serial, _)| *serial);
    let expected = |serial: u64| {
        if serial % 2 == 1 {
            Err(CallFailure::Dropped)
        } else {
            Ok(vec![serial as u8])
        }
    };
    assert_eq!(
        ended,
        (0..6)
            .map(|serial| (serial, expected(serial)))
            .collect::<Vec<_>>()
    );
}

#[test]
fn a_reply_above_the_allowance_comes_back_and_a_handler_may_call_but_not_poll() {
    let pair = Pair::small();
    pair.to_server.call(b"x", 3, 4).unwrap();
    let called_back = Cell::new(false);
    let serve = || {
        poll_client(&pair);
        pair.client.echo_all();
        let on_request = |_: RecvBytes<'_>, reply: Reply<'_, u64>| {
            assert!(
                pair.server.poll(|_, _| ()).is_err() && pair.server.flush_endpoints().is_err(),
                "nested"
            );
            reply.endpoint().call(b"back", 9, 4).unwrap();
            let too_long = vec![0; reply.max_len() + 1];
            let ReplyError::TooLarge {
                request,
                len: 21,
                max: 20,
            } = reply.send(&too_long).unwrap_err()
            else {
                panic!("it fits")
            };
            request.send(&too_long[1..]).unwrap();
        };
        let on_response = |serial, outcome: Outcome<'_>| {
            assert_eq!((serial, outcome.unwrap().to_vec()), (9, b"back".to_vec()));
            called_back.set(true);
        };
        pair.server.serve(on_request, on_response).unwrap();
    };
    step_until(
        || called_back.get() && !pair.ended.borrow().is_empty(),
        serve,
    );
    assert_eq!(pair.ended.take(), [(3, Ok(vec![0; 20]))]);
}

/// The bytes of a request that is held outlive its connection, like the bytes of a request that was
/// received.
#[test]
fn a_handler_may_end_the_connection_of_its_request() {
    let pair = Pair::small();
    for serial in 0..3 {
        pair.to_server
            .call(&payload(serial, 40), serial, 8)
            .unwrap();
    }
    let held = RefCell::new(Vec::new());
    let serve = || {
        poll_client(&pair);
        let on_request = |_: RecvBytes<'_>, reply: Reply<'_, u64>| {
            if held.borrow().is_empty() {
                held.borrow_mut().push(reply.hold());
            } else {
                reply.endpoint().abort();
                let error = reply.send(b"").unwrap_err();
                let ReplyError::Closed(CloseReason::ClosedHere) = error else {
                    panic!("{error}")
                };
            }
        };
        pair.server.serve(on_request, |_, _| ()).unwrap();
    };
    step_until(|| pair.to_client.closed().is_some(), serve);
    for _ in 0..3 {
        pair.server.poll_quietly();
    }
    let handle: RecvHandle<u64> = held.borrow_mut().pop().unwrap();
    assert!(
        held.borrow().is_empty(),
        "the third request was of a connection that had ended"
    );
    assert_eq!(handle.data().to_vec(), payload(0, 40));
    assert!(matches!(handle.reply(b""), Err(ReplyError::Closed(_))));
}
