//! The ends of ipc under the load of `harness`, for the benchmarks here and in `benchkv/peers`;
//! with another `W`, the ends of delegationrpc.

use benchkv_harness::Failure;
use benchkv_harness::load::{Answerer, Caller, Payload};
use ipc::{Announce, CallError, Client, Dir, Server};

const TAG: u64 = 0x7065_6572;

pub(crate) struct RpcServer<W: Announce>(Server<Payload, Payload, W>);
pub(crate) struct RpcClient<W>(Client<Payload, Payload, u32, W>);

impl<W: Announce> RpcServer<W> {
    pub(crate) fn create(
        dir: &Dir,
        name: &str,
        clients: usize,
        depth: u32,
    ) -> Result<Self, Failure> {
        Ok(Self(Server::bind_in(
            dir,
            name,
            clients,
            depth as usize,
            TAG,
        )?))
    }

    #[allow(dead_code, reason = "not of interest to every program")]
    pub(crate) fn region_bytes(&self) -> usize {
        self.0.region_bytes()
    }
}

impl<W: Announce> RpcClient<W> {
    pub(crate) fn connect(dir: &Dir, name: &str) -> Result<Self, Failure> {
        Ok(Self(Client::connect_in(dir, name, TAG)?))
    }
}

impl<W: Announce> Answerer for RpcServer<W> {
    #[inline]
    fn step(&mut self, f: impl FnMut(&Payload) -> Payload) -> Result<usize, Failure> {
        Ok(self.0.step(f))
    }
}

impl<W: Announce> Caller for RpcClient<W> {
    #[inline]
    fn call(&mut self, slot: u32, request: Payload) -> Result<bool, Failure> {
        match self.0.call(request, slot) {
            Ok(_) => Ok(true),
            Err(CallError::Full { .. }) => Ok(false),
            Err(CallError::Closed { reason, .. }) => Err(reason.into()),
            Err(error) => Err(error.to_string().into()),
        }
    }

    #[inline]
    fn poll(&mut self, mut f: impl FnMut(u32, Payload)) -> Result<usize, Failure> {
        let mut failed = None;
        let taken = self.0.poll(|slot, outcome| match outcome {
            Ok(response) => f(slot, response),
            Err(failure) => failed = Some(failure),
        })?;
        failed.map_or(Ok(taken), |failure| Err(failure.into()))
    }
}
