//! The addresses of queue pairs and address handles.

use std::net::{IpAddr, Ipv6Addr, UdpSocket};

use mlx5_hca::{GidKind, Port, address_of};

use crate::options::config::{Link, NO_GID};
use crate::options::errno::Errno;

/// The way by which a queue pair reaches the other end of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Memory that is shared with the port of this index.
    Port(usize),
    /// Packets to this address.
    Packets(IpAddr),
    /// No port has the address, so no answer will arrive.
    Nowhere,
}

/// Resolves the address of a path that starts at GID `sgid_index` of the port `from`, as the kernel
/// does. `link` is the link layer of `from`.
///
/// # Errors
/// `EINVAL`: the path does not start at a GID of the port. On RoCE also `ETIMEDOUT`: no neighbour
/// has this link-local address, which is known here without the kernel's wait; and `ENETUNREACH`:
/// the loopback device has no route to the address.
pub(crate) fn resolve(
    link: Link,
    from: &Port,
    sgid_index: Option<u8>,
    dgid: &[u8; 16],
    dlid: u16,
) -> Result<Way, Errno> {
    const INVALID: Errno = Errno(libc::EINVAL);
    let own = from.address().ok_or(INVALID)?;
    let source = sgid_index
        .map(|index| {
            let gid = own.gids.get(usize::from(index));
            gid.filter(|gid| **gid != NO_GID).ok_or(INVALID)
        })
        .transpose()?;
    if own.lid != 0 {
        return Ok(from
            .network
            .iter()
            .position(|port| port.lid == dlid)
            .map_or(Way::Nowhere, Way::Port));
    }
    let source = source.ok_or(INVALID)?;
    if let Some(index) = from.network.iter().position(|port| {
        port.gids
            .iter()
            .any(|gid| gid.bytes == *dgid && *gid != NO_GID)
    }) {
        return Ok(Way::Port(index));
    }
    if let (Link::Ethernet(Some(own)), Some(to)) = (link, address_of(dgid)) {
        // The connect of the socket asks the kernel for a route.
        let socket = UdpSocket::bind((own.address, 0)).and_then(|socket| socket.connect((to, 1)));
        return socket
            .map(|()| Way::Packets(to))
            .map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::ENETUNREACH)));
    }
    let address = Ipv6Addr::from(*dgid);
    let ipv4 = address.to_ipv4_mapped();
    let is_link_local = address.segments()[0] & 0xffc0 == 0xfe80;
    match source.kind {
        // The MAC address is in the GID, so the kernel needs no answer of a neighbour
        // (`ib_resolve_unicast_gid_dmac`).
        GidKind::RoceV1 if is_link_local => Ok(Way::Nowhere),
        // The whole network 127.0.0.0/8 is at the loopback device.
        _ if ipv4.is_some_and(|address| address.is_loopback()) => Ok(Way::Nowhere),
        _ if is_link_local => Err(Errno(libc::ETIMEDOUT)),
        _ => Err(Errno(libc::ENETUNREACH)),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const ROCE: Link = Link::Ethernet(None);

    fn port(link: Link, index: usize) -> Port {
        Port {
            network: link.network(2, &[]),
            index,
        }
    }

    #[test]
    fn addresses_without_a_route_or_a_neighbour_are_refused_on_roce_as_by_the_kernel() {
        for own in 0..2 {
            let from = port(ROCE, own);
            let resolve = |index, address: &str| {
                resolve(
                    ROCE,
                    &from,
                    index,
                    &address.parse::<Ipv6Addr>().unwrap().octets(),
                    0,
                )
            };
            for index in 0..4 {
                for (port, addresses) in [
                    ["fe80::200:ff:fe00:1", "::ffff:127.0.0.1"],
                    ["fe80::200:ff:fe00:2", "::ffff:127.0.0.2"],
                ]
                .iter()
                .enumerate()
                {
                    addresses.iter().for_each(|address| {
                        assert_eq!(resolve(Some(index), address), Ok(Way::Port(port)))
                    });
                }
                assert_eq!(
                    resolve(Some(index), "::ffff:127.0.0.9"),
                    Ok(Way::Nowhere),
                    "a local address, and no port's"
                );
                for elsewhere in ["::ffff:10.0.0.1", "2001:db8::1"] {
                    assert_eq!(
                        resolve(Some(index), elsewhere),
                        Err(Errno(libc::ENETUNREACH))
                    );
                }
            }
            assert_eq!(
                resolve(Some(0), "fe80::2"),
                Ok(Way::Nowhere),
                "version 1 asks no neighbour"
            );
            assert_eq!(resolve(Some(1), "fe80::2"), Err(Errno(libc::ETIMEDOUT)));
            assert_eq!(
                resolve(Some(4), "fe80::200:ff:fe00:1"),
                Err(Errno(libc::EINVAL))
            );
            assert_eq!(
                resolve(None, "fe80::200:ff:fe00:1"),
                Err(Errno(libc::EINVAL))
            );
        }
    }

    #[test]
    fn infiniband_resolves_only_lids() {
        let from = port(Link::InfiniBand, 1);
        assert_eq!(
            [1, 2, 3].map(|lid| resolve(Link::InfiniBand, &from, None, &[0; 16], lid)),
            [Ok(Way::Port(0)), Ok(Way::Port(1)), Ok(Way::Nowhere)]
        );
        assert_eq!(
            resolve(Link::InfiniBand, &from, Some(0), &[7; 16], 1),
            Ok(Way::Port(0))
        );
        assert_eq!(
            resolve(Link::InfiniBand, &from, Some(1), &[0; 16], 1),
            Err(Errno(libc::EINVAL))
        );
    }

    #[test]
    fn a_port_with_an_address_reaches_others_by_packets_where_there_is_a_route() {
        let link = Link::parse("roce=127.0.0.1").unwrap();
        let from = Port {
            network: link.network(1, &[]),
            index: 0,
        };
        let resolve = |address: Ipv4Addr| {
            resolve(link, &from, Some(1), &address.to_ipv6_mapped().octets(), 0)
        };
        assert_eq!(resolve(Ipv4Addr::LOCALHOST), Ok(Way::Port(0)));
        let other = Ipv4Addr::new(127, 0, 0, 2);
        assert_eq!(resolve(other), Ok(Way::Packets(other.into())));
        assert!(
            resolve(Ipv4Addr::new(8, 8, 8, 8)).is_err(),
            "no way from the loopback interface"
        );
    }
}
