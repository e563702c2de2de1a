//! Endpoints before they are connected: created, and exchanging records.

use std::fmt;
use std::rc::{Rc, Weak};

use mlx5::{Access, QpConfig};
use thiserror::Error;

use crate::config::{CreateEndpointError, EndpointConfig};
use crate::connection::{Connection, Remote, Resources};
use crate::context::{Context, Inner};
use crate::control::ControlMemory;
use crate::endpoint::Endpoint;
use crate::error::LinkConfigError;
use crate::exchange::{ExchangeError, ExchangeRecord, RecordError, Refusal};
use crate::link::{Link, LinkConfig};
use crate::queue_share::Outstanding;
use crate::ring::{RingSize, RingView};
use crate::timers::nanoseconds;
use crate::wire::{ALIGNMENT, FlowWords};

/// Inline bytes of the queue pair: the maximum of a WQE of four WQEBBs.
const MAX_INLINE_DATA: usize = 220;
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
    /// The endpoint of [`Context::connect_over`](crate::Context::connect_over) could not be created.
    #[error(transparent)]
    Create(#[from] CreateEndpointError),
    /// The channel of [`PendingEndpoint::connect_over`] failed.
    #[error("exchanging records: {0}")]
    Channel(#[from] std::io::Error),
    /// The peer of [`PendingEndpoint::connect_over`] could not connect; it has the reason.
    #[error("the peer could not connect its end")]
    NotConnectedThere,
    /// The two endpoints are incompatible.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// The numbers of the records contradict each other.
    #[error(transparent)]
    Link(#[from] LinkConfigError),
    /// The queue pair could not be connected.
    #[error(transparent)]
    Qp(#[from] mlx5::ConnectError),
}

impl ConnectFailure {
    /// Returns whether an end has no room for another peer now.
    pub(crate) const fn is_for_lack_of_room(&self) -> bool {
        matches!(self, Self::Exchange(ExchangeError::Record(RecordError::Refused(Refusal::Full))))
    }
}

/// A refused connection; the endpoint comes back unchanged.
#[derive(Error)]
#[error("cannot connect: {reason}")]
pub struct ConnectError<U> {
    /// The endpoint.
    pub endpoint: PendingEndpoint<U>,
    /// The reason.
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

impl<U> Context<U> {
    /// Makes one end of a connection. Memory: two rings of `ring_size`, and 64 bytes of a region that 64 endpoints share, registered; the
    /// send queue ([`EndpointConfig::send_queue_wqebbs`]), and about 2 KiB.
    ///
    /// # Errors
    /// [`CreateEndpointError`] with the legal range.
    pub fn create_endpoint(&self, config: &EndpointConfig) -> Result<PendingEndpoint<U>, CreateEndpointError> {
        if self.inner.is_polling() {
            return Err(CreateEndpointError::Reentrant);
        }
        if let Some(event) = self.inner.breakdown() {
            return Err(CreateEndpointError::Device(event));
        }
        PendingEndpoint::create(&self.inner, config)
    }
}

impl<U> PendingEndpoint<U> {
    fn create(context: &Rc<Inner<U>>, config: &EndpointConfig) -> Result<Self, CreateEndpointError> {
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
        let ((published_addr, published_rkey), (activity_addr, activity_rkey)) = (control.published(), context.activity());
        let record = ExchangeRecord {
            address: resources.qp.address(),
            recv_ring_rkey: resources.recv_ring.rkey(),
            recv_ring_addr: resources.recv_ring.addr(),
            ring_size,
            published_addr,
            published_rkey,
            activity_addr,
            activity_rkey,
            batches: config.batches_in_flight,
            initial_credit: credit,
        };
        let parts = Parts { resources, control, record, config: config.clone() };
        Ok(Self { parts: Box::new(parts), context: Rc::downgrade(context) })
    }

    pub(crate) const fn context(&self) -> &Weak<Inner<U>> {
        &self.context
    }

    /// Returns the record for the peer; [`ExchangeRecord::encode`] makes 128 bytes of it.
    #[must_use]
    pub fn local_info(&self) -> ExchangeRecord {
        self.parts.record
    }

    /// Connects to the endpoint that gave `remote`. The peer does the same with this endpoint's record, before or after.
    ///
    /// Poll and flush only when the peer has connected too. Messages to a queue pair that is not connected are retried for about half a
    /// second ([`ConnectOptions`](mlx5::ConnectOptions)), then the connection ends as
    /// [`CloseReason::Disconnected`](crate::CloseReason::Disconnected). [`PendingEndpoint::connect_over`] waits for the peer. Processes
    /// that exchange records by other means need a barrier in between, such as an `MPI_Barrier`.
    ///
    /// # Errors
    /// [`ConnectError`], which returns this endpoint.
    #[doc(alias = "connect_ex")]
    pub fn connect(mut self, remote: &ExchangeRecord) -> Result<Endpoint<U>, ConnectError<U>> {
        match self.make_link(remote) {
            Ok((context, link)) => Ok(self.into_endpoint(&context, link, remote)),
            Err(reason) => Err(ConnectError { endpoint: self, reason }),
        }
    }

    /// Connects the queue pair. Everything that can fail comes before that.
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
            // B2: the batches that this end's share of the send CQ has room for.
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
            activity_addr: remote.activity_addr,
            activity_rkey: remote.activity_rkey,
            path_mtu: record.address.mtu.min(remote.address.mtu),
        };
        let connection =
            Rc::new(Connection::new(resources, link, control, recv_view, remote, context.worklist(), context.blueflame_batch()));
        context.register(Rc::clone(&connection));
        Endpoint::new(connection)
    }
}

fn view(ring: &mlx5::Mr, size: RingSize) -> RingView {
    debug_assert_eq!(ring.len() as u64, size.bytes());
    // SAFETY: the region has `size` bytes and lives in the `Connection` beside all copies of the view, until the connection is retired.
    // Then its link is closed and accesses no ring, and the receive ring stays for the requests that the application has. The send ring
    // is written by its link only, which holds no reference into it; the receive ring is written by no view.
    unsafe { RingView::new(ring.as_ptr(), size) }
}
