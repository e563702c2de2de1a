//! The handshake of two endpoints over a byte stream: both send 128 bytes and take 128, then send
//! one byte and take one.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::rc::Weak;

use mlx5_rendezvous::{Incoming, Outgoing, Peer};

use super::record::KIND;
use super::{EXCHANGE_RECORD_SIZE, ExchangeRecord, PendingEndpoint, RecordError, Refusal};
use crate::config::EndpointConfig;
use crate::context::{Context, Inner};
use crate::endpoint::Endpoint;
use crate::error::SetupError;

/// Values of the last byte that an end sends: the end is connected, or it never will be.
const CONNECTED: u8 = 1;
const NOT_CONNECTED: u8 = 0;

pub(crate) struct Handshake<U> {
    context: Weak<Inner<U>>,
    /// `None` at a server whose client has sent no record.
    record: Option<Outgoing<EXCHANGE_RECORD_SIZE>>,
    peers_record: Incoming<EXCHANGE_RECORD_SIZE>,
    /// The endpoint, until the peer's record has arrived.
    pending: Option<PendingEndpoint<U>>,
    /// The connected endpoint, or the reason why it will not be connected; `None` before, and after
    /// it was returned.
    outcome: Option<Result<Endpoint<U>, SetupError>>,
    /// The last byte to send, once the endpoint is connected or has failed to connect. An end that
    /// refuses the peer sends none.
    last: Option<Outgoing<1>>,
    peers_last: Incoming<1>,
    peer: Option<Peer>,
}

impl<U> Handshake<U> {
    pub(crate) fn new(endpoint: PendingEndpoint<U>) -> Self {
        let context = Weak::clone(&endpoint.context);
        let record = endpoint.local_info().encode();
        Self::begin(context, Some(endpoint), None, Some(record))
    }

    /// Begins the handshake of a new endpoint of `context`. If the endpoint cannot be made, the
    /// peer gets a refusal.
    pub(crate) fn of(context: &Context<U>, config: &EndpointConfig) -> Self {
        match context.create_endpoint(config) {
            Ok(endpoint) => Self::new(endpoint),
            Err(error @ SetupError::Full(_)) => Self::refuse(Refusal::Full, error),
            Err(error) => Self::refuse(Refusal::Failed, error),
        }
    }

    /// Begins a handshake that refuses the peer for lack of room.
    pub(crate) fn full() -> Self {
        Self::refuse(Refusal::Full, RecordError::Refused(Refusal::Full).into())
    }

    /// Makes a handshake at a server, for [`serve`](Self::serve).
    pub(crate) fn awaited() -> Self {
        Self::begin(Weak::new(), None, None, None)
    }

    fn refuse(refusal: Refusal, reason: SetupError) -> Self {
        Self::begin(
            Weak::new(),
            None,
            Some(Err(reason)),
            Some(ExchangeRecord::refuse(refusal)),
        )
    }

    fn begin(
        context: Weak<Inner<U>>,
        pending: Option<PendingEndpoint<U>>,
        outcome: Option<Result<Endpoint<U>, SetupError>>,
        record: Option<[u8; EXCHANGE_RECORD_SIZE]>,
    ) -> Self {
        Self {
            context,
            record: record.map(Outgoing::from),
            peers_record: Incoming::default(),
            pending,
            outcome,
            last: None,
            peers_last: Incoming::default(),
            peer: None,
        }
    }

    /// Completes the handshake. If the stream would block, its timeout is over, and the handshake
    /// fails.
    pub(crate) fn complete(
        mut self,
        stream: &mut (impl Read + Write),
    ) -> Result<Endpoint<U>, SetupError> {
        self.advance(stream)?
            .ok_or_else(|| SetupError::Channel(ErrorKind::TimedOut.into()))
    }

    /// Proceeds as far as the stream permits. Returns `None` if the stream would block.
    ///
    /// # Errors
    /// [`SetupError`]; the endpoint is gone then.
    pub(crate) fn advance(
        &mut self,
        stream: &mut (impl Read + Write),
    ) -> Result<Option<Endpoint<U>>, SetupError> {
        let failure = match self.exchange(stream) {
            Ok(None) => return Ok(None),
            Ok(Some(CONNECTED)) => None,
            Ok(Some(_)) => Some(SetupError::NotConnectedThere),
            Err(error) => Some(error),
        };
        // If this end has failed before, its own error is returned: it is the cause.
        match (
            self.outcome
                .take_if(|outcome| outcome.is_err() || failure.is_none()),
            failure,
        ) {
            (Some(outcome), _) => {
                let endpoint = outcome?;
                endpoint
                    .connection
                    .with_link(|link| link.note_peer_connected());
                Ok(Some(endpoint))
            }
            (None, failure) => Err(failure.unwrap_or(SetupError::NotConnectedThere)),
        }
    }

    /// Like [`advance`](Self::advance), at a server. When the client's record has arrived,
    /// continues with the handshake that `begin` returns; until then no endpoint is made for the
    /// client.
    pub(crate) fn serve(
        &mut self,
        stream: &mut TcpStream,
        peer: Peer,
        begin: impl FnOnce() -> Self,
    ) -> Result<Option<Endpoint<U>>, SetupError> {
        if self.record.is_none() {
            let Some(record) = self.peers_record.advance(stream)? else {
                return Ok(None);
            };
            // A client of another version reads the version of this server in the refusal. A client
            // whose socket cannot take the refusal at once does not get it.
            ExchangeRecord::decode(record)
                .inspect_err(|_| drop(stream.write(&ExchangeRecord::refuse(Refusal::Failed))))?;
            let peers_record = std::mem::take(&mut self.peers_record);
            *self = begin();
            (self.peers_record, self.peer) = (peers_record, Some(peer));
        }
        self.advance(stream)
    }

    /// Exchanges the bytes that are left. Returns the peer's last byte; `None` if the stream would
    /// block.
    fn exchange(&mut self, stream: &mut (impl Read + Write)) -> Result<Option<u8>, SetupError> {
        let Some(true) = self
            .record
            .as_mut()
            .map(|record| record.advance(stream))
            .transpose()?
        else {
            return Ok(None);
        };
        stream.flush()?;
        // The peer's record is taken in any case: a TCP socket closed with unread bytes is reset,
        // and its last bytes are lost.
        let Some(record) = KIND.advance(&mut self.peers_record, stream)? else {
            return Ok(None);
        };
        if let Some(endpoint) = self.pending.take() {
            let connected =
                ExchangeRecord::decode(record).and_then(|record| endpoint.connect(&record));
            if let Ok(endpoint) = &connected {
                endpoint.connection.peer.set(self.peer);
            }
            self.last = Some(
                [if connected.is_ok() {
                    CONNECTED
                } else {
                    NOT_CONNECTED
                }]
                .into(),
            );
            self.outcome = Some(connected);
        }
        // An end that has refused, or has failed, does not wait for the peer's last byte.
        let Some(last) = &mut self.last else {
            return Ok(Some(NOT_CONNECTED));
        };
        if !last.advance(stream)? {
            return Ok(None);
        }
        stream.flush()?;
        if let Some(Err(_)) = self.outcome {
            return Ok(Some(NOT_CONNECTED));
        }
        Ok(self.peers_last.advance(stream)?.map(|[last]| *last))
    }

    /// Returns whether the peer may know that this end is connected, and so may call already.
    pub(crate) const fn has_told(&self) -> bool {
        matches!(self.outcome, Some(Ok(_)))
    }
}

/// Aborts a handshake that is not complete.
impl<U> Drop for Handshake<U> {
    fn drop(&mut self) {
        if let Some(Ok(endpoint)) = &self.outcome {
            // The end is not graceful, because a graceful end needs a peer that is connected. The
            // share of the queues is released here, because the next attempt may come before the
            // next drain.
            endpoint.abort();
            if let Some(context) = self.context.upgrade() {
                context.retire_unused(&endpoint.connection);
            }
        }
    }
}
