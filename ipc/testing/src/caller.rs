//! A client that makes sure that each of its calls ends once, and ends well.

use std::collections::BTreeSet;

use calls::{CallFailed, SessionEnd};

use crate::conformance::{Refused, Rpc};
use crate::helpers::PATIENCE;

/// The right answer.
pub fn answer(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17)
}

/// A client that knows which of its calls have not ended.
pub struct Caller<R: Rpc> {
    client: R::Client,
    waiting: BTreeSet<u64>,
    pub answered: u64,
    pub dropped: u64,
    pub gone: u64,
}

impl<R: Rpc> Caller<R> {
    pub fn new(client: R::Client) -> Self {
        Self { client, waiting: BTreeSet::new(), answered: 0, dropped: 0, gone: 0 }
    }

    pub fn call(&mut self, number: u64) {
        R::call(&mut self.client, number, number).unwrap();
        assert!(self.waiting.insert(number));
    }

    /// As [`call`](Self::call), if there is room and a server.
    pub fn try_call(&mut self, number: u64) -> bool {
        let called = R::call(&mut self.client, number, number);
        assert!(called.is_err() || self.waiting.insert(number));
        match called {
            Ok(_) => true,
            Err(Refused::Full(..) | Refused::Ended(_, _, SessionEnd::PeerGone)) => false,
            Err(other) => panic!("call {number}: {other:?}"),
        }
    }

    /// Sleeps until there is something to poll for; false if that takes too long.
    pub fn sleep(&mut self) -> bool {
        R::wait(&mut self.client, Some(PATIENCE))
    }

    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Polls once. A call that ends has not ended before, and ends as it may.
    pub fn poll(&mut self) -> Result<usize, SessionEnd> {
        let Self { client, waiting, answered, dropped, gone } = self;
        R::poll(client, |number, outcome| {
            assert!(waiting.remove(&number), "call {number} ends twice");
            match outcome {
                Ok(response) => {
                    assert_eq!(response, answer(number), "the answer to another call than {number}");
                    *answered += 1;
                }
                Err(CallFailed::Rejected) => *dropped += 1,
                Err(CallFailed::Disconnected(SessionEnd::PeerGone)) => *gone += 1,
                Err(other) => panic!("call {number}: {other}"),
            }
        })
    }
}
