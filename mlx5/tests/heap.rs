//! A process whose queue pairs come and go, among others that stay, has no larger heap in the end.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::time::Duration;

use mlx5::{
    Access, Device, DeviceSpec, FabricSpec, LocalFabric, MonoCq, Pd, QpConfig, RcQp, ReceiveSource,
    SoftOptions,
};

#[allow(dead_code, reason = "numbers below others alone are used here")]
#[path = "support/random.rs"]
mod random;
use random::Random;

/// Maximum number of queue pairs.
const QPS: usize = 400;
/// Allowed growth, in KiB: above the usual growth of about 700 KiB, and below the growth of 3,000
/// KiB and more if the memory of destroyed queues is not reused.
const SLACK_KIB: usize = 1536;

/// Returns the private memory of this process, in KiB.
fn own_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// A queue pair with its owner's data.
struct Peer {
    qp: RcQp,
    _books: Vec<u8>,
}

struct Room {
    cq: MonoCq<usize>,
    pd: Pd,
    random: Random,
    peers: Vec<Peer>,
}

impl Room {
    fn new() -> Self {
        let soft = SoftOptions {
            fabric: FabricSpec::Local(LocalFabric::new()),
            arena_bytes: 16 << 20,
            ..SoftOptions::default()
        };
        let device = Device::open(DeviceSpec::Soft(soft)).unwrap();
        let pd = device.alloc_pd().unwrap();
        assert!(pd.alloc(64, Access::empty()).is_ok());
        Self {
            cq: device.create_mono_cq(1024).unwrap(),
            pd,
            random: Random::new(7),
            peers: Vec::new(),
        }
    }

    fn join(&mut self) {
        let config = QpConfig {
            max_send_wr: 128,
            max_inline_data: 60,
            scatter_to_cqe: false,
            lane_slots: 16,
        };
        let qp = self
            .pd
            .create_qp(
                &self.cq,
                &self.cq,
                ReceiveSource::Own {
                    depth: 1,
                    max_sge: 0,
                },
                &config,
            )
            .unwrap();
        self.cq.register(qp.qpn(), self.peers.len());
        let books = vec![1; self.random.below(2000) as usize];
        self.peers.push(Peer { qp, _books: books });
    }

    fn leave(&mut self) {
        let nth = self.random.below(self.peers.len() as u32) as usize;
        let peer = self.peers.swap_remove(nth);
        self.cq.unregister(peer.qp.qpn());
    }

    /// Replaces `count` visitors, some at a time.
    fn visit(&mut self, count: usize) {
        let mut left = count;
        while left > 0 {
            let some = left.min(1 + self.random.below(QPS as u32 / 8) as usize);
            (0..some).for_each(|_| self.leave());
            (0..some).for_each(|_| self.join());
            left -= some;
        }
    }
}

#[test]
fn queue_pairs_that_come_and_go_leave_the_heap_as_large_as_it_was() {
    copyrpc_testing::limits::watchdog(Duration::from_secs(300));
    let mut room = Room::new();
    (0..QPS).for_each(|_| room.join());
    let first = own_kib();
    room.visit(50 * QPS);
    let last = own_kib();
    assert!(
        last < first + SLACK_KIB,
        "KiB of {QPS} queue pairs: {first}, and {last} after {} others",
        50 * QPS
    );
}
