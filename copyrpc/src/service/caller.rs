//! The client's end of a connection to a server. The connection is made again when it has ended.

use std::fmt;
use std::io;
use std::net::ToSocketAddrs;
use std::task::Waker;
use std::time::{Duration, Instant};

use copyrpc_calls::{
    Arrival, CONNECTIONS, Connection, Dial, EndOf, EndReason, Ended, Facts, GoesOn, OptionError,
    Refusal,
};
use mlx5::{DeviceInfo, DeviceSpec};
use mlx5_rendezvous::{LIFELINE_INTERVAL, Route, Secret};

use super::{ClientError, default_device};
use crate::config::EndpointConfig;
use crate::connect::Handshake;
use crate::connection::Outcome;
use crate::context::{Context, ContextBuilder};
use crate::endpoint::{CallToken, Endpoint};
use crate::error::{CallError, CallFailure, CloseReason, SetupError};
use crate::recv::Reply;
use crate::ring::RecvBytes;
use crate::stats::Stats;

/// Number of endpoints: the endpoint in use, the one before it while its calls end, and an ended
/// endpoint whose resources are not free yet.
const ENDPOINTS: u32 = 3;

/// Default of [`ClientOptions::max_reply`].
const DEFAULT_REPLY: usize = 4 << 10;

/// Options of a [`Client`](crate::Client).
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Device of the client, of the same kind as the server's. Default: the device given by the
    /// environment variable `COPYRPC_DEVICE` (`soft`, `mlx5_0`, `mlx5_0:2`), or the software HCA.
    pub device: DeviceSpec,
    /// Options of the connection. The ring size must be the server's.
    pub endpoint: EndpointConfig,
    /// Maximum time to wait, whenever a connection is made, for a server that is not there yet,
    /// does not answer, or has no room for another client. A refusal that does not pass ends the
    /// wait at once: another secret or version, or a device that this process may not reach.
    /// Default: 5 s.
    pub connect_timeout: Duration,
    /// Maximum length of a reply in bytes; a longer reply ends its call as
    /// [`ClientError::ReplyTooLong`]. A call takes `max_reply` of the credit, which is a quarter of
    /// the ring, until the server answers it, even if the call is given up before. Calls for which
    /// no credit is left wait, and end as [`ClientError::NoCredit`] if calls that were given up
    /// keep the credit. The limit is 3/16 of the ring. Default: 4 KiB, or a quarter of the limit if
    /// that is less. With the default and rings of 1 MiB the credit is enough for 63 calls at once.
    pub max_reply: Option<usize>,
    /// Timeout of [`Client::call`](crate::Client::call). Default: none; a call waits as long as the
    /// server lives and polls ([`EndpointConfig::stall_timeout`]).
    pub timeout: Option<Duration>,
    /// Maximum number of connections of an [`AsyncClient`](crate::AsyncClient): calls that find no
    /// room for 100 ms go over a further connection. Default: 8.
    pub connections: usize,
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
            connections: CONNECTIONS,
            secret: None,
        }
    }
}

impl EndReason for CloseReason {
    const CLOSED_HERE: Self = Self::ClosedHere;
}

/// The device of a client, and its connection to the server.
#[derive(Debug)]
pub struct Caller {
    /// The endpoint in use. It is declared before the context, so it is closed before the context
    /// is dropped.
    pub(super) endpoint: Endpoint<u64>,
    /// The previous endpoint, whose calls may not have ended.
    leaving: Option<Endpoint<u64>>,
    pub(super) context: Context<u64>,
    /// The way to the server, and the socket over which the endpoint was connected. The end of the
    /// socket is a sign for the server that this client may have died, so the route is declared
    /// after the context, whose drop closes the connection gracefully.
    route: Route,
    options: ClientOptions,
    max_reply: usize,
    /// Time of the first of the successive calls that found no credit or no room because [given up
    /// calls keep it](Self::is_starving); `None` if the last call was not of this kind.
    starving_since: Option<Instant>,
    /// Whether the endpoint has refused a call since the last sleep.
    has_no_room: bool,
    /// Counters of the contexts that the present context replaced.
    past: Stats,
}

impl<A: ToSocketAddrs + fmt::Debug> Dial<A> for Caller {
    type Options = ClientOptions;
    type Error = ClientError;
    const THREAD: &'static str = "copyrpc-client";

    fn dial(
        address: A,
        options: &ClientOptions,
        _: bool,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Self, ClientError> {
        let options = options.clone();
        let mut route = Route::to(address, options.secret.clone())?;
        let context = open(&options)?;
        let endpoint = route.connect(options.connect_timeout, is_wanted, |meeting| {
            Handshake::of(&context, &options.endpoint).complete(meeting)
        })?;
        let max = endpoint.max_response_allowance();
        let max_reply = options
            .max_reply
            .unwrap_or_else(|| DEFAULT_REPLY.min(max / 4));
        if max_reply > max {
            let legal =
                format!("at most {max}; a larger ring permits more (EndpointConfig::ring_size)");
            return Err(
                SetupError::from(OptionError::new("max_reply", max_reply as u64, legal)).into(),
            );
        }
        route.has_paused(context.device().coarse_now_ns());
        Ok(Self {
            endpoint,
            leaving: None,
            context,
            route,
            options,
            max_reply,
            starving_since: None,
            has_no_room: false,
            past: Stats::default(),
        })
    }

    fn no_thread(error: io::Error) -> ClientError {
        SetupError::Thread(error).into()
    }
}

impl Connection for Caller {
    type Kind = ();
    type Request = [u8];
    type Reply = Vec<u8>;
    type Arrival<'a> = RecvBytes<'a>;
    type ConnectError = SetupError;
    type EndReason = CloseReason;
    type Call = CallToken;
    type Stats = Stats;
    type Device = DeviceInfo;

    #[inline(always)]
    fn call(
        &mut self,
        number: u64,
        (): (),
        request: &[u8],
        left: Option<Duration>,
    ) -> Result<CallToken, Refusal<ClientError>> {
        let outcome = match left {
            Some(left) => self
                .endpoint
                .call_within(request, number, self.max_reply, left),
            None => self.endpoint.call(request, number, self.max_reply),
        };
        match outcome {
            Ok(call) => {
                self.starving_since = None;
                Ok(call)
            }
            Err(error) => Err(self.refusal(error)),
        }
    }

    fn end_within(&mut self, call: CallToken, left: Duration) {
        self.endpoint.end_within(call, left);
    }

    #[inline]
    fn flush(&mut self) {
        // The function does not run inside a poll, so no guard is needed.
        self.context.inner.flush();
    }

    #[inline(always)]
    fn poll(&mut self, on_end: impl FnMut(u64, EndOf<Self, RecvBytes<'_>>)) -> bool {
        poll(&self.context, self.max_reply, on_end) > 0
    }

    fn late(&mut self) -> ClientError {
        self.starved(true).unwrap_or(ClientError::NotSent)
    }

    fn cancel(&mut self, call: CallToken) {
        self.endpoint
            .cancel(call)
            .or_else(|| self.leaving.as_ref()?.cancel(call));
    }

    /// Sleeps. While calls are under way, the sleep also ends to check whether the server has died.
    /// Otherwise a connection whose server has died is ended here, so that no call is made on it:
    /// it would not be known whether such a call was executed.
    fn sleep(&mut self, limit: Option<Duration>) {
        // The context knows the deadlines of the calls that the endpoint has taken. A call that
        // still waits is tried again after the sleep.
        let has_no_room = std::mem::take(&mut self.has_no_room);
        let starves_for = self.starves_for().filter(|_| has_no_room);
        let waits = self.endpoint.outstanding_calls() > 0;
        let limits = [limit, starves_for, waits.then_some(LIFELINE_INTERVAL)];
        // The wait cannot fail, because the function does not run inside a poll.
        let is_woken = self.context.wait(limits.into_iter().flatten().min());
        if (!waits || matches!(is_woken, Ok(false))) && self.route.has_hung_up() {
            if waits {
                self.endpoint.probe()
            } else {
                self.endpoint.abort()
            }
        }
    }

    fn waker(&self) -> Waker {
        self.context.waker()
    }

    /// Makes a new connection in place of one that takes no calls, to the address at which the
    /// server is now. Calls that are under way end over the previous connection, until a third
    /// connection is made. Calls of a device that broke down must have ended before.
    fn reconnect(
        &mut self,
        within: Duration,
        goes_on: &mut GoesOn<'_, Self>,
    ) -> Result<(), ClientError> {
        self.starving_since = None;
        // A server that closes waits for the closing mark of this end, so this connection ends
        // gracefully and is not aborted.
        if self.endpoint.outstanding_calls() == 0 && !self.endpoint.is_closed_by_peer() {
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
        let (context, endpoint, max_reply) =
            (&self.context, &self.options.endpoint, self.max_reply);
        let mut ended = Ended::<Self>::new();
        // A server that closes waits until its last messages were taken. On a device that sends
        // packets, this thread has to take them, so it polls.
        let leaving = self.leaving.as_ref();
        let mut goes_on = || {
            poll(context, max_reply, |number, outcome| {
                ended.push((number, outcome.map(Arrival::into_reply)))
            });
            let is_wanted = goes_on(&mut ended, &mut |call| {
                leaving.and_then(|before| before.cancel(call));
            });
            // Sends the notices of the cancelled calls, as the next poll may be late.
            context.inner.flush();
            is_wanted
        };
        // This poll frees the resources of the ended connection.
        goes_on();
        let (next, _before) = self.route.connect_again(within, goes_on, |meeting| {
            Handshake::of(context, endpoint).complete(meeting)
        })?;
        self.endpoint = next;
        Ok(())
    }

    /// Sends nothing. Checks the socket only after a pause between calls. A call that follows
    /// another call without a pause detects the end of the connection when the call itself ends.
    #[inline(always)]
    fn has_ended(&mut self) -> bool {
        let now_ns = self.context.device().coarse_now_ns();
        if self.route.has_paused(now_ns) {
            self.end_pause();
        }
        self.endpoint.closed().is_some()
    }

    fn facts(&self) -> Facts<Stats> {
        let mut stats = self.past;
        stats += self.context.stats();
        Facts {
            connect_timeout: self.options.connect_timeout,
            timeout: self.options.timeout,
            connections: self.options.connections,
            max_request: self.endpoint.max_payload(),
            max_reply: self.max_reply,
            stats,
        }
    }

    fn device(&self) -> DeviceInfo {
        self.context.device_info()
    }
}

impl Caller {
    /// Returns the fate of a call that the endpoint did not take.
    #[cold]
    fn refusal(&mut self, error: CallError<u64>) -> Refusal<ClientError> {
        match error {
            CallError::PayloadTooLarge { len, max, .. } => {
                return Refusal::Failed(ClientError::TooLarge { len, max });
            }
            // A server keeps the bytes of a request that it holds, unless it releases them, and
            // thereby all ring space after them. So calls that were given up can keep room, too.
            CallError::InsufficientCredit(_) | CallError::RingFull(_) if self.is_starving() => {
                self.starving_since.get_or_insert_with(Instant::now);
            }
            _ => self.starving_since = None,
        }
        let endpoint = &self.endpoint;
        self.has_no_room = true;
        if endpoint.closed().is_some() || endpoint.is_closing() {
            // The calls of this connection end before those of the next connection begin, so the
            // call waits.
            let waits = matches!(error, CallError::Closed { .. })
                && endpoint.closed().is_some()
                && endpoint.outstanding_calls() > 0;
            if waits {
                Refusal::NoRoom
            } else {
                Refusal::Ended
            }
        } else {
            self.starved(false).map_or(Refusal::NoRoom, Refusal::Failed)
        }
    }

    /// Returns whether a call without credit or room waits for given up calls, so that a new
    /// connection helps. The given up calls must be at least as many as the live calls, and the new
    /// connection must end no live call of the [previous connection](Self::leaving).
    fn is_starving(&self) -> bool {
        let given_up = self.endpoint.given_up_calls();
        given_up > 0
            && given_up >= self.endpoint.outstanding_calls()
            && self
                .leaving
                .as_ref()
                .is_none_or(|before| before.outstanding_calls() == 0)
    }

    /// Returns the error of a call that waits for credit or room that given up calls keep; `None`
    /// before its deadline, unless calls have waited like this for the connect timeout. After the
    /// error, later calls are made on another connection, which has both credit and room.
    fn starved(&mut self, is_late: bool) -> Option<ClientError> {
        let is_over = self.starves_for()?.is_zero() || is_late;
        if !is_over || !self.is_starving() {
            return None;
        }
        self.starving_since = None;
        let given_up = self.endpoint.given_up_calls();
        self.endpoint.close();
        Some(ClientError::NoCredit { given_up })
    }

    /// Returns the remaining time for which calls wait for the credit and room that given up calls
    /// keep; `None` if no call waits for that.
    fn starves_for(&self) -> Option<Duration> {
        Some(
            self.options
                .connect_timeout
                .saturating_sub(self.starving_since?.elapsed()),
        )
    }

    /// Detects in a pause between calls that the connection has ended, and ends a connection whose
    /// server has died. No call may be under way.
    #[cold]
    fn end_pause(&self) {
        self.context.look(|_, reply| refuse(reply), |_, _| ());
        if self.route.has_hung_up() && !self.endpoint.is_closed_by_peer() {
            self.endpoint.abort();
        }
    }
}

/// Polls a client's context: passes the ends of calls to `on_end`, and refuses the requests of the
/// server. A client has no handler, and requests that stay in the ring take the room of replies.
/// Returns what [`Context::serve`] does.
#[inline(always)]
fn poll(
    context: &Context<u64>,
    max_reply: usize,
    mut on_end: impl FnMut(u64, Outcome<'_>),
) -> usize {
    // The polls of a client do not nest, so none fails.
    context
        .serve(
            |_, reply| refuse(reply),
            |number, outcome| on_end(number, ended(outcome, max_reply)),
        )
        .unwrap_or(0)
}

fn refuse(reply: Reply<'_, u64>) {
    let _gone = reply.refuse();
}

fn open(options: &ClientOptions) -> Result<Context<u64>, SetupError> {
    ContextBuilder::new(options.device.clone())
        .endpoints_with(ENDPOINTS, &options.endpoint)
        .build()
}

/// Returns the end of a call in the form in which the caller receives it. Credit is counted in
/// blocks, so a reply that is a few bytes too long can arrive.
#[inline(always)]
fn ended(outcome: Outcome<'_>, max_reply: usize) -> Outcome<'_> {
    let reply = outcome?;
    if reply.len() > max_reply {
        return Err(CallFailure::ReplyTooLong {
            len: Some(reply.len()),
        });
    }
    Ok(reply)
}
