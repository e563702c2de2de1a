//! The firmware commands: creating, connecting, changing and destroying objects.
//!
//! - `request`: the parameters. `create`: devices, completion queues and queue pairs. `regions`:
//!   memory regions. `rqs`: receive queues.
//! - `foreign`: polling and state transitions, for drivers that do not announce doorbells.

pub(crate) mod create;
pub(crate) mod foreign;
pub(crate) mod regions;
pub(crate) mod request;
pub(crate) mod rqs;
