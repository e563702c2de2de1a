//! A process's device and endpoints, and why a process can fail.

use copyrpc::{
    BuildError, CallError, CallFailure, ConnectFailure, Context, ContextBuilder, CreateEndpointError, EXCHANGE_RECORD_SIZE, Endpoint,
    ExchangeError, ExchangeRecord, PendingEndpoint, PollError, Stats,
};
use harness::affinity::AffinityError;
use launch::pingpong::PingPongError;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::options::Options;

/// Why a process ended early.
#[derive(Debug, Error)]
pub(crate) enum JobError {
    #[error(transparent)]
    Exchange(#[from] launch::exchange::ExchangeError),
    #[error(transparent)]
    Affinity(#[from] AffinityError),
    #[error(transparent)]
    Baseline(#[from] PingPongError),
    #[error("the context: {0}")]
    Build(#[from] BuildError),
    #[error("an endpoint: {0}")]
    Endpoint(#[from] CreateEndpointError),
    #[error("the other process's connection records: {0}")]
    Record(#[from] ExchangeError),
    #[error("the other process sent {given} bytes of connection records where {expected} were due")]
    Records { given: usize, expected: usize },
    #[error("connecting: {0}")]
    Connect(#[from] ConnectFailure),
    #[error("polling: {0}")]
    Poll(#[from] PollError),
    #[error("a call was refused: {0}")]
    Refused(CallError<u32>),
    #[error("a call failed: {0}")]
    Failed(CallFailure),
    #[error("a reply was refused: {0}")]
    Reply(String),
    #[error("the answering thread could not be started: {0}")]
    Thread(std::io::Error),
    #[error("the answering thread does not answer")]
    Stuck,
    #[error("the answering thread panicked: this is a defect, please report it")]
    Panicked,
    #[error("a report cannot be read: {0}")]
    Report(#[from] serde_json::Error),
}

/// A context with endpoints that are not connected yet.
pub(crate) struct Setup {
    context: Context<u32>,
    pending: Vec<PendingEndpoint<u32>>,
}

impl Setup {
    /// Opens the device in the calling thread, which keeps it.
    pub(crate) fn open(options: &Options) -> Result<Self, JobError> {
        let job = &options.job;
        let builder = ContextBuilder::new(options.device.spec(options.shm_dir.as_deref()));
        let context = builder.srq_size(job.srq_size).cq_size(job.cq_size).build()?;
        let config = job.endpoint_config();
        let pending = (0..job.all_endpoints()).map(|_| context.create_endpoint(&config)).collect::<Result<_, _>>()?;
        Ok(Self { context, pending })
    }

    /// Name and transport of the device.
    pub(crate) fn device(&self) -> String {
        let info = self.context.device_info();
        format!("{}, {}", info.name, info.transport)
    }

    /// The records of all endpoints, for the other process.
    pub(crate) fn records(&self) -> Vec<u8> {
        self.pending.iter().flat_map(|endpoint| endpoint.local_info().encode()).collect()
    }

    /// Connects each endpoint with the one of the same place in the other process.
    pub(crate) fn connect(self, records: &[u8]) -> Result<(Context<u32>, Vec<Endpoint<u32>>), JobError> {
        let expected = self.pending.len() * EXCHANGE_RECORD_SIZE;
        if records.len() != expected {
            return Err(JobError::Records { given: records.len(), expected });
        }
        let connect = |(endpoint, record): (PendingEndpoint<u32>, &[u8])| {
            let mut bytes = [0; EXCHANGE_RECORD_SIZE];
            bytes.copy_from_slice(record);
            let record = ExchangeRecord::decode(&bytes)?;
            endpoint.connect(&record).map_err(|error| JobError::Connect(error.reason))
        };
        let endpoints = self.pending.into_iter().zip(records.chunks_exact(EXCHANGE_RECORD_SIZE)).map(connect).collect::<Result<_, _>>()?;
        Ok((self.context, endpoints))
    }
}

/// Counters of a context during one run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Counts {
    pub(crate) calls: u64,
    pub(crate) replies: u64,
    pub(crate) writes: u64,
    pub(crate) messages_sent: u64,
    pub(crate) bytes_sent: u64,
    pub(crate) wraps: u64,
    pub(crate) metadata_only: u64,
    pub(crate) reads: u64,
    pub(crate) ring_full: u64,
    pub(crate) insufficient_credit: u64,
    /// Flushes that stopped at the limit of batches in flight.
    pub(crate) batch_stalls: u64,
    /// Flushes that stopped at the window.
    pub(crate) window_stalls: u64,
    /// WRITEs that found no receive posted; `None` where the device does not count them.
    pub(crate) rnr_naks: Option<u64>,
}

/// The counters of a context at one moment.
#[derive(Default)]
pub(crate) struct Moment {
    stats: Stats,
    rnr_naks: Option<u64>,
}

impl Moment {
    pub(crate) fn now(context: &Context<u32>) -> Self {
        Self { stats: context.stats(), rnr_naks: context.device_info().rnr_naks }
    }
}

impl Counts {
    /// Returns the differences between two moments.
    pub(crate) fn between(before: &Moment, after: &Moment) -> Self {
        let rnr_naks = after.rnr_naks.map(|naks| naks - before.rnr_naks.unwrap_or(0));
        let (before, after) = (&before.stats, &after.stats);
        Self {
            calls: after.calls - before.calls,
            replies: after.replies - before.replies,
            writes: after.batches_sent - before.batches_sent,
            messages_sent: after.messages_sent - before.messages_sent,
            bytes_sent: after.bytes_sent - before.bytes_sent,
            wraps: after.wraps - before.wraps,
            metadata_only: after.metadata_only - before.metadata_only,
            reads: after.reads - before.reads,
            ring_full: after.ring_full - before.ring_full,
            insufficient_credit: after.insufficient_credit - before.insufficient_credit,
            batch_stalls: after.batch_stalls - before.batch_stalls,
            window_stalls: after.window_stalls - before.window_stalls,
            rnr_naks,
        }
    }

    pub(crate) fn messages_per_write(&self) -> f64 {
        self.messages_sent as f64 / self.writes.max(1) as f64
    }
}
