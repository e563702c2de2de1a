//! Options of a port for packets.

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

use super::interface::{address_in, own_socket};
use super::network::BadNetwork;
use super::udp::{self, Udp};

/// Options of a port for RoCEv2 packets in UDP datagrams. The port needs no rights and no kernel
/// module. Its peers are software HCAs and other RoCEv2 devices on any host. Packets are neither
/// encrypted nor authenticated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoceOptions {
    /// An IP address of this host. It is the source address of packets, and the device's GID.
    pub address: IpAddr,
    /// Length of a network prefix, in bits: the device has the address of this host in the network
    /// of `address`. So all hosts of a network can have the same options. `None`: the device has
    /// `address` itself.
    pub prefix: Option<u8>,
    /// UDP port of the device. `None`: 4791, or any free port if another device of this address has
    /// 4791. Software HCAs find the port of a peer; other devices send to 4791 only.
    pub port: Option<u16>,
    /// UDP port of peers whose addresses contain no port. `None`: 4791, or, where devices are
    /// virtual functions that share an address, the port that follows from the number of the queue
    /// pair.
    pub peers: Option<u16>,
    /// RDMA MTU, in bytes: 256, 512, 1024, 2048 or 4096. `None`: the largest for the address's
    /// interface.
    pub mtu: Option<u16>,
    /// Whether the device exchanges packets even with peers of its own fabric, and shares memory
    /// with no peer. This is for tests and measurements. A bad network and a capture imply it.
    pub is_for_all: bool,
    /// Whether all packets leave from the UDP port of the device, for a firewall that passes no other
    /// source port. Otherwise connections and datagrams leave from one of eight further ports,
    /// 49152 or above, which depends on the numbers of both queue pairs.
    pub has_one_source: bool,
    /// Bad network through which packets leave the port.
    pub network: BadNetwork,
    /// File to which a capture of all packets is added (pcap-savefile(5)). Where devices are
    /// virtual functions that share an address, a period and the device's `ADDRESS:PORT` are
    /// appended to the name of the file.
    pub pcap: Option<PathBuf>,
}

impl RoceOptions {
    /// Returns the options for this host. If they give a network ([`prefix`](Self::prefix)), the
    /// address becomes this host's own address in this network.
    ///
    /// # Errors
    /// `AddrNotAvailable`: this host has no address in the network.
    pub fn on_this_host(self) -> io::Result<Self> {
        let Some(prefix) = self.prefix else {
            return Ok(self);
        };
        Ok(Self {
            address: address_in(self.address, prefix)?,
            prefix: None,
            ..self
        })
    }

    /// Returns the RDMA MTU of a port with these options, in bytes.
    ///
    /// # Errors
    /// No interface of this host has the address; the errors of getifaddrs(3) and netdevice(7).
    pub fn rdma_mtu(&self) -> io::Result<u16> {
        let of_interface = || {
            let udp = Udp::bind(own_socket(self.address, 0)?)?;
            Ok(udp::rdma_mtu(udp.interface_mtu()?, &self.address))
        };
        self.mtu.map_or_else(of_interface, Ok)
    }

    /// Returns whether peers of the same fabric get packets and no shared memory. The faults of a
    /// bad network and a capture concern the packets to all peers, so they imply it.
    #[must_use]
    pub fn sends_packets_only(&self) -> bool {
        self.is_for_all || self.network != BadNetwork::default() || self.pcap.is_some()
    }

    /// Returns the options of a port with this address and all defaults.
    #[must_use]
    pub fn new(address: IpAddr) -> Self {
        Self {
            address,
            prefix: None,
            port: None,
            peers: None,
            mtu: None,
            is_for_all: false,
            has_one_source: false,
            network: BadNetwork::default(),
            pcap: None,
        }
    }
}

/// Parses `ADDRESS` or `ADDRESS/BITS` ([`prefix`](Self::prefix)), and after commas `port=N`,
/// `peers=N`, `mtu=N`, `packets=all` ([`is_for_all`](Self::is_for_all)), `source_ports=1`
/// ([`has_one_source`](Self::has_one_source)), `loss=PERMILLE`, `double=PERMILLE`,
/// `reorder=PERMILLE`, `delay_us=N` or `delay_us=MIN..MAX` ([`network`](Self::network)),
/// `pcap=FILE`. The error is a sentence with the legal values.
impl FromStr for RoceOptions {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let text = parts.next().unwrap_or_default();
        let (address, prefix) = text
            .split_once('/')
            .map_or((text, None), |(address, prefix)| (address, Some(prefix)));
        let legal = || {
            format!(
                "\"{text}\" is no IP address of this host, nor a network, such as 10.1.0.0/16, in which it has one"
            )
        };
        let mut options = Self::new(address.parse().map_err(|_| legal())?);
        let most = if options.address.is_ipv4() { 32 } else { 128 };
        options.prefix = match prefix.map(str::parse) {
            Some(Ok(bits)) if bits <= most => Some(bits),
            Some(_) => return Err(legal()),
            None => None,
        };
        for part in parts {
            let (key, value) = part.split_once('=').unwrap_or((part, ""));
            let number = |legal: &str| {
                value
                    .parse()
                    .map_err(|_| format!("{key}={value}: use {legal}"))
            };
            let permille = || {
                number("packets in a thousand, 0 to 1000").map(|permille: u16| permille.min(1000))
            };
            match key {
                "port" => options.port = Some(number("a UDP port, 0 to 65535")?),
                "peers" => {
                    options.peers = Some(number(
                        "the UDP port of the other devices, 4791 by their standard",
                    )?)
                }
                "mtu" => {
                    let legal = "256, 512, 1024, 2048 or 4096";
                    let mtu = number(legal)?;
                    let is_legal = [256, 512, 1024, 2048, 4096].contains(&mtu);
                    options.mtu = Some(if is_legal {
                        mtu
                    } else {
                        return Err(format!("mtu={value}: use {legal}"));
                    });
                }
                "loss" => options.network.loss_permille = permille()?,
                "double" => options.network.double_permille = permille()?,
                "reorder" => options.network.reorder_permille = permille()?,
                "delay_us" => {
                    let (least, most) = value.split_once("..").unwrap_or((value, value));
                    options.network.delay_us = match (least.parse(), most.parse()) {
                        (Ok(least), Ok(most)) if least <= most && most <= 1_000_000 => {
                            (least, most)
                        }
                        _ => {
                            return Err(format!(
                                "delay_us={value}: use microseconds, 0 to 1000000, or a range of them, such as 3000..7000"
                            ));
                        }
                    };
                }
                "packets" if value == "all" => options.is_for_all = true,
                "source_ports" if value == "1" => options.has_one_source = true,
                "pcap" if !value.is_empty() => options.pcap = Some(value.into()),
                _ => {
                    return Err(format!(
                        "\"{part}\": use port=N, peers=N, mtu=N, packets=all, source_ports=1, loss=PERMILLE, double=PERMILLE, reorder=PERMILLE, delay_us=MIN..MAX, pcap=FILE"
                    ));
                }
            }
        }
        Ok(options)
    }
}

/// Formats the options as they are parsed, without defaults.
impl fmt::Display for RoceOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            address,
            prefix,
            port,
            peers,
            mtu,
            is_for_all,
            has_one_source,
            network,
            pcap,
        } = self;
        address.fmt(f)?;
        prefix.map_or(Ok(()), |bits| write!(f, "/{bits}"))?;
        port.map_or(Ok(()), |port| write!(f, ",port={port}"))?;
        peers.map_or(Ok(()), |peers| write!(f, ",peers={peers}"))?;
        mtu.map_or(Ok(()), |mtu| write!(f, ",mtu={mtu}"))?;
        f.write_str(if *is_for_all { ",packets=all" } else { "" })?;
        f.write_str(if *has_one_source {
            ",source_ports=1"
        } else {
            ""
        })?;
        let BadNetwork {
            loss_permille,
            double_permille,
            reorder_permille,
            delay_us: (least, most),
        } = network;
        for (key, permille) in [
            ("loss", loss_permille),
            ("double", double_permille),
            ("reorder", reorder_permille),
        ] {
            if *permille > 0 {
                write!(f, ",{key}={permille}")?;
            }
        }
        match most {
            0 => {}
            _ if least == most => write!(f, ",delay_us={most}")?,
            _ => write!(f, ",delay_us={least}..{most}")?,
        }
        pcap.as_ref()
            .map_or(Ok(()), |file| write!(f, ",pcap={}", file.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_options_of_a_port_are_printed_as_they_are_parsed_and_others_are_refused_with_those_that_are_legal()
     {
        for text in [
            "127.0.0.1",
            "::1,port=0",
            "10.1.0.0/16,port=4791,peers=4791,mtu=1024,packets=all,source_ports=1,loss=10,double=5,reorder=1000,delay_us=0..7000,pcap=/tmp/a",
            "::1,delay_us=5000",
        ] {
            assert_eq!(text.parse::<RoceOptions>().unwrap().to_string(), text);
        }
        for (text, part) in [
            ("", "no IP address"),
            ("eth0", "no IP address"),
            ("10.1.0.0/33", "10.1.0.0/16"),
            ("::1,port=70000", "a UDP port, 0 to 65535"),
            ("::1,peers=all", "4791"),
            ("::1,mtu=1000", "256, 512, 1024, 2048 or 4096"),
            ("::1,loss=1.5", "0 to 1000"),
            ("::1,delay_us=5ms", "microseconds"),
            ("::1,delay_us=7..3", "such as 3000..7000"),
            ("::1,packets=some", "packets=all"),
            ("::1,source_ports=2", "source_ports=1"),
            ("::1,pcap=", "pcap=FILE"),
            ("::1,", "port=N"),
        ] {
            let refused = text.parse::<RoceOptions>().unwrap_err();
            assert!(refused.contains(part), "{text}: {refused}");
        }
    }
}
