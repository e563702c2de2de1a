//! Doorbell records, doorbells, the two segments of a receive WQE; and the segments of send WQEs as
//! a device reads them.

use super::hex;
use crate::wire::*;

#[test]
fn next_segment_and_terminator_are_those_of_the_header() {
    // mlx5_wqe_srq_next_seg: next_wqe_index at byte 2; MLX5_INVALID_LKEY 0x100.
    assert_eq!(
        NextSegment {
            next_wqe_index: 0x1234
        }
        .emit()
        .to_vec(),
        hex("0000 1234 00000000 00000000 00000000")
    );
    assert_eq!(
        DataSegment::TERMINATOR.emit().to_vec(),
        hex("00000000 00000100 00000000 00000000")
    );
}

#[test]
fn data_segment_golden_of_the_headers_own_helper() {
    // mlx5dv_set_data_seg(seg, 0x11223344, 0x55667788, 0x99aabbccddeeff00)
    let segment = DataSegment {
        byte_count: 0x1122_3344,
        lkey: 0x5566_7788,
        addr: 0x99aa_bbcc_ddee_ff00,
    };
    assert_eq!(
        segment.emit().to_vec(),
        hex("11223344 55667788 99aabbccddeeff00")
    );
    let words = DataWords::parse(&segment.emit());
    assert_eq!(
        (words.byte_count(), words.lkey(), words.addr()),
        (segment.byte_count, segment.lkey, segment.addr)
    );
}

#[test]
fn doorbell_records_are_big_endian_and_wide_as_the_device_reads_them() {
    assert_eq!(queue_record(0x1234).to_ne_bytes(), [0, 0, 0x12, 0x34]);
    assert_eq!(
        cq_consumer_record(0xab12_3456).to_ne_bytes(),
        [0, 0x12, 0x34, 0x56],
        "24 bits"
    );
    assert_eq!(
        (
            QP_DBREC_RECEIVE,
            QP_DBREC_SEND,
            CQ_DBREC_SET_CI,
            CQ_DBREC_ARM
        ),
        (0, 1, 0, 1)
    );
}

#[test]
fn a_cq_is_armed_with_sequence_kind_and_consumer() {
    // sn << 28 | MLX5_CQ_DB_REQ_NOT_SOL (1 << 24) | ci, then the CQN; at MLX5_CQ_DOORBELL 0x20 of
    // the UAR page.
    let arm = CqArm {
        sequence: 2,
        solicited_only: true,
        consumed: 0xab_cdef,
    };
    assert_eq!(arm.record().to_ne_bytes().to_vec(), hex("21abcdef"));
    assert_eq!(arm.doorbell(0x12_3456).to_vec(), hex("21abcdef 00123456"));
    assert_eq!(CqArm::from_record(arm.record()), arm);
    let next = CqArm {
        sequence: 7,
        solicited_only: false,
        consumed: 0xff00_0001,
    };
    assert_eq!(
        next.record().to_ne_bytes().to_vec(),
        hex("30000001"),
        "2 bits of the sequence, 24 of the counter"
    );
    assert_eq!(
        CqArm::from_record(next.record()),
        CqArm {
            sequence: 3,
            solicited_only: false,
            consumed: 1
        }
    );
    assert_eq!(CQ_DOORBELL_OFFSET, 0x20);
}

#[test]
fn a_control_segment_is_read_with_anything_in_its_reserved_bytes() {
    let ctrl = |fm_ce_se: &str| {
        CtrlWords::parse(
            hex(&format!("ff123411 abcdefc6 ffffff{fm_ce_se} deadbeef"))[..]
                .try_into()
                .unwrap(),
        )
    };
    // MLX5_OPCODE_ATOMIC_CS 0x11; ds has 6 bits. fm_ce_se: fence 4 << 5, CQ update 2 << 2,
    // solicited 1 << 1.
    let words = ctrl("8a");
    assert_eq!(
        (
            words.opcode(),
            words.wqe_index(),
            words.qpn(),
            words.ds(),
            words.imm()
        ),
        (0x11, 0x1234, 0xab_cdef, 6, 0xdead_beef)
    );
    let flags = ["8a", "00", "02"].map(|byte| {
        (
            ctrl(byte).signaled(),
            ctrl(byte).fence(),
            ctrl(byte).solicited(),
        )
    });
    assert_eq!(
        flags,
        [
            (true, FenceMode::SmallAndFence, true),
            (false, FenceMode::None, false),
            (false, FenceMode::None, true)
        ]
    );
    // MLX5_FENCE_MODE_* of the kernel. An undefined mode waits for all earlier work.
    let modes = ["08", "28", "48", "68", "88", "a8", "c8", "e8"].map(|byte| ctrl(byte).fence());
    let strong = FenceMode::StrongOrdering;
    let named = [
        FenceMode::None,
        FenceMode::InitiatorSmall,
        FenceMode::Fence,
        strong,
        FenceMode::SmallAndFence,
    ];
    assert_eq!(
        modes,
        [
            named[0], named[1], named[2], named[3], named[4], strong, strong, strong
        ]
    );
}

#[test]
fn opcodes_are_those_of_the_header() {
    let opcodes = [
        (0x00, Opcode::Nop),
        (0x08, Opcode::RdmaWrite),
        (0x09, Opcode::RdmaWriteImm),
        (0x0a, Opcode::Send),
        (0x0b, Opcode::SendImm),
        (0x10, Opcode::RdmaRead),
        (0x11, Opcode::AtomicCompareSwap),
        (0x12, Opcode::AtomicFetchAdd),
    ];
    for byte in 0..=255u8 {
        let want = opcodes
            .iter()
            .find(|(b, _)| *b == byte)
            .map(|(_, opcode)| *opcode);
        assert_eq!(Opcode::from_repr(byte), want, "{byte:#04x}");
    }
}

#[test]
fn the_segments_behind_it_are_read_where_the_header_puts_them() {
    let bytes = hex("f1f2f3f4f5f6f7f8 0102030405060708");
    let atomic = AtomicSegment {
        swap_add: 0xf1f2_f3f4_f5f6_f7f8,
        compare: 0x0102_0304_0506_0708,
    };
    assert_eq!(AtomicSegment::parse(bytes[..].try_into().unwrap()), atomic);
    let bytes = hex("8877665544332211 aabbccdd ffffffff");
    let raddr = RaddrSegment {
        addr: 0x8877_6655_4433_2211,
        rkey: 0xaabb_ccdd,
    };
    assert_eq!(RaddrSegment::parse(bytes[..].try_into().unwrap()), raddr);
    let bytes = hex(
        "11223344 ffffffff 80123456 35 7f c0de ffffffff 102030405060 99 fe 40312345 000102030405060708090a0b0c0d0e0f",
    );
    let vector = AddressVector {
        stat_rate_sl: 0x35,
        fl_mlid: 0x7f,
        rlid: 0xc0de,
        rmac: [0x10, 0x20, 0x30, 0x40, 0x50, 0x60],
        tclass: 0x99,
        hop_limit: 0xfe,
        grh_gid_fl: 0x4031_2345,
        rgid: std::array::from_fn(|i| i as u8),
    };
    assert!(vector.has_grh() && !AddressVector::local(7, 15).has_grh());
    assert_eq!(
        DatagramSegment::parse(bytes[..].try_into().unwrap()),
        DatagramSegment {
            vector,
            qpn: 0x12_3456,
            qkey: 0x1122_3344
        }
    );
    let data = |first: &str| {
        DataWords::parse(
            hex(&format!("{first} aabbccdd 1122334455667788"))[..]
                .try_into()
                .unwrap(),
        )
    };
    assert_eq!(
        (data("80000102").is_inline(), data("80000102").byte_count()),
        (true, 0x102)
    );
    assert!(!data("7f000102").is_inline());
    assert_eq!(
        NextSegment::parse(
            hex("ffff 1234 ffffffff ffffffff ffffffff")[..]
                .try_into()
                .unwrap()
        )
        .next_wqe_index,
        0x1234
    );
}
