//! A process's device and endpoints.

use bench::load::Failure;
use copyrpc::{
    Context, ContextBuilder, EXCHANGE_RECORD_SIZE, Endpoint, ExchangeRecord, PendingEndpoint, Stats,
};
use serde::{Deserialize, Serialize};

use crate::options::Options;

/// A context with endpoints that are not connected yet.
pub(crate) struct Setup {
    context: Context<u32>,
    pending: Vec<PendingEndpoint<u32>>,
}

impl Setup {
    /// Opens the device in the calling thread, which keeps it.
    pub(crate) fn open(options: &Options) -> Result<Self, Failure> {
        let job = &options.job;
        let config = job.endpoint_config();
        let builder = ContextBuilder::new(options.device.spec(options.shm_dir.as_deref()));
        let builder = builder
            .endpoints_with(job.all_endpoints() as u32, &config)
            .srq_size(job.srq_size);
        let context = job
            .cq_size
            .map_or(builder.clone(), |entries| builder.cq_size(entries))
            .build()?;
        let pending = (0..job.all_endpoints())
            .map(|_| context.create_endpoint(&config))
            .collect::<Result<_, _>>()?;
        Ok(Self { context, pending })
    }

    /// Name and transport of the device.
    pub(crate) fn device(&self) -> String {
        let info = self.context.device_info();
        format!("{}, {}", info.name, info.transport)
    }

    /// The records of all endpoints, for the other process.
    pub(crate) fn records(&self) -> Vec<u8> {
        self.pending
            .iter()
            .flat_map(|endpoint| endpoint.local_info().encode())
            .collect()
    }

    /// Connects each endpoint with the one of the same place in the other process.
    pub(crate) fn connect(
        self,
        records: &[u8],
    ) -> Result<(Context<u32>, Vec<Endpoint<u32>>), Failure> {
        if records.len() != self.pending.len() * EXCHANGE_RECORD_SIZE {
            return Err(format!(
                "the other process sent {} bytes of connection records",
                records.len()
            )
            .into());
        }
        let connect = |(endpoint, record): (PendingEndpoint<u32>, &[u8])| -> Result<_, Failure> {
            Ok(endpoint.connect(&ExchangeRecord::decode(record.try_into()?)?)?)
        };
        let endpoints = self
            .pending
            .into_iter()
            .zip(records.chunks_exact(EXCHANGE_RECORD_SIZE))
            .map(connect)
            .collect::<Result<_, _>>()?;
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
        Self {
            stats: context.stats(),
            rnr_naks: context.device_info().rnr_naks,
        }
    }
}

impl Counts {
    /// Returns the differences between two moments.
    pub(crate) fn between(before: &Moment, after: &Moment) -> Self {
        let rnr_naks = after
            .rnr_naks
            .map(|naks| naks - before.rnr_naks.unwrap_or(0));
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
