//! Layout of a server's region, and of its header.
//!
//! | offset | bytes | content | writer |
//! |---|---|---|---|
//! | 0 | 128 | [`Header`] | server, before the region has a name |
//! | 128 | [`Announce::bytes`] | announcements | clients, server |
//! | then | [`Entries::bytes`] | a line for all clients and one for each: session, `armed`, words to sleep on | clients, server |
//! | then, per client | depth x `Slot<Tagged<Req>>` | request lane | the client |
//! | then, per client | depth x `Slot<Tagged<Resp>>` | response lane | the server |
//! | then, per client and slot of its calls | request bytes, rounded up to 64 | long request ([`bytes`](crate::bytes) only) | the client |
//! | | response bytes, rounded up to 64 | long response ([`bytes`](crate::bytes) only) | the server |
//! | then, per client | depth x 8 | the calls that it gave up: [`GivenUp`](crate::given_up::GivenUp) | the client |
//!
//! A slot is the lane's sequence word (8 B), the tag word (8 B) and the payload, rounded up to 64
//! B: payloads up to 48 B take one line. The slot of a call's tag selects the area of its long
//! messages. The client owns the area of a request until the server has received it; the server
//! owns the area of a response until the client has taken it.

use std::mem::offset_of;

use copyrpc_calls::OptionError;
use copyrpc_calls::Tagged;
use copyrpc_shm::lane::Slot;
use copyrpc_shm::plain::{Plain, TypeShape};

use crate::announce::Announce;
use crate::entries::Entries;
use crate::limits::{CLIENTS_MAX, DEPTH_MAX, LINE};

/// Kind of the region of a server of byte messages, whose lanes hold short messages and the lengths
/// of long ones.
pub(crate) const BYTES_KIND: u64 = u64::from_be_bytes(*b"ipcBYTE\x02");

/// First two lines of the region.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Header {
    pub(crate) magic: u64,
    pub(crate) version: u32,
    pub(crate) max_clients: u32,
    /// Number of words for announcements; for a ring, its depth.
    pub(crate) words: u32,
    pub(crate) depth: u32,
    pub(crate) shape: TypeShape,
    pub(crate) _reserved: [u64; 10],
}

const _: () = {
    assert!(size_of::<Header>() == 2 * LINE);
    assert!(offset_of!(Header, magic) == 0);
    assert!(offset_of!(Header, version) == 8);
    assert!(offset_of!(Header, max_clients) == 12);
    assert!(offset_of!(Header, words) == 16);
    assert!(offset_of!(Header, depth) == 20);
    assert!(offset_of!(Header, shape) == 24);
    assert!(offset_of!(Header, _reserved) == 48);
};

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<Slot<Tagged<[u8; 48]>>>() == LINE);
    assert!(size_of::<Slot<Tagged<[u8; 49]>>>() == 2 * LINE);
};

/// The parameters of a region, and the offsets of its parts from its start, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) max_clients: usize,
    pub(crate) words: usize,
    pub(crate) depth: usize,
    pub(crate) entries: usize,
    pub(crate) requests: usize,
    pub(crate) responses: usize,
    areas: usize,
    area_bytes: AreaBytes,
    pub(crate) given_up: usize,
    pub(crate) total: usize,
}

/// Bytes of a call's request area and response area; 0 for payloads that lie in their lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct AreaBytes {
    pub(crate) request: usize,
    pub(crate) response: usize,
}

impl Layout {
    pub(crate) const ANNOUNCED: usize = size_of::<Header>();

    pub(crate) fn new<Req: Plain, Resp: Plain, W: Announce>(
        max_clients: usize,
        words: usize,
        depth: usize,
        area_bytes: AreaBytes,
    ) -> Result<Self, OptionError> {
        if !(1..=CLIENTS_MAX).contains(&max_clients) {
            let legal = format!("1 to {CLIENTS_MAX}");
            return Err(OptionError::new("max_clients", max_clients as u64, legal));
        }
        if !depth.is_power_of_two() || depth > DEPTH_MAX {
            let legal = format!("a power of two from 1 to {DEPTH_MAX}");
            return Err(OptionError::new("depth", depth as u64, legal));
        }
        let align = align_of::<Req>().max(align_of::<Resp>());
        if align > LINE {
            let legal = format!("at most {LINE} bytes");
            return Err(OptionError::new(
                "alignment of payloads",
                align as u64,
                legal,
            ));
        }
        let entries = Self::ANNOUNCED + W::bytes(max_clients, words)?;
        let requests = entries + Entries::bytes(max_clients);
        let slots = max_clients * depth;
        let sizes = || {
            let responses = slots
                .checked_mul(size_of::<Slot<Tagged<Req>>>())?
                .checked_add(requests)?;
            let areas = slots
                .checked_mul(size_of::<Slot<Tagged<Resp>>>())?
                .checked_add(responses)?;
            let area_bytes = AreaBytes {
                request: area_bytes.request.checked_next_multiple_of(LINE)?,
                response: area_bytes.response.checked_next_multiple_of(LINE)?,
            };
            let per_call = area_bytes.request.checked_add(area_bytes.response)?;
            let given_up = slots.checked_mul(per_call)?.checked_add(areas)?;
            let total = slots
                .checked_mul(size_of::<u64>())?
                .checked_next_multiple_of(LINE)?
                .checked_add(given_up)?;
            Some(Self {
                max_clients,
                words,
                depth,
                entries,
                requests,
                responses,
                areas,
                area_bytes,
                given_up,
                total,
            })
        };
        sizes().ok_or_else(|| {
            let legal = "less, or fewer clients or smaller payloads: the region would exceed the address space";
            OptionError::new("depth", depth as u64, legal)
        })
    }

    pub(crate) fn request_stride(&self) -> usize {
        (self.responses - self.requests) / self.max_clients
    }

    pub(crate) fn response_stride(&self) -> usize {
        (self.areas - self.responses) / self.max_clients
    }

    /// Returns the offset of the long request of a client's call; `None` unless both numbers are in
    /// range. A client has as many slots as calls: `depth`.
    pub(crate) fn request_area(&self, client: usize, slot: usize) -> Option<usize> {
        let in_range = client < self.max_clients && slot < self.depth;
        in_range.then(|| {
            self.areas
                + (client * self.depth + slot)
                    * (self.area_bytes.request + self.area_bytes.response)
        })
    }

    /// Returns the offset of the long response to a client's call; `None` as for
    /// [`request_area`](Self::request_area).
    pub(crate) fn response_area(&self, client: usize, slot: usize) -> Option<usize> {
        Some(self.request_area(client, slot)? + self.area_bytes.request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use copyrpc_shm::ready::ReadyWords;

    fn layout<Req: Plain, Resp: Plain>(
        clients: usize,
        depth: usize,
        area_bytes: AreaBytes,
    ) -> Result<Layout, OptionError> {
        Layout::new::<Req, Resp, ReadyWords>(clients, ReadyWords::words(clients), depth, area_bytes)
    }

    #[test]
    fn parts_follow_each_other_on_cache_lines() {
        let plain = layout::<[u8; 100], u64>(65, 8, AreaBytes::default()).unwrap();
        assert_eq!((Layout::ANNOUNCED, plain.entries), (128, 192));
        assert_eq!(plain.requests, 192 + 66 * 64);
        assert_eq!(
            (plain.request_stride(), plain.response_stride()),
            (8 * 128, 8 * 64)
        );
        assert_eq!(plain.responses, plain.requests + 65 * 8 * 128);
        assert_eq!(plain.given_up, plain.responses + 65 * 8 * 64);
        assert_eq!(plain.total, plain.given_up + 65 * 8 * 8);
        let with_areas = layout::<[u8; 100], u64>(
            65,
            8,
            AreaBytes {
                request: 65,
                response: 1,
            },
        )
        .unwrap();
        assert_eq!(with_areas.request_area(0, 0), Some(plain.given_up));
        assert_eq!(with_areas.response_area(0, 0), Some(plain.given_up + 128));
        assert_eq!(
            with_areas.request_area(64, 7),
            Some(plain.given_up + (65 * 8 - 1) * 192)
        );
        assert_eq!(
            (
                with_areas.request_area(65, 0),
                with_areas.response_area(0, 8)
            ),
            (None, None)
        );
        assert_eq!(with_areas.total, plain.total + 65 * 8 * 192);
        assert_eq!(
            (with_areas.request_stride(), with_areas.response_stride()),
            (plain.request_stride(), plain.response_stride())
        );
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        let refused = |clients, depth, request| {
            let layout = layout::<u64, u64>(
                clients,
                depth,
                AreaBytes {
                    request,
                    response: 0,
                },
            );
            layout
                .map_err(|error| (error.option, error.value))
                .unwrap_err()
        };
        assert_eq!(refused(0, 8, 0), ("max_clients", 0));
        assert_eq!(
            refused(CLIENTS_MAX + 1, 8, 0),
            ("max_clients", CLIENTS_MAX as u64 + 1)
        );
        for depth in [0, 3, DEPTH_MAX * 2, usize::MAX] {
            assert_eq!(refused(1, depth, 0), ("depth", depth as u64));
        }
        for request in [usize::MAX, usize::MAX / 2] {
            assert_eq!(
                refused(CLIENTS_MAX, DEPTH_MAX, request),
                ("depth", DEPTH_MAX as u64)
            );
        }
        assert_eq!(
            Layout::new::<u64, u64, ReadyWords>(64, 3, 8, AreaBytes::default()),
            Err(OptionError::new("words", 3, "as many as the clients need"))
        );
    }
}
