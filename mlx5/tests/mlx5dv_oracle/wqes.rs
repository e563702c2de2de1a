//! Whole WQEs, as the driver posts them.

use mlx5::wire::{AddressVector, CqeOpcode, DatagramSegment, Opcode, RequesterCqe};
use mlx5::*;

use super::segments::datagram_question;
use super::{Questions, report, variants};

/// The common operations of both kinds of queue pair.
trait Sender<O> {
    fn send(&mut self, op: &O, flags: Flags);
    fn finish(&mut self, cqe: &Cqe<'_>) -> Option<u64>;
}

impl<O: RcOperation> Sender<O> for RcQp {
    fn send(&mut self, op: &O, flags: Flags) {
        self.post(op, flags, 0).unwrap();
        self.ring();
    }

    fn finish(&mut self, cqe: &Cqe<'_>) -> Option<u64> {
        self.complete(cqe)
    }
}

impl<O: UdOperation> Sender<O> for UdQp {
    fn send(&mut self, op: &O, flags: Flags) {
        self.post(op, flags, 0).unwrap();
        self.ring();
    }

    fn finish(&mut self, cqe: &Cqe<'_>) -> Option<u64> {
        self.complete(cqe)
    }
}

/// A queue pair of a null device: what it posts is read back, and completed at once.
struct Bench<Q> {
    qp: Q,
    qpn: u32,
    send_cq: Cq,
    null: NullDevice,
    /// The counter behind the last WQE.
    producer: u16,
}

/// `create` makes the queue pair, ready to send.
fn bench<Q>(create: impl FnOnce(&Pd, &Cq, &Srq, &QpConfig) -> (Q, u32)) -> Bench<Q> {
    let device = Device::open(DeviceSpec::Null(mlx5::NullOptions::default())).unwrap();
    let null = device.null().unwrap();
    let pd = device.alloc_pd().unwrap();
    let send_cq = device.create_cq(16).unwrap();
    let srq = pd.create_srq(16, 0).unwrap();
    let (qp, qpn) = create(&pd, &send_cq, &srq, &QpConfig { max_inline_data: 220, ..QpConfig::default() });
    Bench { qp, qpn, send_cq, null, producer: 0 }
}

fn connected() -> Bench<RcQp> {
    bench(|pd, cq, srq, config| {
        let mut qp = pd.create_qp(cq, cq, srq, config).unwrap();
        qp.connect(&qp.address(), &ConnectOptions::default()).unwrap();
        let qpn = qp.qpn();
        (qp, qpn)
    })
}

fn datagrams() -> Bench<UdQp> {
    bench(|pd, cq, srq, config| {
        let mut qp = pd.create_ud_qp(cq, cq, srq, config).unwrap();
        qp.activate(0).unwrap();
        let qpn = qp.qpn();
        (qp, qpn)
    })
}

impl<Q> Bench<Q> {
    /// Posts, and returns the WQE's index and its WQEBBs.
    fn post<O>(&mut self, op: &O, flags: Flags) -> (u16, Vec<u8>)
    where
        Q: Sender<O>,
    {
        self.qp.send(op, flags);
        let mut index = self.producer;
        let block = |counter| self.null.send_queue(self.qpn, counter).unwrap();
        // The end of the ring may have been filled with NOPs.
        while block(index).1[3] == Opcode::Nop as u8 {
            index = index.wrapping_add(1);
        }
        self.producer = block(index).0;
        let blocks = self.producer.wrapping_sub(index);
        let wqe = (0..blocks).flat_map(|i| block(index.wrapping_add(i)).1).collect();

        let cqe = RequesterCqe { wqe_opcode: 0, qpn: self.qpn, wqe_counter: index, byte_count: 0, user_index: 0 };
        assert!(self.null.write_cqe(self.send_cq.cqn(), &cqe.emit(), CqeOpcode::Requester));
        assert_eq!(self.send_cq.poll(1, |cqe| assert_eq!(self.qp.finish(&cqe), Some(0))), 1);
        (index, wqe)
    }
}

/// An operation's fields for the oracle.
#[derive(Clone, Copy, Default)]
struct Fields<'a> {
    verb: &'static str,
    imm: u32,
    addr: u64,
    rkey: u32,
    /// The value that an atomic writes or adds.
    swap_add: u64,
    compare: u64,
    /// The question for its datagram segment, if it has one.
    datagram: &'a str,
}

const SGE: Sge = Sge { addr: 0x1122_3344_5566_7788, len: 0x0009_8765, lkey: 0xaabb_ccdd };
const NO_SGE: Sge = Sge { addr: 0, len: 0, lkey: 0 };

fn flags() -> impl Iterator<Item = Flags> {
    (0..4).map(|bits| Flags { signal: Signal::Always, fence: bits & 1 != 0, solicited: bits & 2 != 0 })
}

impl Questions {
    fn wqe<Q, O>(&mut self, bench: &mut Bench<Q>, op: &O, flags: Flags, fields: Fields<'_>, inline: usize, sge: Sge)
    where
        Q: Sender<O>,
    {
        let (index, wqe) = bench.post(op, flags);
        let letters = format!("c{}{}", if flags.fence { "f" } else { "" }, if flags.solicited { "s" } else { "" });
        let Fields { verb, imm, addr, rkey, swap_add, compare, datagram } = fields;
        let qpn = bench.qpn;
        let ds = usize::from(wqe[7] & 0x3f);
        assert_eq!(wqe.len() / 64, (ds * 16).div_ceil(64), "the doorbell record covers what ds says");
        self.ask(
            format_args!(
                "wqe {verb} {index:x} {qpn:x} {letters} {imm:x} {addr:x} {rkey:x} {swap_add:x} {compare:x} {inline:x} {:x} {:x} {:x} {datagram}",
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
    let mut bench = connected();
    let mut questions = Questions::default();
    let none = Fields::default();
    let write = Fields { verb: "write", addr, rkey, ..none };
    every_payload!(questions, bench, write, |payload| Write { addr, rkey, payload });
    let imm = 0xdead_beef;
    let write_imm = Fields { verb: "write_imm", imm, ..write };
    every_payload!(questions, bench, write_imm, |payload| WriteImm { addr, rkey, imm, payload });
    every_payload!(questions, bench, Fields { verb: "send", ..none }, |payload| Send { payload });
    every_payload!(questions, bench, Fields { verb: "send_imm", imm, ..none }, |payload| SendImm { imm, payload });
    for flags in flags() {
        for len in [0, 1, 0x0009_8765, 1 << 30] {
            let into = Sge { len, ..SGE };
            questions.wqe(&mut bench, &Read { addr, rkey, into }, flags, Fields { verb: "read", ..write }, 0, into);
        }
        let into = Sge { len: 8, ..SGE };
        let (compare, swap) = (0x0102_0304_0506_0708, 0xf1f2_f3f4_f5f6_f7f8);
        let fields = Fields { verb: "compare_swap", swap_add: swap, compare, ..write };
        questions.wqe(&mut bench, &CompareSwap { addr, rkey, compare, swap, into }, flags, fields, 0, into);
        let fields = Fields { verb: "fetch_add", swap_add: swap, ..write };
        questions.wqe(&mut bench, &FetchAdd { addr, rkey, add: swap, into }, flags, fields, 0, into);
    }
    let comparisons = variants("wqe").iter().map(|oracle| oracle.compare(&questions)).sum();
    report("WQEs", comparisons, 4 * 4 * (5 + 2 * 221) + 4 * 6);
}

#[test]
#[ignore = "needs libibverbs-dev"]
fn every_datagram_wqe_is_what_the_header_makes_of_it() {
    let (imm, qpn, qkey) = (0xdead_beef, 0x00c0_ffee, 0x8123_4567);
    let rgid = *b"\xfe\x80\x01\x02\x03\x04\x05\x06the gid.";
    let infiniband = AddressVector::local(0xabcd, 5);
    let routed = infiniband.with_grh(0x7e, 0x000b_cdef, 64, 0x5c, rgid);
    let roce = AddressVector { stat_rate_sl: 0xf6, fl_mlid: 0x7f, rmac: [1, 2, 3, 4, 5, 6], ..routed };
    let mut bench = datagrams();
    let mut questions = Questions::default();
    for vector in [infiniband, routed, roce] {
        let to = &Destination::new(vector, qpn, qkey);
        let question = datagram_question(&DatagramSegment { vector, qpn, qkey });
        let send = Fields { verb: "ud_send", datagram: &question, ..Fields::default() };
        every_payload!(questions, bench, send, |payload| UdSend { to, payload });
        let send_imm = Fields { verb: "ud_send_imm", imm, ..send };
        every_payload!(questions, bench, send_imm, |payload| UdSendImm { to, imm, payload });
    }
    let comparisons = variants("datagram-wqe").iter().map(|oracle| oracle.compare(&questions)).sum();
    report("datagram WQEs", comparisons, 3 * 2 * 4 * (5 + 2 * 221));
}
