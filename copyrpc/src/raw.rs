//! One-sided operations of the application: memory that peers may access, and READs and WRITEs of
//! peers' memory.
//!
//! For data above the message limit: one side puts a [`RemoteMemory`] into a small request, the
//! other side READs or WRITEs that memory and then answers. `examples/bulk.rs` READs and WRITEs.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use mlx5::{MAX_MESSAGE_BYTES, Mr, OutOfBounds, PostError, RcQp};
use thiserror::Error;

use crate::error::CloseReason;

/// Registered memory of this process. Clones share the memory. The memory is deregistered when the
/// last clone is dropped and the operations that use it have ended.
///
/// Every peer of the context that has the [`RemoteMemory`] of this memory may read and write the
/// memory at any time, so there is no `&[u8]` of it: bytes are copied in and out.
#[derive(Clone, Debug)]
pub struct Memory {
    pub(crate) mr: Rc<Mr>,
}

impl Memory {
    /// Returns the length in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "memory is never empty")]
    pub fn len(&self) -> usize {
        self.mr.len()
    }

    /// Copies `bytes` to `offset`. The bytes that a WRITE sends must stay unchanged until the WRITE
    /// has ended.
    ///
    /// # Errors
    /// The range is not inside the memory.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfBounds> {
        self.mr.write(offset, bytes)
    }

    /// Copies the bytes at `offset` out. The bytes that a READ fetches are complete once the READ
    /// has ended. The bytes that a peer WRITEs are complete once a message that the peer sent
    /// afterwards has arrived.
    ///
    /// # Errors
    /// The range is not inside the memory.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), OutOfBounds> {
        self.mr.read(offset, bytes)
    }

    /// Returns the record with which a peer accesses all of this memory.
    #[must_use]
    pub fn remote(&self) -> RemoteMemory {
        RemoteMemory {
            addr: self.mr.addr(),
            len: self.mr.len() as u64,
            rkey: self.mr.rkey(),
        }
    }
}

/// Memory of another process, as that process described it.
///
/// | offset | field, little-endian |
/// |---|---|
/// | 0 | address u64 |
/// | 8 | bytes u64 |
/// | 16 | rkey u32 |
/// | 20 | zero u32 |
///
/// The memory is accessed through any endpoint that is connected to the context of the memory. Only
/// the peer's device can check the description: an operation on memory that does not exist ends the
/// connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteMemory {
    addr: u64,
    len: u64,
    pub(crate) rkey: u32,
}

/// The reason why bytes are not a [`RemoteMemory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RemoteMemoryError {
    /// The last four bytes are not 0.
    #[error("bytes 20..24 of a remote memory are {0:#x}, legal is 0")]
    ReservedNotZero(u32),
    /// The memory is empty, or would end beyond the address space.
    #[error(
        "remote memory of {len} bytes at {addr:#x}: legal is at least 1 byte, and an end within 64 bits"
    )]
    Range {
        /// First address of the range.
        addr: u64,
        /// Length of the range in bytes.
        len: u64,
    },
}

impl RemoteMemory {
    /// Length of the encoded record in bytes.
    pub const SIZE: usize = 24;

    /// Returns the length of the memory in bytes.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "memory is never empty")]
    pub const fn len(&self) -> u64 {
        self.len
    }

    /// Encodes the record for the peer, usually in a request.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[..8].copy_from_slice(&self.addr.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.len.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.rkey.to_le_bytes());
        bytes
    }

    /// Decodes and checks a peer's record.
    ///
    /// # Errors
    /// [`RemoteMemoryError`].
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<Self, RemoteMemoryError> {
        let [addr, len, rest] =
            [0, 8, 16].map(|at| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i])));
        if rest >> 32 != 0 {
            return Err(RemoteMemoryError::ReservedNotZero((rest >> 32) as u32));
        }
        if len == 0 || addr.checked_add(len).is_none() {
            return Err(RemoteMemoryError::Range { addr, len });
        }
        Ok(Self {
            addr,
            len,
            rkey: rest as u32,
        })
    }

    /// Returns the address of the byte at `offset`, if the `len` bytes from there are inside the
    /// memory.
    pub(crate) fn at(&self, offset: u64, len: usize) -> Result<u64, OutOfBounds> {
        match offset.checked_add(len as u64) {
            Some(end) if end <= self.len => Ok(self.addr + offset),
            _ => Err(OutOfBounds {
                offset: offset as usize,
                len,
                region: self.len as usize,
            }),
        }
    }
}

/// The reason why a one-sided operation was not taken, with the caller's data.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RdmaError<U> {
    /// The number of outstanding operations has reached
    /// [`EndpointConfig::raw_operations`](crate::EndpointConfig::raw_operations), or the send queue
    /// is full. Poll and retry.
    #[error("too many operations outstanding; poll and retry")]
    QueueFull(U),
    /// The endpoint was made without room for one-sided operations.
    #[error("the endpoint was made with raw_operations 0")]
    Disabled(U),
    /// The operation exceeds the maximum length of a message.
    #[error("{len} bytes in one operation; the most is {MAX_MESSAGE_BYTES}")]
    TooLong {
        /// Data of the caller.
        user_data: U,
        /// Bytes of the operation.
        len: usize,
    },
    /// The range is outside the memory of this end.
    #[error("local memory: {range}")]
    LocalRange {
        /// Data of the caller.
        user_data: U,
        /// The range that is out of bounds.
        range: OutOfBounds,
    },
    /// The range is outside the memory of the peer.
    #[error("remote memory: {range}")]
    RemoteRange {
        /// Data of the caller.
        user_data: U,
        /// The range that is out of bounds.
        range: OutOfBounds,
    },
    /// The local memory belongs to a context other than the endpoint's.
    #[error("the local memory is of another context")]
    ForeignMemory(U),
    /// The connection has ended.
    #[error("connection closed: {reason}")]
    Closed {
        /// Data of the caller.
        user_data: U,
        /// The reason of the end.
        reason: CloseReason,
    },
}

impl<U> RdmaError<U> {
    /// Returns whether the same operation can succeed after more polls.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::QueueFull(_))
    }

    /// Returns the caller's data.
    #[must_use]
    pub fn into_user_data(self) -> U {
        match self {
            Self::QueueFull(user_data)
            | Self::Disabled(user_data)
            | Self::ForeignMemory(user_data)
            | Self::TooLong { user_data, .. }
            | Self::LocalRange { user_data, .. }
            | Self::RemoteRange { user_data, .. }
            | Self::Closed { user_data, .. } => user_data,
        }
    }
}

/// The operations of one connection that have not ended, in posting order. Each is signaled, and a
/// queue pair completes in posting order, so the oldest operation ends first.
pub(crate) struct RawOperations<U> {
    /// User data and memory of each operation. The memory lives as long as the device may use it.
    posted: RefCell<VecDeque<(U, Rc<Mr>)>>,
    limit: usize,
}

impl<U> RawOperations<U> {
    pub(crate) const fn new(limit: u32) -> Self {
        Self {
            posted: RefCell::new(VecDeque::new()),
            limit: limit as usize,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.posted.borrow().len()
    }

    /// Adds an operation, if there is room and `post` succeeds.
    pub(crate) fn post(
        &self,
        qp: &mut RcQp,
        memory: &Rc<Mr>,
        user_data: U,
        post: impl FnOnce(&mut RcQp) -> Result<(), PostError>,
    ) -> Result<(), RdmaError<U>> {
        if self.limit == 0 {
            return Err(RdmaError::Disabled(user_data));
        }
        if !qp.may_use(memory) {
            return Err(RdmaError::ForeignMemory(user_data));
        }
        let mut posted = self.posted.borrow_mut();
        if posted.len() == self.limit {
            return Err(RdmaError::QueueFull(user_data));
        }
        match post(qp) {
            Ok(()) => {
                posted.push_back((user_data, Rc::clone(memory)));
                Ok(())
            }
            Err(PostError::QueueFull { .. }) => Err(RdmaError::QueueFull(user_data)),
            // The lengths were checked, so any other error means that the queue pair has failed.
            Err(_) => Err(RdmaError::Closed {
                user_data,
                reason: CloseReason::Disconnected,
            }),
        }
    }

    pub(crate) fn end(&self) -> Option<U> {
        self.posted
            .borrow_mut()
            .pop_front()
            .map(|(user_data, _)| user_data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remote_memory_has_the_documented_bytes_and_others_are_none() {
        let memory = RemoteMemory {
            addr: 0x0102_0304_0506_0708,
            len: 0x1112_1314_1516_1718,
            rkey: 0x2122_2324,
        };
        #[rustfmt::skip]
        let golden = [
            8, 7, 6, 5, 4, 3, 2, 1,
            0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11,
            0x24, 0x23, 0x22, 0x21, 0, 0, 0, 0,
        ];
        assert_eq!(
            (memory.encode(), RemoteMemory::decode(&golden)),
            (golden, Ok(memory))
        );
        let mut bytes = golden;
        bytes[23] = 1;
        assert_eq!(
            RemoteMemory::decode(&bytes),
            Err(RemoteMemoryError::ReservedNotZero(1 << 24))
        );
        let mut bytes = golden;
        bytes[8..16].fill(0);
        assert!(matches!(
            RemoteMemory::decode(&bytes),
            Err(RemoteMemoryError::Range { len: 0, .. })
        ));
        bytes[8..16].fill(0xff);
        assert!(matches!(
            RemoteMemory::decode(&bytes),
            Err(RemoteMemoryError::Range { len: u64::MAX, .. })
        ));
    }
}
