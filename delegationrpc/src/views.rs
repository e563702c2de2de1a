//! The parts of a region, as typed views. The only file that turns offsets into addresses.

use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};

use shm::cache;
use shm::clients::Seats;
use shm::lane::{LaneRx, LaneTx};
use shm::pending::Tag;
use shm::plain::{Plain, TypeShape};
use shm::region::{Region, RegionView};
use shm::sync::{AtomicU64, Ordering};

use crate::error::ConnectError;
use crate::layout::{Control, Header, Layout, MAGIC, Response, ResponseSlot, Slot, VERSION};
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

/// Number of a request slot, known to exist. Made by [`Shared::index`] only.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotIndex(usize);

impl SlotIndex {
    pub(crate) fn get(self) -> usize {
        self.0
    }
}

/// The shared parts that both ends use on every call.
#[derive(Debug)]
pub(crate) struct Shared<Req, Resp> {
    control: NonNull<Control>,
    words: NonNull<AtomicU64>,
    requests: NonNull<Slot<Req>>,
    responses: NonNull<ResponseSlot<Resp>>,
    layout: Layout,
}

// SAFETY: a view of memory that is shared through atomics; payloads are plain data.
unsafe impl<Req: Send, Resp: Send> Send for Shared<Req, Resp> {}

impl<Req: Plain, Resp: Plain> Shared<Req, Resp> {
    /// # Safety
    /// The layout fits the region and these types, and the region outlives this value.
    pub(crate) unsafe fn new(view: RegionView<'_>, layout: Layout) -> Self {
        let base = view.base();
        // SAFETY: contract of this function; every offset is inside, and a multiple of 64.
        unsafe {
            Self {
                control: base.add(layout.control).cast(),
                words: base.add(layout.words).cast(),
                requests: base.add(layout.requests).cast(),
                responses: base.add(layout.responses).cast(),
                layout,
            }
        }
    }

    #[inline(always)]
    pub(crate) fn ring(&self) -> Ring<'_> {
        // SAFETY: inside the region (contract of `new`), and atomics only.
        let (control, words) =
            unsafe { (self.control.as_ref(), NonNull::slice_from_raw_parts(self.words, self.layout.ring_depth).as_ref()) };
        Ring::new(&control.head.0, &control.tail.0, words)
    }

    /// Index of a client's slot; `None` unless both numbers are in range.
    #[inline(always)]
    pub(crate) fn index(&self, client: usize, slot: usize) -> Option<SlotIndex> {
        let in_range = client < self.layout.max_clients && slot < self.layout.resp_depth;
        in_range.then(|| SlotIndex(client * self.layout.resp_depth + slot))
    }

    /// Slots of each kind per client.
    pub(crate) fn resp_depth(&self) -> usize {
        self.layout.resp_depth
    }

    #[inline(always)]
    fn request(&self, index: SlotIndex) -> &Slot<Req> {
        // SAFETY: an index was checked against the number of slots (contract of `new`).
        unsafe { self.requests.add(index.0).as_ref() }
    }

    /// Client: writes a request into its slot. Nobody looks there before the slot is announced (D1).
    #[inline(always)]
    pub(crate) fn write_request(&self, index: SlotIndex, tag: Tag, request: Req) {
        let slot = self.request(index);
        slot.tag.store(tag.pack(0), Ordering::Relaxed);
        // SAFETY: the slot's last call has been answered, so the server is done with it, and it is this client's alone.
        slot.payload.with_mut(|p| unsafe { (*p).write(request) });
    }

    /// Client: fetches the line of a slot that it will write soon. The announcement waits for all earlier stores, so without this it would
    /// wait for that line to come from the server's core.
    #[inline(always)]
    pub(crate) fn prefetch_to_write(&self, index: SlotIndex) {
        cache::prefetch_to_write(ptr::from_ref(self.request(index)).addr());
    }

    /// Server: fetches the line of a request that it will read soon.
    #[inline(always)]
    pub(crate) fn prefetch(&self, index: SlotIndex) {
        cache::prefetch(ptr::from_ref(self.request(index)).addr());
    }

    /// Server: copies an announced request (D1).
    #[inline(always)]
    pub(crate) fn read_request(&self, index: SlotIndex) -> (u64, Req) {
        let slot = self.request(index);
        let tag = slot.tag.load(Ordering::Relaxed);
        // SAFETY: shared memory is never uninitialised, any bytes are a valid `Req`, and a client does not write to a slot that it has
        // announced and that is not answered. (One that does gets nonsense for an answer; nothing else comes of it.)
        (tag, slot.payload.with(|p| unsafe { read_plain(p) }))
    }

    /// The responses to a client, a lane that begins at position 0; `None` unless there is such a client.
    fn lane(&self, client: usize) -> Option<NonNull<ResponseSlot<Resp>>> {
        let index = self.index(client, 0)?;
        // SAFETY: there are as many response slots as request slots (contract of `new`).
        Some(unsafe { self.responses.add(index.0) })
    }

    /// Server: its end of the responses to a client. D4 is the lane's L1.
    ///
    /// # Safety
    /// There is no other in use, and the client's slots are empty: since the region's creation, or by [`reset`](Self::reset).
    pub(crate) unsafe fn responses_to(&self, client: usize) -> Option<LaneTx<Response<Resp>>> {
        // SAFETY: contract of this function; a client has at most `resp_depth` calls unanswered or answers not taken, so there is room.
        Some(unsafe { LaneTx::new(self.lane(client)?, self.layout.resp_depth as u64, 0) })
    }

    /// Client: its end of the same.
    ///
    /// # Safety
    /// There is no other in use, and the slots are empty.
    pub(crate) unsafe fn responses_of(&self, client: usize) -> Option<LaneRx<Response<Resp>>> {
        // SAFETY: contract of this function; any bytes are a valid `Response`, by `Plain`.
        Some(unsafe { LaneRx::new(self.lane(client)?, self.layout.resp_depth as u64, 0) })
    }

    /// Server: makes the slots of a client that is gone fit for the next. The seat's release publishes it.
    ///
    /// # Safety
    /// Nobody uses them: the client is gone, and so is the server's end of its lane.
    pub(crate) unsafe fn reset(&self, client: usize) {
        if let Some(lane) = self.lane(client) {
            // SAFETY: contract of this function; zeroed bytes are empty slots.
            unsafe { lane.write_bytes(0, self.layout.resp_depth) };
        }
    }
}

/// # Safety
/// The bytes are initialised, and a valid `T` whatever they are.
#[inline(always)]
unsafe fn read_plain<T: Plain>(p: *const MaybeUninit<T>) -> T {
    // SAFETY: contract of this function.
    unsafe { (*p).assume_init_read() }
}
