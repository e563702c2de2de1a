//! How a daemon or client thread spends its time: rounds of its loop, and what its connections to other ranks did, in all and in each window.

use serde::{Deserialize, Serialize};

use crate::backend::Endpoints;
use crate::control::Phase;

/// How a daemon or client spent its time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerReport {
    /// Rounds over all phases.
    pub loops: u64,
    /// Of these: rounds that found nothing to do.
    pub empty_loops: u64,
    /// Its connections to other ranks, if it has any.
    pub transport: Option<TransportReport>,
    /// What it did in each measured window.
    pub windows: Vec<Activity>,
}

/// What a thread's connections to other ranks did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportReport {
    /// The device that was really opened, for example `soft:lid=3`.
    pub device: String,
    /// How its peers are reached.
    pub reached_by: String,
    /// RDMA WRITEs with immediate posted; of `rc-send` SENDs, of `ucx-am` active messages.
    pub writes: u64,
    /// Messages in them.
    pub messages: u64,
    /// READs of a peer's published record.
    pub reads: u64,
    /// Calls that had to wait for ring space, credit, or a place in the window.
    pub waits: u64,
    /// Most requests that waited at a time, for one of these, or for room on the way to another daemon.
    pub backlog_peak: u64,
}

impl TransportReport {
    /// What was done since `before`, or since the start.
    fn since(&self, before: Option<&Self>) -> Self {
        let Some(before) = before else { return self.clone() };
        Self {
            writes: self.writes - before.writes,
            messages: self.messages - before.messages,
            reads: self.reads - before.reads,
            waits: self.waits - before.waits,
            ..self.clone()
        }
    }

    fn add(&mut self, other: &Self) {
        if self.device.is_empty() {
            self.device.clone_from(&other.device);
            self.reached_by.clone_from(&other.reached_by);
        }
        self.writes += other.writes;
        self.messages += other.messages;
        self.reads += other.reads;
        self.waits += other.waits;
        self.backlog_peak = self.backlog_peak.max(other.backlog_peak);
    }
}

/// What a thread did in a time.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Activity {
    /// Length of that time.
    pub span_ns: u64,
    /// Rounds over all phases.
    pub loops: u64,
    /// Rounds by the messages they moved: 0, 1, 2 to 10, 11 to 100, more.
    pub loops_by_messages: [u64; 5],
    /// Messages that the rounds moved: of clients, of daemons of this rank, of other ranks.
    pub moved: u64,
    /// Its connections, if it has any: differences of counters, and the peak of the backlog.
    pub transport: Option<TransportReport>,
}

/// Follows a thread through the phases of the job.
#[derive(Debug)]
pub struct ActivityLog {
    phase: Phase,
    since_ns: u64,
    /// Since the last change of phase.
    now: Activity,
    /// Counters of the connections at that change.
    before: Option<TransportReport>,
    total: Activity,
    windows: Vec<Activity>,
}

impl ActivityLog {
    /// The log of a thread that has done nothing yet, in a job of `runs` windows.
    #[must_use]
    pub fn new(runs: usize, now_ns: u64) -> Self {
        let none = Activity::default();
        Self { phase: Phase::Ready, since_ns: now_ns, now: none.clone(), before: None, total: none.clone(), windows: vec![none; runs] }
    }

    /// Notes a round that moved `messages`.
    #[inline]
    pub fn note(&mut self, messages: usize) {
        self.now.loops += 1;
        self.now.moved += messages as u64;
        let class = match messages {
            0 => 0,
            1 => 1,
            2..=10 => 2,
            11..=100 => 3,
            _ => 4,
        };
        self.now.loops_by_messages[class] += 1;
    }

    /// Follows the thread into `phase`; cheap while it is the same.
    #[inline]
    pub fn enter(&mut self, phase: Phase, now_ns: impl FnOnce() -> u64, endpoints: &mut impl Endpoints) {
        if phase != self.phase {
            self.turn(phase, now_ns(), endpoints);
        }
    }

    #[cold]
    fn turn(&mut self, phase: Phase, now_ns: u64, endpoints: &mut impl Endpoints) {
        let counters = endpoints.transport();
        let mut ended = std::mem::take(&mut self.now);
        ended.span_ns = now_ns.saturating_sub(self.since_ns);
        ended.transport = counters.as_ref().map(|now| now.since(self.before.as_ref()));
        self.total.add(&ended);
        if let Phase::Window(run) = self.phase {
            self.windows.get_mut(usize::from(run)).into_iter().for_each(|window| *window = ended.clone());
        }
        (self.phase, self.since_ns, self.before) = (phase, now_ns, counters);
    }

    /// Ends the log.
    #[must_use]
    pub fn report(mut self, now_ns: u64, endpoints: &mut impl Endpoints) -> WorkerReport {
        self.turn(Phase::Drain, now_ns, endpoints);
        let [empty_loops, ..] = self.total.loops_by_messages;
        WorkerReport { loops: self.total.loops, empty_loops, transport: self.total.transport, windows: self.windows }
    }
}

impl Activity {
    /// Adds what another thread did in the same time, or this one in another; spans add up.
    pub fn add(&mut self, other: &Self) {
        self.span_ns += other.span_ns;
        self.loops += other.loops;
        self.moved += other.moved;
        self.loops_by_messages.iter_mut().zip(other.loops_by_messages).for_each(|(sum, other)| *sum += other);
        if let Some(other) = &other.transport {
            self.transport.get_or_insert_default().add(other);
        }
    }
}

/// The same as rates and means: of a rank, or of a run. A time in which there was none of something counts as 0 of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct ActivityRates {
    /// Rounds of a daemon per second, mean over daemons.
    pub loops_per_s: f64,
    /// Share of these rounds that found nothing to do.
    pub empty_loops: f64,
    /// Shares of these rounds by the messages they moved: 0, 1, 2 to 10, 11 to 100, more.
    pub loops_by_messages: [f64; 5],
    /// Messages moved per round.
    pub messages_per_loop: f64,
    /// WRITEs posted to other ranks per second, by daemons and clients together.
    pub writes_per_s: f64,
    /// Messages in a WRITE.
    pub messages_per_write: f64,
    /// READs posted per second.
    pub reads_per_s: f64,
    /// Calls per second that had to wait for ring space or credit; each try counts.
    pub waits_per_s: f64,
    /// Most requests that waited in one thread at a time.
    pub backlog_peak: u64,
}

impl ActivityRates {
    /// Of threads observed side by side: `daemons` and `clients` each with what they did in windows that are `seconds` long in all.
    #[must_use]
    pub fn new<'a>(daemons: impl Iterator<Item = &'a Activity>, clients: impl Iterator<Item = &'a Activity>, seconds: f64) -> Self {
        let (mut stepped, mut all) = (Activity::default(), Activity::default());
        daemons.for_each(|daemon| stepped.add(daemon));
        clients.for_each(|client| all.add(client));
        all.add(&stepped);
        let transport = all.transport.unwrap_or_default();
        let loops = stepped.loops.max(1) as f64;
        let loops_by_messages = stepped.loops_by_messages.map(|count| count as f64 / loops);
        let per_s = |count: u64| count as f64 / seconds;
        Self {
            loops_per_s: stepped.loops as f64 * 1e9 / stepped.span_ns.max(1) as f64,
            empty_loops: loops_by_messages[0],
            loops_by_messages,
            messages_per_loop: stepped.moved as f64 / loops,
            writes_per_s: per_s(transport.writes),
            messages_per_write: transport.messages as f64 / transport.writes.max(1) as f64,
            reads_per_s: per_s(transport.reads),
            waits_per_s: per_s(transport.waits),
            backlog_peak: transport.backlog_peak,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Connections that have posted ten WRITEs of three messages more with each look.
    #[derive(Default)]
    struct Counting {
        looks: u64,
    }

    impl Endpoints for Counting {
        fn transport(&mut self) -> Option<TransportReport> {
            self.looks += 1;
            let (writes, backlog_peak) = (10 * self.looks, 100 - self.looks);
            Some(TransportReport { writes, messages: 3 * writes, backlog_peak, ..TransportReport::default() })
        }
    }

    #[test]
    fn a_window_holds_what_was_done_in_it_and_the_total_everything() {
        let (mut endpoints, mut log) = (Counting::default(), ActivityLog::new(2, 50));
        let script = [(Phase::WarmUp, 100, 5), (Phase::Window(0), 200, 0), (Phase::Between, 1200, 1), (Phase::Window(1), 1300, 200)];
        for (phase, now_ns, messages) in script {
            log.enter(phase, || now_ns, &mut endpoints);
            log.note(messages);
            log.enter(phase, || unreachable!("the phase is the same"), &mut endpoints);
            log.note(messages);
        }
        let report = log.report(3300, &mut endpoints);
        assert_eq!((report.loops, report.empty_loops), (8, 2));
        assert_eq!(report.transport.as_ref().map(|all| (all.writes, all.messages, all.backlog_peak)), Some((50, 150, 99)));
        let [first, second] = &report.windows[..] else { panic!("two windows: {report:?}") };
        assert_eq!((first.span_ns, first.loops, first.moved, first.loops_by_messages), (1000, 2, 0, [2, 0, 0, 0, 0]));
        assert_eq!((second.span_ns, second.loops, second.moved, second.loops_by_messages), (2000, 2, 400, [0, 0, 0, 0, 2]));
        let transport = second.transport.as_ref().unwrap();
        assert_eq!((transport.writes, transport.messages, transport.backlog_peak), (10, 30, 95), "between two looks");
    }

    #[test]
    fn rates_are_per_second_and_daemon_and_writes_those_of_all_threads() {
        let transport =
            |writes, backlog_peak| Some(TransportReport { writes, messages: 4 * writes, backlog_peak, ..TransportReport::default() });
        let daemon =
            Activity { span_ns: 2_000_000_000, loops: 100, loops_by_messages: [25, 75, 0, 0, 0], moved: 75, transport: transport(30, 4) };
        let client = Activity { transport: transport(10, 9), ..daemon.clone() };
        let rates = ActivityRates::new([&daemon, &daemon].into_iter(), [&client].into_iter(), 2.0);
        assert_eq!((rates.loops_per_s, rates.empty_loops, rates.messages_per_loop), (50.0, 0.25, 0.75));
        assert_eq!((rates.writes_per_s, rates.messages_per_write, rates.backlog_peak), (35.0, 4.0, 9));
        let none = ActivityRates::new([].into_iter(), [].into_iter(), 1.0);
        assert_eq!(none, ActivityRates::default());
    }
}
