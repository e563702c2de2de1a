//! The calls, and their outcomes.

use std::time::Duration;

/// The calling end of a connection: its node, the peer's node, and the number of the connection
/// between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Caller {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) incarnation: u64,
}

/// The time for which the caller waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// Waits for the reply.
    Endless,
    /// Waits until this time, which may be before the request is sent or long after the reply.
    Deadline(Duration),
    /// Cancels after this number of rounds.
    Cancels(u32),
}

/// A call of the plan.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) request: Vec<u8>,
    pub(crate) allowance: usize,
    pub(crate) reply: Vec<u8>,
    pub(crate) patience: Patience,
}

impl Caller {
    /// Returns the plan of the pair's call number `serial`: sizes from zero to the maximum of the
    /// ring, small sizes more often.
    pub(crate) fn plan(self, serial: u64, max_payload: usize, max_allowance: usize) -> Plan {
        let seed =
            (self.from as u64) << 56 ^ (self.to as u64) << 48 ^ self.incarnation << 32 ^ serial;
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut up_to = |max: usize| match rng.u8(..8) {
            0 => max,
            1 => 0,
            2..=4 => rng.usize(..=max.min(48)),
            _ => rng.usize(..=max),
        };
        let (request, allowance) = (up_to(max_payload), up_to(max_allowance));
        let reply = up_to(allowance);
        let mut bytes = |len| std::iter::repeat_with(|| rng.u8(..)).take(len).collect();
        let (request, reply) = (bytes(request), bytes(reply));
        let patience = match rng.u8(..16) {
            0 => Patience::Deadline(Duration::from_micros(rng.u64(..2_000))),
            1 => Patience::Cancels(rng.u32(..4)),
            _ => Patience::Endless,
        };
        Plan {
            request,
            allowance,
            reply,
            patience,
        }
    }
}
