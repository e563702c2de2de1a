//! The parts of a region, as typed views. The only file that turns offsets into addresses.

use std::ptr::NonNull;

use shm::clients::Seats;
use shm::plain::{Plain, TypeShape};
use shm::region::{Region, RegionView};
use shm::sessions::LanePairs;
use shm::sync::AtomicU64;

use crate::error::ConnectError;
use crate::layout::{Control, Header, Layout, MAGIC, VERSION};
use crate::ring::Ring;

/// The layout that the header of a server's region describes, known to fit the region and these types.
pub(crate) fn described_layout<Req: Plain, Resp: Plain>(region: &Region, type_tag: u64) -> Result<Layout, ConnectError> {
    let have = region.view().len();
    let Some(header) = region.view().at::<Header>(0) else {
        return Err(ConnectError::Truncated { need: size_of::<Header>(), have });
    };
    // SAFETY: in bounds and aligned. It is written before the region can be opened; every field is an integer, so a peer that breaks that
    // rule gives us a wrong number, which is checked below, once, in this copy.
    let header = unsafe { header.as_ptr().read_volatile() };
    if (header.magic, header.version) != (MAGIC, VERSION) {
        return Err(ConnectError::Version { magic: header.magic, version: header.version });
    }
    let client = TypeShape::of::<Req, Resp>(type_tag);
    if header.shape != client {
        return Err(ConnectError::Types { server: header.shape, client });
    }
    let depths = (header.max_clients as usize, header.ring_depth as usize, header.resp_depth as usize);
    let layout = Layout::new::<Req, Resp>(depths.0, depths.1, depths.2).map_err(ConnectError::Damaged)?;
    if layout.total > have {
        return Err(ConnectError::Truncated { need: layout.total, have });
    }
    Ok(layout)
}

/// # Safety
/// The layout fits the region, which was zeroed when created, and outlives the view.
pub(crate) unsafe fn seats(view: RegionView<'_>, layout: &Layout) -> Seats {
    // SAFETY: contract of this function.
    unsafe { Seats::new(view.base().add(layout.seats), layout.max_clients) }
}

/// # Safety
/// As [`seats`], and the layout was made for these types; the region outlives what is made from the lanes.
pub(crate) unsafe fn lanes<Req, Resp>(view: RegionView<'_>, layout: &Layout) -> LanePairs<Req, Resp> {
    // SAFETY: contract of this function.
    unsafe {
        let requests = (view.base().add(layout.requests), layout.request_stride());
        LanePairs::new(requests, (view.base().add(layout.responses), layout.response_stride()), layout.resp_depth)
    }
}

/// Where the ring is.
#[derive(Debug)]
pub(crate) struct RingView {
    control: NonNull<Control>,
    words: NonNull<[AtomicU64]>,
}

// SAFETY: a view of atomics in shared memory.
unsafe impl Send for RingView {}

impl RingView {
    /// # Safety
    /// The layout fits the region, which outlives this value.
    pub(crate) unsafe fn new(view: RegionView<'_>, layout: &Layout) -> Self {
        // SAFETY: contract of this function; both offsets are inside, and multiples of 64.
        let (control, words) = unsafe { (view.base().add(layout.control).cast(), view.base().add(layout.words).cast()) };
        Self { control, words: NonNull::slice_from_raw_parts(words, layout.ring_depth) }
    }

    #[inline(always)]
    pub(crate) fn ring(&self) -> Ring<'_> {
        // SAFETY: inside the region (contract of `new`), and atomics only.
        let (control, words) = unsafe { (self.control.as_ref(), self.words.as_ref()) };
        Ring::new(&control.head.0, &control.tail.0, words)
    }
}
