//! Asynchronous events, which `ibv_get_async_event` reads.

use mlx5_hca::AsyncEvent;

use crate::abi::verbs::AsyncEventDesc;
use crate::objects::Objects;
use crate::options::log;
use crate::options::settings::Change;

/// Events of the device (`enum ib_event_type`), with the same numbers in libibverbs.
mod number {
    pub(crate) const CQ_ERR: u32 = 0;
    pub(crate) const QP_FATAL: u32 = 1;
    pub(crate) const DEVICE_FATAL: u32 = 8;
    pub(crate) const PORT_ACTIVE: u32 = 9;
    pub(crate) const PORT_ERR: u32 = 10;
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
                Change::Fatal => self.hca.break_down(),
            }
        }
        let mut any = false;
        while let Some(event) = self.hca.take_async_event() {
            any = true;
            self.send_async(event);
        }
        any
    }

    fn send_async(&mut self, event: AsyncEvent) {
        let of_cq = |cqn| {
            self.cqs
                .iter()
                .find(|cq| cq.cqn == cqn)
                .map(|cq| cq.user_handle)
        };
        let of_qp = |qpn| {
            self.qps
                .iter()
                .find(|qp| qp.qpn == qpn)
                .map(|qp| qp.user_handle)
        };
        let (element, event_type) = match event {
            AsyncEvent::CqError { cqn } => (of_cq(cqn), number::CQ_ERR),
            AsyncEvent::QpFatal { qpn } => (of_qp(qpn), number::QP_FATAL),
            AsyncEvent::DeviceFatal => (Some(0), number::DEVICE_FATAL),
            AsyncEvent::PortActive { port } => (Some(port.into()), number::PORT_ACTIVE),
            AsyncEvent::PortError { port } => (Some(port.into()), number::PORT_ERR),
            _ => return,
        };
        let Some(element) = element else { return };
        let sent = self.async_events.send(&AsyncEventDesc {
            element,
            event_type,
            reserved: 0,
        });
        let lost = sent
            .err()
            .map(|errno| format!("; it is lost: {errno}"))
            .unwrap_or_default();
        log::error(self.settings, format_args!("{event}{lost}"));
    }
}
