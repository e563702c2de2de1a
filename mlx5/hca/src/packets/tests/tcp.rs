//! TCP through the links of [`link`](super::link), to compare with: CUBIC (RFC 9438) and SACK (RFC
//! 6675) with a minimum retransmission time-out of 200 ms, as Linux has them.

use super::link::{Link, Load, MTU};
use super::*;

const MIN_TIMEOUT_NS: u64 = 200_000_000;
/// Number of segments reported behind a missing one after which it counts as lost.
const DUPLICATES: usize = 3;

/// A packet that arrives: time, order, and the segment, or the acknowledgement: the expected
/// segment and the later segments that arrived.
type Arrival = Reverse<(u64, u64, Result<u64, (u64, Vec<u64>)>)>;

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    Flying,
    Reported,
    Lost,
}

/// A sender whose messages are segments, or end with one.
struct Sender {
    /// Segments that are not acknowledged: state, time of sending, whether it was sent again.
    segments: VecDeque<(State, u64, bool)>,
    first: u64,
    /// Number of segments posted.
    posted: u64,
    window: f64,
    threshold: f64,
    largest: f64,
    epoch_ns: u64,
    /// End of the segments under way at the last loss.
    recovery: u64,
    /// Smoothed round trip and its variation.
    round_trip_ns: Option<(u64, u64)>,
    backoff: u32,
    timeout_ns: u64,
}

impl Sender {
    fn next(&mut self, now_ns: u64) -> Option<u64> {
        let count = |kind| {
            self.segments
                .iter()
                .filter(|(state, ..)| *state == kind)
                .count()
        };
        if count(State::Flying) as f64 >= self.window.floor() {
            return None;
        }
        let lost = self
            .segments
            .iter()
            .position(|(state, ..)| *state == State::Lost);
        let end = self.first + self.segments.len() as u64;
        if lost.is_none() && end == self.posted {
            return None;
        }
        if self.segments.is_empty() {
            self.wait(now_ns);
        }
        let nth = lost.unwrap_or(self.segments.len());
        if lost.is_some() {
            self.segments[nth] = (State::Flying, now_ns, true);
        } else {
            self.segments.push_back((State::Flying, now_ns, false));
        }
        Some(self.first + nth as u64)
    }

    fn wait(&mut self, now_ns: u64) {
        let learned_ns = self
            .round_trip_ns
            .map_or(1_000_000_000, |(mean, var)| mean + 4 * var);
        self.timeout_ns = now_ns + (learned_ns.max(MIN_TIMEOUT_NS) << self.backoff.min(8));
    }

    /// Shrinks the window, once for a window of segments.
    fn shrink(&mut self, now_ns: u64) {
        if self.first >= self.recovery {
            self.largest = self.window;
            self.threshold = (0.7 * self.window).max(2.0);
            self.window = self.threshold;
            self.epoch_ns = now_ns;
            self.recovery = self.first + self.segments.len() as u64;
        }
    }

    /// Takes an acknowledgement of the segments before `until`, and of those `reported`.
    fn on_ack(&mut self, until: u64, reported: &[u64], now_ns: u64) {
        let mut newly = 0;
        let mut sample = None;
        for nth in (self.first..until).chain(reported.iter().copied().filter(|nth| *nth >= until)) {
            let Some(segment) = self
                .segments
                .get_mut((nth.wrapping_sub(self.first)) as usize)
            else {
                continue;
            };
            if segment.0 != State::Reported {
                (newly, segment.0) = (newly + 1, State::Reported);
                sample = sample.or((!segment.2).then(|| now_ns - segment.1));
            }
        }
        let progress = until.saturating_sub(self.first) as usize;
        self.segments.drain(..progress);
        self.first = self.first.max(until);
        if let Some(sample_ns) = sample {
            self.backoff = 0;
            self.round_trip_ns = Some(self.round_trip_ns.map_or(
                (sample_ns, sample_ns / 2),
                |(mean, var)| {
                    (
                        (7 * mean + sample_ns) / 8,
                        (3 * var + mean.abs_diff(sample_ns)) / 4,
                    )
                },
            ));
        }
        if progress > 0 {
            self.wait(now_ns);
        }
        // The time of sending of the newest segment that arrived, for segments sent again.
        let newest_ns = self
            .segments
            .iter()
            .filter(|(state, ..)| *state == State::Reported)
            .map(|(_, sent_ns, _)| *sent_ns)
            .max();
        let margin_ns = self.round_trip_ns.map_or(0, |(mean, _)| mean / 4);
        let (mut behind, mut is_loss) = (0, false);
        for (state, sent_ns, is_repeat) in self.segments.iter_mut().rev() {
            behind += usize::from(*state == State::Reported);
            let is_late = if *is_repeat {
                newest_ns.is_some_and(|newest_ns| newest_ns > *sent_ns + margin_ns)
            } else {
                behind >= DUPLICATES
            };
            if *state == State::Flying && is_late {
                (*state, is_loss) = (State::Lost, true);
            }
        }
        if is_loss {
            self.shrink(now_ns);
        }
        // A window that is not used does not grow.
        if self.first < self.recovery || (self.segments.len() as f64) < self.window / 2.0 {
            return;
        }
        if self.window < self.threshold {
            self.window += f64::from(newly);
            return;
        }
        let seconds = (now_ns - self.epoch_ns) as f64 / 1e9;
        let round_trip = self
            .round_trip_ns
            .map_or(0.1, |(mean, _)| mean as f64 / 1e9);
        let k = (0.75 * self.largest).cbrt();
        let cubic = 0.4 * (seconds + round_trip - k).powi(3) + self.largest;
        let friendly = 0.7 * self.largest + 0.53 * seconds / round_trip;
        let target = cubic.max(friendly).clamp(self.window, 1.5 * self.window);
        self.window += f64::from(newly) * (target - self.window) / self.window;
    }

    fn on_time(&mut self, now_ns: u64) {
        if self.segments.is_empty() || now_ns < self.timeout_ns {
            return;
        }
        self.recovery = 0;
        self.shrink(now_ns);
        self.window = 1.0;
        self.segments
            .iter_mut()
            .filter(|(state, ..)| *state == State::Flying)
            .for_each(|segment| segment.0 = State::Lost);
        self.backoff += 1;
        self.wait(now_ns);
    }
}

/// Returns the goodput of one connection with this load through two such links, over what the link
/// can carry with segments of the MTU.
pub(super) fn goodput(link: Link, load: Load, end_ns: u64, seed: u64) -> f64 {
    let mut rng = Random::new(seed);
    let len = load.len().min(MTU);
    let segments = u64::from(load.len().div_ceil(MTU));
    let mut sender = Sender {
        segments: VecDeque::new(),
        first: 0,
        posted: 0,
        window: 10.0,
        threshold: f64::INFINITY,
        largest: 0.0,
        epoch_ns: 0,
        recovery: 0,
        round_trip_ns: None,
        backoff: 0,
        timeout_ns: 0,
    };
    let (mut forth, mut back) = (link, link);
    let (mut now_ns, mut expected, mut order) = (0, 0, 0);
    let mut early = BTreeSet::new();
    let mut network: BinaryHeap<Arrival> = BinaryHeap::new();
    while now_ns < end_ns {
        let first_message = sender.first / segments;
        sender.posted = (first_message + load.depth) * segments;
        while let Some(nth) = sender.next(now_ns) {
            order += 1;
            if let Some(at_ns) = forth.send(now_ns, len, &mut rng) {
                network.push(Reverse((at_ns, order, Ok(nth))));
            }
        }
        let arrival = network
            .peek()
            .map_or(u64::MAX, |Reverse((at_ns, ..))| *at_ns);
        now_ns = now_ns.max(arrival.min(sender.timeout_ns));
        if arrival <= now_ns {
            match network.pop().unwrap().0.2 {
                Ok(nth) => {
                    if nth >= expected {
                        early.insert(nth);
                    }
                    while early.remove(&expected) {
                        expected += 1;
                    }
                    order += 1;
                    if let Some(at_ns) = back.send(now_ns, 0, &mut rng) {
                        let reported = early.iter().copied().collect();
                        network.push(Reverse((at_ns, order, Err((expected, reported)))));
                    }
                }
                Err((until, reported)) => sender.on_ack(until, &reported, now_ns),
            }
        }
        sender.on_time(now_ns);
    }
    sender.first as f64 * f64::from(len) / link.capacity(now_ns)
}
