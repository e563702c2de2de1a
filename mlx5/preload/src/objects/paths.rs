//! The addresses of queue pairs and address handles.

use std::net::Ipv6Addr;

use mlx5_hca::{GidKind, Port};

use crate::options::errno::Errno;

/// Resolves the address of a path from the GID of `from` with this index, as the kernel does. Returns the index of the port that it is of.
/// `None`: it is of none, and there will be no answer.
///
/// # Errors
/// `EINVAL`: the path does not start at a GID of the port. RoCE only: `ETIMEDOUT`, no neighbour has this link-local address, which is known
/// at once here; `ENETUNREACH`, the loopback device has no route to the address.
pub(crate) fn resolve(from: &Port, sgid_index: Option<u8>, dgid: &[u8; 16], dlid: u16) -> Result<Option<usize>, Errno> {
    const INVALID: Errno = Errno(libc::EINVAL);
    let own = from.address().ok_or(INVALID)?;
    let source = sgid_index.map(|index| own.gids.get(usize::from(index)).ok_or(INVALID)).transpose()?;
    if own.lid != 0 {
        return Ok(from.network.iter().position(|port| port.lid == dlid));
    }
    let source = source.ok_or(INVALID)?;
    if let Some(index) = from.network.iter().position(|port| port.gids.iter().any(|gid| gid.bytes == *dgid)) {
        return Ok(Some(index));
    }
    let address = Ipv6Addr::from(*dgid);
    let is_link_local = address.segments()[0] & 0xffc0 == 0xfe80;
    match source.kind {
        // The MAC address is in the GID, and no neighbour is asked (`ib_resolve_unicast_gid_dmac`).
        GidKind::RoceV1 if is_link_local => Ok(None),
        // The loopback device has this whole network.
        _ if address.to_ipv4_mapped().is_some_and(|address| address.is_loopback()) => Ok(None),
        _ if is_link_local => Err(Errno(libc::ETIMEDOUT)),
        _ => Err(Errno(libc::ENETUNREACH)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::config::Link;

    fn port(link: Link, index: usize) -> Port {
        Port { network: link.network(2), index }
    }

    #[test]
    fn addresses_without_a_route_or_a_neighbour_are_refused_on_roce_as_by_the_kernel() {
        for own in 0..2 {
            let from = port(Link::Ethernet, own);
            let resolve = |index, address: &str| resolve(&from, index, &address.parse::<Ipv6Addr>().unwrap().octets(), 0);
            for index in 0..4 {
                for (port, addresses) in
                    [["fe80::200:ff:fe00:1", "::ffff:127.0.0.1"], ["fe80::200:ff:fe00:2", "::ffff:127.0.0.2"]].iter().enumerate()
                {
                    addresses.iter().for_each(|address| assert_eq!(resolve(Some(index), address), Ok(Some(port))));
                }
                assert_eq!(resolve(Some(index), "::ffff:127.0.0.9"), Ok(None), "a local address, and no port's");
                for elsewhere in ["::ffff:10.0.0.1", "2001:db8::1"] {
                    assert_eq!(resolve(Some(index), elsewhere), Err(Errno(libc::ENETUNREACH)));
                }
            }
            assert_eq!(resolve(Some(0), "fe80::2"), Ok(None), "version 1 asks no neighbour");
            assert_eq!(resolve(Some(1), "fe80::2"), Err(Errno(libc::ETIMEDOUT)));
            assert_eq!(resolve(Some(4), "fe80::200:ff:fe00:1"), Err(Errno(libc::EINVAL)));
            assert_eq!(resolve(None, "fe80::200:ff:fe00:1"), Err(Errno(libc::EINVAL)));
        }
    }

    #[test]
    fn infiniband_resolves_only_lids() {
        let from = port(Link::InfiniBand, 1);
        assert_eq!([1, 2, 3].map(|lid| resolve(&from, None, &[0; 16], lid)), [Ok(Some(0)), Ok(Some(1)), Ok(None)]);
        assert_eq!(resolve(&from, Some(0), &[7; 16], 1), Ok(Some(0)));
        assert_eq!(resolve(&from, Some(1), &[0; 16], 1), Err(Errno(libc::EINVAL)));
    }
}
