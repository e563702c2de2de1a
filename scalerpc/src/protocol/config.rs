//! The configuration of a server, and the memory layout that follows from it.

use std::ops::RangeInclusive;

use copyrpc_calls::OptionError;

use crate::protocol::groups::{DEFAULT_GROUP_SIZE, MAX_ACTIVE_PER_GROUP, max_group_size};
use crate::protocol::wire::{
    ENTRY_BYTES, EVENT_SLOT_BYTES, EVENT_SLOTS, HEADER_BYTES, REST_WORD_BYTES, TRAILER_BYTES,
    ZoneId,
};

/// Default length of a time slice, in ns.
pub const DEFAULT_SLICE_NS: u64 = 100_000;
/// Default of [`ServerConfig::max_rotation_ns`], in ns.
pub const DEFAULT_MAX_ROTATION_NS: u64 = 25_000_000;
/// Default timeout of a call, and default of [`ServerConfig::drain_ns`], in ns.
pub const DEFAULT_TIMEOUT_NS: u64 = 5_000_000_000;
/// Default bytes of a slot.
pub const DEFAULT_SLOT_BYTES: u32 = 4096;
/// Default number of slots of a client.
pub const DEFAULT_DEPTH: u32 = 8;
/// Maximum number of slots of a client: each slot is a bit of a word of 64 bits.
pub const MAX_DEPTH: u32 = 64;
/// Maximum number of clients of a server.
pub const MAX_CLIENTS: u32 = 32_768;

/// Whether clients take turns in groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Grouping {
    /// Clients take turns in groups of [`ServerConfig::group_size`], one group for each time slice.
    #[default]
    On,
    /// Clients do not take turns: all are one group, whose slice never ends (S16 of
    /// docs/scalerpc.md), and each keeps a zone of its own. All other code is the same, so a
    /// comparison with `On` shows the effect of grouping alone. The pools grow with `max_clients`,
    /// and the NIC uses all queue pairs at once.
    Off,
}

/// The configuration of a server. [`ServerConfig::check`] checks the ranges.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Maximum number of clients, 1..=32,768.
    pub max_clients: u32,
    /// Number of slots of a client, 1..=64: the maximum number of the client's calls under way.
    pub depth: u32,
    /// Bytes of a slot, a multiple of 64 in 128..=65,536. The maximum payload is 40 bytes less.
    pub slot_bytes: u32,
    /// Whether clients take turns.
    pub grouping: Grouping,
    /// Configured number of clients of a group, 1..=50. A group has at most 1.5 times this number.
    /// Ignored with grouping off.
    pub group_size: u32,
    /// Number of zones of a pool in addition to the zones of the largest group, 0..=1,024. This
    /// number of clients can stop responding and keep their zones without an effect on the others.
    pub spare_zones: u32,
    /// Length of a time slice, in ns, 1,000..=1,000,000,000. Slices become longer by powers of two
    /// where that makes the same clients complete more requests: for instance, if the NIC needs a
    /// large part of a slice to fetch the contexts of the slice's clients.
    pub slice_ns: u64,
    /// Maximum time between the turns of a client, in ns: slices become longer only as far as one
    /// slice of each group takes no more than this. If this is 0, or if slices are synchronised,
    /// slices always have the length `slice_ns`.
    pub max_rotation_ns: u64,
    /// Maximum number of responses under way, 1..=65,535.
    pub response_buffers: u32,
    /// Time in ns, at least a slice, after which a client that does not release its zone is
    /// evicted. The time begins when the client is sent the end of its slice. A client that rests,
    /// like a [`Client`](crate::Client) between its calls, is not evicted.
    pub drain_ns: u64,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            max_clients: 1024,
            depth: DEFAULT_DEPTH,
            slot_bytes: DEFAULT_SLOT_BYTES,
            grouping: Grouping::On,
            group_size: DEFAULT_GROUP_SIZE,
            spare_zones: 4,
            slice_ns: DEFAULT_SLICE_NS,
            max_rotation_ns: DEFAULT_MAX_ROTATION_NS,
            response_buffers: 512,
            drain_ns: DEFAULT_TIMEOUT_NS,
        }
    }
}

impl ServerConfig {
    /// Checks that every number is in its range.
    ///
    /// # Errors
    /// [`OptionError`]: the first number outside its range.
    pub fn check(&self) -> Result<(), OptionError> {
        let check = |option, value, legal: RangeInclusive<u64>| {
            let is_legal = legal.contains(&value);
            is_legal
                .then_some(())
                .ok_or_else(|| OptionError::new(option, value, format!("{legal:?}")))
        };
        let slot_bytes = u64::from(self.slot_bytes);
        if !(128..=65_536).contains(&slot_bytes) || slot_bytes % 64 != 0 {
            let legal = "a multiple of 64 in 128..=65536";
            return Err(OptionError::new("slot_bytes", slot_bytes, legal));
        }
        check(
            "max_clients",
            self.max_clients.into(),
            1..=MAX_CLIENTS.into(),
        )?;
        check("depth", self.depth.into(), 1..=MAX_DEPTH.into())?;
        let groups = 1..=MAX_ACTIVE_PER_GROUP.into();
        check("group_size", self.group_size.into(), groups)?;
        check("spare_zones", self.spare_zones.into(), 0..=1024)?;
        check("slice_ns", self.slice_ns, 1_000..=1_000_000_000)?;
        check("response_buffers", self.response_buffers.into(), 1..=65_535)?;
        check("drain_ns", self.drain_ns, self.slice_ns..=u64::MAX)
    }

    /// Limits the group size so that it fits a NIC whose cache of `contexts` queue-pair contexts is
    /// shared by `servers` servers: two groups of each server, the group that is served and the
    /// group that is warmed, use at most 80 % of the cache. No device reports the size of its
    /// cache; see [`QPC_CACHE_CONNECTX3`](crate::QPC_CACHE_CONNECTX3) and
    /// [`QPC_CACHE_CONNECTX5`](crate::QPC_CACHE_CONNECTX5).
    #[must_use]
    pub const fn within_cache(mut self, contexts: u32, servers: u32) -> Self {
        let max = max_group_size(contexts, servers);
        if self.group_size > max {
            self.group_size = max;
        }
        self
    }

    /// Returns the memory layout.
    ///
    /// # Errors
    /// Like [`check`](Self::check).
    pub fn layout(&self) -> Result<Layout, OptionError> {
        self.check()?;
        Ok(Layout {
            depth: self.depth as usize,
            slot_bytes: self.slot_bytes as usize,
            zones: (self.largest_group() + self.spare_zones) as usize,
        })
    }

    /// Returns the number of clients of a group that is neither split nor merged.
    #[must_use]
    pub const fn clients_per_group(&self) -> u32 {
        match self.grouping {
            Grouping::On => self.group_size,
            Grouping::Off => self.max_clients,
        }
    }

    const fn largest_group(&self) -> u32 {
        match self.grouping {
            Grouping::On => self.group_size + self.group_size / 2,
            Grouping::Off => self.max_clients,
        }
    }

    /// Returns the number of bytes of the endpoint entries.
    #[must_use]
    pub const fn entries_bytes(&self) -> usize {
        self.max_clients as usize * ENTRY_BYTES
    }

    /// Returns the number of bytes of the response buffers.
    #[must_use]
    pub const fn responses_bytes(&self) -> usize {
        self.response_buffers as usize * self.slot_bytes as usize
    }
}

/// The sizes that both ends know, from which all offsets in memory follow. All offsets of slots are
/// multiples of 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    /// Slots of a client.
    pub depth: usize,
    /// Bytes of a slot.
    pub slot_bytes: usize,
    /// Zones of a pool.
    pub zones: usize,
}

impl Layout {
    /// Returns the maximum number of payload bytes of a request or response.
    #[must_use]
    pub const fn max_payload(&self) -> usize {
        self.slot_bytes - HEADER_BYTES - TRAILER_BYTES
    }

    /// Returns the number of bytes of the slots of one client.
    #[must_use]
    pub const fn zone_bytes(&self) -> usize {
        self.depth * self.slot_bytes
    }

    /// Returns the number of bytes of both pools.
    #[must_use]
    pub const fn pools_bytes(&self) -> usize {
        2 * self.zones * self.zone_bytes()
    }

    /// Returns the number of a zone among the zones of both pools.
    pub(crate) const fn zone_place(&self, zone: ZoneId) -> usize {
        zone.pool as usize * self.zones + zone.zone as usize
    }

    /// Returns the offset of a slot in the pools.
    #[must_use]
    pub const fn pool_slot(&self, zone: ZoneId, slot: usize) -> usize {
        self.zone_place(zone) * self.zone_bytes() + slot * self.slot_bytes
    }

    /// Returns the offset of a slot at a client, in its requests and in its responses.
    #[must_use]
    pub const fn client_slot(&self, slot: usize) -> usize {
        slot * self.slot_bytes
    }

    /// Returns the offset of the trailer in a slot.
    #[must_use]
    pub const fn trailer_at(&self) -> usize {
        self.slot_bytes - TRAILER_BYTES
    }

    /// Returns the number of bytes of a client's requests and its rest word.
    #[must_use]
    pub const fn requests_bytes(&self) -> usize {
        self.rest_word() + REST_WORD_BYTES
    }

    /// Returns the offset of the rest word, which follows a client's requests and shows that the
    /// client rests (S26).
    #[must_use]
    pub const fn rest_word(&self) -> usize {
        self.zone_bytes()
    }

    /// Returns the offset of the event slot for activations, in a client's responses. The slots for
    /// switches and for the server's end follow it.
    #[must_use]
    pub const fn activate_slot(&self) -> usize {
        self.zone_bytes()
    }

    /// Returns the offset of the event slot for switches, in a client's responses.
    #[must_use]
    pub const fn switch_slot(&self) -> usize {
        self.zone_bytes() + EVENT_SLOT_BYTES
    }

    /// Returns the offset of the event slot for the server's end, in a client's responses.
    #[must_use]
    pub const fn close_slot(&self) -> usize {
        self.zone_bytes() + 2 * EVENT_SLOT_BYTES
    }

    /// Returns the number of bytes of a client's responses and event slots.
    #[must_use]
    pub const fn client_responses_bytes(&self) -> usize {
        self.zone_bytes() + EVENT_SLOTS * EVENT_SLOT_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_keep_within_the_cache_and_small_ones_stay_as_they_are() {
        let size = |contexts, servers| {
            ServerConfig::default()
                .within_cache(contexts, servers)
                .group_size
        };
        assert_eq!(
            [size(400, 1), size(400, 8), size(1000, 16), size(1000, 1)],
            [40, 20, 25, 40]
        );
        assert_eq!(
            ServerConfig {
                group_size: 3,
                ..ServerConfig::default()
            }
            .within_cache(400, 8)
            .group_size,
            3
        );
    }

    #[test]
    fn sizes_follow_the_formulas_of_the_page() {
        let config = ServerConfig::default();
        let layout = config.layout().unwrap();
        assert_eq!(
            (layout.zones, layout.pools_bytes()),
            (64, 2 * 64 * 8 * 4096)
        );
        assert_eq!(
            (config.entries_bytes(), config.responses_bytes()),
            (1024 * 64, 512 * 4096)
        );
        assert_eq!(
            (layout.requests_bytes(), layout.client_responses_bytes()),
            (8 * 4096 + 8, 8 * 4096 + 192)
        );
        let off = ServerConfig {
            grouping: Grouping::Off,
            ..config.clone()
        };
        assert_eq!(
            (off.clients_per_group(), off.layout().unwrap().zones),
            (1024, 1024 + 4),
            "a zone for each client"
        );
        let large = ServerConfig {
            depth: 64,
            ..config
        };
        assert_eq!(large.layout().unwrap().pools_bytes(), 8192 * 4096);
        assert_eq!(
            layout.pool_slot(ZoneId { pool: 1, zone: 2 }, 3),
            (64 + 2) * 8 * 4096 + 3 * 4096
        );
    }

    #[test]
    fn each_number_outside_its_range_is_refused_by_name() {
        let good = ServerConfig::default();
        let cases: [(&str, ServerConfig); 9] = [
            (
                "max_clients",
                ServerConfig {
                    max_clients: 0,
                    ..good.clone()
                },
            ),
            (
                "depth",
                ServerConfig {
                    depth: 65,
                    ..good.clone()
                },
            ),
            (
                "slot_bytes",
                ServerConfig {
                    slot_bytes: 130,
                    ..good.clone()
                },
            ),
            (
                "slot_bytes",
                ServerConfig {
                    slot_bytes: 64,
                    ..good.clone()
                },
            ),
            (
                "group_size",
                ServerConfig {
                    group_size: 51,
                    ..good.clone()
                },
            ),
            (
                "spare_zones",
                ServerConfig {
                    spare_zones: 1025,
                    ..good.clone()
                },
            ),
            (
                "slice_ns",
                ServerConfig {
                    slice_ns: 999,
                    ..good.clone()
                },
            ),
            (
                "response_buffers",
                ServerConfig {
                    response_buffers: 0,
                    ..good.clone()
                },
            ),
            (
                "drain_ns",
                ServerConfig {
                    drain_ns: 99_999,
                    ..good
                },
            ),
        ];
        for (field, config) in cases {
            let error = config.layout().unwrap_err();
            assert_eq!(error.option, field);
            if field == "slot_bytes" {
                assert_eq!(error.legal, "a multiple of 64 in 128..=65536");
            }
        }
    }
}
