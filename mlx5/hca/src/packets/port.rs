//! The port on the wire: encodes, sends, receives and decodes packets.

use std::collections::VecDeque;
use std::net::SocketAddr;

use copyrpc_shm::sleep::Notifier;
use mlx5_wire::DatagramSegment;
use mlx5_wire::roce::{Flow, Headers, ICRC_BYTES, Psn, UDP_PORT};

use super::interface;
use super::network::{BadNetwork, Network};
use super::options::RoceOptions;
use super::pcap::Pcap;
use super::reports::Reports;
use super::share::Share;
use super::source::{Peer, SPREAD, Source, source_port};
use super::udp::{self, Packets, Receiver, Udp};
use crate::Clock;
use crate::counters::PortCounters;
use crate::error::OpenError;
use crate::random::Random;
use crate::shared::layout::vf_of;
use crate::types::request::PacketAddress;
use crate::types::vendor::Limit;

/// Maximum number of destroyed queue pairs whose peers still get an answer.
const MAX_GONE: usize = 1024;

/// Counters of a port for packets, in packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PacketCounters {
    /// Packets sent.
    pub sent: u64,
    /// Packets that counted as lost, because the peer did not answer in time or asked for them.
    /// Each is sent again, unless it is acknowledged first.
    pub retransmitted: u64,
    /// Packets received, including dropped packets.
    pub received: u64,
    /// Packets received before an earlier packet of their connection, or again after they had been
    /// executed.
    pub out_of_sequence: u64,
    /// Packets dropped because their ICRC is wrong.
    pub bad_icrc: u64,
    /// Packets dropped because they are malformed, or do not come from the peer of the queue pair.
    pub strangers: u64,
    /// Datagrams dropped because no queue pair with their Q_Key has a receive.
    pub lost_datagrams: u64,
    /// Packets refused by the kernel: too long for the path, without a route, or forbidden. The
    /// failure of an operation gives the reason.
    pub refused: u64,
}

pub(crate) struct WirePort {
    /// The thread that ends sleeps, started for the first sleep; `Some(None)` if the start failed.
    waker: Option<Option<Notifier>>,
    /// The sockets from which packets leave. The first is the socket at which the device receives.
    sources: Vec<Source>,
    /// The places in `sources` of the further ports; `None` before a port is needed. It is 0 if
    /// packets leave from the device's own port, as another socket has the further one.
    places: [Option<u8>; SPREAD],
    /// A bit for each of `sources`, from the lowest bit on: whether packets wait in it, and whether it
    /// has no room for more.
    unsent: u16,
    full: u16,
    reports: Reports,
    /// The address of the device, with the port.
    own: SocketAddr,
    /// RDMA MTU of the port, in bytes.
    pub(crate) mtu: u16,
    /// Whether devices share the IP address, so that the UDP port of each follows from its virtual
    /// function.
    is_shared: bool,
    peers: Option<u16>,
    /// Secret from which the first PSNs of queue pairs follow.
    secret: u64,
    /// Buffers of received packets. `None` between [`receive`](Self::receive) and
    /// [`give_back`](Self::give_back).
    incoming: Option<Box<Packets>>,
    /// Bad network, if the options have one; it holds packets before they are in their source.
    network: Option<Network>,
    pcap: Option<Pcap>,
    pub(crate) counters: PacketCounters,
    /// Counters to which the port adds its packets.
    pub(crate) traffic: Option<&'static PortCounters>,
    /// Destroyed queue pairs: number, peer, and last answer. The oldest are removed.
    gone: VecDeque<(u32, Peer, Headers)>,
    /// Queue pairs with packets to be sent, by index.
    pub(crate) active: Vec<usize>,
}

/// Returns the UDP port of a virtual function. The upper bits of a queue pair number are the number
/// `vf` of its virtual function. The port is 4791 for virtual function 1, and also for 0, because
/// the first queue pair numbers of the kernel's RoCE driver have 0 in these bits.
pub(crate) const fn port_of_vf(vf: u16) -> u16 {
    UDP_PORT + vf.saturating_sub(1)
}

const fn flow(source: SocketAddr, destination: SocketAddr) -> Flow {
    Flow {
        source,
        destination,
        identification: 0,
    }
}

impl WirePort {
    /// Binds the UDP port. With `vf`, this is the port of that virtual function. Otherwise it is
    /// the port in the options; if they give none, it is 4791, or any free port if 4791 is taken.
    /// First PSNs are derived from `secret`, and the actions of a bad network from `seed`.
    pub(crate) fn open(
        options: &RoceOptions,
        vf: Option<u16>,
        secret: u64,
        (seed, clock): (u64, &Clock),
    ) -> Result<Self, OpenError> {
        let address = options.address;
        let failed = |port: u16| {
            move |source| OpenError::Wire {
                address,
                port,
                source,
            }
        };
        let options = options.clone().on_this_host().map_err(failed(0))?;
        let mtu = options.rdma_mtu().map_err(failed(0))?;
        let RoceOptions {
            address,
            port,
            peers,
            network,
            pcap,
            has_one_source,
            ..
        } = options;
        let bind = |port| {
            let bound = if vf.is_some() && port == UDP_PORT {
                Udp::share(address, Share::Device)
            } else {
                interface::own_socket(address, port).and_then(Udp::bind)
            };
            bound.map_err(failed(port))
        };
        let port = vf.map(port_of_vf).or(port);
        let udp = match (port, bind(port.unwrap_or(UDP_PORT))) {
            (None, Err(error)) if error.is_taken() => bind(0)?,
            (_, bound) => bound?,
        };
        let source = Source::new(udp).map_err(failed(0))?;
        let own = source.own;
        let pcap = pcap.map(|mut file| {
            if vf.is_some() {
                file.as_mut_os_string().push(format!(".{own}"));
            }
            Pcap::open(&file)
        });
        let pcap = pcap.transpose().map_err(|source| OpenError::Memory {
            what: "the packet capture",
            source,
        })?;
        Ok(Self {
            waker: None,
            sources: vec![source],
            places: [has_one_source.then_some(0); SPREAD],
            unsent: 0,
            full: 0,
            reports: Reports::default(),
            own,
            mtu,
            is_shared: vf.is_some(),
            peers,
            secret,
            incoming: Some(Box::new(Packets::new().with_controls())),
            network: (network != BadNetwork::default()).then(|| Network::new(network, seed, clock)),
            pcap,
            counters: PacketCounters::default(),
            traffic: None,
            gone: VecDeque::new(),
            active: Vec::new(),
        })
    }

    pub(crate) const fn own(&self) -> SocketAddr {
        self.own
    }

    pub(crate) fn first_psn(&self, qpn: u32, generation: u32) -> Psn {
        let mut random = Random::new(self.secret ^ u64::from(qpn) << 32 ^ u64::from(generation));
        Psn::new(random.next_u64() as u32)
    }

    /// Returns the UDP port of the device with queue pair `qpn`, if the address of the device
    /// contains no port.
    fn port_of_number(&self, qpn: u32) -> u16 {
        self.peers.unwrap_or(if self.is_shared {
            port_of_vf(vf_of(qpn))
        } else {
            UDP_PORT
        })
    }

    pub(crate) fn socket_of(&self, qpn: u32, at: &PacketAddress) -> SocketAddr {
        let port = at.port.unwrap_or_else(|| self.port_of_number(qpn));
        interface::peer_socket(&self.own, at.ip, port)
    }

    /// Returns a MAC address that contains the UDP port of the device with this queue pair.
    pub(crate) fn mac_of(&self, qpn: u32, at: &PacketAddress) -> [u8; 6] {
        let [high, low] = self.socket_of(qpn, at).port().to_be_bytes();
        [0x02, 0, 0, 0, high, low]
    }

    /// Returns the UDP port of the device to which a datagram with this segment goes, at the IP
    /// address in the segment's vector.
    pub(crate) fn port_of(&self, to: &DatagramSegment) -> u16 {
        match to.vector.rmac {
            [0x02, 0, 0, 0, high, low] if !self.is_shared => u16::from_be_bytes([high, low]),
            _ => self.port_of_number(to.qpn),
        }
    }

    /// Returns the thread that ends sleeps, after starting it if necessary. `None` if that failed.
    pub(crate) fn waker(&mut self) -> Option<&Notifier> {
        self.waker
            .get_or_insert_with(|| {
                Notifier::start("mlx5-packets", &self.sources[0].udp.socket).ok()
            })
            .as_ref()
    }

    fn has_arrivals(&self) -> bool {
        self.sources[0].udp.is_readable()
    }

    /// Returns whether packets wait for room in the socket. No event reports such room.
    pub(crate) const fn has_unsent(&self) -> bool {
        self.unsent != 0
    }

    /// Returns whether a poll has something to do: packets have arrived, or connections have
    /// packets to send and the socket has room.
    pub(crate) fn has_work(&self) -> bool {
        self.has_arrivals() || !self.active.is_empty() && !self.has_unsent()
    }

    pub(crate) fn remember_gone(&mut self, qpn: u32, peer: Peer, answer: Headers) {
        self.forget_gone(qpn);
        if self.gone.len() == MAX_GONE {
            self.gone.pop_front();
        }
        self.gone.push_back((qpn, peer, answer));
    }

    /// Forgets the earlier queue pair with number `qpn`, because a new queue pair gets this number.
    pub(crate) fn forget_gone(&mut self, qpn: u32) {
        self.gone.retain(|(gone, ..)| *gone != qpn);
    }

    /// Answers a request to a destroyed queue pair. Returns whether its peer sent the request.
    pub(crate) fn answer_for_gone(&mut self, qpn: u32, from: &SocketAddr) -> bool {
        let Some(&(_, peer, answer)) = self
            .gone
            .iter()
            .find(|(gone, peer, _)| *gone == qpn && peer.is_from(from))
        else {
            return false;
        };
        self.answer(&peer.to, &answer);
        true
    }

    /// Sends an answer without payload, if there is room.
    pub(crate) fn answer(&mut self, peer: &Receiver, answer: &Headers) {
        if self.has_room(peer) {
            let _: Result<(), ()> = self.send(peer, answer, 0, |_| Ok(()));
        }
    }

    pub(crate) fn has_room(&mut self, to: &Receiver) -> bool {
        (self.full == 0 || self.makes_room(to))
            && self.network.as_ref().is_none_or(Network::has_room)
    }

    #[cold]
    fn makes_room(&mut self, to: &Receiver) -> bool {
        self.flush();
        self.full & 1 << to.source == 0
    }

    /// Returns the source of the packets with this flow label. Opens its socket if necessary.
    pub(crate) fn source_of(&mut self, flow_label: u32) -> u8 {
        let mut own = self.own;
        own.set_port(source_port(own.port(), flow_label));
        let nth = usize::from(own.port()) % SPREAD;
        if let Some(place) = self.places[nth] {
            return place;
        }
        let place = match Udp::bind(own).and_then(Source::new) {
            Ok(source) => {
                self.sources.push(source);
                self.sources.len() as u8 - 1
            }
            Err(_) => 0,
        };
        self.places[nth] = Some(place);
        place
    }

    /// Adds a packet to the packets that [`flush`](Self::flush) sends. The caller has checked that
    /// there is room. The payload has `len` bytes, which `fill` writes; if `fill` fails, nothing is
    /// sent.
    pub(crate) fn send<E>(
        &mut self,
        to: &Receiver,
        headers: &Headers,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let source = &mut self.sources[usize::from(to.source)];
        let Source { own, out, end, .. } = source;
        let buffer = out.buffer(*end);
        let header = headers.emit();
        let (head, rest) = buffer.split_at_mut(header.len());
        head.copy_from_slice(&header);
        fill(&mut rest[..len])?;
        let covered = header.len() + len + usize::from(headers.bth.pad);
        buffer[header.len() + len..covered].fill(0);
        let icrc = flow(*own, to.socket).icrc(&buffer[..covered], &[]);
        let whole = covered + ICRC_BYTES;
        buffer[covered..whole].copy_from_slice(&icrc);
        self.counters.sent += 1;
        if let Some(pcap) = &mut self.pcap {
            pcap.record(own, &to.socket, &buffer[..whole]);
        }
        match &mut self.network {
            Some(network) => network.take(to, &buffer[..whole]),
            None => {
                self.unsent |= 1 << to.source;
                if source.add(whole, to) {
                    self.full |= 1 << to.source;
                }
            }
        }
        Ok(())
    }

    /// Returns the time at which [`flush`](Self::flush) sends a packet that a bad network holds.
    pub(crate) fn due_ns(&self) -> Option<u64> {
        self.network.as_ref()?.due_ns()
    }

    /// Returns the MTU of the path to `to`, in bytes of an IP packet, and the largest RDMA MTU for
    /// which the path has room, at least 256. Returns `None` if the kernel has no route.
    pub(crate) fn path_mtu(&self, to: &SocketAddr) -> Option<(u32, u16)> {
        let ip_mtu = self.sources[0].udp.path_mtu(to).ok()?;
        Some((ip_mtu, udp::rdma_mtu(ip_mtu, &to.ip())))
    }

    pub(crate) fn has_reports(&self) -> bool {
        !self.reports.is_empty()
    }

    /// Takes the reports of packets that did not arrive: their receivers, and the reasons.
    pub(crate) fn take_reports(&mut self) -> Vec<(SocketAddr, Limit)> {
        self.reports.take()
    }

    /// Reads the reports on packets that left from the same source as those to `to`. Those on
    /// packets from the device's own port are also read when it receives.
    #[cold]
    pub(crate) fn read_reports(&mut self, to: &Receiver) {
        let source = &self.sources[usize::from(to.source)];
        self.reports.add_queued(&source.udp.socket);
    }

    /// Sends the packets that were added and are due, as far as the socket has room for them.
    pub(crate) fn flush(&mut self) {
        while let Some((to, packet)) = self
            .network
            .as_mut()
            .filter(|_| self.full == 0)
            .and_then(Network::pop_due)
        {
            let source = &mut self.sources[usize::from(to.source)];
            source.out.buffer(source.end)[..packet.len()].copy_from_slice(&packet);
            self.unsent |= 1 << to.source;
            self.full |= u16::from(source.add(packet.len(), &to)) << to.source;
        }
        let mut rest = self.unsent;
        while rest != 0 {
            let nth = rest.trailing_zeros();
            rest &= rest - 1;
            let source = &mut self.sources[nth as usize];
            let (is_empty, refused) = source.flush(&mut self.reports, self.traffic);
            self.counters.refused += refused;
            if is_empty {
                self.unsent &= !(1 << nth);
                self.full &= !(1 << nth);
            }
        }
    }

    /// Receives packets. Returns them and their number, for [`give_back`](Self::give_back).
    pub(crate) fn receive(&mut self) -> Option<(Box<Packets>, usize)> {
        let mut incoming = self.incoming.take()?;
        let count = self.sources[0]
            .udp
            .receive(&mut incoming, &mut self.reports);
        self.counters.received += count as u64;
        if let Some(traffic) = self.traffic {
            traffic.received(count as u64, incoming.bytes(0..count));
        }
        Some((incoming, count))
    }

    pub(crate) fn give_back(&mut self, incoming: Box<Packets>) {
        self.incoming = Some(incoming);
    }

    /// Decodes a received packet. Counts invalid packets, and returns `None` for them.
    pub(crate) fn decode<'a>(
        &mut self,
        from: &SocketAddr,
        packet: &'a [u8],
    ) -> Option<(Headers, &'a [u8])> {
        if let Some(pcap) = &mut self.pcap {
            pcap.record(from, &self.own, packet);
        }
        let Ok(decoded) = Headers::parse(packet) else {
            self.counters.strangers += 1;
            return None;
        };
        if flow(*from, self.own).check(packet).is_none() {
            self.counters.bad_icrc += 1;
            return None;
        }
        Some(decoded)
    }
}
