//! The firmware commands: creating, connecting, changing and destroying objects.
//!
//! - `open`: devices. `create`: completion queues, receive queues and queue pairs. `transitions`:
//!   their states, and their end. `connect`: connections by packets. `regions`: memory regions.
//! - `foreign`: polling and state transitions, for drivers that do not announce doorbells.

mod connect;
pub(crate) mod create;
pub(crate) mod foreign;
mod open;
pub(crate) mod regions;
mod transitions;
