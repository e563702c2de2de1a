//! A packet capture in the format of tcpdump (pcap-savefile(5)), with the IP and UDP headers that the packets have on the wire.

use std::fs::File;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Timestamps in ns.
const MAGIC: u32 = 0xa1b2_3c4d;
const VERSION: [u16; 2] = [2, 4];
const SNAPLEN: u32 = 1 << 16;
/// Packets begin with an IP header.
const LINKTYPE_RAW: u32 = 101;
const UDP: u8 = 17;
const UDP_BYTES: usize = 8;
const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const HOPS: u8 = 64;

/// A capture that is being written. A write error ends it.
#[derive(Debug)]
pub(crate) struct Pcap(Option<File>);

impl Pcap {
    /// Makes the file, or goes on with it: a program may open its device many times.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let mut file = File::options().create(true).append(true).open(path)?;
        if file.metadata()?.len() > 0 {
            return Ok(Self(Some(file)));
        }
        let [major, minor] = VERSION.map(u32::from);
        for word in [MAGIC, minor << 16 | major, 0, 0, SNAPLEN, LINKTYPE_RAW] {
            file.write_all(&word.to_le_bytes())?;
        }
        Ok(Self(Some(file)))
    }

    /// Adds a packet, the payload of a UDP datagram.
    pub(crate) fn record(&mut self, from: &SocketAddr, to: &SocketAddr, packet: &[u8]) {
        if let Some(file) = &mut self.0 {
            if write(file, from, to, packet).is_err() {
                self.0 = None;
            }
        }
    }
}

fn write(file: &mut impl Write, from: &SocketAddr, to: &SocketAddr, packet: &[u8]) -> io::Result<()> {
    let udp_len = (UDP_BYTES + packet.len()) as u16;
    let ip_len = if from.is_ipv4() { IPV4_BYTES } else { IPV6_BYTES } as u32;
    let mut record = Vec::with_capacity(64 + packet.len());
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let len = ip_len + u32::from(udp_len);
    for word in [time.as_secs() as u32, time.subsec_nanos(), len, len] {
        record.extend(word.to_le_bytes());
    }
    match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            let mut ip = [0; IPV4_BYTES];
            (ip[0], ip[6], ip[8], ip[9]) = (0x45, 0x40, HOPS, UDP);
            ip[2..4].copy_from_slice(&(udp_len + IPV4_BYTES as u16).to_be_bytes());
            ip[12..16].copy_from_slice(&from.octets());
            ip[16..20].copy_from_slice(&to.octets());
            let checksum = checksum(&ip);
            ip[10..12].copy_from_slice(&checksum);
            record.extend(ip);
        }
        (from, to) => {
            record.extend([0x60, 0, 0, 0]);
            record.extend(udp_len.to_be_bytes());
            record.extend([UDP, HOPS]);
            record.extend(super::interface::gid_of(from));
            record.extend(super::interface::gid_of(to));
        }
    }
    for port in [from.port(), to.port(), udp_len, 0] {
        record.extend(port.to_be_bytes());
    }
    record.extend(packet);
    // At once, as a program may end at any time.
    file.write_all(&record)
}

/// Returns the checksum of an IPv4 header whose checksum is 0 (RFC 791).
pub(crate) fn checksum(header: &[u8]) -> [u8; 2] {
    let sum: u32 = header.chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    (!(folded + (folded >> 16)) as u16).to_be_bytes()
}
