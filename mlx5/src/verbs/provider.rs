//! The control path of a device behind libibverbs.

use core::ptr::NonNull;
use std::task::Waker;

use super::context::Context;
use crate::address::{DeviceKind, QpAddress};
use crate::config::{CqConfig, DeviceInfo};
use crate::error::{ConnectError, CreateError, RegisterError};
use crate::provider::Provider;
use crate::provider::parts::{ConnectParts, CqParts, MrParts, QpParts, QpRequest, SrqParts};
use crate::wire::{Access, AddressVector, AsyncEvent, CqArm};

impl Provider for Context {
    fn kind(&self) -> DeviceKind {
        DeviceKind::Hardware
    }

    fn info(&self) -> DeviceInfo {
        self.info()
    }

    fn wait(&self, timeout_ns: Option<u64>) -> bool {
        self.wait(timeout_ns)
    }

    fn waker(&self) -> Waker {
        self.alarm.waker()
    }

    fn take_async_event(&self) -> Option<AsyncEvent> {
        self.take_async_event()
    }

    fn alloc_pd(&self) -> Result<u32, CreateError> {
        self.alloc_pd()
    }

    fn dealloc_pd(&self, pdn: u32) {
        self.dealloc_pd(pdn);
    }

    fn alloc_registered(&self, pd: u32, bytes: usize, access: Access, huge: bool) -> Result<MrParts, RegisterError> {
        self.alloc_registered(pd, bytes, access, huge)
    }

    unsafe fn register(&self, pd: u32, addr: NonNull<u8>, bytes: usize, access: Access) -> Result<MrParts, RegisterError> {
        self.register_foreign(pd, addr, bytes, access)
    }

    fn try_deregister(&self, key: u32) -> bool {
        self.try_deregister(key)
    }

    fn deregister(&self, key: u32) {
        self.deregister(key);
    }

    fn create_cq(&self, config: &CqConfig) -> Result<CqParts, CreateError> {
        self.create_cq(config)
    }

    fn events_taken(&self, cqn: u32) -> u8 {
        self.events_taken(cqn)
    }

    fn armed(&self, cqn: u32, command: &CqArm) {
        self.armed(cqn, command);
    }

    fn holds_what_was_armed_for(&self) {
        self.is_due.set(true);
    }

    fn destroy_cq(&self, cqn: u32) {
        self.destroy_cq(cqn);
    }

    fn create_srq(&self, pd: u32, depth: u32, max_sge: usize) -> Result<SrqParts, CreateError> {
        self.create_srq(pd, depth, max_sge)
    }

    fn destroy_srq(&self, srqn: u32) {
        self.destroy_srq(srqn);
    }

    fn create_qp(&self, request: &QpRequest<'_>) -> Result<QpParts, CreateError> {
        self.create_qp(request)
    }

    fn address(&self, qpn: u32) -> QpAddress {
        self.address(qpn)
    }

    fn initialize(&self, qpn: u32) -> Result<(), ConnectError> {
        self.initialize(qpn)
    }

    fn connect(&self, parts: &ConnectParts) -> Result<(), ConnectError> {
        self.check_kind(&parts.remote)?;
        self.connect(parts)
    }

    fn ready_to_send(&self, qpn: u32) -> Result<(), ConnectError> {
        self.ready_to_send(qpn)
    }

    fn activate_datagrams(&self, qpn: u32, qkey: u32) -> Result<(), ConnectError> {
        self.activate_datagrams(qpn, qkey)
    }

    fn fail_qp(&self, qpn: u32) {
        self.fail_qp(qpn);
    }

    fn destroy_qp(&self, qpn: u32) {
        self.destroy_qp(qpn);
    }

    fn address_vector(&self, pd: u32, remote: &QpAddress) -> Result<AddressVector, ConnectError> {
        self.check_kind(remote)?;
        self.address_vector(pd, remote)
    }
}
