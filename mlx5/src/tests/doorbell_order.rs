//! The order in which a device sees new WQEs, as recorded through [`Mmio`](crate::mmio::Mmio).
//! `tests/doorbell_order.rs` checks that the barriers are in release code.

use core::ptr::NonNull;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::control::Hook;
use crate::mmio::{self, Mmio};
use crate::provider::parts::UarParts;
use crate::queues::doorbell::Doorbell;
use crate::tests::null_device::Plays;
use crate::*;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    UdmaToDeviceBarrier,
    /// The record's new value, host order.
    Record(u32),
    MmioWcStart,
    /// Half of the register, and the 8 bytes.
    Eight(usize, Vec<u8>),
    Copy(usize, Vec<u8>),
    MmioFlushWrites,
}
use Step::*;

thread_local! {
    static STEPS: RefCell<Vec<Step>> = const { RefCell::new(Vec::new()) };
}

fn steps() -> Vec<Step> {
    STEPS.take()
}

/// Records the operations, without touching the register.
enum Recorder {}

impl Recorder {
    fn note(step: Step) {
        STEPS.with_borrow_mut(|steps| steps.push(step));
    }
}

fn bytes_at(from: *const u8, len: usize) -> Vec<u8> {
    // SAFETY: `len` bytes are readable at `from` (contract of `Mmio`'s functions, which call this
    // one).
    unsafe { std::slice::from_raw_parts(from, len) }.to_vec()
}

impl Mmio for Recorder {
    const COPY: &'static str = "recorded";

    fn udma_to_device_barrier() {
        Self::note(UdmaToDeviceBarrier);
    }
    fn store_record(record: &AtomicU32, value: u32) {
        record.store(value, Ordering::Relaxed);
        Self::note(Record(u32::from_be(value)));
    }
    fn mmio_wc_start() {
        Self::note(MmioWcStart);
    }
    unsafe fn store_8(register: *mut u8, from: *const u8) {
        Self::note(Eight(register.addr() % 512, bytes_at(from, 8)));
    }
    unsafe fn copy_line<const AT: usize>(_: *mut u8, _: *const u8) {}
    unsafe fn copy(register: *mut u8, from: *const u8, bytes: usize) {
        Self::note(Copy(register.addr() % 512, bytes_at(from, bytes)));
    }
    fn mmio_flush_writes() {
        Self::note(MmioFlushWrites);
    }
}

/// Returns the operations of a doorbell: barrier, record, barrier, register, flush; and no other.
fn doorbell(record: u32, register: Step) -> Vec<Step> {
    vec![
        UdmaToDeviceBarrier,
        Record(record),
        MmioWcStart,
        register,
        MmioFlushWrites,
    ]
}

struct Bench {
    device: NullDevice,
    qp: RcQp,
}

fn bench() -> Bench {
    let device = Device::open(DeviceSpec::Null(NullOptions::default())).unwrap();
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(8).unwrap();
    let srq = pd.create_srq(1, 0).unwrap();
    let mut qp = pd
        .create_qp(
            &cq,
            &cq,
            &srq,
            &QpConfig {
                max_send_wr: 32,
                max_inline_data: 220,
                ..QpConfig::default()
            },
        )
        .unwrap();
    qp.connect(&qp.address(), &ConnectOptions::default())
        .unwrap();
    qp.sq.doorbell().set_mmio::<Recorder>();
    Bench {
        device: device.null().unwrap(),
        qp,
    }
}

impl Bench {
    /// Posts a WRITE whose WQE takes this number of WQEBBs.
    fn post(&mut self, blocks: usize) {
        self.qp.post(&write(blocks), Signal::Reclaim, 0).unwrap();
    }

    /// Returns the bytes of `blocks` WQEBBs of the SQ, from counter `first` on.
    fn sq(&self, first: u16, blocks: u16) -> Vec<u8> {
        (first..first + blocks)
            .flat_map(|i| self.device.send_queue(self.qp.qpn(), i).unwrap().1)
            .collect()
    }

    /// Returns the first 8 bytes of the WQE at `counter`.
    fn head(&self, counter: u16) -> Vec<u8> {
        self.sq(counter, 1)[..8].to_vec()
    }
}

/// Returns a WRITE whose WQE takes `blocks` WQEBBs: 32 bytes of segments, then inline data, 28 in
/// the first WQEBB, 64 in each of the others. A WQE of five WQEBBs has an SGE too.
fn write(blocks: usize) -> Write<(Inline<'static>, Sge)> {
    let inline = Inline(&[7; 220][..(28 + 64 * (blocks - 1)).min(220)]);
    Write {
        addr: 0x1000,
        rkey: 5,
        payload: (
            inline,
            Sge {
                addr: 0x2000,
                len: u32::from(blocks == 5),
                lkey: 6,
            },
        ),
    }
}

#[test]
fn ring_copies_a_single_new_wqe_of_up_to_256_bytes_and_else_8_bytes_of_the_last() {
    let mut b = bench();
    b.qp.ring();
    assert_eq!(steps(), [], "nothing new");
    b.post(1);
    b.qp.ring();
    assert_eq!(steps(), doorbell(1, Copy(0, b.sq(0, 1))));
    b.post(4);
    b.qp.ring();
    assert_eq!(
        steps(),
        doorbell(5, Copy(256, b.sq(1, 4))),
        "the other half"
    );
    b.post(5);
    b.qp.ring();
    assert_eq!(
        steps(),
        doorbell(10, Eight(0, b.head(5))),
        "320 bytes do not fit"
    );
    b.post(1);
    b.post(2);
    b.qp.ring();
    assert_eq!(steps(), doorbell(13, Eight(256, b.head(11))), "two are new");
    b.qp.ring();
    assert_eq!(steps(), [], "rung already");
}

#[test]
fn post_and_ring_rings_as_ring_does_for_everything_new_and_not_at_all_for_a_refused_post() {
    let mut b = bench();
    b.qp.post_and_ring(&write(1), Signal::Reclaim, 0).unwrap();
    assert_eq!(steps(), doorbell(1, Copy(0, b.sq(0, 1))));
    b.qp.post_and_ring(&write(5), Signal::Reclaim, 0).unwrap();
    assert_eq!(
        steps(),
        doorbell(6, Eight(256, b.head(1))),
        "320 bytes do not fit"
    );
    b.post(2);
    b.qp.post_and_ring(&write(1), Signal::Reclaim, 0).unwrap();
    assert_eq!(steps(), doorbell(9, Eight(0, b.head(8))), "two are new");
    (9..32).for_each(|_| b.post(1));
    assert!(matches!(
        b.qp.post_and_ring(&write(1), Signal::Reclaim, 0),
        Err(PostError::QueueFull { .. })
    ));
    assert_eq!(steps(), []);
    b.qp.ring();
    assert_eq!(steps(), doorbell(32, Eight(256, b.head(31))));
}

#[test]
fn ring_doorbell_stores_8_bytes_also_of_a_single_wqe() {
    let mut b = bench();
    b.qp.ring_doorbell();
    assert_eq!(steps(), []);
    b.post(1);
    b.qp.ring_doorbell();
    assert_eq!(steps(), doorbell(1, Eight(0, b.head(0))));
    b.post(1);
    b.post(1);
    b.qp.ring_doorbell();
    assert_eq!(steps(), doorbell(3, Eight(256, b.head(2))));
}

#[test]
fn ring_doorbell_bf_copies_the_last_wqe_however_many_are_new() {
    let mut b = bench();
    b.post(1);
    b.post(3);
    b.qp.ring_doorbell_bf();
    assert_eq!(steps(), doorbell(4, Copy(0, b.sq(1, 3))));
    b.post(5);
    b.qp.ring_doorbell_bf();
    assert_eq!(
        steps(),
        doorbell(9, Eight(256, b.head(4))),
        "320 bytes do not fit"
    );
}

#[test]
fn a_batch_is_flushed_once_and_is_what_the_send_queue_holds() {
    let mut b = bench();
    b.post(1);
    let mut batch = b.qp.blueflame_batch();
    let before = steps();
    for blocks in [1, 2, 1] {
        batch.post(&write(blocks), Signal::Reclaim, 0).unwrap();
    }
    assert_eq!(steps(), [], "before `finish`");
    batch.finish();
    assert_eq!(
        before,
        doorbell(1, Copy(0, b.sq(0, 1))),
        "what was posted before is announced before"
    );
    assert_eq!(steps(), doorbell(5, Copy(256, b.sq(1, 4))));
    b.qp.blueflame_batch().finish();
    assert_eq!(steps(), [], "an empty batch");
    let mut batch = b.qp.blueflame_batch();
    for _ in 0..5 {
        batch.post(&write(1), Signal::Reclaim, 0).unwrap();
    }
    batch.finish();
    assert_eq!(
        steps(),
        doorbell(10, Eight(0, b.head(9))),
        "five WQEBBs do not fit"
    );
    let mut batch = b.qp.blueflame_batch();
    batch.post(&write(1), Signal::Reclaim, 0).unwrap();
    drop(batch);
    b.post(1);
    b.qp.ring();
    assert_eq!(
        steps(),
        doorbell(12, Eight(256, b.head(11))),
        "a dropped batch stays posted"
    );
}

#[test]
fn a_batch_that_passes_the_end_of_the_ring_is_announced_with_8_bytes() {
    let mut b = bench();
    for _ in 0..31 {
        b.post(1);
    }
    b.qp.ring();
    assert_eq!(b.qp.sq.complete(30), Some(0));
    steps();
    let mut batch = b.qp.blueflame_batch();
    batch.post(&write(2), Signal::Reclaim, 0).unwrap();
    batch.finish();
    assert_eq!(
        steps(),
        doorbell(34, Eight(256, b.head(32))),
        "a NOP, then two WQEBBs at the ring's start"
    );
    assert_eq!(b.qp.sq.complete(32), Some(0));
    // `ring` copies the first WQE after the ring's end to the register, like any other single WQE.
    for _ in 0..30 {
        b.post(1);
    }
    b.qp.ring();
    assert_eq!(b.qp.sq.complete(63), Some(0));
    steps();
    b.post(1);
    b.qp.ring();
    assert_eq!(steps(), doorbell(65, Copy(256, b.sq(64, 1))));
}

fn copies_exactly<M: Mmio>() {
    #[repr(align(64))]
    struct Aligned([u8; 320]);
    let mut from = Aligned([0; 320]);
    from.0
        .iter_mut()
        .enumerate()
        .for_each(|(i, b)| *b = i as u8 | 1);
    for bytes in [64, 128, 192, 256] {
        let mut to = Aligned([0xa5; 320]);
        // SAFETY: both arrays have 320 bytes, more than `bytes`, and are aligned to 64.
        unsafe { M::copy(to.0.as_mut_ptr(), from.0.as_ptr(), bytes) };
        M::mmio_flush_writes();
        assert_eq!(to.0[..bytes], from.0[..bytes]);
        assert!(to.0[bytes..].iter().all(|&b| b == 0xa5), "beyond {bytes}");
    }
    let mut to = Aligned([0xa5; 320]);
    // SAFETY: as above.
    unsafe { M::store_8(to.0.as_mut_ptr(), from.0.as_ptr()) };
    assert_eq!(to.0[..8], from.0[..8]);
    assert!(to.0[8..].iter().all(|&b| b == 0xa5));
}

#[test]
fn every_copy_routine_that_this_processor_has_copies_exactly_that() {
    copies_exactly::<mmio::Ordinary>();
    #[cfg(target_arch = "x86_64")]
    {
        copies_exactly::<mmio::Sse2>();
        if std::arch::is_x86_feature_detected!("avx") {
            copies_exactly::<mmio::Avx>();
        }
        if std::arch::is_x86_feature_detected!("avx512f") {
            copies_exactly::<mmio::Avx512>();
        }
    }
    #[cfg(target_arch = "aarch64")]
    copies_exactly::<mmio::Stnp>();
}

/// A BlueFlame register in ordinary memory.
#[repr(align(512))]
struct Register([u8; 512]);

#[repr(align(64))]
struct Wqe([u8; 64]);

#[test]
fn a_register_without_blueflame_gets_8_bytes_at_one_place_and_one_that_nobody_reads_none_whatever_is_asked_for()
 {
    for (kind, written) in [(RegisterKind::DoorbellOnly, 8), (RegisterKind::Unread, 0)] {
        let (mut register, record) = (Register([0xa5; 512]), AtomicU32::new(0));
        let uar = UarParts {
            half: Rc::new(Cell::new(register.0.as_mut_ptr())),
            kind,
            register_index: 0,
        };
        let mut doorbell = Doorbell::new(&uar, NonNull::from(&record), Hook::Nothing);
        for producer in 1..4u16 {
            let wqe = Wqe([producer as u8; 64]);
            // SAFETY: the WQE has 64 bytes and is aligned to 64; the register and the record
            // outlive the doorbell.
            unsafe { doorbell.ring(producer, wqe.0.as_ptr(), 64) };
            // SAFETY: as above.
            let bytes = unsafe { uar.half.get().cast::<[u8; 512]>().read() };
            assert!(
                bytes[..written].iter().all(|byte| *byte == producer as u8)
                    && bytes[written..].iter().all(|byte| *byte == 0xa5)
            );
            assert_eq!(record.load(Ordering::Relaxed), u32::from(producer).to_be());
        }
    }
}

#[test]
fn queue_pairs_that_share_a_register_write_its_halves_by_turns() {
    let (mut register, records) = (Register([0; 512]), [const { AtomicU32::new(0) }; 2]);
    let at = register.0.as_mut_ptr();
    let uar = UarParts {
        half: Rc::new(Cell::new(at)),
        kind: RegisterKind::Ordinary,
        register_index: 0,
    };
    let mut doorbells = records
        .each_ref()
        .map(|record| Doorbell::new(&uar, NonNull::from(record), Hook::Nothing));
    for (i, who) in [0, 1, 1, 0, 1, 0, 0].into_iter().enumerate() {
        let wqe = Wqe([i as u8 + 1; 64]);
        // SAFETY: the WQE has 64 bytes and is aligned to 64; the register and the records outlive
        // the doorbells.
        unsafe { doorbells[who].ring(1, wqe.0.as_ptr(), if i % 2 == 0 { 64 } else { 0 }) };
        // SAFETY: as above.
        let bytes = unsafe { at.cast::<[u8; 512]>().read() };
        let previous = i as u8;
        assert_eq!(
            [bytes[i % 2 * 256], bytes[(i + 1) % 2 * 256]],
            [i as u8 + 1, previous],
            "doorbell {i}"
        );
    }
}
