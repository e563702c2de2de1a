//! Whole jobs, started as a user starts them: their output, their refusals, and their end when a
//! process dies.
//!
//! - `job`: starting the binary with a watchdog, and signals for its processes.
//! - `measurement`: the main job of all backends, over the options that change its paths.
//! - `output`: the table and the JSON document.
//! - `tables`: the flat form of a result, as CSV.
//! - `policies`: the effects of policies, and the series of the daemons.
//! - `report`: results side by side.
//! - `sweep`: the script that measures at many points.
//! - `bad_input`: jobs that cannot run are refused.
//! - `death`: ranks and launchers that are killed. `storm`: the same at random, with every way to
//!   end a job.
//! - `event`: threads that sleep lose no operation, do nothing without work, and are woken by the
//!   end of a job.
//! - `features`: features of mlx5 devices that are off by default.
//! - `sim`: jobs in virtual time.
//! - `ucx`: the backend that needs a library.
//! - `hardware`: all backends on an mlx5 device. `ucx` and `hardware` are ignored by default.
//! - `memory`: compares the memory of a job with the expected memory.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a failing test panics and tests say what they saw; clippy's exemption covers #[test] functions only"
)]

mod bad_input;
mod death;
mod event;
mod features;
mod hardware;
mod job;
mod measurement;
mod memory;
mod output;
mod policies;
mod report;
#[path = "../support/series.rs"]
mod series_file;
mod sim;
mod storm;
mod sweep;
mod tables;
mod ucx;

use benchkv::trace::daemon_of;
