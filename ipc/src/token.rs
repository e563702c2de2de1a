//! Tokens of received requests, and the handles by which other threads reach a server.

use std::sync::Arc;
use std::task::Wake;

use copyrpc_calls::StopHandle;
use copyrpc_shm::dropped::{Dropped, Numbered};

use crate::entries::Entries;
use crate::limits::STOP_TIMEOUT;
use crate::sessions::CallId;

/// The duty to answer a received request, 24 bytes. A token can be kept anywhere, even as the user
/// data of another call, and be moved to another thread.
///
/// Dropping the token, on any thread, ends the client's call with
/// [`CallFailure::Dropped`](crate::CallFailure::Dropped): the drop wakes the server, which ends the
/// call in its next [`poll`](crate::Server::poll) or [`wait`](crate::Server::wait). A token of a
/// server that was dropped does nothing.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a token that is dropped ends its call without an answer"]
#[doc(alias("RecvEntry", "DelegToken"))]
pub struct Token {
    call: CallId,
    /// The number of the server that received the request.
    server: u64,
}

impl Token {
    #[inline(always)]
    pub(crate) fn new(call: CallId, server: &Listed) -> Self {
        Self {
            call,
            server: server.number,
        }
    }

    /// Returns the number of the calling client, below `max_clients`.
    #[must_use]
    pub fn client(&self) -> usize {
        self.call.client()
    }

    /// Returns the identity of the call, if this server received it.
    #[inline(always)]
    pub(crate) fn call_at(&self, server: &Listed) -> Option<CallId> {
        (self.server == server.number).then_some(self.call)
    }

    /// Consumes the token without ending the client's call: the caller answers the request.
    #[inline(always)]
    pub(crate) fn use_up(self) {
        std::mem::forget(self);
    }
}

impl Drop for Token {
    #[cold]
    fn drop(&mut self) {
        // A server that was dropped is not listed any more: the drop of the server has ended all
        // calls.
        SERVERS.with(self.server, |entry| {
            entry.dropped.push(self.call);
            entry.wake();
        });
    }
}

/// The servers of this process by number, for the tokens and stop handles of each.
static SERVERS: Numbered<Entry> = Numbered::new();

struct Entry {
    /// Requests whose tokens were dropped. The drop of a token adds its request here, and then
    /// wakes the server (W1 of `docs/shm-protocols.md`).
    dropped: Arc<Dropped<CallId>>,
    /// The entries of the server's region, mapped in the process `pid` while this entry is listed.
    entries: Entries,
    pid: u32,
}

impl Entry {
    fn wake(&self) {
        // In a forked child the memory is not mapped, and the server is the parent's.
        if self.pid == std::process::id() {
            self.entries.server_sleep().wake();
        }
    }
}

struct ServerWaker(u64);

impl Wake for ServerWaker {
    fn wake(self: Arc<Self>) {
        SERVERS.with(self.0, Entry::wake);
    }
}

/// A server's registration in [`SERVERS`]. Drop it while the region is mapped.
pub(crate) struct Listed {
    /// Number of the server, which is not used again in this process.
    number: u64,
    dropped: Arc<Dropped<CallId>>,
    stop: StopHandle,
}

impl Listed {
    pub(crate) fn new(entries: Entries) -> Self {
        let dropped = Arc::<Dropped<CallId>>::default();
        let number = SERVERS.add(Entry {
            dropped: Arc::clone(&dropped),
            entries,
            pid: std::process::id(),
        });
        Self {
            number,
            dropped,
            stop: StopHandle::new(Arc::new(ServerWaker(number)).into(), STOP_TIMEOUT),
        }
    }

    #[inline(always)]
    pub(crate) fn dropped(&self) -> &Dropped<CallId> {
        &self.dropped
    }

    pub(crate) fn stop_handle(&self) -> StopHandle {
        self.stop.clone()
    }

    /// Returns whether another thread has dropped a token or stopped the server.
    pub(crate) fn any(&self) -> bool {
        self.dropped.any() || self.stop.is_stopped()
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        SERVERS.remove(self.number);
    }
}
