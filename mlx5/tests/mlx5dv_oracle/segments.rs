//! Single segments, with any value in each field, and doorbells.

use mlx5::AddressVector;
use mlx5::wire::*;

use super::{Questions, Random, report, variants};

/// How the oracle is asked for a datagram segment.
pub(super) fn datagram_question(segment: &DatagramSegment) -> String {
    let DatagramSegment { vector, qpn, qkey } = segment;
    let AddressVector { stat_rate_sl, fl_mlid, rlid, rmac, tclass, hop_limit, grh_gid_fl, rgid } = vector;
    let mac = rmac.iter().fold(0u64, |mac, byte| mac << 8 | u64::from(*byte));
    let (high, low) = (u128::from_be_bytes(*rgid) >> 64, u128::from_be_bytes(*rgid) as u64);
    format!("dgram {qkey:x} {qpn:x} {stat_rate_sl:x} {fl_mlid:x} {rlid:x} {mac:x} {tclass:x} {hop_limit:x} {grh_gid_fl:x} {high:x} {low:x}")
}

#[test]
#[ignore = "needs libibverbs-dev"]
fn segments_and_doorbells_are_what_the_header_makes_of_them() {
    let mut questions = Questions::default();
    let mut random = Random(1);
    for i in 0..200 {
        let vector = AddressVector {
            stat_rate_sl: random.next() as u8,
            fl_mlid: random.next() as u8,
            rlid: random.next() as u16,
            rmac: random.next().to_be_bytes()[2..].try_into().unwrap(),
            tclass: random.next() as u8,
            hop_limit: random.next() as u8,
            grh_gid_fl: random.next() as u32,
            rgid: [random.next().to_be_bytes(), random.next().to_be_bytes()].concat().try_into().unwrap(),
        };
        let segment = DatagramSegment { vector, qpn: random.next() as u32 & 0xff_ffff, qkey: random.next() as u32 };
        questions.ask(format_args!("{}", datagram_question(&segment)), &segment.emit());
        let data = DataSegment { byte_count: random.next() as u32 >> 1, lkey: random.next() as u32, addr: random.next() };
        questions.ask(format_args!("data {:x} {:x} {:x}", data.byte_count, data.lkey, data.addr), &data.emit());
        let next = NextSegment { next_wqe_index: random.next() as u16 };
        questions.ask(format_args!("srq_next {:x}", next.next_wqe_index), &next.emit());
        let arm = CqArm { sequence: random.next() as u8, solicited_only: i % 2 == 0, consumed: random.next() as u32 };
        let cqn = random.next() as u32 & 0xff_ffff;
        let question = format!("arm {:x} {:x} {:x} {cqn:x}", arm.sequence, u8::from(arm.solicited_only), arm.consumed);
        questions.ask(format_args!("{question}"), &arm.doorbell(cqn));
        assert_eq!(arm.record().to_ne_bytes(), arm.doorbell(cqn)[..4], "the record's word is the doorbell's first");
    }
    let comparisons = variants("segments").iter().map(|oracle| oracle.compare(&questions)).sum();
    report("segments and doorbells", comparisons, 800);
}
