//! A client's ways to the daemons of its rank.

use super::composed::{Plan, TYPE_TAG};
use super::{BackendError, Ending, IssueError, Paths};
use crate::cli::BackendKind;
use crate::message::{Request, Response};
use crate::store::owner_of;

/// An ipc connection to every daemon, and with delegation a seat at the ring.
#[derive(Debug)]
pub struct ClientPaths {
    rank: usize,
    shards: Vec<ipc::Client<Request, Response, u32>>,
    ring: Option<delegationrpc::Client<Request, Response, u32>>,
}

impl ClientPaths {
    pub(super) fn connect(plan: &Plan) -> Result<Self, BackendError> {
        let connect = |daemon| {
            let name = plan.server_name(&format!("ipc{daemon}"));
            ipc::Client::connect(&plan.dir, &name, TYPE_TAG).map_err(|e| BackendError::setup(format!("connecting to {name}"), e))
        };
        let shards = (0..plan.daemons).map(connect).collect::<Result<_, _>>()?;
        let ring = match plan.topology {
            BackendKind::Meta => None,
            BackendKind::Delegation => {
                let name = plan.server_name("ring");
                let ring = delegationrpc::Client::connect(&plan.dir, &name, TYPE_TAG);
                Some(ring.map_err(|e| BackendError::setup(format!("connecting to {name}"), e))?)
            }
        };
        Ok(Self { rank: plan.rank, shards, ring })
    }
}

impl Paths for ClientPaths {
    fn issue(&mut self, request: &Request, token: u32) -> Result<(), IssueError> {
        if let Some(ring) = self.ring.as_mut().filter(|_| request.rank() as usize != self.rank) {
            return ring.call(*request, token).map_err(|error| match error {
                delegationrpc::CallError::QueueFull { .. } => IssueError::Full,
                delegationrpc::CallError::Ended { end, .. } => BackendError::transport("the path to daemon 0", end).into(),
            });
        }
        // Requests of a client for one key take one path, so they keep their order.
        let owner = owner_of(request.key(), self.shards.len());
        let Some(shard) = self.shards.get_mut(owner) else { return Err(IssueError::Full) };
        shard.call(*request, token).map_err(|error| match error {
            ipc::CallError::QueueFull { .. } => IssueError::Full,
            ipc::CallError::Ended { end, .. } => BackendError::transport("the path to a daemon", end).into(),
        })
    }

    fn poll(&mut self, mut ended: impl FnMut(u32, Ending)) -> Result<(), BackendError> {
        for shard in &mut self.shards {
            let polled = shard.poll(|token, outcome| ended(token, outcome.map_or(Ending::Error, Ending::Reply)));
            polled.map_err(|end| BackendError::transport("the path to a daemon", end))?;
        }
        if let Some(ring) = &mut self.ring {
            let polled = ring.poll(|token, outcome| ended(token, outcome.map_or(Ending::Error, Ending::Reply)));
            polled.map_err(|end| BackendError::transport("the path to daemon 0", end))?;
        }
        Ok(())
    }
}
