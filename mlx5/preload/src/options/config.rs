//! The environment variables by which the launcher configures the library.

use std::net::Ipv4Addr;

use mlx5_hca::{Gid, GidKind, PortAddress, RoceOptions, gid_of};

/// Major and minor number of the first device's file, `MAJOR:MINOR`; the minor numbers of the other
/// devices follow. Without this variable the library does nothing.
pub(crate) const DEVICE: &str = "MLX5_PRELOAD_DEVICE";
pub(crate) const DEVICES: &str = "MLX5_PRELOAD_DEVICES";
/// Link layer: `ib`, `roce`, or `roce=` followed by the options of the port for packets.
pub(crate) const LINK: &str = "MLX5_PRELOAD_LINK";
/// GID table of the port of the only device, as [`parse_gids`] reads it. If it is empty, the port
/// has the table of a real port.
pub(crate) const GIDS: &str = "MLX5_PRELOAD_GIDS";
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

/// Domain and bus of the PCI function, an address that hardly any machine has. All digits are
/// decimal, because UCX reads no others in the name of the PCI root.
pub(crate) const PCI_BUS: &str = "7357:00";

/// Number of entries of a port's GID table. Entries without a GID are zero.
pub(crate) const GID_ENTRIES: usize = 8;

/// A GID table entry without a GID.
pub(crate) const NO_GID: Gid = Gid {
    bytes: [0; 16],
    kind: GidKind::RoceV1,
};

/// Parses a GID table, `v1=fe80::1,-,v2=10.0.0.1`; `-` is an entry without a GID.
pub(crate) fn parse_gids(text: &str) -> Result<Vec<Gid>, String> {
    let entries = text.split(',').filter(|entry| !entry.is_empty());
    let gids = entries.map(|entry| {
        let (kind, address) = match entry.split_once('=') {
            None if entry == "-" => return Ok(NO_GID),
            Some(("v1", address)) => (GidKind::RoceV1, address),
            Some(("v2", address)) => (GidKind::RoceV2, address),
            _ => {
                return Err(format!(
                    "`{entry}` is not a GID; legal are v1=IP, v2=IP and -"
                ));
            }
        };
        let ip = address
            .parse()
            .map_err(|_| format!("`{address}` is not an IP address"))?;
        Ok(Gid {
            bytes: gid_of(ip),
            kind,
        })
    });
    let gids = gids.collect::<Result<Vec<_>, _>>()?;
    if gids.len() > GID_ENTRIES {
        return Err(format!(
            "there are {} GIDs; at most {GID_ENTRIES} are legal",
            gids.len()
        ));
    }
    Ok(gids)
}

/// Returns the GUID of a device and of its port. The GUID of the first device is
/// 0200:00ff:fe00:0001.
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
    /// IPv4 address, ::ffff:127.0.0.1 for the first device; each address has two entries (versions
    /// 1 and 2), as in the kernel. With `roce=ADDRESS` only the entries of ADDRESS exist.
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

    /// Makes the network of `devices` devices. A process has only one network, which is never
    /// freed. If `gids` is not empty, `gids` is the GID table of every port.
    pub(crate) fn network(self, devices: usize, gids: &[Gid]) -> &'static [PortAddress] {
        let has_lid = self == Self::InfiniBand;
        let ports = (0..devices).map(|device| PortAddress {
            lid: if has_lid { 1 + device as u16 } else { 0 },
            gids: if gids.is_empty() {
                self.gids(device).leak()
            } else {
                gids.to_vec().leak()
            },
        });
        ports.collect::<Vec<_>>().leak()
    }

    /// Parses `ib`, `roce` or `roce=OPTIONS`. The options are never freed: a process needs them
    /// until it ends.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gid_table_has_what_was_asked_for_in_its_order_and_with_holes() {
        let gids = parse_gids("v1=fe80::1,-,v2=10.0.0.1").unwrap();
        let of = |ip: &str, kind| Gid {
            bytes: gid_of(ip.parse().unwrap()),
            kind,
        };
        let (v1, v2) = (GidKind::RoceV1, GidKind::RoceV2);
        assert_eq!(gids, [of("fe80::1", v1), NO_GID, of("10.0.0.1", v2)]);
        let port = Link::Ethernet(None).network(1, &gids)[0];
        assert_eq!(port.gids, gids);
        let default = Link::Ethernet(None).network(1, &[])[0];
        assert_eq!(default.gids.len(), 4);
        for (text, said) in [
            ("fe80::1", "v1=IP"),
            ("v2=host", "`host`"),
            ("-,-,-,-,-,-,-,-,-", "at most 8"),
        ] {
            assert!(parse_gids(text).unwrap_err().contains(said), "{text}");
        }
    }
}
