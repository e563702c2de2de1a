//! The suites of the driver, a module each. `MLX5_TEST_TIME` and `MLX5_TEST_DEVICE` run them in
//! other modes of time and on other devices; `.ci/run` and `scripts/verbs-tests` name the suites
//! that support this.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test"
)]

mod all_to_all;
mod asynchronous;
mod bad_input;
mod datagrams;
mod events;
mod litmus;
mod queues;
mod rc;
mod simulation;
mod soft;
mod statuses;
mod verbs;

#[path = "../support/end.rs"]
mod end;
#[path = "../support/fabric.rs"]
mod fabric;
#[path = "../support/null.rs"]
mod null;
#[path = "../support/random.rs"]
mod random;
#[path = "../support/time.rs"]
mod time;
#[path = "../support/worker.rs"]
mod worker;
