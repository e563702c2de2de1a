//! Protection domains and queues. The libraries create them; then `mlx5dv_init_obj` returns the
//! addresses and the actual sizes of the queues' memory, which the data path needs.

use core::mem::zeroed;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::AtomicU32;

use mlx5_hca::{CqMemory, RqMemory, SqMemory};

use super::abi::*;
use super::context::Context;
use super::numbers::*;
use super::tables::{CqObject, QpObject, foreign};
use crate::config::{CqConfig, RqSize};
use crate::error::CreateError;
use crate::error::verbs::CallError;
use crate::mmio::RegisterKind;
use crate::provider::parts::{QpParts, QpRequest, Receives, UarParts};
use crate::provider::{Provider, Queues};
use crate::wire::{
    BLUEFLAME_BYTES, CQ_DBREC_SET_CI, CQE_BYTES, CQE128_BYTES, CqArm, QP_DBREC_RECEIVE,
    QP_DBREC_SEND, Service,
};

/// Number of WQEBBs of the smallest send queue: the longest WQE takes 5 WQEBBs, and may need 9 with
/// the NOPs before the ring's end.
const MIN_SEND_WQEBBS: u32 = 16;

/// Makes the error for a value that can only occur if the library's structs differ from its header.
fn nonsense(what: &'static str, value: u64) -> CreateError {
    mlx5_hca::CreateError::Illegal {
        what,
        value,
        legal: "what mlx5dv_init_obj documents",
    }
    .into()
}

/// Returns the way in which the register at `addr` is written. A register of a size other than 256
/// bytes is legal, and is written 8 bytes at a time, which always works.
fn register_kind(size: usize, addr: usize) -> Result<RegisterKind, CreateError> {
    let (kind, alignment) = match size {
        BLUEFLAME_BYTES => (RegisterKind::WriteCombining, 2 * BLUEFLAME_BYTES),
        _ => (RegisterKind::DoorbellOnly, size_of::<u64>()),
    };
    if addr % alignment == 0 {
        Ok(kind)
    } else {
        Err(nonsense(
            "the address of the doorbell register of a queue pair",
            addr as u64,
        ))
    }
}

fn pointer<A, T>(address: *mut A, what: &'static str) -> Result<NonNull<T>, CreateError> {
    NonNull::new(address.cast()).ok_or_else(|| nonsense(what, 0))
}

/// Returns the address of word `index` of a doorbell record.
fn record(
    words: *mut u32,
    index: usize,
    what: &'static str,
) -> Result<NonNull<AtomicU32>, CreateError> {
    // SAFETY: every doorbell record has more than `index` words.
    pointer(words, what).map(|first: NonNull<AtomicU32>| unsafe { first.add(index) })
}

/// Returns the number of WQEs of a ring, if it is legal: a power of two, up to 2^15, because the
/// index of a WQE has 16 bits.
fn wqe_count(count: u32, what: &'static str) -> Result<u32, CreateError> {
    if count.is_power_of_two() && count <= 1 << 15 {
        Ok(count)
    } else {
        Err(nonsense(what, count.into()))
    }
}

/// Returns the creation flags for `mlx5dv_create_qp`. By default the device scatters data received
/// on a connection to CQEs; a flag disables that. The flag `MLX5DV_QP_CREATE_ALLOW_SCATTER_TO_CQE`
/// concerns the sender: with it READs and atomics leave their results in the CQEs of the send
/// queue, and this crate does not read them there (mlx5dv_create_qp(3)).
fn create_flags(is_datagram: bool, scatter_to_cqe: bool) -> u32 {
    if is_datagram || scatter_to_cqe {
        0
    } else {
        MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE
    }
}

impl Context {
    /// Opens an object to the data path (`mlx5dv_init_obj`). Returns `answer`, filled in.
    ///
    /// # Safety
    /// The object is alive. Its type, and the type of the answer, belong to `kind`
    /// (`MLX5DV_OBJ_*`).
    pub(crate) unsafe fn init_obj<O, A>(
        &self,
        kind: u64,
        object: NonNull<O>,
        mut answer: A,
    ) -> Result<A, CallError> {
        let pair = Pair {
            from: object.as_ptr().cast(),
            to: (&raw mut answer).cast(),
        };
        // SAFETY: the struct holds pointers, for which null is a valid value.
        let mut pairs: mlx5dv_obj = unsafe { zeroed() };
        let place: *mut Pair = (&raw mut pairs).cast();
        // SAFETY: the written pair is one of the struct's pairs, which are in the order of the
        // bits. The caller guarantees that the object is alive, and that its type and the answer's
        // type belong to `kind`.
        CallError::check("mlx5dv_init_obj", unsafe {
            place.add(kind.trailing_zeros() as usize).write(pair);
            (self.device.api.mlx5.mlx5dv_init_obj)(&raw mut pairs, kind)
        })?;
        Ok(answer)
    }

    fn compresses(&self, cqe_bytes: usize) -> bool {
        let caps = self.dv.cqe_comp_caps;
        let fits =
            cqe_bytes == CQE_BYTES || self.dv.flags & MLX5DV_CONTEXT_FLAGS_CQE_128B_COMP != 0;
        caps.max_num > 0 && caps.supported_format & MLX5DV_CQE_RES_FORMAT_HASH != 0 && fits
    }

    /// Takes over a new completion queue for the data path. From now on libmlx5 does not touch its
    /// CQEs and its record. libmlx5 has filled the CQEs with op_own 0xf0, whose opcode means "no
    /// completion"; the poll checks the opcode, so nothing is rewritten.
    fn open_cq(
        &self,
        cq: NonNull<ibv_cq>,
        compression: bool,
    ) -> Result<(u32, CqMemory), CreateError> {
        // SAFETY: the completion queue was just created. Its type and the type of the answer belong
        // to `MLX5DV_OBJ_CQ`. The answer holds pointers and numbers, for which zero is a valid
        // value.
        let dv: mlx5dv_cq = unsafe { self.init_obj(MLX5DV_OBJ_CQ, cq, zeroed()) }?;
        if !dv.cqe_cnt.is_power_of_two()
            || ![CQE_BYTES, CQE128_BYTES].contains(&(dv.cqe_size as usize))
        {
            return Err(nonsense("the number of CQ entries", dv.cqe_cnt.into()));
        }
        let buffer = pointer(dv.buf, "the buffer of a completion queue")?;
        let uar = pointer(dv.cq_uar, "the UAR page of a completion queue")?;
        let record = record(
            dv.dbrec,
            CQ_DBREC_SET_CI,
            "the record of a completion queue",
        )?;
        self.objects.borrow_mut().cqs.insert(
            dv.cqn,
            CqObject {
                cq,
                uar,
                record,
                events: 0,
            },
        );
        let record = record.cast();
        Ok((
            dv.cqn,
            CqMemory {
                buffer,
                entries: dv.cqe_cnt,
                cqe_bytes: dv.cqe_size,
                compression,
                record,
            },
        ))
    }

    /// Takes over a new shared receive queue for the data path. The device begins with WQE 0, and
    /// so does this crate. The library has linked each WQE to the next, up to the tail. It may have
    /// allocated more WQEs after the tail for its own purposes; this crate does not use them.
    fn open_srq(&self, srq: NonNull<ibv_srq>) -> Result<(u32, RqMemory), CreateError> {
        // SAFETY: the struct holds pointers and numbers, for which zero is a valid value.
        let mut dv: mlx5dv_srq = unsafe { zeroed() };
        dv.comp_mask = MLX5DV_SRQ_MASK_SRQN;
        // SAFETY: the queue was just created. Its type and the type of the answer belong to
        // `MLX5DV_OBJ_SRQ`.
        let dv = unsafe { self.init_obj(MLX5DV_OBJ_SRQ, srq, dv) }?;
        if dv.head != 0 || dv.comp_mask & MLX5DV_SRQ_MASK_SRQN == 0 {
            return Err(nonsense(
                "the head of a shared receive queue",
                dv.head.into(),
            ));
        }
        let wqe_cnt = wqe_count(
            dv.tail.wrapping_add(1),
            "the number of WQEs of a shared receive queue",
        )?;
        let buffer = pointer(dv.buf, "the buffer of a shared receive queue")?;
        let record = record(dv.dbrec, 0, "the record of a shared receive queue")?;
        self.objects.borrow_mut().srqs.insert(dv.srqn, srq);
        Ok((
            dv.srqn,
            RqMemory {
                buffer,
                wqe_cnt,
                stride: dv.stride,
                record,
            },
        ))
    }

    fn destroy(&self, qp: NonNull<ibv_qp>) {
        // SAFETY: the queue pair is in no table, or was just removed from it.
        unsafe { (self.verbs().ibv_destroy_qp)(qp.as_ptr()) };
    }

    pub(super) fn make_srq(&self, pdn: u32, size: RqSize) -> Result<NonNull<ibv_srq>, CreateError> {
        let info = self.info();
        size.check(info.max_srq_wr, info.max_recv_sge)?;
        let pd = self.objects.borrow().pd(pdn)?;
        // The library accepts no queue for receives without buffers.
        let attr = ibv_srq_attr {
            max_wr: size.depth,
            max_sge: (size.max_sge as u32).max(1),
            srq_limit: 0,
        };
        let mut attr = ibv_srq_init_attr {
            srq_context: null_mut(),
            attr,
        };
        // SAFETY: `pd` is a domain of this device, and the attributes live through the call.
        let srq = unsafe { (self.verbs().ibv_create_srq)(pd, &raw mut attr) };
        Ok(NonNull::new(srq).ok_or_else(|| CallError::last("ibv_create_srq"))?)
    }

    pub(super) fn check_qp(&self, request: &QpRequest<'_>) -> Result<(), CreateError> {
        let (config, info) = (request.config, self.info());
        config.check(info.max_send_wr)?;
        match request.receives {
            Receives::Shared(_) => Ok(()),
            Receives::Own(size) => Ok(size.check(info.max_recv_wr, info.max_recv_sge)?),
        }
    }

    pub(super) fn qp_attributes(
        &self,
        request: &QpRequest<'_>,
        max_send_wr: u32,
        max_send_sge: u32,
    ) -> Result<(*mut ibv_pd, ibv_qp_init_attr), CreateError> {
        let objects = self.objects.borrow();
        let (mut srq, mut cap) = (
            null_mut(),
            ibv_qp_cap {
                max_send_wr,
                max_send_sge,
                ..ibv_qp_cap::default()
            },
        );
        match request.receives {
            Receives::Shared(srqn) => srq = objects.srqs.get(&srqn).ok_or_else(foreign)?.as_ptr(),
            Receives::Own(RqSize { depth, max_sge }) => {
                (cap.max_recv_wr, cap.max_recv_sge) =
                    (depth.next_power_of_two(), (max_sge as u32).max(1))
            }
        }
        let attr = ibv_qp_init_attr {
            qp_context: null_mut(),
            send_cq: objects.cq(request.send_cq)?,
            recv_cq: objects.cq(request.recv_cq)?,
            srq,
            cap,
            qp_type: if request.service == Service::Datagram {
                IBV_QPT_UD
            } else {
                IBV_QPT_RC
            },
            sq_sig_all: 0,
        };
        Ok((objects.pd(request.pd)?, attr))
    }

    fn try_create_qp(
        &self,
        request: &QpRequest<'_>,
        work_requests: u32,
    ) -> Result<(NonNull<ibv_qp>, mlx5dv_qp), CreateError> {
        let (pd, init) = self.qp_attributes(request, work_requests, 1)?;
        // SAFETY: the struct holds pointers and numbers, for which zero is a valid value.
        let mut attr: ibv_qp_init_attr_ex = unsafe { zeroed() };
        (attr.send_cq, attr.recv_cq, attr.srq) = (init.send_cq, init.recv_cq, init.srq);
        (attr.cap, attr.qp_type) = (init.cap, init.qp_type);
        (attr.comp_mask, attr.pd) = (IBV_QP_INIT_ATTR_PD, pd);
        let is_datagram = request.service == Service::Datagram;
        // SAFETY: the struct holds numbers, for which zero is a valid value.
        let mut mlx5: mlx5dv_qp_init_attr = unsafe { zeroed() };
        mlx5.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS;
        mlx5.create_flags = create_flags(is_datagram, request.config.scatter_to_cqe);
        // SAFETY: the device is an open mlx5 device, the attributes contain objects of this device,
        // and they live through the call.
        let qp = unsafe {
            (self.device.api.mlx5.mlx5dv_create_qp)(
                self.device.context(),
                &raw mut attr,
                &raw mut mlx5,
            )
        };
        let qp = NonNull::new(qp).ok_or_else(|| CallError::last("mlx5dv_create_qp"))?;
        // SAFETY: the queue pair was just created. Its type and the type of the answer belong to
        // `MLX5DV_OBJ_QP`. The answer holds pointers and numbers, for which zero is a valid value.
        let dv = unsafe { self.init_obj(MLX5DV_OBJ_QP, qp, zeroed()) };
        Ok((qp, dv.inspect_err(|_| self.destroy(qp))?))
    }

    fn open_qp(
        &self,
        qp: NonNull<ibv_qp>,
        dv: &mlx5dv_qp,
        request: &QpRequest<'_>,
    ) -> Result<QpParts, CreateError> {
        // SAFETY: the queue pair is alive.
        let qpn = unsafe { qp.as_ref() }.qp_num;
        let record = |index| record(dv.dbrec, index, "the record of a queue pair");
        let register: NonNull<u8> = pointer(dv.bf.reg, "the doorbell register of a queue pair")?;
        let kind = register_kind(dv.bf.size as usize, register.as_ptr().addr())?;
        if dv.sq.stride as usize != crate::wire::WQEBB {
            return Err(nonsense("the stride of a send queue", dv.sq.stride.into()));
        }
        let rq = match request.receives {
            Receives::Shared(_) => None,
            Receives::Own(_) => Some(RqMemory {
                buffer: pointer(dv.rq.buf, "the buffer of a receive queue")?,
                wqe_cnt: wqe_count(dv.rq.wqe_cnt, "the number of WQEs of a receive queue")?,
                stride: dv.rq.stride,
                record: record(QP_DBREC_RECEIVE)?,
            }),
        };
        let sq = SqMemory {
            buffer: pointer(dv.sq.buf, "the buffer of a send queue")?,
            wqe_cnt: wqe_count(dv.sq.wqe_cnt, "the number of WQEBBs of a send queue")?,
            record: record(QP_DBREC_SEND)?,
            register: None,
        };
        let uar = UarParts {
            half: self.objects.borrow_mut().half_of(register),
            kind,
            register_index: 0,
        };
        self.objects.borrow_mut().qps.insert(qpn, QpObject::new(qp));
        let max_inline = request.config.max_inline_data;
        Ok(QpParts {
            qpn,
            sq,
            rq,
            max_inline,
            has_atomics: self.has_atomics(),
            uar,
        })
    }
}

impl Queues for Context {
    fn alloc_pd(&self) -> Result<u32, CreateError> {
        let verbs = self.verbs();
        // SAFETY: the device is open.
        let pd = NonNull::new(unsafe { (verbs.ibv_alloc_pd)(self.device.context()) })
            .ok_or_else(|| CallError::last("ibv_alloc_pd"))?;
        // SAFETY: the domain was just created. Its type and the type of the answer belong to
        // `MLX5DV_OBJ_PD`. The answer holds numbers, for which zero is a valid value.
        let dv: Result<mlx5dv_pd, _> = unsafe { self.init_obj(MLX5DV_OBJ_PD, pd, zeroed()) };
        let pdn = dv.map(|dv| dv.pdn).inspect_err(|_| {
            // SAFETY: no object was made in the PD.
            unsafe { (verbs.ibv_dealloc_pd)(pd.as_ptr()) };
        })?;
        self.objects.borrow_mut().pds.insert(pdn, pd);
        Ok(pdn)
    }

    fn dealloc_pd(&self, pdn: u32) {
        let objects = &mut *self.objects.borrow_mut();
        objects.handles.retain(|(of, _), handle| {
            if *of == pdn {
                // SAFETY: the handle is removed from the table, and only queue pairs of the domain,
                // which are destroyed, used it.
                unsafe { (self.verbs().ibv_destroy_ah)(handle.as_ptr()) };
            }
            *of != pdn
        });
        if let Some(pd) = objects.pds.remove(&pdn) {
            // SAFETY: the domain was removed from the table, so this is the last use. If the kernel
            // refuses, it frees the domain together with the device.
            unsafe { (self.verbs().ibv_dealloc_pd)(pd.as_ptr()) };
        }
    }

    fn create_cq(&self, config: &CqConfig) -> Result<(u32, CqMemory), CreateError> {
        config.check(self.info().max_cqe, self.comp_vectors())?;
        let bytes = config.stride()?;
        let mut mlx5 = mlx5dv_cq_init_attr {
            comp_mask: MLX5DV_CQ_INIT_ATTR_MASK_CQE_SIZE,
            cqe_comp_res_format: 0,
            flags: 0,
            cqe_size: bytes as u16,
        };
        if config.compression {
            if !self.compresses(bytes) {
                return Err(CreateError::Unsupported {
                    what: "compression of CQEs of that size",
                });
            }
            mlx5.comp_mask |= MLX5DV_CQ_INIT_ATTR_MASK_COMPRESSED_CQE;
            mlx5.cqe_comp_res_format = MLX5DV_CQE_RES_FORMAT_HASH as u8;
        }
        // The library allocates one entry more than requested, and does not accept zero.
        let cqe = (config.entries.next_power_of_two() - 1).max(1);
        // SAFETY: the struct holds pointers and numbers, for which zero is a valid value.
        let mut attr: ibv_cq_init_attr_ex = unsafe { zeroed() };
        (attr.cqe, attr.channel) = (cqe, self.channel());
        attr.comp_vector = config.comp_vector;
        // SAFETY: the device is an open mlx5 device, and the attributes live through the call.
        let cq = unsafe {
            (self.device.api.mlx5.mlx5dv_create_cq)(
                self.device.context(),
                &raw mut attr,
                &raw mut mlx5,
            )
        };
        let cq = NonNull::new(cq).ok_or_else(|| CallError::last("mlx5dv_create_cq"))?;
        self.open_cq(cq, config.compression).inspect_err(|_| {
            // SAFETY: the queue was just created, and is in no table.
            unsafe { (self.verbs().ibv_destroy_cq)(cq.as_ptr()) };
        })
    }

    fn armed(&self, cqn: u32, command: &CqArm, holds: &dyn Fn(bool) -> bool) {
        if let Some(cq) = self.objects.borrow().cqs.get(&cqn) {
            cq.tell(cqn, command);
        }
        // The CQEs are checked after the command, so that none is missed: a CQE that arrives after
        // the command gives an event.
        if holds(command.solicited_only) {
            self.is_due.set(true);
        }
    }

    fn destroy_cq(&self, cqn: u32) {
        let object = self.objects.borrow_mut().cqs.remove(&cqn);
        if let Some(object) = object {
            // SAFETY: the queue was removed from the table, so this is the last use, and all its
            // events are acknowledged. Its queue pairs, which kept it alive, have been destroyed.
            unsafe { (self.verbs().ibv_destroy_cq)(object.cq.as_ptr()) };
        }
    }

    fn create_srq(&self, pdn: u32, size: RqSize) -> Result<(u32, RqMemory), CreateError> {
        let srq = self.make_srq(pdn, size)?;
        self.open_srq(srq).inspect_err(|_| {
            // SAFETY: the queue was just created, and is in no table.
            unsafe { (self.verbs().ibv_destroy_srq)(srq.as_ptr()) };
        })
    }

    fn destroy_srq(&self, srqn: u32) {
        if let Some(srq) = self.objects.borrow_mut().srqs.remove(&srqn) {
            // SAFETY: the queue was removed from the table, so this is the last use. Its queue
            // pairs, which kept it alive, have been destroyed.
            unsafe { (self.verbs().ibv_destroy_srq)(srq.as_ptr()) };
        }
    }

    fn create_qp(&self, request: &QpRequest<'_>) -> Result<QpParts, CreateError> {
        self.check_qp(request)?;
        let wanted = request
            .config
            .max_send_wr
            .next_power_of_two()
            .max(MIN_SEND_WQEBBS);
        // The library takes a number of work requests. For each it allocates the WQEBBs of the
        // longest WQE that it expects: at least one WQEBB and often four, depending on the release
        // and on the kind of queue pair.
        let mut work_requests = wanted / 4;
        loop {
            let (qp, dv) = self.try_create_qp(request, work_requests)?;
            if dv.sq.wqe_cnt >= wanted || work_requests >= wanted {
                return self
                    .open_qp(qp, &dv, request)
                    .inspect_err(|_| self.destroy(qp));
            }
            self.destroy(qp);
            work_requests *= 2;
        }
    }

    fn destroy_qp(&self, qpn: u32) {
        let object = self.objects.borrow_mut().qps.remove(&qpn);
        if let Some(object) = object {
            self.destroy(object.qp);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tables::Objects;
    use super::*;

    #[test]
    fn received_data_goes_to_cqes_only_where_asked_for_and_results_of_reads_never() {
        const REQUESTER_TOO: u32 = 1 << 4;
        assert_eq!(
            create_flags(false, false),
            MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE
        );
        assert_eq!(
            create_flags(false, true) & (MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE | REQUESTER_TOO),
            0
        );
        assert_eq!(create_flags(true, true), 0);
    }

    /// A register of two halves of 256 bytes is aligned to 512. Registers of other sizes follow
    /// each other at multiples of their own size.
    #[test]
    fn a_register_of_another_size_is_written_8_bytes_at_a_time_wherever_it_is() {
        assert!(matches!(
            register_kind(256, 0x1a00),
            Ok(RegisterKind::WriteCombining)
        ));
        for (size, addr) in [(0, 0x1800), (128, 0x1880), (64, 0x1908), (512, 0x1b00)] {
            assert!(
                matches!(register_kind(size, addr), Ok(RegisterKind::DoorbellOnly)),
                "{size}"
            );
        }
        for (size, addr) in [(256, 0x1900), (0, 0x1804)] {
            let refused = register_kind(size, addr).unwrap_err().to_string();
            assert!(
                refused.contains("address of the doorbell register"),
                "{refused}"
            );
        }
    }

    #[test]
    fn queue_pairs_on_one_register_share_its_half_and_others_do_not() {
        let mut objects = Objects::default();
        let registers =
            [0x1800, 0x1a00].map(|at| NonNull::new(core::ptr::without_provenance_mut(at)).unwrap());
        let [first, second, other] = [0, 0, 1].map(|i| objects.half_of(registers[i]));
        assert_eq!((first.get().addr(), other.get().addr()), (0x1800, 0x1a00));
        first.set(first.get().wrapping_add(BLUEFLAME_BYTES));
        assert_eq!((second.get().addr(), other.get().addr()), (0x1900, 0x1a00));
    }
}
