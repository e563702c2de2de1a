//! What an endpoint is made with, and why it may be refused.

use std::time::Duration;

use mlx5::{AsyncEvent, ConnectOptions, CreateError, RegisterError};
use thiserror::Error;

use crate::link::Window;
use crate::ring::{DEFAULT_RING_SIZE, MAX_RING_SIZE, MIN_RING_SIZE};

/// WQEBBs of the WQE of a batch that is as long as that.
const BATCH_WQEBBS: u32 = 4;
/// WQEBBs of a send queue that was not asked for by its size.
const MAX_COMPUTED_SEND_WR: u64 = 256;
/// Maximum of messages that wait in the software HCA.
const MAX_LANE_SLOTS: u64 = 128;

/// Of an endpoint that was told nothing else.
pub(crate) const DEFAULT_BATCHES: u32 = 32;
pub(crate) const DEFAULT_RAW_OPERATIONS: u32 = 16;

/// What an endpoint is made with. Both ends of a connection need equal ring sizes.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// Bytes of each of the two rings: a power of two from 4 KiB to 256 MiB. Default 1 MiB. A request may have an eighth of it.
    pub ring_size: u64,
    /// Response credit in bytes the peer starts with: a multiple of 32, at most a quarter of the ring. `None`: a quarter.
    pub initial_credit: Option<u64>,
    /// Batches the peer may have in flight, at least 1; this end never has more either, whatever the peer allows. All endpoints of a
    /// context share two thirds of its SRQ, and each takes of its send CQ's entries this number + `raw_operations` + 8, and the batches of
    /// a [`Window::Completion`]. Default 32.
    pub batches_in_flight: u32,
    /// Most one-sided operations outstanding ([`Endpoint::rdma_read`](crate::Endpoint::rdma_read), [`Endpoint::rdma_write`](crate::Endpoint::rdma_write)). Default 16; 0 for none.
    pub raw_operations: u32,
    /// WQEBBs of the send queue, 64 bytes each and 8 beside. `None`, the default: [`EndpointConfig::send_queue_wqebbs`].
    pub max_send_wr: Option<u32>,
    /// With requests unanswered or messages that the peer has not taken, it is probed when nothing was heard of it for this long. Default
    /// 100 ms, resolution 10 ms.
    pub keepalive: Duration,
    /// With requests unanswered or messages that the peer has not taken, a peer that answers probes and does nothing else for this long is
    /// given up: [`CloseReason::PeerStalled`](crate::CloseReason::PeerStalled). So poll at least that often while calls are outstanding. It does something as long as it polls, however long its handlers take. Longer if three probes take
    /// longer, and only while this end polls at least four times in that time. Default 5 s; `Duration::MAX` never.
    pub stall_timeout: Duration,
    /// With nothing outstanding, the peer is READ when nothing was heard of it for this long, to see that it is there: one that is gone ends
    /// the connection within about two of these intervals. It begins with the first message of either side, or when
    /// [`connect_over`](crate::PendingEndpoint::connect_over) has met the peer. Of one context at most 3,200 endpoints are looked at per second; with
    /// more, or with an owner that polls less often than every 10 ms, it takes longer. Default 1 s, resolution 50 ms; `None` for never.
    pub idle_keepalive: Option<Duration>,
    /// With nothing outstanding for so long, this end closes the connection: [`CloseReason::IdleTimeout`](crate::CloseReason::IdleTimeout). Never early, late by up to
    /// `idle_keepalive`, or as much again without one. Default `None`: one that is idle and lives is kept.
    pub idle_timeout: Option<Duration>,
    /// Small batches of this end under way before the next ones gather. Default [`Window::Off`].
    pub window: Window,
    /// Timeouts and retries of the connection.
    pub connect: ConnectOptions,
}

impl Default for EndpointConfig {
    fn default() -> Self {
        Self {
            ring_size: DEFAULT_RING_SIZE,
            initial_credit: None,
            batches_in_flight: DEFAULT_BATCHES,
            raw_operations: DEFAULT_RAW_OPERATIONS,
            max_send_wr: None,
            keepalive: Duration::from_millis(100),
            stall_timeout: Duration::from_secs(5),
            idle_keepalive: Some(Duration::from_secs(1)),
            idle_timeout: None,
            window: Window::Off,
            connect: ConnectOptions::default(),
        }
    }
}

impl EndpointConfig {
    /// WQEBBs of the send queue: `max_send_wr`, or as many as the batches in flight and the one-sided operations take, and at most 256. The
    /// device rounds up to a power of two.
    #[must_use]
    pub fn send_queue_wqebbs(&self) -> u32 {
        self.max_send_wr.unwrap_or_else(|| {
            // A READ or WRITE of the application has one, and so has the READ of the peer's record.
            let in_flight = self.batches_in_flight.saturating_mul(BATCH_WQEBBS).saturating_add(self.raw_operations).saturating_add(1);
            // NOPs before the ring's end, where the largest WQE does not fit.
            let needed = u64::from(in_flight) + u64::from(BATCH_WQEBBS) - 1;
            // One completion in a quarter of the queue: so much may be done without this end being told.
            (needed * 4).div_ceil(3).min(MAX_COMPUTED_SEND_WR) as u32
        })
    }

    /// Slots of the software HCA's lane, of which it gives back a quarter at a time: no batch in flight (B1) waits for room, unless there are
    /// more than 96.
    pub(crate) fn lane_slots(&self) -> u32 {
        let needed = (u64::from(self.batches_in_flight) * 4).div_ceil(3);
        needed.clamp(1, MAX_LANE_SLOTS) as u32
    }
}

/// Why an endpoint could not be created.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CreateEndpointError {
    /// Called from inside a callback of a poll of the same context.
    #[error("an endpoint cannot be created from inside a poll's callback")]
    Reentrant,
    /// The device, or a queue of the context, broke down. Another context may work.
    #[error("this context makes no endpoints any more: {0}")]
    Device(AsyncEvent),
    /// The ring size is not usable.
    #[error("ring size {0} is not usable: it must be a power of two from {MIN_RING_SIZE} to {MAX_RING_SIZE} bytes")]
    RingSize(u64),
    /// The initial credit is not usable.
    #[error("initial credit {credit} must be a multiple of 32 and at most {max}, a quarter of the ring")]
    InitialCredit {
        /// The credit.
        credit: u64,
        /// A quarter ring.
        max: u64,
    },
    /// The shared receive queue is too small for one more endpoint.
    #[error(
        "{wanted} more batches in flight need a shared receive queue of at least {needed} receives, this one has {depth}: build the context \
         with ContextBuilder::endpoints of more than {endpoints}, or with srq_size({needed})"
    )]
    SrqTooSmall {
        /// Batches in flight the endpoint wants to grant; at least 1 is legal.
        wanted: u32,
        /// Receives the context would need.
        needed: u64,
        /// Receives it has.
        depth: usize,
        /// Endpoints that share it already.
        endpoints: u32,
    },
    /// The send completion queue is too small for one more endpoint.
    #[error(
        "one more endpoint needs a completion queue of at least {needed} entries, this one has {entries}: build the context with \
         ContextBuilder::endpoints of more than {endpoints}, or with cq_size({needed})"
    )]
    CqTooSmall {
        /// Entries the context would need.
        needed: u64,
        /// Entries it has.
        entries: u32,
        /// Endpoints that share it already.
        endpoints: u32,
    },
    /// The queue pair could not be made.
    #[error("creating the queue pair: {0}")]
    Queue(#[from] CreateError),
    /// The memory could not be had.
    #[error("memory of the endpoint: {0}")]
    Memory(#[from] RegisterError),
}
