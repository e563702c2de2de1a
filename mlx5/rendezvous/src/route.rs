//! The way to a server, which a client takes again whenever its connection has ended.

use std::fmt;
use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::names::{Addresses, name_of};
use crate::reach::{Meeting, reach};
use crate::record::RecordError;
use crate::secret::Secret;

/// The reason why no server was reached: the address is invalid, or no server listens there.
#[derive(Debug, Error)]
#[error("connecting to the server at {address}: {source}")]
pub struct Unreachable {
    /// The address.
    pub address: String,
    /// The socket's error.
    pub source: io::Error,
}

impl Unreachable {
    /// Returns a copy of the error.
    #[must_use]
    pub fn again(&self) -> Self {
        Self {
            address: self.address.clone(),
            source: io::Error::new(self.source.kind(), self.source.to_string()),
        }
    }
}

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
    /// [`Unreachable`].
    pub fn to(
        address: impl ToSocketAddrs + fmt::Debug,
        secret: Option<Secret>,
    ) -> Result<Self, Unreachable> {
        let name = name_of(&address);
        match Addresses::of(address) {
            Ok(addresses) => Ok(Self {
                name,
                addresses,
                secret,
            }),
            Err(source) => Err(Unreachable {
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
    /// `may_pass` accepts the error of `meet` because the server was closing. An attempt at one of
    /// several addresses takes its share of the time that is left.
    ///
    /// # Errors
    /// The error of the last attempt, or of the previous attempt if the end of the time cut the
    /// last attempt short.
    pub fn connect<T, E>(
        &self,
        patience: Duration,
        is_wanted: impl FnMut() -> bool,
        mut meet: impl FnMut(&mut Meeting<'_>) -> Result<T, E>,
        may_pass: impl Fn(&E) -> bool,
    ) -> Result<(T, TcpStream), E>
    where
        E: From<Unreachable> + From<io::Error> + From<RecordError>,
    {
        let meet = |mut meeting: Meeting<'_>| {
            if let Some(secret) = &self.secret {
                secret.prove::<E>(&mut meeting)?;
            }
            let met = meet(&mut meeting)?;
            Ok((met, meeting.into_lifeline()?))
        };
        let unreachable = |source| {
            E::from(Unreachable {
                address: self.name.clone(),
                source,
            })
        };
        reach(
            &self.addresses,
            patience,
            is_wanted,
            meet,
            may_pass,
            unreachable,
        )
    }

    /// Connects like [`connect`](Self::connect), after it has resolved the name again: the server
    /// may have moved.
    ///
    /// # Errors
    /// Like [`connect`](Self::connect).
    pub fn connect_again<T, E>(
        &mut self,
        patience: Duration,
        mut is_wanted: impl FnMut() -> bool,
        meet: impl FnMut(&mut Meeting<'_>) -> Result<T, E>,
        may_pass: impl Fn(&E) -> bool,
    ) -> Result<(T, TcpStream), E>
    where
        E: From<Unreachable> + From<io::Error> + From<RecordError>,
    {
        let start = Instant::now();
        self.addresses
            .refresh(&self.name, patience / 2, &mut is_wanted);
        let left = patience.saturating_sub(start.elapsed());
        self.connect(left, is_wanted, meet, may_pass)
    }
}
