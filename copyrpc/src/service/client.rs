//! The client: one call at a time, which ends with a reply or an error.

use std::fmt;
use std::net::ToSocketAddrs;
use std::time::{Duration, Instant};

use copyrpc_calls::{Patience, methods};
use mlx5::DeviceInfo;

use super::caller::{Caller, ClientError, ClientOptions, ended, poll};
use crate::endpoint::CallToken;
use crate::error::{CallError, CloseReason};
use crate::stats::Stats;

/// A connection to a [`Server`](crate::Server). A call after the end of the connection connects
/// again. A client belongs to one thread. It cannot be called: it refuses each request of a server,
/// while it has a call under way.
///
/// For many calls at once there are [`Context`](crate::Context) and [`Endpoint`](crate::Endpoint),
/// which this type uses.
///
/// ```no_run
/// let mut client = copyrpc::Client::connect("127.0.0.1:7479")?;
/// assert_eq!(&client.call(b"ping")?[..], b"PING");
/// # Ok::<(), copyrpc::ClientError>(())
/// ```
pub struct Client {
    pub(super) caller: Caller,
    /// Numbers the calls: a reply that arrives after its call was given up does not belong to the
    /// next call.
    calls: u64,
    patience: Patience,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("address", &self.caller.address)
            .field("endpoint", &self.caller.endpoint)
            .finish_non_exhaustive()
    }
}

impl Client {
    /// Opens the device, and connects to the server at `address`. Waits for a server that is not
    /// there yet.
    ///
    /// # Errors
    /// [`ClientError`]; nothing is left behind.
    pub fn connect(address: impl ToSocketAddrs + fmt::Debug) -> Result<Self, ClientError> {
        Self::with_options(address, &ClientOptions::default())
    }

    /// Like [`connect`](Self::connect), with options.
    ///
    /// # Errors
    /// [`ClientError`]; nothing is left behind.
    pub fn with_options(
        address: impl ToSocketAddrs + fmt::Debug,
        options: &ClientOptions,
    ) -> Result<Self, ClientError> {
        Ok(Self {
            caller: Caller::connect(address, options, || true)?,
            calls: 0,
            patience: Patience::new(),
        })
    }

    /// Sends a request and waits for its reply, as long as the options allow. If the connection has
    /// ended, connects again first.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call(&mut self, request: &[u8]) -> Result<Vec<u8>, ClientError> {
        self.call_for(request, self.caller.options.timeout, Self::idle)
    }

    /// Like [`call`](Self::call), with a timeout of its own, which includes a new connection. It
    /// begins with a new connection, a wait for room, or the 64th poll for the reply, whichever is
    /// first: a call that is answered by then does not read the clock.
    ///
    /// # Errors
    /// [`ClientError`]: [`NotSent`](ClientError::NotSent) if the time ended before the request was sent, so that the call can be made again;
    /// [`TimedOut`](ClientError::TimedOut) if it ended later.
    ///
    /// The server is not told that a call ran out of time, and its
    /// [`max_reply`](ClientOptions::max_reply) stays taken from the credit of the connection until
    /// the server answers it. So after some calls that a server never answers, 63 by default, the
    /// next one is not sent: it ends in its time, or without a time after
    /// [`connect_timeout`](ClientOptions::connect_timeout), as [`NoCredit`](ClientError::NoCredit),
    /// and the call after it connects again.
    pub fn call_within(
        &mut self,
        request: &[u8],
        timeout: Duration,
    ) -> Result<Vec<u8>, ClientError> {
        self.call_for(request, Some(timeout), Self::idle)
    }

    /// Returns the maximum bytes of a request.
    #[must_use]
    pub fn max_request(&self) -> usize {
        self.caller.endpoint.max_payload()
    }

    /// Returns the maximum bytes of a reply.
    #[must_use]
    pub fn max_reply(&self) -> usize {
        self.caller.max_reply
    }

    /// Returns name, transport and capabilities of the device in use.
    #[must_use]
    pub fn device_info(&self) -> DeviceInfo {
        self.caller.context.device_info()
    }

    /// Returns the counters of all connections ever made.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.caller.stats()
    }

    /// Like [`call`](Self::call), with another wait than its own: `idle` runs after each poll
    /// without the reply. For counts of instructions.
    #[doc(hidden)]
    pub fn call_with_idle(
        &mut self,
        request: &[u8],
        timeout: Option<Duration>,
        mut idle: impl FnMut(),
    ) -> Result<Vec<u8>, ClientError> {
        self.call_for(request, timeout, |_, _| idle())
    }

    /// Makes a call. `idle` runs after each poll without the reply, and gets the end of a call that
    /// could not be made yet.
    fn call_for(
        &mut self,
        request: &[u8],
        timeout: Option<Duration>,
        mut idle: impl FnMut(&mut Self, Option<Instant>),
    ) -> Result<Vec<u8>, ClientError> {
        let mut limit = Limit { timeout, end: None };
        self.caller.look();
        if self.caller.endpoint.closed().is_some() {
            self.reconnect(&mut limit)?;
        }
        match self.attempt(request, &mut limit, &mut idle) {
            // No handler got the call: the server was leaving. There may be another server by now.
            Err(ClientError::Closed(CloseReason::ClosedByPeer)) => {
                self.call_again(request, limit, idle)
            }
            outcome => outcome,
        }
    }

    #[cold]
    #[inline(never)]
    fn call_again(
        &mut self,
        request: &[u8],
        mut limit: Limit,
        mut idle: impl FnMut(&mut Self, Option<Instant>),
    ) -> Result<Vec<u8>, ClientError> {
        self.reconnect(&mut limit)?;
        self.attempt(request, &mut limit, &mut idle)
    }

    #[cold]
    fn reconnect(&mut self, limit: &mut Limit) -> Result<(), ClientError> {
        self.caller.endpoint.abort();
        // Frees the resources of the ended connection.
        poll(&self.caller.context, |_, _| ());
        let patience = self.caller.options.connect_timeout;
        let longest = left(limit.end()).map_or(patience, |left| left.min(patience));
        let outcome = self.caller.reconnect(longest, |context| {
            // A server that leaves waits until its last messages were taken, by packets in this
            // thread.
            poll(context, |_, _| ());
            true
        });
        outcome.map_err(|error| {
            if left(limit.end()) == Some(Duration::ZERO) {
                ClientError::NotSent
            } else {
                error
            }
        })
    }

    #[inline(always)]
    fn attempt(
        &mut self,
        request: &[u8],
        limit: &mut Limit,
        idle: &mut impl FnMut(&mut Self, Option<Instant>),
    ) -> Result<Vec<u8>, ClientError> {
        self.calls += 1;
        let (number, max_reply) = (self.calls, self.caller.max_reply);
        let mut call = self.make(request, left(limit.end))?;
        loop {
            let mut end_of_call = None;
            poll(&self.caller.context, |of, outcome| {
                if of == number {
                    end_of_call = Some(ended(outcome, max_reply));
                }
            });
            if let Some(outcome) = end_of_call {
                return outcome;
            }
            // The context knows the deadline of a call that was made.
            idle(self, if call.is_none() { limit.end() } else { None });
            let Some(made) = call else {
                call = self.make(request, left(limit.end()))?;
                continue;
            };
            if limit.end.is_none() && self.patience.is_clock_due() {
                left(limit.end())
                    .into_iter()
                    .for_each(|left| self.caller.endpoint.end_within(made, left));
            }
        }
    }

    /// Notes a poll without the reply. Sleeps after enough of them: until `end` at most, or until a
    /// call that waits for credit has to.
    fn idle(&mut self, end: Option<Instant>) {
        let Some(start) = self.patience.idle() else {
            return;
        };
        self.caller
            .sleep(left(end).into_iter().chain(self.caller.starves_for()).min());
        self.patience.slept(start);
    }

    /// Makes the present call and sends it. Returns it if there was room; ends the call if its time
    /// has ended, or given up calls keep the credit.
    #[inline(always)]
    fn make(
        &mut self,
        request: &[u8],
        left: Option<Duration>,
    ) -> Result<Option<CallToken>, ClientError> {
        match self.caller.call(request, self.calls, left) {
            Ok(call) => {
                // Before a poll, which would look for arrivals first.
                self.caller.flush();
                self.patience.reset();
                Ok(Some(call))
            }
            Err(CallError::Closed { reason, .. }) => Err(ClientError::Closed(reason)),
            Err(CallError::PayloadTooLarge { len, max, .. }) => {
                Err(ClientError::TooLarge { len, max })
            }
            Err(_) => {
                let is_late = left == Some(Duration::ZERO);
                if let Some(error) = self.caller.starved(is_late) {
                    self.caller.endpoint.abort();
                    return Err(error);
                }
                if is_late {
                    Err(ClientError::NotSent)
                } else {
                    Ok(None)
                }
            }
        }
    }
}

impl methods::Caller for Client {
    type Error = ClientError;

    fn timeout(&self) -> Option<Duration> {
        self.caller.options.timeout
    }

    fn call(&mut self, request: &[u8], timeout: Option<Duration>) -> Result<Vec<u8>, ClientError> {
        self.call_for(request, timeout, Self::idle)
    }
}

/// The time of a call.
struct Limit {
    timeout: Option<Duration>,
    /// Known once the clock was read.
    end: Option<Instant>,
}

impl Limit {
    /// Returns the time of its end. The first time, reads the clock.
    fn end(&mut self) -> Option<Instant> {
        self.end = self.end.or_else(|| {
            self.timeout
                .and_then(|timeout| Instant::now().checked_add(timeout))
        });
        self.end
    }
}

/// Returns the time until the end of a call.
#[inline(always)]
fn left(end: Option<Instant>) -> Option<Duration> {
    end.map(|end| end.saturating_duration_since(Instant::now()))
}
