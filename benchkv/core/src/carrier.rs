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
    /// The device puts messages of at most 64 bytes into their completions, of 128 bytes, instead
    /// of into buffers.
    ScatterToCqe,
    /// All operations that a flush posts on a connection are announced together through BlueFlame.
    /// Not proven on a NIC.
    BlueflameBatch,
}

/// Returns the name of an option's value.
#[must_use]
pub fn name_of(value: &impl ValueEnum) -> String {
    value
        .to_possible_value()
        .map_or_else(String::new, |value| value.get_name().to_owned())
}

/// The properties of a carrier that the rest of a job needs.
#[derive(Debug, Clone, Copy)]
pub struct Traits {
    /// The name of its operations, in the plural.
    pub operations: &'static str,
    /// Each message is sent separately, in a window for each connection, and not in a connection's
    /// rings.
    pub is_by_message: bool,
    /// Messages are sent by a flush.
    pub gathers: bool,
    /// The features of mlx5 devices that it can use.
    pub features: &'static [Feature],
    /// The library that moves its bytes, by a device of its own choice; `None`: it opens the device
    /// of the job.
    pub library: Option<Library>,
    /// Returns the bytes of one end of a connection.
    pub connection_bytes: fn(Connection) -> u64,
    /// Bytes of a thread with connections, without these connections.
    pub thread_bytes: u64,
}

/// A library that is opened at run time.
#[derive(Debug, Clone, Copy)]
pub struct Library {
    /// Name of its device in results.
    pub name: &'static str,
    /// Checks whether the carrier's library is installed. The error contains the remedy.
    pub load: fn() -> Result<(), String>,
    /// A variable of the ranks' environment, set unless the user has set it, and its value.
    pub variable: (&'static str, &'static str),
}

/// The sizes of a connection between ranks.
#[derive(Debug, Clone, Copy)]
pub struct Connection {
    /// Bytes of each of its two rings; 0 if it has none.
    pub ring_bytes: u64,
    /// Messages under way at one end: sent and not completed, or arrived; each a request or an
    /// answer.
    pub under_way: u64,
    /// Bytes of a value after the message.
    pub tail_bytes: u64,
}

/// Tables of a thread with endpoints.
const THREAD_BYTES: u64 = 64 << 10;
/// Bytes of an endpoint of copyrpc in addition to its two rings: a send queue of 256 WQEBBs, its
/// bookkeeping, and the lane of the software device, as measured once.
const QUEUE_BYTES: u64 = 23 << 10;
/// Bytes of such an endpoint's part of the thread's receive queue and completion queues: 48
/// receives, and 64 completions in each of two queues.
const SHARED_QUEUE_BYTES: u64 = 48 * 64 + 2 * 64 * 64 + 2 * 64 * 32;
/// Bytes of a message under way on a connection of rc-send: its WQE and completion at one end, the
/// receive with 64 bytes and its completion at the other, and the entry of the call. A connection
/// has a window of requests and a window of answers in each direction.
const BYTES_PER_SEND: u64 = 64 + 8 + 64 + 64 + 32 + 64 + 32;
/// Bytes of a connection of rc-send in addition to those of its messages: the lane of the software
/// device, and its tables.
const SEND_QUEUE_BYTES: u64 = 16 << 10;
/// Bytes of an endpoint of UCX, and of its library and worker, as measured for UCX 1.13 over shared
/// memory. They depend on its transports.
const UCX_ENDPOINT_BYTES: u64 = 384 << 10;
const UCX_WORKER_BYTES: u64 = 8 << 20;

const UCX: Library = Library {
    name: "ucx",
    load: || ucx::load().map(drop).map_err(|error| error.to_string()),
    // UCX writes its messages to standard output, which is for the result, unless this variable
    // changes that.
    variable: ("UCX_LOG_FILE", "stderr"),
};

impl Carrier {
    /// Returns the properties of the carrier.
    #[must_use]
    pub const fn traits(self) -> Traits {
        match self {
            Self::Copyrpc => Traits {
                operations: "WRITEs",
                is_by_message: false,
                gathers: true,
                // copyrpc receives immediates only, so there is no data for a CQE.
                features: &[Feature::CqeCompression, Feature::BlueflameBatch],
                library: None,
                connection_bytes: |of| 2 * of.ring_bytes + QUEUE_BYTES + SHARED_QUEUE_BYTES,
                thread_bytes: THREAD_BYTES,
            },
            Self::RcSend => Traits {
                operations: "SENDs",
                is_by_message: true,
                gathers: true,
                // A flush posts nothing: it announces what was posted before.
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
