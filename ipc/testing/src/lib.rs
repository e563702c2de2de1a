//! The part that tests of several crates share: processes that are started, stopped, killed and single-stepped, and the suites that every
//! RPC through shared memory of this workspace passes. It is not published.
//!
//! A test file has a type for its RPC, which implements [`conformance::Rpc`], and makes the tests of a suite with the macro of that
//! suite's name.
//!
//! - `limits`: watchdogs, the scale of tests, and addresses that no other test listens at.
//! - `executor`: a plain loop for futures.
//! - `helpers`: scratch directories, and processes that execute the test binary again in a role.
//! - `tracee`: a process that is single-stepped from one of its markers to the next.
//! - `conformance`: the promises of every such RPC. `facade`: binding, connecting, serving and asking. `bad_input`: refusals.
//! - `storm`: processes killed at random moments. `single_step`: at every instruction. `caller`: the client of both, whose calls end once.
//! - `one_thread`: many peers in one thread, in virtual time. `simulated`: a server and all its clients there.
//! - `typed`: servers and clients of values, with either kind of announcement.
#![allow(missing_docs, missing_debug_implementations, reason = "tests use it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test says what failed by panicking")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "helper processes talk to their test through it")]

pub mod bad_input;
pub mod caller;
pub mod conformance;
pub mod executor;
pub mod facade;
pub mod helpers;
pub mod limits;
pub mod one_thread;
pub mod simulated;
#[cfg(target_arch = "x86_64")]
pub mod single_step;
pub mod storm;
pub mod tracee;
pub mod typed;
