//! Hardware: devices behind libibverbs and libmlx5, which are opened at run time ([`DeviceSpec::Verbs`](crate::DeviceSpec::Verbs)).
//!
//! The two libraries make and destroy objects; the queues' memory is then driven by this crate, exactly as a soft device's
//! (`mlx5dv_init_obj`). `docs/hardware.md` says what a machine needs for it.
//!
//! - `abi`, `numbers`: their structs and constants. `library`: their functions. `error`: what goes wrong, and what to do.
//! - `device`: finding a device, its port and its GID. `context`: one that is open, its events.
//! - `objects`: domains and queues. `memory`: regions. `connect`: states of queue pairs, and addresses.

mod abi;
mod connect;
mod context;
mod device;
mod error;
mod library;
mod memory;
mod numbers;
mod objects;
mod pages;
mod provider;
mod tables;

use std::fmt;

pub(crate) use context::Context;
pub use error::{CallError, PortState, VerbsError};

/// Which device behind libibverbs, and how it reaches its peers. Plain data.
///
/// With the defaults: the first mlx5 device that has an active port; on InfiniBand peers of the same subnet, by their LID; on RoCE the GID
/// of the highest preference (version 2 before 1, IPv4 before IPv6, others before link-local).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsOptions {
    /// Its name, such as `mlx5_0`, or its place in [`DeviceEntry::all`], from 0.
    pub device: Option<String>,
    /// The port, from 1. Default: the first that is active.
    pub port: Option<u8>,
    /// Place in the port's GID table of the source address (`show_gids`, or `/sys/class/infiniband/*/ports/*/gids`). On InfiniBand, giving
    /// one makes packets carry a GRH, which peers of other subnets need.
    pub gid_index: Option<u8>,
    /// Place in the port's table of partition keys. Default 0. Both ends' partitions must be the same.
    pub pkey_index: u16,
    /// Service level, 0..=15; on RoCE the priority, 0..=7. Default 0.
    pub service_level: u8,
    /// Traffic class of the GRH; on RoCE v2 the upper 6 bits are the DSCP. Default 0.
    pub traffic_class: u8,
    /// Hop limit of the GRH. Default 64.
    pub hop_limit: u8,
    /// Largest payload of a packet, in bytes: 256, 512, 1024, 2048 or 4096. Default: what both ports have active.
    pub mtu: Option<u16>,
    /// READs and atomics that a connection has under way at most, 1..=16, as far as the device goes. Both ends must have the same. Default
    /// 16.
    pub max_rd_atomic: u8,
}

impl Default for VerbsOptions {
    fn default() -> Self {
        Self {
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
    /// Finds out whether there is a device as this names it. Opens none.
    ///
    /// # Errors
    /// No libraries, no such device, or none of mlx5: as opening it would say.
    pub fn find(&self) -> Result<(), VerbsError> {
        device::List::get(library::Api::get()?)?.candidates(self).map(drop)
    }

    fn check(&self) -> Result<(), VerbsError> {
        let option = |option, value: u32, legal| Err(VerbsError::Option { option, value, legal });
        match self {
            Self { service_level: 16.., .. } => option("service_level", self.service_level.into(), "0..=15"),
            Self { max_rd_atomic: 0 | 17.., .. } => option("max_rd_atomic", self.max_rd_atomic.into(), "1..=16"),
            Self { mtu: Some(mtu), .. } if ![256, 512, 1024, 2048, 4096].contains(mtu) => {
                option("mtu", u32::from(*mtu), "256, 512, 1024, 2048 or 4096")
            }
            _ => Ok(()),
        }
    }
}

/// An mlx5 device of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceEntry {
    /// Its name.
    pub name: String,
    /// EUI-64.
    pub node_guid: u64,
    /// The NUMA node it is plugged into, where the system says so.
    pub numa_node: Option<u32>,
    /// Its ports; or why it does not say.
    pub ports: Result<Vec<PortEntry>, VerbsError>,
}

impl DeviceEntry {
    /// The mlx5 devices of this machine, in libibverbs's order.
    ///
    /// # Errors
    /// No libraries, or no RDMA device of any kind. A device that cannot be opened is in the list.
    pub fn all() -> Result<Vec<Self>, VerbsError> {
        let list = device::List::get(library::Api::get()?)?;
        let entry = |found: &device::Found<'_>| Self {
            name: found.name(),
            node_guid: found.node_guid(),
            numa_node: found.numa_node(),
            ports: found.open().and_then(|opened| opened.ports()),
        };
        Ok(list.mlx5().iter().map(entry).collect())
    }
}

/// A port of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortEntry {
    /// From 1.
    pub number: u8,
    /// Whether it carries traffic.
    pub state: PortState,
    /// What it is plugged into.
    pub link_layer: LinkLayer,
    /// Local identifier, on InfiniBand.
    pub lid: u16,
    /// Largest payload of a packet, in bytes.
    pub mtu: u16,
}

/// What a port is plugged into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// An InfiniBand subnet.
    InfiniBand,
    /// Ethernet: RoCE.
    Ethernet,
}

impl LinkLayer {
    fn of(link_layer: u8) -> Self {
        // 0 is "unspecified", which means InfiniBand.
        if link_layer == numbers::IBV_LINK_LAYER_ETHERNET { Self::Ethernet } else { Self::InfiniBand }
    }
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::InfiniBand => "InfiniBand",
            Self::Ethernet => "Ethernet",
        })
    }
}
