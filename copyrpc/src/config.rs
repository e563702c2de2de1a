//! The configuration of an endpoint, and the queue lengths that follow from it.

use std::time::Duration;

use mlx5::ConnectOptions;

use crate::link::Window;
use crate::ring::DEFAULT_RING_SIZE;

/// Number of WQEBBs that a WQE with the maximum of inline bytes takes.
const BATCH_WQEBBS: u32 = 4;
/// Maximum number of WQEBBs of a send queue whose size is not given by
/// [`EndpointConfig::max_send_wr`].
const MAX_COMPUTED_SEND_WR: u32 = 256;
/// Maximum number of slots of an endpoint's lane, the queue of the peer's messages to it in the
/// software HCA.
const MAX_LANE_SLOTS: u64 = 128;

pub(crate) const DEFAULT_BATCHES: u32 = 32;
pub(crate) const DEFAULT_RAW_OPERATIONS: u32 = 16;

/// The configuration of an endpoint. Both ends of a connection need equal ring sizes.
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// Bytes of each of the two rings: a power of two from 4 KiB to 256 MiB. Default 1 MiB. A
    /// request may have at most `ring_size / 8 - 12` bytes.
    pub ring_size: u64,
    /// Batches that the peer may have in flight, at least 1; this end never has more either, even
    /// if the peer permits it. All endpoints of a context share two thirds of the context's SRQ.
    /// Each endpoint takes this number + `raw_operations` + 8 entries of the context's send CQ, and
    /// with a [`Window::Completion`] one more for each batch of the window. Default 32.
    pub batches_in_flight: u32,
    /// Maximum number of outstanding one-sided operations
    /// ([`Endpoint::rdma_read`](crate::Endpoint::rdma_read),
    /// [`Endpoint::rdma_write`](crate::Endpoint::rdma_write)). Default 16; 0 for none.
    pub raw_operations: u32,
    /// Number of WQEBBs of the send queue; each takes 64 bytes, and 8 bytes of bookkeeping. Default
    /// `None`: computed by [`EndpointConfig::send_queue_wqebbs`].
    pub max_send_wr: Option<u32>,
    /// Silence of the peer after which it is probed, while requests are unanswered or the peer has
    /// not taken messages. Default 100 ms, resolution 10 ms.
    pub keepalive: Duration,
    /// Time after which the connection ends with
    /// [`CloseReason::PeerStalled`](crate::CloseReason::PeerStalled) because the peer answers
    /// probes but makes no progress: requests stay unanswered, or messages are not taken. Default 5
    /// s; `Duration::MAX`: never.
    ///
    /// The peer watches this end in the same way. So poll at least once in this time while calls
    /// are outstanding or requests are unanswered: work of a program between two polls, such as on
    /// a request that it [received](crate::Context::recv), counts as silence. A client whose calls have all ended,
    /// also by their deadlines, need not poll. A handler of
    /// [`Context::serve`](crate::Context::serve) or [`Server::serve`](crate::Server::serve) may
    /// take any time, but at most 2 s on a device that sends packets (`soft:roce=ADDRESS`). All
    /// callers of its context wait for the handler meanwhile, unless their calls have deadlines.
    ///
    /// A peer that has run handlers meanwhile gets another quarter of the time. The connection does
    /// not end before three probes were answered. The time begins anew if this end does not poll
    /// for a quarter of it.
    pub stall_timeout: Duration,
    /// Silence of the peer, with nothing outstanding, after which its record is READ to check that
    /// it lives. If the peer is gone, the connection ends within about two of these intervals.
    /// Checks begin with the first message of either side, or when
    /// [`connect_over`](crate::PendingEndpoint::connect_over) has met the peer. A context checks at
    /// most 3,200 endpoints per second: a check is later if there are more endpoints, or if the
    /// owner polls less often than every 10 ms. Default 1 s, resolution 50 ms; `None` for never.
    pub idle_keepalive: Option<Duration>,
    /// Time with nothing outstanding after which this end closes the connection:
    /// [`CloseReason::IdleTimeout`](crate::CloseReason::IdleTimeout). The close is never early. It
    /// is late by up to `idle_keepalive`, or by up to `idle_timeout` if there is no
    /// `idle_keepalive`. Default `None`: an idle connection with a living peer is kept.
    pub idle_timeout: Option<Duration>,
    /// The window of this end: the number of small batches under way above which further messages
    /// wait and gather. Default [`Window::Off`].
    pub window: Window,
    /// Timeouts and retries of the connection.
    pub connect: ConnectOptions,
}

impl Default for EndpointConfig {
    fn default() -> Self {
        Self {
            ring_size: DEFAULT_RING_SIZE,
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
    /// Returns the number of WQEBBs of the send queue: `max_send_wr`, or if it is `None`, the
    /// number for the batches in flight at their maximum length, one additional batch for every
    /// eight of them, and the one-sided operations, at most 256. The device rounds up to a power of
    /// two, at least 16. The additional batches make room for the READ of the peer's record, the
    /// NOPs before the queue's end, and WQEs that are done but not reported
    /// ([`mlx5::Signal::Reclaim`]). With fewer than 8 batches in flight there may be no such room:
    /// an operation then waits for the completion of earlier operations, which does not depend on
    /// the peer's program. A larger `max_send_wr` makes room, at 72 bytes per WQEBB.
    #[must_use]
    pub fn send_queue_wqebbs(&self) -> u32 {
        self.max_send_wr.unwrap_or_else(|| {
            let batches = self
                .batches_in_flight
                .saturating_add(self.batches_in_flight / 8);
            // A READ or WRITE of the application takes one WQEBB.
            batches
                .saturating_mul(BATCH_WQEBBS)
                .saturating_add(self.raw_operations)
                .clamp(1, MAX_COMPUTED_SEND_WR)
        })
    }

    /// Returns the number of slots of the endpoint's lane, the queue of the peer's messages to it
    /// in the software HCA. The software HCA frees a quarter of the slots at a time. With a limit
    /// of at most 96 batches in flight (B1 of docs/copyrpc-protocol.md), no batch waits for a slot.
    pub(crate) fn lane_slots(&self) -> u32 {
        let needed = (u64::from(self.batches_in_flight) * 4).div_ceil(3);
        needed.clamp(1, MAX_LANE_SLOTS) as u32
    }
}
