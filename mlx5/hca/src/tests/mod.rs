//! Tests that look inside: strict mode by mutation, and peers that write anything.

mod datagrams;
#[path = "../../tests/foreign/driver.rs"]
mod driver;
mod events;
mod gone;
mod hand;
mod hostile;
mod plain;
mod strict;
