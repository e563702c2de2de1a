//! The parts of a region, as typed views. Only this file turns offsets into addresses.

use std::ptr::NonNull;

use copyrpc_shm::plain::{Plain, TypeShape};
use copyrpc_shm::region::Region;

use crate::announce::Announce;
use crate::entries::Entries;
use crate::error::SetupError;
use crate::layout::{AreaBytes, Header, Layout};
use crate::sessions::LanePairs;

/// Returns a copy of a server's header. Checks only the magic number and the version.
pub(crate) fn header<W: Announce>(region: &Region) -> Result<Header, SetupError> {
    let have = region.view().len();
    let Some(header) = region.view().at::<Header>(0) else {
        return Err(SetupError::Truncated {
            need: size_of::<Header>(),
            have,
        });
    };
    // SAFETY: the header is in bounds and aligned, and is not written after the region can be
    // opened. Every field is an integer, so a peer that writes it nevertheless can only cause a
    // wrong number; the numbers are checked before their use, in this copy.
    let header = unsafe { header.as_ptr().read_volatile() };
    if (header.magic, header.version) == (W::MAGIC, W::VERSION) {
        Ok(header)
    } else {
        Err(SetupError::Version {
            magic: header.magic,
            version: header.version,
        })
    }
}

/// Returns the layout of a region with this header, after a check of the types and of the length.
pub(crate) fn layout<Req: Plain, Resp: Plain, W: Announce>(
    region: &Region,
    header: &Header,
    client: TypeShape,
    areas: AreaBytes,
) -> Result<Layout, SetupError> {
    if header.shape != client {
        return Err(SetupError::Types {
            server: header.shape,
            client,
        });
    }
    let max_clients = header.max_clients as usize;
    let words = header.words as usize;
    let depth = header.depth as usize;
    let layout = Layout::new::<Req, Resp, W>(max_clients, words, depth, areas)
        .map_err(SetupError::Damaged)?;
    let have = region.view().len();
    if layout.total > have {
        return Err(SetupError::Truncated {
            need: layout.total,
            have,
        });
    }
    Ok(layout)
}

pub(crate) struct Views<Req, Resp, W> {
    pub(crate) entries: Entries,
    pub(crate) lanes: LanePairs<Req, Resp>,
    pub(crate) announced: W,
}

impl<Req, Resp, W: Announce> Views<Req, Resp, W> {
    /// Makes the views of a region.
    ///
    /// # Safety
    /// The region at `base` was zeroed when it was created, and outlives everything that is made
    /// from this value. The layout, made for these types, fits it.
    pub(crate) unsafe fn new(base: NonNull<u8>, layout: &Layout) -> Self {
        // SAFETY: the region at `base` is zeroed, mapped, and large enough for the layout (contract
        // of this function). The layout puts each part on cache lines of its own, and its depth is
        // a power of two.
        unsafe {
            let requests = (base.add(layout.requests), layout.request_stride());
            let responses = (base.add(layout.responses), layout.response_stride());
            Self {
                entries: Entries::new(base.add(layout.entries), layout.max_clients),
                lanes: LanePairs::new(
                    requests,
                    responses,
                    base.add(layout.given_up).cast(),
                    layout.depth,
                ),
                announced: W::new(
                    base.add(Layout::ANNOUNCED),
                    layout.max_clients,
                    layout.words,
                ),
            }
        }
    }
}
