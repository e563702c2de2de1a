//! Unreliable-datagram queue pairs.

use crate::address::QpAddress;
use crate::config::QpState;
use crate::error::ConnectError;
use crate::ops::Destination;
use crate::queues::qp::{Datagram, Qp};
use crate::wire::AddressVector;

/// An unreliable-datagram queue pair. It sends messages of at most
/// [`MAX_DATAGRAM_BYTES`](crate::MAX_DATAGRAM_BYTES) to any other datagram queue pair, and receives
/// messages that carry its Q_Key. A datagram is lost silently if its Q_Key is wrong, if the
/// destination has no receive posted, or if the destination does not exist. A datagram longer than
/// the receive's buffers is a local length error of the receiver, and fails the receiving queue
/// pair. The completion of a send only proves that the datagram was sent.
pub type UdQp = Qp<Datagram>;

impl UdQp {
    /// Moves the queue pair from RESET to RTS: it receives messages that carry `qkey`, and may
    /// send.
    ///
    /// # Errors
    /// Fails if the state is not RESET, or if the device refuses; the software HCA never refuses.
    pub fn activate(&mut self, qkey: u32) -> Result<(), ConnectError> {
        self.transition(QpState::Reset, QpState::ReadyToSend, |control, qpn| {
            control.activate_datagrams(qpn, qkey)
        })?;
        self.transport.qkey = qkey;
        Ok(())
    }

    /// Returns the destination by which other queue pairs reach this queue pair through its LID,
    /// without a GRH: on the software HCA, and in the same InfiniBand subnet. The destination has
    /// the Q_Key that was passed to [`activate`](Self::activate). RoCE has no LIDs;
    /// [`destination_of`](Self::destination_of) works on any device.
    #[must_use]
    pub fn destination(&self) -> Destination {
        Destination::new(
            AddressVector::local(self.address().lid, 0),
            self.qpn(),
            self.transport.qkey,
        )
    }

    /// Returns the destination by which this queue pair reaches the datagram queue pair with the
    /// [`address`](crate::Qp::address) `other` and the Q_Key `qkey`.
    ///
    /// # Errors
    /// The two devices are of different kinds, or the port of `other` is not reachable, which
    /// libibverbs detects on RoCE.
    pub fn destination_of(
        &self,
        other: &QpAddress,
        qkey: u32,
    ) -> Result<Destination, ConnectError> {
        self.control().check_kind(other)?;
        let vector = self.control().address_vector(self.pdn(), other)?;
        Ok(Destination::new(vector, other.qpn, qkey))
    }
}
