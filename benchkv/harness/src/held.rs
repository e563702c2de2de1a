//! The memory of a program: bytes of its allocator, which counts them, and pages of memfds, as the
//! kernel counts them, which hold the queues and registered memory of software devices.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};

/// The system's allocator with a count of the bytes in use, for a program's
/// `#[global_allocator]`.
#[derive(Debug)]
pub struct Counting;

static HELD: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on to the system's allocator unchanged; the counter is not allocated
// memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size() as u64, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Returns the bytes of the allocator in use; 0 in a program whose allocator is not [`Counting`].
#[must_use]
pub fn heap_bytes() -> u64 {
    HELD.load(Ordering::Relaxed)
}

/// A memfd, by device and inode.
pub type Memfd = (u64, u64);

/// Returns the bytes of the pages of the memfds that this process has descriptors of: each once,
/// with any number of descriptors.
///
/// # Errors
/// `/proc` cannot be read.
pub fn memfds() -> io::Result<BTreeMap<Memfd, u64>> {
    let mut memfds = BTreeMap::new();
    for entry in fs::read_dir("/proc/self/fd")? {
        let path = entry?.path();
        // The descriptor of this listing is closed by now, and has no target.
        let is_memfd = fs::read_link(&path)
            .is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:"));
        // Another thread may have closed it by now.
        if let Some(metadata) = is_memfd.then(|| fs::metadata(&path).ok()).flatten() {
            // Blocks have 512 bytes on every file system.
            memfds.insert((metadata.dev(), metadata.ino()), metadata.blocks() * 512);
        }
    }
    Ok(memfds)
}
