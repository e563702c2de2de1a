//! Memory regions.

use core::ffi::c_void;
use core::ptr::NonNull;
use std::io;

use shm::memfd::{HUGE_PAGE, Memfd};

use super::abi::ibv_mr;
use super::context::Context;
use super::error::CallError;
use crate::control::MrParts;
use crate::mr::{Access, Pages, RegisterError};

/// A region, and its memory if it is this crate's.
pub(crate) struct Region {
    mr: NonNull<ibv_mr>,
    memory: Option<Memory>,
}

enum Memory {
    Base(Anonymous),
    /// Huge pages are had, and counted, by means of shared memory. Such regions are few: each has a file descriptor.
    Huge(Memfd),
}

/// Private pages of this process. A forked child does not have them: it would, while the device writes them, have the parent work on copies.
struct Anonymous {
    base: NonNull<c_void>,
    bytes: usize,
}

impl Anonymous {
    fn new(bytes: usize) -> io::Result<Self> {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { libc::mmap(core::ptr::null_mut(), bytes, protection, flags, -1, 0) };
        let base = NonNull::new(base).filter(|base| base.as_ptr() != libc::MAP_FAILED).ok_or_else(io::Error::last_os_error)?;
        let this = Self { base, bytes };
        // SAFETY: our own mapping.
        let result = unsafe { libc::madvise(this.base.as_ptr(), bytes, libc::MADV_DONTFORK) };
        if result == 0 { Ok(this) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Anonymous {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, and not used any more.
        unsafe { libc::munmap(self.base.as_ptr(), self.bytes) };
    }
}

impl Memory {
    fn new(bytes: usize, huge: bool) -> io::Result<(Self, Pages)> {
        if !huge {
            return Ok((Self::Base(Anonymous::new(bytes)?), Pages::Base));
        }
        let size = bytes.checked_next_multiple_of(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let memory = Memfd::create("region", size).map_err(io::Error::other)?;
        let why = memory.commit_huge(0..size).map_err(io::Error::other)?;
        Ok((Self::Huge(memory), why.map_or(Pages::Huge, Pages::NotHuge)))
    }

    fn base(&self) -> NonNull<u8> {
        match self {
            Self::Base(pages) => pages.base.cast(),
            Self::Huge(memory) => memory.base(),
        }
    }
}

impl Context {
    pub(crate) fn alloc_registered(&self, pdn: u32, bytes: usize, access: Access, huge: bool) -> Result<MrParts, RegisterError> {
        self.check(bytes, access)?;
        let (memory, pages) = Memory::new(bytes, huge).map_err(|source| RegisterError::Memory { bytes, source })?;
        let parts = self.register(pdn, memory.base(), bytes, access, Some(memory))?;
        Ok(MrParts { pages, ..parts })
    }

    fn check(&self, bytes: usize, access: Access) -> Result<(), RegisterError> {
        access.check(bytes)?;
        if access.contains(Access::REMOTE_ATOMIC) && !self.has_atomics() { Err(RegisterError::NoAtomics) } else { Ok(()) }
    }

    pub(crate) fn register_foreign(&self, pdn: u32, addr: NonNull<u8>, bytes: usize, access: Access) -> Result<MrParts, RegisterError> {
        self.check(bytes, access)?;
        self.register(pdn, addr, bytes, access, None)
    }

    fn register(&self, pdn: u32, addr: NonNull<u8>, len: usize, access: Access, memory: Option<Memory>) -> Result<MrParts, RegisterError> {
        let objects = &mut *self.objects.borrow_mut();
        let pd = objects.pd(pdn)?;
        let (start, iova) = (addr.as_ptr().cast(), addr.as_ptr() as u64);
        // SAFETY: a domain of this device. The range is mapped, by us or as the caller of `Pd::register` promises; if not, it is refused.
        // Access bits that only newer kernels know are optional, and libibverbs leaves them out for the others.
        let mr = unsafe { (self.device.api.verbs.ibv_reg_mr_iova2)(pd, start, len, iova, access.bits()) };
        let mr = NonNull::new(mr).ok_or_else(|| refusal(CallError::last("ibv_reg_mr_iova2"), len))?;
        // SAFETY: just made. On mlx5 both keys are the same number.
        let key = unsafe { mr.as_ref() }.lkey;
        objects.mrs.insert(key, Region { mr, memory });
        Ok(MrParts { key, addr, len, pages: Pages::Base })
    }

    /// Deregisters; the device is done with the memory when this returns `true`. `false`: the kernel refused, and the region is as it was.
    pub(crate) fn try_deregister(&self, key: u32) -> bool {
        let mrs = &mut self.objects.borrow_mut().mrs;
        let Some(region) = mrs.get(&key) else { return true };
        // SAFETY: registered, and gone from the table if this succeeds.
        let is_gone = unsafe { (self.device.api.verbs.ibv_dereg_mr)(region.mr.as_ptr()) } == 0;
        if is_gone {
            mrs.remove(&key);
        }
        is_gone
    }

    /// Deregisters for good. What the kernel refuses to let go stays mapped.
    pub(crate) fn deregister(&self, key: u32) {
        if !self.try_deregister(key) {
            if let Some(region) = self.objects.borrow_mut().mrs.remove(&key) {
                core::mem::forget(region.memory);
            }
        }
    }
}

/// What to do about a region that was refused.
fn refusal(error: CallError, bytes: usize) -> CallError {
    let advice = match error.errno {
        libc::ENOMEM => {
            let (limit, size) = (memlock_limit(), format!("{} KiB", bytes.div_ceil(1024)));
            format!(
                "the limit of locked memory (ulimit -l) is {limit}, and this region has {size}: raise it (ulimit -l unlimited; \"* - memlock \
                 unlimited\" in /etc/security/limits.conf; LimitMEMLOCK=infinity in a systemd unit), or free memory"
            )
        }
        libc::EFAULT => "the memory is not mapped, or not writable though the device may write it".to_owned(),
        libc::EOPNOTSUPP => "the kernel cannot pin this kind of memory; use Pd::alloc".to_owned(),
        _ => return error,
    };
    error.advise(advice)
}

/// As `ulimit -l` prints it.
fn memlock_limit() -> String {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the answer is ours.
    match unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } {
        0 if limit.rlim_cur == libc::RLIM_INFINITY => "unlimited".to_owned(),
        0 => format!("{} KiB", limit.rlim_cur / 1024),
        _ => "unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_registration_names_the_limit_of_locked_memory_and_what_to_set() {
        let text = refusal(CallError::new("ibv_reg_mr_iova2", libc::ENOMEM), 5000).to_string();
        let wanted = ["ibv_reg_mr_iova2: Cannot allocate memory", &format!("(ulimit -l) is {}", memlock_limit()), "5 KiB", "limits.conf"];
        assert!(wanted.iter().all(|part| text.contains(part)), "{text}");
        assert_eq!(refusal(CallError::new("ibv_reg_mr_iova2", libc::EIO), 1).advice, "", "no advice that does not fit");
    }

    #[test]
    fn allocated_memory_is_zero_and_not_in_a_forked_child() {
        let (memory, pages) = Memory::new(5000, false).unwrap();
        assert_eq!(pages, Pages::Base);
        // SAFETY: 5000 bytes of a mapping that nobody else has.
        let bytes = unsafe { core::slice::from_raw_parts(memory.base().as_ptr(), 5000) };
        assert!(bytes.iter().all(|&byte| byte == 0));
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", memory.base().as_ptr() as usize);
        let flags = maps.split_once(&start).and_then(|(_, rest)| rest.split_once("VmFlags:")).unwrap().1;
        assert!(flags.lines().next().unwrap().contains(" dc "), "do not copy on fork: {flags}");
    }
}
