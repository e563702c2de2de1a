//! The control path: creates and destroys the objects that the data path then uses without calling
//! the provider.

pub(crate) mod null;
pub(crate) mod parts;
pub(crate) mod private;
pub(crate) mod soft;

use core::ptr::NonNull;
use std::task::Waker;

use copyrpc_shm::sleep::{Due, POLL_SLICE, Watch};
use mlx5_hca::{CqMemory, DeviceInfo, Region, RqMemory};

use crate::address::{DeviceKind, QpAddress};
use crate::config::{CqConfig, RqSize};
use crate::error::{ConnectError, CreateError, RegisterError};
use crate::provider::parts::{QpParts, QpRequest};
use crate::wire::{Access, AddressVector, AsyncEvent, ConnectOptions, CqArm};

/// The functions of a device that create regions, connect queue pairs and report events. Regions
/// and queue pairs are identified by their numbers.
pub(crate) trait Provider: Regions + Connections {
    fn kind(&self) -> DeviceKind;

    fn info(&self) -> DeviceInfo;

    /// Sleeps until an armed CQ has an event, the waker was used, or `timeout_ns` have passed.
    /// Returns whether there is an event.
    fn wait(&self, timeout_ns: Option<u64>) -> bool;

    fn waker(&self) -> Waker;

    /// Calls `then` with a watch that ends a sleep on the device. `then` may sleep on this watch
    /// and on others at once.
    fn with_watch(&self, then: &mut dyn FnMut(&mut dyn Watch)) {
        then(&mut Due(POLL_SLICE));
    }

    fn take_async_event(&self) -> Option<AsyncEvent>;

    /// Returns the number of events of this CQ that were taken, modulo 4. The next command to arm
    /// the CQ must carry this number.
    fn events_taken(&self, _cqn: u32) -> u8 {
        0
    }

    /// Returns the kind of the addresses of the device's queue pairs.
    fn address_kind(&self) -> DeviceKind {
        self.kind()
    }

    /// Fails if `remote` is the address of a queue pair on another kind of device.
    fn check_kind(&self, remote: &QpAddress) -> Result<(), ConnectError> {
        let (local, remote) = (self.address_kind(), remote.kind);
        if local == remote {
            Ok(())
        } else {
            Err(ConnectError::DifferentKinds { local, remote })
        }
    }
}

pub(crate) trait Regions {
    fn alloc_registered(
        &self,
        pd: u32,
        bytes: usize,
        access: Access,
        huge: bool,
    ) -> Result<Region, RegisterError>;

    /// # Safety
    /// The range stays mapped until [`try_deregister`](Self::try_deregister) returned `true`.
    unsafe fn register(
        &self,
        pd: u32,
        addr: NonNull<u8>,
        bytes: usize,
        access: Access,
    ) -> Result<Region, RegisterError>;

    /// Deregisters the region. Returns `false` if a peer is using the region: its memory must then
    /// stay as it is, and the call may be repeated.
    fn try_deregister(&self, key: u32) -> bool;

    /// Deregisters the region; the caller does not retry. Memory that a peer is still using is
    /// never reused.
    fn deregister(&self, key: u32);
}

pub(crate) trait Queues {
    fn alloc_pd(&self) -> Result<u32, CreateError>;

    /// Frees the domain. The caller has destroyed all objects of the domain.
    fn dealloc_pd(&self, pdn: u32);

    fn create_cq(&self, config: &CqConfig) -> Result<(u32, CqMemory), CreateError>;

    fn destroy_cq(&self, cqn: u32);

    /// Informs the device that the record of the CQ holds a new command to arm the CQ. Does nothing
    /// on a device that finds the command by itself. `holds(false)` returns whether the CQ already
    /// holds a CQE; `holds(true)`, whether it may hold a solicited CQE or an error. No device gives
    /// an event for such a CQE, so the next wait then ends at once.
    fn armed(&self, _cqn: u32, _command: &CqArm, _holds: &dyn Fn(bool) -> bool) {}

    fn create_srq(&self, pd: u32, size: RqSize) -> Result<(u32, RqMemory), CreateError>;

    fn destroy_srq(&self, srqn: u32);

    fn create_qp(&self, request: &QpRequest<'_>) -> Result<QpParts, CreateError>;

    fn destroy_qp(&self, qpn: u32);
}

/// Addresses and transitions of queue pairs. The caller has checked that every address it passes is
/// of the device's own kind.
pub(crate) trait Connections {
    fn address(&self, qpn: u32) -> QpAddress;

    /// Moves a reliable connection from RESET to INIT.
    fn initialize(&self, _qpn: u32) -> Result<(), ConnectError> {
        Ok(())
    }

    /// Moves a reliable connection from INIT to RTR.
    fn connect(
        &self,
        qpn: u32,
        remote: &QpAddress,
        options: &ConnectOptions,
    ) -> Result<(), ConnectError>;

    /// Moves a reliable connection from RTR to RTS, with the options that
    /// [`connect`](Self::connect) was given.
    fn ready_to_send(&self, _qpn: u32) -> Result<(), ConnectError> {
        Ok(())
    }

    /// Moves a datagram queue pair from RESET to RTS.
    fn activate_datagrams(&self, qpn: u32, qkey: u32) -> Result<(), ConnectError>;

    fn fail_qp(&self, qpn: u32);

    /// Returns the path of datagrams to the port of `remote`.
    fn address_vector(&self, pd: u32, remote: &QpAddress) -> Result<AddressVector, ConnectError>;
}
