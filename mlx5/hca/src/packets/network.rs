//! A bad network, made on purpose: it loses, doubles, delays and reorders the packets that a port
//! sends.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::udp::Receiver;
use crate::Clock;
use crate::random::Random;

/// Maximum number of packets that are held. A port whose network holds this number has no room.
const MAX_HELD: usize = 1024;
/// Maximum further delay, in ns, of a packet that later packets overtake.
const REORDER_NS: u64 = 1_000_000;

/// The treatment of the packets that a port sends. By default the network is good.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BadNetwork {
    /// Packets in a thousand that are lost.
    pub loss_permille: u16,
    /// Packets in a thousand that arrive twice. Each copy has a delay of its own.
    pub double_permille: u16,
    /// Packets in a thousand with an additional delay of up to 1 ms, so that later packets overtake
    /// them.
    pub reorder_permille: u16,
    /// Minimum and maximum delay of a packet, in us: a random time between them. If the two differ,
    /// packets overtake each other.
    pub delay_us: (u32, u32),
}

/// A packet that is held: the time at which it is sent, its place in the order of packets, its
/// receiver, and its bytes.
type Held = Reverse<(u64, u64, Receiver, Box<[u8]>)>;

#[derive(Debug)]
pub(super) struct Network {
    options: BadNetwork,
    random: Random,
    clock: Clock,
    packets: u64,
    held: BinaryHeap<Held>,
}

impl Network {
    pub(super) fn new(options: BadNetwork, seed: u64, clock: &Clock) -> Self {
        Self {
            options,
            random: Random::new(seed),
            clock: clock.clone(),
            packets: 0,
            held: BinaryHeap::new(),
        }
    }

    pub(super) fn has_room(&self) -> bool {
        self.held.len() < MAX_HELD
    }

    /// Loses a packet, or holds it, or two copies of it, until they are due.
    pub(super) fn take(&mut self, to: &Receiver, packet: &[u8]) {
        let BadNetwork {
            loss_permille,
            double_permille,
            reorder_permille,
            delay_us: (least_us, most_us),
        } = self.options;
        if self.random.happens(loss_permille) {
            return;
        }
        let now_ns = self.clock.now_ns();
        for _ in 0..=u8::from(self.random.happens(double_permille)) {
            let delay_ns = 1000 * u64::from(least_us)
                + self
                    .random
                    .below(1000 * u64::from(most_us.saturating_sub(least_us)) + 1);
            let late_ns = if self.random.happens(reorder_permille) {
                self.random.below(REORDER_NS)
            } else {
                0
            };
            self.packets += 1;
            self.held.push(Reverse((
                now_ns + delay_ns + late_ns,
                self.packets,
                *to,
                packet.into(),
            )));
        }
    }

    pub(super) fn due_ns(&self) -> Option<u64> {
        self.held.peek().map(|Reverse((due_ns, ..))| *due_ns)
    }

    /// Takes the next packet that is due, and its destination.
    pub(super) fn pop_due(&mut self) -> Option<(Receiver, Box<[u8]>)> {
        let due_ns = self.due_ns()?;
        if due_ns > self.clock.now_ns() {
            return None;
        }
        self.held
            .pop()
            .map(|Reverse((_, _, to, packet))| (to, packet))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// Sends 10,000 packets, one per us. Returns the time of arrival in us and the number of each
    /// packet, in the order of arrival.
    fn arrivals(options: BadNetwork, seed: u64) -> Vec<(u64, u64)> {
        let now_ns = Arc::<AtomicU64>::default();
        let mut network = Network::new(options, seed, &Clock::Manual(Arc::clone(&now_ns)));
        let mut got = Vec::new();
        for us in 0..20_000_u64 {
            now_ns.store(1000 * us, Ordering::Relaxed);
            if us < 10_000 {
                let socket = ([127, 0, 0, 1], 1).into();
                network.take(
                    &Receiver {
                        socket,
                        class: 0,
                        source: 0,
                    },
                    &us.to_le_bytes(),
                );
            }
            while let Some((_, packet)) = network.pop_due() {
                got.push((us, u64::from_le_bytes((*packet).try_into().unwrap())));
            }
        }
        assert_eq!(network.due_ns(), None);
        got
    }

    #[test]
    fn packets_are_lost_doubled_late_and_reordered_as_often_as_asked_and_the_same_ones_for_a_seed()
    {
        let good = BadNetwork::default();
        let in_order: Vec<_> = (0..10_000).map(|nth| (nth, nth)).collect();
        assert_eq!(arrivals(good, 1), in_order);
        for (options, least, most) in [
            (
                BadNetwork {
                    loss_permille: 100,
                    ..good
                },
                8_800,
                9_200,
            ),
            (
                BadNetwork {
                    double_permille: 100,
                    ..good
                },
                10_800,
                11_200,
            ),
            (
                BadNetwork {
                    reorder_permille: 100,
                    ..good
                },
                10_000,
                10_000,
            ),
            (
                BadNetwork {
                    delay_us: (300, 700),
                    ..good
                },
                10_000,
                10_000,
            ),
        ] {
            let got = arrivals(options, 7);
            assert!(
                (least..=most).contains(&got.len()),
                "{options:?}: {}",
                got.len()
            );
            assert!(got == arrivals(options, 7) && got != arrivals(options, 8));
            let BadNetwork {
                reorder_permille,
                delay_us,
                ..
            } = options;
            let latest = u64::from(delay_us.1)
                + if reorder_permille > 0 {
                    REORDER_NS / 1000
                } else {
                    0
                };
            assert!(
                got.iter()
                    .all(|(at, nth)| (u64::from(delay_us.0)..=latest + 1).contains(&(at - nth))),
                "{options:?}"
            );
            let overtaken = got.windows(2).filter(|pair| pair[1].1 < pair[0].1).count();
            assert_eq!(
                overtaken > 500,
                reorder_permille > 0 || delay_us.0 != delay_us.1,
                "{options:?}: {overtaken}"
            );
        }
    }
}
