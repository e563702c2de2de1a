//! Endpoints before they are connected, and how they connect: by hand with exchanged records, or
//! over a byte stream.

mod handshake;
mod record;

use std::fmt;
use std::io::{Read, Write};
use std::rc::{Rc, Weak};

use copyrpc_calls::OptionError;
use mlx5::{Access, Engine, QpConfig};

pub(crate) use self::handshake::Handshake;
pub use self::record::{
    EXCHANGE_RECORD_SIZE, EXCHANGE_VERSION, ExchangeRecord, RecordError, Refusal,
};
use crate::config::EndpointConfig;
use crate::connection::{Connection, Remote, Resources};
use crate::context::{Context, Inner};
use crate::control::ControlMemory;
use crate::endpoint::Endpoint;
use crate::error::{Reentrant, SetupError};
use crate::link::{Link, LinkConfig, Window};
use crate::queue_share::Outstanding;
use crate::ring::{MAX_RING_SIZE, MIN_RING_SIZE, RingSize, RingView};
use crate::timers::nanoseconds;
use crate::wire::FlowWords;

/// Inline bytes of the queue pair: the maximum of a WQE of four WQEBBs.
const MAX_INLINE_DATA: usize = 220;

const CONTEXT_GONE: SetupError = SetupError::Misuse("the context of this endpoint is gone");

/// An endpoint that is not connected. Give [`local_info`](Self::local_info) to the peer, and its
/// record to [`connect`](Self::connect).
pub struct PendingEndpoint<U> {
    context: Weak<Inner<U>>,
    parts: Box<Parts>,
}

struct Parts {
    resources: Resources,
    control: ControlMemory,
    record: ExchangeRecord,
    config: EndpointConfig,
}

impl<U> fmt::Debug for PendingEndpoint<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingEndpoint")
            .field("record", &self.parts.record)
            .finish_non_exhaustive()
    }
}

impl<U> Context<U> {
    /// Makes one end of a connection. Registered memory: two rings of `ring_size`, and 64 bytes of
    /// a region that 64 endpoints share. Other memory: the send queue
    /// ([`EndpointConfig::send_queue_wqebbs`]), and about 2 KiB.
    ///
    /// # Errors
    /// [`SetupError`]; nothing is left behind.
    pub fn create_endpoint(
        &self,
        config: &EndpointConfig,
    ) -> Result<PendingEndpoint<U>, SetupError> {
        let context = &self.inner;
        if context.is_polling.get() {
            return Err(Reentrant.into());
        }
        if let Some(event) = context.breakdown() {
            return Err(SetupError::Broken(event));
        }
        let ring_size = RingSize::for_connection(config.ring_size).ok_or_else(|| {
            let legal = format!("a power of two from {MIN_RING_SIZE} to {MAX_RING_SIZE}");
            OptionError::new("ring_size", config.ring_size, legal)
        })?;
        if let Window::Completion { batches: 0, .. } | Window::Consumption { batches: 0, .. } =
            config.window
        {
            return Err(OptionError::new("window", 0, "at least 1 batch, or Window::Off").into());
        }
        let credit = ring_size.max_reservation();
        // The queue pair is made last. The kernel destroys the objects of a killed process in the
        // reverse order. If the memory went first, a WRITE of the peer would be refused, and the
        // peer would take that for a fault of its own and not for the end of this process.
        let (pd, bytes) = (&context.pd, ring_size.bytes() as usize);
        let send_ring = pd.alloc(bytes, Access::empty())?;
        let recv_ring = pd.alloc(bytes, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let control = context.create_control_memory(FlowWords {
            credit,
            ..FlowWords::default()
        })?;
        let qp = context.create_qp(&QpConfig {
            max_send_wr: config.send_queue_wqebbs(),
            max_inline_data: MAX_INLINE_DATA,
            lane_slots: config.lane_slots(),
            ..QpConfig::default()
        })?;
        let share = context.share_queues(Outstanding::of(config), qp.send_capacity())?;
        let resources = Resources {
            qp,
            send_ring,
            recv_ring,
            share,
        };
        let ((published_addr, published_rkey), (activity_addr, activity_rkey)) =
            (control.published(), context.activity.published());
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
        let parts = Box::new(Parts {
            resources,
            control,
            record,
            config: config.clone(),
        });
        Ok(PendingEndpoint {
            context: Rc::downgrade(context),
            parts,
        })
    }

    /// Makes an endpoint and connects it as [`PendingEndpoint::connect_over`] does. If the endpoint
    /// cannot be made, the peer gets [`RecordError::Refused`].
    ///
    /// # Errors
    /// [`SetupError`]; nothing is left behind.
    pub fn connect_over(
        &self,
        config: &EndpointConfig,
        mut channel: impl Read + Write,
    ) -> Result<Endpoint<U>, SetupError> {
        Handshake::of(self, config).complete(&mut channel)
    }
}

impl<U> PendingEndpoint<U> {
    /// Returns the record for the peer; [`ExchangeRecord::encode`] makes 128 bytes of it.
    #[must_use]
    pub const fn local_info(&self) -> ExchangeRecord {
        self.parts.record
    }

    /// Exchanges records with the peer over a byte stream, such as a socket, and connects. The peer
    /// does the same: both send 128 bytes and take 128, then send one byte and take one. That byte
    /// reports that its sender is connected, so either end may call at once.
    ///
    /// Blocks as `channel` does, and has no timeout of its own: it waits for a silent peer as long
    /// as the stream's timeouts allow.
    ///
    /// # Errors
    /// [`SetupError`]; nothing is left behind.
    pub fn connect_over(self, mut channel: impl Read + Write) -> Result<Endpoint<U>, SetupError> {
        Handshake::new(self).complete(&mut channel)
    }

    /// Connects to the endpoint that gave `remote`. The peer does the same with this endpoint's
    /// record, before or after.
    ///
    /// Poll and flush only when the peer has connected too. Messages to a queue pair that is not
    /// connected are retried for about half a second ([`ConnectOptions`](mlx5::ConnectOptions)),
    /// then the connection ends as [`CloseReason::Disconnected`](crate::CloseReason::Disconnected).
    /// [`PendingEndpoint::connect_over`] waits for the peer. Processes that exchange records by
    /// other means need a barrier, such as an `MPI_Barrier`, between connecting and the first poll.
    ///
    /// # Errors
    /// [`SetupError`]; nothing is left behind.
    #[doc(alias = "connect_ex")]
    pub fn connect(self, remote: &ExchangeRecord) -> Result<Endpoint<U>, SetupError> {
        let context = self.context.upgrade().ok_or(CONTEXT_GONE)?;
        if context.is_polling.get() {
            return Err(Reentrant.into());
        }
        let Parts {
            mut resources,
            control,
            record,
            config,
        } = *self.parts;
        record.check_peer(remote)?;
        resources.qp.connect(&remote.address, &config.connect)?;
        let rings =
            [&resources.send_ring, &resources.recv_ring].map(|ring| view(ring, record.ring_size));
        let link_config = LinkConfig {
            local_credit: record.initial_credit,
            peer_credit: remote.initial_credit,
            local_batches: record.batches,
            // B2 of docs/copyrpc-protocol.md: this end's share of the send CQ has room for no more
            // batches than this end's own limit.
            peer_batches: remote.batches.min(record.batches),
            send_start: 0,
            recv_start: 0,
            keepalive_ns: nanoseconds(config.keepalive),
            stall_ns: nanoseconds(config.stall_timeout),
            idle_keepalive_ns: config.idle_keepalive.map_or(u64::MAX, nanoseconds),
            idle_timeout_ns: config.idle_timeout.map_or(u64::MAX, nanoseconds),
            // libibverbs does not report how the device reads memory, so a relay's READs may mix
            // bytes of several moments.
            reads_whole_words: context.device.info().engine != Engine::Relay,
            window: config.window,
        };
        let remote = Remote {
            ring_addr: remote.recv_ring_addr,
            ring_rkey: remote.recv_ring_rkey,
            published_addr: remote.published_addr,
            published_rkey: remote.published_rkey,
            activity_addr: remote.activity_addr,
            activity_rkey: remote.activity_rkey,
            path_mtu: record.address.mtu.min(remote.address.mtu),
        };
        let link = Link::new(rings[0], rings[1], &link_config);
        let (worklist, has_blueflame_batch) =
            (Rc::clone(&context.worklist), context.blueflame_batch);
        let connection = Rc::new(Connection::new(
            resources,
            link,
            control,
            rings[1],
            remote,
            worklist,
            has_blueflame_batch,
        ));
        context.register(Rc::clone(&connection));
        Ok(Endpoint::new(connection))
    }
}

fn view(ring: &mlx5::Mr, size: RingSize) -> RingView {
    debug_assert_eq!(ring.len() as u64, size.bytes());
    // SAFETY: the region has `size` bytes and lives in the `Connection`, like all copies of the
    // view, until the connection is retired. Then its link is closed and accesses no ring, and the
    // receive ring stays for the requests that the application has. The send ring is written by its
    // link only, which holds no reference into it; the receive ring is written by no view.
    unsafe { RingView::new(ring.as_ptr(), size) }
}
