//! Tests that need private items of this crate, among them strict mode by mutation, and peers that
//! write random words.

mod datagrams;
#[path = "../../tests/foreign/driver.rs"]
mod driver;
mod events;
mod gone;
mod hand;
mod hostile;
mod plain;
mod ports;
mod strict;
