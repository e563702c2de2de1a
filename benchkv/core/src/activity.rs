//! The activity of a daemon or client thread, in total and in each measured window: the rounds of
//! the thread's loop, and its connections to other ranks.

use serde::{Deserialize, Serialize};

use crate::backend::Endpoints;
use crate::counters::{Figures, Round, TransportReport};
use crate::phase::Phase;
use crate::policy::PolicyReport;
use crate::trace::recorder::TraceReport;

/// The activity of a daemon or client.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerReport {
    /// Number of rounds of the thread's loop.
    pub loops: u64,
    /// Number of these rounds that found nothing to do.
    pub empty_loops: u64,
    /// Report on the thread's connections to other ranks; `None` if the thread has none.
    pub transport: Option<TransportReport>,
    /// Activity of the thread in each measured window.
    pub windows: Vec<Activity>,
    /// Number of a daemon's unanswered requests to other ranks after the first round that sent any,
    /// and the time of that round.
    pub first_burst: Option<Burst>,
    /// Effects of a daemon's policies; `None` if the daemon has none.
    pub policy: Option<PolicyReport>,
    /// Time series of a daemon; `None` if the job records none.
    pub trace: Option<TraceReport>,
}

/// A number of requests under way at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Burst {
    /// Time since load began on the rank, in ns.
    pub at_ns: u64,
    /// Number of requests.
    pub outstanding: u64,
}

/// The activity of a thread in a time span.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Activity {
    /// Length of the span, in ns.
    pub span_ns: u64,
    /// Number of rounds of the thread's loop.
    pub loops: u64,
    /// Numbers of rounds that moved 0, 1, 2 to 10, 11 to 100, and more messages.
    pub loops_by_messages: [u64; 5],
    /// Number of messages that the rounds moved: messages of clients, of daemons of this rank, and
    /// of other ranks.
    pub moved: u64,
    /// Number of completions that the rounds of a daemon took.
    pub cqes: u64,
    /// Numbers of rounds of a daemon that took 0, 1, 2 to 10, 11 to 100, and more completions.
    pub loops_by_cqes: [u64; 5],
    /// Integral over time of the number of requests to other ranks that a daemon has sent and that
    /// are not answered yet, in requests times nanoseconds.
    pub outstanding_ns: u64,
    /// Maximum number of these requests, and the time at which it was reached.
    pub outstanding_peak: Burst,
    /// Report on the thread's connections: the increase of each counter in the span, and the
    /// maximum of the backlog in the span; `None` if the thread has no connections.
    pub transport: Option<TransportReport>,
}

const fn class_of(count: usize) -> usize {
    match count {
        0 => 0,
        1 => 1,
        2..=10 => 2,
        11..=100 => 3,
        _ => 4,
    }
}

/// The log of a thread's activity through the phases of the job.
#[derive(Debug)]
pub struct ActivityLog {
    phase: Phase,
    since_ns: u64,
    /// Number of requests to other ranks that were not answered at the end of the last round.
    /// `counted_to_ns` is the time up to which [`Activity::outstanding_ns`] includes them.
    outstanding: u64,
    counted_to_ns: u64,
    now: Activity,
    before: Option<TransportReport>,
    total: Activity,
    windows: Vec<Activity>,
    /// Time at which load began on the rank, in ns.
    load_ns: u64,
    first_burst: Option<Burst>,
}

impl ActivityLog {
    /// Makes the log of a thread that has done nothing yet, in a job of `runs` windows.
    pub fn new(runs: usize, now_ns: u64) -> Self {
        Self {
            phase: Phase::Ready,
            since_ns: now_ns,
            outstanding: 0,
            counted_to_ns: now_ns,
            now: Activity::default(),
            before: None,
            total: Activity::default(),
            windows: vec![Activity::default(); runs],
            load_ns: now_ns,
            first_burst: None,
        }
    }

    /// Notes a round that moved `messages` messages.
    #[inline]
    pub fn note(&mut self, messages: usize) {
        self.now.loops += 1;
        self.now.moved += messages as u64;
        self.now.loops_by_messages[class_of(messages)] += 1;
    }

    /// Returns the number of messages that all rounds have moved.
    pub const fn moved(&self) -> u64 {
        self.total.moved + self.now.moved
    }

    /// Notes `rounds` rounds that found nothing.
    pub fn note_empty(&mut self, rounds: u64) {
        self.now.loops += rounds;
        self.now.loops_by_messages[0] += rounds;
        self.now.loops_by_cqes[0] += rounds;
    }

    /// Notes a round of a daemon. Reads the clock only if the number of the daemon's unanswered
    /// requests differs from the number after the previous round, or is a new maximum.
    #[inline]
    pub fn note_round(&mut self, round: Round, now_ns: impl FnOnce() -> u64) {
        self.note(round.moved);
        self.now.cqes += round.cqes as u64;
        self.now.loops_by_cqes[class_of(round.cqes)] += 1;
        let outstanding = round.outstanding as u64;
        let is_peak = outstanding > self.now.outstanding_peak.outstanding;
        if is_peak || outstanding != self.outstanding {
            let now_ns = now_ns();
            self.count_outstanding(now_ns);
            self.outstanding = outstanding;
            if is_peak {
                self.note_peak(now_ns);
            }
        }
    }

    const fn count_outstanding(&mut self, now_ns: u64) {
        self.now.outstanding_ns += self.outstanding * now_ns.saturating_sub(self.counted_to_ns);
        self.counted_to_ns = now_ns;
    }

    #[cold]
    fn note_peak(&mut self, now_ns: u64) {
        let burst = Burst {
            at_ns: now_ns.saturating_sub(self.load_ns),
            outstanding: self.outstanding,
        };
        self.now.outstanding_peak = burst;
        self.first_burst.get_or_insert(burst);
    }

    /// Ends the activity of the previous phase, and begins the activity of `phase`. Does nothing,
    /// and does not read the clock, if the phase is the same.
    #[inline]
    pub fn enter(
        &mut self,
        phase: Phase,
        now_ns: impl FnOnce() -> u64,
        endpoints: &mut impl Endpoints,
    ) {
        if phase != self.phase {
            self.turn(phase, now_ns(), endpoints);
        }
    }

    #[cold]
    fn turn(&mut self, phase: Phase, now_ns: u64, endpoints: &mut impl Endpoints) {
        let counters = endpoints.transport();
        self.count_outstanding(now_ns);
        let mut ended = std::mem::take(&mut self.now);
        ended.span_ns = now_ns.saturating_sub(self.since_ns);
        ended.transport = counters.as_ref().map(|now| now.since(self.before.as_ref()));
        self.total.add(&ended);
        match self.phase {
            Phase::Ready => self.load_ns = now_ns,
            Phase::Window(run) => {
                if let Some(window) = self.windows.get_mut(usize::from(run)) {
                    *window = ended;
                }
            }
            _ => {}
        }
        (self.phase, self.since_ns, self.before) = (phase, now_ns, counters);
    }

    /// Ends the log, and returns the report of the thread.
    pub fn report(mut self, now_ns: u64, endpoints: &mut impl Endpoints) -> WorkerReport {
        self.turn(Phase::Drain, now_ns, endpoints);
        WorkerReport {
            loops: self.total.loops,
            empty_loops: self.total.loops_by_messages[0],
            transport: self.total.transport,
            windows: self.windows,
            first_burst: self.first_burst,
            policy: None,
            trace: None,
        }
    }
}

impl Activity {
    /// Adds the activity of another thread, or of this thread in another span.
    pub fn add(&mut self, other: &Self) {
        self.span_ns += other.span_ns;
        self.loops += other.loops;
        self.moved += other.moved;
        self.cqes += other.cqes;
        for class in 0..5 {
            self.loops_by_messages[class] += other.loops_by_messages[class];
            self.loops_by_cqes[class] += other.loops_by_cqes[class];
        }
        self.outstanding_ns += other.outstanding_ns;
        if other.outstanding_peak.outstanding > self.outstanding_peak.outstanding {
            self.outstanding_peak = other.outstanding_peak;
        }
        if let Some(other) = &other.transport {
            self.transport.get_or_insert_default().add(other);
        }
    }
}

/// The activity of threads as rates and means, for a rank or for a run. A rate without events is 0.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ActivityRates {
    /// Number of rounds of a daemon per second, mean over daemons.
    pub loops_per_s: f64,
    /// Share of these rounds that found nothing to do.
    pub empty_loops: f64,
    /// Shares of the rounds of daemons that moved 0, 1, 2 to 10, 11 to 100, and more messages.
    pub loops_by_messages: [f64; 5],
    /// Messages moved per round.
    pub messages_per_loop: f64,
    /// Completions per round of the daemons that have connections.
    pub cqes_per_loop: f64,
    /// Shares of the rounds of daemons with connections that took 0, 1, 2 to 10, 11 to 100, and
    /// more completions.
    pub loops_by_cqes: [f64; 5],
    /// Mean length of a round of a daemon with connections, in nanoseconds: T_loop.
    pub loop_ns: f64,
    /// Time from a request to another rank to its answer, in nanoseconds: T_rtt. It follows by
    /// Little's law from two numbers of the daemons with connections: the mean number of requests
    /// not answered yet, and the number of requests sent per second. 0 if clients have their own
    /// connections.
    pub rtt_ns: f64,
    /// T_loop / T_rtt. If the quotient is below 1, a request is under way for several rounds, and
    /// these rounds find few or no completions.
    pub rho: f64,
    /// Mean time that a daemon takes for a message, in nanoseconds: the length of its rounds
    /// divided by the number of messages that they moved.
    pub message_ns: f64,
    /// Mean over time of the number of requests to other ranks that one daemon with connections has
    /// sent and that are not answered yet.
    pub outstanding_mean: f64,
    /// Maximum number of these requests, and the time at which it was reached.
    pub outstanding_peak: Burst,
    /// Mean number of messages in a WRITE, SEND or active message.
    pub messages_per_write: f64,
    /// Maximum number of requests of one thread that waited for room or credit at the same time.
    pub backlog_peak: u64,
    /// Counters of the job's carrier, per second, of daemons and clients together: `writes_per_s`,
    /// `reads_per_s` and so on.
    #[serde(flatten)]
    pub per_s: Figures<f64>,
}

impl ActivityRates {
    /// Makes the rates from the activities of `daemons` and `clients` in the same windows. Each
    /// activity covers one thread. The windows have a total length of `seconds`.
    pub fn new<'a>(
        daemons: impl Iterator<Item = &'a Activity>,
        clients: impl Iterator<Item = &'a Activity>,
        seconds: f64,
    ) -> Self {
        let mut stepped = Activity::default();
        let mut carriers = Activity::default();
        let mut all = Activity::default();
        for daemon in daemons {
            stepped.add(daemon);
            if daemon.transport.is_some() {
                carriers.add(daemon);
            }
        }
        clients.for_each(|client| all.add(client));
        all.add(&stepped);
        let transport = all.transport.unwrap_or_default();
        let counted = &transport.counted;
        let rate = |(name, count): (&str, u64)| (format!("{name}_per_s"), count as f64 / seconds);
        let per_s = counted.iter().map(rate);
        let loops = stepped.loops.max(1) as f64;
        let loops_by_messages = stepped.loops_by_messages.map(|count| count as f64 / loops);
        let carrier_loops = carriers.loops.max(1) as f64;
        let loops_by_cqes = carriers
            .loops_by_cqes
            .map(|count| count as f64 / carrier_loops);
        let ratio = |one: f64, other: f64| if other > 0.0 { one / other } else { 0.0 };
        let loop_ns = carriers.span_ns as f64 / carrier_loops;
        let outstanding_mean = ratio(carriers.outstanding_ns as f64, carriers.span_ns as f64);
        // Half of the messages of daemons are requests, and the other half are answers.
        let sent = carriers.transport.as_ref();
        let requests = sent.map_or(0, |sent| sent.counted.of("messages")) as f64 / 2.0;
        let rtt_ns = ratio(carriers.outstanding_ns as f64, requests);
        Self {
            loops_per_s: stepped.loops as f64 * 1e9 / stepped.span_ns.max(1) as f64,
            empty_loops: loops_by_messages[0],
            loops_by_messages,
            messages_per_loop: stepped.moved as f64 / loops,
            cqes_per_loop: carriers.cqes as f64 / carrier_loops,
            loops_by_cqes,
            loop_ns,
            rtt_ns,
            rho: ratio(loop_ns, rtt_ns),
            message_ns: ratio(stepped.span_ns as f64, stepped.moved as f64),
            outstanding_mean,
            outstanding_peak: carriers.outstanding_peak,
            messages_per_write: counted.of("messages") as f64 / counted.of("writes").max(1) as f64,
            backlog_peak: transport.backlog_peak,
            per_s: per_s.collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Connections that report ten more WRITEs, of three messages each, at each call.
    #[derive(Default)]
    struct Counting {
        looks: u64,
    }

    impl Endpoints for Counting {
        fn transport(&mut self) -> Option<TransportReport> {
            self.looks += 1;
            let (writes, backlog_peak) = (10 * self.looks, 100 - self.looks);
            Some(TransportReport {
                counted: [("writes", writes), ("messages", 3 * writes)].into(),
                backlog_peak,
                ..TransportReport::default()
            })
        }
    }

    #[test]
    fn a_window_holds_what_was_done_in_it_and_the_total_everything() {
        let (mut endpoints, mut log) = (Counting::default(), ActivityLog::new(2, 50));
        let script = [
            (Phase::WarmUp, 100, 5),
            (Phase::Window(0), 200, 0),
            (Phase::Between, 1200, 1),
            (Phase::Window(1), 1300, 200),
        ];
        for (phase, now_ns, messages) in script {
            log.enter(phase, || now_ns, &mut endpoints);
            log.note(messages);
            log.enter(
                phase,
                || unreachable!("the phase is the same"),
                &mut endpoints,
            );
            log.note(messages);
        }
        let report = log.report(3300, &mut endpoints);
        assert_eq!((report.loops, report.empty_loops), (8, 2));
        assert_eq!(
            report.transport.as_ref().map(|all| (
                all.counted.of("writes"),
                all.counted.of("messages"),
                all.backlog_peak
            )),
            Some((50, 150, 99))
        );
        let [first, second] = &report.windows[..] else {
            panic!("two windows: {report:?}")
        };
        assert_eq!(
            (
                first.span_ns,
                first.loops,
                first.moved,
                first.loops_by_messages
            ),
            (1000, 2, 0, [2, 0, 0, 0, 0])
        );
        assert_eq!(
            (
                second.span_ns,
                second.loops,
                second.moved,
                second.loops_by_messages
            ),
            (2000, 2, 400, [0, 0, 0, 0, 2])
        );
        let transport = second.transport.as_ref().unwrap();
        assert_eq!(
            (
                transport.counted.of("writes"),
                transport.counted.of("messages"),
                transport.backlog_peak
            ),
            (10, 30, 95),
            "between two polls"
        );
    }

    #[test]
    fn requests_under_way_are_told_with_their_peak_and_their_first_burst() {
        let (mut endpoints, mut log) = (Counting::default(), ActivityLog::new(1, 50));
        log.enter(Phase::WarmUp, || 1_000, &mut endpoints);
        let round = |cqes, outstanding| Round {
            moved: 1,
            cqes,
            outstanding,
            is_part: false,
        };
        log.note_round(round(0, 0), || unreachable!("nothing is seen first"));
        log.note_round(round(0, 7), || 1_300);
        log.enter(Phase::Window(0), || 2_000, &mut endpoints);
        for (now_ns, cqes, outstanding) in [
            (2_100, 0, 3),
            (2_200, 1, 9),
            (2_300, 10, 9),
            (2_400, 11, 3),
            (2_500, 101, 1),
        ] {
            log.note_round(round(cqes, outstanding), || now_ns);
        }
        let report = log.report(3_000, &mut endpoints);
        assert_eq!(
            report.first_burst,
            Some(Burst {
                at_ns: 300,
                outstanding: 7
            })
        );
        let window = &report.windows[0];
        // Outstanding requests over the window: 7 until 2100 ns, 3 until 2200, 9 until 2400, 3
        // until 2500, and 1 until 3000. The integral is 3600.
        assert_eq!(
            (window.cqes, window.loops_by_cqes, window.outstanding_ns),
            (123, [1, 1, 1, 1, 1], 3_600)
        );
        assert_eq!(
            window.outstanding_peak,
            Burst {
                at_ns: 1_200,
                outstanding: 9
            },
            "when it was reached first"
        );
        // The second daemon has no connections, so it has no transport and does not count in these
        // figures.
        let idle = Activity {
            span_ns: 1_000,
            loops: 95,
            ..Activity::default()
        };
        let rates = ActivityRates::new([window, &idle].into_iter(), [].into_iter(), 1e-6);
        assert_eq!(
            (
                rates.cqes_per_loop,
                rates.outstanding_mean,
                rates.outstanding_peak.outstanding
            ),
            (24.6, 3.6, 9)
        );
        assert_eq!(rates.loops_by_cqes, [0.2; 5]);
        // The daemon makes five rounds in a microsecond, and has 3.6 requests under way on average.
        // 15 of its 30 messages are requests.
        assert_eq!(
            (rates.loop_ns, rates.rtt_ns, rates.rho),
            (200.0, 240.0, 200.0 / 240.0)
        );
        assert_eq!(rates.message_ns, 2_000.0 / 5.0);
    }

    #[test]
    fn requests_are_under_way_for_as_long_as_rounds_take() {
        let (mut endpoints, mut log) = (Counting::default(), ActivityLog::new(1, 0));
        log.enter(Phase::Window(0), || 0, &mut endpoints);
        let mut now_ns = 0;
        for _ in 0..10 {
            for (round_ns, outstanding) in [(99_000, 100), (1_000, 0)] {
                now_ns += round_ns;
                log.note_round(
                    Round {
                        outstanding,
                        ..Round::default()
                    },
                    || now_ns,
                );
                log.note_round(
                    Round {
                        outstanding,
                        ..Round::default()
                    },
                    || unreachable!("as many as before"),
                );
            }
        }
        let report = log.report(now_ns, &mut endpoints);
        let rates = ActivityRates::new(report.windows.iter(), [].into_iter(), 1e-3);
        assert_eq!(
            rates.outstanding_mean, 1.0,
            "100 for one microsecond of a hundred"
        );
    }

    #[test]
    fn rates_are_per_second_and_daemon_and_writes_those_of_all_threads() {
        let transport = |writes, backlog_peak| {
            Some(TransportReport {
                counted: [("writes", writes), ("messages", 4 * writes)].into(),
                backlog_peak,
                ..TransportReport::default()
            })
        };
        let daemon = Activity {
            span_ns: 2_000_000_000,
            loops: 100,
            loops_by_messages: [25, 75, 0, 0, 0],
            moved: 75,
            transport: transport(30, 4),
            ..Activity::default()
        };
        let client = Activity {
            transport: transport(10, 9),
            ..daemon.clone()
        };
        let rates = ActivityRates::new([&daemon, &daemon].into_iter(), [&client].into_iter(), 2.0);
        assert_eq!(
            (
                rates.loops_per_s,
                rates.empty_loops,
                rates.messages_per_loop
            ),
            (50.0, 0.25, 0.75)
        );
        assert_eq!(
            (
                rates.per_s.of("writes_per_s"),
                rates.messages_per_write,
                rates.backlog_peak
            ),
            (35.0, 4.0, 9)
        );
        let none = ActivityRates::new([].into_iter(), [].into_iter(), 1.0);
        assert_eq!(none, ActivityRates::default());
    }
}
