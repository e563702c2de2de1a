//! The end of a context.

use std::time::{Duration, Instant};

use mlx5_rendezvous::GracePeriod;

use super::Inner;
use crate::connection::{Connection, Outcome};

/// Default of the maximum time for which a context that is dropped waits for its messages to
/// arrive. A peer's device takes messages without a program, so the whole time passes only for a
/// peer that is gone, or that has no room for the messages.
pub(crate) const LINGER: Duration = Duration::from_millis(20);

impl<U> Inner<U> {
    /// Ends all connections. Waits at most the context's linger time until their messages have
    /// arrived, because the end of a queue pair loses everything under way. Meanwhile the context
    /// drains as usual: arrivals and completions make room for messages that wait (S2, B1 of
    /// docs/copyrpc-protocol.md).
    pub(super) fn shut_down_all(&self) {
        let connections: Vec<_> = self.connections.borrow().values().cloned().collect();
        connections.iter().for_each(Connection::begin_leaving);
        let mut grace = GracePeriod::new(self.linger.get(), Instant::now());
        loop {
            // A peer that has closed its end answers no more, so its last message is taken first.
            self.drain(&mut |_, _: Outcome<'_>| ());
            // `is_leaving` also posts messages, so it is called for every connection.
            let leaving = connections
                .iter()
                .filter(|connection| connection.is_leaving())
                .count();
            if leaving == 0 || grace.is_over(Instant::now()) {
                break;
            }
            // A software HCA may need this CPU core to deliver the messages.
            std::thread::yield_now();
        }
        connections.iter().for_each(Connection::abort);
    }
}
