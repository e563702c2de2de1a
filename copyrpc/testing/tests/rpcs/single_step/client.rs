//! The stepped process is a client. The server, and the clients that it must not disturb, are in
//! the test's process.

use std::time::Duration;

use copyrpc_shm::dir::Dir;

use super::{DEPTH, ENTRIES, STEPPED, Words, orders, points, start, words};
use crate::caller::{Caller, answer};
use crate::rpc::{Outcome, Rpc};
use copyrpc_testing::helpers::{Scratch, wait_for};
use copyrpc_testing::tracee::{Tracee, Unit, hello, stepped};

/// The operation that is stepped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    /// A call while the server polls the client's lane.
    Call,
    /// A call while the server sleeps.
    WakingCall,
    /// A wait that ends without a reply.
    Wait,
    PollReply,
    PollEmpty,
    Connect,
    Leave,
}

impl Verb {
    /// Returns the name of the operation in the input of the stepped process.
    fn order(self) -> &'static str {
        match self {
            Self::Call | Self::WakingCall => "call",
            Self::Wait => "wait",
            Self::PollReply | Self::PollEmpty => "poll",
            Self::Connect => "connect",
            Self::Leave => "leave",
        }
    }

    /// Returns whether the operation is no part of a call.
    fn is_rare(self) -> bool {
        matches!(self, Self::Wait | Self::Connect | Self::Leave)
    }
}

/// The stepped process.
pub(crate) fn process<R: Rpc>(dir: &Dir) {
    let mut connected: Option<R::Client> = None;
    let mut ended: Vec<(u64, Outcome)> = Vec::with_capacity(2 * DEPTH);
    hello("ready");
    for (verb, number) in orders() {
        if verb == "connect" {
            connected = stepped(|| R::connect(dir));
            continue;
        }
        if verb == "leave" {
            let leaving = connected.take();
            stepped(|| drop(leaving));
            continue;
        }
        let client = connected.as_mut().expect("there was a free entry");
        let poll = |client: &mut R::Client, ended: &mut Vec<_>| {
            R::poll(client, |number, outcome| ended.push((number, outcome)))
        };
        match verb.as_str() {
            "call" => _ = stepped(|| R::call(client, number, number)).unwrap(),
            "wait" => _ = stepped(|| R::wait(client, Some(Duration::from_millis(1)))),
            // The error of a poll is permanent.
            "poll" => _ = stepped(|| poll(client, &mut ended)),
            // Polls until the server is gone.
            "end" => {
                while poll(client, &mut ended).is_ok() {
                    std::thread::yield_now();
                }
            }
            // Polls until `number` calls have ended, and then checks that no call ends a second
            // time.
            "settle" => {
                while ended.len() < number as usize {
                    poll(client, &mut ended).unwrap();
                    std::thread::yield_now();
                }
                (0..10).for_each(|_| _ = poll(client, &mut ended).unwrap());
            }
            other => panic!("unknown verb {other}"),
        }
        if matches!(verb.as_str(), "end" | "settle") {
            hello(&words(&ended));
            ended.clear();
        }
    }
}

/// The server, a client that calls through the whole test, and the record of the stepped process's
/// requests.
struct House<R: Rpc> {
    scratch: Scratch,
    server: R::Server,
    words: Words,
    good: Option<Caller<R>>,
    next: u64,
    from_stepped: Vec<u64>,
    /// Requests of the stepped process that are answered later.
    held: Option<Vec<(R::Held, u64)>>,
    late_answers: usize,
    /// Number of times that the server was woken before the verb.
    wakes_before: u32,
}

/// The entry of a stepped process: the good client has entry 0, and this entry is free when a
/// stepped process connects.
const ENTRY: usize = 1;

impl<R: Rpc> House<R> {
    fn new(name: &str) -> Self {
        let scratch = Scratch::new(name);
        let server = R::create(&scratch.dir(), ENTRIES, DEPTH);
        let good = Some(Caller::new(R::connect(&scratch.dir()).unwrap()));
        let words = Words::new::<R>(&scratch.dir(), ENTRIES * DEPTH);
        Self {
            scratch,
            server,
            words,
            good,
            next: 0,
            from_stepped: vec![],
            held: None,
            late_answers: 0,
            wakes_before: 0,
        }
    }

    fn serve(&mut self) {
        R::serve_poll(&mut self.server);
        while let Some((request, number)) = R::recv(&mut self.server) {
            if number < STEPPED {
                assert!(
                    R::reply(&mut self.server, request, answer(number)),
                    "client of {number} is gone"
                );
                continue;
            }
            self.from_stepped.push(number);
            match &mut self.held {
                Some(held) => held.push((request, number)),
                None => drop(R::reply(&mut self.server, request, answer(number))),
            }
        }
    }

    /// Serves until a call of the stepped process has been received.
    fn serve_stepped(&mut self) {
        wait_for("the stepped process's call does not come", || {
            self.serve();
            !self.from_stepped.is_empty()
        });
    }

    fn round_trips(&mut self, caller: &mut Caller<R>) {
        for _ in 0..3 {
            caller.call(self.next);
            self.next += 1;
            wait_for("a third party is stalled", || {
                self.serve();
                caller.poll().unwrap();
                caller.is_idle()
            });
        }
    }

    /// Makes calls of the good client, and connects and disconnects another client.
    fn traffic(&mut self) {
        let mut good = self.good.take().unwrap();
        self.round_trips(&mut good);
        self.good = Some(good);
        let mut passer_by = self.join(1).remove(0);
        self.round_trips(&mut passer_by);
        drop(passer_by);
        self.serve();
    }

    /// Connects `entries` clients, which are then connected at the same time.
    fn join(&mut self, entries: usize) -> Vec<Caller<R>> {
        let mut joined = vec![];
        wait_for("an entry stays taken", || {
            // A dead client is found after some polls.
            for _ in 0..64 {
                self.serve();
            }
            joined.extend(R::connect(&self.scratch.dir()).map(Caller::new));
            joined.len() == entries
        });
        joined
    }

    /// Asserts that all entries except the good client's can be taken, and that their new clients
    /// get no answers to calls of the former clients. Then frees the entries.
    fn entries_are_free(&mut self) {
        let mut joined = self.join(ENTRIES - 1);
        for caller in &mut joined {
            caller.call(self.next);
            self.next += 1;
        }
        R::serve_poll(&mut self.server);
        let late = self.answer_held();
        assert!(
            late.iter().all(|&is_there| !is_there),
            "a client that is gone is answered"
        );
        self.late_answers += late.len();
        wait_for("a new client is stalled", || {
            self.serve();
            joined
                .iter_mut()
                .for_each(|caller| assert!(caller.poll().is_ok()));
            joined.iter().all(Caller::is_idle)
        });
        drop(joined);
        self.serve();
    }

    /// Makes the server serve a call of the stepped process, so that it polls the process's lane.
    fn warm_up(&mut self, stepped: &mut Tracee, number: u64) {
        self.from_stepped.clear();
        stepped.through(&format!("call {number}"));
        self.serve_stepped();
        stepped.tell("settle 1");
        assert_eq!(stepped.hear(), words(&[(number, Ok(answer(number)))]));
        assert!(!self.words.is_armed(ENTRY));
    }

    /// Lets the server go to sleep, and makes it look asleep from then on, whatever it does. It
    /// then needs the announcement of every call: also of a client that is stopped between lowering
    /// its flag and announcing itself, as soon as the server has passed over all entries (R4).
    fn doze(&mut self) -> u32 {
        wait_for("the server finds no sleep", || {
            self.serve();
            !R::serve_wait(&mut self.server, Some(Duration::from_micros(1)))
                && self.words.is_armed(ENTRY)
        });
        self.words.lull_server()
    }

    /// Brings server and stepped process to the state in which the verb is tested.
    fn prepare(&mut self, verb: Verb, stepped: &mut Tracee, number: u64) {
        self.held = None;
        match verb {
            Verb::Call => self.warm_up(stepped, 2 * number),
            Verb::WakingCall => self.wakes_before = self.doze(),
            _ => {}
        }
        self.from_stepped.clear();
        self.held = (!matches!(verb, Verb::PollReply | Verb::Connect)).then(Vec::new);
        if matches!(
            verb,
            Verb::PollReply | Verb::PollEmpty | Verb::Wait | Verb::Leave
        ) {
            stepped.through(&format!("call {number}"));
        }
        if matches!(verb, Verb::PollReply | Verb::PollEmpty | Verb::Wait) {
            self.serve_stepped();
        }
        stepped.stand(&format!("{} {number}", verb.order()));
    }

    fn answer_held(&mut self) -> Vec<bool> {
        let held = self.held.take().into_iter().flatten();
        held.map(|(request, number)| R::reply(&mut self.server, request, answer(number)))
            .collect()
    }

    /// Asserts, after the verb, that the call of the stepped process arrived once and ends once.
    fn finish(&mut self, verb: Verb, stepped: &mut Tracee, number: u64) {
        match verb {
            Verb::Connect => stepped.through(&format!("call {number}")),
            Verb::Leave => {
                assert!(self.from_stepped.len() <= 1);
                self.entries_are_free();
                return stepped.through("connect 0");
            }
            Verb::WakingCall => {
                assert_ne!(
                    self.words.lull_server(),
                    self.wakes_before,
                    "the server was not woken"
                );
                self.serve();
                assert_eq!(self.from_stepped, [number], "the server was not told");
                assert_eq!(self.answer_held(), [true]);
                // The server gets the announcement of the next call, or polls the lane.
                stepped.through(&format!("call {}", 2 * number));
                self.serve();
                assert_eq!(
                    self.from_stepped,
                    [number, 2 * number],
                    "the server was not told"
                );
                stepped.tell("settle 2");
                let ended = [number, 2 * number].map(|number| (number, Ok(answer(number))));
                assert_eq!(stepped.hear(), words(&ended));
                return;
            }
            _ => {}
        }
        self.serve_stepped();
        assert!(self.answer_held().iter().all(|&is_there| is_there));
        stepped.tell("settle 1");
        assert_eq!(stepped.hear(), words(&[(number, Ok(answer(number)))]));
        self.serve();
        assert_eq!(self.from_stepped, [number], "every request comes once");
        if verb == Verb::Connect {
            stepped.through("leave 0");
            self.entries_are_free();
        }
    }

    /// Connects the stepped process, unless the connection is to be stepped.
    fn connect(verb: Verb, stepped: &mut Tracee) {
        if verb != Verb::Connect {
            stepped.through("connect 0");
        }
    }

    fn steps(&mut self, verb: Verb, stepped: &mut Tracee, number: u64) -> usize {
        self.prepare(verb, stepped, number);
        let steps = stepped.count();
        stepped.resume();
        self.finish(verb, stepped, number);
        steps
    }

    fn end(self) {
        let Self {
            scratch,
            server,
            good,
            ..
        } = self;
        drop((server, good));
        assert!(scratch.names().is_empty());
    }
}

/// Stops the client at an instruction while other clients continue, and then resumes it.
pub(crate) fn stop<R: Rpc>(verb: Verb, unit: Unit, name: &str) {
    let mut house = House::<R>::new(name);
    let mut stepped = start::<R>("client", &house.scratch, unit);
    House::<R>::connect(verb, &mut stepped);
    // The first run of a verb does work that is done only once, so the second run is counted.
    house.steps(verb, &mut stepped, STEPPED);
    let mut points = points(
        house.steps(verb, &mut stepped, STEPPED + 1),
        unit,
        verb.is_rare(),
    );
    let mut stops = 0;
    for point in points.by_ref() {
        let number = STEPPED + 2 + stops;
        house.prepare(verb, &mut stepped, number);
        // The number of instructions differs a little from run to run; a step too many ends at the
        // marker.
        let inside = stepped.step(point);
        house.traffic();
        match verb {
            Verb::WakingCall => _ = house.doze(),
            Verb::Wait => assert_eq!(house.answer_held(), [true]),
            _ => {}
        }
        stepped.go_on(inside);
        house.finish(verb, &mut stepped, number);
        stops += 1;
    }
    println!(
        "client, {verb:?}: {}, {stops} stops, 0 stalls, 0 lost, 0 duplicated",
        points.of(unit)
    );
    stepped.kill();
    house.entries_are_free();
    house.end();
}

/// Stops the client at an instruction of a poll, while the server answers and then ends: the call
/// ends with the answer.
pub(crate) fn stop_at_the_end<R: Rpc>(verb: Verb, unit: Unit, name: &str) {
    let scratch = Scratch::new(name);
    let mut stepped = start::<R>("client", &scratch, unit);
    let mut round = |point: Option<usize>| {
        let mut server = R::create(&scratch.dir(), ENTRIES, DEPTH);
        stepped.through("connect 0");
        stepped.through("call 1");
        R::serve_poll(&mut server);
        let (request, number) = R::recv(&mut server).unwrap();
        stepped.stand(&format!("{} 0", verb.order()));
        let steps = point.is_none().then(|| stepped.count());
        let inside = point.is_some_and(|point| stepped.step(point));
        assert!(R::reply(&mut server, request, answer(number)));
        drop(server);
        stepped.go_on(inside);
        stepped.tell("end 1");
        assert_eq!(
            stepped.hear(),
            words(&[(1, Ok(answer(1)))]),
            "stopped at {point:?}"
        );
        stepped.through("leave 0");
        steps
    };
    let mut points = points(round(None).unwrap(), unit, verb.is_rare());
    for point in points.by_ref() {
        round(Some(point));
    }
    println!(
        "client, poll at the server's end: {}, {} stops, 0 answers lost",
        points.of(unit),
        points.taken
    );
}

/// Kills the client at an instruction while other clients continue.
pub(crate) fn kill<R: Rpc>(verb: Verb, unit: Unit, name: &str) {
    let mut house = House::<R>::new(name);
    let mut stepped = start::<R>("client", &house.scratch, unit);
    House::<R>::connect(verb, &mut stepped);
    let steps = house.steps(verb, &mut stepped, STEPPED);
    stepped.replace();
    house.entries_are_free();
    let mut points = points(steps, unit, verb.is_rare());
    let (mut kills, mut came) = (0, 0);
    for point in points.by_ref() {
        let number = STEPPED + 1 + kills;
        House::<R>::connect(verb, &mut stepped);
        house.prepare(verb, &mut stepped, number);
        stepped.step(point);
        stepped.replace();
        kills += 1;
        house.traffic();
        house.entries_are_free();
        assert!(
            house.from_stepped.is_empty() || house.from_stepped == [number],
            "{:?} at {point}",
            house.from_stepped
        );
        came += house.from_stepped.len();
        house.traffic();
    }
    println!(
        "client, {verb:?}: {}, {kills} kills, {came} calls of theirs came, {} late answers dropped, \
         {kills} entries recovered, 0 stalls, 0 lost, 0 duplicated",
        points.of(unit),
        house.late_answers
    );
    stepped.kill();
    house.end();
}
