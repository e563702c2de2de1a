//! Further connections of a client whose calls are futures. Calls that wait at the server for long,
//! such as long polls, may use up the room of a connection; the call that makes the server answer
//! them goes over another one.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Default of the maximum number of connections of an [`AsyncClient`](crate::AsyncClient).
pub const CONNECTIONS: usize = 8;

/// Time for which the oldest waiting call finds no room before it goes over a further connection.
const STUCK: Duration = Duration::from_millis(100);

/// A client `A` that connects; `None` if it could not.
pub(crate) type Coming<A> = Pin<Box<dyn Future<Output = Option<A>>>>;

/// The next connection of a client. That one has the connection after it, and so on.
pub(crate) struct Further<A> {
    /// Begins to connect; `None` if there may be no further connection.
    connect: Option<Box<dyn Fn() -> Coming<A>>>,
    /// The number of the oldest waiting call, and the time since which it has found no room.
    stuck: Option<(u64, Instant)>,
    coming: Option<Coming<A>>,
    client: Option<A>,
}

impl<A> Further<A> {
    pub(crate) const fn new(connect: Option<Box<dyn Fn() -> Coming<A>>>) -> Self {
        Self {
            connect,
            stuck: None,
            coming: None,
            client: None,
        }
    }

    /// Returns the client for calls that find no room, once there is one. `oldest` is the number of
    /// the oldest of them. `waker` is called when there may be a client.
    pub(crate) fn for_stuck(&mut self, oldest: u64, waker: &Waker) -> Option<&A> {
        if self.client.is_none() {
            let connect = self.connect.as_ref()?;
            let now = Instant::now();
            let since = match self.stuck {
                Some((number, since)) if number == oldest => since,
                _ => now,
            };
            self.stuck = Some((oldest, since));
            if now.saturating_duration_since(since) < STUCK {
                return None;
            }
            let coming = self.coming.get_or_insert_with(connect);
            let Poll::Ready(client) = coming.as_mut().poll(&mut Context::from_waker(waker)) else {
                return None;
            };
            (self.client, self.coming, self.stuck) = (client, None, None);
        }
        self.client.as_ref()
    }

    pub(crate) const fn client(&self) -> Option<&A> {
        self.client.as_ref()
    }

    /// Returns the time until the oldest waiting call has waited for long enough. There must be a
    /// waiting call.
    pub(crate) fn left(&self) -> Option<Duration> {
        let (_, since) = self.stuck.filter(|_| self.coming.is_none())?;
        Some(STUCK.saturating_sub(since.elapsed()))
    }
}
