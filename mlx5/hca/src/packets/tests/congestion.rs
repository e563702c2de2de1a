//! Many connections through one narrow link: P9.

use super::super::congestion::Congestion;
use super::*;

/// Bytes of a packet on the link beside its payload: Ethernet, IP, UDP, BTH, ICRC.
const OVERHEAD: u64 = 14 + 4 + 20 + 8 + 12 + 4;
const MTU: u32 = 1024;
const MESSAGE: u32 = 16 << 10;
/// Number of messages that a requester keeps posted.
const POSTED: u64 = 16;

/// A responder's memory that takes everything.
struct Sink;

impl Target for Sink {
    fn take_receive(&mut self) -> bool {
        true
    }

    fn place(&mut self, _offset: u32, _bytes: &[u8]) -> Result<(), Nak> {
        Ok(())
    }

    fn check(&mut self, _at: &Reth, _is_read: bool) -> Result<(), Nak> {
        Ok(())
    }

    fn write(&mut self, _at: &Reth, _offset: u32, _bytes: &[u8]) -> Result<(), Nak> {
        Ok(())
    }

    fn execute(&mut self, _opcode: Opcode, _atomic: &AtomicEth) -> Result<u64, Nak> {
        Ok(0)
    }

    fn complete(&mut self, _completion: Completion) {}
}

/// A link that sends a packet after the other, and drops what finds its queue full. Then packets
/// take a constant time.
#[derive(Clone, Copy, Debug)]
struct Link {
    ns_per_byte: u64,
    delay_ns: u64,
    /// Maximum number of queued packets.
    queue: u64,
    /// Packets in a thousand that are lost behind the queue.
    loss_permille: u16,
    free_ns: u64,
    sent: u64,
}

impl Link {
    const fn new(megabits: u64, delay_ns: u64, queue: u64) -> Self {
        Self {
            ns_per_byte: 8_000 / megabits,
            delay_ns,
            queue,
            loss_permille: 0,
            free_ns: 0,
            sent: 0,
        }
    }

    /// Returns the time at which a packet of this payload arrives, if it does.
    fn send(&mut self, now_ns: u64, len: u32, rng: &mut Random) -> Option<u64> {
        let packet_ns = (OVERHEAD + u64::from(len)) * self.ns_per_byte;
        let queued = self.free_ns.saturating_sub(now_ns).div_ceil(packet_ns);
        if queued > self.queue {
            return None;
        }
        self.free_ns = self.free_ns.max(now_ns) + packet_ns;
        self.sent += 1;
        (!rng.happens(self.loss_permille)).then_some(self.free_ns + self.delay_ns)
    }
}

/// A packet that arrives: time, order, connection, headers, bytes of payload.
type Arrival = Reverse<(u64, u64, usize, bool)>;

struct Pair {
    requester: Requester,
    responder: Responder,
    posted: u64,
}

/// The result of connections that send through one link for a time.
#[derive(Debug)]
struct Outcome {
    /// Payload acknowledged, over what the link can carry.
    goodput: f64,
    /// Jain's index of fairness of the connections' payloads.
    fairness: f64,
    /// Data packets that crossed the link, over those that were needed.
    packets: f64,
}

/// Lets `senders` connections send (or read, if `reads`) through the link for this time.
fn flood(senders: usize, mut link: Link, reads: bool, end_ns: u64, seed: u64) -> Outcome {
    let mut rng = Random::new(seed);
    let mut pairs: Vec<Pair> = (0..senders)
        .map(|_| {
            let first = Psn::new(rng.next_u64() as u32);
            let options = Options {
                qpn: 7,
                mtu: MTU,
                timeout_ns: 500_000_000,
                retry_count: 7,
                rnr_retry: 7,
                rd_atomic: 4,
                is_unreliable: false,
                is_polled: true,
            };
            Pair {
                requester: Requester::new(options, first),
                responder: Responder::new(9, MTU, RNR_TIMER, first),
                posted: 0,
            }
        })
        .collect();
    let whole = link;
    let mut now_ns = 0;
    let mut order = 0;
    let mut network: BinaryHeap<Arrival> = BinaryHeap::new();
    let mut bytes: Vec<Vec<u8>> = Vec::new();
    while now_ns < end_ns {
        for (nth, pair) in pairs.iter_mut().enumerate() {
            while pair.posted < pair.requester.completed() + POSTED {
                pair.posted += 1;
                let at = Reth {
                    addr: BASE,
                    rkey: RKEY,
                    len: MESSAGE,
                };
                let request = if reads {
                    Request::Read(at)
                } else {
                    Request::Write {
                        to: at,
                        imm: None,
                        is_solicited: false,
                    }
                };
                pair.requester.post(request, true);
            }
            let mut fly = |to_responder: bool, headers: &Headers, len: u32, at_ns: u64| {
                let mut packet = headers.emit().to_vec();
                packet.resize(packet.len() + len as usize + 4, 0);
                bytes.push(packet);
                network.push(Reverse((at_ns, order, nth, to_responder)));
                order += 1;
            };
            while let Some(packet) = pair.requester.next_packet(now_ns) {
                let at_ns = if reads {
                    Some(now_ns + link.delay_ns)
                } else {
                    link.send(now_ns, packet.len, &mut rng)
                };
                if let Some(at_ns) = at_ns {
                    fly(true, &packet.headers, packet.len, at_ns);
                }
                pair.requester.on_sent(now_ns);
            }
            while let Some(reply) = pair.responder.next_reply(now_ns) {
                let len = reply.from.map_or(0, |from| from.len);
                let at_ns = if reads {
                    link.send(now_ns, len, &mut rng)
                } else {
                    Some(now_ns + link.delay_ns)
                };
                if let Some(at_ns) = at_ns {
                    fly(false, &reply.headers, len, at_ns);
                }
            }
        }
        let due = pairs
            .iter()
            .flat_map(|pair| [pair.requester.due_ns(), pair.responder.due_ns()])
            .flatten()
            .min();
        let arrival = network.peek().map(|Reverse((at_ns, ..))| *at_ns);
        now_ns = now_ns.max(arrival.into_iter().chain(due).min().unwrap());
        while let Some(Reverse((_, order, nth, to_responder))) = network
            .peek()
            .is_some_and(|Reverse((at_ns, ..))| *at_ns <= now_ns)
            .then(|| network.pop().unwrap())
        {
            let packet = std::mem::take(&mut bytes[order as usize]);
            let (headers, payload) = Headers::parse(&packet).unwrap();
            let Pair {
                requester,
                responder,
                ..
            } = &mut pairs[nth];
            if to_responder {
                responder.on_request(&headers, payload, &mut Sink, now_ns);
            } else if requester.on_response(&headers, payload.len(), now_ns) != Taken::Nothing {
                requester.placed(headers.bth.psn, now_ns);
            }
        }
        for pair in &mut pairs {
            pair.requester.on_time(now_ns);
            assert_eq!(pair.requester.failure(), None, "seed {seed}");
        }
    }
    let done: Vec<f64> = pairs
        .iter()
        .map(|pair| pair.requester.completed() as f64 * f64::from(MESSAGE))
        .collect();
    let (sum, squares) = (
        done.iter().sum::<f64>(),
        done.iter().map(|x| x * x).sum::<f64>(),
    );
    let capacity = now_ns as f64 / whole.ns_per_byte as f64 * f64::from(MTU)
        / (OVERHEAD + u64::from(MTU)) as f64;
    Outcome {
        goodput: sum / capacity,
        fairness: sum * sum / (senders as f64 * squares),
        packets: link.sent as f64 / (sum / f64::from(MTU)),
    }
}

/// 100 Mbit/s, a queue of 100 packets, and 0.1 ms each way.
#[test]
fn p9_senders_share_a_narrow_link_and_keep_it_busy() {
    for seed in seeds().take(3) {
        for (senders, reads) in [1, 4, 16].into_iter().flat_map(|n| [(n, false), (n, true)]) {
            let link = Link::new(100, 100_000, 100);
            let outcome = flood(senders, link, reads, 4_000_000_000, seed);
            assert!(
                outcome.goodput >= 0.8 && outcome.fairness >= 0.9 && outcome.packets <= 1.3,
                "{senders} senders, reads: {reads}: {outcome:?}"
            );
        }
    }
}

/// A path of 50 ms each way, whose round trip the requester does not know at first.
#[test]
fn p9_a_long_path_causes_no_repeats_once_it_is_known() {
    for reads in [false, true] {
        let link = Link::new(1000, 50_000_000, 1000);
        let outcome = flood(2, link, reads, 20_000_000_000, 1);
        assert!(outcome.packets <= 1.05, "reads: {reads}: {outcome:?}");
    }
}

/// Losses that are no congestion.
#[test]
fn p9_a_window_grows_again_after_losses() {
    for reads in [false, true] {
        let link = Link {
            loss_permille: 10,
            ..Link::new(100, 100_000, 100)
        };
        let outcome = flood(4, link, reads, 4_000_000_000, 1);
        assert!(
            outcome.goodput >= 0.8 && outcome.packets <= 1.3,
            "reads: {reads}: {outcome:?}"
        );
    }
}

/// A peer that was only slow acknowledges packets that were not sent again.
#[test]
fn p9_a_needless_repeat_costs_no_window_and_a_loss_after_it_does() {
    let first = Psn::new(0xff_fff0);
    let sent = first.after(32);
    for is_lost in [false, true] {
        let mut congestion = Congestion::new(64, first);
        congestion.on_send(32);
        congestion.on_repeat(sent);
        congestion.on_repeat(sent);
        assert_eq!(congestion.window(), 1);
        if is_lost {
            congestion.on_loss(sent);
        }
        congestion.on_needless_repeat();
        congestion.on_progress(sent, 32, sent);
        assert_eq!(congestion.window(), if is_lost { 16 } else { 64 });
    }
}
