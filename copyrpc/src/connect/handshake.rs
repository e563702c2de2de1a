//! The handshake of two endpoints over a byte stream: both send 128 bytes and take 128, then send one byte and take one.

use std::io::{self, ErrorKind, Read, Write};
use std::rc::Weak;

use rendezvous::Peer;
use rendezvous::record::field;

use super::record::KIND;
use super::{ConnectError, EXCHANGE_RECORD_SIZE, ExchangeRecord, PendingEndpoint, RecordError, Refusal};
use crate::config::{CreateEndpointError, EndpointConfig};
use crate::context::{Context, Inner};
use crate::endpoint::Endpoint;

/// The last byte that each end sends: it is connected, or it is not and never will be.
const CONNECTED: u8 = 1;
const NOT_CONNECTED: u8 = 0;
/// Bytes that each end sends, and takes.
const ALL: usize = EXCHANGE_RECORD_SIZE + 1;

/// One end of a handshake in progress.
pub(crate) struct Handshake<U> {
    /// The context of the endpoint.
    context: Weak<Inner<U>>,
    /// The endpoint, until the peer's record has arrived.
    pending: Option<PendingEndpoint<U>>,
    /// The connected endpoint, or the reason why it will not be connected; `None` before, and after it was returned.
    outcome: Option<Result<Endpoint<U>, ConnectError>>,
    to_send: [u8; ALL],
    /// Number of its bytes that can be sent, and that were sent.
    ready: usize,
    sent: usize,
    taken: [u8; ALL],
    count: usize,
    /// The client, at a server.
    peer: Option<Peer>,
}

impl<U> Handshake<U> {
    /// Begins the handshake of an endpoint.
    pub(crate) fn new(endpoint: PendingEndpoint<U>) -> Self {
        let (context, record) = (Weak::clone(&endpoint.context), endpoint.local_info().encode());
        Self::begin(context, Some(endpoint), None, &record)
    }

    /// Begins the handshake of a new endpoint of `context`. If there is no room for it, the peer is told.
    pub(crate) fn of(context: &Context<U>, config: &EndpointConfig) -> Self {
        match context.create_endpoint(config) {
            Ok(endpoint) => Self::new(endpoint),
            Err(error @ (CreateEndpointError::SrqTooSmall { .. } | CreateEndpointError::CqTooSmall { .. })) => {
                Self::refuse(Refusal::Full, error.into())
            }
            Err(error) => Self::refuse(Refusal::Failed, error.into()),
        }
    }

    /// Begins a handshake that tells the peer that there is no room for it.
    pub(crate) fn full() -> Self {
        Self::refuse(Refusal::Full, RecordError::Refused(Refusal::Full).into())
    }

    /// Continues after the record of a client, which has arrived already.
    pub(crate) fn after(mut self, record: &[u8; EXCHANGE_RECORD_SIZE], peer: Peer) -> Self {
        self.peer = Some(peer);
        self.taken[..EXCHANGE_RECORD_SIZE].copy_from_slice(record);
        self.count = EXCHANGE_RECORD_SIZE;
        self
    }

    fn refuse(refusal: Refusal, reason: ConnectError) -> Self {
        Self::begin(Weak::new(), None, Some(Err(reason)), &ExchangeRecord::refuse(refusal))
    }

    fn begin(
        context: Weak<Inner<U>>,
        pending: Option<PendingEndpoint<U>>,
        outcome: Option<Result<Endpoint<U>, ConnectError>>,
        record: &[u8; EXCHANGE_RECORD_SIZE],
    ) -> Self {
        let mut to_send = [0; ALL];
        to_send[..EXCHANGE_RECORD_SIZE].copy_from_slice(record);
        Self { context, pending, outcome, to_send, ready: EXCHANGE_RECORD_SIZE, sent: 0, taken: [0; ALL], count: 0, peer: None }
    }

    /// Proceeds to the end. A stream that blocks returns an error when its timeout is over.
    pub(crate) fn complete(mut self, stream: &mut (impl Read + Write)) -> Result<Endpoint<U>, ConnectError> {
        self.advance(stream)?.ok_or_else(|| ConnectError::Channel(ErrorKind::TimedOut.into()))
    }

    /// Proceeds as far as the stream permits. Returns `None` if the stream would block.
    ///
    /// # Errors
    /// [`ConnectError`]; the endpoint is gone then.
    pub(crate) fn advance(&mut self, stream: &mut (impl Read + Write)) -> Result<Option<Endpoint<U>>, ConnectError> {
        loop {
            match self.step(stream) {
                Ok(false) => {}
                Ok(true) => return self.finish().map(Some),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.failure(error.into())),
            }
        }
    }

    /// Does one read or write. Returns whether the exchange is complete.
    fn step(&mut self, stream: &mut (impl Read + Write)) -> io::Result<bool> {
        if self.sent < self.ready {
            self.sent += some(stream.write(&self.to_send[self.sent..self.ready])?, ErrorKind::WriteZero)?;
            return Ok(false);
        }
        stream.flush()?;
        // The peer's record is taken in any case: a TCP socket closed with unread bytes is reset, and its last bytes are lost. The peer's
        // last byte is not waited for if the peer may not speak this protocol, or was refused.
        let all = if matches!(self.outcome, Some(Ok(_))) { ALL } else { EXCHANGE_RECORD_SIZE };
        if self.count < all {
            self.count += some(stream.read(&mut self.taken[self.count..all])?, ErrorKind::UnexpectedEof)?;
            // A peer that speaks another protocol may say no more: its record is not waited for.
            let magic = if self.count < EXCHANGE_RECORD_SIZE { KIND.check_magic(&self.taken[..self.count]) } else { Ok(()) };
            if let (Err(error), Some(_)) = (magic, &self.pending) {
                self.outcome = Some(Err(error.into()));
                return Ok(true);
            }
            return Ok(false);
        }
        // The peer's record has arrived.
        let Some(endpoint) = self.pending.take() else { return Ok(true) };
        let connected = ExchangeRecord::decode(&field(&self.taken, 0)).and_then(|record| endpoint.connect(&record));
        if let Ok(endpoint) = &connected {
            endpoint.connection.peer.set(self.peer);
        }
        self.to_send[EXCHANGE_RECORD_SIZE] = if connected.is_ok() { CONNECTED } else { NOT_CONNECTED };
        self.ready = ALL;
        self.outcome = Some(connected);
        Ok(false)
    }

    /// Returns whether the peer may know that this end is connected, and so may call already.
    pub(crate) const fn has_told(&self) -> bool {
        self.sent == ALL && matches!(self.outcome, Some(Ok(_)))
    }

    fn finish(&mut self) -> Result<Endpoint<U>, ConnectError> {
        if self.taken[EXCHANGE_RECORD_SIZE] == CONNECTED {
            if let Some(Ok(endpoint)) = self.outcome.take_if(|outcome| outcome.is_ok()) {
                endpoint.connection.with_link(|link| link.note_peer_connected());
                return Ok(endpoint);
            }
        }
        Err(self.failure(ConnectError::NotConnectedThere))
    }

    /// Returns why the handshake failed: the earlier failure, or `last`.
    fn failure(&mut self, last: ConnectError) -> ConnectError {
        match self.outcome.take_if(|outcome| outcome.is_err()) {
            Some(Err(earlier)) => earlier,
            _ => last,
        }
    }
}

/// Aborts a handshake that is not complete.
impl<U> Drop for Handshake<U> {
    fn drop(&mut self) {
        if let Some(Ok(endpoint)) = &self.outcome {
            // A graceful end needs a peer. The share of the queues is free for the next attempt, which no drain may come before.
            endpoint.abort();
            if let Some(context) = self.context.upgrade() {
                context.retire_unused(&endpoint.connection);
            }
        }
    }
}

/// Returns the number of bytes; 0 is the end of the stream.
fn some(bytes: usize, end: ErrorKind) -> io::Result<usize> {
    if bytes == 0 { Err(end.into()) } else { Ok(bytes) }
}
