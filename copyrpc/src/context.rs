//! The context of one thread: a device, its queues, and the poll that drives all connections.

mod broken;
mod leaving;
mod wait;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use copyrpc_calls::OptionError;
use mlx5::{
    AsyncEvent, Cq, CqConfig, CqeOpcode, CreateError, Device, DeviceInfo, DeviceSpec, Found,
    MonoCq, Pd, QpConfig, RcQp, RegisterError, Srq,
};

use crate::config::EndpointConfig;
use crate::connection::{Connection, Outcome, Receiver};
use crate::control::{Activity, ControlMemory, ControlRegions, Handling};
use crate::error::{Reentrant, SetupError};
use crate::link::Request;
use crate::queue_share::{Outstanding, QueueShare, Used};
use crate::recv::{RecvHandle, Reply};
use crate::ring::RecvBytes;
use crate::stats::Stats;
use crate::timers::IDLE_CHECKS;
use crate::wire::FlowWords;
use crate::worklist::Worklist;

pub(crate) use leaving::LINGER;

/// Default number of endpoints that a context has room for.
pub const DEFAULT_ENDPOINTS: u32 = 128;
/// Number of receives of the shared receive queue that are enough for [`DEFAULT_ENDPOINTS`].
pub const DEFAULT_SRQ_SIZE: u32 = Outstanding::DEFAULT.receives(DEFAULT_ENDPOINTS) as u32;
/// Number of entries of the send completion queue that are enough for [`DEFAULT_ENDPOINTS`],
/// rounded up to a power of two as devices do.
pub const DEFAULT_CQ_SIZE: u32 =
    (Outstanding::DEFAULT.completions() * DEFAULT_ENDPOINTS).next_power_of_two();

/// Maximum number of completions that one poll takes from the receive CQ, so that a poll is bounded
/// under any load. The send CQ is emptied in steps of this size: the number of its completions is
/// bounded by the operations under way.
const POLL_BUDGET: usize = 256;

/// Describes a context. A `ContextBuilder` is plain data: send it to the thread that will own the
/// context, and build the context there.
///
/// ```
/// fn is_send<T: Send>() {}
/// is_send::<copyrpc::ContextBuilder>();
/// ```
#[derive(Clone, Debug)]
pub struct ContextBuilder {
    device: DeviceSpec,
    endpoints: u32,
    outstanding: Outstanding,
    srq_size: Option<u32>,
    cq_size: Option<u32>,
    cqe_compression: bool,
    blueflame_batch: bool,
}

impl ContextBuilder {
    /// Describes a context on this device.
    #[must_use]
    pub const fn new(device: DeviceSpec) -> Self {
        Self {
            device,
            endpoints: DEFAULT_ENDPOINTS,
            outstanding: Outstanding::DEFAULT,
            srq_size: None,
            cq_size: None,
            cqe_compression: false,
            blueflame_batch: false,
        }
    }

    /// Sets the minimum number of endpoints with the default [`EndpointConfig`] that the context
    /// has room for at once. The sizes of all queues follow from it. Default [`DEFAULT_ENDPOINTS`].
    /// Memory: about 9 KiB for each endpoint, and its rings when the endpoint is made. Devices have
    /// about 32,000 receives in a queue, enough for 680 endpoints; for more, see
    /// [`ContextBuilder::endpoints_with`].
    #[must_use]
    pub const fn endpoints(mut self, count: u32) -> Self {
        self.endpoints = count;
        self.outstanding = Outstanding::DEFAULT;
        self
    }

    /// Like [`ContextBuilder::endpoints`], for endpoints made with `config`: the fewer their
    /// [`batches_in_flight`](EndpointConfig::batches_in_flight), the more endpoints fit a queue.
    #[must_use]
    pub const fn endpoints_with(mut self, count: u32, config: &EndpointConfig) -> Self {
        self.endpoints = count;
        self.outstanding = Outstanding::of(config);
        self
    }

    /// Sets the number of receives of the queue that all endpoints share, instead of the number
    /// that follows from the endpoints. Two thirds of them are divided among the endpoints as
    /// batches in flight.
    #[must_use]
    pub const fn srq_size(mut self, receives: u32) -> Self {
        self.srq_size = Some(receives);
        self
    }

    /// Sets the number of entries of each completion queue, instead of the number that follows from
    /// the other options. It must be at least the SRQ size, and at least the sum over all endpoints
    /// of [`batches_in_flight`](EndpointConfig::batches_in_flight) +
    /// [`raw_operations`](EndpointConfig::raw_operations) + 8, plus the number of batches of a
    /// [`Window::Completion`](crate::Window::Completion). An endpoint whose send queue has fewer
    /// WQEBBs than its term of that sum adds the number of its WQEBBs instead.
    #[must_use]
    pub const fn cq_size(mut self, entries: u32) -> Self {
        self.cq_size = Some(entries);
        self
    }

    /// Lets the device write the completions of batches of equal length as one compressed session
    /// ([`mlx5::CqConfig::compression`]). [`ContextBuilder::build`] fails with
    /// [`CreateError::Unsupported`] on a device without compression. Default `false`.
    #[must_use]
    pub const fn cqe_compression(mut self, is_on: bool) -> Self {
        self.cqe_compression = is_on;
        self
    }

    /// Announces together, through BlueFlame ([`mlx5::BlueflameBatch`]), the operations that a
    /// flush posts on a connection when it posts more than one whole batch: for example the parts
    /// of a batch that a wrap divides, and the READ of the peer's record after them. Not proven on
    /// a NIC. Default `false`: a flush rings the doorbell after the last batch, and again after the
    /// READ.
    #[must_use]
    pub const fn blueflame_batch(mut self, is_on: bool) -> Self {
        self.blueflame_batch = is_on;
        self
    }

    /// Returns the number of receives of the SRQ, and the number of entries of the send CQ. Unless
    /// `cq_size` is set, the send CQ is large enough for all endpoints for which the SRQ has
    /// receives.
    fn sizes(&self) -> (u32, u32) {
        let receives = self
            .srq_size
            .map_or(self.outstanding.receives(self.endpoints), u64::from);
        let endpoints = self
            .outstanding
            .endpoints(receives)
            .max(u64::from(self.endpoints));
        let completions = self.cq_size.map_or(
            endpoints.saturating_mul(u64::from(self.outstanding.completions())),
            u64::from,
        );
        // A number of more than 32 bits becomes `u32::MAX`: no device has so long a queue, so the
        // creation fails either way.
        (
            u32::try_from(receives).unwrap_or(u32::MAX),
            u32::try_from(completions).unwrap_or(u32::MAX),
        )
    }

    /// Returns the error for an SRQ that the device refuses. If the SRQ is too long, and its size
    /// follows from the number of endpoints, the error gives the maximum number of endpoints
    /// instead.
    fn too_many(&self, error: CreateError) -> SetupError {
        match error {
            CreateError::Refused(mlx5::hca::CreateError::OutOfRange { value, max, .. })
                if value > max && self.srq_size.is_none() =>
            {
                let legal = format!(
                    "at most {} on this device, with {} batches in flight each (EndpointConfig::batches_in_flight)",
                    self.outstanding.endpoints(max),
                    self.outstanding.batches
                );
                OptionError::new("endpoints", self.endpoints.into(), legal).into()
            }
            error => error.into(),
        }
    }

    /// Opens the device and makes the queues. The context belongs to the calling thread.
    ///
    /// # Errors
    /// [`SetupError`]; nothing is left behind.
    pub fn build<U>(self) -> Result<Context<U>, SetupError> {
        let device = Device::open(&self.device)?;
        self.build_on(device)
    }

    /// Makes the queues on an open device, instead of opening one: contexts of one thread can share
    /// a device.
    ///
    /// # Errors
    /// [`SetupError`]; nothing is left behind.
    pub fn build_on<U>(self, device: Device) -> Result<Context<U>, SetupError> {
        let pd = device.alloc_pd()?;
        let (receives, send_completions) = self.sizes();
        let srq = pd
            .create_srq(receives, 0)
            .map_err(|error| self.too_many(error))?;
        let send_cq = device.create_cq(send_completions)?;
        let recv_cq = CqConfig {
            compression: self.cqe_compression,
            ..self.cq_size.unwrap_or(srq.depth() as u32).into()
        };
        let recv_cq = device.create_mono_cq(recv_cq)?;
        if (recv_cq.entries() as usize) < srq.depth() {
            let legal = format!(
                "at least {}, the number of receives; or leave cq_size out",
                srq.depth()
            );
            return Err(OptionError::new("cq_size", recv_cq.entries().into(), legal).into());
        }
        let control_regions = ControlRegions::default();
        let inner = Inner {
            worklist: Rc::new(Worklist::new(device.clone())),
            activity: Activity::new(&control_regions, &pd)?,
            control_regions,
            connections: RefCell::default(),
            used: Rc::default(),
            queues: RefCell::new(Queues {
                max_free: srq.depth() / 3,
                recv_cq,
                send_cq,
                srq,
            }),
            pd,
            device,
            is_polling: Cell::new(false),
            blueflame_batch: self.blueflame_batch,
            broken: Cell::new(None),
            retired: Cell::new(Stats::default()),
            linger: Cell::new(LINGER),
        };
        fill(&mut inner.queues.borrow_mut().srq);
        Ok(Context {
            inner: Rc::new(inner),
        })
    }
}

/// Connections over one device, and the queues that they share. `U` is the caller's data per call.
///
/// A context belongs to one thread, and so does everything made from it. The context may be moved;
/// its endpoints stay valid. Methods take `&self`, so callbacks may call, reply and receive;
/// methods that must not nest return [`Reentrant`](crate::Reentrant).
///
/// The drop of a context ends its connections, and drops the user data of calls and operations that
/// have not ended. The drop waits, at most 20 ms, until the peers have received the replies that
/// were given, and the closing message of this end. Messages for which a peer has no room in that
/// time, and messages to a peer that is gone, are lost with the queue pair. At a peer that gets the
/// closing message and has nothing outstanding, the connection ends with
/// [`CloseReason::ClosedByPeer`](crate::CloseReason::ClosedByPeer); all other peers detect by their
/// operations, or by their keep-alive, that the queue pair is gone.
///
/// ```compile_fail
/// fn is_send<T: Send>() {}
/// is_send::<copyrpc::Context<()>>();
/// ```
pub struct Context<U> {
    pub(crate) inner: Rc<Inner<U>>,
}

impl<U> fmt::Debug for Context<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("device", &self.inner.device)
            .finish_non_exhaustive()
    }
}

/// The part of a context to which its endpoints refer before they are connected. While user code
/// runs, nothing in it is borrowed mutably except the queues being polled; `is_polling` prevents
/// user code from using these queues.
pub(crate) struct Inner<U> {
    pub(crate) worklist: Rc<Worklist<Connection<U>>>,
    /// The connections that are not released, by QPN.
    connections: RefCell<BTreeMap<u32, Rc<Connection<U>>>>,
    used: Rc<Used>,
    queues: RefCell<Queues<U>>,
    control_regions: ControlRegions,
    pub(crate) activity: Activity,
    pub(crate) pd: Pd,
    pub(crate) device: Device,
    pub(crate) is_polling: Cell<bool>,
    pub(crate) blueflame_batch: bool,
    broken: Cell<Option<AsyncEvent>>,
    /// Sums of the counters of connections that were removed.
    retired: Cell<Stats>,
    /// Maximum time for which the drop waits until the posted messages have arrived.
    pub(crate) linger: Cell<Duration>,
}

struct Queues<U> {
    recv_cq: MonoCq<Rc<Connection<U>>>,
    send_cq: Cq,
    srq: Srq,
    /// Maximum number of receives that may be free, that is, not posted, after arrivals were taken:
    /// a third of the queue.
    max_free: usize,
}

/// A guard that exists while a poll runs. Its drop, also by the panic of a callback, ends the poll.
struct Polling<'a>(&'a Cell<bool>);

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// A guard that exists while arrivals are taken. Its drop, also by the panic of a callback, posts
/// receives again if more than `max_free` are not posted: the next flush reports the arrivals, and
/// then the peers may send further batches (B1 of docs/copyrpc-protocol.md).
struct Unfilled<'a> {
    srq: &'a mut Srq,
    max_free: usize,
}

impl Drop for Unfilled<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.srq.free() > self.max_free {
            fill(self.srq);
        }
    }
}

#[inline(never)]
fn fill(srq: &mut Srq) {
    srq.fill(0);
    srq.ring();
}

struct Serving<'a, R, F> {
    activity: &'a AtomicU64,
    on_request: R,
    on_response: F,
}

impl<U, R: FnMut(RecvBytes<'_>, Reply<'_, U>), F: FnMut(U, Outcome<'_>)> Receiver<U>
    for Serving<'_, R, F>
{
    const TAKES_REQUESTS: bool = true;

    #[inline(always)]
    fn on_request(
        &mut self,
        connection: &Rc<Connection<U>>,
        request: Request,
        bytes: RecvBytes<'_>,
    ) {
        let _running = Handling::begin(self.activity);
        (self.on_request)(bytes, Reply::new(connection, request));
    }

    #[inline(always)]
    fn on_response(&mut self, user_data: U, outcome: Outcome<'_>) {
        (self.on_response)(user_data, outcome);
    }
}

impl<U> Context<U> {
    /// Returns name, transport and capabilities of the device in use.
    #[must_use]
    pub fn device_info(&self) -> DeviceInfo {
        self.inner.device.info()
    }

    /// Returns the device of this context. Its clock, [`Device::now_ns`], measures all times here:
    /// deadlines, keep-alive, stalls.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Does one bounded step: takes arrivals and completions, ends calls through `on_response`,
    /// posts gathered messages. Returns the number of completions plus the number of calls that ran
    /// out of time. READs of a peer's record without new flow-control words are not counted, and
    /// neither are the calls that end with their connection.
    ///
    /// `on_response` gets the call's user data and either the reply's bytes, valid during the
    /// callback, or the reason why there are none. It may call, reply and receive.
    ///
    /// # Errors
    /// [`Reentrant`].
    pub fn poll(&self, mut on_response: impl FnMut(U, Outcome<'_>)) -> Result<usize, Reentrant> {
        let _polling = self.inner.enter()?;
        let taken = self.inner.drain(&mut on_response);
        self.inner.flush();
        Ok(taken)
    }

    /// Like [`Context::poll`], but answers requests while it takes them, which costs less than
    /// [`Context::recv`]. `on_request` gets the bytes of each request and the [`Reply`] to it, in
    /// the order of arrival on each endpoint; this includes the requests that earlier polls and
    /// drains have queued. Returns the number of completions, plus the number of calls that ran out
    /// of time, plus the number of queued requests that were handed out.
    ///
    /// ```no_run
    /// # fn serve(context: copyrpc::Context<()>) -> Result<(), Box<dyn std::error::Error>> {
    /// loop {
    ///     context.wait(None)?;
    ///     context.serve(
    ///         |request, reply| {
    ///             let _gone = reply.send(&request.to_vec().to_ascii_uppercase());
    ///         },
    ///         |(), _| (),
    ///     )?;
    /// }
    /// # }
    /// ```
    ///
    /// `on_request` may call, and keep requests for later with [`Reply::hold`]; `on_response` is as
    /// in a poll. A handler that panics loses only its own request.
    ///
    /// # Errors
    /// [`Reentrant`].
    pub fn serve(
        &self,
        on_request: impl FnMut(RecvBytes<'_>, Reply<'_, U>),
        on_response: impl FnMut(U, Outcome<'_>),
    ) -> Result<usize, Reentrant> {
        let _polling = self.inner.enter()?;
        let taken = self.inner.serve(&mut Serving {
            activity: self.inner.activity.word(),
            on_request,
            on_response,
        });
        self.inner.flush();
        Ok(taken)
    }

    /// Polls without the second half of [`Context::poll`]: posts nothing, so calls and replies
    /// continue to gather into larger batches.
    ///
    /// # Errors
    /// [`Reentrant`].
    pub fn drain(&self, mut on_response: impl FnMut(U, Outcome<'_>)) -> Result<usize, Reentrant> {
        let _polling = self.inner.enter()?;
        Ok(self.inner.drain(&mut on_response))
    }

    /// Serves without the second half of [`Context::serve`]: posts nothing, so calls and replies
    /// continue to gather into larger batches.
    ///
    /// # Errors
    /// [`Reentrant`].
    pub fn drain_serving(
        &self,
        on_request: impl FnMut(RecvBytes<'_>, Reply<'_, U>),
        on_response: impl FnMut(U, Outcome<'_>),
    ) -> Result<usize, Reentrant> {
        let _polling = self.inner.enter()?;
        Ok(self.inner.serve(&mut Serving {
            activity: self.inner.activity.word(),
            on_request,
            on_response,
        }))
    }

    /// Like [`drain_serving`](Self::drain_serving), for an owner that polls soon: does not read the
    /// clock, and does not hand out the requests that earlier drains have queued.
    pub(crate) fn look(
        &self,
        on_request: impl FnMut(RecvBytes<'_>, Reply<'_, U>),
        on_response: impl FnMut(U, Outcome<'_>),
    ) {
        if let Ok(_polling) = self.inner.enter() {
            self.inner.take(&mut Serving {
                activity: self.inner.activity.word(),
                on_request,
                on_response,
            });
        }
    }

    /// Does the second half of [`Context::poll`] and of [`Context::serve`]: posts gathered
    /// messages, and probes peers that have been silent for long. Takes no completions, and does
    /// not read the clock; drains do.
    ///
    /// # Errors
    /// [`Reentrant`].
    pub fn flush_endpoints(&self) -> Result<(), Reentrant> {
        let _polling = self.inner.enter()?;
        self.inner.flush();
        Ok(())
    }

    /// Takes the oldest request that waits to be received, over all endpoints.
    #[must_use]
    #[inline]
    pub fn recv(&self) -> Option<RecvHandle<U>> {
        self.inner
            .worklist
            .next_request()
            .map(|(connection, name)| RecvHandle::new(connection, name))
    }

    /// Returns the number of endpoints that have a share of the queues, connected or not.
    pub(crate) fn shares(&self) -> u32 {
        self.inner.used.endpoints()
    }

    /// Returns the number of connections. A connection that has ended counts until a poll or drain
    /// removes it.
    #[must_use]
    pub fn endpoints(&self) -> usize {
        self.inner.connections.borrow().len()
    }

    /// Returns the sums of the counters of all connections ever made.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let mut stats = self.inner.retired.get();
        for connection in self.inner.connections.borrow().values() {
            stats += connection.with_link(|link| link.stats());
        }
        stats
    }
}

impl<U> Inner<U> {
    /// Takes a share of the queues for one more endpoint, whose queue pair has `send_capacity`
    /// WQEBBs.
    pub(crate) fn share_queues(
        &self,
        outstanding: Outstanding,
        send_capacity: usize,
    ) -> Result<QueueShare, SetupError> {
        let Queues { send_cq, srq, .. } = &*self.queues.borrow();
        QueueShare::take(
            &self.used,
            outstanding,
            send_capacity,
            srq.depth(),
            send_cq.entries(),
        )
    }

    pub(crate) fn create_qp(&self, config: &QpConfig) -> Result<RcQp, CreateError> {
        let Queues {
            recv_cq,
            send_cq,
            srq,
            ..
        } = &*self.queues.borrow();
        self.pd.create_qp(send_cq, recv_cq, srq, config)
    }

    pub(crate) fn create_control_memory(
        &self,
        words: FlowWords,
    ) -> Result<ControlMemory, RegisterError> {
        ControlMemory::new(&self.control_regions, &self.pd, words)
    }

    /// Returns the event by which the device, or a queue of the context, broke down, if any.
    pub(crate) fn breakdown(&self) -> Option<AsyncEvent> {
        self.broken.get()
    }

    pub(crate) fn has_requests(&self) -> bool {
        self.worklist.has_requests()
    }

    pub(crate) fn register(&self, connection: Rc<Connection<U>>) {
        self.connections
            .borrow_mut()
            .insert(connection.qpn(), Rc::clone(&connection));
        self.queues
            .borrow_mut()
            .recv_cq
            .register(connection.qpn(), Rc::clone(&connection));
        connection.check_idle(self.worklist.timers().deadline_in(Duration::ZERO));
    }

    fn enter(&self) -> Result<Polling<'_>, Reentrant> {
        if self.is_polling.replace(true) {
            return Err(Reentrant);
        }
        Ok(Polling(&self.is_polling))
    }

    /// Takes arrivals and completions, and releases the connections that ended. Ends the calls that
    /// are out of time, if the clock is to be read in this drain.
    #[inline]
    fn drain(&self, receiver: &mut impl Receiver<U>) -> usize {
        let mut taken = self.take(receiver);
        // The clock is checked after the arrivals of the same drain, so that a response that
        // arrived in time wins.
        if self.worklist.timers().tick(taken == 0) {
            taken += self.check_clock(receiver);
        }
        taken
    }

    /// Takes arrivals and completions, and releases the connections that ended.
    #[inline]
    fn take(&self, receiver: &mut impl Receiver<U>) -> usize {
        let taken = self.take_completions(receiver);
        if self.worklist.has_unfinished() {
            self.finish(receiver);
        }
        taken
    }

    /// Drains with a receiver that takes requests, and hands out the requests that drains have
    /// queued.
    #[inline]
    fn serve(&self, receiver: &mut impl Receiver<U>) -> usize {
        let taken = self.drain(receiver);
        if self.worklist.has_entries() {
            taken + self.serve_queued(receiver)
        } else {
            taken
        }
    }

    #[cold]
    #[inline(never)]
    fn serve_queued(&self, receiver: &mut impl Receiver<U>) -> usize {
        let mut taken = 0;
        while let Some((connection, name)) = self.worklist.next_request() {
            let request = connection.with_link(|link| link.held(name));
            let bytes = connection.recv_view.bytes(request.payload());
            receiver.on_request(&connection, request, bytes);
            taken += 1;
        }
        taken
    }

    /// Delivers the events that are left on connections that have ended, or whose callback
    /// panicked, and removes the connections that have ended.
    #[cold]
    #[inline(never)]
    fn finish(&self, receiver: &mut impl Receiver<U>) {
        while let Some(connection) = self.worklist.unfinished() {
            connection.deliver_rest(receiver);
            connection.publish_rest();
            if connection.is_closed() {
                self.retire(&connection);
                connection.end_raw(receiver);
            }
            self.worklist.finish(&connection);
        }
    }

    /// Reads the clock, sweeps the connections in use if it is time to, and ends the calls that are
    /// out of time. Returns the number of these calls.
    #[cold]
    #[inline(never)]
    fn check_clock(&self, receiver: &mut impl Receiver<U>) -> usize {
        let timers = self.worklist.timers();
        let mut ended = 0;
        timers.read_clock();
        if timers.is_sweep_due() {
            self.sweep();
        }
        while let Some(connection) = timers.take_due() {
            ended += connection.expire(timers.now_ns(), receiver);
        }
        ended
    }

    #[cold]
    #[inline(never)]
    fn sweep(&self) {
        self.heed_events();
        self.worklist.sweep();
        let timers = self.worklist.timers();
        for _ in 0..IDLE_CHECKS {
            let Some(connection) = timers.take_idle() else {
                break;
            };
            connection.check_idle(timers.now_ns());
        }
    }

    #[inline(always)]
    fn take_completions(&self, receiver: &mut impl Receiver<U>) -> usize {
        let mut taken = 0;
        let queues = &mut *self.queues.borrow_mut();
        if let Some(found) = queues.recv_cq.progress() {
            taken = Self::take_received(found, &mut queues.srq, queues.max_free, receiver);
        }
        if queues.send_cq.has_completion() {
            taken += Self::take_sent(queues, receiver);
        }
        taken
    }

    #[inline(always)]
    fn take_received(
        found: Found<'_, Rc<Connection<U>>>,
        srq: &mut Srq,
        max_free: usize,
        receiver: &mut impl Receiver<U>,
    ) -> usize {
        let unfilled = Unfilled { srq, max_free };
        found.take(POLL_BUDGET, |connection, cqe| {
            // Every completion of a batch from a correct peer has this opcode. A completion without
            // a connection is a late arrival for a connection that has ended.
            if cqe.opcode() == Some(CqeOpcode::ResponderWriteImm) {
                unfilled.srq.complete_receive(&cqe);
                if let Some(connection) = connection {
                    connection.deliver(cqe.imm(), receiver);
                }
                return;
            }
            unfilled.srq.complete_receive(&cqe);
            match (connection, cqe.result()) {
                (Some(connection), Err(error)) => connection.fail(error),
                (Some(connection), Ok(())) => connection.deliver(cqe.imm(), receiver),
                (None, _) => {}
            }
        })
    }

    /// Takes all completions of the send CQ. So a connection that is retired afterwards has no
    /// completion left in the CQ, and its share of the queues can be released. The number of
    /// completions is bounded (B2): operations that callbacks post are executed only after the next
    /// flush.
    #[inline(never)]
    fn take_sent(queues: &mut Queues<U>, receiver: &mut impl Receiver<U>) -> usize {
        let Queues {
            recv_cq, send_cq, ..
        } = queues;
        let mut sent = 0;
        while send_cq.has_completion() {
            let mut idle = 0;
            sent += send_cq.poll(POLL_BUDGET, |cqe| {
                if let Some(connection) = recv_cq.queues().get(cqe.qpn()) {
                    idle += usize::from(!connection.complete(&cqe, receiver));
                }
            });
            sent -= idle;
        }
        sent
    }

    /// Serves every connection that has something to post, READ or publish. Runs no user code.
    #[inline(always)]
    pub(crate) fn flush(&self) {
        if self.worklist.has_listed() {
            self.flush_listed();
        }
    }

    #[inline(never)]
    fn flush_listed(&self) {
        let now_ns = self.worklist.timers().now_ns();
        self.worklist.flush(|connection| connection.flush(now_ns));
    }

    /// Removes a connection that has ended, if no batch or READ was posted on it, so that no
    /// completion will arrive. Otherwise, or inside a poll, the next drain removes the connection.
    pub(crate) fn retire_unused(&self, connection: &Connection<U>) {
        let Stats {
            batches_sent,
            reads,
            ..
        } = connection.with_link(|link| link.stats());
        if batches_sent + reads == 0 && !self.is_polling.get() {
            self.retire(connection);
            self.worklist.finish(connection);
        }
    }

    /// Removes a connection that has ended and whose calls have all ended.
    fn retire(&self, connection: &Connection<U>) {
        if self
            .queues
            .borrow_mut()
            .recv_cq
            .unregister(connection.qpn())
            .is_some()
        {
            self.connections.borrow_mut().remove(&connection.qpn());
            let mut stats = self.retired.get();
            stats += connection.with_link(|link| link.stats());
            self.retired.set(stats);
        }
        connection.retire();
        self.worklist.forget(connection);
    }
}

impl<U> Drop for Inner<U> {
    fn drop(&mut self) {
        self.shut_down_all();
        let connections = self.connections.take();
        connections
            .values()
            .for_each(|connection| connection.retire());
        self.worklist.clear();
        // The user data of a connection may hold an endpoint of that connection, and so keep both
        // alive: the drop of the data ends that cycle.
        connections
            .values()
            .for_each(|connection| connection.discard());
    }
}
