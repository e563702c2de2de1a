//! The memory of a program: bytes of its allocator, which counts them, and pages of memfds, as the
//! kernel counts them, which hold the queues and registered memory of software devices.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

/// The system's allocator with a count of the bytes in use. A program that uses [`Held`] makes it
/// its `#[global_allocator]`.
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

/// The memfds that this process has descriptors of, by device and inode: each once, with any number
/// of descriptors. Values are bytes of pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memfds(BTreeMap<(u64, u64), u64>);

impl Memfds {
    /// Lists the memfds there are now.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn now() -> io::Result<Self> {
        let mut memfds = BTreeMap::new();
        for entry in fs::read_dir("/proc/self/fd")? {
            let path = entry?.path();
            // The descriptor of this listing is closed by now, and has no target.
            let is_memfd = fs::read_link(&path)
                .is_ok_and(|target| target.to_string_lossy().starts_with("/memfd:"));
            if is_memfd {
                let metadata = fs::metadata(&path)?;
                // Blocks have 512 bytes on every file system.
                memfds.insert((metadata.dev(), metadata.ino()), metadata.blocks() * 512);
            }
        }
        Ok(Self(memfds))
    }

    /// Returns the bytes of all memfds.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.values().sum()
    }

    /// Returns the memfds that were not in `earlier`.
    #[must_use]
    pub fn since(mut self, earlier: &Self) -> Self {
        self.0.retain(|memfd, _| !earlier.0.contains_key(memfd));
        self
    }

    /// Returns the bytes of the memfds that are in `others` too.
    #[must_use]
    pub fn bytes_of(&self, others: &Self) -> u64 {
        self.0
            .iter()
            .filter(|(memfd, _)| others.0.contains_key(memfd))
            .map(|(_, bytes)| bytes)
            .sum()
    }
}

/// Bytes in use, in all or of one of several things.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Held {
    /// Bytes of the allocator.
    pub heap: f64,
    /// Pages of memfds: queues and registered memory of software devices.
    pub device: f64,
}

impl Held {
    /// Returns the bytes that the program uses now.
    ///
    /// # Errors
    /// Like [`Memfds::now`].
    pub fn now() -> io::Result<Self> {
        // The listing itself is freed before the heap is measured.
        let device = Memfds::now()?.bytes() as f64;
        Ok(Self {
            heap: heap_bytes() as f64,
            device,
        })
    }

    /// Returns the increase since `before`, for each of `count`.
    #[must_use]
    pub fn each_since(self, before: Self, count: usize) -> Self {
        Self {
            heap: (self.heap - before.heap) / count as f64,
            device: (self.device - before.device) / count as f64,
        }
    }

    /// Returns the difference from `other`.
    #[must_use]
    pub const fn less(self, other: Self) -> Self {
        Self {
            heap: self.heap - other.heap,
            device: self.device - other.device,
        }
    }

    /// Returns the sum of both kinds.
    #[must_use]
    pub const fn sum(self) -> f64 {
        self.heap + self.device
    }
}

#[cfg(test)]
mod tests {
    use mlx5::{Device, DeviceSpec, FabricSpec, LocalFabric, SoftOptions};

    use super::*;

    #[test]
    fn the_memfds_of_a_device_are_told_from_those_that_come_later() {
        let open = || {
            let fabric = FabricSpec::Local(LocalFabric::new());
            Device::open(DeviceSpec::Soft(SoftOptions {
                fabric,
                arena_bytes: 1 << 20,
                ..SoftOptions::default()
            }))
            .unwrap()
        };
        let before = Memfds::now().unwrap();
        let first = open();
        let of_first = Memfds::now().unwrap().since(&before);
        let region = first
            .alloc_pd()
            .unwrap()
            .alloc(1 << 16, mlx5::Access::LOCAL_WRITE)
            .unwrap();
        let _second = open();
        let now = Memfds::now().unwrap();
        assert!(
            now.bytes_of(&of_first) >= of_first.bytes() + region.len() as u64,
            "pages that came later count"
        );
        assert!(now.bytes_of(&of_first) < now.bytes());
    }
}
