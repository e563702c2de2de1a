//! Memory regions.

use core::ptr::NonNull;

use rustix::process::{Resource, getrlimit};

use super::abi::ibv_mr;
use super::context::Context;
use super::pages::Memory;
use super::tables::MrObject;
use crate::error::verbs::CallError;
use mlx5_hca::{Pages, Region, RegisterError as Refused, check_region};

use crate::error::RegisterError;
use crate::provider::Regions;
use crate::wire::Access;

impl Context {
    fn check(&self, bytes: usize, access: Access) -> Result<(), RegisterError> {
        check_region(bytes, access)?;
        if access.contains(Access::REMOTE_ATOMIC) && !self.has_atomics() {
            Err(RegisterError::NoAtomics)
        } else {
            Ok(())
        }
    }

    pub(super) fn register_memory(
        &self,
        pdn: u32,
        addr: NonNull<u8>,
        len: usize,
        access: Access,
        memory: Option<Memory>,
    ) -> Result<Region, CallError> {
        let objects = &mut *self.objects.borrow_mut();
        let pd = objects.pd(pdn)?;
        let (start, iova) = (addr.as_ptr().cast(), addr.as_ptr() as u64);
        // SAFETY: `pd` is a domain of this device. The range is mapped, by this crate or by
        // contract of `Pd::register`; the kernel refuses an unmapped range. Access bits that only
        // newer kernels know are optional, and libibverbs drops them for older kernels.
        let mr = unsafe { (self.verbs().ibv_reg_mr_iova2)(pd, start, len, iova, access.bits()) };
        let mr =
            NonNull::new(mr).ok_or_else(|| refusal(CallError::last("ibv_reg_mr_iova2"), len))?;
        // SAFETY: the region was just created.
        let &ibv_mr {
            lkey: key, rkey, ..
        } = unsafe { mr.as_ref() };
        // Both keys are equal on mlx5 and most other devices. A device may give no remote key to a
        // region without remote access.
        if rkey != key && access.intersects(Access::REMOTE) {
            // SAFETY: the region was just created, and is in no table.
            unsafe { (self.verbs().ibv_dereg_mr)(mr.as_ptr()) };
            return Err(CallError::new("ibv_reg_mr_iova2", libc::EOPNOTSUPP)
                .advise("the device gives a region two keys; this crate needs one"));
        }
        objects.mrs.insert(key, MrObject { mr, memory });
        Ok(Region {
            key,
            addr,
            len,
            pages: Pages::Base,
        })
    }
}

impl Regions for Context {
    fn alloc_registered(
        &self,
        pdn: u32,
        bytes: usize,
        access: Access,
        huge: bool,
    ) -> Result<Region, RegisterError> {
        self.check(bytes, access)?;
        let (mut memory, pages) =
            Memory::new(bytes, huge).map_err(|source| Refused::Memory { bytes, source })?;
        Ok(Region {
            pages,
            ..self.register_memory(pdn, memory.base(), bytes, access, Some(memory))?
        })
    }

    unsafe fn register(
        &self,
        pdn: u32,
        addr: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> Result<Region, RegisterError> {
        self.check(bytes, access)?;
        Ok(self.register_memory(pdn, addr, bytes, access, None)?)
    }

    fn try_deregister(&self, key: u32) -> bool {
        let mrs = &mut self.objects.borrow_mut().mrs;
        let Some(region) = mrs.get(&key) else {
            return true;
        };
        // SAFETY: the region is registered, and is removed from the table if this call succeeds.
        let is_gone = unsafe { (self.verbs().ibv_dereg_mr)(region.mr.as_ptr()) } == 0;
        if is_gone {
            mrs.remove(&key);
        }
        is_gone
    }

    fn deregister(&self, key: u32) {
        if !self.try_deregister(key) {
            if let Some(region) = self.objects.borrow_mut().mrs.remove(&key) {
                core::mem::forget(region.memory);
            }
        }
    }
}

fn refusal(error: CallError, bytes: usize) -> CallError {
    let advice = match error.errno {
        libc::ENOMEM => {
            let (limit, size) = (memlock_limit(), format!("{} KiB", bytes.div_ceil(1024)));
            format!(
                "the limit of locked memory (ulimit -l) is {limit}, and this region has {size}: raise it (ulimit -l unlimited; \"* - memlock \
                 unlimited\" in /etc/security/limits.conf; LimitMEMLOCK=infinity in a systemd unit), or free memory"
            )
        }
        libc::EFAULT => {
            "the memory is not mapped, or not writable though the device may write it".to_owned()
        }
        libc::EOPNOTSUPP => "the kernel cannot pin this kind of memory; use Pd::alloc".to_owned(),
        _ => return error,
    };
    error.advise(advice)
}

/// Returns the limit as `ulimit -l` prints it.
fn memlock_limit() -> String {
    getrlimit(Resource::Memlock).current.map_or_else(
        || "unlimited".to_owned(),
        |bytes| format!("{} KiB", bytes / 1024),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_registration_names_the_limit_of_locked_memory_and_what_to_set() {
        let text = refusal(CallError::new("ibv_reg_mr_iova2", libc::ENOMEM), 5000).to_string();
        let refused = format!(
            "ibv_reg_mr_iova2: {}",
            std::io::Error::from_raw_os_error(libc::ENOMEM)
        );
        let wanted = [
            &refused,
            &format!("(ulimit -l) is {}", memlock_limit()),
            "5 KiB",
            "limits.conf",
        ];
        assert!(wanted.iter().all(|part| text.contains(part)), "{text}");
        assert_eq!(
            refusal(CallError::new("ibv_reg_mr_iova2", libc::EIO), 1).advice,
            "",
            "no advice that does not fit"
        );
    }
}
