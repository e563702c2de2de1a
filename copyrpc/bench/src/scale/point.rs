//! A point of a curve: a server and its clients in virtual time, in one thread, and the results.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use benchkv_harness::Failure;
use benchkv_harness::clock::Clock;
use benchkv_harness::pattern::{self, Tag};
use mlx5::{ContextUses, Device, DeviceSpec, Did, Simulation, SoftOptions};
use scalerpc::rdma::{PendingClient, SetupError};
use scalerpc::{Grouping, HandlerError, Handlers, RdmaClient, RdmaServer, ServerStats};
use serde::Serialize;

use super::setting::Setting;
use super::workload::{Lane, Store, Workload};
use crate::compare::calls::{Content, Shared};
use crate::compare::load::Caller;
use crate::compare::scale_rpc::ScaleClient;

const REQUEST: u16 = 1;
/// Maximum number of requests that a step of the server answers.
const BUDGET: usize = 32;
/// Bytes of address space of a client's device, which has a few slots, and of the server's device,
/// which has the pools.
const CLIENT_ARENA_BYTES: usize = 64 << 20;
const SERVER_ARENA_BYTES: usize = 16 << 30;
/// Maximum time in ns for outstanding calls to end after the last call was made, and the interval
/// of the check. Calls that take more time are lost.
const DRAIN_NS: u64 = 1_000_000_000;
const DRAIN_STEP_NS: u64 = 1_000_000;
/// Number of READs or events that take the CPU time of one request: they are only posted, and need
/// no copy and no check.
const OPERATION_DIVISOR: u64 = 10;

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Measured {
    pub(crate) responses: u64,
    pub(crate) responses_per_s: f64,
    /// Share of the messages sent by the server's NIC for which the NIC had to fetch the context.
    pub(crate) send_miss_share: f64,
    /// Share of the messages received by the server's NIC for which it had to fetch the context.
    pub(crate) arrival_miss_share: f64,
    /// Messages sent for each response: the response, and its share of READs and events.
    pub(crate) sends_per_response: f64,
    /// Number of slices that began in the window.
    pub(crate) slices: u64,
    /// Length of a slice at the end of the window, in ns.
    pub(crate) slice_ns: u64,
    /// Minimum and maximum number of responses that a client received.
    pub(crate) fewest_of_a_client: u64,
    pub(crate) most_of_a_client: u64,
}

/// Measures a point. It is an error if a call is not answered, or a response is wrong.
pub(crate) fn measure(
    setting: &Setting,
    clients: u32,
    grouping: Grouping,
) -> Result<Measured, Failure> {
    let mut simulation = Simulation::new(setting.nic());
    let world = World::new(setting, clients, grouping, &mut simulation)?;
    let start_ns = setting.settle_ns(clients, grouping);
    simulation.run(start_ns);
    let before = world.snapshot(&simulation)?;
    simulation.run(start_ns + setting.window_ns());
    let after = world.snapshot(&simulation)?;
    world.drain(&mut simulation)?;
    Ok(Measured::between(&before, &after, setting.window_ns()))
}

impl Measured {
    fn between(before: &Snapshot, after: &Snapshot, window_ns: u64) -> Self {
        let pairs = || after.ended.iter().zip(&before.ended);
        let each = || pairs().map(|(after, before)| after - before);
        let responses: u64 = each().sum();
        let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        let uses = |count: fn(&ContextUses) -> u64| count(&after.uses) - count(&before.uses);
        let sends = uses(|uses| uses.sends);
        Self {
            responses,
            responses_per_s: responses as f64 * 1e9 / window_ns as f64,
            send_miss_share: share(uses(|uses| uses.send_misses), sends),
            arrival_miss_share: share(uses(|uses| uses.arrival_misses), uses(|uses| uses.arrivals)),
            sends_per_response: share(sends, responses),
            slices: after.stats.slices - before.stats.slices,
            slice_ns: after.slice_ns,
            fewest_of_a_client: each().min().unwrap_or(0),
            most_of_a_client: each().max().unwrap_or(0),
        }
    }
}

struct Snapshot {
    /// Number of operations that have ended, by client.
    ended: Vec<u64>,
    uses: ContextUses,
    stats: ServerStats,
    slice_ns: u64,
}

/// The server and the clients, which the simulation steps.
struct World {
    server: Rc<RefCell<Serving>>,
    /// The server's device.
    device: Device,
    callers: Vec<Rc<RefCell<Calling>>>,
    /// Set when clients have to stop making calls.
    is_over: Rc<Cell<bool>>,
}

impl World {
    fn new(
        setting: &Setting,
        clients: u32,
        grouping: Grouping,
        simulation: &mut Simulation<'_>,
    ) -> Result<Self, Failure> {
        let config = setting.server(clients, grouping);
        let mut server = RdmaServer::new(&spec(simulation, SERVER_ARENA_BYTES), &config)
            .map_err(|error| format!("setting up the server: {error}"))?;
        let device = server.device().clone();
        let is_over = Rc::<Cell<bool>>::default();
        let mut callers = Vec::with_capacity(clients as usize);
        for number in 0..clients {
            let client = connect(simulation, &mut server)
                .map_err(|error| format!("setting up client {number} of {clients}: {error}"))?;
            let device = client.device().clone();
            let caller = Rc::new(RefCell::new(Calling::new(client, number, clients, setting)));
            callers.push(Rc::clone(&caller));
            let is_over = Rc::clone(&is_over);
            simulation.spawn(&[&device], move |_| caller.borrow_mut().step(is_over.get()))?;
        }
        let server = Rc::new(RefCell::new(Serving::new(server, clients, setting)));
        let serving = Rc::clone(&server);
        simulation.spawn(&[&device], move |_| serving.borrow_mut().step())?;
        Ok(Self {
            server,
            device,
            callers,
            is_over,
        })
    }

    fn snapshot(&self, simulation: &Simulation<'_>) -> Result<Snapshot, Failure> {
        self.check()?;
        let callers = self.callers.iter();
        let ended = callers.map(|calling| calling.borrow().caller.book.operations);
        let ended = ended.collect();
        let server = &self.server.borrow().server;
        Ok(Snapshot {
            ended,
            uses: simulation.context_uses(&self.device)?,
            stats: *server.stats(),
            slice_ns: server.slice_ns(),
        })
    }

    /// Returns the first error of the run.
    fn check(&self) -> Result<(), Failure> {
        let garbage = self.server.borrow().server.stats().garbage;
        if garbage > 0 {
            let what = format!("the server found {garbage} malformed requests or entries");
            return Err(what.into());
        }
        let mut callers = self.callers.iter();
        let error = callers.find_map(|caller| caller.borrow_mut().error.take());
        error.map_or(Ok(()), Err)
    }

    fn drain(&self, simulation: &mut Simulation<'_>) -> Result<(), Failure> {
        self.is_over.set(true);
        let end_ns = simulation.now_ns() + DRAIN_NS;
        loop {
            self.check()?;
            let callers = self.callers.iter();
            let left = callers.map(|calling| calling.borrow().caller.book.unanswered());
            let lost: usize = left.sum();
            if lost == 0 {
                return self.check_money();
            }
            if simulation.now_ns() >= end_ns {
                let ms = DRAIN_NS / 1_000_000;
                let what =
                    format!("{lost} calls had not ended {ms} ms after the last one was made");
                return Err(what.into());
            }
            simulation.run(simulation.now_ns() + DRAIN_STEP_NS);
        }
    }

    /// Checks that the accounts gained exactly the money that the transactions brought. All
    /// transactions have ended.
    fn check_money(&self) -> Result<(), Failure> {
        let callers = self.callers.iter();
        let brought = callers.map(|calling| calling.borrow().brought());
        let brought = brought.fold(0, u64::wrapping_add);
        let held = self.server.borrow().store.borrow().gained();
        if held != brought {
            return Err(format!(
                "the accounts hold {held} more than at first, and transactions brought {brought}"
            )
            .into());
        }
        Ok(())
    }
}

/// Returns a device of the simulation. It is neither strict nor traced, because that would take
/// most of the run's time; the devices of the protocol's tests are strict and traced.
fn spec(simulation: &Simulation<'_>, arena_bytes: usize) -> DeviceSpec {
    DeviceSpec::Soft(SoftOptions {
        arena_bytes,
        strict: false,
        trace: false,
        ..simulation.options()
    })
}

fn connect(simulation: &Simulation<'_>, server: &mut RdmaServer) -> Result<RdmaClient, SetupError> {
    let offered = server.offer()?;
    let client = PendingClient::new(&spec(simulation, CLIENT_ARENA_BYTES), offered.record())?;
    let admission = server.admit(offered, &client.record())?;
    Ok(client.admitted(&admission))
}

/// The server as an actor. It is never idle, like a server's threads that poll memory.
struct Serving {
    server: RdmaServer,
    handlers: Handlers<'static>,
    setting: Setting,
    store: Rc<RefCell<Store>>,
    answered: Rc<Cell<u64>>,
}

impl Serving {
    fn new(server: RdmaServer, clients: u32, setting: &Setting) -> Self {
        let (setting, (_, response_bytes)) = (*setting, setting.bytes());
        let store = Rc::new(RefCell::new(Store::new(setting.workload, clients)));
        let answered = Rc::<Cell<u64>>::default();
        let mut handlers = Handlers::new(server.max_payload());
        let (count, files_and_accounts) = (Rc::clone(&answered), Rc::clone(&store));
        handlers.insert(REQUEST, move |request: &[u8], response: &mut [u8]| {
            count.set(count.get() + 1);
            if setting.workload != Workload::Echo {
                let mut store = files_and_accounts.borrow_mut();
                return store.execute(request, response).ok_or(HandlerError);
            }
            let response = response.get_mut(..response_bytes).ok_or(HandlerError)?;
            pattern::fill_reply(response, Tag::of_request(request));
            Ok(response.len())
        });
        Self {
            server,
            handlers,
            setting,
            store,
            answered,
        }
    }

    fn step(&mut self) -> Did {
        let operations = |stats: &ServerStats| stats.reads + stats.bare_events;
        let before = (self.answered.get(), operations(self.server.stats()));
        self.server.step(&mut self.handlers, BUDGET);
        let requests = self.answered.get() - before.0;
        let others = operations(self.server.stats()) - before.1;
        Did::Cost(
            Setting::SERVER_STEP_NS
                + self.setting.server_ns * requests
                + self.setting.server_ns * others / OPERATION_DIVISOR,
        )
    }
}

/// A client as an actor: calls from every slot without an outstanding call, and checks responses.
struct Calling {
    caller: Caller<ScaleClient, Lanes>,
    shared: Shared,
    number: u32,
    error: Option<Failure>,
}

/// A client's sequences of calls, by slot.
struct Lanes(Vec<Lane>);

impl Content for Lanes {
    fn request(&mut self, slot: u32, tag: Tag, request: &mut [u8]) {
        if let Some(lane) = self.0.get(slot as usize) {
            lane.request(tag, request);
        }
    }

    fn reply(&mut self, slot: u32, tag: Tag, reply: &[u8]) -> Option<u64> {
        self.0.get_mut(slot as usize)?.response(tag, reply)
    }
}

impl Calling {
    fn new(client: RdmaClient, number: u32, clients: u32, setting: &Setting) -> Self {
        let (depth, (request_bytes, _)) = (setting.depth, setting.bytes());
        let lane = |lane| Lane::new(setting.workload, number, lane, clients);
        let lanes = (0..depth.into()).map(lane).collect();
        let client = ScaleClient::new(client);
        Self {
            caller: Caller::new(client, Lanes(lanes), number as usize, 1, depth as usize),
            shared: Shared::new(Clock::monotonic(), request_bytes),
            number,
            error: None,
        }
    }

    fn step(&mut self, is_over: bool) -> Did {
        match self.work(is_over) {
            Ok(0) => Did::IdleUntil(None),
            Ok(calls) => Did::Cost(calls * Setting::CLIENT_CALL_NS),
            Err(error) => {
                let error = format!("client {}: {error}", self.number);
                self.error.get_or_insert(error.into());
                Did::IdleUntil(None)
            }
        }
    }

    /// Takes ended calls and makes new ones. Returns the number ended or made, whichever is larger.
    fn work(&mut self, is_over: bool) -> Result<u64, Failure> {
        let Self { caller, shared, .. } = self;
        let (ended, made) = (caller.book.ended, caller.book.made);
        caller.take(shared)?;
        let book = &caller.book;
        if book.bad_replies + book.refused > 0 {
            let calls = book.ended;
            let what = format!("a response was wrong, or a call refused, after {calls} calls");
            return Err(what.into());
        }
        if !is_over {
            caller.call(shared)?;
        }
        let made = caller.book.made - made;
        if made > 0 {
            caller.client.client.poll();
        }
        Ok(made.max(caller.book.ended - ended))
    }

    /// Returns the money that the client's transactions brought to the accounts.
    fn brought(&self) -> u64 {
        let lanes = &self.caller.book.content.0;
        lanes
            .iter()
            .fold(0, |sum: u64, lane| sum.wrapping_add(lane.brought))
    }
}
