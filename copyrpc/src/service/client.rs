//! The client: one call at a time, which ends with a reply or an error.

use std::fmt;
use std::net::ToSocketAddrs;
use std::time::{Duration, Instant};

use calls::{Patience, methods};
use mlx5::DeviceInfo;

use super::caller::{Caller, ClientError, ClientOptions, ended};
use crate::error::{CallError, CloseReason};
use crate::stats::Stats;

/// A connection to a [`Server`](crate::Server). A call after the end of the connection connects again. A client belongs to one thread. It
/// cannot be called: it refuses each request of a server, while it has a call under way.
///
/// For many calls at once there are [`Context`](crate::Context) and [`Endpoint`](crate::Endpoint), which this type uses.
///
/// ```no_run
/// let mut client = copyrpc::Client::connect("127.0.0.1:7479")?;
/// assert_eq!(&client.call(b"ping")?[..], b"PING");
/// # Ok::<(), copyrpc::ClientError>(())
/// ```
pub struct Client {
    pub(super) caller: Caller,
    /// Numbers the calls: a reply that arrives after its call was given up does not belong to the next call.
    calls: u64,
    patience: Patience,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("address", &self.caller.address).field("endpoint", &self.caller.endpoint).finish_non_exhaustive()
    }
}

impl Client {
    /// Opens the device, and connects to the server at `address`. Waits for a server that is not there yet.
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
    pub fn with_options(address: impl ToSocketAddrs + fmt::Debug, options: &ClientOptions) -> Result<Self, ClientError> {
        Ok(Self { caller: Caller::connect(address, options, || true)?, calls: 0, patience: Patience::new() })
    }

    /// Sends a request and waits for its reply, as long as the options allow. If the connection has ended, connects again first.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call(&mut self, request: &[u8]) -> Result<Vec<u8>, ClientError> {
        self.call_for(request, self.caller.options.timeout)
    }

    /// Like [`call`](Self::call), with a timeout of its own, which includes a new connection.
    ///
    /// # Errors
    /// [`ClientError`]: [`NotSent`](ClientError::NotSent) if the time ended before the request was sent, so that the call can be made again;
    /// [`TimedOut`](ClientError::TimedOut) if it ended later.
    ///
    /// The server is not told that a call ran out of time, and its [`max_reply`](ClientOptions::max_reply) stays taken from the credit of the
    /// connection until the server answers it. So after some calls that a server never answers, 63 by default, the next one is not sent:
    /// it ends in its time, or without a time after [`connect_timeout`](ClientOptions::connect_timeout), as
    /// [`NoCredit`](ClientError::NoCredit), and the call after it connects again.
    pub fn call_within(&mut self, request: &[u8], timeout: Duration) -> Result<Vec<u8>, ClientError> {
        self.call_for(request, Some(timeout))
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

    fn call_for(&mut self, request: &[u8], timeout: Option<Duration>) -> Result<Vec<u8>, ClientError> {
        let end = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        // Learn of an end of the connection since the last call.
        self.caller.poll(|_, _| ());
        if self.caller.endpoint.closed().is_some() {
            self.reconnect(end)?;
        }
        match self.attempt(request, end) {
            // No handler got the call: the server was leaving. There may be another server by now.
            Err(ClientError::Closed(CloseReason::ClosedByPeer)) => {
                self.reconnect(end)?;
                self.attempt(request, end)
            }
            outcome => outcome,
        }
    }

    fn reconnect(&mut self, end: Option<Instant>) -> Result<(), ClientError> {
        self.caller.endpoint.abort();
        // Frees the resources of the ended connection.
        self.caller.poll(|_, _| ());
        let patience = self.caller.options.connect_timeout;
        let left = end.map_or(patience, |end| end.saturating_duration_since(Instant::now()));
        self.caller.reconnect(left.min(patience), || true).map_err(|error| if is_over(end) { ClientError::NotSent } else { error })
    }

    fn attempt(&mut self, request: &[u8], end: Option<Instant>) -> Result<Vec<u8>, ClientError> {
        self.calls += 1;
        let number = self.calls;
        let mut is_made = false;
        self.patience.reset();
        loop {
            // The time also bounds a call that is not taken yet.
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if !is_made {
                is_made = match self.caller.call(request, number, left) {
                    Ok(_) => true,
                    Err(CallError::Closed { reason, .. }) => return Err(ClientError::Closed(reason)),
                    Err(CallError::PayloadTooLarge { len, max, .. }) => return Err(ClientError::TooLarge { len, max }),
                    Err(_) => {
                        let is_late = left == Some(Duration::ZERO);
                        if let Some(error) = self.caller.starved(is_late) {
                            self.caller.endpoint.abort();
                            return Err(error);
                        }
                        if is_late {
                            return Err(ClientError::NotSent);
                        }
                        false
                    }
                };
            }
            let mut end_of_call = None;
            let max_reply = self.caller.max_reply;
            let moved = self.caller.poll(|of, outcome| {
                if of == number {
                    end_of_call = Some(ended(outcome, max_reply));
                }
            });
            if let Some(outcome) = end_of_call {
                return outcome;
            }
            if moved > 0 {
                self.patience.reset();
            } else if let Some(start) = self.patience.idle() {
                // The context knows the deadline of a call that was made.
                let longest = left.into_iter().chain(self.caller.starves_for()).min();
                self.caller.sleep(longest.filter(|_| !is_made));
                self.patience.slept(start);
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
        self.call_for(request, timeout)
    }
}

fn is_over(end: Option<Instant>) -> bool {
    end.is_some_and(|end| end <= Instant::now())
}
