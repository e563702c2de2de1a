//! Global synchronisation of slices: the offset between this server's clock and the leader's. The method is that of NTP: four timestamps,
//! and the exchange with the shortest round trip of the last eight counts.
//!
//! A probe travels as a call. Any server that has a [`time_handler`] for [`PROBE_TYPE`] can lead; the other servers are its clients
//! ([`TimeFollower`](crate::rdma::TimeFollower)).

use crate::protocol::handlers::{Handler, HandlerError};
use crate::protocol::wire::le_u64;

/// The `rpc_type` of probes.
pub const PROBE_TYPE: u16 = u16::MAX;
/// Time between probes, in ns.
pub const SYNC_INTERVAL_NS: u64 = 100_000_000;
/// Number of exchanges that are kept.
pub const SAMPLES: usize = 8;

/// A question for the leader's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    /// Time of sending, in ns of this clock.
    pub sent_ns: u64,
}

/// The leader's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeReply {
    /// The time in the probe, in ns.
    pub sent_ns: u64,
    /// Arrival of the probe, in ns of the leader's clock.
    pub received_ns: u64,
    /// Departure of the answer, in ns of the leader's clock.
    pub answered_ns: u64,
}

impl Probe {
    /// Bytes of the request.
    pub const BYTES: usize = 8;

    /// Returns the request's payload: the time, little-endian.
    #[must_use]
    pub const fn encode(self) -> [u8; Self::BYTES] {
        self.sent_ns.to_le_bytes()
    }

    /// Reads a payload. Returns `None` if it has another length.
    #[must_use]
    pub fn decode(payload: &[u8]) -> Option<Self> {
        Some(Self { sent_ns: u64::from_le_bytes(payload.try_into().ok()?) })
    }

    /// Makes the leader's answer. Times in ns of the leader's clock.
    #[must_use]
    pub const fn answer(self, received_ns: u64, answered_ns: u64) -> ProbeReply {
        ProbeReply { sent_ns: self.sent_ns, received_ns, answered_ns }
    }
}

impl ProbeReply {
    /// Bytes of the response.
    pub const BYTES: usize = 24;

    /// Returns the response's payload: the three times in the order of the fields, little-endian.
    #[must_use]
    pub fn encode(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (nth, time) in [self.sent_ns, self.received_ns, self.answered_ns].into_iter().enumerate() {
            bytes[8 * nth..8 * nth + 8].copy_from_slice(&time.to_le_bytes());
        }
        bytes
    }

    /// Reads a payload. [`ClockSync::on_reply`] checks its values.
    #[must_use]
    pub fn decode(payload: &[u8; Self::BYTES]) -> Self {
        Self { sent_ns: le_u64(payload, 0), received_ns: le_u64(payload, 8), answered_ns: le_u64(payload, 16) }
    }
}

/// Makes the leader's handler for [`PROBE_TYPE`]. `clock` returns the time that all slices end by, in ns.
pub fn time_handler(mut clock: impl FnMut() -> u64) -> impl Handler {
    move |request: &[u8], response: &mut [u8]| {
        let received_ns = clock();
        let probe = Probe::decode(request).ok_or(HandlerError)?;
        let payload = probe.answer(received_ns, clock()).encode();
        // The smallest slot has room for it.
        response.get_mut(..payload.len()).ok_or(HandlerError)?.copy_from_slice(&payload);
        Ok(payload.len())
    }
}

/// The measured offset: `global = local + offset_ns`, with an error of at most `error_ns`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offset {
    /// Number to add to this clock, in ns.
    pub offset_ns: i64,
    /// Maximum error, in ns: half the round trip.
    pub error_ns: u64,
}

/// Why an answer was not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReplyRefused {
    /// The answer matches no outstanding probe: it is late, a duplicate, or another end's.
    #[error("an answer to no outstanding probe")]
    Unasked,
    /// Its times are impossible: it left before it came, or stayed longer than the exchange took.
    #[error("the times of the answer contradict each other")]
    Impossible,
}

/// One server's view of the leader's clock.
#[derive(Clone, Debug, Default)]
pub struct ClockSync {
    samples: [Option<Offset>; SAMPLES],
    next: usize,
    due_ns: u64,
    outstanding: Option<Probe>,
}

impl ClockSync {
    /// Makes a view that knows nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the next probe, if its time has come. A probe that was not answered by then is given up.
    pub fn poll(&mut self, now_ns: u64) -> Option<Probe> {
        if now_ns < self.due_ns {
            return None;
        }
        self.due_ns = now_ns.saturating_add(SYNC_INTERVAL_NS);
        self.outstanding = Some(Probe { sent_ns: now_ns });
        self.outstanding
    }

    /// Takes an answer. `now_ns` is its arrival by this clock.
    ///
    /// # Errors
    /// [`ReplyRefused`]; nothing changed.
    pub fn on_reply(&mut self, reply: ProbeReply, now_ns: u64) -> Result<(), ReplyRefused> {
        if self.outstanding != Some(Probe { sent_ns: reply.sent_ns }) {
            return Err(ReplyRefused::Unasked);
        }
        let total = now_ns.checked_sub(reply.sent_ns).ok_or(ReplyRefused::Impossible)?;
        let stay = reply.answered_ns.checked_sub(reply.received_ns).ok_or(ReplyRefused::Impossible)?;
        let round_trip = total.checked_sub(stay).ok_or(ReplyRefused::Impossible)?;
        // 128 bits cannot overflow here; the mean of two differences of u64 may still exceed an i64.
        let there = i128::from(reply.received_ns) - i128::from(reply.sent_ns);
        let back = i128::from(reply.answered_ns) - i128::from(now_ns);
        let offset_ns = i64::try_from((there + back) / 2).map_err(|_| ReplyRefused::Impossible)?;
        self.outstanding = None;
        self.samples[self.next] = Some(Offset { offset_ns, error_ns: round_trip.div_ceil(2) });
        self.next = (self.next + 1) % SAMPLES;
        Ok(())
    }

    /// Returns the best of the last [`SAMPLES`] exchanges; `None` before the first.
    #[must_use]
    pub fn offset(&self) -> Option<Offset> {
        self.samples.iter().flatten().min_by_key(|sample| sample.error_ns).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sample_with_the_shortest_round_trip_counts_and_is_right_within_its_error() {
        let mut rng = fastrand::Rng::with_seed(3);
        let (mut sync, mut now) = (ClockSync::new(), 1_000);
        let skew: i64 = -777_000;
        let at_leader = |local: u64| local.checked_add_signed(skew + 1_000_000).unwrap();
        for exchange in 0..50 {
            let probe = sync.poll(now).unwrap();
            assert_eq!(sync.poll(now + SYNC_INTERVAL_NS - 1), None);
            let (there, stay, back) = (rng.u64(1..5_000), rng.u64(..100), rng.u64(1..5_000));
            let reply = probe.answer(at_leader(now + there), at_leader(now + there + stay));
            sync.on_reply(reply, now + there + stay + back).unwrap();
            let offset = sync.offset().unwrap();
            assert!(offset.offset_ns.abs_diff(skew + 1_000_000) <= offset.error_ns, "exchange {exchange}: {offset:?}");
            now += SYNC_INTERVAL_NS;
        }
        assert!(sync.offset().unwrap().error_ns < 3_000, "of eight, one is better than most");
    }

    #[test]
    fn an_answer_that_cannot_be_is_refused() {
        let mut sync = ClockSync::new();
        let probe = sync.poll(100).unwrap();
        assert_eq!(sync.on_reply(Probe { sent_ns: 99 }.answer(5, 6), 200), Err(ReplyRefused::Unasked));
        assert_eq!(sync.on_reply(probe.answer(7, 6), 200), Err(ReplyRefused::Impossible));
        assert_eq!(sync.on_reply(probe.answer(0, 101), 200), Err(ReplyRefused::Impossible));
        assert_eq!(sync.on_reply(probe.answer(u64::MAX, u64::MAX), 200), Err(ReplyRefused::Impossible));
        assert_eq!(sync.offset(), None);
        sync.on_reply(probe.answer(1_000, 1_000), 200).unwrap();
        assert_eq!(sync.on_reply(probe.answer(1_000, 1_000), 200), Err(ReplyRefused::Unasked), "twice");
        assert_eq!(sync.offset(), Some(Offset { offset_ns: 850, error_ns: 50 }));
    }

    #[test]
    fn a_probe_and_its_answer_travel_as_payloads() {
        let mut now_ns = 100;
        let mut handler = time_handler(move || {
            now_ns += 50;
            now_ns
        });
        let mut response = [0xa5; ProbeReply::BYTES + 1];
        let probe = Probe { sent_ns: 7 };
        assert_eq!(handler(&probe.encode(), &mut response), Ok(ProbeReply::BYTES));
        let payload: [u8; ProbeReply::BYTES] = response[..ProbeReply::BYTES].try_into().unwrap();
        assert_eq!(ProbeReply::decode(&payload), ProbeReply { sent_ns: 7, received_ns: 150, answered_ns: 200 });
        for bad in [&[][..], &[0; 7], &[0; 9]] {
            assert_eq!(handler(bad, &mut response), Err(HandlerError), "a probe of {} bytes", bad.len());
        }
    }
}
