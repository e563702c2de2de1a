//! ipc.

use ipc::{CallError, Client, Server};

use crate::load::{Answerer, Caller, Failure, Payload};

pub(crate) type IpcServer = Server<Payload, Payload>;
pub(crate) type IpcClient = Client<Payload, Payload, u32>;

impl Answerer for IpcServer {
    #[inline]
    fn step(&mut self, mut f: impl FnMut(&Payload) -> Payload) -> Result<usize, Failure> {
        let waiting = self.poll();
        while let Some(request) = self.recv() {
            let response = f(request.data());
            request.reply(response)?;
        }
        Ok(waiting)
    }
}

impl Caller for IpcClient {
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
