//! The server: the serving end of sessions of byte messages.

use std::fmt;
use std::time::Duration;

use copyrpc_calls::{ANSWERED, StopHandle, TOO_LONG};
use copyrpc_shm::dir::Dir;
use copyrpc_shm::ready::ReadyWords;
use copyrpc_shm::sleep::{Sleeper, Watch};

use super::host::ServerOptions;
use super::message::{Areas, Message, MessageBytes};
use crate::announce::Announce;
use crate::blocking;
use crate::error::{ReplyError, SetupError};
use crate::layout::BYTES_KIND;
use crate::token::Token;

/// A server of byte messages for up to `max_clients` clients, in one thread, like the typed
/// [`Server`](crate::Server).
pub struct Server {
    inner: crate::Server<Message, Message>,
    areas: Areas,
    /// The request that was received last. If it is long, its bytes are in `request`.
    message: Message,
    request: Vec<u8>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("inner", &self.inner)
            .field("areas", &self.areas)
            .finish_non_exhaustive()
    }
}

impl Server {
    /// Creates the server `name` for any process of this user on this host, for messages of up to
    /// 4096 bytes, with room for 64 clients of 32 unanswered calls each. The application's tag is
    /// 0; [`bind_in`](Self::bind_in) takes another tag.
    ///
    /// # Errors
    /// [`SetupError`]; nothing is left behind.
    pub fn bind(name: &str) -> Result<Self, SetupError> {
        Self::with_options(name, &ServerOptions::default())
    }

    /// Like [`bind`](Self::bind), with options.
    ///
    /// # Errors
    /// [`SetupError`]; nothing is left behind.
    pub fn with_options(name: &str, options: &ServerOptions) -> Result<Self, SetupError> {
        let ServerOptions {
            dir,
            clients,
            depth,
            max,
            type_tag,
        } = options;
        let dir = match dir {
            Some(dir) => dir.clone(),
            None => Dir::open(None)?,
        };
        Self::bind_in(&dir, name, *clients, *depth, *max, *type_tag)
    }

    /// Creates the server `name` in `dir` for `max_clients` clients (1 to 4096) with `depth`
    /// unanswered calls each (a power of two, 1 to 32768) whose messages are not longer than `max`.
    /// `type_tag` is the application's number for the meaning of the messages; clients must have
    /// the same number.
    ///
    /// The region takes `max_clients x depth` times 128 B, and the areas of long messages (see
    /// [`MessageBytes`]).
    ///
    /// # Errors
    /// [`SetupError`]; nothing is left behind.
    pub fn bind_in(
        dir: &Dir,
        name: &str,
        max_clients: usize,
        depth: usize,
        max: MessageBytes,
        type_tag: u64,
    ) -> Result<Self, SetupError> {
        let layout = max.layout(max_clients, ReadyWords::words_for(max_clients), depth)?;
        let inner = crate::Server::bind_as(dir, name, BYTES_KIND, layout, max.shape(type_tag))?;
        // SAFETY: the region was made for this layout, and the layout for `max`. `inner` keeps the
        // region as long as this server uses `areas`.
        let areas = unsafe { Areas::new(inner.base(), layout, max) };
        Ok(Self {
            inner,
            areas,
            message: Message::EMPTY,
            request: Vec::with_capacity(max.request),
        })
    }

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
        self.inner.wait(timeout)
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
    pub(super) fn answer(&mut self, token: Token, response: &[u8]) {
        if let Err(ReplyError::TooLarge { token, .. }) = self.reply(token, response) {
            let _gone = self.inner.end(token, TOO_LONG, |_| Message::EMPTY);
        }
    }

    pub(super) fn send_back(&mut self, token: Token) {
        self.inner.send_back(token);
    }

    /// Returns the number of connected clients.
    #[must_use]
    pub fn clients(&self) -> usize {
        self.inner.clients()
    }

    /// Like the typed server's [`serve`](crate::Server::serve), with [`step`](Self::step).
    pub fn serve<R: AsRef<[u8]>>(&mut self, mut handler: impl FnMut(&[u8]) -> R) {
        let stop = self.stop_handle();
        blocking::serve(self, &stop, |server| server.step(&mut handler), Self::wait);
    }

    /// Returns a handle that ends [`serve`](Self::serve), from any thread.
    #[must_use]
    pub fn stop_handle(&self) -> StopHandle {
        self.inner.stop_handle()
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

/// The condition of [`Server::wait`], so that a thread can sleep on several things.
impl Sleeper for Server {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        self.inner.with_watch(then);
    }
}
