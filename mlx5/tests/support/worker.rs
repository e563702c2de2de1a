//! A process of the all-to-all test: 64 queue pairs to each peer, with an operation in flight on
//! each at all times, and every result checked. It follows the lines of its standard input, and
//! answers each with a line.

use std::io::Write as _;
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use mlx5::*;

use super::fabric::options;
use super::random::Random;

/// Number of processes.
pub(crate) const PROCESSES: usize = 4;
/// Number of queue pairs between two processes.
pub(crate) const QPS: usize = 64;
/// Number of receives of the shared receive queue.
pub(crate) const DEPTH: usize = 512;
/// Size of a queue pair's part of its peer's region: data, and a word for atomics.
const CELL: usize = 512;
const WORD: usize = 256;
/// The maximum number of bytes of an ordinary message.
const MESSAGE: usize = 256;
/// Bytes of a long message, and of a receive's buffer. The copy takes so long that the sender is
/// likely to be killed in it.
const LONG: usize = 32 << 10;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Op {
    WriteImm,
    /// Reads back the bytes of the WRITE before it.
    Read,
    Send,
    SendLong,
    CompareSwap,
    FetchAdd,
    /// Adds to the one word that all processes add to.
    FetchAddShared,
    /// Posted while the peer returns no receives.
    Flood,
}

struct Connection {
    qp: RcQp,
    peer: usize,
    number: usize,
    /// Address of its cell at the peer, and the peer's shared word.
    remote: u64,
    shared: u64,
    rkey: u32,
    pending: Option<Op>,
    outstanding: usize,
    /// The value written last.
    written: usize,
    /// Numbers of messages that take a receive, sent and received.
    sent: u32,
    received: u32,
    /// Expected value of the atomics word in this queue pair's cell at the peer.
    word: u64,
    last_shared: Option<u64>,
    is_dead: bool,
}

struct Worker {
    me: usize,
    connections: Vec<Connection>,
    send_cq: Cq,
    recv_cq: MonoCq<(usize, usize)>,
    srq: Srq,
    slots: Mr,
    region: Mr,
    local: Mr,
    /// The memory of the long messages.
    long: Mr,
    random: Random,
    free: Vec<u64>,
    holds: bool,
    held: usize,
    runs: bool,
    /// Counts for each peer: operations completed, messages sent and received, queue pairs that
    /// ended.
    completed: [u64; PROCESSES],
    pd: Pd,
}

/// Makes bytes that name their owner. The last 8 are the checksum of the others.
fn message(me: usize, number: usize, sequence: u32) -> Vec<u8> {
    let mut random = Random::new(u64::from(sequence) << 32 | (me * QPS + number) as u64);
    let len = 32 + random.below((MESSAGE - 40) as u32) as usize;
    let mut bytes: Vec<u8> = [me as u32, number as u32, sequence]
        .iter()
        .flat_map(|n| n.to_le_bytes())
        .collect();
    bytes.extend((bytes.len()..len).map(|_| random.below(256) as u8));
    bytes.extend(checksum(&bytes).to_le_bytes());
    bytes
}

/// Returns byte `at` of the long messages of a process.
fn long_byte(process: usize, at: usize) -> u8 {
    (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ (process as u8) << 6
}

fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, &byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn check(bytes: &[u8], from: usize, number: usize, sequence: u32) {
    let (body, sum) = bytes.split_last_chunk::<8>().unwrap();
    let head: Vec<u8> = [from as u32, number as u32, sequence]
        .iter()
        .flat_map(|n| n.to_le_bytes())
        .collect();
    assert!(
        body[..12] == head && checksum(body) == u64::from_le_bytes(*sum),
        "message {sequence} of queue pair {number} of process {from} was damaged"
    );
}

fn answer(line: &str) {
    println!("\n{line}");
    std::io::stdout().flush().unwrap();
}

/// Runs until its input ends.
pub(crate) fn run(dir: &Path, me: usize) {
    let (tx, rx) = channel();
    std::thread::spawn(move || {
        std::io::stdin()
            .lines()
            .map_while(Result::ok)
            .try_for_each(|line| tx.send(line))
    });
    let mut worker = Worker::open(dir, me);
    answer("ready");
    while worker.serve(&rx) {
        if worker.progress() == 0 {
            std::thread::yield_now();
        }
    }
}

impl Worker {
    fn open(dir: &Path, me: usize) -> Self {
        let device = Device::open(DeviceSpec::Soft(options(dir))).unwrap();
        let pd = device.alloc_pd().unwrap();
        let (send_cq, recv_cq) = (
            device.create_cq(4096).unwrap(),
            device.create_mono_cq(4096).unwrap(),
        );
        let srq = pd.create_srq(DEPTH as u32, 1).unwrap();
        // The queue holds one less than a power of two, and at least the requested number.
        let slots = pd.alloc(LONG * srq.depth(), Access::LOCAL_WRITE).unwrap();
        let long = pd.alloc(LONG, Access::empty()).unwrap();
        long.write(
            0,
            &(0..LONG).map(|at| long_byte(me, at)).collect::<Vec<_>>(),
        )
        .unwrap();
        let access = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC;
        let region = pd.alloc(PROCESSES * QPS * CELL + 8, access).unwrap();
        let local = pd
            .alloc(PROCESSES * QPS * CELL, Access::LOCAL_WRITE)
            .unwrap();
        let free = (0..srq.depth() as u64).collect();
        let random = Random::new(u64::from(std::process::id()));
        let (connections, completed) = (vec![], [0; PROCESSES]);
        let holds = false;
        let held = 0;
        let runs = true;
        let mut worker = Self {
            me,
            connections,
            send_cq,
            recv_cq,
            srq,
            slots,
            region,
            local,
            long,
            random,
            free,
            holds,
            held,
            runs,
            completed,
            pd,
        };
        worker.refill();
        worker
    }

    fn refill(&mut self) {
        for slot in self.free.drain(..) {
            let sge = self.slots.sge(slot as usize * LONG, LONG as u32).unwrap();
            self.srq.post(&[sge], slot).unwrap();
        }
        self.srq.ring();
    }

    /// Executes a command. Returns `false` at the end of the input.
    fn serve(&mut self, rx: &Receiver<String>) -> bool {
        let line = match rx.try_recv() {
            Ok(line) => line,
            Err(std::sync::mpsc::TryRecvError::Empty) => return true,
            Err(_) => return false,
        };
        let mut words = line.split_whitespace();
        let verb = words.next().unwrap();
        let n: Vec<u64> = words.map(|word| word.parse().unwrap()).collect();
        let peer = n.first().map_or(0, |&n| n as usize);
        match verb {
            "create" => self.create(peer),
            "connect" => self.connect(peer, &n[1..]),
            "dead" => self.reap(peer),
            "status" => answer(&format!("status {}", join(&self.completed))),
            "finish" => {
                self.runs = false;
                while self.connections.iter().any(|c| c.outstanding > 0) {
                    self.progress();
                }
                answer("finished");
            }
            "totals" => {
                let total = |count: fn(&Connection) -> u32| {
                    let by_peer = (0..PROCESSES).map(|p| {
                        self.connections
                            .iter()
                            .filter(|c| c.peer == p)
                            .map(count)
                            .sum::<u32>()
                            .into()
                    });
                    join(&by_peer.collect::<Vec<u64>>())
                };
                answer(&format!(
                    "totals {} {}",
                    total(|c| c.sent),
                    total(|c| c.received)
                ));
            }
            "hold" => {
                self.holds = true;
                answer("holds");
            }
            "flood" => self.flood(peer, n[1] as usize),
            "release" => {
                // Each poll covers only some lanes.
                let mut idle = 0;
                while idle < 1000 {
                    idle = if self.progress() > 0 { 0 } else { idle + 1 };
                }
                answer(&format!("released {} of {}", self.held, self.srq.depth()));
                (self.holds, self.held) = (false, 0);
                self.refill();
            }
            other => panic!("what is {other}?"),
        }
        true
    }

    /// Makes the queue pairs towards `peer`, and answers with their addresses.
    fn create(&mut self, peer: usize) {
        let at = peer * QPS * CELL;
        self.region.write(at, &vec![0; QPS * CELL]).unwrap();
        let mut address = None;
        for number in 0..QPS {
            let config = QpConfig {
                max_send_wr: 32,
                ..QpConfig::default()
            };
            let qp = self
                .pd
                .create_qp(&self.send_cq, &self.recv_cq, &self.srq, &config)
                .unwrap();
            self.recv_cq.register(qp.qpn(), (peer, number));
            address = Some(qp.address());
            self.connections.push(Connection {
                qp,
                peer,
                number,
                remote: 0,
                shared: 0,
                rkey: 0,
                pending: None,
                outstanding: 0,
                written: 0,
                sent: 0,
                received: 0,
                word: 0,
                last_shared: None,
                is_dead: false,
            });
        }
        let address = address.unwrap();
        let qpns: Vec<u64> = self
            .connections
            .iter()
            .filter(|c| c.peer == peer)
            .map(|c| c.qp.qpn().into())
            .collect();
        answer(&format!(
            "created {} {} {} {} {}",
            address.lid,
            address.epoch,
            self.region.addr(),
            self.region.rkey(),
            join(&qpns)
        ));
    }

    /// Connects the queue pairs towards `peer` to the addresses in the peer's "created" line.
    fn connect(&mut self, peer: usize, n: &[u64]) {
        let lid = n[0] as u16;
        let epoch = n[1];
        let addr = n[2];
        let rkey = n[3] as u32;
        for i in 0..self.connections.len() {
            let connection = &mut self.connections[i];
            if connection.peer != peer {
                continue;
            }
            let number = connection.number;
            let address = QpAddress::soft(lid, n[4 + number] as u32, epoch);
            connection.remote = addr + ((self.me * QPS + number) * CELL) as u64;
            connection.shared = addr + (PROCESSES * QPS * CELL) as u64;
            connection.rkey = rkey;
            connection
                .qp
                .connect(&address, &ConnectOptions::default())
                .unwrap();
            self.next(i);
        }
        answer("connected");
    }

    /// Destroys the queue pairs to the killed `peer`, after each has reported an error.
    fn reap(&mut self, peer: usize) {
        let end = Instant::now() + Duration::from_secs(20);
        while self
            .connections
            .iter()
            .any(|c| c.peer == peer && !c.is_dead)
        {
            self.progress();
            assert!(Instant::now() < end, "a killed process was not noticed");
        }
        let of_peer = self.connections.iter().filter(|c| c.peer == peer);
        let errors = of_peer
            .map(|c| self.recv_cq.unregister(c.qp.qpn()).unwrap())
            .count();
        self.connections.retain(|c| c.peer != peer);
        answer(&format!("reaped {errors}"));
    }

    /// Sends `n` messages to `peer`, which posts no receive meanwhile. Returns the number received.
    fn flood(&mut self, peer: usize, n: usize) {
        let to: Vec<usize> = (0..self.connections.len())
            .filter(|&i| self.connections[i].peer == peer)
            .collect();
        for (i, _) in to.iter().cycle().zip(0..n) {
            self.post(*i, Op::Flood);
        }
        let end = Instant::now() + Duration::from_secs(3);
        while to.iter().any(|&i| self.connections[i].outstanding > 0) && Instant::now() < end {
            self.progress();
        }
        let missing: usize = to.iter().map(|&i| self.connections[i].outstanding).sum();
        answer(&format!("flooded {}", n - missing));
    }

    fn next(&mut self, i: usize) {
        if !self.runs {
            return;
        }
        let op = match self.connections[i].pending {
            Some(Op::WriteImm) => Op::Read,
            _ => [
                Op::WriteImm,
                Op::WriteImm,
                Op::Send,
                Op::SendLong,
                Op::SendLong,
                Op::CompareSwap,
                Op::FetchAdd,
                Op::FetchAddShared,
            ][self.random.below(8) as usize],
        };
        self.post(i, op);
    }

    fn post(&mut self, i: usize, op: Op) {
        let Self {
            connections,
            local,
            long,
            me,
            ..
        } = self;
        let Connection {
            qp,
            peer,
            number,
            remote: addr,
            shared,
            rkey,
            pending,
            outstanding,
            written,
            sent,
            word,
            ..
        } = &mut connections[i];
        let (addr, rkey) = (*addr, *rkey);
        let source = (*peer * QPS + *number) * CELL;
        let into = local.sge(source + MESSAGE, 8).unwrap();
        let mut fill = || {
            let bytes = message(*me, *number, *sent);
            local.write(source, &bytes).unwrap();
            *sent += 1;
            *written = bytes.len();
            local.sge(source, bytes.len() as u32).unwrap()
        };
        let signal = Signal::Always;
        match op {
            Op::WriteImm => {
                let payload = fill();
                qp.post(
                    &WriteImm {
                        addr,
                        rkey,
                        imm: *sent - 1,
                        payload,
                    },
                    signal,
                    0,
                )
            }
            Op::Send => {
                let payload = fill();
                qp.post(
                    &SendImm {
                        imm: *sent - 1,
                        payload,
                    },
                    signal,
                    0,
                )
            }
            Op::SendLong => {
                *sent += 1;
                qp.post(
                    &SendImm {
                        imm: *sent - 1,
                        payload: long.sge(0, LONG as u32).unwrap(),
                    },
                    signal,
                    0,
                )
            }
            Op::Flood => {
                let message = message(*me, *number, *sent);
                *sent += 1;
                qp.post(
                    &SendImm {
                        imm: *sent - 1,
                        payload: Inline(&message[..12]),
                    },
                    signal,
                    0,
                )
            }
            Op::Read => qp.post(
                &Read {
                    addr,
                    rkey,
                    into: local.sge(source + MESSAGE, *written as u32).unwrap(),
                },
                signal,
                0,
            ),
            Op::CompareSwap => qp.post(
                &CompareSwap {
                    addr: addr + WORD as u64,
                    rkey,
                    compare: *word,
                    swap: *word + 1,
                    into,
                },
                signal,
                0,
            ),
            Op::FetchAdd => qp.post(
                &FetchAdd {
                    addr: addr + WORD as u64,
                    rkey,
                    add: 1,
                    into,
                },
                signal,
                0,
            ),
            Op::FetchAddShared => qp.post(
                &FetchAdd {
                    addr: *shared,
                    rkey,
                    add: 1,
                    into,
                },
                signal,
                0,
            ),
        }
        .unwrap();
        (*pending, *outstanding) = (Some(op), *outstanding + 1);
        qp.ring();
    }

    /// Takes completions and arrivals, checks them, and posts the next operations. Returns their
    /// number.
    fn progress(&mut self) -> usize {
        self.arrivals() + self.completions()
    }

    fn completions(&mut self) -> usize {
        let mut done = vec![];
        let Self {
            send_cq,
            connections,
            ..
        } = self;
        let n = send_cq.poll(64, |cqe| {
            let i = connections
                .iter()
                .position(|c| c.qp.qpn() == cqe.qpn())
                .unwrap();
            connections[i].qp.complete(&cqe).unwrap();
            done.push((i, cqe.result().map_err(|e| e.syndrome)));
        });
        for (i, result) in done {
            let connection = &mut self.connections[i];
            connection.outstanding -= 1;
            match result {
                Ok(()) if !connection.is_dead => {
                    self.completed[connection.peer] += 1;
                    self.check_result(i);
                    if self.connections[i].pending != Some(Op::Flood) {
                        self.next(i);
                    }
                }
                Err(Syndrome::TransportRetryExceeded | Syndrome::WorkRequestFlushed) => {
                    if !core::mem::replace(&mut connection.is_dead, true) && connection.number == 0
                    {
                        // The test checks whether that process was killed.
                        answer(&format!("error {}", connection.peer));
                    }
                }
                other => panic!(
                    "{other:?} from process {} for {:?}",
                    connection.peer, connection.pending
                ),
            }
        }
        n
    }

    /// Checks the result of a completed operation.
    fn check_result(&mut self, i: usize) {
        let Self {
            connections, local, ..
        } = self;
        let connection = &mut connections[i];
        let source = (connection.peer * QPS + connection.number) * CELL;
        let read = |offset: usize, len: usize| {
            let mut bytes = vec![0; len];
            local.read(source + offset, &mut bytes).unwrap();
            bytes
        };
        let value = u64::from_le_bytes(read(MESSAGE, 8).try_into().unwrap());
        match connection.pending.unwrap() {
            Op::Read => {
                let (sent, got) = (
                    read(0, connection.written),
                    read(MESSAGE, connection.written),
                );
                assert_eq!(
                    sent, got,
                    "what was written to process {} was damaged",
                    connection.peer
                );
            }
            Op::CompareSwap | Op::FetchAdd => {
                assert_eq!(
                    value, connection.word,
                    "an atomic operation was lost or done twice"
                );
                connection.word += 1;
            }
            Op::FetchAddShared => {
                assert!(connection.last_shared < Some(value), "a counter went back");
                connection.last_shared = Some(value);
            }
            Op::WriteImm | Op::Send | Op::SendLong | Op::Flood => {}
        }
    }

    fn arrivals(&mut self) -> usize {
        let Self {
            recv_cq,
            srq,
            slots,
            connections,
            free,
            held,
            holds,
            ..
        } = self;
        let n = recv_cq.poll(64, |from, cqe| {
            let slot = srq.complete_receive(&cqe).unwrap();
            free.push(slot);
            *held += 1;
            // Messages of a killed process arrive when its queue pairs are destroyed.
            let Some(&(peer, number)) = from else { return };
            cqe.result().unwrap();
            let connection = connections
                .iter_mut()
                .find(|c| (c.peer, c.number) == (peer, number))
                .unwrap();
            assert_eq!(
                cqe.imm(),
                connection.received,
                "lost or duplicated, queue pair {number} of process {peer}"
            );
            connection.received += 1;
            let mut bytes = [0; MESSAGE];
            let (at, len) = (slot as usize * LONG, cqe.byte_count() as usize);
            match (cqe.opcode(), len) {
                (Some(CqeOpcode::ResponderSendImm), LONG) => {
                    for part in (0..LONG).step_by(LONG / 8) {
                        slots.read(at + part, &mut bytes).unwrap();
                        let mut expected = (part..).map(|at| long_byte(peer, at));
                        assert!(
                            bytes.iter().all(|&b| Some(b) == expected.next()),
                            "a long message of process {peer} was damaged"
                        );
                    }
                }
                (Some(CqeOpcode::ResponderSendImm), 13..) => {
                    slots.read(at, &mut bytes[..len]).unwrap();
                    check(&bytes[..len], peer, number, cqe.imm());
                }
                _ => {}
            }
        });
        if !*holds {
            *held = 0;
            self.refill();
        }
        n
    }
}

fn join(numbers: &[u64]) -> String {
    numbers
        .iter()
        .map(u64::to_string)
        .collect::<Vec<_>>()
        .join(" ")
}
