//! Tests that look inside the crate: bytes in the send queue, bytes of CQEs.

mod compact;
mod destroyed;
mod doorbell_order;
mod events;
mod golden;
mod hand;
#[path = "../../tests/support/random.rs"]
pub(crate) mod random;
mod receives;
mod send_queue;
mod strict;
