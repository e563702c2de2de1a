//! Calls as futures: none is lost, none is woken for nothing, and a dropped one leaves no trace.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use copyrpc::future::{AsyncCallError, AsyncEndpoint};
use copyrpc::typed::zerocopy::little_endian::{U32, U64};
use copyrpc::typed::{Call, SizeError};
use copyrpc::{CallError, CallFailure, EndpointConfig, RdmaError};
use zerocopy::{Immutable, IntoBytes};

use super::task::{Pair, Task, bytes, echo};
use super::{small, step_until};

#[test]
fn calls_of_many_tasks_wait_for_room_and_end_with_their_own_replies() {
    const TASKS: usize = 300;
    const CALLS: usize = 20;
    let pair = Pair::new(&small());
    let (endpoint, serial, order) = (&pair.endpoint, &Cell::new(0_u32), RefCell::new(Vec::new()));
    let call = |task: usize| async move {
        for number in 0..CALLS {
            let mut payload = bytes(task, 4 + (task * 7 + number * 31) % 480);
            payload[..4].copy_from_slice(&serial.replace(serial.get() + 1).to_le_bytes());
            assert_eq!(endpoint.call(&payload, payload.len()).await, Ok(payload));
        }
    };
    let mut servers = [Task::new(async {
        while order.borrow().len() < TASKS * CALLS {
            let request = pair.far.recv().await.unwrap();
            order.borrow_mut().push(request.data().read::<u32>().unwrap());
            let answer = request.data().to_vec();
            request.reply(&answer).unwrap();
        }
    })];
    let mut clients: Vec<_> = (0..TASKS).map(|task| Task::new(call(task))).collect();
    step_until(|| {
        clients.iter_mut().for_each(|task| _ = task.turn());
        servers.iter_mut().for_each(|task| _ = task.turn());
        pair.poll();
        clients.iter().all(Task::is_done)
    });
    let stats = pair.near.stats();
    assert!(stats.ring_full + stats.insufficient_credit > 0, "{stats:?}");
    assert_eq!((stats.calls, stats.cancelled, endpoint.endpoint().outstanding_calls()), ((TASKS * CALLS) as u64, 0, 0));
    // First come, first served.
    assert!(order.borrow().is_sorted(), "a call overtook others");
    // One poll to begin, one when it is the first to wait, some when there is too little room for it, one at its end.
    let polls: u64 = clients.iter().map(|task| task.polls).sum();
    assert!(polls <= (TASKS * CALLS * 5) as u64, "{polls} polls");
    assert!(servers[0].is_done() && servers[0].polls <= 1 + pair.far.stats().batches_received, "{} polls", servers[0].polls);
}

#[test]
fn both_ends_call_each_other_at_a_depth_above_their_credit() {
    let pair = Pair::new(&small());
    let left = [Cell::new(2_000), Cell::new(2_000)];
    let call = |endpoint: AsyncEndpoint, number: usize| async move {
        let payload = bytes(number, number % 400);
        assert_eq!(endpoint.call(&payload, payload.len()).await, Ok(payload));
    };
    let mut tasks = vec![Task::new(echo(&pair.near, &left[0])), Task::new(echo(&pair.far, &left[1]))];
    for number in 0..2_000 {
        tasks.push(Task::new(call(pair.endpoint.clone(), number)));
        tasks.push(Task::new(call(pair.peer.clone(), number)));
    }
    pair.finish(&mut tasks);
}

#[test]
fn a_future_that_is_dropped_takes_its_call_back_in_every_state() {
    let pair = Pair::new(&small());
    let (endpoint, large) = (&pair.endpoint, [7; 500]);
    let calls = || pair.near.stats().calls;
    drop(endpoint.call(b"never polled", 8));
    assert_eq!(calls(), 0);
    // Taken, not answered; and as many as there is room for.
    let mut sent = Vec::new();
    loop {
        let mut task = Task::new(endpoint.call(&large, 100));
        let before = calls();
        assert!(task.turn().is_none());
        if calls() == before {
            break;
        }
        sent.push(task);
    }
    // The one that was refused above is gone, and waits for nothing. Of these, the first and one in the middle go.
    let mut waiting: Vec<_> = (0..4).map(|number| Task::new(async move { endpoint.call(&[number; 400], 100).await })).collect();
    waiting.iter_mut().for_each(|task| assert!(task.turn().is_none()));
    // Completions of what was sent are no reason to try again; the first had one when the other was dropped.
    pair.settle();
    waiting.iter_mut().for_each(|task| assert!(task.turn().is_none()));
    pair.settle();
    assert!(waiting.iter().all(|task| !task.is_woken()), "nothing was answered, and no room came back");
    drop(waiting.remove(2));
    drop(waiting.remove(0));
    assert_eq!(waiting.iter().map(Task::is_woken).collect::<Vec<_>>(), [true, false], "the next is the first now");
    let taken = sent.len();
    drop(sent.remove(0));
    assert_eq!((calls(), pair.near.stats().cancelled, endpoint.endpoint().outstanding_calls()), (taken as u64, 1, taken - 1));
    let served = RefCell::new(Vec::new());
    let mut server = Task::new(async {
        while let Some(request) = pair.far.recv().await {
            served.borrow_mut().push(request.data().read::<u8>());
            request.reply(b"done").unwrap();
        }
    });
    let mut replies = Vec::new();
    step_until(|| {
        _ = server.turn();
        pair.poll();
        replies.extend(sent.iter_mut().chain(&mut waiting).filter_map(Task::turn));
        replies.len() == taken - 1 + 2
    });
    assert!(replies.iter().all(|reply| *reply == Ok(b"done".to_vec())));
    assert_eq!(served.borrow()[taken..], [Some(1), Some(3)], "those that were dropped before they were taken never left");
    assert_eq!(pair.near.stats().late_responses, 1);
    // Its reply is there, and nobody looked at it.
    let mut task = Task::new(endpoint.call(b"", 8));
    assert!(task.turn().is_none());
    step_until(|| {
        _ = server.turn();
        pair.poll();
        task.is_woken()
    });
    drop(task);
    let stats = pair.near.stats();
    assert_eq!((stats.cancelled, stats.late_responses, endpoint.endpoint().outstanding_calls()), (1, 1, 0));
}

#[test]
fn futures_dropped_at_random_neither_hold_up_nor_disturb_the_others() {
    let pair = Pair::new(&small());
    let endpoint = &pair.endpoint;
    let mut rng = fastrand::Rng::with_seed(5);
    let mut server = Task::new(async {
        while let Some(request) = pair.far.recv().await {
            let answer = request.data().to_vec();
            request.reply(&answer).unwrap();
        }
    });
    let (mut tasks, mut ended, mut dropped) = (Vec::new(), 0, 0);
    for number in 0..5_000 {
        let payload = bytes(number, rng.usize(..480));
        tasks.push(Task::new(async move { assert_eq!(endpoint.call(&payload, payload.len()).await, Ok(payload)) }));
        if rng.u8(..4) == 0 {
            drop(tasks.swap_remove(rng.usize(..tasks.len())));
            dropped += 1;
        }
        if rng.bool() {
            ended += tasks.iter_mut().filter_map(Task::turn).count();
            tasks.retain(|task| !task.is_done());
        }
        if rng.bool() {
            pair.near.poll().unwrap();
        }
        if rng.bool() {
            _ = server.turn();
            pair.far.poll().unwrap();
        }
    }
    step_until(|| {
        ended += tasks.iter_mut().filter_map(Task::turn).count();
        _ = server.turn();
        pair.poll();
        tasks.iter().all(Task::is_done)
    });
    assert_eq!((ended + dropped, endpoint.endpoint().outstanding_calls()), (5_000, 0));
    let stats = pair.near.stats();
    assert!(stats.cancelled > 0 && stats.calls < 5_000, "dropped both before and after they were taken: {stats:?}");
}

#[test]
fn each_request_reaches_one_of_those_that_wait_also_when_the_first_is_dropped() {
    let pair = Pair::new(&small());
    let mut receivers: Vec<_> = (0..3).map(|_| Task::new(pair.far.recv())).collect();
    receivers.iter_mut().for_each(|task| assert!(task.turn().is_none()));
    let endpoint = &pair.endpoint;
    let call = |number: u8| {
        let mut task = Task::new(async move { endpoint.call(&[number], 8).await });
        assert!(task.turn().is_none());
        task
    };
    let calls = [call(1), call(2)];
    step_until(|| {
        pair.poll();
        receivers[0].is_woken()
    });
    assert!(!receivers[1].is_woken() && !receivers[2].is_woken());
    // It was woken and does not take the request: the next does.
    drop(receivers.remove(0));
    let first = receivers[0].turn().unwrap().unwrap();
    let second = receivers[1].turn().unwrap().unwrap();
    assert_eq!([first.data().to_vec(), second.data().to_vec()], [[1], [2]]);
    drop(calls);
}

#[test]
fn a_call_ends_with_its_deadline_a_refusal_or_its_failure() {
    let pair = Pair::new(&small());
    let endpoint = &pair.endpoint;
    let late = pair.value(endpoint.call(b"late", 0).within(Duration::from_millis(2)));
    assert_eq!(late, Err(AsyncCallError::Failed(CallFailure::DeadlineExceeded)));
    let large = pair.value(endpoint.call(&[0; 501], 0));
    assert_eq!(large, Err(AsyncCallError::NotTaken(CallError::PayloadTooLarge { user_data: (), len: 501, max: 500 })));
    let mut call = Task::new(endpoint.call(b"refused", 0));
    assert!(call.turn().is_none());
    assert_eq!(pair.request().data().to_vec(), b"late");
    pair.request().refuse().unwrap();
    let mut refused = None;
    step_until(|| {
        pair.poll();
        refused = call.turn();
        refused.is_some()
    });
    assert_eq!(refused, Some(Err(AsyncCallError::Failed(CallFailure::Refused))));
}

/// A number, to which the server below adds 1.
#[derive(IntoBytes, Immutable)]
#[repr(transparent)]
struct Number(U32);

impl Call for Number {
    type Reply = U64;
}

/// The same, with a reply that it does not get.
#[derive(IntoBytes, Immutable)]
#[repr(transparent)]
struct Misunderstood(U32);

impl Call for Misunderstood {
    type Reply = [u8; 9];
}

#[test]
fn structs_and_one_sided_operations_are_awaited_too() {
    let pair = Pair::new(&EndpointConfig { raw_operations: 2, ..small() });
    let endpoint = &pair.endpoint;
    let mut server = Task::new(async {
        while let Some(request) = pair.far.recv().await {
            let answer = U64::new(u64::from(request.read_as::<U32>().unwrap()) + 1);
            request.reply_typed(&answer).unwrap();
        }
    });
    let mut client = Task::new(async {
        assert_eq!(endpoint.call_typed(&Number(41.into())).await, Ok(42.into()));
        let wrong = endpoint.call_typed(&Misunderstood(1.into())).await;
        assert_eq!(wrong, Err(AsyncCallError::Size(SizeError { received: 8, expected: 9 })));
    });
    step_until(|| {
        _ = (client.turn(), server.turn());
        pair.poll();
        client.is_done()
    });
    let (local, back, theirs) = (pair.near.alloc(64).unwrap(), pair.near.alloc(64).unwrap(), pair.far.alloc(64).unwrap());
    let remote = theirs.remote();
    local.write(0, &bytes(1, 64)).unwrap();
    let mut writes: Vec<_> = (0..8).map(|at| Task::new(endpoint.rdma_write(&local, at * 8, &remote, at as u64 * 8, 8))).collect();
    let mut ended = Vec::new();
    step_until(|| {
        ended.extend(writes.iter_mut().filter_map(Task::turn));
        assert!(endpoint.endpoint().raw_rdma_pending() <= 2);
        pair.poll();
        ended.len() == 8
    });
    assert_eq!(ended, [const { Ok(()) }; 8]);
    assert_eq!(pair.value(endpoint.rdma_read(&back, 0, &remote, 0, 64)), Ok(()));
    let mut copy = vec![0; 64];
    back.read(0, &mut copy).unwrap();
    assert_eq!(copy, bytes(1, 64));
    let outside = pair.value(endpoint.rdma_read(&back, 60, &remote, 0, 8));
    assert!(matches!(outside, Err(RdmaError::LocalRange { user_data: (), .. })));
}
