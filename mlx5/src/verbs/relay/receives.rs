//! A receive queue, whose WQEs become work requests.

use core::ffi::c_int;
use core::ptr::{NonNull, null_mut};
use core::sync::atomic::Ordering;

use mlx5_hca::RqMemory;

use super::super::abi::*;
use super::Id;
use crate::config::RqSize;
use crate::error::CreateError;
use crate::provider::private::PrivateMemory;
use crate::wire::{
    DataWords, INVALID_LKEY, MAX_RECV_SGE, NextSegment, SEGMENT, WQEBB, queue_record_index,
};

#[derive(Clone, Copy)]
pub(super) enum Target {
    Shared(NonNull<ibv_srq>),
    Own(NonNull<ibv_qp>),
}

/// A receive queue in memory of this process. The record lies before the WQEs.
pub(super) struct ReceiveRing {
    target: Target,
    id: Id,
    _owned: PrivateMemory,
    pub(super) memory: RqMemory,
    posted: u16,
    /// WQE of a shared queue that is posted next.
    head: u16,
}

impl ReceiveRing {
    pub(super) fn new(
        id: Id,
        target: Target,
        RqSize { depth, max_sge }: RqSize,
    ) -> Result<Self, CreateError> {
        let is_linked = matches!(target, Target::Shared(_));
        // The last WQE in the list of a shared queue is never posted, so such a queue has one WQE
        // more.
        let wqe_cnt = (depth + u32::from(is_linked)).next_power_of_two();
        let stride = (SEGMENT * (max_sge.max(1) + usize::from(is_linked))).next_power_of_two();
        let (owned, first) =
            PrivateMemory::new("a receive queue", WQEBB + wqe_cnt as usize * stride, WQEBB)?;
        // SAFETY: the offset is inside the new memory.
        let buffer = unsafe { first.add(WQEBB) };
        let memory = RqMemory {
            buffer,
            wqe_cnt,
            stride: stride as u32,
            record: first.cast(),
        };
        Ok(Self {
            target,
            id,
            _owned: owned,
            memory,
            posted: 0,
            head: 0,
        })
    }

    pub(super) fn is_of(&self, srq: NonNull<ibv_srq>) -> bool {
        matches!(self.target, Target::Shared(own) if own == srq)
    }

    /// Posts new receives until the device takes no more; the others stay for the next call.
    pub(super) fn relay(&mut self, calls: &ibv_context_ops) {
        // SAFETY: the record lives as long as the queue; the driver stores it through the same
        // atomic type.
        let producer =
            queue_record_index(unsafe { self.memory.record.as_ref() }.load(Ordering::Acquire));
        while self.posted != producer {
            if !self.post(calls) {
                return;
            }
        }
    }

    /// Posts the next receive. Returns whether the device took it.
    fn post(&mut self, calls: &ibv_context_ops) -> bool {
        let is_linked = matches!(self.target, Target::Shared(_));
        let RqMemory {
            buffer,
            wqe_cnt,
            stride,
            ..
        } = self.memory;
        let (mask, stride) = ((wqe_cnt - 1) as u16, stride as usize);
        let index = if is_linked { self.head } else { self.posted } & mask;
        // SAFETY: the segment is part of a WQE inside the queue. The driver has finished this WQE,
        // and does not write it before its completion.
        let segment = |at: usize| unsafe {
            buffer
                .add(usize::from(index) * stride + at * SEGMENT)
                .cast::<[u8; SEGMENT]>()
                .read()
        };
        let mut sges = [ibv_sge::default(); MAX_RECV_SGE as usize + 1];
        let mut count = 0;
        for (at, sge) in (usize::from(is_linked)..stride / SEGMENT).zip(&mut sges) {
            let data = DataWords::parse(&segment(at));
            if data.lkey() == INVALID_LKEY {
                break;
            }
            *sge = ibv_sge {
                addr: data.addr(),
                length: data.byte_count(),
                lkey: data.lkey(),
            };
            count += 1;
        }
        let wqe_counter = if is_linked { index } else { self.posted };
        let Id(wr_id) = self.id.of_wqe(0, wqe_counter);
        let mut request = ibv_recv_wr {
            wr_id,
            next: null_mut(),
            sg_list: sges.as_mut_ptr(),
            num_sge: count as c_int,
        };
        let mut bad = null_mut();
        // SAFETY: the target is a queue of this device; the request and its buffers live through
        // the call.
        let result = unsafe {
            match (self.target, calls.post_srq_recv) {
                (Target::Shared(srq), Some(post)) => {
                    post(srq.as_ptr(), &raw mut request, &raw mut bad)
                }
                (Target::Shared(_), None) => return false,
                (Target::Own(qp), _) => {
                    (calls.post_recv)(qp.as_ptr(), &raw mut request, &raw mut bad)
                }
            }
        };
        if result != 0 {
            return false;
        }
        self.posted = self.posted.wrapping_add(1);
        if is_linked {
            self.head = NextSegment::parse(&segment(0)).next_wqe_index & mask;
        }
        true
    }
}
