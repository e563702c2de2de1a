//! Reliable-connected queue pairs.

use crate::address::QpAddress;
use crate::config::QpState;
use crate::error::{ConnectError, check_options};
use crate::queues::qp::{Connected, Qp};
use crate::wire::ConnectOptions;

/// A reliable-connected queue pair.
#[doc(alias("RcQpForMonoCqWithSrqAndSqCb", "OrderedWqeTable"))]
pub type RcQp = Qp<Connected>;

impl RcQp {
    /// Moves the queue pair from RESET to INIT: receives may be posted.
    ///
    /// # Errors
    /// Fails if the state is not RESET, or if the device refuses; the software HCA never refuses.
    pub fn initialize(&mut self) -> Result<(), ConnectError> {
        self.transition(QpState::Reset, QpState::Init, |control, qpn| {
            control.initialize(qpn)
        })
    }

    /// Moves the queue pair from INIT to RTR, connected to `remote`: messages of that queue pair
    /// are received from now on.
    ///
    /// # Errors
    /// See [`ConnectError`]; the state is unchanged.
    pub fn ready_to_receive(
        &mut self,
        remote: &QpAddress,
        options: &ConnectOptions,
    ) -> Result<(), ConnectError> {
        check_options(options)?;
        self.transition(QpState::Init, QpState::ReadyToReceive, |control, qpn| {
            control.check_kind(remote)?;
            control.connect(qpn, remote, options)
        })
    }

    /// Moves the queue pair from RTR to RTS: operations may be posted.
    ///
    /// # Errors
    /// Fails if the state is not RTR, or if the device refuses; the software HCA never refuses.
    pub fn ready_to_send(&mut self) -> Result<(), ConnectError> {
        let (from, to) = (QpState::ReadyToReceive, QpState::ReadyToSend);
        self.transition(from, to, |control, qpn| control.ready_to_send(qpn))
    }

    /// Connects the queue pair to `remote`: performs the transitions RESET to INIT to RTR to RTS
    /// that are still missing. Both ends must connect; operations posted before the peer has
    /// connected are retried for the transport timeout. A queue pair in the error state is not
    /// connected again: create a new queue pair.
    ///
    /// # Errors
    /// See [`ConnectError`]; the queue pair stays in the state after the last transition that
    /// succeeded.
    pub fn connect(
        &mut self,
        remote: &QpAddress,
        options: &ConnectOptions,
    ) -> Result<(), ConnectError> {
        check_options(options)?;
        if self.state() != QpState::Init {
            self.initialize()?;
        }
        self.ready_to_receive(remote, options)?;
        self.ready_to_send()
    }
}
