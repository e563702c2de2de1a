//! The front end from outside: programs under `mlx5-run`, and commands written to the device file.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

mod failures;
mod programs;
mod support;
mod ucx;
