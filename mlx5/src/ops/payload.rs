//! The content of a message: nothing, bytes inside the WQE, memory that the device gathers, or
//! both.

use super::{Payload, sealed};

/// A buffer in registered local memory. A length of 0 is legal and emits no data segment (on the
/// wire 0 means 2^31 bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sge {
    /// Virtual address inside the region of `lkey`.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// Local key of the region.
    pub lkey: u32,
}

/// Bytes that travel inside the WQE. The post copies them, so the source may be reused at once.
#[derive(Clone, Copy, Debug)]
pub struct Inline<'a>(pub &'a [u8]);

impl Sge {
    pub(crate) const NONE: Self = Self {
        addr: 0,
        len: 0,
        lkey: 0,
    };
}

impl sealed::Sealed for () {}
impl sealed::Sealed for Sge {}
impl sealed::Sealed for Inline<'_> {}
impl sealed::Sealed for (Inline<'_>, Inline<'_>) {}
impl sealed::Sealed for (Inline<'_>, Sge) {}

impl Payload for () {}

impl Payload for Sge {
    #[inline(always)]
    fn gathered(&self) -> Sge {
        *self
    }
}

impl Payload for Inline<'_> {
    #[inline(always)]
    fn inline(&self) -> [&[u8]; 2] {
        [self.0, &[]]
    }
}

/// Both parts are copied into the WQE, one after the other.
impl Payload for (Inline<'_>, Inline<'_>) {
    #[inline(always)]
    fn inline(&self) -> [&[u8]; 2] {
        [self.0.0, self.1.0]
    }
}

/// The first bytes are copied into the WQE, and the device gathers the rest.
impl Payload for (Inline<'_>, Sge) {
    #[inline(always)]
    fn inline(&self) -> [&[u8]; 2] {
        self.0.inline()
    }

    #[inline(always)]
    fn gathered(&self) -> Sge {
        self.1
    }
}
