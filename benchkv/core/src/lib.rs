//! The engine of benchkv: everything between the start of a job and its counts that is the same in
//! real time, in lockstep and in virtual time.
//!
//! Daemons and clients are state machines: they are stepped, get the time as an argument, and own
//! neither thread nor clock. Nothing here knows processes, files or the display of results.
//!
//! - [`job`]: the parameters of a job.
//! - [`workload`], [`zipf`], [`pace`]: the accesses of every client, and their start times.
//! - [`message`]: the bytes of a request and its response.
//! - [`values`]: the bytes of values that messages do not hold.
//! - [`store`]: the shard that a daemon serves.
//! - [`client`]: the loop that issues requests; [`operation`]: its record of each operation;
//!   [`verify`]: the check of their results.
//! - [`topology`]: the endpoints between threads, and the paths of requests; [`carrier`]: the
//!   carriers of messages between ranks.
//! - [`backend`]: daemons, the paths of clients to them, and the carriers of messages between ranks
//!   ([`ucx`]: the library of one carrier).
//! - [`policy`]: the delays of daemons that make batches larger.
//! - [`phase`]: the current activity of clients; [`drain`]: how long ranks wait for outstanding
//!   operations.
//! - [`drive`]: all ranks of a job in one thread.
//! - [`activity`]: the activity of the threads, from [`counters`](mod@counters); [`trace`]: the
//!   activity of a daemon over time.

pub mod activity;
pub mod backend;
pub mod carrier;
pub mod client;
pub mod counters;
pub mod drain;
pub mod drive;
pub mod job;
pub mod message;
pub mod operation;
pub mod pace;
pub mod phase;
pub mod policy;
pub mod store;
pub mod topology;
pub mod trace;
pub mod ucx;
pub mod values;
pub mod verify;
pub mod workload;
pub mod zipf;

#[cfg(test)]
mod tests;
