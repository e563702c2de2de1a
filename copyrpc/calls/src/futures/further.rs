//! Further connections of a client whose calls are futures. Calls that wait at the server for long,
//! such as long polls, may use up the room of a connection; the call that makes the server answer
//! them then goes over another connection.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// Default of the maximum number of connections of an [`AsyncClient`](crate::AsyncClient).
pub const CONNECTIONS: usize = 8;

/// Time for which the oldest waiting call finds no room before it goes over a further connection.
const STUCK: Duration = Duration::from_millis(100);
/// Maximum of the time [`STUCK`], which each failed attempt to connect doubles.
const LONGEST_STUCK: Duration = Duration::from_secs(5);
/// Time after which a connection without calls is closed.
pub(crate) const IDLE: Duration = Duration::from_secs(10);

/// A client `A` that connects; `None` if it could not.
pub(crate) type Coming<A> = Pin<Box<dyn Future<Output = Option<A>>>>;

/// The next connection of a client: a client of its own, which may have a next connection too.
pub(crate) struct Further<A> {
    /// Begins to connect; `None` if there may be no further connection.
    connect: Option<Box<dyn Fn() -> Coming<A>>>,
    /// The number of the oldest waiting call, and the time since which it has found no room.
    stuck: Option<(u64, Instant)>,
    /// Time for which the oldest waiting call finds no room before there is an attempt to connect.
    patience: Duration,
    coming: Option<Coming<A>>,
    /// The client, and the last time at which it had calls.
    client: Option<(A, Instant)>,
}

impl<A> Further<A> {
    pub(crate) const fn new(connect: Option<Box<dyn Fn() -> Coming<A>>>) -> Self {
        Self {
            connect,
            stuck: None,
            patience: STUCK,
            coming: None,
            client: None,
        }
    }

    /// Returns the client for calls that find no room at `now`, once there is one. `oldest` is the
    /// number of the oldest of them. `waker` is called when there may be a client.
    pub(crate) fn for_stuck(&mut self, oldest: u64, now: Instant, waker: &Waker) -> Option<&A> {
        if self.client.is_none() {
            let connect = self.connect.as_ref()?;
            let since = match self.stuck {
                Some((number, since)) if number == oldest => since,
                _ => now,
            };
            self.stuck = Some((oldest, since));
            if now.saturating_duration_since(since) < self.patience {
                return None;
            }
            self.coming.get_or_insert_with(connect);
            self.arrive(now, waker);
        }
        let (client, used) = self.client.as_mut()?;
        *used = now;
        Some(client)
    }

    pub(crate) fn is_coming(&self) -> bool {
        self.coming.is_some()
    }

    /// Takes the client that connects, if it has connected at `now`, whether calls still wait for it
    /// or not. Otherwise `waker` is called when it may have.
    pub(crate) fn arrive(&mut self, now: Instant, waker: &Waker) {
        let Some(coming) = self.coming.as_mut() else {
            return;
        };
        let Poll::Ready(client) = coming.as_mut().poll(&mut Context::from_waker(waker)) else {
            return;
        };
        self.patience = match client {
            Some(_) => STUCK,
            None => (2 * self.patience).min(LONGEST_STUCK),
        };
        self.client = client.map(|client| (client, now));
        (self.coming, self.stuck) = (None, None);
    }

    pub(crate) fn client(&self) -> Option<&A> {
        self.client.as_ref().map(|(client, _)| client)
    }

    /// Returns the client to be closed, if it had no calls for [`IDLE`] until `now`. `is_idle`
    /// returns whether a client has no calls.
    pub(crate) fn take_idle(&mut self, now: Instant, is_idle: impl Fn(&A) -> bool) -> Option<A> {
        let (client, used) = self.client.as_mut()?;
        if !is_idle(client) {
            *used = now;
        }
        if now.saturating_duration_since(*used) < IDLE {
            return None;
        }
        self.client.take().map(|(client, _)| client)
    }

    /// Returns the time until the oldest waiting call has waited for long enough. There must be a
    /// waiting call.
    pub(crate) fn left(&self) -> Option<Duration> {
        let (_, since) = self.stuck.filter(|_| self.coming.is_none())?;
        Some(self.patience.saturating_sub(since.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::future::ready;
    use std::rc::Rc;

    use super::*;

    #[test]
    fn attempts_that_fail_become_rare_and_a_connection_without_calls_is_closed() {
        let (attempts, is_up) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
        let connect = {
            let (attempts, is_up) = (Rc::clone(&attempts), Rc::clone(&is_up));
            move || -> Coming<u8> {
                attempts.set(attempts.get() + 1);
                Box::pin(ready(is_up.get().then_some(7)))
            }
        };
        let mut further = Further::new(Some(Box::new(connect)));
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let stuck =
            |further: &mut Further<u8>, ms| further.for_stuck(1, at(ms), Waker::noop()).copied();
        let found: Vec<_> = (0..60_000)
            .filter_map(|ms| stuck(&mut further, ms))
            .collect();
        assert!(found.is_empty());
        // After 0.1, 0.3, 0.7, 1.5, 3.1 and 6.3 seconds, then each 5 seconds.
        assert_eq!(attempts.get(), 16);
        is_up.set(true);
        let first = (60_000..).find(|ms| stuck(&mut further, *ms).is_some());
        let first = first.unwrap();
        assert_eq!((further.patience, further.client()), (STUCK, Some(&7)));
        assert_eq!(further.take_idle(at(first + 9_000), |_| false), None);
        assert_eq!(further.take_idle(at(first + 18_999), |_| true), None);
        assert_eq!(further.take_idle(at(first + 19_000), |_| true), Some(7));
        assert!(further.client().is_none());
    }
}
