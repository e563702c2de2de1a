//! The server: the serving end of sessions of byte messages.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use copyrpc_calls::{ANSWERED, Answer, Bind, Patience, Serving, StopHandle, TOO_LONG};
use copyrpc_shm::dir::Dir;
use copyrpc_shm::ready::ReadyWords;
use copyrpc_shm::sleep::{self, Alarm, Sleeper, Watch};

use super::Events;
use super::message::{Areas, Message, MessageBytes};
use crate::announce::Announce;
use crate::blocking;
use crate::error::{ReplyError, SetupError};
use crate::layout::BYTES_KIND;
use crate::limits::{CLIENTS, CLIENTS_MAX, DEPTH, STOP_TIMEOUT};
use crate::token::Token;

/// Maximum sleep: time between two checks for requests that are overdue, or whose client has ended.
const LONGEST_SLEEP: Duration = Duration::from_millis(10);
const ALL: [u64; CLIENTS_MAX / 64] = [u64::MAX; CLIENTS_MAX / 64];

/// Options of a [`Server`](super::Server) or an [`AsyncServer`](super::AsyncServer).
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// The directory. Default: the user's directory.
    pub dir: Option<Dir>,
    /// Maximum number of clients, 1 to 4096; a further client is refused. Default: 64.
    pub max_clients: usize,
    /// Maximum number of unanswered calls of a client, a power of two, 1 to 32768. Default: 32.
    pub depth: usize,
    /// Maximum lengths of messages. Default: 4096 bytes each.
    pub message_bytes: MessageBytes,
    /// The application's number for the meaning of the messages, which must be the clients'
    /// ([`ClientOptions::type_tag`](crate::ClientOptions::type_tag)). Default: 0.
    pub type_tag: u64,
    /// Maximum time for which a stopped server continues while clients fetch replies in
    /// [parts](crate::parts). Default: 1 s.
    pub stop_timeout: Duration,
    /// Function for the sessions of clients, which begin with the first call of a client and end
    /// within some milliseconds of the client's end. A client that finds no room, or another type,
    /// refuses itself: the server does not know of it. Default: none.
    pub events: Events,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            dir: None,
            max_clients: CLIENTS,
            depth: DEPTH,
            message_bytes: MessageBytes::DEFAULT,
            type_tag: 0,
            stop_timeout: STOP_TIMEOUT,
            events: Events::default(),
        }
    }
}

/// A server of byte messages, in one thread, like the typed [`Server`](crate::Server).
pub struct Host {
    inner: crate::Server<Message, Message>,
    areas: Areas,
    /// The request that was received last. If it is long, its bytes are in `request`.
    message: Message,
    request: Vec<u8>,
    /// The alarm by which other threads end the sleep.
    alarm: Arc<Alarm>,
    stop: StopHandle,
    patience: Patience,
    is_closed: bool,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host")
            .field("inner", &self.inner)
            .field("areas", &self.areas)
            .finish_non_exhaustive()
    }
}

impl Host {
    /// Like the typed server's [`poll`](crate::Server::poll).
    #[inline]
    pub fn poll(&mut self) -> usize {
        self.inner.poll()
    }

    /// Like the typed server's [`poll_with_skip`](crate::Server::poll_with_skip).
    #[inline]
    pub fn poll_with_skip(&mut self, mask: &[u64]) -> usize {
        self.inner.poll_with_skip(mask)
    }

    /// Like the typed server's [`wait`](crate::Server::wait).
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        sleep::wait([self as &mut dyn Sleeper], timeout)
    }

    /// Returns the oldest request that [`poll`](Self::poll) has found, like the typed server's
    /// [`recv`](crate::Server::recv): the bytes are a copy that lasts until the next call of
    /// `recv`. A client whose message has a wrong length or slot loses its session.
    #[inline]
    pub fn recv(&mut self) -> Option<(Token, &[u8])> {
        let Self {
            inner,
            areas,
            message,
            request,
            ..
        } = self;
        let token = inner.recv_if(|call, received| {
            *message = received;
            areas
                .read_request(call.client(), call.tag.slot(), message, request)
                .is_some()
        })?;
        Some((token, message.inline().unwrap_or(request)))
    }

    /// Answers a request, like the typed server's [`reply`](crate::Server::reply). Copies only the
    /// answer's bytes.
    ///
    /// # Errors
    /// [`ReplyError`]; the answer was not delivered. If it is too long, the error returns the
    /// token.
    #[inline]
    pub fn reply(&mut self, token: Token, response: &[u8]) -> Result<(), ReplyError> {
        let (areas, bytes) = (self.areas, response.len());
        if bytes > areas.max.response {
            return Err(ReplyError::TooLarge {
                token,
                bytes,
                max: areas.max.response,
            });
        }
        // SAFETY: the response is not longer than `max.response`. `end` calls this only while the
        // client waits for the answer, so only this server uses the response area of its slot.
        self.inner.end(token, ANSWERED, |call| unsafe {
            areas.write_response(call.client(), call.tag.slot(), response)
        })
    }

    /// Like the typed server's [`refuse`](crate::Server::refuse).
    ///
    /// # Errors
    /// [`ReplyError`]; the call had ended.
    pub fn refuse(&mut self, token: Token) -> Result<(), ReplyError> {
        self.inner.refuse(token)
    }

    /// Like the typed server's [`is_wanted`](crate::Server::is_wanted).
    #[must_use]
    pub fn is_wanted(&self, token: &Token) -> bool {
        self.inner.is_wanted(token)
    }

    /// [Polls](Self::poll) once, and answers all waiting requests with the results of `handler`. If
    /// an answer is too long, its call ends with
    /// [`CallFailure::ReplyTooLong`](crate::CallFailure::ReplyTooLong). Returns the number of
    /// requests.
    pub fn step<R: AsRef<[u8]>>(&mut self, mut handler: impl FnMut(&[u8]) -> R) -> usize {
        let waiting = self.poll();
        for _ in 0..waiting {
            let Some((token, request)) = self.recv() else {
                break;
            };
            let response = handler(request);
            self.answer(token, response.as_ref());
        }
        waiting
    }

    /// Answers a request. If the answer is too long, its call ends as `ReplyTooLong`.
    #[inline(always)]
    fn answer(&mut self, token: Token, response: &[u8]) {
        if let Err(ReplyError::TooLarge { token, .. }) = self.reply(token, response) {
            let _gone = self.inner.end(token, TOO_LONG, |_| Message::EMPTY);
        }
    }

    /// Returns the maximum lengths of messages.
    #[must_use]
    pub fn message_bytes(&self) -> MessageBytes {
        self.areas.max
    }

    /// Returns the size of the shared-memory region in bytes.
    #[must_use]
    pub fn region_bytes(&self) -> usize {
        self.inner.region_bytes()
    }
}

/// The condition of [`Host::wait`], so that a thread can sleep on several things.
impl Sleeper for Host {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        let mut alarm = &*self.alarm;
        sleep::join([&mut self.inner as &mut dyn Sleeper, &mut alarm], then);
    }
}

impl Serving for Host {
    type Options = ServerOptions;
    type Request<'a> = &'a [u8];
    type Token = Token;
    /// The number of the client.
    type Peer = usize;
    type Error = SetupError;
    /// The name of the server.
    type Address = String;
    type Stats = ();
    type Device = ();
    const THREAD: &'static str = "ipc-server";

    fn address(&self) -> io::Result<String> {
        Ok(self.inner.name().to_owned())
    }

    fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    fn device(&self) {}

    fn clients(&self) -> usize {
        self.inner.clients()
    }

    fn stats(&self) {}

    fn serve<R: AsRef<[u8]>>(
        &mut self,
        mut handler: impl FnMut(&[u8]) -> R,
    ) -> Result<(), SetupError> {
        let stop = self.stop.clone();
        // A stopped server that lets clients fetch replies in parts sleeps too, so the alarm of the
        // stop is taken.
        let wait = |server: &mut Self, limit| {
            let is_woken = server.wait(limit);
            server.alarm.take();
            is_woken
        };
        blocking::serve(self, &stop, |server| server.step(&mut handler), wait);
        Ok(())
    }

    fn step(&mut self, holds_back: bool) -> Result<(), SetupError> {
        let takes = !holds_back && !self.is_closed;
        // A closed server still notices clients that disconnect.
        let mask = if takes { &[][..] } else { &ALL };
        let is_found = self.inner.poll_with_skip(mask) > 0 && takes;
        // The caller takes the posted answers after this reset, so no ring of the alarm is lost.
        if self.alarm.take() || is_found {
            self.patience.reset();
        } else if let Some(start) = self.patience.idle() {
            let mut alarm = &*self.alarm;
            let server = takes.then_some(&mut self.inner as &mut dyn Sleeper);
            let sleepers = server.into_iter().chain([&mut alarm as &mut dyn Sleeper]);
            sleep::wait(sleepers, Some(LONGEST_SLEEP));
            self.patience.slept(start);
        }
        Ok(())
    }

    fn hurry(&mut self) {
        self.patience.exhaust();
    }

    fn recv(&mut self) -> Option<(Token, Vec<u8>, usize)> {
        let (token, request) = self.recv()?;
        let client = token.client();
        Some((token, request.to_vec(), client))
    }

    fn answer(&mut self, token: Token, answer: Answer) {
        match answer {
            Answer::Reply(reply) => self.answer(token, &reply),
            Answer::Refusal => drop(self.inner.refuse(token)),
            Answer::SentBack => self.inner.send_back(token),
            Answer::Dropped => drop(token),
        }
    }

    fn has(&self, client: u64) -> bool {
        self.inner.has(client as usize)
    }

    fn is_wanted(&self, token: &Token) -> bool {
        self.inner.is_wanted(token)
    }

    /// Stops taking requests: calls in the lanes end when the server is dropped.
    fn close(&mut self) {
        self.is_closed = true;
    }

    fn no_thread(error: io::Error) -> SetupError {
        SetupError::Thread(error)
    }
}

impl<A: Into<String>> Bind<A> for Host {
    /// Creates the server with this name for any process of this user on this host. The region takes
    /// `max_clients x depth` times 128 B, and the areas of long messages (see [`MessageBytes`]).
    fn bind_with(name: A, options: &ServerOptions) -> Result<Self, SetupError> {
        let max = options.message_bytes;
        let dir = match &options.dir {
            Some(dir) => dir.clone(),
            None => Dir::open(None)?,
        };
        let words = ReadyWords::words_for(options.max_clients);
        let layout = max.layout(options.max_clients, words, options.depth)?;
        let shape = max.shape(options.type_tag);
        let mut inner = crate::Server::bind_as(&dir, &name.into(), BYTES_KIND, layout, shape)?;
        inner.hear(options.events.clone());
        // SAFETY: the region was made for this layout, and the layout for `max`. `inner` keeps the
        // region as long as this server uses `areas`.
        let areas = unsafe { Areas::new(inner.base(), layout, max) };
        let alarm = Arc::<Alarm>::default();
        Ok(Self {
            inner,
            areas,
            message: Message::EMPTY,
            request: Vec::with_capacity(max.request),
            stop: StopHandle::new(alarm.waker(), options.stop_timeout),
            alarm,
            patience: Patience::new(),
            is_closed: false,
        })
    }
}
