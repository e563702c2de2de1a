//! An open device: its capabilities, the objects made from it, and its events.

use core::ffi::c_void;
use core::ptr::NonNull;
use core::sync::atomic::Ordering;
use std::cell::{Cell, OnceCell, RefCell};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use copyrpc_shm::sleep::{Alarm, Due, Notifier, POLL_SLICE, Watch, Word};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::VerbsOptions;
use super::abi::*;
use super::device::{List, Opened, Port};
use super::library::{Api, Verbs};
use super::numbers::*;
use super::tables::Objects;
use crate::address::DeviceKind;
use crate::error::verbs::{CallError, VerbsError};
use crate::provider::Provider;
use crate::wire::{
    AsyncEvent, CQ_DBREC_ARM, CQ_DBREC_SET_CI, ConnectOptions, CqArm, MAX_CQE, MAX_INLINE,
    MAX_RECV_SGE, MAX_RECV_WR, MAX_SEND_WR,
};
use mlx5_hca::{DeviceInfo, Engine};

/// An open device with one of its ports. Objects are identified by their numbers.
pub(crate) struct Context {
    pub(crate) port: Port,
    pub(crate) options: VerbsOptions,
    pub(crate) attr: ibv_device_attr,
    /// Whether this crate drives the device's queues itself: true for an mlx5 device, unless a
    /// relay was requested.
    pub(crate) is_direct: bool,
    /// The answer of `mlx5dv_query_device`; all zeros if `is_direct` is false.
    pub(crate) dv: mlx5dv_context,
    channel: NonNull<ibv_comp_channel>,
    pub(crate) objects: RefCell<Objects>,
    /// Whether a queue was armed while it already held a completion of the armed kind. The next
    /// wait then ends at once, because the event of this completion may have been taken already.
    pub(crate) is_due: Cell<bool>,
    pub(super) alarm: Arc<Alarm>,
    /// The thread that waits for events of completion queues, started by the first
    /// [`with_arrivals`](Self::with_arrivals); `None` if it could not be started.
    arrivals: OnceCell<Option<Notifier>>,
    /// Closed last: fields are dropped in this order.
    pub(crate) device: Opened,
}

/// The watch of a sleep on all completion queues of the device. `arm` takes earlier events and arms
/// the queues. The sleeper itself checks the queues after it has armed them, so
/// [`look`](Watch::look) checks nothing.
struct Armed<'a, F> {
    arm: F,
    arrivals: &'a Notifier,
}

impl<F: FnMut()> Watch for Armed<'_, F> {
    fn words(&mut self, show: &mut dyn FnMut(Word<'_>)) {
        show(self.arrivals.word());
    }

    fn arm(&mut self) {
        (self.arm)();
        self.arrivals.arm();
    }

    fn look(&mut self, _is_told: bool) -> bool {
        false
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the channel is alive, and no completion queue uses it any more: every object made
        // from this device keeps the device open.
        unsafe { (self.verbs().ibv_destroy_comp_channel)(self.channel.as_ptr()) };
    }
}

impl Context {
    pub(crate) fn open(options: &VerbsOptions) -> Result<Self, VerbsError> {
        options.check()?;
        let list = List::get(Api::get()?)?;
        let mut first_error = None;
        for found in list.candidates(options)? {
            let is_direct = found.is_mlx5() && !options.relay;
            match found
                .open()
                .and_then(|device| Self::new(device, options, is_direct))
            {
                Ok(context) => return Ok(context),
                Err(error) => drop(first_error.get_or_insert(error)),
            }
        }
        Err(first_error.unwrap_or_else(|| VerbsError::NoDevice {
            hint: "libibverbs lists none of libmlx5".to_owned(),
        }))
    }

    fn new(device: Opened, options: &VerbsOptions, is_direct: bool) -> Result<Self, VerbsError> {
        let port = device.choose_port(options)?;
        let attr = device.attributes()?;
        let dv = if is_direct {
            device.query_mlx5()?
        } else {
            mlx5dv_context::default()
        };
        // SAFETY: the device is open.
        let channel =
            NonNull::new(unsafe { (device.api.verbs.ibv_create_comp_channel)(device.context()) });
        let channel = channel.ok_or_else(|| CallError::last("ibv_create_comp_channel"))?;
        device.never_wait_for_async_events()?;
        let alarm = Arc::new(
            Alarm::with_descriptor()
                .map_err(|error| CallError::new("eventfd", error.raw_os_error().unwrap_or(0)))?,
        );
        Ok(Self {
            device,
            port,
            options: options.clone(),
            attr,
            is_direct,
            dv,
            channel,
            objects: RefCell::default(),
            is_due: Cell::default(),
            alarm,
            arrivals: OnceCell::new(),
        })
    }

    pub(super) fn verbs(&self) -> &'static Verbs {
        &self.device.api.verbs
    }

    pub(crate) fn channel(&self) -> *mut ibv_comp_channel {
        self.channel.as_ptr()
    }

    fn channel_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is alive, and its descriptor is open, as long as `self`.
        unsafe { BorrowedFd::borrow_raw(self.channel.as_ref().fd) }
    }

    /// Returns whether the device has atomics of any kind (`IBV_ATOMIC_NONE` is 0).
    pub(crate) fn has_atomics(&self) -> bool {
        self.attr.atomic_cap != 0
    }

    /// Returns the number of completion vectors; 1 on a relay, which polls all queues itself.
    pub(crate) fn comp_vectors(&self) -> u32 {
        if self.is_direct {
            self.device.comp_vectors()
        } else {
            1
        }
    }

    /// Calls `then` with a watch that ends the sleep at an event of the device, or after
    /// [`POLL_SLICE`] if the thread that waits for events could not be started. `arm` arms all
    /// queues.
    pub(super) fn with_arrivals(&self, arm: impl FnMut(), then: &mut dyn FnMut(&mut dyn Watch)) {
        match self
            .arrivals
            .get_or_init(|| Notifier::start("mlx5-events", self.channel_fd()).ok())
        {
            Some(arrivals) => then(&mut Armed { arm, arrivals }),
            None => then(&mut Due(POLL_SLICE)),
        }
    }

    pub(super) fn take_events(&self) {
        while self.has_event(Some(Duration::ZERO)) && self.take_event() {}
    }

    /// Takes all events, and arms every queue for any completion that its record does not show as
    /// consumed.
    fn arm_all(&self) {
        self.take_events();
        for (cqn, cq) in &self.objects.borrow().cqs {
            // SAFETY: both words belong to the queue's record, which lives as long as the queue,
            // and are accessed only as atomics.
            let [consumed, armed] =
                [CQ_DBREC_SET_CI, CQ_DBREC_ARM].map(|word| unsafe { cq.record.add(word).as_ref() });
            let consumed = u32::from_be(consumed.load(Ordering::Relaxed));
            let command = CqArm {
                sequence: cq.events,
                solicited_only: false,
                consumed,
            };
            armed.store(command.record(), Ordering::Release);
            cq.tell(*cqn, &command);
        }
    }

    /// Waits until the channel is readable, and returns whether it is. May return early, and does
    /// so when the alarm is rung.
    fn has_event(&self, left: Option<Duration>) -> bool {
        let channel = self.channel_fd();
        let mut polled = [channel, self.alarm.descriptor().unwrap_or(channel)]
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        poll(&mut polled, timeout.as_ref()).is_ok() && !polled[0].revents().is_empty()
    }

    /// Takes one event; the channel must be readable. Returns whether an event was taken.
    fn take_event(&self) -> bool {
        let (mut cq, mut context) = (
            core::ptr::null_mut::<ibv_cq>(),
            core::ptr::null_mut::<c_void>(),
        );
        let verbs = self.verbs();
        // SAFETY: the channel is alive, and both pointers are to local variables.
        if unsafe { (verbs.ibv_get_cq_event)(self.channel(), &raw mut cq, &raw mut context) } != 0 {
            return false;
        }
        // Every event of a queue must be acknowledged before the queue is destroyed; there is no
        // reason to do it later. SAFETY: `cq` is a queue of this device that still exists:
        // destroying a queue takes its events out of the channel.
        unsafe { (verbs.ibv_ack_cq_events)(cq, 1) };
        if let Some(object) = self
            .objects
            .borrow_mut()
            .cqs
            .values_mut()
            .find(|object| object.cq.as_ptr() == cq)
        {
            object.events = (object.events + 1) & 3;
        }
        true
    }
}

impl Provider for Context {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Hardware
    }

    fn info(&self) -> DeviceInfo {
        let at_most = |limit: u32, theirs: i32| limit.min(u32::try_from(theirs).unwrap_or(0));
        let firmware = self
            .attr
            .fw_ver
            .iter()
            .take_while(|&&c| c != 0)
            .map(|&c| char::from(c as u8))
            .collect::<String>();
        let at = |node| format!(", NUMA node {node}");
        let engine = if self.is_direct {
            Engine::Direct
        } else {
            Engine::Relay
        };
        DeviceInfo {
            name: format!("{}:{}", self.device.name, self.port.number),
            engine,
            transport: self.port.describe(),
            max_send_wr: at_most(MAX_SEND_WR, self.attr.max_qp_wr),
            max_recv_wr: at_most(MAX_RECV_WR, self.attr.max_qp_wr),
            // A device without shared receive queues reports a maximum of 0 buffers for them, which
            // does not limit the other receive queues.
            max_recv_sge: at_most(
                MAX_RECV_SGE,
                if self.attr.max_srq_wr > 0 {
                    self.attr.max_sge.min(self.attr.max_srq_sge)
                } else {
                    self.attr.max_sge
                },
            ),
            max_inline_data: MAX_INLINE as u32,
            max_cqe: at_most(MAX_CQE, self.attr.max_cqe),
            comp_vectors: self.comp_vectors(),
            max_srq_wr: at_most(MAX_RECV_WR, self.attr.max_srq_wr),
            has_atomics: self.has_atomics(),
            numa_node: self.device.numa_node,
            modes: format!(
                "{engine}, {}, firmware {firmware}, MTU {}{}",
                if self.is_direct {
                    self.device.api.library_file()
                } else {
                    "libibverbs".to_owned()
                },
                self.port.mtu,
                self.device.numa_node.map(at).unwrap_or_default()
            ),
            dead_peer_timeout_ns: ConnectOptions::default().transport_timeout_ns(),
            quarantined: 0,
            violations: 0,
            rnr_naks: None,
            packets: None,
        }
    }

    /// Takes all events. Does not sleep if `is_due` is set.
    fn wait(&self, timeout_ns: Option<u64>) -> bool {
        let end = timeout_ns.and_then(|ns| Instant::now().checked_add(Duration::from_nanos(ns)));
        loop {
            let is_due = self.is_due.take();
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if is_due || self.has_event(left) {
                self.take_events();
                return true;
            }
            if self.alarm.take() || left.is_some_and(|left| left.is_zero()) {
                return false;
            }
        }
    }

    fn with_watch(&self, then: &mut dyn FnMut(&mut dyn Watch)) {
        self.with_arrivals(|| self.arm_all(), then);
    }

    fn take_async_event(&self) -> Option<AsyncEvent> {
        let verbs = self.verbs();
        // SAFETY: the struct holds a number and a pointer, for which zero is a valid value.
        let mut event: ibv_async_event = unsafe { core::mem::zeroed() };
        // SAFETY: the device is open, and `event` has room for the answer.
        if unsafe { (verbs.ibv_get_async_event)(self.device.context(), &raw mut event) } != 0 {
            return None;
        }
        let ibv_async_event {
            element,
            event_type,
        } = &event;
        // SAFETY: the event type determines which field of the element is valid: a pointer to an
        // object of this device, whose destruction waits until the event is acknowledged, or a
        // number.
        let typed = unsafe {
            match *event_type {
                IBV_EVENT_CQ_ERR => self
                    .objects
                    .borrow()
                    .number_of(element.cq)
                    .map(|cqn| AsyncEvent::CqError { cqn }),
                IBV_EVENT_QP_FATAL => Some(AsyncEvent::QpFatal {
                    qpn: (*element.qp).qp_num,
                }),
                IBV_EVENT_QP_REQ_ERR => Some(AsyncEvent::QpRequestError {
                    qpn: (*element.qp).qp_num,
                }),
                IBV_EVENT_QP_ACCESS_ERR => Some(AsyncEvent::QpAccessError {
                    qpn: (*element.qp).qp_num,
                }),
                IBV_EVENT_QP_LAST_WQE_REACHED => Some(AsyncEvent::QpLastReceive {
                    qpn: (*element.qp).qp_num,
                }),
                IBV_EVENT_DEVICE_FATAL => Some(AsyncEvent::DeviceFatal),
                IBV_EVENT_PORT_ACTIVE => Some(AsyncEvent::PortActive {
                    port: element.port_num as u8,
                }),
                IBV_EVENT_PORT_ERR => Some(AsyncEvent::PortError {
                    port: element.port_num as u8,
                }),
                _ => None,
            }
        };
        // SAFETY: `event` is the event that was just read, and it is acknowledged once.
        unsafe { (verbs.ibv_ack_async_event)(&raw mut event) };
        Some(typed.unwrap_or(AsyncEvent::Other {
            event_type: event.event_type as u32,
        }))
    }

    fn events_taken(&self, cqn: u32) -> u8 {
        self.objects
            .borrow()
            .cqs
            .get(&cqn)
            .map_or(0, |cq| cq.events)
    }

    fn waker(&self) -> Waker {
        self.alarm.waker()
    }
}
