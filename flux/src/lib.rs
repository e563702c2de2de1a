//! [`network`] makes `K` [`Node`]s, one for each thread, every one of which can call every other.
//! Calls and replies travel through lanes on the heap, one for each ordered pair of nodes: no lock,
//! no shared counter, and a read-modify-write only to wake a node that was idle.
//!
//! ```
//! use flux::{Config, network};
//!
//! let mut nodes = network::<u64, &str>(2, Config::default())?;
//! let mut b = nodes.pop().ok_or("two nodes were asked for")?;
//! let mut a = nodes.pop().ok_or("two nodes were asked for")?;
//!
//! a.call(1, 12, "the square of 12")?;
//! b.step(|_, _| {}, |_from, number| number * number);
//! let mut answers = vec![];
//! a.poll(|question, answer| answers.push((question, answer)));
//! assert_eq!(answers, [("the square of 12", Ok(144))]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! - [`Node::step`] answers each call at once, with the fewest instructions. [`Node::poll`] and
//!   [`Node::recv`] take calls that are answered later.
//! - A call and a reply can be seen when the function that sends them returns. There is no flush.
//! - Replies arrive in any order. A [`Token`] is the duty to answer one call: [`Node::reply`] uses
//!   it up, and dropping it, on any thread, rejects the call. The node's next [`Node::poll`] sends
//!   the rejection, and a [`Node::wait`] ends for it.
//! - **Back-pressure**: at most `in_flight` calls of one node to another are unanswered (default
//!   256); a further call fails as [`CallError::Full`], which returns payload and user data.
//!   [`Node::reply`] never fails for lack of room.
//! - Every call ends exactly once: with its reply, with [`CallFailure::Dropped`] when its token is
//!   dropped, with [`CallFailure::TimedOut`] after the time that [`Node::call_within`] was given or
//!   by [`Node::cancel`] (such a call keeps its slot until its late reply arrives, which is
//!   discarded), or with [`CallFailure::Closed`] when the other node is dropped. As long as
//!   none of this happens, a call waits: a token that is kept ends no call.
//! - **Memory**: `K x (K - 1) x capacity` slots of 16 B and the payload, rounded up to 64 B: 3.7 MB
//!   for 8 nodes with the default capacity of 1024.
//! - A poll is bounded and fair, and visits active nodes only. [`Node::wait`] sleeps until there is
//!   something to poll for; [`sleep::wait`] sleeps on a node and on other things at once.
//! - Nodes share a process, so data of any length stay on the heap: a payload is `Copy`, an index
//!   or an address that both threads know.
//!
//! Why lanes without a word for the reader's position never overflow: `docs/shm-protocols.md`, M1
//! and M2.
//!
//! # The files, in the order a call passes them
//! - `config`: the sizes of a network. `mesh`: the memory that all its nodes share.
//! - `node`: calls, received calls, replies; why the lanes never overflow.
//! - `token`: the token of a received call. `error`: the errors, one type per verb.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

mod config;
mod error;
mod mesh;
mod node;
mod token;

pub use config::{Config, NODES_MAX};
pub use copyrpc_calls::{CallError, CallFailure, OptionError, SessionEnd};
pub use copyrpc_shm::sleep;
pub use copyrpc_shm::wait::WaitStrategy;
pub use error::ForeignToken;
#[doc(hidden)]
pub use node::network_by;
pub use node::{Node, network};
pub use token::{CallToken, Token};

/// Checks that `?` makes a `Box<dyn Error + Send + Sync>` of every error.
#[cfg(test)]
mod errors {
    fn check<E: std::error::Error + Send + Sync + 'static>() {}

    #[test]
    fn go_anywhere() {
        check::<crate::CallError<u64, u64>>();
        check::<crate::OptionError>();
        check::<crate::ForeignToken<u64>>();
    }
}
