//! `RankPlan`: the parameters that daemons and clients of a rank need.

use copyrpc_shm::dir::Dir;
use mlx5::{Device, DeviceSpec};

use super::{BackendError, OrSetup};
use crate::carrier::Feature;
use crate::job::Job;
use crate::topology::Worker;
use crate::values::Values;

/// Tag of the layout of shared-memory payloads. It changes when
/// [`Request`](crate::message::Request) or [`Response`](crate::message::Response) changes.
pub(super) const TYPE_TAG: u64 = u64::from_be_bytes(*b"BENCHKV2");

/// The number of a rank, and the resources that the rank opens.
#[derive(Debug, Clone)]
pub struct Site {
    /// Number of the rank.
    pub rank: usize,
    /// The directory of the rank's shared memory.
    pub dir: Dir,
    /// Devices for the threads that have connections; at least one. Daemon k and client k open
    /// device k modulo the number of devices.
    pub devices: Vec<DeviceSpec>,
}

#[derive(Debug, Clone)]
pub(super) struct RankPlan {
    pub(super) job: Job,
    pub(super) rank: usize,
    /// The tails of values under way within the rank.
    pub(super) values: Values,
    devices: Vec<DeviceSpec>,
    pub(super) dir: Dir,
}

impl RankPlan {
    pub(super) fn new(job: &Job, site: Site) -> Result<Self, BackendError> {
        let Site { rank, dir, devices } = site;
        Ok(Self {
            values: Values::new(job.places()).or_setup("the memory of values under way")?,
            job: job.clone(),
            rank,
            devices,
            dir,
        })
    }

    pub(super) fn depth(&self) -> usize {
        self.job.queue_depth.next_power_of_two()
    }

    pub(super) fn has(&self, feature: Feature) -> bool {
        self.job.features.contains(&feature)
    }

    /// Returns the device of a thread with connections: `shared`, which is open already, or a
    /// device that the thread opens itself.
    pub(super) fn device<'a>(
        &'a self,
        worker: Worker,
        shared: Option<&'a Device>,
    ) -> Result<ThreadDevice<'a>, BackendError> {
        let (Worker::Daemon(number) | Worker::Client(number)) = worker;
        let none = || BackendError::setup("the RDMA device", "there is none");
        let spec = number
            .checked_rem(self.devices.len())
            .and_then(|number| self.devices.get(number))
            .ok_or_else(none)?;
        Ok(ThreadDevice { spec, shared })
    }

    /// Returns the name of a server. The process id distinguishes jobs, and the rank distinguishes
    /// the ranks of one process. A server takes over the name of a server whose process is dead.
    pub(super) fn server_name(&self, what: &str) -> String {
        format!("benchkv-{}-{}-{what}", std::process::id(), self.rank)
    }
}

pub(super) struct ThreadDevice<'a> {
    pub(super) spec: &'a DeviceSpec,
    shared: Option<&'a Device>,
}

impl ThreadDevice<'_> {
    pub(super) fn open(&self) -> Result<Device, BackendError> {
        let open = || Device::open(self.spec).or_setup("the RDMA device");
        self.shared.map_or_else(open, |device| Ok(device.clone()))
    }
}
