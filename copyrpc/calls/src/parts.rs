//! Payloads of up to 1 GiB as one call, over every RPC whose client is a [`Caller`]: a [`Client`]
//! sends a request in parts, one call of bytes each, and fetches a long reply in the same way; a
//! [`Reassembler`] at the server joins the parts, and the handler gets the whole. The client is
//! itself a [`Caller`], so methods of a [`service!`](crate::service!) can take and return such
//! payloads too.
//!
//! ```
//! use copyrpc_calls::methods::Caller;
//! use copyrpc_calls::parts::{Client, Reassembler};
//!
//! # type Error = copyrpc_calls::ClientError<std::convert::Infallible, copyrpc_calls::SessionEnd>;
//! # struct Direct(Reassembler);
//! # impl Caller for Direct {
//! #     type Error = Error;
//! #     fn timeout(&self) -> Option<std::time::Duration> { None }
//! #     fn call(&mut self, request: &[u8], _: Option<std::time::Duration>) -> Result<std::borrow::Cow<'_, [u8]>, Error> {
//! #         assert!(request.len() <= 4096);
//! #         Ok(self.0.answer(request, |whole| whole.iter().rev().copied().collect()).into())
//! #     }
//! # }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let stop = copyrpc_calls::StopHandle::new(std::task::Waker::noop().clone(), std::time::Duration::ZERO);
//! // The server's part is `server.serve(|request| parts.answer(request, |whole| ..))`, with such a `parts`,
//! // where `stop` is the server's `stop_handle()`:
//! let parts = Reassembler::new(stop, 1 << 20, 4 << 20);
//! # let client = Direct(parts);
//! // The client's, for a client whose calls take 4096 bytes in each direction:
//! let mut client = Client::new(client, 4096, 4096);
//! let payload: Vec<u8> = (0..1 << 20).map(|n: u32| n as u8).collect();
//! assert!(client.call(&payload, None)?.iter().eq(payload.iter().rev()));
//! # Ok(())
//! # }
//! ```
//!
//! # Ends
//! The handler runs when the last part of a request has arrived. A call that ends earlier, for
//! instance because the connection was lost, has reached no handler and is retryable, whether its
//! parts arrived or not ([`PartsError::Unsent`]). A retry begins at the first part.
//!
//! A reply that its client has not fetched whole when the server ends is lost
//! ([`PartsError::ReplyLost`]): a server that stops lets clients fetch the replies before
//! ([`Reassembler::new`]).
//!
//! The remaining time in the header of a method's request counts from the arrival of the first
//! part: [`Whole::deadline`].
//!
//! # Memory
//! The length of a payload is checked before memory is reserved, at both ends. A server keeps at
//! most one payload of a client, and at most [`max_held`](Reassembler::new) bytes in all; further
//! requests end as [`PartsError::Busy`], which is retryable. The bytes of a client that has
//! disconnected are freed after 10 s without a part, or by [`Reassembler::forget_idle`]. A client
//! has a random number of 64 bits, without which no other client reaches its payload. The next part
//! is sent when the server has taken the previous part.
//!
//! # The bytes
//! A part is a header of 40 bytes (kind u32: 0x1_0001 a part of the request, 0x1_0002 a request for
//! a part of the reply, neither of which begins the request of a [method](crate::methods::Header);
//! maximum length of the reply u32; number of the client u64; number of the call u64; length of the
//! payload u64; offset u64) and the bytes. A reply to a part is one byte (0 a part of the reply, 1 continue,
//! 2 busy, 3 too long, 4 the server has no such call), with 0 and 3 a length u64 (of the whole
//! reply; the maximum), and with 0 the bytes. All is little-endian, without padding.

use std::borrow::Cow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use crate::methods::{self, AsyncCaller, Caller, Header, PayloadError, Request};
use crate::serving::Unfetched;
use crate::{Ending, StopHandle};

/// Lengths in bytes of the header of a part, and of the header of a reply.
const HEADER: usize = 40;
const REPLY_HEADER: usize = 9;

/// Bytes that a call takes at a server in addition to its payload, rounded up. They make the limit
/// of held bytes a limit of the number of calls, too.
const CALL_BYTES: usize = 256;

/// Kinds of parts: the first 4 bytes of a part's header. The upper half of both is 1. In the header
/// of a method it is 0, so a part is never taken for a call of a method.
const REQUEST: u32 = 0x1_0001;
const FETCH: u32 = 0x1_0002;

const DONE: u8 = 0;
const MORE: u8 = 1;
const BUSY: u8 = 2;
const TOO_LONG: u8 = 3;
const LOST: u8 = 4;

fn push_words<const N: usize>(into: &mut Vec<u8>, words: [u64; N]) {
    for word in words {
        into.extend_from_slice(&word.to_le_bytes());
    }
}

/// Returns the words at the front of the bytes, and the bytes after them.
fn take_words<const N: usize>(mut bytes: &[u8]) -> Option<([u64; N], &[u8])> {
    let mut words = [0; N];
    for word in &mut words {
        let (first, rest) = bytes.split_first_chunk()?;
        *word = u64::from_le_bytes(*first);
        bytes = rest;
    }
    Some((words, bytes))
}

/// The error of a call in parts. `E` is the error of the client's calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartsError<E> {
    /// A call ended before the last part was sent: no handler got the request. Retryable, unless
    /// the error of that call is permanent.
    #[error("the request was not sent whole: {0}")]
    Unsent(E),
    /// The call that sent the last part of the request ended with this error.
    #[error(transparent)]
    Call(E),
    /// The handler ran, and a call that fetched a part of its reply ended with this error.
    #[error("the handler ran, but its reply was not fetched whole: {0}")]
    Unfetched(E),
    /// The server has no memory for the request now. No handler got it. Retryable.
    #[error("the server is busy with other large payloads")]
    Busy,
    /// The request is longer than the server accepts. No handler got the request. Permanent.
    #[error("the request is longer than the {max} bytes that the server takes")]
    TooLong {
        /// Maximum length.
        max: usize,
    },
    /// The server has no earlier parts of the request: it was restarted, or needed their memory. No
    /// handler got it. Retryable.
    #[error("the server has lost the first parts of the request")]
    Lost,
    /// The handler ran, but the server no longer has the reply: the server was restarted, or needed
    /// the memory.
    #[error("the handler ran, but the server has lost its reply")]
    ReplyLost,
    /// The handler ran, and its reply is longer than [`Client::max_bytes`], or than the memory of
    /// the client.
    #[error("the handler ran, but its reply of {bytes} bytes is too long for this client")]
    ReplyTooLong {
        /// Length of the reply.
        bytes: usize,
    },
    /// The bytes of a reply are not bytes of a [`Reassembler`]. The handler may have run.
    #[error("the server does not take requests in parts, and what it did with them is not known")]
    Reply,
    /// The server has methods and no [`Reassembler`]. No handler got the request. Permanent.
    #[error("nothing ran: the server does not take requests in parts")]
    NoParts,
}

impl<E: Ending + 'static> Ending for PartsError<E> {
    fn is_retryable(&self) -> bool {
        match self {
            // The request is not complete, so no handler got it, even if this part arrived.
            Self::Unsent(error) => error.is_retryable() || error.may_have_executed(),
            Self::Call(error) => error.is_retryable(),
            _ => matches!(self, Self::Busy | Self::Lost),
        }
    }

    fn may_have_executed(&self) -> bool {
        match self {
            Self::Call(error) => error.may_have_executed(),
            _ => !matches!(
                self,
                Self::Unsent(_) | Self::Busy | Self::TooLong { .. } | Self::Lost | Self::NoParts
            ),
        }
    }
}

/// A client whose calls take payloads of any length, over a [`Caller`] or an [`AsyncCaller`]. It
/// belongs to one thread. Over a `Caller` it has one call at a time; over an `AsyncCaller` any
/// number of calls may be under way, and each counts as one client at the server.
#[derive(Debug)]
pub struct Client<C> {
    /// The client that sends the parts.
    pub caller: C,
    /// Maximum length of a reply in bytes. Default: 1 GiB, and 4 KiB for the values that a method
    /// returns beside a payload of 1 GiB.
    pub max_bytes: usize,
    limits: (usize, usize),
    /// Number of the client, and of its last call.
    name: (u64, u64),
}

impl<C> Client<C> {
    /// Returns a client over `caller`. The limits of `caller` are `max_request` bytes for a request
    /// and `max_reply` bytes for a reply.
    pub fn new(caller: C, max_request: usize, max_reply: usize) -> Self {
        Self {
            caller,
            max_bytes: (1 << 30) + 4096,
            limits: (max_request, max_reply),
            name: (random(), 0),
        }
    }

    fn transfer<'a>(
        &self,
        name: (u64, u64),
        request: &'a [u8],
        timeout: Option<Duration>,
    ) -> Transfer<'a> {
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        Transfer {
            request,
            sent: 0,
            reply: Vec::new(),
            reply_len: None,
            name,
            limits: self.limits,
            max_bytes: self.max_bytes,
            end,
        }
    }
}

/// The clone is another client to the server.
impl<C: Clone> Clone for Client<C> {
    fn clone(&self) -> Self {
        Self {
            name: (random(), 0),
            caller: self.caller.clone(),
            ..*self
        }
    }
}

/// The progress of a call in parts, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Length of the part of the request that the server has taken.
    pub sent: usize,
    /// Length of the part of the reply that has arrived.
    pub received: usize,
    /// Length of the reply, once the handler has run.
    pub reply: Option<usize>,
}

impl<C: Caller<Error: 'static>> Client<C> {
    /// Like [`call`](Caller::call), and passes the progress to `on_part` after each part.
    ///
    /// # Errors
    /// [`PartsError`].
    pub fn call_with(
        &mut self,
        request: &[u8],
        timeout: Option<Duration>,
        mut on_part: impl FnMut(Progress),
    ) -> Result<Vec<u8>, PartsError<C::Error>> {
        self.name.1 += 1;
        let mut transfer = self.transfer(self.name, request, timeout);
        while !transfer.is_whole() {
            let part = transfer.next_part();
            transfer.take(self.caller.call(&part, transfer.left()))?;
            on_part(transfer.progress());
        }
        Ok(transfer.reply)
    }
}

impl<C: AsyncCaller<Error: Send + 'static> + Sync> Client<C> {
    /// Makes a call whose request stays the caller's, to be repeated. Passes the progress to
    /// `on_part` after each part.
    ///
    /// # Errors
    /// [`PartsError`].
    pub async fn call_async_with(
        &self,
        request: &[u8],
        timeout: Option<Duration>,
        mut on_part: impl FnMut(Progress),
    ) -> Result<Vec<u8>, PartsError<C::Error>> {
        let mut transfer = self.transfer((random(), 0), request, timeout);
        while !transfer.is_whole() {
            let part = transfer.next_part();
            transfer.take(self.caller.call(part, transfer.left()).await)?;
            on_part(transfer.progress());
        }
        Ok(transfer.reply)
    }
}

impl<C: Caller<Error: 'static>> Caller for Client<C> {
    type Error = PartsError<C::Error>;

    fn timeout(&self) -> Option<Duration> {
        self.caller.timeout()
    }

    /// Calls with a request of any length. The timeout is for the whole call.
    fn call(
        &mut self,
        request: &[u8],
        timeout: Option<Duration>,
    ) -> Result<Cow<'_, [u8]>, Self::Error> {
        self.call_with(request, timeout, |_| ()).map(Cow::Owned)
    }
}

impl<C: AsyncCaller<Error: Send + 'static> + Sync> AsyncCaller for Client<C> {
    type Error = PartsError<C::Error>;

    fn timeout(&self) -> Option<Duration> {
        self.caller.timeout()
    }

    async fn call(
        &self,
        request: Vec<u8>,
        timeout: Option<Duration>,
    ) -> Result<Vec<u8>, Self::Error> {
        self.call_async_with(&request, timeout, |_| ()).await
    }
}

/// Returns a random number, which other clients cannot guess.
fn random() -> u64 {
    RandomState::new().hash_one(0)
}

struct Transfer<'a> {
    request: &'a [u8],
    sent: usize,
    reply: Vec<u8>,
    /// Length of the reply, once it is known. The handler has run then.
    reply_len: Option<usize>,
    name: (u64, u64),
    limits: (usize, usize),
    max_bytes: usize,
    end: Option<Instant>,
}

impl Transfer<'_> {
    fn left(&self) -> Option<Duration> {
        self.end
            .map(|end| end.saturating_duration_since(Instant::now()))
    }

    fn progress(&self) -> Progress {
        Progress {
            sent: self.sent,
            received: self.reply.len(),
            reply: self.reply_len,
        }
    }

    fn is_whole(&self) -> bool {
        self.reply_len == Some(self.reply.len())
    }

    fn next_part(&mut self) -> Vec<u8> {
        let (max_request, max_reply) = self.limits;
        let len = max_request
            .saturating_sub(HEADER)
            .max(1)
            .min(self.request.len() - self.sent);
        let (kind, offset) = if self.reply_len.is_some() {
            (FETCH, self.reply.len())
        } else {
            (REQUEST, self.sent)
        };
        let room = u32::try_from(max_reply).unwrap_or(u32::MAX);
        let mut part = Vec::with_capacity(HEADER + len);
        let kind_and_room = u64::from(kind) | u64::from(room) << 32;
        push_words(
            &mut part,
            [
                kind_and_room,
                self.name.0,
                self.name.1,
                self.request.len() as u64,
                offset as u64,
            ],
        );
        part.extend_from_slice(&self.request[self.sent..self.sent + len]);
        self.sent += len;
        part
    }

    /// Takes the outcome of the call that sent the previous part.
    fn take<E>(&mut self, outcome: Result<impl AsRef<[u8]>, E>) -> Result<(), PartsError<E>> {
        let (is_sent, is_fetching) = (self.sent == self.request.len(), self.reply_len.is_some());
        let bytes = outcome.map_err(|error| match (is_sent, is_fetching) {
            (_, true) => PartsError::Unfetched(error),
            (true, false) => PartsError::Call(error),
            (false, false) => PartsError::Unsent(error),
        })?;
        match bytes.as_ref().split_first() {
            Some((&DONE, rest)) if is_sent => {
                let ([len], rest) = take_words(rest).ok_or(PartsError::Reply)?;
                let len = len as usize;
                if len > self.max_bytes
                    || self
                        .reply
                        .try_reserve_exact(len.saturating_sub(self.reply.len()))
                        .is_err()
                {
                    return Err(PartsError::ReplyTooLong { bytes: len });
                }
                let is_as_told = self.reply_len.is_none_or(|told| told == len)
                    && self.reply.len() + rest.len() <= len;
                if !is_as_told || rest.is_empty() && len > 0 {
                    return Err(PartsError::Reply);
                }
                self.reply_len = Some(len);
                self.reply.extend_from_slice(rest);
                Ok(())
            }
            Some((&MORE, [])) if !is_sent => Ok(()),
            Some((&BUSY, [])) if !is_fetching => Err(PartsError::Busy),
            Some((&TOO_LONG, max)) if !is_fetching => Err(match take_words(max) {
                Some(([max], [])) => PartsError::TooLong { max: max as usize },
                _ if bytes.as_ref() == methods::no_request() => PartsError::NoParts,
                _ => PartsError::Reply,
            }),
            Some((&LOST, [])) => Err(if is_fetching {
                PartsError::ReplyLost
            } else {
                PartsError::Lost
            }),
            _ => Err(PartsError::Reply),
        }
    }
}

/// A server's calls in parts.
#[derive(Debug)]
pub struct Reassembler {
    /// Time without a part after which the parts of a call may be dropped for another call.
    /// Default: 10 s.
    pub idle: Duration,
    max_bytes: usize,
    max_held: usize,
    /// The calls, by the number of the client.
    calls: HashMap<u64, Held>,
    /// Bytes that the calls take, or will take when they are whole.
    held: usize,
    /// The handle that stops the server.
    stop: StopHandle,
}

/// A request that is not whole, or a reply that is not fetched.
#[derive(Debug)]
struct Held {
    call: u64,
    /// The kind of the parts that continue the call: [`REQUEST`] or [`FETCH`].
    kind: u32,
    bytes: Vec<u8>,
    /// Length of the whole request or reply in bytes.
    len: usize,
    /// Number of bytes of the request that have arrived, or of the reply that were sent.
    done: usize,
    since: Instant,
    touched: Instant,
    /// Counts the reply as not fetched, until the drop of this field.
    _unfetched: Option<Unfetched>,
}

impl Held {
    const fn cost(&self) -> usize {
        self.len + CALL_BYTES
    }
}

/// A call whose request is whole.
#[derive(Debug)]
pub struct Whole {
    client: u64,
    call: u64,
    room: usize,
    since: Instant,
    unfetched: Unfetched,
}

impl Whole {
    /// Returns the end of the caller's time, if `request`, which was passed to the handler with
    /// this value, is the request of a method ([`service!`](crate::service!)) and its caller has a
    /// limit. The time counts from the arrival of the first part. A part has no time of its own.
    #[must_use]
    pub fn deadline(&self, request: &[u8]) -> Option<Instant> {
        Header::deadline(request, self.since)
    }
}

impl Reassembler {
    /// Makes the server's end of calls in parts. `stop` is the stop handle of the server. Requests
    /// have up to `max_bytes` each. The requests that are not complete and the replies that are not
    /// fetched take at most `max_held` bytes together. Only replies of handlers that run meanwhile
    /// may exceed that limit; then further requests end as [`PartsError::Busy`].
    ///
    /// After `stop`, the server continues until its clients have fetched the replies, at most for its
    /// stop timeout, and further requests in parts end as [`PartsError::Busy`]. An
    /// [`AsyncServer`](crate::AsyncServer) whose requests are passed here whole, and not as bytes,
    /// does not wait for clients that have left.
    ///
    /// Servers at one address ([`Server::beside`](crate::Server::beside)) share one value, behind a
    /// lock: the connections of an [`AsyncClient`](crate::AsyncClient) may lead to several of them.
    #[must_use]
    pub fn new(stop: StopHandle, max_bytes: usize, max_held: usize) -> Self {
        Self {
            idle: Duration::from_secs(10),
            max_bytes,
            max_held,
            calls: HashMap::new(),
            held: 0,
            stop,
        }
    }

    /// Returns the number of bytes that the calls take.
    #[must_use]
    pub const fn held(&self) -> usize {
        self.held
    }

    /// Returns the reply to a part. If the part is the last of a request, calls `handler` with the
    /// whole request.
    pub fn answer(
        &mut self,
        part: &(impl Request + ?Sized),
        handler: impl FnOnce(Vec<u8>) -> Vec<u8>,
    ) -> Vec<u8> {
        self.receive(part).map_or_else(
            |reply| reply,
            |(whole, request)| self.reply(whole, handler(request)),
        )
    }

    /// Forgets the calls of which no part has arrived for `idle`. A `Reassembler` that is short of
    /// memory does this by itself, for the time [`idle`](Self::idle).
    pub fn forget_idle(&mut self, idle: Duration) {
        self.calls.retain(|_, held| held.touched.elapsed() < idle);
        self.held = self.calls.values().map(Held::cost).sum();
    }

    /// Takes a part. Returns the request if this part completes it. [`answer`](Self::answer) does
    /// the same for handlers that answer at once.
    ///
    /// # Errors
    /// The reply to a part that does not complete a request. The reply to a request that is no part
    /// too: the caller of a method gets
    /// [`MethodError::Arguments`](crate::methods::MethodError::Arguments) with
    /// [`PayloadError::NotInParts`]; any other caller gets the byte 4.
    pub fn receive(&mut self, part: &(impl Request + ?Sized)) -> Result<(Whole, Vec<u8>), Vec<u8>> {
        let (request, data) = (part, part.data());
        // The header of a method is none of a part: its caller has no client of this module.
        let lost = || {
            Header::read(&data).map_or_else(
                || vec![LOST],
                |_| methods::undecodable(PayloadError::NotInParts),
            )
        };
        let ([kind_and_room, client, call, len, offset], part) =
            take_words(&data).ok_or_else(lost)?;
        let kind = kind_and_room as u32;
        let room = (kind_and_room >> 32) as usize;
        let len = len as usize;
        let offset = offset as usize;
        // A client's number has one call at a time (each call of an `AsyncClient` takes a new
        // number). So a part of the next call removes a call that was given up.
        let earlier = self.calls.remove(&client);
        self.held -= earlier.as_ref().map_or(0, Held::cost);
        if kind == REQUEST && self.stop.is_stopping() {
            return Err(vec![BUSY]);
        }
        let mut held = match earlier
            .filter(|held| (held.call, held.kind, held.done) == (call, kind, offset) && offset > 0)
        {
            Some(held) => held,
            None if (kind, offset) == (REQUEST, 0) => self.admit(call, len)?,
            None => return Err(lost()),
        };
        held.touched = Instant::now();
        if kind == FETCH {
            return Err(self.send(client, room, held));
        }
        if held.len != len || part.len() > len - offset || part.is_empty() && len > 0 {
            return Err(lost());
        }
        held.bytes.extend_from_slice(part);
        held.done += part.len();
        if held.done == len {
            return Ok((
                Whole {
                    client,
                    call,
                    room,
                    since: held.since,
                    unfetched: self.stop.unfetched(request.context().client()),
                },
                held.bytes,
            ));
        }
        self.keep(client, held);
        Err(vec![MORE])
    }

    /// Returns the reply to the last part of a request.
    pub fn reply(&mut self, to: Whole, reply: Vec<u8>) -> Vec<u8> {
        let call = to.call;
        let len = reply.len();
        let since = to.since;
        let unfetched = Some(to.unfetched);
        let held = Held {
            call,
            kind: FETCH,
            bytes: reply,
            len,
            done: 0,
            since,
            touched: Instant::now(),
            _unfetched: unfetched,
        };
        self.send(to.client, to.room, held)
    }

    /// Makes room for a request. If there is none, the error is the reply to send.
    fn admit(&mut self, call: u64, len: usize) -> Result<Held, Vec<u8>> {
        if len > self.max_bytes {
            let mut reply = vec![TOO_LONG];
            push_words(&mut reply, [self.max_bytes as u64]);
            return Err(reply);
        }
        let is_short = |parts: &Self| {
            len.saturating_add(CALL_BYTES) > parts.max_held.saturating_sub(parts.held)
        };
        if is_short(self) {
            self.forget_idle(self.idle);
        }
        let mut bytes = Vec::new();
        if is_short(self) || bytes.try_reserve_exact(len).is_err() {
            return Err(vec![BUSY]);
        }
        let now = Instant::now();
        Ok(Held {
            call,
            kind: REQUEST,
            bytes,
            len,
            done: 0,
            since: now,
            touched: now,
            _unfetched: None,
        })
    }

    /// Returns the next part of a reply: at most `room` bytes with the header, but at least one
    /// byte of the reply. Keeps the rest of the reply.
    fn send(&mut self, client: u64, room: usize, mut held: Held) -> Vec<u8> {
        let len = room
            .saturating_sub(REPLY_HEADER)
            .max(1)
            .min(held.len - held.done);
        let mut part = Vec::with_capacity(REPLY_HEADER + len);
        part.push(DONE);
        push_words(&mut part, [held.len as u64]);
        part.extend_from_slice(&held.bytes[held.done..held.done + len]);
        held.done += len;
        if held.done < held.len {
            self.keep(client, held);
        }
        part
    }

    /// Keeps a call, unless its client has begun another call meanwhile.
    fn keep(&mut self, client: u64, held: Held) {
        if let Entry::Vacant(place) = self.calls.entry(client) {
            self.held += held.cost();
            place.insert(held);
        }
    }
}

#[cfg(test)]
mod tests;
