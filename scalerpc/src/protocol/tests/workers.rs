//! Workers and callers: handlers that fail or panic, buffers that run out.

use std::cell::RefCell;

use super::defects::active_world;
use super::world::{World, responses_addr, small};
use crate::protocol::memory::Memory;
use crate::protocol::wire::{HEADER_BYTES, ReqId, RequestHeader, Trailer, valid};
use crate::protocol::{CallFailure, HandlerError, Handlers, HeldRequest, ServerConfig, ServerOp};

/// Makes a call of this type in a world with one active client. `handlers` answer it, with `clock`
/// as their time. Returns its outcome.
fn answer(
    world: &mut World,
    handlers: &mut Handlers,
    rpc_type: u16,
    mut clock: impl FnMut() -> u64,
) -> Option<Result<usize, CallFailure>> {
    let side = &mut world.sides[0];
    side.client
        .call(rpc_type, &[1, 2, 3], 0, &mut side.to_server)
        .unwrap();
    world.deliver_to_server(0);
    world.poll_server();
    let mut ops = Vec::new();
    let now_ns = clock();
    handlers.step(&mut world.server, 8, now_ns, clock, &mut ops);
    deliver(world, ops)
}

fn deliver(world: &mut World, ops: Vec<ServerOp>) -> Option<Result<usize, CallFailure>> {
    let side = &mut world.sides[0];
    side.to_client.extend(ops);
    while world.deliver_to_client(0) {}
    let side = &mut world.sides[0];
    side.client.poll(0, &mut side.to_server);
    side.client
        .poll_completion(&mut [])
        .map(|completion| completion.outcome)
}

#[test]
fn unknown_types_failures_and_responses_that_are_too_large_are_told_to_the_caller() {
    let mut world = active_world(&small(), 1);
    let mut handlers = Handlers::new(world.server.layout().max_payload());
    handlers.insert(1, |request: &[u8], response: &mut [u8]| {
        response[..request.len()].copy_from_slice(request);
        Ok(request.len())
    });
    handlers.insert(2, |_: &[u8], _: &mut [u8]| Err(HandlerError));
    handlers.insert(3, |_: &[u8], response: &mut [u8]| Ok(response.len() + 1));
    let expected = [
        (1, Ok(3)),
        (2, Err(CallFailure::Refused)),
        (3, Err(CallFailure::ReplyTooLong { len: None })),
        (4, Err(CallFailure::UnknownType)),
    ];
    for (rpc_type, outcome) in expected {
        assert_eq!(
            answer(&mut world, &mut handlers, rpc_type, || 0),
            Some(outcome)
        );
    }
}

#[test]
fn a_handler_that_panics_drops_its_request() {
    let mut world = active_world(&small(), 1);
    let mut handlers = Handlers::new(8);
    handlers.insert(1, |_: &[u8], _: &mut [u8]| panic!("on purpose"));
    let side = &mut world.sides[0];
    side.client.call(1, &[], 0, &mut side.to_server).unwrap();
    world.deliver_to_server(0);
    world.poll_server();
    let mut ops = Vec::new();
    let step =
        std::panic::AssertUnwindSafe(|| handlers.step(&mut world.server, 1, 0, || 0, &mut ops));
    assert!(std::panic::catch_unwind(step).is_err());
    assert_eq!(deliver(&mut world, ops), Some(Err(CallFailure::Dropped)));
}

/// A request without a buffer for its response is not taken, and stays where it is.
#[test]
fn requests_wait_for_response_buffers() {
    let config = ServerConfig {
        depth: 2,
        response_buffers: 1,
        ..small()
    };
    let mut world = active_world(&config, 1);
    world.call(0).unwrap();
    world.call(0).unwrap();
    while world.deliver_to_server(0) {}
    world.poll_server();
    assert!(world.take() && !world.take());
    assert!(world.reply() && !world.take(), "the WRITE is under way");
    assert!(world.deliver_to_client(0) && world.take());
}

/// Held requests are answered in another order, by another thread, by a drop, and after a context
/// switch. A client that has disconnected gets no answer, and each other call gets its own answer,
/// once.
#[test]
fn requests_that_are_held_are_answered_whenever_by_whomever() {
    let config = ServerConfig {
        depth: 4,
        response_buffers: 2,
        ..small()
    };
    let mut world = active_world(&config, 1);
    let held = RefCell::new(Vec::new());
    let mut handlers = Handlers::new(world.server.layout().max_payload());
    handlers.insert_held(1, |request| held.borrow_mut().push(request));
    let side = &mut world.sides[0];
    let calls: Vec<_> = (0..4_u8)
        .map(|call| {
            side.client
                .call(1, &[call], 0, &mut side.to_server)
                .unwrap()
        })
        .collect();
    while world.deliver_to_server(0) {}
    world.poll_server();
    let mut ops = Vec::new();
    assert_eq!(
        handlers.step(&mut world.server, 8, 0, || 0, &mut ops),
        4,
        "two buffers, four requests: none keeps a buffer"
    );
    assert_eq!(
        (handlers.held(), world.server.free_buffers(), ops.len()),
        (4, 2, 0)
    );
    assert_eq!(
        handlers.step(&mut world.server, 8, 0, || 0, &mut ops),
        0,
        "nobody has answered"
    );

    let mut requests: Vec<HeldRequest> = held.take();
    assert!(
        requests
            .iter()
            .zip(0..)
            .all(|(request, call)| *request.payload() == [call])
    );
    let too_large = vec![0; requests[0].max_response() + 1];
    assert!(matches!(
        requests.remove(1).reply(too_large),
        Err(CallFailure::ReplyTooLong { len: Some(_) })
    ));
    drop(requests.remove(1));
    let worker = std::thread::spawn(move || {
        for request in requests.into_iter().rev() {
            let call = request.payload()[0];
            request.reply([call]).unwrap();
        }
    });
    worker.join().unwrap();

    let mut ends = Vec::new();
    for round in 0..10 {
        handlers.step(&mut world.server, 8, 0, || 0, &mut ops);
        assert!(
            ops.len() <= 2,
            "round {round}: as many responses as buffers"
        );
        let side = &mut world.sides[0];
        side.to_client.extend(ops.drain(..));
        while world.deliver_to_client(0) {}
        let side = &mut world.sides[0];
        side.client.poll(0, &mut side.to_server);
        let mut payload = [0xff];
        while let Some(completion) = side.client.poll_completion(&mut payload) {
            let call = calls
                .iter()
                .position(|call| *call == completion.call)
                .unwrap();
            ends.push((call, completion.outcome.map(|_| payload[0])));
        }
    }
    ends.sort_by_key(|(call, _)| *call);
    let failures = [
        CallFailure::ReplyTooLong { len: None },
        CallFailure::Dropped,
    ];
    assert_eq!(
        ends,
        [
            (0, Ok(0)),
            (1, Err(failures[0])),
            (2, Err(failures[1])),
            (3, Ok(3))
        ]
    );
    assert_eq!((handlers.held(), world.server.free_buffers()), (0, 2));
}

/// A client that breaks the rules uses the slot of a held request again.
#[test]
fn the_late_answer_to_a_request_whose_slot_was_used_again_ends_no_other_call() {
    let mut world = active_world(&small(), 1);
    let held = RefCell::new(Vec::new());
    let mut handlers = Handlers::new(world.server.layout().max_payload());
    handlers.insert_held(7, |request| held.borrow_mut().push(request));
    let (layout, mut ops) = (*world.server.layout(), Vec::new());
    let start = layout.pool_slot(world.server.zone_of(world.sides[0].id).unwrap(), 0);
    for sequence in [2, 3] {
        let header = RequestHeader {
            rpc_type: 7,
            req_id: ReqId { slot: 0, sequence }.to_wire(),
            client_slot_addr: responses_addr(0),
            client_slot_rkey: 200,
            payload_len: 0,
        };
        let pools = &world.server.memory().pools;
        pools.write(start + layout.trailer_at() - HEADER_BYTES, &header.encode());
        pools.store(
            start + layout.trailer_at(),
            Trailer {
                len: HEADER_BYTES as u32,
                valid: valid(sequence),
            }
            .to_word(),
        );
        world.poll_server();
        assert_eq!(handlers.step(&mut world.server, 8, 0, || 0, &mut ops), 1);
    }
    for (answered, request) in held.take().into_iter().enumerate() {
        request.reply([]).unwrap();
        let done = handlers.step(&mut world.server, 8, 0, || 0, &mut ops);
        assert_eq!(
            (done, ops.len(), handlers.held()),
            (answered, answered, 1 - answered)
        );
    }
}

/// A worker that panics drops its requests.
#[test]
fn a_worker_that_dies_drops_its_requests() {
    let mut world = active_world(&small(), 1);
    let mut handlers = Handlers::new(8);
    let (to_worker, of_server) = std::sync::mpsc::channel::<HeldRequest>();
    handlers.insert_held(1, move |request| to_worker.send(request).unwrap());
    assert_eq!(answer(&mut world, &mut handlers, 1, || 0), None);
    let worker = std::thread::spawn(move || {
        let _request = of_server.recv().unwrap();
        panic!("on purpose");
    });
    assert!(worker.join().is_err());
    let mut ops = Vec::new();
    assert_eq!(handlers.step(&mut world.server, 8, 0, || 0, &mut ops), 1);
    assert_eq!(deliver(&mut world, ops), Some(Err(CallFailure::Dropped)));
}
