//! What can carry messages between ranks: the names, and what the rest of a job has to know of each.
//!
//! To add a carrier: its variant and its row of [`Transport::traits`] here, its file beside `backend/remote/copyrpc.rs`, its line in the
//! registry of `backend/remote/mod.rs`.

use std::fmt;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::ucx;

/// What carries messages between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// copyrpc: batches written into the peer's ring.
    Copyrpc,
    /// A SEND for each message: the baseline of two-sided verbs.
    RcSend,
    /// A UCX active message for each message. Needs libucp, and no RDMA device.
    UcxAm,
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&name_of(self))
    }
}

/// The name that an option gives a value.
#[must_use]
pub fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// What the rest of a job has to know of a carrier.
#[derive(Debug, Clone, Copy)]
pub struct Traits {
    /// What it posts, in the plural.
    pub operations: &'static str,
    /// It sends each message by itself, in a window for each connection, and not in the rings of one.
    pub is_by_message: bool,
    /// What is sent waits for a flush.
    pub gathers: bool,
    /// The library that moves its bytes, by a device of its own choice; `None`: it opens the device of the job.
    pub library: Option<Library>,
    /// Bytes of one end of a connection.
    pub connection_bytes: fn(Connection) -> u64,
    /// Bytes of a thread with connections, without these.
    pub thread_bytes: u64,
}

/// A library that is opened at run time.
#[derive(Debug, Clone, Copy)]
pub struct Library {
    /// What results call the device that it chooses.
    pub name: &'static str,
    /// Finds out whether it is there, or says what to do.
    pub load: fn() -> Result<(), String>,
    /// A variable of the ranks' environment, where the user has not set it, and why.
    pub variable: (&'static str, &'static str),
}

/// The sizes of a connection between ranks.
#[derive(Debug, Clone, Copy)]
pub struct Connection {
    /// Bytes of each of its two rings; 0 where it has none.
    pub ring_bytes: u64,
    /// Messages under way at one end: what is sent and not gone, and what has come, each a request or an answer.
    pub under_way: u64,
    /// Bytes of a value behind the message.
    pub tail_bytes: u64,
}

/// Tables of a thread with endpoints.
const THREAD_BYTES: u64 = 64 << 10;
/// Beside its two rings an endpoint of copyrpc has a send queue of 256 WQEBBs, its bookkeeping, and the lane of the software device: what `copyrpc_memory
/// --send-wr 256` measures.
const QUEUE_BYTES: u64 = 23 << 10;
/// Its part of the thread's receive queue and completion queues: 48 receives, and 64 completions in each of two queues.
const SHARED_QUEUE_BYTES: u64 = 48 * 64 + 2 * 64 * 64 + 2 * 64 * 32;
/// A message under way on a connection of rc-send, a window of requests and of answers in each direction: its WQE and completion at one end, the
/// receive with 64 bytes and its completion at the other, what is kept of the call.
const BYTES_PER_SEND: u64 = 64 + 8 + 64 + 64 + 32 + 64 + 32;
/// Beside these such a connection has the lane of the software device, and its tables.
const SEND_QUEUE_BYTES: u64 = 16 << 10;
/// An endpoint of UCX, and beside these its library and worker: what UCX 1.13 took over shared memory. Its transports decide.
const UCX_ENDPOINT_BYTES: u64 = 384 << 10;
const UCX_WORKER_BYTES: u64 = 8 << 20;

const UCX: Library = Library {
    name: "ucx",
    load: || ucx::load().map(drop).map_err(|error| error.to_string()),
    // UCX writes its messages to standard output, which is for the result, unless it is told otherwise.
    variable: ("UCX_LOG_FILE", "stderr"),
};

impl Transport {
    /// What the rest of a job has to know of it.
    #[must_use]
    pub const fn traits(self) -> Traits {
        match self {
            Self::Copyrpc => Traits {
                operations: "WRITEs",
                is_by_message: false,
                gathers: true,
                library: None,
                connection_bytes: |of| 2 * of.ring_bytes + QUEUE_BYTES + SHARED_QUEUE_BYTES,
                thread_bytes: THREAD_BYTES,
            },
            Self::RcSend => Traits {
                operations: "SENDs",
                is_by_message: true,
                gathers: true,
                library: None,
                connection_bytes: |of| of.under_way * (BYTES_PER_SEND + 2 * of.tail_bytes) + SEND_QUEUE_BYTES,
                thread_bytes: THREAD_BYTES,
            },
            Self::UcxAm => Traits {
                operations: "active messages",
                is_by_message: true,
                gathers: false,
                library: Some(UCX),
                connection_bytes: |of| UCX_ENDPOINT_BYTES + of.under_way * 2 * of.tail_bytes,
                thread_bytes: UCX_WORKER_BYTES,
            },
        }
    }
}
