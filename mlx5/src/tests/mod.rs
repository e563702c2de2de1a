//! Tests that look inside the crate: bytes in the send queue, bytes of CQEs.

mod doorbell_order;
mod golden;
mod send_queue;
