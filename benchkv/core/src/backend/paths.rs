//! A client's paths to the daemons of its rank, and to the daemons of other ranks.

use std::task::Waker;
use std::time::Duration;

use copyrpc_shm::sleep::{self, Due, Sleeper, Watch};
use mlx5::Device;

use super::plan::{RankPlan, TYPE_TAG};
use super::remote::Remote;
use super::{BackendError, Endpoints, IssueError, OrSetup, Paths, Restful};
use crate::message::{Request, Response};
use crate::operation::Operation;
use crate::store::owner_of;
use crate::topology::Worker;
use crate::values::ClientValues;

type LocalClient = ipc::Client<Request, Response, Operation>;
type RingClient = delegationrpc::Client<Request, Response, Operation>;

/// A client's connections to the daemons of the rank, and the further connections of its topology.
#[derive(Debug)]
pub struct ClientPaths {
    rank: usize,
    shards: Vec<LocalClient>,
    /// The ring of each daemon that has a ring.
    rings: Vec<RingClient>,
    /// The client's own connections to other ranks. A caller is an operation and the
    /// [place](crate::values) of the tail of its value.
    remote: Option<Remote<(Operation, u32)>>,
    values: ClientValues,
}

impl ClientPaths {
    pub(super) fn open(
        plan: &RankPlan,
        client: usize,
        device: Option<&Device>,
    ) -> Result<Self, BackendError> {
        let topology = plan.job.topology;
        let name = |kind, daemon| plan.server_name(&format!("{kind}{daemon}"));
        let shard = |daemon| {
            let name = name("ipc", daemon);
            LocalClient::connect_in(&plan.dir, &name, TYPE_TAG)
                .or_setup(format!("connecting to {name}"))
        };
        let ring = |daemon| {
            let name = name("ring", daemon);
            RingClient::connect_in(&plan.dir, &name, TYPE_TAG)
                .or_setup(format!("connecting to {name}"))
        };
        Ok(Self {
            rank: plan.rank,
            shards: (0..topology.daemons).map(shard).collect::<Result<_, _>>()?,
            rings: (0..topology.rings()).map(ring).collect::<Result<_, _>>()?,
            remote: Remote::open(plan, Worker::Client(client), device)?,
            values: ClientValues {
                values: plan.values.clone(),
                first: plan.values.places().first_of_client(client),
            },
        })
    }
}

fn sleepers<'a>(
    shards: &'a mut [LocalClient],
    rings: &'a mut [RingClient],
) -> impl Iterator<Item = &'a mut dyn Sleeper> {
    let shards = shards.iter_mut().map(|shard| shard as &mut dyn Sleeper);
    shards.chain(rings.iter_mut().map(|ring| ring as &mut dyn Sleeper))
}

impl Endpoints for ClientPaths {
    fn remote(&mut self) -> Option<&mut dyn Endpoints> {
        self.remote
            .as_mut()
            .map(|remote| remote as &mut dyn Endpoints)
    }
}

impl Sleeper for ClientPaths {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        // Requests that wait for room are sent only in polls, so the client does not sleep.
        let remote = self.remote.as_ref();
        if remote.is_some_and(|remote| remote.backlogged() > 0) {
            return then(&mut Due::now());
        }
        let remote = self
            .remote
            .as_mut()
            .map(|remote| remote as &mut dyn Sleeper);
        sleep::join(
            sleepers(&mut self.shards, &mut self.rings).chain(remote),
            then,
        );
    }
}

impl ClientPaths {
    #[inline(always)]
    fn issue_far(&mut self, request: Request, note: Operation) -> Result<(), IssueError> {
        let remote = self.remote.as_mut();
        if let Some((link, remote)) =
            remote.and_then(|remote| Some((remote.link_for(&request)?, remote)))
        {
            // A request that finds no room waits in the backlog of `remote`; the queue depth bounds
            // the number of waiting requests.
            let called = remote.call(link, request, (note, request.place()));
            return called.map_err(IssueError::Down);
        }
        // If there is one ring, it takes all keys; otherwise each ring takes the keys that its
        // daemon owns.
        let ring = if self.rings.len() > 1 {
            owner_of(request.key(), self.rings.len())
        } else {
            0
        };
        if let Some(ring) = self.rings.get_mut(ring) {
            return ring
                .call(request, note)
                .map(|_| ())
                .map_err(|error| refused("the path to a daemon's ring", &error));
        }
        self.issue_here(request, note)
    }

    #[inline(always)]
    fn issue_here(&mut self, request: Request, note: Operation) -> Result<(), IssueError> {
        let owner = owner_of(request.key(), self.shards.len());
        let Some(shard) = self.shards.get_mut(owner) else {
            return Err(IssueError::Full);
        };
        shard
            .call(request, note)
            .map(|_| ())
            .map_err(|error| refused("the path to a daemon", &error))
    }
}

impl Restful for ClientPaths {
    fn rest(&mut self, waker: &Waker) -> Option<Duration> {
        let remote = self.remote.as_mut();
        let remote = remote.map_or(Some(Duration::MAX), Remote::rest)?;
        let local = sleepers(&mut self.shards, &mut self.rings);
        Some(remote.min(sleep::rest(local, waker)?))
    }
}

#[cold]
fn refused(path: &'static str, error: &ipc::CallError<Request, Operation>) -> IssueError {
    let down = match error {
        ipc::CallError::Full { .. } => return IssueError::Full,
        ipc::CallError::Closed { reason, .. } => BackendError::transport(path, *reason),
        ipc::CallError::TooLarge { .. } | ipc::CallError::NoSuchNode { .. } => {
            BackendError::transport(path, error.to_string())
        }
    };
    IssueError::Down(Box::new(down))
}

/// Keeps the order of a client's requests for one key, because all of them take one path.
impl Paths for ClientPaths {
    fn values(&self) -> Option<ClientValues> {
        (self.values.tail_bytes() > 0).then(|| self.values.clone())
    }

    #[inline(always)]
    fn issue(&mut self, request: Request, note: Operation) -> Result<(), IssueError> {
        if request.rank() as usize == self.rank {
            self.issue_here(request, note)
        } else {
            self.issue_far(request, note)
        }
    }

    #[inline(always)]
    fn poll(
        &mut self,
        mut ended: impl FnMut(Operation, Option<Response>),
    ) -> Result<(), BackendError> {
        for shard in &mut self.shards {
            let polled = shard.poll(|operation, outcome| ended(operation, outcome.ok()));
            polled.map_err(|end| BackendError::transport("the path to a daemon", end))?;
        }
        for ring in &mut self.rings {
            let polled = ring.poll(|operation, outcome| ended(operation, outcome.ok()));
            polled.map_err(|end| BackendError::transport("the path to a daemon's ring", end))?;
        }
        let Some(remote) = &mut self.remote else {
            return Ok(());
        };
        let answer = |(operation, place), response, tail: &[u8]| {
            if !tail.is_empty() {
                self.values.values.write(place, tail);
            }
            ended(operation, response);
        };
        remote.poll(answer, |_, _| None)?;
        remote.retry()?;
        remote.flush()
    }

    fn flush(&mut self) -> Result<(), BackendError> {
        self.remote.as_mut().map_or(Ok(()), Remote::flush)
    }
}
