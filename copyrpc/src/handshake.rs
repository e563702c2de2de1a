//! Two endpoints meet over a byte stream: both send 128 bytes and take 128, then send one byte and take one.

use std::io::{self, ErrorKind, Read, Write};

use rendezvous::record::field;

use crate::config::{CreateEndpointError, EndpointConfig};
use crate::context::Context;
use crate::endpoint::Endpoint;
use crate::exchange::{EXCHANGE_RECORD_SIZE, ExchangeRecord, Refusal};
use crate::pending::{ConnectFailure, PendingEndpoint};

/// The last byte each end sends: it is connected, or it is not and never will be.
const CONNECTED: u8 = 1;
const NOT_CONNECTED: u8 = 0;
/// Bytes each end sends, and takes.
const ALL: usize = EXCHANGE_RECORD_SIZE + 1;

impl<U> Context<U> {
    /// Makes an endpoint and connects it as [`PendingEndpoint::connect_over`]. If there is no room for it, the peer is told so:
    /// [`RecordError::Refused`](crate::RecordError::Refused).
    ///
    /// # Errors
    /// [`ConnectFailure`]; nothing is left behind.
    pub fn connect_over(&self, config: &EndpointConfig, mut channel: impl Read + Write) -> Result<Endpoint<U>, ConnectFailure> {
        meet(Handshake::of(self, config), &mut channel)
    }
}

impl<U> PendingEndpoint<U> {
    /// Swaps records with the peer over a byte stream, such as a socket, and connects. The peer does the same: both send 128 bytes and take
    /// 128, then send one byte and take one. That byte says that an end is connected, so that either may call at once.
    ///
    /// Blocks as `channel` does, and takes no time of its own: a peer that stays silent is waited for as long as the stream's time-outs say.
    ///
    /// # Errors
    /// [`ConnectFailure`]; the endpoint is gone then. To keep it, swap the records by hand and use [`PendingEndpoint::connect`].
    pub fn connect_over(self, mut channel: impl Read + Write) -> Result<Endpoint<U>, ConnectFailure> {
        meet(Handshake::new(self), &mut channel)
    }
}

fn meet<U>(mut handshake: Handshake<U>, channel: &mut (impl Read + Write)) -> Result<Endpoint<U>, ConnectFailure> {
    // A channel that blocks says so when its time is up.
    handshake.advance(channel)?.ok_or_else(|| ConnectFailure::Channel(io::ErrorKind::WouldBlock.into()))
}

/// One end, as far as it got.
pub(crate) struct Handshake<U> {
    end: End<U>,
    to_send: [u8; ALL],
    /// What of it can be sent, and what was.
    ready: usize,
    sent: usize,
    taken: [u8; ALL],
    count: usize,
}

enum End<U> {
    Pending(PendingEndpoint<U>),
    Connected(Endpoint<U>),
    /// It will not be connected.
    Failed(ConnectFailure),
    /// It was handed out.
    Taken,
}

impl<U> Handshake<U> {
    /// Of an endpoint.
    pub(crate) fn new(endpoint: PendingEndpoint<U>) -> Self {
        let record = endpoint.local_info().encode();
        Self::begin(End::Pending(endpoint), &record)
    }

    /// Of a new endpoint of `context`. If there is no room for it, the peer is told so.
    pub(crate) fn of(context: &Context<U>, config: &EndpointConfig) -> Self {
        match context.create_endpoint(config) {
            Ok(endpoint) => Self::new(endpoint),
            Err(error) => {
                let refusal = ExchangeRecord::refuse(refusal_of(&error));
                Self::begin(End::Failed(error.into()), &refusal)
            }
        }
    }

    /// The peer's record has come already.
    pub(crate) fn after(mut self, record: &[u8; EXCHANGE_RECORD_SIZE]) -> Self {
        self.taken[..EXCHANGE_RECORD_SIZE].copy_from_slice(record);
        self.count = EXCHANGE_RECORD_SIZE;
        self
    }

    fn begin(end: End<U>, record: &[u8; EXCHANGE_RECORD_SIZE]) -> Self {
        let mut to_send = [0; ALL];
        to_send[..EXCHANGE_RECORD_SIZE].copy_from_slice(record);
        Self { end, to_send, ready: EXCHANGE_RECORD_SIZE, sent: 0, taken: [0; ALL], count: 0 }
    }

    /// Goes on as far as the stream lets it. `None`: the stream would block.
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

    /// One read or write. Whether all is said.
    fn step(&mut self, stream: &mut (impl Read + Write)) -> io::Result<bool> {
        if self.sent < self.ready {
            self.sent += some(stream.write(&self.to_send[self.sent..self.ready])?, ErrorKind::WriteZero)?;
            return Ok(false);
        }
        stream.flush()?;
        // The peer's record is taken in any case, because a TCP socket closed over unread bytes is reset, and what it sent last is lost. Its last
        // byte is not waited for if it may not speak this protocol, or has been refused.
        let all = if self.ready == ALL && !matches!(self.end, End::Failed(_)) { ALL } else { EXCHANGE_RECORD_SIZE };
        if self.count < all {
            self.count += some(stream.read(&mut self.taken[self.count..all])?, ErrorKind::UnexpectedEof)?;
            return Ok(false);
        }
        if let End::Pending(_) = self.end {
            self.connect();
            return Ok(false);
        }
        Ok(true)
    }

    /// The peer's record is there.
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

    /// The stream failed. What was wrong before it did is the reason.
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

/// It did not come to an end.
impl<U> Drop for Handshake<U> {
    fn drop(&mut self) {
        if let End::Connected(endpoint) = &self.end {
            // A graceful end needs a peer.
            endpoint.abort();
        }
    }
}

/// None is the end of the stream.
fn some(bytes: usize, end: ErrorKind) -> io::Result<usize> {
    if bytes == 0 { Err(end.into()) } else { Ok(bytes) }
}

/// What the peer is told.
fn refusal_of(error: &CreateEndpointError) -> Refusal {
    match error {
        CreateEndpointError::SrqTooSmall { .. } | CreateEndpointError::CqTooSmall { .. } => Refusal::Full,
        _ => Refusal::Failed,
    }
}
