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

/// Bytes of a probe: the time of sending, little-endian, in ns of the follower's clock.
pub const PROBE_BYTES: usize = 8;
/// Bytes of the leader's answer: the time in the probe, then the times of its arrival and of the answer's departure, in ns of the leader's
/// clock.
pub const ANSWER_BYTES: usize = 24;

/// Makes the leader's handler for [`PROBE_TYPE`]. `clock` returns the time that all slices end by, in ns.
pub fn time_handler(mut clock: impl FnMut() -> u64) -> impl Handler {
    move |request: &[u8], response: &mut [u8]| {
        let received_ns = clock();
        let sent: [u8; PROBE_BYTES] = request.try_into().map_err(|_| HandlerError)?;
        let times = [sent, received_ns.to_le_bytes(), clock().to_le_bytes()];
        // The smallest slot has room for it.
        response.get_mut(..ANSWER_BYTES).ok_or(HandlerError)?.copy_from_slice(times.as_flattened());
        Ok(ANSWER_BYTES)
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

/// One server's view of the leader's clock.
#[derive(Clone, Debug, Default)]
pub struct ClockSync {
    samples: [Option<Offset>; SAMPLES],
    next: usize,
    due_ns: u64,
    /// The time of the probe that is not answered.
    outstanding_ns: Option<u64>,
}

impl ClockSync {
    /// Returns the next probe, if its time has come. A probe that was not answered by then is given up.
    pub fn poll(&mut self, now_ns: u64) -> Option<[u8; PROBE_BYTES]> {
        if now_ns < self.due_ns {
            return None;
        }
        self.due_ns = now_ns.saturating_add(SYNC_INTERVAL_NS);
        self.outstanding_ns = Some(now_ns);
        Some(now_ns.to_le_bytes())
    }

    /// Takes an answer. `now_ns` is its arrival by this clock. Returns `None`, and changes nothing, if the answer matches no outstanding
    /// probe, or its times contradict each other: it left before it came, or stayed longer than the exchange took.
    pub fn on_reply(&mut self, answer: &[u8; ANSWER_BYTES], now_ns: u64) -> Option<()> {
        let [sent_ns, received_ns, answered_ns] = [0, 8, 16].map(|at| le_u64(answer, at));
        self.outstanding_ns.filter(|outstanding_ns| *outstanding_ns == sent_ns)?;
        let stay_ns = answered_ns.checked_sub(received_ns)?;
        let round_trip_ns = now_ns.checked_sub(sent_ns)?.checked_sub(stay_ns)?;
        // 128 bits cannot overflow here; the mean of two differences of u64 may still exceed an i64.
        let there = i128::from(received_ns) - i128::from(sent_ns);
        let back = i128::from(answered_ns) - i128::from(now_ns);
        let offset_ns = i64::try_from((there + back) / 2).ok()?;
        self.outstanding_ns = None;
        self.samples[self.next] = Some(Offset { offset_ns, error_ns: round_trip_ns.div_ceil(2) });
        self.next = (self.next + 1) % SAMPLES;
        Some(())
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

    /// Returns the leader's answer to a probe.
    fn answer(probe: [u8; PROBE_BYTES], received_ns: u64, answered_ns: u64) -> [u8; ANSWER_BYTES] {
        let (mut answer, mut times) = ([0; ANSWER_BYTES], [received_ns, answered_ns].into_iter());
        assert_eq!(time_handler(|| times.next().unwrap())(&probe, &mut answer), Ok(ANSWER_BYTES));
        answer
    }

    #[test]
    fn the_sample_with_the_shortest_round_trip_counts_and_is_right_within_its_error() {
        let mut rng = fastrand::Rng::with_seed(3);
        let (mut sync, mut now) = (ClockSync::default(), 1_000);
        let skew: i64 = -777_000;
        let at_leader = |local: u64| local.checked_add_signed(skew + 1_000_000).unwrap();
        for exchange in 0..50 {
            let probe = sync.poll(now).unwrap();
            assert_eq!(sync.poll(now + SYNC_INTERVAL_NS - 1), None);
            let (there, stay, back) = (rng.u64(1..5_000), rng.u64(..100), rng.u64(1..5_000));
            let reply = answer(probe, at_leader(now + there), at_leader(now + there + stay));
            sync.on_reply(&reply, now + there + stay + back).unwrap();
            let offset = sync.offset().unwrap();
            assert!(offset.offset_ns.abs_diff(skew + 1_000_000) <= offset.error_ns, "exchange {exchange}: {offset:?}");
            now += SYNC_INTERVAL_NS;
        }
        assert!(sync.offset().unwrap().error_ns < 3_000, "of eight, one is better than most");
    }

    #[test]
    fn an_answer_that_cannot_be_is_refused() {
        let mut sync = ClockSync::default();
        let probe = sync.poll(100).unwrap();
        let mut refuses = |probe, received_ns, answered_ns| sync.on_reply(&answer(probe, received_ns, answered_ns), 200).is_none();
        assert!(refuses(99_u64.to_le_bytes(), 5, 6), "unasked");
        assert!(refuses(probe, 7, 6) && refuses(probe, 0, 101) && refuses(probe, u64::MAX, u64::MAX), "impossible");
        assert_eq!(sync.offset(), None);
        sync.on_reply(&answer(probe, 1_000, 1_000), 200).unwrap();
        assert_eq!(sync.on_reply(&answer(probe, 1_000, 1_000), 200), None, "twice");
        assert_eq!(sync.offset(), Some(Offset { offset_ns: 850, error_ns: 50 }));
    }

    #[test]
    fn an_answer_has_the_documented_bytes_and_a_probe_its_length() {
        let times = [7_u64, 150, 200].map(u64::to_le_bytes);
        assert_eq!(answer(times[0], 150, 200), times.as_flattened());
        for bad in [&[][..], &[0; 7], &[0; 9]] {
            assert_eq!(time_handler(|| 0)(bad, &mut [0; ANSWER_BYTES]), Err(HandlerError), "a probe of {} bytes", bad.len());
        }
    }
}
