//! Clients whose calls are futures. Each belongs to a thread of its own, which sleeps when idle.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use copyrpc_calls::{
    Arrival, CONNECTIONS, CallFailure, Connection, Dial, Facts, GoesOn, Refusal, SessionEnd,
    Tag as CallToken,
};
use copyrpc_shm::dir::Dir;
use copyrpc_shm::plain::Plain;
use copyrpc_shm::sleep::{self, Alarm, Sleeper};

use crate::announce::Announce;
use crate::blocking;
use crate::bytes::{self, MessageBytes};
use crate::client::Client;
use crate::error::{ClientError, Misfit, SetupError};

/// Options of an [`AsyncClient`].
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// The directory of the server. Default: the directory of the user.
    pub dir: Option<Dir>,
    /// The application's tag, which must be the server's. Default: 0.
    pub type_tag: u64,
    /// Maximum time to wait, whenever a connection is made, for a server that is not up yet or is
    /// full. Default: none, a client tries once.
    pub connect_timeout: Duration,
    /// Timeout of [`AsyncClient::call`]. Default: none; a call waits as long as the server lives.
    pub timeout: Option<Duration>,
    /// Maximum number of connections: calls that find no room for 100 ms go over a further
    /// connection. Default: 8.
    pub connections: usize,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            dir: None,
            type_tag: 0,
            connect_timeout: Duration::ZERO,
            timeout: None,
            connections: CONNECTIONS,
        }
    }
}

/// A client that the thread of an [`AsyncClient`] uses. It identifies its calls by numbers.
pub trait Session: Sleeper + Sized + 'static {
    /// A request.
    type Request: ToOwned<Owned: Send + Unpin + 'static> + ?Sized;
    /// A reply.
    type Reply: Send + 'static;
    /// The reply in the memory at which it arrived.
    type Arrival<'a>: Arrival<Self::Reply>;

    /// Connects like [`Client::connect_in`].
    ///
    /// # Errors
    /// [`SetupError`].
    fn connect_in(dir: &Dir, name: &str, type_tag: u64) -> Result<Self, SetupError>;

    /// Returns the maximum lengths of messages at the present server.
    fn message_bytes(&self) -> MessageBytes;

    /// Makes a call.
    ///
    /// # Errors
    /// [`Refusal`]; the call was not made.
    fn call(
        &mut self,
        number: u64,
        request: &Self::Request,
    ) -> Result<CallToken, Refusal<ClientError>>;

    /// Gives a call a deadline: the time `left` from now.
    fn end_within(&mut self, call: CallToken, left: Duration);

    /// Passes the calls that have ended to `on_end`.
    fn poll(&mut self, on_end: impl FnMut(u64, Result<Self::Arrival<'_>, CallFailure>));

    /// Cancels a call.
    fn cancel(&mut self, call: CallToken);

    /// Returns the number of calls that have not ended.
    fn in_flight(&self) -> usize;
}

impl<Req: Plain + Send + Unpin, Resp: Plain + Send, W: Announce + 'static> Session
    for Client<Req, Resp, u64, W>
{
    type Request = Req;
    type Reply = Resp;
    type Arrival<'a> = Resp;

    fn connect_in(dir: &Dir, name: &str, type_tag: u64) -> Result<Self, SetupError> {
        Self::connect_in(dir, name, type_tag)
    }

    fn message_bytes(&self) -> MessageBytes {
        MessageBytes {
            request: size_of::<Req>(),
            response: size_of::<Resp>(),
        }
    }

    fn call(&mut self, number: u64, request: &Req) -> Result<CallToken, Refusal<ClientError>> {
        self.call(*request, number).map_err(Refusal::from)
    }

    fn end_within(&mut self, call: CallToken, left: Duration) {
        self.end_within(call, left);
    }

    fn poll(&mut self, on_end: impl FnMut(u64, Result<Resp, CallFailure>)) {
        // The end of the session is not reported here: the next call finds it.
        let _ended = self.poll(on_end);
    }

    fn cancel(&mut self, call: CallToken) {
        self.cancel(call);
    }

    fn in_flight(&self) -> usize {
        self.in_flight()
    }
}

impl Session for bytes::Client<u64> {
    type Request = [u8];
    type Reply = Vec<u8>;
    type Arrival<'a> = &'a [u8];

    fn connect_in(dir: &Dir, name: &str, type_tag: u64) -> Result<Self, SetupError> {
        Self::connect_in(dir, name, type_tag)
    }

    fn message_bytes(&self) -> MessageBytes {
        self.message_bytes()
    }

    fn call(&mut self, number: u64, request: &[u8]) -> Result<CallToken, Refusal<ClientError>> {
        self.call(request, number).map_err(Refusal::from)
    }

    fn end_within(&mut self, call: CallToken, left: Duration) {
        self.end_within(call, left);
    }

    fn poll(&mut self, on_end: impl FnMut(u64, Result<&[u8], CallFailure>)) {
        let _ended = self.poll(on_end);
    }

    fn cancel(&mut self, call: CallToken) {
        self.cancel(call);
    }

    fn in_flight(&self) -> usize {
        self.in_flight()
    }
}

/// A client of a [`Server`](crate::Server), for any executor and from any thread: each call is a
/// future. `C` is a [`Client`] or a [`bytes::Client`] whose user data are numbers. Clones share the
/// session, which ends with the last clone, and its slots for unanswered calls, the server's
/// `depth`. Further calls wait in their order. If they find no slot for 100 ms, they go over a
/// further session, up to [`connections`](ClientOptions::connections) in all; a call that finds no
/// slot in the last session waits until its timeout, if it has one. A call that is given up keeps
/// its slot until its reply arrives, which is discarded.
///
/// A call after the end of the session connects to the next server of the name. If there is no such
/// server for [`connect_timeout`](ClientOptions::connect_timeout), the call fails with
/// [`Misfit::Absent`].
///
/// ```no_run
/// # async fn caller() -> Result<(), Box<dyn std::error::Error>> {
/// let client = ipc::bytes::AsyncClient::connect("upper").await?;
/// assert_eq!(client.call(b"ping").await?, b"PING");
/// # Ok(())
/// # }
/// ```
pub type AsyncClient<C> = copyrpc_calls::AsyncClient<Reconnecting<C>>;

/// The reply to a call of an [`AsyncClient`].
pub type AsyncCall<C> = copyrpc_calls::AsyncCall<Reconnecting<C>>;

/// The sessions of an [`AsyncClient`], one after the other.
pub struct Reconnecting<C> {
    client: C,
    /// Connects to the server that has the name now.
    open: Box<dyn Fn() -> Result<C, SetupError>>,
    alarm: Arc<Alarm>,
    options: ClientOptions,
    /// Whether a call waits for a slot.
    is_full: bool,
}

impl<C> fmt::Debug for Reconnecting<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reconnecting")
            .field("is_full", &self.is_full)
            .finish_non_exhaustive()
    }
}

impl<C: Session, A: Into<String>> Dial<A> for Reconnecting<C> {
    type Options = ClientOptions;
    type Error = SetupError;
    const THREAD: &'static str = "ipc-client";

    fn dial(
        name: A,
        options: &ClientOptions,
        _: bool,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Self, SetupError> {
        let (name, type_tag) = (name.into(), options.type_tag);
        let dir = match &options.dir {
            Some(dir) => dir.clone(),
            None => Dir::open(None)?,
        };
        let open = Box::new(move || C::connect_in(&dir, &name, type_tag));
        let may_pass = |error: &SetupError| error.may_pass() && is_wanted();
        Ok(Self {
            client: blocking::retry(options.connect_timeout, may_pass, &open)?,
            open,
            alarm: Arc::default(),
            options: options.clone(),
            is_full: false,
        })
    }

    fn no_thread(error: io::Error) -> SetupError {
        SetupError::Thread(error)
    }
}

impl<C: Session> Connection for Reconnecting<C> {
    type Kind = ();
    type Request = C::Request;
    type Reply = C::Reply;
    type Arrival<'a> = C::Arrival<'a>;
    type ConnectError = Misfit;
    type EndReason = SessionEnd;
    type Call = CallToken;
    type Stats = ();
    type Device = ();

    fn call(
        &mut self,
        number: u64,
        (): (),
        request: &C::Request,
        left: Option<Duration>,
    ) -> Result<CallToken, Refusal<ClientError>> {
        let made = self.client.call(number, request);
        self.is_full = matches!(made, Err(Refusal::NoRoom));
        match made {
            Ok(call) => {
                left.into_iter()
                    .for_each(|left| self.client.end_within(call, left));
                Ok(call)
            }
            // The calls of the next session begin only after all calls of this session have ended.
            Err(Refusal::Ended) if self.client.in_flight() > 0 => Err(Refusal::NoRoom),
            made => made,
        }
    }

    fn end_within(&mut self, call: CallToken, left: Duration) {
        self.client.end_within(call, left);
    }

    /// Sends nothing: a call has already sent its request.
    fn flush(&mut self) {}

    fn poll(&mut self, mut on_end: impl FnMut(u64, Result<C::Arrival<'_>, CallFailure>)) -> bool {
        let mut moved = false;
        self.client.poll(|number, outcome| {
            moved = true;
            on_end(number, outcome);
        });
        moved
    }

    fn late(&mut self) -> ClientError {
        ClientError::NotSent
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
            // Checks whether the server has died meanwhile. Otherwise the next call would be made
            // at a dead server, and its outcome would be unknown.
            self.client.with_watch(&mut |client| _ = client.check());
        }
        // The caller takes the posted calls after this reset, so no ring of the alarm is lost.
        self.alarm.take();
    }

    fn waker(&self) -> Waker {
        self.alarm.waker()
    }

    fn reconnect(
        &mut self,
        within: Duration,
        goes_on: &mut GoesOn<'_, Self>,
    ) -> Result<(), ClientError> {
        let next = blocking::retry(
            within,
            |error: &SetupError| error.may_pass() && goes_on(&mut Vec::new(), &mut |_| ()),
            &self.open,
        );
        self.client = next.map_err(|error| error.of_call())?;
        Ok(())
    }

    fn has_ended(&mut self) -> bool {
        false
    }

    fn facts(&self) -> Facts<()> {
        let bytes = self.client.message_bytes();
        Facts {
            connect_timeout: self.options.connect_timeout,
            timeout: self.options.timeout,
            connections: self.options.connections,
            max_request: bytes.request,
            max_reply: bytes.response,
            stats: (),
        }
    }

    fn device(&self) {}
}
