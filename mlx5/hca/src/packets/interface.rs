//! Addresses of this host, and what a GID says of an address.

use std::io;
use std::net::{IpAddr, Ipv6Addr};

use if_addrs::IfAddr;

/// Returns the bytes of an address as a GID has them.
#[must_use]
pub fn gid_of(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Returns the IP address that a GID of RoCEv2 is. `None` for the zero GID.
#[must_use]
pub fn address_of(gid: &[u8; 16]) -> Option<IpAddr> {
    let v6 = Ipv6Addr::from(*gid);
    (*gid != [0; 16]).then(|| v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4))
}

fn bits(address: IpAddr) -> u128 {
    u128::from_be_bytes(gid_of(address))
}

/// Returns the first address of this host, and the name of its interface, that `is_it`, given the
/// address and the mask of its network.
fn find(is_it: impl Fn(IpAddr, u128) -> bool) -> io::Result<(IpAddr, String)> {
    let mask = |of: &IfAddr| match of {
        IfAddr::V4(v4) => bits(v4.netmask.into()),
        IfAddr::V6(v6) => bits(v6.netmask.into()),
    };
    let found = if_addrs::get_if_addrs()?
        .into_iter()
        .find(|own| is_it(own.ip(), mask(&own.addr)));
    found
        .map(|own| (own.ip(), own.name))
        .ok_or_else(|| io::ErrorKind::AddrNotAvailable.into())
}

/// Returns the name of the interface whose network has this address.
pub(crate) fn name_of(address: IpAddr) -> io::Result<String> {
    let has = |own: IpAddr, mask| {
        own.is_ipv4() == address.is_ipv4() && (bits(own) ^ bits(address)) & mask == 0
    };
    find(has).map(|(_, name)| name)
}

/// Returns the address of this host in the network of `address` with a prefix of `prefix` bits.
pub(crate) fn address_in(address: IpAddr, prefix: u8) -> io::Result<IpAddr> {
    let prefix = u32::from(prefix) + if address.is_ipv4() { 96 } else { 0 };
    let mask = u128::MAX
        .checked_shl(128_u32.saturating_sub(prefix))
        .unwrap_or(0);
    let has = |own: IpAddr, _| {
        own.is_ipv4() == address.is_ipv4() && (bits(own) ^ bits(address)) & mask == 0
    };
    find(has).map(|(own, _)| own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_found_by_its_network() {
        let [one, other, none] =
            [[127, 0, 0, 1], [127, 9, 9, 9], [255, 255, 255, 255]].map(IpAddr::from);
        assert_eq!(name_of(other).unwrap(), "lo");
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
