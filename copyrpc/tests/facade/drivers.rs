//! Drivers of futures, and the ends of all futures: sleeping threads, wake-ups from others, a context or a peer that goes.

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::task::{Poll, Waker};
use std::time::Duration;

use copyrpc::future::{AsyncCallError, AsyncContext};
use copyrpc::{CallError, CallFailure, CloseReason, ExchangeRecord};
use mlx5::LocalFabric;

use super::task::{Pair, Task, echo};
use super::wait::{stagger, watchdog};
use super::{builder, small, step_until};

#[test]
fn everything_awaited_ends_when_the_context_is_dropped_or_the_peer_is_gone() {
    for is_near_dropped in [true, false] {
        let Pair { near, far, endpoint, peer } = Pair::new(&small());
        let mut calls = Vec::new();
        while calls.len() < 100 {
            calls.push(Task::new(endpoint.call(&[1; 400], 100)));
            assert!(calls.last_mut().unwrap().turn().is_none());
        }
        near.poll().unwrap();
        let taken = near.stats().calls;
        let mut closed = Task::new(endpoint.closed());
        let (mut refused, mut failed, mut reason) = (0, 0, None);
        let mut turn = |expected: CloseReason| {
            reason = reason.or(closed.turn());
            for outcome in calls.iter_mut().filter_map(Task::turn) {
                match outcome {
                    Err(AsyncCallError::Failed(CallFailure::Closed(why))) if why == expected => failed += 1,
                    Err(AsyncCallError::NotTaken(CallError::Closed { reason: why, .. })) if why == expected => refused += 1,
                    other => panic!("{other:?}"),
                }
            }
            (refused, failed, reason)
        };
        assert_eq!(turn(CloseReason::ClosedHere), (0, 0, None));
        let expected = if is_near_dropped { CloseReason::ClosedHere } else { CloseReason::Disconnected };
        if is_near_dropped {
            drop(near);
            // Those that waited for room go one after the other.
            step_until(|| turn(expected) == (100 - taken, taken, Some(expected)));
        } else {
            // A context that is dropped would say so.
            peer.endpoint().abort();
            far.poll().unwrap();
            drop((far, peer));
            step_until(|| {
                near.poll().unwrap();
                turn(expected) == (100 - taken, taken, Some(expected))
            });
            let mut recv = Task::new(near.recv());
            assert!(recv.turn().unwrap().is_none(), "nobody is left that could call");
        }
    }
}

#[test]
fn after_a_graceful_close_calls_have_their_replies_and_receivers_hear_of_the_end() {
    let pair = Pair::new(&small());
    let mut server = Task::new(async {
        let mut served = 0;
        while let Some(request) = pair.far.recv().await {
            request.reply(b"yes").unwrap();
            served += 1;
        }
        served
    });
    let mut call = Task::new(pair.endpoint.call(b"last", 8));
    assert!(call.turn().is_none() && server.turn().is_none());
    // The request is with the server; the answer is not on its way.
    step_until(|| {
        assert!(server.turn().is_none());
        let is_served = pair.far.stats().replies == 1;
        if !is_served {
            pair.poll();
        }
        is_served
    });
    pair.endpoint.endpoint().close();
    let late = pair.endpoint.call(b"late", 8);
    let (mut reply, mut served) = (None, None);
    let mut closed = [Task::new(pair.endpoint.closed()), Task::new(pair.peer.closed())];
    let mut reasons = Vec::new();
    step_until(|| {
        pair.poll();
        reply = reply.take().or_else(|| call.turn());
        served = served.or_else(|| server.turn());
        reasons.extend(closed.iter_mut().filter_map(Task::turn));
        reasons.len() == 2 && served.is_some()
    });
    assert_eq!((reply, served), (Some(Ok(b"yes".to_vec())), Some(1)));
    assert!(reasons.contains(&CloseReason::ClosedHere) && reasons.contains(&CloseReason::ClosedByPeer), "{reasons:?}");
    assert!(matches!(pair.value(late), Err(AsyncCallError::NotTaken(CallError::Closed { .. }))));
}

/// Threads that sleep whenever there is nothing to do: the one in the loop of the library, the other in one of its own.
#[test]
fn futures_on_both_sides_of_sleeping_threads_wake_for_every_message() {
    // What is behind libibverbs here takes its time.
    let rounds = if std::env::var_os("MLX5_TEST_DEVICE").is_some() { 1_000 } else { 30_000 };
    watchdog();
    let fabric = LocalFabric::new();
    let context = AsyncContext::new(builder(&fabric).build().unwrap()).spins(0);
    let pending = context.create_endpoint(&small()).unwrap();
    let (record, server_builder, (to_client, from_server)) = (pending.local_info().encode(), builder(&fabric), channel());
    let (done, is_done) = channel();
    let server = std::thread::spawn(move || {
        let context = AsyncContext::new(server_builder.build().unwrap());
        let pending = context.create_endpoint(&small()).unwrap();
        to_client.send(pending.local_info().encode()).unwrap();
        let _endpoint = pending.connect(&ExchangeRecord::decode(&record).unwrap()).unwrap();
        let left = Cell::new(rounds as usize);
        let (mut task, mut polls) = (Task::new(echo(&context, &left)), 0);
        while task.turn().is_none() {
            if !task.is_woken() {
                context.wait(None).unwrap();
            }
            context.poll().unwrap();
            polls += 1;
        }
        while is_done.try_recv().is_err() {
            context.poll().unwrap();
        }
        (polls, task.polls)
    });
    let endpoint = context.endpoint(pending.connect(&ExchangeRecord::decode(&from_server.recv().unwrap()).unwrap()).unwrap());
    let polls = Rc::new(Cell::new(0));
    let client = async {
        for round in 0..rounds {
            stagger(round);
            let payload = round.to_le_bytes();
            let mut call = std::pin::pin!(endpoint.call(&payload, 8));
            let counted = std::future::poll_fn(|task| {
                polls.set(polls.get() + 1);
                call.as_mut().poll(task)
            });
            assert_eq!(counted.await, Ok(payload.to_vec()));
        }
    };
    context.run_until(client).unwrap();
    done.send(()).unwrap();
    assert!(polls.get() <= 2 * rounds, "{} polls of {rounds} calls", polls.get());
    let (context_polls, task_polls) = server.join().unwrap();
    assert!(task_polls <= rounds + 1 && context_polls <= 3 * rounds, "{task_polls} {context_polls}");
}

#[test]
fn a_wake_up_from_another_thread_ends_a_sleep() {
    watchdog();
    let context = AsyncContext::new(builder(&LocalFabric::new()).build().unwrap());
    let (to_thread, wakers) = channel::<Waker>();
    let is_set = Arc::new(AtomicBool::new(false));
    let set = Arc::clone(&is_set);
    let thread = std::thread::spawn(move || {
        let waker = wakers.recv().unwrap();
        std::thread::sleep(Duration::from_millis(50));
        set.store(true, Ordering::Relaxed);
        waker.wake();
    });
    let other = std::future::poll_fn(|task| {
        if is_set.load(Ordering::Relaxed) {
            return Poll::Ready(());
        }
        to_thread.send(task.waker().clone()).unwrap();
        Poll::Pending
    });
    context.run_until(other).unwrap();
    thread.join().unwrap();
}

#[test]
fn a_driver_among_other_futures_is_enough_and_requests_nobody_waits_for_keep_no_context_awake() {
    let pair = Pair::new(&small());
    let (mut near, mut far) = (Task::new(pair.near.drive()), Task::new(pair.far.drive()));
    let mut call = Task::new(pair.endpoint.call(b"driven", 8));
    let mut recv = Task::new(pair.far.recv());
    let mut request = None;
    step_until(|| {
        assert!(near.turn().is_none() && far.turn().is_none() && call.turn().is_none());
        request = request.take().or_else(|| recv.turn());
        request.is_some()
    });
    request.unwrap().unwrap().reply(b"yes").unwrap();
    let mut reply = None;
    step_until(|| {
        assert!(near.turn().is_none() && far.turn().is_none());
        reply = call.turn();
        reply.is_some()
    });
    assert_eq!(reply, Some(Ok(b"yes".to_vec())));
    let mut unheard = Task::new(pair.endpoint.call(b"unheard", 8));
    assert!(unheard.turn().is_none());
    pair.near.poll().unwrap();
    step_until(|| pair.far.poll().unwrap() > 0);
    step_until(|| pair.far.poll().unwrap() == 0 && !pair.far.wait(Some(Duration::ZERO)).unwrap());
    assert_eq!(pair.request().data().to_vec(), b"unheard");
}
