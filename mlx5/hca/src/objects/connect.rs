//! Connections of queue pairs, through shared memory or by packets, whichever both ends have.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use mlx5_wire::roce::{Psn, UDP_PORT};
use mlx5_wire::{Access, AddressVector, ConnectOptions};

use crate::error::ConnectError;
use crate::packets::connection::Connection;
use crate::packets::interface::gid_of;
use crate::packets::source::flow_label;
use crate::packets::udp::Receiver;
use crate::queues::qp::{Mode, Transport, by_number};
use crate::shared::layout::{QpEntry, qp_index};
use crate::shared::remote::Remote;
use crate::types::request::{Address, PacketAddress, Way};
use crate::types::terms::{self, Difference, Terms};
use crate::{Hca, State};

/// Hop limit of datagrams that are sent as packets.
const HOPS: u8 = 64;

impl Hca {
    /// Returns the address of the device's port for packets, and its RDMA MTU in bytes. `None` if
    /// the device has no such port.
    #[must_use]
    pub fn wire_address(&self) -> Option<(SocketAddr, u16)> {
        let state = self.state.borrow();
        let port = state.wire.port.as_ref()?;
        Some((port.own(), port.mtu))
    }

    /// Returns the address at which peers reach a queue pair.
    #[must_use]
    pub fn address(&self, qpn: u32) -> Address {
        let state = self.state.borrow();
        let qp = state.queues.qps.get(qp_index(qpn)).and_then(Option::as_ref);
        let generation = qp.map_or(0, |qp| qp.generation);
        let packets = state.wire.port.as_ref().map(|port| PacketAddress {
            ip: port.own().ip(),
            port: Some(port.own().port()),
            psn: port.first_psn(qpn, generation).get(),
            mtu: port.mtu,
            traffic_class: 0,
        });
        let shares_memory = self.membership.shares_memory();
        Address {
            lid: if shares_memory { self.lid() } else { 0 },
            qpn,
            epoch: Some(self.membership.epoch),
            packets,
        }
    }

    pub(crate) fn way_to(&self, remote: &Address) -> Way {
        self.membership
            .way_to(remote.lid, remote.epoch, remote.packets.is_some())
    }

    /// Returns the path of datagrams to the device of an address.
    #[must_use]
    pub fn address_vector(&self, remote: &Address) -> AddressVector {
        let state = self.state.borrow();
        let (Way::Packets, Some(port), Some(packets)) =
            (self.way_to(remote), &state.wire.port, &remote.packets)
        else {
            return AddressVector::local(remote.lid, 0);
        };
        AddressVector {
            rmac: port.mac_of(remote.qpn, packets),
            ..AddressVector::local(0, 0).with_grh(0, 0, HOPS, 0, gid_of(packets.ip))
        }
    }

    /// Moves a queue pair from INIT to RTR, and grants `access` to the peer. Maps the memory of the
    /// peer's device, or prepares to exchange packets with it, from the PSN of
    /// [`address`](Self::address) on. The driver must not post sends before RTS.
    ///
    /// # Errors
    /// See [`ConnectError`]. If `remote` has an `epoch`, or the error is
    /// [`ConnectError::NoAccess`], nothing has changed. After any other error the queue pair, if it
    /// exists, is connected to a peer that never answers.
    pub fn connect(
        &self,
        qpn: u32,
        remote: &Address,
        options: &ConnectOptions,
        access: Access,
    ) -> Result<(), ConnectError> {
        let way = self.way_to(remote);
        let state = &mut *self.state.borrow_mut();
        let transport = match (way, &remote.packets) {
            (Way::Packets, Some(to)) => self.by_packets(state, (qpn, remote.qpn), to, options),
            (Way::Nowhere, Some(to)) => Err(ConnectError::NoWire { to: to.ip }),
            _ => self.by_memory(state, qpn, remote),
        };
        let qp = by_number(&mut state.queues.qps, qpn).ok_or(ConnectError::NoSuchQp {
            lid: self.lid(),
            qpn,
        })?;
        let transport = match transport {
            Ok(transport) => transport,
            Err(error) => {
                if remote.epoch.is_none() && !matches!(error, ConnectError::NoAccess { .. }) {
                    qp.transport = Transport::NoPeer;
                }
                state.links.forget_unused();
                return Err(error);
            }
        };
        (qp.options, qp.access, qp.transport) = (*options, access, transport);
        qp.version = qp.version.wrapping_add(1);
        // H1 of `shared::layout`: stored after the entry's other fields.
        qp.entry()
            .identity
            .store(qp.connected_identity(), Ordering::Release);
        Ok(())
    }

    /// Maps the peer's device. Stores the peer's QPN and generation, and the epoch of its device,
    /// in the entry of `qpn`.
    fn by_memory(
        &self,
        state: &mut State,
        qpn: u32,
        remote: &Address,
    ) -> Result<Transport, ConnectError> {
        let State { queues, links, .. } = state;
        let peer = links.peer(&self.membership, remote.lid, remote.epoch)?;
        let connection = by_number(&mut queues.qps, qpn).and_then(|qp| {
            let own = QpEntry::pack_peer(qpn, qp.generation);
            let mut connection = Remote::of(&peer, remote.qpn, own, self.membership.epoch)?;
            connection.terms = qp.terms;
            let entry = qp.entry();
            let number = QpEntry::pack_peer(remote.qpn, connection.generation);
            entry.peer.store(number, Ordering::Relaxed);
            entry.peer_epoch.store(peer.epoch, Ordering::Relaxed);
            Some(connection)
        });
        let (lid, qpn) = (remote.lid, remote.qpn);
        let connection = connection.ok_or(ConnectError::NoSuchQp { lid, qpn })?;
        Ok(Transport::Connected(Box::new(connection)))
    }

    fn by_packets(
        &self,
        state: &mut State,
        (own, peer): (u32, u32),
        remote: &PacketAddress,
        options: &ConnectOptions,
    ) -> Result<Transport, ConnectError> {
        let State { queues, wire, .. } = state;
        let (Some(port), Some(qp)) = (&mut wire.port, by_number(&mut queues.qps, own)) else {
            return Err(ConnectError::NoWire { to: remote.ip });
        };
        let to = port.socket_of(peer, remote);
        let own_port = port.own().port();
        // Devices of other makers send only to UDP port 4791, so this device needs that port.
        if remote.port.is_none() && self.port.is_none() && own_port != UDP_PORT {
            return Err(ConnectError::NotTheRocePort { to, own: own_port });
        }
        let mtu = remote.mtu.min(port.mtu);
        if let Some((path, fits)) = port.path_mtu(&to).filter(|(_, fits)| *fits < mtu) {
            return Err(ConnectError::PathMtu {
                to,
                mtu,
                path,
                fits,
            });
        }
        port.forget_gone(own);
        qp.mode = qp.mode.max(Mode::Ordinary);
        let flow_label = flow_label(own, peer);
        let receiver = Receiver {
            socket: to,
            class: remote.traffic_class,
            source: port.source_of(flow_label),
        };
        let connection = Connection::new(
            (peer, receiver, flow_label),
            PacketAddress { mtu, ..*remote },
            port.first_psn(own, qp.generation),
            options,
            qp.is_unreliable,
        );
        wire.insert(qp.index, connection);
        Ok(Transport::Wire)
    }

    /// Sets the terms of a connected queue pair, in INIT and in RTR. The peer's driver has to set
    /// the terms of the other end: then messages in which the two ends do not agree fail as on a
    /// NIC, and [`take_difference`](Self::take_difference) returns the reason. Connections by
    /// packets find the differences by themselves.
    pub fn set_terms(&self, qpn: u32, terms: Terms) {
        self.with_qp(qpn, |qp| {
            qp.terms = Some(terms);
            qp.mode = qp.mode.max(Mode::Ordinary);
            let word = terms::pack(terms.expected());
            qp.entry().terms.store(word, Ordering::Relaxed);
            if let Transport::Connected(remote) = &mut qp.transport {
                remote.terms = Some(terms);
            }
        });
    }

    /// Returns the oldest difference between two queue pairs that was not returned yet.
    #[must_use]
    pub fn take_difference(&self) -> Option<Difference> {
        self.differences.borrow_mut().pop_front()
    }

    /// Moves a queue pair whose peer is reached by packets from RTR to RTS: it sends with these
    /// options, from this PSN on, and has at most `rd_atomic` unanswered READs and atomics. Does
    /// nothing to other queue pairs.
    pub fn start_packets(&self, qpn: u32, options: &ConnectOptions, psn: u32, rd_atomic: u8) {
        let State { queues, wire, .. } = &mut *self.state.borrow_mut();
        let parts = wire.parts(&mut queues.qps, qp_index(qpn));
        if let Some((_, connection, _)) = parts.filter(|(qp, ..)| qp.qpn == qpn) {
            connection.restart(options, Psn::new(psn), rd_atomic);
        }
    }
}
