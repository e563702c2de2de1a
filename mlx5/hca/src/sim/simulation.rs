//! The network: its devices, its actors, and the order of their events.

use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::hash::hash_of;
use crate::requester::complete::EVERY_LID;
use crate::sim::actor::{Actor, ActorId, Bell, Did};
use crate::sim::due::{DueTimes, NEVER};
use crate::sim::nic::{ContextUses, NicModel, NicParameters};
use crate::{Clock, FabricSpec, Hca, LocalFabric, SoftOptions, Timing};

/// A software HCA, or a device that has one, so that a driver's devices can be given to a
/// [`Simulation`].
pub trait Simulated {
    /// Returns the HCA; `None` for a device that is not a software HCA.
    fn hca(&self) -> Option<&Rc<Hca>>;
}

impl Simulated for Rc<Hca> {
    fn hca(&self) -> Option<&Rc<Hca>> {
        Some(self)
    }
}

/// The device does not belong to the simulation's network: it was not opened with
/// [`Simulation::options`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the device was not opened with the options of this simulation")]
pub struct ForeignDevice;

/// Number of low bits of a time in `Simulation::turns` that hold the number of the turn. A turn is
/// a scheduled step of an actor.
const TURN_BITS: u32 = 64;

struct Node {
    hca: Rc<Hca>,
    /// Number of CQEs that the HCA had written at the last poll.
    produced: u32,
    /// Numbers of the actors bound to the device.
    actors: Vec<usize>,
}

struct Bound<'a> {
    actor: Box<dyn Actor + 'a>,
    devices: Vec<u16>,
    is_idle: bool,
}

/// A network of software HCAs and the actors that drive them, in one thread. The simulation owns
/// the clock and the model of the NICs, and advances from event to event.
///
/// The earliest event happens next. At equal times devices come before actors. Devices are ordered
/// by the time at which they were added, and actors by the time at which their turn was scheduled.
/// Real time, addresses and the order of hash maps have no influence. So two runs with the same
/// parameters, seed and actors are the same, and have the same [`trace_hash`](Self::trace_hash).
///
/// An idle actor is not stepped. It sleeps until one of its devices gets a CQE or is written to, or
/// until the time that the actor has set.
///
/// Devices are opened with the simulation's [`options`](Self::options). Then [`add`](Self::add)
/// adds them, or [`spawn`](Self::spawn) with an actor. They belong to this thread, as does the
/// simulation.
pub struct Simulation<'a> {
    fabric: LocalFabric,
    now_ns: Arc<AtomicU64>,
    model: NicModel,
    /// The devices, in the order in which they were added.
    nodes: Vec<Node>,
    /// Time of the next event of each device, as of the last poll.
    due: DueTimes,
    /// Index in `nodes`, by LID.
    places: BTreeMap<u16, usize>,
    actors: Vec<Bound<'a>>,
    /// Time of the next turn of each actor, by number. Of turns at the same time, the turn that was
    /// scheduled first comes first.
    turns: DueTimes,
    last_turn: u64,
    steps: u64,
    /// LIDs of devices to be polled. Empty between two events.
    touched: Vec<u16>,
    bell: Bell,
}

impl fmt::Debug for Simulation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Simulation")
            .field("now_ns", &self.now_ns())
            .field("devices", &self.nodes.len())
            .field("actors", &self.actors.len())
            .finish_non_exhaustive()
    }
}

impl<'a> Simulation<'a> {
    /// Makes an empty network at time 0, whose NICs have the costs `parameters`.
    #[must_use]
    pub fn new(parameters: NicParameters) -> Self {
        Self {
            fabric: LocalFabric::new(),
            now_ns: Arc::default(),
            model: NicModel::new(parameters),
            nodes: Vec::new(),
            due: DueTimes::default(),
            places: BTreeMap::new(),
            actors: Vec::new(),
            turns: DueTimes::default(),
            last_turn: 0,
            steps: 0,
            touched: Vec::new(),
            bell: Bell::default(),
        }
    }

    /// Returns the word that holds the [time](Self::now_ns), for other users of this clock. Only
    /// the simulation writes the word.
    #[must_use]
    pub fn hands(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.now_ns)
    }

    /// Returns a bell that wakes the simulation's actors. A ring outside of steps takes effect at
    /// the next [`run`](Self::run) or [`step`](Self::step).
    #[must_use]
    pub fn bell(&self) -> Bell {
        self.bell.clone()
    }

    /// Returns the time, in ns. It starts at 0.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.now_ns.load(Ordering::Relaxed)
    }

    /// Returns options for a device of this network: strict, traced, with 1 GiB of address space.
    /// The user may change `arena_bytes`, `strict`, `trace`, `faults` and `dead_peer_timeout_ns`.
    #[must_use]
    pub fn options(&self) -> SoftOptions {
        SoftOptions {
            fabric: FabricSpec::Local(self.fabric.clone()),
            arena_bytes: 1 << 30,
            clock: Clock::Manual(Arc::clone(&self.now_ns)),
            timing: Timing::Model(Arc::new(self.model.clone())),
            strict: true,
            trace: true,
            ..SoftOptions::default()
        }
    }

    /// Adds a device that was opened with the [`options`](Self::options), and holds it open until
    /// [`remove`](Self::remove). A device that was added before stays.
    ///
    /// # Errors
    /// The device belongs to another network.
    pub fn add(&mut self, device: &dyn Simulated) -> Result<(), ForeignDevice> {
        let hca = self.of_this_network(device)?;
        self.insert(hca);
        Ok(())
    }

    fn of_this_network<'d>(&self, device: &'d dyn Simulated) -> Result<&'d Rc<Hca>, ForeignDevice> {
        device
            .hca()
            .filter(|hca| hca.is_of(&self.fabric))
            .ok_or(ForeignDevice)
    }

    fn insert(&mut self, hca: &Rc<Hca>) {
        let lid = hca.lid();
        if !self.places.contains_key(&lid) {
            self.places.insert(lid, self.nodes.len());
            self.nodes.push(Node {
                hca: Rc::clone(hca),
                produced: hca.produced(),
                actors: Vec::new(),
            });
            self.due.push();
        }
    }

    /// Removes `device`, and does not hold it open any longer. The device closes with its last
    /// handle, and its peers detect that like a death.
    pub fn remove(&mut self, device: &dyn Simulated) {
        let Ok(hca) = self.of_this_network(device) else {
            return;
        };
        if let Some(place) = self.places.remove(&hca.lid()) {
            self.nodes.remove(place);
            self.due.remove(place);
            self.places
                .values_mut()
                .filter(|p| **p > place)
                .for_each(|p| *p -= 1);
        }
    }

    /// Cuts the power of the host of `device`: peers find the device dead, and the simulation does
    /// not advance the device any more, although handles of it may exist. The actors of the device
    /// must stop too.
    pub fn kill(&mut self, device: &dyn Simulated) {
        if let Ok(hca) = self.of_this_network(device) {
            hca.leave();
        }
        self.remove(device);
    }

    /// Adds an actor that uses only `devices`. Its first step is due now. Returns its number, for
    /// [`Bell`]s. New devices are [`add`](Self::add)ed.
    ///
    /// # Errors
    /// A device belongs to another network. Nothing was added.
    pub fn spawn(
        &mut self,
        devices: &[&dyn Simulated],
        actor: impl Actor + 'a,
    ) -> Result<ActorId, ForeignDevice> {
        let hcas = devices
            .iter()
            .map(|device| self.of_this_network(*device))
            .collect::<Result<Vec<_>, _>>()?;
        let number = self.actors.len();
        let mut lids = Vec::with_capacity(hcas.len());
        for hca in hcas {
            self.insert(hca);
            let lid = hca.lid();
            lids.push(lid);
            if let Some(&place) = self.places.get(&lid) {
                self.nodes[place].actors.push(number);
            }
        }
        self.actors.push(Bound {
            actor: Box::new(actor),
            devices: lids,
            is_idle: false,
        });
        self.turns.push();
        self.decide_turn(number, self.now_ns());
        Ok(ActorId(number))
    }

    /// Advances the clock to the next event and runs it. Returns the time. `None` if no event will
    /// ever be due: every actor is idle without limit, and no device has work in flight.
    pub fn step(&mut self) -> Option<u64> {
        self.look_at_all();
        let at_ns = self.next_ns()?;
        self.run_at(at_ns);
        Some(at_ns)
    }

    /// Returns the time of the next event, in ns. `None` if there is none.
    #[must_use]
    pub fn next_event_ns(&mut self) -> Option<u64> {
        self.look_at_all();
        self.next_ns()
    }

    /// Runs all events up to `until_ns`. Returns whether there are later events. If so, advances
    /// the clock to `until_ns`; otherwise the clock stays at the last event.
    pub fn run(&mut self, until_ns: u64) -> bool {
        self.look_at_all();
        loop {
            match self.next_ns() {
                None => return false,
                Some(at_ns) if at_ns > until_ns => {
                    self.now_ns.fetch_max(until_ns, Ordering::Relaxed);
                    return true;
                }
                Some(at_ns) => self.run_at(at_ns),
            }
        }
    }

    /// Returns the number of steps that actors have made.
    #[must_use]
    pub fn actor_steps(&self) -> u64 {
        self.steps
    }

    /// Returns a hash over the time, the number of steps, and all events of the devices, in the
    /// order in which the devices were added. Two runs with the same hash were the same. Devices
    /// without [`SoftOptions::trace`] are not in the hash.
    #[must_use]
    pub fn trace_hash(&self) -> u64 {
        let devices = self.nodes.iter().filter_map(|node| node.hca.trace_hash());
        hash_of([self.now_ns(), self.steps].into_iter().chain(devices))
    }

    /// Returns the number of times that the NIC of `device` needed the context of a queue pair, and
    /// the number of times that it did not hold that context.
    ///
    /// # Errors
    /// The device belongs to another network.
    pub fn context_uses(&self, device: &dyn Simulated) -> Result<ContextUses, ForeignDevice> {
        Ok(self.model.context_uses(self.of_this_network(device)?.lid()))
    }

    /// Polls all devices, because the program may have used them outside of its actors.
    fn look_at_all(&mut self) {
        for place in 0..self.nodes.len() {
            self.look(place, None);
        }
        self.follow_touched();
        self.follow_bell();
    }

    /// Wakes the actors that the bell was rung for, in that order.
    fn follow_bell(&mut self) {
        for number in self.bell.take() {
            self.end_sleep(number, true);
        }
    }

    fn end_sleep(&mut self, number: usize, is_rung: bool) {
        let now_ns = self.now_ns();
        if let Some(bound) = self.actors.get_mut(number).filter(|bound| bound.is_idle) {
            bound.is_idle = false;
            let at_ns = bound.actor.notices_ns(now_ns, is_rung).max(now_ns);
            self.decide_turn(number, at_ns);
        }
    }

    fn next_ns(&self) -> Option<u64> {
        // An actor whose turn is at the maximum time has no further step.
        let actor = u64::try_from(self.turns.first() >> TURN_BITS)
            .ok()
            .filter(|at_ns| *at_ns < u64::MAX);
        let device = u64::try_from(self.due.first()).ok();
        [actor, device]
            .into_iter()
            .flatten()
            .min()
            .map(|at_ns| at_ns.max(self.now_ns()))
    }

    fn run_at(&mut self, at_ns: u64) {
        self.now_ns.fetch_max(at_ns, Ordering::Relaxed);
        match self.due.first_due(at_ns.into()) {
            Some(place) => self.look(place, None),
            None => self.step_actor(),
        }
        self.follow_touched();
        self.follow_bell();
    }

    fn step_actor(&mut self) {
        let Some(number) = self.turns.first_due(self.turns.first()) else {
            return;
        };
        let now_ns = self.now_ns();
        self.steps += 1;
        let bound = &mut self.actors[number];
        bound.is_idle = false;
        let did = bound.actor.step(now_ns);
        match did {
            Did::Cost(ns) => self.decide_turn(number, now_ns.saturating_add(ns.max(1))),
            Did::IdleUntil(until_ns) => {
                self.actors[number].is_idle = true;
                match until_ns {
                    Some(until_ns) => {
                        self.decide_turn(number, until_ns.max(now_ns.saturating_add(1)))
                    }
                    None => self.turns.set(number, NEVER),
                }
            }
        }
        for i in 0..self.actors[number].devices.len() {
            if let Some(&place) = self.places.get(&self.actors[number].devices[i]) {
                self.look(place, Some(number));
            }
        }
    }

    /// Polls a device, and wakes the actors bound to it if the poll gave CQEs. Actor `stepped` is
    /// not woken by the effects of its own step.
    fn look(&mut self, place: usize, stepped: Option<usize>) {
        let node = &mut self.nodes[place];
        let before = node.hca.produced();
        let after = node.hca.advance(&mut self.touched);
        let (is_news, is_own) = (after != node.produced, after == before);
        node.produced = after;
        self.due
            .set(place, node.hca.next_event_ns().map_or(NEVER, u128::from));
        if is_news {
            self.wake(place, stepped.filter(|_| is_own));
        }
    }

    /// Polls devices that others changed, until no device changes.
    fn follow_touched(&mut self) {
        while let Some(lid) = self.touched.pop() {
            if lid == EVERY_LID {
                for place in 0..self.nodes.len() {
                    self.look(place, None);
                }
            } else if let Some(&place) = self.places.get(&lid) {
                self.look(place, None);
                // The memory of the device was written, which wakes its actors even without a CQE.
                self.wake(place, None);
            }
        }
    }

    /// Wakes the actors bound to a device, except `but`.
    fn wake(&mut self, place: usize, but: Option<usize>) {
        for i in 0..self.nodes[place].actors.len() {
            let number = self.nodes[place].actors[i];
            let bound = &mut self.actors[number];
            if bound.is_idle && Some(number) != but && bound.actor.has_news() {
                self.end_sleep(number, false);
            }
        }
    }

    fn decide_turn(&mut self, number: usize, at_ns: u64) {
        self.last_turn += 1;
        self.turns.set(
            number,
            u128::from(at_ns) << TURN_BITS | u128::from(self.last_turn),
        );
    }
}
