//! A client that stops or dies when it is IDLE, in WARMUP or in PROCESS, while five other clients
//! continue.

use scalerpc::mlx5::Device;
use scalerpc::{ServerConfig, State};

use crate::desk::{Desk, SMALL_ARENA, device_in, socket_in};
use crate::guest::Guest;
use crate::support::plan::SLOT_BYTES;
use crate::time::{Mode, mode};
use copyrpc_testing::helpers::{Helper, Scratch, limited, say, scale};

const STATES: [&str; 3] = ["idle", "warmup", "process"];
/// Number of clients in the test's own process.
const OTHERS: usize = 5;
/// A time for which no client is stopped, in ns.
const NEVER_NS: u64 = 100_000_000_000;
/// Number of slices for which the other clients are watched.
const WATCHED: u64 = 300;

/// Runs in the helper: gets into a state, and stops or dies there. If it is continued, it makes
/// more calls, and reports the outcome. Both processes yield after each poll: otherwise each would
/// see, on a machine with one core, many slices of the other at once, and a client would be in the
/// state that it waits for between two polls.
pub(crate) fn run(deed: &str, state: &str) {
    let mut guest = Guest::connect(&Device::open(device_in(SMALL_ARENA)).unwrap(), &socket_in())
        .expect("there is room");
    let caller = &mut guest.caller;
    match state {
        // The client is IDLE again, after a slice of its own.
        "idle" => {
            caller.call();
            while caller.outstanding() > 0 || caller.state() != State::Idle {
                caller.poll();
                std::thread::yield_now();
            }
        }
        "warmup" => {
            // On a machine with one core the whole slice may pass while this process does not run.
            while caller.state() != State::Warmup {
                if caller.outstanding() == 0 {
                    caller.call();
                }
                caller.poll();
                if caller.state() != State::Warmup {
                    std::thread::yield_now();
                }
            }
        }
        // The client is in PROCESS, with a request that was just written into the pool.
        "process" => {
            while !matches!(caller.state(), State::Process { .. }) || caller.outstanding() == 0 {
                std::thread::yield_now();
                caller.call();
                caller.poll();
            }
        }
        _ => panic!("no state is called {state}"),
    }
    let signal = if deed == "dies" {
        libc::SIGKILL
    } else {
        libc::SIGSTOP
    };
    // SAFETY: no pointers are involved.
    unsafe { libc::raise(signal) };

    let quota = caller.made() + 50;
    while !matches!(caller.state(), State::Closed(_))
        && (caller.made() < quota || caller.outstanding() > 0)
    {
        caller.step(quota);
        std::thread::yield_now();
    }
    if guest.was_evicted() {
        return say("was evicted");
    }
    guest.say_farewell();
    say("went on");
}

/// A client in the test's own process, with one call at a time.
struct Local {
    guest: Guest,
    /// The slice in which the call was made.
    since: u64,
}

/// A server, and the clients that continue.
struct Room {
    scratch: Scratch,
    desk: Desk,
    locals: Vec<Local>,
    /// Maximum number of slices from a call to its response.
    farthest: u64,
}

impl Room {
    fn new(name: &str, drain_ns: u64) -> Self {
        let scratch = Scratch::new(name);
        let max_clients = OTHERS as u32 + 1;
        let config = ServerConfig {
            max_clients,
            slot_bytes: SLOT_BYTES,
            depth: 2,
            group_size: 2,
            spare_zones: 1,
            slice_ns: 20_000,
            drain_ns,
            ..ServerConfig::default()
        };
        let mut desk = Desk::new(&scratch, &config);
        let locals = (0..OTHERS)
            .map(|_| Local {
                guest: desk.join_here(),
                since: 0,
            })
            .collect();
        Self {
            scratch,
            desk,
            locals,
            farthest: 0,
        }
    }

    fn slices(&self) -> u64 {
        self.desk.server.stats().slices
    }

    fn step(&mut self) {
        self.desk.step();
        let now = self.slices();
        for Local {
            guest: Guest { caller, .. },
            since,
        } in &mut self.locals
        {
            if caller.outstanding() == 0 {
                caller.call();
                *since = now;
            }
            if caller.poll() > 0 {
                self.farthest = self.farthest.max(now - *since);
            }
        }
    }

    fn step_until(&mut self, mut done: impl FnMut(&Self) -> bool) {
        while !done(self) {
            self.step();
            std::thread::yield_now();
        }
    }

    /// Asserts that the other clients are served, each within two rotations of the groups (S17).
    fn watch(&mut self) {
        let (slices, made) = (self.slices(), self.made());
        self.farthest = 0;
        // The loop does not yield: with a yield after each poll, a slice might contain a single
        // poll.
        while self.slices() <= slices + WATCHED {
            self.step();
        }
        assert!(
            self.made()
                .iter()
                .zip(made)
                .all(|(now, before)| *now > before + WATCHED / 10),
            "{:?}",
            self.made()
        );
        let groups = self.desk.server.groups() as u64;
        assert!(
            self.farthest <= 2 * groups + 1,
            "{} slices with {groups} groups",
            self.farthest
        );
    }

    fn made(&self) -> Vec<u64> {
        self.locals
            .iter()
            .map(|local| local.guest.caller.made())
            .collect()
    }

    /// Disconnects the other clients too.
    fn close(mut self) {
        while let Some(mut local) = self.locals.pop() {
            while local.guest.caller.outstanding() > 0 {
                self.desk.step();
                local.guest.caller.poll();
            }
            local.guest.say_farewell();
        }
        while self.desk.guests() > 0 || self.desk.server.clients() > 0 {
            self.desk.step();
        }
        self.desk.close(&self.scratch);
    }
}

#[test]
fn a_client_that_stops_in_whatever_state_keeps_nobody_from_being_served_and_goes_on_when_it_is_continued()
 {
    limited(|| {
        let mut room = Room::new("scalerpc-stops", NEVER_NS);
        for state in STATES.repeat(scale() as usize) {
            let mut helper = Helper::start(&format!("stops {state}"), &room.scratch);
            room.step_until(|_| helper.is_stopped());
            room.watch();
            helper.signal(libc::SIGCONT);
            room.step_until(|_| helper.has_ended());
            assert_eq!(helper.hear(), "went on", "{state}");
            helper.wait();
            room.step_until(|room| room.desk.server.clients() == OTHERS);
        }
        assert_eq!(room.desk.server.stats().evictions, 0);
        room.close();
    });
}

/// In WARMUP a client has a zone as soon as the server has taken its announcement. In delayed time
/// the announcement may not be sent when the client stops.
#[test]
fn a_client_that_stops_with_a_zone_and_for_too_long_is_evicted_and_told_so() {
    limited(|| {
        // The drain time is longer than a busy machine may keep the helper from running before it
        // stops by itself.
        let mut room = Room::new("scalerpc-evicted", 500_000_000);
        let states: &[_] = if mode() == Mode::Delay {
            &["process"]
        } else {
            &["warmup", "process"]
        };
        for (round, state) in states.repeat(scale() as usize).into_iter().enumerate() {
            let mut helper = Helper::start(&format!("stops {state}"), &room.scratch);
            room.step_until(|_| helper.is_stopped());
            room.watch();
            room.step_until(|room| room.desk.server.clients() == OTHERS);
            assert_eq!(room.desk.server.stats().evictions, round as u64 + 1);
            room.watch();
            helper.signal(libc::SIGCONT);
            room.step_until(|_| helper.has_ended());
            assert_eq!(helper.hear(), "was evicted", "{state}");
            helper.wait();
        }
        room.close();
    });
}

/// The next client gets the resources of this client, as there is only one entry in addition to the
/// entries of the other clients.
#[test]
fn what_a_client_had_that_dies_in_whatever_state_is_its_successors() {
    limited(|| {
        let mut room = Room::new("scalerpc-dies", NEVER_NS);
        for state in STATES.repeat(2 * scale() as usize) {
            let mut helper = Helper::start(&format!("dies {state}"), &room.scratch);
            room.step_until(|_| helper.has_ended());
            room.watch();
            room.step_until(|room| room.desk.server.clients() == OTHERS);
        }
        assert_eq!(room.desk.server.stats().evictions, 0);
        room.close();
    });
}
