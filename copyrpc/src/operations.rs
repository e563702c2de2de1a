//! One-sided operations of the public types: the memory of a context, and the READs and WRITEs of
//! an endpoint.

use std::rc::Rc;

use mlx5::{Access, MAX_MESSAGE_BYTES, RcOperation, Read, RegisterError, Sge, Signal, Write};

use crate::context::Context;
use crate::endpoint::Endpoint;
use crate::raw::{Memory, RdmaError, RemoteMemory};

impl<U> Context<U> {
    /// Allocates `bytes` of zeroed, page-aligned memory for one-sided operations: the local end of
    /// this context's operations, and the remote end of the peers' operations.
    ///
    /// # Errors
    /// [`RegisterError`]: `bytes` is 0, or no memory is left.
    pub fn alloc(&self, bytes: usize) -> Result<Memory, RegisterError> {
        let mr = self.inner.pd.alloc(
            bytes,
            Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE,
        )?;
        Ok(Memory { mr: Rc::new(mr) })
    }
}

/// One-sided operations end through the callback of a poll, exactly once, as calls do: with no
/// bytes, or with the reason of their failure. After a failure it is not known whether the peer's
/// memory was written. An operation is posted at once and sent with the next flush. A WRITE that is
/// posted before a call or a reply of the same endpoint is done when that message arrives, so the
/// message may refer to the WRITE without waiting for its end. The bytes of a READ are valid only
/// after its end.
///
/// READs of the peer's published record, which the protocol does when it lacks room or credit,
/// share the connection's `max_rd_atomic` with the one-sided operations: a READ above that number
/// waits in the send queue, and delays the operations after it.
impl<U> Endpoint<U> {
    /// Copies `len` bytes, 0 to 2^30, at `remote_offset` of the peer's memory to `local_offset` of
    /// `local`.
    ///
    /// # Errors
    /// [`RdmaError`], which returns `user_data`; nothing was posted. After `QueueFull`, poll and
    /// retry.
    #[doc(alias = "post_rdma_read")]
    pub fn rdma_read(
        &self,
        local: &Memory,
        local_offset: usize,
        remote: &RemoteMemory,
        remote_offset: u64,
        len: usize,
        user_data: U,
    ) -> Result<(), RdmaError<U>> {
        let (local, remote) = ((local, local_offset), (remote, remote_offset));
        self.one_sided(local, remote, len, user_data, |addr, rkey, into| Read {
            addr,
            rkey,
            into,
        })
    }

    /// Copies `len` bytes, 0 to 2^30, at `local_offset` of `local` to `remote_offset` of the peer's
    /// memory.
    ///
    /// # Errors
    /// [`RdmaError`], which returns `user_data`; nothing was posted. After `QueueFull`, poll and
    /// retry.
    #[doc(alias = "post_rdma_write")]
    pub fn rdma_write(
        &self,
        local: &Memory,
        local_offset: usize,
        remote: &RemoteMemory,
        remote_offset: u64,
        len: usize,
        user_data: U,
    ) -> Result<(), RdmaError<U>> {
        let (local, remote) = ((local, local_offset), (remote, remote_offset));
        self.one_sided(local, remote, len, user_data, |addr, rkey, payload| Write {
            addr,
            rkey,
            payload,
        })
    }

    /// Checks both ranges, each given as a memory and an offset. Then posts the operation that
    /// `operation` makes of the remote address, the remote key and the local range.
    fn one_sided<O: RcOperation>(
        &self,
        (local, local_offset): (&Memory, usize),
        (remote, remote_offset): (&RemoteMemory, u64),
        len: usize,
        user_data: U,
        operation: impl FnOnce(u64, u32, Sge) -> O,
    ) -> Result<(), RdmaError<U>> {
        let Some(bytes) = u32::try_from(len)
            .ok()
            .filter(|bytes| u64::from(*bytes) <= MAX_MESSAGE_BYTES)
        else {
            return Err(RdmaError::TooLong { user_data, len });
        };
        let range = match local.mr.sge(local_offset, bytes) {
            Ok(range) => range,
            Err(range) => return Err(RdmaError::LocalRange { user_data, range }),
        };
        let addr = match remote.at(remote_offset, len) {
            Ok(addr) => addr,
            Err(range) => return Err(RdmaError::RemoteRange { user_data, range }),
        };
        let operation = operation(addr, remote.rkey, range);
        self.connection.post_raw(&local.mr, user_data, |qp, user| {
            qp.post(&operation, Signal::Always, user)
        })
    }

    /// Returns the number of one-sided operations that have not ended.
    #[must_use]
    #[doc(alias = "raw_rdma_done")]
    pub fn raw_rdma_pending(&self) -> usize {
        self.connection.raw.len()
    }
}
