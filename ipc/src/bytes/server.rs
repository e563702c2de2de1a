//! The serving end.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use shm::blocking::{self, StopHandle};
use shm::dir::Dir;
use shm::sleep::{Sleeper, Watch};

use super::error::ReplyError;
use super::message::{Areas, Message, MessageBytes};
use crate::error::CreateError;
use crate::layout::{BYTES_KIND, CLIENTS, DEPTH};

/// Serves any number of clients up to `max_clients` from one thread, as the typed [`Server`](crate::Server) does.
///
/// `!Send`: create it on the thread that polls it. Dropping it ends all clients' calls with
/// [`SessionEnd::PeerGone`](crate::SessionEnd::PeerGone), once the last [`RecvHandle`] is gone too.
pub struct Server {
    inner: crate::Server<Message, Message>,
    shared: Rc<Shared>,
}

/// What handles need of their server.
#[derive(Debug)]
struct Shared {
    areas: Areas,
    /// Buffers of requests that were answered, for later ones: as many as long requests were ever held at a time, of `most.request` bytes
    /// each.
    pool: RefCell<Vec<Vec<u8>>>,
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("inner", &self.inner).field("areas", &self.shared.areas).finish_non_exhaustive()
    }
}

impl Server {
    /// Creates the server `name` for any process of this user on this host, for messages of up to 4096 bytes, with room for 64 clients of 32
    /// unanswered calls each.
    ///
    /// # Errors
    /// [`CreateError`]; nothing is left behind.
    pub fn bind(name: &str) -> Result<Self, CreateError> {
        Self::bind_in(&Dir::open(None)?, name, CLIENTS, DEPTH, MessageBytes { request: 4096, response: 4096 }, 0)
    }

    /// Creates the server `name` in `dir` for `max_clients` clients (1 to 4096) with `depth` unanswered calls each (a power of two, 1 to
    /// 32768) whose messages are at most as long as `most` says. `type_tag` is the application's number for the meaning of the messages;
    /// clients must have the same.
    ///
    /// The region takes `max_clients x depth` times 128 B, and the places of long messages as [`MessageBytes`] says.
    ///
    /// # Errors
    /// [`CreateError`]; nothing is left behind.
    pub fn bind_in(
        dir: &Dir,
        name: &str,
        max_clients: usize,
        depth: usize,
        most: MessageBytes,
        type_tag: u64,
    ) -> Result<Self, CreateError> {
        let layout = most.layout(max_clients, depth)?;
        let inner = crate::Server::bind_as(dir, name, BYTES_KIND, layout, most.shape(type_tag))?;
        // SAFETY: the region was made for this layout, and `inner` and its handles keep it.
        let areas = unsafe { Areas::new(inner.base(), layout, most) };
        Ok(Self { inner, shared: Rc::new(Shared { areas, pool: RefCell::default() }) })
    }

    /// As the typed server's [`poll`](crate::Server::poll).
    #[inline]
    pub fn poll(&mut self) -> usize {
        self.inner.poll()
    }

    /// As the typed server's [`poll_with_skip`](crate::Server::poll_with_skip).
    #[inline]
    pub fn poll_with_skip(&mut self, mask: &[u64]) -> usize {
        self.inner.poll_with_skip(mask)
    }

    /// As the typed server's [`wait`](crate::Server::wait).
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        self.inner.wait(timeout)
    }

    /// The oldest request that [`poll`](Self::poll) has taken, copied out of shared memory. A client whose message cannot be, because its
    /// length or its place is wrong, loses its session.
    #[inline]
    pub fn recv(&mut self) -> Option<RecvHandle> {
        loop {
            let inner = self.inner.recv()?;
            let mut copy = Copied { buffer: Vec::new(), shared: Rc::clone(&self.shared) };
            if inner.data().inline().is_none() {
                copy.take_buffer();
            }
            if self.shared.areas.read_request(inner.client(), inner.slot(), inner.data(), &mut copy.buffer).is_some() {
                return Some(RecvHandle { inner, copy });
            }
            inner.evict();
        }
    }

    /// [Polls](Self::poll) once, and answers all requests that wait with what `handler` makes of each; one whose answer is too long is rejected.
    /// Returns how many.
    pub fn step<R: AsRef<[u8]>>(&mut self, mut handler: impl FnMut(&[u8]) -> R) -> usize {
        let waiting = self.poll();
        for request in std::iter::from_fn(|| self.recv()).take(waiting) {
            let response = handler(request.data());
            // A client that is gone needs no answer, and a request that comes back is rejected.
            let _ = request.reply(response.as_ref());
        }
        waiting
    }

    /// As the typed server's [`serve`](crate::Server::serve), with [`step`](Self::step).
    pub fn serve<R: AsRef<[u8]>>(&mut self, mut handler: impl FnMut(&[u8]) -> R) {
        let stop = self.stop_handle();
        blocking::serve(self, &stop, |server| server.step(&mut handler), Self::wait);
    }

    /// Ends [`serve`](Self::serve), from any thread.
    #[must_use]
    pub fn stop_handle(&self) -> StopHandle {
        self.inner.stop_handle()
    }

    /// How long messages can be.
    #[must_use]
    pub fn message_bytes(&self) -> MessageBytes {
        self.shared.areas.most
    }

    /// Size of the shared-memory region in bytes.
    #[must_use]
    pub fn region_bytes(&self) -> usize {
        self.inner.region_bytes()
    }
}

/// The copy of a long request, whose buffer goes back to the pool; that of a short one has none.
struct Copied {
    buffer: Vec<u8>,
    shared: Rc<Shared>,
}

impl Copied {
    fn take_buffer(&mut self) {
        let Shared { areas, pool } = &*self.shared;
        self.buffer = pool.borrow_mut().pop().unwrap_or_else(|| Vec::with_capacity(areas.most.request));
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        if self.buffer.capacity() > 0 {
            self.shared.pool.borrow_mut().push(std::mem::take(&mut self.buffer));
        }
    }
}

/// As the typed server.
impl Sleeper for Server {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        self.inner.with_watch(then);
    }
}

/// A request that waits for its answer. Handles can be kept and answered in any order, also after others that came later.
///
/// Dropping one without an answer ends the client's call with [`CallFailed::Rejected`](crate::CallFailed::Rejected).
pub struct RecvHandle {
    inner: crate::RecvHandle<Message, Message>,
    copy: Copied,
}

impl fmt::Debug for RecvHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecvHandle").field("client", &self.client()).field("bytes", &self.data().len()).finish()
    }
}

impl RecvHandle {
    /// The number of the client that asks, below `max_clients`.
    #[must_use]
    pub fn client(&self) -> usize {
        self.inner.client()
    }

    /// The request: a copy that the client cannot change any more.
    #[must_use]
    #[inline]
    pub fn data(&self) -> &[u8] {
        self.inner.data().inline().unwrap_or(&self.copy.buffer)
    }

    /// Longest answer in bytes.
    #[must_use]
    pub fn response_max(&self) -> usize {
        self.copy.shared.areas.most.response
    }

    /// Answers the request, copying the answer's bytes and no more. The client can see the answer when this returns; nothing has to be
    /// flushed, and nothing can be full.
    ///
    /// # Errors
    /// [`ReplyError`]: the client left or died meanwhile and the server knows; or the answer is too long, and the request comes back.
    #[inline]
    pub fn reply(self, response: &[u8]) -> Result<(), ReplyError> {
        if response.len() > self.response_max() {
            return Err(ReplyError::TooLarge { request: self, bytes: response.len() });
        }
        let Self { inner, copy } = self;
        let (client, slot) = (inner.client(), inner.slot());
        // SAFETY: the response is not too long, and it is called while the client waits for it.
        inner.reply_with(|| unsafe { copy.shared.areas.write_response(client, slot, response) })?;
        Ok(())
    }
}
