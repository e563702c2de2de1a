//! Many pairs of other projects' programs on few cores. Some programs are stopped and continued,
//! and some programs are killed. The other programs finish, the peers of killed programs get
//! errors, and no file is left.

use std::fs;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::random::Random;
use crate::support::{Finished, Place, Program, free_port, is_listening, scale};

/// Time for which programs are stopped and continued, in a round.
const STORM: Duration = Duration::from_secs(5);

/// Programs with arguments, their iterations, and whether a client detects a killed server because
/// it has operations in flight.
const KINDS: [(&[&str], u32, bool); 5] = [
    (&["ib_write_bw", "-s", "4096"], 10_000, true),
    (&["ib_send_bw", "-s", "4096"], 10_000, true),
    (&["ib_read_bw", "-s", "4096"], 10_000, true),
    (&["ib_atomic_bw"], 1_000, true),
    (&["ibv_rc_pingpong"], 2_000, false),
];

/// Iterations if the server is killed: many more than fit in the time.
const ENDLESS: u32 = 5_000_000;

/// A server and its client.
struct Pair {
    ends: [Program; 2],
    is_victim: bool,
}

impl Pair {
    fn start(place: &Place, log: &str, program: &[&str], iterations: u32, is_victim: bool) -> Self {
        let (port, iterations) = (free_port(), iterations.to_string());
        let command = |more: &[&str]| {
            let mut command = place.mlx5_run(&["--log", log, "--log-commands"]);
            command
                .args(program)
                .args(["-n", &iterations, "-p", &port.to_string()])
                .args(more);
            command
        };
        let mut server = place.start(&mut command(&[]));
        server.wait_for(|| is_listening(port));
        Self {
            ends: [server, place.start(&mut command(&["localhost"]))],
            is_victim,
        }
    }

    fn finish(self) -> [Finished; 2] {
        self.ends.map(Program::finish)
    }
}

/// Returns the program of a launcher, if it still runs.
fn program_of(launcher: libc::pid_t) -> Option<libc::pid_t> {
    fs::read_to_string(format!("/proc/{launcher}/task/{launcher}/children"))
        .ok()?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

fn signal(program: &Program, signal: libc::c_int) {
    if let Some(process) = program_of(program.id()) {
        // SAFETY: all arguments are plain numbers. The launcher has not waited for the process, or
        // it would not be the launcher's child.
        unsafe { libc::kill(process, signal) };
    }
}

/// Stops programs for some time, one after the other. Kills the servers of the victims, one after
/// the other.
fn storm(pairs: &[Pair], random: &mut Random) {
    let end = Instant::now() + STORM;
    let mut stops = 0;
    let mut victims: Vec<_> = pairs.iter().filter(|pair| pair.is_victim).collect();
    let every = STORM / (victims.len() as u32 + 1);
    while Instant::now() < end {
        let one = &pairs[random.below(pairs.len() as u32) as usize].ends[random.below(2) as usize];
        signal(one, libc::SIGSTOP);
        if Instant::now() + every * victims.len() as u32 > end {
            let victim = victims.pop().unwrap();
            match random.below(2) {
                0 => signal(&victim.ends[0], libc::SIGKILL),
                // SAFETY: a child that was not waited for.
                _ => _ = unsafe { libc::kill(victim.ends[0].id(), libc::SIGKILL) },
            }
        }
        sleep(Duration::from_millis(u64::from(20 + random.below(200))));
        signal(one, libc::SIGCONT);
        stops += 1;
    }
    victims
        .iter()
        .for_each(|victim| signal(&victim.ends[0], libc::SIGKILL));
    println!("{stops} times stopped and continued");
}

fn round(seed: u64) {
    let random = &mut Random::new(seed);
    let place = Place::new(&format!("storm-{seed}"));
    let log = place.file("log");
    let log = log.to_str().unwrap();
    let mut pairs = vec![];
    for (program, iterations, can_notice) in KINDS {
        pairs.push(Pair::start(&place, log, program, iterations, false));
        if can_notice && random.below(4) < 3 {
            pairs.push(Pair::start(&place, log, program, ENDLESS, true));
        }
    }
    // The storm begins when each end has its connection.
    let connected = 2 * pairs.len();
    pairs[0].ends[0].wait_for_all(|| {
        fs::read_to_string(log)
            .is_ok_and(|log| log.matches("-> ReadyToReceive").count() >= connected)
    });
    storm(&pairs, random);
    for pair in pairs {
        let is_victim = pair.is_victim;
        let [server, client] = pair.finish();
        if is_victim {
            assert!(
                !server.status.success() && !client.status.success(),
                "seed {seed}: {server:#?} {client:#?}"
            );
            client.said("Failed status 12");
        } else {
            // Both outputs are shown, because the end that failed first has the reason.
            assert!(
                server.status.success() && client.status.success(),
                "seed {seed}: {server:#?} {client:#?}"
            );
        }
    }
    // A new pair works, and removes the files of killed programs.
    for end in place.pair(&[], &["ibv_rc_pingpong", "-n", "100", "-c"]) {
        end.succeeded().said("100 iters in ");
    }
    let left = place.left();
    assert!(left.is_empty(), "seed {seed}: left in the fabric: {left:?}");
}

#[test]
#[ignore = "needs perftest and ibverbs-utils"]
fn who_is_not_killed_finishes_and_who_has_lost_its_peer_is_told() {
    for seed in 1..=u64::from(scale()) {
        round(seed);
    }
}
