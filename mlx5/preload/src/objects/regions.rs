//! Protection domains, memory regions, address handles.

use core::ptr::NonNull;
use std::time::{Duration, Instant};

use mlx5_hca::{Access, RegisterError};
use zerocopy::FromZeros;

use crate::abi::mlx5::{AllocPdResp as DriverPdResp, CreateAhResp as DriverAhResp};
use crate::abi::verbs::{
    AllocPd, AllocPdResp, CreateAh, CreateAhResp, DeallocPd, DeregMr, DestroyAh, RegMr, RegMrResp,
    ReregMr, ReregMrResp,
};
use crate::command::{Call, LATER, Reply};
use crate::objects::paths::{Way, resolve};
use crate::objects::{Mr, Objects};
use crate::options::config::guid;
use crate::options::errno::Errno;
use crate::options::limits::Limit;
use crate::options::log;
use crate::system::sys;
use crate::system::sys::Use;

/// Maximum time for which a command on a region waits for peers in the middle of a copy.
const QUIET: Duration = Duration::from_secs(2);

/// `IB_ACCESS_*` that the HCA need not support: huge pages, memory windows (whose allocation is
/// refused), and optional access.
const IGNORED_ACCESS: u32 = 1 << 4 | 1 << 7 | 0x3ff << 20;

/// `IB_MR_REREG_TRANS`, `_PD` and `_ACCESS`.
const REREG: [u32; 3] = [1, 2, 4];

/// Returns the address that a driver passes, after a check of the memory there.
///
/// # Errors
/// `EINVAL`: the address is null, or not aligned for `T`. `EFAULT`: the `len` bytes at the address
/// cannot be used for `what_for`.
pub(crate) fn place<T>(addr: u64, len: u64, what_for: Use) -> Result<NonNull<T>, Errno> {
    let place = NonNull::new(addr as *mut T)
        .filter(|place| place.is_aligned())
        .ok_or(Errno(libc::EINVAL))?;
    let end = addr.checked_add(len).filter(|end| *end <= i64::MAX as u64);
    Errno(libc::EFAULT).when(end.is_none() || !sys::is_there(addr, len, what_for))?;
    Ok(place)
}

/// Returns the MAC address of RoCE port `index`, from which the GUID is derived (modified EUI-64).
fn mac(index: usize) -> [u8; 6] {
    let [a, b, c, _, _, d, e, f] = guid(index);
    [a ^ 2, b, c, d, e, f]
}

impl Objects {
    pub(crate) fn alloc_pd(&mut self, call: &Call) -> Result<Reply, Errno> {
        let AllocPd { .. } = call.request::<_, AllocPdResp>()?;
        let pdn = self.hca.alloc_pd();
        let pd_handle = self.pds.insert(pdn);
        Ok(Reply::of(&AllocPdResp { pd_handle })
            .with(&DriverPdResp { pdn })
            .note(format!("-> pd={pd_handle} pdn={pdn:#x}")))
    }

    pub(crate) fn dealloc_pd(&mut self, call: &Call) -> Result<Reply, Errno> {
        let DeallocPd { pd_handle } = call.request::<_, ()>()?;
        self.pds.get(pd_handle)?;
        let of_pd = |pd| pd == pd_handle;
        let has_objects = self.mrs.iter().any(|mr| of_pd(mr.pd))
            || self.ahs.iter().any(|ah| of_pd(*ah))
            || self.srqs.iter().any(|srq| of_pd(srq.pd))
            || self.qps.iter().any(|qp| of_pd(qp.pd));
        Errno(libc::EBUSY).when(has_objects)?;
        self.pds.remove(pd_handle)?;
        Ok(Reply::none().note(format!("pd={pd_handle}")))
    }

    /// Carries out CREATE_AH. libmlx5 makes the address vector, except the MAC address on RoCE.
    pub(crate) fn create_ah(&mut self, call: &Call) -> Result<Reply, Errno> {
        let CreateAh {
            pd_handle, attr, ..
        } = call.request::<_, CreateAhResp>()?;
        self.pds.get(pd_handle)?;
        Errno(libc::EINVAL).when(attr.port_num != 1)?;
        let way = resolve(
            self.settings.link,
            &self.port,
            (attr.is_global != 0).then_some(attr.grh.sgid_index),
            &attr.grh.dgid,
            attr.dlid,
        )?;
        let ah_handle = self.ahs.insert(pd_handle);
        let driver = DriverAhResp {
            response_length: size_of::<DriverAhResp>() as u32,
            dmac: mac(if let Way::Port(index) = way {
                index
            } else {
                self.port.index
            }),
            reserved: [0; 6],
        };
        Ok(Reply::of(&CreateAhResp { ah_handle })
            .with(&driver)
            .note(format!(
                "pd={pd_handle} dlid={} -> ah={ah_handle}",
                attr.dlid
            )))
    }

    pub(crate) fn destroy_ah(&mut self, call: &Call) -> Result<Reply, Errno> {
        let DestroyAh { ah_handle } = call.request::<_, ()>()?;
        self.ahs.remove(ah_handle)?;
        Ok(Reply::none().note(format!("ah={ah_handle}")))
    }

    fn refused_region(&self, error: &RegisterError) -> Errno {
        log::refused(self.settings, format_args!("reg_mr: {error}"));
        match error {
            RegisterError::Empty | RegisterError::RemoteWithoutLocalWrite => Errno(libc::EINVAL),
            RegisterError::Unreachable { .. } => Errno(libc::EPERM),
            _ => Errno(libc::ENOMEM),
        }
    }

    /// Checks the memory and the access of a region. Checks also that the addresses in the region
    /// equal the addresses of the memory, because the HCA does not translate. Returns the memory,
    /// and the access in the HCA's terms.
    fn check_translation(&self, asked: &RegMr) -> Result<(NonNull<u8>, Access), Errno> {
        let (start, hca_va) = (asked.start, asked.hca_va);
        if start != hca_va {
            log::refused(
                self.settings,
                format_args!(
                    "reg_mr: address {hca_va:#x} for memory at {start:#x}, which the HCA does not do"
                ),
            );
            return Err(Errno(libc::EOPNOTSUPP));
        }
        self.within(Limit::MrSize, asked.length)?;
        let access = Access::from_bits(asked.access_flags & !IGNORED_ACCESS);
        let access = access.ok_or(Errno(libc::EOPNOTSUPP))?;
        Errno(libc::EINVAL).when(asked.length == 0)?;
        let written = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let what_for = if access.intersects(written) {
            Use::Write
        } else {
            Use::Read
        };
        Ok((place(start, asked.length, what_for)?, access))
    }

    fn register(&self, asked: &RegMr) -> Result<Mr, Errno> {
        let pdn = *self.pds.get(asked.pd_handle)?;
        let (addr, access) = self.check_translation(asked)?;
        // SAFETY: a program keeps the memory mapped until its deregistration is answered, as a
        // device requires too. If the program unmaps the memory earlier, the kernel's copy fails.
        let key = unsafe { self.hca.register(pdn, addr, asked.length as usize, access) }
            .map_err(|error| self.refused_region(&error))?
            .key;
        Ok(Mr {
            pd: asked.pd_handle,
            key: Some(key),
            start: asked.start,
            length: asked.length,
            access_flags: asked.access_flags,
        })
    }

    /// Invalidates the key of a region. On success the region is gone.
    ///
    /// # Errors
    /// A peer is in the middle of a copy: [`LATER`] until the command has waited for [`QUIET`]
    /// since `since`, and then `EBUSY`. The region is unchanged after `EBUSY`.
    fn deregister(&self, mr: &Mr, since: Instant) -> Result<(), Errno> {
        match mr.key {
            Some(key) if !self.hca.try_deregister(key) => Err(self.not_quiet(mr, key, since)),
            _ => Ok(()),
        }
    }

    fn not_quiet(&self, mr: &Mr, key: u32, since: Instant) -> Errno {
        if since.elapsed() < QUIET {
            return LATER;
        }
        let access = Access::from_bits(mr.access_flags & !IGNORED_ACCESS);
        if let (Ok(pd), Some(access)) = (self.pds.get(mr.pd), access) {
            // Makes the key valid again for later operations, even if older operations have not
            // ended.
            let _ = self.hca.try_reregister(key, *pd, access);
        }
        Errno(libc::EBUSY)
    }

    pub(crate) fn reg_mr(&mut self, call: &Call) -> Result<Reply, Errno> {
        let asked: RegMr = call.request::<_, RegMrResp>()?;
        self.has_room(Limit::Mr, self.mrs.len())?;
        let mr = self.register(&asked)?;
        let (mr_handle, key) = (self.mrs.insert(mr), mr.key.unwrap_or(0));
        let RegMr { start, length, .. } = asked;
        let (pd_handle, access_flags) = (asked.pd_handle, asked.access_flags);
        let note = format!(
            "pd={pd_handle} {start:#x}+{length:#x} access={access_flags:#x} -> mr={mr_handle} key={key:#x}"
        );
        Ok(Reply::of(&RegMrResp {
            mr_handle,
            lkey: key,
            rkey: key,
        })
        .note(note))
    }

    /// Carries out REREG_MR: replaces the region if its memory changes; otherwise changes the
    /// region and keeps its keys, as the kernel's mlx5 driver does. If the memory of the new region
    /// is refused, the old region is deregistered too; according to ibv_rereg_mr(3) a program must
    /// then use neither region.
    pub(crate) fn rereg_mr(&mut self, call: &Call, since: Instant) -> Result<Reply, Errno> {
        let request: ReregMr = call.request::<_, ReregMrResp>()?;
        let [translation, pd, access] = REREG;
        let old = *self.mrs.get(request.mr_handle)?;
        Errno(libc::EINVAL)
            .when(request.flags == 0 || request.flags & !(translation | pd | access) != 0)?;
        let is_asked = |flag| request.flags & flag != 0;
        let mut asked = RegMr {
            start: old.start,
            hca_va: old.start,
            length: old.length,
            pd_handle: old.pd,
            access_flags: old.access_flags,
            ..RegMr::new_zeroed()
        };
        if is_asked(translation) {
            (asked.start, asked.hca_va) = (request.start, request.hca_va);
            asked.length = request.length;
        }
        if is_asked(pd) {
            asked.pd_handle = request.pd_handle;
        }
        if is_asked(access) {
            asked.access_flags = request.access_flags;
        }
        Errno(libc::EINVAL).when(!is_asked(translation) && old.key.is_none())?;
        let pdn = *self.pds.get(asked.pd_handle)?;
        let (_, access) = self.check_translation(&asked)?;
        let new = if is_asked(translation) {
            self.deregister(&old, since)?;
            self.mrs.get_mut(request.mr_handle)?.key = None;
            self.register(&asked)?
        } else {
            let key = old.key.ok_or(Errno(libc::EINVAL))?;
            let changed = self.hca.try_reregister(key, pdn, access);
            if !changed.map_err(|error| self.refused_region(&error))? {
                return Err(self.not_quiet(&old, key, since));
            }
            Mr {
                pd: asked.pd_handle,
                access_flags: asked.access_flags,
                ..old
            }
        };
        *self.mrs.get_mut(request.mr_handle)? = new;
        let key = new.key.unwrap_or(0);
        let note = format!(
            "mr={} flags={} -> key={key:#x}",
            request.mr_handle, request.flags
        );
        Ok(Reply::of(&ReregMrResp {
            lkey: key,
            rkey: key,
        })
        .note(note))
    }

    pub(crate) fn dereg_mr(&mut self, call: &Call, since: Instant) -> Result<Reply, Errno> {
        let DeregMr { mr_handle } = call.request::<_, ()>()?;
        self.deregister(self.mrs.get(mr_handle)?, since)?;
        self.mrs.remove(mr_handle)?;
        Ok(Reply::none().note(format!("mr={mr_handle}")))
    }
}
