//! The stepped process is the server. Its clients are in the test's process.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use copyrpc_calls::SessionEnd;
use copyrpc_shm::dir::Dir;

use super::{DEPTH, ENTRIES, Words, orders, points, start};
use crate::caller::{Caller, answer};
use crate::rpc::Rpc;
use copyrpc_testing::helpers::{Scratch, wait_for};
use copyrpc_testing::tracee::{Tracee, Unit, hello, stepped};

/// Number of the request after which the server stops serving for now: requests of at least this
/// number count, so the low bits can be any.
const LAST: u64 = 1 << 40;

/// The operation that is stepped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verb {
    Poll,
    /// A poll after a client left.
    Reap,
    /// A wait that ends by its timeout.
    Wait,
    Recv,
    Reply,
    /// A reply to a client that sleeps.
    WakingReply,
    Reject,
    Create,
    Close,
}

impl Verb {
    /// Returns the name of the operation in the input of the stepped process.
    fn order(self) -> &'static str {
        match self {
            Self::Poll | Self::Reap => "poll",
            Self::Recv => "recv",
            Self::Wait => "wait",
            Self::Reply | Self::WakingReply => "reply",
            Self::Reject => "reject",
            Self::Create => "create",
            Self::Close => "close",
        }
    }

    /// Returns whether the operation is no part of a call.
    fn is_rare(self) -> bool {
        matches!(
            self,
            Self::Reap | Self::Wait | Self::Reject | Self::Create | Self::Close
        )
    }
}

/// The stepped process.
pub(crate) fn process<R: Rpc>(dir: &Dir) {
    let mut server: Option<R::Server> = None;
    let mut held = VecDeque::new();
    let mut executed = HashSet::new();
    hello("ready");
    for (verb, _) in orders() {
        if verb == "create" {
            server = stepped(|| R::try_create(dir, ENTRIES + 1, DEPTH));
            hello(if server.is_some() {
                "created"
            } else {
                "refused"
            });
            continue;
        }
        if verb == "close" {
            let closing = server.take();
            stepped(|| drop(closing));
            hello("closed");
            continue;
        }
        let server = server.as_mut().unwrap();
        match verb.as_str() {
            "poll" => _ = stepped(|| R::serve_poll(server)),
            "wait" => _ = stepped(|| R::serve_wait(server, Some(Duration::from_millis(1)))),
            "recv" => {
                let received = stepped(|| R::recv(server)).unwrap();
                assert!(executed.insert(received.1), "received twice");
                held.push_back(received);
            }
            "reply" => {
                let (request, number) = held.pop_front().unwrap();
                assert!(stepped(|| R::reply(server, request, answer(number))));
            }
            "reject" => {
                let (request, _) = held.pop_front().unwrap();
                stepped(|| R::reject(server, request));
            }
            "serve" => {
                let mut is_last = false;
                while !is_last {
                    R::serve_poll(server);
                    while let Some(received) = R::recv(server) {
                        assert!(executed.insert(received.1), "received twice");
                        held.push_back(received);
                    }
                    // The newest request is answered first.
                    while let Some((request, number)) = held.pop_back() {
                        R::reply(server, request, answer(number));
                        is_last |= number >= LAST;
                    }
                    std::thread::yield_now();
                }
                hello("served");
            }
            other => panic!("unknown verb {other}"),
        }
    }
}

/// The clients.
struct Guests<R: Rpc> {
    callers: Vec<Caller<R>>,
    next: u64,
    /// Number of times that the first two clients were woken before the verb.
    wakes_before: u32,
}

impl<R: Rpc> Guests<R> {
    fn new(scratch: &Scratch) -> Self {
        Self {
            callers: (0..2)
                .map(|_| Caller::new(R::connect(&scratch.dir()).unwrap()))
                .collect(),
            next: 0,
            wakes_before: 0,
        }
    }

    fn join(&self, scratch: &Scratch) -> Caller<R> {
        Caller::new(R::connect(&scratch.dir()).expect("there is a free entry"))
    }

    /// Makes the first two clients appear asleep. Returns the number of times that they were woken.
    fn wakes(&self, scratch: &Scratch) -> u32 {
        let words = Words::new::<R>(&scratch.dir(), (ENTRIES + 1) * DEPTH);
        (0..2).map(|entry| words.lull_client(entry)).sum()
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn call_all(&mut self) {
        for index in 0..self.callers.len() {
            let number = self.number();
            self.callers[index].call(number);
        }
    }

    fn poll_all(&mut self) {
        for caller in &mut self.callers {
            caller.poll().unwrap();
        }
    }

    fn until_idle(&mut self) {
        wait_for("an answer does not come", || {
            self.poll_all();
            self.callers.iter().all(Caller::is_idle)
        });
    }

    /// Brings server and clients to the state in which the verb is tested.
    fn prepare(&mut self, verb: Verb, stepped: &mut Tracee, scratch: &Scratch) {
        if verb != Verb::Wait {
            self.call_all();
            self.call_all();
        }
        match verb {
            Verb::Recv => stepped.through("poll 0"),
            Verb::Reap => {
                let mut leaver = self.join(scratch);
                leaver.call(self.number());
                stepped.through("poll 0");
                drop(leaver);
            }
            Verb::Reply | Verb::WakingReply | Verb::Reject => {
                stepped.through("poll 0");
                stepped.through("recv 0");
            }
            _ => {}
        }
        if verb == Verb::WakingReply {
            self.wakes_before = self.wakes(scratch);
        }
        stepped.stand(&format!("{} 0", verb.order()));
    }

    /// Connects a further client, and makes all clients call and poll, while the server is stopped.
    fn go_on(&mut self, scratch: &Scratch) {
        self.callers.push(self.join(scratch));
        self.call_all();
        self.poll_all();
    }

    /// Asserts, after the verb, that every call ends, and disconnects the third client.
    fn finish(&mut self, verb: Verb, stepped: &mut Tracee, scratch: &Scratch) {
        if verb == Verb::WakingReply {
            assert_ne!(
                self.wakes(scratch),
                self.wakes_before,
                "the client was not woken"
            );
        }
        stepped.tell("serve 0");
        self.until_idle();
        self.callers.truncate(2);
        let number = LAST + self.number();
        self.callers[0].call(number);
        self.until_idle();
        stepped.wait_for("served");
        // The server finds that the third client left.
        stepped.through("poll 0");
    }

    fn dropped(&self) -> u64 {
        self.callers.iter().map(|caller| caller.dropped).sum()
    }

    /// Asserts that every call ends when the server is gone. Returns the numbers of calls that were
    /// answered, dropped, and ended by the server's end.
    fn end(mut self) -> (u64, u64, u64) {
        for caller in &mut self.callers {
            wait_for("the server's end is not noticed", || {
                caller.poll() == Err(SessionEnd::PeerGone)
            });
            assert!(caller.is_idle(), "a call did not end");
        }
        let sum = |of: fn(&Caller<R>) -> u64| self.callers.iter().map(of).sum();
        (
            sum(|caller| caller.answered),
            sum(|caller| caller.dropped),
            sum(|caller| caller.gone),
        )
    }
}

fn create(stepped: &mut Tracee) {
    stepped.through("create 0");
    stepped.wait_for("created");
}

fn steps<R: Rpc>(
    verb: Verb,
    guests: &mut Guests<R>,
    stepped: &mut Tracee,
    scratch: &Scratch,
) -> usize {
    // The first run of a verb does work that is done only once, so the second run is counted.
    guests.prepare(verb, stepped, scratch);
    stepped.finish();
    stepped.resume();
    guests.finish(verb, stepped, scratch);
    guests.prepare(verb, stepped, scratch);
    let steps = stepped.count();
    stepped.resume();
    guests.finish(verb, stepped, scratch);
    steps
}

/// Stops the server at an instruction while clients continue, and then resumes it.
pub(crate) fn stop<R: Rpc>(verb: Verb, unit: Unit, name: &str) {
    let scratch = Scratch::new(name);
    let mut stepped = start::<R>("server", &scratch, unit);
    create(&mut stepped);
    let mut guests = Guests::<R>::new(&scratch);
    let mut points = points(
        steps(verb, &mut guests, &mut stepped, &scratch),
        unit,
        verb.is_rare(),
    );
    let rejected_before = guests.dropped();
    for point in points.by_ref() {
        guests.prepare(verb, &mut stepped, &scratch);
        // The number of instructions differs a little from run to run; a step too many ends at the
        // marker.
        let inside = stepped.step(point);
        guests.go_on(&scratch);
        stepped.go_on(inside);
        guests.finish(verb, &mut stepped, &scratch);
    }
    let rejected = if verb == Verb::Reject {
        points.taken as u64
    } else {
        0
    };
    assert_eq!(
        guests.dropped() - rejected_before,
        rejected,
        "no call is dropped but those that were rejected"
    );
    println!(
        "server, {verb:?}: {}, {} stops, 0 stalls, 0 lost, 0 duplicated",
        points.of(unit),
        points.taken
    );
    stepped.kill();
    guests.end();
}

/// Kills the server at an instruction; then another server of the same name starts.
pub(crate) fn kill<R: Rpc>(verb: Verb, unit: Unit, name: &str) {
    let scratch = Scratch::new(name);
    let mut stepped = start::<R>("server", &scratch, unit);
    create(&mut stepped);
    let steps = if verb == Verb::Close {
        stepped.stand("close 0");
        stepped.count()
    } else {
        let mut guests = Guests::<R>::new(&scratch);
        steps(verb, &mut guests, &mut stepped, &scratch)
    };
    stepped.replace();
    let mut points = points(steps, unit, verb.is_rare());
    let (mut answered, mut gone) = (0, 0);
    // The last point is after the verb.
    for point in points.by_ref().chain([usize::MAX]) {
        create(&mut stepped);
        assert_eq!(scratch.names().len(), 1);
        let mut guests = Guests::<R>::new(&scratch);
        // The server has served before.
        stepped.tell("serve 0");
        guests.call_all();
        guests.callers[1].call(LAST);
        guests.until_idle();
        stepped.wait_for("served");
        guests.prepare(verb, &mut stepped, &scratch);
        let inside = stepped.step(point);
        stepped.replace();
        let ended = guests.end();
        // One of the four calls that wait may have been answered or rejected; after the verb, one
        // has been.
        let expected = u64::from(matches!(
            verb,
            Verb::Reply | Verb::WakingReply | Verb::Reject
        ));
        let waited = if verb == Verb::Wait { 0 } else { 4 };
        let done = ended.0 - 3 + ended.1;
        assert!(
            if inside {
                done <= expected
            } else {
                done == expected
            },
            "{verb:?} at {point}: {ended:?}"
        );
        assert_eq!(ended.2 + done, waited);
        (answered, gone) = (answered + ended.0, gone + ended.2);
    }
    stepped.kill();
    drop(R::create(&scratch.dir(), ENTRIES, DEPTH));
    assert!(scratch.names().is_empty());
    let kills = points.taken + 1;
    println!(
        "server, {verb:?}: {}, {kills} kills, {kills} next starts, {answered} calls answered and {gone} ended, 0 lost, 0 duplicated",
        points.of(unit)
    );
}

/// Leaves the region of a killed server behind.
fn leave_a_dead_one(stepped: &mut Tracee, scratch: &Scratch) {
    create(stepped);
    stepped.replace();
    assert_eq!(scratch.names().len(), 1);
}

fn create_steps(stepped: &mut Tracee, scratch: &Scratch) -> usize {
    leave_a_dead_one(stepped, scratch);
    stepped.stand("create 0");
    let steps = stepped.count();
    stepped.replace();
    steps
}

/// Kills a server at an instruction while it takes the name of a dead server.
pub(crate) fn kill_create<R: Rpc>(_: Verb, unit: Unit, name: &str) {
    let scratch = Scratch::new(name);
    let mut stepped = start::<R>("server", &scratch, unit);
    let mut points = points(create_steps(&mut stepped, &scratch), unit, true);
    for point in points.by_ref() {
        leave_a_dead_one(&mut stepped, &scratch);
        stepped.stand("create 0");
        stepped.step(point);
        stepped.replace();
        assert!(scratch.names().len() <= 1);
        let next = R::create(&scratch.dir(), ENTRIES, DEPTH);
        R::connect(&scratch.dir()).expect("the next server is whole");
        drop(next);
        assert!(scratch.names().is_empty());
    }
    stepped.kill();
    println!(
        "server, Create: {0}, {1} kills, {1} next starts",
        points.of(unit),
        points.taken
    );
}

/// Stops a server at an instruction while it takes the name of a dead server and another server
/// starts: one of the two gets the name.
pub(crate) fn stop_create<R: Rpc>(_: Verb, unit: Unit, name: &str) {
    let scratch = Scratch::new(name);
    let mut stepped = start::<R>("server", &scratch, unit);
    let mut points = points(create_steps(&mut stepped, &scratch), unit, true);
    let mut won = 0;
    for point in points.by_ref() {
        leave_a_dead_one(&mut stepped, &scratch);
        stepped.stand("create 0");
        let inside = stepped.step(point);
        let other = R::try_create(&scratch.dir(), ENTRIES, DEPTH);
        stepped.go_on(inside);
        let words = stepped.hear();
        assert_eq!(
            words == "created",
            other.is_none(),
            "stopped at instruction {point}"
        );
        won += u64::from(other.is_none());
        assert_eq!(scratch.names().len(), 1);
        R::connect(&scratch.dir()).expect("there is a server");
        stepped.replace();
        drop(other);
        drop(R::create(&scratch.dir(), ENTRIES, DEPTH));
        assert!(scratch.names().is_empty());
    }
    stepped.kill();
    println!(
        "server, Create: {}, {} stops, {won} won",
        points.of(unit),
        points.taken
    );
}

/// Stops a server at an instruction of its end, while clients poll and another server starts.
pub(crate) fn stop_close<R: Rpc>(_: Verb, unit: Unit, name: &str) {
    let scratch = Scratch::new(name);
    let mut stepped = start::<R>("server", &scratch, unit);
    create(&mut stepped);
    stepped.stand("close 0");
    let mut points = points(stepped.count(), unit, true);
    stepped.resume();
    stepped.wait_for("closed");
    let mut started = 0;
    for point in points.by_ref() {
        stepped.through("create 0");
        stepped.wait_for("created");
        let mut guests = Guests::<R>::new(&scratch);
        guests.call_all();
        stepped.stand("close 0");
        let inside = stepped.step(point);
        for caller in &mut guests.callers {
            let _ = caller.poll();
        }
        let next = R::try_create(&scratch.dir(), ENTRIES, DEPTH);
        started += usize::from(next.is_some());
        stepped.go_on(inside);
        stepped.wait_for("closed");
        guests.end();
        let next = next.unwrap_or_else(|| R::create(&scratch.dir(), ENTRIES, DEPTH));
        R::connect(&scratch.dir()).expect("the next server is there");
        drop(next);
        assert!(scratch.names().is_empty());
    }
    println!(
        "server, Close: {}, {} stops, {started} next starts meanwhile",
        points.of(unit),
        points.taken
    );
    stepped.kill();
}
