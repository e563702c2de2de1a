//! CQEs of operations that the software HCA executes, as libmlx5 reads them.

use std::time::{Duration, Instant};

use mlx5::Sge;

use super::libmlx5::{
    Api, IbvPath, IbvSge, IbvWc, Op, QKEY, QpRequest, SEND_SIGNALED, VerbsCq, VerbsDevice, VerbsQp,
    VerbsSrq, WrOpcode,
};
use super::open;

const SUCCESS: u32 = 0;
const FLUSHED: u32 = 5;
const WRITE: u32 = 1;
const RECEIVE: u32 = 1 << 7;
const WITH_IMM: u32 = 2;
const IMM: u32 = 0x0102_0304;

/// Number of words of memory, half for each end.
const WORDS: usize = 1024;

/// Two queue pairs of one device, the first connected to the second, with one completion queue
/// each, and memory that both reach.
struct Ends {
    device: VerbsDevice,
    cqs: [VerbsCq; 2],
    qps: [VerbsQp; 2],
    srq: Option<VerbsSrq>,
    memory: u64,
    key: u32,
}

impl Ends {
    fn new(cqe_bytes: u32, is_shared: bool, is_datagram: bool) -> Self {
        let device = open();
        let cqs = [(); 2].map(|()| device.create_cq(32, cqe_bytes, false, false));
        let srq = is_shared.then(|| device.create_srq(7, 2));
        let qps = cqs.each_ref().map(|cq| {
            let request = QpRequest {
                send_cq: cq.parts.cq,
                recv_cq: cq.parts.cq,
                srq: srq
                    .as_ref()
                    .map_or(std::ptr::null_mut(), |srq| srq.parts.srq),
                is_datagram: is_datagram.into(),
                send_wr: 16,
                send_sge: 1,
                inline_bytes: 0,
                recv_wr: if is_shared { 0 } else { 8 },
                recv_sge: if is_shared { 0 } else { 2 },
            };
            let qp = device.create_qp(&request);
            qp.to_init();
            qp
        });
        qps[0].connect(qps[1].parts.qpn);
        qps[1].connect(qps[0].parts.qpn);
        let memory = Box::leak(vec![7u64; WORDS].into_boxed_slice());
        let addr = memory.as_ptr() as u64;
        let key = device.register(memory);
        Self {
            device,
            cqs,
            qps,
            srq,
            memory: addr,
            key,
        }
    }

    /// Returns this number of bytes of the half of end `end`, as a buffer.
    fn buffer(&self, end: u64, len: u32) -> Sge {
        Sge {
            addr: self.memory + end * 4 * WORDS as u64,
            len,
            lkey: self.key,
        }
    }

    /// Posts to the second queue pair's receives.
    fn receive(&self, wr_id: u64, buffers: &[Sge]) {
        match &self.srq {
            Some(srq) => srq.post(wr_id, buffers),
            None => self.qps[1].post_receive(wr_id, buffers),
        }
    }

    /// Posts to the first queue pair. `to` is an address handle for datagrams.
    fn send(&self, wr_id: u64, verb: WrOpcode, payload: Sge, rkey: u32, to: *mut std::ffi::c_void) {
        let mut sge = IbvSge::from(payload);
        let op = Op {
            wr_id,
            opcode: verb,
            flags: SEND_SIGNALED,
            imm: IMM,
            rkey,
            raddr: self.buffer(1, 0).addr,
            compare_add: 7,
            swap: 8,
            ah: to,
            qpn: self.qps[1].parts.qpn,
            qkey: QKEY,
            sge: &mut sge,
            sges: 1,
        };
        self.qps[0].post(Api::PostSend, &[op]);
    }

    /// Returns the next completion of an end.
    fn next(&self, end: usize) -> IbvWc {
        let start = Instant::now();
        loop {
            if let Some(wc) = self.cqs[end].poll(1).pop() {
                assert_eq!(wc.qp_num, self.qps[end].parts.qpn);
                return wc;
            }
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "no completion at end {end}"
            );
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Asserts that the next completion of an end has this status, and belongs to that post.
    fn expect(&self, end: usize, wr_id: u64, status: u32) -> IbvWc {
        let wc = self.next(end);
        assert_eq!((wc.wr_id, wc.status), (wr_id, status), "end {end}: {wc:?}");
        wc
    }
}

#[test]
#[ignore = "needs libibverbs-dev and mlx5-run"]
fn libmlx5_reads_the_success_of_every_verb() {
    for (cqe_bytes, is_shared) in [(64, false), (64, true), (128, false), (128, true)] {
        let ends = Ends::new(cqe_bytes, is_shared, false);
        let eight = |verb| matches!(verb, WrOpcode::CompareSwap | WrOpcode::FetchAdd);
        // The verb, and the opcodes of its completions.
        let verbs = [
            (WrOpcode::Send, 0, Some(RECEIVE)),
            (WrOpcode::SendImm, 0, Some(RECEIVE)),
            (WrOpcode::Write, WRITE, None),
            (WrOpcode::WriteImm, WRITE, Some(RECEIVE + 1)),
            (WrOpcode::Read, 2, None),
            (WrOpcode::CompareSwap, 3, None),
            (WrOpcode::FetchAdd, 4, None),
        ];
        // More than a lap of the completion queues and of the receives.
        for (round, (verb, opcode, received)) in (0u64..)
            .zip(verbs.iter().cycle().copied())
            .take(12 * verbs.len())
        {
            let len = if eight(verb) { 8 } else { 1000 };
            if received.is_some() {
                ends.receive(round, &[ends.buffer(1, 10), ends.buffer(1, 4000)]);
            }
            ends.send(
                round,
                verb,
                ends.buffer(0, len),
                ends.key,
                std::ptr::null_mut(),
            );
            let wc = ends.expect(0, round, SUCCESS);
            assert_eq!(wc.opcode, opcode);
            assert!(opcode < 2 || wc.byte_len == len, "{wc:?}");
            if let Some(received) = received {
                let wc = ends.expect(1, round, SUCCESS);
                let with_imm = matches!(verb, WrOpcode::SendImm | WrOpcode::WriteImm);
                assert_eq!((wc.opcode, wc.byte_len), (received, len), "{wc:?}");
                assert_eq!(wc.wc_flags, if with_imm { WITH_IMM } else { 0 }, "{wc:?}");
                assert!(!with_imm || wc.imm_data == IMM.to_be(), "{wc:?}");
            }
        }
    }
}

#[test]
#[ignore = "needs libibverbs-dev and mlx5-run"]
fn libmlx5_reads_datagrams_with_the_sender_and_the_40_bytes_in_front() {
    for is_shared in [false, true] {
        let ends = Ends::new(64, is_shared, true);
        let to = ends.device.create_ah(&IbvPath {
            lid: 1,
            ..IbvPath::default()
        });
        for batch in 0..3 {
            let rounds = 7 * batch..7 * (batch + 1);
            for round in rounds.clone() {
                ends.receive(round, &[ends.buffer(1, 4096)]);
            }
            // The device must have seen the receive before a datagram arrives, which is lost
            // otherwise.
            std::thread::sleep(Duration::from_millis(100));
            for (round, verb) in rounds.zip([WrOpcode::Send, WrOpcode::SendImm].into_iter().cycle())
            {
                ends.send(round, verb, ends.buffer(0, 100), 0, to);
                assert_eq!(ends.expect(0, round, SUCCESS).opcode, 0);
                let wc = ends.expect(1, round, SUCCESS);
                assert_eq!(
                    (wc.opcode, wc.byte_len, wc.src_qp),
                    (RECEIVE, 140, ends.qps[0].parts.qpn),
                    "{wc:?}"
                );
                assert!(
                    verb == WrOpcode::Send || wc.imm_data == IMM.to_be(),
                    "{wc:?}"
                );
            }
        }
    }
}

/// Makes a queue pair fail at an operation. Checks its status, and that later operations are
/// flushed.
fn fails(ends: &Ends, verb: WrOpcode, payload: Sge, rkey: u32, status: u32) {
    ends.send(1, verb, payload, rkey, std::ptr::null_mut());
    ends.send(
        2,
        WrOpcode::Write,
        ends.buffer(0, 8),
        ends.key,
        std::ptr::null_mut(),
    );
    let wc = ends.expect(0, 1, status);
    assert_ne!(wc.vendor_err, 0, "the software HCA says why: {wc:?}");
    ends.expect(0, 2, FLUSHED);
}

#[test]
#[ignore = "needs libibverbs-dev and mlx5-run"]
fn libmlx5_reads_every_failure() {
    let bad = |sge: Sge| Sge {
        lkey: sge.lkey ^ 0xff00,
        ..sge
    };
    for is_shared in [false, true] {
        let ends = || Ends::new(64, is_shared, false);

        let one = ends();
        fails(&one, WrOpcode::Write, bad(one.buffer(0, 8)), one.key, 4);
        let one = ends();
        fails(
            &one,
            WrOpcode::Write,
            one.buffer(0, 8),
            one.key ^ 0xff00,
            10,
        );
        let one = ends();
        fails(&one, WrOpcode::Read, one.buffer(0, 8), one.key ^ 0xff00, 10);

        // A message longer than its receive, and a receive with a key that is not the receiver's.
        let one = ends();
        one.receive(9, &[one.buffer(1, 10)]);
        fails(&one, WrOpcode::Send, one.buffer(0, 100), 0, 9);
        one.expect(1, 9, 1);
        let one = ends();
        one.receive(9, &[bad(one.buffer(1, 100))]);
        fails(&one, WrOpcode::Send, one.buffer(0, 100), 0, 11);
        one.expect(1, 9, 4);

        // No receive, and no peer.
        let one = ends();
        one.send(1, WrOpcode::Send, one.buffer(0, 8), 0, std::ptr::null_mut());
        one.expect(0, 1, 13);
        let Ends { device, .. } = &one;
        let cq = device.create_cq(16, 64, false, false);
        let request = QpRequest {
            send_cq: cq.parts.cq,
            recv_cq: cq.parts.cq,
            srq: std::ptr::null_mut(),
            is_datagram: 0,
            send_wr: 4,
            send_sge: 1,
            inline_bytes: 0,
            recv_wr: 1,
            recv_sge: 1,
        };
        let lonely = device.create_qp(&request);
        lonely.to_init();
        lonely.connect(one.qps[0].parts.qpn ^ 0x3f00);
        let alone = Ends {
            device: *device,
            cqs: [cq, device.create_cq(16, 64, false, false)],
            qps: [lonely, device.create_qp(&request)],
            ..one
        };
        alone.send(
            1,
            WrOpcode::Write,
            alone.buffer(0, 8),
            alone.key,
            std::ptr::null_mut(),
        );
        alone.expect(0, 1, 12);
    }
}
