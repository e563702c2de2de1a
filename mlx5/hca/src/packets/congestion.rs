//! The congestion window of a requester: NewReno (RFC 5681, RFC 6582), counted in packets.
//!
//! Each connection has a window of its own, as each flow of DCQCN has a rate of its own. Losses are
//! the only signal. A loss shrinks the window once for everything that was under way when it was
//! noticed.

use mlx5_wire::roce::Psn;

/// Initial window, in packets. RFC 6928 has ten for paths across the Internet; most peers of a
/// device are one switch away.
const INITIAL: u32 = 32;
/// Minimum of half a window, in packets.
const MIN: u32 = 2;

#[derive(Clone, Copy, Debug)]
struct Size {
    packets: u32,
    /// Below this size the window doubles in a round trip. From it on, the window grows by a packet
    /// in a round trip.
    threshold: u32,
}

#[derive(Debug)]
pub(super) struct Congestion {
    size: Size,
    /// Maximum size, in packets.
    limit: u32,
    /// Number of packets acknowledged since the window grew last.
    acknowledged: u32,
    /// Maximum number of packets under way in this round trip.
    used: u32,
    /// PSN after the packets that were under way when this round trip began.
    round: Psn,
    /// PSN after the packets that were under way at the last loss. Until they are acknowledged,
    /// further losses do not shrink the window.
    recovery: Option<Psn>,
    /// The size before a repeat whose need is not known yet.
    before_repeat: Option<Size>,
}

impl Congestion {
    pub(super) fn new(limit: u32, first: Psn) -> Self {
        let size = Size {
            packets: limit.min(INITIAL),
            threshold: limit,
        };
        Self {
            size,
            limit,
            acknowledged: 0,
            used: 0,
            round: first,
            recovery: None,
            before_repeat: None,
        }
    }

    /// Returns the maximum number of packets that are not acknowledged.
    pub(super) const fn window(&self) -> u32 {
        self.size.packets
    }

    /// Notes that a packet was sent, with which `in_flight` packets are under way.
    pub(super) fn on_send(&mut self, in_flight: u32) {
        self.used = self.used.max(in_flight);
    }

    /// Notes that everything before `until` is acknowledged, `packets` more than before, and
    /// that the next packet to be sent is `next`. A window that is not used does not grow.
    pub(super) fn on_progress(&mut self, until: Psn, packets: u32, next: Psn) {
        self.before_repeat = None;
        self.recovery = self.recovery.filter(|end| end.since(until) > 0);
        let size = self.size.packets;
        if size == 1 {
            self.size.packets = self.size.threshold;
        } else if self.used >= size {
            self.acknowledged += packets;
            if size < self.size.threshold {
                self.size.packets += std::mem::take(&mut self.acknowledged);
            } else if self.acknowledged >= size {
                self.acknowledged -= size;
                self.size.packets += 1;
            }
            self.size.packets = self.size.packets.min(self.limit);
        }
        if until.since(self.round) >= 0 {
            self.used = next.since(until) as u32;
            self.round = next;
        }
    }

    /// Notes that the peer reported a loss. Packets before `sent` are under way; the peer discards
    /// what follows the lost packet. So one packet is sent, whose answer shows that the rest has
    /// left the network.
    pub(super) fn on_loss(&mut self, sent: Psn) {
        if self.recovery.is_none() {
            self.size.threshold = (self.size.packets / 2).max(MIN);
            self.recovery = Some(sent);
        }
        (self.size.packets, self.acknowledged) = (1, 0);
        self.before_repeat = None;
    }

    /// Notes that packets before `sent` are sent again because nothing was acknowledged for a time.
    pub(super) fn on_repeat(&mut self, sent: Psn) {
        let before = self.before_repeat.unwrap_or(self.size);
        self.on_loss(sent);
        self.before_repeat = Some(before);
    }

    /// Notes that packets were acknowledged that were not sent again after the last repeat: the
    /// peer was slow, and nothing was lost (compare RFC 5682).
    pub(super) fn on_needless_repeat(&mut self) {
        if let Some(before) = self.before_repeat.take() {
            (self.size, self.recovery) = (before, None);
        }
    }
}
