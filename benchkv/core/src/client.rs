//! A client: a closed loop with as many outstanding requests as the queue depth, where a request is
//! issued as soon as another has ended; or an open loop, which issues each request at its intended
//! start, or as soon after that as the queue depth permits.
//!
//! A client is stepped, and knows neither thread nor transport. Each step has one time stamp, for
//! all operations that it finds ended and for all operations that it issues. The step reads the
//! clock after the poll that found the ended operations, so the latencies include the time for
//! which the thread did not run before or during the poll.

use std::time::Duration;

use benchkv_harness::Failure;
use benchkv_harness::hist::LatencyHistogram;
use serde::{Deserialize, Serialize};

use crate::activity::WorkerReport;
use crate::backend::{BackendError, IssueError, Paths};
use crate::counters;
use crate::job::ClientSpec;
use crate::message::{Op, Outcome, Request, Response};
use crate::operation::{Kind, Operation};
use crate::phase::Phase;
use crate::values::ClientValues;
use crate::verify::{PrivateStep, Verdict, Verifier, fill_tail};
use crate::workload::AccessKind;

/// The measurements of one client from the beginning to the end of a window. The times are readings
/// of the client's own clock.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Window {
    /// Time at which this client saw the window begin, in ns.
    pub started_ns: u64,
    /// Time at which this client saw the window end, in ns.
    pub ended_ns: u64,
    /// Sum over time of the operations outstanding, in operations times nanoseconds. An operation
    /// that is due and not issued is not outstanding.
    pub outstanding_ns: u128,
    /// Sum of the ages of the operations that were outstanding when this client saw the window end,
    /// minus the same sum when it saw the window begin, in operations times nanoseconds.
    pub carried_ns: i128,
    /// Round trips to this rank's own store, counted in the window in which they end. In an open
    /// loop a round trip begins at the intended start of its operation.
    pub local: RoundTrips,
    /// Round trips to other ranks.
    pub remote: RoundTrips,
    /// Number of gets that found no value, among the round trips.
    pub not_found: u64,
    /// Number of operations that ended in an error.
    pub errors: u64,
    /// The figures of the open loop.
    pub open_loop: OpenWindow,
}

/// Round trips of gets and of puts.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RoundTrips {
    /// Round trips of gets, with or without a value.
    pub gets: LatencyHistogram,
    /// Round trips of puts.
    pub puts: LatencyHistogram,
}

impl RoundTrips {
    /// Makes empty histograms. Their memory is allocated here, or as needed if they are to `grow`.
    fn none(grow: bool) -> Self {
        let histogram = if grow {
            LatencyHistogram::growing
        } else {
            LatencyHistogram::new
        };
        Self {
            gets: histogram(),
            puts: histogram(),
        }
    }

    /// Returns the number of round trips.
    pub fn count(&self) -> u64 {
        self.gets.count() + self.puts.count()
    }

    /// Adds all of `other`.
    ///
    /// # Errors
    /// The histograms of `other` were decoded from bytes with a larger range.
    pub fn merge(&mut self, other: &Self) -> Result<(), Failure> {
        self.gets.merge(&other.gets)?;
        self.puts.merge(&other.puts)
    }

    /// Returns the sum of the latencies in nanoseconds, to the precision of the histograms.
    pub fn sum_ns(&self) -> f64 {
        [&self.gets, &self.puts]
            .map(LatencyHistogram::sum_ns)
            .iter()
            .sum()
    }
}

/// The figures of an open loop in a window; all 0 in a closed loop.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct OpenWindow {
    /// Number of operations whose intended start lay in the window.
    pub due: u64,
    /// Number of operations that were due and not issued when the window ended.
    pub backlog: u64,
    /// Time from the intended start to the issue: the sum over the round trips of the window, in
    /// nanoseconds. Latencies include it.
    pub held_ns: u128,
}

counters! {
    /// The fate of every operation of a client, or of several clients, warm-up and drain included:
    /// `issued = completed + errors + lost + unfinished`.
    pub struct Counts {
        /// Number of operations that the transport accepted.
        sum issued,
        /// Number of operations that ended with the answer of a store.
        sum completed,
        /// Number of operations that ended with an error or a refusal.
        sum errors,
        /// Number of operations that had not ended when the daemons of the job stopped moving
        /// messages.
        sum lost,
        /// Number of operations that had not ended when the drain was cut: the drain took too long,
        /// or the user had interrupted the job.
        sum unfinished,
        /// Number of completed gets that found no value.
        sum not_found,
    }
}

/// The results of a client.
#[derive(Debug, Serialize, Deserialize)]
pub struct ClientReport {
    /// Fate of the operations.
    pub counts: Counts,
    /// Number of operations that had not ended at the end of the drain.
    pub outstanding: u64,
    /// The window of each run.
    pub windows: Vec<Window>,
    /// The failed checks of values; `None` if values are not verified.
    pub verdict: Option<Verdict>,
    /// Digest of the client's accesses ([`digest`](crate::workload::Pattern::digest)).
    pub pattern_hash: u64,
    /// The activity of the client's thread, and of the client's own connections to other ranks.
    pub worker: WorkerReport,
}

/// The result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Number of issues and ends of operations: an operation that was issued and ended in the step
    /// counts twice.
    Busy(usize),
    /// The client is idle now: no operation was issued, and none ended.
    Idle,
    /// Nothing is outstanding and nothing more is issued: the phase is a drain, or all operations
    /// of the client have ended.
    Drained,
}

/// The client. `P` carries its requests.
#[derive(Debug)]
pub struct Client<P> {
    paths: P,
    book: Book,
    ended: Vec<(Operation, Response)>,
}

/// The counts of a client while it runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of operations that have ended, errors included.
    pub ended: u64,
    /// Sum over time of the operations outstanding, in operations times nanoseconds.
    pub outstanding_ns: u64,
}

/// The state of a client except its paths. It is a separate struct, because a poll borrows the
/// paths and this state at the same time.
#[derive(Debug)]
struct Book {
    spec: ClientSpec,
    /// Total number of operations to issue.
    limit: u64,
    /// `None` if values have no tails.
    tails: Option<Box<Tails>>,
    next_access: u32,
    refused: Option<(Operation, Request)>,
    counts: Counts,
    /// Sum of the times of issue of all outstanding operations, in ns; wraps.
    issued_ns: u64,
    /// Round trips that ended in the current step and are not recorded yet, by [`Kind::group`].
    alike: [Alike; Kind::GROUPS],
    windows: Vec<Window>,
    phase: Phase,
    /// Sum over time of the operations outstanding, up to [`counted_to_ns`](Self::counted_to_ns).
    outstanding_ns: u64,
    counted_to_ns: u64,
    /// Value of `outstanding_ns` when the window began.
    window_from_ns: u64,
}

/// A number of consecutive round trips of one group with the same two times: operations of a closed
/// loop that were issued in one step and ended in another are recorded together.
#[derive(Debug, Clone, Copy, Default)]
struct Alike {
    /// Intended start and issue, in ns.
    times_ns: (u64, u64),
    count: u64,
}

/// The [places](crate::values) in memory for the tails of a client's values: the bytes after the
/// first 8.
#[derive(Debug)]
struct Tails {
    values: ClientValues,
    /// Places without an operation.
    free: Vec<u32>,
    /// The tail that was written or read last.
    tail: Vec<u8>,
}

/// Interval at which a refused request is offered again. There may be no outstanding operation
/// whose end would show that there is room.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

impl<P: Paths> Client<P> {
    /// Makes a client that has issued nothing. Allocates all memory of the client here, unless the
    /// `spec` is frugal.
    pub fn new(spec: ClientSpec, paths: P) -> Self {
        let window = Window {
            local: RoundTrips::none(spec.is_frugal),
            remote: RoundTrips::none(spec.is_frugal),
            ..Window::default()
        };
        let book = Book {
            limit: spec.ops.unwrap_or(u64::MAX),
            tails: paths.values().map(|values| {
                Box::new(Tails {
                    free: (0..spec.queue_depth as u32).rev().collect(),
                    tail: vec![0; values.tail_bytes()],
                    values,
                })
            }),
            next_access: 0,
            refused: None,
            counts: Counts::default(),
            issued_ns: 0,
            alike: Default::default(),
            windows: vec![window; spec.runs],
            phase: Phase::Ready,
            outstanding_ns: 0,
            counted_to_ns: 0,
            window_from_ns: 0,
            spec,
        };
        Self {
            ended: Vec::with_capacity(book.spec.queue_depth),
            paths,
            book,
        }
    }

    /// Takes ended operations and, while `phase` asks for load, issues operations that are due, up
    /// to the queue depth. Calls `now_ns` once, or twice if the phase differs from the phase of the
    /// previous step. Once the client's total number of operations has ended, its window is over
    /// and the client drains, in any `phase`.
    ///
    /// # Errors
    /// A path is down; outstanding operations are lost.
    pub fn step(
        &mut self,
        phase: Phase,
        mut now_ns: impl FnMut() -> u64,
    ) -> Result<Step, BackendError> {
        let Self { paths, book, ended } = self;
        let phase = if book.has_ended() {
            Phase::Drain
        } else {
            phase
        };
        if phase != book.phase {
            book.enter(phase, now_ns());
        }
        let polled = paths.poll(|operation, response| {
            let response = response.unwrap_or(Response::new(Outcome::Refused));
            ended.push((operation, response));
        });
        let now_ns = now_ns();
        book.count_outstanding(now_ns);
        let mut moves = ended.len();
        if moves > 0 {
            book.end_all(ended, now_ns);
            ended.clear();
        }
        polled?;
        if phase.is_loading() && book.wants_to_issue(now_ns) {
            moves += book.issue_all(paths, now_ns)?;
            paths.flush()?;
        }
        Ok(match moves {
            0 if phase == Phase::Drain && book.in_flight() == 0 => Step::Drained,
            0 => Step::Idle,
            moves => Step::Busy(moves),
        })
    }

    /// Returns the time for which the client has nothing to do unless one of its operations ends;
    /// [`Duration::MAX`] if only the end of an operation gives it work.
    pub fn until_due(&self, now_ns: u64) -> Duration {
        let Book {
            spec,
            phase,
            refused,
            ..
        } = &self.book;
        if refused.is_some() {
            return RETRY_INTERVAL;
        }
        let next = spec
            .schedule
            .as_ref()
            .filter(|_| phase.is_loading() && self.book.room() > 0);
        next.map_or(Duration::MAX, |schedule| schedule.until_next(now_ns))
    }

    /// Returns the client's counts up to its last step.
    pub const fn tally(&self) -> Tally {
        let Book {
            counts,
            outstanding_ns,
            ..
        } = &self.book;
        Tally {
            ended: counts.completed + counts.errors,
            outstanding_ns: *outstanding_ns,
        }
    }

    /// Sets the maximum number of outstanding operations, at most the number with which the client
    /// was made. With 0 the client issues no operations.
    pub fn set_queue_depth(&mut self, operations: usize) {
        self.book.spec.queue_depth = operations;
    }

    /// Returns the paths of the client's requests.
    pub fn paths_mut(&mut self) -> &mut P {
        &mut self.paths
    }

    /// Ends the client; operations still outstanding are lost. `worker` is the activity of the
    /// client's thread.
    pub fn report(self, worker: WorkerReport) -> ClientReport {
        let book = self.book;
        ClientReport {
            outstanding: book.in_flight(),
            counts: book.counts,
            windows: book.windows,
            verdict: book.spec.verifier.map(Verifier::verdict),
            pattern_hash: book.spec.pattern.digest(),
            worker,
        }
    }
}

impl Book {
    fn in_flight(&self) -> u64 {
        self.counts.issued - self.counts.completed - self.counts.errors
    }

    /// Returns the number of operations that can be issued before another operation ends, if no
    /// request was refused.
    fn room(&self) -> u64 {
        (self.spec.queue_depth as u64)
            .saturating_sub(self.in_flight())
            .min(self.limit - self.counts.issued)
    }

    /// Returns the age of all outstanding operations together, in ns.
    fn age_ns(&self, now_ns: u64) -> i128 {
        i128::from(
            self.in_flight()
                .wrapping_mul(now_ns)
                .wrapping_sub(self.issued_ns) as i64,
        )
    }

    fn has_ended(&self) -> bool {
        self.counts.issued == self.limit && self.in_flight() == 0
    }

    fn window(&mut self) -> Option<&mut Window> {
        match self.phase {
            Phase::Window(run) => self.windows.get_mut(usize::from(run)),
            _ => None,
        }
    }

    /// Ends the window of the previous phase, and begins the window of `phase`.
    #[cold]
    fn enter(&mut self, phase: Phase, now_ns: u64) {
        self.count_outstanding(now_ns);
        let age_ns = self.age_ns(now_ns);
        let (from_ns, to_ns) = (self.window_from_ns, self.outstanding_ns);
        let (due, backlog) = self.due(now_ns);
        if let Some(window) = self.window() {
            window.ended_ns = now_ns;
            window.carried_ns += age_ns;
            window.outstanding_ns = u128::from(to_ns.wrapping_sub(from_ns));
            window.open_loop.due = due - window.open_loop.due;
            window.open_loop.backlog = backlog;
        }
        self.window_from_ns = to_ns;
        self.phase = phase;
        let schedule = self.spec.schedule.as_mut();
        if let Some(schedule) = schedule.filter(|_| phase.is_loading()) {
            schedule.begin(now_ns);
        }
        let (due, _) = self.due(now_ns);
        if let Some(window) = self.window() {
            window.started_ns = now_ns;
            window.carried_ns -= age_ns;
            // While the window is open, the field is the number of operations that were due before
            // the window began.
            window.open_loop.due = due;
        }
    }

    /// Returns the number of operations that have become due by now, and the number of them that
    /// are not issued yet. Both are 0 in a closed loop.
    fn due(&self, now_ns: u64) -> (u64, u64) {
        let schedule = self.spec.schedule.as_ref();
        schedule.map_or((0, 0), |schedule| {
            (schedule.due(now_ns), schedule.backlog(now_ns))
        })
    }

    fn wants_to_issue(&self, now_ns: u64) -> bool {
        let is_due = || {
            self.spec
                .schedule
                .as_ref()
                .is_none_or(|schedule| schedule.due_ns(now_ns).is_some())
        };
        self.refused.is_some() || (self.room() > 0 && is_due())
    }

    fn count_outstanding(&mut self, now_ns: u64) {
        // Even with 4096 operations outstanding, the sum wraps only after 52 days, and only
        // differences of the sum are used.
        let elapsed_ns = now_ns.saturating_sub(self.counted_to_ns);
        self.outstanding_ns = self
            .outstanding_ns
            .wrapping_add(self.in_flight().wrapping_mul(elapsed_ns));
        self.counted_to_ns = now_ns;
    }

    /// Issues the operations that can be issued, and returns their number.
    #[inline(always)]
    fn issue_all<P: Paths>(&mut self, paths: &mut P, now_ns: u64) -> Result<usize, BackendError> {
        let mut issued = 0;
        let result = self.issue_each(paths, now_ns, &mut issued);
        self.counts.issued += issued;
        self.issued_ns = self.issued_ns.wrapping_add(issued.wrapping_mul(now_ns));
        result.map(|()| issued as usize)
    }

    /// Issues the operations that can be issued, and counts them in `issued`, which is 0 at the
    /// call.
    #[inline(always)]
    fn issue_each<P: Paths>(
        &mut self,
        paths: &mut P,
        now_ns: u64,
        issued: &mut u64,
    ) -> Result<(), BackendError> {
        if let Some((mut operation, request)) = self.refused.take() {
            operation.issued_ns = now_ns;
            if self.spec.schedule.is_none() {
                operation.intended_ns = now_ns;
            }
            let again = operation.again();
            if let Err(error) = paths.issue(request, operation) {
                return self.refuse(again, request, error);
            }
            *issued = 1;
        }
        for _ in *issued..self.room() {
            let Some((operation, request)) = self.next_operation(now_ns) else {
                break;
            };
            let again = operation.again();
            if let Err(error) = paths.issue(request, operation) {
                return self.refuse(again, request, error);
            }
            *issued += 1;
        }
        Ok(())
    }

    /// Keeps a request that found no room, to offer it again. The function is inlined, because a
    /// call would pass the operation and the request through memory, and they would be written there
    /// for each operation.
    #[inline(always)]
    fn refuse(
        &mut self,
        operation: Operation,
        request: Request,
        error: IssueError,
    ) -> Result<(), BackendError> {
        match error {
            IssueError::Full => {
                self.refused = Some((operation, request));
                Ok(())
            }
            IssueError::Down(error) => Err(*error),
        }
    }

    /// Makes an operation of the next access that can be made. Returns `None` if no operation is
    /// due, or no access can be made.
    #[inline(always)]
    fn next_operation(&mut self, now_ns: u64) -> Option<(Operation, Request)> {
        let intended_ns = match &mut self.spec.schedule {
            None => now_ns,
            Some(schedule) => schedule.take_due(now_ns)?,
        };
        let (access, kind, mut request) = self.next_request()?;
        let mut place = 0;
        if self.tails.is_some() {
            place = self.take_place(kind, request.op());
            request = self
                .tails
                .as_ref()
                .map_or(request, |tails| request.at(tails.values.place(place)));
        }
        let moment = self.spec.verifier.as_mut().map_or(0, Verifier::issue);
        Some((
            Operation {
                access,
                moment,
                intended_ns,
                issued_ns: now_ns,
                place,
                kind: kind.to(request.rank() != u32::from(self.spec.rank)),
            },
            request,
        ))
    }

    /// Returns the next access that can be made, as its index, its kind and its request.
    #[inline(always)]
    fn next_request(&mut self) -> Option<(u32, Kind, Request)> {
        // An access to a private key with an outstanding operation is skipped. At most 1 in 16
        // accesses is private, so one of 4 consecutive accesses can be made. One more round is for
        // the end of the pattern.
        for _ in 0..5 {
            let index = self.next_access;
            let Some(access) = self.spec.pattern.accesses.get(index as usize) else {
                self.next_access = 0;
                continue;
            };
            self.next_access = index + 1;
            let (rank, key) = (access.rank.into(), access.key);
            let (kind, request) = match (access.kind, &mut self.spec.verifier) {
                (AccessKind::Read, _) => (Kind::GET, Request::get(rank, key)),
                (AccessKind::Write, Some(verifier)) => {
                    let value = verifier.next_value(access);
                    (Kind::PUT, Request::put(rank, key, value))
                }
                (AccessKind::Private, Some(_)) => match self.next_private(index) {
                    Some(next) => next,
                    None => continue,
                },
                (AccessKind::Write | AccessKind::Private, None) => {
                    (Kind::PUT, Request::put(rank, key, key))
                }
            };
            return Some((index, kind, request));
        }
        None
    }

    /// Returns the next request for a private key; `None` while an operation on the key is
    /// outstanding.
    #[inline(never)]
    fn next_private(&mut self, access: u32) -> Option<(Kind, Request)> {
        let access = self.spec.pattern.accesses.get(access as usize)?;
        let (rank, key) = (u32::from(access.rank), access.key);
        Some(match self.spec.verifier.as_mut()?.begin_private(access)? {
            PrivateStep::Get => (Kind::PRIVATE_GET, Request::get(rank, key)),
            PrivateStep::Put(value) => {
                let is_corrupt = self.tails.is_none() && std::mem::take(&mut self.spec.corrupt_one);
                let value = value ^ u64::from(is_corrupt);
                (Kind::PRIVATE_PUT, Request::put(rank, key, value))
            }
        })
    }

    /// Takes a place, and writes the tail of the value of a put to it. Without verification the
    /// function writes nothing, and the place keeps its last tail.
    #[inline(never)]
    fn take_place(&mut self, kind: Kind, op: Option<Op>) -> u32 {
        let Some(Tails { values, free, tail }) = self.tails.as_deref_mut() else {
            return 0;
        };
        // The client has a place for each operation that it can have outstanding, so `free` is not
        // empty.
        let place = free.pop().unwrap_or_default();
        if let (Some(Op::Put { value, .. }), Some(_)) = (op, &self.spec.verifier) {
            let is_corrupt = kind.is_private() && std::mem::take(&mut self.spec.corrupt_one);
            fill_tail(value, tail);
            tail.last_mut()
                .into_iter()
                .for_each(|last| *last ^= u8::from(is_corrupt));
            values.write(place, tail);
        }
        place
    }

    /// Frees the place of an operation. If the operation has found a value, judges the tail of the
    /// value.
    #[inline(never)]
    fn end_tail(&mut self, operation: &Operation, response: &Response) {
        let Self { tails, spec, .. } = self;
        let Some(Tails { values, free, tail }) = tails.as_deref_mut() else {
            return;
        };
        free.push(operation.place);
        let access = spec.pattern.accesses.get(operation.access as usize);
        if let (Some(verifier), Some(Outcome::GetOk { value }), Some(access)) = (
            &mut spec.verifier,
            response.answer_to(operation.kind.is_put()),
            access,
        ) {
            values.read(operation.place, tail);
            verifier.judge_tail(access, value, tail);
        }
    }

    /// Ends the operations that a poll has found ended.
    #[inline(always)]
    fn end_all(&mut self, ended: &[(Operation, Response)], now_ns: u64) {
        let before = self.counts;
        if self.tails.is_some() {
            for (operation, response) in ended {
                self.end_tail(operation, response);
            }
        }
        for (operation, response) in ended {
            self.end(operation, response, now_ns);
        }
        for group in 0..Kind::GROUPS {
            self.record(group, now_ns);
        }
        let errors = self.counts.errors - before.errors;
        let not_found = self.counts.not_found - before.not_found;
        self.counts.completed += ended.len() as u64 - errors;
        if let Some(window) = self.window() {
            window.errors += errors;
            window.not_found += not_found;
        }
    }

    #[inline(always)]
    fn end(&mut self, operation: &Operation, response: &Response, now_ns: u64) {
        let kind = operation.kind;
        let outcome = response.answer_to(kind.is_put());
        if kind.is_judged() {
            self.judge(operation, outcome);
        }
        match outcome {
            Some(Outcome::NotFound) => self.counts.not_found += 1,
            Some(_) => {}
            None => {
                self.counts.errors += 1;
                self.issued_ns = self.issued_ns.wrapping_sub(operation.issued_ns);
                return;
            }
        }
        let times_ns = (operation.intended_ns, operation.issued_ns);
        if self.alike[kind.group()].times_ns != times_ns {
            self.record(kind.group(), now_ns);
            self.alike[kind.group()].times_ns = times_ns;
        }
        self.alike[kind.group()].count += 1;
    }

    /// Judges the outcome of a get, or of an operation on a private key.
    #[inline(always)]
    fn judge(&mut self, operation: &Operation, outcome: Option<Outcome>) {
        let access = self.spec.pattern.accesses.get(operation.access as usize);
        let (Some(verifier), Some(access)) = (&mut self.spec.verifier, access) else {
            return;
        };
        let moment = operation.moment;
        match outcome {
            outcome if operation.kind.is_private() => verifier.end_private(access, outcome),
            Some(Outcome::GetOk { value }) => verifier.judge_read(access, moment, Some(value)),
            Some(Outcome::NotFound) => verifier.judge_read(access, moment, None),
            _ => {}
        }
    }

    /// Records the round trips of a group that [`alike`](Self::alike) holds, if any.
    #[inline(always)]
    fn record(&mut self, group: usize, now_ns: u64) {
        if self.alike[group].count > 0 {
            self.record_alike(group, now_ns);
        }
    }

    /// Takes the round trips of a group, which end now, from the books, and records them if a
    /// window is open.
    #[inline(never)]
    fn record_alike(&mut self, group: usize, now_ns: u64) {
        let Alike { times_ns, count } = std::mem::take(&mut self.alike[group]);
        let (intended_ns, issued_ns) = times_ns;
        self.issued_ns = self.issued_ns.wrapping_sub(count.wrapping_mul(issued_ns));
        let Some(window) = self.window() else { return };
        let histogram = match group {
            0 => &mut window.local.gets,
            1 => &mut window.local.puts,
            2 => &mut window.remote.gets,
            _ => &mut window.remote.puts,
        };
        histogram.record_many(now_ns.saturating_sub(intended_ns), count);
        window.open_loop.held_ns += u128::from(count * (issued_ns - intended_ns));
    }
}

#[cfg(test)]
mod tests;
