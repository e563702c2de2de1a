//! Tests that look inside the crate: bytes in the send queue, bytes of CQEs.

mod events;
mod golden;
mod hand;
mod strict;
