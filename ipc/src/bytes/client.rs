//! The client: the calling end of a session of byte messages.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use copyrpc_calls::{CallError, CallFailure, SessionEnd, Tag as CallToken, methods};
use copyrpc_shm::dir::Dir;
use copyrpc_shm::ready::ReadyWords;
use copyrpc_shm::region::Region;
use copyrpc_shm::sleep::{Sleeper, Watch};

use super::message::{Areas, Message, MessageBytes};
use crate::blocking;
use crate::error::{ClientError, SetupError};
use crate::layout::{BYTES_KIND, Header};
use crate::views::{self, Views};

/// A client of a [`Server`](super::Server). `U` is the type of the user data of a call; the client
/// returns them with the reply.
///
/// A client belongs to one thread at a time (`Send`). The drop ends the session with the server and
/// discards unanswered calls.
pub struct Client<U> {
    inner: crate::Client<Message, Message, U>,
    areas: Areas,
    /// Buffer of a long reply.
    reply: Vec<u8>,
}

impl<U> fmt::Debug for Client<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("inner", &self.inner)
            .field("areas", &self.areas)
            .finish_non_exhaustive()
    }
}

impl<U> Client<U> {
    /// Connects to the server `name` of this user on this host. The application's tag is 0, as for
    /// servers made by `bind`. [`connect_in`](Self::connect_in) takes another tag.
    ///
    /// # Errors
    /// [`SetupError`]. After an error that [may pass](SetupError::may_pass), try again.
    pub fn connect(name: &str) -> Result<Self, SetupError> {
        Self::connect_in(&Dir::open(None)?, name, 0)
    }

    /// Like the typed client's [`connect_within`](crate::Client::connect_within).
    ///
    /// # Errors
    /// Like [`connect`](Self::connect).
    pub fn connect_within(name: &str, timeout: Duration) -> Result<Self, SetupError> {
        let mut client = blocking::retry(timeout, SetupError::may_pass, || Self::connect(name))?;
        client.inner.patience = timeout;
        Ok(client)
    }

    /// Like the typed client's [`reconnect`](crate::Client::reconnect). The maximum lengths of
    /// messages are then the lengths of the next server.
    ///
    /// # Errors
    /// [`SetupError`]; the client is as before.
    pub fn reconnect(&mut self, timeout: Duration) -> Result<(), SetupError> {
        let mut next = self.inner.next(timeout, Self::connect_in)?;
        next.inner.patience = self.inner.patience;
        *self = next;
        Ok(())
    }

    /// Connects to the server `name` in `dir`. `type_tag` must be the server's; the server has
    /// chosen the maximum lengths of messages.
    ///
    /// # Errors
    /// [`SetupError`]. Try again if the server is not there yet (`NotFound`, `OwnerGone`) or is
    /// full.
    pub fn connect_in(dir: &Dir, name: &str, type_tag: u64) -> Result<Self, SetupError> {
        let region = Region::open(dir, name, BYTES_KIND, size_of::<Header>())?;
        let header = views::header::<ReadyWords>(&region)?;
        let max = MessageBytes::of_shape(&header.shape);
        let areas = max.areas().map_err(SetupError::Damaged)?;
        let layout = views::layout::<Message, Message, ReadyWords>(
            &region,
            &header,
            max.shape(type_tag),
            areas,
        )?;
        let base = region.view().base();
        // SAFETY: `views::layout` has checked that the layout, made for these lengths, fits the
        // region, which the server zeroed when it created it. The client keeps the region as long
        // as it uses the views and the areas.
        let (inner, areas) = unsafe {
            (
                crate::Client::join(region, Views::new(base, &layout), type_tag)?,
                Areas::new(base, layout, max),
            )
        };
        Ok(Self {
            inner,
            areas,
            reply: Vec::with_capacity(max.response),
        })
    }

    /// Returns this client's number at the server, below the server's `max_clients`.
    #[must_use]
    pub fn id(&self) -> usize {
        self.inner.id()
    }

    /// Returns the number of calls that have not ended.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }

    /// Returns the number of calls that can be unanswered at a time: the server's `depth`.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.inner.depth()
    }

    /// Returns the maximum lengths of messages.
    #[must_use]
    pub fn message_bytes(&self) -> MessageBytes {
        self.areas.max
    }

    /// Sends one request; only the bytes of the request are copied. The server can see the request
    /// when this function returns, and sees the calls of one client in their order.
    /// [`poll`](Self::poll) returns `user_data` with the reply, exactly once. Replies arrive in any
    /// order.
    ///
    /// # Errors
    /// [`CallError`], with the request and the user data; nothing was sent.
    #[inline]
    pub fn call<'a>(
        &mut self,
        request: &'a [u8],
        user_data: U,
    ) -> Result<CallToken, CallError<&'a [u8], U>> {
        let (client, areas) = (self.inner.id(), self.areas);
        let max = areas.max.request;
        if request.len() > max {
            return Err(CallError::TooLarge {
                request,
                user_data,
                bytes: request.len(),
                max,
            });
        }
        let (call, request) = self.inner.begin(request, user_data)?;
        // SAFETY: the request is not longer than `max`, and the areas of the slot belong to this
        // call until the client has taken its answer.
        self.inner.send(call, unsafe {
            areas.write_request(client, call.slot(), request)
        });
        Ok(call)
    }

    /// Like [`call`](Self::call), with a deadline: without a reply the call ends with
    /// [`CallFailure::TimedOut`] in the first poll after `timeout`. The call keeps its slot like a
    /// [cancelled](Self::cancel) call.
    ///
    /// # Errors
    /// Like [`call`](Self::call).
    pub fn call_within<'a>(
        &mut self,
        request: &'a [u8],
        user_data: U,
        timeout: Duration,
    ) -> Result<CallToken, CallError<&'a [u8], U>> {
        let call = self.call(request, user_data)?;
        self.inner.end_within(call, timeout);
        Ok(call)
    }

    pub(crate) fn end_within(&mut self, call: CallToken, timeout: Duration) {
        self.inner.end_within(call, timeout);
    }

    /// Like the typed client's [`cancel`](crate::Client::cancel).
    pub fn cancel(&mut self, call: CallToken) -> Option<U> {
        self.inner.cancel(call)
    }

    /// Passes the replies that have arrived to `f`, at most [`depth`](Self::depth) of them. Returns
    /// their number. A long reply is copied out of shared memory first. A reply that is longer than
    /// the server's maximum, which only a broken server sends, counts as
    /// [`CallFailure::ReplyTooLong`].
    ///
    /// # Errors
    /// Like the typed client's [`poll`](crate::Client::poll).
    #[inline]
    pub fn poll(
        &mut self,
        mut f: impl FnMut(U, Result<&[u8], CallFailure>),
    ) -> Result<usize, SessionEnd> {
        let Self {
            inner,
            areas,
            reply,
        } = self;
        let client = inner.id();
        inner.poll_slots(|user_data, slot, outcome| match outcome {
            Ok(message) => match areas.read_response(client, slot, &message, reply) {
                Some(bytes) => f(user_data, Ok(bytes)),
                None => f(user_data, Err(CallFailure::ReplyTooLong { len: None })),
            },
            Err(failed) => f(user_data, Err(failed)),
        })
    }

    /// Like the typed client's [`wait`](crate::Client::wait).
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        self.inner.wait(timeout)
    }
}

impl Client<()> {
    /// Like the typed client's [`ask`](crate::Client::ask).
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn ask(&mut self, request: &[u8], timeout: Duration) -> Result<Vec<u8>, ClientError> {
        let patience = self.inner.prepare_to_ask()?;
        let timeout =
            blocking::connect_first(timeout, patience, |patience| self.reconnect(patience))?;
        let call = self.call(request, ())?;
        let (slot, message) = self.inner.answer(call, timeout)?;
        let Self {
            inner,
            areas,
            reply,
        } = self;
        let bytes = areas
            .read_response(inner.id(), slot, &message, reply)
            .ok_or(ClientError::ReplyTooLong { len: None })?;
        Ok(bytes.to_vec())
    }
}

impl methods::Caller for Client<()> {
    type Error = ClientError;

    fn timeout(&self) -> Option<Duration> {
        None
    }

    fn call(
        &mut self,
        request: &[u8],
        timeout: Option<Duration>,
    ) -> Result<Cow<'_, [u8]>, ClientError> {
        self.ask(request, timeout.unwrap_or(Duration::MAX))
            .map(Cow::Owned)
    }
}

/// The condition of [`Client::wait`], so that a thread can sleep on several things.
impl<U> Sleeper for Client<U> {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        self.inner.with_watch(then);
    }
}
