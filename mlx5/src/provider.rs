//! The control path: creating and destroying what the data path then drives without asking.

use core::ptr::NonNull;
use std::task::Waker;

use crate::address::{DeviceKind, QpAddress};
use crate::config::{CqConfig, DeviceInfo};
use crate::error::{ConnectError, CreateError, RegisterError};
use crate::parts::{ConnectParts, CqParts, MrParts, QpParts, QpRequest, SrqParts};
use crate::wire::{Access, AddressVector, AsyncEvent, CqArm};

/// Who makes a device's objects, and knows them by their numbers.
pub(crate) trait Provider {
    fn kind(&self) -> DeviceKind;

    fn info(&self) -> DeviceInfo;

    /// Sleeps until an armed CQ has an event, the waker was used, or `timeout_ns` have passed; whether there is an event.
    fn wait(&self, timeout_ns: Option<u64>) -> bool;

    /// Ends the wait under way, or the next one.
    fn waker(&self) -> Waker;

    /// The oldest asynchronous event that was not taken yet.
    fn take_async_event(&self) -> Option<AsyncEvent>;

    fn alloc_pd(&self) -> Result<u32, CreateError>;

    /// Nothing of the domain is left.
    fn dealloc_pd(&self, pdn: u32);

    fn alloc_registered(&self, pd: u32, bytes: usize, access: Access, huge: bool) -> Result<MrParts, RegisterError>;

    /// # Safety
    /// The range stays mapped until [`try_deregister`](Self::try_deregister) returned `true`.
    unsafe fn register(&self, pd: u32, addr: NonNull<u8>, bytes: usize, access: Access) -> Result<MrParts, RegisterError>;

    /// Deregisters, unless a peer is in the middle of using the region, which it says with `false`; then it may be called again.
    fn try_deregister(&self, key: u32) -> bool;

    /// Deregisters for good.
    fn deregister(&self, key: u32);

    fn create_cq(&self, config: &CqConfig) -> Result<CqParts, CreateError>;

    /// How many events of this CQ were taken, modulo 4: the next command to arm it must say so.
    fn events_taken(&self, _cqn: u32) -> u8 {
        0
    }

    /// The command to arm a CQ is in its record: tells the device, unless it looks there for itself.
    fn armed(&self, _cqn: u32, _command: &CqArm) {}

    /// An armed CQ holds a CQE that it was armed for: the next wait ends at once, also of a device that gives no event for it.
    fn holds_what_was_armed_for(&self) {}

    fn destroy_cq(&self, cqn: u32);

    fn create_srq(&self, pd: u32, depth: u32, max_sge: usize) -> Result<SrqParts, CreateError>;

    fn destroy_srq(&self, srqn: u32);

    fn create_qp(&self, request: &QpRequest<'_>) -> Result<QpParts, CreateError>;

    /// Where peers reach a queue pair.
    fn address(&self, qpn: u32) -> QpAddress;

    /// RESET to INIT, of a reliable connection.
    fn initialize(&self, _qpn: u32) -> Result<(), ConnectError> {
        Ok(())
    }

    /// INIT to RTR, of a reliable connection.
    fn connect(&self, parts: &ConnectParts) -> Result<(), ConnectError>;

    /// RTR to RTS, of a reliable connection, with what [`connect`](Self::connect) was given.
    fn ready_to_send(&self, _qpn: u32) -> Result<(), ConnectError> {
        Ok(())
    }

    /// RESET to RTS, of datagrams.
    fn activate_datagrams(&self, qpn: u32, qkey: u32) -> Result<(), ConnectError>;

    /// To the error state.
    fn fail_qp(&self, qpn: u32);

    fn destroy_qp(&self, qpn: u32);

    /// How datagrams get to the port of `remote`.
    fn address_vector(&self, pd: u32, remote: &QpAddress) -> Result<AddressVector, ConnectError>;

    /// Refuses the address of another kind of device.
    fn check_kind(&self, remote: &QpAddress) -> Result<(), ConnectError> {
        let (local, remote) = (self.kind(), remote.kind);
        if local == remote { Ok(()) } else { Err(ConnectError::DifferentKinds { local, remote }) }
    }
}
