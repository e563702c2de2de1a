//! The packets of a software HCA that arrived before an earlier packet.

use std::collections::VecDeque;

use mlx5_wire::roce::Headers;

/// Maximum number of packets of which an ACK reports whether they are held.
const MAX_REPORTED: usize = 2048;

type Packet = (Headers, Box<[u8]>);

/// Packets that are held until the expected packet arrives: a place for that packet, which is
/// empty, and one for each PSN after it.
#[derive(Debug, Default)]
pub(super) struct Held(VecDeque<Option<Box<Packet>>>);

impl Held {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Holds a packet whose PSN is `ahead` PSNs after the expected one.
    pub(super) fn hold(&mut self, ahead: usize, headers: &Headers, payload: &[u8]) {
        if self.0.len() <= ahead {
            self.0.resize_with(ahead + 1, || None);
        }
        self.0[ahead].get_or_insert_with(|| Box::new((*headers, payload.into())));
    }

    /// Advances by the number of PSNs that were executed. Returns the packet that is then expected,
    /// if it is held.
    pub(super) fn next(&mut self, executed: usize) -> Option<Packet> {
        self.0.drain(..executed.min(self.0.len()));
        let packet = self.0.front_mut()?.take()?;
        Some(*packet)
    }

    /// Returns the report of an ACK: a bit for each place, the lowest bit of the first byte for the
    /// first, or nothing if no packet is held.
    pub(super) fn report(&self) -> Vec<u8> {
        let mut report = vec![0; self.0.len().min(MAX_REPORTED).div_ceil(8)];
        for (nth, packet) in self.0.iter().take(MAX_REPORTED).enumerate() {
            report[nth / 8] |= u8::from(packet.is_some()) << (nth % 8);
        }
        report
    }
}
