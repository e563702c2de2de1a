//! A client on a device.

use std::time::Duration;

use mlx5::{
    Access, AsyncEvent, Cq, Device, DeviceSpec, Inline, Mr, PostError, RcQp, Signal, Write,
};

use super::exchange::{Accept, Admission, Offer};
use super::port::{Port, Target, is_fatal, post_write};
use super::{COMPLETION_BATCH, DOORBELL_BATCH, PROBE_NS, RdmaOptions, SetupError, is_full};
use crate::protocol::{
    CallFailure, CallToken, Client, ClientMemory, ClientOp, ClientRegions, ClientStats,
    CloseReason, Completion, Layout, State,
};

/// The user word of every operation: a completion only frees room in the send queue.
const WRITE: u64 = 0;

/// A client that has not been admitted.
#[derive(Debug)]
pub struct PendingClient {
    qp: RcQp,
    memory: ClientMemory<Mr>,
    port: Port<Cq>,
    layout: Layout,
    /// Number of receives; 0 unless the client sleeps.
    receives: u32,
}

impl PendingClient {
    /// Opens the device, registers the client's memory, and connects to the offered queue pair.
    ///
    /// # Errors
    /// [`SetupError`].
    pub fn new(device: &DeviceSpec, offer: &Offer) -> Result<Self, SetupError> {
        Self::on(&Device::open(device)?, offer, &RdmaOptions::default())
    }

    /// Like [`new`](Self::new), with options, and on an open device, which many clients may share.
    ///
    /// # Errors
    /// [`SetupError`].
    pub fn on(device: &Device, offer: &Offer, options: &RdmaOptions) -> Result<Self, SetupError> {
        let layout = offer.layout;
        // Responses for all slots and three events can be under way, and as many earlier receives
        // can await the poll of their completions (S23 of docs/scalerpc.md).
        let receives = if options.sleeps {
            2 * (layout.depth as u32 + 3)
        } else {
            0
        };
        let port = Port::on(
            device,
            device.create_cq(
                options
                    .send_queue_size
                    .saturating_mul(2)
                    .saturating_add(receives),
            )?,
            options,
        )?;
        let memory = ClientMemory {
            requests: port.alloc(layout.requests_bytes(), Access::REMOTE_READ)?,
            responses: port.alloc(
                layout.client_responses_bytes(),
                Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            )?,
        };
        let mut qp = port.create_qp(receives)?;
        port.connect(&mut qp, &offer.address)?;
        post_receives(&mut qp, receives)?;
        Ok(Self {
            qp,
            memory,
            port,
            layout,
            receives,
        })
    }

    /// Returns the record for the server.
    #[must_use]
    pub fn record(&self) -> Accept {
        let ClientMemory {
            requests,
            responses,
        } = &self.memory;
        let regions = ClientRegions {
            requests_addr: requests.addr(),
            requests_rkey: requests.rkey(),
            responses_addr: responses.addr(),
            responses_rkey: responses.rkey(),
        };
        Accept {
            address: self.qp.address(),
            regions,
            sleeps: self.receives > 0,
        }
    }

    /// Makes the client, after the server has admitted it.
    #[must_use]
    pub fn admitted(self, admission: &Admission) -> RdmaClient {
        let regions = self.record().regions;
        let Self {
            qp,
            memory,
            port,
            layout,
            ..
        } = self;
        let core = Client::new(
            layout,
            memory,
            admission.0,
            regions.responses_addr,
            regions.responses_rkey,
        );
        let ops = Vec::with_capacity(2 * layout.depth + 1);
        let probe_at = (admission.0.entry_addr, admission.0.entry_rkey);
        RdmaClient {
            qp,
            core,
            port,
            ops,
            probe_at,
            probe_ns: 0,
        }
    }
}

/// A client on a device, for one thread.
#[derive(Debug)]
#[doc(alias("RpcClient", "DoorbellBatcher"))]
pub struct RdmaClient {
    /// Declared before the memory it uses, so dropped first.
    qp: RcQp,
    core: Client<Mr>,
    port: Port<Cq>,
    ops: Vec<ClientOp>,
    /// Address and key of the probe, a WRITE of no bytes, and the time of the next probe.
    probe_at: (u64, u32),
    probe_ns: u64,
}

impl RdmaClient {
    /// Makes a call; see [`Client::call`]. The call is sent with the next [`poll`](Self::poll),
    /// together with others.
    ///
    /// # Errors
    /// [`CallFailure`]; nothing was done.
    #[inline]
    pub fn call(&mut self, rpc_type: u16, payload: &[u8]) -> Result<CallToken, CallFailure> {
        self.core
            .call(rpc_type, payload, self.port.now_ns(), &mut self.ops)
    }

    /// Does one bounded step: takes completions and arrivals, and posts operations.
    pub fn poll(&mut self) {
        let is_broken = self.port.cq.progress() && !self.take_completions();
        let now_ns = self.port.now_ns();
        self.core.poll(now_ns, &mut self.ops);
        if is_broken
            || !self.ops.is_empty() && self.post().is_err()
            || now_ns >= self.probe_ns && self.probe(now_ns).is_err()
        {
            self.core.close(CloseReason::Disconnected);
        }
    }

    /// Takes completions. A completion of a WRITE only frees room in the send queue; for each
    /// completion of a receive another receive is posted. Returns whether the connection is still
    /// open.
    #[inline(never)]
    fn take_completions(&mut self) -> bool {
        let Self { port, qp, .. } = self;
        let (mut is_broken, mut received) = (false, 0);
        port.cq.poll(COMPLETION_BATCH, |cqe| {
            is_broken |= cqe.result().is_err();
            if is_broken {
                return;
            }
            if qp.complete_receive(&cqe).is_some() {
                received += 1;
                return;
            }
            let _made_room = qp.complete(&cqe);
        });
        // Receives are posted before the core's poll, whose operations can bring more responses.
        !is_broken && (received == 0 || post_receives(qp, received).is_ok())
    }

    /// Sleeps until a [`poll`](Self::poll) may find something: a response, an event, a call to
    /// send, or the end of a call's time. Sleeps at most `limit`. A call of the
    /// [waker](mlx5::Device::waker) of the client's [`device`](Self::device) also ends the sleep.
    /// Returns `false` if the time ended. No wake-up is missed: an arrival since the last poll ends
    /// the sleep at once. While a slot waits for the server, even if only for the late response to
    /// a call whose time ended, the sleep ends once a second, to check that the server lives (S20).
    ///
    /// This function is for clients with [`RdmaOptions::sleeps`] that have a device of their own.
    /// Other clients are woken by their own operations only.
    pub fn wait(&mut self, limit: Option<Duration>) -> bool {
        let is_closed = matches!(self.core.state(), State::Closed(_));
        if !is_closed && (!self.ops.is_empty() || self.core.has_news()) {
            return true;
        }
        if self.port.cq.progress() {
            return true;
        }
        // The queue is armed after a poll that found nothing, and before the sleep (S24).
        self.port.cq.arm(false);
        let probe_ns = self.core.awaits_server().then_some(self.probe_ns);
        let due_ns = [self.core.next_event_ns(), probe_ns]
            .into_iter()
            .flatten()
            .min()
            .filter(|_| !is_closed);
        let left =
            due_ns.map(|due_ns| Duration::from_nanos(due_ns.saturating_sub(self.port.now_ns())));
        self.port
            .device()
            .wait([limit, left].into_iter().flatten().min())
    }

    /// Handles an asynchronous event of the [`device`](Self::device); no completion reports such an
    /// event. Ends the connection if the device or the completion queue broke down, or the queue pair
    /// went to the error state. The owner of the device takes its events ([`Device::take_async_event`]) from time to time, and gives
    /// each event to every client on the device. Returns whether the device or the completion queue
    /// broke down.
    pub fn heed(&mut self, event: AsyncEvent) -> bool {
        let is_fatal = is_fatal(event, self.port.cq.cqn());
        if is_fatal || event.failed_qp() == Some(self.qp.qpn()) {
            self.core.close(CloseReason::Device);
        }
        is_fatal
    }

    /// Takes the next call that has ended; see [`Client::poll_completion`].
    #[inline]
    pub fn poll_completion(&mut self, into: &mut [u8]) -> Option<Completion> {
        self.core.poll_completion(into)
    }

    /// Gives a call under way a deadline, in ns from now.
    pub(crate) fn end_within(&mut self, call: CallToken, left_ns: u64) {
        self.core
            .end_at(call, self.port.now_ns().saturating_add(left_ns));
    }

    /// Lets the server take the zone back until the next [`poll`](Self::poll), if no call is under
    /// way. It is for a client that polls only in its calls (S26).
    pub fn rest(&mut self) {
        while !self.core.rest() {
            self.poll();
        }
    }

    /// Returns the client's state.
    #[must_use]
    pub const fn state(&self) -> State {
        self.core.state()
    }

    /// Returns the maximum number of bytes of a request, and of a response.
    #[must_use]
    pub const fn max_payload(&self) -> usize {
        self.core.layout().max_payload()
    }

    /// Returns the number of calls that can be made now.
    #[must_use]
    pub fn free_slots(&self) -> usize {
        self.core.free_slots()
    }

    /// Returns the number of calls whose time ended and that the server has not answered. Each call
    /// keeps its slot until it is answered. If the result is the number of slots, such calls are
    /// the only reason for [`CallFailure::Full`].
    #[must_use]
    pub const fn given_up_calls(&self) -> usize {
        self.core.given_up_calls()
    }

    /// Returns counters since the client was made.
    #[must_use]
    pub const fn stats(&self) -> &ClientStats {
        self.core.stats()
    }

    /// Returns the core.
    #[doc(hidden)]
    #[must_use]
    pub const fn core(&self) -> &Client<Mr> {
        &self.core
    }

    /// Sets the timeout of later calls, in ns.
    pub const fn set_timeout_ns(&mut self, timeout_ns: u64) {
        self.core.set_timeout_ns(timeout_ns);
    }

    /// Returns the device in use. Deadlines are measured by its clock, so a simulation drives this
    /// end with its time.
    #[must_use]
    pub const fn device(&self) -> &Device {
        self.port.device()
    }

    /// Probes the server: a client whose slots all wait for the server posts nothing, and would not
    /// detect the end of its server.
    #[cold]
    fn probe(&mut self, now_ns: u64) -> Result<(), PostError> {
        self.probe_ns = now_ns.saturating_add(PROBE_NS);
        if !self.core.awaits_server() {
            return Ok(());
        }
        let (addr, rkey) = self.probe_at;
        match self.qp.post(
            &Write {
                addr,
                rkey,
                payload: (),
            },
            Signal::Always,
            WRITE,
        ) {
            Ok(()) => self.qp.ring(),
            // The operations under way show the end of the connection as well.
            Err(error) if is_full(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Posts the operations of the core, as many as there is room for.
    #[inline(never)]
    fn post(&mut self) -> Result<(), PostError> {
        let Self { qp, core, ops, .. } = self;
        let mut posted = 0;
        while posted < ops.len() {
            match post_op(qp, core.memory(), &ops[posted]) {
                Ok(()) => {}
                Err(error) if is_full(&error) => break,
                Err(error) => return Err(error),
            }
            posted += 1;
            if posted % DOORBELL_BATCH == 0 {
                qp.ring();
            }
        }
        qp.ring();
        if posted == ops.len() {
            ops.clear();
        } else {
            ops.drain(..posted);
        }
        Ok(())
    }
}

/// Posts `count` receives for WRITEs with immediate.
fn post_receives(qp: &mut RcQp, count: u32) -> Result<(), SetupError> {
    (0..count).try_for_each(|_| qp.post_receive(&[], 0))?;
    qp.ring_receives();
    Ok(())
}

#[inline(always)]
fn post_op(qp: &mut RcQp, memory: &ClientMemory<Mr>, op: &ClientOp) -> Result<(), PostError> {
    match *op {
        ClientOp::WriteRequest {
            addr,
            rkey,
            from,
            len,
        } => post_write(
            qp,
            &memory.requests,
            from,
            len,
            Target {
                addr,
                rkey,
                wakes: false,
            },
            Signal::Reclaim,
            WRITE,
        ),
        ClientOp::WriteEntry {
            addr,
            rkey,
            ref bytes,
            len,
        } => qp.post(
            &Write {
                addr,
                rkey,
                payload: Inline(&bytes[..usize::from(len)]),
            },
            Signal::Reclaim,
            WRITE,
        ),
    }
}
