//! The way to a server, which a client takes again whenever its connection has ended.

use std::fmt;
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use crate::names::{Addresses, name_of};
use crate::reach::{Meeting, reach};
use crate::secret::Secret;
use crate::setup::SetupError;

/// The way to a server, which a client takes again whenever its connection has ended.
#[derive(Debug)]
pub struct Route {
    /// The address as given.
    name: String,
    addresses: Addresses,
    secret: Option<Secret>,
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
            }),
            Err(source) => Err(SetupError::Unreachable {
                address: name,
                source,
            }),
        }
    }

    /// Connects to the first of the addresses at which a server listens: proves the secret, and
    /// lets `meet` exchange records. Returns the stream too, for later [checks](crate::has_hung_up)
    /// whether it has ended; the stream does not block.
    ///
    /// Tries again for `patience`, while `is_wanted` returns true, if no server listens, or if
    /// `meet` failed and the next attempt may succeed, for example because the server was closing
    /// or full. An attempt at one of several addresses takes its share of the time that is left.
    ///
    /// # Errors
    /// The error of the last attempt, or of the previous attempt if the end of the time cut the
    /// last attempt short.
    pub fn connect<T>(
        &self,
        patience: Duration,
        is_wanted: impl FnMut() -> bool,
        mut meet: impl FnMut(&mut Meeting<'_>) -> Result<T, SetupError>,
    ) -> Result<(T, TcpStream), SetupError> {
        let meet = |mut meeting: Meeting<'_>| {
            if let Some(secret) = &self.secret {
                secret.prove::<SetupError>(&mut meeting)?;
            }
            let met = meet(&mut meeting)?;
            Ok((met, meeting.into_lifeline()?))
        };
        let unreachable = |source| SetupError::Unreachable {
            address: self.name.clone(),
            source,
        };
        reach(
            &self.addresses,
            patience,
            is_wanted,
            meet,
            SetupError::may_come,
            unreachable,
        )
    }

    /// Connects like [`connect`](Self::connect), after it has resolved the name again: the server
    /// may have moved.
    ///
    /// # Errors
    /// Like [`connect`](Self::connect).
    pub fn connect_again<T>(
        &mut self,
        patience: Duration,
        mut is_wanted: impl FnMut() -> bool,
        meet: impl FnMut(&mut Meeting<'_>) -> Result<T, SetupError>,
    ) -> Result<(T, TcpStream), SetupError> {
        let start = Instant::now();
        self.addresses
            .refresh(&self.name, patience / 2, &mut is_wanted);
        let left = patience.saturating_sub(start.elapsed());
        self.connect(left, is_wanted, meet)
    }
}
