//! A client: a closed loop with as many outstanding requests as the queue depth, each issued as soon as another has ended; or an open
//! loop, which issues each at its intended start, or as soon after as the queue depth permits.
//!
//! It is stepped and knows neither thread nor transport. Time stamps are taken once per step for all operations found ended, and once for
//! all issued in their place: the error is below the length of a step and unbiased.

use std::time::Duration;

use harness::hist::{HistogramError, LatencyHistogram};
use serde::{Deserialize, Serialize};

use crate::activity::WorkerReport;
use crate::backend::{BackendError, Ending, IssueError, Paths};
use crate::counters;
use crate::message::{Op, Outcome, Request};
use crate::pace::Schedule;
use crate::phase::Phase;
use crate::values::ClientValues;
use crate::verify::{PrivateStep, Verdict, Verifier, fill_tail};
use crate::workload::{Access, AccessKind, Pattern};

/// The measurements of one client between the beginning and the end of a window, by its own clock readings.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Window {
    /// Time at which this client saw the window begin, in ns.
    pub started_ns: u64,
    /// Time at which it saw the window end, in ns.
    pub ended_ns: u64,
    /// Sum over time of the operations outstanding, in operations times nanoseconds. An operation that is due and not issued is not
    /// outstanding.
    pub outstanding_ns: u128,
    /// Age of the operations outstanding when this client saw the window end, less that when it saw it begin, in operations times
    /// nanoseconds.
    pub carried_ns: i128,
    /// Round trips to this rank's own store, in an open loop from the intended start. An operation counts in the window in which it ends.
    pub local: RoundTrips,
    /// Round trips to other ranks.
    pub remote: RoundTrips,
    /// Gets among them that found no value.
    pub not_found: u64,
    /// Operations that ended in an error.
    pub errors: u64,
    /// The client's progress through its schedule.
    pub open_loop: OpenWindow,
}

/// Round trips, reads and writes apart.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RoundTrips {
    /// Round trips of gets, with or without a value.
    pub gets: LatencyHistogram,
    /// Round trips of puts.
    pub puts: LatencyHistogram,
}

impl RoundTrips {
    /// Makes empty histograms, allocated as a whole, or, if they are to `grow`, as needed.
    fn none(grow: bool) -> Self {
        let histogram = || if grow { LatencyHistogram::growing() } else { LatencyHistogram::new() };
        Self { gets: histogram(), puts: histogram() }
    }

    /// Returns the number of round trips.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.gets.count() + self.puts.count()
    }

    /// Adds all of `other`.
    ///
    /// # Errors
    /// The histograms of `other` were decoded from bytes with a larger range.
    pub fn merge(&mut self, other: &Self) -> Result<(), HistogramError> {
        self.gets.merge(&other.gets)?;
        self.puts.merge(&other.puts)
    }

    /// Returns their sum in nanoseconds, to the precision of the histograms.
    #[must_use]
    pub fn sum_ns(&self) -> f64 {
        [&self.gets, &self.puts].map(LatencyHistogram::sum_ns).iter().sum()
    }
}

/// The figures of an open loop in a window; all 0 in a closed loop.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct OpenWindow {
    /// Operations whose intended start lay in the window.
    pub due: u64,
    /// Operations due and not issued when the window ended.
    pub backlog: u64,
    /// Time from the intended start to the issue: the sum over the round trips of the window, in nanoseconds. Latencies include it.
    pub held_ns: u128,
}

counters! {
    /// The fate of every operation of a client, or of several, warm-up and drain included: `issued = completed + errors + lost + unfinished`.
    pub struct Counts {
        /// Accepted by the transport.
        sum issued,
        /// Ended with the answer of a store.
        sum completed,
        /// Ended with an error or a refusal.
        sum errors,
        /// Had not ended when nothing moved any more.
        sum lost,
        /// Had not ended when the drain was cut, because it took too long or the user interrupted it.
        sum unfinished,
        /// Of the completed: gets that found no value.
        sum not_found,
        /// Endings that no outstanding operation waited for: a fault of the transport.
        sum strays,
    }
}

impl Counts {
    /// Returns the number of operations issued plus the number ended.
    const fn moves(&self) -> u64 {
        self.issued + self.completed + self.errors
    }
}

/// The results of a client.
#[derive(Debug, Serialize, Deserialize)]
pub struct ClientReport {
    /// Fate of the operations.
    pub counts: Counts,
    /// Operations that had not ended at the end of the drain.
    pub outstanding: u64,
    /// One window per run.
    pub windows: Vec<Window>,
    /// The findings of `--verify`.
    pub verdict: Option<Verdict>,
    /// [`Pattern::digest`] of its accesses.
    pub pattern_hash: u64,
    /// The activity of its thread, and of its own connections to other ranks.
    pub worker: WorkerReport,
    /// Maximum resident memory of its process, if it has one of its own; 0 if it is in the rank's process.
    pub process_rss_bytes: u64,
}

/// The result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// That many operations were issued or ended; an operation that was both counts twice.
    Busy(usize),
    /// Nothing to do.
    Idle,
    /// Nothing is outstanding and nothing more is issued: the phase is a drain, or all operations of the client have ended.
    Drained,
}

/// The parameters of a client.
#[derive(Debug)]
pub struct ClientSpec {
    /// This rank.
    pub rank: u16,
    /// Operations to keep outstanding, at least 1.
    pub queue_depth: usize,
    /// Total number of operations to issue; `None`: as many as there is time for.
    pub ops: Option<u64>,
    /// Measured runs.
    pub runs: usize,
    /// See [`Job::is_frugal`](crate::job::Job::is_frugal).
    pub is_frugal: bool,
    /// The accesses, at least one.
    pub pattern: Pattern,
    /// Schedule of the operations; `None`: closed loop.
    pub schedule: Option<Schedule>,
    /// The judge, with `--verify`.
    pub verifier: Option<Verifier>,
    /// Flips one bit of the last byte, or of the only 8, of one written value, which `--verify` has to notice.
    pub corrupt_one: bool,
}

/// The client. `P` carries its requests.
#[derive(Debug)]
pub struct Client<P> {
    paths: P,
    book: Book,
    /// The operations that a poll has found ended.
    ended: Vec<(u32, Ending)>,
}

/// The counts of a client while it runs: differences of two looks are those of the time between.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Operations that have ended, errors included.
    pub ended: u64,
    /// Sum over time of the operations outstanding, in operations times nanoseconds.
    pub outstanding_ns: u64,
}

/// All state but the paths: a poll borrows both.
#[derive(Debug)]
struct Book {
    spec: ClientSpec,
    /// Total number of operations to issue.
    limit: u64,
    /// The places of tails, and one tail; `None` if values have none.
    tails: Option<(ClientValues, Vec<u8>)>,
    next_access: usize,
    /// By token. `None`: the token is free.
    outstanding: Vec<Option<Outstanding>>,
    free: Vec<u32>,
    /// A request that no path has accepted yet.
    refused: Option<(u32, Request)>,
    counts: Counts,
    /// The last round trips of this step that are not recorded yet, by [`kind`].
    alike: [Alike; 4],
    windows: Vec<Window>,
    phase: Phase,
    /// Sum over time of the operations outstanding, up to [`counted_to_ns`](Self::counted_to_ns).
    outstanding_ns: u64,
    counted_to_ns: u64,
    /// The sum when the window began.
    window_from_ns: u64,
}

/// Consecutive round trips of one kind and equal length: operations issued in one step and ended in another are recorded together.
#[derive(Debug, Clone, Copy, Default)]
struct Alike {
    latency_ns: u64,
    count: u64,
    /// Sum of the times from the intended starts to the issues, in ns.
    held_ns: u64,
}

/// Returns the index of a kind: local gets, local puts, remote gets, remote puts.
const fn kind(is_remote: bool, is_put: bool) -> usize {
    2 * is_remote as usize + is_put as usize
}

#[derive(Debug, Clone, Copy)]
struct Outstanding {
    access: Access,
    /// Start of the latency: the issue, in an open loop the intended start.
    intended_ns: u64,
    issued_ns: u64,
    moment: u32,
    is_put: bool,
}

impl Outstanding {
    /// Returns the time since its issue, in ns.
    fn age_ns(&self, now_ns: u64) -> u64 {
        if self.issued_ns == NOT_ISSUED { 0 } else { now_ns.saturating_sub(self.issued_ns) }
    }
}

/// Interval at which a refused request is offered again. There may be no outstanding operation whose end would tell.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// Time stamp of an operation that no path has accepted yet.
const NOT_ISSUED: u64 = 0;

impl<P: Paths> Client<P> {
    /// Makes a client that has issued nothing. All its memory is allocated here, unless it is frugal.
    #[must_use]
    pub fn new(spec: ClientSpec, paths: P) -> Self {
        let depth = spec.queue_depth;
        let window = Window {
            started_ns: 0,
            ended_ns: 0,
            outstanding_ns: 0,
            carried_ns: 0,
            local: RoundTrips::none(spec.is_frugal),
            remote: RoundTrips::none(spec.is_frugal),
            not_found: 0,
            errors: 0,
            open_loop: OpenWindow::default(),
        };
        let book = Book {
            limit: spec.ops.unwrap_or(u64::MAX),
            tails: paths.values().map(|values| {
                let tail = vec![0; values.tail_bytes()];
                (values, tail)
            }),
            next_access: 0,
            outstanding: vec![None; depth],
            free: (0..depth as u32).rev().collect(),
            refused: None,
            counts: Counts::default(),
            alike: [Alike::default(); 4],
            windows: vec![window; spec.runs],
            phase: Phase::Ready,
            outstanding_ns: 0,
            counted_to_ns: 0,
            window_from_ns: 0,
            spec,
        };
        Self { paths, book, ended: Vec::with_capacity(depth) }
    }

    /// Takes ended operations and, while `phase` asks for load, issues as many again. Reads `now_ns` at most twice. Once as many
    /// operations have ended as it was to issue in all, its window is over and it drains, in any `phase`.
    ///
    /// # Errors
    /// A path is down; outstanding operations are lost.
    pub fn step(&mut self, phase: Phase, mut now_ns: impl FnMut() -> u64) -> Result<Step, BackendError> {
        let Self { paths, book, ended } = self;
        let begin_ns = now_ns();
        let phase = if book.has_ended() { Phase::Drain } else { phase };
        book.enter(phase, begin_ns);
        let before = book.counts;
        let polled = paths.poll(|token, ending| ended.push((token, ending)));
        if !ended.is_empty() {
            ended.iter().for_each(|&(token, ending)| book.end(token, ending, begin_ns));
            ended.clear();
            (0..4).for_each(|kind| book.record(kind));
        }
        polled?;
        if phase.is_loading() && book.wants_to_issue(begin_ns) {
            let issue_ns = now_ns();
            book.count_outstanding(issue_ns);
            book.issue_all(paths, issue_ns)?;
            paths.flush()?;
        }
        Ok(match book.counts.moves() - before.moves() {
            0 if phase == Phase::Drain && book.in_flight() == 0 => Step::Drained,
            0 => Step::Idle,
            moves => Step::Busy(moves as usize),
        })
    }

    /// Returns for how long it has nothing to do, unless one of its operations ends. [`Duration::MAX`]: forever.
    #[must_use]
    pub fn until_due(&self, now_ns: u64) -> Duration {
        let Book { spec, phase, free, refused, .. } = &self.book;
        if refused.is_some() {
            return RETRY_INTERVAL;
        }
        let next = spec.schedule.as_ref().filter(|_| phase.is_loading() && !free.is_empty());
        next.map_or(Duration::MAX, |schedule| schedule.until_next(now_ns))
    }

    /// Returns its counts up to its last step.
    #[must_use]
    pub const fn tally(&self) -> Tally {
        let Book { counts, outstanding_ns, .. } = &self.book;
        Tally { ended: counts.completed + counts.errors, outstanding_ns: *outstanding_ns }
    }

    /// Returns the paths of its requests.
    pub fn paths_mut(&mut self) -> &mut P {
        &mut self.paths
    }

    /// Ends the client; operations still outstanding are lost. `worker` has the notes of its thread.
    #[must_use]
    pub fn report(self, worker: WorkerReport) -> ClientReport {
        let book = self.book;
        ClientReport {
            outstanding: book.in_flight(),
            counts: book.counts,
            windows: book.windows,
            verdict: book.spec.verifier.map(Verifier::verdict),
            pattern_hash: book.spec.pattern.digest(),
            worker,
            process_rss_bytes: 0,
        }
    }
}

impl Book {
    fn in_flight(&self) -> u64 {
        self.counts.issued - self.counts.completed - self.counts.errors
    }

    /// Returns whether all operations that it was to issue have ended.
    fn has_ended(&self) -> bool {
        self.counts.issued == self.limit && self.in_flight() == 0
    }

    fn window(&mut self) -> Option<&mut Window> {
        match self.phase {
            Phase::Window(run) => self.windows.get_mut(usize::from(run)),
            _ => None,
        }
    }

    /// Follows the main thread into `phase`.
    fn enter(&mut self, phase: Phase, now_ns: u64) {
        self.count_outstanding(now_ns);
        if phase == self.phase {
            return;
        }
        let age_ns = self.outstanding.iter().flatten().map(|outstanding| i128::from(outstanding.age_ns(now_ns))).sum::<i128>();
        let (from_ns, to_ns) = (self.window_from_ns, self.outstanding_ns);
        if let Some(window) = self.window() {
            window.ended_ns = now_ns;
            window.carried_ns += age_ns;
            window.outstanding_ns = u128::from(to_ns.wrapping_sub(from_ns));
        }
        self.window_from_ns = to_ns;
        self.turn_open_loop(now_ns, |open_loop, due, backlog| {
            open_loop.due = due - open_loop.due;
            open_loop.backlog = backlog;
        });
        self.phase = phase;
        if let Some(schedule) = self.spec.schedule.as_mut().filter(|_| phase.is_loading()) {
            schedule.begin(now_ns);
        }
        if let Some(window) = self.window() {
            window.started_ns = now_ns;
            window.carried_ns -= age_ns;
        }
        // Until the window ends, `due` is the number that had been due before it.
        self.turn_open_loop(now_ns, |open_loop, due, _| open_loop.due = due);
    }

    /// Notes at an edge of a window the number of operations due by then, and how many of them are not issued.
    fn turn_open_loop(&mut self, now_ns: u64, note: impl FnOnce(&mut OpenWindow, u64, u64)) {
        let Some((due, backlog)) = self.spec.schedule.as_ref().map(|schedule| (schedule.due(now_ns), schedule.backlog(now_ns))) else {
            return;
        };
        if let Some(window) = self.window() {
            note(&mut window.open_loop, due, backlog);
        }
    }

    /// Returns whether there is something to issue, and a token for it.
    fn wants_to_issue(&self, now_ns: u64) -> bool {
        let is_due = || self.spec.schedule.as_ref().is_none_or(|schedule| schedule.due_ns(now_ns).is_some());
        self.refused.is_some() || (!self.free.is_empty() && self.counts.issued < self.limit && is_due())
    }

    fn count_outstanding(&mut self, now_ns: u64) {
        // 4096 operations are outstanding for 52 days before the sum begins again, and only differences are used.
        let elapsed_ns = now_ns.saturating_sub(self.counted_to_ns);
        self.outstanding_ns = self.outstanding_ns.wrapping_add(self.in_flight().wrapping_mul(elapsed_ns));
        self.counted_to_ns = now_ns;
    }

    fn issue_all<P: Paths>(&mut self, paths: &mut P, now_ns: u64) -> Result<(), BackendError> {
        if let Some((token, request)) = self.refused.take() {
            let is_closed_loop = self.spec.schedule.is_none();
            if let Some(Some(outstanding)) = self.outstanding.get_mut(token as usize) {
                outstanding.issued_ns = now_ns;
                if is_closed_loop {
                    outstanding.intended_ns = now_ns;
                }
            }
            if !self.issue(paths, token, request)? {
                return Ok(());
            }
        }
        // Bounded by the queue depth: each turn takes a free token or ends the loop.
        while let Some((token, request)) = self.prepare(now_ns) {
            if !self.issue(paths, token, request)? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Offers a request. Returns `false` if there is no room for it now.
    #[inline(always)]
    fn issue<P: Paths>(&mut self, paths: &mut P, token: u32, request: Request) -> Result<bool, BackendError> {
        match paths.issue(&request, token) {
            Ok(()) => {
                self.counts.issued += 1;
                Ok(true)
            }
            Err(IssueError::Full) => {
                if let Some(Some(outstanding)) = self.outstanding.get_mut(token as usize) {
                    outstanding.issued_ns = NOT_ISSUED;
                }
                self.refused = Some((token, request));
                Ok(false)
            }
            Err(IssueError::Down(error)) => Err(error),
        }
    }

    /// Takes a token for the next access that can be made and is due.
    #[inline(always)]
    fn prepare(&mut self, now_ns: u64) -> Option<(u32, Request)> {
        if self.counts.issued == self.limit {
            return None;
        }
        let token = *self.free.last()?;
        let intended_ns = self.spec.schedule.as_ref().map_or(Some(now_ns), |schedule| schedule.due_ns(now_ns))?;
        // A private key with an operation outstanding is skipped. There are fewer consecutive private accesses than this.
        let mut tries = 0..4;
        let (access, request) = loop {
            tries.next()?;
            if let Some(next) = self.next_request(token) {
                break next;
            }
        };
        self.free.pop();
        if let Some(schedule) = &mut self.spec.schedule {
            schedule.take();
        }
        let moment = self.spec.verifier.as_mut().map_or(0, Verifier::issue);
        let slot = self.outstanding.get_mut(token as usize)?;
        *slot = Some(Outstanding { access, intended_ns, issued_ns: now_ns, moment, is_put: request.is_put() });
        Some((token, request))
    }

    #[inline(always)]
    fn next_request(&mut self, token: u32) -> Option<(Access, Request)> {
        let accesses = &self.spec.pattern.accesses;
        let access = *accesses.get(self.next_access)?;
        self.next_access = if self.next_access + 1 < accesses.len() { self.next_access + 1 } else { 0 };
        let (rank, key) = (u32::from(access.rank), access.key);
        let request = match (access.kind, &mut self.spec.verifier) {
            (AccessKind::Read, _) => Request::get(rank, key),
            (AccessKind::Write, Some(verifier)) => Request::put(rank, key, verifier.next_value(access.rank, key)),
            (AccessKind::Private, Some(_)) => self.next_private(&access)?,
            (AccessKind::Write | AccessKind::Private, None) => Request::put(rank, key, key),
        };
        let Some((values, _)) = &self.tails else { return Some((access, request)) };
        let request = request.at(values.place(token));
        if let (Some(Op::Put { value, .. }), Some(_)) = (request.op(), &self.spec.verifier) {
            self.write_tail(value, token, access.kind);
        }
        Some((access, request))
    }

    /// Returns the next request for a private key; `None` while one is outstanding.
    #[inline(never)]
    fn next_private(&mut self, access: &Access) -> Option<Request> {
        let (rank, key) = (u32::from(access.rank), access.key);
        Some(match self.spec.verifier.as_mut()?.begin_private(access)? {
            PrivateStep::Get => Request::get(rank, key),
            PrivateStep::Put(value) => {
                let is_corrupt = self.tails.is_none() && std::mem::take(&mut self.spec.corrupt_one);
                Request::put(rank, key, value ^ u64::from(is_corrupt))
            }
        })
    }

    /// Writes the tail of the value of a put to its place. One that is not judged is the last one again.
    #[inline(never)]
    fn write_tail(&mut self, value: u64, token: u32, kind: AccessKind) {
        let Self { tails: Some((values, tail)), spec, .. } = self else { return };
        let is_corrupt = kind == AccessKind::Private && std::mem::take(&mut spec.corrupt_one);
        fill_tail(value, tail);
        tail.last_mut().into_iter().for_each(|last| *last ^= u8::from(is_corrupt));
        values.write(token, tail);
    }

    /// Records the end of an operation. A token that is not outstanding is a fault of the transport, and must not end another operation.
    #[inline(always)]
    fn end(&mut self, token: u32, ending: Ending, now_ns: u64) {
        let ended = self.outstanding.get_mut(token as usize).and_then(Option::take);
        let Some(Outstanding { access, intended_ns, issued_ns, moment, is_put }) = ended else {
            self.counts.strays += 1;
            return;
        };
        self.free.push(token);
        let outcome = match ending {
            Ending::Reply(response) => response.outcome().filter(|outcome| answers(*outcome, is_put)),
            Ending::Error => None,
        };
        if let Some(verifier) = &mut self.spec.verifier {
            if let (Some((values, tail)), Some(Outcome::GetOk { value })) = (&mut self.tails, outcome) {
                values.read(token, tail);
                verifier.judge_tail(&access, value, tail);
            }
            match (access.kind, outcome) {
                (AccessKind::Private, outcome) => verifier.end_private(&access, outcome),
                (_, Some(Outcome::GetOk { value })) => verifier.judge_read(&access, moment, Some(value)),
                (_, Some(Outcome::NotFound)) => verifier.judge_read(&access, moment, None),
                _ => {}
            }
        }
        let kind = kind(access.rank != self.spec.rank, is_put);
        let Some(outcome) = outcome else {
            self.counts.errors += 1;
            if let Some(window) = self.window() {
                window.errors += 1;
            }
            return;
        };
        self.counts.completed += 1;
        if outcome == Outcome::NotFound {
            self.counts.not_found += 1;
            self.window().into_iter().for_each(|window| window.not_found += 1);
        }
        let latency_ns = now_ns.saturating_sub(intended_ns);
        if latency_ns != self.alike[kind].latency_ns {
            self.record(kind);
            self.alike[kind].latency_ns = latency_ns;
        }
        self.alike[kind].count += 1;
        self.alike[kind].held_ns += issued_ns.saturating_sub(intended_ns);
    }

    /// Records the round trips of a kind in [`alike`](Self::alike), if there are any.
    #[inline(always)]
    fn record(&mut self, kind: usize) {
        if self.alike[kind].count > 0 {
            self.record_alike(kind);
        }
    }

    /// Records the round trips of a kind, if they ended in a window.
    #[inline(never)]
    fn record_alike(&mut self, kind: usize) {
        let Alike { latency_ns, count, held_ns } = std::mem::take(&mut self.alike[kind]);
        let Some(window) = self.window() else { return };
        let histogram = match kind {
            0 => &mut window.local.gets,
            1 => &mut window.local.puts,
            2 => &mut window.remote.gets,
            _ => &mut window.remote.puts,
        };
        histogram.record_many(latency_ns, count);
        window.open_loop.held_ns += u128::from(held_ns);
    }
}

/// Returns whether `outcome` answers a put (`is_put`) or a get.
const fn answers(outcome: Outcome, is_put: bool) -> bool {
    match outcome {
        Outcome::PutOk => is_put,
        Outcome::GetOk { .. } | Outcome::NotFound => !is_put,
        Outcome::Refused => false,
    }
}

#[cfg(test)]
mod tests;
