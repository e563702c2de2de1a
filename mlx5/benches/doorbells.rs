//! Compares the ways to announce new WQEs to the device, and the ways in which the device reports
//! arrivals. WRITEs with immediate of 28 bytes, each in one WQEBB, go from a queue pair to another
//! of the same device, in one thread. A doorbell announces one or four WQEs. It stores 8 bytes, the
//! last WQE through BlueFlame, or all WQEs through BlueFlame (`BlueflameBatch`, which is unproven
//! on a NIC). The completion queue has plain CQEs, or compressed CQEs if the device has them. All
//! combinations are measured in turn. Then messages are sent one at a time, and three medians are
//! printed: the time to write the WQE, the time of its doorbell, and the time from the start of the
//! post until the message has arrived.
//!
//! `cargo bench -p mlx5 --bench doorbells -- [DEVICE] [ROUNDS]` prints the messages per second of
//! each combination on DEVICE (`mlx5_0`, or the default `soft`), as the median of ROUNDS (11)
//! rounds, and the ratio of that rate to the rate of the first combination. `scripts/instructions`
//! counts the instructions of a doorbell of each kind. Without `--bench`, as `cargo test` runs it,
//! or with `--quick`, the program runs one short round.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a benchmark")]

use std::time::{Duration, Instant};

use mlx5::{
    Access, ConnectOptions, Cq, CqConfig, CreateError, Device, Inline, Mr, Pd, QpConfig, RcQp,
    Signal, Srq, WriteImm,
};

const IN_FLIGHT: usize = 128;
const PAYLOAD: [u8; 28] = [0x5a; 28];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bell {
    EightBytes,
    BlueFlame,
    Batch,
}

struct Pair {
    sender: RcQp,
    _receiver: RcQp,
    send_cq: Cq,
    recv_cq: Cq,
    srq: Srq,
    target: Mr,
    sent: u32,
    received: u32,
    _pd: Pd,
}

impl Pair {
    fn new(device: &Device, compression: bool) -> Result<Self, CreateError> {
        let pd = device.alloc_pd()?;
        let send_cq = device.create_cq(1024)?;
        let recv_cq = device.create_cq(CqConfig {
            compression,
            ..CqConfig::from(1024)
        })?;
        let (srq, own) = (pd.create_srq(511, 0)?, pd.create_srq(1, 0)?);
        let config = QpConfig {
            max_send_wr: 1024,
            ..QpConfig::default()
        };
        let mut sender = pd.create_qp(&send_cq, &send_cq, &own, &config)?;
        let mut receiver = pd.create_qp(&recv_cq, &recv_cq, &srq, &config)?;
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
            sent: 0,
            received: 0,
            _pd: pd,
        };
        pair.post_receives();
        Ok(pair)
    }

    fn post_receives(&mut self) {
        while self.srq.free() > 0 {
            self.srq.post(&[], 0).unwrap();
        }
        self.srq.ring();
    }

    fn send(&mut self, bell: Bell, per_doorbell: u32) {
        let (addr, rkey) = (self.target.addr(), self.target.rkey());
        while (self.sent - self.received) as usize + per_doorbell as usize <= IN_FLIGHT {
            let messages = self.sent..self.sent + per_doorbell;
            let operation = |imm| WriteImm {
                addr,
                rkey,
                imm,
                payload: Inline(&PAYLOAD),
            };
            self.sent = messages.end;
            if bell == Bell::Batch {
                let mut batch = self.sender.blueflame_batch();
                messages.for_each(|imm| batch.post(&operation(imm), Signal::Reclaim, 0).unwrap());
                batch.finish();
                continue;
            }
            messages.for_each(|imm| {
                self.sender
                    .post(&operation(imm), Signal::Reclaim, 0)
                    .unwrap()
            });
            if bell == Bell::BlueFlame {
                self.sender.ring_doorbell_bf()
            } else {
                self.sender.ring_doorbell()
            }
        }
    }

    /// Takes the messages that have arrived. Each must arrive once, and in order.
    fn receive(&mut self) {
        let Self {
            sender,
            send_cq,
            recv_cq,
            srq,
            received,
            ..
        } = self;
        recv_cq.poll(IN_FLIGHT, |cqe| {
            cqe.result().unwrap();
            assert_eq!(
                (cqe.imm(), cqe.byte_count()),
                (*received, PAYLOAD.len() as u32)
            );
            assert!(srq.complete_receive(&cqe).is_some());
            *received += 1;
        });
        send_cq.poll(64, |cqe| {
            cqe.result().unwrap();
            sender.complete(&cqe);
        });
        self.post_receives();
    }

    /// Returns messages per second.
    fn rate(&mut self, bell: Bell, per_doorbell: u32, duration: Duration) -> f64 {
        let (start, first) = (Instant::now(), self.received);
        while start.elapsed() < duration {
            for _ in 0..16 {
                self.send(bell, per_doorbell);
                self.receive();
            }
        }
        f64::from(self.received - first) / start.elapsed().as_secs_f64()
    }
}

impl Pair {
    /// Sends one message after the other. Returns three medians in ns: the time to write a WQE, the
    /// time of its doorbell, and the time from the start of the post until the message has arrived.
    fn times(&mut self, bell: Bell, messages: u32) -> [f64; 3] {
        while self.received < self.sent {
            self.receive();
        }
        let (addr, rkey) = (self.target.addr(), self.target.rkey());
        let mut times = [Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..messages {
            let operation = WriteImm {
                addr,
                rkey,
                imm: self.sent,
                payload: Inline(&PAYLOAD),
            };
            let start = Instant::now();
            self.sender.post(&operation, Signal::Reclaim, 0).unwrap();
            let written = start.elapsed();
            if bell == Bell::BlueFlame {
                self.sender.ring_doorbell_bf()
            } else {
                self.sender.ring_doorbell()
            }
            let rung = start.elapsed();
            self.sent += 1;
            while self.received < self.sent {
                self.receive();
            }
            let each = [written, rung - written, start.elapsed()];
            times
                .iter_mut()
                .zip(each)
                .for_each(|(times, time)| times.push(time.as_nanos() as f64));
        }
        times.map(median)
    }
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

fn main() -> Result<(), CreateError> {
    let (options, args): (Vec<String>, Vec<String>) = std::env::args()
        .skip(1)
        .partition(|arg| arg.starts_with('-'));
    let has = |option: &str| options.iter().any(|given| given == option);
    let is_short = !has("--bench") || has("--quick");
    let (rounds, ms) = if is_short {
        (1, 5)
    } else {
        (args.get(1).map_or(11, |n| n.parse().unwrap()), 100)
    };
    let device = Device::open(args.first().map_or("soft", String::as_str)).unwrap();
    println!(
        "messages per second on {}, {IN_FLIGHT} under way, {rounds} rounds",
        device.info().name
    );
    for (name, compression) in [("plain", false), ("compressed", true)] {
        let mut pair = match Pair::new(&device, compression) {
            Ok(pair) => pair,
            Err(CreateError::Unsupported { what }) => {
                println!("this device has no {what}");
                continue;
            }
            Err(error) => return Err(error),
        };
        let ways = [Bell::EightBytes, Bell::BlueFlame, Bell::Batch]
            .map(|bell| [1, 4].map(|per_doorbell| (bell, per_doorbell)));
        let ways: Vec<_> = ways.concat();
        let rates: Vec<Vec<f64>> = (0..rounds)
            .map(|_| {
                ways.iter()
                    .map(|&(bell, n)| pair.rate(bell, n, Duration::from_millis(ms)))
                    .collect()
            })
            .collect();
        for (way, (bell, per_doorbell)) in ways.iter().enumerate() {
            let rate = median(rates.iter().map(|round| round[way]).collect());
            let ratio = median(rates.iter().map(|round| round[way] / round[0]).collect());
            println!(
                "{name} CQEs, {bell:?}, {per_doorbell} to a doorbell: {rate:.0} ({ratio:.2} of the first)"
            );
        }
        for bell in [Bell::EightBytes, Bell::BlueFlame] {
            let [written, rung, arrived] = pair.times(bell, if is_short { 100 } else { 100_000 });
            println!(
                "{name} CQEs, {bell:?}, one message: WQE {written:.0} ns, doorbell {rung:.0} ns, arrived after {arrived:.0} ns"
            );
        }
    }
    Ok(())
}
