//! Endpoints: made, exchanged, connected, called.

use std::fmt;
use std::rc::{Rc, Weak};
use std::time::Duration;

use mlx5::{Access, ConnectOptions, QpConfig};
use thiserror::Error;

use crate::connection::{Connection, Remote, Resources};
use crate::context::{CreateEndpointError, Inner};
use crate::control::ControlMemory;
use crate::error::{CallError, CloseReason, LinkConfigError};
use crate::exchange::{ExchangeError, ExchangeRecord};
use crate::link::{CallKey, Link, LinkConfig, Window};
use crate::queue_share::Outstanding;
use crate::ring::{DEFAULT_RING_SIZE, RingSize, RingView};
use crate::stats::Stats;
use crate::timers::nanoseconds;
use crate::wire::{ALIGNMENT, FlowWords};

/// Inline bytes asked of the queue pair: what fits a WQE of four WQEBBs.
const MAX_INLINE_DATA: usize = 220;
/// WQEBBs of the WQE of a batch that is as long as that.
const BATCH_WQEBBS: u32 = 4;
/// WQEBBs of a send queue that was not asked for by its size.
const MAX_COMPUTED_SEND_WR: u64 = 256;
/// Most messages that the software HCA lets wait.
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
    /// Most one-sided operations outstanding ([`Endpoint::rdma_read`], [`Endpoint::rdma_write`]). Default 16; 0 for none.
    pub raw_operations: u32,
    /// WQEBBs of the send queue, 64 bytes each and 8 beside. `None`, the default: [`EndpointConfig::send_queue_wqebbs`].
    pub max_send_wr: Option<u32>,
    /// With requests unanswered or messages that the peer has not taken, it is probed when nothing was heard of it for this long. Default
    /// 100 ms, resolution 10 ms.
    pub keepalive: Duration,
    /// With requests unanswered or messages that the peer has not taken, a peer that answers probes and does nothing else for this long is
    /// given up: [`CloseReason::PeerStalled`]. So poll at least that often while calls are outstanding. It does something as long as it polls, however long its handlers take. Longer if three probes take
    /// longer, and only while this end polls at least four times in that time. Default 5 s; `Duration::MAX` never.
    pub stall_timeout: Duration,
    /// With nothing outstanding, the peer is READ when nothing was heard of it for this long, to see that it is there: one that is gone ends
    /// the connection within about two of these intervals. It begins with the first message of either side, or when
    /// [`connect_over`](PendingEndpoint::connect_over) has met the peer. Of one context at most 3,200 endpoints are looked at per second; with
    /// more, or with an owner that polls less often than every 10 ms, it takes longer. Default 1 s, resolution 50 ms; `None` for never.
    pub idle_keepalive: Option<Duration>,
    /// With nothing outstanding for so long, this end closes the connection: [`CloseReason::IdleTimeout`]. Never early, late by up to
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
            // NOPs in front of the ring's end, where the largest WQE does not fit.
            let needed = u64::from(in_flight) + u64::from(BATCH_WQEBBS) - 1;
            // One completion in a quarter of the queue: so much may be done without this end being told.
            (needed * 4).div_ceil(3).min(MAX_COMPUTED_SEND_WR) as u32
        })
    }

    /// Slots of the software HCA's lane, of which it gives back a quarter at a time: no batch in flight (B1) waits for room, unless there are
    /// more than 96.
    fn lane_slots(&self) -> u32 {
        let needed = (u64::from(self.batches_in_flight) * 4).div_ceil(3);
        needed.clamp(1, MAX_LANE_SLOTS) as u32
    }
}

/// Why two endpoints were not connected.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectFailure {
    /// Called from inside a callback of a poll of the same context.
    #[error("an endpoint cannot be connected from inside a poll's callback")]
    Reentrant,
    /// The context was dropped.
    #[error("the context of this endpoint is gone")]
    ContextGone,
    /// The endpoint of [`Context::connect_over`](crate::Context::connect_over) could not be made.
    #[error(transparent)]
    Create(#[from] CreateEndpointError),
    /// The channel of [`PendingEndpoint::connect_over`] failed.
    #[error("exchanging records: {0}")]
    Channel(#[from] std::io::Error),
    /// The peer of [`PendingEndpoint::connect_over`] could not connect; it knows why.
    #[error("the peer could not connect its end")]
    NotConnectedThere,
    /// The two cannot talk.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// The numbers of the records do not go together.
    #[error(transparent)]
    Link(#[from] LinkConfigError),
    /// The queue pair could not be connected.
    #[error(transparent)]
    Qp(#[from] mlx5::ConnectError),
}

/// A refused connection; the endpoint comes back unchanged.
#[derive(Error)]
#[error("cannot connect: {reason}")]
pub struct ConnectError<U> {
    /// The endpoint.
    pub endpoint: PendingEndpoint<U>,
    /// Why.
    #[source]
    pub reason: ConnectFailure,
}

impl<U> fmt::Debug for ConnectError<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConnectError").field("endpoint", &self.endpoint).field("reason", &self.reason).finish()
    }
}

/// An endpoint that is not connected. Give [`local_info`](Self::local_info) to the peer, and its record to
/// [`connect`](Self::connect).
pub struct PendingEndpoint<U> {
    parts: Box<Parts>,
    context: Weak<Inner<U>>,
}

impl<U> fmt::Debug for PendingEndpoint<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingEndpoint").field("record", &self.parts.record).finish_non_exhaustive()
    }
}

struct Parts {
    resources: Resources,
    control: ControlMemory,
    record: ExchangeRecord,
    config: EndpointConfig,
}

impl<U> PendingEndpoint<U> {
    pub(crate) fn create(context: &Rc<Inner<U>>, config: &EndpointConfig) -> Result<Self, CreateEndpointError> {
        let ring_size = RingSize::for_connection(config.ring_size).ok_or(CreateEndpointError::RingSize(config.ring_size))?;
        let max = ring_size.max_reservation();
        let credit = config.initial_credit.unwrap_or(max);
        if credit > max || credit % ALIGNMENT != 0 {
            return Err(CreateEndpointError::InitialCredit { credit, max });
        }
        let qp = context.create_qp(&QpConfig {
            max_send_wr: config.send_queue_wqebbs(),
            max_inline_data: MAX_INLINE_DATA,
            lane_slots: config.lane_slots(),
            ..QpConfig::default()
        })?;
        let share = context.share_queues(Outstanding::of(config), qp.send_capacity())?;
        let pd = context.pd();
        let bytes = ring_size.bytes() as usize;
        let resources = Resources {
            qp,
            send_ring: pd.alloc(bytes, Access::empty())?,
            recv_ring: pd.alloc(bytes, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?,
            share,
        };
        let control = context.create_control_memory(FlowWords { credit, ..FlowWords::default() })?;
        let (published_addr, published_rkey) = control.published();
        let record = ExchangeRecord {
            address: resources.qp.address(),
            recv_ring_rkey: resources.recv_ring.rkey(),
            recv_ring_addr: resources.recv_ring.addr(),
            ring_size,
            published_addr,
            published_rkey,
            batches: config.batches_in_flight,
            initial_credit: credit,
        };
        let parts = Parts { resources, control, record, config: config.clone() };
        Ok(Self { parts: Box::new(parts), context: Rc::downgrade(context) })
    }

    /// What the peer must know of this endpoint; [`ExchangeRecord::encode`] makes 128 bytes of it.
    #[must_use]
    pub fn local_info(&self) -> ExchangeRecord {
        self.parts.record
    }

    /// Connects to the endpoint that gave `remote`. The peer does the same with this one's record, before or after.
    ///
    /// Poll and flush only when the peer has connected too: what reaches a queue pair that is not connected is sent again for about half a
    /// second ([`ConnectOptions`]), then the connection ends as [`CloseReason::Disconnected`]. [`PendingEndpoint::connect_over`] waits for it;
    /// processes that swap records by other means meet in between, as in an `MPI_Barrier`.
    ///
    /// # Errors
    /// [`ConnectError`], with this endpoint.
    pub fn connect(mut self, remote: &ExchangeRecord) -> Result<Endpoint<U>, ConnectError<U>> {
        match self.make_link(remote) {
            Ok((context, link)) => Ok(self.into_endpoint(&context, link, remote)),
            Err(reason) => Err(ConnectError { endpoint: self, reason }),
        }
    }

    /// Connects the queue pair; whatever can fail does so before that.
    fn make_link(&mut self, remote: &ExchangeRecord) -> Result<(Rc<Inner<U>>, Link<U>), ConnectFailure> {
        let context = self.context.upgrade().ok_or(ConnectFailure::ContextGone)?;
        if context.is_polling() {
            return Err(ConnectFailure::Reentrant);
        }
        let Parts { resources, record, config, .. } = &mut *self.parts;
        record.check_peer(remote)?;
        let link_config = LinkConfig {
            local_credit: record.initial_credit,
            peer_credit: remote.initial_credit,
            local_batches: record.batches,
            // B2: what this end's share of the send CQ pays for.
            peer_batches: remote.batches.min(record.batches),
            send_start: 0,
            recv_start: 0,
            keepalive_ns: nanoseconds(config.keepalive),
            stall_ns: nanoseconds(config.stall_timeout),
            idle_keepalive_ns: config.idle_keepalive.map_or(u64::MAX, nanoseconds),
            idle_timeout_ns: config.idle_timeout.map_or(u64::MAX, nanoseconds),
            window: config.window,
        };
        let rings = [&resources.send_ring, &resources.recv_ring].map(|ring| view(ring, record.ring_size));
        let link = Link::new(rings[0], rings[1], &link_config)?;
        resources.qp.connect(&remote.address, &config.connect)?;
        Ok((context, link))
    }

    fn into_endpoint(self, context: &Rc<Inner<U>>, link: Link<U>, remote: &ExchangeRecord) -> Endpoint<U> {
        let Parts { resources, control, record, .. } = *self.parts;
        let recv_view = view(&resources.recv_ring, record.ring_size);
        let remote = Remote {
            ring_addr: remote.recv_ring_addr,
            ring_rkey: remote.recv_ring_rkey,
            published_addr: remote.published_addr,
            published_rkey: remote.published_rkey,
            path_mtu: record.address.mtu.min(remote.address.mtu),
        };
        let connection = Rc::new(Connection::new(resources, link, control, recv_view, remote, context.worklist()));
        context.register(Rc::clone(&connection));
        Endpoint::new(connection)
    }
}

fn view(ring: &mlx5::Mr, size: RingSize) -> RingView {
    debug_assert_eq!(ring.len() as u64, size.bytes());
    // SAFETY: the region has `size` bytes and lives in the `Connection` beside all copies of the view, until it is retired: then its link
    // is closed and touches no ring, and the receive ring stays for the requests that the application has. The send ring is written by its
    // link only, which holds no reference into it; the receive ring is written by no view.
    unsafe { RingView::new(ring.as_ptr(), size) }
}

/// Names one call of one endpoint of this process, for [`Endpoint::cancel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallToken {
    connection: u64,
    call: CallKey,
}

/// One end of a connection. Clones name the same connection, and so does [`RecvHandle::endpoint`](crate::RecvHandle::endpoint).
///
/// Dropping the last of them closes the connection as [`Endpoint::close`] does: outstanding calls end as they would, a request that was
/// received can be answered, and the peer hears of it with the next polls. So keep it for as long as the peer may call.
#[derive(Debug)]
#[must_use = "dropping the last handle of an endpoint closes its connection"]
pub struct Endpoint<U> {
    pub(crate) connection: Rc<Connection<U>>,
}

impl<U> Clone for Endpoint<U> {
    fn clone(&self) -> Self {
        Self::new(Rc::clone(&self.connection))
    }
}

impl<U> Drop for Endpoint<U> {
    fn drop(&mut self) {
        self.connection.remove_handle();
    }
}

impl<U> PartialEq for Endpoint<U> {
    fn eq(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.connection, &other.connection)
    }
}

impl<U> Eq for Endpoint<U> {}

impl<U> Endpoint<U> {
    pub(crate) fn new(connection: Rc<Connection<U>>) -> Self {
        connection.add_handle();
        Self { connection }
    }

    /// Sends `payload` as a request whose reply may have `response_allowance` bytes. Nothing leaves before the next
    /// [`Context::poll`](crate::Context::poll) or [`flush_endpoints`](crate::Context::flush_endpoints); calls made until then share one
    /// WRITE. `user_data` comes back, exactly once, through the callback of a poll or from [`Endpoint::cancel`].
    ///
    /// # Errors
    /// [`CallError`], with `user_data`. After `RingFull` or `InsufficientCredit`, poll and retry.
    #[inline(always)]
    pub fn call(&self, payload: &[u8], user_data: U, response_allowance: usize) -> Result<CallToken, CallError<U>> {
        let outcome = self.connection.link().try_call(payload, user_data, response_allowance);
        match outcome {
            Ok(call) => {
                self.connection.mark_dirty();
                Ok(CallToken { connection: self.connection.serial(), call })
            }
            Err(user_data) => self.call_after_all(payload, user_data, response_allowance),
        }
    }

    #[cold]
    #[inline(never)]
    fn call_after_all(&self, payload: &[u8], user_data: U, response_allowance: usize) -> Result<CallToken, CallError<U>> {
        let outcome = self.connection.link().call(payload, user_data, response_allowance);
        self.note_call(outcome)
    }

    /// As [`Endpoint::call`], but when there is no reply after `timeout` the call ends with
    /// [`CallFailure::DeadlineExceeded`](crate::CallFailure::DeadlineExceeded), in a later poll or drain: the first one without arrivals
    /// that comes after it, under load at the latest the 64th. A reply that arrives in that same poll wins. The peer is not told, and a
    /// reply that comes later reaches no call. Reads the clock; calls without a deadline do not.
    ///
    /// # Errors
    /// As [`Endpoint::call`].
    pub fn call_within(
        &self,
        payload: &[u8],
        user_data: U,
        response_allowance: usize,
        timeout: Duration,
    ) -> Result<CallToken, CallError<U>> {
        let deadline_ns = self.connection.timers().deadline_in(timeout);
        let outcome = self.connection.link().call_until(payload, user_data, response_allowance, deadline_ns);
        if outcome.is_ok() {
            self.connection.arm(deadline_ns);
        }
        self.note_call(outcome)
    }

    fn note_call(&self, outcome: Result<CallKey, CallError<U>>) -> Result<CallToken, CallError<U>> {
        // A refused call too: it may want a READ. Not one on a connection that has ended: nobody flushes that.
        if !matches!(outcome, Err(CallError::Closed { .. })) {
            self.connection.mark_dirty();
        }
        outcome.map(|call| CallToken { connection: self.connection.serial(), call })
    }

    /// Ends a call at once: its user data comes back here, and no callback gets it. `None` when the call has ended, or was made on
    /// another endpoint. The peer is not told, and its reply reaches no call; what the call took of ring and credit comes back with that
    /// reply. From a callback too.
    pub fn cancel(&self, call: CallToken) -> Option<U> {
        if call.connection != self.connection.serial() {
            return None;
        }
        self.connection.with_link(|link| link.cancel(call.call))
    }

    /// Largest request payload in bytes.
    #[must_use]
    pub fn max_payload(&self) -> usize {
        self.connection.recv_view().size().max_payload() as usize
    }

    /// Largest response allowance in bytes.
    #[must_use]
    pub fn max_response_allowance(&self) -> usize {
        self.connection.recv_view().size().max_response_allowance() as usize
    }

    /// Calls that have not ended.
    #[must_use]
    pub fn outstanding_calls(&self) -> usize {
        self.connection.with_link(|link| link.outstanding_calls())
    }

    /// Ends the connection when all is done: no more calls are taken, on either side, as soon as the peer hears of it; outstanding calls
    /// end as they would; requests that were received may be answered. Those that were not received by the next flush, and those that
    /// arrive later, end at the peer with [`CloseReason::ClosedByPeer`]. Both ends go on polling. When nothing is outstanding any more,
    /// [`Endpoint::closed`] is [`CloseReason::ClosedHere`], and `ClosedByPeer` at the other end. It takes as long as the handlers; a peer
    /// that is stopped or dead meanwhile ends it as it ends calls. One-sided operations are not waited for: end them first.
    pub fn close(&self) {
        self.connection.close();
    }

    /// Ends the connection at once: calls end with [`CloseReason::ClosedHere`] in the next poll or drain. The peer finds out as if this
    /// process had died.
    pub fn abort(&self) {
        self.connection.abort();
    }

    /// Why the connection ended, once it has.
    #[must_use]
    pub fn closed(&self) -> Option<CloseReason> {
        self.connection.with_link(|link| link.closed())
    }

    /// Counters of this connection.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.connection.with_link(|link| link.stats())
    }

    /// Most payload bytes of a packet on the way to the peer: the smaller of both ends' MTUs.
    #[must_use]
    pub fn path_mtu(&self) -> u16 {
        self.connection.path_mtu()
    }

    /// Queue pair number of this end: unique on its device while the endpoint lives.
    #[must_use]
    pub fn qpn(&self) -> u32 {
        self.connection.qpn()
    }
}
