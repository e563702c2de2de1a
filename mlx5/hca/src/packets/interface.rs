//! Addresses of this host, and what a GID says of an address.

use std::io;
use std::net::{IpAddr, Ipv6Addr};

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

/// The name of an interface, with its end.
pub(crate) type Name = [libc::c_char; libc::IFNAMSIZ];

/// A list of getifaddrs(3).
struct Interfaces(*mut libc::ifaddrs);

impl Drop for Interfaces {
    fn drop(&mut self) {
        // SAFETY: the list that getifaddrs made.
        unsafe { libc::freeifaddrs(self.0) }
    }
}

fn bits(address: IpAddr) -> u128 {
    u128::from_be_bytes(gid_of(address))
}

fn address(raw: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the kernel's addresses have the length that their family says.
    unsafe {
        match libc::c_int::from(raw.as_ref()?.sa_family) {
            libc::AF_INET => Some(IpAddr::V4((*raw.cast::<libc::sockaddr_in>()).sin_addr.s_addr.to_ne_bytes().into())),
            libc::AF_INET6 => Some(IpAddr::V6((*raw.cast::<libc::sockaddr_in6>()).sin6_addr.s6_addr.into())),
            _ => None,
        }
    }
}

/// Returns the first address of this host, and the name of its interface, that `is_it`, given the address and the mask of its network.
fn find(is_it: impl Fn(IpAddr, u128) -> bool) -> io::Result<(IpAddr, Name)> {
    let mut list = Interfaces(core::ptr::null_mut());
    // SAFETY: the call writes the list.
    if unsafe { libc::getifaddrs(&raw mut list.0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut next = list.0;
    // SAFETY: an entry of the list, which lives, or null.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        let (Some(own), Some(mask)) = (address(entry.ifa_addr), address(entry.ifa_netmask)) else { continue };
        if is_it(own, bits(mask)) {
            let mut name = [0; libc::IFNAMSIZ];
            // SAFETY: the name is a string, of which its end is not copied if it is too long.
            unsafe { libc::strncpy(name.as_mut_ptr(), entry.ifa_name, name.len() - 1) };
            return Ok((own, name));
        }
    }
    Err(io::ErrorKind::AddrNotAvailable.into())
}

/// Returns the name of the interface whose network has this address.
pub(crate) fn name_of(address: IpAddr) -> io::Result<Name> {
    let has = |own: IpAddr, mask| own.is_ipv4() == address.is_ipv4() && (bits(own) ^ bits(address)) & mask == 0;
    find(has).map(|(_, name)| name)
}

/// Returns the address of this host in the network of `address` with a prefix of `prefix` bits.
pub(crate) fn address_in(address: IpAddr, prefix: u8) -> io::Result<IpAddr> {
    let prefix = u32::from(prefix) + if address.is_ipv4() { 96 } else { 0 };
    let mask = u128::MAX.checked_shl(128_u32.saturating_sub(prefix)).unwrap_or(0);
    let has = |own: IpAddr, _| own.is_ipv4() == address.is_ipv4() && (bits(own) ^ bits(address)) & mask == 0;
    find(has).map(|(own, _)| own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_interface_is_found_by_its_network() {
        let [one, other, none] = [[127, 0, 0, 1], [127, 9, 9, 9], [255, 255, 255, 255]].map(IpAddr::from);
        assert_eq!(name_of(other).unwrap()[..3], [b'l' as _, b'o' as _, 0]);
        assert_eq!((address_in(other, 8).unwrap(), address_in(one, 32).unwrap()), (one, one));
        assert_eq!(address_in(other, 32).unwrap_err().kind(), io::ErrorKind::AddrNotAvailable);
        assert_eq!(address_in(none, 32).unwrap_err().kind(), io::ErrorKind::AddrNotAvailable);
        let v6 = IpAddr::V6(Ipv6Addr::LOCALHOST);
        for address in [one, v6] {
            assert_eq!(address_of(&gid_of(address)), Some(address));
        }
        assert_eq!(address_of(&[0; 16]), None);
    }
}
