//! Operations in the form that both drivers take.

use std::ffi::c_void;

use mlx5::*;

use super::fields::Segment;
use super::libmlx5::{
    IbvSge, Op, SEND_FENCE, SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED, WrOpcode,
};

pub(crate) const RADDR: u64 = 0x1000_0000_0000_0008;
pub(crate) const RKEY: u32 = 0x0765_4321;
pub(crate) const IMM: u32 = 0xdead_beef;
pub(crate) const COMPARE: u64 = 0x0102_0304_0506_0708;
pub(crate) const SWAP_ADD: u64 = 0xf1f2_f3f4_f5f6_f7f8;
pub(crate) const SGE: Sge = Sge {
    addr: 0x1122_3344_5566_7788,
    len: 0x0009_8765,
    lkey: 0xaabb_ccdd,
};

/// The content of a message.
#[derive(Clone, Debug)]
pub(crate) enum Content {
    Nothing,
    Inline(Vec<u8>),
    /// Buffers by pointer.
    Gathered(Vec<Sge>),
}

/// An operation.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) verb: WrOpcode,
    pub(crate) content: Content,
    pub(crate) flags: Flags,
    /// The destination, if the operation sends a datagram.
    pub(crate) to: Option<Address>,
}

/// The destination of a datagram: libmlx5's address handle, and ours.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub(crate) ah: *mut c_void,
    pub(crate) qpn: u32,
    pub(crate) qkey: u32,
    pub(crate) ours: Destination,
}

/// Returns all combinations of flags: signaled or not, fenced or not, solicited or not.
pub(crate) fn flags() -> impl Iterator<Item = Flags> {
    (0..8).map(|bits| Flags {
        signal: if bits & 1 != 0 {
            Signal::Always
        } else {
            Signal::Reclaim
        },
        fence: bits & 2 != 0,
        solicited: bits & 4 != 0,
    })
}

impl Case {
    /// Returns the segments after the control segment.
    pub(crate) fn segments(&self) -> Vec<Segment> {
        let mut segments = match self.verb {
            _ if self.to.is_some() => vec![Segment::Datagram],
            WrOpcode::Send | WrOpcode::SendImm => vec![],
            WrOpcode::Write | WrOpcode::WriteImm | WrOpcode::Read => vec![Segment::Remote],
            WrOpcode::CompareSwap | WrOpcode::FetchAdd => vec![Segment::Remote, Segment::Atomic],
        };
        match &self.content {
            Content::Nothing => {}
            Content::Inline(data) if data.is_empty() => {}
            Content::Inline(data) => segments.push(Segment::Inline(data.len())),
            Content::Gathered(sges) => segments.extend(
                sges.iter()
                    .filter(|sge| sge.len != 0)
                    .map(|_| Segment::Data),
            ),
        }
        segments
    }

    /// Returns the buffers for libmlx5. With `split`, inline data of two bytes or more is in two
    /// buffers.
    pub(crate) fn sges(&self, split: bool) -> Vec<IbvSge> {
        match &self.content {
            Content::Nothing => vec![],
            Content::Gathered(sges) => sges.iter().copied().map(IbvSge::from).collect(),
            Content::Inline(data) => {
                let middle = if split { data.len() / 2 } else { 0 };
                let parts: &[&[u8]] = if middle != 0 {
                    &[&data[..middle], &data[middle..]]
                } else {
                    &[data]
                };
                parts
                    .iter()
                    .map(|part| IbvSge {
                        addr: part.as_ptr() as u64,
                        length: part.len() as u32,
                        lkey: 0,
                    })
                    .collect()
            }
        }
    }

    /// Returns the operation for libmlx5, with the buffers of [`sges`](Self::sges).
    pub(crate) fn op(&self, wr_id: u64, sges: &mut [IbvSge]) -> Op {
        let flag = |is_set: bool, flag| if is_set { flag } else { 0 };
        let flags = flag(self.flags.signal == Signal::Always, SEND_SIGNALED)
            | flag(self.flags.fence, SEND_FENCE)
            | flag(self.flags.solicited, SEND_SOLICITED)
            | flag(matches!(self.content, Content::Inline(_)), SEND_INLINE);
        let to = self.to.as_ref();
        Op {
            wr_id,
            opcode: self.verb,
            flags,
            imm: IMM,
            rkey: RKEY,
            raddr: RADDR,
            compare_add: if self.verb == WrOpcode::CompareSwap {
                COMPARE
            } else {
                SWAP_ADD
            },
            swap: SWAP_ADD,
            ah: to.map_or(std::ptr::null_mut(), |to| to.ah),
            qpn: to.map_or(0, |to| to.qpn),
            qkey: to.map_or(0, |to| to.qkey),
            sge: sges.as_mut_ptr(),
            sges: sges.len() as u32,
        }
    }

    /// Posts the operation to this crate's queue pair. Returns `false` if the operation has several
    /// buffers: such a queue pair gathers from one buffer only.
    pub(crate) fn post(&self, qp: &mut Ours) -> bool {
        match (&self.content, qp) {
            (Content::Nothing, qp) => self.post_payload(qp, ()),
            (Content::Inline(data), qp) => self.post_payload(qp, Inline(data)),
            (Content::Gathered(sges), qp) => match (&sges[..], self.verb, qp) {
                (&[into], WrOpcode::Read, Ours::Connected(qp)) => self.push(
                    qp,
                    &Read {
                        addr: RADDR,
                        rkey: RKEY,
                        into,
                    },
                ),
                (&[into], WrOpcode::CompareSwap, Ours::Connected(qp)) => {
                    self.push(
                        qp,
                        &CompareSwap {
                            addr: RADDR,
                            rkey: RKEY,
                            compare: COMPARE,
                            swap: SWAP_ADD,
                            into,
                        },
                    );
                }
                (&[into], WrOpcode::FetchAdd, Ours::Connected(qp)) => self.push(
                    qp,
                    &FetchAdd {
                        addr: RADDR,
                        rkey: RKEY,
                        add: SWAP_ADD,
                        into,
                    },
                ),
                (&[sge], _, qp) => self.post_payload(qp, sge),
                _ => return false,
            },
        }
        true
    }

    fn push(&self, qp: &mut RcQp, op: &impl RcOperation) {
        qp.post(op, self.flags, 7).unwrap();
    }

    fn post_payload<P: Payload>(&self, qp: &mut Ours, payload: P) {
        let addr = RADDR;
        let rkey = RKEY;
        let imm = IMM;
        match (qp, self.verb, &self.to) {
            (Ours::Connected(qp), WrOpcode::Write, _) => self.push(
                qp,
                &Write {
                    addr,
                    rkey,
                    payload,
                },
            ),
            (Ours::Connected(qp), WrOpcode::WriteImm, _) => self.push(
                qp,
                &WriteImm {
                    addr,
                    rkey,
                    imm,
                    payload,
                },
            ),
            (Ours::Connected(qp), WrOpcode::Send, _) => self.push(qp, &Send { payload }),
            (Ours::Connected(qp), WrOpcode::SendImm, _) => self.push(qp, &SendImm { imm, payload }),
            (Ours::Datagrams(qp), WrOpcode::Send, Some(to)) => qp
                .post(
                    &UdSend {
                        to: &to.ours,
                        payload,
                    },
                    self.flags,
                    7,
                )
                .unwrap(),
            (Ours::Datagrams(qp), WrOpcode::SendImm, Some(to)) => qp
                .post(
                    &UdSendImm {
                        to: &to.ours,
                        imm,
                        payload,
                    },
                    self.flags,
                    7,
                )
                .unwrap(),
            _ => panic!("no such operation: {self:?}"),
        }
    }
}

/// A queue pair of this crate.
pub(crate) enum Ours {
    Connected(RcQp),
    Datagrams(UdQp),
}

impl Ours {
    pub(crate) fn qpn(&self) -> u32 {
        match self {
            Self::Connected(qp) => qp.qpn(),
            Self::Datagrams(qp) => qp.qpn(),
        }
    }

    pub(crate) fn ring(&mut self) {
        match self {
            Self::Connected(qp) => qp.ring(),
            Self::Datagrams(qp) => qp.ring(),
        }
    }

    pub(crate) fn complete(&mut self, cqe: &Cqe<'_>) -> Option<u64> {
        match self {
            Self::Connected(qp) => qp.complete(cqe),
            Self::Datagrams(qp) => qp.complete(cqe),
        }
    }
}
