//! The device's side of queues: its private state of them, and the memory that the driver writes.
//!
//! - `qp`: queue pairs. `in_flight`: their scheduled work. `cq`: completion queues. `mirror`:
//!   receive queues in memory that peers do not map. `rqs`: makes receive queues. `data`: gathers
//!   and scatters the bytes of messages.
//! - `async_events`: asynchronous events, and the failures that cause them.

pub(crate) mod async_events;
pub mod cq;
pub(crate) mod data;
pub(crate) mod in_flight;
pub(crate) mod mirror;
pub(crate) mod qp;
pub(crate) mod rqs;
