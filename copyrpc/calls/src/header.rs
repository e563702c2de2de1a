//! The header of the request of a method.

use std::time::{Duration, Instant};

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The number of the method.
    pub method: u16,
    /// The time that the caller had left when it made the call, rounded up to milliseconds; `None`:
    /// the caller waits without a limit.
    pub left: Option<Duration>,
}

impl Header {
    /// Length in bytes.
    pub const BYTES: usize = 8;

    /// Reads the header of a request of a [`service!`](crate::service!). Returns the header and the
    /// arguments; `None` if the request has no such header.
    #[must_use]
    #[inline]
    pub fn read(request: &[u8]) -> Option<(Self, &[u8])> {
        let (header, arguments) = request.split_first_chunk()?;
        let header = u64::from_le_bytes(*header);
        let (method, left_ms) = (header as u16, (header >> 32) as u32);
        let left = Some(left_ms)
            .filter(|left_ms| *left_ms > 0)
            .map(|left_ms| Duration::from_millis(left_ms.into()));
        if header as u32 == u32::from(method) {
            Some((Self { method, left }, arguments))
        } else {
            None
        }
    }

    /// Returns the end of the caller's time, if `request`, which arrived at this time, has a header
    /// with a limit.
    #[must_use]
    pub fn deadline(request: &[u8], at: Instant) -> Option<Instant> {
        at.checked_add(Self::read(request)?.0.left?)
    }

    /// Writes the header into `request`, in place of the present content.
    #[inline]
    pub(crate) fn write(self, request: &mut Vec<u8>) {
        let left_ms = self.left.map_or(0, rounded_up_ms);
        request.clear();
        request.reserve(4 * Self::BYTES);
        let header = u64::from(self.method) | u64::from(left_ms) << 32;
        request.extend_from_slice(&header.to_le_bytes());
    }
}

/// Returns the time in milliseconds for the header, rounded up; at least 1, since 0 is no limit.
fn rounded_up_ms(left: Duration) -> u32 {
    u32::try_from(left.as_nanos().div_ceil(1_000_000))
        .unwrap_or(u32::MAX)
        .max(1)
}
