//! A packet capture in the format of tcpdump (pcap-savefile(5)), with the IP and UDP headers that
//! the packets have on the wire.

use std::fs::File;
use std::io::{self, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use etherparse::PacketBuilder;

use super::interface::gid_of;

/// Magic number of a capture whose timestamps are in ns.
const MAGIC: u32 = 0xa1b2_3c4d;
const VERSION: [u16; 2] = [2, 4];
const SNAPLEN: u32 = 1 << 16;
/// Link type of a capture whose packets begin with an IP header.
const LINKTYPE_RAW: u32 = 101;
const HOPS: u8 = 64;

/// A capture that is being written. A write error ends it.
#[derive(Debug)]
pub(crate) struct Pcap(Option<File>);

impl Pcap {
    /// Makes the file, or continues it: a program may open its device many times.
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

fn write(
    file: &mut impl Write,
    from: &SocketAddr,
    to: &SocketAddr,
    packet: &[u8],
) -> io::Result<()> {
    let ip = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => PacketBuilder::ipv4(from.octets(), to.octets(), HOPS),
        (from, to) => PacketBuilder::ipv6(gid_of(from), gid_of(to), HOPS),
    };
    let udp = ip.udp(from.port(), to.port());
    let len = udp.size(packet.len());
    let mut record = Vec::with_capacity(16 + len);
    let time = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    for word in [
        time.as_secs() as u32,
        time.subsec_nanos(),
        len as u32,
        len as u32,
    ] {
        record.extend(word.to_le_bytes());
    }
    udp.write(&mut record, packet).map_err(io::Error::other)?;
    // Each record is written at once, because a program may end at any time.
    file.write_all(&record)
}
