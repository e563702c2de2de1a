//! The environment variables by which the launcher configures the library.

use std::net::Ipv4Addr;

use mlx5_hca::{Gid, GidKind, PortAddress, RoceOptions, gid_of};

/// Major and minor number of the first device's file, `MAJOR:MINOR`; the minor numbers of the other
/// devices follow. Without this variable the library does nothing.
pub(crate) const DEVICE: &str = "MLX5_PRELOAD_DEVICE";
pub(crate) const DEVICES: &str = "MLX5_PRELOAD_DEVICES";
/// Link layer: `ib`, `roce`, or `roce=` followed by the options of the port for packets.
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

/// Limits, separated by commas.
pub(crate) const LIMITS: &str = "MLX5_PRELOAD_LIMITS";

/// If set, the buffers of sends are checked.
pub(crate) const CHECK_BUFFERS: &str = "MLX5_PRELOAD_CHECK_BUFFERS";

/// The launcher's tree, which libibverbs reads in place of `/sys`.
pub(crate) const TREE: &str = "SYSFS_PATH";

/// Domain and bus of the PCI function, an address that no machine has. All digits are decimal,
/// because UCX reads only decimal digits in the name of the PCI root.
pub(crate) const PCI_BUS: &str = "7357:00";

/// Number of entries of a port's GID table. Entries without a GID are zero.
pub(crate) const GID_ENTRIES: usize = 8;

/// Returns the GUID of a device and of its port. The first one is 0200:00ff:fe00:0001.
pub(crate) const fn guid(device: usize) -> [u8; 8] {
    [2, 0, 0, 0xff, 0xfe, 0, 0, 1 + device as u8]
}

/// `vendor_part_id`: ConnectX-6.
pub(crate) const DEVICE_ID: u16 = 0x101b;
/// Firmware version: major, minor, sub-minor.
pub(crate) const FIRMWARE: [u16; 3] = [20, 35, 1012];

/// Link layer of the port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    /// InfiniBand: addressed by LID.
    InfiniBand,
    /// RoCE: addressed by GID. With options, the port sends packets, which reach other hosts;
    /// without options, the port is on a network of this host.
    Ethernet(Option<&'static RoceOptions>),
}

impl Link {
    /// Returns the GID table of the port of a device, without empty entries. On InfiniBand it has
    /// one GID, fe80::200:ff:fe00:1 for the first device. On RoCE that address is followed by an
    /// IPv4 address, ::ffff:127.0.0.1 for the first device; each address has the two entries
    /// (versions 1 and 2) that the kernel makes for it. With `roce=ADDRESS` only the entries of
    /// ADDRESS exist.
    fn gids(self, device: usize) -> Vec<Gid> {
        let mut link_local = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        link_local[8..].copy_from_slice(&guid(device));
        let ipv4 = Ipv4Addr::new(127, 0, 0, 1 + device as u8)
            .to_ipv6_mapped()
            .octets();
        let both = |bytes| [GidKind::RoceV1, GidKind::RoceV2].map(|kind| Gid { bytes, kind });
        match self {
            Self::InfiniBand => vec![Gid {
                bytes: link_local,
                kind: GidKind::InfiniBand,
            }],
            Self::Ethernet(None) => [both(link_local), both(ipv4)].concat(),
            Self::Ethernet(Some(options)) => both(gid_of(options.address)).to_vec(),
        }
    }

    /// Makes the network of `devices` devices. A process has only one, so it is never freed.
    pub(crate) fn network(self, devices: usize) -> &'static [PortAddress] {
        let has_lid = self == Self::InfiniBand;
        let ports = (0..devices).map(|device| PortAddress {
            lid: if has_lid { 1 + device as u16 } else { 0 },
            gids: self.gids(device).leak(),
        });
        ports.collect::<Vec<_>>().leak()
    }

    /// Parses `ib`, `roce` or `roce=OPTIONS`. The options are never freed: a process has one port.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        match text {
            "ib" => Ok(Self::InfiniBand),
            "roce" => Ok(Self::Ethernet(None)),
            _ => {
                let options = text
                    .strip_prefix("roce=")
                    .ok_or_else(|| format!("`{text}` is not a link; legal are ib and roce"))?;
                Ok(Self::Ethernet(Some(Box::leak(Box::new(options.parse()?)))))
            }
        }
    }
}
