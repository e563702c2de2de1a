//! Clients whose calls are futures. A thread of its own has the client, and sleeps while nothing
//! arrives.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Duration;

use copyrpc_calls::futures::{self, Calls, Connection, Ended, GoesOn, Refusal};
use copyrpc_calls::oneshot::lock;
use copyrpc_calls::{AskError, CallError, CallFailed, Tag as CallToken, methods};
use copyrpc_shm::dir::Dir;
use copyrpc_shm::plain::Plain;
use copyrpc_shm::sleep::{self, Alarm, Sleeper};

use crate::announce::Announce;
use crate::blocking;
use crate::bytes::{self, MessageBytes};
use crate::client::Client;
use crate::error::ConnectError;

/// A client that the thread of an [`AsyncClient`] has. It knows its calls by number.
pub trait Session: Sleeper + Sized + 'static {
    /// A request.
    type Request: Send + 'static;
    /// A reply.
    type Reply: Send + 'static;
    /// The limits of requests and replies at the server.
    type Limits: Copy + Send + 'static;

    /// Connects, as [`Client::connect_in`].
    ///
    /// # Errors
    /// [`ConnectError`].
    fn connect_in(dir: &Dir, name: &str, type_tag: u64) -> Result<Self, ConnectError>;

    /// Returns the limits at the server in use.
    fn limits(&self) -> Self::Limits;

    /// Makes a call. `left` is the time until its deadline.
    ///
    /// # Errors
    /// [`Refusal`]; the call was not made.
    fn call(
        &mut self,
        number: u64,
        request: &Self::Request,
        left: Option<Duration>,
    ) -> Result<CallToken, Refusal<AskError>>;

    /// Appends the calls that have ended.
    fn poll(&mut self, ended: &mut Ended<Self::Reply, AskError>);

    /// Cancels a call.
    fn cancel(&mut self, call: CallToken);

    /// Returns the number of calls that have not ended.
    fn in_flight(&self) -> usize;
}

fn refusal<R>(error: CallError<R, u64>) -> Refusal<AskError> {
    match error {
        CallError::Full { .. } => Refusal::NoRoom,
        CallError::TooLarge { max, .. } => Refusal::Failed(AskError::TooLarge { max }),
        CallError::Disconnected { .. } => Refusal::Ended,
    }
}

impl<Req: Plain + Send, Resp: Plain + Send, W: Announce + 'static> Session
    for Client<Req, Resp, u64, W>
{
    type Request = Req;
    type Reply = Resp;
    type Limits = ();

    fn connect_in(dir: &Dir, name: &str, type_tag: u64) -> Result<Self, ConnectError> {
        Self::connect_in(dir, name, type_tag)
    }

    fn limits(&self) {}

    fn call(
        &mut self,
        number: u64,
        request: &Req,
        left: Option<Duration>,
    ) -> Result<CallToken, Refusal<AskError>> {
        let call = self.call(*request, number).map_err(refusal)?;
        left.into_iter()
            .for_each(|left| self.end_within(call, left));
        Ok(call)
    }

    fn poll(&mut self, ended: &mut Ended<Resp, AskError>) {
        // The next call finds the end of the session.
        let _ended =
            self.poll(|number, outcome| ended.push((number, outcome.map_err(AskError::Failed))));
    }

    fn cancel(&mut self, call: CallToken) {
        self.cancel(call);
    }

    fn in_flight(&self) -> usize {
        self.in_flight()
    }
}

impl Session for bytes::Client<u64> {
    type Request = Vec<u8>;
    type Reply = Vec<u8>;
    type Limits = MessageBytes;

    fn connect_in(dir: &Dir, name: &str, type_tag: u64) -> Result<Self, ConnectError> {
        Self::connect_in(dir, name, type_tag)
    }

    fn limits(&self) -> MessageBytes {
        self.message_bytes()
    }

    fn call(
        &mut self,
        number: u64,
        request: &Vec<u8>,
        left: Option<Duration>,
    ) -> Result<CallToken, Refusal<AskError>> {
        let made = match left {
            Some(left) => self.call_within(request, number, left),
            None => self.call(request, number),
        };
        made.map_err(refusal)
    }

    fn poll(&mut self, ended: &mut Ended<Vec<u8>, AskError>) {
        let _ended = self.poll(|number, outcome| {
            ended.push((
                number,
                outcome.map(<[u8]>::to_vec).map_err(AskError::Failed),
            ))
        });
    }

    fn cancel(&mut self, call: CallToken) {
        self.cancel(call);
    }

    fn in_flight(&self) -> usize {
        self.in_flight()
    }
}

/// A client of a [`Server`](crate::Server) whose calls are futures, for any executor and from any
/// thread: `C` is a [`Client`] or a [`bytes::Client`] whose user data are numbers. Clones share the
/// session, which is over with the last clone, and so the server's `depth` of unanswered calls;
/// further calls wait in their order, a call without a timeout forever if none of those is
/// answered. A call that would end the others, as of a server that holds calls until there are
/// news, needs another client.
///
/// Calls that wait are kept without limit: a program that may make too many bounds them itself, for
/// instance by a semaphore, since only it knows whether a further call is to wait or to fail.
///
/// A thread of its own has the client, and sleeps while no reply arrives; calls and replies wake
/// it. A call after the end of the session connects to the next server of the name.
///
/// ```no_run
/// # async fn caller() -> Result<(), Box<dyn std::error::Error>> {
/// let client = ipc::bytes::AsyncClient::connect("upper").await?;
/// assert_eq!(client.call(b"ping").await?, b"PING");
/// # Ok(())
/// # }
/// ```
pub struct AsyncClient<C: Session> {
    calls: Calls<C::Request, C::Reply, AskError>,
    limits: Arc<Mutex<C::Limits>>,
}

/// The reply to a call of an [`AsyncClient`].
pub type AsyncCall<C> =
    futures::AsyncCall<<C as Session>::Request, <C as Session>::Reply, AskError>;

impl<C: Session> Clone for AsyncClient<C> {
    fn clone(&self) -> Self {
        Self {
            calls: self.calls.clone(),
            limits: Arc::clone(&self.limits),
        }
    }
}

impl<C: Session> fmt::Debug for AsyncClient<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncClient")
            .field("calls", &self.calls)
            .finish_non_exhaustive()
    }
}

impl<C: Session> AsyncClient<C> {
    /// Connects like [`Client::connect`].
    ///
    /// # Errors
    /// [`ConnectError`]; nothing is left behind.
    pub async fn connect(name: &str) -> Result<Self, ConnectError> {
        Self::connect_within(name, Duration::ZERO).await
    }

    /// Like [`connect`](Self::connect), and tries again for `timeout` if the server is not up yet
    /// or is full. Calls after the end of the session do the same; those of a client that was made
    /// without a timeout try once.
    ///
    /// # Errors
    /// Like [`connect`](Self::connect).
    pub async fn connect_within(name: &str, timeout: Duration) -> Result<Self, ConnectError> {
        Self::connect_in(&Dir::open(None)?, name, 0, timeout).await
    }

    /// Like [`connect_within`](Self::connect_within), to the server `name` in `dir`. `type_tag`
    /// must be the server's.
    ///
    /// # Errors
    /// Like [`connect`](Self::connect).
    pub async fn connect_in(
        dir: &Dir,
        name: &str,
        type_tag: u64,
        timeout: Duration,
    ) -> Result<Self, ConnectError> {
        let (dir, name) = (dir.clone(), name.to_owned());
        let open = Box::new(move || C::connect_in(&dir, &name, type_tag));
        let connect = move |is_wanted: &dyn Fn() -> bool| {
            let client = blocking::retry(
                timeout,
                |error: &ConnectError| error.may_pass() && is_wanted(),
                &open,
            )?;
            let limits = Arc::new(Mutex::new(client.limits()));
            Ok((
                AsyncConnection {
                    client,
                    open,
                    alarm: Arc::default(),
                    limits: Arc::clone(&limits),
                    timeout,
                    is_full: false,
                },
                limits,
            ))
        };
        let (calls, limits) = Calls::start("ipc-client", ConnectError::Thread, connect).await?;
        Ok(Self { calls, limits })
    }

    /// Sends a request with the first poll of the future, and waits for its reply as long as the
    /// session lasts. Dropping the future gives the call up: it keeps its slot until its reply
    /// arrives, which is discarded. The server sees the calls of one client in the order of their
    /// first polls.
    ///
    /// # Errors
    /// [`AskError`]. A call whose server was gone is [`AskError::NotSent`] if there is no other
    /// server of the name.
    pub fn call(&self, request: impl Into<C::Request>) -> AsyncCall<C> {
        self.calls.call(request.into(), None)
    }

    /// Like [`call`](Self::call), with a timeout, which counts from the first poll and includes a
    /// new connection.
    ///
    /// # Errors
    /// Like [`call`](Self::call); [`AskError::Late`] if the time ended before the request was sent,
    /// and [`CallFailed::TimedOut`] if it ended later.
    pub fn call_within(&self, request: impl Into<C::Request>, timeout: Duration) -> AsyncCall<C> {
        self.calls.call(request.into(), Some(timeout))
    }
}

impl AsyncClient<bytes::Client<u64>> {
    /// Returns the maximum lengths of messages at the last server that the client connected to.
    #[must_use]
    pub fn message_bytes(&self) -> MessageBytes {
        *lock(&self.limits)
    }
}

impl methods::AsyncCaller for AsyncClient<bytes::Client<u64>> {
    type Error = AskError;

    fn timeout(&self) -> Option<Duration> {
        None
    }

    fn call(
        &self,
        request: Vec<u8>,
        timeout: Option<Duration>,
    ) -> impl Future<Output = Result<Vec<u8>, AskError>> + Send {
        self.calls.call(request, timeout)
    }
}

/// The session of the thread.
struct AsyncConnection<C: Session> {
    client: C,
    /// Connects to the server that has the name now.
    open: Box<dyn Fn() -> Result<C, ConnectError>>,
    alarm: Arc<Alarm>,
    limits: Arc<Mutex<C::Limits>>,
    /// Maximum time for a new session.
    timeout: Duration,
    /// A call waits for a slot.
    is_full: bool,
}

impl<C: Session> Connection for AsyncConnection<C> {
    type Request = C::Request;
    type Reply = C::Reply;
    type Error = AskError;
    type Call = CallToken;

    fn call(
        &mut self,
        number: u64,
        request: &C::Request,
        left: Option<Duration>,
    ) -> Result<CallToken, Refusal<AskError>> {
        let made = self.client.call(number, request, left);
        self.is_full = matches!(made, Err(Refusal::NoRoom));
        match made {
            // Its calls end before those of the next session begin.
            Err(Refusal::Ended) if self.client.in_flight() > 0 => Err(Refusal::NoRoom),
            made => made,
        }
    }

    /// A call sends its request.
    fn flush(&mut self) {}

    fn poll(&mut self, ended: &mut Ended<C::Reply, AskError>) -> bool {
        self.client.poll(ended);
        !ended.is_empty()
    }

    /// The server was leaving. There may be another server by now.
    fn repeats(error: &AskError, is_second: bool) -> bool {
        *error == AskError::Failed(CallFailed::Stopped) && !is_second
    }

    fn late(&mut self) -> AskError {
        AskError::Late
    }

    fn cancel(&mut self, call: CallToken) {
        self.client.cancel(call);
    }

    fn sleep(&mut self, limit: Option<Duration>) {
        let mut alarm = &*self.alarm;
        // Without calls the end of the session is no reason to wake up.
        let client = (self.client.in_flight() > 0 || self.is_full)
            .then_some(&mut self.client as &mut dyn Sleeper);
        sleep::wait(
            client.into_iter().chain([&mut alarm as &mut dyn Sleeper]),
            limit,
        );
        self.is_full = false;
        if self.client.in_flight() == 0 {
            // Learn of the server's death meanwhile, before a call is made that would have an
            // unknown end.
            self.client.with_watch(&mut |client| _ = client.check());
        }
        // The calls posted before the ring are taken after it.
        self.alarm.take();
    }

    fn waker(&self) -> Waker {
        self.alarm.waker()
    }

    fn reconnect(
        &mut self,
        within: Duration,
        goes_on: &mut GoesOn<'_, Self>,
    ) -> Result<(), AskError> {
        let next = blocking::retry(
            within,
            |error: &ConnectError| error.may_pass() && goes_on(&mut Vec::new()),
            &self.open,
        );
        self.client = next.map_err(|error| error.of_call())?;
        *lock(&self.limits) = self.client.limits();
        Ok(())
    }

    fn connect_timeout(&self) -> Duration {
        self.timeout
    }

    fn again(&self, error: &AskError) -> AskError {
        *error
    }
}
