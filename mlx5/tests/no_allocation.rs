//! Nothing on the data path allocates once everything is set up: not posting, ringing, polling, nor the software HCA underneath, and not
//! when it has to wait and try again either.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mlx5::*;

/// The system's allocator, which counts this thread's calls.
struct Counting;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    // A thread that ends may have no counter any more.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

// SAFETY: everything is the system allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's.
        unsafe { System.realloc(at, layout, bytes) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller's.
        unsafe { System.dealloc(at, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocator calls that `f` makes.
fn calls_of(f: impl FnOnce()) -> u64 {
    let before = CALLS.get();
    f();
    CALLS.get() - before
}

struct End {
    qp: RcQp,
    send_cq: Cq,
    recv_cq: MonoCq<u32>,
    srq: Srq,
    mr: Mr,
}

fn pair(clock: &Arc<AtomicU64>) -> (End, End) {
    let fabric = LocalFabric::new();
    let end = || {
        let clock = Clock::Manual(Arc::clone(clock));
        let options = SoftOptions { fabric: FabricSpec::Local(fabric.clone()), arena_bytes: 1 << 20, clock, ..Default::default() };
        let device = Device::open(&DeviceSpec::Soft(options)).unwrap();
        let pd = device.alloc_pd();
        let send_cq = device.create_cq(64).unwrap();
        let mut recv_cq = device.create_mono_cq(64).unwrap();
        let srq = pd.create_srq(15, 0).unwrap();
        let qp =
            pd.create_qp(&send_cq, &recv_cq, &srq, &QpConfig { max_send_wr: 64, max_inline_data: 220, ..QpConfig::default() }).unwrap();
        recv_cq.register(qp.qpn(), 7);
        let mr = pd.alloc(8192, Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ).unwrap();
        End { qp, send_cq, recv_cq, srq, mr }
    };
    let (mut a, mut b) = (end(), end());
    a.qp.connect(&b.qp.address(), &ConnectOptions::default()).unwrap();
    b.qp.connect(&a.qp.address(), &ConnectOptions::default()).unwrap();
    (a, b)
}

#[test]
fn messages_reads_receives_and_retries_allocate_nothing() {
    let clock = Arc::<AtomicU64>::default();
    let (mut a, mut b) = pair(&clock);
    let data = [0x5a; 220];
    let (mut sent, mut received, mut waited) = (0u64, 0u32, 0u32);
    let mut posted = 0u64;
    let calls = calls_of(|| {
        for round in 0..2000u32 {
            let (addr, rkey) = (b.mr.addr(), b.mr.rkey());
            // Every other round the receives come too late, and the messages are tried again.
            let late = round % 2 == 1;
            let receives = |srq: &mut Srq| {
                (0..4).for_each(|i| srq.post(&[], i).unwrap());
                srq.ring();
            };
            if !late {
                receives(&mut b.srq);
            }
            let sge = a.mr.sge(0, 1024).unwrap();
            let mut post = |qp: &mut RcQp, kind| {
                posted += 1;
                match kind {
                    0 => qp.post(&WriteImm { addr, rkey, imm: round, payload: Inline(&data[..28]) }, Signal::Reclaim, posted),
                    1 => qp.post(&WriteImm { addr, rkey, imm: round, payload: sge }, Signal::Reclaim, posted),
                    2 => qp.post(&WriteImm { addr, rkey, imm: round, payload: (Inline(&data[..204]), sge) }, Signal::Reclaim, posted),
                    3 => qp.post(&WriteImm { addr, rkey, imm: round, payload: () }, Signal::Reclaim, posted),
                    4 => qp.post(&Write { addr, rkey, payload: sge }, Signal::Reclaim, posted),
                    _ => qp.post(&Read { addr, rkey, into: a.mr.sge(4096, 512).unwrap() }, Signal::Always, posted),
                }
                .unwrap();
            };
            match round % 3 {
                0 => (0..6).for_each(|kind| {
                    post(&mut a.qp, kind);
                    a.qp.ring();
                }),
                1 => {
                    (0..6).for_each(|kind| post(&mut a.qp, kind));
                    a.qp.ring_doorbell_bf();
                }
                _ => {
                    (1..4).for_each(|kind| post(&mut a.qp, kind));
                    a.qp.ring_doorbell();
                    let mut batch = a.qp.blueflame_batch();
                    batch.post(&WriteImm { addr, rkey, imm: round, payload: Inline(&data[..28]) }, Signal::Reclaim, 0).unwrap();
                    batch.post(&Read { addr, rkey, into: a.mr.sge(4096, 512).unwrap() }, Signal::Always, 0).unwrap();
                    batch.finish();
                    posted += 2;
                }
            }
            if late {
                assert_eq!(b.recv_cq.poll(16, |_, _| ()), 0);
                receives(&mut b.srq);
                assert_eq!(a.send_cq.poll(16, |_| ()), 0);
                waited += 1;
                clock.fetch_add(ConnectOptions::default().rnr_timer_ns, Ordering::Relaxed);
                let qp = &mut a.qp;
                a.send_cq.poll(16, |cqe| sent += qp.complete_each(&cqe, |_| ()) as u64);
            }
            let (qp, srq) = (&mut a.qp, &mut b.srq);
            a.send_cq.poll(16, |cqe| sent += qp.complete_each(&cqe, |_| ()) as u64);
            b.recv_cq.poll(16, |value, cqe| {
                assert_eq!((value, cqe.imm()), (Some(&7), round));
                srq.complete(cqe.wqe_counter()).unwrap();
                received += 1;
            });
        }
    });
    assert_eq!((sent, received, waited), (posted, 8000, 1000), "everything arrived");
    assert_eq!(calls, 0, "allocator calls");
    assert!(calls_of(|| drop(std::hint::black_box(Box::new(1)))) == 2, "the counter counts");
}
