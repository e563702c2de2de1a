//! A minimal driver of its own: queues in the heap of this process, doorbells that are plain
//! stores.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use mlx5_hca::wire::*;
use mlx5_hca::{
    Address, Clock, CqMemory, FabricSpec, Gid, GidKind, Hca, LocalFabric, MAX_LANE_SLOTS,
    PacketAddress, Port, PortAddress, QpMemory, Receives, RoceOptions, RqMemory, SoftOptions,
    SqMemory, Timing,
};

pub(crate) const GID: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0xff, 0xfe, 0, 0, 1];
/// 127.0.0.1.
pub(crate) const IPV4: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1];

/// A network of one InfiniBand port.
pub(crate) const INFINIBAND: Port = Port {
    network: &[PortAddress {
        lid: 1,
        gids: &[Gid {
            bytes: GID,
            kind: GidKind::InfiniBand,
        }],
    }],
    index: 0,
};

/// A network of one RoCE port.
pub(crate) const ROCE: Port = Port {
    network: &[PortAddress {
        lid: 0,
        gids: &[
            Gid {
                bytes: GID,
                kind: GidKind::RoceV1,
            },
            Gid {
                bytes: GID,
                kind: GidKind::RoceV2,
            },
            Gid {
                bytes: IPV4,
                kind: GidKind::RoceV1,
            },
            Gid {
                bytes: IPV4,
                kind: GidKind::RoceV2,
            },
        ],
    }],
    index: 0,
};
/// Number of entries of every queue.
pub(crate) const ENTRIES: u32 = 16;
/// Bytes of a receive WQE.
const STRIDE: usize = 64;
/// Bytes of an end's registered memory.
pub(crate) const BYTES: usize = 1 << 14;
pub(crate) const ALL: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

/// Zeroed pages of the heap.
pub(crate) struct Pages {
    base: NonNull<u8>,
    layout: Layout,
}

impl Pages {
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, 4096).unwrap();
        Self {
            // SAFETY: the size is not 0.
            base: NonNull::new(unsafe { alloc_zeroed(layout) }).unwrap(),
            layout,
        }
    }

    fn at<T>(&self, offset: usize) -> NonNull<T> {
        assert!(offset + size_of::<T>() <= self.layout.size());
        // SAFETY: inside.
        unsafe { self.base.add(offset).cast() }
    }

    pub(crate) fn put<const N: usize>(&self, offset: usize, bytes: [u8; N]) {
        // SAFETY: inside (`at`); no code holds a reference.
        unsafe { self.at::<[u8; N]>(offset).write(bytes) };
    }

    pub(crate) fn get<const N: usize>(&self, offset: usize) -> [u8; N] {
        // SAFETY: as in `put`.
        unsafe { self.at::<[u8; N]>(offset).read() }
    }

    /// Takes the pages from this process, as if it had unmapped them; but no other mapping gets
    /// their place.
    pub(crate) fn forbid(&self) {
        self.protect(libc::PROT_NONE);
    }

    fn protect(&self, access: libc::c_int) {
        // SAFETY: pages of this memory, to which no references exist.
        let result =
            unsafe { libc::mprotect(self.base.as_ptr().cast(), self.layout.size(), access) };
        assert_eq!(result, 0);
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: inside, aligned; the HCA accesses it through the same type.
        unsafe { self.at::<AtomicU32>(offset).as_ref() }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.protect(libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: allocated in `new`.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

/// The fabric and the time of a test. The test moves the clock, unless processes share the fabric.
#[derive(Clone)]
pub(crate) struct World {
    fabric: FabricSpec,
    clock: Clock,
    options: ConnectOptions,
    port: Port,
    roce: Option<RoceOptions>,
    timing: Timing,
    pub(crate) now_ns: Arc<AtomicU64>,
}

impl Default for World {
    fn default() -> Self {
        let now_ns = Arc::<AtomicU64>::default();
        let options = ConnectOptions {
            timeout: 1,
            retry_count: 1,
            rnr_retry: 1,
            rnr_timer_ns: 1_000,
        };
        Self {
            fabric: FabricSpec::Local(LocalFabric::new()),
            clock: Clock::Manual(Arc::clone(&now_ns)),
            options,
            port: INFINIBAND,
            roce: None,
            timing: Timing::Immediate,
            now_ns,
        }
    }
}

impl World {
    /// Makes the world of several processes.
    pub(crate) fn shared(dir: &Path) -> Self {
        let (fabric, options) = (
            FabricSpec::Shared {
                dir: Some(dir.to_owned()),
            },
            ConnectOptions {
                rnr_retry: 7,
                ..Default::default()
            },
        );
        Self {
            fabric,
            clock: Clock::System,
            options,
            port: INFINIBAND,
            roce: None,
            timing: Timing::Immediate,
            now_ns: Arc::default(),
        }
    }

    /// Makes a world whose connections fail where they find no receive.
    pub(crate) fn without_rnr_retries() -> Self {
        let world = Self::default();
        Self {
            options: ConnectOptions {
                rnr_retry: 0,
                ..world.options
            },
            ..world
        }
    }

    /// Makes a world in which WQEs are late by 1 to 2 ms, and buffers are checked.
    pub(crate) fn late() -> Self {
        Self {
            timing: Timing::Random {
                ns: (1_000_000, 2_000_000),
                seed: 7,
            },
            ..Self::default()
        }
    }

    /// Makes the world of a RoCE port.
    pub(crate) fn roce() -> Self {
        Self::default().at(ROCE)
    }

    /// Makes a world whose connections are made of packets.
    pub(crate) fn by_packets() -> Self {
        let roce = RoceOptions {
            is_for_all: true,
            ..RoceOptions::new(Ipv4Addr::LOCALHOST.into())
        };
        Self {
            roce: Some(roce),
            ..Self::roce()
        }
    }

    /// Makes another port's view of the same world.
    pub(crate) fn at(&self, port: Port) -> Self {
        Self {
            port,
            ..self.clone()
        }
    }

    pub(crate) fn pass_a_second(&self) {
        self.now_ns.fetch_add(1_000_000_000, Ordering::Relaxed);
    }

    pub(crate) fn hca(&self) -> Hca {
        let options = SoftOptions {
            fabric: self.fabric.clone(),
            port: Some(self.port),
            roce: self.roce.clone(),
            arena_bytes: 4096,
            clock: self.clock.clone(),
            check_buffers: !matches!(self.timing, Timing::Immediate),
            timing: self.timing.clone(),
            ..SoftOptions::default()
        };
        Hca::open(&options).unwrap()
    }
}

/// The decoded fields of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Done {
    Sent {
        wqe: u16,
        bytes: u32,
    },
    Received {
        opcode: CqeOpcode,
        wqe: u16,
        bytes: u32,
        imm: u32,
        source: u32,
        grh: bool,
    },
    Failed {
        opcode: CqeOpcode,
        wqe: u16,
        syndrome: Syndrome,
    },
}

/// A queue pair with its queues and memory. The HCA's objects are dropped before the memory.
pub(crate) struct End {
    pub(crate) hca: Hca,
    pub(crate) qpn: u32,
    cqn: u32,
    pd: u32,
    srqn: Option<u32>,
    pub(crate) key: u32,
    /// The registered memory.
    pub(crate) data: Pages,
    pub(crate) sq: Pages,
    pub(crate) rq: Pages,
    cq: Pages,
    records: Pages,
    producer: u16,
    posted: u16,
    consumed: u32,
    user_index: u32,
    options: ConnectOptions,
    /// More queue pairs, which only receive.
    receivers: Vec<u32>,
}

const CQ_RECORD: usize = 0;
const QP_RECORD: usize = 64;
const SRQ_RECORD: usize = 128;

impl End {
    pub(crate) fn new(world: &World, service: Service, is_shared: bool, access: Access) -> Self {
        Self::new_inside(world, service, is_shared, access, 0)
    }

    /// Like `new`, with this number of unregistered bytes at the start and at the end of the
    /// memory.
    pub(crate) fn new_inside(
        world: &World,
        service: Service,
        is_shared: bool,
        access: Access,
        outside: usize,
    ) -> Self {
        let (hca, options) = (world.hca(), world.options);
        let pages = |bytes| Pages::new(bytes);
        let data = pages(BYTES);
        let sq = pages(ENTRIES as usize * WQEBB);
        let rq = pages(ENTRIES as usize * STRIDE);
        let (cq, records) = (pages(ENTRIES as usize * CQE_BYTES), pages(4096));
        (0..ENTRIES as usize).for_each(|i| cq.put(i * CQE_BYTES + OP_OWN_OFFSET, [0xf0]));
        let pd = hca.alloc_pd();
        let cq_memory = CqMemory {
            buffer: cq.at(0),
            entries: ENTRIES,
            cqe_bytes: 64,
            compression: false,
            record: records.at(CQ_RECORD),
        };
        let record = records.at(if is_shared { SRQ_RECORD } else { QP_RECORD });
        let rq_memory = RqMemory {
            buffer: rq.at(0),
            wqe_cnt: ENTRIES,
            stride: STRIDE as u32,
            record,
        };
        let sq_memory = SqMemory {
            buffer: sq.at(0),
            wqe_cnt: ENTRIES,
            record: records.at(QP_RECORD + 4),
            register: None,
        };
        let user_index = 0x12_3450 + u32::from(hca.lid());
        // SAFETY: `End` keeps the memory until its HCA, which goes first, is gone.
        let (cqn, srqn, qpn, key) = unsafe {
            let cqn = hca.create_cq(&cq_memory).unwrap();
            let srqn = is_shared.then(|| hca.create_srq(pd, &rq_memory).unwrap());
            let receives = srqn.map_or(Receives::Own(rq_memory), Receives::Shared);
            let memory = QpMemory {
                service,
                pd,
                send_cq: cqn,
                recv_cq: cqn,
                receives,
                sq: sq_memory,
                user_index: Some(user_index),
                scatter_to_cqe: false,
                lane_slots: MAX_LANE_SLOTS,
            };
            (
                cqn,
                srqn,
                hca.create_qp(&memory).unwrap(),
                hca.register(pd, data.at(outside), BYTES - 2 * outside, access)
                    .unwrap()
                    .key,
            )
        };
        Self {
            hca,
            qpn,
            cqn,
            pd,
            srqn,
            key,
            data,
            sq,
            rq,
            cq,
            records,
            producer: 0,
            posted: 0,
            consumed: 0,
            user_index,
            options,
            receivers: vec![],
        }
    }

    /// Makes a connected pair.
    pub(crate) fn pair(world: &World, is_shared: bool, access: Access) -> [Self; 2] {
        let ends = [(); 2].map(|()| Self::new(world, Service::Connected, is_shared, access));
        for (own, peer) in [(&ends[0], &ends[1]), (&ends[1], &ends[0])] {
            match peer.hca.wire_address() {
                Some((to, _)) => own.connect_by_packets(peer, to.ip()),
                None => own.connect(peer.qpn),
            }
        }
        ends
    }

    /// Connects to a peer by packets to this address, without its UDP port.
    pub(crate) fn connect_by_packets(&self, peer: &Self, ip: IpAddr) {
        self.hca.initialize(self.qpn);
        let packets = peer.hca.address(peer.qpn).packets.unwrap();
        let remote = Address {
            packets: Some(PacketAddress {
                ip,
                port: None,
                ..packets
            }),
            ..Address::of_number(peer.qpn)
        };
        self.hca
            .connect(self.qpn, &remote, &self.options, ALL)
            .unwrap();
        self.hca.start_sending(self.qpn, &self.options);
    }

    pub(crate) fn connect(&self, qpn: u32) {
        self.connect_with(qpn, ALL);
    }

    /// Connects to queue pair `qpn`, and grants this peer `access`.
    pub(crate) fn connect_with(&self, qpn: u32, access: Access) {
        self.hca.initialize(self.qpn);
        let remote = Address::of_number(qpn);
        let _nobody = self.hca.connect(self.qpn, &remote, &self.options, access);
        self.hca.start_sending(self.qpn, &self.options);
    }

    /// Makes one more queue pair on the shared receive queue and the completion queue, which sends
    /// nothing.
    pub(crate) fn add_receiver(&mut self) -> u32 {
        let receives = Receives::Shared(self.srqn.unwrap());
        let sq = SqMemory {
            buffer: self.sq.at(0),
            wqe_cnt: 0,
            record: self.records.at(256),
            register: None,
        };
        let service = Service::Connected;
        let user_index = self.user_index;
        let cqn = self.cqn;
        let memory = QpMemory {
            service,
            pd: self.pd,
            send_cq: cqn,
            recv_cq: cqn,
            receives,
            sq,
            user_index: Some(user_index),
            scatter_to_cqe: false,
            lane_slots: MAX_LANE_SLOTS,
        };
        // SAFETY: as in `new`.
        let qpn = unsafe { self.hca.create_qp(&memory) }.unwrap();
        self.receivers.push(qpn);
        qpn
    }

    /// Connects `receiver`, which [`add_receiver`](Self::add_receiver) made, to queue pair `qpn`.
    pub(crate) fn connect_receiver(&self, receiver: u32, qpn: u32) {
        self.hca.initialize(receiver);
        let remote = Address::of_number(qpn);
        let _nobody = self.hca.connect(receiver, &remote, &self.options, ALL);
    }

    pub(crate) fn activate_datagrams(&self, qkey: u32) {
        self.hca.initialize(self.qpn);
        self.hca.activate_datagrams(self.qpn, qkey);
        self.hca.start_sending(self.qpn, &ConnectOptions::default());
    }

    pub(crate) fn addr(&self, offset: usize) -> u64 {
        self.data.at::<u8>(offset).as_ptr() as u64
    }

    pub(crate) fn sge(&self, offset: usize, byte_count: u32) -> [u8; SEGMENT] {
        DataSegment {
            byte_count,
            lkey: self.key,
            addr: self.addr(offset),
        }
        .emit()
    }

    /// Returns the remote address segment of byte `offset`.
    pub(crate) fn remote(&self, offset: usize) -> [u8; SEGMENT] {
        RaddrSegment {
            addr: self.addr(offset),
            rkey: self.key,
        }
        .emit()
    }

    /// Posts a signaled WQE, without moving the doorbell record.
    pub(crate) fn post(&mut self, opcode: Opcode, imm: u32, segments: &[[u8; SEGMENT]]) -> u16 {
        let ds = 1 + segments.len();
        let wqe_index = self.producer;
        let ctrl = CtrlSegment {
            opcode: opcode as u8,
            wqe_index,
            qpn: self.qpn,
            ds: ds as u8,
            signaled: true,
            fence: FenceMode::None,
            solicited: false,
            imm,
        };
        for (i, segment) in std::iter::once(&ctrl.emit()).chain(segments).enumerate() {
            let at = usize::from(wqe_index) % ENTRIES as usize * WQEBB + i * SEGMENT;
            self.sq.put(at % (ENTRIES as usize * WQEBB), *segment);
        }
        self.producer = self.producer.wrapping_add(ds.div_ceil(4) as u16);
        wqe_index
    }

    /// Posts a signaled WQE, and stores the doorbell record.
    pub(crate) fn post_now(&mut self, opcode: Opcode, imm: u32, segments: &[[u8; SEGMENT]]) -> u16 {
        let wqe = self.post(opcode, imm, segments);
        self.ring();
        wqe
    }

    /// Stores only the doorbell record.
    pub(crate) fn ring(&self) {
        self.set_record(self.producer);
    }

    pub(crate) fn set_record(&self, producer: u16) {
        self.records
            .word(QP_RECORD + 4)
            .store(queue_record(producer), Ordering::Release);
    }

    /// Writes receive WQE `index` with one buffer; `next` is for a shared queue.
    pub(crate) fn write_receive(&self, index: u16, next: u16, buffer: [u8; SEGMENT]) {
        let mut at = usize::from(index) * STRIDE;
        if self.srqn.is_some() {
            self.rq.put(
                at,
                NextSegment {
                    next_wqe_index: next,
                }
                .emit(),
            );
            at += SEGMENT;
        }
        self.rq.put(at, buffer);
        self.rq.put(at + SEGMENT, DataSegment::TERMINATOR.emit());
    }

    /// Posts the receives from number 0 on, into buffers of `len` bytes at these offsets.
    pub(crate) fn receive_at(&mut self, offsets: &[usize], len: u32) {
        for (index, &offset) in (0..).zip(offsets) {
            self.write_receive(index, 0, self.sge(offset, len));
        }
        self.ring_receives(offsets.len() as u16);
    }

    /// Posts `count` more receives.
    pub(crate) fn ring_receives(&mut self, count: u16) {
        self.posted = self.posted.wrapping_add(count);
        let at = if self.srqn.is_some() {
            SRQ_RECORD
        } else {
            QP_RECORD
        };
        self.records
            .word(at)
            .store(queue_record(self.posted), Ordering::Release);
    }

    /// Returns the completions, all of which belong to its queue pairs.
    pub(crate) fn poll(&mut self) -> Vec<Done> {
        let (user_index, qpns) = (self.user_index, [&[self.qpn][..], &self.receivers].concat());
        self.take(|index, qpn| assert!(index == user_index && qpns.contains(&qpn)))
    }

    /// Returns the vendor syndrome of completion `nth`, a failure.
    pub(crate) fn vendor_syndrome(&self, nth: usize) -> u8 {
        ErrorCqe::parse(&self.cq.get(nth * CQE_BYTES)).vendor_syndrome
    }

    /// Returns the completions of any queue pair.
    pub(crate) fn try_poll(&mut self) -> Vec<Done> {
        self.take(|_, _| ())
    }

    fn take(&mut self, check: impl Fn(u32, u32)) -> Vec<Done> {
        let mut done = vec![];
        loop {
            let bytes: [u8; CQE_BYTES] =
                self.cq.get((self.consumed % ENTRIES) as usize * CQE_BYTES);
            let op_own = bytes[OP_OWN_OFFSET];
            let opcode = CqeOpcode::from_op_own(op_own).unwrap();
            if opcode == CqeOpcode::Invalid || u32::from(op_own & 1) != self.consumed / ENTRIES % 2
            {
                self.records
                    .word(CQ_RECORD)
                    .store(cq_consumer_record(self.consumed), Ordering::Release);
                return done;
            }
            self.consumed += 1;
            let (sent, received) = (RequesterCqe::parse(&bytes), ResponderCqe::parse(&bytes));
            check(
                u32::from_be_bytes([bytes[32], bytes[33], bytes[34], bytes[35]]),
                received.qpn,
            );
            done.push(match opcode {
                CqeOpcode::Requester => Done::Sent {
                    wqe: sent.wqe_counter,
                    bytes: sent.byte_count,
                },
                CqeOpcode::RequesterError | CqeOpcode::ResponderError => Done::Failed {
                    opcode,
                    wqe: sent.wqe_counter,
                    syndrome: ErrorCqe::parse(&bytes).syndrome(),
                },
                _ => {
                    let ResponderCqe {
                        imm,
                        byte_count: bytes,
                        wqe_counter: wqe,
                        source_qpn: source,
                        grh,
                        ..
                    } = received;
                    Done::Received {
                        opcode,
                        wqe,
                        bytes,
                        imm,
                        source,
                        grh,
                    }
                }
            });
        }
    }

    /// Polls both ends several times. Returns the completions of this end and of `with`.
    pub(crate) fn exchange(&mut self, with: &mut Self) -> (Vec<Done>, Vec<Done>) {
        for _ in 0..4 {
            self.hca.poll();
            with.hca.poll();
        }
        (self.poll(), with.poll())
    }

    /// Moves the queue pair back to RESET, and does what a driver does then.
    pub(crate) fn reset(&mut self) {
        assert!(self.hca.reset_qp(self.qpn));
        // The records are reset late, as in rdma-core: until then the device must not poll the
        // queues.
        self.hca.poll();
        self.records.word(QP_RECORD).store(0, Ordering::Release);
        self.set_record(0);
        (self.producer, self.posted) = (0, 0);
    }

    pub(crate) fn arm(&self) {
        let arm = CqArm {
            sequence: 0,
            solicited_only: false,
            consumed: self.consumed,
        };
        self.records
            .word(CQ_RECORD + 4)
            .store(arm.record(), Ordering::Release);
    }

    /// Returns the counter of the next WQE.
    pub(crate) fn next_wqe(&self) -> u16 {
        self.producer
    }

    pub(crate) fn pd(&self) -> u32 {
        self.pd
    }

    pub(crate) fn cqn(&self) -> u32 {
        self.cqn
    }
}
