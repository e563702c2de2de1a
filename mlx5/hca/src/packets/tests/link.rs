//! Connections of many pairs of devices through two narrow links, one for each direction, in virtual time.

use super::*;

/// Bytes of a packet on the link beside its payload: Ethernet, IP, UDP, BTH, ICRC.
pub(super) const OVERHEAD: u64 = 14 + 4 + 20 + 8 + 12 + 4;
pub(super) const MTU: u32 = 1024;
/// Maximum further delay, in ns, of a packet that later packets overtake.
const REORDER_NS: u64 = 1_000_000;

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

/// A link that sends one packet after the other, and drops a packet that finds the queue full. Then
/// packets take a constant time, and some are lost or overtaken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    pub(super) ns_per_byte: u64,
    pub(super) delay_ns: u64,
    /// Maximum number of queued packets.
    pub(super) queue: u64,
    /// Number of queued packets above which the link marks packets.
    pub(super) mark: u64,
    /// Packets in a thousand that are lost behind the queue.
    pub(super) loss_permille: u16,
    /// Packets in a thousand with a further delay of up to [`REORDER_NS`].
    pub(super) reorder_permille: u16,
    pub(super) free_ns: u64,
    pub(super) sent: u64,
    /// Sum of the numbers of packets that packets found queued, and whether the last one was
    /// marked.
    pub(super) found: u64,
    pub(super) is_marked: bool,
}

impl Link {
    pub(super) const fn new(megabits: u64, delay_ns: u64, queue: u64) -> Self {
        Self {
            ns_per_byte: 8_000 / megabits,
            delay_ns,
            queue,
            mark: u64::MAX,
            loss_permille: 0,
            reorder_permille: 0,
            free_ns: 0,
            sent: 0,
            found: 0,
            is_marked: false,
        }
    }

    /// Returns the time at which a packet of this payload arrives, if it does.
    pub(super) fn send(&mut self, now_ns: u64, len: u32, rng: &mut Random) -> Option<u64> {
        let packet_ns = (OVERHEAD + u64::from(len)) * self.ns_per_byte;
        let queued = self.free_ns.saturating_sub(now_ns).div_ceil(packet_ns);
        if queued > self.queue {
            return None;
        }
        self.free_ns = self.free_ns.max(now_ns) + packet_ns;
        self.sent += 1;
        self.found += queued;
        self.is_marked = queued > self.mark;
        let late_ns = if rng.happens(self.reorder_permille) {
            rng.below(REORDER_NS)
        } else {
            0
        };
        (!rng.happens(self.loss_permille)).then_some(self.free_ns + self.delay_ns + late_ns)
    }

    /// Returns the number of payload bytes that packets of the MTU carry in this time.
    pub(super) fn capacity(&self, ns: u64) -> f64 {
        ns as f64 / self.ns_per_byte as f64 * f64::from(MTU) / (OVERHEAD + u64::from(MTU)) as f64
    }
}

/// The messages that a requester keeps posted: their number, and the kind and length of each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub(super) depth: u64,
    pub(super) request: Request,
}

impl Load {
    pub(super) const fn write(len: u32, depth: u64) -> Self {
        let request = Request::Write {
            to: at(len),
            imm: None,
            is_solicited: false,
        };
        Self { depth, request }
    }

    pub(super) const fn read(len: u32, depth: u64) -> Self {
        let request = Request::Read(at(len));
        Self { depth, request }
    }

    pub(super) const fn call(depth: u64) -> Self {
        let request = Request::Send {
            len: 32,
            imm: None,
            is_solicited: false,
        };
        Self { depth, request }
    }

    pub(super) const fn is_read(&self) -> bool {
        matches!(self.request, Request::Read(_))
    }

    /// Returns the length of a message, in bytes.
    pub(super) fn len(&self) -> u32 {
        match self.request {
            Request::Send { len, .. } => len,
            Request::Write { to, .. } | Request::Read(to) => to.len,
            Request::CompareSwap(_) | Request::FetchAdd(_) => 8,
        }
    }
}

const fn at(len: u32) -> Reth {
    Reth {
        addr: BASE,
        rkey: RKEY,
        len,
    }
}

/// A packet that arrives: time, order, connection, whether it goes to the responder.
type Arrival = Reverse<(u64, u64, usize, bool)>;

struct Pair {
    /// Number of the pair of devices.
    device: usize,
    requester: Requester,
    responder: Responder,
    posted: u64,
    /// Number of packets with data of which the payload has its place.
    done: u64,
}

/// The result of connections that send through one link for a time.
#[derive(Debug)]
pub(super) struct Outcome {
    /// Payload in its place, over what the link can carry.
    pub(super) goodput: f64,
    /// Jain's index of fairness of the payloads of the pairs of devices.
    pub(super) fairness: f64,
    /// Packets with data that were sent, over those that were needed.
    pub(super) packets: f64,
    /// Mean number of packets that wait for the link when a packet comes: of the fuller direction.
    pub(super) queue: f64,
}

/// Lets pairs of devices, each with this number of connections, use two such links, one for each
/// direction, for this time. Each connection has this load.
pub(super) fn flood(senders: &[usize], link: Link, load: Load, end_ns: u64, seed: u64) -> Outcome {
    let mut rng = Random::new(seed);
    let mut pairs: Vec<Pair> = Vec::new();
    let devices = senders
        .iter()
        .enumerate()
        .flat_map(|(device, connections)| std::iter::repeat_n(device, *connections));
    for device in devices {
        let first = Psn::new(rng.next_u64() as u32);
        let options = Options {
            qpn: 7,
            mtu: MTU,
            timeout_ns: 500_000_000,
            retry_count: 7,
            rnr_retry: 7,
            rd_atomic: 16,
            is_unreliable: false,
            is_polled: true,
        };
        let mut requester = Requester::new(options, first);
        if let Some(other) = pairs.iter().find(|other| other.device == device) {
            requester.share_window(&other.requester);
        }
        pairs.push(Pair {
            device,
            requester,
            responder: Responder::new(9, MTU, RNR_TIMER, first, true),
            posted: 0,
            done: 0,
        });
    }
    let zeros = [0; MTU as usize];
    let (mut forth, mut back) = (link, link);
    let (mut now_ns, mut order, mut data) = (0, 0, 0);
    let mut network: BinaryHeap<Arrival> = BinaryHeap::new();
    let mut bytes: Vec<Vec<u8>> = Vec::new();
    while now_ns < end_ns {
        for (nth, pair) in pairs.iter_mut().enumerate() {
            while pair.posted < pair.requester.completed() + load.depth {
                pair.posted += 1;
                pair.requester.post(load.request, true);
            }
            let mut fly =
                |to_responder: bool, mut headers: Headers, payload: &[u8], at_ns, mark| {
                    headers.bth.has_fecn = mark;
                    let mut packet = headers.emit().to_vec();
                    packet.extend(payload);
                    packet.resize(packet.len() + usize::from(headers.bth.pad) + 4, 0);
                    bytes.push(packet);
                    network.push(Reverse((at_ns, order, nth, to_responder)));
                    order += 1;
                };
            while let Some(packet) = pair.requester.next_packet(now_ns) {
                data += u64::from(!load.is_read());
                if let Some(at_ns) = forth.send(now_ns, packet.len, &mut rng) {
                    let payload = &zeros[..packet.len as usize];
                    fly(true, packet.headers, payload, at_ns, forth.is_marked);
                }
                pair.requester.on_sent(now_ns);
            }
            while let Some(reply) = pair.responder.next_reply(now_ns) {
                let payload = reply
                    .from
                    .map_or(&reply.report[..], |from| &zeros[..from.len as usize]);
                data += u64::from(load.is_read() && reply.from.is_some());
                if let Some(at_ns) = back.send(now_ns, payload.len() as u32, &mut rng) {
                    fly(false, reply.headers, payload, at_ns, back.is_marked);
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
                done,
                ..
            } = &mut pairs[nth];
            if to_responder {
                let before = responder.expected();
                responder.on_request(&headers, payload, &mut Sink, now_ns);
                if !load.is_read() {
                    *done += responder.expected().since(before) as u64;
                }
            } else if requester.on_response(&headers, payload, now_ns) != Taken::Nothing {
                requester.placed(headers.bth.psn, now_ns);
                *done += 1;
            }
        }
        for pair in &mut pairs {
            pair.requester.on_time(now_ns);
            assert_eq!(pair.requester.failure(), None, "seed {seed}");
        }
    }
    let mut done = vec![0.0; senders.len()];
    for pair in &pairs {
        done[pair.device] += pair.done as f64 * f64::from(load.len().min(MTU));
    }
    let (sum, squares) = (
        done.iter().sum::<f64>(),
        done.iter().map(|x| x * x).sum::<f64>(),
    );
    Outcome {
        goodput: sum / link.capacity(now_ns),
        fairness: sum * sum / (senders.len() as f64 * squares),
        packets: data as f64 / (sum / f64::from(load.len().min(MTU))),
        queue: [forth, back]
            .map(|link| link.found as f64 / link.sent as f64)
            .into_iter()
            .fold(0.0, f64::max),
    }
}
