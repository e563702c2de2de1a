//! Several processes, each with contexts that call those of all others: under load, stopped, killed
//! and started again.
//!
//! A test is the launcher of a [`job::Job`]; the processes re-execute this binary and run
//! [`worker::process`]. The bytes of a call and its reply follow from the caller, the callee and
//! the number of earlier calls ([`plan`]), so that every byte of both is checked at both ends.

mod all_to_all;
mod job;
mod killed;
mod plan;
mod stopped;
mod worker;
