use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::*;

/// A slice that is longer than a test may take, so that a lost wake-up is a hang.
const HOUR: Duration = Duration::from_secs(3600);

/// The number of messages to a consumer, and the word on which the consumer sleeps.
#[derive(Default)]
struct Mail {
    sleep: Sleep,
    published: AtomicU64,
}

impl Mail {
    fn publish(&self) {
        self.published.fetch_add(1, Ordering::Release);
        self.sleep.wake();
    }

    fn sent(&self) -> u64 {
        self.published.load(Ordering::Relaxed)
    }

    fn beyond(&self, taken: u64) -> Counter<'_> {
        Counter {
            mail: self,
            taken,
            slice: HOUR,
            checks: 0,
            gives_up_after: 0,
        }
    }
}

struct Counter<'a> {
    mail: &'a Mail,
    taken: u64,
    slice: Duration,
    checks: u32,
    gives_up_after: u32,
}

impl Watch for Counter<'_> {
    fn words(&mut self, show: &mut dyn FnMut(Word<'_>)) {
        show(self.mail.sleep.word());
    }
    fn look(&mut self, _: bool) -> bool {
        self.mail.published.load(Ordering::Acquire) > self.taken
    }
    fn slice(&mut self) -> Duration {
        self.slice
    }
    fn check(&mut self) -> bool {
        self.checks += 1;
        self.checks == self.gives_up_after
    }
}

fn wait_for_all(counters: &mut [Counter<'_>], timeout: Option<Duration>) -> bool {
    wait(
        counters
            .iter_mut()
            .map(|counter| counter as &mut dyn Sleeper),
        timeout,
    )
}

/// Runs threads until all have ended, and fails if they hang: `published` returns the number of
/// messages that they have sent, which must grow.
fn play<const N: usize>(published: impl Fn() -> u64, players: [Box<dyn FnOnce() + Send>; N]) {
    let players = players.map(std::thread::spawn);
    let (mut before, mut progress) = (0, Instant::now());
    while !players.iter().all(|player| player.is_finished()) {
        let now = published();
        if now != before {
            (before, progress) = (now, Instant::now());
        }
        assert!(
            progress.elapsed() < Duration::from_secs(60),
            "a wake-up was lost"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(players.into_iter().all(|player| player.join().is_ok()));
}

#[test]
fn timeout_ends_a_wait_and_a_zero_one_only_looks() {
    let mails: [Mail; 2] = Default::default();
    for count in [1, 2] {
        let mut watches: Vec<_> = mails
            .iter()
            .take(count)
            .map(|mail| mail.beyond(0))
            .collect();
        assert!(!wait_for_all(&mut watches, Some(Duration::ZERO)));
        assert!(watches.iter().all(|watch| watch.checks == 0));
        watches[0].slice = Duration::from_millis(1);
        assert!(!wait_for_all(&mut watches, Some(Duration::from_millis(5))));
        assert!(
            watches.iter().all(|watch| watch.checks > 0),
            "the shortest slice is that of all"
        );
    }
    mails[1].publish();
    assert!(wait_for_all(
        &mut [mails[0].beyond(0), mails[1].beyond(0)],
        Some(Duration::ZERO)
    ));
    assert!(
        !wait([], Some(Duration::from_millis(1))),
        "nothing to wait for but the time"
    );
}

#[test]
fn what_wakes_nobody_is_found_after_a_slice() {
    let mails: [Mail; 2] = Default::default();
    for count in [1, 2] {
        let mut watches: Vec<_> = mails
            .iter()
            .take(count)
            .map(|mail| mail.beyond(0))
            .collect();
        let last = watches.last_mut().unwrap();
        (last.slice, last.gives_up_after) = (Duration::from_millis(1), 3);
        assert!(wait_for_all(&mut watches, None));
        assert_eq!(watches.last().unwrap().checks, 3);
    }
}

#[test]
fn flags_are_down_when_nobody_sleeps() {
    let mails: [Mail; 3] = Default::default();
    assert!(!wait_for_all(
        &mut mails.each_ref().map(|mail| mail.beyond(0)),
        Some(Duration::from_millis(1))
    ));
    mails.iter().for_each(Mail::publish);
    assert!(
        mails
            .iter()
            .all(|mail| mail.sleep.wakes.load(Ordering::Relaxed) == crate::sync::FIRST),
        "a producer made a system call for nobody"
    );
}

/// A [`Due`] ends a wait when its time has passed, and a time of 0 ends the wait at once.
#[test]
fn what_is_due_ends_a_wait_when_its_time_has_come() {
    let mail = Mail::default();
    for due in [Duration::ZERO, Duration::from_millis(1)] {
        assert!(wait(
            [&mut mail.beyond(0) as &mut dyn Sleeper, &mut Due(due)],
            None
        ));
    }
    assert!(!wait(
        [&mut Due(Duration::MAX) as &mut dyn Sleeper],
        Some(Duration::from_millis(1))
    ));
    let mut looks = 0;
    let mut second_look = Look(|| {
        looks += 1;
        looks == 2
    });
    assert!(
        wait([&mut second_look as &mut dyn Sleeper, &mut Due(HOUR)], None),
        "seen behind the barrier"
    );
}

/// Sends one message at a time, through any of `count` words. One system call takes at most 128
/// words; the sleeper checks the further words by itself.
#[test]
fn any_number_of_words_can_be_slept_on() {
    for count in [2, 3, 128, 200] {
        let mails: Arc<[Mail]> = (0..count).map(|_| Mail::default()).collect();
        let taken: Arc<Mail> = Arc::default();
        let order = [count - 1, 0, count / 2, 1];
        let (also_mails, also_taken) = (Arc::clone(&mails), Arc::clone(&taken));
        let published = Arc::clone(&taken);
        play(
            || published.sent(),
            [
                Box::new(move || {
                    let mut watches: Vec<_> = mails.iter().map(|mail| mail.beyond(0)).collect();
                    for which in order {
                        assert!(wait_for_all(&mut watches, None));
                        assert!(watches[which].look(false), "{which} of {count}");
                        watches[which].taken += 1;
                        taken.publish();
                    }
                }),
                Box::new(move || {
                    for (round, which) in (0..).zip(order) {
                        // The sleeper usually falls asleep in this time.
                        std::thread::sleep(Duration::from_millis(5));
                        also_mails[which].publish();
                        assert!(wait_for_all(&mut [also_taken.beyond(round)], None));
                    }
                }),
            ],
        );
    }
}

#[test]
fn two_that_wait_for_each_other_lose_no_wake_up() {
    const ROUNDS: u64 = 20_000;
    let ends: Arc<[Mail; 2]> = Arc::default();
    let player = |own: usize| -> Box<dyn FnOnce() + Send> {
        let ends = Arc::clone(&ends);
        Box::new(move || {
            for round in 0..ROUNDS {
                if own == 0 {
                    ends[1].publish();
                }
                assert!(wait_for_all(&mut [ends[own].beyond(round)], None));
                if own == 1 {
                    ends[0].publish();
                }
            }
        })
    };
    play(|| ends.iter().map(Mail::sent).sum(), [player(0), player(1)]);
}

/// Each of three threads waits for a message of both other threads at once. When it has one of
/// each, it sends a message to each.
#[test]
fn three_that_wait_for_two_each_lose_no_wake_up() {
    const ROUNDS: u64 = 20_000;
    // Indexed by receiver, then by sender.
    let mails: Arc<[[Mail; 3]; 3]> = Arc::default();
    let player = |own: usize| -> Box<dyn FnOnce() + Send> {
        let mails = Arc::clone(&mails);
        let others = [(own + 1) % 3, (own + 2) % 3];
        Box::new(move || {
            for round in 0..ROUNDS {
                others.iter().for_each(|other| mails[*other][own].publish());
                let mut missing = others.to_vec();
                while !missing.is_empty() {
                    let mut watches: Vec<_> = missing
                        .iter()
                        .map(|other| mails[own][*other].beyond(round))
                        .collect();
                    assert!(wait_for_all(&mut watches, None));
                    missing.retain(|other| !mails[own][*other].beyond(round).look(false));
                }
            }
        })
    };
    play(
        || mails.iter().flatten().map(Mail::sent).sum(),
        [player(0), player(1), player(2)],
    );
}

/// Two sleepers wait for one bell, each also for another condition.
#[test]
fn a_bell_is_heard_by_all_who_listen() {
    const RINGS: u64 = 2_000;
    #[derive(Default)]
    struct Steered {
        bell: Bell,
        phase: AtomicU64,
        seen: [Mail; 2],
        nothing: [Mail; 2],
    }
    let shared: Arc<Steered> = Arc::default();
    let listener = |own: usize| -> Box<dyn FnOnce() + Send> {
        let shared = Arc::clone(&shared);
        Box::new(move || {
            let mut seen = 0;
            while seen < RINGS {
                let mut heard = shared.bell.listen();
                let phase = shared.phase.load(Ordering::Acquire);
                if phase > seen {
                    seen = phase;
                    shared.seen[own].publish();
                } else {
                    assert!(wait(
                        [
                            &mut heard as &mut dyn Sleeper,
                            &mut shared.nothing[own].beyond(0)
                        ],
                        None
                    ));
                }
            }
        })
    };
    let ringer = {
        let shared = Arc::clone(&shared);
        Box::new(move || {
            for ring in 0..RINGS {
                shared.phase.store(ring + 1, Ordering::Release);
                shared.bell.ring();
                shared
                    .seen
                    .iter()
                    .for_each(|seen| assert!(wait_for_all(&mut [seen.beyond(ring)], None)));
            }
        })
    };
    play(
        || shared.phase.load(Ordering::Relaxed),
        [listener(0), listener(1), ringer],
    );
}

/// A waker that counts its calls.
#[derive(Default)]
struct Count(AtomicU64);

impl std::task::Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

fn counted() -> (Arc<Count>, std::task::Waker) {
    let count = Arc::<Count>::default();
    (Arc::clone(&count), count.into())
}

#[test]
fn one_that_rests_is_woken_once_by_what_is_published_after() {
    let mails: [Mail; 2] = Default::default();
    let (count, waker) = counted();
    let rest_beyond = |taken: [u64; 2]| {
        let mut counters = [mails[0].beyond(taken[0]), mails[1].beyond(taken[1])];
        counters[1].slice = Duration::from_secs(1);
        rest(
            counters
                .iter_mut()
                .map(|counter| counter as &mut dyn Sleeper),
            &waker,
        )
    };
    mails[1].publish();
    assert_eq!(rest_beyond([0, 0]), None, "there is something");
    mails[0].publish();
    assert_eq!(count.0.load(Ordering::Relaxed), 0, "it does not rest");
    assert_eq!(rest_beyond([1, 1]), Some(Duration::from_secs(1)));
    for n in 1..=3 {
        mails.iter().for_each(Mail::publish);
        // The waker is called once for each word.
        assert_eq!(count.0.load(Ordering::Relaxed), 2 * n);
        mails.iter().for_each(Mail::publish);
        assert_eq!(
            count.0.load(Ordering::Relaxed),
            2 * n,
            "it was woken already"
        );
        assert!(rest_beyond([1 + 2 * n; 2]).is_some());
    }
    // The next consumer of a word takes the place of the last.
    let (next, next_waker) = counted();
    assert!(rest([&mut mails[0].beyond(7) as &mut dyn Sleeper], &next_waker).is_some());
    mails[0].publish();
    assert_eq!(
        (
            count.0.load(Ordering::Relaxed),
            next.0.load(Ordering::Relaxed)
        ),
        (6, 1)
    );
    // Other threads do not know the wakers of this thread: for them, sleeping and waking in the
    // kernel still work.
    std::thread::scope(|scope| scope.spawn(|| mails[1].publish()).join()).unwrap();
    assert_eq!(count.0.load(Ordering::Relaxed), 6);
    assert!(wait_for_all(&mut [mails[1].beyond(7)], None));
}

#[test]
fn all_who_rest_on_a_bell_are_woken_once_by_a_ring() {
    let bell = Bell::default();
    let listeners = [counted(), counted()];
    for (_, waker) in listeners.iter().chain(&listeners) {
        assert_eq!(
            rest([&mut bell.listen() as &mut dyn Sleeper], waker),
            Some(Duration::MAX)
        );
    }
    bell.ring();
    bell.ring();
    assert!(
        listeners
            .iter()
            .all(|(count, _)| count.0.load(Ordering::Relaxed) == 1)
    );
}
