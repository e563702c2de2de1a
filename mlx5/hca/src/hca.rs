//! The device: its state, its doorbell and its poll.
//!
//! Apart from models of the network and hooks for tests, no function calls the user's code while it
//! borrows [`State`]. So the borrow of one entry point cannot conflict with the borrow of another.

use core::sync::atomic::Ordering;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use copyrpc_shm::ready::{HotSet, ReadyWords};
use copyrpc_shm::sync::LightBarrier;
use mlx5_wire::{AddressVector, AsyncEvent};

use crate::clock::Clock;
use crate::counters::PortCounters;
use crate::debug::faults::{Faults, Injector};
use crate::debug::strict;
use crate::debug::trace::Trace;
use crate::deferred::Deferred;
use crate::objects::create::{LANE_SLOT_BYTES, QPN_TAGS, QpPlace};
use crate::objects::regions::Regions;
use crate::packets::Wire;
use crate::queues::cq::SoftCq;
use crate::queues::qp::{Mode, SoftQp};
use crate::queues::rqs::RqSlot;
use crate::random::Random;
use crate::requester::execute;
use crate::requester::timing::Timing;
use crate::responder::repair::Repair;
use crate::responder::{arrive, datagrams};
use crate::shared::arena::Arena;
use crate::shared::fabric::{LocalFabric, Membership};
use crate::shared::layout::{ALL_LANE_SLOTS, LANE_SLOTS, MAX_QPS, QUEUE_BYTES, qp_index};
use crate::shared::links::Links;
use crate::shared::memory::DeviceMemory;
use crate::shared::quiesce::Stuck;
use crate::types::rule::Violation;
use crate::types::terms::Difference;
use crate::{Gid, GidKind, Port};
use crate::{arrivals, flush};

/// Number of empty polls between two checks for peers that died with a receive of this device.
pub(crate) const POLLS_PER_CHECK: u32 = 1024;

/// Number of cold lanes that a check of the peers polls, in turn. A cold lane is a lane that other
/// polls read only if its ready bit is set. A producer in another process that still takes the lane
/// for hot does not set the bit (R4 of docs/shm-protocols.md: a lost announcement is found).
const LANES_PER_CHECK: usize = 8;

/// Number of completion vectors of a device.
pub const COMP_VECTORS: u32 = 1;
/// The maximum number of messages that may wait in a queue pair's lane.
pub const MAX_LANE_SLOTS: u32 = LANE_SLOTS as u32;

/// A software HCA. It belongs to the thread that opened it. Peers detect a dead HCA by the exit of
/// that thread, so the thread must outlive the HCA.
///
/// ```compile_fail,E0277
/// fn send<T: Send>() {}
/// send::<mlx5_hca::Hca>();
/// ```
pub struct Hca {
    /// Dropped first: peers stop finding the device before its memory is freed.
    pub(crate) membership: Membership,
    pub(crate) memory: DeviceMemory,
    pub(crate) dead_peer_timeout_ns: u64,
    pub(crate) clock: Clock,
    pub(crate) timing: Timing,
    pub(crate) strict: bool,
    pub(crate) checks_buffers: bool,
    pub(crate) barrier: LightBarrier,
    /// Mode of a new queue pair if the device makes no faults and its port is up.
    pub(crate) mode: Mode,
    pub(crate) trace: Option<Trace>,
    /// Whether [`Completions`](crate::requester::complete::Completions) records successful WQEs,
    /// because the timing is not immediate, or the device is traced or has counters.
    pub(crate) is_watched: bool,
    /// Whether lanes are polled only when their ready bits are set, so that all runs of a
    /// simulation are the same.
    pub(crate) has_exact_lanes: bool,
    /// Counters of the ports, to which the device adds its traffic through shared memory.
    pub(crate) counters: Option<&'static [PortCounters]>,
    /// The port of which the device is a virtual function.
    pub(crate) port: Option<Port>,
    /// Whether a check of the peers is due, or `failed` is not empty.
    pub(crate) has_chores: Cell<bool>,
    /// Queue pairs that failed since the last flush, and failed queue pairs with a receive queue of
    /// their own to flush: index and generation.
    pub(crate) failed: RefCell<Vec<(usize, u32)>>,
    pub(crate) is_port_up: Cell<bool>,
    pub(crate) events: RefCell<VecDeque<AsyncEvent>>,
    pub(crate) differences: RefCell<VecDeque<Difference>>,
    /// Number of times that a WQE found no receive at its target.
    pub(crate) rnr_naks: Cell<u64>,
    /// Number of receive completions written into compressed sessions.
    pub(crate) compressed: Cell<u64>,
    /// Number of WRITEs and SENDs announced. Counted only if a model of NICs times them.
    pub(crate) sends: Cell<u64>,
    /// Number of regions registered since the device was opened, modulo 2^32.
    pub(crate) registrations: Cell<u32>,
    pub(crate) state: RefCell<State>,
}

/// State of a device that an entry point borrows as a whole. It is private to the process.
pub(crate) struct State {
    pub(crate) queues: Queues,
    /// Places of queue pairs, by index. A place has the upper bits of its next queue pair's number,
    /// so that the number of a destroyed queue pair is invalid.
    pub(crate) qp_places: Vec<QpPlace>,
    /// Initial value of [`QpPlace::tag`] in each place.
    pub(crate) first_tag: u16,
    pub(crate) mrs: Regions,
    pub(crate) rqs: Vec<Option<RqSlot>>,
    pub(crate) links: Links,
    pub(crate) wire: Wire,
    pub(crate) repair: Repair,
    /// Peers that did not finish a doorbell while an object was destroyed.
    pub(crate) stuck: Vec<Stuck>,
    /// Number of queue pair places and regions that are never used again, because of `stuck`.
    pub(crate) quarantined: u64,
    pub(crate) hot: HotSet,
    /// The words in which peers announce messages in cold lanes.
    pub(crate) ready: ReadyWords,
    pub(crate) deferred: Deferred,
    pub(crate) violations: Vec<Violation>,
    /// Number of CQEs written to queues that were destroyed.
    pub(crate) produced: u32,
    /// LIDs of the devices whose memory or queues this device has changed since the last call of
    /// `Hca::advance`, each once. Filled only if the device `has_exact_lanes`.
    pub(crate) touched: Vec<u16>,
    pub(crate) polls_to_check: u32,
    pub(crate) arena: Arena,
    pub(crate) queue_area: Arena,
    /// Allocator of the slots of all lanes, in bytes.
    pub(crate) lane_area: Arena,
    pub(crate) next_pd: u32,
}

/// Part of the state that an arriving message can change. The set of hot lanes, [`State::hot`], is
/// not in this part, because the pass over the hot lanes borrows both.
pub(crate) struct Queues {
    pub(crate) qps: Vec<Option<Box<SoftQp>>>,
    pub(crate) cqs: Vec<Option<SoftCq>>,
    pub(crate) injector: Option<Box<Injector>>,
}

impl State {
    pub(crate) fn new(
        arena_bytes: usize,
        faults: &Faults,
        ready: ReadyWords,
        random: &mut Random,
    ) -> Self {
        Self {
            queues: Queues {
                qps: Vec::new(),
                cqs: Vec::new(),
                injector: Injector::new(faults),
            },
            qp_places: Vec::new(),
            first_tag: random.below(QPN_TAGS.into()) as u16,
            mrs: Regions::new(random),
            rqs: Vec::new(),
            links: Links::default(),
            wire: Wire::default(),
            repair: Repair::default(),
            stuck: Vec::new(),
            quarantined: 0,
            hot: HotSet::new(MAX_QPS),
            ready,
            deferred: Deferred::default(),
            violations: Vec::new(),
            produced: 0,
            touched: Vec::new(),
            polls_to_check: POLLS_PER_CHECK,
            arena: Arena::new(arena_bytes),
            queue_area: Arena::new(QUEUE_BYTES),
            lane_area: Arena::new(ALL_LANE_SLOTS * LANE_SLOT_BYTES),
            next_pd: 1,
        }
    }

    /// Returns the time of the next scheduled event, or of the next packet that a bad network holds
    /// back, if that is earlier.
    pub(crate) fn next_event_ns(&self) -> Option<u64> {
        let packet_ns = self.wire.port.as_ref().and_then(|port| port.due_ns());
        self.deferred.next_ns().into_iter().chain(packet_ns).min()
    }
}

impl Hca {
    /// Returns the index of a queue pair's BlueFlame register among the registers of the device,
    /// for [`ring`](Self::ring).
    #[must_use]
    pub fn register_index(qpn: u32) -> usize {
        qp_index(qpn)
    }

    /// Executes the new WQEs of the queue pair whose BlueFlame register has this index
    /// ([`register_index`](Self::register_index)). The driver calls it right after the stores of
    /// each doorbell.
    pub fn ring(&self, index: usize) {
        self.executing(|| execute::doorbell(self, index));
    }

    /// Executes due work and turns arrived messages into CQEs. The driver calls it when it finds a
    /// completion queue empty. Returns whether there may be new CQEs.
    pub fn empty_poll(&self) -> bool {
        let mut state = self.state.borrow_mut();
        let has_more = state.deferred.any();
        let arrived = !has_more && arrive::pass::<true>(self, &mut state) > 0;
        drop(state);
        let progress = if has_more {
            self.progress_with_extras()
        } else {
            arrived
        };
        // The chores are last, because the earlier work may have failed a queue pair, and another
        // poll may never follow.
        if self.has_chores.get() {
            self.do_chores() || progress
        } else {
            progress
        }
    }

    /// Runs due timers, receives packets and datagrams, checks the rules of strict mode, and takes
    /// messages: an [`empty_poll`](Self::empty_poll) that has more to do than to take messages.
    #[cold]
    #[inline(never)]
    fn progress_with_extras(&self) -> bool {
        let state = &mut *self.state.borrow_mut();
        self.clock.polled();
        let mut progress = false;
        if !state.deferred.is_empty() {
            progress = self.executing(|| execute::run_deferred(self, state));
        }
        if state.wire.port.is_some() {
            progress |= self.executing(|| arrivals::poll(self, state));
        }
        if state.links.has_datagrams {
            progress |= datagrams::receive(self, state) > 0;
        }
        if self.strict {
            self.check_strictly(state);
        }
        let taken = if self.has_exact_lanes {
            arrive::exact_pass(self, state)
        } else {
            arrive::pass::<false>(self, state)
        };
        progress | (taken > 0)
    }

    /// Flushes failed queue pairs, and checks the peers if due. Returns whether there may be CQEs.
    #[cold]
    #[inline(never)]
    fn do_chores(&self) -> bool {
        let state = &mut *self.state.borrow_mut();
        let is_due = state.polls_to_check == 0;
        if is_due {
            self.check_peers(state);
        }
        flush::flush_failed(self, state) || is_due
    }

    /// Counts `polls` empty polls towards the next check of the peers.
    pub(crate) fn count_polls(&self, polls_to_check: &mut u32, polls: u32) {
        *polls_to_check = polls_to_check.saturating_sub(polls);
        if *polls_to_check == 0 {
            self.has_chores.set(true);
        }
    }

    fn check_strictly(&self, state: &mut State) {
        for index in 0..state.queues.qps.len() {
            if strict::finds_unannounced(self, state, index) {
                execute::announce_all(self, state, index);
            }
        }
        strict::check_queues(state);
    }

    /// Returns the rules that the driver has broken since the last call.
    #[must_use]
    pub fn take_violations(&self) -> Vec<Violation> {
        let state = &mut *self.state.borrow_mut();
        if self.strict {
            self.check_strictly(state);
        }
        core::mem::take(&mut state.violations)
    }

    /// Does due work for a simulation, and adds to `touched` the LIDs of the devices that this
    /// device changed since the last call; [`EVERY_LID`](crate::requester::complete::EVERY_LID)
    /// means all. Returns [`produced`](Self::produced).
    pub(crate) fn advance(&self, touched: &mut Vec<u16>) -> u32 {
        self.empty_poll();
        touched.append(&mut self.state.borrow_mut().touched);
        self.produced()
    }

    /// Returns a number that changes with every CQE that the device writes.
    #[must_use]
    pub(crate) fn produced(&self) -> u32 {
        let state = self.state.borrow();
        state
            .queues
            .cqs
            .iter()
            .flatten()
            .fold(state.produced, |sum, cq| sum.wrapping_add(cq.produced()))
    }

    /// Returns the number of WRITEs and SENDs that the device's doorbells have announced; 0 unless
    /// a model of the network times them.
    #[must_use]
    pub fn sends(&self) -> u64 {
        self.sends.get()
    }

    /// Removes the device from its local fabric: from now on peers take it for dead.
    pub(crate) fn leave(&self) {
        self.membership.leave();
    }

    /// Returns the time on the device's clock, in ns since an arbitrary moment.
    #[must_use]
    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// Like [`now_ns`](Self::now_ns), but cheaper: the time may be some milliseconds old.
    #[must_use]
    pub fn coarse_now_ns(&self) -> u64 {
        self.clock.coarse_now_ns()
    }

    #[must_use]
    pub(crate) fn is_of(&self, fabric: &LocalFabric) -> bool {
        self.membership.is_of(fabric)
    }

    /// Returns the device's LID, or the number of its virtual function if it has a port.
    #[must_use]
    pub fn lid(&self) -> u16 {
        self.membership.lid
    }

    /// Returns the LID, or the virtual function, of the device that has queue pair `qpn` at the
    /// address `vector`. `None` if this device's port is down, or the network has no port with this
    /// address and queue pair.
    pub(crate) fn lid_of(&self, qpn: u32, vector: &AddressVector) -> Option<u16> {
        match &self.port {
            _ if !self.is_port_up.get() => None,
            None => Some(vector.rlid),
            Some(port) => port.find(qpn, vector),
        }
    }

    /// Returns the source GID of datagrams with this vector: the entry of the port's GID table, or
    /// without such an entry a link-local GID with the device's LID.
    pub(crate) fn source_gid(&self, vector: &AddressVector) -> Gid {
        let own = u128::from(self.lid()) | 0xfe80 << 112;
        let given = self.port.and_then(|port| port.source(vector));
        given.copied().unwrap_or(Gid {
            bytes: own.to_be_bytes(),
            kind: GidKind::InfiniBand,
        })
    }

    /// Checks whether peers have died. Takes the last messages of dead peers out of the lanes, and
    /// gives back the receives that these peers had popped. Also polls some cold lanes.
    #[cold]
    fn check_peers(&self, state: &mut State) {
        state.polls_to_check = POLLS_PER_CHECK;
        for peer in state.links.newly_gone() {
            let is_of_it = |qp: &SoftQp| qp.remote().is_some_and(|r| Rc::ptr_eq(&r.peer, &peer));
            let Queues { qps, cqs, .. } = &mut state.queues;
            for qp in qps.iter_mut().flatten().filter(|qp| is_of_it(qp)) {
                arrive::drain(self, qp, cqs);
                state.repair.peer_died(&self.memory, qp.index, qp.rqn);
            }
        }
        self.repair(state);
        self.poll_cold_lanes(state, LANES_PER_CHECK);
    }

    /// Checks the next `lanes` lanes for messages, in turn, and makes lanes with messages hot (R4).
    /// Does nothing on a device with exact lanes.
    pub(crate) fn poll_cold_lanes(&self, state: &mut State, lanes: usize) {
        let State { queues, hot, .. } = state;
        let count = queues.qps.len();
        if !self.has_exact_lanes {
            hot.mend(&*queues, count, 0, lanes);
        }
    }

    /// Marks this device as executing while `f` runs, so that peers that free memory wait for the
    /// end of `f` (H3 of `shared::layout`).
    #[inline(always)]
    pub(crate) fn executing<R>(&self, f: impl FnOnce() -> R) -> R {
        let _executing = Executing::begin(&self.memory);
        // H3: the owner of the memory either sees the odd `executing` word, or has invalidated the
        // key or identity before `f` reads it.
        self.barrier.execute();
        f()
    }
}

/// Guard that marks the device as executing, until its drop.
struct Executing<'a>(&'a DeviceMemory);

impl<'a> Executing<'a> {
    #[inline(always)]
    fn begin(memory: &'a DeviceMemory) -> Self {
        Self::advance(memory);
        Self(memory)
    }

    /// Advances the `executing` word, which has one writer. Release: a peer that sees the end of a
    /// doorbell sees the effects of that doorbell.
    #[inline(always)]
    fn advance(memory: &DeviceMemory) {
        let word = &memory.control().header.executing;
        word.store(word.load(Ordering::Relaxed) + 1, Ordering::Release);
    }
}

impl Drop for Executing<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        Self::advance(self.0);
    }
}

impl core::fmt::Debug for Hca {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Hca")
            .field("lid", &self.lid())
            .finish_non_exhaustive()
    }
}
