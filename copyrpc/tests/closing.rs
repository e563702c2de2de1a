//! The graceful end through the driver, both ends in one thread. The rules are tested in `protocol`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use copyrpc::{CallError, CallFailure, CloseReason, Context, ContextBuilder, Endpoint, EndpointConfig};
use mlx5::{DeviceSpec, FabricSpec, LocalFabric, SoftOptions};

struct World {
    contexts: [Context<u64>; 2],
    ends: [Endpoint<u64>; 2],
    ended: Vec<(u64, Result<Vec<u8>, CallFailure>)>,
}

impl World {
    fn new() -> Self {
        let fabric = LocalFabric::new();
        let contexts: [Context<u64>; 2] = std::array::from_fn(|_| {
            let soft = SoftOptions { fabric: FabricSpec::Local(fabric.clone()), ..SoftOptions::default() };
            ContextBuilder::new(DeviceSpec::Soft(soft)).build().unwrap()
        });
        let config = EndpointConfig { ring_size: 4096, ..EndpointConfig::default() };
        let [a, b] = [0, 1].map(|side: usize| contexts[side].create_endpoint(&config).unwrap());
        let records = [a.local_info(), b.local_info()];
        let ends = [a.connect(&records[1]).unwrap(), b.connect(&records[0]).unwrap()];
        Self { contexts, ends, ended: Vec::new() }
    }

    fn poll(&mut self, times: usize) {
        for _ in 0..times {
            for context in &self.contexts {
                context.poll(|serial, outcome| self.ended.push((serial, outcome.map(|bytes| bytes.to_vec())))).unwrap();
            }
        }
    }

    fn reasons(&self) -> [Option<CloseReason>; 2] {
        [0, 1].map(|side: usize| self.ends[side].closed())
    }
}

#[test]
fn both_ends_part_when_all_is_answered_and_not_before() {
    let mut world = World::new();
    for (side, serial) in [(0, 1), (1, 2)] {
        world.ends[side].call(b"held", serial, 8).unwrap();
    }
    world.poll(3);
    let held = [0, 1].map(|side: usize| world.contexts[side].recv().unwrap());
    world.ends[0].close();
    world.poll(10);
    assert_eq!(world.reasons(), [None, None]);
    for (side, reason) in [CloseReason::ClosedHere, CloseReason::ClosedByPeer].into_iter().enumerate() {
        assert_eq!(world.ends[side].call(b"", 9, 0), Err(CallError::Closed { user_data: 9, reason }));
    }
    for request in held {
        request.reply(b"answer").unwrap();
    }
    world.poll(20);
    world.ended.sort_by_key(|(serial, _)| *serial);
    assert_eq!(world.ended, [(1, Ok(b"answer".to_vec())), (2, Ok(b"answer".to_vec()))]);
    assert_eq!(world.reasons(), [Some(CloseReason::ClosedHere), Some(CloseReason::ClosedByPeer)]);
}

#[test]
fn a_request_that_nobody_received_is_refused() {
    let mut world = World::new();
    world.ends[1].call(b"late", 1, 8).unwrap();
    world.ends[0].close();
    world.poll(20);
    assert_eq!(world.ended, [(1, Err(CallFailure::Closed(CloseReason::ClosedByPeer)))]);
    assert_eq!(world.reasons(), [Some(CloseReason::ClosedHere), Some(CloseReason::ClosedByPeer)]);
    assert!(world.contexts[0].recv().is_none());
}

#[test]
fn an_abort_ends_calls_at_once() {
    let mut world = World::new();
    world.ends[0].call(b"", 1, 0).unwrap();
    world.ends[0].abort();
    assert_eq!(world.reasons()[0], Some(CloseReason::ClosedHere));
    world.contexts[0].drain(|serial, outcome| world.ended.push((serial, outcome.map(|bytes| bytes.to_vec())))).unwrap();
    assert_eq!(world.ended, [(1, Err(CallFailure::Closed(CloseReason::ClosedHere)))]);
}
