//! Memory of one device object that only its own process touches: send queues, completion queues, BlueFlame registers.

use core::ptr::NonNull;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;

/// Zeroed memory, as a driver would map it for a queue.
pub(crate) struct PrivateMemory {
    base: NonNull<u8>,
    layout: Layout,
}

impl PrivateMemory {
    /// `bytes` at a multiple of `align`, a power of two.
    pub(crate) fn new(bytes: usize, align: usize) -> io::Result<Self> {
        let layout = Layout::from_size_align(bytes.max(1), align).map_err(io::Error::other)?;
        // SAFETY: the layout's size is not 0.
        let base = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, layout })
    }

    /// The address of byte `offset`, which must be inside.
    pub(crate) fn at<T>(&self, offset: usize) -> NonNull<T> {
        debug_assert!(offset + size_of::<T>() <= self.layout.size());
        // SAFETY: inside the allocation.
        unsafe { self.base.add(offset).cast() }
    }
}

impl Drop for PrivateMemory {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}
