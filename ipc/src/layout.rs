//! Where everything lies in the region of a server, and what its header says.
//!
//! | offset | bytes | what | writer |
//! |---|---|---|---|
//! | 0 | 64 | [`Header`] | server, before the region has a name |
//! | 64 | 8 x [`ReadyWords::words`], rounded up to 64 | ready bits of the request lanes | clients, server |
//! | then | [`Seats::bytes`] | a line for all clients and one for each: session, `armed` | clients, server |
//! | then, per client | depth x `Slot<Request>` | request lane | the client |
//! | | depth x `Slot<Response>` | response lane | the server |
//!
//! A slot is the lane's sequence word (8 B), the tag word (8 B) and the payload, rounded up to 64 B: payloads up to 48 B take one line.

use std::mem::offset_of;

use shm::clients::{CLIENTS_MAX, Seats};
use shm::lane::Slot;
use shm::plain::{Plain, TypeShape};
use shm::ready::ReadyWords;

/// "ipcLANE" and the layout's version.
pub(crate) const KIND: u64 = u64::from_be_bytes(*b"ipcLANE\x01");
/// Deepest lane.
pub const DEPTH_MAX: usize = 1 << 15;
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

/// A request as it lies in its lane.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Request<Req> {
    /// The client's tag, note 0.
    pub(crate) tag: u64,
    pub(crate) payload: Req,
}

/// A response as it lies in its lane.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub(crate) struct Response<Resp> {
    /// The request's tag, and how the call went as its note: [`ANSWERED`] or [`DROPPED`].
    pub(crate) tag: u64,
    pub(crate) payload: Resp,
}

/// The payload is the answer.
pub(crate) const ANSWERED: u8 = 0;
/// The handler dropped the request; the payload is zero.
pub(crate) const DROPPED: u8 = 1;

#[cfg(not(loom))]
const _: () = {
    assert!(offset_of!(Request<u64>, tag) == 0 && offset_of!(Request<u64>, payload) == 8);
    assert!(offset_of!(Response<u64>, tag) == 0 && offset_of!(Response<u64>, payload) == 8);
    assert!(size_of::<Slot<Request<[u8; 48]>>>() == LINE);
    assert!(size_of::<Slot<Response<[u8; 48]>>>() == LINE);
    assert!(size_of::<Slot<Request<[u8; 49]>>>() == 2 * LINE);
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
    pub(crate) total: usize,
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
    /// The sum exceeds the address space.
    #[error("the region would exceed the address space: use fewer clients, less depth, or smaller payloads")]
    TooLarge,
}

impl Layout {
    pub(crate) fn new<Req: Plain, Resp: Plain>(max_clients: usize, depth: usize) -> Result<Self, ParameterError> {
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
            let request_lane_bytes = depth.checked_mul(size_of::<Slot<Request<Req>>>())?;
            let response_lane_bytes = depth.checked_mul(size_of::<Slot<Response<Resp>>>())?;
            let per_client = request_lane_bytes.checked_add(response_lane_bytes)?;
            let total = max_clients.checked_mul(per_client)?.checked_add(lanes)?;
            Some(Self { max_clients, depth, ready, seats, lanes, request_lane_bytes, response_lane_bytes, total })
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
        let layout = Layout::new::<[u8; 100], u64>(65, 8).unwrap();
        assert_eq!((layout.ready, layout.seats), (64, 128));
        assert_eq!(layout.request_lane(0), 128 + 66 * 64);
        assert_eq!(layout.response_lane(0), layout.request_lane(0) + 8 * 128);
        assert_eq!(layout.request_lane(1), layout.response_lane(0) + 8 * 64);
        assert_eq!(layout.total, layout.request_lane(65));
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        assert_eq!(Layout::new::<u64, u64>(0, 8), Err(ParameterError::MaxClients(0)));
        assert_eq!(Layout::new::<u64, u64>(CLIENTS_MAX + 1, 8), Err(ParameterError::MaxClients(CLIENTS_MAX + 1)));
        for depth in [0, 3, DEPTH_MAX * 2, usize::MAX] {
            assert_eq!(Layout::new::<u64, u64>(1, depth), Err(ParameterError::Depth(depth)));
        }
    }
}
