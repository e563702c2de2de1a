//! CQEs: the header reads ours, we read the header's.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use mlx5::wire::*;

use super::{Oracle, Random, report};

const OPCODES: [CqeOpcode; 9] = [
    CqeOpcode::Requester,
    CqeOpcode::ResponderWriteImm,
    CqeOpcode::ResponderSend,
    CqeOpcode::ResponderSendImm,
    CqeOpcode::ResponderSendInvalidate,
    CqeOpcode::Resize,
    CqeOpcode::RequesterError,
    CqeOpcode::ResponderError,
    CqeOpcode::Invalid,
];
const FORMATS: [CqeFormat; 4] = [CqeFormat::Plain, CqeFormat::Inline32, CqeFormat::Inline64, CqeFormat::Compressed];

/// Every op_own byte that has a meaning, with its parts.
fn op_owns() -> impl Iterator<Item = (u8, CqeOpcode, CqeFormat, bool, bool)> {
    OPCODES.into_iter().flat_map(|opcode| {
        FORMATS.into_iter().flat_map(move |format| {
            (0..4).map(move |bits| {
                let (solicited, owner) = (bits & 2 != 0, bits & 1 != 0);
                (op_own_with(opcode, format, solicited, owner), opcode, format, solicited, owner)
            })
        })
    })
}

#[test]
#[ignore = "needs libibverbs-dev"]
fn the_header_reads_our_cqes_as_they_were_meant() {
    let mut random = Random(2);
    let mut questions = String::new();
    let mut want: Vec<Vec<(&str, u32)>> = Vec::new();
    for (op_own, opcode, format, solicited, owner) in op_owns() {
        let mut ask = |mut bytes: [u8; CQE_BYTES], mut fields: Vec<(&'static str, u32)>| {
            bytes[OP_OWN_OFFSET] = op_own;
            let text: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            writeln!(questions, "read_cqe {text}").unwrap();
            fields.extend([("opcode", opcode as u32), ("format", format as u32)]);
            fields.extend([("solicited", u32::from(solicited)), ("owner", u32::from(owner))]);
            want.push(fields);
        };
        let (qpn, wqe_opcode, wqe_counter) = (random.next() as u32 & 0xff_ffff, random.next() as u8, random.next() as u16);
        let (srqn, imm, byte_count) = (random.next() as u32 & 0xff_ffff, random.next() as u32, random.next() as u32);
        let (source_qpn, grh) = (random.next() as u32 & 0xff_ffff, random.next() & 1 != 0);
        let (raw_syndrome, vendor_syndrome) = (random.next() as u8, random.next() as u8);
        let opcode_qpn = u32::from(wqe_opcode) << 24 | qpn;
        let counter = u32::from(wqe_counter);

        let cqe = RequesterCqe { wqe_opcode, qpn, wqe_counter, byte_count, user_index: srqn };
        let fields = [("sop_drop_qpn", opcode_qpn), ("wqe_counter", counter), ("byte_cnt", byte_count), ("imm", 0), ("srqn", srqn)];
        ask(cqe.emit(), fields.to_vec());
        let cqe = ResponderCqe { qpn, srqn, imm, byte_count, wqe_counter, source_qpn, grh };
        let fields = [
            ("sop_drop_qpn", qpn),
            ("wqe_counter", counter),
            ("byte_cnt", byte_count),
            ("imm", imm),
            ("srqn", srqn),
            ("flags_rqpn", u32::from(grh) << 28 | source_qpn),
        ];
        ask(cqe.emit(), fields.to_vec());
        let cqe = ErrorCqe { raw_syndrome, vendor_syndrome, wqe_opcode, qpn, wqe_counter, user_index: srqn };
        let fields = [
            ("syndrome", u32::from(raw_syndrome)),
            ("vendor", u32::from(vendor_syndrome)),
            ("s_wqe_opcode_qpn", opcode_qpn),
            ("err_wqe_counter", counter),
            ("srqn", srqn),
        ];
        ask(cqe.emit(), fields.to_vec());
        // A title: its byte count is the number of CQEs. The format must not have to be set by hand.
        let mut title = [0; CQE_BYTES];
        title[OP_OWN_OFFSET] = op_own;
        TitleCqe { count: byte_count, wqe_counter }.emit_into(&mut title);
        assert_eq!(title[OP_OWN_OFFSET], op_own_with(opcode, CqeFormat::Compressed, solicited, owner));
        ask(title, vec![("byte_cnt", byte_count), ("wqe_counter", counter)]);
    }
    let answers = Oracle::compile("read", "plain").run(&questions);
    assert_eq!(answers.len(), want.len());
    let mut comparisons = 0;
    for (answer, want) in answers.iter().zip(&want) {
        let words: Vec<_> = answer.split(' ').collect();
        let read: BTreeMap<_, _> = words.chunks(2).map(|pair| (pair[0], u32::from_str_radix(pair[1], 16).unwrap())).collect();
        for (name, value) in want {
            assert_eq!(read[name], *value, "{name} in {answer}");
            comparisons += 1;
        }
    }
    report("fields of our CQEs", comparisons, 36 * 4 * 4 * 6);
}

#[test]
#[ignore = "needs libibverbs-dev"]
fn we_read_the_headers_cqes_as_they_were_meant() {
    let mut random = Random(3);
    let mut questions = String::new();
    let mut want = Vec::new();
    for (_, opcode, format, solicited, owner) in op_owns() {
        let (qpn, wqe_opcode, wqe_counter) = (random.next() as u32 & 0xff_ffff, random.next() as u8, random.next() as u16);
        let (srqn, imm, byte_count) = (random.next() as u32 & 0xff_ffff, random.next() as u32, random.next() as u32);
        let (source_qpn, grh) = (random.next() as u32 & 0xff_ffff, random.next() & 1 != 0);
        let (raw_syndrome, vendor_syndrome) = (random.next() as u8, random.next() as u8);
        let flags_rqpn = u32::from(grh) << 28 | source_qpn;
        let sop_drop_qpn = u32::from(wqe_opcode) << 24 | qpn;
        writeln!(
            questions,
            "make_cqe {:x} {:x} {:x} {:x} {flags_rqpn:x} {srqn:x} {imm:x} {byte_count:x} {sop_drop_qpn:x} {wqe_counter:x}",
            opcode as u8,
            format as u8,
            u8::from(solicited),
            u8::from(owner)
        )
        .unwrap();
        writeln!(questions, "make_err_cqe {srqn:x} {vendor_syndrome:x} {raw_syndrome:x} {sop_drop_qpn:x} {wqe_counter:x}").unwrap();
        let error = ErrorCqe { raw_syndrome, vendor_syndrome, wqe_opcode, qpn, wqe_counter, user_index: srqn };
        let requester = RequesterCqe { wqe_opcode, qpn, wqe_counter, byte_count, user_index: srqn };
        let responder = ResponderCqe { qpn, srqn, imm, byte_count, wqe_counter, source_qpn, grh };
        want.push(((opcode, format, solicited, owner), requester, responder, TitleCqe { count: byte_count, wqe_counter }, error));
    }
    let answers = Oracle::compile("make", "plain").run(&questions);
    assert_eq!(answers.len(), 2 * want.len());
    let mut comparisons = 0;
    for (answers, (op_own, requester, responder, title, error)) in answers.chunks(2).zip(want) {
        // Whatever the header leaves unset must not matter.
        for filler in ["00", "a5", "ff"] {
            let cqe = bytes(&answers[0].replace("..", filler));
            let byte = cqe[OP_OWN_OFFSET];
            let parts = (CqeOpcode::from_op_own(byte).unwrap(), CqeFormat::from_op_own(byte), is_solicited(byte), byte & 1 != 0);
            assert_eq!(parts, op_own);
            assert_eq!(RequesterCqe::parse(&cqe), requester);
            assert_eq!(ResponderCqe::parse(&cqe), responder);
            assert_eq!(TitleCqe::parse(&cqe), title);
            assert_eq!(ErrorCqe::parse(&bytes(&answers[1].replace("..", filler))), error);
            comparisons += 5;
        }
    }
    report("the header's CQEs", comparisons, 36 * 4 * 5 * 3);
}

fn bytes(hex: &str) -> [u8; CQE_BYTES] {
    std::array::from_fn(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap())
}
