//! The program whose instructions `scripts/instructions` counts: one thread that does one kind of operation so many times.
//!
//! Arguments: what to do, and how often. The script runs it twice with different counts under callgrind and divides the difference, so
//! set-up does not count; for the software HCA's share callgrind collects inside its two entry points only. `--list` prints one line per kind
//! for the script: name, bound in instructions (`-` if there is none), the counts of the two runs, what to collect (`all`, `hca`), and what
//! an operation is. `--copy-routine` prints which routine fills a write-combining BlueFlame register here.
//!
//! Posts run on a null device with a write-combining register, in steady state: every 1,024 WQEBBs the device writes one completion, which
//! is polled and given to `complete`. So a post's count contains its share of that, and of this program's loop.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a program for measuring")]

use std::hint::black_box;

use mlx5::wire::{MiniCqe, RequesterCqe, ResponderCqe};
use mlx5::*;

/// What can be counted.
struct Kind {
    name: &'static str,
    bound: Option<u32>,
    /// Operations of the two runs.
    counts: (usize, usize),
    collect: &'static str,
    what: &'static str,
    run: fn(usize),
}

const KINDS: &[Kind] = &[
    Kind {
        name: "post_inline28",
        bound: Some(107),
        counts: (10_240, 30_720),
        collect: "all",
        what: "post one WRITE+IMM of 28 B inline, unsignaled, and ring",
        run: |n| post_inline::<28>(n, 1, true),
    },
    Kind {
        name: "post_batch8_inline28",
        bound: Some(60),
        counts: (10_240, 30_720),
        collect: "all",
        what: "the same, 8 WQEs to a doorbell; per WQE",
        run: |n| post_inline::<28>(n, 8, true),
    },
    Kind {
        name: "post_inline220",
        bound: Some(140),
        counts: (10_240, 30_720),
        collect: "all",
        what: "post one WRITE+IMM of 220 B inline, unsignaled, and ring",
        run: |n| post_inline::<220>(n, 1, true),
    },
    Kind {
        name: "post_sge1024",
        bound: Some(97),
        counts: (10_240, 30_720),
        collect: "all",
        what: "post one WRITE+IMM of a 1,024 B SGE, unsignaled, and ring",
        run: post_sge,
    },
    Kind {
        name: "post_inline28_any",
        bound: None,
        counts: (10_240, 30_720),
        collect: "all",
        what: "as post_inline28, of a length that the compiler does not know",
        run: |n| post_inline::<28>(n, 1, false),
    },
    Kind {
        name: "post_batch8_inline28_any",
        bound: None,
        counts: (10_240, 30_720),
        collect: "all",
        what: "as post_batch8_inline28, of a length that the compiler does not know",
        run: |n| post_inline::<28>(n, 8, false),
    },
    Kind {
        name: "post_inline220_any",
        bound: None,
        counts: (10_240, 30_720),
        collect: "all",
        what: "as post_inline220, of a length that the compiler does not know",
        run: |n| post_inline::<220>(n, 1, false),
    },
    Kind {
        name: "poll_mono",
        bound: Some(46),
        counts: (4_096, 12_288),
        collect: "all",
        what: "one SRQ receive from MonoCq::poll(16), look-up and callback included",
        run: |n| poll_mono(n, false),
    },
    Kind {
        name: "poll_mono_srq",
        bound: None,
        counts: (4_096, 12_288),
        collect: "all",
        what: "the same, and Srq::complete in the callback",
        run: |n| poll_mono(n, true),
    },
    Kind {
        name: "poll_compressed",
        bound: Some(20),
        counts: (4_096, 12_288),
        collect: "all",
        what: "one SRQ receive of a compressed session of 16 from MonoCq::poll(16), look-up and callback included",
        run: poll_compressed,
    },
    Kind {
        name: "hca_write_imm64",
        bound: Some(400),
        counts: (8_192, 24_576),
        collect: "hca",
        what: "software HCA: one WRITE+IMM of a 64 B SGE, 8 to a doorbell, and its CQE at the owner",
        run: |n| write_imm(n, 8),
    },
    Kind {
        name: "hca_write_imm64_single",
        bound: None,
        counts: (8_192, 24_576),
        collect: "hca",
        what: "the same, 1 to a doorbell",
        run: |n| write_imm(n, 1),
    },
];

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--list"] => {
            for k in KINDS {
                let bound = k.bound.map_or("-".to_owned(), |b| b.to_string());
                println!("{}|{bound}|{}|{}|{}|{}", k.name, k.counts.0, k.counts.1, k.collect, k.what);
            }
        }
        ["--copy-routine"] => println!("{}", RegisterKind::WriteCombining.copy_routine()),
        // `cargo bench` starts every benchmark like this.
        [.., "--bench"] => println!("instructions: counted by scripts/instructions"),
        [name, count] => {
            let kind = KINDS.iter().find(|k| k.name == name).unwrap_or_else(|| panic!("no such operation: {name}"));
            (kind.run)(count.parse().unwrap());
        }
        _ => panic!("usage: instructions OPERATION COUNT | --list | --copy-routine"),
    }
}

/// WQEBBs between two completions of a post benchmark: a quarter of its queue, which is how often `Signal::Reclaim` asks for one.
const RECLAIM_EVERY: usize = 1024;

struct Poster {
    device: NullDevice,
    qp: RcQp,
    cq: Cq,
    mr: Mr,
    posted: u16,
}

impl Poster {
    fn new() -> Self {
        let device = Device::open(&DeviceSpec::Null(NullOptions { register: RegisterKind::WriteCombining })).unwrap();
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(64).unwrap();
        let srq = pd.create_srq(1, 0).unwrap();
        let mut qp = pd
            .create_qp(&cq, &cq, &srq, &QpConfig { max_send_wr: 4 * RECLAIM_EVERY as u32, max_inline_data: 220, ..QpConfig::default() })
            .unwrap();
        qp.connect(&qp.address(), &ConnectOptions::default()).unwrap();
        let mr = pd.alloc(4096, Access::LOCAL_WRITE).unwrap();
        Self { device: device.null().unwrap(), qp, cq, mr, posted: 0 }
    }

    /// `RECLAIM_EVERY` WQEBBs more were posted, in WQEs of `blocks`.
    #[inline(never)]
    fn reclaim(&mut self, blocks: usize) {
        self.posted = self.posted.wrapping_add(RECLAIM_EVERY as u16);
        let wqe_counter = self.posted.wrapping_sub(blocks as u16);
        let cqe = RequesterCqe { wqe_opcode: 9, qpn: self.qp.qpn(), wqe_counter, byte_count: 0, user_index: 0 };
        assert!(self.device.write_cqe(self.cq.cqn(), &cqe.emit(), CqeOpcode::Requester));
        let qp = &mut self.qp;
        assert_eq!(self.cq.poll(1, |cqe| assert!(qp.complete(&cqe).is_some())), 1);
    }

    /// Posts `n` times what `op` makes of a number, `batch` to a doorbell.
    #[inline(always)]
    fn run<O: RcOperation>(&mut self, n: usize, blocks: usize, batch: usize, op: impl Fn(u32) -> O) {
        let mut i = 0;
        while i < n {
            let round = i + RECLAIM_EVERY / blocks;
            while i != round {
                for _ in 0..batch {
                    self.qp.post(&op(i as u32), Signal::Reclaim, i as u64).unwrap();
                    i += 1;
                }
                self.qp.ring();
            }
            self.reclaim(blocks);
        }
    }
}

/// `n` inline operations of `BYTES`, `batch` to a doorbell. The length is known when it is compiled, or else only at run time.
#[inline(always)]
fn post_inline<const BYTES: usize>(n: usize, batch: usize, known: bool) {
    let mut poster = Poster::new();
    let data = black_box([0x5a; BYTES]);
    let data = if known { &data } else { &data[..black_box(BYTES)] };
    let (addr, rkey) = (poster.mr.addr(), poster.mr.rkey());
    poster.run(n, (16 + 16 + 4 + BYTES).div_ceil(64), batch, |imm| WriteImm { addr, rkey, imm, payload: Inline(data) });
}

fn post_sge(n: usize) {
    let mut poster = Poster::new();
    let (addr, rkey) = (poster.mr.addr(), poster.mr.rkey());
    let payload = black_box(poster.mr.sge(0, 1024).unwrap());
    poster.run(n, 1, 1, |imm| WriteImm { addr, rkey, imm, payload });
}

/// A full CQ is made, of which `n` CQEs are polled.
#[inline(always)]
fn poll_mono(n: usize, complete: bool) {
    const CQES: u32 = 1 << 14;
    let device = Device::open(&DeviceSpec::Null(NullOptions::default())).unwrap();
    let pd = device.alloc_pd().unwrap();
    let mut cq = device.create_mono_cq::<u64>(CQES).unwrap();
    let mut srq = pd.create_srq(CQES, 0).unwrap();
    let qps: Vec<RcQp> = (0..4).map(|_| pd.create_qp(&cq, &cq, &srq, &QpConfig::default()).unwrap()).collect();
    for (i, qp) in qps.iter().enumerate() {
        cq.register(qp.qpn(), i as u64);
    }
    for i in 0..CQES {
        srq.post(&[], u64::from(i)).unwrap();
        let qpn = qps[i as usize % 4].qpn();
        let cqe = ResponderCqe { qpn, imm: i, byte_count: 64, wqe_counter: i as u16, ..Default::default() };
        assert!(device.null().unwrap().write_cqe(cq.cqn(), &cqe.emit(), CqeOpcode::ResponderWriteImm));
    }
    let (mut polled, mut sum) = (0, 0);
    while polled < n {
        polled += match complete {
            false => cq.poll(16, |queue, cqe| sum += queue.map_or(0, |q| q + u64::from(cqe.imm()))),
            true => cq.poll(16, |queue, cqe| {
                let user = srq.complete(cqe.wqe_counter()).unwrap_or(0);
                sum += queue.map_or(0, |q| q + u64::from(cqe.imm()).min(user));
            }),
        };
    }
    // The sum of all i + i % 4, without a loop that would be counted.
    let want = n * (n - 1) / 2 + n / 4 * 6;
    assert_eq!((polled, sum), (n, want as u64));
}

/// The same in compressed sessions of 16.
fn poll_compressed(n: usize) {
    const CQES: u32 = 1 << 14;
    const SESSION: usize = 16;
    let device = Device::open(&DeviceSpec::Null(NullOptions::default())).unwrap();
    let null = device.null().unwrap();
    let pd = device.alloc_pd().unwrap();
    let mut cq = device.create_mono_cq::<u64>(CqConfig { compression: true, ..CqConfig::from(CQES) }).unwrap();
    let srq = pd.create_srq(1, 0).unwrap();
    let qp = pd.create_qp(&cq, &cq, &srq, &QpConfig::default()).unwrap();
    cq.register(qp.qpn(), 1);
    for session in 0..CQES as usize / SESSION {
        let first = session * SESSION;
        let title = ResponderCqe { qpn: qp.qpn(), imm: 7, wqe_counter: first as u16, ..Default::default() };
        let minis: Vec<_> = (first..first + SESSION).map(|i| MiniCqe { word: 0, byte_count: i as u32 }).collect();
        assert!(null.write_compressed(cq.cqn(), &title.emit(), CqeOpcode::ResponderWriteImm, &minis));
    }
    let (mut polled, mut sum) = (0, 0);
    while polled < n {
        polled += cq.poll(16, |queue, cqe| sum += queue.map_or(0, |q| q + u64::from(cqe.byte_count())));
    }
    assert_eq!((polled, sum), (n, (0..n as u64).map(|i| i + 1).sum()));
}

/// `n` messages from one device to another, `batch` to a doorbell.
fn write_imm(n: usize, batch: usize) {
    let fabric = LocalFabric::new();
    let end = || {
        let options = SoftOptions { fabric: FabricSpec::Local(fabric.clone()), arena_bytes: 1 << 30, ..Default::default() };
        let device = Device::open(&DeviceSpec::Soft(options)).unwrap();
        let pd = device.alloc_pd().unwrap();
        let send_cq = device.create_cq(64).unwrap();
        let recv_cq = device.create_mono_cq::<()>(64).unwrap();
        let srq = pd.create_srq(63, 0).unwrap();
        let qp = pd.create_qp(&send_cq, &recv_cq, &srq, &QpConfig::default()).unwrap();
        let mr = pd.alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
        (qp, send_cq, recv_cq, srq, mr)
    };
    let (mut qp, mut send_cq, _, _, from) = end();
    let (mut peer, _, mut recv_cq, mut srq, to) = end();
    qp.connect(&peer.address(), &ConnectOptions::default()).unwrap();
    peer.connect(&qp.address(), &ConnectOptions::default()).unwrap();
    recv_cq.register(peer.qpn(), ());
    let payload = from.sge(0, 64).unwrap();
    let mut received = 0;
    for i in (0..n).step_by(batch) {
        for imm in i as u32..(i + batch) as u32 {
            srq.post(&[], 0).unwrap();
            let op = WriteImm { addr: to.addr(), rkey: to.rkey(), imm, payload };
            qp.post(&op, Signal::Reclaim, 0).unwrap();
        }
        srq.ring();
        qp.ring();
        recv_cq.poll(batch, |_, cqe| {
            assert_eq!(cqe.imm(), received);
            srq.complete(cqe.wqe_counter()).unwrap();
            received += 1;
        });
        if i / 64 != (i + batch) / 64 {
            send_cq.poll(8, |cqe| assert!(cqe.result().is_ok() && qp.complete(&cqe).is_some()));
        }
    }
    assert_eq!(received as usize, n);
}
