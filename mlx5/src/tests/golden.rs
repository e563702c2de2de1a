//! Golden bytes. None comes from this crate's own emitters: WQEs were read from a send queue that NVIDIA's libmlx5 (rdma-core 44) had
//! filled, segment and CQE field offsets are those of `infiniband/mlx5dv.h`. Everything is emitted over a buffer filled with 0xa5.

use crate::control::{CqParts, SqParts, UarParts};
use crate::doorbell::Doorbell;
use crate::ops::{Inline, Operation, Read, Sge, Write, WriteImm};
use crate::soft::{Hca, LocalFabric};
use crate::sq::{PostError, SendQueue, Signal};
use crate::wire::*;
use crate::{FabricSpec, NullOptions, RegisterKind, SoftOptions};

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|b| b.is_ascii_hexdigit()).collect();
    digits.chunks(2).map(|d| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap()).collect()
}

/// A send queue over memory filled with 0xa5, starting at WQEBB `start` of QP `qpn`.
struct Bench {
    memory: Box<[[u8; 64]]>,
    sq: SendQueue,
}

#[repr(C, align(512))]
struct Uar {
    register: [u8; 512],
    record: u32,
}

fn bench(qpn: u32, wqe_cnt: u16) -> Bench {
    let mut memory = vec![[0xa5u8; 64]; usize::from(wqe_cnt)].into_boxed_slice();
    // A BlueFlame register is aligned to its size.
    let uar = Box::leak(Box::new(Uar { register: [0; 512], record: 0 }));
    let (register, record) = (std::ptr::NonNull::from(&mut uar.register).cast(), std::ptr::NonNull::from(&mut uar.record).cast());
    let uar = UarParts { register, kind: RegisterKind::Ordinary, uar_offset: 0 };
    let buffer = std::ptr::NonNull::new(memory.as_mut_ptr()).unwrap().cast();
    let parts = SqParts { qpn, buffer, wqe_cnt, max_inline: 220, record, uar };
    let sq = SendQueue::new(&parts, Doorbell::new(&uar, record, None));
    Bench { memory, sq }
}

impl Bench {
    fn bytes(&self) -> Vec<u8> {
        // SAFETY: reads the memory the send queue writes through its raw pointer.
        (0..self.memory.len()).flat_map(|i| unsafe { (&raw const self.memory[i]).read_volatile() }).collect()
    }

    fn emit(op: &impl Operation, signal: Signal, index: u16) -> Vec<u8> {
        let mut b = bench(1, 16);
        for _ in 0..index {
            b.sq.push(&Write { addr: 0, rkey: 0, payload: () }, Signal::Reclaim, 0).unwrap();
        }
        b.sq.push(op, signal, 0).unwrap();
        b.bytes()[usize::from(index) * 64..].to_vec()
    }
}

#[test]
fn write_imm_inline_is_what_libmlx5_wrote() {
    let payload: Vec<u8> = (0..17).collect();
    let op = WriteImm { addr: 0x0000_55b6_341f_a000, rkey: 0x143, imm: 0xdead_beef, payload: Inline(&payload) };
    let got = Bench::emit(&op, Signal::Always, 0);
    let mut want = hex("00000009 00000104 00000008 deadbeef 000055b6341fa000 00000143 00000000 80000011");
    want.extend(&payload);
    want.extend([0; 11]);
    assert_eq!(got[..64], want, "ctrl, raddr, inline header, data, padding to 16");
    assert_eq!(got[64..128], [0xa5; 64], "nothing beyond ds");
}

#[test]
fn write_imm_with_one_sge_is_what_libmlx5_wrote() {
    let sge = Sge { addr: 0x0000_55b6_341f_9000, len: 21, lkey: 0x143 };
    let op = WriteImm { addr: 0x0000_55b6_341f_b000, rkey: 0x143, imm: 0xdead_beef, payload: sge };
    let got = Bench::emit(&op, Signal::Always, 1);
    let want = hex("00000109 00000103 00000008 deadbeef 000055b6341fb000 00000143 00000000 00000015 00000143 000055b6341f9000");
    assert_eq!(got[..48], want);
    assert_eq!(got[48..64], [0xa5; 16], "nothing beyond ds");
}

#[test]
fn opcodes_and_unsignaled_bits_are_those_of_the_header() {
    let sge = Sge { addr: 0x1122_3344_5566_7788, len: 0x99, lkey: 0xaabb_ccdd };
    // MLX5_OPCODE_RDMA_WRITE 0x08, MLX5_OPCODE_RDMA_READ 0x10; MLX5_WQE_CTRL_CQ_UPDATE is 2 << 2.
    let tail = hex("1000000000000002 00000007 00000000 00000099 aabbccdd 1122334455667788");
    let write = Bench::emit(&Write { addr: 0x1000_0000_0000_0002, rkey: 7, payload: sge }, Signal::Reclaim, 0);
    assert_eq!(write[..16], hex("00000008 00000103 00000000 00000000"));
    assert_eq!(write[16..48], tail);
    let read = Bench::emit(&Read { addr: 0x1000_0000_0000_0002, rkey: 7, into: sge }, Signal::Always, 0);
    assert_eq!(read[..16], hex("00000010 00000103 00000008 00000000"));
    assert_eq!(read[16..48], tail);
}

#[test]
fn every_inline_size_has_the_length_of_the_format_and_the_limit_holds() {
    let payload: Vec<u8> = (0..=220u8).collect();
    for n in 0..=220usize {
        let got = Bench::emit(&WriteImm { addr: 1, rkey: 2, imm: 3, payload: Inline(&payload[..n]) }, Signal::Reclaim, 0);
        // A message of length 0 has no data segment; else 4 bytes of header and n of data, padded to 16.
        let segments = if n == 0 { 0 } else { (4 + n).div_ceil(16) };
        assert_eq!(usize::from(got[7]), 2 + segments, "ds at {n}");
        if n > 0 {
            assert_eq!(got[32..36], (0x8000_0000u32 | n as u32).to_be_bytes());
            assert_eq!(got[36..36 + n], payload[..n]);
            assert!(got[36 + n..32 + segments * 16].iter().all(|&b| b == 0), "padding at {n}");
        }
        let end = ((2 + segments) * 16).next_multiple_of(64);
        assert!(got[(2 + segments) * 16..end.max(64)].iter().all(|&b| b == 0xa5), "beyond ds at {n}");
    }
    let mut b = bench(1, 16);
    let over = b.sq.push(&WriteImm { addr: 1, rkey: 2, imm: 3, payload: Inline(&[0; 221]) }, Signal::Reclaim, 0);
    assert_eq!(over, Err(PostError::InlineTooLong { bytes: 221, max: 220 }));
    assert!(b.bytes().iter().all(|&b| b == 0xa5), "a refused post writes nothing");
}

#[test]
fn hybrid_is_inline_padded_to_16_then_the_pointer() {
    let sge = Sge { addr: 0x1234, len: 1000, lkey: 5 };
    let got = Bench::emit(&WriteImm { addr: 1, rkey: 2, imm: 3, payload: (Inline(&[9; 204]), sge) }, Signal::Reclaim, 0);
    assert_eq!(got[7], 16, "16 + 16 + 208 + 16 bytes");
    assert_eq!(got[32..36], hex("800000cc"));
    assert_eq!(got[36..240], [9; 204]);
    assert_eq!(got[240..256], hex("000003e8 00000005 0000000000001234"));
}

#[test]
fn a_zero_length_sge_is_never_emitted() {
    let got = Bench::emit(&WriteImm { addr: 1, rkey: 2, imm: 3, payload: Sge { addr: 9, len: 0, lkey: 9 } }, Signal::Reclaim, 0);
    assert_eq!(got[7], 2);
    assert_eq!(got[32..64], [0xa5; 32]);
}

#[test]
fn the_end_of_the_ring_is_filled_with_nops_and_indices_go_on() {
    let mut b = bench(0xab_cdef, 8);
    let one = Write { addr: 0, rkey: 0, payload: () };
    let three = Write { addr: 0, rkey: 0, payload: Inline(&[7; 140]) };
    for _ in 0..6 {
        b.sq.push(&one, Signal::Always, 0).unwrap();
    }
    assert_eq!(b.sq.complete(5), Some(0));
    b.sq.push(&three, Signal::Always, 42).unwrap();
    let bytes = b.bytes();
    for index in [6u8, 7] {
        let at = usize::from(index) * 64;
        // MLX5_OPCODE_NOP 0x00, ds 1.
        assert_eq!(bytes[at..at + 16], [0, 0, index, 0, 0xab, 0xcd, 0xef, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
    assert_eq!(bytes[..8], [0, 0, 8, 0x08, 0xab, 0xcd, 0xef, 11], "the WQE starts at the ring's start, index 8");
    assert_eq!(b.sq.complete(8), Some(42));
    assert_eq!(b.sq.complete(8), None, "completed twice");
    assert_eq!(b.sq.complete(9), None, "never posted");
}

#[test]
fn next_segment_and_terminator_are_those_of_the_header() {
    // mlx5_wqe_srq_next_seg: next_wqe_index at byte 2; MLX5_INVALID_LKEY 0x100.
    assert_eq!(NextSegment { next_wqe_index: 0x1234 }.emit().to_vec(), hex("0000 1234 00000000 00000000 00000000"));
    assert_eq!(DataSegment::TERMINATOR.emit().to_vec(), hex("00000000 00000100 00000000 00000000"));
}

#[test]
fn data_segment_golden_of_the_headers_own_helper() {
    // mlx5dv_set_data_seg(seg, 0x11223344, 0x55667788, 0x99aabbccddeeff00)
    let segment = DataSegment { byte_count: 0x1122_3344, lkey: 0x5566_7788, addr: 0x99aa_bbcc_ddee_ff00 };
    assert_eq!(segment.emit().to_vec(), hex("11223344 55667788 99aabbccddeeff00"));
    assert_eq!(DataSegment::parse(&segment.emit()), segment);
}

#[test]
fn doorbell_records_are_big_endian_and_wide_as_the_device_reads_them() {
    assert_eq!(queue_record(0x1234).to_ne_bytes(), [0, 0, 0x12, 0x34]);
    assert_eq!(cq_consumer_record(0xab12_3456).to_ne_bytes(), [0, 0x12, 0x34, 0x56], "24 bits");
    assert_eq!((QP_DBREC_RECEIVE, QP_DBREC_SEND, CQ_DBREC_SET_CI, CQ_DBREC_ARM), (0, 1, 0, 1));
}

/// Sets `bytes` at the offsets of `struct mlx5_cqe64` and `struct mlx5_err_cqe`.
fn cqe(fields: &[(usize, &str)]) -> [u8; 64] {
    let mut b = [0; 64];
    for (at, text) in fields {
        let bytes = hex(text);
        b[*at..*at + bytes.len()].copy_from_slice(&bytes);
    }
    b
}

#[test]
fn cqe_fields_are_where_the_header_says() {
    // srqn_uidx 32, imm_inval_pkey 36, byte_cnt 44, sop_drop_qpn 56, wqe_counter 60, op_own 63.
    let responder = ResponderCqe { qpn: 0x12_3456, srqn: 0x65_4321, imm: 0xdead_beef, byte_count: 0x0102_0304, wqe_counter: 0xfffe };
    let bytes = cqe(&[(32, "00654321"), (36, "deadbeef"), (44, "01020304"), (56, "00123456"), (60, "fffe"), (63, "f1")]);
    assert_eq!(responder.emit(), bytes);
    assert_eq!(ResponderCqe::parse(&bytes), responder);
    let requester = RequesterCqe { wqe_opcode: 0x10, qpn: 0x12_3456, wqe_counter: 7, byte_count: 64 };
    let bytes = cqe(&[(44, "00000040"), (56, "10123456"), (60, "0007"), (63, "f1")]);
    assert_eq!(requester.emit(), bytes);
    assert_eq!(RequesterCqe::parse(&bytes), requester);
    // vendor_err_synd 54, syndrome 55, s_wqe_opcode_qpn 56, wqe_counter 60. MLX5_CQE_SYNDROME_REMOTE_ACCESS_ERR 0x13.
    let error = ErrorCqe { raw_syndrome: 0x13, vendor_syndrome: 0x88, wqe_opcode: 9, qpn: 0x12_3456, wqe_counter: 3 };
    let bytes = cqe(&[(54, "88"), (55, "13"), (56, "09123456"), (60, "0003"), (63, "f1")]);
    assert_eq!(error.emit(), bytes);
    assert_eq!(ErrorCqe::parse(&bytes), error);
    assert_eq!(error.syndrome(), Syndrome::RemoteAccess);
    // MLX5_CQE_REQ 0, MLX5_CQE_RESP_WR_IMM 1, MLX5_CQE_REQ_ERR 13, MLX5_CQE_RESP_ERR 14, MLX5_CQE_INVALID 15; owner is bit 0.
    let kinds =
        [CqeOpcode::Requester, CqeOpcode::ResponderWriteImm, CqeOpcode::RequesterError, CqeOpcode::ResponderError, CqeOpcode::Invalid];
    assert_eq!(kinds.map(|k| op_own(k, true)), [0x01, 0x11, 0xd1, 0xe1, 0xf1]);
}

#[test]
fn a_new_cq_holds_no_completion_on_either_lap() {
    let options = SoftOptions { fabric: FabricSpec::Local(LocalFabric::new()), arena_bytes: 4096, ..Default::default() };
    let hca = Hca::open(&options, Some(&NullOptions::default())).unwrap();
    let CqParts { buffer, entries, .. } = hca.create_cq(5).unwrap();
    assert_eq!(entries, 8);
    for i in 0..8usize {
        // SAFETY: inside the CQ's memory, which `hca` holds.
        assert_eq!(unsafe { buffer.as_ptr().add(i * 64 + 63).read() }, 0xf1);
    }
}
