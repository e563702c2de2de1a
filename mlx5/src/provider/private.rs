//! Memory of queues that only their own process accesses: send queues, completion queues, BlueFlame
//! registers.

use core::cell::Cell;
use core::ptr::NonNull;
use core::sync::atomic::AtomicU32;
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::rc::Rc;

use mlx5_hca::{COMP_VECTORS, CqMemory, CreateError as Refused, RqMemory, SqMemory};

use crate::config::{CqConfig, QpConfig};
use crate::error::CreateError;
use crate::mmio::RegisterKind;
use crate::provider::parts::{QpParts, UarParts};
use crate::wire::{
    BLUEFLAME_BYTES, CQE_BYTES, MAX_CQE, MAX_SEND_WR, OP_OWN_OFFSET, OP_OWN_UNTOUCHED, WQEBB,
};

const PAGE: usize = 4096;

/// Alignment that every block of the system's allocator has, at least.
const BASE_ALIGN: usize = 8;

/// Zeroed memory, as a driver would map it for a queue.
///
/// This type itself aligns the memory, instead of the allocator. For an aligned block glibc
/// searches for a free block that is larger than necessary, so it does not reuse the memory of a
/// destroyed queue. A process whose peers connect and disconnect repeatedly would hold twice the
/// memory that is in use.
pub(crate) struct PrivateMemory {
    /// The block of the allocator.
    whole: NonNull<u8>,
    layout: Layout,
}

impl PrivateMemory {
    /// Allocates `bytes` at a multiple of `align`, a power of two, for `what`. Returns the memory
    /// and the address of the first byte.
    pub(crate) fn new(
        what: &'static str,
        bytes: usize,
        align: usize,
    ) -> Result<(Self, NonNull<u8>), CreateError> {
        let no_memory = |source| Refused::Memory { what, source };
        let bytes = bytes.saturating_add(align).max(1);
        let layout = Layout::from_size_align(bytes, BASE_ALIGN)
            .map_err(|error| no_memory(std::io::Error::other(error)))?;
        // SAFETY: the layout's size is not 0.
        let whole = unsafe { alloc_zeroed(layout) };
        let whole =
            NonNull::new(whole).ok_or_else(|| no_memory(std::io::ErrorKind::OutOfMemory.into()))?;
        // SAFETY: the offset is less than `align` bytes, and `align` bytes were allocated in
        // addition.
        let base = unsafe { whole.add(whole.align_offset(align)) };
        Ok((Self { whole, layout }, base))
    }
}

impl Drop for PrivateMemory {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the block with this layout, and it is freed only here.
        unsafe { dealloc(self.whole.as_ptr(), self.layout) };
    }
}

/// A completion queue's memory: the doorbell record and, on the next page, untouched entries.
pub(crate) struct CqPlace {
    _memory: PrivateMemory,
    pub(crate) cq: CqMemory,
}

impl CqPlace {
    pub(crate) fn new(config: &CqConfig) -> Result<Self, CreateError> {
        config.check(MAX_CQE, COMP_VECTORS)?;
        let (stride, entries) = (config.stride()?, config.entries.next_power_of_two());
        let (memory, record) =
            PrivateMemory::new("a completion queue", PAGE + entries as usize * stride, PAGE)?;
        // SAFETY: the offsets are inside the new memory, whose size includes them.
        let buffer = unsafe { record.add(PAGE) };
        for entry in 1..=entries as usize {
            // SAFETY: the byte is inside the new memory, which no other code accesses yet. The CQE
            // is the last 64 bytes of its entry.
            unsafe {
                buffer
                    .add(entry * stride - CQE_BYTES + OP_OWN_OFFSET)
                    .write(OP_OWN_UNTOUCHED)
            };
        }
        let (cqe_bytes, compression) = (config.cqe_bytes, config.compression);
        Ok(Self {
            _memory: memory,
            cq: CqMemory {
                buffer,
                entries,
                cqe_bytes,
                compression,
                record: record.cast(),
            },
        })
    }
}

/// A send queue's memory: the BlueFlame register, aligned to its size, the WQEBBs and the doorbell
/// record.
pub(crate) struct SqPlace {
    _memory: PrivateMemory,
    /// The queue. Its `register` is `None` if the device does not read a register.
    pub(crate) sq: SqMemory,
}

impl SqPlace {
    pub(crate) fn new(config: &QpConfig, kind: RegisterKind) -> Result<Self, CreateError> {
        config.check(MAX_SEND_WR)?;
        // The longest WQE, with 220 inline bytes and an SGE, takes 5 WQEBBs. With the NOPs before
        // the ring's end it may need 9, so the smallest queue has 16.
        let wqe_cnt = config.max_send_wr.next_power_of_two().max(16);
        let register_bytes = if kind == RegisterKind::Unread {
            0
        } else {
            2 * BLUEFLAME_BYTES
        };
        let buffer_bytes = wqe_cnt as usize * WQEBB;
        let bytes = register_bytes + buffer_bytes + size_of::<AtomicU32>();
        let (memory, first) = PrivateMemory::new("a send queue", bytes, register_bytes.max(WQEBB))?;
        let register = (register_bytes > 0).then_some(first);
        // SAFETY: the offsets are inside the new memory, whose size includes them.
        let (buffer, record) = unsafe {
            (
                first.add(register_bytes),
                first.add(register_bytes + buffer_bytes).cast(),
            )
        };
        Ok(Self {
            _memory: memory,
            sq: SqMemory {
                buffer,
                wqe_cnt,
                record,
                register,
            },
        })
    }

    /// Describes the queue pair. `register_index` is an index among the registers of the device.
    pub(crate) fn parts(
        &self,
        qpn: u32,
        rq: Option<RqMemory>,
        config: &QpConfig,
        kind: RegisterKind,
        register_index: usize,
    ) -> QpParts {
        let half = Rc::new(Cell::new(
            self.sq
                .register
                .map_or(core::ptr::null_mut(), NonNull::as_ptr),
        ));
        let uar = UarParts {
            half,
            kind,
            register_index,
        };
        QpParts {
            qpn,
            sq: self.sq,
            rq,
            max_inline: config.max_inline_data,
            has_atomics: true,
            uar,
        }
    }
}
