//! A node of a litmus test: a device, its words, and the queue pairs of the threads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use mlx5::*;

use super::statements::{LETTERS, NODES, Remote, Statement, Way, Word};

/// Number of copies of all words. A run with several uses them one after the other.
pub(crate) const COPIES: usize = 32;
/// Bytes of a word: a cache line.
const STRIDE: usize = 64;
const ALL: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC);

/// The end of a queue pair at the thread that posts, or at the other node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) thread: usize,
    pub(crate) from: usize,
    pub(crate) way: Way,
}

struct End {
    qp: RcQp,
    cq: Cq,
    /// Number of posted operations that were not polled.
    outstanding: usize,
}

/// The region of a node, for its peers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Region {
    addr: u64,
    rkey: u32,
}

pub(crate) struct Node {
    number: usize,
    ends: BTreeMap<Key, End>,
    peers: [Region; NODES],
    mr: Mr,
    pd: Pd,
    pub(crate) device: Device,
}

impl Node {
    pub(crate) fn new(number: usize, device: Device) -> Self {
        let pd = device.alloc_pd().unwrap();
        let mr = pd.alloc(COPIES * LETTERS * STRIDE, ALL).unwrap();
        Self {
            number,
            ends: BTreeMap::new(),
            peers: [Region::default(); NODES],
            mr,
            pd,
            device,
        }
    }

    pub(crate) fn region(&self) -> Region {
        Region {
            addr: self.mr.addr(),
            rkey: self.mr.rkey(),
        }
    }

    /// Makes its end of the queue pair `key`, and returns the address.
    pub(crate) fn end(&mut self, key: Key) -> QpAddress {
        let cq = self.device.create_cq(64).unwrap();
        let own = ReceiveSource::Own {
            depth: 1,
            max_sge: 1,
        };
        let qp = self
            .pd
            .create_qp(&cq, &cq, own, &QpConfig::default())
            .unwrap();
        let address = qp.address();
        let end = End {
            qp,
            cq,
            outstanding: 0,
        };
        self.ends.insert(key, end);
        address
    }

    pub(crate) fn connect(&mut self, key: Key, remote: &QpAddress) {
        let qp = &mut self.ends.get_mut(&key).unwrap().qp;
        qp.connect(remote, &ConnectOptions::default()).unwrap();
    }

    pub(crate) fn set_peers(&mut self, peers: [Region; NODES]) {
        self.peers = peers;
    }

    fn offset(copy: usize, word: Word) -> usize {
        (copy * LETTERS + word.index) * STRIDE
    }

    fn word(&self, copy: usize, word: Word) -> &AtomicU64 {
        // SAFETY: the region has a word at each offset, aligned to 64 bytes, for as long as the
        // node. Other processors and the devices access it by whole words.
        unsafe {
            AtomicU64::from_ptr(
                self.mr
                    .as_ptr()
                    .as_ptr()
                    .add(Self::offset(copy, word))
                    .cast(),
            )
        }
    }

    /// Loads as a processor of x86 does.
    pub(crate) fn load(&self, copy: usize, word: Word) -> u64 {
        self.word(copy, word).load(Ordering::Acquire)
    }

    pub(crate) fn store(&self, copy: usize, word: Word, value: u64) {
        self.word(copy, word).store(value, Ordering::Release);
    }

    /// Executes a statement of `thread`. Returns whether it is done: a poll or a wait may
    /// have to be repeated.
    pub(crate) fn execute(
        &mut self,
        (thread, copy): (usize, usize),
        statement: &Statement,
        registers: &[AtomicU64; LETTERS],
    ) -> bool {
        let from = self.number;
        match *statement {
            Statement::Store(word, value) => self.store(copy, word, value),
            Statement::Load(register, word) => {
                registers[register].store(self.load(copy, word), Ordering::Relaxed);
            }
            Statement::Wait(word) => return self.load(copy, word) != 0,
            Statement::Post {
                what,
                way,
                local,
                remote,
                has_fence,
            } => {
                let sge = self.mr.sge(Self::offset(copy, local), 8).unwrap();
                let Region { addr, rkey } = self.peers[way.to];
                let addr = addr + Self::offset(copy, remote) as u64;
                let end = self.ends.get_mut(&Key { thread, from, way }).unwrap();
                end.post((what, has_fence), (addr, rkey), sge);
            }
            Statement::Poll(way) => {
                let end = self.ends.get_mut(&Key { thread, from, way }).unwrap();
                return end.poll();
            }
        }
        true
    }

    /// Polls all queue pairs. Returns whether all operations are complete.
    pub(crate) fn drain(&mut self) -> bool {
        self.ends.values_mut().fold(true, |is_done, end| {
            while end.poll() {}
            is_done && end.outstanding == 0
        })
    }
}

impl End {
    fn post(&mut self, (what, has_fence): (Remote, bool), (addr, rkey): (u64, u32), sge: Sge) {
        let flags = if has_fence {
            Signal::Always.fence()
        } else {
            Signal::Always.into()
        };
        let qp = &mut self.qp;
        match what {
            Remote::Put => {
                let payload = sge;
                qp.post_and_ring(
                    &Write {
                        addr,
                        rkey,
                        payload,
                    },
                    flags,
                    0,
                )
            }
            Remote::Get => {
                let into = sge;
                qp.post_and_ring(&Read { addr, rkey, into }, flags, 0)
            }
            Remote::FetchAdd(add) => {
                let into = sge;
                qp.post_and_ring(
                    &FetchAdd {
                        addr,
                        rkey,
                        add,
                        into,
                    },
                    flags,
                    0,
                )
            }
            Remote::CompareSwap(compare, swap) => qp.post_and_ring(
                &CompareSwap {
                    addr,
                    rkey,
                    compare,
                    swap,
                    into: sge,
                },
                flags,
                0,
            ),
        }
        .unwrap();
        self.outstanding += 1;
    }

    /// Returns whether there was a completion.
    fn poll(&mut self) -> bool {
        let qp = &mut self.qp;
        let polled = self.cq.poll(1, |cqe| {
            cqe.result().unwrap();
            qp.complete(&cqe).unwrap();
        });
        self.outstanding -= polled;
        polled == 1
    }
}
