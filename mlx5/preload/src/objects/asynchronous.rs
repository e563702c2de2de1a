//! Asynchronous events, which `ibv_get_async_event` reads.

use std::fmt::Display;

use mlx5_hca::AsyncEvent;

use crate::abi::verbs::AsyncEventDesc;
use crate::files::fds;
use crate::objects::Objects;
use crate::options::log;
use crate::options::settings::Change;

/// Events of the device (`enum ib_event_type`), with the same numbers in libibverbs.
mod number {
    pub(crate) const CQ_ERR: u32 = 0;
    pub(crate) const QP_FATAL: u32 = 1;
    pub(crate) const QP_REQ_ERR: u32 = 2;
    pub(crate) const QP_ACCESS_ERR: u32 = 3;
    pub(crate) const DEVICE_FATAL: u32 = 8;
    pub(crate) const PORT_ACTIVE: u32 = 9;
    pub(crate) const PORT_ERR: u32 = 10;
    pub(crate) const SRQ_LIMIT_REACHED: u32 = 15;
    pub(crate) const QP_LAST_WQE_REACHED: u32 = 16;
}

impl Objects {
    /// Makes the changes that the settings request and that are due, and sends the events that the
    /// device reports. Returns whether the device reported an event.
    pub(crate) fn send_async_events(&mut self) -> bool {
        while let Some(&(at_ms, change)) = self.settings.changes.get(self.changes_made) {
            if self.opened.elapsed().as_millis() < at_ms.into() {
                break;
            }
            self.changes_made += 1;
            match change {
                Change::Port { is_up } => self.hca.set_port_up(is_up),
                Change::Fatal => {
                    self.hca.break_down();
                    let device = self.port.index;
                    fds::sessions().iter().for_each(|cm| cm.lose(device));
                }
            }
        }
        if self.settings.check_buffers {
            for violation in self.hca.take_violations() {
                log::error(self.settings, format_args!("{violation}"));
            }
        }
        while let Some(difference) = self.hca.take_difference() {
            log::error(self.settings, format_args!("{difference}"));
        }
        let mut any = false;
        for srq in self.srqs.iter().filter(|srq| srq.is_armed.get()) {
            if u32::from(self.hca.available_receives(srq.srqn)) < srq.limit {
                srq.is_armed.set(false);
                any = true;
                let what = format_args!(
                    "a shared receive queue has fewer than {} receives",
                    srq.limit
                );
                self.send_event(srq.user_handle, number::SRQ_LIMIT_REACHED, &what);
            }
        }
        while let Some(event) = self.hca.take_async_event() {
            any = true;
            self.send_async(event);
        }
        any
    }

    fn send_async(&mut self, event: AsyncEvent) {
        let of_cq = |cqn| Some(self.cqs.iter().find(|cq| cq.cqn == cqn)?.user_handle);
        let of_qp = |qpn| Some(self.qps.iter().find(|qp| qp.qpn == qpn)?.user_handle);
        let (element, event_type) = match event {
            AsyncEvent::CqError { cqn } => (of_cq(cqn), number::CQ_ERR),
            AsyncEvent::QpFatal { qpn } => (of_qp(qpn), number::QP_FATAL),
            AsyncEvent::QpRequestError { qpn } => (of_qp(qpn), number::QP_REQ_ERR),
            AsyncEvent::QpAccessError { qpn } => (of_qp(qpn), number::QP_ACCESS_ERR),
            AsyncEvent::QpLastReceive { qpn } => (of_qp(qpn), number::QP_LAST_WQE_REACHED),
            AsyncEvent::DeviceFatal => (Some(0), number::DEVICE_FATAL),
            AsyncEvent::PortActive { port } => (Some(port.into()), number::PORT_ACTIVE),
            AsyncEvent::PortError { port } => (Some(port.into()), number::PORT_ERR),
            _ => return,
        };
        if let Some(element) = element {
            self.send_event(element, event_type, &event);
        }
    }

    fn send_event(&self, element: u64, event_type: u32, what: &dyn Display) {
        let sent = self.async_events.send(&AsyncEventDesc {
            element,
            event_type,
            reserved: 0,
        });
        let lost = sent.map_or_else(|errno| format!("; it is lost: {errno}"), |()| String::new());
        // These events report no failure, and the second one follows each end of a queue pair.
        let log = match event_type {
            number::SRQ_LIMIT_REACHED => log::refused,
            number::QP_LAST_WQE_REACHED if lost.is_empty() => return,
            _ => log::error,
        };
        log(self.settings, format_args!("{what}{lost}"));
    }
}
