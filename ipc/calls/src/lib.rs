#![doc = include_str!("../README.md")]
//!
//! # The files
//! - `tag`: the name of a call, in messages too.
//! - `table`: the calls that wait for an answer.
//! - `deadlines`: when they end without one.
//! - `error`: how calls end, and why one is not made.
#![forbid(unsafe_code)]

mod deadlines;
mod error;
mod table;
mod tag;

pub use error::{AskError, CallError, CallFailed, SessionEnd};
pub use table::{CALLS_MAX, Calls};
pub use tag::{ANSWERED, REJECTED, Tag, Tagged};
