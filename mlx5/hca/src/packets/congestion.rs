//! The congestion window of a pair of devices: CUBIC (RFC 9438), counted in packets. The window
//! stops growing when a queue in the network fills.
//!
//! The connections between the two devices share the window: through a narrow link, sixteen of them
//! get no more than one does. A loss shrinks the window once for everything that was under way when
//! the loss was noticed. The growth of the round trip shows how many packets wait in
//! queues. If they are more than a socket buffer holds, the window shrinks. Such a queue may be the
//! peer's own socket buffer, if its program polls rarely.

use std::cell::{RefCell, RefMut};
use std::rc::Rc;

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
/// Number of packets that may be sent at once. The other packets of a window are spread over a
/// round trip, if the round trip is longer than [`PACED_NS`].
const BURST: u64 = 16;
const PACED_NS: u64 = 1_000_000;

/// Packets of a connection: the PSN of the oldest that is not acknowledged, the PSN after the
/// newest that was sent, and the number of packets that may be in the network.
pub(super) type Counts = (Psn, Psn, u32);

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
    /// The number of packets that may be in the network, and of the connections that have some.
    flying: u32,
    busy: u32,
    /// The numbers of packets that all connections have sent and got acknowledged, without repeats.
    /// Everything that was under way at some time counts as acknowledged when `done` has reached
    /// the value that `sent` had at that time.
    sent: u64,
    done: u64,
    /// Time at which the next packet is due if packets are evenly spaced, in ns.
    pace_ns: u64,
    /// The time since which the window has grown above the threshold, and its size at that time.
    epoch: Option<(u64, f64)>,
    /// `sent` when the window was last full.
    full: u64,
    /// `sent` when the window last shrank because of a queue.
    drained: u64,
    /// `sent` at the last loss. Until `done` reaches it, further losses do not shrink the window.
    recovery: Option<u64>,
    /// Size of the window before the first loss of this recovery, and the number of losses that may
    /// still prove to be none. `None` outside of a recovery, and if the losses are certain.
    before: Option<(Size, u32)>,
    /// The packets that the network has marked in one round trip, which begins with the first
    /// marked packet: `done` and `sent` at that time, and the number of marked packets.
    marks: Option<(u64, u64, u32)>,
    /// Least round trip, in ns.
    least_ns: u64,
}

impl Congestion {
    /// Makes a window of at most `limit` packets, which doubles in a round trip up to `threshold`.
    pub(super) fn new(limit: u32, threshold: u32, queue: u32) -> Self {
        Self {
            size: Size {
                packets: limit.min(INITIAL).into(),
                threshold: threshold.into(),
                largest: 0.0,
            },
            limit,
            queue,
            flying: 0,
            busy: 0,
            sent: 0,
            done: 0,
            pace_ns: 0,
            epoch: None,
            full: 0,
            drained: 0,
            recovery: None,
            before: None,
            marks: None,
            least_ns: u64::MAX,
        }
    }

    /// Returns the maximum number of packets under way.
    const fn window(&self) -> u32 {
        self.size.packets as u32
    }

    /// Notes that the window is full with the packets under way.
    pub(super) const fn on_full(&mut self) {
        self.full = self.sent;
    }

    /// Notes that `packets` arrived since the last call. `round_trip_ns` is the round trip of the
    /// last of these packets, if it was sent only once. A window that is not used up does not grow.
    fn on_progress(&mut self, packets: u32, round_trip_ns: Option<u64>, now_ns: u64) {
        let until = self.done;
        if self.marks.is_some_and(|(_, end, _)| end <= until) {
            self.on_marked_round();
        }
        if let Some(end) = self.recovery {
            if end > until {
                return;
            }
            (self.recovery, self.before) = (None, None);
        }
        if until > self.full {
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
            if until > self.drained {
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

    /// Notes that the network has marked `packets` packets, because a queue on their way is long.
    /// Marks are ignored until the window has recovered from a loss, which has already shrunk it.
    #[cold]
    pub(super) fn on_marks(&mut self, packets: u32) {
        if self.recovery.is_none() {
            let (.., marked) = self.marks.get_or_insert((self.done, self.sent, 0));
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
            let share = f64::from(marked) / (end - begin).max(1) as f64;
            let size = &mut self.size;
            size.largest = size.packets;
            size.packets = (size.packets * (1.0 - share.min(1.0) / 2.0)).max(MIN.into());
            size.threshold = size.threshold.min(size.packets);
            self.epoch = None;
        }
    }

    /// Notes that `packets` packets are lost.
    pub(super) fn on_loss(&mut self, packets: u32) {
        if self.recovery.is_none() {
            self.before = Some((self.size, 0));
            self.size.largest = self.size.packets;
            self.size.threshold = (LEFT * self.size.packets).max(MIN.into());
            self.size.packets = self.size.threshold;
            (self.recovery, self.epoch, self.marks) = (Some(self.sent), None, None);
        }
        if let Some((_, losses)) = &mut self.before {
            *losses += packets;
        }
    }

    /// Notes that a connection sends again all its packets that are not acknowledged: because the
    /// peer discarded them (`is_known`), or because no answer came for a time.
    fn on_repeat(&mut self, is_known: bool) {
        self.on_loss(0);
        self.before = match self.before {
            Some((size, losses)) if !is_known => Some((size, losses.max(1))),
            _ => None,
        };
    }

    /// Notes that `packets` packets were not lost, although they had counted as lost. If no loss of
    /// this recovery is left, restores the window and returns `true` (compare RFC 5682).
    fn on_needless_repeat(&mut self, packets: u32) -> bool {
        let Some((size, losses)) = &mut self.before else {
            return false;
        };
        *losses = losses.saturating_sub(packets);
        let is_over = *losses == 0;
        if is_over {
            self.size = *size;
            (self.recovery, self.before) = (None, None);
        }
        is_over
    }
}

/// A connection's part of a congestion window.
#[derive(Debug)]
pub(super) struct Part {
    shared: Rc<RefCell<Congestion>>,
    /// The packets of this connection that `shared` counts.
    counted: Counts,
    /// Maximum number of packets under way until answers show that earlier ones have left the
    /// network.
    allowed: u32,
}

impl Part {
    /// Makes the only part of a window, for packets from PSN `first` on.
    pub(super) fn new(congestion: Congestion, first: Psn) -> Self {
        Self {
            shared: Rc::new(RefCell::new(congestion)),
            counted: (first, first, 0),
            allowed: u32::MAX,
        }
    }

    /// Makes this a part of the window of `other`. Nothing was sent yet.
    pub(super) fn join(&mut self, other: &Self) {
        self.shared = Rc::clone(&other.shared);
    }

    pub(super) fn shared(&self) -> RefMut<'_, Congestion> {
        self.shared.borrow_mut()
    }

    /// Returns the maximum number of packets under way on this connection: what the others leave of
    /// the window, or an equal share for each connection with packets under way if that is more. It
    /// is at least 1: the answer to its own packet lets a connection continue.
    pub(super) fn size(&self) -> u32 {
        let (shared, (.., flying)) = (self.shared(), self.counted);
        let busy = shared.busy + u32::from(flying == 0);
        let left = (shared.window() + flying).saturating_sub(shared.flying);
        self.allowed.min(left.max(shared.window() / busy)).max(1)
    }

    /// Notes the packets that the connection has now.
    pub(super) fn count(&mut self, counts: Counts) {
        let ((first, end, flying), before) = (counts, self.counted);
        self.counted = counts;
        let mut shared = self.shared();
        shared.done += first.since(before.0) as u64;
        shared.sent += end.since(before.1) as u64;
        shared.flying = shared.flying + flying - before.2;
        shared.busy = shared.busy + u32::from(flying > 0) - u32::from(before.2 > 0);
    }

    /// Notes that the connection waits for no packet any more.
    pub(super) fn leave(&mut self) {
        let (_, end, _) = self.counted;
        self.count((end, end, 0));
    }

    /// Returns the time at which the next packet, which takes this number of PSNs, is to be sent,
    /// if too many were sent at once. Otherwise counts the packet.
    pub(super) fn too_early(&self, psns: u32, round_trip_ns: u64, now_ns: u64) -> Option<u64> {
        let mut shared = self.shared();
        if round_trip_ns <= PACED_NS || shared.flying < BURST as u32 {
            return None;
        }
        // The gap lets 5/4 of a window (2 windows while the window doubles) be sent in a round
        // trip, so that the window is used.
        let is_doubling = shared.size.packets < shared.size.threshold;
        let faster = if is_doubling { 8 } else { 5 };
        let gap_ns = 4 * round_trip_ns / (faster * u64::from(shared.window()));
        if shared.pace_ns > now_ns + BURST * gap_ns {
            return Some(shared.pace_ns - BURST / 2 * gap_ns);
        }
        shared.pace_ns = shared.pace_ns.max(now_ns) + u64::from(psns) * gap_ns;
        None
    }

    /// See [`Congestion::on_progress`]. `counts` are the packets after the progress.
    pub(super) fn on_progress(
        &mut self,
        counts: Counts,
        packets: u32,
        round_trip_ns: Option<u64>,
        now_ns: u64,
    ) {
        self.count(counts);
        let is_uncertain = self.shared().before.is_some();
        self.allowed = if is_uncertain {
            self.allowed.saturating_mul(2)
        } else {
            u32::MAX
        };
        self.shared().on_progress(packets, round_trip_ns, now_ns);
    }

    /// See [`Congestion::on_repeat`]. The connection may have one packet under way until the answer
    /// to it shows that the others have left the network.
    pub(super) fn on_repeat(&mut self, is_known: bool) {
        self.allowed = 1;
        self.shared().on_repeat(is_known);
    }

    /// See [`Congestion::on_needless_repeat`].
    pub(super) fn on_needless_repeat(&mut self, packets: u32) -> bool {
        let is_over = self.shared().on_needless_repeat(packets);
        if is_over {
            self.allowed = u32::MAX;
        }
        is_over
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.leave();
    }
}
