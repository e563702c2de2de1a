//! The environment variables by which the launcher configures the library.

use mlx5_hca::{Gid, GidKind, Port};

/// Major and minor number of the device file, `MAJOR:MINOR`. Without it the library does nothing.
pub(crate) const DEVICE: &str = "MLX5_PRELOAD_DEVICE";
/// `ib` or `roce`.
pub(crate) const LINK: &str = "MLX5_PRELOAD_LINK";
/// The directory through which processes find each other.
pub(crate) const FABRIC: &str = "MLX5_PRELOAD_FABRIC";
/// Faults, separated by commas.
pub(crate) const FAULTS: &str = "MLX5_PRELOAD_FAULTS";
/// Destination of the log: a file, or `-` for standard error.
pub(crate) const LOG: &str = "MLX5_PRELOAD_LOG";
/// If set, successful commands are logged too.
pub(crate) const LOG_COMMANDS: &str = "MLX5_PRELOAD_LOG_COMMANDS";

/// If set, the drivers' doorbells are checked.
pub(crate) const CHECK_DOORBELLS: &str = "MLX5_PRELOAD_CHECK_DOORBELLS";

/// The launcher's tree, which libibverbs reads in place of `/sys`.
pub(crate) const TREE: &str = "SYSFS_PATH";

/// Domain and bus of the PCI function, an address that no machine has. Decimal digits: UCX reads no others in the name of the root.
pub(crate) const PCI_BUS: &str = "7357:00";

/// LID of the port.
pub(crate) const LID: u16 = 1;
/// Number of entries of the port's GID table. A NIC has at least as many; those without a GID are zero.
pub(crate) const GID_ENTRIES: usize = 8;
/// GUID of the device and of its port.
pub(crate) const GUID: [u8; 8] = [2, 0, 0, 0xff, 0xfe, 0, 0, 1];
/// fe80::200:ff:fe00:1.
const LINK_LOCAL: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, GUID[0], GUID[1], GUID[2], GUID[3], GUID[4], GUID[5], GUID[6], GUID[7]];
/// ::ffff:127.0.0.1.
const IPV4: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1];
/// `vendor_part_id`: ConnectX-6.
pub(crate) const DEVICE_ID: u16 = 0x101b;
/// Firmware version: major, minor, sub-minor.
pub(crate) const FIRMWARE: [u16; 3] = [20, 35, 1012];

/// Link layer of the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    /// InfiniBand: addressed by LID.
    InfiniBand,
    /// RoCE: addressed by GID.
    Ethernet,
}

impl Link {
    /// Returns the GID table of the port, without empty entries. On RoCE the kernel makes two entries for each address of the network
    /// device, in this order.
    pub(crate) const fn gids(self) -> &'static [Gid] {
        match self {
            Self::InfiniBand => &[Gid { bytes: LINK_LOCAL, kind: GidKind::InfiniBand }],
            Self::Ethernet => &[
                Gid { bytes: LINK_LOCAL, kind: GidKind::RoceV1 },
                Gid { bytes: LINK_LOCAL, kind: GidKind::RoceV2 },
                Gid { bytes: IPV4, kind: GidKind::RoceV1 },
                Gid { bytes: IPV4, kind: GidKind::RoceV2 },
            ],
        }
    }

    /// Returns the port, which all devices of a fabric share.
    pub(crate) const fn port(self) -> Port {
        Port { lid: if matches!(self, Self::InfiniBand) { LID } else { 0 }, gids: self.gids() }
    }

    /// Parses `ib` or `roce`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text {
            "ib" => Ok(Self::InfiniBand),
            "roce" => Ok(Self::Ethernet),
            _ => Err(format!("`{text}` is not a link; legal are ib and roce")),
        }
    }
}
