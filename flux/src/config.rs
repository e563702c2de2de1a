//! The sizes of a network.

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
    pub(crate) fn check(self, nodes: usize) -> Result<(), ConfigError> {
        let Self {
            capacity,
            in_flight,
        } = self;
        if !(1..=NODES_MAX).contains(&nodes) {
            return Err(ConfigError::Nodes(nodes));
        }
        if !(1..=IN_FLIGHT_MAX).contains(&in_flight) {
            return Err(ConfigError::InFlight {
                in_flight,
                max: IN_FLIGHT_MAX,
            });
        }
        // M2 (module `node`): a lane has more slots than twice the number of calls in flight.
        if !capacity.is_power_of_two() || capacity <= 2 * in_flight || capacity > CAPACITY_MAX {
            return Err(ConfigError::Capacity {
                capacity,
                in_flight,
            });
        }
        Ok(())
    }
}

/// The reason why a network was not made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The number of nodes is out of range.
    #[error("{0} nodes: there must be 1 to {NODES_MAX}")]
    Nodes(usize),
    /// The number of calls in flight is out of range.
    #[error("in_flight is {in_flight}: it must be 1 to {max}")]
    InFlight {
        /// The given number of calls in flight.
        in_flight: usize,
        /// The maximum.
        max: usize,
    },
    /// A lane cannot hold all calls and replies, or is longer than the maximum.
    #[error("capacity is {capacity}: it must be a power of two above 2 x in_flight = {}, at most {CAPACITY_MAX}", 2 * in_flight)]
    Capacity {
        /// The given number of slots.
        capacity: usize,
        /// The given number of calls in flight.
        in_flight: usize,
    },
}
