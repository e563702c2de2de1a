//! The lying end: a real core over a raw queue pair, and its changes.

use crate::link::{Emit, Event, Link, LinkConfig, Request, Window};
use crate::ring::{RingSize, RingView};
use crate::wire::{
    CallId, FLOW_METADATA_SIZE, FlowMetadata, FlowWords, Header, PublishedRecord, RESPONSE_FLAG,
    encode_imm, padded,
};
use crate::{EXCHANGE_RECORD_SIZE, ExchangeRecord};
use mlx5::{
    Access, ConnectOptions, Cq, Device, DeviceSpec, Inline, Mr, Pd, QpConfig, RcQp, Read,
    ReceiveSource, Send, SendImm, Sge, Signal, WriteImm,
};

use super::victim::{BATCHES, RING};

/// Number of receives of the liar's queue pair: more than the victim may have batches in flight.
const RECEIVES: u32 = 64;
/// The offset to which the peer's record is READ: after the liar's own record.
const READ_AT: usize = FLOW_METADATA_SIZE;
/// The word that the completions of all operations of a liar return.
const WRITTEN: u64 = 0;
const READ: u64 = 1;

/// The shared resources of all liars of one device: each liar begins with the bytes of the last
/// liar in its rings.
pub(crate) struct Home {
    send: Mr,
    recv: Mr,
    /// The published record, and the destination of a READ of the peer's record.
    record: Mr,
    /// Memory from which lies are written.
    scratch: Mr,
    send_cq: Cq,
    recv_cq: Cq,
    pd: Pd,
    _device: Device,
}

impl Home {
    pub(crate) fn new(spec: &DeviceSpec) -> Self {
        let device = Device::open(spec).unwrap();
        let pd = device.alloc_pd().unwrap();
        let alloc = |bytes: u64, access| pd.alloc(bytes as usize, access).unwrap();
        Self {
            send: alloc(RING, Access::LOCAL_WRITE),
            recv: alloc(RING, Access::LOCAL_WRITE | Access::REMOTE_WRITE),
            record: alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_READ),
            scratch: alloc(2 * RING, Access::LOCAL_WRITE),
            send_cq: device.create_cq(1024).unwrap(),
            recv_cq: device.create_cq(1024).unwrap(),
            pd,
            _device: device,
        }
    }

    /// Takes the completions that a liar left in the completion queues.
    pub(crate) fn forget(&mut self) {
        while self.send_cq.poll(64, |_| ()) + self.recv_cq.poll(64, |_| ()) > 0 {}
    }
}

fn view(ring: &Mr) -> RingView {
    // SAFETY: the region lives in `Home`, longer than any liar, and is reached by copies only.
    unsafe { RingView::new(ring.as_ptr(), RingSize::new(RING).unwrap()) }
}

/// Changes an encoded record: all bytes, one word, or one byte.
pub(crate) fn damage_record(record: &mut [u8; EXCHANGE_RECORD_SIZE], rng: &mut fastrand::Rng) {
    match rng.u8(..4) {
        0 => record.fill_with(|| rng.u8(..)),
        // One word of the record.
        1..=2 => {
            let at = 8 * rng.usize(..EXCHANGE_RECORD_SIZE / 8);
            let mut word = [0; 8];
            word.copy_from_slice(&record[at..at + 8]);
            record[at..at + 8]
                .copy_from_slice(&odd_number(u64::from_le_bytes(word), rng).to_le_bytes());
        }
        _ => record[rng.usize(..EXCHANGE_RECORD_SIZE)] ^= 1 << rng.u8(..8),
    }
}

/// Returns a number near `word`, or near a number at which a counter may wrap.
fn odd_number(word: u64, rng: &mut fastrand::Rng) -> u64 {
    let near = [
        word,
        0,
        1 << 16,
        1 << 31,
        1 << 32,
        1 << 37,
        1 << 63,
        RING,
        RING / 4,
    ][rng.usize(..9)];
    let off = [32, !31, 1, !0, 0][rng.usize(..5)];
    near.wrapping_add(off)
}

/// Returns a number near a number at which a counter may wrap, or a small number.
fn odd_u32(rng: &mut fastrand::Rng) -> u32 {
    let near = [0, 1 << 16, 1 << 20, 1 << 31, (RING / 32) as u32][rng.usize(..5)];
    u32::wrapping_add(near, [0, 1, 2, !0, !1][rng.usize(..5)])
}

pub(crate) struct Liar {
    qp: RcQp,
    link: Link<()>,
    peer: ExchangeRecord,
    held: Vec<Request>,
    record: PublishedRecord,
    /// Batches that were posted: each with its place, its immediate and its bytes.
    sent: Vec<(Emit, Vec<u8>)>,
    /// Percentage of the batches that are changed.
    lies: u8,
}

impl Liar {
    pub(crate) fn new(home: &Home, peer: &ExchangeRecord, rng: &mut fastrand::Rng) -> Self {
        let receives = ReceiveSource::Own {
            depth: RECEIVES,
            max_sge: 0,
        };
        let mut qp = home
            .pd
            .create_qp(&home.send_cq, &home.recv_cq, receives, &QpConfig::default())
            .unwrap();
        // Without retries, this queue pair fails at once when the victim's is gone.
        qp.connect(
            &peer.address,
            &ConnectOptions {
                retry_count: 0,
                rnr_retry: 0,
                ..ConnectOptions::default()
            },
        )
        .unwrap();
        let config = LinkConfig {
            local_credit: RING / 4,
            peer_credit: peer.initial_credit,
            local_batches: BATCHES,
            peer_batches: peer.batches,
            send_start: 0,
            recv_start: 0,
            keepalive_ns: u64::MAX,
            stall_ns: u64::MAX,
            idle_keepalive_ns: u64::MAX,
            idle_timeout_ns: u64::MAX,
            reads_whole_words: true,
            window: Window::Off,
        };
        let words = FlowWords {
            consumer_pos: 0,
            credit: RING / 4,
            batches_received: 0,
        };
        let mut liar = Self {
            qp,
            link: Link::new(view(&home.send), view(&home.recv), &config),
            peer: *peer,
            held: Vec::new(),
            record: PublishedRecord {
                words,
                heartbeat: 0,
                batches_taken: 0,
            },
            sent: Vec::new(),
            lies: [0, 5, 30, 100][rng.usize(..4)],
        };
        liar.publish(home);
        liar.refill();
        liar
    }

    /// Returns the properties of this end that the victim gets.
    pub(crate) fn record(&self, home: &Home) -> ExchangeRecord {
        ExchangeRecord {
            address: self.qp.address(),
            recv_ring_rkey: home.recv.rkey(),
            recv_ring_addr: home.recv.addr(),
            ring_size: RingSize::new(RING).unwrap(),
            published_addr: home.record.addr(),
            published_rkey: home.record.rkey(),
            // The word stays 0: no handler runs.
            activity_addr: home.record.addr() + 2 * READ_AT as u64,
            activity_rkey: home.record.rkey(),
            batches: BATCHES,
            initial_credit: RING / 4,
        }
    }

    fn publish(&self, home: &Home) {
        home.record.write(0, &self.record.encode()).unwrap();
    }

    fn refill(&mut self) {
        while self.qp.free_receives() > 0 && self.qp.post_receive(&[], 0).is_ok() {}
        self.qp.ring_receives();
    }

    /// Does one step of an honest end, or one lie. Errors of the queue pair are ignored.
    pub(crate) fn step(&mut self, home: &mut Home, rng: &mut fastrand::Rng) {
        match rng.u8(..16) {
            0..=2 => self.call(rng),
            3..=5 => self.answer(rng),
            6..=8 => self.flush(home, rng),
            9..=11 => self.take(home),
            _ if rng.u8(..100) >= self.lies => {}
            12 => self.lie_of_words(home, rng),
            13 => self.send_again(home, rng),
            _ => self.forge(home, rng),
        }
        self.qp.ring();
    }

    fn call(&mut self, rng: &mut fastrand::Rng) {
        let (len, allowance) = if rng.u8(..4) == 0 {
            (rng.usize(..500), rng.usize(..700))
        } else {
            (rng.usize(..40), rng.usize(..40))
        };
        if rng.u8(..50) == 0 {
            self.link.shut_down();
        }
        let _refused = self.link.call(&[7; 500][..len], (), allowance);
    }

    fn answer(&mut self, rng: &mut fastrand::Rng) {
        if self.held.is_empty() {
            return;
        }
        let request = self.held.swap_remove(rng.usize(..self.held.len()));
        let len = rng.usize(..=request.max_reply());
        let _closed = match rng.u8(..4) {
            0 => self.link.refuse(request),
            _ => self.link.reply(request, &vec![9; len]),
        };
    }

    /// Flushes, READs and publishes as a driver does, except that batches may be changed.
    fn flush(&mut self, home: &Home, rng: &mut fastrand::Rng) {
        let mut emits = Vec::new();
        let _never: Result<(), ()> = self.link.flush(|emit: Emit| {
            let mut bytes = vec![0; emit.bytes as usize];
            home.send.read(emit.offset as usize, &mut bytes).unwrap();
            emits.push((emit, bytes));
            Ok(())
        });
        for (mut emit, mut bytes) in emits {
            if rng.u8(..100) < self.lies {
                change(&mut emit, &mut bytes, rng);
            }
            self.post(home, emit, &bytes);
            self.sent.push((emit, bytes));
        }
        if self.link.poll_read(0) {
            let into = home.record.sge(READ_AT, FLOW_METADATA_SIZE as u32).unwrap();
            let read = Read {
                addr: self.peer.published_addr,
                rkey: self.peer.published_rkey,
                into,
            };
            if self.qp.post(&read, Signal::Always, READ).is_ok() {
                self.link.read_posted();
            }
        }
        if let Some(words) = self.link.publish() {
            self.record.words = words;
        }
        self.record.heartbeat = self.link.beat().unwrap_or(self.record.heartbeat);
        self.record.batches_taken = self.link.batches_taken();
        self.publish(home);
    }

    /// Posts a WRITE with immediate whose bytes are in the scratch memory. The device executes the
    /// WRITE in the doorbell, so the memory can be used again at once.
    fn post(&mut self, home: &Home, emit: Emit, bytes: &[u8]) {
        home.scratch.write(0, bytes).unwrap();
        let write = WriteImm {
            addr: self.peer.recv_ring_addr.wrapping_add(emit.offset),
            rkey: self.peer.recv_ring_rkey,
            imm: emit.imm,
            payload: Sge {
                len: bytes.len() as u32,
                ..home.scratch.sge(0, 1).unwrap()
            },
        };
        let _broken = self.qp.post(&write, Signal::Always, WRITTEN);
        self.qp.ring();
    }

    /// Takes the arrivals, and the completions of the send queue.
    fn take(&mut self, home: &mut Home) {
        let Self { qp, link, held, .. } = self;
        let qpn = qp.qpn();
        home.recv_cq.poll(64, |cqe| {
            if cqe.qpn() == qpn && cqe.result().is_ok() {
                qp.complete_receive(&cqe);
                link.on_imm(cqe.imm());
                while let Some(event) = link.next_event() {
                    if let Event::Requests(count) = event {
                        held.extend((0..count).filter_map(|_| link.next_request()));
                    }
                }
            }
        });
        let mut is_read = false;
        home.send_cq.poll(64, |cqe| {
            is_read |= cqe.qpn() == qpn && qp.complete(&cqe) == Some(READ) && cqe.result().is_ok()
        });
        if is_read {
            let mut record = [0; FLOW_METADATA_SIZE];
            home.record.read(READ_AT, &mut record).unwrap();
            link.on_read_done(&record);
        }
        self.refill();
    }

    /// Stores a record with changed words for the READs of the victim.
    fn lie_of_words(&mut self, home: &Home, rng: &mut fastrand::Rng) {
        let mut record = self.record.encode();
        if rng.u8(..8) == 0 {
            record[20 + rng.usize(..4)] = rng.u8(..);
        } else {
            change_words(&mut record, rng);
        }
        home.record.write(0, &record).unwrap();
    }

    /// Posts once more some batches that were posted before, at the offsets that they had.
    fn send_again(&mut self, home: &Home, rng: &mut fastrand::Rng) {
        if self.sent.is_empty() {
            return;
        }
        for _ in 0..[1, 1, 2, 8][rng.usize(..4)] {
            let (emit, bytes) = self.sent[rng.usize(..self.sent.len())].clone();
            self.post(home, emit, &bytes);
        }
    }

    /// Sends something that copyrpc never sends: a forged batch instead of the next batch, or
    /// another operation.
    fn forge(&mut self, home: &Home, rng: &mut fastrand::Rng) {
        let operation = rng.u8(..16);
        let _broken = match operation {
            0 => self.qp.post(&Send { payload: () }, Signal::Always, WRITTEN),
            1 => self.qp.post(
                &Send {
                    payload: Inline(b"no batch"),
                },
                Signal::Always,
                WRITTEN,
            ),
            2 => self.qp.post(
                &SendImm {
                    imm: odd_u32(rng),
                    payload: (),
                },
                Signal::Always,
                WRITTEN,
            ),
            3 => {
                // A READ of an address near the victim's record, whose memory the key may not
                // permit.
                let into = home.record.sge(READ_AT, FLOW_METADATA_SIZE as u32).unwrap();
                let addr = odd_number(self.peer.published_addr, rng);
                let rkey = [
                    self.peer.published_rkey,
                    self.peer.recv_ring_rkey,
                    odd_u32(rng),
                ][rng.usize(..3)];
                self.qp
                    .post(&Read { addr, rkey, into }, Signal::Always, WRITTEN)
            }
            _ => {
                let (emit, bytes) = self.forged_batch(rng);
                self.post(home, emit, &bytes);
                return;
            }
        };
    }

    /// Returns a batch of at most three messages with plausible or arbitrary headers, in most cases
    /// right behind the last batch.
    fn forged_batch(&self, rng: &mut fastrand::Rng) -> (Emit, Vec<u8>) {
        let count = rng.u32(..4);
        let words = self.record.words;
        let metadata = FlowMetadata {
            words,
            message_count: count,
            is_closing: rng.u8(..8) == 0,
        };
        let mut bytes = metadata.encode().to_vec();
        for _ in 0..count {
            let len = [0, 20, 21, 500, 501, 700, 1000][rng.usize(..7)];
            let id = CallId::new(rng.u32(..3), rng.u32(..3)).to_request();
            let header = match rng.u8(..4) {
                0 => Header {
                    call_id: id,
                    piggyback: rng.u32(..26),
                    len,
                },
                1..=2 => Header {
                    call_id: id | RESPONSE_FLAG,
                    piggyback: rng.u32(..6),
                    len,
                },
                _ => Header {
                    call_id: odd_u32(rng),
                    piggyback: odd_u32(rng),
                    len: if rng.bool() { len } else { odd_u32(rng) },
                },
            };
            let at = bytes.len();
            bytes.extend_from_slice(&header.encode());
            bytes.resize(at + padded(u64::from(len)) as usize, 3);
        }
        let offset = match self.sent.last() {
            Some((last, _)) if rng.u8(..4) > 0 => (last.offset + last.bytes) % RING,
            _ => rng.u64(..RING / 32) * 32,
        };
        bytes.truncate((RING - offset) as usize);
        (
            Emit {
                offset,
                bytes: bytes.len() as u64,
                imm: encode_imm(bytes.len() as u64),
                is_last: true,
                signal: false,
            },
            bytes,
        )
    }
}

/// Changes one of the three words.
fn change_words(metadata: &mut [u8], rng: &mut fastrand::Rng) {
    let at = [0, 8, 24][rng.usize(..3)];
    let mut word = [0; 8];
    word.copy_from_slice(&metadata[at..at + 8]);
    metadata[at..at + 8].copy_from_slice(&odd_number(u64::from_le_bytes(word), rng).to_le_bytes());
}

/// Changes a batch before it is posted.
fn change(emit: &mut Emit, bytes: &mut [u8], rng: &mut fastrand::Rng) {
    let header_at = FLOW_METADATA_SIZE + 4 * rng.usize(..3);
    match rng.u8(..12) {
        0..=1 => change_words(bytes, rng),
        2 => bytes[16..20].copy_from_slice(&odd_u32(rng).to_le_bytes()),
        3 => bytes[20 + rng.usize(..4)] ^= 1 << rng.u8(..8),
        4 => bytes[16] = bytes[16].wrapping_add([1, !0][rng.usize(..2)]),
        5..=6 if bytes.len() > FLOW_METADATA_SIZE => {
            bytes[header_at..header_at + 4].copy_from_slice(&odd_u32(rng).to_le_bytes())
        }
        7 => emit.imm = odd_u32(rng),
        8 => emit.imm = emit.imm.wrapping_add([1, 2, !0][rng.usize(..3)]),
        9 => emit.offset = odd_number(emit.offset, rng) % (2 * RING),
        10 => bytes.iter_mut().for_each(|byte| *byte = rng.u8(..)),
        _ => bytes[rng.usize(..bytes.len())] ^= 1 << rng.u8(..8),
    }
}
