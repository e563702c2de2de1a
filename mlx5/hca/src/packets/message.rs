//! The messages of a connection, and the numbers that both of its ends compute.

use mlx5_wire::roce::{AtomicEth, Headers, Opcode, PacketOpcode, Psn, Reth, Transport};

/// Maximum number of unanswered READs and atomics of a connection, and number of atomics whose
/// results a responder remembers.
pub(crate) const MAX_RD_ATOMIC: usize = 16;

/// Maximum delay, in ns, of the ACK of a message that does not ask for an ACK. The delayed ACK
/// covers further messages too. A message is sent without asking only if its requester's timeout is
/// more than twice this delay.
pub(crate) const ACK_DELAY_NS: u64 = 500_000;

/// Syndrome by which a software HCA reports to another that a queue pair failed or was destroyed: a
/// NAK with a reserved code. Other devices send nothing in that case, so the requester fails by its
/// timeout.
pub(crate) const GONE: u8 = 3 << 5 | 31;

pub(crate) const fn packets(len: u32, mtu: u32) -> u32 {
    // A message of no bytes has one packet.
    if len == 0 { 1 } else { len.div_ceil(mtu) }
}

/// Maximum total payload, in bytes, of all packets from the oldest that is not acknowledged to the
/// newest. A responder holds at most this amount for a requester until an earlier packet arrives.
const MAX_HELD_BYTES: u32 = 8 << 20;
/// Maximum number of packets, even small ones, that fit into the default socket buffer of a Linux
/// receiver together with their overhead; and maximum total payload, in bytes, that fits.
const QUEUE: u32 = 64;
const QUEUE_BYTES: u32 = 128 << 10;
/// Interval, in PSNs, at which packets ask for an ACK.
const ASK_INTERVAL: u32 = 16;

/// Returns the maximum number of packets from the oldest that is not acknowledged to the newest.
pub(super) const fn max_span(mtu: u32) -> u32 {
    MAX_HELD_BYTES / mtu
}

/// The properties of a connection that its requester needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    /// QPN of the peer.
    pub(crate) qpn: u32,
    /// Maximum payload bytes of a packet: 256 to 4096.
    pub(crate) mtu: u32,
    /// Time without an answer before a retry, in ns.
    pub(crate) timeout_ns: u64,
    /// Maximum number of retries without progress.
    pub(crate) retry_count: u8,
    /// Maximum number of retries after RNR NAKs; 7 means without limit.
    pub(crate) rnr_retry: u8,
    /// Maximum number of unanswered READs and atomics: 1 to [`MAX_RD_ATOMIC`], and at most the
    /// number that the peer keeps.
    pub(crate) rd_atomic: u8,
    /// Whether the connection is unreliable. Its messages are complete when they were sent.
    pub(crate) is_unreliable: bool,
    /// Whether the peer is a software HCA, which may send [`GONE`], acknowledges messages that do
    /// not ask for an ACK, and holds and reports packets that arrive early.
    pub(crate) is_polled: bool,
}

impl Options {
    /// Returns the number of packets that the default socket buffer of a Linux receiver holds; at
    /// least 8.
    pub(super) fn queue(&self) -> u32 {
        (QUEUE_BYTES / self.mtu).clamp(8, QUEUE)
    }

    /// Returns whether a message without a completion may share the ACK of a later message.
    pub(super) const fn may_share_acks(&self) -> bool {
        self.is_polled && self.timeout_ns > 2 * ACK_DELAY_NS
    }

    pub(crate) const fn transport(&self) -> Transport {
        if self.is_unreliable {
            Transport::Uc
        } else {
            Transport::Rc
        }
    }
}

/// A message to be executed by the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    Send {
        len: u32,
        imm: Option<u32>,
        is_solicited: bool,
    },
    Write {
        to: Reth,
        imm: Option<u32>,
        is_solicited: bool,
    },
    Read(Reth),
    CompareSwap(AtomicEth),
    FetchAdd(AtomicEth),
}

impl Request {
    /// Returns the number of PSNs of the request.
    pub(super) const fn packets(&self, mtu: u32) -> u32 {
        match self {
            Self::Send { len, .. } => packets(*len, mtu),
            Self::Write { to, .. } | Self::Read(to) => packets(to.len, mtu),
            Self::CompareSwap(_) | Self::FetchAdd(_) => 1,
        }
    }

    /// Returns whether the request is completed by its own response, and not by an ACK.
    pub(super) const fn has_response(&self) -> bool {
        matches!(
            self,
            Self::Read(_) | Self::CompareSwap(_) | Self::FetchAdd(_)
        )
    }
}

/// A packet to be sent. Its payload is `len` bytes of the message from `offset` on, followed by the
/// number of pad bytes that is in its BTH.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outgoing {
    pub(crate) headers: Headers,
    /// Number of the message, in the order of posting, from 0.
    pub(crate) message: u64,
    pub(crate) offset: u32,
    pub(crate) len: u32,
}

/// The place of a packet in the requester's window.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Whether the packet was sent before.
    pub(super) is_repeat: bool,
    /// Whether the window, or its first half, ends with the packet.
    pub(super) asks_ack: bool,
    /// Maximum number of READ responses that the packet requests.
    pub(super) responses: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    pub(super) request: Request,
    /// Whether the program gets a completion of the message.
    pub(super) is_signaled: bool,
    /// First PSN of the message, once the message has begun.
    pub(super) first: Psn,
    pub(super) packets: u32,
}

impl Message {
    pub(super) fn end(&self) -> Psn {
        self.first.after(self.packets)
    }

    /// Makes the packet with this PSN of message `number`.
    pub(super) fn packet(&self, number: u64, psn: Psn, room: Room, options: &Options) -> Outgoing {
        let mtu = options.mtu;
        let nth = psn.since(self.first) as u32;
        let (is_first, is_last) = (nth == 0, nth + 1 == self.packets);
        let offset = nth * mtu;
        let part = |is_write, imm: Option<u32>| {
            Opcode::of_message(is_write, is_first, is_last, imm.is_some())
        };
        let (opcode, end) = match self.request {
            Request::Send { len, imm, .. } => (part(false, imm), len),
            Request::Write { to, imm, .. } => (part(true, imm), to.len),
            Request::Read(_) => (Opcode::ReadRequest, offset),
            Request::CompareSwap(_) => (Opcode::CompareSwap, offset),
            Request::FetchAdd(_) => (Opcode::FetchAdd, offset),
        };
        let transport = options.transport();
        let opcode = PacketOpcode { transport, opcode };
        let mut headers = Headers::new(opcode, options.qpn, psn);
        match self.request {
            Request::Send { .. } => {}
            Request::Write { to, .. } => headers.reth = to,
            Request::Read(from) => {
                headers.reth = Reth {
                    addr: from.addr.wrapping_add(offset.into()),
                    len: (from.len - offset).min(room.responses * mtu),
                    ..from
                };
            }
            Request::CompareSwap(atomic) | Request::FetchAdd(atomic) => headers.atomic = atomic,
        }
        if let Request::Send {
            imm, is_solicited, ..
        }
        | Request::Write {
            imm, is_solicited, ..
        } = self.request
        {
            headers.imm = imm.unwrap_or(0);
            headers.bth.is_solicited = is_solicited && is_last;
        }
        let len = (end - offset).min(mtu);
        headers.bth.pad = (len.wrapping_neg() & 3) as u8;
        let may_wait = is_first && !self.is_signaled && !room.is_repeat && options.may_share_acks();
        let asks_ack = is_last && !may_wait
            || self.request.has_response()
            || psn.get() % ASK_INTERVAL == 0
            || room.asks_ack;
        headers.bth.asks_ack = asks_ack && !options.is_unreliable;
        Outgoing {
            headers,
            message: number,
            offset,
            len,
        }
    }
}
