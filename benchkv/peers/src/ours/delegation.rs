//! delegationrpc.

use delegationrpc::{CallError, Client, Server};

use crate::load::{Answerer, Caller, Failure, Payload};

pub(crate) type DelegationServer = Server<Payload, Payload>;
pub(crate) type DelegationClient = Client<Payload, Payload, u32>;

impl Answerer for DelegationServer {
    #[inline]
    fn step(&mut self, mut f: impl FnMut(&Payload) -> Payload) -> Result<usize, Failure> {
        let waiting = self.poll();
        while let Some(request) = self.recv() {
            let response = f(&request.payload);
            self.reply(request.token, response)?;
        }
        Ok(waiting)
    }
}

impl Caller for DelegationClient {
    #[inline]
    fn call(&mut self, slot: u32, request: Payload) -> Result<bool, Failure> {
        match Client::call(self, request, slot) {
            Ok(()) => Ok(true),
            Err(CallError::QueueFull { .. }) => Ok(false),
            Err(CallError::Ended { end, .. }) => Err(end.into()),
        }
    }

    #[inline]
    fn poll(&mut self, mut f: impl FnMut(u32, Payload)) -> Result<usize, Failure> {
        let mut failed = None;
        let taken = Client::poll(self, |slot, outcome| match outcome {
            Ok(response) => f(slot, response),
            Err(failure) => failed = Some(failure),
        })?;
        failed.map_or(Ok(taken), |failure| Err(failure.into()))
    }
}
