//! Connecting queue pairs by packets.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use mlx5_wire::roce::{Psn, UDP_PORT};
use mlx5_wire::{Access, ConnectOptions};

use crate::error::ConnectError;
use crate::packets::Wire;
use crate::packets::connection::{Connection, PacketPath};
use crate::queues::qp::{Mode, Transport, by_number};
use crate::shared::layout::{qp_index, vf_of};
use crate::types::request::Address;
use crate::{Hca, State};

impl Hca {
    /// Returns the address of the device's port for packets, and its RDMA MTU in bytes. `None` if
    /// it has none.
    #[must_use]
    pub fn wire_address(&self) -> Option<(SocketAddr, u16)> {
        let state = self.state.borrow();
        let wire = state.wire.as_ref()?;
        Some((wire.port.own(), wire.port.mtu))
    }

    /// Returns whether devices of the same fabric are reached by packets, too.
    #[must_use]
    pub fn sends_packets_only(&self) -> bool {
        let state = self.state.borrow();
        state.wire.as_ref().is_some_and(|wire| wire.port.is_for_all)
    }

    /// Returns the UDP port of the device with a queue pair, whose address tells none.
    #[must_use]
    pub fn packet_port(&self, qpn: u32) -> u16 {
        let state = self.state.borrow();
        let wire = state.wire.as_ref();
        wire.map_or(UDP_PORT, |wire| wire.port.port_of_number(qpn))
    }

    /// RTR to RTS of a queue pair whose peer is reached by packets: sends with these options from
    /// this PSN on, with so many READs and atomics that are not answered. Does nothing to others.
    pub fn start_packets(&self, qpn: u32, options: &ConnectOptions, psn: u32, rd_atomic: u8) {
        let State { queues, wire, .. } = &mut *self.state.borrow_mut();
        let parts = Wire::parts(wire, &mut queues.qps, qp_index(qpn));
        if let Some((_, connection, _)) = parts.filter(|(qp, ..)| qp.qpn == qpn) {
            connection.restart(options, psn, rd_atomic);
        }
    }

    /// Returns whether the device that gave this address is reached through shared memory. Both
    /// ends find the same.
    #[must_use]
    pub fn shares_memory_with(&self, remote: &Address) -> bool {
        self.membership
            .shares_memory_with(remote.lid, Some(remote.epoch))
    }

    /// Returns whether the virtual function that has a queue pair is reached through shared memory.
    /// Both ends find the same.
    #[must_use]
    pub fn shares_memory_with_number(&self, qpn: u32) -> bool {
        self.membership.shares_memory_with(vf_of(qpn), None)
    }

    /// Returns the first PSN of a queue pair's packets; 0 without a port for them.
    #[must_use]
    pub fn first_psn(&self, qpn: u32) -> u32 {
        let state = self.state.borrow();
        let (Some(wire), Some(Some(qp))) = (&state.wire, state.queues.qps.get(qp_index(qpn)))
        else {
            return 0;
        };
        wire.port.first_psn(qpn, qp.generation).get()
    }

    /// INIT to RTR of a queue pair whose peer is reached by packets, which it sends from
    /// [`first_psn`](Self::first_psn) on.
    ///
    /// # Errors
    /// [`ConnectError::NoWire`], [`ConnectError::NotTheRocePort`]; nothing has changed.
    pub fn connect_by_packets(
        &self,
        qpn: u32,
        path: &PacketPath,
        options: &ConnectOptions,
        access: Access,
    ) -> Result<(), ConnectError> {
        let first = Psn::new(self.first_psn(qpn));
        let State { queues, wire, .. } = &mut *self.state.borrow_mut();
        let Some(wire) = wire.as_deref_mut() else {
            return Err(ConnectError::NoWire { to: path.to });
        };
        let qp = by_number(&mut queues.qps, qpn).ok_or(ConnectError::NoSuchQp {
            lid: self.lid(),
            qpn,
        })?;
        wire.port.forget_gone(qpn);
        (qp.options, qp.access, qp.mode) = (*options, access, qp.mode.max(Mode::Ordinary));
        qp.version = qp.version.wrapping_add(1);
        qp.transport = Transport::Wire;
        let connection = Connection::new(path, first, options, qp.is_unreliable);
        wire.insert(qp.index, connection);
        qp.entry()
            .identity
            .store(qp.connected_identity(), Ordering::Release);
        Ok(())
    }
}
