//! Layout of a message of bytes in shared memory.

use std::ptr::{self, NonNull};

use copyrpc_shm::plain::TypeShape;
use copyrpc_shm::ready::ReadyWords;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::layout::{AreaBytes, Layout};
pub use crate::limits::MESSAGE_MAX;
use copyrpc_calls::OptionError;

/// Maximum length of a message that lies in its lane, where it shares a cache line with the words
/// of its slot.
pub const INLINE_MAX: usize = 44;
/// Maximum lengths of a server's messages, in bytes. If a length is above [`INLINE_MAX`], each of
/// the `max_clients x depth` calls has an area of this length, rounded up to 64, for its request or
/// for its response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageBytes {
    /// Longest request, 0 to [`MESSAGE_MAX`].
    pub request: usize,
    /// Longest response, 0 to [`MESSAGE_MAX`].
    pub response: usize,
}

impl MessageBytes {
    /// Default lengths: 4,096 bytes for a request, and for a response.
    pub const DEFAULT: Self = Self {
        request: 4096,
        response: 4096,
    };

    pub(super) fn layout(
        self,
        max_clients: usize,
        words: usize,
        depth: usize,
    ) -> Result<Layout, OptionError> {
        Layout::new::<Message, Message, ReadyWords>(max_clients, words, depth, self.areas()?)
    }

    pub(super) fn areas(self) -> Result<AreaBytes, OptionError> {
        let area = |bytes| match bytes {
            0..=INLINE_MAX => Ok(0),
            _ if bytes <= MESSAGE_MAX => Ok(bytes),
            _ => {
                let legal = format!("at most {MESSAGE_MAX}");
                Err(OptionError::new("message_bytes", bytes as u64, legal))
            }
        };
        Ok(AreaBytes {
            request: area(self.request)?,
            response: area(self.response)?,
        })
    }

    /// Returns the shape for the region's header: messages are bytes, with alignment 1.
    pub(super) fn shape(self, tag: u64) -> TypeShape {
        // The layout has checked that no length exceeds `MESSAGE_MAX`.
        TypeShape {
            request_bytes: self.request as u32,
            request_align: 1,
            response_bytes: self.response as u32,
            response_align: 1,
            tag,
        }
    }

    pub(super) fn of_shape(shape: &TypeShape) -> Self {
        Self {
            request: shape.request_bytes as usize,
            response: shape.response_bytes as usize,
        }
    }
}

/// A message as it lies in a lane.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable)]
#[repr(C)]
pub(crate) struct Message {
    len: u32,
    /// The message and zeros, if the message is not longer than [`INLINE_MAX`].
    inline: [u8; INLINE_MAX],
}

const _: () = assert!(size_of::<Message>() == 48);

impl Message {
    pub(super) const EMPTY: Self = Self {
        len: 0,
        inline: [0; INLINE_MAX],
    };

    /// Writes `bytes` into the message, or into `area` if they are longer than [`INLINE_MAX`].
    ///
    /// # Safety
    /// If `bytes` are longer than [`INLINE_MAX`], `area` is as long as `bytes`, and no other thread
    /// uses the area until the message is published.
    #[inline]
    pub(super) unsafe fn write(bytes: &[u8], area: NonNull<u8>) -> Self {
        let mut inline = [0; INLINE_MAX];
        match inline.get_mut(..bytes.len()) {
            Some(front) => front.copy_from_slice(bytes),
            // SAFETY: `area` is as long as `bytes`, and no other thread uses it (contract of this
            // function). It is shared memory, so it does not overlap a slice of this process's own.
            None => unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), area.as_ptr(), bytes.len()) },
        }
        Self {
            len: bytes.len() as u32,
            inline,
        }
    }

    /// Returns the message, if it lies in its lane.
    #[inline]
    pub(super) fn inline(&self) -> Option<&[u8]> {
        self.inline.get(..self.len as usize)
    }

    /// Returns the message, copied to `buffer` unless it is inline; `None` if it exceeds `max`.
    ///
    /// # Safety
    /// `area` is at least `max` bytes of shared memory, if `max` is more than [`INLINE_MAX`].
    #[inline]
    pub(super) unsafe fn read<'a>(
        &'a self,
        area: NonNull<u8>,
        max: usize,
        buffer: &'a mut Vec<u8>,
    ) -> Option<&'a [u8]> {
        let len = self.len as usize;
        if len > max {
            return None;
        }
        if let Some(bytes) = self.inline() {
            return Some(bytes);
        }
        buffer.clear();
        buffer.reserve(len);
        // SAFETY: `area` has at least `max` bytes (contract of this function), `len` is at most
        // `max`, and the buffer has room for `len`. The peer that wrote the message does not write
        // there now; a broken peer garbles its own message, of which any bytes are valid.
        unsafe {
            ptr::copy_nonoverlapping(area.as_ptr(), buffer.as_mut_ptr(), len);
            buffer.set_len(len);
        }
        Some(buffer)
    }
}

/// The areas of long messages in a region.
#[derive(Debug, Clone, Copy)]
pub(super) struct Areas {
    base: NonNull<u8>,
    layout: Layout,
    pub(super) max: MessageBytes,
}

// SAFETY: an `Areas` holds an address in shared memory, which any thread may use under the rules of
// `Message`.
unsafe impl Send for Areas {}

impl Areas {
    /// # Safety
    /// The region at `base` has the layout `layout`, which was made for `max`, and is large enough
    /// for it. The region outlives everything that is made from this value.
    pub(super) unsafe fn new(base: NonNull<u8>, layout: Layout, max: MessageBytes) -> Self {
        Self { base, layout, max }
    }

    #[inline]
    fn at(&self, offset: usize) -> NonNull<u8> {
        // SAFETY: an offset of the layout lies inside the region, or at its end if the area has no
        // bytes (contract of `new`).
        unsafe { self.base.add(offset) }
    }

    /// Writes a client's request. Returns an empty message if the client does not have the slot.
    ///
    /// # Safety
    /// `bytes` are at most `max.request` long, and only the caller uses the slot's request area.
    #[inline]
    pub(super) unsafe fn write_request(&self, client: usize, slot: usize, bytes: &[u8]) -> Message {
        let offset = self.layout.request_area(client, slot);
        // SAFETY: the layout was made for `max`, so the area has room for `bytes`, and only the
        // caller uses it (contract of this function).
        offset.map_or(Message::EMPTY, |offset| unsafe {
            Message::write(bytes, self.at(offset))
        })
    }

    /// Writes the response to a client's call, as [`write_request`](Self::write_request).
    ///
    /// # Safety
    /// `bytes` are at most `max.response` long, and only the caller uses the slot's response area.
    #[inline]
    pub(super) unsafe fn write_response(
        &self,
        client: usize,
        slot: usize,
        bytes: &[u8],
    ) -> Message {
        let offset = self.layout.response_area(client, slot);
        // SAFETY: the layout was made for `max`, so the area has room for `bytes`, and only the
        // caller uses it (contract of this function).
        offset.map_or(Message::EMPTY, |offset| unsafe {
            Message::write(bytes, self.at(offset))
        })
    }

    /// Returns a client's request, copied to `buffer` if it is long; `None` if the client does not
    /// have that slot, or the length is wrong.
    #[inline]
    pub(super) fn read_request<'a>(
        &self,
        client: usize,
        slot: usize,
        message: &'a Message,
        buffer: &'a mut Vec<u8>,
    ) -> Option<&'a [u8]> {
        let area = self.at(self.layout.request_area(client, slot)?);
        // SAFETY: the layout was made for `max`, so an area for long requests has `max.request`
        // bytes.
        unsafe { message.read(area, self.max.request, buffer) }
    }

    /// Returns the response to a client's call, like [`read_request`](Self::read_request).
    #[inline]
    pub(super) fn read_response<'a>(
        &self,
        client: usize,
        slot: usize,
        message: &'a Message,
        buffer: &'a mut Vec<u8>,
    ) -> Option<&'a [u8]> {
        let area = self.at(self.layout.response_area(client, slot)?);
        // SAFETY: the layout was made for `max`, so an area for long responses has `max.response`
        // bytes.
        unsafe { message.read(area, self.max.response, buffer) }
    }
}
