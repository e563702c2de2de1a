//! Every state that a real server and three real clients in two groups can reach with few calls, in
//! every order of the operations. Each operation may be held while any others are executed, a
//! client may die at any point, and the time of its calls may be over at any point.
//!
//! In each state, nothing is executed or ended twice, no end writes where it must not (S6, S7, S8,
//! S12), and no client waits for more than two rotations (S17). In each state, every client that
//! calls detects that the server has died (S20). From each state, all calls end in a bounded number
//! of fair rounds, after which every slot works.

use std::collections::HashSet;
use std::io::Write;
use std::rc::Rc;

use super::world::{Counters, World, small};
use super::worlds::scale;
use crate::protocol::ServerConfig;

/// A possible event. A client reads its memory after each operation that reached it, or after all
/// operations that wait. A client that does not read its memory for a while is equivalent to
/// operations that are held.
#[derive(Clone, Copy, Debug)]
enum Action {
    Call(usize),
    /// A call whose time is over before the first poll of its client: it is never offered.
    CallTooLate(usize),
    /// The time of all calls of a client is over.
    TimeOut(usize),
    Rest(usize),
    Wake(usize),
    ToServer(usize),
    ToClient(usize),
    AllToClient(usize),
    PollServer,
    /// The server polls at the time of its next event.
    PollServerLater,
    Take,
    Reply,
    Die(usize),
    Leave(usize),
}

#[derive(Clone, Copy)]
struct Setup {
    /// Calls of each client.
    calls: [usize; 3],
    /// The client that may die, once.
    mortal: Option<usize>,
    /// The client whose calls may run out of time.
    impatient: Option<usize>,
    /// The client that may sleep while it has no call: it does not read its memory until it makes a
    /// call or polls without one.
    rests: Option<usize>,
    /// Maximum number of slices: while a request is kept, groups may take turns without end.
    slices: u64,
    /// A worker may keep a request while other things happen; otherwise all requests are answered
    /// after each poll.
    keeps_requests: bool,
}

fn actions(world: &World, setup: Setup) -> Vec<Action> {
    let mut all = vec![Action::PollServer, Action::PollServerLater];
    if setup.keeps_requests {
        all.extend([Action::Take, Action::Reply]);
    }
    for (nth, side) in world.sides.iter().enumerate() {
        if !side.is_alive {
            if !side.has_left {
                all.push(Action::Leave(nth));
            }
            continue;
        }
        if side.made < setup.calls[nth] {
            all.push(Action::Call(nth));
            if setup.impatient == Some(nth) {
                all.push(Action::CallTooLate(nth));
            }
        }
        if setup.impatient == Some(nth) {
            all.push(Action::TimeOut(nth));
        }
        if setup.rests == Some(nth) {
            all.push(if world.is_resting(nth) {
                Action::Wake(nth)
            } else {
                Action::Rest(nth)
            });
        }
        all.extend([Action::ToServer(nth), Action::ToClient(nth)]);
        if side.to_client.len() > 1 {
            all.push(Action::AllToClient(nth));
        }
        if setup.mortal == Some(nth) {
            all.push(Action::Die(nth));
        }
    }
    all
}

/// Applies an action. Returns whether it was possible.
fn apply(world: &mut World, action: Action, setup: Setup) -> bool {
    let is_possible = match action {
        Action::Call(nth) => {
            let is_made = world.call(nth).is_some();
            world.poll_client(nth);
            is_made
        }
        Action::CallTooLate(nth) => {
            let is_made = world.call(nth).is_some();
            world.time_out(nth);
            is_made
        }
        Action::TimeOut(nth) => {
            world.time_out(nth);
            true
        }
        Action::Rest(nth) => world.rest(nth),
        Action::Wake(nth) => {
            world.poll_client(nth);
            true
        }
        Action::ToServer(nth) => world.deliver_to_server(nth),
        Action::ToClient(nth) => {
            let is_delivered = world.deliver_to_client(nth);
            look(world, nth);
            is_delivered
        }
        Action::AllToClient(nth) => {
            while world.deliver_to_client(nth) {}
            look(world, nth);
            true
        }
        Action::PollServer | Action::PollServerLater => {
            let is_possible = matches!(action, Action::PollServer) || world.tick();
            world.poll_server();
            while !setup.keeps_requests && world.take() {
                world.reply();
            }
            is_possible
        }
        Action::Take => world.take(),
        Action::Reply => world.reply(),
        Action::Die(nth) => {
            world.sides[nth].is_alive = false;
            true
        }
        Action::Leave(nth) => {
            world.leave(nth);
            true
        }
    };
    world.rebase();
    is_possible
}

/// Lets a client read its memory, unless it sleeps.
fn look(world: &mut World, nth: usize) {
    if !world.is_resting(nth) {
        world.poll_client(nth);
    }
}

fn check(world: &World, path: &Path, setup: Setup, is_fair_checked: bool) {
    world.server.check_consistency();
    let groups = world.server.groups().count();
    let longest = world.waited.iter().max().copied().unwrap_or(0);
    assert!(
        longest <= 2 * groups,
        "S17: waited for {longest} switches of {groups} groups: {path:?}"
    );
    assert_eq!(
        world.server.stats().garbage,
        0,
        "a correct client's message is garbage: {path:?}"
    );
    if !is_fair_checked {
        return;
    }
    world.clone().lose_server();
    let mut fair = world.clone();
    // The server does not need a client that rests.
    let rounds = fair.run_beside_rests(MOST_ROUNDS);
    assert!(
        rounds < MOST_ROUNDS,
        "calls wait for a client that rests: {path:?}\n{:?}",
        fair.server
    );
    let rounds = fair.settle(MOST_ROUNDS);
    assert!(
        rounds < MOST_ROUNDS,
        "calls do not end, or their slots are lost: {path:?}\n{:?}",
        fair.server
    );
    for (nth, side) in fair
        .sides
        .iter()
        .enumerate()
        .filter(|(_, side)| side.is_alive)
    {
        let is_patient = setup.impatient != Some(nth);
        assert!(
            !is_patient
                || side
                    .executed
                    .iter()
                    .chain(&side.ended)
                    .all(|count| *count == 1),
            "lost: {path:?}"
        );
    }
    let Some(nth) = setup.impatient.filter(|nth| fair.sides[*nth].is_alive) else {
        return;
    };
    let before = fair.sides[nth].made;
    while fair.call(nth).is_some() {}
    let rounds = fair.settle(MOST_ROUNDS);
    assert!(
        rounds < MOST_ROUNDS
            && fair.sides[nth].ended[before..]
                .iter()
                .all(|count| *count == 1),
        "a slot is lost: {path:?}"
    );
    assert_eq!(fair.server.stats().garbage, 0, "{path:?}");
}

/// Maximum number of rounds of a fair run, each of 100 ns; a slice is 1,000 ns.
const MOST_ROUNDS: usize = 100;
/// The fair run starts from one in `FAIR_RUN_OF` states: it costs as much as some hundred
/// transitions, and it passes only through states that are explored anyway.
const FAIR_RUN_OF: usize = 8;

/// The actions that led to a state.
#[derive(Clone, Debug)]
struct Path(
    #[expect(dead_code, reason = "for the message of a failure")] Option<Rc<(Action, Path)>>,
);

fn explore(name: &str, config: &ServerConfig, setup: Setup) {
    explore_from(name, config, setup, Counters::default());
}

fn explore_from(name: &str, config: &ServerConfig, setup: Setup, counters: Counters) {
    let mut seen = HashSet::new();
    let mut root = World::of_two_groups(config, counters);
    root.nobody_rests = setup.rests.is_none();
    seen.insert(root.hash());
    let mut stack = vec![(root, Path(None))];
    let mut transitions = 0_u64;
    while let Some((world, path)) = stack.pop() {
        for action in actions(&world, setup) {
            let mut next = world.clone();
            if !apply(&mut next, action, setup) {
                continue;
            }
            transitions += 1;
            if next.server.scheduler().epoch() - counters.epoch > setup.slices {
                continue;
            }
            if seen.insert(next.hash()) {
                let path = Path(Some(Rc::new((action, path.clone()))));
                check(&next, &path, setup, seen.len() % FAIR_RUN_OF == 0);
                stack.push((next, path));
            }
        }
    }
    // `println` is not used: its output is not shown for a test that passes.
    std::io::stderr()
        .write_all(
            format!(
                "explored {name}: {} states, {transitions} transitions\n",
                seen.len()
            )
            .as_bytes(),
        )
        .unwrap();
}

/// Returns the bound of an exploration: by default, where `COPYRPC_TEST_SCALE` is 2 (a turn of
/// `.ci/run`), and where it is larger.
fn bound<T: Copy>(bounds: [T; 3]) -> T {
    bounds[scale().clamp(1, 3) as usize - 1]
}

/// In the short form each group has one
/// slice. The long form has no bound that these calls reach (millions of states).
#[test]
fn one_call_of_each_client_is_executed_and_ends_once() {
    let slices = bound([2, 2, u64::MAX]);
    explore(
        "one call each",
        &small(),
        Setup {
            calls: [1, 1, 1],
            mortal: None,
            impatient: None,
            rests: None,
            slices,
            keeps_requests: false,
        },
    );
}

#[test]
fn one_call_of_each_group_is_executed_and_ends_once_in_slices_without_end() {
    explore(
        "one call of each group",
        &small(),
        Setup {
            calls: [1, 0, 1],
            mortal: None,
            impatient: None,
            rests: None,
            slices: 6,
            keeps_requests: false,
        },
    );
}

/// The second call finds the client in any state that the first call has left it in.
#[test]
fn a_second_call_is_executed_and_ends_once_in_whatever_state_it_finds_the_client() {
    let calls = bound([[2, 0, 1], [2, 0, 1], [2, 1, 1]]);
    explore(
        "a second call",
        &small(),
        Setup {
            calls,
            mortal: None,
            impatient: None,
            rests: None,
            slices: 4,
            keeps_requests: false,
        },
    );
}

#[test]
fn the_others_go_on_when_a_client_dies_in_whatever_state() {
    let calls = bound([[1, 0, 1], [1, 0, 1], [1, 1, 1]]);
    explore(
        "a client dies",
        &small(),
        Setup {
            calls,
            mortal: Some(0),
            impatient: None,
            rests: None,
            slices: 4,
            keeps_requests: false,
        },
    );
}

/// A client with a zone, or with a zone whose *activate* is on its way, rests for any time, and
/// wakes at any point.
#[test]
fn a_client_that_rests_in_whatever_state_loses_its_zone_and_nothing_else() {
    let (calls, slices) = ([2, 0, 1], bound([4, 4, 6]));
    explore(
        "a client rests",
        &small(),
        Setup {
            calls,
            mortal: None,
            impatient: None,
            rests: Some(0),
            slices,
            keeps_requests: false,
        },
    );
}

/// A response that arrives long after its slice finds the client in WARMUP, where it rests with an
/// announcement that the server takes later.
#[test]
fn a_client_that_rests_while_it_is_warmed_loses_its_zone_and_nothing_else() {
    let setup = Setup {
        calls: [1, 0, 1],
        mortal: None,
        impatient: None,
        rests: Some(0),
        slices: bound([2, 3, 3]),
        keeps_requests: true,
    };
    explore("a client rests in WARMUP", &small(), setup);
}

#[test]
fn a_request_that_a_worker_keeps_while_groups_take_turns_is_answered_once() {
    explore(
        "a worker keeps requests",
        &small(),
        Setup {
            calls: [1, 0, 1],
            mortal: None,
            impatient: None,
            rests: None,
            slices: 3,
            keeps_requests: true,
        },
    );
}

/// A call that was never offered leaves its slot unchanged; the response to any other call frees
/// its slot, at any later time.
#[test]
fn a_slot_works_again_after_a_call_that_ran_out_of_time_in_whatever_state() {
    let calls = bound([[2, 0, 1], [2, 0, 1], [3, 0, 1]]);
    explore(
        "calls out of time",
        &small(),
        Setup {
            calls,
            mortal: None,
            impatient: Some(0),
            rests: None,
            slices: 3,
            keeps_requests: false,
        },
    );
}

/// With a second slot, a call that is made in WARMUP is not offered before PROCESS.
#[test]
fn two_slots_work_again_after_calls_that_ran_out_of_time_in_whatever_state() {
    let config = ServerConfig {
        depth: 2,
        ..small()
    };
    let slices = bound([2, 2, 4]);
    explore(
        "calls of two slots out of time",
        &config,
        Setup {
            calls: [2, 0, 1],
            mortal: None,
            impatient: Some(0),
            rests: None,
            slices,
            keeps_requests: false,
        },
    );
}

#[test]
fn counters_that_wrap_change_nothing_in_whatever_state() {
    let setup = Setup {
        calls: [2, 0, 1],
        mortal: None,
        impatient: Some(0),
        rests: None,
        slices: 3,
        keeps_requests: false,
    };
    for (bits, left) in [(31, 0), (32, 0), (32, 1)] {
        explore_from(
            "counters that wrap",
            &small(),
            setup,
            Counters::before_wrap(bits, left),
        );
    }
}
