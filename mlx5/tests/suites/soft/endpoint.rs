//! A connection of one thread with one operation in flight, for tests of the ways to a peer.

use std::collections::VecDeque;

use mlx5::*;

/// Receives that an end keeps posted.
const DEPTH: usize = 64;
/// Bytes of the memory that the peer reads and writes.
const MEMORY_BYTES: usize = 1 << 16;

/// The address of an end and of its memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct EndpointAddress {
    pub(crate) qp: QpAddress,
    pub(crate) addr: u64,
    pub(crate) rkey: u32,
}

pub(crate) struct Endpoint {
    pub(crate) qp: RcQp,
    cq: Cq,
    ended: Option<Result<(), CompletionError>>,
    /// Messages that have arrived: the number of the receive, and the bytes.
    inbox: VecDeque<(u64, u32)>,
    remote: Option<EndpointAddress>,
    /// Bytes to send, or that were read.
    buffer: Mr,
    /// Receive buffers, by number of the receive.
    receives: Mr,
    pub(crate) memory: Mr,
    message_bytes: u32,
    connection: ConnectOptions,
}

impl Endpoint {
    pub(crate) fn new(device: &Device) -> Self {
        Self::with(device, 4096, ConnectOptions::default())
    }

    pub(crate) fn with(device: &Device, message_bytes: u32, connection: ConnectOptions) -> Self {
        let (pd, cq) = (
            device.alloc_pd().unwrap(),
            device.create_cq(DEPTH as u32 + 1).unwrap(),
        );
        let own = ReceiveSource::Own {
            depth: DEPTH as u32,
            max_sge: 1,
        };
        let remote = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let local = |bytes| pd.alloc(bytes, Access::LOCAL_WRITE).unwrap();
        Self {
            qp: pd.create_qp(&cq, &cq, own, &QpConfig::default()).unwrap(),
            cq,
            ended: None,
            inbox: VecDeque::new(),
            remote: None,
            buffer: local(message_bytes as usize),
            receives: local(DEPTH * message_bytes as usize),
            memory: pd
                .alloc(MEMORY_BYTES, Access::LOCAL_WRITE | remote)
                .unwrap(),
            message_bytes,
            connection,
        }
    }

    pub(crate) fn address(&self) -> EndpointAddress {
        EndpointAddress {
            qp: self.qp.address(),
            addr: self.memory.addr(),
            rkey: self.memory.rkey(),
        }
    }

    pub(crate) fn connect(&mut self, remote: &EndpointAddress) -> Result<(), ConnectError> {
        if self.qp.state() == QpState::Reset {
            self.qp.initialize()?;
            (0..DEPTH as u64).for_each(|number| self.post_receive(number));
            self.qp.ring_receives();
        }
        self.qp.ready_to_receive(&remote.qp, &self.connection)?;
        self.qp.ready_to_send()?;
        self.remote = Some(*remote);
        Ok(())
    }

    fn post_receive(&mut self, number: u64) {
        let at = number as usize * self.message_bytes as usize;
        let buffer = self.receives.sge(at, self.message_bytes).unwrap();
        self.qp.post_receive(&[buffer], number).unwrap();
    }

    pub(crate) fn send(&mut self, message: &[u8]) -> Result<(), CompletionError> {
        self.buffer.write(0, message).unwrap();
        let payload = self.buffer.sge(0, message.len() as u32).unwrap();
        self.carry_out(&Send { payload })
    }

    pub(crate) fn recv(&mut self) -> Vec<u8> {
        while self.inbox.is_empty() {
            self.poll();
        }
        // Sends the ACK, also if the end is dropped next.
        self.poll();
        let (number, bytes) = self.inbox.pop_front().unwrap();
        let mut message = vec![0; bytes as usize];
        let at = number as usize * self.message_bytes as usize;
        self.receives.read(at, &mut message).unwrap();
        self.post_receive(number);
        self.qp.ring_receives();
        message
    }

    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) {
        let (addr, rkey) = self.remote(offset);
        self.buffer.write(0, bytes).unwrap();
        let payload = self.buffer.sge(0, bytes.len() as u32).unwrap();
        self.carry_out(&Write {
            addr,
            rkey,
            payload,
        })
        .unwrap();
    }

    pub(crate) fn read(&mut self, offset: u64, bytes: &mut [u8]) {
        let (addr, rkey) = self.remote(offset);
        let into = self.buffer.sge(0, bytes.len() as u32).unwrap();
        self.carry_out(&Read { addr, rkey, into }).unwrap();
        self.buffer.read(0, bytes).unwrap();
    }

    pub(crate) fn fetch_add(&mut self, offset: u64, add: u64) -> u64 {
        let (addr, rkey) = self.remote(offset);
        let into = self.buffer.sge(0, ATOMIC_BYTES).unwrap();
        self.atomic(&FetchAdd {
            addr,
            rkey,
            add,
            into,
        })
    }

    pub(crate) fn compare_swap(&mut self, offset: u64, compare: u64, swap: u64) -> u64 {
        let (addr, rkey) = self.remote(offset);
        let into = self.buffer.sge(0, ATOMIC_BYTES).unwrap();
        self.atomic(&CompareSwap {
            addr,
            rkey,
            compare,
            swap,
            into,
        })
    }

    fn atomic(&mut self, operation: &impl RcOperation) -> u64 {
        self.carry_out(operation).unwrap();
        let mut old = [0; 8];
        self.buffer.read(0, &mut old).unwrap();
        u64::from_ne_bytes(old)
    }

    fn remote(&self, offset: u64) -> (u64, u32) {
        let remote = self.remote.unwrap();
        (remote.addr + offset, remote.rkey)
    }

    fn carry_out(&mut self, operation: &impl RcOperation) -> Result<(), CompletionError> {
        self.qp.post(operation, Signal::Always, 0).unwrap();
        self.qp.ring();
        loop {
            if let Some(result) = self.ended.take() {
                return result;
            }
            self.poll();
        }
    }

    fn poll(&mut self) {
        let Self {
            qp,
            cq,
            ended,
            inbox,
            ..
        } = self;
        cq.poll(16, |cqe| {
            if qp.complete(&cqe).is_some() {
                *ended = Some(cqe.result());
            } else if let (Some(number), Ok(())) = (qp.complete_receive(&cqe), cqe.result()) {
                inbox.push_back((number, cqe.byte_count()));
            }
        });
    }
}
