//! Measures whether the order of a shared receive queue's links in memory matters. A NIC that finds
//! the next WQE after the present one can fetch several at a time; a NIC that has to follow links
//! cannot. WRITEs with immediate go from a queue pair to another of the same device, in one thread.
//! One queue is linked in order and one is shuffled; they are measured in turn.
//!
//! `cargo bench -p mlx5 --bench srq_order -- [DEVICE] [ROUNDS]` prints the messages per second on
//! DEVICE (`mlx5_0`, or the default `soft`, where the order has no effect) as the median of ROUNDS
//! (11) rounds, and the ratio of the two orders. Without `--bench`, as `cargo test` runs it, or
//! with `--quick`, the program runs one short round.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark")]

use std::time::{Duration, Instant};

use mlx5::{
    Access, ConnectOptions, Cq, Device, Inline, Mr, Pd, QpConfig, RcQp, Signal, Srq, WriteImm,
};

const DEPTH: usize = 1023;
const IN_FLIGHT: usize = 256;
const BATCH: usize = 16;

struct Pair {
    sender: RcQp,
    _receiver: RcQp,
    send_cq: Cq,
    recv_cq: Cq,
    srq: Srq,
    target: Mr,
    in_flight: usize,
    pd: Pd,
}

impl Pair {
    fn new(device: &Device) -> Self {
        let pd = device.alloc_pd().unwrap();
        let (send_cq, recv_cq) = (
            device.create_cq(1024).unwrap(),
            device.create_cq(2048).unwrap(),
        );
        let (srq, own) = (
            pd.create_srq(DEPTH as u32, 0).unwrap(),
            pd.create_srq(1, 0).unwrap(),
        );
        let config = QpConfig {
            max_send_wr: 1024,
            ..QpConfig::default()
        };
        let mut sender = pd.create_qp(&send_cq, &send_cq, &own, &config).unwrap();
        let mut receiver = pd.create_qp(&recv_cq, &recv_cq, &srq, &config).unwrap();
        receiver
            .connect(&sender.address(), &ConnectOptions::default())
            .unwrap();
        sender
            .connect(&receiver.address(), &ConnectOptions::default())
            .unwrap();
        let target = pd
            .alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
            .unwrap();
        let mut pair = Self {
            sender,
            _receiver: receiver,
            send_cq,
            recv_cq,
            srq,
            target,
            in_flight: 0,
            pd,
        };
        pair.post_receives();
        pair
    }

    fn post_receives(&mut self) {
        while self.srq.free() > 0 {
            self.srq.post(&[], 0).unwrap();
        }
        self.srq.ring();
    }

    fn send(&mut self, in_flight: usize) {
        let (addr, rkey) = (self.target.addr(), self.target.rkey());
        while self.in_flight < in_flight {
            let batch = BATCH.min(in_flight - self.in_flight);
            let operation = |imm: usize| WriteImm {
                addr,
                rkey,
                imm: imm as u32,
                payload: Inline(&[0x5a; 8]),
            };
            let posted = (0..batch)
                .take_while(|imm| {
                    self.sender
                        .post(&operation(*imm), Signal::Reclaim, 0)
                        .is_ok()
                })
                .count();
            self.sender.ring();
            self.in_flight += posted;
            let Self {
                sender, send_cq, ..
            } = self;
            send_cq.poll(64, |cqe| {
                cqe.result().unwrap();
                sender.complete(&cqe);
            });
            if posted < batch {
                return;
            }
        }
    }

    /// Takes the messages that have arrived, and returns their receives to the list in the order of
    /// arrival. Returns the number of messages.
    fn receive(&mut self, mut each: impl FnMut(u16)) -> usize {
        let Self {
            recv_cq,
            srq,
            in_flight,
            ..
        } = self;
        let received = recv_cq.poll(64, |cqe| {
            cqe.result().unwrap();
            assert!(
                srq.complete_receive(&cqe).is_some(),
                "each entry is taken once"
            );
            each(cqe.wqe_counter());
        });
        *in_flight -= received;
        received
    }

    /// Links the receives in a random order, which is the same in every run. A generator with a
    /// fixed seed chooses the connection whose message takes the next receive. Then the receives
    /// are returned connection by connection.
    fn shuffle(&mut self, device: &Device) {
        const CONNECTIONS: usize = 32;
        let config = QpConfig {
            max_send_wr: 1024,
            ..QpConfig::default()
        };
        let mut connections: Vec<_> = (0..CONNECTIONS)
            .map(|_| {
                let recv_cq = device.create_cq(DEPTH as u32).unwrap();
                let mut from = self
                    .pd
                    .create_qp(&self.send_cq, &self.send_cq, &self.srq, &config)
                    .unwrap();
                let mut to = self
                    .pd
                    .create_qp(&self.send_cq, &recv_cq, &self.srq, &config)
                    .unwrap();
                to.connect(&from.address(), &ConnectOptions::default())
                    .unwrap();
                from.connect(&to.address(), &ConnectOptions::default())
                    .unwrap();
                (from, to, recv_cq, 0)
            })
            .collect();
        let (addr, rkey) = (self.target.addr(), self.target.rkey());
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..DEPTH {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let (from, _, _, sent) = &mut connections[(state >> 33) as usize % CONNECTIONS];
            from.post(
                &WriteImm {
                    addr,
                    rkey,
                    imm: 0,
                    payload: (),
                },
                Signal::Always,
                0,
            )
            .unwrap();
            from.ring();
            *sent += 1;
            while self.send_cq.poll(1, |cqe| {
                assert!(cqe.result().is_ok() && from.complete(&cqe).is_some())
            }) == 0
            {}
        }
        let srq = &mut self.srq;
        for (_, _, recv_cq, sent) in &mut connections {
            while *sent > 0 {
                *sent -= recv_cq.poll(64, |cqe| {
                    assert!(
                        srq.complete_receive(&cqe).is_some(),
                        "each entry is taken once"
                    )
                });
            }
        }
        self.post_receives();
    }

    /// Returns messages per second. The order of the links stays, because entries are returned in
    /// the order in which they were taken.
    fn rate(&mut self, duration: Duration) -> f64 {
        let (start, mut messages) = (Instant::now(), 0);
        while start.elapsed() < duration {
            for _ in 0..16 {
                self.send(IN_FLIGHT);
                messages += self.receive(drop);
                self.post_receives();
            }
        }
        messages as f64 / start.elapsed().as_secs_f64()
    }

    /// Returns the share of entries whose successor in the list is also the next in memory.
    fn in_order(&mut self) -> f64 {
        let mut entries = Vec::new();
        while entries.len() < DEPTH {
            self.send(IN_FLIGHT);
            self.receive(|entry| entries.push(entry));
            self.post_receives();
        }
        let followed = entries
            .windows(2)
            .filter(|pair| pair[0] + 1 == pair[1])
            .count();
        followed as f64 / (entries.len() - 1) as f64
    }
}

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
    let (mut sequential, mut shuffled) = (Pair::new(&device), Pair::new(&device));
    shuffled.shuffle(&device);
    let orders = [sequential.in_order(), shuffled.in_order()];
    assert!(
        orders[0] > 0.99 && orders[1] < 0.1,
        "the queues are what they are said to be: {orders:?}"
    );
    let rates: Vec<[f64; 2]> = (0..rounds)
        .map(|_| [sequential.rate(duration), shuffled.rate(duration)])
        .collect();
    println!(
        "messages per second on {}, SRQ of {DEPTH}, {rounds} rounds",
        device.info().name
    );
    println!(
        "links in order:  {:.0}",
        median(rates.iter().map(|rate| rate[0]).collect())
    );
    println!(
        "links shuffled:  {:.0}",
        median(rates.iter().map(|rate| rate[1]).collect())
    );
    println!(
        "shuffled / in order: {:.3}",
        median(rates.iter().map(|rate| rate[1] / rate[0]).collect())
    );
    let orders = [sequential.in_order(), shuffled.in_order()];
    assert!(
        orders[0] > 0.99 && orders[1] < 0.1,
        "they stayed what they were: {orders:?}"
    );
}
