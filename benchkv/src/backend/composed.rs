//! The topologies made of ipc, delegationrpc, flux and copyrpc.
//!
//! | | meta | delegation |
//! |---|---|---|
//! | local key | client -ipc-> the daemon that owns the key | the same |
//! | remote key | client -ipc-> the daemon that owns such keys -flux-> the carrier -copyrpc-> peer | client -ring-> daemon 0 -copyrpc-> peer |
//! | carrier of rank r | daemon r mod D | daemon 0 |
//! | arriving request | its carrier -flux-> the daemon that owns the key | the same |

use std::sync::{Mutex, PoisonError};

use harness::device::DeviceChoice;
use shm::dir::Dir;

use super::daemon::KvDaemon;
use super::paths::ClientPaths;
use super::shards::{self, ShardNode};
use super::{Backend, BackendError};
use crate::cli::BackendKind;
use crate::options::Options;

/// The meaning of the shared-memory payloads: changes with [`Request`](crate::message::Request) and [`Response`](crate::message::Response).
pub(super) const TYPE_TAG: u64 = u64::from_be_bytes(*b"BENCHKV1");

/// One rank of a composed topology.
#[derive(Debug)]
pub struct Composed {
    pub(super) plan: Plan,
    /// The daemons' ends of their channel, each until its daemon takes it.
    nodes: Mutex<Vec<Option<ShardNode>>>,
}

/// What daemons and clients of a rank have to know.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    pub(super) topology: BackendKind,
    pub(super) rank: usize,
    pub(super) ranks: usize,
    pub(super) daemons: usize,
    pub(super) clients: usize,
    /// Operations of a client, rounded up to a power of two.
    pub(super) depth: usize,
    pub(super) ring_slots: usize,
    pub(super) ring_bytes: u64,
    pub(super) store_keys: u64,
    pub(super) device: DeviceChoice,
    pub(super) dir: Dir,
}

impl Plan {
    /// The daemon with the endpoint to rank `remote`.
    pub(super) fn carrier_of(&self, remote: usize) -> usize {
        match self.topology {
            BackendKind::Meta => remote % self.daemons,
            BackendKind::Delegation => 0,
        }
    }

    /// Whether daemon `daemon` serves the clients' shared ring.
    pub(super) fn has_ring(&self, daemon: usize) -> bool {
        self.topology == BackendKind::Delegation && daemon == 0
    }

    /// The ranks whose endpoints daemon `daemon` has.
    pub(super) fn remotes_of(&self, daemon: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.ranks).filter(move |&remote| remote != self.rank && self.carrier_of(remote) == daemon)
    }

    /// Name of a server of this rank. The process id keeps ranks and jobs apart; what a dead process left under it is replaced.
    pub(super) fn server_name(&self, what: &str) -> String {
        format!("benchkv-{}-{what}", std::process::id())
    }
}

impl Composed {
    /// The rank's backend; opens the shared-memory directory and makes the channel between its daemons.
    ///
    /// # Errors
    /// [`BackendError::Setup`] with the cause.
    pub fn new(options: &Options, rank: usize) -> Result<Self, BackendError> {
        let dir = Dir::open(options.shm_dir.as_deref()).map_err(|e| BackendError::setup("the shared-memory directory", e))?;
        let plan = Plan {
            topology: options.backend,
            rank,
            ranks: options.workload.ranks,
            daemons: options.server_threads,
            clients: options.workload.clients,
            depth: options.queue_depth.next_power_of_two(),
            ring_slots: options.sizes.ring_slots,
            ring_bytes: options.sizes.ring_bytes,
            store_keys: options.workload.store_keys(),
            device: options.device.clone(),
            dir,
        };
        let nodes = shards::mesh(plan.daemons, &options.sizes)?;
        Ok(Self { plan, nodes: Mutex::new(nodes.into_iter().map(Some).collect()) })
    }
}

impl Backend for Composed {
    type Daemon = KvDaemon;
    type Paths = ClientPaths;

    fn open_daemon(&self, daemon: usize) -> Result<KvDaemon, BackendError> {
        let mut nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        let node = nodes.get_mut(daemon).and_then(Option::take);
        let node = node.ok_or_else(|| BackendError::setup(format!("daemon {daemon}"), "it is open already"))?;
        drop(nodes);
        KvDaemon::open(&self.plan, daemon, node)
    }

    fn connect_client(&self, _client: usize) -> Result<ClientPaths, BackendError> {
        ClientPaths::connect(&self.plan)
    }
}
