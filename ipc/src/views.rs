//! The parts of a region, as typed views. The only file that turns offsets into addresses.

use std::ptr::NonNull;

use shm::clients::Seats;
use shm::lane::Slot;
use shm::plain::{Plain, TypeShape};
use shm::ready::ReadyWords;
use shm::region::{Region, RegionView};

use crate::error::ConnectError;
use crate::layout::{AreaBytes, Header, Layout, Request, Response};

/// The layout that the header of a server's region describes, known to fit the region and these types.
pub(crate) fn described_layout<Req: Plain, Resp: Plain>(region: &Region, type_tag: u64) -> Result<Layout, ConnectError> {
    let header = header(region)?;
    let client = TypeShape::of::<Req, Resp>(type_tag);
    if header.shape != client {
        return Err(ConnectError::Types { server: header.shape, client });
    }
    layout_in::<Req, Resp>(region, &header, AreaBytes::default())
}

/// A copy of the header of a server's region, of which nothing is known yet.
pub(crate) fn header(region: &Region) -> Result<Header, ConnectError> {
    let have = region.view().len();
    let Some(header) = region.view().at::<Header>(0) else {
        return Err(ConnectError::Truncated { need: size_of::<Header>(), have });
    };
    // SAFETY: in bounds and aligned. It is written before the region can be opened; every field is an integer, so a peer that breaks that
    // rule gives us a wrong number, which is checked below, once, in this copy.
    Ok(unsafe { header.as_ptr().read_volatile() })
}

/// The layout of a region with this header and these areas, known to fit the region.
pub(crate) fn layout_in<Req: Plain, Resp: Plain>(region: &Region, header: &Header, areas: AreaBytes) -> Result<Layout, ConnectError> {
    let have = region.view().len();
    let layout = Layout::new::<Req, Resp>(header.max_clients as usize, header.depth as usize, areas).map_err(ConnectError::Damaged)?;
    if layout.total > have {
        return Err(ConnectError::Truncated { need: layout.total, have });
    }
    Ok(layout)
}

/// The address at `offset`.
///
/// # Safety
/// The offset lies inside the region.
unsafe fn address<T>(view: RegionView<'_>, offset: usize) -> NonNull<T> {
    // SAFETY: contract of this function.
    unsafe { view.base().add(offset).cast() }
}

/// # Safety
/// The layout fits the region, which outlives the view and was zeroed when created.
pub(crate) unsafe fn seats(view: RegionView<'_>, layout: &Layout) -> Seats {
    // SAFETY: contract of this function; the layout gives the seats their room, on a line.
    unsafe { Seats::new(address(view, layout.seats), layout.max_clients) }
}

/// # Safety
/// As [`seats`].
pub(crate) unsafe fn ready(view: RegionView<'_>, layout: &Layout) -> ReadyWords {
    // SAFETY: contract of this function; the layout gives the words their room, on a line.
    unsafe { ReadyWords::new(address(view, layout.ready), layout.max_clients) }
}

/// # Safety
/// The layout fits the region and these types, and `client` is below its `max_clients`.
pub(crate) unsafe fn request_lane<Req>(view: RegionView<'_>, layout: &Layout, client: usize) -> NonNull<Slot<Request<Req>>> {
    // SAFETY: contract of this function.
    unsafe { address(view, layout.request_lane(client)) }
}

/// # Safety
/// As [`request_lane`].
pub(crate) unsafe fn response_lane<Resp>(view: RegionView<'_>, layout: &Layout, client: usize) -> NonNull<Slot<Response<Resp>>> {
    // SAFETY: contract of this function.
    unsafe { address(view, layout.response_lane(client)) }
}

/// Empties both lanes of a client.
///
/// # Safety
/// As [`request_lane`]; and nobody else uses the lanes: the client is gone, and no end of this process refers to them.
pub(crate) unsafe fn reset_lanes(view: RegionView<'_>, layout: &Layout, client: usize) {
    // SAFETY: contract of this function; zeroed bytes are empty slots.
    unsafe { address::<u8>(view, layout.request_lane(client)).write_bytes(0, layout.lane_pair_bytes()) };
}
