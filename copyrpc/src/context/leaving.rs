//! The end of a context.

use std::time::{Duration, Instant};

use super::{Inner, POLL_BUDGET};
use crate::connection::Connection;

/// Maximum time that a context that goes waits for its posted messages. A peer's device takes them without a program, so only a peer that
/// is gone needs this long.
const LINGER: Duration = Duration::from_millis(20);

impl<U> Inner<U> {
    /// Ends all connections; the next drain ends their calls. Their messages have [`LINGER`] to arrive: a queue pair loses everything
    /// under way at its end.
    pub(crate) fn part_all(&self) {
        let connections = self.connections.borrow().clone();
        connections.iter().for_each(Connection::part);
        let start = Instant::now();
        loop {
            // Each is called: the call serves it.
            let leaving = connections.iter().filter(|connection| connection.is_leaving()).count();
            if leaving == 0 || start.elapsed() >= LINGER {
                break;
            }
            let recv_cq = self.recv_cq.borrow();
            self.send_cq.borrow_mut().poll(POLL_BUDGET, |cqe| {
                if let Some(connection) = recv_cq.queues().get(cqe.qpn()) {
                    connection.note_arrival(&cqe);
                }
            });
        }
        connections.iter().for_each(Connection::abort);
    }
}
