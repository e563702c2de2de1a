//! Shared receive queues.

use std::cell::Cell;

use mlx5_hca::RqMemory;
use zerocopy::FromZeros;

use crate::abi::mlx5::{
    CreateSrq as DriverSrq, CreateSrqResp as DriverSrqResp, SRQ_FLAG_SIGNATURE,
};
use crate::abi::verbs::{
    CreateSrq, CreateSrqResp, CreateXsrq, DestroySrq, DestroySrqResp, ModifySrq, QuerySrq,
    QuerySrqResp,
};
use crate::command::{Call, Reply};
use crate::objects::device::{MAX_SGE, MAX_WQES};
use crate::objects::regions::place;
use crate::objects::{Objects, Srq};
use crate::options::errno::Errno;
use crate::options::limits::Limit;
use crate::system::sys::Use;

/// `IB_SRQT_BASIC`.
const BASIC: u32 = 0;

/// `IB_SRQ_MAX_WR` and `IB_SRQ_LIMIT`.
const MAX_WR: u32 = 1;
const LIMIT: u32 = 2;

impl Objects {
    pub(crate) fn create_srq(&mut self, call: &Call) -> Result<Reply, Errno> {
        let asked: CreateSrq = call.request::<_, CreateSrqResp>()?;
        self.make_srq(call, &asked)
    }

    /// Carries out CREATE_XSRQ, for the basic type only.
    pub(crate) fn create_xsrq(&mut self, call: &Call) -> Result<Reply, Errno> {
        let asked: CreateXsrq = call.request::<_, CreateSrqResp>()?;
        Errno(libc::EOPNOTSUPP).when(asked.srq_type != BASIC)?;
        let request = CreateSrq {
            user_handle: asked.user_handle,
            pd_handle: asked.pd_handle,
            max_wr: asked.max_wr,
            max_sge: asked.max_sge,
            ..CreateSrq::new_zeroed()
        };
        self.make_srq(call, &request)
    }

    fn make_srq(&mut self, call: &Call, asked: &CreateSrq) -> Result<Reply, Errno> {
        let request: DriverSrq = call.driver();
        let (pd_handle, max_wr, max_sge) = (asked.pd_handle, asked.max_wr, asked.max_sge);
        Errno(libc::EINVAL).when(max_wr >= MAX_WQES || max_sge > MAX_SGE + 1)?;
        Errno(libc::EOPNOTSUPP).when(request.flags & SRQ_FLAG_SIGNATURE != 0)?;
        self.within(Limit::SrqWr, max_wr)?;
        self.within(Limit::SrqSge, max_sge)?;
        self.has_room(Limit::Srq, self.srqs.len())?;
        let pdn = *self.pds.get(pd_handle)?;
        // As in the kernel, a WQE is a next segment and the segments of its buffers, and the driver
        // never posts all WQEs.
        let stride = (16 + 16 * max_sge).next_power_of_two().max(32);
        let wqe_cnt = (max_wr + 1).next_power_of_two();
        let memory = RqMemory {
            buffer: place(
                request.buf_addr,
                u64::from(wqe_cnt) * u64::from(stride),
                Use::Read,
            )?,
            wqe_cnt,
            stride,
            record: place(request.db_addr, 4, Use::Read)?,
        };
        // SAFETY: `place` has checked the buffer and the record. libmlx5 keeps both until the queue
        // is destroyed, and accesses them as the queue of a device.
        let srqn =
            unsafe { self.hca.create_srq(pdn, &memory) }.map_err(|error| self.refused(&error))?;
        let srq_handle = self.srqs.insert(Srq {
            pd: pd_handle,
            srqn,
            max_wr,
            max_sge,
            user_handle: asked.user_handle,
            limit: 0,
            is_armed: Cell::new(false),
        });
        let note =
            format!("pd={pd_handle} wqes={wqe_cnt}x{stride} -> srq={srq_handle} srqn={srqn:#x}");
        Ok(Reply::of(&CreateSrqResp {
            srq_handle,
            max_wr,
            max_sge,
            srqn,
        })
        .with(&DriverSrqResp { srqn, reserved: 0 })
        .note(note))
    }

    /// Carries out MODIFY_SRQ. Refuses a resize, as mlx5 does. Arms the limit that the program
    /// sets: when fewer receives than the limit are posted, there is one event.
    pub(crate) fn modify_srq(&mut self, call: &Call) -> Result<Reply, Errno> {
        let asked: ModifySrq = call.request::<_, ()>()?;
        let srq = self.srqs.get_mut(asked.srq_handle)?;
        Errno(libc::EINVAL).when(asked.attr_mask & MAX_WR != 0)?;
        if asked.attr_mask & LIMIT != 0 {
            Errno(libc::EINVAL).when(asked.srq_limit > srq.max_wr)?;
            srq.limit = asked.srq_limit;
            srq.is_armed.set(srq.limit > 0);
        }
        Ok(Reply::none().note(format!("srq={}", asked.srq_handle)))
    }

    pub(crate) fn query_srq(&mut self, call: &Call) -> Result<Reply, Errno> {
        let QuerySrq { srq_handle, .. } = call.request::<_, QuerySrqResp>()?;
        let Srq {
            max_wr,
            max_sge,
            limit,
            ref is_armed,
            ..
        } = *self.srqs.get(srq_handle)?;
        // The event of the limit sets the limit back to 0.
        let srq_limit = if is_armed.get() { limit } else { 0 };
        Ok(Reply::of(&QuerySrqResp {
            max_wr,
            max_sge,
            srq_limit,
            reserved: 0,
        })
        .note(format!("srq={srq_handle}")))
    }

    pub(crate) fn destroy_srq(&mut self, call: &Call) -> Result<Reply, Errno> {
        let DestroySrq { srq_handle, .. } = call.request::<_, DestroySrqResp>()?;
        self.srqs.get(srq_handle)?;
        Errno(libc::EBUSY).when(self.qps.iter().any(|qp| qp.srq == Some(srq_handle)))?;
        let srq = self.srqs.remove(srq_handle)?;
        self.hca.destroy_srq(srq.srqn);
        let events_reported = self.async_events.forget(srq.user_handle);
        Ok(Reply::of(&DestroySrqResp { events_reported }).note(format!("srq={srq_handle}")))
    }
}
