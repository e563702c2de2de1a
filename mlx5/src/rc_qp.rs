//! Reliable-connected queue pairs.

use crate::address::QpAddress;
use crate::config::QpState;
use crate::error::{ConnectError, check_options};
use crate::ops::{PostError, RcOperation};
use crate::parts::ConnectParts;
use crate::qp::{Connected, Qp};
use crate::sq::Flags;
use crate::wire::ConnectOptions;

/// A reliable-connected queue pair.
pub type RcQp = Qp<Connected>;

impl RcQp {
    /// RESET to INIT: receives may be posted.
    ///
    /// # Errors
    /// The state is not RESET; or the device refuses, which the software HCA does not.
    pub fn initialize(&mut self) -> Result<(), ConnectError> {
        self.transition(QpState::Reset, QpState::Init)?;
        self.control().initialize(self.qpn()).inspect_err(|_| self.set_state(QpState::Reset))
    }

    /// INIT to RTR, towards `remote`: messages of that queue pair are received from now on.
    ///
    /// # Errors
    /// See [`ConnectError`]; the state is unchanged.
    pub fn ready_to_receive(&mut self, remote: &QpAddress, options: &ConnectOptions) -> Result<(), ConnectError> {
        check_options(options)?;
        self.transition(QpState::Init, QpState::ReadyToReceive)?;
        let parts = ConnectParts { qpn: self.qpn(), remote: *remote, options: *options };
        self.control().connect(&parts).inspect_err(|_| self.set_state(QpState::Init))
    }

    /// RTR to RTS: operations may be posted.
    ///
    /// # Errors
    /// The state is not RTR; or the device refuses, which the software HCA does not.
    pub fn ready_to_send(&mut self) -> Result<(), ConnectError> {
        self.transition(QpState::ReadyToReceive, QpState::ReadyToSend)?;
        self.control().ready_to_send(self.qpn()).inspect_err(|_| self.set_state(QpState::ReadyToReceive))
    }

    /// RESET to INIT to RTR to RTS, towards `remote`, from wherever on that way the queue pair is. Both ends do this; operations posted before
    /// the peer has done it are retried for the transport timeout.
    ///
    /// # Errors
    /// See [`ConnectError`]; the state is that of the last step that succeeded.
    pub fn connect(&mut self, remote: &QpAddress, options: &ConnectOptions) -> Result<(), ConnectError> {
        check_options(options)?;
        if self.state() != QpState::Init {
            self.initialize()?;
        }
        self.ready_to_receive(remote, options)?;
        self.ready_to_send()
    }

    /// Puts an operation into the send queue. `user` comes back from [`complete`](Self::complete) if the operation gives a CQE.
    ///
    /// # Errors
    /// See [`PostError`]; nothing was written.
    #[inline(always)]
    pub fn post<O: RcOperation>(&mut self, op: &O, flags: impl Into<Flags>, user: u64) -> Result<(), PostError> {
        self.push(op, flags, user)
    }
}
