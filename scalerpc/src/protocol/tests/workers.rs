//! Workers and callers: handlers that fail, panic or take long, buffers that run out, permits.

use std::collections::VecDeque;

use super::defects::active_world;
use super::world::{World, small};
use crate::handlers::LONG_RUNS;
use crate::{CallError, CallFailure, ClientOp, CloseReason, HandlerError, Handlers, ServerConfig, ServerOp};

#[test]
fn a_permit_is_had_in_process_only_and_keeps_the_client_there() {
    let mut world = World::new(&ServerConfig { depth: 2, ..small() }, 1);
    assert_eq!(world.sides[0].client.try_activate().unwrap_err(), CallError::NotActive);
    world.call(0).unwrap();
    world.run(20);
    let side = &mut world.sides[0];
    let mut permit = side.client.try_activate().unwrap();
    permit.call(7, &[0, 1, 0x5a, 0xa5], 0, &mut side.to_server).unwrap();
    assert!(matches!(side.to_server.back(), Some(ClientOp::WriteRequest { .. })), "left at once");
    side.client.close(CloseReason::ClosedHere);
    assert_eq!(side.client.try_activate().unwrap_err(), CallError::Closed(CloseReason::ClosedHere));
}

/// Handlers of a world with one active client: calls of these types, answered by `handlers` whose clock is `clock`.
fn answer(world: &mut World, handlers: &mut Handlers, rpc_type: u16, clock: impl FnMut() -> u64) -> Option<Result<usize, CallFailure>> {
    let side = &mut world.sides[0];
    side.client.call(rpc_type, &[1, 2, 3], 0, &mut side.to_server).unwrap();
    world.deliver_to_server(0);
    world.poll_server();
    let mut ops = VecDeque::new();
    handlers.step(&mut world.server, 8, clock, &mut ops);
    deliver(world, ops)
}

fn deliver(world: &mut World, mut ops: VecDeque<ServerOp>) -> Option<Result<usize, CallFailure>> {
    let side = &mut world.sides[0];
    side.to_client.append(&mut ops);
    while world.deliver_to_client(0) {}
    let side = &mut world.sides[0];
    side.client.poll(0, &mut side.to_server);
    side.client.poll_completion(&mut []).map(|completion| completion.outcome)
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
    let expected =
        [(1, Ok(3)), (2, Err(CallFailure::HandlerFailed)), (3, Err(CallFailure::ResponseTooLarge)), (4, Err(CallFailure::UnknownType))];
    for (rpc_type, outcome) in expected {
        assert_eq!(answer(&mut world, &mut handlers, rpc_type, || 0), Some(outcome));
    }
}

#[test]
fn a_handler_that_panics_answers_that_it_failed() {
    let mut world = active_world(&small(), 1);
    let mut handlers = Handlers::new(8);
    handlers.insert(1, |_: &[u8], _: &mut [u8]| panic!("on purpose"));
    let side = &mut world.sides[0];
    side.client.call(1, &[], 0, &mut side.to_server).unwrap();
    world.deliver_to_server(0);
    world.poll_server();
    let mut ops = VecDeque::new();
    let step = std::panic::AssertUnwindSafe(|| handlers.step(&mut world.server, 1, || 0, &mut ops));
    assert!(std::panic::catch_unwind(step).is_err());
    assert_eq!(deliver(&mut world, ops), Some(Err(CallFailure::HandlerFailed)));
}

#[test]
fn a_handler_that_takes_longer_than_a_slice_is_served_from_the_legacy_lane_and_a_full_lane_says_so() {
    let config = ServerConfig { depth: 3, ..small() };
    let mut world = active_world(&config, 1);
    let mut handlers = Handlers::new(world.server.layout().max_payload());
    handlers.insert(1, |_: &[u8], _: &mut [u8]| Ok(0));
    let mut now_ns = 0;
    let mut slow = || {
        now_ns += 1_001;
        now_ns
    };
    for _ in 0..LONG_RUNS {
        assert_eq!(answer(&mut world, &mut handlers, 1, &mut slow), Some(Ok(0)), "at first it is answered like any");
        assert_eq!(world.server.stats().legacy, 0);
    }
    assert_eq!(answer(&mut world, &mut handlers, 1, &mut slow), None, "then they wait in the lane");
    assert_eq!(answer(&mut world, &mut handlers, 1, &mut slow), Some(Err(CallFailure::Busy)), "which has one place");
    let mut ops = VecDeque::new();
    assert!(handlers.step_legacy(&mut world.server, &mut slow, &mut ops));
    assert_eq!(deliver(&mut world, ops), Some(Ok(0)), "of its own slot, whenever it comes");
    assert!(!handlers.step_legacy(&mut world.server, &mut slow, &mut VecDeque::new()));
    assert_eq!(world.server.stats().legacy, 2);
}

/// Without a buffer for its response a request is not taken; it stays where it is.
#[test]
fn requests_wait_for_response_buffers() {
    let config = ServerConfig { depth: 2, response_buffers: 1, legacy_capacity: 0, ..small() };
    let mut world = active_world(&config, 1);
    world.call(0).unwrap();
    world.call(0).unwrap();
    while world.deliver_to_server(0) {}
    world.poll_server();
    assert!(world.take() && !world.take());
    assert!(world.reply() && !world.take(), "the WRITE is under way");
    assert!(world.deliver_to_client(0) && world.take());
}
