//! The exchange of `raw` by WRITE with immediate, through the software HCA.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use mlx5::{
    Access, ConnectOptions, Cq, Device, DeviceSpec, FabricSpec, Inline, MonoCq, Mr, Pd, QpAddress,
    QpConfig, QpState, RcQp, Sge, Signal, SoftOptions, Srq, WriteImm,
};

use crate::{Role, Wait};

const BYTES: usize = 64;
/// Number of places for messages in a region, larger than `WINDOW`.
const PLACES: u64 = 256;
const RECEIVES: u32 = 511;
const REPOST: usize = 16;
/// Maximum number of messages in flight (`WINDOW`), and the interval in messages at which the
/// receiver reports the received messages (`WINDOW_EVERY`).
const WINDOW: u64 = 96;
const WINDOW_EVERY: u64 = 16;
/// Interval at which the send CQ is polled, in messages. `Signal::Reclaim` signals once in a
/// quarter of the send queue, which holds this number of inline messages.
const SEND_CQ_EVERY: u64 = 128;

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Payload {
    Inline,
    Gathered,
}

pub(crate) struct End {
    wait: Wait,
    qp: RcQp,
    send_cq: Cq,
    recv: Recv,
    source: Mr,
    sent: u64,
    /// Address and rkey of the peer's region.
    to: (u64, u32),
    _pd: Pd,
    _device: Device,
}

struct Recv {
    cq: MonoCq<()>,
    srq: Srq,
    region: Mr,
    received: u64,
    looks_at_all: bool,
}

/// Returns the value of all words of message `n`.
fn word(n: u64) -> u64 {
    n.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn place(n: u64) -> u64 {
    n % PLACES * BYTES as u64
}

impl End {
    pub(crate) fn open(dir: &Path, wait: Wait) -> Self {
        let fabric = FabricSpec::Shared {
            dir: Some(dir.to_owned()),
        };
        let device = Device::open(DeviceSpec::Soft(SoftOptions {
            fabric,
            ..Default::default()
        }))
        .unwrap();
        let pd = device.alloc_pd().unwrap();
        let send_cq = device.create_cq(64).unwrap();
        let mut cq = device.create_mono_cq(RECEIVES + 1).unwrap();
        let mut srq = pd.create_srq(RECEIVES, 0).unwrap();
        let qp = pd
            .create_qp(
                &send_cq,
                &cq,
                &srq,
                &QpConfig {
                    max_send_wr: 1024,
                    ..QpConfig::default()
                },
            )
            .unwrap();
        cq.register(qp.qpn(), ());
        while srq.post(&[], 0).is_ok() {}
        srq.ring();
        let alloc = || {
            pd.alloc(
                PLACES as usize * BYTES,
                Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            )
            .unwrap()
        };
        let (region, source) = (alloc(), alloc());
        let recv = Recv {
            cq,
            srq,
            region,
            received: 0,
            looks_at_all: false,
        };
        Self {
            wait,
            qp,
            send_cq,
            recv,
            source,
            sent: 0,
            to: (0, 0),
            _pd: pd,
            _device: device,
        }
    }

    pub(crate) fn to_itself(dir: &Path, wait: Wait) -> Self {
        let mut end = Self::open(dir, wait);
        end.connect(&end.describe());
        end
    }

    /// Returns the argument of [`connect`](Self::connect).
    pub(crate) fn describe(&self) -> String {
        let at = self.qp.address();
        format!(
            "{} {} {} {} {}",
            at.lid,
            at.qpn,
            at.epoch,
            self.recv.region.addr(),
            self.recv.region.rkey()
        )
    }

    pub(crate) fn connect(&mut self, peer: &str) {
        let n: Vec<u64> = peer
            .split_whitespace()
            .map(|word| word.parse().unwrap())
            .collect();
        let peer = QpAddress::soft(n[0] as u16, n[1] as u32, n[2]);
        self.qp.connect(&peer, &ConnectOptions::default()).unwrap();
        self.to = (n[3], n[4] as u32);
    }

    /// Sets whether receivers check every byte of a payload, or only its first and last word.
    pub(crate) fn looks_at_all(&mut self, all: bool) {
        self.recv.looks_at_all = all;
    }

    #[inline(always)]
    fn post(&mut self, payload: Payload) {
        let n = self.sent;
        let addr = self.to.0 + place(n);
        let rkey = self.to.1;
        let imm = n as u32;
        let words = [word(n); BYTES / 8];
        // SAFETY: an array of integers may be read as bytes, and `words` outlives `bytes`.
        let bytes = unsafe { &*words.as_ptr().cast::<[u8; BYTES]>() };
        match payload {
            Payload::Inline => self.qp.post(
                &WriteImm {
                    addr,
                    rkey,
                    imm,
                    payload: Inline(bytes),
                },
                Signal::Reclaim,
                n,
            ),
            Payload::Gathered => {
                let offset = place(n) as usize;
                // SAFETY: the place is inside the region and 8-aligned. The device does not read it
                // now: the last message from this place has arrived, because there are more places
                // than messages in flight.
                unsafe {
                    self.source
                        .as_ptr()
                        .add(offset)
                        .cast::<[u64; BYTES / 8]>()
                        .write(words)
                };
                let payload: Sge = self.source.sge(offset, BYTES as u32).unwrap();
                self.qp.post(
                    &WriteImm {
                        addr,
                        rkey,
                        imm,
                        payload,
                    },
                    Signal::Reclaim,
                    n,
                )
            }
        }
        .unwrap();
        self.sent += 1;
        if self.sent % SEND_CQ_EVERY == 0 {
            self.reclaim();
        }
    }

    #[inline(never)]
    fn reclaim(&mut self) {
        let qp = &mut self.qp;
        self.send_cq.poll(16, |cqe| {
            assert!(cqe.result().is_ok());
            qp.complete(&cqe);
        });
        assert_eq!(self.qp.state(), QpState::ReadyToSend);
    }

    /// Makes round trips: the timer sends first, the helper answers.
    #[inline(never)]
    pub(crate) fn trips(&mut self, role: Role, trips: u64) {
        let wait = self.wait;
        for _ in 0..trips {
            if role == Role::Timer {
                self.post(Payload::Inline);
                self.qp.ring();
            }
            wait.until(|| self.recv.poll(1) == 1);
            if role == Role::Helper {
                self.post(Payload::Inline);
                self.qp.ring();
            }
        }
    }

    #[inline(never)]
    pub(crate) fn send_many(
        &mut self,
        messages: u64,
        payload: Payload,
        batch: u64,
        window: &AtomicU64,
    ) {
        match (payload, batch) {
            (Payload::Inline, 1) => self.send_batches(messages, Payload::Inline, 1, window),
            (Payload::Inline, _) => self.send_batches(messages, Payload::Inline, batch, window),
            (Payload::Gathered, 1) => self.send_batches(messages, Payload::Gathered, 1, window),
            (Payload::Gathered, _) => self.send_batches(messages, Payload::Gathered, batch, window),
        }
    }

    #[inline(always)]
    fn send_batches(&mut self, messages: u64, payload: Payload, batch: u64, window: &AtomicU64) {
        let wait = self.wait;
        let end = self.sent + messages;
        // All messages sent have arrived: both processes end their previous work before `Raw::meet`
        // returns.
        let mut arrived = self.sent;
        let offset = window.load(Ordering::Acquire).wrapping_sub(self.sent);
        while self.sent < end {
            wait.until(|| {
                if self.sent + batch - arrived <= WINDOW {
                    return true;
                }
                arrived = window.load(Ordering::Acquire).wrapping_sub(offset);
                false
            });
            for _ in 0..batch {
                self.post(payload);
            }
            self.qp.ring();
        }
    }

    #[inline(never)]
    pub(crate) fn receive_many(&mut self, messages: u64, window: &AtomicU64) {
        let end = self.recv.received + messages;
        let mut told = self.recv.received;
        while self.recv.received < end {
            let left = (end - self.recv.received).min(16) as usize;
            self.wait.until(|| self.recv.poll(left) > 0);
            if self.recv.received - told >= WINDOW_EVERY || self.recv.received == end {
                window.store(
                    window.load(Ordering::Relaxed) + self.recv.received - told,
                    Ordering::Release,
                );
                told = self.recv.received;
            }
        }
    }

    #[inline(never)]
    pub(crate) fn loopback(&mut self, messages: u64, batch: u64) {
        let end = self.sent + messages;
        while self.sent < end {
            for _ in 0..batch {
                self.post(Payload::Inline);
            }
            self.qp.ring();
            let sent = self.sent;
            while self.recv.received < sent {
                self.recv.poll(16);
            }
        }
    }
}

impl Recv {
    /// Takes up to `max` messages. Each message must be the next in the sequence.
    #[inline(always)]
    fn poll(&mut self, max: usize) -> usize {
        let Self {
            cq,
            srq,
            region,
            received,
            looks_at_all,
        } = self;
        let at = region.as_ptr();
        let taken = cq.poll(max, |_, cqe| {
            let n = *received;
            assert!(
                cqe.result().is_ok() && cqe.imm() == n as u32 && cqe.byte_count() == BYTES as u32
            );
            // SAFETY: the place is inside the region. Its message has arrived, and the peer does
            // not use the place again before this process has reported the message.
            let words = unsafe { at.add(place(n) as usize).cast::<[u64; BYTES / 8]>() };
            // SAFETY: the words are inside the place, which may be read as stated above.
            let (first, last) = unsafe {
                (
                    words.cast::<u64>().read_volatile(),
                    words.cast::<u64>().add(BYTES / 8 - 1).read_volatile(),
                )
            };
            assert!(first == word(n) && last == word(n));
            if *looks_at_all {
                // SAFETY: the words are inside the place, which may be read as stated above.
                assert_eq!(unsafe { words.read_volatile() }, [word(n); BYTES / 8]);
            }
            srq.complete_receive(&cqe).unwrap();
            *received += 1;
        });
        if srq.free() >= REPOST {
            for _ in 0..REPOST {
                srq.post(&[], 0).unwrap();
            }
            srq.ring();
        }
        taken
    }
}
