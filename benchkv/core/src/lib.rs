//! The engine of benchkv: everything between the start of a job and its counts that is the same in real time, in lockstep and in virtual time.
//!
//! Daemons and clients are state machines: they are stepped, are told the time, and own neither thread nor clock. Nothing here knows processes,
//! files or how a result is shown.
//!
//! - [`job`]: what is to be run. - [`workload`], [`zipf`], [`pace`]: the accesses of every client, and when they start.
//! - [`message`]: the bytes of a request and its response. - [`values`]: the bytes of values that messages do not hold. - [`store`]: the shard that a
//!   daemon serves.
//! - [`client`]: the loop that issues requests; [`verify`] judges what comes back.
//! - [`topology`]: which thread has an endpoint to which, and which way a request goes; [`transport`]: what can carry it.
//! - [`backend`]: daemons, the paths of clients to them, and what carries messages between ranks ([`ucx`]: the library of one carrier).
//! - [`policy`]: what daemons leave for later, so that batches become larger.
//! - [`phase`]: what clients do at a time; [`drain`]: when they give up at the end.
//! - [`drive`]: all ranks of a job in one thread.
//! - [`activity`]: how the threads spent their time, out of [`counters`](mod@counters); [`trace`]: what a daemon was doing, over time.

pub mod activity;
pub mod backend;
pub mod client;
pub mod counters;
pub mod drain;
pub mod drive;
pub mod job;
pub mod message;
pub mod pace;
pub mod phase;
pub mod policy;
pub mod store;
pub mod topology;
pub mod trace;
pub mod transport;
pub mod ucx;
pub mod values;
pub mod verify;
pub mod workload;
pub mod zipf;

#[cfg(test)]
mod testing;
