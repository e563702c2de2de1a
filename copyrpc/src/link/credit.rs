//! The two credit ledgers of one side: the credit that this side granted (ring space reserved for
//! responses to the peer's calls), and the credit that the peer granted (responses that this side
//! may ask for). Credit is bytes of internal allowance.

#[cfg(test)]
#[path = "explore/credit.rs"]
mod explore;

use crate::error::ProtocolError;
use crate::ring::RingSize;
use crate::wire::{ALIGNMENT, internal_allowance};

/// Ring bytes that grants keep free, so that metadata alone still has room after a grant. Calls
/// leave 128 bytes free, so grants can use space that calls cannot (invariant L3 of
/// docs/copyrpc-protocol.md).
const GRANT_SLACK: u64 = 64;

/// Credit granted to the peer. Granted and released credit are cumulative. Their difference is R of
/// the invariants; released <= granted - unused.
#[derive(Debug)]
pub(super) struct Reservation {
    /// Granted credit, the initial credit included.
    granted: u64,
    /// Granted credit that arrived requests have not used.
    unused: u64,
    /// Credit returned by written replies, plus the maximum of R: the highest legal grant (R1).
    max_granted: u64,
    max: u64,
}

impl Reservation {
    pub(super) const fn new(ring: RingSize, initial_credit: u64) -> Self {
        let max = ring.max_reservation();
        Self {
            granted: initial_credit,
            unused: initial_credit,
            max_granted: max,
            max,
        }
    }

    pub(super) const fn granted(&self) -> u64 {
        self.granted
    }

    /// Returns R of the invariants: bytes of responses that the peer may still ask for or wait for.
    pub(super) const fn outstanding(&self) -> u64 {
        self.granted - self.released()
    }

    /// Returns the cumulative credit that arrived requests have used.
    pub(super) const fn claimed(&self) -> u64 {
        self.granted - self.unused
    }

    pub(super) const fn released(&self) -> u64 {
        self.max_granted - self.max
    }

    /// Returns whether R is below its maximum, a quarter of the ring (R1).
    #[inline(always)]
    pub(super) const fn is_short(&self) -> bool {
        self.granted != self.max_granted
    }

    /// Raises R to a quarter of the ring (R1), if that keeps `in_flight + 2R <= C` (S1), where C is
    /// the size of the ring. Otherwise changes nothing. Returns whether R was raised.
    #[inline(always)]
    pub(super) const fn fill_up(&mut self, ring: RingSize, in_flight: u64) -> bool {
        let has_room = in_flight + GRANT_SLACK <= ring.bytes() - 2 * ring.max_reservation();
        if has_room {
            self.unused += self.max_granted - self.granted;
            self.granted = self.max_granted;
        }
        has_room
    }

    /// Raises R as far as `in_flight + 2R <= C` (S1), where C is the size of the ring, and the
    /// maximum of a quarter of the ring (R1) permit.
    pub(super) fn top_up(&mut self, ring: RingSize, in_flight: u64) {
        let by_invariant = ring.bytes().saturating_sub(in_flight + GRANT_SLACK) / 2;
        let room = by_invariant.min(ring.max_reservation());
        let more = room.saturating_sub(self.outstanding()) & !(ALIGNMENT - 1);
        self.granted += more;
        self.unused += more;
    }

    /// Takes a request that asks for `wanted` bytes of internal allowance; at most `max` are legal
    /// (T6).
    #[inline(always)]
    pub(super) fn claim(&mut self, wanted: u64, max: u64) -> Result<(), ProtocolError> {
        if wanted < internal_allowance(0) || wanted > self.unused || wanted > max {
            return Err(ProtocolError::Allowance {
                wanted,
                available: self.unused.min(max),
            });
        }
        self.unused -= wanted;
        Ok(())
    }

    /// Releases the credit of a reply that has been written: the `claimed` bytes reserved for it.
    pub(super) const fn release(&mut self, claimed: u64) {
        self.max_granted += claimed;
    }
}

#[derive(Debug)]
pub(super) struct PeerCredit {
    granted: u64,
    /// Granted credit that is not spent.
    balance: u64,
}

impl PeerCredit {
    pub(super) const fn new(initial_credit: u64) -> Self {
        Self {
            granted: initial_credit,
            balance: initial_credit,
        }
    }

    pub(super) const fn granted(&self) -> u64 {
        self.granted
    }

    pub(super) const fn balance(&self) -> u64 {
        self.balance
    }

    pub(super) const fn spent(&self) -> u64 {
        self.granted - self.balance
    }

    /// Pays for a call; the caller has checked the balance.
    pub(super) const fn spend(&mut self, internal_allowance: u64) {
        self.balance -= internal_allowance;
    }

    /// Takes the peer's cumulative grant if it is no less than any earlier grant, and legal.
    /// Returns whether it was taken.
    #[inline(always)]
    pub(super) const fn raise_further(&mut self, ring: RingSize, told: u64) -> bool {
        let more = told.wrapping_sub(self.granted);
        // The rotation of a multiple of the alignment is the quotient. The rotation of any other
        // number is greater than every `room`.
        let blocks = more.rotate_right(ALIGNMENT.trailing_zeros());
        let room = (ring.max_reservation() - self.balance) / ALIGNMENT;
        if blocks > room {
            return false;
        }
        self.granted = told;
        self.balance += more;
        true
    }

    /// Takes the peer's cumulative grant; `floor` is the grant that the peer reported before on the
    /// same channel: in batches, or by READs.
    ///
    /// The peer reserves ring space for at least the balance of this end, so a balance above a
    /// quarter ring is false (T5).
    pub(super) fn raise(
        &mut self,
        ring: RingSize,
        told: u64,
        floor: u64,
    ) -> Result<(), ProtocolError> {
        let ceiling = self.granted - self.balance + ring.max_reservation();
        if told < floor || told > ceiling || told % ALIGNMENT != 0 {
            return Err(ProtocolError::Credit {
                told,
                floor,
                ceiling,
            });
        }
        // The other channel may have reported a higher grant.
        let more = told.saturating_sub(self.granted);
        self.granted += more;
        self.balance += more;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const C: u64 = 4096;
    /// Maximum internal allowance (L2).
    const MAX: u64 = C / 4 - C / 16;

    fn ring() -> RingSize {
        RingSize::new(C).unwrap()
    }

    #[test]
    fn a_grant_never_breaks_the_ring_invariant_or_the_quarter() {
        for in_flight in (0..=C).step_by(32) {
            for initial in (0..=(C - in_flight) / 2).step_by(32) {
                let mut reservation = Reservation::new(ring(), initial.min(C / 4));
                reservation.top_up(ring(), in_flight);
                let mut at_once = Reservation::new(ring(), initial.min(C / 4));
                let is_full = at_once.is_short() && at_once.fill_up(ring(), in_flight);
                assert!(
                    !is_full
                        || (at_once.granted, at_once.unused)
                            == (reservation.granted, reservation.unused)
                );
                assert!(
                    is_full || at_once.outstanding() == C / 4 || reservation.outstanding() < C / 4
                );
                assert!(in_flight + 2 * reservation.outstanding() <= C);
                assert!(reservation.outstanding() <= C / 4);
                assert_eq!(reservation.granted() % 32, 0);
            }
        }
    }

    #[test]
    fn an_idle_side_grants_the_whole_quarter() {
        let mut reservation = Reservation::new(ring(), 32);
        reservation.top_up(ring(), 0);
        assert_eq!(reservation.granted(), C / 4);
    }

    #[test]
    fn a_request_cannot_claim_credit_that_was_never_granted() {
        let mut reservation = Reservation::new(ring(), 256);
        assert_eq!(reservation.claim(192, MAX), Ok(()));
        let overdraft = ProtocolError::Allowance {
            wanted: 96,
            available: 64,
        };
        assert_eq!(reservation.claim(96, MAX), Err(overdraft));
        assert!(reservation.claim(32, MAX).is_err(), "below the minimum");
        assert_eq!(reservation.claim(64, MAX), Ok(()));
        reservation.release(192);
        assert_eq!(reservation.outstanding(), 64);
    }

    #[test]
    fn peer_credit_rises_only_and_only_to_a_quarter_ring() {
        let mut credit = PeerCredit::new(512);
        credit.spend(128);
        assert_eq!(credit.raise(ring(), 512 + 128, 0), Ok(()));
        assert_eq!(credit.balance(), 512);
        assert_eq!(credit.raise(ring(), 544, 0), Ok(()), "stale, other channel");
        assert_eq!(credit.balance(), 512);
        assert!(credit.raise(ring(), 544, 640).is_err(), "backwards");
        assert!(
            credit.raise(ring(), 1024 + 128 + 32, 0).is_err(),
            "thin air"
        );
        assert!(credit.raise(ring(), 650, 0).is_err(), "unaligned");
    }
}
