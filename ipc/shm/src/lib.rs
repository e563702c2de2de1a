//! Shared memory between processes of one user on one host, and what it takes to survive them.
//!
//! In the order data flows:
//! - [`sync`]: atomics (loom's under `--cfg loom`) and the asymmetric barrier pair.
//! - [`lane`]: one producer, one consumer, lap-stamped slots: the only ring in the workspace.
//! - [`ready`]: polling thousands of lanes at the price of the busy ones.

pub mod lane;
pub mod ready;
pub mod sync;
