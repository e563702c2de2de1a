//! IP addresses of the devices. A program gives the IP address and the port of a service. The
//! fabric finds the service by its port alone; the address only selects the device.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use crate::abi::cm::SockAddr;
use crate::options::config::Link;
use crate::options::settings::Settings;

/// Decodes an IPv4 or IPv6 address. Returns `None` for other families.
pub(crate) fn parse(bytes: &SockAddr) -> Option<SocketAddr> {
    let [a, b, c, d, rest @ ..] = *bytes;
    let port = u16::from_be_bytes([c, d]);
    match i32::from(u16::from_ne_bytes([a, b])) {
        libc::AF_INET => rest
            .first_chunk::<4>()
            .map(|ip| (Ipv4Addr::from(*ip), port).into()),
        libc::AF_INET6 => rest
            .get(4..)?
            .first_chunk::<16>()
            .map(|ip| (Ipv6Addr::from(*ip), port).into()),
        _ => None,
    }
}

pub(crate) fn bytes(address: SocketAddr) -> SockAddr {
    let mut bytes = [0; size_of::<SockAddr>()];
    let family = if address.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    bytes[..2].copy_from_slice(&(family as u16).to_ne_bytes());
    bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
    match address.ip() {
        IpAddr::V4(ip) => bytes[4..8].copy_from_slice(&ip.octets()),
        IpAddr::V6(ip) => bytes[8..24].copy_from_slice(&ip.octets()),
    }
    bytes
}

/// Returns the index of the device with this address. 127.0.0.1 belongs to the first device,
/// 127.0.0.2 to the second, and so on; all other addresses of the host belong to the first device
/// too. A device with an address of its own (`--address`) has only that address and, if it is no
/// address of the loopback interface, all of these: programs bind an id to 127.0.0.1 to find a
/// device.
pub(crate) fn device(settings: &Settings, ip: IpAddr) -> Option<usize> {
    if let Link::Ethernet(Some(own)) = &settings.link {
        let is_of_host = ip.is_loopback() && !own.address.is_loopback();
        return (ip == own.address || is_of_host).then_some(0);
    }
    let of_loopback = |index| ip == IpAddr::from(Ipv4Addr::new(127, 0, 0, 1 + index as u8));
    let devices = settings.network.len();
    (0..devices)
        .find(|index| of_loopback(*index))
        .or_else(|| (devices > 0 && UdpSocket::bind((ip, 0)).is_ok()).then_some(0))
}

/// Returns whether an address is of another host to which packets from this address find a way.
pub(crate) fn is_far(settings: &Settings, from: IpAddr, to: SocketAddr) -> bool {
    let is_one_host = !to.ip().is_unspecified() && !to.ip().is_multicast();
    matches!(settings.link, Link::Ethernet(Some(_)))
        && is_one_host
        && source(settings, to) == Some(from)
}

/// Returns the address from which the host reaches `to`.
pub(crate) fn source(settings: &Settings, to: SocketAddr) -> Option<IpAddr> {
    let any: IpAddr = match (&settings.link, to) {
        (Link::Ethernet(Some(own)), _) => own.address,
        (_, SocketAddr::V4(_)) => Ipv4Addr::UNSPECIFIED.into(),
        (_, SocketAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(to).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cm::tests::settings;

    /// An id that is bound to 127.0.0.1 has the device, as in the kernel, and reaches no other host.
    #[test]
    fn the_loopback_interface_belongs_to_a_device_with_an_address_of_its_own() {
        let to = "192.0.2.1:1".parse().unwrap();
        for (own, loopback) in [("192.0.2.7", Some(0)), ("127.0.0.1", None)] {
            let settings = settings(std::path::Path::new("/f"), &format!("roce={own}"));
            assert_eq!(device(settings, own.parse().unwrap()), Some(0));
            assert_eq!(device(settings, [127, 0, 0, 2].into()), loopback);
            assert_eq!(device(settings, [192, 0, 2, 1].into()), None);
            assert!(!is_far(settings, [127, 0, 0, 1].into(), to));
        }
    }

    #[test]
    fn addresses_are_those_of_the_kernels_structures() {
        for address in ["127.0.0.1:7471", "[fe80::1]:1"] {
            let address: SocketAddr = address.parse().unwrap();
            assert_eq!(parse(&bytes(address)), Some(address));
        }
        assert_eq!(
            bytes("1.2.3.4:258".parse().unwrap())[..8],
            [2, 0, 1, 2, 1, 2, 3, 4]
        );
        assert_eq!(parse(&[0; 28]), None);
    }
}
