//! Names for the bytes of a WQE, segment by segment (`infiniband/mlx5dv.h`).

use std::ops::Range;

/// The segments of an operation, after its control segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Segment {
    Datagram,
    Remote,
    Atomic,
    /// Inline data of this number of bytes, with its header.
    Inline(usize),
    /// A buffer by pointer.
    Data,
}

const CTRL: &[(&str, usize)] = &[
    ("opmod", 1),
    ("wqe_index", 2),
    ("opcode", 1),
    ("qpn", 3),
    ("ds", 1),
    ("signature", 1),
    ("reserved", 2),
    ("fm_ce_se", 1),
    ("imm", 4),
];
const DATAGRAM: &[(&str, usize)] = &[
    ("qkey", 4),
    ("reserved_key", 4),
    ("dqp_dct", 4),
    ("stat_rate_sl", 1),
    ("fl_mlid", 1),
    ("rlid", 2),
    ("reserved", 4),
    ("rmac", 6),
    ("tclass", 1),
    ("hop_limit", 1),
    ("grh_gid_fl", 4),
    ("rgid", 16),
];
const REMOTE: &[(&str, usize)] = &[("raddr", 8), ("rkey", 4), ("reserved", 4)];
const ATOMIC: &[(&str, usize)] = &[("swap_add", 8), ("compare", 8)];
const DATA: &[(&str, usize)] = &[("byte_count", 4), ("lkey", 4), ("addr", 8)];

/// Returns the name of every byte of a WQE of these segments.
pub(crate) fn fields(segments: &[Segment]) -> Vec<(String, Range<usize>)> {
    let mut fields = Vec::new();
    let mut at = 0;
    let mut put = |segment: &str, layout: &[(&str, usize)]| {
        for (name, len) in layout {
            fields.push((format!("{segment}.{name}"), at..at + len));
            at += len;
        }
    };
    put("ctrl", CTRL);
    for segment in segments {
        match *segment {
            Segment::Datagram => put("datagram", DATAGRAM),
            Segment::Remote => put("raddr", REMOTE),
            Segment::Atomic => put("atomic", ATOMIC),
            Segment::Data => put("data", DATA),
            Segment::Inline(bytes) => {
                put(
                    "inline",
                    &[
                        ("byte_count", 4),
                        ("data", bytes),
                        ("padding", (4 + bytes).next_multiple_of(16) - 4 - bytes),
                    ],
                );
            }
        }
    }
    fields
}
