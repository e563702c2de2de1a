//! An id (`struct rdma_cm_id`): the addresses and parameters of both ends, and the answers to the
//! program that follow from them.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mlx5_hca::{Access, GidKind, Service, gid_of};
use zerocopy::{FromZeros, IntoBytes};

use crate::abi::cm::{ConnParam, PathRec, QpAttr, QueryRouteResp, UdParam};
use crate::abi::transitions::{State as QpState, needed, service};
use crate::abi::verbs::{AhAttr, GlobalRoute};
use crate::cm::machine::{Event, Heard, Kind, Machine, State, Step, reason};
use crate::cm::message::{LONGEST_PACKET, Message, private_bytes};
use crate::cm::service::{self, Port, Sharing};
use crate::cm::sockets::Parcel;
use crate::cm::{address, far};
use crate::options::config::{Link, guid};
use crate::options::errno::Errno;
use crate::options::faults::Fault;
use crate::options::log;
use crate::options::settings::Settings;

/// Port spaces (`enum rdma_ucm_port_space`).
mod space {
    pub(super) const TCP: u16 = 0x0106;
    pub(super) const UDP: u16 = 0x0111;
    pub(super) const IB: u16 = 0x013f;
}

/// Types of queue pairs (`enum ib_qp_type`).
mod qp_type {
    pub(super) const RC: u8 = 2;
    pub(super) const UD: u8 = 4;
}

/// Q_Key of datagrams if the program gives none (`RDMA_UDP_QKEY`).
const DATAGRAM_QKEY: u32 = 0x0123_4567;
/// Default N of the time 4.096 us * 2^N after which an unacknowledged packet is sent again.
const ACK_TIMEOUT: u8 = 18;
/// Time for which a request waits until its service listens, if the last service that this process
/// reached was at the same port. perftest makes a new listener for each connection, and its client
/// assumes that the next listener exists by the time a network has resolved the route.
const PATIENCE: Duration = Duration::from_secs(2);
/// Hop limit of RoCE.
const HOPS: u8 = 64;

/// The numbers of ids in use, one bit for each number. librdmacm has one table of 2^16 ids for all
/// files of a process, so a number is unique in the process. The child of a fork keeps its parent's
/// bits.
static TAKEN: [AtomicU64; 1 << 10] = [const { AtomicU64::new(0) }; 1 << 10];

/// The number of an id in commands.
#[derive(Debug)]
pub(crate) struct Handle(pub(crate) u32);

impl Handle {
    /// Takes the lowest free number.
    fn take() -> Option<Self> {
        TAKEN.iter().enumerate().find_map(|(index, word)| {
            let taken = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |bits| {
                (bits != u64::MAX).then_some(bits | (bits + 1))
            });
            taken
                .ok()
                .map(|bits| Self(index as u32 * u64::BITS + bits.trailing_ones()))
        })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        TAKEN[(self.0 / u64::BITS) as usize]
            .fetch_and(!(1 << (self.0 % u64::BITS)), Ordering::Relaxed);
    }
}

#[derive(Debug)]
pub(crate) struct Id {
    pub(crate) handle: Handle,
    /// The program's identification of the id, which the id's events carry. 0 until the program
    /// accepts an id that a listener made.
    pub(crate) uid: u64,
    space: u16,
    qp_type: u8,
    pub(crate) machine: Machine,
    pub(crate) sharing: Sharing,
    pub(crate) port: Option<Port>,
    pub(crate) socket: Option<OwnedFd>,
    /// Number of the id's events that the program has read.
    pub(crate) reported: u32,
    /// Handle of the listener that made the id, until the program has read the request's event.
    pub(crate) parent: Option<u32>,
    pub(crate) local: SocketAddr,
    remote: Option<SocketAddr>,
    /// Index of this end's device; `None` while no address determines the device.
    pub(crate) device: Option<usize>,
    /// Whether the event that the id's device has failed was already added.
    pub(crate) is_told: bool,
    peer_device: Option<usize>,
    /// Whether the peer is on another host, so that the gate has the other end of the socket.
    pub(crate) is_far: bool,
    /// First packet number that this end expects; `peer_psn` is the first packet number that the
    /// peer expects.
    psn: u32,
    peer_psn: u32,
    /// N of the longest packet that the peer can send and receive, 128 B * 2^N.
    peer_mtu: u32,
    /// The connection parameters of this end; `peer` has the parameters of the peer.
    own: ConnParam,
    peer: ConnParam,
    /// Whether this end has sent the request.
    is_active: bool,
    pub(crate) ack_timeout: u8,
    /// The time at which the wait for the peer's answer ends; `None` if the id awaits no answer.
    pub(crate) answer_until: Option<Instant>,
    /// The time at which the wait for the peer's service ends, once an attempt to reach the service
    /// has failed.
    listens_until: Option<Instant>,
}

/// Error of a step whose service does not listen yet. The caller repeats the step later, and does
/// not return this error to the program.
pub(crate) const LATER: Errno = Errno(libc::EINPROGRESS);

impl Id {
    /// Makes an id with a free number.
    ///
    /// # Errors
    /// `EOPNOTSUPP`: an unknown port space, such as the port space for multicast over IPoIB.
    /// `ENOMEM`: all numbers are in use.
    pub(crate) fn new(uid: u64, space: u16, kind: u8) -> Result<Self, Errno> {
        let qp_type = match space {
            space::TCP => qp_type::RC,
            space::UDP => qp_type::UD,
            space::IB => kind,
            _ => return Err(Errno(libc::EOPNOTSUPP)),
        };
        Ok(Self {
            handle: Handle::take().ok_or(Errno(libc::ENOMEM))?,
            uid,
            space,
            qp_type,
            machine: Machine {
                state: State::New,
                is_datagram: qp_type == qp_type::UD,
            },
            sharing: Sharing::default(),
            port: None,
            socket: None,
            reported: 0,
            parent: None,
            local: (Ipv4Addr::UNSPECIFIED, 0).into(),
            remote: None,
            device: None,
            is_told: false,
            peer_device: None,
            is_far: false,
            psn: service::random() >> 8,
            peer_psn: 0,
            peer_mtu: LONGEST_PACKET,
            own: ConnParam::new_zeroed(),
            peer: ConnParam::new_zeroed(),
            is_active: false,
            ack_timeout: ACK_TIMEOUT,
            answer_until: None,
            listens_until: None,
        })
    }

    /// Makes the id of a connection that a listener has accepted.
    pub(crate) fn taken(listener: &Self, socket: OwnedFd) -> Result<Self, Errno> {
        let mut id = Self::new(0, listener.space, listener.qp_type)?;
        (id.socket, id.parent, id.device) =
            (Some(socket), Some(listener.handle.0), listener.device);
        id.machine.state = State::Arriving;
        Ok(id)
    }

    /// Returns the sockets of the id that its session watches.
    pub(crate) fn watched(&self) -> impl Iterator<Item = &OwnedFd> {
        let is_listener = self.machine.state == State::Listening;
        let port = self.port.as_ref().filter(|_| is_listener);
        self.socket.iter().chain(port.map(|port| &port.socket))
    }

    /// Binds the id to an address, and reserves the port; port 0 means any free port.
    ///
    /// # Errors
    /// `EINVAL`: the id has an address already. `EADDRINUSE`, `EADDRNOTAVAIL`: as of
    /// [`Port::reserve`]. `ENODEV`: no device has the address.
    pub(crate) fn bind(&mut self, settings: &Settings, to: SocketAddr) -> Result<(), Errno> {
        let (device, is_any) = (address::device(settings, to.ip()), to.ip().is_unspecified());
        Errno(libc::ENODEV).when(device.is_none() && !is_any)?;
        self.machine.take(Step::Bind)?;
        let port = Port::reserve(&settings.fabric, self.space, to, self.sharing)
            .inspect_err(|_| self.machine.state = State::New)?;
        self.device = device.filter(|_| !is_any);
        self.local = SocketAddr::new(to.ip(), port.number);
        self.port = Some(port);
        Ok(())
    }

    /// Finds this end's device, which has the source address, and the peer's device, which has the
    /// address `to`, or is on another host to which there is a route. Returns whether both exist.
    ///
    /// # Errors
    /// `EINVAL`: the address of the peer is resolved already, or the id is a listener.
    pub(crate) fn resolve(
        &mut self,
        settings: &Settings,
        from: Option<SocketAddr>,
        to: SocketAddr,
    ) -> Result<bool, Errno> {
        let before = self.machine.state;
        self.machine.take(Step::ResolveAddress)?;
        let bound = Some(self.local.ip()).filter(|ip| !ip.is_unspecified());
        let from = bound
            .or(from.map(|from| from.ip()).filter(|ip| !ip.is_unspecified()))
            .or_else(|| address::source(settings, to));
        self.device = from.and_then(|ip| address::device(settings, ip));
        self.peer_device = address::device(settings, to.ip());
        self.is_far =
            self.peer_device.is_none() && from.is_some_and(|ip| address::is_far(settings, ip, to));
        let has_peer = self.peer_device.is_some() || self.is_far;
        let (Some(ip), true) = (from, self.device.is_some() && has_peer) else {
            self.machine.state = before;
            return Ok(false);
        };
        let port = if self.local.port() == 0 {
            service::chosen_port()
        } else {
            self.local.port()
        };
        (self.local, self.remote) = (SocketAddr::new(ip, port), Some(to));
        Ok(true)
    }

    /// Takes the addresses of a request. Returns whether both are addresses of devices, and the
    /// destination is at the device of the listener, if the listener is bound to a device.
    pub(crate) fn arrive(&mut self, settings: &Settings, message: &Message) -> bool {
        let (Some(local), Some(remote)) = (
            address::parse(&message.destination),
            address::parse(&message.source),
        ) else {
            return false;
        };
        let (device, peer) = (
            address::device(settings, local.ip()),
            address::device(settings, remote.ip()),
        );
        let is_of_listener = self.device.is_none() || self.device == device;
        (self.local, self.remote, self.device, self.peer_device) =
            (local, Some(remote), device, peer);
        is_of_listener && device.is_some() && (peer.is_some() || self.is_far)
    }

    /// Decodes a message of the peer: on the same host, or by the gate.
    pub(crate) fn parse(&mut self, settings: &Settings, bytes: &[u8]) -> Option<(Kind, Message)> {
        let Some(Parcel { peer, mad }) = Parcel::parse(bytes) else {
            return Message::parse(bytes);
        };
        let Link::Ethernet(Some(own)) = settings.link else {
            return None;
        };
        self.is_far = true;
        far::decode(&mad, peer, own.address)
    }

    /// Encodes a message for the peer, and sends it if there is a socket.
    fn send(&self, kind: Kind, message: &Message) {
        match (&self.socket, self.remote) {
            (Some(socket), Some(remote)) if self.is_far => {
                let service = far::service(
                    self.space,
                    if self.is_active { remote } else { self.local }.port(),
                );
                let is_datagram = self.machine.is_datagram;
                let mad = far::encode(kind, is_datagram, service, message, self.ack_timeout);
                let peer = remote.ip();
                service::send(socket, &Parcel { peer, mad }.emit());
            }
            (Some(socket), _) => service::send(socket, message.as_bytes()),
            (None, _) => {}
        }
    }

    /// Stores the peer's parameters, which a message has brought.
    pub(crate) fn learn(&mut self, message: &Message) {
        (self.peer, self.peer_psn, self.peer_mtu) = (message.param, message.psn, message.mtu);
    }

    /// Carries out a step, and sends the step's message to the peer. If a request reaches no
    /// listener, returns the event of its rejection.
    ///
    /// # Errors
    /// `EINVAL`: the state does not allow the step, or the private data is too long. [`LATER`]: the
    /// service does not listen yet.
    pub(crate) fn say(
        &mut self,
        settings: &Settings,
        step: Step,
        param: &ConnParam,
        reason: i32,
    ) -> Result<Option<(Event, i32)>, Errno> {
        let before = self.machine.state;
        let Some(kind) = self.machine.take(step)? else {
            return Ok(None);
        };
        let is_datagram = self.machine.is_datagram;
        let mut message =
            Message::new(kind, is_datagram, param).inspect_err(|_| self.machine.state = before)?;
        (message.psn, message.mtu) = (self.psn, self.path_mtu(settings));
        message.reason = reason;
        if is_datagram && message.param.qkey == 0 {
            message.param.qkey = DATAGRAM_QKEY;
        }
        if matches!(kind, Kind::Request | Kind::Reply) {
            self.own = message.param;
        }
        if let (Kind::Request, Some(remote)) = (kind, self.remote) {
            (message.source, message.destination) =
                (address::bytes(self.local), address::bytes(remote));
            self.is_active = true;
            let reached = if self.is_far {
                service::connect_gate(self.local.ip())
            } else {
                service::connect(&settings.fabric, self.space, remote)
            };
            match reached {
                Ok(socket) => self.socket = Some(socket),
                Err(errno) if self.is_far => {
                    let why = "no process has the connection messages of this address, as UDP port 4791 belongs to another program or user";
                    log::error(
                        settings,
                        format_args!("rdma_cm connect to {remote}: {why}: {errno}"),
                    );
                    return Ok(self.machine.hear(Heard::Silence));
                }
                Err(Errno(libc::ENOENT | libc::ECONNREFUSED)) if self.waits_for(remote.port()) => {
                    self.machine.state = before;
                    return Err(LATER);
                }
                Err(errno) => {
                    log::refused(
                        settings,
                        format_args!(
                            "rdma_cm connect: no service takes it at port {} of port space {:#x}: {errno}",
                            remote.port(),
                            self.space
                        ),
                    );
                    return Ok(self
                        .machine
                        .hear(Heard::Message(Kind::Reject, reason::of(errno, is_datagram))));
                }
            }
        }
        self.send(kind, &message);
        Ok(None)
    }

    /// Returns whether to wait until a service listens at the port. The first call begins the wait.
    fn waits_for(&mut self, port: u16) -> bool {
        let now = Instant::now();
        let patience = || {
            now + if service::was_reached(port) {
                PATIENCE
            } else {
                Duration::ZERO
            }
        };
        now < *self.listens_until.get_or_insert_with(patience)
    }

    /// Returns the parameters that the event of a message has: the peer's, as this end sees them.
    /// The responder resources of one end are the initiator depth of the other end.
    pub(crate) fn param(&self, settings: &Settings, kind: Kind) -> [u8; size_of::<UdParam>()] {
        let peer = self.peer;
        let private_data_len = private_bytes(kind, self.machine.is_datagram) as u8;
        let mut bytes = [0; size_of::<UdParam>()];
        if self.machine.is_datagram {
            let mut param = UdParam {
                qp_num: peer.qp_num,
                qkey: peer.qkey,
                private_data: peer.private_data,
                private_data_len,
                ..UdParam::new_zeroed()
            };
            if kind == Kind::Reply {
                param.ah_attr = self.path(settings);
            }
            bytes.copy_from_slice(param.as_bytes());
        } else if private_data_len > 0 {
            let param = ConnParam {
                private_data_len,
                responder_resources: peer.initiator_depth,
                initiator_depth: peer.responder_resources,
                valid: 0,
                ..peer
            };
            bytes[..size_of::<ConnParam>()].copy_from_slice(param.as_bytes());
        }
        bytes
    }

    /// Returns the index in a port's GID table of the entry that rdma_cm uses: the last entry that
    /// is not of RoCE version 1.
    fn gid_index(settings: &Settings, device: Option<usize>) -> Option<usize> {
        let port = settings.network.get(device?)?;
        port.gids
            .iter()
            .rposition(|gid| gid.kind != GidKind::RoceV1)
    }

    /// Returns the GIDs of both ends of a path.
    fn gids(&self, settings: &Settings) -> [Option<[u8; 16]>; 2] {
        let gid = |device: Option<usize>| {
            let index = Self::gid_index(settings, device)?;
            Some(settings.network[device?].gids[index].bytes)
        };
        let far = self.remote.filter(|_| self.is_far);
        [
            gid(self.device),
            far.map(|remote| gid_of(remote.ip()))
                .or_else(|| gid(self.peer_device)),
        ]
    }

    fn lid(settings: &Settings, device: Option<usize>) -> u16 {
        device
            .and_then(|device| settings.network.get(device))
            .map_or(0, |port| port.lid)
    }

    fn path(&self, settings: &Settings) -> AhAttr {
        let mut path = AhAttr {
            dlid: Self::lid(settings, self.peer_device),
            port_num: 1,
            ..AhAttr::new_zeroed()
        };
        let index = Self::gid_index(settings, self.device);
        if let (Link::Ethernet(_), [_, Some(dgid)], Some(index)) =
            (settings.link, self.gids(settings), index)
        {
            path.grh = GlobalRoute {
                dgid,
                sgid_index: index as u8,
                hop_limit: HOPS,
                ..GlobalRoute::new_zeroed()
            };
            path.is_global = 1;
        }
        path
    }

    /// Returns N of the longest packet that both ends can send and receive, 128 B * 2^N.
    fn path_mtu(&self, settings: &Settings) -> u32 {
        let own = match settings.link {
            Link::Ethernet(Some(port)) => port.rdma_mtu().ok(),
            _ => None,
        };
        own.map_or(LONGEST_PACKET, |bytes| bytes.ilog2() - 7)
            .min(self.peer_mtu)
    }

    /// Returns the response to `QUERY_ROUTE`: the addresses and, if the id has a device, the path.
    /// Without a device the GUID is 0.
    pub(crate) fn route(&self, settings: &Settings) -> QueryRouteResp {
        let mut route = QueryRouteResp {
            src_addr: address::bytes(self.local),
            ibdev_index: u32::MAX,
            ..QueryRouteResp::new_zeroed()
        };
        if let Some(remote) = self.remote {
            route.dst_addr = address::bytes(remote);
        }
        let Some(device) = self.device else {
            return route;
        };
        let [sgid, dgid] = self.gids(settings).map(Option::unwrap_or_default);
        (route.node_guid, route.port_num) = (guid(device), 1);
        route.num_paths = u32::from(!matches!(
            self.machine.state,
            State::New | State::Bound | State::Listening | State::AddressResolved
        ));
        route.ib_route[0] = PathRec {
            dgid,
            sgid,
            dlid: Self::lid(settings, self.peer_device).to_be_bytes(),
            slid: Self::lid(settings, self.device).to_be_bytes(),
            reversible: 1 << 24,
            mtu: self.path_mtu(settings),
            pkey: [0xff; 2],
            hop_limit: if settings.link == Link::InfiniBand {
                0
            } else {
                HOPS
            },
            numb_path: 1,
            mtu_selector: 2,
            packet_life_time: ACK_TIMEOUT - 2,
            ..PathRec::new_zeroed()
        };
        route
    }

    /// Returns the attributes for the transition of a queue pair to a state (`ib_cm_init_qp_attr`).
    ///
    /// # Errors
    /// `EINVAL`: the id has no device yet, or no peer, or the transition does not exist.
    pub(crate) fn attributes(&self, settings: &Settings, to: u32) -> Result<QpAttr, Errno> {
        const INVALID: Errno = Errno(libc::EINVAL);
        let state = u8::try_from(to).ok().and_then(QpState::from_repr);
        let state = state.ok_or(INVALID)?;
        self.device.ok_or(INVALID)?;
        let mut at = QpAttr {
            qp_state: to,
            port_num: 1,
            ..QpAttr::new_zeroed()
        };
        if self.machine.is_datagram {
            at.qkey = if self.own.qkey == 0 {
                DATAGRAM_QKEY
            } else {
                self.own.qkey
            };
            at.qp_attr_mask = needed(Service::Datagram, QpState::Init).unwrap_or(0);
            return Ok(at);
        }
        let service = service(self.qp_type).ok_or(INVALID)?;
        at.qp_attr_mask = needed(service, state).ok_or(INVALID)?;
        let has_peer = self.peer.qp_num != 0;
        // The last message with parameters determines the resources of both ends. For the active
        // end this is the peer's reply, once it has arrived; for the passive end, the peer's
        // request until this end sends the reply.
        let is_of_peer = has_peer && (self.is_active || self.machine.state == State::Requested);
        let (responder, initiator) = match is_of_peer {
            true => (self.peer.initiator_depth, self.peer.responder_resources),
            false => (self.own.responder_resources, self.own.initiator_depth),
        };
        match state {
            QpState::Init => {
                if has_peer || self.is_active {
                    let mut access = Access::REMOTE_WRITE;
                    if responder > 0 {
                        access |= Access::REMOTE_READ;
                        access.set(Access::REMOTE_ATOMIC, !settings.has(Fault::NoAtomics));
                    }
                    at.qp_access_flags = access.bits();
                }
            }
            QpState::ReadyToReceive if has_peer => {
                (at.ah_attr, at.path_mtu) = (self.path(settings), self.path_mtu(settings));
                (at.dest_qp_num, at.rq_psn, at.max_dest_rd_atomic) =
                    (self.peer.qp_num, self.psn, responder);
            }
            QpState::ReadyToSend if has_peer => {
                (at.sq_psn, at.timeout, at.max_rd_atomic) =
                    (self.peer_psn, self.ack_timeout, initiator);
                at.retry_cnt = if self.is_active {
                    self.own.retry_count
                } else {
                    self.peer.retry_count
                };
                at.rnr_retry = self.peer.rnr_retry_count;
            }
            _ => return Err(INVALID),
        }
        Ok(at)
    }
}
