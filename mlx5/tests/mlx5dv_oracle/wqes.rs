//! Whole WQEs, as the driver posts them.

use mlx5::wire::{CqeOpcode, Opcode, RequesterCqe};
use mlx5::*;

use super::{Questions, report, variants};

/// A queue pair of a null device: what it posts is read back, and completed at once.
struct Bench {
    qp: RcQp,
    send_cq: Cq,
    null: NullDevice,
    /// The counter behind the last WQE.
    producer: u16,
}

impl Bench {
    fn new() -> Self {
        let device = Device::open(&DeviceSpec::Null(mlx5::NullOptions::default())).unwrap();
        let null = device.null().unwrap();
        let pd = device.alloc_pd();
        let send_cq = device.create_cq(16).unwrap();
        let recv_cq = device.create_cq(16).unwrap();
        let srq = pd.create_srq(16, 0).unwrap();
        let config = QpConfig { max_inline_data: 220, ..QpConfig::default() };
        let mut qp = pd.create_qp(&send_cq, &recv_cq, &srq, &config).unwrap();
        qp.connect(&qp.address(), &ConnectOptions::default()).unwrap();
        Self { qp, send_cq, null, producer: 0 }
    }

    /// Posts, and returns the WQE's index and its WQEBBs.
    fn post(&mut self, op: &impl RcOperation, flags: Flags) -> (u16, Vec<u8>) {
        let qpn = self.qp.qpn();
        self.qp.post(op, flags, 0).unwrap();
        self.qp.ring();
        let mut index = self.producer;
        let block = |counter| self.null.send_queue(qpn, counter).unwrap();
        // The end of the ring may have been filled with NOPs.
        while block(index).1[3] == Opcode::Nop as u8 {
            index = index.wrapping_add(1);
        }
        self.producer = block(index).0;
        let blocks = self.producer.wrapping_sub(index);
        let wqe = (0..blocks).flat_map(|i| block(index.wrapping_add(i)).1).collect();

        let cqe = RequesterCqe { wqe_opcode: 0, qpn, wqe_counter: index, byte_count: 0 };
        assert!(self.null.write_cqe(self.send_cq.cqn(), &cqe.emit(), CqeOpcode::Requester));
        assert_eq!(self.send_cq.poll(1, |cqe| assert_eq!(self.qp.complete(&cqe), Some(0))), 1);
        (index, wqe)
    }
}

/// What an operation is for the oracle: name, immediate, remote address, rkey, swap or add, compare.
type Fields = (&'static str, u32, u64, u32, u64, u64);

const SGE: Sge = Sge { addr: 0x1122_3344_5566_7788, len: 0x0009_8765, lkey: 0xaabb_ccdd };
const NO_SGE: Sge = Sge { addr: 0, len: 0, lkey: 0 };

fn flags() -> impl Iterator<Item = Flags> {
    (0..4).map(|bits| Flags { signal: Signal::Always, fence: bits & 1 != 0, solicited: bits & 2 != 0 })
}

impl Questions {
    fn wqe(&mut self, bench: &mut Bench, op: &impl RcOperation, flags: Flags, fields: Fields, inline: usize, sge: Sge) {
        let (index, wqe) = bench.post(op, flags);
        let letters = format!("c{}{}", if flags.fence { "f" } else { "" }, if flags.solicited { "s" } else { "" });
        let (verb, imm, addr, rkey, swap_add, compare) = fields;
        let qpn = bench.qp.qpn();
        let ds = usize::from(wqe[7] & 0x3f);
        assert_eq!(wqe.len() / 64, (ds * 16).div_ceil(64), "the doorbell record covers what ds says");
        self.ask(
            format_args!(
                "wqe {verb} {index:x} {qpn:x} {letters} {imm:x} {addr:x} {rkey:x} {swap_add:x} {compare:x} {inline:x} {:x} {:x} {:x}",
                sge.len, sge.lkey, sge.addr
            ),
            &wqe[..ds * 16],
        );
    }
}

/// Asks about every payload of a verb, which `make` calls for with each.
macro_rules! every_payload {
    ($questions:ident, $bench:ident, $fields:expr, |$payload:ident| $make:expr) => {
        let data: Vec<u8> = (0..220u8).map(|i| i.wrapping_mul(7).wrapping_add(1)).collect();
        for flags in flags() {
            let $payload = ();
            $questions.wqe(&mut $bench, &$make, flags, $fields, 0, NO_SGE);
            for len in [0, 1, 0x0009_8765, 1 << 30] {
                let $payload = Sge { len, ..SGE };
                $questions.wqe(&mut $bench, &$make, flags, $fields, 0, $payload);
            }
            for n in 0..=data.len() {
                let $payload = Inline(&data[..n]);
                $questions.wqe(&mut $bench, &$make, flags, $fields, n, NO_SGE);
                let $payload = (Inline(&data[..n]), SGE);
                $questions.wqe(&mut $bench, &$make, flags, $fields, n, SGE);
            }
        }
    };
}

#[test]
#[ignore = "needs libibverbs-dev"]
fn every_wqe_is_what_the_header_makes_of_it() {
    let (addr, rkey) = (0x1000_0000_0000_0008, 0x0765_4321);
    let mut bench = Bench::new();
    let mut questions = Questions::default();
    every_payload!(questions, bench, ("write", 0, addr, rkey, 0, 0), |payload| Write { addr, rkey, payload });
    let imm = 0xdead_beef;
    every_payload!(questions, bench, ("write_imm", imm, addr, rkey, 0, 0), |payload| WriteImm { addr, rkey, imm, payload });
    every_payload!(questions, bench, ("send", 0, 0, 0, 0, 0), |payload| Send { payload });
    every_payload!(questions, bench, ("send_imm", imm, 0, 0, 0, 0), |payload| SendImm { imm, payload });
    for flags in flags() {
        for len in [0, 1, 0x0009_8765, 1 << 30] {
            let into = Sge { len, ..SGE };
            questions.wqe(&mut bench, &Read { addr, rkey, into }, flags, ("read", 0, addr, rkey, 0, 0), 0, into);
        }
        let into = Sge { len: 8, ..SGE };
        let (compare, swap) = (0x0102_0304_0506_0708, 0xf1f2_f3f4_f5f6_f7f8);
        let fields = ("compare_swap", 0, addr, rkey, swap, compare);
        questions.wqe(&mut bench, &CompareSwap { addr, rkey, compare, swap, into }, flags, fields, 0, into);
        questions.wqe(&mut bench, &FetchAdd { addr, rkey, add: swap, into }, flags, ("fetch_add", 0, addr, rkey, swap, 0), 0, into);
    }
    let comparisons = variants("wqe").iter().map(|oracle| oracle.compare(&questions)).sum();
    report("WQEs", comparisons, 4 * 4 * (5 + 2 * 221) + 4 * 6);
}
