use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use copyrpc_shm::sleep::{Due, Sleeper, Watch};

use super::*;
use crate::backend::Endpoints;
use crate::message::Response;
use crate::pace::{Arrivals, Pace};
use crate::store::Shard;
use crate::workload::{Distribution, Workload};

/// Two stores with one queue, which holds at most `room` requests. The stores execute requests in
/// order, and answer them in reverse order.
#[derive(Clone)]
struct Loopback {
    stores: Rc<RefCell<[Shard; 2]>>,
    queue: Rc<RefCell<VecDeque<(Operation, Request)>>>,
    room: usize,
    serve: Rc<Cell<usize>>,
    /// Result of all operations; `None`: the stores' answers.
    ending: Option<Option<Response>>,
    /// Number of requests in the queue that were flushed.
    flushed: Rc<Cell<usize>>,
    /// The clock, if the thread does not run for [`STALL_NS`] at the beginning of each poll.
    stalls: Option<Rc<Cell<u64>>>,
}

const STALL_NS: u64 = 4_000_000;

impl Endpoints for Loopback {}

impl Sleeper for Loopback {
    fn with_watch(&mut self, then: &mut dyn FnMut(&mut dyn Watch)) {
        then(&mut Due::now());
    }
}

impl Paths for Loopback {
    fn issue(&mut self, request: Request, note: Operation) -> Result<(), IssueError> {
        let mut queue = self.queue.borrow_mut();
        if queue.len() == self.room {
            return Err(IssueError::Full);
        }
        queue.push_back((note, request));
        Ok(())
    }

    fn poll(
        &mut self,
        mut ended: impl FnMut(Operation, Option<Response>),
    ) -> Result<(), BackendError> {
        self.stalls
            .iter()
            .for_each(|clock| clock.set(clock.get() + STALL_NS));
        let mut queue = self.queue.borrow_mut();
        let count = queue.len().min(self.serve.get());
        // Executed in order, answered in reverse.
        let served: Vec<_> = queue
            .drain(..count)
            .map(|(operation, request)| {
                let response = self.stores.borrow_mut()[request.rank() as usize].apply(&request);
                (operation, self.ending.unwrap_or(Some(response)))
            })
            .collect();
        served
            .into_iter()
            .rev()
            .for_each(|(operation, response)| ended(operation, response));
        Ok(())
    }

    fn flush(&mut self) -> Result<(), BackendError> {
        self.flushed.set(self.queue.borrow().len());
        Ok(())
    }
}

const WORKLOAD: Workload = Workload {
    ranks: 2,
    clients: 1,
    key_range: 50,
    value_bytes: 8,
    empty: true,
    read_ratio: 0.5,
    remote_ratio: 0.25,
    distribution: Distribution::Uniform,
    verify: true,
    seed: 3,
    accesses: crate::workload::PATTERN_LEN,
};

fn loopback(room: usize) -> Loopback {
    let keys = WORKLOAD.store_keys();
    Loopback {
        stores: Rc::new(RefCell::new([
            Shard::new(0, 1, keys),
            Shard::new(0, 1, keys),
        ])),
        queue: Rc::default(),
        room,
        serve: Rc::new(Cell::new(usize::MAX)),
        ending: None,
        flushed: Rc::default(),
        stalls: None,
    }
}

fn client(paths: Loopback, corrupt_one: bool) -> Client<Loopback> {
    paced(paths, corrupt_one, None)
}

/// Makes a client with an open loop of `per_us` operations per microsecond.
fn open_loop(paths: Loopback, per_us: f64) -> Client<Loopback> {
    paced(
        paths,
        false,
        Some(Pace {
            rate: per_us * 1e6,
            arrivals: Arrivals::Even,
        }),
    )
}

fn paced(paths: Loopback, corrupt_one: bool, pace: Option<Pace>) -> Client<Loopback> {
    of_spec(paths, corrupt_one, pace, None)
}

fn of_spec(
    paths: Loopback,
    corrupt_one: bool,
    pace: Option<Pace>,
    ops: Option<u64>,
) -> Client<Loopback> {
    let schedule = pace.map(|pace| pace.schedule(0, 1, WORKLOAD.seed));
    let pattern = WORKLOAD.pattern(0, 0);
    let verifier = Some(Verifier::new(0, 2, WORKLOAD.accesses, pattern.read_keys));
    Client::new(
        ClientSpec {
            rank: 0,
            queue_depth: 8,
            ops,
            runs: 2,
            is_frugal: false,
            pattern,
            schedule,
            verifier,
            corrupt_one,
        },
        paths,
    )
}

/// Steps the client `count` times in a phase, with a clock that advances 100 ns per reading.
fn steps(client: &mut Client<Loopback>, clock: &Cell<u64>, phase: Phase, count: usize) {
    for _ in 0..count {
        client
            .step(phase, || clock.replace(clock.get() + 100))
            .unwrap();
    }
}

/// Steps the client until the clock is at `end_ns`.
fn steps_until(client: &mut Client<Loopback>, clock: &Cell<u64>, phase: Phase, end_ns: u64) {
    while clock.get() < end_ns {
        steps(client, clock, phase, 1);
    }
}

fn ended(window: &Window) -> u64 {
    window.local.count() + window.remote.count()
}

/// Returns the sum of all latencies, to the precision of the histograms, in ns.
fn latency_sum_ns(window: &Window) -> f64 {
    window.local.sum_ns() + window.remote.sum_ns()
}

#[test]
fn a_stall_before_the_poll_is_in_the_latency_of_all_that_waited() {
    let clock = Rc::new(Cell::new(0));
    let mut client = client(
        Loopback {
            stalls: Some(Rc::clone(&clock)),
            ..loopback(8)
        },
        false,
    );
    steps(&mut client, &clock, Phase::Window(0), 10);
    let readings = |client: &mut Client<Loopback>| {
        let count = Cell::new(0);
        client
            .step(Phase::Between, || {
                clock.replace(clock.get() + 100 * count.replace(count.get() + 1).min(1))
            })
            .unwrap();
        count.get()
    };
    assert_eq!(
        readings(&mut client),
        2,
        "one of them for the ends and the issues"
    );
    drain(&mut client, &clock);
    let report = client.report(WorkerReport::default());
    let window = &report.windows[0];
    let of = [
        &window.local.gets,
        &window.local.puts,
        &window.remote.gets,
        &window.remote.puts,
    ];
    let least = of
        .map(|histogram| histogram.summary().min)
        .into_iter()
        .min();
    assert!(
        ended(window) == 72 && least > Some(STALL_NS * 99 / 100),
        "{least:?} of {}",
        ended(window)
    );
    let apart = latency_sum_ns(window) + window.carried_ns as f64 - window.outstanding_ns as f64;
    assert!(
        apart.abs() < 0.01 * window.outstanding_ns as f64,
        "Little's law: {apart} of {}",
        window.outstanding_ns
    );
}

fn drain(client: &mut Client<Loopback>, clock: &Cell<u64>) {
    let drained =
        (0..100).any(|_| client.step(Phase::Drain, || clock.get()).unwrap() == Step::Drained);
    assert!(drained);
}

#[test]
fn every_operation_ends_once_and_windows_hold_what_ended_in_them() {
    let (clock, mut client) = (Cell::new(1), client(loopback(100), false));
    steps(&mut client, &clock, Phase::Ready, 3);
    assert_eq!(client.book.counts.issued, 0);
    steps(&mut client, &clock, Phase::WarmUp, 5);
    steps(&mut client, &clock, Phase::Window(0), 10_000);
    steps(&mut client, &clock, Phase::Between, 5);
    steps(&mut client, &clock, Phase::Window(1), 20_000);
    drain(&mut client, &clock);
    let report = client.report(WorkerReport::default());
    assert_eq!(report.counts.issued, report.counts.completed);
    assert_eq!((report.counts.errors, report.outstanding), (0, 0));
    assert_eq!(
        report.windows.iter().map(ended).collect::<Vec<_>>(),
        [80_000, 160_000]
    );
    let remote = report.windows[0].remote.count() as f64 / 80_000.0;
    assert!((remote - 0.25).abs() < 0.02, "{remote}");
    // Half of the shared accesses are reads, and so are 8 of 16 private accesses.
    for kinds in [&report.windows[0].local, &report.windows[1].remote] {
        let gets = kinds.gets.count() as f64 / kinds.count() as f64;
        assert!((gets - 0.5).abs() < 0.02, "{gets}");
    }
    let missed = report
        .windows
        .iter()
        .map(|window| window.not_found)
        .sum::<u64>();
    assert!(
        missed > 0 && missed <= report.counts.not_found,
        "{missed} of {:?}",
        report.counts
    );
    let verdict = report.verdict.unwrap();
    assert_eq!((verdict.failures, verdict.first), (0, None));
    assert!(verdict.issued > 80_000);
}

/// The client also ends by itself if requests are refused for lack of room, and in an open loop.
#[test]
fn a_client_with_a_number_of_operations_ends_by_itself_when_they_have_ended() {
    for (ops, room, pace) in [
        (1, 100, None),
        (1000, 100, None),
        (1000, 3, None),
        (
            50,
            1,
            Some(Pace {
                rate: 1e6,
                arrivals: Arrivals::Even,
            }),
        ),
    ] {
        let clock = Cell::new(1);
        let mut client = of_spec(loopback(room), false, pace, Some(ops));
        let end = (0..10_000).find(|_| {
            client
                .step(Phase::Window(0), || clock.replace(clock.get() + 100))
                .unwrap()
                == Step::Drained
        });
        assert!(end.is_some(), "{ops}, {room}");
        let ended_ns = clock.get();
        steps(&mut client, &clock, Phase::Window(0), 100);
        let report = client.report(WorkerReport::default());
        let counts = report.counts;
        assert_eq!(
            (
                counts.issued,
                counts.completed,
                report.outstanding,
                ended(&report.windows[0])
            ),
            (ops, ops, 0, ops)
        );
        assert!(
            report.windows[0].ended_ns <= ended_ns,
            "its window is as long as it was busy"
        );
    }
}

/// Little's law holds to the precision of the histograms, for any length of the window and any
/// unevenness of the service.
#[test]
fn littles_law_holds_in_a_window() {
    for (room, served, count) in [
        (100, usize::MAX, 10_000),
        (100, 1, 40),
        (3, 2, 30),
        (100, 0, 5),
    ] {
        for per_us in [None, Some(3.0), Some(300.0)] {
            let (paths, clock) = (loopback(room), Cell::new(1));
            let mut client = per_us.map_or_else(
                || client(paths.clone(), false),
                |per_us| open_loop(paths.clone(), per_us),
            );
            steps(&mut client, &clock, Phase::WarmUp, 5);
            paths.serve.set(served);
            steps(&mut client, &clock, Phase::Window(0), count);
            paths.serve.set(usize::MAX);
            steps(&mut client, &clock, Phase::Between, 1);
            let report = client.report(WorkerReport::default());
            let window = &report.windows[0];
            let (measured, carried) = (window.outstanding_ns as f64, window.carried_ns as f64);
            let computed = latency_sum_ns(window) - window.open_loop.held_ns as f64 + carried;
            // The histogram's error for long waits is a thousandth.
            let precision = 0.01 * measured + 0.001 * window.open_loop.held_ns as f64;
            assert!(
                (measured - computed).abs() < precision,
                "{served} served: {measured}, {computed} of which {carried}"
            );
        }
    }
}

#[test]
fn an_open_loop_starts_what_is_due_and_nothing_else() {
    let (clock, mut client) = (Cell::new(1), open_loop(loopback(100), 1.0));
    steps(&mut client, &clock, Phase::Ready, 3);
    let origin_ns = clock.get();
    // The window begins and ends 250 ns after an intended start, when the operation has ended.
    steps_until(&mut client, &clock, Phase::WarmUp, origin_ns + 10_450);
    steps_until(&mut client, &clock, Phase::Window(0), origin_ns + 1_010_450);
    steps(&mut client, &clock, Phase::Between, 1);
    let report = client.report(WorkerReport::default());
    let window = &report.windows[0];
    assert_eq!(
        (report.counts.issued, report.counts.completed),
        (1011, 1011),
        "one at once, then one each microsecond"
    );
    assert_eq!((ended(window), window.open_loop.due), (1000, 1000));
    assert_eq!(window.open_loop.backlog, 0);
    assert_eq!(report.windows[1].open_loop.due, 0);
    let longest = [&window.local.gets, &window.local.puts].map(|all| all.summary().max);
    assert!(longest.iter().all(|max| *max < 500), "{longest:?}");
}

/// A stall delays all operations due in it, not only the few that were outstanding.
#[test]
fn latency_counts_from_the_intended_start_through_a_stall() {
    const STALL_NS: u64 = 100_000;
    let paths = loopback(100);
    let (clock, mut client) = (Cell::new(1), open_loop(paths.clone(), 1.0));
    steps(&mut client, &clock, Phase::Window(0), 1);
    paths.serve.set(0);
    steps_until(&mut client, &clock, Phase::Window(0), STALL_NS);
    assert_eq!(
        (client.book.in_flight(), client.book.room()),
        (8, 0),
        "the queue depth bounds what is outstanding"
    );
    paths.serve.set(usize::MAX);
    steps_until(&mut client, &clock, Phase::Window(0), 2 * STALL_NS);
    steps(&mut client, &clock, Phase::Between, 1);
    let report = client.report(WorkerReport::default());
    let window = &report.windows[0];
    assert!(
        ended(window).abs_diff(200) <= 1 && window.open_loop.backlog <= 1,
        "the backlog was worked off: {}",
        ended(window)
    );
    // Of the 100 delayed operations the first waited for the whole stall, and the last not at all.
    let (expected, sum) = (100.0 * STALL_NS as f64 / 2.0, latency_sum_ns(window));
    assert!(
        (sum - expected).abs() < 0.05 * expected,
        "{sum}, not {expected}"
    );
    let held = window.open_loop.held_ns as f64;
    assert!(
        held > 0.8 * sum && held < sum,
        "{held} of {sum} before the issue"
    );
}

#[test]
fn a_rate_that_is_too_high_is_a_backlog_to_the_operation() {
    let paths = loopback(100);
    paths.serve.set(1);
    let (clock, mut client) = (Cell::new(1), open_loop(paths, 50.0));
    steps(&mut client, &clock, Phase::WarmUp, 100);
    steps(&mut client, &clock, Phase::Window(0), 1000);
    steps(&mut client, &clock, Phase::Between, 1);
    let schedule = client.book.spec.schedule.clone().unwrap();
    let report = client.report(WorkerReport::default());
    let OpenWindow { due, backlog, .. } = report.windows[0].open_loop;
    assert_eq!(ended(&report.windows[0]), 1000, "one each step");
    assert!(
        backlog > due - 1000,
        "{due} {backlog}: some were due before the window"
    );
    assert_eq!(
        schedule.due(report.windows[0].ended_ns),
        report.counts.issued + backlog - 1,
        "the step after the window issued one"
    );
}

#[test]
fn a_full_path_delays_requests_and_loses_none() {
    let (clock, mut client) = (Cell::new(1), client(loopback(3), false));
    steps(&mut client, &clock, Phase::WarmUp, 5000);
    drain(&mut client, &clock);
    assert_eq!(
        (
            client.book.in_flight(),
            client.book.room(),
            client.book.age_ns(clock.get())
        ),
        (0, 8, 0)
    );
    let report = client.report(WorkerReport::default());
    assert!(report.counts.issued >= 3 * 4999);
    assert_eq!(
        (report.counts.completed, report.outstanding),
        (report.counts.issued, 0)
    );
    assert_eq!(report.verdict.unwrap().failures, 0);
}

/// The refused request may be the only one, with no outstanding operation whose end would make
/// room.
#[test]
fn a_refused_request_that_takes_the_last_room_is_tried_again() {
    let (clock, mut client) = (Cell::new(1), client(loopback(0), false));
    client.book.spec.queue_depth = 1;
    steps(&mut client, &clock, Phase::WarmUp, 3);
    assert_eq!(
        (client.book.counts.issued, client.book.refused.is_some()),
        (0, true)
    );
    client.paths.room = 1;
    steps(&mut client, &clock, Phase::WarmUp, 3);
    assert!(client.book.counts.completed > 0);
}

#[test]
fn an_open_loop_reads_the_clock_once_while_nothing_is_due() {
    let (clock, mut client) = (Cell::new(1), open_loop(loopback(100), 1.0));
    steps(&mut client, &clock, Phase::WarmUp, 2);
    let before_ns = clock.get();
    steps(&mut client, &clock, Phase::WarmUp, 3);
    assert_eq!(clock.get() - before_ns, 3 * 100);
}

/// The client knows the time until its next operation is due or offered again, but not when an
/// outstanding operation ends.
#[test]
fn a_client_knows_until_when_it_has_nothing_to_do() {
    let paths = loopback(100);
    let (clock, mut client) = (Cell::new(1), open_loop(paths.clone(), 1.0));
    assert_eq!(client.until_due(1), Duration::MAX, "no load yet");
    steps(&mut client, &clock, Phase::WarmUp, 2);
    let next_ns = client
        .book
        .spec
        .schedule
        .as_ref()
        .unwrap()
        .due_ns(u64::MAX)
        .unwrap();
    assert_eq!(
        [next_ns - 700, next_ns, next_ns + 1].map(|now_ns| client.until_due(now_ns).as_nanos()),
        [700, 0, 0]
    );
    paths.serve.set(0);
    steps(&mut client, &clock, Phase::WarmUp, 1000);
    assert_eq!(
        client.until_due(clock.get()),
        Duration::MAX,
        "more is due, but as much as may be is outstanding"
    );
    // After one of the 8 requests is served, the queue holds 7, and has no room.
    client.paths.room = 7;
    paths.serve.set(1);
    steps(&mut client, &clock, Phase::WarmUp, 1);
    assert_eq!(client.until_due(clock.get()), RETRY_INTERVAL, "refused");
    paths.serve.set(100);
    drain(&mut client, &clock);
    assert_eq!(
        self::client(paths, false).until_due(1),
        Duration::MAX,
        "a closed loop waits for nothing but ends"
    );
}

#[test]
fn the_queue_depth_is_never_exceeded() {
    let paths = loopback(100);
    paths.serve.set(0);
    let (clock, mut client) = (Cell::new(1), client(paths.clone(), false));
    steps(&mut client, &clock, Phase::WarmUp, 50);
    assert_eq!(paths.queue.borrow().len(), 8);
    assert_eq!(
        paths.flushed.get(),
        8,
        "what a step has issued is sent before it ends"
    );
    let report = client.report(WorkerReport::default());
    assert_eq!(
        (report.counts.issued, report.outstanding),
        (8, 8),
        "what never ended is outstanding"
    );
}

#[test]
fn errors_and_nonsense_replies_are_counted_as_errors() {
    let put_to_get = Some(Response::new(Outcome::Refused));
    for ending in [None, put_to_get] {
        let paths = Loopback {
            ending: Some(ending),
            ..loopback(100)
        };
        let (clock, mut client) = (Cell::new(1), client(paths, false));
        steps(&mut client, &clock, Phase::Window(0), 100);
        drain(&mut client, &clock);
        let report = client.report(WorkerReport::default());
        assert!(report.counts.issued > 700);
        assert_eq!(
            (report.counts.errors, report.counts.completed),
            (report.counts.issued, 0)
        );
        assert_eq!(
            report.windows[0].errors,
            report.counts.errors - 8,
            "the last eight ended in the drain"
        );
    }
}

#[test]
fn one_corrupted_value_is_caught() {
    let (clock, mut client) = (Cell::new(1), client(loopback(100), true));
    steps(&mut client, &clock, Phase::WarmUp, 1000);
    assert_eq!(
        client
            .report(WorkerReport::default())
            .verdict
            .unwrap()
            .failures,
        1
    );
}
