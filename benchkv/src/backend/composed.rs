//! One rank of any topology made of ipc, delegationrpc, flux and a carrier between ranks: what its threads share until each has opened its part.

use std::path::Path;
use std::sync::{Mutex, PoisonError};

use mlx5::DeviceSpec;
use shm::dir::Dir;

use super::daemon::KvDaemon;
use super::paths::ClientPaths;
use super::plan::Plan;
use super::shards::{self, ShardNode};
use super::{Backend, BackendError};
use crate::options::Options;
use crate::ucx::PeerErrors;

/// The meaning of the shared-memory payloads: changes with [`Request`](crate::message::Request) and [`Response`](crate::message::Response).
pub(super) const TYPE_TAG: u64 = u64::from_be_bytes(*b"BENCHKV1");

/// One rank of a composed topology.
#[derive(Debug)]
pub struct Composed {
    plan: Plan,
    /// The daemons' ends of their channel, each until its daemon takes it.
    nodes: Mutex<Vec<Option<ShardNode>>>,
}

impl Composed {
    /// The rank's backend; opens the shared-memory directory and makes the channel between its daemons.
    ///
    /// # Errors
    /// [`BackendError::Setup`] with the cause.
    pub fn new(options: &Options, rank: usize) -> Result<Self, BackendError> {
        Self::on(options, rank, |dir| options.device_spec(dir))
    }

    /// The same on another device than that of `options`: `device` is given the shared-memory directory.
    ///
    /// # Errors
    /// Likewise.
    pub fn on(options: &Options, rank: usize, device: impl FnOnce(&Path) -> DeviceSpec) -> Result<Self, BackendError> {
        let plan = Self::plan(options, rank, std::process::id(), device)?;
        let nodes = shards::mesh(options.server_threads, &options.sizes)?;
        Ok(Self { plan, nodes: Mutex::new(nodes.into_iter().map(Some).collect()) })
    }

    /// The rank's backend in a client process of it: opens clients, of the daemons in `process`, and no daemon.
    ///
    /// # Errors
    /// Likewise.
    pub fn for_clients(options: &Options, rank: usize, process: u32) -> Result<Self, BackendError> {
        let plan = Self::plan(options, rank, process, |dir| options.device_spec(dir))?;
        Ok(Self { plan, nodes: Mutex::default() })
    }

    fn plan(options: &Options, rank: usize, process: u32, device: impl FnOnce(&Path) -> DeviceSpec) -> Result<Plan, BackendError> {
        let dir = Dir::open(options.shm_dir.as_deref()).map_err(|e| BackendError::setup("the shared-memory directory", e))?;
        Ok(Plan {
            topology: options.topology(),
            rank,
            process,
            depth: options.queue_depth.next_power_of_two(),
            ring_slots: options.sizes.ring_slots,
            ring_bytes: options.sizes.ring_bytes,
            store_keys: options.workload.store_keys(),
            policies: options.policies.clone(),
            window: options.sizes.window,
            ucx_errors: options.ucx_errors.unwrap_or(PeerErrors::None),
            device: device(dir.path()),
            dir,
        })
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

    fn open_client(&self, client: usize) -> Result<ClientPaths, BackendError> {
        ClientPaths::open(&self.plan, client)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn clients_in_processes_of_their_own_open_the_same_port_as_their_rank() {
        let args = ["benchkv", "--clients", "processes", "--device", "mlx5_1", "--port", "2", "--gid-index", "3", "--mtu", "1024"];
        let options = Options::resolve(Cli::try_parse_from(args).unwrap()).unwrap();
        let [rank, clients] =
            [Composed::new(&options, 0), Composed::for_clients(&options, 0, 1)].map(|backend| backend.unwrap().plan.device);
        let DeviceSpec::Verbs(port) = &clients else { panic!("{clients:?}") };
        assert_eq!((port.port, port.gid_index, port.mtu), (Some(2), Some(3), Some(1024)));
        assert_eq!(format!("{rank:?}"), format!("{clients:?}"));
    }
}
