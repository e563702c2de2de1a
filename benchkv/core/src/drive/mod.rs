//! Drivers that step all ranks of a job in one thread. `benchkv` itself drives the threads of jobs
//! in real time.
//!
//! - [`cluster`]: all ranks of a job in one process, connected, and stepped in turn (lockstep).
//! - [`simulated`]: all ranks of a job in virtual time.
//! - [`faults`]: the faults of a simulated job.

pub mod cluster;
pub mod faults;
pub mod simulated;

mod threads;
mod world;

#[cfg(test)]
mod tests;
