//! Where everything lies in the region of a server.
//!
//! Offsets and sizes in bytes; `S(T)` is `16 + size of T`, rounded up to 64.
//!
//! | offset | size | what | writer | beside the seed's layout |
//! |---|---|---|---|---|
//! | 0 | 8 | magic `0x444C_4752_5043_5631`, "DLGRPCV1" | server, before the region has a name | same |
//! | 8 | 4 | version, 2 | | was 1 |
//! | 12 | 4 | max_clients | | same |
//! | 16 | 4 | ring_depth, a power of two | | same |
//! | 20 | 4 | resp_depth: slots of each kind per client, a power of two | | same |
//! | 24 | 24 | types: sizes, alignments, tag | | new; `next_client_id` is superseded by the seats, `server_alive` by the region's own liveness |
//! | 48 | 80 | zero | | |
//! | 128 | 8 | head: a hint | clients | same place |
//! | 192 | 8 | tail | server | same place |
//! | 256 | 8 x ring_depth | ring words, rounded up to 64 | clients, server | was slots with the payload inside; see [`ring`](crate::ring) |
//! | then | [`Seats::bytes`] | a line for all clients and one for each | clients, server | new |
//! | then | S(Req) x clients x resp_depth | request lanes | the client | new: payloads have left the ring |
//! | then | S(Resp) x clients x resp_depth | response lanes | server | same place in the order |
//!
//! A slot is sequence @0 (the seed's `committed` and `valid`), tag @8, payload @16. The slots of client `c` are `c * resp_depth ..`, a
//! [lane](shm::lane) in each direction: its call number `n`, counted from 0, has its request in slot `n % resp_depth` of them, and so has
//! the `n`th answer that it gets, whichever call that is for. So neither side looks at a line that has nothing new for it.

use std::mem::offset_of;

use calls::Tagged;
use shm::clients::{CLIENTS_MAX, Seats};
use shm::lane::Slot;
use shm::plain::{Plain, TypeShape};
use shm::sync::AtomicU64;

/// The region's kind: "DLGRPC", the layout's version, 0.
pub(crate) const KIND: u64 = u64::from_be_bytes(*b"DLGRPC\x02\x00");
/// "DLGRPCV1".
pub(crate) const MAGIC: u64 = 0x444C_4752_5043_5631;
pub(crate) const VERSION: u32 = 2;
/// Most slots per client.
pub(crate) const RESP_DEPTH_MAX: usize = 1 << 15;
/// Least and most words of a ring.
pub(crate) const RING_DEPTH_MAX: usize = 1 << 27;
/// Clients of a server that is told no number.
pub(crate) const CLIENTS: usize = 64;
/// Unanswered calls of a client of a server that is told no number.
pub(crate) const RESP_DEPTH: usize = 32;
const LINE: usize = 64;

/// First 128 bytes of the region.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Header {
    pub(crate) magic: u64,
    pub(crate) version: u32,
    pub(crate) max_clients: u32,
    pub(crate) ring_depth: u32,
    pub(crate) resp_depth: u32,
    pub(crate) shape: TypeShape,
    pub(crate) _reserved: [u64; 10],
}

/// One position hint, alone on its line.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Hint(pub(crate) AtomicU64);

/// The next 128 bytes.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Control {
    pub(crate) head: Hint,
    pub(crate) tail: Hint,
}

/// A slot with its message.
type MessageSlot<T> = Slot<Tagged<T>>;

const CONTROL: usize = 128;
const WORDS: usize = 256;

const _: () = {
    assert!(size_of::<Header>() == CONTROL);
    assert!(offset_of!(Header, magic) == 0);
    assert!(offset_of!(Header, version) == 8);
    assert!(offset_of!(Header, max_clients) == 12);
    assert!(offset_of!(Header, ring_depth) == 16);
    assert!(offset_of!(Header, resp_depth) == 20);
    assert!(offset_of!(Header, shape) == 24);
    assert!(offset_of!(Header, _reserved) == 48);
};

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<Control>() == WORDS - CONTROL);
    assert!(CONTROL + offset_of!(Control, head) == 128);
    assert!(CONTROL + offset_of!(Control, tail) == 192);
    assert!(size_of::<AtomicU64>() == 8);
    assert!(size_of::<MessageSlot<[u8; 48]>>() == LINE);
    assert!(size_of::<MessageSlot<[u8; 49]>>() == 2 * LINE);
};

/// Offsets from the start of the region, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) max_clients: usize,
    pub(crate) ring_depth: usize,
    pub(crate) resp_depth: usize,
    pub(crate) control: usize,
    pub(crate) words: usize,
    pub(crate) seats: usize,
    pub(crate) requests: usize,
    pub(crate) responses: usize,
    pub(crate) total: usize,
}

/// What is wrong with the parameters of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ParameterError {
    /// Too few or too many clients.
    #[error("max_clients is {0}: it must be 1 to {CLIENTS_MAX}")]
    MaxClients(usize),
    /// Not a legal ring.
    #[error("ring_depth is {0}: it must be a power of two from 1 to {RING_DEPTH_MAX}")]
    RingDepth(usize),
    /// Not a legal number of slots.
    #[error("resp_depth is {0}: it must be a power of two from 1 to {RESP_DEPTH_MAX}")]
    RespDepth(usize),
    /// The payloads ask for more alignment than a cache line has.
    #[error("payloads are aligned to {0} bytes: at most {LINE} are possible")]
    Alignment(usize),
    /// The sum exceeds the address space.
    #[error("the region would exceed the address space: use fewer clients, less depth, or smaller payloads")]
    TooLarge,
}

/// The ring that is never full: a word for every call that can be unanswered, at least 1024, a power of two. A smaller one, of a word per
/// client or less, works too: who finds it full is served later, by a millisecond for every 64 clients at most.
#[must_use]
pub const fn ring_depth_for(max_clients: usize, resp_depth: usize) -> usize {
    let calls = max_clients.saturating_mul(resp_depth);
    let calls = if calls > RING_DEPTH_MAX { RING_DEPTH_MAX } else { calls };
    if calls < 1024 { 1024 } else { calls.next_power_of_two() }
}

impl Layout {
    pub(crate) fn new<Req: Plain, Resp: Plain>(max_clients: usize, ring_depth: usize, resp_depth: usize) -> Result<Self, ParameterError> {
        if !(1..=CLIENTS_MAX).contains(&max_clients) {
            return Err(ParameterError::MaxClients(max_clients));
        }
        if !ring_depth.is_power_of_two() || ring_depth > RING_DEPTH_MAX {
            return Err(ParameterError::RingDepth(ring_depth));
        }
        if !resp_depth.is_power_of_two() || resp_depth > RESP_DEPTH_MAX {
            return Err(ParameterError::RespDepth(resp_depth));
        }
        let align = align_of::<Req>().max(align_of::<Resp>());
        if align > LINE {
            return Err(ParameterError::Alignment(align));
        }
        let slots = max_clients * resp_depth;
        let seats = WORDS + (8 * ring_depth).next_multiple_of(LINE);
        let requests = seats + Seats::bytes(max_clients);
        let ends = || {
            let responses = slots.checked_mul(size_of::<MessageSlot<Req>>())?.checked_add(requests)?;
            Some((responses, slots.checked_mul(size_of::<MessageSlot<Resp>>())?.checked_add(responses)?))
        };
        let (responses, total) = ends().ok_or(ParameterError::TooLarge)?;
        Ok(Self { max_clients, ring_depth, resp_depth, control: CONTROL, words: WORDS, seats, requests, responses, total })
    }

    /// Number of slots of each kind.
    pub(crate) fn slots(&self) -> usize {
        self.max_clients * self.resp_depth
    }

    /// Bytes of the request slots of one client.
    pub(crate) fn request_stride(&self) -> usize {
        (self.responses - self.requests) / self.max_clients
    }

    /// Bytes of the response slots of one client.
    pub(crate) fn response_stride(&self) -> usize {
        (self.total - self.responses) / self.max_clients
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other() {
        let layout = Layout::new::<[u8; 24], [u8; 100]>(3, 1024, 4).unwrap();
        assert_eq!((layout.control, layout.words, layout.seats), (128, 256, 256 + 8192));
        assert_eq!(layout.requests, layout.seats + 4 * 64);
        assert_eq!(layout.responses, layout.requests + 12 * 64);
        assert_eq!(layout.total, layout.responses + 12 * 128);
        assert_eq!((layout.request_stride(), layout.response_stride()), (4 * 64, 4 * 128));
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        type L = Layout;
        assert_eq!(L::new::<u8, u8>(0, 8, 8), Err(ParameterError::MaxClients(0)));
        assert_eq!(L::new::<u8, u8>(CLIENTS_MAX + 1, 8, 8), Err(ParameterError::MaxClients(CLIENTS_MAX + 1)));
        for depth in [0, 3, RING_DEPTH_MAX * 2] {
            assert_eq!(L::new::<u8, u8>(1, depth, 8), Err(ParameterError::RingDepth(depth)));
        }
        for depth in [0, 5, RESP_DEPTH_MAX * 2] {
            assert_eq!(L::new::<u8, u8>(1, 8, depth), Err(ParameterError::RespDepth(depth)));
        }
    }

    #[test]
    fn default_ring_holds_every_call() {
        assert_eq!(ring_depth_for(1, 1), 1024);
        assert_eq!(ring_depth_for(46, 32), 2048);
        assert_eq!(ring_depth_for(CLIENTS_MAX, RESP_DEPTH_MAX), RING_DEPTH_MAX);
        assert!(ring_depth_for(usize::MAX, usize::MAX) <= RING_DEPTH_MAX);
    }
}
