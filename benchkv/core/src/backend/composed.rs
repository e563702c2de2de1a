//! A rank of any topology made of ipc, delegationrpc, flux and a carrier between ranks: the state
//! that its threads share until each has opened its part.

use std::sync::{Mutex, PoisonError};

use mlx5::Device;

use super::daemon::KvDaemon;
use super::paths::ClientPaths;
use super::plan::{RankPlan, Site};
use super::shards::{self, ShardNode};
use super::{BackendError, Workers};
use crate::job::Job;

/// A rank of a composed topology.
#[derive(Debug)]
pub struct Composed {
    plan: RankPlan,
    /// The daemons' ends of their channel, each until its daemon takes it.
    nodes: Mutex<Vec<Option<ShardNode>>>,
}

impl Composed {
    /// Makes a rank of `job`: the channel between its daemons, and the memory of values under way.
    ///
    /// # Errors
    /// [`BackendError::Setup`] with the cause.
    pub fn new(job: &Job, site: Site) -> Result<Self, BackendError> {
        let nodes = shards::mesh(site.dir.clock(), job.topology.daemons, &job.sizes)?;
        Ok(Self {
            plan: RankPlan::new(job, site)?,
            nodes: Mutex::new(nodes.into_iter().map(Some).collect()),
        })
    }

    /// Like [`open_daemon`](Workers::open_daemon), with its endpoints on `device`, which the
    /// workers of one rank can share if they are not threads. `None`: on a device of its own.
    ///
    /// # Errors
    /// [`BackendError::Setup`] with the cause.
    pub fn open_daemon_on(
        &self,
        daemon: usize,
        device: Option<&Device>,
    ) -> Result<KvDaemon, BackendError> {
        let mut nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        let node = nodes.get_mut(daemon).and_then(Option::take);
        let node = node
            .ok_or_else(|| BackendError::setup(format!("daemon {daemon}"), "it is open already"))?;
        drop(nodes);
        KvDaemon::open(&self.plan, daemon, node, device)
    }

    /// Like [`open_client`](Workers::open_client), with its endpoints on `device`.
    ///
    /// # Errors
    /// [`BackendError::Setup`] with the cause.
    pub fn open_client_on(
        &self,
        client: usize,
        device: Option<&Device>,
    ) -> Result<ClientPaths, BackendError> {
        ClientPaths::open(&self.plan, client, device)
    }
}

impl Workers for Composed {
    type Daemon = KvDaemon;
    type Paths = ClientPaths;

    fn open_daemon(&self, daemon: usize) -> Result<KvDaemon, BackendError> {
        self.open_daemon_on(daemon, None)
    }

    fn open_client(&self, client: usize) -> Result<ClientPaths, BackendError> {
        self.open_client_on(client, None)
    }
}
