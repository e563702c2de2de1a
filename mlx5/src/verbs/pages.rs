//! Memory of regions.

use core::ptr::NonNull;
use std::io;

use copyrpc_shm::memfd::{HUGE_PAGE, Memfd};
use memmap2::{Advice, MmapMut, MmapOptions};

use mlx5_hca::Pages;

pub(crate) enum Memory {
    /// Private pages of this process. A forked child does not inherit them: otherwise the parent
    /// would work on copies while the device writes the originals.
    Base(MmapMut),
    /// Huge pages, allocated and counted as shared memory. Each such region has a file descriptor,
    /// so there should be few of them.
    Huge(Memfd),
}

impl Memory {
    pub(crate) fn new(bytes: usize, huge: bool) -> io::Result<(Self, Pages)> {
        if !huge {
            let pages = MmapOptions::new().len(bytes).map_anon()?;
            pages.advise(Advice::DontFork)?;
            return Ok((Self::Base(pages), Pages::Base));
        }
        let size = bytes
            .checked_next_multiple_of(HUGE_PAGE)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        let memory = Memfd::create("region", size).map_err(io::Error::other)?;
        let why = memory.commit_huge(0..size).map_err(io::Error::other)?;
        Ok((Self::Huge(memory), why.map_or(Pages::Huge, Pages::NotHuge)))
    }

    pub(crate) fn base(&mut self) -> NonNull<u8> {
        match self {
            Self::Base(pages) => NonNull::from(&mut **pages).cast(),
            Self::Huge(memory) => memory.base(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocated_memory_is_zero_and_not_in_a_forked_child() {
        let (mut memory, pages) = Memory::new(5000, false).unwrap();
        assert_eq!(pages, Pages::Base);
        // SAFETY: the slice is the first 5000 bytes of a mapping that no other code uses.
        let bytes = unsafe { core::slice::from_raw_parts(memory.base().as_ptr(), 5000) };
        assert!(bytes.iter().all(|&byte| byte == 0));
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", memory.base().as_ptr() as usize);
        let flags = maps
            .split_once(&start)
            .and_then(|(_, rest)| rest.split_once("VmFlags:"))
            .unwrap()
            .1;
        assert!(
            flags.lines().next().unwrap().contains(" dc "),
            "do not copy on fork: {flags}"
        );
    }
}
