//! The packets of a requester, beginning with the oldest that is not acknowledged, and the losses
//! among them.
//!
//! A software HCA holds packets that arrive early, and reports them. So a packet to such a peer is
//! lost if a later packet is reported, and the earlier packet does not follow within the longest
//! delay that the network is known to cause by reordering (compare RFC 8985).

use std::collections::VecDeque;

use mlx5_wire::roce::Psn;

use super::congestion::Counts;

/// Maximum time, in ns, before a packet that was overtaken counts as lost.
const MAX_REORDER_NS: u64 = 4_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing is known of the packet since it was sent.
    Flying,
    /// The packet is to be sent again.
    Lost,
    /// The peer has the packet, and waits for an earlier packet to execute it.
    Held,
    /// The packet was executed, and its response arrived if it has one.
    Done,
}

#[derive(Clone, Copy, Debug)]
struct Packet {
    state: State,
    is_repeat: bool,
    sent_ns: u64,
    /// The time from which on a response is expected: when the packet was sent, or when the peer
    /// reported that it holds the request.
    from_ns: u64,
    /// The time at which the peer reported a packet that was sent later.
    overtaken_ns: Option<u64>,
}

/// The packets that a response newly reports.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Arrived {
    pub(super) packets: u32,
    /// Number of packets that had counted as lost, and of which the first copy arrived.
    pub(super) needless: u32,
    /// Send times of the first and the last of the packets that were sent only once.
    pub(super) sent_ns: Option<(u64, u64)>,
}

#[derive(Debug)]
pub(super) struct Flight {
    packets: VecDeque<Packet>,
    first: Psn,
    flying: u32,
    lost: u32,
    /// No packet before this is lost.
    lost_from: Psn,
    /// The packet that was sent last among those that arrived: its time and PSN.
    newest: (u64, Psn),
    /// Least time between a packet and its answer, in ns. An answer that comes within a quarter of
    /// this time after a repeat is an answer to the first copy.
    least_ns: Option<u64>,
    /// An overtaken packet counts as lost after this time, in ns. The time is 5/4 of the longest
    /// delay with which an overtaken packet has arrived, at most [`MAX_REORDER_NS`].
    reorder_ns: u64,
    /// Time at which the next overtaken packet counts as lost.
    due_ns: Option<u64>,
    arrived: Arrived,
}

impl Flight {
    pub(super) const fn new(first: Psn) -> Self {
        Self {
            packets: VecDeque::new(),
            first,
            flying: 0,
            lost: 0,
            lost_from: first,
            newest: (0, first),
            least_ns: None,
            reorder_ns: 0,
            due_ns: None,
            arrived: Arrived {
                packets: 0,
                needless: 0,
                sent_ns: None,
            },
        }
    }

    /// Returns the PSN of the oldest packet that is not acknowledged, or of the next packet.
    pub(super) const fn first(&self) -> Psn {
        self.first
    }

    /// Returns the PSN after the packets that were sent.
    pub(super) fn end(&self) -> Psn {
        self.first.after(self.len())
    }

    pub(super) fn len(&self) -> u32 {
        self.packets.len() as u32
    }

    /// Returns the number of packets that may be in the network.
    pub(super) const fn flying(&self) -> u32 {
        self.flying
    }

    pub(super) fn counts(&self) -> Counts {
        (self.first, self.end(), self.flying)
    }

    /// Returns the time at which [`Flight::lose_late`] has something to do.
    pub(super) const fn due_ns(&self) -> Option<u64> {
        self.due_ns
    }

    /// Notes that this number of packets was sent for the first time.
    pub(super) fn send(&mut self, count: u32, now_ns: u64) {
        for _ in 0..count {
            self.packets.push_back(Packet {
                state: State::Flying,
                is_repeat: false,
                sent_ns: now_ns,
                from_ns: now_ns,
                overtaken_ns: None,
            });
        }
        self.flying += count;
    }

    /// Returns the first lost packet.
    pub(super) fn first_lost(&mut self) -> Option<Psn> {
        if self.lost == 0 {
            return None;
        }
        let from = self.lost_from.since(self.first).max(0) as usize;
        let lost = |packet: &Packet| packet.state == State::Lost;
        let nth = from + self.packets.range(from..).position(lost)?;
        self.lost_from = self.first.after(nth as u32);
        Some(self.lost_from)
    }

    /// Notes that lost packets are sent again: the one that [`first_lost`](Self::first_lost)
    /// returned, and the lost packets that follow it without a gap, at most `limit` in total.
    /// Returns their number.
    pub(super) fn send_again(&mut self, limit: u32, now_ns: u64) -> u32 {
        let from = self.lost_from.since(self.first).max(0) as usize;
        let mut count = 0;
        for packet in self.packets.range_mut(from..).take(limit as usize) {
            if packet.state != State::Lost {
                break;
            }
            *packet = Packet {
                state: State::Flying,
                is_repeat: true,
                sent_ns: now_ns,
                from_ns: now_ns,
                overtaken_ns: None,
            };
            count += 1;
        }
        self.lost -= count;
        self.flying += count;
        count
    }

    pub(super) fn state(&self, psn: Psn) -> Option<State> {
        self.packets
            .get(psn.since(self.first) as usize)
            .map(|packet| packet.state)
    }

    /// Notes that the packets from `from` to before `until` have arrived. `state` is their new
    /// state.
    pub(super) fn arrive(&mut self, from: Psn, until: Psn, state: State, now_ns: u64) {
        let from = from.since(self.first).max(0) as usize;
        let until = (until.since(self.first).max(0) as usize).min(self.packets.len());
        for nth in from..until {
            let packet = &mut self.packets[nth];
            if packet.state == State::Done {
                continue;
            }
            let before = std::mem::replace(&mut packet.state, state);
            if before == State::Held {
                continue;
            }
            let sent_ns = packet.sent_ns;
            self.arrived.packets += 1;
            let psn = self.first.after(nth as u32);
            if sent_ns > self.newest.0 || sent_ns == self.newest.0 && psn.since(self.newest.1) > 0 {
                self.newest = (sent_ns, psn);
            }
            let took_ns = now_ns.saturating_sub(sent_ns);
            let is_early =
                packet.is_repeat && self.least_ns.is_some_and(|least_ns| took_ns < least_ns / 4);
            if !is_early && self.least_ns.is_none_or(|least_ns| took_ns < least_ns) {
                self.least_ns = Some(took_ns);
            }
            if !packet.is_repeat {
                let (first_ns, _) = self.arrived.sent_ns.unwrap_or((sent_ns, sent_ns));
                self.arrived.sent_ns = Some((first_ns, sent_ns));
            }
            if before == State::Flying {
                self.flying -= 1;
                if !is_early && packet.overtaken_ns.is_none() {
                    continue;
                }
            } else {
                self.lost -= 1;
            }
            self.arrived.needless += u32::from(is_early || before == State::Lost);
            let late_ns = match packet.overtaken_ns {
                Some(overtaken_ns) => now_ns.saturating_sub(overtaken_ns),
                None if is_early => self.reorder_ns + took_ns,
                None => 0,
            };
            self.reorder_ns = self
                .reorder_ns
                .max((late_ns + late_ns / 4).min(MAX_REORDER_NS));
        }
    }

    /// Notes that the peer holds the request with this PSN, whose responses have PSNs before
    /// `until`. They are expected from now on.
    pub(super) fn hold_request(&mut self, psn: Psn, until: Psn, now_ns: u64) {
        let from = psn.since(self.first) as usize;
        let Some(&Packet { sent_ns, .. }) = self.packets.get(from) else {
            return;
        };
        if sent_ns > self.newest.0 {
            self.newest = (sent_ns, psn);
        }
        let responses = self.packets.range_mut(from..);
        for packet in responses
            .take(until.since(psn) as usize)
            .take_while(|packet| packet.sent_ns == sent_ns)
        {
            (packet.from_ns, packet.overtaken_ns) = (now_ns, None);
        }
    }

    /// Removes the oldest packets, as far as they are done, and returns what arrived since the last
    /// call.
    pub(super) fn take_arrived(&mut self) -> Arrived {
        let is_done = |packet: &&Packet| packet.state == State::Done;
        let done = self.packets.iter().take_while(is_done).count();
        if done > 0 {
            self.packets.drain(..done);
            self.first = self.first.after(done as u32);
        }
        std::mem::take(&mut self.arrived)
    }

    /// Marks as lost the packets that later packets overtook too long ago. Returns the number of
    /// packets marked.
    pub(super) fn lose_late(&mut self, now_ns: u64) -> u32 {
        self.due_ns = None;
        let before = self.lost;
        let (newest_ns, newest) = self.newest;
        let is_older = |packet: &Packet, psn: Psn| {
            packet.from_ns < newest_ns || packet.from_ns == newest_ns && psn.since(newest) < 0
        };
        let is_gap = self.flying + self.lost < self.len()
            || self
                .packets
                .front()
                .is_some_and(|packet| is_older(packet, self.first));
        if is_gap {
            for (nth, packet) in self.packets.iter_mut().enumerate() {
                let psn = self.first.after(nth as u32);
                if packet.state != State::Flying || !is_older(packet, psn) {
                    continue;
                }
                let lost_ns = *packet.overtaken_ns.get_or_insert(now_ns) + self.reorder_ns;
                if lost_ns > now_ns {
                    self.due_ns = Some(self.due_ns.map_or(lost_ns, |due_ns| due_ns.min(lost_ns)));
                    continue;
                }
                packet.state = State::Lost;
                self.flying -= 1;
                self.lost += 1;
                if self.lost_from.since(psn) > 0 || self.lost == 1 {
                    self.lost_from = psn;
                }
            }
        }
        self.lost - before
    }

    /// Notes that the packets that count as lost, and were not sent again, are under way after all.
    pub(super) fn lose_none(&mut self) {
        let lost = self
            .packets
            .iter_mut()
            .filter(|packet| packet.state == State::Lost);
        lost.for_each(|packet| packet.state = State::Flying);
        self.flying += std::mem::take(&mut self.lost);
    }

    /// Marks as lost all packets that are not done. Without `drops_held`, packets that the peer
    /// holds stay held, except the first packet. Returns the number of packets marked.
    pub(super) fn lose_all(&mut self, drops_held: bool) -> u32 {
        let mut count = 0;
        for (nth, packet) in self.packets.iter_mut().enumerate() {
            let is_lost = match packet.state {
                State::Flying => true,
                State::Held => drops_held || nth == 0,
                State::Lost | State::Done => false,
            };
            if is_lost {
                packet.state = State::Lost;
                count += 1;
            }
        }
        self.lost += count;
        (self.flying, self.lost_from, self.due_ns) = (0, self.first, None);
        count
    }
}
