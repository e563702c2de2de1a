//! A client that asserts that each of its calls ends once, and successfully.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use copyrpc_calls::{CallFailure, SessionEnd, Tag};

use crate::rpc::{Refused, Rpc};
use copyrpc_testing::helpers::PATIENCE;

/// Returns the right answer to a request.
pub(crate) fn answer(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17)
}

/// A client that records which of its calls have not ended.
pub(crate) struct Caller<R: Rpc> {
    client: R::Client,
    /// The calls that have not ended: by number, the tag, and the deadline if there is one.
    waiting: BTreeMap<u64, (Tag, Option<Instant>)>,
    /// A call that has ended.
    ended: Option<Tag>,
    pub(crate) answered: u64,
    pub(crate) dropped: u64,
    pub(crate) gone: u64,
    pub(crate) late: u64,
    pub(crate) cancelled: u64,
}

impl<R: Rpc> Caller<R> {
    pub(crate) fn new(client: R::Client) -> Self {
        Self {
            client,
            waiting: BTreeMap::new(),
            ended: None,
            answered: 0,
            dropped: 0,
            gone: 0,
            late: 0,
            cancelled: 0,
        }
    }

    pub(crate) fn call(&mut self, number: u64) {
        assert!(self.try_call(number, None));
    }

    /// Like [`call`](Self::call), but returns `false` if there is no room or no server. With a
    /// timeout, the call may end as timed out.
    pub(crate) fn try_call(&mut self, number: u64, timeout: Option<Duration>) -> bool {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let called = match timeout {
            Some(timeout) => R::call_within(&mut self.client, number, number, timeout),
            None => R::call(&mut self.client, number, number),
        };
        match called {
            Ok(call) => {
                assert!(self.waiting.insert(number, (call, deadline)).is_none());
                true
            }
            Err(Refused::Full(..) | Refused::Ended(_, _, SessionEnd::PeerGone)) => false,
            Err(other) => panic!("call {number}: {other:?}"),
        }
    }

    /// Gives the oldest call up. Asserts that a call that has ended cannot be given up.
    pub(crate) fn cancel(&mut self) {
        let ended = self
            .ended
            .and_then(|call| R::cancel(&mut self.client, call));
        assert_eq!(ended, None, "a call that has ended is given up");
        if let Some((number, (call, _))) = self.waiting.pop_first() {
            assert_eq!(
                R::cancel(&mut self.client, call),
                Some(number),
                "call {number} has ended, and was not heard of"
            );
            self.ended = Some(call);
            self.cancelled += 1;
        }
    }

    /// Sleeps until there is something to poll for. Returns `false` after [`PATIENCE`].
    pub(crate) fn sleep(&mut self) -> bool {
        R::wait(&mut self.client, Some(PATIENCE))
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Polls once. Asserts that each call that ends has not ended before, and has a legal outcome.
    pub(crate) fn poll(&mut self) -> Result<usize, SessionEnd> {
        let Self {
            client,
            waiting,
            ended,
            answered,
            dropped,
            gone,
            late,
            ..
        } = self;
        R::poll(client, |number, outcome| {
            let (call, deadline) = waiting
                .remove(&number)
                .unwrap_or_else(|| panic!("call {number} ends twice"));
            *ended = Some(call);
            match outcome {
                Ok(response) => {
                    assert_eq!(
                        response,
                        answer(number),
                        "the answer to another call than {number}"
                    );
                    *answered += 1;
                }
                Err(CallFailure::Refused | CallFailure::Dropped) => *dropped += 1,
                Err(CallFailure::TimedOut) => {
                    assert!(
                        deadline.is_some_and(|at| at <= Instant::now()),
                        "call {number} ends before its time"
                    );
                    *late += 1;
                }
                Err(CallFailure::NotSent | CallFailure::Closed(SessionEnd::PeerGone)) => *gone += 1,
                Err(other) => panic!("call {number}: {other}"),
            }
        })
    }
}
