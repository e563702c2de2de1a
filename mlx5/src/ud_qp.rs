//! Unreliable-datagram queue pairs.

use crate::address::QpAddress;
use crate::config::QpState;
use crate::error::ConnectError;
use crate::ops::{Destination, PostError, UdOperation};
use crate::qp::{Datagram, Qp};
use crate::sq::Flags;
use crate::wire::AddressVector;

/// An unreliable-datagram queue pair: it sends to any other, a message of at most [`MAX_DATAGRAM_BYTES`](crate::MAX_DATAGRAM_BYTES), and receives from any that knows its
/// Q_Key. A datagram that finds no receive, a wrong Q_Key or no queue pair is lost without a word; one longer than the receive's buffers is a
/// local length error, and ends the queue pair. A completion of a send says that the datagram has left, and no more.
pub type UdQp = Qp<Datagram>;

impl UdQp {
    /// RESET to RTS: receives what brings `qkey`, and may send.
    ///
    /// # Errors
    /// The state is not RESET; or the device refuses, which the software HCA does not.
    pub fn activate(&mut self, qkey: u32) -> Result<(), ConnectError> {
        self.transition(QpState::Reset, QpState::ReadyToSend)?;
        self.transport.qkey = qkey;
        self.control().activate_datagrams(self.qpn(), qkey).inspect_err(|_| self.set_state(QpState::Reset))
    }

    /// Where others reach this queue pair by its LID, without a GRH: on the software HCA, and in the same InfiniBand subnet. Its Q_Key is that
    /// given to [`activate`](Self::activate). On RoCE there are no LIDs; [`destination_of`](Self::destination_of) is for any device.
    #[must_use]
    pub fn destination(&self) -> Destination {
        Destination::new(AddressVector::local(self.address().lid, 0), self.qpn(), self.transport.qkey)
    }

    /// How this queue pair reaches another, which gave its [`address`](crate::Qp::address) and Q_Key.
    ///
    /// # Errors
    /// The other is of another kind of device; or its port is not reachable, which libibverbs finds out on RoCE.
    pub fn destination_of(&self, other: &QpAddress, qkey: u32) -> Result<Destination, ConnectError> {
        let vector = self.control().address_vector(self.pdn(), other)?;
        Ok(Destination::new(vector, other.qpn, qkey))
    }

    /// Puts an operation into the send queue. `user` comes back from [`complete`](Self::complete) if the operation gives a CQE.
    ///
    /// # Errors
    /// See [`PostError`]; nothing was written.
    #[inline(always)]
    pub fn post<O: UdOperation>(&mut self, op: &O, flags: impl Into<Flags>, user: u64) -> Result<(), PostError> {
        self.push(op, flags, user)
    }
}
