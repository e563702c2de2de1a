//! The carriers of messages between ranks: their names, and the properties that the rest of a job
//! needs.
//!
//! To add a carrier: its variant and its row of [`Carrier::traits`] here, its file next to
//! `backend/remote/copyrpc.rs`, its line in the registry of `backend/remote/mod.rs`.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::ucx;

/// A carrier of messages between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Carrier {
    /// copyrpc: batches written into the peer's ring.
    Copyrpc,
    /// A SEND for each message: the baseline of two-sided verbs.
    RcSend,
    /// A UCX active message for each message. Needs libucp, and no RDMA device.
    UcxAm,
}

impl fmt::Display for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name_of(self))
    }
}

/// A feature of mlx5 devices that is off by default (`--mlx5`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Feature {
    /// The device writes similar completions of receives as one compressed session. Fails on a
    /// device without compression.
    CqeCompression,
    /// The device puts a message of at most 64 bytes into its completion, which then has 128 bytes,
    /// instead of into a buffer.
    ScatterToCqe,
    /// All operations that a flush posts on a connection are announced together through BlueFlame.
    /// Not proven on a NIC.
    BlueflameBatch,
}

/// Returns the name of an option's value, as the user types it.
pub fn name_of(value: &impl ValueEnum) -> String {
    value
        .to_possible_value()
        .map_or_else(String::new, |value| value.get_name().to_owned())
}

/// The properties of a carrier that the rest of a job needs.
#[derive(Debug, Clone, Copy)]
pub struct Traits {
    /// The name of the carrier's operations, in the plural.
    pub operations: &'static str,
    /// Whether each message is sent separately, within a window of unanswered messages per
    /// connection, and not in the rings of a connection.
    pub is_by_message: bool,
    /// Whether messages are gathered, and sent or announced by a flush.
    pub gathers: bool,
    /// The features of mlx5 devices that the carrier can use.
    pub features: &'static [Feature],
    /// The library that moves the carrier's bytes, by a device that the library chooses; `None`:
    /// the carrier opens the device of the job.
    pub library: Option<Library>,
    /// Returns the memory of one end of a connection, in bytes.
    pub connection_bytes: fn(Connection) -> u64,
    /// Memory of a thread with connections, in addition to that of the connections, in bytes.
    pub thread_bytes: u64,
}

/// A library that is opened at run time.
#[derive(Debug, Clone, Copy)]
pub struct Library {
    /// Name of the library's device in results.
    pub name: &'static str,
    /// Checks whether the carrier's library is installed. The error contains the remedy.
    pub load: fn() -> Result<(), String>,
    /// Name and value of an environment variable that is set for the ranks unless the user has set
    /// it.
    pub variable: (&'static str, &'static str),
}

/// The sizes of a connection between ranks, from which its memory follows.
#[derive(Debug, Clone, Copy)]
pub struct Connection {
    /// Bytes of each of the connection's two rings; 0 if it has none.
    pub ring_bytes: u64,
    /// Maximum number of messages under way at one end, requests and answers together: messages
    /// that were sent and are not completed, or that have arrived.
    pub under_way: u64,
    /// Length of the part of a value that follows a message, in bytes.
    pub tail_bytes: u64,
}

/// Memory of the tables of a thread with endpoints, in bytes.
const THREAD_BYTES: u64 = 64 << 10;
/// Memory of an endpoint of copyrpc in addition to its two rings, in bytes, as measured once: a
/// send queue of 256 WQEBBs, the tables of this queue, and the memory of the connection in the
/// software device.
const QUEUE_BYTES: u64 = 23 << 10;
/// Memory of a copyrpc endpoint's share of the thread's receive queue and completion queues, in
/// bytes: 48 receives, and 64 completions in each of two queues.
const SHARED_QUEUE_BYTES: u64 = 48 * 64 + 2 * 64 * 64 + 2 * 64 * 32;
/// Bytes of a message under way on a connection of rc-send: its WQE and completion at one end, the
/// receive with 64 bytes and its completion at the other end, and the entry of the call. A
/// connection has a window of requests and a window of answers in each direction.
const BYTES_PER_SEND: u64 = 64 + 8 + 64 + 64 + 32 + 64 + 32;
/// Memory of a connection of rc-send in addition to the memory of its messages, in bytes: the
/// memory of the connection in the software device, and the tables of the connection.
const SEND_QUEUE_BYTES: u64 = 16 << 10;
/// Memory of an endpoint of UCX, and of the UCX library with its worker, in bytes, as measured for
/// UCX 1.13 over shared memory. Both depend on the transports that UCX chooses.
const UCX_ENDPOINT_BYTES: u64 = 384 << 10;
const UCX_WORKER_BYTES: u64 = 8 << 20;

const UCX: Library = Library {
    name: "ucx",
    load: || ucx::load().map(drop).map_err(|error| error.to_string()),
    // UCX writes its log to standard output by default. Standard output is for the result, so this
    // variable redirects the log.
    variable: ("UCX_LOG_FILE", "stderr"),
};

impl Carrier {
    /// Returns the properties of the carrier.
    pub const fn traits(self) -> Traits {
        match self {
            Self::Copyrpc => Traits {
                operations: "WRITEs",
                is_by_message: false,
                gathers: true,
                // copyrpc receives only immediates, so a receive has no data that could be put into
                // a CQE.
                features: &[Feature::CqeCompression, Feature::BlueflameBatch],
                library: None,
                connection_bytes: |of| 2 * of.ring_bytes + QUEUE_BYTES + SHARED_QUEUE_BYTES,
                thread_bytes: THREAD_BYTES,
            },
            Self::RcSend => Traits {
                operations: "SENDs",
                is_by_message: true,
                gathers: true,
                // A flush only announces messages that were posted before, so it has no operations
                // for a BlueFlame batch.
                features: &[Feature::CqeCompression, Feature::ScatterToCqe],
                library: None,
                connection_bytes: |of| {
                    of.under_way * (BYTES_PER_SEND + 2 * of.tail_bytes) + SEND_QUEUE_BYTES
                },
                thread_bytes: THREAD_BYTES,
            },
            Self::UcxAm => Traits {
                operations: "active messages",
                is_by_message: true,
                gathers: false,
                features: &[],
                library: Some(UCX),
                connection_bytes: |of| UCX_ENDPOINT_BYTES + of.under_way * 2 * of.tail_bytes,
                thread_bytes: UCX_WORKER_BYTES,
            },
        }
    }
}
