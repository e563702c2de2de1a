//! The count of the replies that clients have not fetched whole, for the thread that stops a
//! server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Time between two reads of the count.
const PAUSE: Duration = Duration::from_millis(1);

/// The replies of a [`Reassembler`](super::Reassembler), for use from any thread: the replies that
/// its clients still fetch, and those of the handlers that run. A server that stops answers no
/// further part, so let its clients fetch the replies first:
///
/// ```
/// # fn stop_on_signal(parts: &copyrpc_calls::parts::Reassembler, stop: impl Fn() + Send + 'static) {
/// let replies = parts.replies();
/// // In the thread that gets the signal:
/// std::thread::spawn(move || {
///     replies.drain(std::time::Duration::from_secs(1));
///     stop();
/// });
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Replies(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    unfetched: AtomicUsize,
    is_closed: AtomicBool,
}

impl Replies {
    /// Makes the [`Reassembler`](super::Reassembler) take no further request, and waits until
    /// clients have fetched all replies, at most for `limit`. Returns the number of replies that
    /// are left. Parts of further requests end as [`PartsError::Busy`](super::PartsError::Busy),
    /// which is retryable. If a client has ended without fetching its reply, the drain takes all of
    /// `limit`.
    pub fn drain(&self, limit: Duration) -> usize {
        self.0.is_closed.store(true, Ordering::Relaxed);
        let start = Instant::now();
        loop {
            let left = self.0.unfetched.load(Ordering::Acquire);
            if left == 0 || start.elapsed() >= limit {
                return left;
            }
            thread::sleep(PAUSE.min(limit));
        }
    }

    pub(super) fn are_closed(&self) -> bool {
        self.0.is_closed.load(Ordering::Relaxed)
    }

    pub(super) fn count(&self) -> Unfetched {
        self.0.unfetched.fetch_add(1, Ordering::Relaxed);
        Unfetched(self.clone())
    }
}

/// A guard for one reply: until its drop, the reply counts as not fetched.
#[derive(Debug)]
pub(super) struct Unfetched(Replies);

impl Drop for Unfetched {
    fn drop(&mut self) {
        self.0.0.unfetched.fetch_sub(1, Ordering::Release);
    }
}
