//! One-sided operations: what they copy, how they end, and what refuses them.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use copyrpc::{
    CallFailure, CloseReason, Context, Endpoint, EndpointConfig, Memory, RdmaError, RemoteMemory,
};
use mlx5::LocalFabric;

use super::{builder, connect, next_request, small, step_until};

/// Two ends with memory each, and the operations that ended at the near end.
struct Pair {
    near: Context<u64>,
    far: Context<u64>,
    endpoint: Endpoint<u64>,
    peer: Endpoint<u64>,
    local: Memory,
    theirs: Memory,
    ended: RefCell<Vec<(u64, Result<usize, CallFailure>)>>,
}

impl Pair {
    fn new(bytes: usize, config: &EndpointConfig) -> Self {
        let fabric = LocalFabric::new();
        let (near, far) = (
            builder(&fabric).build().unwrap(),
            builder(&fabric).build().unwrap(),
        );
        let (endpoint, peer) = connect(&near, &far, config);
        let (local, theirs) = (near.alloc(bytes).unwrap(), far.alloc(bytes).unwrap());
        Self {
            near,
            far,
            endpoint,
            peer,
            local,
            theirs,
            ended: RefCell::default(),
        }
    }

    fn poll(&self) {
        self.near
            .poll(|user, outcome| {
                self.ended
                    .borrow_mut()
                    .push((user, outcome.map(|bytes| bytes.len())))
            })
            .unwrap();
        self.far.poll(|_, _| ()).unwrap();
    }

    fn finish(&self, operations: usize) -> Vec<(u64, Result<usize, CallFailure>)> {
        step_until(|| {
            self.poll();
            self.ended.borrow().len() >= operations
        });
        assert_eq!(self.endpoint.raw_rdma_pending(), 0);
        self.ended.take()
    }

    fn write(&self, len: usize, user: u64) -> Result<(), RdmaError<u64>> {
        self.endpoint
            .rdma_write(&self.local, 0, &self.theirs.remote(), 0, len, user)
    }
}

fn contents(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

#[test]
fn bytes_far_above_the_message_limit_are_read_and_written() {
    let bytes = 3 << 20;
    let pair = Pair::new(bytes, &small());
    let pattern: Vec<u8> = (0..bytes).map(|at| (at / 251) as u8).collect();
    pair.local.write(0, &pattern).unwrap();
    // The record for the peer, encoded and decoded as in a message.
    let remote = RemoteMemory::decode(&pair.theirs.remote().encode()).unwrap();
    assert_eq!(remote.len(), bytes as u64);
    pair.endpoint
        .rdma_write(&pair.local, 0, &remote, 0, bytes, 1)
        .unwrap();
    assert_eq!(pair.endpoint.raw_rdma_pending(), 1);
    assert!(
        contents(&pair.theirs).iter().all(|byte| *byte == 0),
        "nothing leaves before a flush"
    );
    assert_eq!(pair.finish(1), [(1, Ok(0))]);
    assert_eq!(contents(&pair.theirs), pattern);
    // The last 1000 bytes, read to the beginning.
    pair.endpoint
        .rdma_read(&pair.local, 0, &remote, (bytes - 1000) as u64, 1000, 2)
        .unwrap();
    pair.endpoint
        .rdma_read(&pair.local, bytes, &remote, bytes as u64, 0, 3)
        .unwrap();
    assert_eq!(pair.finish(2), [(2, Ok(0)), (3, Ok(0))]);
    assert_eq!(contents(&pair.local)[..1000], pattern[bytes - 1000..]);
    assert_eq!(contents(&pair.local)[1000..], pattern[1000..]);
}

#[test]
fn a_write_posted_before_a_call_is_there_when_the_request_arrives() {
    let pair = Pair::new(64, &small());
    for round in 1..=100 {
        pair.local.write(0, &[round; 64]).unwrap();
        pair.write(64, 0).unwrap();
        pair.endpoint.call(&[round], 1, 0).unwrap();
        pair.near.flush_endpoints().unwrap();
        let request = next_request(&pair.far);
        assert_eq!(
            (request.data().to_vec(), contents(&pair.theirs)),
            (vec![round], vec![round; 64])
        );
        request.reply(b"").unwrap();
        assert_eq!(pair.finish(2).len(), 2);
    }
}

#[test]
fn operations_above_the_limit_are_refused_and_taken_later() {
    let pair = Pair::new(
        64,
        &EndpointConfig {
            raw_operations: 2,
            max_send_wr: Some(8),
            ..small()
        },
    );
    let mut next = 0;
    let mut refused = 0;
    let mut calls = 0;
    let mut ended = Vec::new();
    step_until(|| {
        while next < 2_000 {
            match pair.write(64, next) {
                Ok(()) => next += 1,
                Err(error) => {
                    assert_eq!((error.is_retryable(), error.into_user_data()), (true, next));
                    refused += 1;
                    break;
                }
            }
        }
        if calls < 2_000
            && pair
                .endpoint
                .call(b"and a call", 1_000_000 + calls, 0)
                .is_ok()
        {
            calls += 1;
        }
        assert!(pair.endpoint.raw_rdma_pending() <= 2);
        pair.poll();
        while let Some(request) = pair.far.recv() {
            request.reply(b"").unwrap();
        }
        ended.append(&mut pair.ended.borrow_mut());
        ended.len() == 4_000
    });
    assert!(refused > 0);
    let (operations, calls): (Vec<_>, Vec<_>) =
        ended.iter().partition(|(user, _)| *user < 1_000_000);
    assert!(
        operations.iter().map(|(user, _)| *user).eq(0..2_000) && calls.len() == 2_000,
        "each once, in order"
    );
    assert!(ended.iter().all(|(_, outcome)| *outcome == Ok(0)));
}

#[test]
fn ranges_outside_either_memory_are_refused_with_the_user_data() {
    let pair = Pair::new(100, &small());
    let remote = pair.theirs.remote();
    let at = |local: usize, far: u64, len: usize| {
        let (read, write) = (
            pair.endpoint
                .rdma_read(&pair.local, local, &remote, far, len, 5)
                .unwrap_err(),
            pair.endpoint
                .rdma_write(&pair.local, local, &remote, far, len, 5)
                .unwrap_err(),
        );
        assert_eq!(read, write);
        assert!(!read.is_retryable());
        read
    };
    for (offset, len) in [(0, 101), (100, 1), (99, 2), (usize::MAX, 1)] {
        assert!(
            matches!(
                at(offset, 0, len),
                RdmaError::LocalRange { user_data: 5, .. }
            ),
            "{offset} {len}"
        );
    }
    for (offset, len) in [(1, 100), (100, 1), (u64::MAX, 1)] {
        assert!(
            matches!(
                at(0, offset, len),
                RdmaError::RemoteRange { user_data: 5, .. }
            ),
            "{offset} {len}"
        );
    }
    assert!(matches!(
        at(0, 0, (1 << 30) + 1),
        RdmaError::TooLong {
            user_data: 5,
            len: 0x4000_0001
        }
    ));
    assert!(matches!(at(0, 0, 1 << 32), RdmaError::TooLong { .. }));
    assert_eq!(pair.endpoint.raw_rdma_pending(), 0);
    let foreign = pair.endpoint.rdma_write(&pair.theirs, 0, &remote, 0, 1, 6);
    assert_eq!(foreign, Err(RdmaError::ForeignMemory(6)));
    let without = Pair::new(
        100,
        &EndpointConfig {
            raw_operations: 0,
            ..small()
        },
    );
    assert_eq!(without.write(1, 7), Err(RdmaError::Disabled(7)));
    assert!(pair.near.alloc(0).is_err());
}

#[test]
fn memory_lives_until_the_operations_that_use_it_have_ended() {
    let pair = Pair::new(64, &small());
    let local = pair.near.alloc(64).unwrap();
    local.write(0, &[7; 64]).unwrap();
    pair.endpoint
        .rdma_write(&local, 0, &pair.theirs.remote(), 0, 64, 1)
        .unwrap();
    drop(local);
    assert_eq!(pair.finish(1), [(1, Ok(0))]);
    assert_eq!(contents(&pair.theirs), [7; 64]);
}

#[test]
fn an_operation_on_memory_that_is_gone_ends_the_connection_and_everything_on_it_once() {
    let pair = Pair::new(64, &small());
    let gone = pair.far.alloc(64).unwrap();
    let remote = gone.remote();
    drop(gone);
    pair.write(64, 1).unwrap();
    pair.endpoint
        .rdma_write(&pair.local, 0, &remote, 0, 64, 2)
        .unwrap();
    pair.endpoint
        .rdma_read(&pair.local, 0, &remote, 0, 64, 3)
        .unwrap();
    pair.endpoint.call(b"lost", 4, 0).unwrap();
    let mut ended = pair.finish(4);
    for _ in 0..10 {
        pair.poll();
    }
    assert!(pair.ended.borrow().is_empty());
    ended.sort_by_key(|(user, _)| *user);
    let Some(reason @ CloseReason::Transport { .. }) = pair.endpoint.closed() else {
        panic!("{:?}", pair.endpoint.closed())
    };
    let lost = Err(CallFailure::Closed(reason));
    assert_eq!(ended, [(1, Ok(0)), (2, lost), (3, lost), (4, lost)]);
    assert_eq!(
        pair.write(64, 5),
        Err(RdmaError::Closed {
            user_data: 5,
            reason
        })
    );
}

#[test]
fn operations_end_when_the_peer_is_gone_or_this_end_closes() {
    let Pair {
        near,
        far,
        endpoint,
        peer,
        local,
        theirs,
        ..
    } = Pair::new(64, &small());
    let remote = theirs.remote();
    drop((far, peer, theirs));
    endpoint.rdma_read(&local, 0, &remote, 0, 64, 1).unwrap();
    let mut ended = Vec::new();
    step_until(|| {
        near.poll(|user, outcome| ended.push((user, outcome.is_ok())))
            .unwrap();
        endpoint.raw_rdma_pending() == 0
    });
    assert_eq!(ended, [(1, false)]);
    // The operation is posted and never flushed.
    let pair = Pair::new(64, &small());
    pair.write(64, 2).unwrap();
    let Pair { near, endpoint, .. } = pair;
    drop(near);
    assert!(matches!(
        endpoint.rdma_write(&local, 0, &remote, 0, 64, 3),
        Err(RdmaError::Closed {
            reason: CloseReason::ClosedHere,
            ..
        })
    ));
}

#[test]
fn a_callback_that_panics_loses_only_its_own_operation() {
    let pair = Pair::new(64, &small());
    (0..4).for_each(|user| pair.write(64, user).unwrap());
    let mut ended = Vec::new();
    step_until(|| {
        let panic = |user, _: copyrpc::Outcome<'_>| {
            ended.push(user);
            std::panic::resume_unwind(Box::new(user));
        };
        let _ = catch_unwind(AssertUnwindSafe(|| pair.near.poll(panic)));
        pair.endpoint.raw_rdma_pending() == 0
    });
    assert_eq!(ended, [0, 1, 2, 3]);
}

/// A queue pair that fails gives a completion for each posted operation, so each endpoint's share
/// of the send CQ (B2) includes one-sided operations.
#[test]
fn peers_that_die_with_operations_outstanding_overrun_no_completion_queue() {
    let fabric = LocalFabric::new();
    let near: Context<u64> = builder(&fabric).srq_size(48).cq_size(64).build().unwrap();
    let (far, doomed): (Context<u64>, Context<u64>) = (
        builder(&fabric).build().unwrap(),
        builder(&fabric).build().unwrap(),
    );
    let config = EndpointConfig {
        batches_in_flight: 1,
        raw_operations: 23,
        ..small()
    };
    let (alive, _peer) = connect(&near, &far, &config);
    // As many endpoints as the context has room for.
    let dead: Vec<_> = std::iter::from_fn(|| {
        let (a, b) = (
            near.create_endpoint(&config).ok()?,
            doomed.create_endpoint(&config).unwrap(),
        );
        Some(a.connect(&b.local_info()).unwrap())
    })
    .collect();
    assert!(!dead.is_empty());
    let (local, theirs) = (near.alloc(64).unwrap(), doomed.alloc(64).unwrap());
    let (gone, there) = (theirs.remote(), far.alloc(64).unwrap());
    drop((theirs, doomed));
    for user in 0..23 {
        dead.iter()
            .for_each(|dead| dead.rdma_read(&local, 0, &gone, 0, 64, user).unwrap());
        alive
            .rdma_read(&local, 0, &there.remote(), 0, 64, 100 + user)
            .unwrap();
    }
    let (mut failed, mut done) = (0, 0);
    step_until(|| {
        near.poll(|_, outcome| {
            *if outcome.is_ok() {
                &mut done
            } else {
                &mut failed
            } += 1
        })
        .unwrap();
        dead.iter().all(|dead| dead.raw_rdma_pending() == 0) && alive.raw_rdma_pending() == 0
    });
    assert_eq!((done, failed), (23, 23 * dead.len()));
    alive
        .rdma_write(&local, 0, &there.remote(), 0, 64, 200)
        .unwrap();
    step_until(|| {
        near.poll(|_, outcome| assert!(outcome.is_ok())).unwrap();
        alive.raw_rdma_pending() == 0
    });
}
