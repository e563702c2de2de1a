//! Memory regions: memory that the device may access.

use core::ptr::NonNull;
use std::fmt;
use std::rc::Rc;

use mlx5_hca::{Pages, Region};

use crate::ops::Sge;
use crate::pd::PdObject;

/// A registered memory region.
///
/// The device, and peers through it, may write this memory at any time, so no `&[u8]` of it exists.
/// Bytes are copied in and out, or accessed through [`as_ptr`](Self::as_ptr) under the caller's own
/// ordering contract. A CQE proves that a peer's bytes are visible; reading the bytes does not.
///
/// Dropping the region deregisters it. The drop waits up to 50 ms for a peer in the middle of a
/// copy. After that the memory is quarantined: it is never reused, and is counted in
/// [`DeviceInfo::quarantined`](crate::DeviceInfo::quarantined). An operation on the region that has
/// not yet run fails.
///
/// It is not `Send`:
/// ```compile_fail,E0277
/// fn send<T: Send>() {}
/// send::<mlx5::Mr>();
/// ```
pub struct Mr {
    region: Region,
    pd: Rc<PdObject>,
}

impl Drop for Mr {
    fn drop(&mut self) {
        self.pd.control.deregister(self.region.key);
    }
}

/// A region that a peer may still be copying to or from. Either the peer has not finished a
/// doorbell within 50 ms (it may be stopped), or membarrier(2) works in the peer's process but not
/// in this process, which then cannot detect the end of the copy. The key is invalid already; try
/// again later.
#[derive(Debug, thiserror::Error)]
#[error(
    "a peer may still be copying to or from this region: it does not finish a doorbell (is it stopped?), or membarrier(2) works in its process but \
     not in this one; the region must stay allocated until `deregister` succeeds"
)]
pub struct Busy(
    /// The region that is still registered.
    pub Mr,
);

impl fmt::Debug for Mr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mr")
            .field("addr", &self.addr())
            .field("len", &self.len())
            .field("key", &self.lkey())
            .finish()
    }
}

/// A range that is not inside a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bytes {offset}..{offset}+{len} are outside the memory region of {region} bytes")]
pub struct OutOfBounds {
    /// First byte.
    pub offset: usize,
    /// Length in bytes.
    pub len: usize,
    /// Length of the region in bytes.
    pub region: usize,
}

impl Mr {
    pub(crate) fn new(region: Region, pd: Rc<PdObject>) -> Self {
        Self { region, pd }
    }

    pub(crate) fn pd(&self) -> &Rc<PdObject> {
        &self.pd
    }

    /// Deregisters the region. After `Ok` its memory can be freed or put to other use.
    ///
    /// # Errors
    /// [`Busy`], with the region, if a peer does not finish a copy within 50 ms.
    pub fn deregister(self) -> Result<(), Busy> {
        if !self.pd.control.try_deregister(self.region.key) {
            return Err(Busy(self));
        }
        let this = core::mem::ManuallyDrop::new(self);
        // SAFETY: the field is taken once, from a value whose `drop` will not run; the rest is plain
        // data.
        drop(unsafe { core::ptr::read(&this.pd) });
        Ok(())
    }

    /// Returns the kind of pages under the region. Only [`Pd::alloc_huge`](crate::Pd::alloc_huge)
    /// requests huge pages.
    #[must_use]
    pub fn pages(&self) -> Pages {
        self.region.pages
    }

    /// Returns the virtual address of the first byte, to which peers refer in their operations.
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.region.addr.as_ptr() as u64
    }

    /// Returns the length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.region.len
    }

    /// Returns the local key.
    #[must_use]
    pub fn lkey(&self) -> u32 {
        self.region.key
    }

    /// Returns the remote key, which peers need together with the address.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        self.region.key
    }

    /// Returns a pointer to the first byte. The pointer is valid for [`len`](Self::len) bytes as
    /// long as this region lives; the device may write these bytes meanwhile.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.region.addr
    }

    fn range(&self, offset: usize, len: usize) -> Result<*mut u8, OutOfBounds> {
        match offset.checked_add(len) {
            // SAFETY: the range is inside the region.
            Some(end) if end <= self.len() => Ok(unsafe { self.as_ptr().as_ptr().add(offset) }),
            _ => Err(OutOfBounds {
                offset,
                len,
                region: self.len(),
            }),
        }
    }

    /// Returns `len` bytes from `offset` as a gather or scatter element.
    ///
    /// # Errors
    /// The range is not inside the region.
    pub fn sge(&self, offset: usize, len: u32) -> Result<Sge, OutOfBounds> {
        self.range(offset, len as usize)?;
        Ok(Sge {
            addr: self.addr() + offset as u64,
            len,
            lkey: self.lkey(),
        })
    }

    /// Copies `bytes` into the region. Bytes that an operation gathers must not change from its
    /// doorbell to its completion.
    ///
    /// # Errors
    /// The range is not inside the region.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfBounds> {
        let to = self.range(offset, bytes.len())?;
        // SAFETY: `to` is valid for `bytes.len()` bytes. No Rust reference to the region's memory
        // exists, so `bytes` does not overlap it.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes out of the region. Bytes that a READ, an atomic or a peer writes there are
    /// complete only after the completion of the operation.
    ///
    /// # Errors
    /// The range is not inside the region.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), OutOfBounds> {
        let from = self.range(offset, bytes.len())?;
        // SAFETY: `from` is valid for `bytes.len()` bytes. No Rust reference to the region's memory
        // exists, so `bytes` does not overlap it.
        unsafe { from.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}
