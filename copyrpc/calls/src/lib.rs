//! The calls of every RPC of this workspace through shared memory: the table of calls that wait for
//! an answer, their deadlines, and the errors of calls. A late, repeated or forged answer finds no
//! call in the table. The crate has no unsafe code. Time is an argument, in nanoseconds of any
//! monotonic clock; [`parts`] and [`futures`] read the system's, and only the latter starts a
//! thread. `ipc`, `delegationrpc` and `flux` are built on it; `copyrpc` and `scalerpc` share the
//! errors, the services with [`methods`], and [`futures`].
//!
//! ```rust
//! use std::time::Duration;
//! use copyrpc_calls::Calls;
//!
//! let mut calls = Calls::new(2);
//! let first = calls.insert("first")?;
//! let second = calls.insert("second")?;
//! calls.end_within(second, 1_000, Duration::from_nanos(50));
//!
//! assert_eq!(calls.take(first), Some("first"));
//! assert_eq!(calls.take(first), None); // an answer is taken once
//!
//! let mut late = vec![];
//! calls.expire(1_050, |call| late.push(call));
//! assert_eq!((late, calls.waiting(), calls.len()), (vec!["second"], 0, 1)); // its place waits for the late answer
//! # Ok::<(), &str>(())
//! ```
//!
//! # The files
//! - `tag`: the name of a call, in messages too.
//! - `table`: the calls that wait for an answer.
//! - `deadlines`: a heap of deadlines, here and in `copyrpc`.
//! - `error`: the errors of calls.
//! - `patience`: the number of empty polls before a thread sleeps.
//! - [`payloads`]: the values that methods take and return.
//! - [`methods`]: services with methods, over any client that sends bytes.
//! - [`futures`]: calls as futures, over a connection that a thread owns.
//! - `posting`: their way from any thread to that one.
//! - [`oneshot`]: one value from a thread to a future.
//! - [`parts`]: payloads above the limits of a message, over the same clients.
#![forbid(unsafe_code)]

mod deadlines;
mod error;
pub mod futures;
pub mod methods;
pub mod oneshot;
pub mod parts;
mod patience;
pub mod payloads;
mod posting;
mod table;
mod tag;
mod wakes;

pub use deadlines::Deadlines;
pub use error::{AskError, CallError, CallFailed, Ending, Misfit, SessionEnd};
pub use patience::Patience;
pub use table::{CALLS_MAX, Calls};
pub use tag::{ANSWERED, DROPPED, REFUSED, TOO_LONG, Tag, Tagged};

/// Errors go to other threads, and `?` makes a `Box<dyn Error + Send + Sync>` of each.
#[cfg(test)]
mod errors {
    fn check<E: std::error::Error + Send + Sync + 'static>() {}

    #[test]
    fn go_anywhere() {
        check::<crate::AskError>();
        check::<crate::CallError<u64, u64>>();
        check::<crate::CallFailed>();
        check::<crate::SessionEnd>();
        check::<crate::methods::MethodError<u64, crate::AskError>>();
        check::<crate::parts::PartsError<crate::AskError>>();
    }
}
