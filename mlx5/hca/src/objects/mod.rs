//! The firmware commands: creating, connecting, changing and destroying objects.
//!
//! - `open`: devices. `create`: completion queues, receive queues and queue pairs. `transitions`:
//!   the states of queue pairs, and their destruction. `connect`: connections through shared memory
//!   or by packets. `regions`: memory regions.
//! - `foreign`: polling and state transitions, for drivers that do not announce doorbells.

mod connect;
pub(crate) mod create;
pub(crate) mod foreign;
mod open;
pub(crate) mod regions;
mod transitions;
