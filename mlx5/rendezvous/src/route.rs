//! The connection of a client to its server, which is made again whenever it has ended.

use std::fmt;
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use crate::names::{Addresses, name_of};
use crate::reach::{LIFELINE_INTERVAL, Meeting, has_hung_up, reach};
use crate::secret::Secret;
use crate::setup::SetupError;

/// Connects a client to its server, and again whenever the connection has ended. Holds the address,
/// the secret and the socket of the server.
#[derive(Debug)]
pub struct Route {
    /// The address as given.
    name: String,
    addresses: Addresses,
    secret: Option<Secret>,
    /// The socket over which the client last connected, which does not block.
    lifeline: Option<TcpStream>,
    /// Time of the last call of [`has_paused`](Self::has_paused), in ns.
    checked_ns: u64,
}

impl Route {
    /// Resolves the address of a server. `secret` is the server's secret, if it has one.
    ///
    /// # Errors
    /// [`SetupError::Unreachable`].
    pub fn to(
        address: impl ToSocketAddrs + fmt::Debug,
        secret: Option<Secret>,
    ) -> Result<Self, SetupError> {
        let name = name_of(&address);
        match Addresses::of(address) {
            Ok(addresses) => Ok(Self {
                name,
                addresses,
                secret,
                lifeline: None,
                checked_ns: 0,
            }),
            Err(source) => Err(SetupError::Unreachable {
                address: name,
                source,
            }),
        }
    }

    /// Connects to the first of the addresses at which a server listens: proves the secret, and
    /// lets `meet` exchange records. The client keeps the socket until the next connection: the end
    /// of the socket is a sign for each end that the other may have died.
    ///
    /// Tries again for `patience`, while `is_wanted` returns true, if no server listens, or if
    /// `meet` failed and the next attempt may succeed, for example because the server was closing
    /// or full. An attempt at one of several addresses takes its share of the time that is left.
    ///
    /// # Errors
    /// The error of the last attempt, or of the previous attempt if the end of the time cut the
    /// last attempt short.
    pub fn connect<T>(
        &mut self,
        patience: Duration,
        is_wanted: impl FnMut() -> bool,
        mut meet: impl FnMut(&mut Meeting<'_>) -> Result<T, SetupError>,
    ) -> Result<T, SetupError> {
        let meet = |mut meeting: Meeting<'_>| {
            if let Some(secret) = &self.secret {
                secret.prove(&mut meeting)?;
            }
            let met = meet(&mut meeting)?;
            Ok((met, meeting.into_lifeline()?))
        };
        let unreachable = |source| SetupError::Unreachable {
            address: self.name.clone(),
            source,
        };
        let (met, lifeline) = reach(
            &self.addresses,
            patience,
            is_wanted,
            meet,
            SetupError::may_come,
            unreachable,
        )?;
        self.lifeline = Some(lifeline);
        Ok(met)
    }

    /// Connects like [`connect`](Self::connect), after it has resolved the name again: the server
    /// may have moved. Returns the previous socket too. The caller must close this socket only
    /// after it has ended the previous connection, so that a server that sees the end of the socket
    /// finds that the connection has ended.
    ///
    /// # Errors
    /// Like [`connect`](Self::connect).
    pub fn connect_again<T>(
        &mut self,
        patience: Duration,
        mut is_wanted: impl FnMut() -> bool,
        meet: impl FnMut(&mut Meeting<'_>) -> Result<T, SetupError>,
    ) -> Result<(T, Option<TcpStream>), SetupError> {
        let start = Instant::now();
        self.addresses
            .refresh(&self.name, patience / 2, &mut is_wanted);
        let left = patience.saturating_sub(start.elapsed());
        let before = self.lifeline.take();
        match self.connect(left, is_wanted, meet) {
            Ok(met) => Ok((met, before)),
            Err(error) => {
                self.lifeline = before;
                Err(error)
            }
        }
    }

    /// Returns whether the server's end of the socket is closed. The system closes it when the
    /// process of the server dies.
    #[must_use]
    pub fn has_hung_up(&self) -> bool {
        self.lifeline.as_ref().is_some_and(has_hung_up)
    }

    /// Returns whether no call of this function was made for [`LIFELINE_INTERVAL`]: the server may
    /// have died meanwhile. `now_ns` is the time of any monotonic clock.
    #[inline(always)]
    pub fn has_paused(&mut self, now_ns: u64) -> bool {
        let pause_ns = now_ns.wrapping_sub(std::mem::replace(&mut self.checked_ns, now_ns));
        pause_ns >= LIFELINE_INTERVAL.as_nanos() as u64
    }
}
