//! The events of the device other than completions, and the connections that they end.

use mlx5::AsyncEvent;

use super::Inner;
use crate::connection::Connection;
use crate::error::CloseReason;

impl<U> Inner<U> {
    /// Takes the events of the device. Ends the connections that an event concerns, since the
    /// device may report the event without a completion in error. Notes an event that concerns the
    /// whole context.
    pub(super) fn heed_events(&self) {
        while let Some(event) = self.device.take_async_event() {
            let is_everything = match event {
                AsyncEvent::DeviceFatal => true,
                AsyncEvent::CqError { cqn } => {
                    let queues = self.queues.borrow();
                    [queues.send_cq.cqn(), queues.recv_cq.cqn()].contains(&cqn)
                }
                _ => false,
            };
            let is_concerned = |connection: &Connection<U>| {
                is_everything || event.failed_qp() == Some(connection.qpn())
            };
            for connection in self
                .connections
                .borrow()
                .values()
                .filter(|connection| is_concerned(connection))
            {
                connection.end(CloseReason::Device(event));
            }
            if is_everything {
                self.broken.set(Some(event));
            }
        }
    }
}
