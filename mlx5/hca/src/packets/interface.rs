//! Addresses of this host, and the address in a GID.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use if_addrs::{IfAddr, Interface};

/// Returns the bytes of an address as a GID has them.
#[must_use]
pub fn gid_of(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Returns the IP address in a GID of RoCEv2; `None` for the zero GID.
#[must_use]
pub fn address_of(gid: &[u8; 16]) -> Option<IpAddr> {
    let v6 = Ipv6Addr::from(*gid);
    (*gid != [0; 16]).then(|| v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4))
}

/// Returns the socket address of a port of this host. A link-local address is in the scope of the
/// interface that has it, or of the first of several.
pub(crate) fn own_socket(address: IpAddr, port: u16) -> io::Result<SocketAddr> {
    let mut own = SocketAddr::new(address, port);
    if let (SocketAddr::V6(own), true) = (&mut own, is_link_local(address)) {
        let all = if_addrs::get_if_addrs()?;
        let has = all.iter().find(|interface| interface.ip() == address);
        own.set_scope_id(has.and_then(|interface| interface.index).unwrap_or(0));
    }
    Ok(own)
}

/// Returns the socket address of a peer's port. A link-local address is in the scope of `own`.
pub(crate) fn peer_socket(own: &SocketAddr, address: IpAddr, port: u16) -> SocketAddr {
    let mut peer = SocketAddr::new(address, port);
    if let (SocketAddr::V6(own), SocketAddr::V6(peer), true) =
        (own, &mut peer, is_link_local(address))
    {
        peer.set_scope_id(own.scope_id());
    }
    peer
}

fn is_link_local(address: IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

fn bits(address: IpAddr) -> u128 {
    u128::from_be_bytes(gid_of(address))
}

/// Returns whether two addresses are in the same network.
fn are_of_one(one: IpAddr, other: IpAddr, mask: u128) -> bool {
    one.is_ipv4() == other.is_ipv4() && (bits(one) ^ bits(other)) & mask == 0
}

fn mask_of(own: &Interface) -> u128 {
    match &own.addr {
        IfAddr::V4(v4) => bits(v4.netmask.into()),
        IfAddr::V6(v6) => bits(v6.netmask.into()),
    }
}

/// Returns the names of the interfaces by which packets from `address` may leave: the interface
/// that has the address, or else an interface whose network contains it. If this is the loopback
/// interface although the address is not a loopback address, packets leave by routes through other
/// interfaces, as in networks without a common link layer. Then the result is the names of all
/// other interfaces, if any.
pub(crate) fn names_of(address: IpAddr) -> io::Result<Vec<String>> {
    leaving(&if_addrs::get_if_addrs()?, address)
        .ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
}

fn leaving(all: &[Interface], address: IpAddr) -> Option<Vec<String>> {
    let has = all.iter().find(|own| own.ip() == address);
    let name = &has
        .or_else(|| {
            all.iter()
                .find(|own| are_of_one(own.ip(), address, mask_of(own)))
        })?
        .name;
    let is_loopback = |name: &str| {
        all.iter()
            .any(|own| own.name == name && own.ip().is_loopback())
    };
    let others: Vec<_> = all
        .iter()
        .filter(|own| !is_loopback(&own.name))
        .map(|own| own.name.clone())
        .collect();
    let is_routed = is_loopback(name) && !address.is_loopback() && !others.is_empty();
    Some(if is_routed {
        others
    } else {
        vec![name.clone()]
    })
}

/// Returns the address of this host in the network of `address` with a prefix of `prefix` bits.
pub(crate) fn address_in(address: IpAddr, prefix: u8) -> io::Result<IpAddr> {
    let prefix = u32::from(prefix) + if address.is_ipv4() { 96 } else { 0 };
    let mask = u128::MAX
        .checked_shl(128_u32.saturating_sub(prefix))
        .unwrap_or(0);
    let found = if_addrs::get_if_addrs()?
        .iter()
        .map(Interface::ip)
        .find(|own| are_of_one(*own, address, mask));
    found.ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddrV6;

    use if_addrs::{IfOperStatus, Ifv4Addr};

    use super::*;

    #[test]
    fn packets_leave_by_the_interface_that_has_the_address_and_by_the_others_if_it_is_routed_to_the_loopback_interface()
     {
        let interface = |name: &str, ip: [u8; 4], netmask: [u8; 4]| Interface {
            name: name.to_owned(),
            addr: IfAddr::V4(Ifv4Addr {
                ip: ip.into(),
                netmask: netmask.into(),
                prefixlen: 0,
                broadcast: None,
            }),
            index: None,
            oper_status: IfOperStatus::Up,
            is_p2p: false,
        };
        let all = [
            interface("lo", [127, 0, 0, 1], [255, 0, 0, 0]),
            interface("lo", [10, 9, 9, 9], [255; 4]),
            interface("eth0", [10, 0, 0, 1], [255, 0, 0, 0]),
            interface("eth1", [10, 2, 0, 5], [255, 255, 0, 0]),
        ];
        for (address, names) in [
            ([127, 3, 3, 3], &["lo"][..]),
            ([10, 2, 0, 5], &["eth1"]),
            ([10, 0, 0, 1], &["eth0"]),
            ([10, 9, 9, 9], &["eth0", "eth1"]),
        ] {
            assert_eq!(leaving(&all, address.into()).unwrap(), names, "{address:?}");
        }
        assert_eq!(
            leaving(&all[..2], [10, 9, 9, 9].into()).unwrap(),
            ["lo"],
            "no other"
        );
        assert_eq!(leaving(&all, [11, 0, 0, 1].into()), None);
    }

    /// The kernel needs the interface of a link-local address, and no other address has one.
    #[test]
    fn only_a_link_local_address_is_in_the_scope_of_an_interface() {
        let link_local = |nth| IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, nth));
        let [v4, v6] = [IpAddr::from([127, 0, 0, 1]), Ipv6Addr::LOCALHOST.into()];
        for address in [v4, v6, link_local(0)] {
            let own = own_socket(address, 7).unwrap();
            assert_eq!(own, SocketAddr::new(address, 7), "no interface has it");
            assert_eq!(peer_socket(&own, v4, 8), SocketAddr::new(v4, 8));
        }
        for interface in if_addrs::get_if_addrs().unwrap() {
            let own = own_socket(interface.ip(), 7).unwrap();
            let is_scoped = |socket| matches!(socket, SocketAddr::V6(v6) if v6.scope_id() != 0);
            assert_eq!(
                is_scoped(own),
                is_link_local(interface.ip()),
                "{interface:?}"
            );
        }
        let own = SocketAddrV6::new(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1), 7, 0, 3).into();
        assert_eq!(peer_socket(&own, v6, 8), SocketAddr::new(v6, 8));
        let SocketAddr::V6(peer) = peer_socket(&own, link_local(2), 8) else {
            panic!("not IPv6")
        };
        assert_eq!((peer.port(), peer.scope_id()), (8, 3));
    }

    #[test]
    fn the_loopback_interface_is_found_by_its_network() {
        let [one, other, none] =
            [[127, 0, 0, 1], [127, 9, 9, 9], [255, 255, 255, 255]].map(IpAddr::from);
        assert_eq!(names_of(other).unwrap(), ["lo"]);
        assert_eq!(
            (address_in(other, 8).unwrap(), address_in(one, 32).unwrap()),
            (one, one)
        );
        assert_eq!(
            address_in(other, 32).unwrap_err().kind(),
            io::ErrorKind::AddrNotAvailable
        );
        assert_eq!(
            address_in(none, 32).unwrap_err().kind(),
            io::ErrorKind::AddrNotAvailable
        );
        let v6 = IpAddr::V6(Ipv6Addr::LOCALHOST);
        for address in [one, v6] {
            assert_eq!(address_of(&gid_of(address)), Some(address));
        }
        assert_eq!(address_of(&[0; 16]), None);
    }
}
