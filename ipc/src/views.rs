//! The parts of a region, as typed views. The only file that turns offsets into addresses.

use std::ptr::NonNull;

use shm::plain::{Plain, TypeShape};
use shm::region::{Region, RegionView};

use crate::announce::Announce;
use crate::error::ConnectError;
use crate::layout::{AreaBytes, Header, Layout};
use crate::seats::Seats;
use crate::sessions::LanePairs;

/// A copy of the header of a server's region, of this layout's version; nothing else is known of it.
pub(crate) fn header<W: Announce>(region: &Region) -> Result<Header, ConnectError> {
    let have = region.view().len();
    let Some(header) = region.view().at::<Header>(0) else {
        return Err(ConnectError::Truncated { need: size_of::<Header>(), have });
    };
    // SAFETY: in bounds and aligned. It is written before the region can be opened; every field is an integer, so a peer that breaks that
    // rule gives us a wrong number, which is checked below, once, in this copy.
    let header = unsafe { header.as_ptr().read_volatile() };
    if (header.magic, header.version) == (W::MAGIC, W::VERSION) {
        Ok(header)
    } else {
        Err(ConnectError::Version { magic: header.magic, version: header.version })
    }
}

/// Returns the layout of a region with this header, for these types and this shape, known to fit the region.
pub(crate) fn layout<Req: Plain, Resp: Plain, W: Announce>(
    region: &Region,
    header: &Header,
    client: TypeShape,
    areas: AreaBytes,
) -> Result<Layout, ConnectError> {
    if header.shape != client {
        return Err(ConnectError::Types { server: header.shape, client });
    }
    let (max_clients, words, depth) = (header.max_clients as usize, header.words as usize, header.depth as usize);
    let layout = Layout::new::<Req, Resp, W>(max_clients, words, depth, areas).map_err(ConnectError::Damaged)?;
    let have = region.view().len();
    if layout.total > have {
        return Err(ConnectError::Truncated { need: layout.total, have });
    }
    Ok(layout)
}

/// Returns the address at `offset`.
///
/// # Safety
/// The offset lies inside the region.
unsafe fn address(view: RegionView<'_>, offset: usize) -> NonNull<u8> {
    // SAFETY: contract of this function.
    unsafe { view.base().add(offset) }
}

/// # Safety
/// The layout fits the region, which outlives the view and was zeroed when created.
pub(crate) unsafe fn seats(view: RegionView<'_>, layout: &Layout) -> Seats {
    // SAFETY: contract of this function; the layout gives the seats their room, on a line.
    unsafe { Seats::new(address(view, layout.seats), layout.max_clients) }
}

/// # Safety
/// Like [`seats`], and the layout was made for this `W`.
pub(crate) unsafe fn announced<W: Announce>(view: RegionView<'_>, layout: &Layout) -> W {
    // SAFETY: contract of this function; the layout gives them their room, on a line.
    unsafe { W::new(address(view, Layout::ANNOUNCED), layout.max_clients, layout.words) }
}

/// # Safety
/// The layout fits the region and these types; the region outlives what is made from the lanes, and they were zeroed when it was created.
pub(crate) unsafe fn lanes<Req, Resp>(view: RegionView<'_>, layout: &Layout) -> LanePairs<Req, Resp> {
    // SAFETY: contract of this function.
    unsafe {
        let requests = (address(view, layout.requests), layout.request_stride());
        LanePairs::new(requests, (address(view, layout.responses), layout.response_stride()), layout.depth)
    }
}
