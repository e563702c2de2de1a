//! Runs many peers in one thread: a seed determines their order, and the clock is set by hand.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Wake, Waker};
use std::time::Duration;

use copyrpc_shm::clock::Clock;
use copyrpc_shm::sleep::{self, SLICE, Sleeper};

/// Maximum virtual time of one turn, which is a step of one actor, and of a wake-up.
const TURN_NS: u64 = 2_000;
const WAKE_NS: u64 = 500;

#[derive(Default)]
struct Woken(Mutex<Vec<usize>>);

struct Actor {
    number: usize,
    woken: Arc<Woken>,
}

impl Wake for Actor {
    fn wake(self: Arc<Self>) {
        self.woken.0.lock().unwrap().push(self.number);
    }
}

pub enum Turn {
    /// The actor has worked, and may have more to do.
    Did,
    /// The actor found nothing to do. If it sleeps, its next turn is after this time at the latest
    /// ([`Duration::MAX`]: there is no such limit).
    Idle(Duration),
    Done,
}

/// The time, and the record of all turns.
pub struct World {
    hands: Arc<AtomicU64>,
    pub random: fastrand::Rng,
    pub trace: Vec<(u64, u64)>,
    /// Number of turns, and number of turns that found nothing.
    pub turns: [usize; 2],
}

impl World {
    pub fn new(seed: u64) -> Self {
        // The clock does not start at 0, so that code that takes 0 for the start fails.
        let hands = Arc::new(AtomicU64::new(seed << 32));
        Self {
            hands,
            random: fastrand::Rng::with_seed(seed),
            trace: vec![],
            turns: [0; 2],
        }
    }

    pub fn clock(&self) -> Clock {
        Clock::by_hand(Arc::clone(&self.hands))
    }

    pub fn now_ns(&self) -> u64 {
        self.hands.load(Ordering::Relaxed)
    }

    pub fn note(&mut self, what: u64) {
        self.trace.push((self.now_ns(), what));
    }

    /// Gives turns to actors, in the order of their times, until an actor returns [`Turn::Done`].
    /// An idle actor sleeps on the sleeper that `rest` passes to its last argument.
    pub fn run<S>(
        &mut self,
        actors: usize,
        state: &mut S,
        mut turn: impl FnMut(&mut Self, &mut S, usize) -> Turn,
        mut rest: impl FnMut(&mut S, usize, &mut dyn FnMut(&mut dyn Sleeper)),
    ) {
        let woken = Arc::new(Woken::default());
        let wakers: Vec<_> = (0..actors)
            .map(|number| {
                Waker::from(Arc::new(Actor {
                    number,
                    woken: Arc::clone(&woken),
                }))
            })
            .collect();
        let mut due: Vec<u64> = (0..actors)
            .map(|_| self.now_ns() + self.random.u64(..TURN_NS))
            .collect();
        loop {
            let (actor, at) = due
                .iter()
                .copied()
                .enumerate()
                .min_by_key(|&(actor, at)| (at, actor))
                .unwrap();
            assert!(at < u64::MAX, "everybody rests forever");
            self.hands.fetch_max(at, Ordering::Relaxed);
            self.note(actor as u64);
            self.turns[0] += 1;
            let longest = match turn(self, state, actor) {
                Turn::Done => return,
                Turn::Did => None,
                Turn::Idle(longest) => {
                    self.turns[1] += 1;
                    let mut look_again = None;
                    rest(state, actor, &mut |sleeper| {
                        look_again = sleep::rest([sleeper], &wakers[actor])
                    });
                    look_again.map(|look_again| look_again.min(longest))
                }
            };
            let pause = longest.map_or_else(
                || self.random.u64(1..TURN_NS),
                |longest| u64::try_from(longest.as_nanos()).unwrap_or(u64::MAX),
            );
            due[actor] = self.now_ns().saturating_add(pause);
            for actor in std::mem::take(&mut *woken.0.lock().unwrap()) {
                due[actor] = due[actor].min(self.now_ns() + self.random.u64(1..WAKE_NS));
            }
        }
    }
}

/// Returns the number of descriptors of this process, and whether a file in shared memory is
/// mapped.
pub fn files() -> (usize, bool) {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    (
        std::fs::read_dir("/proc/self/fd").unwrap().count(),
        maps.contains("/dev/shm"),
    )
}

/// A run of a seed: its trace, the counts of the events that it reached (none may be 0), and the
/// turns.
pub type Run = (Vec<(u64, u64)>, Vec<usize>, [usize; 2]);

/// Runs three seeds, each twice, and checks that both runs are the same.
pub fn check(run: impl Fn(u64) -> Run) {
    static IS_ONLY: AtomicBool = AtomicBool::new(true);
    assert!(
        IS_ONLY.swap(false, Ordering::Relaxed),
        "descriptors are counted: one test to a process"
    );
    let before = files();
    let mut traces = vec![];
    for seed in 1..=3 {
        let (trace, seen, turns) = run(seed);
        assert!(!seen.contains(&0), "seed {seed} saw {seen:?}");
        // All waits ended by wake-ups and deadlines, none because a sleep reached its maximum
        // length, [`SLICE`]. Few turns find nothing: one for each time that an actor becomes idle.
        let took = Duration::from_nanos(trace.last().unwrap().0 - trace[0].0);
        assert!(took < SLICE, "seed {seed} took {took:?}");
        assert!(turns[1] * 2 <= turns[0] + 200, "seed {seed}: {turns:?}");
        assert_eq!(files(), before);
        assert!(
            run(seed).0 == trace,
            "seed {seed} is not the same run twice"
        );
        traces.push(trace);
    }
    assert!(
        traces[0]
            .iter()
            .map(|entry| entry.1)
            .ne(traces[1].iter().map(|entry| entry.1))
    );
}
