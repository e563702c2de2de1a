//! The launcher's side of a collective operation, without sockets and clock. It takes the parts of
//! the ranks, and returns one broadcast.

use crate::launch::exchange::MAX_PART_BYTES;
use crate::launch::exchange::frame::Frame;

/// Collects the parts of one round (collective operation) at a time. Every frame that it returns is
/// for all ranks.
#[derive(Debug)]
pub(super) struct Relay {
    /// The round being collected; the first is 1.
    round: u32,
    parts: Vec<Option<Vec<u8>>>,
    /// Time at which the round fails, in ns, and the time limit of the round, in ms. The limit
    /// begins with the first part; `None` before the first part.
    deadline: Option<(u64, u32)>,
    /// Whether a round failed, so that later frames are late.
    failed: bool,
}

impl Relay {
    pub(super) fn new(size: usize) -> Self {
        Self {
            round: 1,
            parts: vec![None; size],
            deadline: None,
            failed: false,
        }
    }

    /// Takes a frame of rank `from`. Returns the frame for all ranks if the round is complete. The
    /// error describes a violation of the protocol.
    pub(super) fn arrived(
        &mut self,
        from: usize,
        frame: Frame,
        now_ns: u64,
    ) -> Result<Option<Frame>, String> {
        let Frame::Part {
            round,
            within_ms,
            part,
        } = frame
        else {
            return Err("sent a frame that only the launcher sends".to_owned());
        };
        if self.failed {
            return Ok(None);
        }
        if part.len() > MAX_PART_BYTES {
            return Err(format!(
                "sent a part of {} bytes, above the limit of {MAX_PART_BYTES}",
                part.len()
            ));
        }
        let expected = self.round;
        match self.parts.get_mut(from) {
            Some(slot @ None) if round == expected => *slot = Some(part),
            _ => {
                return Err(format!(
                    "sent a part for round {round} when round {expected} was due from it"
                ));
            }
        }
        self.deadline.get_or_insert((
            now_ns.saturating_add(u64::from(within_ms) * 1_000_000),
            within_ms,
        ));
        if self.parts.iter().any(Option::is_none) {
            return Ok(None);
        }
        let parts = self.parts.iter_mut().filter_map(Option::take).collect();
        self.round = self.round.wrapping_add(1);
        self.deadline = None;
        Ok(Some(Frame::Gathered { round, parts }))
    }

    /// Returns the time from which [`expire`](Self::expire) fails the round.
    pub(super) fn deadline_ns(&self) -> Option<u64> {
        self.deadline.map(|(at_ns, _)| at_ns)
    }

    /// Fails the round if its time is over. Then returns the frame that reports the missing ranks.
    pub(super) fn expire(&mut self, now_ns: u64) -> Option<Frame> {
        let (_, within_ms) = self.deadline.filter(|(at_ns, _)| *at_ns <= now_ns)?;
        let ranks = self.waited_for().map(|rank| rank as u32).collect();
        self.deadline = None;
        self.failed = true;
        Some(Frame::Missing {
            round: self.round,
            within_ms,
            ranks,
        })
    }

    /// Returns the ranks whose parts other ranks wait for now.
    pub(super) fn waited_for(&self) -> impl Iterator<Item = usize> {
        let open = self.deadline.is_some();
        self.parts
            .iter()
            .enumerate()
            .filter(move |(_, part)| open && part.is_none())
            .map(|(rank, _)| rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(round: u32, bytes: &[u8]) -> Frame {
        Frame::Part {
            round,
            within_ms: 1000,
            part: bytes.to_vec(),
        }
    }

    const MS: u64 = 1_000_000;

    #[test]
    fn a_round_ends_with_the_last_part_in_rank_order() {
        let mut relay = Relay::new(3);
        assert_eq!(relay.arrived(2, part(1, b"c"), 0), Ok(None));
        assert_eq!(relay.arrived(0, part(1, b"a"), 1), Ok(None));
        assert_eq!(relay.waited_for().collect::<Vec<_>>(), [1]);
        let gathered = Frame::Gathered {
            round: 1,
            parts: vec![b"a".to_vec(), b"b".to_vec(), b"c".to_vec()],
        };
        assert_eq!(relay.arrived(1, part(1, b"b"), 2), Ok(Some(gathered)));
        assert_eq!((relay.deadline_ns(), relay.waited_for().count()), (None, 0));
        assert_eq!(relay.arrived(1, part(2, b""), 3), Ok(None));
    }

    #[test]
    fn a_rank_that_does_not_come_is_named_to_all() {
        let mut relay = Relay::new(3);
        relay.arrived(0, part(1, b""), 5 * MS).unwrap();
        relay.arrived(2, part(1, b""), 900 * MS).unwrap();
        assert_eq!(relay.deadline_ns(), Some(1005 * MS));
        assert_eq!(relay.expire(1005 * MS - 1), None);
        let missing = Frame::Missing {
            round: 1,
            within_ms: 1000,
            ranks: vec![1],
        };
        assert_eq!(relay.expire(1005 * MS), Some(missing));
        assert_eq!(relay.expire(u64::MAX), None);
        assert_eq!(
            relay.arrived(1, part(1, b""), 1006 * MS),
            Ok(None),
            "a late part must not complete a failed round"
        );
    }

    #[test]
    fn a_rank_out_of_step_is_refused() {
        let mut relay = Relay::new(2);
        assert!(
            relay
                .arrived(0, part(2, b""), 0)
                .unwrap_err()
                .contains("round 2 when round 1")
        );
        relay.arrived(0, part(1, b""), 0).unwrap();
        assert!(
            relay.arrived(0, part(1, b""), 0).is_err(),
            "the same part twice"
        );
        assert!(relay.arrived(1, Frame::Interrupted, 0).is_err());
    }
}
