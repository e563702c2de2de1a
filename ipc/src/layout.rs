//! Where everything lies in the region of a server, and what its header says.
//!
//! | offset | bytes | what | writer |
//! |---|---|---|---|
//! | 0 | 64 | [`Header`] | server, before the region has a name |
//! | 64 | 8 x [`ReadyWords::words`], rounded up to 64 | ready bits of the request lanes | clients, server |
//! | then | [`Seats::bytes`] | a line for all clients and one for each: session, `armed`, what they sleep on | clients, server |
//! | then, per client | depth x `Slot<Tagged<Req>>` | request lane | the client |
//! | | depth x `Slot<Tagged<Resp>>` | response lane | the server |
//! | then, per client and slot of its calls | request bytes, rounded up to 64 | long request ([`bytes`](crate::bytes) only) | the client |
//! | | response bytes, rounded up to 64 | long response ([`bytes`](crate::bytes) only) | the server |
//!
//! A slot is the lane's sequence word (8 B), the tag word (8 B) and the payload, rounded up to 64 B: payloads up to 48 B take one line.
//! The place of a long message is that of its call's tag: the client's from the call to the server's receiving it, and the server's from
//! its answer to the client's taking it.

use std::mem::offset_of;

use calls::Tagged;
use shm::clients::{CLIENTS_MAX, Seats};
use shm::lane::Slot;
use shm::plain::{Plain, TypeShape};
use shm::ready::ReadyWords;

/// "ipcLANE" and the layout's version.
pub(crate) const KIND: u64 = u64::from_be_bytes(*b"ipcLANE\x01");
/// The same for a server of byte messages, whose lanes hold short messages and the lengths of long ones.
pub(crate) const BYTES_KIND: u64 = u64::from_be_bytes(*b"ipcBYTE\x01");
/// Deepest lane.
pub const DEPTH_MAX: usize = 1 << 15;
/// Clients of a server that is told no number.
pub(crate) const CLIENTS: usize = 64;
/// Unanswered calls of a client of a server that is told no number.
pub(crate) const DEPTH: usize = 32;
const LINE: usize = 64;

/// First line of the region.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Header {
    pub(crate) max_clients: u32,
    pub(crate) depth: u32,
    pub(crate) shape: TypeShape,
}

const _: () = {
    assert!(size_of::<Header>() == LINE);
    assert!(offset_of!(Header, max_clients) == 0);
    assert!(offset_of!(Header, depth) == 4);
    assert!(offset_of!(Header, shape) == 8);
};

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<Slot<Tagged<[u8; 48]>>>() == LINE);
    assert!(size_of::<Slot<Tagged<[u8; 49]>>>() == 2 * LINE);
};

/// Offsets from the start of the region, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) max_clients: usize,
    pub(crate) depth: usize,
    pub(crate) ready: usize,
    pub(crate) seats: usize,
    lanes: usize,
    request_lane_bytes: usize,
    response_lane_bytes: usize,
    areas: usize,
    area_bytes: AreaBytes,
    pub(crate) total: usize,
}

/// Room for a long request and a long response beside their lanes; 0 for payloads that lie in their lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct AreaBytes {
    pub(crate) request: usize,
    pub(crate) response: usize,
}

/// What is wrong with the parameters of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ParameterError {
    /// Too few or too many clients.
    #[error("max_clients is {0}: it must be 1 to {CLIENTS_MAX}")]
    MaxClients(usize),
    /// Not a legal depth.
    #[error("depth is {0}: it must be a power of two from 1 to {DEPTH_MAX}")]
    Depth(usize),
    /// The payloads ask for more alignment than a cache line has.
    #[error("payloads are aligned to {0} bytes: at most {LINE} are possible")]
    Alignment(usize),
    /// A longer message than there can be.
    #[error("messages of {0} bytes: at most {max} are possible", max = crate::bytes::MESSAGE_MAX)]
    MessageBytes(usize),
    /// The sum exceeds the address space.
    #[error("the region would exceed the address space: use fewer clients, less depth, or smaller payloads")]
    TooLarge,
}

impl Layout {
    pub(crate) fn new<Req: Plain, Resp: Plain>(max_clients: usize, depth: usize, area_bytes: AreaBytes) -> Result<Self, ParameterError> {
        if !(1..=CLIENTS_MAX).contains(&max_clients) {
            return Err(ParameterError::MaxClients(max_clients));
        }
        if !depth.is_power_of_two() || depth > DEPTH_MAX {
            return Err(ParameterError::Depth(depth));
        }
        let align = align_of::<Req>().max(align_of::<Resp>());
        if align > LINE {
            return Err(ParameterError::Alignment(align));
        }
        let ready = size_of::<Header>();
        let seats = ready + (8 * ReadyWords::words(max_clients)).next_multiple_of(LINE);
        let lanes = seats + Seats::bytes(max_clients);
        let sizes = || {
            let request_lane_bytes = depth.checked_mul(size_of::<Slot<Tagged<Req>>>())?;
            let response_lane_bytes = depth.checked_mul(size_of::<Slot<Tagged<Resp>>>())?;
            let per_client = request_lane_bytes.checked_add(response_lane_bytes)?;
            let areas = max_clients.checked_mul(per_client)?.checked_add(lanes)?;
            let area_bytes = AreaBytes {
                request: area_bytes.request.checked_next_multiple_of(LINE)?,
                response: area_bytes.response.checked_next_multiple_of(LINE)?,
            };
            let per_call = area_bytes.request.checked_add(area_bytes.response)?;
            let total = (max_clients * depth).checked_mul(per_call)?.checked_add(areas)?;
            Some(Self { max_clients, depth, ready, seats, lanes, request_lane_bytes, response_lane_bytes, areas, area_bytes, total })
        };
        sizes().ok_or(ParameterError::TooLarge)
    }

    /// Start of both lanes of `client`, which must be below `max_clients`.
    pub(crate) fn request_lane(&self, client: usize) -> usize {
        self.lanes + client * self.lane_pair_bytes()
    }

    pub(crate) fn response_lane(&self, client: usize) -> usize {
        self.request_lane(client) + self.request_lane_bytes
    }

    /// Where the long request of a client's call lies; `None` unless both numbers are in range. A client's slots are as many as its
    /// calls: `depth`.
    pub(crate) fn request_area(&self, client: usize, slot: usize) -> Option<usize> {
        let in_range = client < self.max_clients && slot < self.depth;
        in_range.then(|| self.areas + (client * self.depth + slot) * (self.area_bytes.request + self.area_bytes.response))
    }

    /// Where the long response to a client's call lies, as [`request_area`](Self::request_area).
    pub(crate) fn response_area(&self, client: usize, slot: usize) -> Option<usize> {
        Some(self.request_area(client, slot)? + self.area_bytes.request)
    }

    /// Bytes of both lanes of one client.
    pub(crate) fn lane_pair_bytes(&self) -> usize {
        self.request_lane_bytes + self.response_lane_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_on_cache_lines() {
        let layout = Layout::new::<[u8; 100], u64>(65, 8, AreaBytes::default()).unwrap();
        assert_eq!((layout.ready, layout.seats), (64, 128));
        assert_eq!(layout.request_lane(0), 128 + 66 * 64);
        assert_eq!(layout.response_lane(0), layout.request_lane(0) + 8 * 128);
        assert_eq!(layout.request_lane(1), layout.response_lane(0) + 8 * 64);
        assert_eq!(layout.total, layout.request_lane(65));
        let with_areas = Layout::new::<[u8; 100], u64>(65, 8, AreaBytes { request: 65, response: 1 }).unwrap();
        assert_eq!(with_areas.request_area(0, 0), Some(layout.total));
        assert_eq!(with_areas.response_area(0, 0), Some(layout.total + 128));
        assert_eq!(with_areas.request_area(64, 7), Some(layout.total + (65 * 8 - 1) * 192));
        assert_eq!((with_areas.request_area(65, 0), with_areas.response_area(0, 8)), (None, None));
        assert_eq!(with_areas.total, layout.total + 65 * 8 * 192);
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        let layout = |clients, depth, request| Layout::new::<u64, u64>(clients, depth, AreaBytes { request, response: 0 });
        assert_eq!(layout(0, 8, 0), Err(ParameterError::MaxClients(0)));
        assert_eq!(layout(CLIENTS_MAX + 1, 8, 0), Err(ParameterError::MaxClients(CLIENTS_MAX + 1)));
        for depth in [0, 3, DEPTH_MAX * 2, usize::MAX] {
            assert_eq!(layout(1, depth, 0), Err(ParameterError::Depth(depth)));
        }
        for request in [usize::MAX, usize::MAX / 2] {
            assert_eq!(layout(CLIENTS_MAX, DEPTH_MAX, request), Err(ParameterError::TooLarge));
        }
    }
}
