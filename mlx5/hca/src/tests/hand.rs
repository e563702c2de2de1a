//! A driver written by hand against the bytes of the device: it uses no queue, doorbell or emitter
//! of this crate, only memory and numbers. It is correct by default; tests make it do one thing
//! wrong.

use std::alloc::{Layout, alloc_zeroed};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::{
    Access, Clock, ConnectOptions, CqMemory, FabricSpec, Hca, LocalFabric, QpMemory, Receives,
    Region, RqMemory, Service, SoftOptions, SqMemory, Violation,
};

pub(super) const SEND: u8 = 0x0a;
pub(super) const SEND_IMM: u8 = 0x0b;
pub(super) const WRITE: u8 = 0x08;
pub(super) const WRITE_IMM: u8 = 0x09;
pub(super) const READ: u8 = 0x10;
pub(super) const COMPARE_SWAP: u8 = 0x11;
pub(super) const FETCH_ADD: u8 = 0x12;

/// WQEBBs of the send queue.
pub(super) const SQ: u16 = 64;
/// Number of receives of the queue, one of which ends the list.
pub(super) const RQ: u16 = 8;
/// Entries of each completion queue.
pub(super) const CQ: u32 = 64;
/// Bytes of the region.
pub(super) const REGION: usize = 8192;

/// Zeroed memory that is never freed.
fn leak<T>(bytes: usize, align: usize) -> NonNull<T> {
    // SAFETY: the size is not 0.
    NonNull::new(unsafe { alloc_zeroed(Layout::from_size_align(bytes, align).unwrap()) })
        .unwrap()
        .cast()
}

/// A completion queue, by hand.
pub(super) struct HandCq {
    pub(super) cqn: u32,
    memory: CqMemory,
    pub(super) consumed: u32,
    /// Whether `poll` writes the consumer counter to the doorbell record.
    pub(super) tells: bool,
}

impl HandCq {
    fn new(hca: &Hca) -> Self {
        let (buffer, record) = (leak::<u8>(CQ as usize * 64, 64), leak(8, 8));
        for entry in 0..CQ as usize {
            // SAFETY: inside the queue's buffer.
            unsafe { buffer.add(entry * 64 + 63).write(0xf1) };
        }
        let memory = CqMemory {
            buffer,
            entries: CQ,
            cqe_bytes: 64,
            compression: false,
            record,
        };
        Self {
            // SAFETY: the memory is never freed.
            cqn: unsafe { hca.create_cq(&memory) }.unwrap(),
            memory,
            consumed: 0,
            tells: true,
        }
    }

    pub(super) fn tell(&self, consumed: u32) {
        // SAFETY: the record lives as long as the device.
        let [consumer, _] = unsafe { self.memory.record.as_ref() };
        consumer.store((consumed & 0xff_ffff).to_be(), Ordering::Release);
    }

    /// Returns the unread CQEs.
    pub(super) fn poll(&mut self) -> Vec<[u8; 64]> {
        let mut got = vec![];
        loop {
            let index = (self.consumed & (CQ - 1)) as usize;
            // SAFETY: inside the queue's buffer.
            let cqe = unsafe {
                self.memory
                    .buffer
                    .add(index * 64)
                    .cast::<[u8; 64]>()
                    .read_volatile()
            };
            let lap = (self.consumed / CQ) as u8 & 1;
            if cqe[63] >> 4 == 15 || cqe[63] & 1 != lap {
                break;
            }
            self.consumed += 1;
            got.push(cqe);
        }
        if self.tells && !got.is_empty() {
            self.tell(self.consumed);
        }
        got
    }
}

/// Returns the opcode of a CQE.
pub(super) fn opcode(cqe: &[u8; 64]) -> u8 {
    cqe[63] >> 4
}

pub(super) fn counter(cqe: &[u8; 64]) -> u16 {
    u16::from_be_bytes([cqe[60], cqe[61]])
}

/// Returns syndrome and vendor syndrome of an error CQE.
pub(super) fn syndrome(cqe: &[u8; 64]) -> (u8, u8) {
    (cqe[55], cqe[54])
}

/// Makes a remote address segment for `offset` of `region`.
pub(super) fn raddr(region: &Region, offset: usize) -> Vec<u8> {
    [
        &(region.addr.as_ptr() as u64 + offset as u64).to_be_bytes()[..],
        &region.key.to_be_bytes(),
        &[0; 4],
    ]
    .concat()
}

/// Makes a data segment of `len` bytes at `offset` of `region`.
pub(super) fn pointer(region: &Region, offset: usize, len: u32) -> Vec<u8> {
    [
        &len.to_be_bytes()[..],
        &region.key.to_be_bytes(),
        &(region.addr.as_ptr() as u64 + offset as u64).to_be_bytes(),
    ]
    .concat()
}

/// A queue pair, connected to itself or to another, with all its queues and memory.
pub(super) struct Hand {
    pub(super) hca: Rc<Hca>,
    pub(super) now_ns: Arc<AtomicU64>,
    pub(super) pd: u32,
    pub(super) qpn: u32,
    pub(super) memory: QpMemory,
    sq: SqMemory,
    register: NonNull<u8>,
    pub(super) rqn: u32,
    pub(super) rq: RqMemory,
    pub(super) is_list: bool,
    pub(super) send_cq: HandCq,
    pub(super) recv_cq: HandCq,
    pub(super) mr: Region,
    /// Numbers of WQEBBs written, announced, and known to be complete.
    pub(super) producer: u16,
    pub(super) rung: u16,
    pub(super) done: u16,
    /// First WQEBB of the last WQE.
    pub(super) last: u16,
    /// Counter after the WQE that starts at each WQEBB.
    ends: Vec<u16>,
    /// The half of the register for the next doorbell.
    pub(super) half: usize,
    pub(super) received: u16,
    pub(super) posted_receives: u16,
}

impl Hand {
    /// Makes a queue pair that is connected to itself, or for datagrams.
    pub(super) fn new(strict: bool, is_list: bool, is_datagram: bool) -> Self {
        let hand = Self::alone(&LocalFabric::new(), strict, is_list, is_datagram);
        if is_datagram {
            hand.hca.activate_datagrams(hand.qpn, 7);
        } else {
            hand.connect(&hand);
        }
        hand
    }

    /// Makes a device of its own on `fabric`, and a queue pair that is not connected.
    pub(super) fn alone(
        fabric: &LocalFabric,
        strict: bool,
        is_list: bool,
        is_datagram: bool,
    ) -> Self {
        let now_ns = Arc::<AtomicU64>::default();
        let options = SoftOptions {
            fabric: FabricSpec::Local(fabric.clone()),
            arena_bytes: 1 << 20,
            clock: Clock::Manual(Arc::clone(&now_ns)),
            strict,
            ..SoftOptions::default()
        };
        let hca = Rc::new(Hca::open(&options).unwrap());
        let pd = hca.alloc_pd();
        let (send_cq, recv_cq) = (HandCq::new(&hca), HandCq::new(&hca));
        let (rqn, rq) = hca
            .create_rq(pd, u32::from(RQ) - u32::from(is_list), 2, is_list)
            .unwrap();
        assert_eq!(
            (rq.wqe_cnt, rq.stride),
            (RQ.into(), if is_list { 64 } else { 32 })
        );
        let register = leak(512, 512);
        let sq = SqMemory {
            buffer: leak(usize::from(SQ) * 64, 64),
            wqe_cnt: SQ.into(),
            record: leak(4, 4),
            register: Some(register),
        };
        let memory = QpMemory {
            service: if is_datagram {
                Service::Datagram
            } else {
                Service::Connected
            },
            pd,
            send_cq: send_cq.cqn,
            recv_cq: recv_cq.cqn,
            receives: if is_list {
                Receives::Shared(rqn)
            } else {
                Receives::OwnInReach(rqn)
            },
            sq,
            user_index: None,
            scatter_to_cqe: false,
            lane_slots: 128,
        };
        // SAFETY: the memory is never freed.
        let qpn = unsafe { hca.create_qp(&memory) }.unwrap();
        let access = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC;
        let mr = hca.alloc_registered(pd, REGION, access, false).unwrap();
        let mut hand = Self {
            hca,
            now_ns,
            pd,
            qpn,
            memory,
            sq,
            register,
            rqn,
            rq,
            is_list,
            send_cq,
            recv_cq,
            mr,
            producer: 0,
            rung: 0,
            done: 0,
            last: 0,
            ends: vec![0; SQ.into()],
            half: 0,
            received: 0,
            posted_receives: 0,
        };
        for index in 0..RQ {
            hand.link(index, (index + 1) % RQ);
        }
        hand
    }

    /// Makes this end's half of a connection to `peer`.
    pub(super) fn connect(&self, peer: &Self) {
        let options = ConnectOptions {
            rnr_retry: 1,
            rnr_timer_ns: 1000,
            ..ConnectOptions::default()
        };
        self.hca
            .connect(
                self.qpn,
                &peer.hca.address(peer.qpn),
                &options,
                Access::REMOTE,
            )
            .unwrap();
    }

    /// Makes another queue pair on the same queues, which is not connected. Returns its number.
    pub(super) fn another(&self) -> u32 {
        // SAFETY: the memory is never freed.
        unsafe { self.hca.create_qp(&self.memory) }.unwrap()
    }

    // Segments.

    pub(super) fn ctrl(&self, opcode: u8, ds: usize, signaled: bool, imm: u32) -> Vec<u8> {
        let index = self.producer.to_be_bytes();
        let qpn = self.qpn.to_be_bytes();
        let mut bytes = vec![
            0,
            index[0],
            index[1],
            opcode,
            qpn[1],
            qpn[2],
            qpn[3],
            ds as u8,
            0,
            0,
            0,
            if signaled { 8 } else { 0 },
        ];
        bytes.extend(imm.to_be_bytes());
        bytes
    }

    /// Makes a whole WQE for the producer's place: header and data segments after a control
    /// segment.
    pub(super) fn wqe(&self, opcode: u8, signaled: bool, segments: &[Vec<u8>]) -> Vec<u8> {
        let body: Vec<u8> = segments.concat();
        assert_eq!(body.len() % 16, 0);
        let mut bytes = self.ctrl(opcode, 1 + body.len() / 16, signaled, 0x1234_5678);
        bytes.extend(body);
        bytes
    }

    pub(super) fn raddr(&self, offset: usize) -> Vec<u8> {
        raddr(&self.mr, offset)
    }

    pub(super) fn pointer(&self, offset: usize, len: u32) -> Vec<u8> {
        pointer(&self.mr, offset, len)
    }

    pub(super) fn inline(bytes: &[u8]) -> Vec<u8> {
        let mut segment = (0x8000_0000 | bytes.len() as u32).to_be_bytes().to_vec();
        segment.extend(bytes);
        segment.resize(segment.len().next_multiple_of(16), 0);
        segment
    }

    pub(super) fn atomic(swap_add: u64, compare: u64) -> Vec<u8> {
        [swap_add.to_be_bytes(), compare.to_be_bytes()].concat()
    }

    /// Returns the destination of this queue pair itself.
    pub(super) fn datagram(&self, qkey: u32) -> Vec<u8> {
        let mut segment = vec![0; 48];
        segment[..4].copy_from_slice(&qkey.to_be_bytes());
        segment[8..12].copy_from_slice(&(0x8000_0000 | self.qpn).to_be_bytes());
        segment[14..16].copy_from_slice(&self.hca.address(self.qpn).lid.to_be_bytes());
        segment
    }

    // Send queue.

    pub(super) fn sq_bytes(&self, at: u16, len: usize) -> Vec<u8> {
        let start = usize::from(at % SQ) * 64;
        // SAFETY: wraps inside the SQ's buffer.
        (0..len)
            .map(|i| unsafe {
                self.sq
                    .buffer
                    .add((start + i) % (usize::from(SQ) * 64))
                    .read_volatile()
            })
            .collect()
    }

    pub(super) fn write_sq(&self, at: u16, bytes: &[u8]) {
        let start = usize::from(at % SQ) * 64;
        for (i, byte) in bytes.iter().enumerate() {
            // SAFETY: wraps inside the SQ's buffer.
            unsafe {
                self.sq
                    .buffer
                    .add((start + i) % (usize::from(SQ) * 64))
                    .write_volatile(*byte)
            };
        }
    }

    pub(super) fn room(&self) -> u16 {
        SQ - self.producer.wrapping_sub(self.done)
    }

    /// Writes a WQE that was built for the producer's place to this place. The WQE may wrap, as the
    /// device allows.
    pub(super) fn push(&mut self, wqe: &[u8]) {
        self.write_sq(self.producer, wqe);
        self.last = self.producer;
        self.producer = self
            .producer
            .wrapping_add((wqe.len().div_ceil(64) as u16).max(1));
        self.ends[usize::from(self.last % SQ)] = self.producer;
    }

    pub(super) fn write_record(&self, counter: u16) {
        // SAFETY: the record lives as long as the queue pair.
        unsafe { self.sq.record.as_ref() }.store(u32::from(counter).to_be(), Ordering::Release);
    }

    pub(super) fn write_register(&self, bytes: &[u8]) {
        for (i, word) in bytes.chunks(8).enumerate() {
            let mut padded = [0; 8];
            padded[..word.len()].copy_from_slice(word);
            // SAFETY: a half holds 256 bytes, 8-aligned.
            unsafe {
                self.register
                    .add(self.half + 8 * i)
                    .cast::<u64>()
                    .write_volatile(u64::from_ne_bytes(padded))
            };
        }
    }

    /// Calls the software HCA after a store, as the doorbell function does. The other half is next.
    pub(super) fn notify(&mut self) {
        self.hca.ring(Hca::register_index(self.qpn));
        self.half ^= 256;
    }

    /// Returns the bytes for the register: the whole WQE if it is the only new WQE and fits,
    /// otherwise the start of the last WQE.
    pub(super) fn register_bytes(&self) -> Vec<u8> {
        let whole = usize::from(self.producer.wrapping_sub(self.last)) * 64;
        let fits = self.last == self.rung && whole <= 256;
        self.sq_bytes(self.last, if fits { whole } else { 8 })
    }

    /// Rings the doorbell correctly.
    pub(super) fn ring(&mut self) {
        self.write_record(self.producer);
        self.write_register(&self.register_bytes());
        self.rung = self.producer;
        self.notify();
    }

    /// Posts a WQE that was built for the producer's place, and rings the doorbell correctly.
    pub(super) fn post(&mut self, wqe: &[u8]) {
        self.push(wqe);
        self.ring();
    }

    // Receive queue.

    pub(super) fn link(&mut self, index: u16, next: u16) {
        if self.is_list {
            // SAFETY: inside the ring.
            unsafe {
                self.rq
                    .buffer
                    .add(usize::from(index) * self.rq.stride as usize + 2)
                    .cast::<[u8; 2]>()
                    .write(next.to_be_bytes())
            };
        }
    }

    pub(super) fn write_receive(&mut self, index: u16, segments: &[Vec<u8>]) {
        let mut bytes = segments.concat();
        let first = if self.is_list { 16 } else { 0 };
        if first + bytes.len() < self.rq.stride as usize {
            // lkey 0x100 ends the list.
            bytes.extend([0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        }
        assert!(first + bytes.len() <= self.rq.stride as usize);
        // SAFETY: inside the WQE.
        unsafe {
            let at = self
                .rq
                .buffer
                .add(usize::from(index % RQ) * self.rq.stride as usize + first)
                .as_ptr();
            at.copy_from(bytes.as_ptr(), bytes.len());
        }
    }

    pub(super) fn write_receive_record(&self, counter: u16) {
        // SAFETY: the record lives as long as the queue.
        unsafe { self.rq.record.as_ref() }.store(u32::from(counter).to_be(), Ordering::Release);
    }

    /// Posts receives until the queue is full. Each may take 2 x 128 bytes.
    pub(super) fn post_receives(&mut self) {
        while self.posted_receives.wrapping_sub(self.received) < RQ - u16::from(self.is_list) {
            let index = self.posted_receives % RQ;
            let at = 4096 + usize::from(index) * 256;
            let segments = [self.pointer(at, 128), self.pointer(at + 128, 128)];
            self.write_receive(index, &segments);
            self.posted_receives = self.posted_receives.wrapping_add(1);
        }
        self.write_receive_record(self.posted_receives);
    }

    // Completions.

    /// Polls both queues and asserts success. Returns the numbers of completed sends and receives.
    pub(super) fn reap(&mut self) -> (usize, usize) {
        self.hca.empty_poll();
        let (sends, receives) = (self.send_cq.poll(), self.recv_cq.poll());
        for cqe in &sends {
            assert_eq!(opcode(cqe), 0, "{:?}", syndrome(cqe));
            self.done = self.ends[usize::from(counter(cqe) % SQ)];
        }
        for cqe in &receives {
            assert!(matches!(opcode(cqe), 1..=3), "{:?}", syndrome(cqe));
            assert_eq!(
                counter(cqe),
                if self.is_list {
                    self.received % RQ
                } else {
                    self.received
                },
                "in order"
            );
            self.received = self.received.wrapping_add(1);
        }
        (sends.len(), receives.len())
    }

    pub(super) fn violations(&self) -> Vec<Violation> {
        self.hca.take_violations()
    }

    pub(super) fn pass_ns(&self, ns: u64) {
        self.now_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Returns the receive record, as an atomic, like the device accesses it.
    pub(super) fn receive_record(&self) -> &AtomicU32 {
        // SAFETY: the record lives as long as the queue.
        unsafe { self.rq.record.as_ref() }
    }
}
