//! The client's end of a connection to a server. The connection is made again when it has ended.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use mlx5::DeviceSpec;
use mlx5_rendezvous::{Addresses, LIFELINE_INTERVAL, Meeting, Secret, has_hung_up};
use thiserror::Error;

use super::default_device;
use crate::config::EndpointConfig;
use crate::connect::{ConnectError, Handshake};
use crate::connection::Outcome;
use crate::context::{BuildError, Context, ContextBuilder};
use crate::endpoint::{CallToken, Endpoint};
use crate::error::{CallError, CallFailure, CloseReason};
use crate::recv::Reply;
use crate::stats::Stats;

/// Number of endpoints: the endpoint in use, the one before it while its calls end, and an ended
/// endpoint whose resources are not free yet.
const ENDPOINTS: u32 = 3;

/// Default of [`ClientOptions::max_reply`].
const DEFAULT_REPLY: usize = 4 << 10;

/// Options of a [`Client`](crate::Client).
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Its device, of the same kind as the server's. Default: the device that the environment
    /// variable `COPYRPC_DEVICE` names (`soft`, `mlx5_0`, `mlx5_0:2`), or the software HCA.
    pub device: DeviceSpec,
    /// Options of the connection. The ring size must be the server's.
    pub endpoint: EndpointConfig,
    /// Maximum time to wait, whenever a connection is made, for a server that is not there yet,
    /// does not answer, or has no room for another client. A refusal that does not pass ends it at
    /// once: another secret or version, or a device that this process may not reach. Default: 5 s.
    pub connect_timeout: Duration,
    /// Maximum bytes of a reply; a longer one ends its call as [`ClientError::ReplyTooLong`]. A
    /// call takes that much of the credit, which is a quarter of the ring, until the server answers
    /// it, even if it is given up before; calls for which no credit is left wait, and end as
    /// [`ClientError::NoCredit`] if calls that were given up keep it. The limit is 3/16 of the
    /// ring. Default: 4 KiB, or a quarter of the limit if that is less. With that and rings of 1
    /// MiB the credit is enough for 63 calls at once.
    pub max_reply: Option<usize>,
    /// Timeout of [`Client::call`](crate::Client::call). Default: none; a call waits as long as the
    /// server lives and polls ([`EndpointConfig::stall_timeout`]).
    pub timeout: Option<Duration>,
    /// The server's secret ([`ServerOptions::secret`](crate::ServerOptions::secret)), which both
    /// ends prove to each other. A client with another secret, or without the server's, is refused:
    /// [`Refusal`](crate::Refusal). Default: none.
    pub secret: Option<Secret>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            device: default_device(),
            endpoint: EndpointConfig::default(),
            connect_timeout: Duration::from_secs(5),
            max_reply: None,
            timeout: None,
            secret: None,
        }
    }
}

/// Why a client could not be made, or a call has no reply.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The device could not be opened, or its queues could not be created.
    #[error(transparent)]
    Device(#[from] BuildError),
    /// The address is invalid, or no server listens there.
    #[error("connecting to the server at {address}: {source}")]
    Unreachable {
        /// The address.
        address: String,
        /// The socket's error.
        source: io::Error,
    },
    /// [`ClientOptions::max_reply`] is above the limit.
    #[error(
        "a max_reply of {wanted} bytes, the limit is {max}: larger rings permit more (EndpointConfig::ring_size)"
    )]
    MaxReply {
        /// The option.
        wanted: usize,
        /// The limit in bytes.
        max: usize,
    },
    /// The thread of an [`AsyncClient`](crate::AsyncClient) could not be started.
    #[error("starting the thread of a client: {0}")]
    Thread(#[source] io::Error),
    /// The server and this client could not be connected.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The request is longer than the ring permits. It was not sent.
    #[error(
        "request of {len} bytes, the limit is {max}: larger rings take more (EndpointConfig::ring_size)"
    )]
    TooLarge {
        /// Bytes of the request.
        len: usize,
        /// Maximum bytes of a request.
        max: usize,
    },
    /// The time of the call ended before it was sent to a server that takes calls: the client was
    /// connecting again, or waited for room in the ring or for credit. No handler got the request,
    /// and none will.
    #[error(
        "not sent in time: there was no connection, or no room in its ring, or no credit for the reply"
    )]
    NotSent,
    /// The call was not sent, since calls that ran out of time or were dropped keep the credit of
    /// the connection, or the room in its ring: the server has not answered them, and they are at
    /// least as many as the calls that wait for a reply. No handler got the request, and none will.
    /// The next call connects again, and so has all of both.
    #[error(
        "the request was not sent: {given_up} calls that were given up keep the credit, or the room in the ring, until the server answers \
         them; the next call connects again (a smaller ClientOptions::max_reply lets more calls wait at a server)"
    )]
    NoCredit {
        /// Number of those calls.
        given_up: usize,
    },
    /// The request was sent, and no reply arrived in time. It is not known whether the handler ran,
    /// or will run.
    #[error("no reply in time")]
    TimedOut,
    /// The handler said no: it refused the request.
    #[error("the server refused the request")]
    Refused,
    /// The handler ran, and its reply is too long for this client.
    #[error(
        "the handler ran, but its reply of {len} bytes has more than {max} (ClientOptions::max_reply)"
    )]
    ReplyTooLong {
        /// Bytes of the reply.
        len: usize,
        /// Maximum bytes of a reply.
        max: usize,
    },
    /// The handler dropped the request, or the server ended while the handler had it.
    #[error("the server dropped the request")]
    Dropped,
    /// The connection ended before a reply arrived. The next call connects again. After
    /// [`CloseReason::ClosedByPeer`] no handler got the request: the server was leaving, and so was
    /// the next one that the client tried. Otherwise it is not known whether the handler ran.
    #[error("no reply: {0}")]
    Closed(CloseReason),
}

impl ClientError {
    /// Returns whether the same call can succeed later: no handler got the request, and none will.
    /// A refusal that does not pass is none: another secret, version, ring size or kind of device.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        use ClientError::{Closed, Connect, Device, NoCredit, NotSent, Unreachable};
        match self {
            Connect(error) => error.may_pass(),
            NotSent
            | NoCredit { .. }
            | Unreachable { .. }
            | Device(_)
            | Closed(CloseReason::ClosedByPeer) => true,
            _ => false,
        }
    }

    /// Returns whether a handler may have got the request, or may still get it: the call must not
    /// be repeated unless the server takes it twice.
    #[must_use]
    pub const fn may_have_executed(&self) -> bool {
        use ClientError::{Closed, Dropped, Refused, ReplyTooLong, TimedOut};
        matches!(
            self,
            TimedOut | Refused | ReplyTooLong { .. } | Dropped | Closed(_)
        ) && !self.is_retryable()
    }
}

copyrpc_calls::ending!(ClientError);

/// The device and the connection.
pub(super) struct Caller {
    /// Declared before the context.
    pub(super) endpoint: Endpoint<u64>,
    /// The endpoint before, whose calls have not all ended.
    leaving: Option<Endpoint<u64>>,
    pub(super) context: Context<u64>,
    /// The socket over which the endpoint was connected. Its end tells the server that this client
    /// may have died, so it is declared after the context, whose drop tells the server of a
    /// graceful end.
    lifeline: TcpStream,
    /// The address as given, for errors.
    pub(super) address: String,
    addresses: Addresses,
    pub(super) options: ClientOptions,
    /// Maximum bytes of a reply.
    pub(super) max_reply: usize,
    /// Time of the first call in a row that found no credit or no room, since [given up calls keep
    /// it](Self::is_starving).
    starving_since: Option<Instant>,
    /// Time of the last [`look`](Self::look), in ns.
    looked_ns: u64,
    /// Counters of the contexts before.
    past: Stats,
}

impl Caller {
    /// Opens the device, and connects to the server at `address`. Waits for the server as long as
    /// it `is_wanted`.
    pub(super) fn connect(
        address: impl ToSocketAddrs + fmt::Debug,
        options: &ClientOptions,
        is_wanted: impl Fn() -> bool,
    ) -> Result<Self, ClientError> {
        let name = mlx5_rendezvous::name_of(&address);
        let addresses = Addresses::of(address).map_err(|source| ClientError::Unreachable {
            address: name.clone(),
            source,
        })?;
        let context = open(options)?;
        let (endpoint, lifeline) = reach(
            &context,
            &name,
            &addresses,
            options,
            options.connect_timeout,
            is_wanted,
        )?;
        let max = endpoint.max_response_allowance();
        let max_reply = options
            .max_reply
            .unwrap_or_else(|| DEFAULT_REPLY.min(max / 4));
        if max_reply > max {
            return Err(ClientError::MaxReply {
                wanted: max_reply,
                max,
            });
        }
        let leaving = None;
        let starving_since = None;
        let past = Stats::default();
        let options = options.clone();
        let looked_ns = context.device().coarse_now_ns();
        Ok(Self {
            endpoint,
            leaving,
            context,
            lifeline,
            address: name,
            addresses,
            options,
            max_reply,
            starving_since,
            looked_ns,
            past,
        })
    }

    /// Makes a new connection in place of one that takes no calls, where the server is now. Tries
    /// for the time `patience`, and as long as `goes_on` returns true, which [polls](poll) the
    /// context. Calls that are under way end over the connection before, until there is a third
    /// one. Calls of a device that broke down must have ended before.
    pub(super) fn reconnect(
        &mut self,
        patience: Duration,
        mut goes_on: impl FnMut(&Context<u64>) -> bool,
    ) -> Result<(), ClientError> {
        self.starving_since = None;
        if self.endpoint.outstanding_calls() == 0 {
            self.endpoint.abort();
        } else if self.leaving.as_ref() != Some(&self.endpoint) {
            self.endpoint.close();
            if let Some(before) = self.leaving.replace(self.endpoint.clone()) {
                before.abort();
            }
        }
        if self.context.inner.breakdown().is_some() {
            self.leaving = None;
            let broken = std::mem::replace(&mut self.context, open(&self.options)?);
            self.past += broken.stats();
        }
        let (start, context) = (Instant::now(), &self.context);
        self.addresses
            .refresh(&self.address, patience / 2, || goes_on(context));
        let connected = reach(
            context,
            &self.address,
            &self.addresses,
            &self.options,
            patience.saturating_sub(start.elapsed()),
            || goes_on(context),
        )?;
        (self.endpoint, self.lifeline) = connected;
        Ok(())
    }

    /// Makes the call of this number. `left` is the time until its deadline; `None`: no deadline.
    #[inline]
    pub(super) fn call(
        &mut self,
        request: &[u8],
        number: u64,
        left: Option<Duration>,
    ) -> Result<CallToken, CallError<u64>> {
        let outcome = match left {
            Some(left) => self
                .endpoint
                .call_within(request, number, self.max_reply, left),
            None => self.endpoint.call(request, number, self.max_reply),
        };
        match &outcome {
            // A server keeps the bytes of a request that it holds, unless it releases them, and so
            // the ring after them.
            Err(CallError::InsufficientCredit(_) | CallError::RingFull(_))
                if self.is_starving() =>
            {
                self.starving_since.get_or_insert_with(Instant::now);
            }
            _ => self.starving_since = None,
        }
        outcome
    }

    /// Returns whether a call without credit or room waits for given up calls: they are at least as
    /// many as the live ones, and a new connection ends no live one of the [connection
    /// before](Self::leaving).
    fn is_starving(&self) -> bool {
        let given_up = self.endpoint.given_up_calls();
        given_up > 0
            && given_up >= self.endpoint.outstanding_calls()
            && self
                .leaving
                .as_ref()
                .is_none_or(|before| before.outstanding_calls() == 0)
    }

    /// Returns the error of a call that waits for credit or room which given up calls keep, if it
    /// is late, or such calls have waited for as long as a connection takes. A new connection has
    /// both, and the one in use is to take no further call.
    pub(super) fn starved(&mut self, is_late: bool) -> Option<ClientError> {
        let is_over = self.starves_for()?.is_zero() || is_late;
        if !is_over || !self.is_starving() {
            return None;
        }
        self.starving_since = None;
        Some(ClientError::NoCredit {
            given_up: self.endpoint.given_up_calls(),
        })
    }

    /// Returns the time for which calls go on waiting for what given up calls keep, if they do.
    pub(super) fn starves_for(&self) -> Option<Duration> {
        Some(
            self.options
                .connect_timeout
                .saturating_sub(self.starving_since?.elapsed()),
        )
    }

    /// Learns of an end of the connection in a pause between calls, and sends nothing. A call
    /// without a pause learns of it by its own end.
    #[inline(always)]
    pub(super) fn look(&mut self) {
        let now_ns = self.context.device().coarse_now_ns();
        let pause_ns = now_ns.wrapping_sub(std::mem::replace(&mut self.looked_ns, now_ns));
        if pause_ns >= LIFELINE_INTERVAL.as_nanos() as u64 {
            self.end_pause();
        }
    }

    /// Learns of an end of the connection, and ends one whose server has died. No call is under
    /// way.
    #[cold]
    fn end_pause(&self) {
        self.context.look(|_, reply| refuse(reply), |_, _| ());
        if has_hung_up(&self.lifeline) {
            self.endpoint.abort();
        }
    }

    /// Sends the calls that were made.
    pub(super) fn flush(&self) {
        // Not inside a poll.
        let _sent = self.context.flush_endpoints();
    }

    /// Sleeps until there is something to poll for, at most for `longest`. While calls wait, it
    /// also ends to see whether the server has died. Otherwise ends a connection whose server has
    /// died meanwhile, before a call is made that would have an unknown end.
    pub(super) fn sleep(&self, longest: Option<Duration>) {
        let waits = self.endpoint.outstanding_calls() > 0;
        // Not inside a poll.
        let is_woken = self.context.wait(
            longest
                .into_iter()
                .chain(waits.then_some(LIFELINE_INTERVAL))
                .min(),
        );
        if (!waits || matches!(is_woken, Ok(false))) && has_hung_up(&self.lifeline) {
            if waits {
                self.endpoint.probe()
            } else {
                self.endpoint.abort()
            }
        }
    }

    /// Cancels a call.
    pub(super) fn cancel(&self, call: CallToken) {
        self.endpoint
            .cancel(call)
            .or_else(|| self.leaving.as_ref()?.cancel(call));
    }

    /// Returns the counters of all connections ever made.
    pub(super) fn stats(&self) -> Stats {
        let mut stats = self.past;
        stats += self.context.stats();
        stats
    }
}

/// Polls a client's context: gives the ends of calls to `on_response`, and refuses the requests of
/// the server. A client has no handler, and requests that stay in the ring are in the way of
/// replies. Returns what [`Context::serve`] does.
pub(super) fn poll(context: &Context<u64>, on_response: impl FnMut(u64, Outcome<'_>)) -> usize {
    // The polls of a client do not nest.
    context
        .serve(|_, reply| refuse(reply), on_response)
        .unwrap_or(0)
}

fn refuse(reply: Reply<'_, u64>) {
    let _gone = reply.refuse();
}

fn open(options: &ClientOptions) -> Result<Context<u64>, BuildError> {
    ContextBuilder::new(options.device.clone())
        .endpoints_with(ENDPOINTS, &options.endpoint)
        .build()
}

/// Connects to the first address that has a server. Waits for a server that is not there yet.
fn reach(
    context: &Context<u64>,
    name: &str,
    addresses: &[SocketAddr],
    options: &ClientOptions,
    patience: Duration,
    is_wanted: impl FnMut() -> bool,
) -> Result<(Endpoint<u64>, TcpStream), ClientError> {
    let unreachable = |source| ClientError::Unreachable {
        address: name.to_owned(),
        source,
    };
    let meet = |mut meeting: Meeting<'_>| {
        if let Some(secret) = &options.secret {
            secret.prove::<ConnectError>(&mut meeting)?;
        }
        let endpoint = Handshake::of(context, &options.endpoint).complete(&mut meeting)?;
        Ok((
            endpoint,
            meeting.into_lifeline().map_err(ConnectError::Channel)?,
        ))
    };
    mlx5_rendezvous::reach(addresses, patience, is_wanted, meet, may_pass, unreachable)
}

/// Returns whether another attempt may succeed: the server left while this client waited for its
/// admission or during the handshake, or has no room until another client has gone, maybe this
/// one's predecessor.
fn may_pass(error: &ClientError) -> bool {
    match error {
        ClientError::Connect(error) if error.is_for_lack_of_room() => true,
        ClientError::Connect(ConnectError::Channel(error)) => {
            mlx5_rendezvous::stream_has_ended(error)
        }
        ClientError::Connect(ConnectError::Qp(error @ mlx5::ConnectError::Soft(_))) => {
            error.may_pass()
        }
        _ => false,
    }
}

/// Returns the end of a call as its caller hears it. Credit has blocks, so a reply with a few bytes
/// too many can arrive.
#[inline(always)]
pub(super) fn ended(outcome: Outcome<'_>, max_reply: usize) -> Result<Vec<u8>, ClientError> {
    match outcome {
        Ok(reply) if reply.len() <= max_reply => Ok(reply.to_vec()),
        Ok(reply) => Err(failed(
            CallFailure::ReplyTooLong { len: reply.len() },
            max_reply,
        )),
        Err(failure) => Err(failed(failure, max_reply)),
    }
}

#[cold]
fn failed(failure: CallFailure, max_reply: usize) -> ClientError {
    match failure {
        CallFailure::ReplyTooLong { len } => ClientError::ReplyTooLong {
            len,
            max: max_reply,
        },
        CallFailure::Refused => ClientError::Refused,
        CallFailure::Dropped => ClientError::Dropped,
        CallFailure::TimedOut => ClientError::TimedOut,
        CallFailure::Closed(reason) => ClientError::Closed(reason),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No later attempt has access; a device that is not there may come.
    #[test]
    fn a_refused_access_is_not_tried_again() {
        use mlx5::hca::ConnectError::{NoAccess, NoSuchDevice};
        let refused = |error| {
            may_pass(&ClientError::Connect(ConnectError::Qp(
                mlx5::ConnectError::Soft(error),
            )))
        };
        assert!(!refused(NoAccess {
            lid: 1,
            reason: String::new()
        }));
        assert!(refused(NoSuchDevice {
            lid: 1,
            reason: String::new()
        }));
    }
}
