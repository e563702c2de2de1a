//! The addresses of queue pairs and address handles.

use std::net::Ipv6Addr;

use mlx5_hca::GidKind;

use crate::options::config::{LID, Link};
use crate::options::errno::Errno;

/// Resolves the address of a path from the GID with this index, as the kernel does. Returns whether it is that of the port, the only one.
///
/// # Errors
/// `EINVAL`: the path does not start at a GID of the port. RoCE only: `ETIMEDOUT`, no neighbour has this link-local address, which is known
/// at once here; `ENETUNREACH`, the loopback device has no route to the address.
pub(crate) fn resolve(link: Link, sgid_index: Option<u8>, dgid: &[u8; 16], dlid: u16) -> Result<bool, Errno> {
    const INVALID: Errno = Errno(libc::EINVAL);
    let gids = link.gids();
    let source = sgid_index.map(|index| gids.get(usize::from(index)).ok_or(INVALID)).transpose()?;
    if link == Link::InfiniBand {
        return Ok(dlid == LID);
    }
    let source = source.ok_or(INVALID)?;
    if gids.iter().any(|gid| gid.bytes == *dgid) {
        return Ok(true);
    }
    let address = Ipv6Addr::from(*dgid);
    let is_link_local = address.segments()[0] & 0xffc0 == 0xfe80;
    match source.kind {
        // The MAC address is in the GID, and no neighbour is asked (`ib_resolve_unicast_gid_dmac`).
        GidKind::RoceV1 if is_link_local => Ok(false),
        // The loopback device has this whole network.
        _ if address.to_ipv4_mapped().is_some_and(|address| address.is_loopback()) => Ok(false),
        _ if is_link_local => Err(Errno(libc::ETIMEDOUT)),
        _ => Err(Errno(libc::ENETUNREACH)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_without_a_route_or_a_neighbour_are_refused_on_roce_as_by_the_kernel() {
        let resolve = |index, address: &str| resolve(Link::Ethernet, index, &address.parse::<Ipv6Addr>().unwrap().octets(), 0);
        for index in 0..4 {
            for here in ["fe80::200:ff:fe00:1", "::ffff:127.0.0.1"] {
                assert_eq!(resolve(Some(index), here), Ok(true));
            }
            assert_eq!(resolve(Some(index), "::ffff:127.0.0.9"), Ok(false), "a local address, and no port's");
            for elsewhere in ["::ffff:10.0.0.1", "2001:db8::1"] {
                assert_eq!(resolve(Some(index), elsewhere), Err(Errno(libc::ENETUNREACH)));
            }
        }
        assert_eq!(resolve(Some(0), "fe80::2"), Ok(false), "version 1 asks no neighbour");
        assert_eq!(resolve(Some(1), "fe80::2"), Err(Errno(libc::ETIMEDOUT)));
        assert_eq!(resolve(Some(4), "fe80::200:ff:fe00:1"), Err(Errno(libc::EINVAL)));
        assert_eq!(resolve(None, "fe80::200:ff:fe00:1"), Err(Errno(libc::EINVAL)));
    }

    #[test]
    fn infiniband_resolves_nothing() {
        assert_eq!(resolve(Link::InfiniBand, None, &[0; 16], LID), Ok(true));
        assert_eq!(resolve(Link::InfiniBand, Some(0), &[7; 16], LID + 1), Ok(false));
        assert_eq!(resolve(Link::InfiniBand, Some(1), &[0; 16], LID), Err(Errno(libc::EINVAL)));
    }
}
