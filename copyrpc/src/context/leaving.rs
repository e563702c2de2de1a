//! The end of a context.

use std::time::{Duration, Instant};

use mlx5_rendezvous::GracePeriod;

use super::Inner;
use crate::connection::{Connection, Outcome};

/// Maximum time for which a context that is dropped waits for its posted messages. A peer's device
/// takes them without a program, so only a peer that is gone needs this long.
pub(crate) const LINGER: Duration = Duration::from_millis(20);

impl<U> Inner<U> {
    /// Ends all connections. Their messages have the context's time to arrive: a queue pair loses
    /// everything under way at its end. Meanwhile it drains as ever: arrivals and completions make
    /// room for messages that wait (S2, B1).
    pub(super) fn shut_down_all(&self) {
        let connections = self.connections.borrow().clone();
        connections.iter().for_each(Connection::begin_leaving);
        let mut grace = GracePeriod::new(self.linger.get(), Instant::now());
        loop {
            // Each is called: the call serves it.
            let leaving = connections
                .iter()
                .filter(|connection| connection.is_leaving())
                .count();
            if leaving == 0 || grace.is_over(Instant::now()) {
                break;
            }
            self.drain(&mut |_, _: Outcome<'_>| ());
            // A software HCA may need the core.
            std::thread::yield_now();
        }
        connections.iter().for_each(Connection::abort);
    }
}
