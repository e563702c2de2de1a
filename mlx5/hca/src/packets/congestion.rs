//! The congestion window of a requester: CUBIC (RFC 9438), counted in packets. The window stops
//! growing when a queue in the network fills.
//!
//! Each connection has a window of its own. A loss shrinks the window once for everything that was
//! under way when the loss was noticed. The growth of the round trip shows how many packets wait in
//! queues. If they are more than a socket buffer holds, the window shrinks. Such a queue may be the
//! peer's own socket buffer, if its program polls rarely.

use mlx5_wire::roce::Psn;

/// Initial window, in packets. RFC 6928 has ten for paths across the Internet; most peers of a
/// device are one switch away.
const INITIAL: u32 = 32;
/// Minimum of a window after a loss, in packets.
const MIN: u32 = 2;
/// The part of the window that is left after a loss.
const LEFT: f64 = 0.5;
/// Growth in packets per cubed second.
const SCALING: f64 = 0.4;
/// Minimum growth in packets per round trip: that of NewReno.
const LEAST: f64 = 1.0;

#[derive(Clone, Copy, Debug)]
struct Size {
    packets: f64,
    /// Below this size the window doubles in a round trip.
    threshold: f64,
    /// The window before the last loss.
    largest: f64,
}

#[derive(Debug)]
pub(super) struct Congestion {
    size: Size,
    /// Maximum size, in packets.
    limit: u32,
    /// The window grows only while at most this number of packets wait in queues of the network.
    queue: u32,
    /// The time since which the window has grown above the threshold, and its size at that time.
    epoch: Option<(u64, f64)>,
    /// PSN after the packets that were under way when the window was last full.
    full: Psn,
    /// PSN after the packets that were under way when the window last shrank because of a queue.
    drained: Psn,
    /// PSN after the packets that were under way at the last loss. Until they are acknowledged,
    /// further losses do not shrink the window.
    recovery: Option<Psn>,
    /// Size of the window before the first loss of this recovery, and the number of losses that may
    /// still prove to be none. `None` outside of a recovery, and if the losses are certain.
    before: Option<(Size, u32)>,
    /// The packets that the network has marked in one round trip, which begins with the first
    /// marked packet: the PSN before which everything was acknowledged at that time, the PSN after
    /// the packets that were then under way, and the number of marked packets.
    marks: Option<(Psn, Psn, u32)>,
    /// Maximum number of packets under way until answers show that earlier ones have left the
    /// network.
    allowed: u32,
    /// Least round trip, in ns.
    least_ns: u64,
}

impl Congestion {
    /// Makes a window of at most `limit` packets, which doubles in a round trip up to `threshold`.
    pub(super) fn new(limit: u32, threshold: u32, queue: u32, first: Psn) -> Self {
        Self {
            size: Size {
                packets: limit.min(INITIAL).into(),
                threshold: threshold.into(),
                largest: 0.0,
            },
            limit,
            queue,
            epoch: None,
            full: first,
            drained: first,
            recovery: None,
            before: None,
            marks: None,
            allowed: u32::MAX,
            least_ns: u64::MAX,
        }
    }

    /// Returns the maximum number of packets under way.
    pub(super) fn window(&self) -> u32 {
        self.allowed.min(self.size.packets as u32)
    }

    /// Returns whether the window doubles in a round trip.
    pub(super) fn is_doubling(&self) -> bool {
        self.size.packets < self.size.threshold
    }

    /// Notes that the window is full with the packets under way, which are before `next`.
    pub(super) fn on_full(&mut self, next: Psn) {
        self.full = next;
    }

    /// Notes that everything before `until` is acknowledged, and that `packets` arrived since the
    /// last call. `round_trip_ns` is the round trip of the last of these packets, if it was sent
    /// only once. A window that is not used up does not grow.
    pub(super) fn on_progress(
        &mut self,
        (until, packets): (Psn, u32),
        round_trip_ns: Option<u64>,
        now_ns: u64,
    ) {
        self.allowed = match self.before {
            Some(_) => self.allowed.saturating_mul(2),
            None => u32::MAX,
        };
        if let Some((_, end, _)) = self.marks {
            if end.since(until) <= 0 {
                self.on_marked_round();
            }
        }
        if let Some(end) = self.recovery {
            if end.since(until) > 0 {
                return;
            }
            (self.recovery, self.before) = (None, None);
        }
        if until.since(self.full) > 0 {
            (self.full, self.drained, self.epoch) = (until, until, None);
            return;
        }
        let Some(round_trip_ns) = round_trip_ns else {
            return;
        };
        self.least_ns = self.least_ns.min(round_trip_ns);
        let packets = f64::from(packets);
        let size = &mut self.size;
        let (round_trip, queueing) = (
            round_trip_ns.max(1) as f64,
            (round_trip_ns - self.least_ns) as f64,
        );
        let queued = size.packets * queueing / round_trip;
        if queued > self.queue.into() {
            if until.since(self.drained) > 0 {
                size.packets -= queued / 2.0;
                size.threshold = size.threshold.min(size.packets);
                (self.drained, self.epoch) = (self.full, None);
            }
            return;
        }
        if size.packets < size.threshold {
            size.packets += packets;
        } else {
            let (epoch_ns, begin) = *self.epoch.get_or_insert((now_ns, size.packets));
            let plateau = ((size.largest - begin).max(0.0) / SCALING).cbrt();
            let seconds = ((now_ns - epoch_ns) as f64 + round_trip) / 1e9;
            let cubic = begin.max(size.largest) + SCALING * (seconds - plateau).powi(3);
            let growth = (cubic - size.packets).clamp(LEAST, LEAST.max(size.packets / 2.0));
            size.packets += packets * growth / size.packets;
        }
        size.packets = size.packets.min(self.limit.into());
    }

    /// Notes that the network has marked `packets` of the packets after `first` and before `sent`,
    /// because a queue on their way is long. Marks are ignored until the window has recovered from
    /// a loss, which has already shrunk it.
    #[cold]
    pub(super) fn on_marks(&mut self, first: Psn, packets: u32, sent: Psn) {
        if self.recovery.is_none() {
            let (.., marked) = self.marks.get_or_insert((first, sent, 0));
            *marked += packets;
            let size = &mut self.size;
            size.threshold = size.threshold.min(size.packets);
        }
    }

    /// Shrinks the window by half of the share of the marked packets of a round trip, as DCTCP does
    /// (RFC 8257). A queue marks packets when it is still far too short to lose any. If marks
    /// halved the window, the link would be idle at times.
    #[cold]
    fn on_marked_round(&mut self) {
        if let Some((begin, end, marked)) = self.marks.take() {
            let share = f64::from(marked) / f64::from(end.since(begin).max(1));
            let size = &mut self.size;
            size.largest = size.packets;
            size.packets = (size.packets * (1.0 - share.min(1.0) / 2.0)).max(MIN.into());
            size.threshold = size.threshold.min(size.packets);
            self.epoch = None;
        }
    }

    /// Notes that `packets` of the packets before `sent` are lost.
    pub(super) fn on_loss(&mut self, packets: u32, sent: Psn) {
        if self.recovery.is_none() {
            self.before = Some((self.size, 0));
            self.size.largest = self.size.packets;
            self.size.threshold = (LEFT * self.size.packets).max(MIN.into());
            self.size.packets = self.size.threshold;
            (self.recovery, self.epoch, self.marks) = (Some(sent), None, None);
        }
        if let Some((_, losses)) = &mut self.before {
            *losses += packets;
        }
    }

    /// Notes that all packets before `sent` that are not acknowledged are sent again: because the
    /// peer discarded them (`is_known`), or because no answer came for a time. The window is one
    /// packet until the answer to it shows that the others have left the network.
    pub(super) fn on_repeat(&mut self, sent: Psn, is_known: bool) {
        self.on_loss(0, sent);
        self.allowed = 1;
        self.before = match self.before {
            Some((size, losses)) if !is_known => Some((size, losses.max(1))),
            _ => None,
        };
    }

    /// Notes that `packets` packets were not lost, although they had counted as lost. If no loss of
    /// this recovery is left, restores the window and returns `true` (compare RFC 5682).
    pub(super) fn on_needless_repeat(&mut self, packets: u32) -> bool {
        let Some((size, losses)) = &mut self.before else {
            return false;
        };
        *losses = losses.saturating_sub(packets);
        let is_over = *losses == 0;
        if is_over {
            self.size = *size;
            (self.recovery, self.before, self.allowed) = (None, None, u32::MAX);
        }
        is_over
    }
}
