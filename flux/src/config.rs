//! The sizes of a network.

use copyrpc_calls::OptionError;

/// Maximum number of nodes of a network.
pub const NODES_MAX: usize = 256;

/// Maximum of [`Config::in_flight`], so that the calls of a node to all others are at most as many
/// as one table of calls can have.
const IN_FLIGHT_MAX: usize = copyrpc_calls::CALLS_MAX / NODES_MAX;

/// Maximum number of slots of a lane, enough for the maximum of calls in flight.
const CAPACITY_MAX: usize = 4 * IN_FLIGHT_MAX;

/// Sizes of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Number of slots of a lane: a power of two above `2 x in_flight`, at most 262,144. Each
    /// ordered pair of nodes has one lane, for calls and replies alike. A slot is 16 B and the
    /// payload, rounded up to 64 B.
    pub capacity: usize,
    /// Maximum number of unanswered calls of one node to another, 1 to 65,536.
    pub in_flight: usize,
}

impl Default for Config {
    /// 1024 slots, 256 calls in flight.
    fn default() -> Self {
        Self {
            capacity: 1024,
            in_flight: 256,
        }
    }
}

impl Config {
    pub(crate) fn check(self, nodes: usize) -> Result<(), OptionError> {
        let Self {
            capacity,
            in_flight,
        } = self;
        if !(1..=NODES_MAX).contains(&nodes) {
            let legal = format!("1 to {NODES_MAX}");
            return Err(OptionError::new("nodes", nodes as u64, legal));
        }
        if !(1..=IN_FLIGHT_MAX).contains(&in_flight) {
            let legal = format!("1 to {IN_FLIGHT_MAX}");
            return Err(OptionError::new("in_flight", in_flight as u64, legal));
        }
        // M2 (module `node`): a lane has more slots than twice the number of calls in flight.
        if !capacity.is_power_of_two() || capacity <= 2 * in_flight || capacity > CAPACITY_MAX {
            let legal = format!(
                "a power of two above 2 x in_flight = {}, at most {CAPACITY_MAX}",
                2 * in_flight
            );
            return Err(OptionError::new("capacity", capacity as u64, legal));
        }
        Ok(())
    }
}
