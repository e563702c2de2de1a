//! The state that the threads of a rank share until each thread has opened its part. The topology
//! of the rank is made of ipc, delegationrpc, flux and a carrier between ranks.

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
    /// Each daemon's end of the channel between the daemons, until that daemon takes its end.
    nodes: Mutex<Vec<Option<ShardNode>>>,
}

impl Composed {
    /// Makes a rank of `job`: the channel between its daemons, and the memory for the
    /// [tails](crate::values) of values.
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

    /// Opens a daemon like [`open_daemon`](Workers::open_daemon), but with its endpoints on
    /// `device`. Workers of one rank that run in one thread can share a device. `None`: the daemon
    /// opens a device of its own.
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

    /// Opens a client like [`open_client`](Workers::open_client), but with its endpoints on
    /// `device`, as in [`open_daemon_on`](Self::open_daemon_on).
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
