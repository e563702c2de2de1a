//! A requester and a responder over a network of chosen badness, in virtual time, against an oracle
//! that executes each message at once when it is posted. The packets are bytes, with their ICRC.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use mlx5_wire::Syndrome as Status;
use mlx5_wire::roce::{
    Aeth, AtomicEth, Flow, Headers, Nak, Opcode, PacketOpcode, Psn, Reth, Transport,
};

use super::message::{MAX_RD_ATOMIC, packets};
use super::requester::{Failure, Options, Outgoing, Request, Requester, Taken};
use super::responder::{Completion, Reply, Responder, Target};
use crate::random::Random;

const MEMORY: usize = 16 << 10;
const RKEY: u32 = 0x1234;
const BASE: u64 = 0x7f00_0000_0000;
const FLOW: Flow = Flow::V6 {
    source: [1; 16],
    destination: [2; 16],
    source_port: 0xc000,
    destination_port: 4791,
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
    /// A byte behind which nothing may be accessed.
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
            Opcode::FetchAdd => before.wrapping_add(atomic.swap_add),
            _ if before == atomic.compare => atomic.swap_add,
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
            requester: Requester::new(options, first),
            responder: Responder::new(9, mtu, RNR_TIMER, first),
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
            swap_add: self.rng.below(3),
            compare: self.rng.below(3),
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
        let copies = if self.rng.happens(self.badness.lost) {
            0
        } else {
            1 + u64::from(self.rng.happens(self.badness.doubled))
        };
        for _ in 0..copies {
            let mut packet = packet.clone();
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
            let at_ns = self.now_ns + 5_000 + extra;
            self.network.push(Reverse(Flying {
                at_ns,
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
        match self
            .requester
            .on_response(&headers, payload.len(), self.now_ns)
        {
            Taken::Nothing => return,
            Taken::Place { message, .. } if self.unplaceable == Some(message) => {
                return self.requester.fail(Status::LocalProtection);
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

    /// Sends all that may be sent, and goes on to the next event. Returns whether there was one.
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
            let Some(Reply { headers, from }) = self.responder.next_reply(self.now_ns) else {
                break;
            };
            let payload = from.filter(|from| from.len > 0).map_or(Vec::new(), |from| {
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

#[test]
fn p1_every_message_is_executed_once_and_in_order_however_bad_the_network_is() {
    let mut total = 0;
    for seed in seeds() {
        let mut rng = Random::new(!seed);
        let mut rate = |most: u64| rng.below(most + 1) as u16;
        let badness = Badness {
            lost: rate(100),
            doubled: rate(100),
            damaged: rate(50),
            late: rate(300),
        };
        // Endless retries: with these losses any number may be needed.
        let mut world = World::new(seed, badness, u8::MAX);
        for _ in 0..20 + seed % 20 {
            world.post();
            if seed % 3 == 0 {
                world.step();
            }
        }
        world.run();
        world.assert_done();
        total += world.requests;
    }
    assert!(total > 10_000, "{total}");
}

/// A peer that was slow, so that nothing was repeated before the time-out, and is fast again.
#[test]
fn p3_repeats_come_back_when_the_peer_is_fast_again() {
    let mut world = World::new(3, Badness::default(), 7);
    let first = world.responder.expected();
    let acknowledge = |world: &mut World, nth: u32, after_ns: u64| {
        world.requester.post(
            Request::Send {
                len: 1,
                imm: None,
                is_solicited: false,
            },
            true,
        );
        assert!(world.requester.next_packet(world.now_ns).is_some());
        world.now_ns += after_ns;
        let opcode = PacketOpcode {
            transport: Transport::Rc,
            opcode: Opcode::Acknowledge,
        };
        let ack = Headers {
            aeth: Aeth::ack(0),
            ..Headers::new(opcode, 9, first.after(nth))
        };
        world.requester.on_response(&ack, 0, world.now_ns);
        assert_eq!(world.requester.completed(), u64::from(nth) + 1);
    };
    acknowledge(&mut world, 0, 30_000_000);
    (1..100).for_each(|nth| acknowledge(&mut world, nth, 5_000));
    world.requester.post(
        Request::Send {
            len: 1,
            imm: None,
            is_solicited: false,
        },
        true,
    );
    assert!(world.requester.next_packet(world.now_ns).is_some());
    assert_eq!(world.requester.due_ns(), Some(world.now_ns + 2_000_000));
}

/// Messages of one packet whose completion nobody awaits share an ACK: that of the quarter of a
/// window, or of the time after the last one.
#[test]
fn p8_messages_without_a_completion_share_an_ack() {
    // The seed of a peer that is a software HCA, with a long time-out.
    let mut world = World::new(6, Badness::default(), 0);
    let quarter = (128 << 10) / world.requester.mtu() / 4;
    let quarter = quarter.min(16);
    world.memory.receives = 1000;
    let messages = u64::from(20 * quarter);
    for nth in 0..messages {
        world.posted.push(Posted::refused(vec![1]));
        world.requester.post(
            Request::Send {
                len: 1,
                imm: None,
                is_solicited: false,
            },
            false,
        );
        // Each as if it answered a message of the peer.
        while world.requests <= nth || world.memory.received.len() as u64 <= nth {
            world.step();
        }
    }
    world.run();
    assert_eq!(
        (world.requester.failure(), world.requests),
        (None, messages)
    );
    let acks = world.sent - world.requests;
    assert!((20..=21).contains(&acks), "{acks}");
    // An answer that the program waits for comes at once.
    world.posted.push(Posted::refused(vec![1]));
    world.requester.post(
        Request::Send {
            len: 1,
            imm: None,
            is_solicited: false,
        },
        true,
    );
    let begin_ns = world.now_ns;
    world.run();
    assert!(world.now_ns - begin_ns < 20_000);
}

/// A good network: no packet is sent twice, whatever the order of messages.
#[test]
fn p3_nothing_is_sent_again_without_need() {
    for seed in 0..50 {
        let mut world = World::new(seed, Badness::default(), 0);
        world.memory.receives = 1000;
        let mut packets_of_all = 0;
        for _ in 0..40 {
            world.post();
        }
        let mtu = world.requester.mtu();
        for request in world.requester.requests() {
            packets_of_all += match request {
                Request::Send { len, .. } => u64::from(packets(*len, mtu)),
                Request::Write { to, .. } => u64::from(packets(to.len, mtu)),
                _ => 1,
            };
        }
        world.run();
        world.assert_done();
        assert_eq!(world.requests, packets_of_all);
    }
}

#[test]
fn p3_a_peer_that_does_not_answer_fails_the_oldest_message_after_its_retries() {
    // Within the first long time-out, it is asked again after 2, 6, 14 and 30 ms.
    for (seed, timeout_ns, requests) in [(1, TIMEOUT_NS, 4), (3, LONG_TIMEOUT_NS, 8)] {
        let mut world = World::new(
            seed,
            Badness {
                lost: 1000,
                ..Badness::default()
            },
            3,
        );
        world.posted.push(Posted::refused(vec![1]));
        world.requester.post(
            Request::Send {
                len: 1,
                imm: None,
                is_solicited: false,
            },
            true,
        );
        world.run();
        let expected = Failure {
            message: 0,
            status: Status::TransportRetryExceeded,
        };
        assert_eq!(
            (world.requester.failure(), world.now_ns, world.requests),
            (Some(expected), 4 * timeout_ns, requests)
        );
        assert_eq!(
            world
                .requester
                .next_packet(world.now_ns)
                .map(|packet| packet.message),
            None
        );
    }
}

/// A lost packet that nothing follows costs some ms, however long the time-out is.
#[test]
fn p3_a_lost_packet_is_sent_again_long_before_a_long_timeout() {
    let mut world = World::new(3, Badness::default(), 0);
    for nth in 0..100 {
        world.memory.receives = 1;
        world.badness.lost = 1000;
        world.posted.push(Posted::refused(vec![1]));
        world.requester.post(
            Request::Send {
                len: 1,
                imm: None,
                is_solicited: false,
            },
            true,
        );
        let begin_ns = world.now_ns;
        world.step();
        world.badness.lost = 0;
        world.run();
        assert!(
            world.requester.failure().is_none() && world.now_ns - begin_ns < 2_100_000,
            "{nth}"
        );
        // An answer that is to no repeat ends the longer wait behind one.
        world.posted.push(Posted::refused(vec![1]));
        world.memory.receives = 1;
        world.requester.post(
            Request::Send {
                len: 1,
                imm: None,
                is_solicited: false,
            },
            true,
        );
        world.run();
    }
}

/// A message whose bytes cannot be read, or whose result cannot be placed, fails itself, and those
/// before it are complete.
#[test]
fn p1_a_message_that_this_end_cannot_execute_fails_itself() {
    for (seed, is_read) in (1..50).flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut world = World::new(
            seed,
            Badness {
                lost: 100,
                ..Badness::default()
            },
            u8::MAX,
        );
        world.memory.receives = 100;
        (0..10).for_each(|_| world.post());
        world.posted.push(Posted::refused(vec![1]));
        if is_read {
            world.requester.post(
                Request::Read(Reth {
                    addr: BASE,
                    rkey: RKEY,
                    len: 1,
                }),
                true,
            );
            world.unplaceable = Some(10);
        } else {
            world.requester.post(
                Request::Send {
                    len: 1,
                    imm: None,
                    is_solicited: false,
                },
                true,
            );
            world.requester.refuse(10, Status::LocalProtection);
        }
        while world.requester.failure().is_none() {
            assert!(world.step());
        }
        let expected = Failure {
            message: 10,
            status: Status::LocalProtection,
        };
        assert_eq!(
            (world.requester.failure(), world.requester.completed()),
            (Some(expected), 10)
        );
        assert!(
            world.memory.received == world.oracle.received
                && world.memory.bytes == world.oracle.bytes,
            "{seed}"
        );
    }
}

/// A peer that answers after a constant time above that of the first repeat is asked again a few
/// times in all, not for each message.
#[test]
fn p3_the_time_of_a_slow_peer_is_learned() {
    for answer_ns in [2_100_000, 5_000_000, 10_000_000, 300_000_000] {
        let mut world = World::new(3, Badness::default(), 7);
        let first = world.responder.expected();
        world.requester = Requester::new(
            Options {
                timeout_ns: 4_000_000_000,
                ..world.requester.options()
            },
            first,
        );
        for nth in 0..30 {
            world.requester.post(
                Request::Send {
                    len: 1,
                    imm: None,
                    is_solicited: false,
                },
                true,
            );
            let (mut sent, end_ns) = (0, world.now_ns + answer_ns);
            loop {
                sent += std::iter::from_fn(|| world.requester.next_packet(world.now_ns)).count();
                let Some(due_ns) = world.requester.due_ns().filter(|due_ns| *due_ns < end_ns)
                else {
                    break;
                };
                world.now_ns = due_ns;
                world.requester.on_time(due_ns);
            }
            assert!(
                sent == 1 || nth < 10,
                "{answer_ns}: {sent} times, message {nth}"
            );
            world.now_ns = end_ns;
            let opcode = PacketOpcode {
                transport: Transport::Rc,
                opcode: Opcode::Acknowledge,
            };
            let ack = Headers {
                aeth: Aeth::ack(0),
                ..Headers::new(opcode, 9, first.after(nth))
            };
            world.requester.on_response(&ack, 0, end_ns);
        }
    }
}

/// A READ of many packets is asked for by the window, so that no more responses are under way.
#[test]
fn p3_no_more_read_responses_are_asked_for_than_a_window_has() {
    for lost in [0, 20] {
        let mut world = World::new(
            6,
            Badness {
                lost,
                ..Badness::default()
            },
            u8::MAX,
        );
        let (mtu, len) = (world.requester.mtu(), MEMORY as u32);
        let window = (128 << 10) / mtu;
        world.requester = Requester::new(
            Options {
                mtu: 64,
                ..world.requester.options()
            },
            world.responder.expected(),
        );
        world.responder = Responder::new(9, 64, RNR_TIMER, world.responder.expected());
        let expected = world.oracle.bytes.clone();
        world.posted.push(Posted {
            got: vec![0; expected.len()],
            ..Posted::refused(Vec::new())
        });
        world.requester.post(
            Request::Read(Reth {
                addr: BASE,
                rkey: RKEY,
                len,
            }),
            true,
        );
        let mut most = 0;
        while world.requester.completed() == 0 {
            assert!(world.step() && world.requester.failure().is_none());
            most = most.max(
                world
                    .network
                    .iter()
                    .filter(|Reverse(flying)| !flying.to_responder)
                    .count(),
            );
        }
        assert!(
            world.posted[0].got == expected && most <= window.min(64) as usize,
            "{most}"
        );
    }
}

#[test]
fn p5_a_duplicate_atomic_is_answered_from_the_newest_with_its_number() {
    let mut world = World::new(1, Badness::default(), 7);
    let first = world.responder.expected();
    let ask = |world: &mut World| {
        let opcode = PacketOpcode {
            transport: Transport::Rc,
            opcode: Opcode::FetchAdd,
        };
        let atomic = AtomicEth {
            addr: BASE,
            rkey: RKEY,
            swap_add: 1,
            compare: 0,
        };
        world.responder.on_request(
            &Headers {
                atomic,
                ..Headers::new(opcode, 7, first)
            },
            &[],
            &mut world.memory,
            0,
        );
        world.responder.next_reply(0).unwrap().headers.original
    };
    let before = ask(&mut world);
    assert_eq!(ask(&mut world), before);
    // All numbers were used, and fewer than sixteen atomics came.
    world.responder.set_expected(first);
    assert_eq!(
        [ask(&mut world), ask(&mut world)],
        [before.wrapping_add(1); 2]
    );
}

/// A forged packet far ahead of the others costs that packet's place, and not half of all.
#[test]
fn p7_one_packet_far_ahead_makes_no_others_late() {
    for ahead in [1, 100, 1 << 11, 1 << 22, (1 << 23) - 1, 1 << 23] {
        let mut world = World::new(1, Badness::default(), 7).unreliable();
        world.memory.receives = 5000;
        let first = world.responder.expected();
        let send = |world: &mut World, opcode, psn: Psn| {
            let opcode = PacketOpcode {
                transport: Transport::Uc,
                opcode,
            };
            world
                .responder
                .on_unreliable(&Headers::new(opcode, 7, psn), &[], &mut world.memory);
        };
        send(&mut world, Opcode::SendOnly, first);
        send(&mut world, Opcode::SendMiddle, first.after(ahead));
        assert_eq!(world.memory.received.len(), 1);
        send(&mut world, Opcode::SendOnly, first.after(ahead));
        (1..=2000).for_each(|nth| send(&mut world, Opcode::SendOnly, first.after(nth)));
        assert!(
            world.memory.received.len() > 2000 - 1024,
            "{ahead}: {}",
            world.memory.received.len()
        );
        // A packet that comes again and late is executed once.
        let received = world.memory.received.len();
        (1900..=2000).for_each(|nth| send(&mut world, Opcode::SendOnly, first.after(nth)));
        assert_eq!(world.memory.received.len(), received);
    }
}

#[test]
fn p4_a_peer_without_receives_fails_it_after_the_rnr_retries() {
    // NAKs that come twice are one each.
    let mut world = World::new(
        1,
        Badness {
            doubled: 1000,
            ..Badness::default()
        },
        7,
    );
    world.requester.set_rnr_retry(3);
    world.posted.push(Posted::refused(vec![1]));
    world.requester.post(
        Request::Send {
            len: 1,
            imm: None,
            is_solicited: false,
        },
        true,
    );
    world.rng = Random::new(0);
    while world.requester.failure().is_none() {
        world.memory.receives = 0;
        assert!(world.step());
        world.memory.receives = 0;
    }
    assert_eq!(
        world.requester.failure(),
        Some(Failure {
            message: 0,
            status: Status::RnrRetryExceeded
        })
    );
    assert_eq!(world.requests, 4);
}

#[test]
fn p6_a_refused_access_fails_both_ends_and_nothing_behind_it_is_executed() {
    for (request, status) in [
        (
            Request::Write {
                to: Reth {
                    addr: BASE,
                    rkey: 1,
                    len: 8,
                },
                imm: None,
                is_solicited: false,
            },
            Status::RemoteAccess,
        ),
        (
            Request::Read(Reth {
                addr: BASE + MEMORY as u64 - 8,
                rkey: RKEY,
                len: 16,
            }),
            Status::RemoteAccess,
        ),
        (
            Request::FetchAdd(AtomicEth {
                addr: BASE + 4,
                rkey: RKEY,
                swap_add: 1,
                compare: 0,
            }),
            Status::RemoteAccess,
        ),
        (
            Request::Send {
                len: 10_000,
                imm: None,
                is_solicited: false,
            },
            Status::RemoteInvalidRequest,
        ),
    ] {
        let mut world = World::new(
            3,
            Badness {
                late: 300,
                ..Badness::default()
            },
            7,
        );
        world.memory.receives = 100;
        for _ in 0..5 {
            world.post();
        }
        let (expected, oracle) = (world.posted.len() as u64, world.oracle.clone());
        world.posted.push(Posted::refused(vec![7; 10_000]));
        world.requester.post(request, true);
        for _ in 0..5 {
            world.post();
        }
        world.run();
        assert_eq!(
            world.requester.failure(),
            Some(Failure {
                message: expected,
                status
            })
        );
        assert!(world.responder.fatal().is_some());
        while world.step() {}
        assert_eq!(
            (world.memory.bytes, world.memory.received),
            (oracle.bytes, oracle.received),
            "{request:?}"
        );
    }
}

#[test]
fn p6_a_read_of_more_bytes_than_a_message_may_have_is_refused() {
    let mut world = World::new(1, Badness::default(), 7);
    world.memory.end = usize::MAX;
    let opcode = PacketOpcode {
        transport: Transport::Rc,
        opcode: Opcode::ReadRequest,
    };
    let reth = Reth {
        addr: BASE,
        rkey: RKEY,
        len: (1 << 30) + 1,
    };
    let headers = Headers {
        reth,
        ..Headers::new(opcode, 7, world.responder.expected())
    };
    world
        .responder
        .on_request(&headers, &[], &mut world.memory, 0);
    assert_eq!(world.responder.fatal(), Some(Nak::InvalidRequest));
}

#[test]
fn p7_unreliable_messages_are_executed_once_and_in_order_or_lost_without_a_word() {
    let mut lost = 0;
    for seed in seeds() {
        let badness = Badness {
            lost: 50 * u16::from(seed % 2 == 0),
            doubled: 50,
            damaged: 20,
            late: 100 * u16::from(seed % 4 == 0),
        };
        let badness = if seed % 5 == 0 {
            Badness::default()
        } else {
            badness
        };
        let mut world = World::new(seed, badness, 0).unreliable();
        world.memory.receives = if seed % 3 == 0 { 10 } else { 1000 };
        for _ in 0..40 {
            world.post();
        }
        while world.step() {}
        assert_eq!(
            (
                world.requester.completed(),
                world.requester.failure(),
                world.responder.kept()
            ),
            (40, None, 0)
        );
        let mut expected = world.oracle.received.iter();
        assert!(
            world
                .memory
                .received
                .iter()
                .all(|received| expected.any(|one| one == received)),
            "{seed}"
        );
        let missing = world.oracle.received.len() - world.memory.received.len();
        assert!(
            missing == 0 && world.memory.bytes == world.oracle.bytes
                || badness != Badness::default()
                || seed % 3 == 0,
            "{seed}"
        );
        lost += missing;
    }
    assert!(lost > 100, "{lost}");
}

/// A stranger that knows the QPN, with any packet: no panic, and bounded memory. Ten million
/// packets.
#[test]
fn any_packets_in_any_order_change_no_memory_beyond_the_region_and_keep_little() {
    let mut understood = 0;
    for seed in seeds() {
        let mut world = World::new(seed, Badness::default(), 7);
        if seed % 4 == 0 {
            world = world.unreliable();
        }
        let options = world.requester.options();
        for nth in 0..50_000_u32 {
            if nth % 64 == 0 {
                // A connection that has failed takes nothing any more.
                let next = world.responder.expected();
                world.responder = Responder::new(9, options.mtu, RNR_TIMER, next);
                world.requester = Requester::new(options, next);
                (world.memory.receives, world.memory.open) = (20, None);
                world.memory.received.clear();
                for _ in 0..4 {
                    world.requester.post(
                        Request::Read(Reth {
                            addr: BASE,
                            rkey: RKEY,
                            len: 2000,
                        }),
                        true,
                    );
                    world.requester.post(
                        Request::Send {
                            len: 2000,
                            imm: None,
                            is_solicited: false,
                        },
                        true,
                    );
                }
            }
            while world.requester.next_packet(world.now_ns).is_some() {
                world.requester.on_sent(world.now_ns);
            }
            let mut bytes = [0; 64];
            bytes
                .chunks_exact_mut(8)
                .for_each(|word| word.copy_from_slice(&world.rng.next_u64().to_le_bytes()));
            // Mostly about the expected PSN, and with the opcodes there are.
            bytes[0] %= 24;
            bytes[1] &= 0x30;
            let near = world.rng.below(40) as u32;
            let psn = world
                .responder
                .expected()
                .after(near)
                .after(20_u32.wrapping_neg());
            bytes[9..12].copy_from_slice(&psn.get().to_be_bytes()[1..]);
            if world.rng.happens(700) {
                let reth = Reth {
                    addr: BASE + world.rng.below(MEMORY as u64),
                    rkey: RKEY,
                    len: world.rng.below(3000) as u32,
                };
                bytes[12..20].copy_from_slice(&reth.addr.to_be_bytes());
                bytes[20..24].copy_from_slice(&reth.rkey.to_be_bytes());
                bytes[24..28].copy_from_slice(&reth.len.to_be_bytes());
            }
            if let Ok((headers, payload)) = Headers::parse(&bytes) {
                understood += 1;
                world.arrive_at_responder(&headers, payload);
                if world
                    .requester
                    .on_response(&headers, payload.len(), world.now_ns)
                    != Taken::Nothing
                {
                    world.requester.placed(headers.bth.psn, world.now_ns);
                }
                world.now_ns += 1000;
                world.requester.on_time(world.now_ns);
            }
            assert!(world.responder.kept() <= 200);
            if world.rng.happens(200) {
                world.responder.next_reply(world.now_ns);
            }
        }
    }
    assert!(understood > 5_000_000, "{understood}");
}
