//! [`Endpoint`]: a reliable connection in one value, for programs that move bytes and need no control over queues.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use crate::address::QpAddress;
use crate::completions::cq::Cq;
use crate::completions::cqe::CompletionError;
use crate::config::{QpConfig, QpState};
use crate::device::{Device, Pd};
use mlx5_hca::check;

use crate::error::{ConnectError, CreateError, RegisterError};
use crate::mr::{Mr, OutOfBounds};
use crate::ops::{CompareSwap, FetchAdd, PostError, RcOperation, Read, Send, Write};
use crate::queues::qp::ReceiveSource;
use crate::queues::rc_qp::RcQp;
use crate::queues::rq::PostReceiveError;
use crate::queues::sq::Signal;
use crate::wire::{ATOMIC_BYTES, Access, ConnectOptions, Syndrome};

/// Sizes of an [`Endpoint`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointConfig {
    /// Number of the peer's messages that may wait here to be received, 1..=4096. Default 64.
    pub depth: u32,
    /// Maximum length of a message of [`send`](Endpoint::send), in bytes. Default 4096.
    pub message_bytes: u32,
    /// Memory that the peer reads and writes, in bytes. Default 64 KiB.
    pub memory_bytes: usize,
    /// Maximum time that a call may block. An operation that takes longer ends the connection.
    /// Default `None`: unlimited. The device may give up an operation earlier
    /// ([`ConnectOptions::transport_timeout_ns`]).
    pub timeout: Option<Duration>,
    /// Attributes of the connection.
    pub connection: ConnectOptions,
}

impl Default for EndpointConfig {
    fn default() -> Self {
        Self {
            depth: 64,
            message_bytes: 4096,
            memory_bytes: 1 << 16,
            timeout: None,
            connection: ConnectOptions::default(),
        }
    }
}

/// The address of an endpoint and of its memory, which the peer needs to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointAddress {
    qp: QpAddress,
    addr: u64,
    bytes: u64,
    rkey: u32,
}

impl EndpointAddress {
    /// Bytes of [`to_bytes`](Self::to_bytes).
    pub const LEN: usize = QpAddress::LEN + 20;

    /// Encodes the address, for any transport to the peer: the queue pair's address, then address,
    /// bytes and rkey of the memory, little-endian.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[..40].copy_from_slice(&self.qp.to_bytes());
        b[40..48].copy_from_slice(&self.addr.to_le_bytes());
        b[48..56].copy_from_slice(&self.bytes.to_le_bytes());
        b[56..].copy_from_slice(&self.rkey.to_le_bytes());
        b
    }

    /// Decodes the bytes of [`to_bytes`](Self::to_bytes). Returns `None` for bytes that it never
    /// makes.
    #[must_use]
    pub fn from_bytes(b: &[u8; Self::LEN]) -> Option<Self> {
        let (qp, rest) = b.split_first_chunk()?;
        let (addr, rest) = rest.split_first_chunk()?;
        let (bytes, rest) = rest.split_first_chunk()?;
        let (addr, bytes) = (u64::from_le_bytes(*addr), u64::from_le_bytes(*bytes));
        addr.checked_add(bytes)?;
        Some(Self {
            qp: QpAddress::from_bytes(qp)?,
            addr,
            bytes,
            rkey: u32::from_le_bytes(*rest.first_chunk()?),
        })
    }
}

/// The reason why a call of an endpoint failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// A size of [`EndpointConfig`] is outside its range, or a queue could not be created.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// Memory could not be registered.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The connection was not established.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The endpoint is not connected.
    #[error("the endpoint is not connected: call `connect` with the peer's address")]
    NotConnected,
    /// The message is longer than [`EndpointConfig::message_bytes`].
    #[error("a message of {bytes} bytes; this endpoint sends at most {max}: raise message_bytes")]
    TooLong {
        /// Bytes of the message.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// The range is outside the peer's memory.
    #[error("the peer's memory: {0}")]
    OutOfBounds(#[from] OutOfBounds),
    /// The operation failed, and the connection with it: create a new endpoint.
    #[error(transparent)]
    Failed(#[from] CompletionError),
    /// The connection had already failed.
    #[error("the connection has failed: {0}")]
    Broken(CompletionError),
    /// [`EndpointConfig::timeout`] has passed. A [`recv`](Endpoint::recv) has received no message
    /// and may be repeated. Any other operation may still take effect, and the connection has ended
    /// with it: create a new endpoint.
    #[error("nothing came within {0:?}")]
    TimedOut(Duration),
    /// A post was refused.
    #[error(transparent)]
    Post(#[from] PostError),
    /// A receive was refused.
    #[error(transparent)]
    PostReceive(#[from] PostReceiveError),
}

/// A reliable connection in one value: protection domain, completion queue, queue pair, receives,
/// buffers, and memory for the peer's READs, WRITEs and atomics. The two ends exchange their
/// [`address`](Self::address) by any means, and connect.
///
/// Calls block, so an endpoint serves one conversation and not throughput. To keep many operations
/// in flight, or to share queues, use the [queue pair](Self::qp) and the objects it is made from
/// ([`Pd`]).
///
/// ```
/// use mlx5::{Device, EndpointConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::open("soft")?; // or "mlx5_0"
/// let (mut a, mut b) = (device.endpoint(EndpointConfig::default())?, device.endpoint(EndpointConfig::default())?);
/// a.connect(&b.address())?;
/// b.connect(&a.address())?;
/// a.send(b"hello")?;
/// assert_eq!(b.recv()?, b"hello");
/// a.write(8, b"to your memory")?;
/// assert_eq!(a.fetch_add(0, 5)?, 0);
/// # Ok(())
/// # }
/// ```
///
/// It is not `Send`. A peer that goes away sends no notice: an operation towards it fails, and
/// [`recv`](Self::recv) blocks until its timeout.
pub struct Endpoint {
    qp: RcQp,
    cq: Cq,
    /// Result of the operation, once it has completed.
    ended: Option<Result<(), CompletionError>>,
    /// Messages that have arrived: the number of the receive, and the bytes.
    inbox: VecDeque<(u64, u32)>,
    broken: Option<CompletionError>,
    remote: Option<EndpointAddress>,
    /// Buffer of the operation: the bytes to send, or the bytes that were read.
    buffer: Mr,
    /// Receive buffers, by number of the receive.
    receives: Mr,
    memory: Mr,
    config: EndpointConfig,
    device: Device,
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint")
            .field("address", &self.address())
            .field("remote", &self.remote)
            .finish_non_exhaustive()
    }
}

impl Device {
    /// Creates an endpoint, which is not yet connected.
    ///
    /// # Errors
    /// A size is outside its range, or memory cannot be allocated.
    pub fn endpoint(&self, config: EndpointConfig) -> Result<Endpoint, EndpointError> {
        Endpoint::new(self, &self.alloc_pd()?, config)
    }
}

impl Endpoint {
    fn new(device: &Device, pd: &Pd, config: EndpointConfig) -> Result<Self, EndpointError> {
        let EndpointConfig {
            depth,
            message_bytes,
            memory_bytes,
            ..
        } = config;
        check("depth", depth.into(), 1, 4096)
            .and_then(|()| check("message_bytes", message_bytes.into(), 1, 1 << 20))
            .and_then(|()| check("memory_bytes", memory_bytes as u64, 1, isize::MAX as u64))
            .map_err(CreateError::from)?;
        let cq = device.create_cq(depth + 1)?;
        let own = ReceiveSource::Own { depth, max_sge: 1 };
        let qp = pd.create_qp(
            &cq,
            &cq,
            own,
            &QpConfig {
                max_send_wr: 1,
                ..QpConfig::default()
            },
        )?;
        let has_atomics = device.info().has_atomics;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        Ok(Self {
            qp,
            cq,
            ended: None,
            inbox: VecDeque::with_capacity(depth as usize),
            broken: None,
            remote: None,
            buffer: pd.alloc(
                message_bytes.max(ATOMIC_BYTES) as usize,
                Access::LOCAL_WRITE,
            )?,
            receives: pd.alloc(depth as usize * message_bytes as usize, Access::LOCAL_WRITE)?,
            memory: pd.alloc(
                memory_bytes,
                if has_atomics {
                    access | Access::REMOTE_ATOMIC
                } else {
                    access
                },
            )?,
            config,
            device: device.clone(),
        })
    }

    /// Returns the address that the peer needs to connect.
    #[must_use]
    pub fn address(&self) -> EndpointAddress {
        let Self { qp, memory, .. } = self;
        EndpointAddress {
            qp: qp.address(),
            addr: memory.addr(),
            bytes: memory.len() as u64,
            rkey: memory.rkey(),
        }
    }

    /// Connects to the endpoint with this address, which must connect to this one. A message sent
    /// before the peer has connected waits for it, up to the transport timeout.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect(&mut self, remote: &EndpointAddress) -> Result<(), EndpointError> {
        if self.qp.state() == QpState::Reset {
            self.qp.initialize()?;
            for number in 0..u64::from(self.config.depth) {
                self.post_receive(number)?;
            }
            self.qp.ring_receives();
        }
        self.qp
            .ready_to_receive(&remote.qp, &self.config.connection)?;
        self.qp.ready_to_send()?;
        self.remote = Some(*remote);
        Ok(())
    }

    /// Returns the memory that the peer READs and WRITEs.
    #[must_use]
    pub fn memory(&self) -> &Mr {
        &self.memory
    }

    /// Returns the queue pair. The endpoint polls its completion queue and takes every completion
    /// for its own: do not post to the queue pair.
    #[must_use]
    pub fn qp(&self) -> &RcQp {
        &self.qp
    }

    /// Sends a message. Returns once the peer's device has it. Blocks while the peer holds
    /// [`depth`](EndpointConfig::depth) messages that it has not received.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub fn send(&mut self, message: &[u8]) -> Result<(), EndpointError> {
        let max = self.config.message_bytes as usize;
        if message.len() > max {
            return Err(EndpointError::TooLong {
                bytes: message.len(),
                max,
            });
        }
        self.usable()?;
        self.buffer.write(0, message)?;
        let payload = self.buffer.sge(0, message.len() as u32)?;
        self.carry_out(&Send { payload })
    }

    /// Waits for the peer's next message.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub fn recv(&mut self) -> Result<Vec<u8>, EndpointError> {
        self.wait_until(|endpoint| !endpoint.inbox.is_empty())?;
        Ok(self.try_recv()?.unwrap_or_default())
    }

    /// Returns the peer's next message, if one has arrived.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub fn try_recv(&mut self) -> Result<Option<Vec<u8>>, EndpointError> {
        self.connected()?;
        self.poll();
        let Some((number, bytes)) = self.inbox.pop_front() else {
            return self
                .broken
                .map_or(Ok(None), |error| Err(EndpointError::Broken(error)));
        };
        let mut message = vec![0; bytes as usize];
        self.receives.read(
            number as usize * self.config.message_bytes as usize,
            &mut message,
        )?;
        // After a failure the queue pair takes no receive, but messages that have arrived are still
        // returned.
        if self.broken.is_none() {
            self.post_receive(number)?;
            self.qp.ring_receives();
        }
        Ok(Some(message))
    }

    /// Writes into the peer's memory from `offset` on. Returns once the peer's device has the
    /// bytes. The peer gets no notice.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), EndpointError> {
        let (mut addr, rkey) = self.range(offset, bytes.len())?;
        for piece in bytes.chunks(self.config.message_bytes as usize) {
            self.buffer.write(0, piece)?;
            let payload = self.buffer.sge(0, piece.len() as u32)?;
            self.carry_out(&Write {
                addr,
                rkey,
                payload,
            })?;
            addr += piece.len() as u64;
        }
        Ok(())
    }

    /// Reads the peer's memory from `offset` on. The peer gets no notice.
    ///
    /// # Errors
    /// See [`EndpointError`]; some of `bytes` may have been read.
    pub fn read(&mut self, offset: usize, bytes: &mut [u8]) -> Result<(), EndpointError> {
        let (mut addr, rkey) = self.range(offset, bytes.len())?;
        for piece in bytes.chunks_mut(self.config.message_bytes as usize) {
            let into = self.buffer.sge(0, piece.len() as u32)?;
            self.carry_out(&Read { addr, rkey, into })?;
            self.buffer.read(0, piece)?;
            addr += piece.len() as u64;
        }
        Ok(())
    }

    /// Adds to the number at `offset` of the peer's memory, a multiple of 8. Returns the previous
    /// value.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub fn fetch_add(&mut self, offset: usize, add: u64) -> Result<u64, EndpointError> {
        let (addr, rkey) = self.range(offset, ATOMIC_BYTES as usize)?;
        self.atomic(|into| FetchAdd {
            addr,
            rkey,
            add,
            into,
        })
    }

    /// Stores `swap` at `offset` of the peer's memory, a multiple of 8, if the value there is
    /// `compare`. Returns the previous value.
    ///
    /// # Errors
    /// See [`EndpointError`].
    pub fn compare_swap(
        &mut self,
        offset: usize,
        compare: u64,
        swap: u64,
    ) -> Result<u64, EndpointError> {
        let (addr, rkey) = self.range(offset, ATOMIC_BYTES as usize)?;
        self.atomic(|into| CompareSwap {
            addr,
            rkey,
            compare,
            swap,
            into,
        })
    }

    fn atomic<O: RcOperation>(
        &mut self,
        operation: impl FnOnce(crate::Sge) -> O,
    ) -> Result<u64, EndpointError> {
        let operation = operation(self.buffer.sge(0, ATOMIC_BYTES)?);
        self.carry_out(&operation)?;
        let mut old = [0; ATOMIC_BYTES as usize];
        self.buffer.read(0, &mut old)?;
        Ok(u64::from_ne_bytes(old))
    }

    /// Returns address and rkey of a range of the peer's memory.
    fn range(&self, offset: usize, len: usize) -> Result<(u64, u32), EndpointError> {
        let EndpointAddress {
            addr, bytes, rkey, ..
        } = self.usable()?;
        let region = usize::try_from(bytes).unwrap_or(usize::MAX);
        match offset.checked_add(len) {
            Some(end) if end <= region => Ok((addr + offset as u64, rkey)),
            _ => Err(OutOfBounds {
                offset,
                len,
                region,
            }
            .into()),
        }
    }

    fn connected(&self) -> Result<EndpointAddress, EndpointError> {
        self.remote.ok_or(EndpointError::NotConnected)
    }

    /// Returns the peer's address if operations may be posted.
    fn usable(&self) -> Result<EndpointAddress, EndpointError> {
        self.broken.map_or_else(
            || self.connected(),
            |error| Err(EndpointError::Broken(error)),
        )
    }

    fn post_receive(&mut self, number: u64) -> Result<(), EndpointError> {
        let bytes = self.config.message_bytes;
        let buffer = self.receives.sge(number as usize * bytes as usize, bytes)?;
        Ok(self.qp.post_receive(&[buffer], number)?)
    }

    /// Posts an operation, and waits for its completion. A call that times out ends the connection,
    /// as a peer does that does not answer.
    fn carry_out(&mut self, operation: &impl RcOperation) -> Result<(), EndpointError> {
        self.qp.post(operation, Signal::Always, 0)?;
        self.ended = None;
        self.qp.ring();
        if let Err(error) = self.wait_until(|endpoint| endpoint.ended.is_some()) {
            let (syndrome, kind) = (Syndrome::TransportRetryExceeded, self.qp.address().kind);
            self.broken.get_or_insert(CompletionError {
                syndrome,
                raw: syndrome as u8,
                vendor: 0,
                kind,
            });
            self.qp.fail();
            return Err(error);
        }
        Ok(self.ended.take().unwrap_or(Ok(()))?)
    }

    /// Takes completions.
    fn poll(&mut self) -> usize {
        let Self {
            qp,
            cq,
            ended,
            inbox,
            broken,
            ..
        } = self;
        cq.poll(16, |cqe| {
            let result = cqe.result();
            if let Err(error) = result {
                broken.get_or_insert(error);
            }
            if qp.complete(&cqe).is_some() {
                *ended = Some(result);
            } else if let (Some(number), Ok(())) = (qp.complete_receive(&cqe), result) {
                inbox.push_back((number, cqe.byte_count()));
            }
        })
    }

    /// Polls until `is_over`, first without a pause, then with sleeps.
    fn wait_until(&mut self, is_over: impl Fn(&Self) -> bool) -> Result<(), EndpointError> {
        const SPINS: u32 = 1_000;
        const SLICE: Duration = Duration::from_millis(10);
        self.connected()?;
        // A time that the clock cannot represent is never reached.
        let end = self
            .config
            .timeout
            .and_then(|timeout| Some((timeout, Instant::now().checked_add(timeout)?)));
        let mut spins = 0;
        loop {
            let polled = self.poll();
            if is_over(self) {
                return Ok(());
            }
            if let Some(error) = self.broken {
                return Err(EndpointError::Broken(error));
            }
            if polled > 0 {
                continue;
            }
            spins += 1;
            if spins < SPINS {
                core::hint::spin_loop();
                continue;
            }
            let left =
                end.map(|(timeout, end)| (timeout, end.saturating_duration_since(Instant::now())));
            if let Some((timeout, Duration::ZERO)) = left {
                return Err(EndpointError::TimedOut(timeout));
            }
            self.cq.arm(false);
            if !self.cq.has_completion() {
                self.device
                    .wait(Some(left.map_or(SLICE, |(_, left)| left.min(SLICE))));
            }
        }
    }
}
