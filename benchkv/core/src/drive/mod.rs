//! Drivers: whose turn it is. The threads of real jobs are driven by `benchkv` itself; here are those that run all ranks of a job in one thread.
//!
//! - [`cluster`]: all ranks of a job in one process, connected, and stepped in turn (lockstep).
//! - [`simulated`]: the same in virtual time.
//! - [`faults`]: what goes wrong there.

pub mod cluster;
pub mod faults;
pub mod simulated;

mod threads;
mod world;

#[cfg(test)]
mod tests;
