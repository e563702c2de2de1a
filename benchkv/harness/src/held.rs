//! The memory of a program: the bytes in use of its allocator, and the pages of its memfds, which
//! hold the queues and registered memory of software devices. The allocator counts the bytes, and
//! the kernel counts the pages.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};

/// The system's allocator with a count of the bytes in use, for a `#[global_allocator]`.
#[derive(Debug)]
pub struct Counting;

static HELD: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed unchanged to the system's allocator, which keeps the contract.
// Counting touches no allocated memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller guarantees the contract of `alloc`, which is the same for both
        // allocators.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller guarantees the contract of `dealloc`, and `memory` is from `System`.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Returns the bytes of the allocator in use; 0 in a program whose allocator is not [`Counting`].
pub fn heap_bytes() -> u64 {
    HELD.load(Ordering::Relaxed)
}

/// A memfd, by device and inode.
pub type Memfd = (u64, u64);

/// Returns the bytes in the pages of each memfd of which this process has a descriptor. A memfd
/// with several descriptors is one entry.
///
/// # Errors
/// `/proc` cannot be read.
pub fn memfds() -> io::Result<BTreeMap<Memfd, u64>> {
    let mut memfds = BTreeMap::new();
    for entry in fs::read_dir("/proc/self/fd")? {
        let path = entry?.path();
        // The listing's descriptor may be closed by now; it then has no target, and is skipped.
        let is_memfd = fs::read_link(&path)
            .is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:"));
        // Another thread may have closed the descriptor by now. Then it is skipped.
        if let Some(metadata) = is_memfd.then(|| fs::metadata(&path).ok()).flatten() {
            // Blocks have 512 bytes on every file system.
            memfds.insert((metadata.dev(), metadata.ino()), metadata.blocks() * 512);
        }
    }
    Ok(memfds)
}
