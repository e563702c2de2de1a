//! The sizes of a network.

/// Maximum number of nodes of a network.
pub const NODES_MAX: usize = 256;

/// Sizes of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Slots of a lane; there is one for each ordered pair of nodes, for requests and replies alike. A power of two above
    /// `2 x in_flight`. A slot is 16 B and the payload, rounded up to 64 B.
    pub capacity: usize,
    /// Unanswered calls of one node to one other.
    pub in_flight: usize,
}

impl Default for Config {
    /// 1024 slots, 256 calls in flight.
    fn default() -> Self {
        Self { capacity: 1024, in_flight: 256 }
    }
}

impl Config {
    pub(crate) fn check(self, nodes: usize) -> Result<(), ConfigError> {
        let Self { capacity, in_flight } = self;
        if !(1..=NODES_MAX).contains(&nodes) {
            return Err(ConfigError::Nodes(nodes));
        }
        // M2 of `node`; and the calls of a node to all others must have tags.
        let in_flight_max = calls::CALLS_MAX / NODES_MAX;
        if !(1..=in_flight_max).contains(&in_flight) {
            return Err(ConfigError::InFlight { in_flight, max: in_flight_max });
        }
        if !capacity.is_power_of_two() || capacity <= 2 * in_flight {
            return Err(ConfigError::Capacity { capacity, in_flight });
        }
        Ok(())
    }
}

/// Why a network was not made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Too few or too many nodes.
    #[error("{0} nodes: there must be 1 to {NODES_MAX}")]
    Nodes(usize),
    /// Too few or too many calls in flight.
    #[error("in_flight is {in_flight}: it must be 1 to {max}")]
    InFlight {
        /// Calls in flight asked for.
        in_flight: usize,
        /// The maximum.
        max: usize,
    },
    /// A lane that cannot hold all calls and replies.
    #[error("capacity is {capacity}: it must be a power of two above 2 x in_flight = {}", 2 * in_flight)]
    Capacity {
        /// Slots asked for.
        capacity: usize,
        /// Calls in flight asked for.
        in_flight: usize,
    },
}
