//! The actions that callbacks may take, and the effects of their panics.

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};

use copyrpc::{CloseReason, Outcome, Reentrant, SetupError};

use crate::support::{Net, Pair, join, small, step_until};

#[test]
fn a_callback_may_call_reply_and_receive_but_not_poll() {
    let pair = Pair::small();
    let mut pending: Vec<_> = (0..10)
        .map(|_| pair.client.create_endpoint(&small()).unwrap())
        .collect();
    let record = pair.server.create_endpoint(&small()).unwrap().local_info();
    pair.to_server.call(b"first", 0, 100).unwrap();
    let ended = Cell::new(0);
    let step = || {
        let on_response = |serial: u64, outcome: Outcome<'_>| {
            ended.set(ended.get() + 1);
            assert!(outcome.is_ok());
            assert_eq!(pair.client.poll(|_, _| ()), Err(Reentrant));
            assert_eq!(pair.client.drain(|_, _| ()), Err(Reentrant));
            assert_eq!(pair.client.flush_endpoints(), Err(Reentrant));
            assert!(matches!(
                pair.client.create_endpoint(&small()),
                Err(SetupError::Misuse(_))
            ));
            assert!(pair.client.has_work() && pair.client.idle_for().is_none());
            let error = pending.pop().unwrap().connect(&record).unwrap_err();
            assert!(matches!(error, SetupError::Misuse(_)));
            assert!(pair.client.stats().calls > 0 && pair.client.recv().is_none());
            if serial < 9 {
                pair.to_server.call(b"next", serial + 1, 100).unwrap();
            }
        };
        pair.client.poll(on_response).unwrap();
        pair.server.poll_quietly();
        pair.server.echo_all();
    };
    step_until(|| ended.get() == 10, step);
    assert_eq!(pair.to_server.outstanding_calls(), 0);
    let texts = [
        Reentrant.to_string(),
        SetupError::from(Reentrant).to_string(),
    ];
    assert!(
        texts
            .iter()
            .all(|text| text.contains("inside a poll's callback")),
        "{texts:?}"
    );
}

/// Two connections of one context, of which the first ends with several calls outstanding,
/// gracefully or by an abort. Each callback of these calls panics, and so ends a poll after one
/// call; the second connection is served all the same.
#[test]
fn a_callback_that_panics_loses_no_connection_and_no_call() {
    [false, true].into_iter().for_each(a_callback_panics);
}

fn a_callback_panics(says_goodbye: bool) {
    let net = Net::new();
    let client = net.context();
    let server = net.context();
    let doomed = net.context();
    let (dead, peer) = join(&client, &doomed, &small());
    let (alive, _peer) = join(&client, &server, &small());
    if !says_goodbye {
        peer.abort();
    }
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
        server.poll_quietly();
        server.echo_all();
    };
    step_until(|| !failed.borrow().is_empty(), poll);
    alive.call(b"", 10, 0).unwrap();
    step_until(
        || failed.borrow().len() == 4 && answered.borrow().len() == 1,
        poll,
    );
    alive.call(b"", 11, 0).unwrap();
    step_until(
        || answered.borrow().len() == 2 && dead.closed().is_some(),
        poll,
    );
    failed.borrow_mut().sort_unstable();
    assert_eq!(
        (failed.take(), answered.take()),
        (vec![0, 1, 2, 3], vec![10, 11])
    );
    assert_eq!(dead.closed(), Some(CloseReason::Disconnected));
}

/// Four responses and a request arrive in one batch; each response's callback panics.
#[test]
fn a_callback_that_panics_loses_nothing_of_the_batch_it_came_in() {
    let pair = Pair::small();
    for serial in 0..4 {
        pair.to_server.call(b"", serial, 0).unwrap();
    }
    let requests = RefCell::new(Vec::new());
    let receive = || {
        pair.client.poll_quietly();
        pair.server.drain(|_, _| ()).unwrap();
        requests
            .borrow_mut()
            .extend(std::iter::from_fn(|| pair.server.recv()));
    };
    step_until(|| requests.borrow().len() == 4, receive);
    for request in requests.take() {
        request.reply(b"").unwrap();
    }
    pair.to_client.call(b"behind", 9, 0).unwrap();
    pair.server.flush_endpoints().unwrap();
    let (answered, behind) = (RefCell::new(Vec::new()), RefCell::new(None));
    let drain = || {
        let on_response = |serial, _: Outcome<'_>| {
            answered.borrow_mut().push(serial);
            std::panic::resume_unwind(Box::new(serial));
        };
        let _ = catch_unwind(AssertUnwindSafe(|| pair.client.drain(on_response)));
        pair.server.drain(|_, _| ()).unwrap();
        if let Some(request) = pair.client.recv() {
            assert!(behind.replace(Some(request.data().to_vec())).is_none());
        }
    };
    step_until(|| behind.borrow().is_some(), drain);
    assert_eq!(
        (answered.take(), behind.take()),
        (vec![0, 1, 2, 3], Some(b"behind".to_vec()))
    );
}

/// B1: the arrivals that a drain reported must be matched by the receives that replace theirs, also
/// if a callback ended the drain with a panic. The receive queue has room for one endpoint; each
/// drain takes an answer, and the callback panics in each drain.
#[test]
fn callbacks_that_panic_in_every_drain_leave_no_receive_queue_empty() {
    let pair = Pair::new(|builder| builder.srq_size(48), &small());
    let answered = Cell::new(0);
    for serial in 0..200 {
        pair.to_server.call(b"", serial, 0).unwrap();
        let drain = || {
            pair.client.flush_endpoints().unwrap();
            pair.server.poll_quietly();
            pair.server.echo_all();
            pair.server.flush_endpoints().unwrap();
            let on_response = |_, outcome: Outcome<'_>| {
                assert!(outcome.is_ok());
                answered.set(answered.get() + 1);
                std::panic::resume_unwind(Box::new(serial));
            };
            let _ = catch_unwind(AssertUnwindSafe(|| pair.client.drain(on_response)));
        };
        step_until(|| answered.get() == serial + 1, drain);
    }
    assert_eq!(
        (pair.to_server.closed(), pair.to_client.closed()),
        (None, None)
    );
}
