//! Tests that look inside the crate: bytes in the send queue, bytes of CQEs.

mod golden;
mod hand;
mod strict;
