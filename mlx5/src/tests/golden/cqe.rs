//! CQEs: success of each opcode, errors, inline data, 128-byte entries, compressed sessions.

use super::hex;
use crate::tests::null;
use crate::wire::*;
use mlx5_hca::CqMemory;

/// Sets bytes at the offsets of `struct mlx5_cqe64` and `struct mlx5_err_cqe`; the others are 0.
fn cqe(fields: &[(usize, &str)]) -> [u8; 64] {
    let mut b = [0; 64];
    for (at, text) in fields {
        let bytes = hex(text);
        b[*at..*at + bytes.len()].copy_from_slice(&bytes);
    }
    b
}

/// Returns the CQE with these fields, and 0xa5 in all other bytes, which a parser must not read.
pub(super) fn noisy(fields: &[(usize, &str)]) -> [u8; 64] {
    let mut b = [0xa5; 64];
    for (at, text) in fields {
        let bytes = hex(text);
        b[*at..*at + bytes.len()].copy_from_slice(&bytes);
    }
    b
}

#[test]
fn responder_fields_are_where_the_header_says() {
    // slid 22, flags_rqpn 24, srqn_uidx 32, imm_inval_pkey 36, byte_cnt 44, sop_drop_qpn 56,
    // wqe_counter 60, op_own 63.
    let fields = [
        (22, "0bcd"),
        (24, "12abcdef"),
        (32, "00654321"),
        (36, "deadbeef"),
        (44, "01020304"),
        (56, "00123456"),
        (60, "fffe"),
        (63, "f1"),
    ];
    let responder = ResponderCqe {
        qpn: 0x12_3456,
        srqn: 0x65_4321,
        imm: 0xdead_beef,
        byte_count: 0x0102_0304,
        wqe_counter: 0xfffe,
        source_qpn: 0xab_cdef,
        slid: 0x0bcd,
        grh: true,
        sl: 2,
    };
    assert_eq!(responder.emit(), cqe(&fields));
    assert_eq!(ResponderCqe::parse(&noisy(&fields)), responder);
    // libmlx5 takes bits 28 and 29 for the GRH, 24..28 are the service level.
    for (flags, grh) in [("0fabcdef", false), ("2fabcdef", true), ("c0abcdef", false)] {
        assert_eq!(
            ResponderCqe::parse(&noisy(&[(24, flags)])).grh,
            grh,
            "{flags}"
        );
        assert_eq!(
            ResponderCqe::parse(&noisy(&[(24, flags)])).source_qpn,
            0xab_cdef,
            "{flags}"
        );
    }
}

#[test]
fn requester_fields_are_where_the_header_says() {
    let fields = [
        (32, "00654321"),
        (44, "00000040"),
        (56, "10123456"),
        (60, "0007"),
        (63, "f1"),
    ];
    let requester = RequesterCqe {
        wqe_opcode: 0x10,
        qpn: 0x12_3456,
        wqe_counter: 7,
        byte_count: 64,
        user_index: 0x65_4321,
    };
    assert_eq!(requester.emit(), cqe(&fields));
    assert_eq!(RequesterCqe::parse(&noisy(&fields)), requester);
}

#[test]
fn error_fields_are_where_the_header_says_for_every_syndrome() {
    // vendor_err_synd 54, syndrome 55, s_wqe_opcode_qpn 56, wqe_counter 60. The numbers are
    // MLX5_CQE_SYNDROME_*.
    let syndromes = [
        ("01", Syndrome::LocalLength),
        ("02", Syndrome::LocalQpOperation),
        ("04", Syndrome::LocalProtection),
        ("05", Syndrome::WorkRequestFlushed),
        ("06", Syndrome::MemoryWindowBind),
        ("10", Syndrome::BadResponse),
        ("11", Syndrome::LocalAccess),
        ("12", Syndrome::RemoteInvalidRequest),
        ("13", Syndrome::RemoteAccess),
        ("14", Syndrome::RemoteOperation),
        ("15", Syndrome::TransportRetryExceeded),
        ("16", Syndrome::RnrRetryExceeded),
        ("22", Syndrome::RemoteAborted),
        ("77", Syndrome::Unknown),
    ];
    for (byte, syndrome) in syndromes {
        let fields = [
            (32, "00654321"),
            (54, "88"),
            (55, byte),
            (56, "09123456"),
            (60, "0003"),
            (63, "f1"),
        ];
        let raw_syndrome = u8::from_str_radix(byte, 16).unwrap();
        let error = ErrorCqe {
            raw_syndrome,
            vendor_syndrome: 0x88,
            wqe_opcode: 9,
            qpn: 0x12_3456,
            wqe_counter: 3,
            user_index: 0x65_4321,
        };
        assert_eq!(error.emit(), cqe(&fields));
        assert_eq!(ErrorCqe::parse(&noisy(&fields)), error);
        assert_eq!(error.syndrome(), syndrome);
    }
}

#[test]
fn op_own_holds_opcode_format_solicited_and_owner() {
    // MLX5_CQE_REQ 0, RESP_WR_IMM 1, RESP_SEND 2, RESP_SEND_IMM 3, RESP_SEND_INV 4, RESIZE_CQ 5,
    // REQ_ERR 13, RESP_ERR 14, INVALID 15.
    let opcodes = [
        (0x0, CqeOpcode::Requester),
        (0x1, CqeOpcode::ResponderWriteImm),
        (0x2, CqeOpcode::ResponderSend),
        (0x3, CqeOpcode::ResponderSendImm),
        (0x4, CqeOpcode::ResponderSendInvalidate),
        (0x5, CqeOpcode::Resize),
        (0xd, CqeOpcode::RequesterError),
        (0xe, CqeOpcode::ResponderError),
        (0xf, CqeOpcode::Invalid),
    ];
    // MLX5_NO_INLINE_DATA 0, MLX5_INLINE_SCATTER_32 0x4, MLX5_INLINE_SCATTER_64 0x8,
    // MLX5_COMPRESSED 3 << 2.
    let formats = [
        (0x0, CqeFormat::Plain),
        (0x4, CqeFormat::Inline32),
        (0x8, CqeFormat::Inline64),
        (0xc, CqeFormat::Compressed),
    ];
    for (high, opcode) in opcodes {
        for (low, format) in formats {
            for bits in 0..4 {
                let byte = high << 4 | low | bits;
                assert_eq!(
                    op_own_with(opcode, format, bits & 2 != 0, bits & 1 != 0),
                    byte
                );
                assert_eq!(CqeOpcode::from_op_own(byte), Some(opcode));
                assert_eq!(CqeFormat::from_op_own(byte), format);
                assert_eq!(is_solicited(byte), bits & 2 != 0);
            }
        }
        assert_eq!(
            (op_own(opcode, false), op_own(opcode, true)),
            (high << 4, high << 4 | 1)
        );
    }
    for unknown in [0x6, 0x7, 0x8, 0x9, 0xa, 0xb, 0xc] {
        assert_eq!(CqeOpcode::from_op_own(unknown << 4), None);
    }
}

#[test]
fn a_large_entry_has_its_cqe_in_the_second_half() {
    assert_eq!(
        (CQE_BYTES, CQE128_BYTES, CQE128_OFFSET, OP_OWN_OFFSET),
        (64, 128, 64, 63)
    );
}

#[test]
fn a_new_cq_holds_no_completion_on_either_lap() {
    let (_null, control) = null();
    let (
        _,
        CqMemory {
            buffer, entries, ..
        },
    ) = control.queues().create_cq(&5.into()).unwrap();
    assert_eq!(entries, 8);
    for i in 0..8usize {
        // SAFETY: inside the CQ's memory, which the device holds.
        assert_eq!(unsafe { buffer.as_ptr().add(i * 64 + 63).read() }, 0xf1);
    }
}

/// A session of 19 receives in a ring of 32. Its title is at entry 20, so the arrays are at 21, 28
/// and 4 (20 + 16 - 32). Written by hand from the kernel's `mlx5_mini_cqe8`: 4 bytes of hash or
/// checksum, byte_cnt.
pub(super) fn session() -> Vec<[u8; 64]> {
    let mut ring = vec![[0xa5; 64]; 32];
    // byte_cnt 44 is the count, 19; the first WQE is 0xfffe; op_own: RESP_SEND, compressed,
    // owner 1.
    ring[20] = noisy(&[
        (36, "deadbeef"),
        (44, "00000013"),
        (56, "00123456"),
        (60, "fffe"),
        (63, "2d"),
    ]);
    let array = |text: &str| noisy(&[(0, text)]);
    ring[21] = array(
        "00000000 00000100 00000001 00000101 00000002 00000102 00000003 00000103
         00000004 00000104 00000005 00000105 00000006 00000106 00000007 00000107",
    );
    ring[28] = array(
        "00000008 00000108 00000009 00000109 0000000a 0000010a 0000000b 0000010b
         0000000c 0000010c 0000000d 0000010d 0000000e 0000010e 0000000f 0000010f",
    );
    ring[4] = array("00000010 00000110 00000011 00000111 80000012 40000112");
    ring
}

#[test]
fn array_places_are_those_of_the_kernels_loop() {
    // mlx5e_decompress_cqes_start reads the array after the title and takes its first entry.
    // mlx5e_decompress_cqes_cont continues with the second, and reads another array, at the counter
    // it has reached, whenever eight entries are used up.
    let cc = 1000;
    let mut place = 1001;
    let mut used = 1;
    assert_eq!(mini_array_offset(0), place - cc);
    for entry in 1..200 {
        if used == 8 {
            (place, used) = (cc + entry, 0);
        }
        used += 1;
        assert_eq!(mini_array_offset(entry), place - cc, "mini CQE {entry}");
    }
}

#[test]
fn a_mini_cqe_and_its_title_make_a_cqe() {
    // Receive: the byte count comes from the mini CQE and the WQE counter from the reader; the rest
    // is the title's.
    let mut got = session()[20];
    MiniCqe {
        word: 0xffff_ffff,
        byte_count: 0x102,
    }
    .expand_receive(&mut got, 0x0001);
    assert_eq!(
        got,
        noisy(&[
            (36, "deadbeef"),
            (44, "00000102"),
            (56, "00123456"),
            (60, "0001"),
            (63, "2d")
        ])
    );
    // Send (s_wqe_info): wqe_counter, s_wqe_opcode, reserved; byte_cnt.
    let bytes = hex("1234 09 00 00000040");
    let mini = MiniCqe::parse(bytes[..].try_into().unwrap());
    assert_eq!(
        (mini.wqe_counter(), mini.wqe_opcode(), mini.byte_count),
        (0x1234, 9, 64)
    );
    assert_eq!(MiniCqe::requester(0x1234, 9, 64).emit().to_vec(), bytes);
    let mut got = noisy(&[(44, "00000002"), (56, "08123456"), (60, "0007"), (63, "0d")]);
    mini.expand_send(&mut got);
    assert_eq!(
        got,
        noisy(&[(44, "00000040"), (56, "09123456"), (60, "1234"), (63, "0d")])
    );
}

#[test]
fn a_title_is_the_first_cqe_with_count_and_format() {
    let mut got = noisy(&[(44, "00000100"), (60, "0000"), (63, "21")]);
    TitleCqe {
        count: 19,
        wqe_counter: 0xfffe,
    }
    .emit_into(&mut got);
    assert_eq!(
        TitleCqe::parse(&got),
        TitleCqe {
            count: 19,
            wqe_counter: 0xfffe
        }
    );
    assert_eq!(got, noisy(&[(44, "00000013"), (60, "fffe"), (63, "2d")]));
}
