//! Random operations of one queue pair, polled in any order by both devices, against a model that
//! executes them in sequence.

use super::driver::{ALL, Done, ENTRIES, End, World};
use mlx5_hca::wire::*;

#[path = "../../../tests/support/random.rs"]
mod random;

use random::Random;

/// Size of the area that operations read and write, and of a receive's buffer, in bytes.
const AREA: u32 = 2048;
const BUFFER: u32 = 128;
/// Offset of the receives' buffers, after the area.
const BUFFERS: usize = 4096;
/// Offset of the results, at the end that posts.
const RESULTS: usize = 8192;
/// Maximum number of operations in flight: each WQE takes at most two WQEBBs.
const MOST: usize = ENTRIES as usize / 2 - 1;

/// A completion that the model expects.
struct Expected {
    wqe: u16,
    bytes: u32,
    /// Place of the result, and its expected value.
    result: Option<(usize, Vec<u8>)>,
}

/// The whole run: both ends, and the expected completions.
struct Run {
    random: Random,
    ends: [End; 2],
    /// The target's area.
    area: Vec<u8>,
    expected: std::collections::VecDeque<Expected>,
    arriving: std::collections::VecDeque<(CqeOpcode, u32, Vec<u8>)>,
    /// The posted WQEs of the receive queue in the order of their posting.
    posted: std::collections::VecDeque<u16>,
    free: std::collections::VecDeque<u16>,
    next_imm: u32,
    is_shared: bool,
    /// Number of receives completed.
    received: u16,
}

impl Run {
    fn new(seed: u64, is_shared: bool) -> Self {
        let ends = End::pair(&World::default(), is_shared, ALL);
        Self {
            random: Random::new(seed),
            ends,
            area: vec![0; AREA as usize],
            expected: Default::default(),
            arriving: Default::default(),
            posted: Default::default(),
            // One WQE of a list stays unposted.
            free: (0..ENTRIES as u16).collect(),
            next_imm: 0,
            is_shared,
            received: 0,
        }
    }

    /// Posts a receive into the WQE that is free for the longest time. The link of the WQE names
    /// the next free WQE.
    fn post_receive(&mut self) {
        if self.free.len() < 2 {
            return;
        }
        let to = &mut self.ends[1];
        let (index, next) = (self.free[0], self.free[1]);
        self.free.pop_front();
        to.write_receive(
            index,
            next,
            to.sge(BUFFERS + usize::from(index) * BUFFER as usize, BUFFER),
        );
        to.ring_receives(1);
        self.posted.push_back(index);
    }

    fn bytes(&mut self, most: u32) -> Vec<u8> {
        let n = 1 + self.random.below(most);
        (0..n).map(|_| self.random.below(256) as u8).collect()
    }

    fn post(&mut self) {
        if self.expected.len() >= MOST {
            return;
        }
        let kind = self.random.below(6);
        let data = self.bytes(BUFFER);
        let n = data.len() as u32;
        let at = self.random.below(AREA - n) as usize;
        let word = at / 8 * 8;
        let [from, to] = &mut self.ends;
        // Each outstanding operation has its own places.
        let place = usize::from(from.next_wqe() % ENTRIES as u16) * BUFFER as usize;
        let (source, slot) = (place, RESULTS + place);
        data.iter()
            .enumerate()
            .for_each(|(i, byte)| from.data.put(source + i, [*byte]));
        let (sge, mut result) = (from.sge(source, n), None);
        let mut bytes = 0;
        let wqe = match kind {
            0 => {
                self.area[at..][..data.len()].copy_from_slice(&data);
                from.post(Opcode::RdmaWrite, 0, &[to.remote(at), sge])
            }
            1 => {
                self.area[at..][..data.len()].copy_from_slice(&data);
                self.next_imm += 1;
                self.arriving
                    .push_back((CqeOpcode::ResponderWriteImm, self.next_imm, vec![]));
                from.post(Opcode::RdmaWriteImm, self.next_imm, &[to.remote(at), sge])
            }
            2 => {
                self.arriving.push_back((CqeOpcode::ResponderSend, 0, data));
                from.post(Opcode::Send, 0, &[sge])
            }
            3 => {
                (bytes, result) = (n, Some((slot, self.area[at..][..data.len()].to_vec())));
                from.post(Opcode::RdmaRead, 0, &[to.remote(at), from.sge(slot, n)])
            }
            _ => {
                let old: [u8; 8] = self.area[word..][..8].try_into().unwrap();
                let (swap_add, is_add) = (u64::from(self.random.below(u32::MAX)), kind == 4);
                let compare = u64::from_ne_bytes(old) ^ u64::from(self.random.one_in(2));
                let new = match (is_add, compare == u64::from_ne_bytes(old)) {
                    (true, _) => u64::from_ne_bytes(old).wrapping_add(swap_add),
                    (false, true) => swap_add,
                    (false, false) => u64::from_ne_bytes(old),
                };
                self.area[word..][..8].copy_from_slice(&new.to_ne_bytes());
                (bytes, result) = (8, Some((slot, old.to_vec())));
                let opcode = if is_add {
                    Opcode::AtomicFetchAdd
                } else {
                    Opcode::AtomicCompareSwap
                };
                let operands = AtomicSegment { swap_add, compare }.emit();
                from.post(opcode, 0, &[to.remote(word), operands, from.sge(slot, 8)])
            }
        };
        self.expected.push_back(Expected { wqe, bytes, result });
    }

    fn take(&mut self) {
        for done in self.ends[0].poll() {
            let expected = self.expected.pop_front().unwrap();
            assert_eq!(
                done,
                Done::Sent {
                    wqe: expected.wqe,
                    bytes: expected.bytes
                }
            );
            for (i, byte) in expected
                .result
                .iter()
                .flat_map(|(slot, bytes)| bytes.iter().enumerate().map(move |(i, b)| (slot + i, b)))
            {
                assert_eq!(self.ends[0].data.get(i), [*byte]);
            }
        }
        for done in self.ends[1].poll() {
            let Done::Received {
                opcode,
                wqe,
                bytes,
                imm,
                ..
            } = done
            else {
                panic!("{done:?}")
            };
            let (want, want_imm, data) = self.arriving.pop_front().unwrap();
            let index = self.posted.pop_front().unwrap();
            assert_eq!(
                (opcode, imm, wqe),
                (
                    want,
                    want_imm,
                    if self.is_shared { index } else { self.received }
                )
            );
            self.received = self.received.wrapping_add(1);
            if want == CqeOpcode::ResponderSend {
                assert_eq!(bytes as usize, data.len());
                let at = BUFFERS + usize::from(index) * BUFFER as usize;
                data.iter()
                    .enumerate()
                    .for_each(|(i, byte)| assert_eq!(self.ends[1].data.get(at + i), [*byte]));
            }
            self.free.push_back(index);
        }
    }

    fn step(&mut self) {
        match self.random.below(8) {
            0 | 1 => self.post(),
            2 => self.post_receive(),
            3 => self.ends[0].ring(),
            4 | 5 => _ = self.ends[0].hca.poll(),
            6 => _ = self.ends[1].hca.poll(),
            _ => self.take(),
        }
    }
}

#[test]
fn random_operations_do_what_they_would_do_one_after_another() {
    for (seed, is_shared) in [(1, false), (2, true), (3, false), (4, true)] {
        let mut run = Run::new(seed, is_shared);
        // Every counter wraps.
        for _ in 0..600_000 {
            run.step();
        }
        for _ in 0..100 {
            run.post_receive();
            run.ends[0].ring();
            run.ends[0].hca.poll();
            run.ends[1].hca.poll();
            run.take();
        }
        assert!(
            run.expected.is_empty() && run.arriving.is_empty(),
            "seed {seed}: {} operations stay",
            run.expected.len()
        );
        let area: Vec<u8> = (0..AREA as usize)
            .flat_map(|i| run.ends[1].data.get::<1>(i))
            .collect();
        assert!(area == run.area, "seed {seed}");
        assert!(
            run.next_imm > 10_000,
            "seed {seed}: {} messages",
            run.next_imm
        );
    }
}
