//! A server on a device.

use std::collections::VecDeque;

use copyrpc_calls::OptionError;
use mlx5::{
    Access, AsyncEvent, Device, DeviceSpec, Found, Inline, MonoCq, Mr, PostError, RcQp, Read, Sge,
    Signal, Write,
};

use super::exchange::{Accept, Admission, Offer};
use super::port::{Port, Target, is_fatal, post_to, post_write};
use super::{COMPLETION_BATCH, DOORBELL_BATCH, PROBE_NS, RdmaOptions, SetupError, is_full};
use crate::protocol::wire::{ENTRY_BYTES, REST_WORD_BYTES};
use crate::protocol::{
    ClientId, Handlers, Server, ServerConfig, ServerMemory, ServerOp, ServerRegions, ServerStats,
};

/// Four counts of operations on a queue pair, in 16 bits each of one word: of all operations, of
/// responses, of last READs and of READs of rest words. An operation that asks for a completion
/// carries the counts of the operations up to and including itself, and its completion returns that
/// word: it completes all operations before it. A sum may carry into the next count, and a
/// difference borrows from it again, so the difference of two words contains the four differences.
/// These are below 2^16, because a send queue holds fewer operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts(u64);

impl Counts {
    const OTHER: Self = Self(1);
    const RESPONSE: Self = Self(1 | 1 << 16);
    /// A READ that is the last of its announcement.
    const LAST_READ: Self = Self(1 | 1 << 32);
    const REST_WORD: Self = Self(1 | 1 << 48);

    const fn and(self, operation: Self) -> Self {
        Self(self.0.wrapping_add(operation.0))
    }

    /// Returns the counts of the operations after `before`.
    const fn since(self, before: Self) -> Self {
        Self(self.0.wrapping_sub(before.0))
    }

    const fn all(self) -> u16 {
        self.0 as u16
    }

    const fn responses(self) -> u16 {
        (self.0 >> 16) as u16
    }

    const fn last_reads(self) -> u16 {
        (self.0 >> 32) as u16
    }

    const fn rest_words(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// Returns whether there are operations whose completions are passed to the core one by one.
    const fn are_for_core(self) -> bool {
        self.0 >> 32 != 0
    }
}

const GONE: &str = "it is gone, or its device does not answer";

/// The queue pair of one client.
#[derive(Debug)]
struct Peer {
    qp: RcQp,
    /// Operations that wait for room, in order.
    backlog: VecDeque<ServerOp>,
    posted: Counts,
    completed: Counts,
    /// Address and key for the probes of this client: WRITEs of no bytes.
    probe_at: (u64, u32),
    /// Whether the client sleeps while it waits. If so, the completion of a WRITE with immediate
    /// wakes it.
    sleeps: bool,
    /// The reason why the client has to be removed.
    broken: Option<&'static str>,
}

impl Peer {
    fn under_way(&self) -> usize {
        self.posted.since(self.completed).all().into()
    }
}

/// A client with an offer that it has not accepted yet.
#[derive(Debug)]
pub struct PendingPeer {
    qp: RcQp,
    offer: Offer,
}

impl PendingPeer {
    /// Returns the record for the client.
    #[must_use]
    pub const fn record(&self) -> &Offer {
        &self.offer
    }
}

/// The number of operations under way, and its limits.
#[derive(Debug)]
struct UnderWay {
    count: usize,
    /// Maximum number: the entries of the completion queue.
    max: usize,
    /// Number of outstanding operations up to which an operation asks for a completion only where
    /// its send queue needs one (S25 of docs/scalerpc.md). Above this number, the last operation of
    /// each run (consecutive operations of one client) asks for a completion.
    quiet: usize,
}

/// A server on a device, for one thread.
#[derive(Debug)]
#[doc(alias = "RpcServer")]
pub struct RdmaServer {
    /// Connections, indexed by client. Declared before the memory they use, so dropped first.
    peers: Vec<Option<Peer>>,
    core: Server<Mr>,
    /// The device, and a completion queue that maps each queue pair to the number of its client.
    port: Port<MonoCq<usize>>,
    /// Operations of the core to post; empty between steps.
    ops: Vec<ServerOp>,
    /// Clients with operations in their backlog, or to be disconnected.
    unserved: Vec<ClientId>,
    under_way: UnderWay,
    /// Operations of removed queue pairs that may still complete; `under_way` includes them.
    orphaned: usize,
    /// Names of the clients that have disconnected, with the reasons. A client without a name is
    /// not listed.
    departed: Vec<(mlx5_rendezvous::Peer, &'static str)>,
    /// The next client to probe, and the time of that probe.
    probe: usize,
    probe_ns: u64,
}

impl RdmaServer {
    /// Opens the device and registers the server's memory: entries, both pools, responses.
    ///
    /// # Errors
    /// [`SetupError`].
    pub fn new(device: &DeviceSpec, config: &ServerConfig) -> Result<Self, SetupError> {
        Self::on(&Device::open(device)?, config, &RdmaOptions::default())
    }

    /// Like [`new`](Self::new), with options, and on an open device.
    ///
    /// # Errors
    /// [`SetupError`].
    pub fn on(
        device: &Device,
        config: &ServerConfig,
        options: &RdmaOptions,
    ) -> Result<Self, SetupError> {
        let layout = config.layout()?;
        let port = Port::on(device, device.create_mono_cq(options.cq_size)?, options)?;
        let written = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let memory = ServerMemory {
            entries: port.alloc(config.entries_bytes(), written)?,
            pools: port.alloc_huge(layout.pools_bytes(), written)?,
            responses: port.alloc(config.responses_bytes(), Access::empty())?,
        };
        let core = Server::new(config, memory)?;
        let probe_ns = port.now_ns().saturating_add(PROBE_NS);
        // The other half of the entries and of the buffers is for operations that are posted before
        // a completion arrives.
        let quiet = options.cq_size.min(config.response_buffers) / 2;
        let under_way = UnderWay {
            count: 0,
            max: options.cq_size as usize,
            quiet: quiet as usize,
        };
        Ok(Self {
            peers: (0..config.max_clients).map(|_| None).collect(),
            core,
            port,
            ops: Vec::new(),
            unserved: Vec::new(),
            under_way,
            orphaned: 0,
            departed: Vec::new(),
            probe: 0,
            probe_ns,
        })
    }

    /// Makes a queue pair for one more client.
    ///
    /// # Errors
    /// [`SetupError`]; [`SetupError::Full`] if there is no room for another client.
    pub fn offer(&self) -> Result<PendingPeer, SetupError> {
        if self.clients() == self.peers.len() {
            return Err(self.full());
        }
        let qp = self.port.create_qp(0)?;
        let offer = Offer {
            address: qp.address(),
            layout: *self.core.layout(),
        };
        Ok(PendingPeer { qp, offer })
    }

    fn full(&self) -> SetupError {
        let clients = self.peers.len();
        SetupError::Full(OptionError::new(
            "max_clients",
            clients as u64,
            format!("more than {clients} for another client"),
        ))
    }

    /// Connects to a client that accepted, and admits it.
    ///
    /// # Errors
    /// [`SetupError`]; the client was not admitted.
    pub fn admit(
        &mut self,
        pending: PendingPeer,
        accept: &Accept,
    ) -> Result<Admission, SetupError> {
        let mut qp = pending.qp;
        self.port.connect(&mut qp, &accept.address)?;
        let client = self.core.join(accept.regions).ok_or_else(|| self.full())?;
        let memory = self.core.memory();
        let regions = ServerRegions {
            client,
            pools_addr: memory.pools.addr(),
            pools_rkey: memory.pools.rkey(),
            entry_addr: memory.entries.addr() + (client.index() * ENTRY_BYTES) as u64,
            entry_rkey: memory.entries.rkey(),
        };
        self.port.cq.register(qp.qpn(), client.index());
        self.peers[client.index()] = Some(Peer {
            qp,
            backlog: VecDeque::new(),
            posted: Counts::default(),
            completed: Counts::default(),
            probe_at: (accept.regions.responses_addr, accept.regions.responses_rkey),
            sleeps: accept.sleeps,
            broken: None,
        });
        Ok(Admission(regions))
    }

    /// Does one bounded step: takes completions and arrivals, answers requests (see
    /// [`Handlers::step`] for `budget`), and posts operations. Returns the number of completions
    /// and answered requests.
    pub fn step(&mut self, handlers: &mut Handlers<'_>, budget: usize) -> usize {
        let now_ns = self.port.now_ns();
        let completions = self.take(now_ns);
        let Self {
            core, port, ops, ..
        } = self;
        core.poll(now_ns, ops);
        let answered = handlers.step(core, budget, now_ns, || port.now_ns(), ops);
        self.post();
        if now_ns >= self.probe_ns {
            self.probe_next(now_ns);
        }
        completions + answered
    }

    #[inline(always)]
    fn take(&mut self, now_ns: u64) -> usize {
        let Self {
            port,
            peers,
            core,
            unserved,
            under_way,
            ..
        } = self;
        let found = port.cq.progress();
        let completions = found.map_or(0, |found| {
            take_completions(found, now_ns, core, peers, unserved, &mut under_way.count)
        });
        if completions < COMPLETION_BATCH {
            // The queue is empty, so it holds no completion of removed queue pairs.
            self.under_way.count -= std::mem::take(&mut self.orphaned);
        }
        completions
    }

    /// Begins the end: accepts the requests that have arrived, and none from now on.
    /// [`step_to_end`](Self::step_to_end) follows in place of [`step`](Self::step).
    pub fn close(&mut self) {
        self.core.close();
        self.settle();
    }

    /// Does one bounded step after [`close`](Self::close): answers at most `budget` of the accepted
    /// requests. When all accepted requests of a client are answered, sends a close to the client,
    /// which then ends its calls without an answer as [`CallFailure::NotSent`], because no handler
    /// got them (S27). If the server `gives_up`, requests that a handler still keeps end as
    /// [`CallFailure::Dropped`], and accepted requests that no handler got end as not sent. Returns
    /// whether the close was sent to all clients, and all messages have arrived.
    ///
    /// [`CallFailure::NotSent`]: crate::CallFailure::NotSent
    /// [`CallFailure::Dropped`]: crate::CallFailure::Dropped
    pub fn step_to_end(
        &mut self,
        handlers: &mut Handlers<'_>,
        budget: usize,
        gives_up: bool,
    ) -> bool {
        let now_ns = self.port.now_ns();
        self.take(now_ns);
        let Self {
            core, port, ops, ..
        } = self;
        if gives_up {
            core.drop_queued();
            handlers.give_up(core, now_ns, ops);
        } else {
            handlers.step(core, budget, now_ns, || port.now_ns(), ops);
        }
        core.dismiss(|client| handlers.has_any_of(client), ops);
        self.post();
        self.core.has_dismissed_all() && self.under_way.count == 0 && self.unserved.is_empty()
    }

    /// Drops the accepted requests that no handler got. Their calls end as not sent.
    pub(crate) fn drop_queued(&mut self) {
        self.core.drop_queued();
    }

    /// Handles an asynchronous event of the [`device`](Self::device); no completion reports such an
    /// event. Removes the client whose queue pair went to the error state. Returns whether the
    /// device or this server's completion queue broke down, so that no client can be served any
    /// more. Ignores other events. The owner of the device takes the device's events
    /// ([`Device::take_async_event`]) from time to time.
    pub fn heed(&mut self, event: AsyncEvent) -> bool {
        if let Some(qpn) = event.failed_qp() {
            let nth = self
                .peers
                .iter()
                .position(|peer| peer.as_ref().is_some_and(|peer| peer.qp.qpn() == qpn));
            nth.into_iter()
                .for_each(|nth| self.remove(ClientId(nth as u16), "its queue pair broke down"));
        }
        is_fatal(event, self.port.cq.cqn())
    }

    /// Returns the maximum number of bytes of a request, and of a response.
    #[must_use]
    pub const fn max_payload(&self) -> usize {
        self.core.layout().max_payload()
    }

    /// Returns counters since the server was made.
    #[must_use]
    pub const fn stats(&self) -> &ServerStats {
        self.core.stats()
    }

    /// Returns the number of groups of clients.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.core.groups().count()
    }

    /// Returns the current length of a slice, in ns: the configured length, or a longer one; see
    /// [`ServerConfig::max_rotation_ns`].
    #[must_use]
    pub const fn slice_ns(&self) -> u64 {
        self.core.scheduler().length_ns()
    }

    /// Returns whether the server may sleep before the next step: the entries of all clients that
    /// may wait were checked; see [`Server::has_checked_all`].
    pub(crate) fn may_sleep(&self) -> bool {
        self.core.has_checked_all()
    }

    /// Returns the core.
    #[doc(hidden)]
    #[must_use]
    pub const fn core(&self) -> &Server<Mr> {
        &self.core
    }

    /// Makes slices end at multiples of their length in global time, which is the time of
    /// [`device`](Self::device) plus this offset. `None` ends that.
    pub const fn synchronise(&mut self, offset_ns: Option<i64>) {
        self.core.synchronise(offset_ns);
    }

    /// Returns the number of operations posted and not completed, according to the completions that
    /// the steps have taken. Most operations do not ask for a completion: they count until a later
    /// operation completes, at the latest after a second, or after [`settle`](Self::settle).
    #[must_use]
    pub const fn under_way(&self) -> usize {
        self.under_way.count
    }

    /// Asks for the completion of everything that is under way, and of everything that is posted
    /// from now on: a server that ends waits until nothing is [`under_way`](Self::under_way), so
    /// that its last responses arrive.
    pub fn settle(&mut self) {
        self.under_way.quiet = 0;
        for nth in 0..self.peers.len() {
            if self.peers[nth]
                .as_ref()
                .is_some_and(|peer| peer.under_way() > 0)
            {
                self.probe(nth);
            }
        }
    }

    /// Returns whether a panic of a handler left answers of its step that are not posted.
    pub(crate) fn has_unposted(&self) -> bool {
        !self.ops.is_empty()
    }

    /// Posts what is not posted. Returns whether all of it has arrived, after [`settle`](Self::settle).
    pub(crate) fn post_rest(&mut self) -> bool {
        self.take(self.port.now_ns());
        self.post();
        self.under_way.count == 0 && self.unserved.is_empty()
    }

    /// Returns the number of connected clients.
    #[must_use]
    pub fn clients(&self) -> usize {
        self.peers.iter().flatten().count()
    }

    /// Returns the device in use. Slices are measured by its clock, so a simulation drives this end
    /// with its time.
    #[must_use]
    pub const fn device(&self) -> &Device {
        self.port.device()
    }

    /// Posts the operations of the core, and disconnects the clients that are broken or evicted.
    #[inline]
    fn post(&mut self) {
        if !self.unserved.is_empty() || !self.ops.is_empty() {
            self.post_some();
        }
    }

    fn post_some(&mut self) {
        // The backlog is posted first; later operations of the same client wait for it.
        if !self.unserved.is_empty() {
            self.post_backlogs();
        }
        let posted = post_ops(
            &mut self.peers,
            self.core.memory(),
            &self.ops,
            &mut self.under_way,
        );
        if posted < self.ops.len() {
            self.defer(posted);
        }
        self.ops.clear();
    }

    /// Calls [`post_ops`], without inlining, for operations that waited or whose predecessors wait.
    #[cold]
    #[inline(never)]
    fn post_late(&mut self, ops: &[ServerOp]) -> usize {
        post_ops(
            &mut self.peers,
            self.core.memory(),
            ops,
            &mut self.under_way,
        )
    }

    #[cold]
    fn post_backlogs(&mut self) {
        for nth in 0..self.unserved.len() {
            self.post_backlog(self.unserved[nth]);
        }
        self.unserved.retain(|client| {
            self.peers[client.index()]
                .as_ref()
                .is_some_and(|peer| !peer.backlog.is_empty())
        });
    }

    fn post_backlog(&mut self, client: ClientId) {
        let Some(peer) = self.peers.get_mut(client.index()).and_then(Option::as_mut) else {
            return;
        };
        let mut backlog = std::mem::take(&mut peer.backlog);
        let posted = self.post_late(backlog.make_contiguous());
        let Some(peer) = self.peers.get_mut(client.index()).and_then(Option::as_mut) else {
            return;
        };
        backlog.drain(..posted);
        peer.backlog = backlog;
        if let Some(reason) = peer.broken {
            self.remove(client, reason);
        }
    }

    /// Moves the operations from `first` on that find no room into the backlogs of their clients,
    /// and posts the operations of other clients. Removes broken clients.
    #[cold]
    fn defer(&mut self, mut first: usize) {
        let ops = std::mem::take(&mut self.ops);
        while let Some(run) = ops[first..].chunk_by(are_of_one).next() {
            self.keep(run);
            first += run.len();
            first += self.post_late(&ops[first..]);
        }
        self.ops = ops;
    }

    /// Moves operations that found no room into their client's backlog. Removes a broken client.
    fn keep(&mut self, ops: &[ServerOp]) {
        let Some(client) = ops.first().map(ServerOp::client) else {
            return;
        };
        let Some(peer) = self.peers.get_mut(client.index()).and_then(Option::as_mut) else {
            return;
        };
        if peer.backlog.is_empty() {
            self.unserved.push(client);
        }
        peer.backlog.extend(ops);
        if let Some(reason) = peer.broken {
            self.remove(client, reason);
        }
    }

    #[cold]
    fn probe_next(&mut self, now_ns: u64) {
        self.probe_ns = now_ns + PROBE_NS / self.peers.len() as u64;
        self.probe = (self.probe + 1) % self.peers.len();
        self.probe(self.probe);
    }

    /// Probes the clients for whose names `are_meant` returns `true`.
    pub(crate) fn probe_those(&mut self, are_meant: impl Fn(mlx5_rendezvous::Peer) -> bool) {
        for nth in 0..self.peers.len() {
            if self.core.peer(ClientId(nth as u16)).is_some_and(&are_meant) {
                self.probe(nth);
            }
        }
    }

    /// Posts a WRITE of no bytes to a client. The WRITE completes everything before it, or fails if
    /// the client is gone (S20).
    fn probe(&mut self, nth: usize) {
        let Some(peer) = self.peers[nth]
            .as_mut()
            .filter(|_| self.under_way.count < self.under_way.max)
        else {
            return;
        };
        let (addr, rkey) = peer.probe_at;
        let posted = peer.posted.and(Counts::OTHER);
        match peer.qp.post(
            &Write {
                addr,
                rkey,
                payload: (),
            },
            Signal::Always,
            posted.0,
        ) {
            Ok(()) => {
                peer.posted = posted;
                self.under_way.count += 1;
                peer.qp.ring();
            }
            // If the queue is full, its completions show whether the client lives.
            Err(error) if is_full(&error) => {}
            Err(_) => self.remove(ClientId(nth as u16), GONE),
        }
    }

    /// Sets the name of a client that was admitted. Requests and events report the name.
    pub(crate) fn set_peer(&mut self, client: ClientId, peer: mlx5_rendezvous::Peer) {
        self.core.set_peer(client, peer);
    }

    /// Returns the names of the connected clients.
    pub(crate) fn peers(&self) -> impl Iterator<Item = mlx5_rendezvous::Peer> {
        (0..self.peers.len()).filter_map(|nth| self.core.peer(ClientId(nth as u16)))
    }

    /// Returns the clients that have disconnected since the last call, with the reasons.
    pub(crate) fn take_departed(&mut self) -> Vec<(mlx5_rendezvous::Peer, &'static str)> {
        std::mem::take(&mut self.departed)
    }

    fn remove(&mut self, client: ClientId, reason: &'static str) {
        self.departed
            .extend(self.core.peer(client).map(|peer| (peer, reason)));
        let Some(peer) = self.peers.get_mut(client.index()).and_then(Option::take) else {
            return;
        };
        self.port.cq.unregister(peer.qp.qpn());
        self.orphaned += peer.under_way();
        // After this drop nothing of the client is under way.
        drop(peer);
        self.core.leave(client);
    }
}

/// Takes up to [`COMPLETION_BATCH`] completions of a non-empty queue. Returns their number.
#[inline(never)]
fn take_completions(
    found: Found<'_, usize>,
    now_ns: u64,
    core: &mut Server<Mr>,
    peers: &mut [Option<Peer>],
    unserved: &mut Vec<ClientId>,
    under_way: &mut usize,
) -> usize {
    found.take(COMPLETION_BATCH, |nth, cqe| {
        let Some((client, peer)) =
            nth.and_then(|nth| Some((ClientId(*nth as u16), peers[*nth].as_mut()?)))
        else {
            return;
        };
        if cqe.result().is_err() {
            peer.broken = Some(GONE);
            unserved.push(client);
            return;
        }
        let Some(word) = peer.qp.complete(&cqe) else {
            return;
        };
        let completed = Counts(word);
        let ended = completed.since(std::mem::replace(&mut peer.completed, completed));
        *under_way -= usize::from(ended.all());
        core.on_responses_done(client, ended.responses());
        if ended.are_for_core() {
            on_reads(core, client, ended, now_ns);
        }
    })
}

/// Passes the completions of READs to the core. A client has at most one announcement and one READ
/// of its rest word under way, so each count is 0 or 1.
fn on_reads(core: &mut Server<Mr>, client: ClientId, ended: Counts, now_ns: u64) {
    if ended.last_reads() > 0 {
        core.on_reads_done(client, now_ns);
    }
    if ended.rest_words() > 0 {
        core.on_rest_word(client);
    }
}

const fn are_of_one(op: &ServerOp, other: &ServerOp) -> bool {
    op.client().0 == other.client().0
}

/// Posts operations in their order, up to the first that finds no room or whose client is broken.
/// Returns the number of operations that need no further work: posted operations, and operations
/// for disconnected clients.
#[inline(always)]
fn post_ops(
    peers: &mut [Option<Peer>],
    memory: &ServerMemory<Mr>,
    ops: &[ServerOp],
    under_way: &mut UnderWay,
) -> usize {
    let mut done = 0;
    for run in ops.chunk_by(are_of_one) {
        let peer = run
            .first()
            .and_then(|op| peers.get_mut(op.client().index()))
            .and_then(Option::as_mut);
        let posted = match peer {
            // The operations in the backlog are posted before these.
            Some(peer) if !peer.backlog.is_empty() => return done,
            Some(peer) => post_all(peer, memory, run, under_way),
            None => run.len(),
        };
        done += posted;
        if posted < run.len() {
            break;
        }
    }
    done
}

/// Posts operations of one client in their order, as many as there is room for. Returns their
/// number. Marks the client as broken if an operation evicts it, or if its queue pair refuses an
/// operation.
#[inline(always)]
fn post_all(
    peer: &mut Peer,
    memory: &ServerMemory<Mr>,
    ops: &[ServerOp],
    under_way: &mut UnderWay,
) -> usize {
    let fitting = ops.len().min(under_way.max - under_way.count);
    if peer.broken.is_some() || fitting == 0 {
        return 0;
    }
    // If more than `quiet` operations are under way, this run included, the last operation
    // of the run asks for a completion, which implies the completions of all operations before it.
    let quiet = fitting - usize::from(under_way.count + fitting > under_way.quiet);
    let mut posted = 0;
    let quiet_ops = &ops[..quiet];
    while posted < quiet_ops.len() {
        let op = &quiet_ops[posted];
        let is_posted = match *op {
            // Nearly every operation is a response, so its code is inlined here.
            ServerOp::WriteResponse {
                addr,
                rkey,
                from,
                len,
                ..
            } => {
                let to = Target {
                    addr,
                    rkey,
                    wakes: peer.sleeps,
                };
                let after = peer.posted.and(Counts::RESPONSE);
                match post_write(
                    &mut peer.qp,
                    &memory.responses,
                    from,
                    len,
                    to,
                    Signal::Reclaim,
                    after.0,
                ) {
                    Ok(()) => {
                        peer.posted = after;
                        true
                    }
                    Err(error) => refused(peer, &error),
                }
            }
            _ => post_op(peer, memory, op, Signal::Reclaim),
        };
        if !is_posted {
            break;
        }
        posted += 1;
        if posted % DOORBELL_BATCH == 0 {
            peer.qp.ring();
        }
    }
    if posted == quiet {
        for op in &ops[quiet..fitting] {
            posted += usize::from(post_op(peer, memory, op, Signal::Always));
        }
    }
    peer.qp.ring();
    under_way.count += posted;
    posted
}

/// Marks the client of a refused operation as broken, unless its send queue is full. Returns
/// `false`.
#[cold]
fn refused(peer: &mut Peer, error: &PostError) -> bool {
    if !is_full(error) {
        peer.broken = Some(GONE);
    }
    false
}

/// Posts an operation. Returns whether it was posted. If not, it found no room, or its client is
/// broken now. The function is not inlined, so that the loop over responses has more registers.
#[inline(never)]
fn post_op(peer: &mut Peer, memory: &ServerMemory<Mr>, op: &ServerOp, signal: Signal) -> bool {
    let (qp, wakes) = (&mut peer.qp, peer.sleeps);
    let (count, done) = match *op {
        ServerOp::Read {
            addr,
            rkey,
            into,
            len,
            is_last,
            ..
        } => {
            let into = Sge {
                addr: memory.pools.addr() + into as u64,
                len,
                lkey: memory.pools.lkey(),
            };
            // The core needs the completion of the last READ, so this READ asks for a completion.
            let (count, signal) = if is_last {
                (Counts::LAST_READ, Signal::Always)
            } else {
                (Counts::OTHER, signal)
            };
            (
                count,
                qp.post(&Read { addr, rkey, into }, signal, peer.posted.and(count).0),
            )
        }
        ServerOp::WriteResponse {
            addr,
            rkey,
            from,
            len,
            ..
        } => {
            let (count, to) = (Counts::RESPONSE, Target { addr, rkey, wakes });
            (
                count,
                post_write(
                    qp,
                    &memory.responses,
                    from,
                    len,
                    to,
                    signal,
                    peer.posted.and(count).0,
                ),
            )
        }
        ServerOp::WriteEvent {
            addr, rkey, bytes, ..
        } => {
            let count = Counts::OTHER;
            (
                count,
                post_to(
                    qp,
                    Target { addr, rkey, wakes },
                    Inline(&bytes),
                    signal,
                    peer.posted.and(count).0,
                ),
            )
        }
        ServerOp::ReadRestWord {
            addr, rkey, into, ..
        } => {
            let into = Sge {
                addr: memory.entries.addr() + into as u64,
                len: REST_WORD_BYTES as u32,
                lkey: memory.entries.lkey(),
            };
            (
                Counts::REST_WORD,
                qp.post(
                    &Read { addr, rkey, into },
                    Signal::Always,
                    peer.posted.and(Counts::REST_WORD).0,
                ),
            )
        }
        ServerOp::Evict { .. } => {
            peer.broken = Some("it is alive, and did not release its zone in time: evicted");
            return false;
        }
    };
    if let Err(error) = done {
        return refused(peer, &error);
    }
    peer.posted = peer.posted.and(count);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_of_counts_survive_the_wrap_of_each() {
        // The counts start just before they wrap, in a word that wraps too.
        for start in [
            0,
            0xfffe,
            0xffff_fffe,
            0xffff_0000_fffe,
            0xffff_ffff_ffff,
            0xffff_0000_0000_0000,
            u64::MAX - 1,
        ] {
            let before = Counts(start);
            let operations = [
                Counts::OTHER,
                Counts::RESPONSE,
                Counts::LAST_READ,
                Counts::RESPONSE,
                Counts::RESPONSE,
                Counts::OTHER,
            ];
            let ended = operations
                .into_iter()
                .fold(before, Counts::and)
                .since(before);
            assert_eq!(
                (
                    ended.all(),
                    ended.responses(),
                    ended.last_reads(),
                    ended.rest_words()
                ),
                (6, 3, 1, 0),
                "{start:#x}"
            );
            let asked = before
                .and(Counts::REST_WORD)
                .and(Counts::RESPONSE)
                .since(before);
            assert_eq!(
                (
                    asked.all(),
                    asked.responses(),
                    asked.last_reads(),
                    asked.rest_words()
                ),
                (2, 1, 0, 1),
                "{start:#x}"
            );
        }
    }
}
