//! The part of a device that both ends need: device, protection domain, completion queue.

use core::borrow::Borrow;

use mlx5::{
    Access, AsyncEvent, Cq, Device, Inline, Mr, Payload, Pd, PostError, QpAddress, QpConfig, RcQp,
    ReceiveSource, Signal, Write, WriteImm,
};

use super::{MAX_INLINE_BYTES, RdmaOptions, SetupError};

/// A device with its protection domain and completion queue, declared so that queues are dropped
/// before the domain, and the domain before the device.
#[derive(Debug)]
pub(super) struct Port<C> {
    /// The completions: a [`Cq`](mlx5::Cq) where there is one queue pair, a
    /// [`MonoCq`](mlx5::MonoCq) where there are many.
    pub(super) cq: C,
    pd: Pd,
    device: Device,
    options: RdmaOptions,
}

impl<C: Borrow<Cq>> Port<C> {
    pub(super) fn on(device: &Device, cq: C, options: &RdmaOptions) -> Result<Self, SetupError> {
        Ok(Self {
            cq,
            pd: device.alloc_pd()?,
            device: device.clone(),
            options: options.clone(),
        })
    }

    pub(super) const fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the device's time, in ns, so that virtual time governs the end as well.
    pub(super) fn now_ns(&self) -> u64 {
        self.device.now_ns()
    }

    pub(super) fn alloc(&self, bytes: usize, access: Access) -> Result<Mr, SetupError> {
        Ok(self.pd.alloc(bytes, access)?)
    }

    pub(super) fn alloc_huge(&self, bytes: usize, access: Access) -> Result<Mr, SetupError> {
        Ok(self.pd.alloc_huge(bytes, access)?)
    }

    /// Makes a queue pair with `receives` receives, which carry no payload.
    pub(super) fn create_qp(&self, receives: u32) -> Result<RcQp, SetupError> {
        let config = QpConfig {
            max_send_wr: self.options.send_queue_size,
            max_inline_data: MAX_INLINE_BYTES,
            scatter_to_cqe: false,
            lane_slots: 16,
        };
        Ok(self.pd.create_qp(
            self.cq.borrow(),
            self.cq.borrow(),
            ReceiveSource::Own {
                depth: receives.max(1),
                max_sge: 0,
            },
            &config,
        )?)
    }

    pub(super) fn connect(&self, qp: &mut RcQp, to: &QpAddress) -> Result<(), SetupError> {
        Ok(qp.connect(to, &self.options.connect)?)
    }
}

/// Returns whether an event reports that the device, or its completion queue `cqn`, broke down.
pub(super) fn is_fatal(event: AsyncEvent, cqn: u32) -> bool {
    event == AsyncEvent::DeviceFatal || event == AsyncEvent::CqError { cqn }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub(super) addr: u64,
    pub(super) rkey: u32,
    /// Whether the peer sleeps, so that the WRITE wakes it.
    pub(super) wakes: bool,
}

#[inline(always)]
pub(super) fn post_to<P: Payload>(
    qp: &mut RcQp,
    to: Target,
    payload: P,
    signal: Signal,
    user: u64,
) -> Result<(), PostError> {
    let Target { addr, rkey, wakes } = to;
    if wakes {
        return qp.post(
            &WriteImm {
                addr,
                rkey,
                imm: 0,
                payload,
            },
            signal,
            user,
        );
    }
    qp.post(
        &Write {
            addr,
            rkey,
            payload,
        },
        signal,
        user,
    )
}

/// Posts a WRITE of `len` bytes from byte `from` of a region that no device writes. At most
/// [`MAX_INLINE_BYTES`] bytes are carried in the WQE.
#[inline(always)]
pub(super) fn post_write(
    qp: &mut RcQp,
    region: &Mr,
    from: usize,
    len: u32,
    to: Target,
    signal: Signal,
    user: u64,
) -> Result<(), PostError> {
    if len as usize > MAX_INLINE_BYTES {
        let payload = mlx5::Sge {
            addr: region.addr() + from as u64,
            len,
            lkey: region.lkey(),
        };
        return post_to(qp, to, payload, signal, user);
    }
    // The core writes no range outside of the region; such a WRITE would have no bytes.
    let bytes = region.sge(from, len).map_or(&[][..], |part| {
        // SAFETY: the bytes are inside the region. No device writes the bytes, and this thread,
        // which owns them, writes them only after this use.
        unsafe { std::slice::from_raw_parts(region.as_ptr().as_ptr().add(from), part.len as usize) }
    });
    post_to(qp, to, Inline(bytes), signal, user)
}
