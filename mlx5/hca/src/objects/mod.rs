//! The firmware commands: creating, connecting, changing and destroying objects.
//!
//! - `create`: devices, completion queues and queue pairs. `regions`: memory regions.
//! - `foreign`: polling and state transitions, for drivers that do not announce doorbells.

pub(crate) mod create;
pub(crate) mod foreign;
pub(crate) mod regions;
