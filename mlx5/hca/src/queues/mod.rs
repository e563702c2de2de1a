//! The device's side of queues: its private state of them, and their memory, which the driver writes.
//!
//! - `qp`: queue pairs. `in_flight`: their work whose time has not come. `cq`: completion queues. `mirror`: receive queues in memory that peers do
//!   not reach.
//! - `async_events`: asynchronous events, and failures that only they report.

pub(crate) mod async_events;
pub mod cq;
pub(crate) mod in_flight;
pub(crate) mod mirror;
pub(crate) mod qp;
