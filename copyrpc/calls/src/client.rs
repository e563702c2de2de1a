//! The client with one call at a time, which ends with a reply or an error.

use std::borrow::Cow;
use std::fmt;
use std::time::{Duration, Instant};

use crate::connection::{Arrival, Connection, Dial, ErrorOf, Refusal, Repeats};
use crate::error::{CallFailure, ClientError};
use crate::{Patience, methods};

/// A client over a connection. A call after the end of the connection connects again. A client
/// belongs to one thread.
pub struct Client<C: Connection> {
    connection: C,
    timeout: Option<Duration>,
    /// Number of the last call. A reply that arrives after its call was given up has another
    /// number, and so does not end the next call.
    calls: u64,
    patience: Patience,
    reply: Vec<u8>,
}

impl<C: Connection> fmt::Debug for Client<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("device", &self.connection.device())
            .field("calls", &self.calls)
            .finish_non_exhaustive()
    }
}

impl<C: Connection<Reply = Vec<u8>>> Client<C> {
    /// Connects to the server at `address`. Waits for a server that has not started yet, as long as
    /// `connect_timeout` of the default options: 5 s over copyrpc and scalerpc, not at all over ipc.
    ///
    /// # Errors
    /// The reason; nothing is left behind.
    pub fn connect<A>(address: A) -> Result<Self, C::Error>
    where
        C: Dial<A>,
    {
        Self::with_options(address, &C::Options::default())
    }

    /// Like [`connect`](Self::connect), with options.
    ///
    /// # Errors
    /// The reason; nothing is left behind.
    pub fn with_options<A>(address: A, options: &C::Options) -> Result<Self, C::Error>
    where
        C: Dial<A>,
    {
        let connection = C::dial(address, options, false, &|| true)?;
        Ok(Self {
            timeout: connection.facts().timeout,
            connection,
            calls: 0,
            patience: Patience::new(),
            reply: Vec::new(),
        })
    }

    /// Sends a request and waits for its reply, as long as the options allow. If the connection has
    /// ended, connects again first. The client keeps the reply until its next call, and keeps the
    /// memory of its longest reply.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call(&mut self, request: &C::Request) -> Result<&[u8], ErrorOf<C>> {
        self.call_for(C::Kind::default(), request, self.timeout, Self::idle)
    }

    /// Like [`call`](Self::call), with a timeout of its own, which includes the time for a new
    /// connection. The timeout begins with a new connection, a wait for room, or the 64th poll for
    /// the reply, whichever is first: a call that is answered before does not read the clock.
    ///
    /// The server is informed of the end of a timeout, and the room that the call takes at the
    /// connection stays taken until the handler has ended. Once such calls keep all of the room, a
    /// further call is not sent. It ends as [`NoCredit`](ClientError::NoCredit) after its timeout,
    /// or, if it has none, after the maximum time for a new connection; the call after it connects
    /// again.
    ///
    /// # Errors
    /// [`ClientError`]: [`NotSent`](ClientError::NotSent) if the timeout ended before the request
    /// was sent, so that the call can be made again (a timeout of zero always ends so);
    /// [`TimedOut`](ClientError::TimedOut) if it ended later.
    pub fn call_within(
        &mut self,
        request: &C::Request,
        timeout: Duration,
    ) -> Result<&[u8], ErrorOf<C>> {
        self.call_for(C::Kind::default(), request, Some(timeout), Self::idle)
    }

    /// Returns the maximum length of a request in bytes.
    #[must_use]
    pub fn max_request(&self) -> usize {
        self.connection.facts().max_request
    }

    /// Returns the maximum length of a reply in bytes.
    #[must_use]
    pub fn max_reply(&self) -> usize {
        self.connection.facts().max_reply
    }

    /// Returns name, transport and capabilities of the device in use.
    #[must_use]
    pub fn device_info(&self) -> C::Device {
        self.connection.device()
    }

    /// Returns the counters of all connections ever made.
    #[must_use]
    pub fn stats(&self) -> C::Stats {
        self.connection.facts().stats
    }

    /// Returns the connection.
    #[must_use]
    pub const fn connection(&mut self) -> &mut C {
        &mut self.connection
    }

    /// Like [`call_within`](Self::call_within), with the caller's way to wait: `idle` runs after
    /// each poll without the reply. For counts of instructions.
    ///
    /// # Errors
    /// [`ClientError`].
    #[doc(hidden)]
    pub fn call_with_idle(
        &mut self,
        request: &C::Request,
        timeout: Option<Duration>,
        mut idle: impl FnMut(),
    ) -> Result<&[u8], ErrorOf<C>> {
        self.call_for(C::Kind::default(), request, timeout, |_, _| idle())
    }

    /// Makes a call. `idle` runs after each poll without the reply. While the call waits for room,
    /// `idle` gets the end of the call's time.
    fn call_for(
        &mut self,
        kind: C::Kind,
        request: &C::Request,
        timeout: Option<Duration>,
        mut idle: impl FnMut(&mut Self, Option<Instant>),
    ) -> Result<&[u8], ErrorOf<C>> {
        if timeout == Some(Duration::ZERO) {
            return Err(ClientError::NotSent);
        }
        let mut limit = Limit { timeout, end: None };
        if self.connection.has_ended() {
            self.reconnect(&mut limit)?;
        }
        match self.attempt(kind, request, &mut limit, &mut idle) {
            Ok(()) => self.connection.rest(),
            Err(refusal) => {
                let outcome = self.call_again(kind, request, limit, refusal, idle);
                self.connection.rest();
                outcome?;
            }
        }
        Ok(&self.reply)
    }

    /// Repeats a call that the connection refused, or that no handler got: the server was closing,
    /// and another server may have started since.
    #[cold]
    #[inline(never)]
    fn call_again(
        &mut self,
        kind: C::Kind,
        request: &C::Request,
        mut limit: Limit,
        mut refusal: Refusal<ErrorOf<C>>,
        mut idle: impl FnMut(&mut Self, Option<Instant>),
    ) -> Result<(), ErrorOf<C>> {
        let (mut repeats, patience) = (Repeats::default(), self.connection.facts().connect_timeout);
        loop {
            match refusal {
                Refusal::Failed(ClientError::NotSent)
                    if !limit.is_over() && repeats.go_on(patience) => {}
                Refusal::Failed(error) => return Err(error),
                _ => self.reconnect(&mut limit)?,
            }
            match self.attempt(kind, request, &mut limit, &mut idle) {
                Ok(()) => return Ok(()),
                Err(next) => refusal = next,
            }
        }
    }

    #[cold]
    fn reconnect(&mut self, limit: &mut Limit) -> Result<(), ErrorOf<C>> {
        let patience = self.connection.facts().connect_timeout;
        let within = left(limit.end()).map_or(patience, |left| left.min(patience));
        let outcome = self.connection.reconnect(within, &mut |_, _| true);
        outcome.map_err(|error| {
            if limit.is_over() {
                ClientError::NotSent
            } else {
                error
            }
        })
    }

    #[inline(always)]
    fn attempt(
        &mut self,
        kind: C::Kind,
        request: &C::Request,
        limit: &mut Limit,
        idle: &mut impl FnMut(&mut Self, Option<Instant>),
    ) -> Result<(), Refusal<ErrorOf<C>>> {
        self.calls += 1;
        let number = self.calls;
        let mut made = self.make(kind, request, left(limit.end));
        while let Err(Refusal::NoRoom) = made {
            self.connection.poll(|_, _| ());
            idle(self, limit.end());
            made = self.make(kind, request, left(limit.end()));
        }
        let call = made?;
        loop {
            let mut end_of_call = None;
            let reply = &mut self.reply;
            self.connection.poll(|of, outcome| {
                if of == number {
                    end_of_call = Some(outcome.map(|arrival| arrival.overwrite(reply)));
                }
            });
            if let Some(outcome) = end_of_call {
                return outcome.map_err(failed::<C>);
            }
            // The connection knows the deadline of a call that was made.
            idle(self, None);
            if limit.end.is_none() && self.patience.is_clock_due() {
                left(limit.end())
                    .into_iter()
                    .for_each(|left| self.connection.end_within(call, left));
            }
        }
    }

    /// Notes a poll without the reply. Sleeps after enough of them, until `end` at most.
    fn idle(&mut self, end: Option<Instant>) {
        if let Some(start) = self.patience.idle() {
            self.connection.sleep(left(end));
            self.patience.slept(start);
        }
    }

    /// Makes the present call and sends it, unless its time has ended.
    #[inline(always)]
    fn make(
        &mut self,
        kind: C::Kind,
        request: &C::Request,
        left: Option<Duration>,
    ) -> Result<C::Call, Refusal<ErrorOf<C>>> {
        if left == Some(Duration::ZERO) {
            return Err(Refusal::Failed(self.connection.late()));
        }
        let call = self.connection.call(self.calls, kind, request, left)?;
        // The request is flushed here and not by the next poll, because a poll checks for arrivals
        // before it sends.
        self.connection.flush();
        self.patience.reset();
        Ok(call)
    }
}

impl<C: Connection<Kind = u16, Reply = Vec<u8>>> Client<C> {
    /// Like [`call`](Self::call), for the handler of the type `rpc_type`.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call_type(&mut self, rpc_type: u16, request: &C::Request) -> Result<&[u8], ErrorOf<C>> {
        self.call_for(rpc_type, request, self.timeout, Self::idle)
    }
}

impl<C: Connection<Request = [u8], Reply = Vec<u8>>> methods::Caller for Client<C> {
    type Error = ErrorOf<C>;

    fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    fn call(
        &mut self,
        request: &[u8],
        timeout: Option<Duration>,
    ) -> Result<Cow<'_, [u8]>, ErrorOf<C>> {
        self.call_for(C::Kind::default(), request, timeout, Self::idle)
            .map(Cow::Borrowed)
    }
}

/// Returns the failure as the end of a call without its reply. The failure is smaller than the
/// error of a client, and becomes one only here, so that a reply on its way takes no more memory
/// than a failure.
#[cold]
fn failed<C: Connection>(failure: CallFailure<C::EndReason>) -> Refusal<ErrorOf<C>> {
    Refusal::Failed(failure.of_client())
}

struct Limit {
    timeout: Option<Duration>,
    /// End of the call's time, once the clock was read.
    end: Option<Instant>,
}

impl Limit {
    /// Returns the end of the call's time. Reads the clock the first time.
    fn end(&mut self) -> Option<Instant> {
        self.end = self.end.or_else(|| {
            self.timeout
                .and_then(|timeout| Instant::now().checked_add(timeout))
        });
        self.end
    }

    fn is_over(&self) -> bool {
        left(self.end) == Some(Duration::ZERO)
    }
}

#[inline(always)]
fn left(end: Option<Instant>) -> Option<Duration> {
    end.map(|end| end.saturating_duration_since(Instant::now()))
}
