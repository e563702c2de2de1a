//! The end of a context.

use std::time::{Duration, Instant};

use super::{Inner, POLL_BUDGET};
use crate::connection::Connection;

/// How long a context that goes waits for what it has posted. A peer's device needs no program to take it, so this is long only for one that
/// is gone.
const LINGER: Duration = Duration::from_millis(20);

impl<U> Inner<U> {
    /// Ends all connections; the next drain ends their calls. What they have to send has [`LINGER`] to arrive: with a queue pair goes what it
    /// has under way.
    pub(crate) fn part_all(&self) {
        let connections = self.connections.borrow().clone();
        connections.iter().for_each(Connection::part);
        let start = Instant::now();
        loop {
            // Each is asked: that serves it.
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
