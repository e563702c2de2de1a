//! Asynchronous events, and their causes.

use mlx5_wire::{AsyncEvent, Syndrome};

use crate::queues::cq::Overrun;
use crate::queues::qp::{Mode, SoftQp};
use crate::types::terms::Difference;
use crate::{Hca, Queues};

/// Number of the device's only port.
const PORT: u8 = 1;

impl Hca {
    pub(crate) fn report(&self, event: AsyncEvent) {
        self.events.borrow_mut().push_back(event);
    }

    /// Queues the report of a difference between the terms of two queue pairs, unless
    /// `has_reported`. Sets `has_reported`.
    #[cold]
    pub(crate) fn report_difference(&self, has_reported: &mut bool, difference: Difference) {
        if !core::mem::replace(has_reported, true) {
            self.differences.borrow_mut().push_back(difference);
        }
    }

    /// Takes the oldest asynchronous event. The events of an object are removed when it is
    /// destroyed.
    #[must_use]
    pub fn take_async_event(&self) -> Option<AsyncEvent> {
        self.events.borrow_mut().pop_front()
    }

    pub(crate) fn forget_events(&self, of: impl Fn(AsyncEvent) -> bool) {
        self.events.borrow_mut().retain(|event| !of(*event));
    }

    /// Takes the port down or up, and reports it. While it is down, no peer answers this device:
    /// its connections retry until their retries are used up, and its datagrams are lost. Messages
    /// from peers whose ports are up still arrive.
    pub fn set_port_up(&self, is_up: bool) {
        if self.is_port_up.replace(is_up) == is_up {
            return;
        }
        self.state
            .borrow_mut()
            .queues
            .qps
            .iter_mut()
            .flatten()
            .for_each(|qp| qp.mode = qp.mode.max(Mode::Exceptional));
        self.report(if is_up {
            AsyncEvent::PortActive { port: PORT }
        } else {
            AsyncEvent::PortError { port: PORT }
        });
    }

    /// Returns whether the port is up: the value that [`set_port_up`](Self::set_port_up) last set,
    /// or `true` initially.
    #[must_use]
    pub fn is_port_up(&self) -> bool {
        self.is_port_up.get()
    }

    /// Moves the device and its queue pairs to the error state, and reports a fatal error. As on
    /// hardware, no completion follows.
    pub fn break_down(&self) {
        let Queues { qps, cqs, .. } = &mut self.state.borrow_mut().queues;
        cqs.iter_mut().flatten().for_each(|cq| cq.end());
        qps.iter_mut().flatten().for_each(|qp| qp.fail(self));
        self.report(AsyncEvent::DeviceFatal);
    }
}

impl SoftQp {
    /// Goes to the error state for a reason that no completion reports.
    #[cold]
    pub(crate) fn break_down(&mut self, hca: &Hca) {
        self.end_by(hca, AsyncEvent::QpFatal { qpn: self.qpn });
    }

    /// Goes to the error state after it has refused a request of the peer with this syndrome.
    #[cold]
    pub(crate) fn refused(&mut self, hca: &Hca, syndrome: u8) {
        let qpn = self.qpn;
        let is_access = syndrome == Syndrome::RemoteAccess as u8;
        self.end_by(
            hca,
            if is_access {
                AsyncEvent::QpAccessError { qpn }
            } else {
                AsyncEvent::QpRequestError { qpn }
            },
        );
    }

    fn end_by(&mut self, hca: &Hca, event: AsyncEvent) {
        if !self.has_failed() {
            hca.report(event);
        }
        self.fail(hca);
    }

    /// Handles the result of writing a CQE of a send. The queue pair fails if there was no room.
    #[inline(always)]
    pub(crate) fn wrote_send(&mut self, hca: &Hca, written: Result<(), Overrun>) {
        if let Err(overrun) = written {
            self.overran(hca, self.send_cq, overrun);
        }
    }

    /// Handles the result of writing a CQE of a receive. The queue pair fails if there was no room.
    #[inline(always)]
    pub(crate) fn wrote_receive(&mut self, hca: &Hca, written: Result<(), Overrun>) {
        if let Err(overrun) = written {
            self.overran(hca, self.recv_cq, overrun);
        }
    }

    /// Goes to the error state, because `cqn` had no room for a CQE of this queue pair.
    #[cold]
    pub(crate) fn overran(&mut self, hca: &Hca, cqn: u32, overrun: Overrun) {
        if overrun.is_first {
            hca.report(AsyncEvent::CqError { cqn });
        }
        self.break_down(hca);
    }
}
