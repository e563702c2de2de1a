//! A requester and a responder over a network of chosen badness, in virtual time, against an oracle
//! that executes each message at once when it is posted. The packets are bytes, with their ICRC.

mod congestion;
mod garbage;
mod link;
mod matrix;
mod pace;
mod promises;
mod tcp;

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use mlx5_wire::roce::{
    Aeth, AtomicEth, Flow, Headers, Nak, Opcode, PacketOpcode, Psn, Reth, Transport,
};
use mlx5_wire::{AtomicSegment, Syndrome as Status};

use self::link::Link;
use super::message::{MAX_RD_ATOMIC, Options, Outgoing, Request, packets};
use super::requester::{Failure, Requester, Taken};
use super::responder::{Completion, Reply, Responder, Target};
use crate::random::Random;

const MEMORY: usize = 16 << 10;
const RKEY: u32 = 0x1234;
const BASE: u64 = 0x7f00_0000_0000;
const FLOW: Flow = Flow {
    source: SocketAddr::new(IpAddr::V6(Ipv6Addr::LOCALHOST), 0xc000),
    destination: SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 4791),
    identification: 0,
};
const TIMEOUT_NS: u64 = 1_000_000;
/// Longer than the time after which packets are sent again.
const LONG_TIMEOUT_NS: u64 = 32_000_000;
/// Code of 0.64 ms.
const RNR_TIMER: u8 = 12;

/// The share of packets to which the network does each of these, in thousandths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Badness {
    lost: u16,
    doubled: u16,
    damaged: u16,
    late: u16,
    /// Further delay of every packet.
    delay_ms: u64,
    /// Maximum number of packets that wait for a link of 100 Mbit/s. 0: the link is fast.
    queue: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Received {
    bytes: Vec<u8>,
    completion: Completion,
}

/// The memory and receives of the responder, and their oracle.
#[derive(Clone, Debug)]
struct Memory {
    bytes: Vec<u8>,
    receives: usize,
    open: Option<Vec<u8>>,
    received: Vec<Received>,
    /// Messages may be lost after they took a receive.
    is_unreliable: bool,
    /// The end of the bytes that may be accessed.
    end: usize,
}

impl Memory {
    fn range(&self, at: &Reth) -> Option<std::ops::Range<usize>> {
        let from = at.addr.checked_sub(BASE)? as usize;
        let range = from..from.checked_add(at.len as usize)?;
        (at.rkey == RKEY && range.end <= self.end).then_some(range)
    }
}

impl Target for Memory {
    fn take_receive(&mut self) -> bool {
        assert!(
            self.open.is_none() || self.is_unreliable,
            "one message at a time"
        );
        if self.receives == 0 && self.open.is_none() {
            return false;
        }
        self.receives -= usize::from(self.open.is_none());
        self.open = Some(Vec::new());
        true
    }

    fn place(&mut self, offset: u32, bytes: &[u8]) -> Result<(), Nak> {
        let open = self.open.as_mut().expect("a receive was taken");
        assert_eq!(open.len(), offset as usize);
        open.extend(bytes);
        if open.len() > 9000 {
            Err(Nak::InvalidRequest)
        } else {
            Ok(())
        }
    }

    fn check(&mut self, at: &Reth, _is_read: bool) -> Result<(), Nak> {
        self.range(at).map(drop).ok_or(Nak::RemoteAccess)
    }

    fn write(&mut self, at: &Reth, offset: u32, bytes: &[u8]) -> Result<(), Nak> {
        let from = (at.addr - BASE) as usize + offset as usize;
        self.bytes[from..from + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn execute(&mut self, opcode: Opcode, atomic: &AtomicEth) -> Result<u64, Nak> {
        let at = Reth {
            addr: atomic.addr,
            rkey: atomic.rkey,
            len: 8,
        };
        let range = self
            .range(&at)
            .filter(|range| range.start % 8 == 0)
            .ok_or(Nak::RemoteAccess)?;
        let before = u64::from_le_bytes(self.bytes[range.clone()].try_into().unwrap());
        let after = match opcode {
            Opcode::FetchAdd => before.wrapping_add(atomic.operands.swap_add),
            _ if before == atomic.operands.compare => atomic.operands.swap_add,
            _ => before,
        };
        self.bytes[range].copy_from_slice(&after.to_le_bytes());
        Ok(before)
    }

    fn complete(&mut self, completion: Completion) {
        let bytes = self.open.take().expect("a receive was taken");
        self.received.push(Received { bytes, completion });
    }
}

/// A posted message: its payload, and the result that the oracle has for it.
#[derive(Clone, Debug)]
struct Posted {
    payload: Vec<u8>,
    expected: Vec<u8>,
    got: Vec<u8>,
    /// The range of a READ, and the oracle's memory after the message.
    read: Option<std::ops::Range<usize>>,
    memory: Vec<u8>,
}

impl Posted {
    /// Makes a message that the oracle does not execute.
    fn refused(payload: Vec<u8>) -> Self {
        Self {
            payload,
            expected: Vec::new(),
            got: vec![0; 16],
            read: None,
            memory: Vec::new(),
        }
    }
}

/// A packet under way, in the order of arrival.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Flying {
    at_ns: u64,
    nth: u64,
    to_responder: bool,
    bytes: Vec<u8>,
}

struct World {
    now_ns: u64,
    rng: Random,
    badness: Badness,
    /// The links from the responder and to it.
    links: [Link; 2],
    requester: Requester,
    responder: Responder,
    memory: Memory,
    oracle: Memory,
    posted: Vec<Posted>,
    network: BinaryHeap<Reverse<Flying>>,
    sent: u64,
    requests: u64,
    /// Time until which the responder sends nothing.
    silent_until_ns: u64,
    /// A READ whose result has no place.
    unplaceable: Option<u64>,
}

impl World {
    fn new(seed: u64, badness: Badness, retry_count: u8) -> Self {
        let mut rng = Random::new(seed);
        let mtu = 256 << rng.below(3);
        // Often close to the wrap.
        let first = Psn::new(if rng.happens(500) {
            0xff_fff0
        } else {
            rng.next_u64() as u32
        });
        let options = Options {
            qpn: 7,
            mtu,
            timeout_ns: if seed % 3 == 0 {
                LONG_TIMEOUT_NS
            } else {
                TIMEOUT_NS
            },
            retry_count,
            rnr_retry: 7,
            rd_atomic: MAX_RD_ATOMIC as u8,
            is_unreliable: false,
            is_polled: seed % 2 == 0,
        };
        let link = match badness.queue {
            0 => Link::new(8_000, 5_000 + badness.delay_ms * 1_000_000, u64::MAX),
            queue => Link::new(100, 5_000 + badness.delay_ms * 1_000_000, queue),
        };
        let link = Link {
            loss_permille: badness.lost,
            mark: if badness.queue > 0 {
                badness.queue / 2
            } else {
                u64::MAX
            },
            ..link
        };
        // A time-out is longer than a round trip with full queues.
        let longest_ns = 2 * badness.delay_ms * 1_000_000 + badness.queue * 2 * 100_000;
        let options = Options {
            timeout_ns: match longest_ns {
                0 => options.timeout_ns,
                _ => LONG_TIMEOUT_NS.max(3 * longest_ns),
            },
            ..options
        };
        let bytes = (0..MEMORY).map(|_| rng.next_u64() as u8).collect();
        let memory = Memory {
            bytes,
            receives: 0,
            open: None,
            received: Vec::new(),
            is_unreliable: false,
            end: MEMORY,
        };
        Self {
            now_ns: 0,
            rng,
            badness,
            links: [link; 2],
            requester: Requester::new(options, first),
            responder: Responder::new(9, mtu, RNR_TIMER, first, options.is_polled),
            oracle: Memory {
                receives: usize::MAX,
                ..memory.clone()
            },
            memory,
            posted: Vec::new(),
            network: BinaryHeap::new(),
            sent: 0,
            requests: 0,
            silent_until_ns: 0,
            unplaceable: None,
        }
    }

    /// Makes the connection unreliable.
    fn unreliable(mut self) -> Self {
        let options = Options {
            is_unreliable: true,
            ..self.requester.options()
        };
        self.requester = Requester::new(options, self.responder.expected());
        self.memory.is_unreliable = true;
        self
    }

    fn bytes(&mut self, len: u32) -> Vec<u8> {
        (0..len).map(|_| self.rng.next_u64() as u8).collect()
    }

    /// Posts a message of a random kind, and executes it on the oracle.
    fn post(&mut self) {
        let len = match self.rng.below(4) {
            0 => 0,
            1 => self.rng.below(64) as u32,
            2 => 256 << self.rng.below(4),
            _ => self.rng.below(6000) as u32,
        };
        let reth = Reth {
            addr: BASE + self.rng.below((MEMORY - len as usize) as u64),
            rkey: RKEY,
            len,
        };
        let imm = self.rng.happens(500).then(|| self.rng.next_u64() as u32);
        let is_solicited = self.rng.happens(300);
        let atomic = AtomicEth {
            addr: BASE + 8 * self.rng.below(16),
            rkey: RKEY,
            operands: AtomicSegment {
                swap_add: self.rng.below(3),
                compare: self.rng.below(3),
            },
        };
        let (request, payload, expected) =
            match self
                .rng
                .below(if self.memory.is_unreliable { 2 } else { 5 })
            {
                0 => {
                    let payload = self.bytes(len);
                    let completion = Completion {
                        len,
                        imm,
                        is_write: false,
                        is_solicited,
                    };
                    self.oracle.received.push(Received {
                        bytes: payload.clone(),
                        completion,
                    });
                    (
                        Request::Send {
                            len,
                            imm,
                            is_solicited,
                        },
                        payload,
                        Vec::new(),
                    )
                }
                1 => {
                    let payload = self.bytes(len);
                    self.oracle.write(&reth, 0, &payload).unwrap();
                    if imm.is_some() {
                        let completion = Completion {
                            len,
                            imm,
                            is_write: true,
                            is_solicited,
                        };
                        self.oracle.received.push(Received {
                            bytes: Vec::new(),
                            completion,
                        });
                    }
                    (
                        Request::Write {
                            to: reth,
                            imm,
                            is_solicited,
                        },
                        payload,
                        Vec::new(),
                    )
                }
                2 => (
                    Request::Read(reth),
                    Vec::new(),
                    self.oracle.bytes[self.oracle.range(&reth).unwrap()].to_vec(),
                ),
                nth => {
                    let opcode = if nth == 3 {
                        Opcode::FetchAdd
                    } else {
                        Opcode::CompareSwap
                    };
                    let before = self.oracle.execute(opcode, &atomic).unwrap();
                    let request = if nth == 3 {
                        Request::FetchAdd(atomic)
                    } else {
                        Request::CompareSwap(atomic)
                    };
                    (request, Vec::new(), before.to_le_bytes().to_vec())
                }
            };
        let (got, memory) = (vec![0; expected.len()], self.oracle.bytes.clone());
        let read = if let Request::Read(from) = request {
            self.oracle.range(&from)
        } else {
            None
        };
        self.posted.push(Posted {
            payload,
            expected,
            got,
            read,
            memory,
        });
        self.requester.post(request, reth.addr % 2 == 0);
    }

    /// Sends a packet over the network.
    fn send(&mut self, to_responder: bool, headers: &Headers, payload: &[u8]) {
        let mut packet = headers.emit().to_vec();
        packet.extend(payload);
        packet.resize(packet.len() + usize::from(headers.bth.pad), 0);
        packet.extend(FLOW.icrc(&packet, &[]));
        for _ in 0..=u8::from(self.rng.happens(self.badness.doubled)) {
            let link = &mut self.links[usize::from(to_responder)];
            let Some(at_ns) = link.send(self.now_ns, payload.len() as u32, &mut self.rng) else {
                continue;
            };
            let mut packet = packet.clone();
            // FECN, which the ICRC does not cover.
            packet[4] |= u8::from(link.is_marked) << 7;
            if self.rng.happens(self.badness.damaged) {
                let bit = self.rng.below(8 * packet.len() as u64) as usize;
                packet[bit / 8] ^= 1 << (bit % 8);
            }
            let extra = if self.rng.happens(self.badness.late) {
                self.rng.below(TIMEOUT_NS / 2)
            } else {
                0
            };
            self.sent += 1;
            self.network.push(Reverse(Flying {
                at_ns: at_ns + extra,
                nth: self.sent,
                to_responder,
                bytes: packet,
            }));
        }
    }

    fn arrive(&mut self, to_responder: bool, packet: &[u8]) {
        if FLOW.check(packet).is_none() {
            return;
        }
        let Ok((headers, payload)) = Headers::parse(packet) else {
            return;
        };
        if to_responder {
            return self.arrive_at_responder(&headers, payload);
        }
        match self.requester.on_response(&headers, payload, self.now_ns) {
            Taken::Nothing => return,
            Taken::Place { message, .. } if self.unplaceable == Some(message) => {
                return self.requester.refuse(message, Status::LocalProtection);
            }
            Taken::Place { message, offset } => {
                self.posted[message as usize].got[offset as usize..][..payload.len()]
                    .copy_from_slice(payload);
            }
            Taken::Original { message, value } => {
                self.posted[message as usize].got = value.to_le_bytes().to_vec()
            }
        }
        self.requester.placed(headers.bth.psn, self.now_ns);
    }

    fn arrive_at_responder(&mut self, headers: &Headers, payload: &[u8]) {
        if self.memory.is_unreliable {
            self.responder
                .on_unreliable(headers, payload, &mut self.memory);
        } else {
            self.responder
                .on_request(headers, payload, &mut self.memory, self.now_ns);
        }
    }

    /// Sends all packets that may be sent, and advances to the next event. Returns whether there
    /// was an event.
    fn step(&mut self) -> bool {
        while let Some(Outgoing {
            headers,
            message,
            offset,
            len,
        }) = self.requester.next_packet(self.now_ns)
        {
            let payload = self.posted[message as usize]
                .payload
                .get(offset as usize..(offset + len) as usize)
                .unwrap_or_default()
                .to_vec();
            self.requests += 1;
            self.send(true, &headers, &payload);
            self.requester.on_sent(self.now_ns);
        }
        // Now and then answers wait for long, as if the port had no room.
        if self.badness.late > 0 && self.silent_until_ns <= self.now_ns && self.rng.happens(20) {
            self.silent_until_ns = self.now_ns + self.rng.below(6 * TIMEOUT_NS);
        }
        while self.silent_until_ns <= self.now_ns
            || self.network.is_empty() && self.requester.due_ns().is_none()
        {
            let Some(Reply {
                headers,
                from,
                report,
            }) = self.responder.next_reply(self.now_ns)
            else {
                break;
            };
            let payload = from.filter(|from| from.len > 0).map_or(report, |from| {
                self.memory.bytes[self.memory.range(&from).unwrap()].to_vec()
            });
            self.send(false, &headers, &payload);
        }
        let arrival = self.network.peek().map(|Reverse(flying)| flying.at_ns);
        let due = [
            arrival,
            self.requester.due_ns(),
            self.responder
                .due_ns()
                .filter(|_| self.silent_until_ns <= self.now_ns),
        ];
        let Some(at_ns) = due.into_iter().flatten().min() else {
            return false;
        };
        self.now_ns = self.now_ns.max(at_ns);
        if arrival == Some(at_ns) {
            let Reverse(Flying {
                to_responder,
                bytes,
                ..
            }) = self.network.pop().unwrap();
            self.arrive(to_responder, &bytes);
        }
        self.requester.on_time(self.now_ns);
        // Receives come late.
        if self.rng.happens(100) {
            self.memory.receives += 1;
        }
        true
    }

    fn run(&mut self) {
        let mut steps = 0;
        while self.requester.failure().is_none()
            && self.requester.completed() < self.posted.len() as u64
        {
            assert!(self.step(), "nothing is under way, and nothing is due");
            steps += 1;
            assert!(steps < 2_000_000, "{:?}", self.requester);
        }
    }

    /// Checks that all was executed once (P1, P2). A READ that is asked for again may return what
    /// later messages wrote.
    fn assert_done(&self) {
        assert_eq!(
            (self.requester.failure(), self.requester.completed()),
            (None, self.posted.len() as u64)
        );
        for (
            nth,
            Posted {
                expected,
                got,
                read,
                ..
            },
        ) in self.posted.iter().enumerate()
        {
            let is_right = match read {
                Some(range) => range.clone().zip(got).all(|(at, byte)| {
                    self.posted[nth..]
                        .iter()
                        .any(|later| later.memory[at] == *byte)
                }),
                None => got == expected,
            };
            assert!(is_right, "message {nth}");
            assert!(
                got == expected || self.badness != Badness::default(),
                "message {nth}: nothing was asked for again"
            );
        }
        assert!(self.memory.received == self.oracle.received);
        assert!(self.memory.bytes == self.oracle.bytes);
    }
}

fn seeds() -> impl Iterator<Item = u64> {
    (1..=200 * u64::from(copyrpc_testing::limits::scale_of("MLX5_TEST_SCALE")))
        .inspect(|seed| println!("seed {seed}"))
}
