//! The handshake of two endpoints over a byte stream: both send 128 bytes and take 128, then send one byte and take one.

use std::io::{self, ErrorKind, Read, Write};
use std::rc::Weak;

use rendezvous::record::field;

use crate::config::{CreateEndpointError, EndpointConfig};
use crate::context::{Context, Inner};
use crate::endpoint::Endpoint;
use crate::exchange::{EXCHANGE_RECORD_SIZE, ExchangeError, ExchangeRecord, KIND, RecordError, Refusal};
use crate::pending::{ConnectFailure, PendingEndpoint};

/// The last byte that each end sends: it is connected, or it is not and never will be.
const CONNECTED: u8 = 1;
const NOT_CONNECTED: u8 = 0;
/// Bytes that each end sends, and takes.
const ALL: usize = EXCHANGE_RECORD_SIZE + 1;

impl<U> Context<U> {
    /// Makes an endpoint and connects it as [`PendingEndpoint::connect_over`] does. If there is no room for it, the peer is told:
    /// [`RecordError::Refused`](crate::RecordError::Refused).
    ///
    /// # Errors
    /// [`ConnectFailure`]; nothing is left behind.
    pub fn connect_over(&self, config: &EndpointConfig, mut channel: impl Read + Write) -> Result<Endpoint<U>, ConnectFailure> {
        meet(Handshake::of(self, config), &mut channel)
    }
}

impl<U> PendingEndpoint<U> {
    /// Exchanges records with the peer over a byte stream, such as a socket, and connects. The peer does the same: both send 128 bytes
    /// and take 128, then send one byte and take one. That byte says that an end is connected, so either end may call at once.
    ///
    /// Blocks as `channel` does, and has no timeout of its own: it waits for a silent peer as long as the stream's timeouts allow.
    ///
    /// # Errors
    /// [`ConnectFailure`]; the endpoint is gone then. To keep it, exchange the records by hand and use [`PendingEndpoint::connect`].
    pub fn connect_over(self, mut channel: impl Read + Write) -> Result<Endpoint<U>, ConnectFailure> {
        meet(Handshake::new(self), &mut channel)
    }
}

fn meet<U>(mut handshake: Handshake<U>, channel: &mut (impl Read + Write)) -> Result<Endpoint<U>, ConnectFailure> {
    // A channel that blocks returns an error when its timeout is over.
    handshake.advance(channel)?.ok_or_else(|| ConnectFailure::Channel(io::ErrorKind::WouldBlock.into()))
}

/// One end of a handshake in progress.
pub(crate) struct Handshake<U> {
    /// Of its endpoint.
    context: Weak<Inner<U>>,
    end: End<U>,
    to_send: [u8; ALL],
    /// Number of its bytes that can be sent, and that were sent.
    ready: usize,
    sent: usize,
    taken: [u8; ALL],
    count: usize,
}

enum End<U> {
    Pending(PendingEndpoint<U>),
    Connected(Endpoint<U>),
    /// The endpoint will not be connected.
    Failed(ConnectFailure),
    /// The endpoint was returned.
    Taken,
}

impl<U> Handshake<U> {
    /// Begins the handshake of an endpoint.
    pub(crate) fn new(endpoint: PendingEndpoint<U>) -> Self {
        let (context, record) = (endpoint.context().clone(), endpoint.local_info().encode());
        Self::begin(context, End::Pending(endpoint), &record)
    }

    /// Begins the handshake of a new endpoint of `context`. If there is no room for it, the peer is told.
    pub(crate) fn of(context: &Context<U>, config: &EndpointConfig) -> Self {
        match context.create_endpoint(config) {
            Ok(endpoint) => Self::new(endpoint),
            Err(error) => {
                let refusal = ExchangeRecord::refuse(refusal_of(&error));
                Self::begin(Weak::new(), End::Failed(error.into()), &refusal)
            }
        }
    }

    /// Begins a handshake that tells the peer that there is no room for it.
    pub(crate) fn full() -> Self {
        let reason = ExchangeError::Record(RecordError::Refused(Refusal::Full));
        Self::begin(Weak::new(), End::Failed(reason.into()), &ExchangeRecord::refuse(Refusal::Full))
    }

    /// Continues after a peer's record that has arrived already.
    pub(crate) fn after(mut self, record: &[u8; EXCHANGE_RECORD_SIZE]) -> Self {
        self.taken[..EXCHANGE_RECORD_SIZE].copy_from_slice(record);
        self.count = EXCHANGE_RECORD_SIZE;
        self
    }

    fn begin(context: Weak<Inner<U>>, end: End<U>, record: &[u8; EXCHANGE_RECORD_SIZE]) -> Self {
        let mut to_send = [0; ALL];
        to_send[..EXCHANGE_RECORD_SIZE].copy_from_slice(record);
        Self { context, end, to_send, ready: EXCHANGE_RECORD_SIZE, sent: 0, taken: [0; ALL], count: 0 }
    }

    /// Proceeds as far as the stream permits. Returns `None` if the stream would block.
    ///
    /// # Errors
    /// [`ConnectFailure`]; the endpoint is gone then.
    pub(crate) fn advance(&mut self, stream: &mut (impl Read + Write)) -> Result<Option<Endpoint<U>>, ConnectFailure> {
        loop {
            match self.step(stream) {
                Ok(false) => {}
                Ok(true) => return self.finish().map(Some),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.give_up(error.into())),
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
        let all = if self.ready == ALL && !matches!(self.end, End::Failed(_)) { ALL } else { EXCHANGE_RECORD_SIZE };
        if self.count < all {
            self.count += some(stream.read(&mut self.taken[self.count..all])?, ErrorKind::UnexpectedEof)?;
            // A peer that speaks another protocol may say no more: its record is not waited for.
            let magic = if self.count < EXCHANGE_RECORD_SIZE { KIND.check_magic(&self.taken[..self.count]) } else { Ok(()) };
            if let (Err(error), End::Pending(_)) = (magic, &self.end) {
                self.end = End::Failed(ExchangeError::from(error).into());
                return Ok(true);
            }
            return Ok(false);
        }
        if let End::Pending(_) = self.end {
            self.connect();
            return Ok(false);
        }
        Ok(true)
    }

    /// Connects: the peer's record has arrived.
    fn connect(&mut self) {
        let End::Pending(endpoint) = std::mem::replace(&mut self.end, End::Taken) else { return };
        let record = ExchangeRecord::decode(&field(&self.taken, 0));
        let connected = record.map_err(ConnectFailure::from).and_then(|record| endpoint.connect(&record).map_err(|error| error.reason));
        self.to_send[EXCHANGE_RECORD_SIZE] = if connected.is_ok() { CONNECTED } else { NOT_CONNECTED };
        self.ready = ALL;
        self.end = connected.map_or_else(End::Failed, End::Connected);
    }

    fn finish(&mut self) -> Result<Endpoint<U>, ConnectFailure> {
        match std::mem::replace(&mut self.end, End::Taken) {
            End::Connected(endpoint) if self.taken[EXCHANGE_RECORD_SIZE] == CONNECTED => {
                endpoint.connection.with_link(|link| link.note_peer_connected());
                Ok(endpoint)
            }
            End::Failed(reason) => Err(reason),
            end => {
                self.end = end;
                Err(ConnectFailure::NotConnectedThere)
            }
        }
    }

    /// Ends the handshake after a failure of the stream. An earlier failure is the reason.
    fn give_up(&mut self, error: ConnectFailure) -> ConnectFailure {
        match std::mem::replace(&mut self.end, End::Taken) {
            End::Failed(reason) => reason,
            end => {
                self.end = end;
                error
            }
        }
    }
}

/// Aborts a handshake that is not complete.
impl<U> Drop for Handshake<U> {
    fn drop(&mut self) {
        if let End::Connected(endpoint) = &self.end {
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

/// Returns the refusal for the peer.
fn refusal_of(error: &CreateEndpointError) -> Refusal {
    match error {
        CreateEndpointError::SrqTooSmall { .. } | CreateEndpointError::CqTooSmall { .. } => Refusal::Full,
        _ => Refusal::Failed,
    }
}
