//! WQEs: every verb with every legal payload, signaled or not, fenced or not, solicited or not, at
//! indices that wrap.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::LazyLock;

use super::hex;
use crate::mmio::RegisterKind;
use crate::ops::*;
use crate::provider::parts::{QpParts, UarParts};
use crate::queues::doorbell::Doorbell;
use crate::queues::sq::{Flags, SendQueue, Signal};
use crate::wire::AddressVector;
use mlx5_hca::SqMemory;

const QPN: u32 = 0xab_cdef;
const WQE_CNT: u16 = 16;
const RING: usize = WQE_CNT as usize * 64;

/// A send queue, its memory, and the expected content.
struct Bench {
    ring: *mut [u8; RING],
    sq: SendQueue,
    /// Number of all posted WQEBBs, modulo 2^16 (`producer`), and of the WQEBBs posted since the
    /// last signaled WQE (`unsignaled`).
    producer: u16,
    unsignaled: u16,
}

/// A BlueFlame register is aligned to its size.
#[repr(C, align(512))]
struct Uar {
    register: [u8; 512],
    record: u32,
}

fn bench(qpn: u32) -> Bench {
    let ring = Box::leak(Box::new([0xa5u8; RING])) as *mut [u8; RING];
    let uar = Box::leak(Box::new(Uar {
        register: [0; 512],
        record: 0,
    }));
    let (register, record) = (
        std::ptr::NonNull::from(&mut uar.register).cast(),
        std::ptr::NonNull::from(&mut uar.record).cast(),
    );
    let uar = UarParts {
        half: Rc::new(Cell::new(register.as_ptr())),
        kind: RegisterKind::Ordinary,
        register_index: 0,
    };
    let buffer = std::ptr::NonNull::new(ring).unwrap().cast();
    let sq = SqMemory {
        buffer,
        wqe_cnt: WQE_CNT.into(),
        record,
        register: None,
    };
    let parts = QpParts {
        qpn,
        sq,
        rq: None,
        max_inline: 220,
        has_atomics: true,
        uar,
    };
    Bench {
        ring,
        sq: SendQueue::new(
            &parts,
            Doorbell::new(&parts.uar, record, crate::control::Hook::Nothing),
        ),
        producer: 0,
        unsignaled: 0,
    }
}

impl Bench {
    /// Makes a queue that has posted up to index `start`.
    fn at(start: u16) -> Self {
        let mut b = bench(QPN);
        while b.producer != start {
            b.sq.push(&Send { payload: () }, Signal::Always, 0).unwrap();
            b.sq.complete(b.producer).unwrap();
            b.producer = b.producer.wrapping_add(1);
        }
        b
    }

    fn bytes(&self) -> [u8; RING] {
        // A whole array would be one volatile load of a thousand values, which takes the compiler
        // most of a minute. SAFETY: leaked memory, written by this thread only.
        std::array::from_fn(|at| unsafe { self.ring.cast::<u8>().add(at).read_volatile() })
    }

    /// Posts `op` over 0xa5, compares the whole ring with the expected content, and completes the
    /// operation if it is signaled: as `flags` request, or because more than 7 WQEBBs would be
    /// unsignaled.
    fn check(&mut self, op: &impl Operation, flags: Flags, opcode: u8, imm: u32, body: &[u8]) {
        let ds = 1 + body.len() / 16;
        let blocks = ds.div_ceil(4) as u16;
        let to_end = WQE_CNT - self.producer % WQE_CNT;
        let nops = if blocks > to_end { to_end } else { 0 };
        self.unsignaled += nops + blocks;
        let signaled = flags.signal == Signal::Always || self.unsignaled > 7;
        if signaled {
            self.unsignaled = 0;
        }
        let mut want = [0xa5; RING];
        for nop in 0..nops {
            self.put(
                &mut want,
                self.producer.wrapping_add(nop),
                0x00,
                1,
                0,
                0,
                &[],
            );
        }
        let index = self.producer.wrapping_add(nops);
        // MLX5_WQE_CTRL_CQ_UPDATE 2 << 2, MLX5_WQE_CTRL_SOLICITED 1 << 1, MLX5_WQE_CTRL_FENCE 4
        // << 5.
        let fm_ce_se = if signaled { 0x08 } else { 0 }
            | if flags.solicited { 0x02 } else { 0 }
            | if flags.fence { 0x80 } else { 0 };
        self.put(&mut want, index, opcode, ds as u8, fm_ce_se, imm, body);

        for at in 0..RING {
            // SAFETY: as above.
            unsafe { self.ring.cast::<u8>().add(at).write_volatile(0xa5) };
        }
        self.sq.push(op, flags, u64::from(index)).unwrap();
        let got = self.bytes();
        let at = usize::from(index % WQE_CNT) * 64;
        assert_eq!(
            got[at..(at + 320).min(RING)],
            want[at..(at + 320).min(RING)],
            "WQE {index:#x} of opcode {opcode:#04x}, {flags:?}"
        );
        assert_eq!(
            got, want,
            "around WQE {index:#x} of opcode {opcode:#04x}, {flags:?}"
        );
        self.producer = index.wrapping_add(blocks);
        assert_eq!(self.sq.complete(index), Some(u64::from(index)));
    }

    #[allow(clippy::too_many_arguments, reason = "the fields of a control segment")]
    fn put(
        &self,
        ring: &mut [u8; RING],
        index: u16,
        opcode: u8,
        ds: u8,
        fm_ce_se: u8,
        imm: u32,
        body: &[u8],
    ) {
        let ([high, low], at) = (index.to_be_bytes(), usize::from(index % WQE_CNT) * 64);
        ring[at..at + 12].copy_from_slice(&[
            0, high, low, opcode, 0xab, 0xcd, 0xef, ds, 0, 0, 0, fm_ce_se,
        ]);
        ring[at + 12..at + 16].copy_from_slice(&imm.to_be_bytes());
        ring[at + 16..at + 16 + body.len()].copy_from_slice(body);
    }

    /// Checks that a refused post writes nothing.
    fn refuse(&mut self, op: &impl Operation, error: PostError) {
        let before = self.bytes();
        assert_eq!(self.sq.push(op, Signal::Always, 0), Err(error));
        assert_eq!(self.bytes(), before, "a refused post writes nothing");
    }
}

/// MLX5_INLINE_SEG | count, the data, zeroes to the next 16 bytes. A message of length 0 has no
/// segment.
fn inline_bytes(data: &[u8]) -> Vec<u8> {
    if data.is_empty() {
        return Vec::new();
    }
    let mut b = (0x8000_0000 | data.len() as u32).to_be_bytes().to_vec();
    b.extend(data);
    b.resize(b.len().next_multiple_of(16), 0);
    b
}

/// byte_count, lkey, addr. A length of 0 has no segment: 0 means 2^31 bytes to the device.
fn sge_bytes(sge: &Sge) -> Vec<u8> {
    if sge.len == 0 {
        return Vec::new();
    }
    [
        &sge.len.to_be_bytes()[..],
        &sge.lkey.to_be_bytes(),
        &sge.addr.to_be_bytes(),
    ]
    .concat()
}

/// A verb that sends: its operation for a payload, and the WQE according to `infiniband/mlx5dv.h`.
trait Verb {
    type Of<P: Payload>: Operation;
    const OPCODE: u8;
    const IMM: u32;
    /// The bytes between the control segment and the payload.
    const HEADER: &'static str;
    fn of<P: Payload>(&self, payload: P) -> Self::Of<P>;
}

fn flags() -> impl Iterator<Item = Flags> {
    (0..8).map(|bits| {
        let signal = if bits & 4 == 0 {
            Signal::Always
        } else {
            Signal::Reclaim
        };
        Flags {
            signal,
            fence: bits & 2 != 0,
            solicited: bits & 1 != 0,
        }
    })
}

const SGE: Sge = Sge {
    addr: 0x1122_3344_5566_7788,
    len: 0x0009_8765,
    lkey: 0xaabb_ccdd,
};
const EMPTY: Sge = Sge { len: 0, ..SGE };

/// Tests every payload, with all flags, from an index near the end of 16 bits on.
fn every_payload<V: Verb>(verb: &V) {
    let mut b = Bench::at(0xf3f7);
    let data: Vec<u8> = (0..=221u8).map(|i| i ^ 0x5a).collect();
    let header = hex(V::HEADER);
    let body = |payload: &[Vec<u8>]| [&header[..], &payload.concat()].concat();
    for flags in flags() {
        b.check(&verb.of(()), flags, V::OPCODE, V::IMM, &body(&[]));
        for len in [0, 1, 0x0009_8765, 1 << 30] {
            let sge = Sge { len, ..SGE };
            b.check(
                &verb.of(sge),
                flags,
                V::OPCODE,
                V::IMM,
                &body(&[sge_bytes(&sge)]),
            );
        }
        for n in 0..=220 {
            let (data, bytes) = (Inline(&data[..n]), inline_bytes(&data[..n]));
            b.check(
                &verb.of(data),
                flags,
                V::OPCODE,
                V::IMM,
                &body(std::slice::from_ref(&bytes)),
            );
            b.check(
                &verb.of((data, SGE)),
                flags,
                V::OPCODE,
                V::IMM,
                &body(&[bytes.clone(), sge_bytes(&SGE)]),
            );
            b.check(
                &verb.of((data, EMPTY)),
                flags,
                V::OPCODE,
                V::IMM,
                &body(std::slice::from_ref(&bytes)),
            );
            let (head, rest) = data.0.split_at(n.min(32));
            b.check(
                &verb.of((Inline(head), Inline(rest))),
                flags,
                V::OPCODE,
                V::IMM,
                &body(&[bytes]),
            );
        }
    }
    assert!(b.producer < 0xf3f7, "the index went round");
    b.refuse(
        &verb.of(Inline(&data[..221])),
        PostError::InlineTooLong {
            bytes: 221,
            max: 220,
        },
    );
    b.refuse(
        &verb.of((Inline(&data[..221]), SGE)),
        PostError::InlineTooLong {
            bytes: 221,
            max: 220,
        },
    );
    b.refuse(
        &verb.of((Inline(&data[..32]), Inline(&data[32..221]))),
        PostError::InlineTooLong {
            bytes: 221,
            max: 220,
        },
    );
    let long = Sge {
        len: (1 << 30) + 1,
        ..SGE
    };
    b.refuse(
        &verb.of(long),
        PostError::MessageTooLong {
            bytes: (1 << 30) + 1,
        },
    );
    let long = Sge {
        len: 1 << 30,
        ..SGE
    };
    b.refuse(
        &verb.of((Inline(&[1]), long)),
        PostError::MessageTooLong {
            bytes: (1 << 30) + 1,
        },
    );
}

/// Implements a verb for all payloads, and tests it.
macro_rules! verb {
    ($verb:ident is $of:ty: $opcode:literal, $imm:literal, $header:literal, |$payload:ident| $op:expr; $test:ident) => {
        struct $verb;

        impl Verb for $verb {
            type Of<P: Payload> = $of;
            const OPCODE: u8 = $opcode;
            const IMM: u32 = $imm;
            const HEADER: &'static str = $header;
            fn of<P: Payload>(&self, $payload: P) -> $of {
                $op
            }
        }

        #[test]
        fn $test() {
            every_payload(&$verb);
        }
    };
}

// MLX5_OPCODE_RDMA_WRITE; mlx5_wqe_raddr_seg: raddr, rkey, reserved.
verb!(WriteVerb is Write<P>: 0x08, 0, "1000000000000002 00000007 00000000",
    |payload| Write { addr: 0x1000_0000_0000_0002, rkey: 7, payload };
    write_is_control_remote_address_payload);

// MLX5_OPCODE_RDMA_WRITE_IMM.
verb!(WriteImmVerb is WriteImm<P>: 0x09, 0xdead_beef, "1000000000000002 00000007 00000000",
    |payload| WriteImm { addr: 0x1000_0000_0000_0002, rkey: 7, imm: 0xdead_beef, payload };
    write_with_immediate_is_control_remote_address_payload);

// MLX5_OPCODE_SEND; nothing between control segment and payload.
verb!(SendVerb is Send<P>: 0x0a, 0, "",
    |payload| Send { payload };
    send_is_control_payload);

// MLX5_OPCODE_SEND_IMM.
verb!(SendImmVerb is SendImm<P>: 0x0b, 0x0102_0304, "",
    |payload| SendImm { imm: 0x0102_0304, payload };
    send_with_immediate_is_control_payload);

const GID: [u8; 16] = [0xfe, 0x80, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// The port of an InfiniBand peer, with a GRH.
static INFINIBAND: LazyLock<Destination> = LazyLock::new(|| {
    Destination::new(
        AddressVector::local(0x1234, 5).with_grh(3, 0x1_2345, 64, 0x77, GID),
        0x12_3456,
        0x1122_3344,
    )
});

// mlx5_wqe_av of an InfiniBand port with a GRH: Q_Key, reserved, MLX5_EXTENDED_UD_AV | QPN,
// stat_rate_sl, fl_mlid, rlid, reserved, rmac, tclass, hop_limit, grh_gid_fl (1 << 30 | index <<
// 20 | flow label), rgid.
verb!(UdSendVerb is UdSend<'static, P>: 0x0a, 0, "11223344 00000000 80123456 05 00 1234 00000000 000000000000 77 40 40312345 fe8002030405060708090a0b0c0d0e0f",
    |payload| UdSend { to: &INFINIBAND, payload };
    datagram_is_control_address_payload);

/// Every field of the vector, as for a RoCE port.
const ROCE: AddressVector = AddressVector {
    stat_rate_sl: 0x36,
    fl_mlid: 0x7f,
    rlid: 0xc0de,
    rmac: [0x10, 0x20, 0x30, 0x40, 0x50, 0x60],
    tclass: 0x99,
    hop_limit: 0xfe,
    grh_gid_fl: 0x00ab_cdef,
    rgid: GID,
};

static OVER_ROCE: LazyLock<Destination> =
    LazyLock::new(|| Destination::new(ROCE, 0xff_ffff, 0x8001_0000));

// The same for a RoCE port.
verb!(UdSendImmVerb is UdSendImm<'static, P>: 0x0b, 0xcafe_f00d, "80010000 00000000 80ffffff 36 7f c0de 00000000 102030405060 99 fe 00abcdef fe8002030405060708090a0b0c0d0e0f",
    |payload| UdSendImm { to: &OVER_ROCE, imm: 0xcafe_f00d, payload };
    datagram_with_immediate_is_control_address_payload);

#[test]
fn a_destination_gives_back_what_it_was_made_of() {
    let to = Destination::new(ROCE, 0x12_3456, 9);
    assert_eq!((to.vector(), to.qpn()), (ROCE, 0x12_3456));
}

#[test]
fn read_is_control_remote_address_destination() {
    let mut b = Bench::at(0xfff0);
    let header = "1000000000000002 00000007 00000000";
    let read = |len| Read {
        addr: 0x1000_0000_0000_0002,
        rkey: 7,
        into: Sge { len, ..SGE },
    };
    for flags in flags() {
        // MLX5_OPCODE_RDMA_READ 0x10.
        b.check(
            &read(0x99),
            flags,
            0x10,
            0,
            &hex(&format!("{header} 00000099 aabbccdd 1122334455667788")),
        );
        b.check(
            &read(1 << 30),
            flags,
            0x10,
            0,
            &hex(&format!("{header} 40000000 aabbccdd 1122334455667788")),
        );
        b.check(&read(0), flags, 0x10, 0, &hex(header));
    }
    b.refuse(
        &read((1 << 30) + 1),
        PostError::MessageTooLong {
            bytes: (1 << 30) + 1,
        },
    );
}

#[test]
fn atomics_are_control_remote_address_operands_result() {
    let mut b = Bench::at(0xfff0);
    let into = Sge { len: 8, ..SGE };
    let (compare, swap) = (0x0102_0304_0506_0708, 0xf1f2_f3f4_f5f6_f7f8);
    let cas = CompareSwap {
        addr: 0x1000_0000_0000_0008,
        rkey: 7,
        compare,
        swap,
        into,
    };
    let faa = FetchAdd {
        addr: 0x1000_0000_0000_0008,
        rkey: 7,
        add: 0x8877_6655_4433_2211,
        into,
    };
    for flags in flags() {
        // MLX5_OPCODE_ATOMIC_CS 0x11, MLX5_OPCODE_ATOMIC_FA 0x12. mlx5_wqe_atomic_seg: swap_add,
        // compare.
        let raddr = "1000000000000008 00000007 00000000";
        let result = "00000008 aabbccdd 1122334455667788";
        b.check(
            &cas,
            flags,
            0x11,
            0,
            &hex(&format!(
                "{raddr} f1f2f3f4f5f6f7f8 0102030405060708 {result}"
            )),
        );
        b.check(
            &faa,
            flags,
            0x12,
            0,
            &hex(&format!(
                "{raddr} 8877665544332211 0000000000000000 {result}"
            )),
        );
    }
    for off in 1..8 {
        let addr = 0x1000_0000_0000_0008 + off;
        b.refuse(
            &CompareSwap { addr, ..cas },
            PostError::AtomicMisaligned { addr },
        );
        b.refuse(
            &FetchAdd { addr, ..faa },
            PostError::AtomicMisaligned { addr },
        );
    }
    for len in [0, 4, 7, 9, 16, 1 << 31] {
        let into = Sge { len, ..into };
        b.refuse(
            &CompareSwap { into, ..cas },
            PostError::AtomicResult { bytes: len },
        );
        b.refuse(
            &FetchAdd { into, ..faa },
            PostError::AtomicResult { bytes: len },
        );
    }
}

/// Returns the ring from the WQE of `op` on, posted at index `index` of queue pair 1.
fn of_qp_1(op: &impl Operation, index: u16) -> Vec<u8> {
    let mut b = bench(1);
    for _ in 0..index {
        b.sq.push(
            &Write {
                addr: 0,
                rkey: 0,
                payload: (),
            },
            Signal::Reclaim,
            0,
        )
        .unwrap();
    }
    b.sq.push(op, Signal::Always, 0).unwrap();
    b.bytes()[usize::from(index) * 64..].to_vec()
}

#[test]
fn write_imm_inline_is_what_libmlx5_wrote() {
    let payload: Vec<u8> = (0..17).collect();
    let op = WriteImm {
        addr: 0x0000_55b6_341f_a000,
        rkey: 0x143,
        imm: 0xdead_beef,
        payload: Inline(&payload),
    };
    let got = of_qp_1(&op, 0);
    let mut want =
        hex("00000009 00000104 00000008 deadbeef 000055b6341fa000 00000143 00000000 80000011");
    want.extend(&payload);
    want.extend([0; 11]);
    assert_eq!(
        got[..64],
        want,
        "ctrl, raddr, inline header, data, padding to 16"
    );
    assert_eq!(got[64..128], [0xa5; 64], "nothing beyond ds");
}

#[test]
fn write_imm_with_one_sge_is_what_libmlx5_wrote() {
    let sge = Sge {
        addr: 0x0000_55b6_341f_9000,
        len: 21,
        lkey: 0x143,
    };
    let got = of_qp_1(
        &WriteImm {
            addr: 0x0000_55b6_341f_b000,
            rkey: 0x143,
            imm: 0xdead_beef,
            payload: sge,
        },
        1,
    );
    let want = hex(
        "00000109 00000103 00000008 deadbeef 000055b6341fb000 00000143 00000000 00000015 00000143 000055b6341f9000",
    );
    assert_eq!(got[..48], want);
    assert_eq!(got[48..64], [0xa5; 16], "nothing beyond ds");
}

#[test]
fn the_end_of_the_ring_is_filled_with_nops_and_indices_go_on() {
    let mut b = Bench::at(8);
    let one = Write {
        addr: 0,
        rkey: 0,
        payload: (),
    };
    let three = Write {
        addr: 0,
        rkey: 0,
        payload: Inline(&[7; 140]),
    };
    for _ in 0..6 {
        b.sq.push(&one, Signal::Always, 0).unwrap();
    }
    assert_eq!(b.sq.complete(13), Some(0));
    b.sq.push(&three, Signal::Always, 42).unwrap();
    let bytes = b.bytes();
    for index in [14u8, 15] {
        let at = usize::from(index) * 64;
        // MLX5_OPCODE_NOP 0x00, ds 1.
        assert_eq!(
            bytes[at..at + 16],
            [0, 0, index, 0, 0xab, 0xcd, 0xef, 1, 0, 0, 0, 0, 0, 0, 0, 0]
        );
    }
    assert_eq!(
        bytes[..8],
        [0, 0, 16, 0x08, 0xab, 0xcd, 0xef, 11],
        "the WQE starts at the ring's start, index 16"
    );
    assert_eq!(b.sq.complete(16), Some(42));
    assert_eq!(b.sq.complete(16), None, "completed twice");
    assert_eq!(b.sq.complete(17), None, "never posted");
}
