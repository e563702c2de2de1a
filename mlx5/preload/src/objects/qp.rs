//! Creation and destruction of queue pairs; `modify` makes their transitions.

use mlx5_hca::{MAX_LANE_SLOTS, QpMemory, Receives, RqMemory, SqMemory};
use zerocopy::{FromZeros, IntoBytes};

use crate::abi::mlx5::{
    CreateQp as DriverQp, CreateQpResp as DriverQpResp, QP_FLAG_BFREG_INDEX, QP_FLAG_SCATTER_CQE,
    QP_FLAG_SIGNATURE, QP_FLAG_UAR_PAGE_INDEX,
};
use crate::abi::transitions::{State, service};
use crate::abi::verbs::{
    CreateQp, CreateQpResp, DestroyQp, DestroyQpResp, ExCreateQp, ExCreateQpResp, QueryQp,
    QueryQpResp,
};
use crate::command::{Call, Reply};
use crate::objects::device::MAX_WQES;
use crate::objects::regions::place;
use crate::objects::{Objects, Qp};
use crate::options::errno::Errno;
use crate::options::limits::Limit;
use crate::system::sys::Use;

/// Length of a WQEBB, in bytes.
const WQEBB: u32 = 64;

/// Length of a data segment, in bytes.
const DATA_SEGMENT: u32 = 16;

/// User index of a queue pair whose driver gives none; also the mask of a user index.
const NO_USER_INDEX: u32 = 0xff_ffff;

fn queues(request: &DriverQp, has_srq: bool) -> Result<(SqMemory, Option<RqMemory>), Errno> {
    const INVALID: Errno = Errno(libc::EINVAL);
    let is_count = |count: u32| count == 0 || (count.is_power_of_two() && count <= MAX_WQES);
    let are_counts = is_count(request.sq_wqe_count) && is_count(request.rq_wqe_count);
    INVALID.when(!are_counts || request.rq_wqe_shift > 9)?;
    // The buffer has the receive queue first, and the send queue after it. The record has the word
    // of the receive queue, then the word of the send queue (MLX5_RCV_DBR, MLX5_SND_DBR).
    let rq_bytes = request.rq_wqe_count << request.rq_wqe_shift;
    let bytes = u64::from(rq_bytes) + u64::from(request.sq_wqe_count) * u64::from(WQEBB);
    let buffer = place::<u8>(request.buf_addr, bytes.max(1), Use::Read)?;
    let record = place::<[core::sync::atomic::AtomicU32; 2]>(request.db_addr, 8, Use::Read)?.cast();
    let has_rq = request.rq_wqe_count > 0 && !has_srq;
    INVALID.when(has_rq && request.rq_wqe_shift < 4)?;
    let rq = RqMemory {
        buffer,
        wqe_cnt: request.rq_wqe_count,
        stride: 1 << request.rq_wqe_shift,
        record,
    };
    // SAFETY: both pointers are inside, or at the end of, the ranges that `place` has checked.
    let (sq_buffer, sq_record) = unsafe { (buffer.add(rq_bytes as usize), record.add(1)) };
    Ok((
        SqMemory {
            buffer: sq_buffer,
            wqe_cnt: request.sq_wqe_count,
            record: sq_record,
            register: None,
        },
        has_rq.then_some(rq),
    ))
}

impl Objects {
    pub(crate) fn create_qp(&mut self, call: &Call) -> Result<Reply, Errno> {
        let request: CreateQp = call.request::<_, CreateQpResp>()?;
        self.make_qp(call, &request)
    }

    pub(crate) fn create_qp_extended(&mut self, call: &Call) -> Result<Reply, Errno> {
        let request: ExCreateQp = call.request::<_, ExCreateQpResp>()?;
        Errno(libc::EOPNOTSUPP).when(request.comp_mask != 0 || request.create_flags != 0)?;
        // `ExCreateQp` begins with the fields of `CreateQp` after the first field.
        const SHARED: usize = core::mem::offset_of!(ExCreateQp, comp_mask);
        let mut base = CreateQp::new_zeroed();
        base.as_mut_bytes()[size_of::<CreateQp>() - SHARED..]
            .copy_from_slice(&request.as_bytes()[..SHARED]);
        Ok(self.make_qp(call, &base)?.extended())
    }

    fn make_qp(&mut self, call: &Call, request: &CreateQp) -> Result<Reply, Errno> {
        let service = service(request.qp_type).ok_or(Errno(libc::EOPNOTSUPP))?;
        Errno(libc::EINVAL).when(call.driver_len() == 0)?;
        let driver: DriverQp = call.driver();
        Errno(libc::EOPNOTSUPP).when(driver.flags & QP_FLAG_SIGNATURE != 0)?;
        self.within(Limit::QpWr, request.max_send_wr.max(request.max_recv_wr))?;
        self.within(Limit::Sge, request.max_send_sge.max(request.max_recv_sge))?;
        self.within(Limit::InlineData, request.max_inline_data)?;
        self.has_room(Limit::Qp, self.qps.len())?;
        let srq = (request.is_srq != 0).then_some(request.srq_handle);
        let (sq, rq) = queues(&driver, srq.is_some())?;
        let receives = match (srq, rq) {
            (Some(srq), _) => Receives::Shared(self.srqs.get(srq)?.srqn),
            (None, Some(rq)) => Receives::Own(rq),
            (None, None) => Receives::None,
        };
        let memory = QpMemory {
            service,
            pd: *self.pds.get(request.pd_handle)?,
            send_cq: self.cqs.get(request.send_cq_handle)?.cqn,
            recv_cq: self.cqs.get(request.recv_cq_handle)?.cqn,
            receives,
            sq,
            user_index: Some(driver.uidx & NO_USER_INDEX),
            scatter_to_cqe: driver.flags & QP_FLAG_SCATTER_CQE != 0,
            lane_slots: MAX_LANE_SLOTS,
        };
        // SAFETY: `place` has checked the buffer and the records. libmlx5 keeps them until the
        // queue pair is destroyed, and accesses them as the queues of a device.
        let qpn = unsafe { self.hca.create_qp(&memory) }.map_err(|error| self.refused(&error))?;
        // If the driver chooses a register itself, the register is not one of `bfregs`.
        let bfreg = (driver.flags & (QP_FLAG_BFREG_INDEX | QP_FLAG_UAR_PAGE_INDEX) == 0)
            .then(|| self.bfregs.take());
        // Drivers align send queues to a WQEBB; doorbells of unaligned queues are not checked.
        let is_checked = sq.wqe_cnt > 0 && sq.buffer.addr().get() % WQEBB as usize == 0;
        if let (Some(doorbells), Some(register), true) = (&mut self.doorbells, bfreg, is_checked) {
            doorbells.add(qpn, sq, register);
        }
        let CreateQp {
            max_send_wr,
            max_send_sge,
            max_inline_data,
            ..
        } = *request;
        // The sizes for receives are the sizes that the driver derived from the request, as in the
        // kernel (`set_rq_size`). libmlx5 itself returns the sizes for sends to the program.
        let (max_recv_wr, max_recv_sge) =
            rq.map_or((0, 0), |rq| (rq.wqe_cnt, rq.stride / DATA_SEGMENT));
        let in_reset = QueryQpResp {
            max_send_wr,
            max_recv_wr,
            max_send_sge,
            max_recv_sge,
            max_inline_data,
            sq_sig_all: request.sq_sig_all,
            ..QueryQpResp::new_zeroed()
        };
        let qp_handle = self.qps.insert(Qp {
            user_handle: request.user_handle,
            pd: request.pd_handle,
            send_cq: request.send_cq_handle,
            recv_cq: request.recv_cq_handle,
            srq,
            qpn,
            service,
            state: State::Reset,
            attributes: in_reset,
            in_reset,
            bfreg,
        });
        let bfreg_index = bfreg.unwrap_or(driver.bfreg_index);
        let response = CreateQpResp {
            qp_handle,
            qpn,
            max_send_wr,
            max_recv_wr,
            max_send_sge,
            max_recv_sge,
            max_inline_data,
            reserved: 0,
        };
        let note = format!(
            "{service:?} pd={} send_cq={} recv_cq={} srq={srq:?} sq={} rq={}x{} flags={:#x} uidx={:#x} -> qp={qp_handle} qpn={qpn:#x} bfreg={bfreg_index}",
            request.pd_handle,
            request.send_cq_handle,
            request.recv_cq_handle,
            driver.sq_wqe_count,
            driver.rq_wqe_count,
            1u32 << driver.rq_wqe_shift,
            driver.flags,
            driver.uidx,
        );
        let driver = DriverQpResp {
            bfreg_index,
            ..DriverQpResp::new_zeroed()
        };
        Ok(Reply::of(&response).with(&driver).note(note))
    }

    pub(crate) fn state(&self, qp: &Qp) -> State {
        if qp.state != State::Reset && self.hca.has_failed(qp.qpn) {
            State::Error
        } else {
            qp.state
        }
    }

    pub(crate) fn query_qp(&mut self, call: &Call) -> Result<Reply, Errno> {
        let QueryQp { qp_handle, .. } = call.request::<_, QueryQpResp>()?;
        let qp = self.qps.get(qp_handle)?;
        let state = self.state(qp);
        let response = QueryQpResp {
            qp_state: state as u8,
            cur_qp_state: state as u8,
            ..qp.attributes
        };
        Ok(Reply::of(&response).note(format!("qp={qp_handle} state={state:?}")))
    }

    pub(crate) fn destroy_qp(&mut self, call: &Call) -> Result<Reply, Errno> {
        let DestroyQp { qp_handle, .. } = call.request::<_, DestroyQpResp>()?;
        let qp = self.qps.remove(qp_handle)?;
        if let Some(broken) = self
            .doorbells
            .as_mut()
            .and_then(|doorbells| doorbells.remove(qp.qpn))
        {
            self.end_by(&broken);
        }
        self.hca.destroy_qp(qp.qpn);
        if let Some(bfreg) = qp.bfreg {
            self.bfregs.give_back(bfreg);
        }
        let events_reported = self.async_events.forget(qp.user_handle);
        Ok(Reply::of(&DestroyQpResp { events_reported }).note(format!("qp={qp_handle}")))
    }
}
