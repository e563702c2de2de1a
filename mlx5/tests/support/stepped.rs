//! A requester in another process that is single-stepped through a doorbell, and the ends of its
//! connections, for several tests.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::time::Duration;

use mlx5::*;

use super::addresses::{describe, parse};
use super::fabric::options;
use copyrpc_testing::limits::{scale_of, watchdog};
use copyrpc_testing::tracee::{Helper, Tracee, again_and_again, hello, marker};

const DIR: &str = "MLX5_TEST_STEPPED_DIR";
const KIND: &str = "MLX5_TEST_STEPPED_KIND";
/// Number of receives that an end keeps posted.
pub(crate) const RECEIVES: usize = 15;
/// Bytes of a receive's buffer: a GRH and a payload.
const SLOT: usize = 128;
/// Bytes of a message.
pub(crate) const MESSAGE: usize = 64;
/// Bytes of a [`Kind::Write`].
pub(crate) const WRITE: usize = 4096;
const QKEY: u32 = 0x1234;
/// Number of places in the target's region for the WRITEs of one queue pair. Queue pair `name` uses
/// the places from `name * PLACES` on.
const PLACES: u32 = 32;

/// Begins a test, which stops and kills processes of its own. It may take `factor` times 4 minutes;
/// the limit only ends a hang.
pub(crate) fn begin(factor: u32) {
    watchdog(Duration::from_secs(240) * factor * scale_of("MLX5_TEST_SCALE"));
}

/// The operation that the stepped process sends, and the receive of its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// WRITE with immediate, through a shared receive queue.
    WriteImm,
    /// SEND, through a shared receive queue.
    Send,
    /// WRITE with immediate, through the queue pair's own receive queue.
    Own,
    /// Datagrams, through a shared receive queue.
    Datagram,
    /// WRITEs of [`WRITE`] bytes.
    Write,
    /// WRITEs of every length: message `imm` has [`length`] bytes, and ends at an aligned place if
    /// `imm` is even.
    Length,
}

const KINDS: [Kind; 6] = [
    Kind::WriteImm,
    Kind::Send,
    Kind::Own,
    Kind::Datagram,
    Kind::Write,
    Kind::Length,
];

/// Returns the number of bytes of message `imm` of [`Kind::Length`], and the offset of its end.
pub(crate) fn length(imm: u32) -> (usize, usize) {
    (1 + imm as usize / 2, 256 + if imm % 2 == 0 { 0 } else { 3 })
}

/// Returns the content of message `imm`.
pub(crate) fn content(imm: u32) -> [u8; MESSAGE] {
    core::array::from_fn(|i| {
        (imm.wrapping_mul(0x9e37_79b1) >> 24) as u8 ^ (i as u8).wrapping_mul(29) ^ imm as u8
    })
}

/// An end, with one queue pair for each peer.
pub(crate) struct End {
    pub(crate) qps: HashMap<u32, RcQp>,
    pub(crate) ud: Option<UdQp>,
    send_cq: Cq,
    recv_cq: MonoCq<u32>,
    pub(crate) srq: Srq,
    /// Buffers of receives.
    slots: Mr,
    /// Target of WRITEs, source of SENDs.
    pub(crate) mr: Mr,
    /// QPNs of the queue pairs that have, or had, a receive queue of their own.
    own: HashSet<u32>,
    /// Slots of completed receives that are not posted again.
    free: Vec<u64>,
    pub(crate) pd: Pd,
    pub(crate) device: Device,
}

/// A message that arrived.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    /// Name of the queue pair; 0 if it was destroyed.
    pub(crate) name: u32,
    pub(crate) imm: u32,
    /// Whether the message arrived; `false` if its receive was flushed.
    pub(crate) is_ok: bool,
}

impl End {
    pub(crate) fn open(dir: &Path) -> Self {
        // The operations are executed in the doorbell in every mode of the tests, because the
        // process is stepped through the doorbell.
        let options = SoftOptions {
            timing: Timing::Immediate,
            ..options(dir)
        };
        let device = Device::open(DeviceSpec::Soft(options)).unwrap();
        let pd = device.alloc_pd().unwrap();
        let (send_cq, recv_cq) = (
            device.create_cq(64).unwrap(),
            device.create_mono_cq(64).unwrap(),
        );
        let srq = pd.create_srq(RECEIVES as u32, 1).unwrap();
        let slots = pd.alloc(SLOT * RECEIVES, Access::LOCAL_WRITE).unwrap();
        let mr = pd
            .alloc(64 << 10, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
            .unwrap();
        let qps = HashMap::new();
        let own = HashSet::new();
        let free = (0..RECEIVES as u64).collect();
        let mut end = Self {
            qps,
            ud: None,
            send_cq,
            recv_cq,
            srq,
            slots,
            mr,
            own,
            free,
            pd,
            device,
        };
        end.refill();
        end
    }

    /// Posts the receives that have completed.
    pub(crate) fn refill(&mut self) {
        for slot in self.free.drain(..) {
            let sge = self.slots.sge(slot as usize * SLOT, SLOT as u32).unwrap();
            self.srq.post(&[sge], slot).unwrap();
        }
        self.srq.ring();
    }

    fn describe(&self, address: &QpAddress) -> String {
        describe(address, self.mr.addr(), self.mr.rkey())
    }

    /// Makes a queue pair for the peer called `name`. Returns its address.
    pub(crate) fn add(&mut self, name: u32, kind: Kind) -> QpAddress {
        let config = QpConfig {
            max_send_wr: 32,
            max_inline_data: 64,
            ..QpConfig::default()
        };
        if kind == Kind::Datagram {
            let mut ud = self
                .pd
                .create_ud_qp(&self.send_cq, &self.recv_cq, &self.srq, &config)
                .unwrap();
            ud.activate(QKEY).unwrap();
            self.recv_cq.register(ud.qpn(), name);
            let to = ud.destination();
            self.ud = Some(ud);
            return QpAddress::soft(to.vector().rlid, to.qpn(), 0);
        }
        let own = ReceiveSource::Own {
            depth: 8,
            max_sge: 0,
        };
        let source = if matches!(kind, Kind::Own | Kind::Write | Kind::Length) {
            own
        } else {
            ReceiveSource::Shared(&self.srq)
        };
        let mut qp = self
            .pd
            .create_qp(&self.send_cq, &self.recv_cq, source, &config)
            .unwrap();
        self.recv_cq.register(qp.qpn(), name);
        if kind == Kind::Own {
            self.own.insert(qp.qpn());
            qp.initialize().unwrap();
            (0..8).for_each(|user| qp.post_receive(&[], user).unwrap());
            qp.ring_receives();
        }
        let address = qp.address();
        self.qps.insert(name, qp);
        address
    }

    /// Destroys queue pair `name`, if it exists.
    pub(crate) fn remove(&mut self, name: u32) {
        let qpn = self.qps.remove(&name).map(|qp| qp.qpn());
        if let Some(qpn) = qpn.or_else(|| self.ud.take().map(|ud| ud.qpn())) {
            self.recv_cq.unregister(qpn);
        }
    }

    /// Connects queue pair `name`. A message that finds no receive fails at once.
    pub(crate) fn connect(&mut self, name: u32, peer: &QpAddress) {
        let options = ConnectOptions {
            rnr_retry: 0,
            ..ConnectOptions::default()
        };
        self.qps
            .get_mut(&name)
            .unwrap()
            .connect(peer, &options)
            .unwrap();
    }

    /// Posts message `imm` to the peer whose region is `peer`.
    pub(crate) fn post(&mut self, name: u32, kind: Kind, peer: (u64, u32), imm: u32) {
        let bytes = content(imm);
        let place = MESSAGE * (imm % PLACES) as usize;
        let qp = self.qps.get_mut(&name).unwrap();
        match kind {
            Kind::WriteImm | Kind::Own => {
                let addr = peer.0 + (MESSAGE as u64) * u64::from(name * PLACES + imm % PLACES);
                qp.post(
                    &WriteImm {
                        addr,
                        rkey: peer.1,
                        imm,
                        payload: Inline(&bytes[..28]),
                    },
                    Signal::Always,
                    0,
                )
            }
            Kind::Send => {
                self.mr.write(32 << 10 | place, &bytes).unwrap();
                let payload = self.mr.sge(32 << 10 | place, MESSAGE as u32).unwrap();
                qp.post(&SendImm { imm, payload }, Signal::Always, 0)
            }
            Kind::Write => {
                let payload = self.mr.sge(0, WRITE as u32).unwrap();
                qp.post(
                    &Write {
                        addr: peer.0,
                        rkey: peer.1,
                        payload,
                    },
                    Signal::Always,
                    0,
                )
            }
            Kind::Length => {
                let (len, end) = length(imm);
                let payload = self.mr.sge(0, len as u32).unwrap();
                qp.post(
                    &Write {
                        addr: peer.0 + (end - len) as u64,
                        rkey: peer.1,
                        payload,
                    },
                    Signal::Always,
                    0,
                )
            }
            Kind::Datagram => unreachable!("has a queue pair of its own"),
        }
        .unwrap();
    }

    pub(crate) fn ring(&mut self, name: u32) {
        self.qps.get_mut(&name).unwrap().ring();
    }

    /// Takes send completions, all of which must be successes.
    pub(crate) fn reap(&mut self) {
        let Self {
            send_cq, qps, ud, ..
        } = self;
        send_cq.poll(64, |cqe| {
            cqe.result().unwrap();
            match qps.values_mut().find(|qp| qp.qpn() == cqe.qpn()) {
                Some(qp) => qp.complete(&cqe).unwrap(),
                None => ud.as_mut().unwrap().complete(&cqe).unwrap(),
            };
        });
    }

    /// Returns the messages that have arrived, after checking their content. Posts their receives
    /// again if `refill`.
    pub(crate) fn arrived(&mut self, refill: bool) -> Vec<Arrival> {
        let Self {
            recv_cq,
            srq,
            slots,
            mr,
            qps,
            own,
            free,
            ..
        } = self;
        let mut got = vec![];
        recv_cq.poll(64, |name, cqe| {
            let name = name.copied().unwrap_or(0);
            let is_ok = cqe.result().is_ok();
            got.push(Arrival {
                name,
                imm: if is_ok { cqe.imm() } else { 0 },
                is_ok,
            });
            let slot = if own.contains(&cqe.qpn()) {
                // A completion without a queue pair in `qps` belongs to a destroyed one.
                qps.get_mut(&name)
                    .map(|qp| qp.complete_receive(&cqe).unwrap());
                0
            } else {
                let slot = srq.complete_receive(&cqe).unwrap();
                free.push(slot);
                slot
            };
            if !is_ok {
                return;
            }
            let mut bytes = [0; MESSAGE];
            let (at, len) = match cqe.opcode() {
                Some(CqeOpcode::ResponderSendImm) => {
                    let grh = if cqe.byte_count() as usize > MESSAGE {
                        GRH_BYTES
                    } else {
                        0
                    };
                    slots.read(slot as usize * SLOT + grh, &mut bytes).unwrap();
                    (0, MESSAGE)
                }
                _ => {
                    let place = MESSAGE * (name * PLACES + cqe.imm() % PLACES) as usize;
                    mr.read(place, &mut bytes).unwrap();
                    (place, 28)
                }
            };
            assert_eq!(
                bytes[..len],
                content(cqe.imm())[..len],
                "message {} at {at} was damaged",
                cqe.imm()
            );
        });
        if refill {
            self.refill();
        }
        got
    }

    /// Destroys all queue pairs, then the shared receive queue, and makes another. The new queue
    /// gets the place of the old queue if this place is free.
    pub(crate) fn renew_srq(&mut self) {
        let names: Vec<u32> = self.qps.keys().copied().collect();
        names.into_iter().for_each(|name| self.remove(name));
        while self.recv_cq.poll(64, |_, _| ()) > 0 {}
        let between = self.pd.create_srq(1, 0).unwrap();
        drop(core::mem::replace(&mut self.srq, between));
        self.srq = self.pd.create_srq(RECEIVES as u32, 1).unwrap();
        self.free = (0..RECEIVES as u64).collect();
        self.refill();
    }

    /// Polls as often as the device needs to check for dead peers, without taking completions.
    pub(crate) fn sweep(&self) {
        for _ in 0..3000 {
            self.device.progress();
        }
    }
}

// ---- the process that is stepped ----

/// Runs the body of the test called `stepped_process`, which is not a test of its own.
pub(crate) fn run_process() {
    let Some(dir) = std::env::var_os(DIR) else {
        return;
    };
    let kind = KINDS[std::env::var(KIND).unwrap().parse::<usize>().unwrap()];
    again_and_again(|| send(Path::new(&dir), kind));
}

/// Sends messages. The first line is the target, and each other line a number of messages.
fn send(dir: &Path, kind: Kind) {
    let mut end = End::open(dir);
    end.mr.write(0, &[0xee; WRITE]).unwrap();
    let address = end.add(
        0,
        if kind == Kind::Own {
            Kind::WriteImm
        } else {
            kind
        },
    );
    hello(&end.describe(&address));
    let mut lines = std::io::stdin().lines().map(Result::unwrap);
    let (peer, addr, rkey) = parse(&lines.next().unwrap());
    let to = Destination::new(AddressVector::local(peer.lid, 0), peer.qpn, QKEY);
    if kind != Kind::Datagram {
        end.connect(0, &peer);
    }
    let mut next = 0;
    for line in lines {
        let first = next;
        next += line.parse::<u32>().unwrap();
        for imm in first..next {
            match &mut end.ud {
                Some(ud) => ud
                    .post(
                        &UdSendImm {
                            to: &to,
                            imm,
                            payload: Inline(&content(imm)),
                        },
                        Signal::Always,
                        0,
                    )
                    .unwrap(),
                None => end.post(0, kind, (addr, rkey), imm),
            }
        }
        marker();
        match &mut end.ud {
            Some(ud) => ud.ring(),
            None => end.ring(0),
        }
        marker();
        if kind != Kind::Write {
            end.reap();
        } else {
            // The target of the operation may be dead.
            end.send_cq.poll(64, |cqe| {
                assert!(end.qps.get_mut(&0).unwrap().complete(&cqe).is_some())
            });
        }
    }
}

// ---- its tracer ----

/// The process, and the address of its queue pair.
pub(crate) struct Stepped {
    tracee: Tracee,
    pub(crate) address: QpAddress,
}

impl core::ops::Deref for Stepped {
    type Target = Tracee;

    fn deref(&self) -> &Tracee {
        &self.tracee
    }
}

impl Stepped {
    /// Starts the process that forks processes which send as `kind` requires.
    pub(crate) fn helper(dir: &Path, kind: Kind) -> Helper {
        let number = KINDS.iter().position(|&k| k == kind).unwrap().to_string();
        Helper::start(&[(DIR, dir.as_os_str()), (KIND, number.as_ref())])
    }

    /// Forks the process, connects it to queue pair `name` of `target`, and attaches to it. Its
    /// WRITEs go to `region`.
    pub(crate) fn start(
        helper: Helper,
        target: &mut End,
        name: u32,
        kind: Kind,
        region: (u64, u32),
    ) -> Self {
        let (mut tracee, words) = helper.fork();
        let (address, ..) = parse(&words);
        let own = target.add(name, kind);
        if kind != Kind::Datagram {
            target.connect(name, &address);
        }
        tracee.tell(&describe(&own, region.0, region.1));
        tracee.attach();
        let mut stepped = Self { tracee, address };
        if kind == Kind::Datagram {
            // The first datagram makes a lane, which takes many instructions.
            stepped.go(1);
            stepped.finish();
            stepped.resume();
        }
        stepped
    }

    /// Makes the process post `n` messages, and stop before the doorbell.
    pub(crate) fn go(&mut self, n: u32) {
        self.tracee.stand(&n.to_string());
    }

    /// Counts the instructions of a doorbell with `n` messages, and continues it.
    pub(crate) fn count(&mut self, n: u32) -> usize {
        self.go(n);
        let instructions = self.tracee.count();
        self.resume();
        instructions
    }

    pub(crate) fn kill(self) -> Helper {
        self.tracee.kill()
    }
}
