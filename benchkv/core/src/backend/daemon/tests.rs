//! Two ranks in one thread, on a clock that the test sets.

use std::cell::Cell;
use std::time::Duration;

use super::super::composed::Composed;
use super::super::paths::ClientPaths;
use super::super::{Paths, Records, Workers};
use super::*;

use crate::operation::Operation;
use crate::policy::PolicyOptions;
use crate::tests::{self as testing, Scratch, topology};
use crate::topology::{Backend, Carrier, Peer};

/// A job in which rank 0 calls, and the other ranks answer.
struct Job {
    asking: KvDaemon,
    answering: Vec<KvDaemon>,
    client: ClientPaths,
    /// The clients of the other ranks.
    others: Vec<ClientPaths>,
    now_ns: Cell<u64>,
    _dir: Scratch,
}

impl Job {
    /// Makes a job whose `policies` apply to rank 0.
    fn new(ranks: usize, policies: &str) -> Self {
        let dir = Scratch::new();
        let job = testing::job(topology(Backend::Delegation, Carrier::Copyrpc, ranks, 1, 1));
        let open = |rank: usize| {
            let policies = if rank == 0 {
                testing::policies(policies)
            } else {
                PolicyOptions::default()
            };
            let backend = Composed::new(
                &crate::job::Job {
                    policies,
                    ..job.clone()
                },
                dir.site(rank),
            )
            .unwrap();
            let daemon = backend.open_daemon(0).unwrap();
            (daemon, backend.open_client_on(0, None).unwrap())
        };
        let mut ends: Vec<(KvDaemon, ClientPaths)> = (0..ranks).map(open).collect();
        let records: Vec<Records> = ends
            .iter_mut()
            .map(|(daemon, _)| daemon.records())
            .collect();
        for (rank, (daemon, _)) in ends.iter_mut().enumerate() {
            let of_peer = |from: usize| {
                let (_, bytes) = records[from]
                    .iter()
                    .find(|(to, _)| to.rank == rank)
                    .unwrap();
                (
                    Peer {
                        rank: from,
                        worker: Worker::Daemon(0),
                    },
                    bytes.clone(),
                )
            };
            let mine: Records = (0..ranks)
                .filter(|from| *from != rank)
                .map(of_peer)
                .collect();
            daemon.connect(&mine).unwrap();
        }
        let mut ends = ends.into_iter();
        let (asking, client) = ends.next().unwrap();
        let (answering, others) = ends.unzip();
        Self {
            asking,
            answering,
            client,
            others,
            now_ns: Cell::new(1_000_000),
            _dir: dir,
        }
    }

    fn ask(&mut self, rank: u32, token: u32) {
        self.client
            .issue(
                Request::get(rank, u64::from(token)),
                Operation::numbered(token),
            )
            .unwrap();
    }

    /// Does a round, with the polls that are added to it.
    fn step(&mut self) -> Round {
        loop {
            let round = self.asking.step(|| self.now_ns.get()).unwrap();
            if !round.is_part {
                return round;
            }
        }
    }

    fn advance(&self, ns: u64) {
        self.now_ns.set(self.now_ns.get() + ns);
    }

    /// Steps the other ranks' daemons ten times, which serves all requests.
    fn let_answer(&mut self) {
        for _ in 0..10 {
            for daemon in &mut self.answering {
                daemon
                    .step(|| unreachable!("no policy asks for the time"))
                    .unwrap();
            }
        }
    }

    /// Returns the operations of the client that have ended since the last call.
    fn ended(&mut self) -> Vec<u32> {
        let mut ended = Vec::new();
        self.client
            .poll(|operation, response| {
                assert!(response.is_some(), "{operation:?}");
                ended.push(operation.access);
            })
            .unwrap();
        ended.sort_unstable();
        ended
    }

    /// Makes calls, and lets the answers arrive at the daemon.
    fn fetch(&mut self, rank: u32, tokens: std::ops::Range<u32>) {
        tokens.for_each(|token| self.ask(rank, token));
        self.step();
        self.let_answer();
        self.step();
    }
}

#[test]
fn without_a_policy_an_answer_goes_on_in_the_step_that_finds_it_and_no_clock_is_read() {
    let mut job = Job::new(2, "");
    job.ask(1, 5);
    let round = job.asking.step(|| unreachable!("nobody asks")).unwrap();
    assert_eq!((round.moved, round.outstanding), (1, 1));
    job.let_answer();
    let round = job.asking.step(|| unreachable!("nobody asks")).unwrap();
    assert_eq!(
        (round.moved, round.cqes > 0, round.outstanding),
        (1, true, 0)
    );
    assert_eq!(job.ended(), [5]);
    assert!(job.asking.policy().is_none());
}

#[test]
fn a_request_that_was_deferred_is_served_before_a_later_one_for_its_key() {
    let mut job = Job::new(2, "--coalesce-rtt-us 50");
    job.ask(1, 5);
    job.step();
    let put = |job: &mut Job, value| {
        job.others[0]
            .issue(Request::put(0, 7, value), Operation::numbered(0))
            .unwrap();
        job.let_answer();
        job.step();
        job.asking.store.apply(&Request::get(0, 7)).outcome()
    };
    assert_eq!(
        put(&mut job, 1),
        Some(Outcome::NotFound),
        "it waits for answers"
    );
    assert_eq!(job.ended(), [5]);
    assert_eq!(
        put(&mut job, 2),
        Some(Outcome::GetOk { value: 2 }),
        "in their order"
    );
    assert_eq!(
        put(&mut job, 3),
        Some(Outcome::GetOk { value: 3 }),
        "at once"
    );
}

#[test]
fn a_held_answer_is_released_when_there_are_enough() {
    let mut job = Job::new(2, "--hold 50us");
    job.fetch(1, 0..1);
    assert_eq!((job.ended(), job.asking.gauges().held), (vec![], 1));
    job.fetch(1, 1..2);
    assert_eq!(
        (job.ended(), job.asking.gauges().held),
        (vec![0, 1], 0),
        "as many as ranks"
    );
    assert_eq!(job.asking.gauges().hold_ns, 0, "such batches need no hold");
    let report = job.asking.policy().unwrap();
    assert_eq!(
        (report.held, report.full_releases, report.late_releases),
        (2, 1, 0)
    );
    job.fetch(1, 2..3);
    assert_eq!(
        (job.ended(), job.asking.gauges().hold_ns),
        (vec![2], 50_000),
        "a smaller one does"
    );
}

#[test]
fn a_held_answer_is_released_by_a_step_without_work_when_its_time_has_come() {
    for (name, policy) in [
        ("late", "--hold 50us"),
        ("late-adaptive", "--hold adaptive:50us"),
    ] {
        let mut job = Job::new(4, policy);
        job.fetch(1, 0..1);
        job.advance(49_999);
        assert_eq!((job.step().moved, job.ended()), (0, vec![]), "{name}");
        job.advance(1);
        assert_eq!((job.step().moved, job.ended()), (1, vec![0]), "{name}");
        assert_eq!(job.asking.policy().unwrap().late_releases, 1);
    }
}

/// A daemon does not sleep while a round would do something, but sleeps while only other ranks have
/// work.
#[test]
fn a_daemon_that_holds_answers_does_not_sleep() {
    let mut job = Job::new(2, "--hold 50us");
    let slice = |daemon: &mut KvDaemon| {
        let mut slice = None;
        daemon.with_watch(&mut |watch| slice = Some(watch.slice()));
        slice.unwrap()
    };
    assert!(slice(&mut job.asking) > Duration::ZERO);
    job.fetch(1, 0..1);
    assert_eq!(
        (job.asking.gauges().held, slice(&mut job.asking)),
        (1, Duration::ZERO)
    );
    job.advance(50_000);
    job.step();
    assert!(job.asking.gauges().held == 0 && slice(&mut job.asking) > Duration::ZERO);
}

/// With all policies at once, all requests end after the last call.
#[test]
fn a_load_that_stops_drains() {
    let policies = "--hold adaptive --coalesce-rtt-us 20 --poll-budget 3 --flush-every 64";
    let mut job = Job::new(4, &format!("{policies} --batch-window completion:1"));
    for token in 0..30 {
        job.ask(1 + token % 3, token);
    }
    let mut ended = Vec::new();
    // Bounded: 1 ms in steps of 1 us.
    for round in 0..1000 {
        job.advance(1_000);
        job.step();
        if round % 4 == 0 {
            job.let_answer();
        }
        ended.extend(job.ended());
    }
    ended.sort_unstable();
    assert_eq!(ended, (0..30).collect::<Vec<_>>());
    let Sample {
        outstanding,
        backlog,
        held,
        ..
    } = job.asking.gauges();
    assert_eq!((outstanding, backlog, held), (0, 0, 0));
    let report = job.asking.policy().unwrap();
    assert!(
        report.held > 0 && report.extra_polls > 0 && report.gathering_rounds > 0,
        "{report:?}"
    );
}

#[test]
fn requests_wait_while_answers_gather() {
    let mut job = Job::new(2, "--coalesce-rtt-us 6");
    job.ask(1, 0);
    job.step();
    job.ask(1, 1);
    assert_eq!(
        job.step(),
        Round {
            outstanding: 1,
            ..Round::default()
        },
        "the ring is left alone"
    );
    job.advance(6_000);
    assert_eq!(
        job.step(),
        Round {
            moved: 1,
            outstanding: 2,
            ..Round::default()
        }
    );
    job.let_answer();
    job.step();
    assert_eq!(job.ended(), [0, 1]);
}

#[test]
fn a_flush_waits_for_rounds_with_work_or_one_without() {
    let mut job = Job::new(2, "--flush-every 3");
    let writes = |job: &mut Job| {
        job.step();
        job.asking.gauges().writes
    };
    let before = writes(&mut job);
    for (token, sent) in [(0, 0), (1, 0), (2, 1), (3, 1)] {
        job.ask(1, token);
        assert_eq!(writes(&mut job) - before, sent);
    }
    assert_eq!(
        writes(&mut job) - before,
        2,
        "nothing to do: what is there goes"
    );
}

#[test]
fn polls_are_added_until_one_finds_something() {
    let mut job = Job::new(2, "--poll-budget 5");
    job.step();
    assert_eq!(job.asking.policy().unwrap().extra_polls, 5);
    job.fetch(1, 0..1);
    let report = job.asking.policy().unwrap();
    assert_eq!((job.ended(), report.extra_polls), (vec![0], 10));
}

/// Answers that arrive in polls before the last one count in the round.
#[test]
fn polls_are_added_until_enough_completions() {
    for (budget, polls) in [("5:9", [5, 5]), ("5:1", [5, 0])] {
        let mut job = Job::new(2, &format!("--poll-budget {budget}"));
        job.step();
        let before = job.asking.policy().unwrap().extra_polls;
        job.ask(1, 0);
        job.step();
        job.let_answer();
        let asked = job.asking.policy().unwrap().extra_polls;
        let round = job.step();
        assert_eq!(
            [
                asked - before,
                job.asking.policy().unwrap().extra_polls - asked
            ],
            polls,
            "{budget}"
        );
        assert_eq!((round.moved, job.ended()), (1, vec![0]), "{budget}");
    }
}

/// With a window of one batch, the second batch waits for the first.
#[test]
fn the_batch_window_is_that_of_the_connections() {
    let mut job = Job::new(2, "--batch-window consumption:1");
    for token in 0..2 {
        job.ask(1, token);
        job.step();
    }
    let Sample {
        window_stalls,
        writes,
        ..
    } = job.asking.gauges();
    assert!(
        window_stalls > 0 && writes == 1,
        "{window_stalls} stalls, {writes} writes"
    );
    assert!(job.asking.transport().unwrap().counted.of("window_stalls") > 0);
}

/// If one batch may be in flight, the second batch waits until the peer has taken the first.
#[test]
fn the_batches_in_flight_are_those_of_the_connections() {
    for (options, most) in [("--batches-in-flight 1", 1), ("", 2)] {
        let mut job = Job::new(2, options);
        for token in 0..2 {
            job.ask(1, token);
            job.step();
        }
        assert_eq!(job.asking.gauges().writes, most, "{options}");
    }
}

/// Answers that are held when the policies cease to act are passed on, and the daemon holds no
/// answer until the policies act again.
#[test]
fn policies_that_rest_hold_nothing() {
    let mut job = Job::new(2, "--hold 100us");
    for (token, acts) in [(0, false), (1, true), (2, false)] {
        job.asking.act_on_policies(acts);
        job.ask(1, token);
        for _ in 0..8 {
            job.step();
            job.let_answer();
        }
        assert_eq!(job.asking.gauges().held, u64::from(acts), "{token}");
    }
    assert_eq!(job.ended(), [0, 1, 2]);
}

/// Correct clients send requests for other ranks through the daemon's ring, not through ipc.
/// `serve` executes the requests of ipc.
#[test]
fn a_request_for_another_rank_that_nothing_passes_on_is_refused() {
    let mut job = Job::new(2, "");
    let KvDaemon { store, plan, .. } = &mut job.asking;
    let outcomes =
        [0, 1, 2, u32::MAX].map(|rank| serve(store, plan, &Request::put(rank, 0, 7)).outcome());
    assert_eq!(
        outcomes,
        [
            Outcome::PutOk,
            Outcome::Refused,
            Outcome::Refused,
            Outcome::Refused
        ]
        .map(Some)
    );
}
