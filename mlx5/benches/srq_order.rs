//! Measures how many messages a shared receive queue (SRQ) takes per second. A NIC that finds the
//! next WQE after the present one can fetch several at a time; a NIC that has to follow links
//! cannot. WRITEs with immediate go from 1, 8 and 32 queue pairs to as many others of the same
//! device, in one thread, into: an SRQ of each receiver; one SRQ for all, linked in order; the same,
//! shuffled; two SRQs. An SRQ of each receiver is the control: if it is no faster, the core or the
//! port is the limit, and not the SRQ.
//!
//! `cargo bench -p mlx5 --bench srq_order -- [DEVICE] [ROUNDS]` prints the messages per second on
//! DEVICE (`mlx5_0`, or the default `soft`, where the order has no effect) as the median of ROUNDS
//! (11) rounds, the ratio to the control, and the share of links that are in order afterwards.
//! Without `--bench`, as `cargo test` runs it, or with `--quick`, the program runs one short round.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark")]

use std::time::{Duration, Instant};

use mlx5::{
    Access, ConnectOptions, Cq, Device, Inline, Mr, Pd, QpConfig, RcQp, Signal, Srq, WriteImm,
};

const DEPTH: usize = 1023;
const IN_FLIGHT: usize = 256;
const BATCH: usize = 8;
const SENDERS: [usize; 3] = [1, 8, 32];

struct Connection {
    sender: RcQp,
    _receiver: RcQp,
    send_cq: Cq,
}

impl Connection {
    /// Connects two queue pairs. The receiver takes its receives from `srq` and completes them into
    /// `recv_cq`.
    fn new(device: &Device, pd: &Pd, srq: &Srq, recv_cq: &Cq) -> Self {
        let send_cq = device.create_cq(1024).unwrap();
        let config = QpConfig {
            max_send_wr: 1024,
            ..QpConfig::default()
        };
        let mut sender = pd.create_qp(&send_cq, &send_cq, srq, &config).unwrap();
        let mut receiver = pd.create_qp(&send_cq, recv_cq, srq, &config).unwrap();
        receiver
            .connect(&sender.address(), &ConnectOptions::default())
            .unwrap();
        sender
            .connect(&receiver.address(), &ConnectOptions::default())
            .unwrap();
        Self {
            sender,
            _receiver: receiver,
            send_cq,
        }
    }
}

/// A shared receive queue, and the completion queue of all of its receivers.
struct Queue {
    srq: Srq,
    recv_cq: Cq,
}

impl Queue {
    fn new(device: &Device, pd: &Pd) -> Self {
        let mut queue = Self {
            srq: pd.create_srq(DEPTH as u32, 0).unwrap(),
            recv_cq: device.create_cq(2048).unwrap(),
        };
        queue.post_receives();
        queue
    }

    fn post_receives(&mut self) {
        while self.srq.free() > 0 {
            self.srq.post(&[], 0).unwrap();
        }
        self.srq.ring();
    }

    /// Takes the messages that have arrived, and returns their receives to the list in the order of
    /// arrival. Returns the number of messages.
    fn receive(&mut self, mut each: impl FnMut(u16)) -> usize {
        let Self { recv_cq, srq } = self;
        recv_cq.poll(64, |cqe| {
            cqe.result().unwrap();
            assert!(
                srq.complete_receive(&cqe).is_some(),
                "each entry is taken once"
            );
            each(cqe.wqe_counter());
        })
    }
}

struct Load {
    connections: Vec<Connection>,
    /// Connection *i* uses queue *i* modulo their number.
    queues: Vec<Queue>,
    target: Mr,
    in_flight: usize,
    /// The connection that sends next.
    next: usize,
    pd: Pd,
}

impl Load {
    fn new(device: &Device, connections: usize, queues: usize) -> Self {
        let pd = device.alloc_pd().unwrap();
        let queues: Vec<Queue> = (0..queues).map(|_| Queue::new(device, &pd)).collect();
        let connect = |number: usize| {
            let Queue { srq, recv_cq } = &queues[number % queues.len()];
            Connection::new(device, &pd, srq, recv_cq)
        };
        Self {
            connections: (0..connections).map(connect).collect(),
            target: pd
                .alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
                .unwrap(),
            queues,
            in_flight: 0,
            next: 0,
            pd,
        }
    }

    /// Posts batches, from one connection after the other, until `in_flight` messages are under way
    /// or a send queue is full.
    fn send(&mut self, in_flight: usize) {
        let (addr, rkey) = (self.target.addr(), self.target.rkey());
        let connections = self.connections.len();
        while self.in_flight < in_flight {
            let batch = BATCH.min(in_flight - self.in_flight);
            let operation = |imm: usize| WriteImm {
                addr,
                rkey,
                imm: imm as u32,
                payload: Inline(&[0x5a; 8]),
            };
            let Connection {
                sender, send_cq, ..
            } = &mut self.connections[self.next];
            self.next = (self.next + 1) % connections;
            let posted = (0..batch)
                .take_while(|imm| sender.post(&operation(*imm), Signal::Reclaim, 0).is_ok())
                .count();
            sender.ring();
            self.in_flight += posted;
            send_cq.poll(64, |cqe| {
                cqe.result().unwrap();
                sender.complete(&cqe);
            });
            if posted < batch {
                return;
            }
        }
    }

    /// Takes the messages that have arrived, and posts their receives again. Returns the number of
    /// messages.
    fn receive(&mut self) -> usize {
        let mut received = 0;
        for queue in &mut self.queues {
            received += queue.receive(drop);
            queue.post_receives();
        }
        self.in_flight -= received;
        received
    }

    /// Links the receives of the first queue in a random order, which is the same in every run. A
    /// generator with a fixed seed chooses the connection whose message takes the next receive.
    /// Then the receives are returned connection by connection.
    fn shuffle(&mut self, device: &Device) {
        const CONNECTIONS: usize = 32;
        let Self {
            queues, target, pd, ..
        } = self;
        let queue = &mut queues[0];
        let mut connections: Vec<_> = (0..CONNECTIONS)
            .map(|_| {
                let recv_cq = device.create_cq(DEPTH as u32).unwrap();
                let connection = Connection::new(device, pd, &queue.srq, &recv_cq);
                (connection, recv_cq, 0)
            })
            .collect();
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..DEPTH {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let (from, _, sent) = &mut connections[(state >> 33) as usize % CONNECTIONS];
            let operation = WriteImm {
                addr: target.addr(),
                rkey: target.rkey(),
                imm: 0,
                payload: (),
            };
            from.sender.post(&operation, Signal::Always, 0).unwrap();
            from.sender.ring();
            *sent += 1;
            let Connection {
                sender, send_cq, ..
            } = from;
            while send_cq.poll(1, |cqe| {
                assert!(cqe.result().is_ok() && sender.complete(&cqe).is_some())
            }) == 0
            {}
        }
        for (_, recv_cq, sent) in &mut connections {
            while *sent > 0 {
                *sent -= recv_cq.poll(64, |cqe| {
                    assert!(
                        queue.srq.complete_receive(&cqe).is_some(),
                        "each entry is taken once"
                    )
                });
            }
        }
        queue.post_receives();
    }

    /// Returns messages per second. With one sender the order of the links stays, because entries
    /// are returned in the order in which they were taken. With several senders, completions may
    /// arrive in a different order.
    fn rate(&mut self, duration: Duration) -> f64 {
        let (start, mut messages) = (Instant::now(), 0);
        while start.elapsed() < duration {
            for _ in 0..16 {
                self.send(IN_FLIGHT);
                messages += self.receive();
            }
        }
        messages as f64 / start.elapsed().as_secs_f64()
    }

    /// Returns the share of entries of the first queue whose successor in the list is also the next
    /// in memory.
    fn in_order(&mut self) -> f64 {
        let mut entries = Vec::new();
        while entries.len() < DEPTH {
            self.send(IN_FLIGHT);
            for (number, queue) in self.queues.iter_mut().enumerate() {
                self.in_flight -= queue.receive(|entry| {
                    if number == 0 {
                        entries.push(entry);
                    }
                });
                queue.post_receives();
            }
        }
        let followed = entries
            .windows(2)
            .filter(|pair| pair[0] + 1 == pair[1])
            .count();
        followed as f64 / (entries.len() - 1) as f64
    }

    /// Checks that most links are in order, or few of a shuffled queue.
    fn check_order(&mut self, is_shuffled: bool) {
        let share = self.in_order();
        assert!(
            if is_shuffled {
                share < 0.1
            } else {
                share > 0.5
            },
            "the queue is not what it is said to be: {share}"
        );
    }
}

/// An arrangement of queues: its name, the number of queues for a number of senders, and whether the
/// first queue is shuffled.
type Arrangement = (&'static str, fn(usize) -> usize, bool);

/// The arrangements, of which the first is the control.
const ARRANGEMENTS: [Arrangement; 4] = [
    ("an SRQ of each receiver", |senders| senders, false),
    ("one SRQ, links in order", |_| 1, false),
    ("one SRQ, links shuffled", |_| 1, true),
    ("two SRQs", |_| 2, false),
];

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn main() {
    let (options, args): (Vec<String>, Vec<String>) = std::env::args()
        .skip(1)
        .partition(|arg| arg.starts_with('-'));
    let has = |option: &str| options.iter().any(|given| given == option);
    let is_short = !has("--bench") || has("--quick");
    let device = args.first().map_or("soft", String::as_str);
    if device.starts_with("relay:") {
        return println!(
            "this device has no order of links: the relay posts each receive by a call of libibverbs"
        );
    }
    let (rounds, duration) = if is_short {
        (1, 10)
    } else {
        (args.get(1).map_or(11, |n| n.parse().unwrap()), 200)
    };
    let duration = Duration::from_millis(duration);
    let device = Device::open(device).unwrap();
    println!(
        "messages per second on {}, SRQs of {DEPTH}, {rounds} rounds; in brackets: of the control",
        device.info().name
    );
    for senders in SENDERS {
        // Two queues need two senders.
        let measured = ARRANGEMENTS
            .into_iter()
            .filter(|(_, queues, _)| queues(1) <= senders);
        let mut loads: Vec<(&str, Load)> = measured
            .map(|(name, queues, is_shuffled)| {
                let mut load = Load::new(&device, senders, queues(senders));
                if is_shuffled {
                    load.shuffle(&device);
                }
                load.check_order(is_shuffled);
                (name, load)
            })
            .collect();
        let rates: Vec<Vec<f64>> = (0..rounds)
            .map(|_| {
                loads
                    .iter_mut()
                    .map(|(_, load)| load.rate(duration))
                    .collect()
            })
            .collect();
        for (number, (name, load)) in loads.iter_mut().enumerate() {
            let median_of = |of: fn(&[f64], usize) -> f64| {
                median(rates.iter().map(|round| of(round, number)).collect())
            };
            println!(
                "{senders} sender{}, {name}: {:.0} ({:.3}), in order then: {:.0} %",
                if senders == 1 { "" } else { "s" },
                median_of(|round, number| round[number]),
                median_of(|round, number| round[number] / round[0]),
                100.0 * load.in_order()
            );
        }
    }
}
