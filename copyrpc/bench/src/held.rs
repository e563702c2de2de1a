//! The memory of a server: the bytes that it has allocated, and the pages of its device.

use std::collections::BTreeMap;
use std::io;

use benchkv_harness::Failure;
use benchkv_harness::held::{Memfd, heap_bytes, memfds};

/// The memory of an object.
#[derive(Debug)]
pub(crate) struct Held {
    /// Bytes that the program had on the heap before it made the object.
    others_bytes: u64,
    /// The memfds that were new when the object was made. Memfds that the object attaches later
    /// are not in the map.
    memfds: BTreeMap<Memfd, u64>,
}

impl Held {
    /// Makes an object. Returns it, and its memory.
    pub(crate) fn by<T>(make: impl FnOnce() -> Result<T, Failure>) -> Result<(T, Self), Failure> {
        let (others_bytes, before) = (heap_bytes(), memfds()?);
        let made = make()?;
        let mut memfds = memfds()?;
        memfds.retain(|memfd, _| !before.contains_key(memfd));
        let held = Self {
            others_bytes,
            memfds,
        };
        Ok((made, held))
    }

    pub(crate) fn bytes(&self) -> io::Result<u64> {
        let heap_bytes = heap_bytes();
        Ok(self.device_bytes()? + heap_bytes.saturating_sub(self.others_bytes))
    }

    fn device_bytes(&self) -> io::Result<u64> {
        let mut own = memfds()?;
        own.retain(|memfd, _| self.memfds.contains_key(memfd));
        Ok(own.values().sum())
    }
}

#[cfg(test)]
mod tests {
    use mlx5::{Access, Device, DeviceSpec, FabricSpec, LocalFabric, SoftOptions};

    use super::*;

    /// Returns whether the pages of a device are counted, and the pages of a later device are not.
    fn is_told_apart() -> bool {
        let open = || {
            let fabric = FabricSpec::Local(LocalFabric::new());
            Device::open(DeviceSpec::Soft(SoftOptions {
                fabric,
                arena_bytes: 1 << 20,
                ..SoftOptions::default()
            }))
            .unwrap()
        };
        let alloc = |device: &Device, bytes| {
            let pd = device.alloc_pd().unwrap();
            pd.alloc(bytes, Access::LOCAL_WRITE).unwrap()
        };
        let (first, held) = Held::by(|| Ok(open())).unwrap();
        let empty = held.device_bytes().unwrap();
        let region = alloc(&first, 1 << 16);
        let full = held.device_bytes().unwrap();
        let _other = alloc(&open(), 1 << 19);
        full >= empty + region.len() as u64 && held.device_bytes().unwrap() == full
    }

    #[test]
    fn the_memory_of_a_device_is_told_from_that_of_later_ones() {
        // Other tests open and close devices at the same time, so a single attempt may fail.
        let is_told = |_| {
            std::thread::sleep(std::time::Duration::from_millis(50));
            is_told_apart()
        };
        assert!((0..200).any(is_told));
    }
}
