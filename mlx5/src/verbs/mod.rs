//! Hardware: devices of libibverbs and libmlx5, which are opened at run time
//! ([`DeviceSpec::Verbs`](crate::DeviceSpec::Verbs)).
//!
//! On an mlx5 device the two libraries create and destroy objects, and this crate drives the
//! queues' memory (`mlx5dv_init_obj`), exactly as it drives the memory of a soft device's queues.
//! Devices of other vendors are used through a relay. `docs/hardware.md` states the requirements of
//! the machine.
//!
//! - `abi`, `numbers`: the libraries' structs and constants. `library`: their functions.
//! - `device`: finding a device, its port and its GID. `context`: an open device, its events, and
//!   sleeps that end at its events.
//! - `objects`: domains and queues. `memory`: regions. `pages`: their memory. `tables`: the objects
//!   by number. `connect`: transitions of queue pairs, and addresses. `relay`: a relay from WQEs to
//!   the calls of libibverbs.

mod abi;
mod connect;
mod context;
mod device;
mod library;
mod memory;
mod numbers;
mod objects;
mod pages;
mod relay;
mod tables;

pub use crate::error::verbs::{CallError, PortState, VerbsError};
pub(crate) use context::Context;
pub(crate) use relay::Relay;

/// The choice of a device of libibverbs, and of the path to its peers. Plain data.
///
/// The defaults select the first device with an active port; mlx5 devices come before others. On
/// InfiniBand, peers of the same subnet are reached by their LID. On RoCE, the GID of the highest
/// preference is used (RoCE version 2 before 1, IPv4 before IPv6, other addresses before link-local
/// ones).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsOptions {
    /// Whether to use the calls of libibverbs, as for a device of another vendor
    /// (`docs/hardware.md`), even on a device to which this crate has direct access. By default the
    /// calls are used only where there is no direct access.
    pub relay: bool,
    /// Name of the device, such as `mlx5_0`, or its position in [`DeviceEntry::all`], from 0.
    /// Default: the first device with an active port.
    pub device: Option<String>,
    /// Number of the port, from 1. Default: the first active port.
    pub port: Option<u8>,
    /// Index of the source address in the port's GID table (`show_gids`, or
    /// `/sys/class/infiniband/*/ports/*/gids`). On InfiniBand an index makes packets carry a GRH,
    /// which peers of other subnets need.
    pub gid_index: Option<u8>,
    /// Index in the port's table of partition keys. Default 0. Both ends must be in the same
    /// partition.
    pub pkey_index: u16,
    /// Service level, 0..=15; on RoCE the priority, 0..=7. Default 0.
    pub service_level: u8,
    /// Traffic class of the GRH; on RoCE v2 the upper 6 bits are the DSCP. Default 0.
    pub traffic_class: u8,
    /// Hop limit of the GRH. Default 64.
    pub hop_limit: u8,
    /// Largest payload of a packet, in bytes: 256, 512, 1024, 2048 or 4096. Default: the active MTU
    /// of the port. A connection uses the smaller MTU of its two ends.
    pub mtu: Option<u16>,
    /// Maximum number of READs and atomics of a connection in flight, 1..=16, limited by the
    /// device. Both ends must have the same number. Default 16.
    pub max_rd_atomic: u8,
}

impl Default for VerbsOptions {
    fn default() -> Self {
        Self {
            relay: false,
            device: None,
            port: None,
            gid_index: None,
            pkey_index: 0,
            service_level: 0,
            traffic_class: 0,
            hop_limit: 64,
            mtu: None,
            max_rd_atomic: 16,
        }
    }
}

impl VerbsOptions {
    /// Checks whether a device matches these options. Opens no device.
    ///
    /// # Errors
    /// The libraries are not installed, or no device matches: the error that opening the device
    /// would return.
    pub fn find(&self) -> Result<(), VerbsError> {
        device::List::get(library::Api::get()?)?
            .candidates(self)
            .map(drop)
    }

    fn check(&self) -> Result<(), VerbsError> {
        let option = |option, value: u32, legal| {
            Err(VerbsError::Option {
                option,
                value,
                legal,
            })
        };
        match self {
            Self {
                service_level: 16..,
                ..
            } => option("service_level", self.service_level.into(), "0..=15"),
            Self {
                max_rd_atomic: 0 | 17..,
                ..
            } => option("max_rd_atomic", self.max_rd_atomic.into(), "1..=16"),
            Self { mtu: Some(mtu), .. } if ![256, 512, 1024, 2048, 4096].contains(mtu) => {
                option("mtu", u32::from(*mtu), "256, 512, 1024, 2048 or 4096")
            }
            _ => Ok(()),
        }
    }
}

/// An RDMA device of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceEntry {
    /// Name of the device.
    pub name: String,
    /// Whether the device is an mlx5 device, whose queues this crate drives itself. Any other
    /// device is used through a relay.
    pub is_mlx5: bool,
    /// Node GUID, an EUI-64.
    pub node_guid: u64,
    /// NUMA node to which the device is attached, if the system reports it.
    pub numa_node: Option<u32>,
    /// Ports of the device, or the error that prevented listing them.
    pub ports: Result<Vec<PortEntry>, VerbsError>,
}

impl DeviceEntry {
    /// Returns the devices of this machine: the mlx5 devices in libibverbs's order, then the
    /// others, but no iWARP devices.
    ///
    /// # Errors
    /// The libraries are not installed, or there is no such device. A device that cannot be opened
    /// is in the list.
    pub fn all() -> Result<Vec<Self>, VerbsError> {
        let list = device::List::get(library::Api::get()?)?;
        let entry = |found: &device::Found<'_>| Self {
            name: found.name(),
            is_mlx5: found.is_mlx5(),
            node_guid: found.node_guid(),
            numa_node: found.numa_node(),
            ports: found.open().and_then(|opened| opened.ports()),
        };
        Ok(list
            .candidates(&VerbsOptions::default())?
            .iter()
            .map(entry)
            .collect())
    }
}

/// A port of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortEntry {
    /// Number of the port, from 1.
    pub number: u8,
    /// State of the port, which shows whether it carries traffic.
    pub state: PortState,
    /// Network that the port is attached to.
    pub link_layer: LinkLayer,
    /// Local identifier, on InfiniBand.
    pub lid: u16,
    /// Largest payload of a packet, in bytes.
    pub mtu: u16,
}

/// The network that a port is attached to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
pub enum LinkLayer {
    /// An InfiniBand subnet.
    InfiniBand,
    /// Ethernet: RoCE.
    Ethernet,
}

impl LinkLayer {
    fn of(link_layer: u8) -> Self {
        // 0 is "unspecified", which means InfiniBand.
        if link_layer == numbers::IBV_LINK_LAYER_ETHERNET {
            Self::Ethernet
        } else {
            Self::InfiniBand
        }
    }
}
