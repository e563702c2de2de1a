use super::*;

fn view(head: &AtomicU64, tail: &AtomicU64, words: &[AtomicU64]) -> Ring {
    let depth = words.len() as u64;
    Ring {
        head: head.into(),
        tail: tail.into(),
        words: NonNull::from(words).cast(),
        depth,
        next: 0,
        released: 0,
        probes: 0,
    }
}

#[cfg(not(loom))]
mod plain {
    use super::*;

    struct Memory {
        head: Box<AtomicU64>,
        tail: Box<AtomicU64>,
        words: Box<[AtomicU64]>,
    }

    impl Memory {
        fn new(depth: usize) -> Self {
            Self {
                head: Box::default(),
                tail: Box::default(),
                words: (0..depth).map(|_| AtomicU64::new(0)).collect(),
            }
        }

        /// A ring that has been in use until `position`.
        fn at(depth: usize, position: u64) -> (Self, Ring) {
            let memory = Self::new(depth);
            let ring = memory.ring();
            for p in position..position + depth as u64 {
                ring.word(p).store(free(ring.lap(p)), Ordering::Relaxed);
            }
            memory.head.store(position, Ordering::Relaxed);
            memory.tail.store(position, Ordering::Relaxed);
            (
                memory,
                Ring {
                    next: position,
                    released: position,
                    ..ring
                },
            )
        }

        /// A view of the ring, which must not outlive it.
        fn ring(&self) -> Ring {
            view(&self.head, &self.tail, &self.words)
        }
    }

    fn drain(server: &mut Ring) -> Vec<usize> {
        let mut clients = vec![];
        server.drain(|client| clients.push(client));
        clients
    }

    #[test]
    fn default_ring_has_two_words_for_each_client() {
        assert_eq!(
            [0, 1, 4, 5, 46, CLIENTS_MAX, usize::MAX].map(ring_depth_for),
            [8, 8, 8, 16, 128, 8192, 8192]
        );
    }

    #[test]
    fn words_keep_their_parts_apart() {
        for client in [0, 1, 4095] {
            for lap in [0, 1, LAP_MASK] {
                assert_eq!(see(full(lap, client), lap), Seen::Full(client));
                assert_eq!(see(free(lap), lap), Seen::Free);
                assert_eq!(see(full(lap, client), lap.wrapping_add(1)), Seen::Earlier);
                assert_eq!(see(free(lap.wrapping_add(1)), lap), Seen::Later);
            }
        }
    }

    #[test]
    fn announced_names_come_out_in_order_at_any_start_and_the_ring_fills_exactly() {
        let lap_wrap = (LAP_MASK + 1) * 8;
        for start in [0, 5, 8, lap_wrap - 3, lap_wrap - 8] {
            let (memory, mut server) = Memory::at(8, start);
            let ring = memory.ring();
            for round in 0..6 {
                for slot in 0..8 {
                    assert_eq!(
                        ring.push(round * 8 + slot),
                        Ok(()),
                        "start {start} round {round}"
                    );
                }
                assert_eq!(ring.push(0), Err(Full));
                assert!(server.any());
                assert_eq!(
                    drain(&mut server),
                    (round * 8..round * 8 + 8).collect::<Vec<_>>()
                );
            }
        }
    }

    #[test]
    fn what_is_taken_and_not_released_is_not_taken_again() {
        let (memory, mut server) = Memory::at(2, 0);
        let ring = memory.ring();
        ring.push(1).unwrap();
        ring.push(2).unwrap();
        assert_eq!((server.take(), server.take()), (Some(1), Some(2)));
        assert_eq!((server.take(), server.any()), (None, false));
        assert_eq!(ring.push(3), Err(Full));
        server.release();
        ring.push(3).unwrap();
        assert_eq!(drain(&mut server), [3]);
    }

    #[test]
    fn wrong_head_leaves_no_gap() {
        for wrong in [0, 1, 3, 6, 7, 8, 9, 15, 16, 100, 8 << 24, u64::MAX, 1 << 63] {
            for taken in [0u64, 3, 8, 11] {
                let (memory, mut server) = Memory::at(8, taken);
                let ring = memory.ring();
                ring.push(0).unwrap();
                ring.push(1).unwrap();
                memory.head.store(wrong, Ordering::Relaxed);
                ring.push(2).unwrap();
                assert_eq!(drain(&mut server), [0, 1, 2], "head {wrong} after {taken}");
            }
        }
    }

    #[test]
    fn stale_head_of_a_stopped_client_costs_nobody_a_request() {
        let (memory, mut server) = Memory::at(4, 0);
        let ring = memory.ring();
        for slot in 0..1000 {
            ring.push(slot).unwrap();
            if slot % 7 == 0 {
                memory.head.store(slot as u64 / 2, Ordering::Relaxed);
            }
            assert_eq!(drain(&mut server), [slot]);
        }
    }

    #[test]
    fn garbage_in_the_next_word_is_put_right() {
        for garbage in [1, FULL - 1, full(3, 0), free(77), u64::MAX] {
            let (memory, mut server) = Memory::at(4, 0);
            let ring = memory.ring();
            memory.words[0].store(garbage, Ordering::Relaxed);
            assert_eq!(server.take(), None);
            server.keep_order(0);
            ring.push(9).unwrap();
            assert_eq!(drain(&mut server), [9], "{garbage:#x}");
        }
    }

    #[test]
    fn announcement_beyond_a_gap_is_found() {
        let (memory, mut server) = Memory::at(8, 16);
        let ring = memory.ring();
        // Garbage makes a client announce itself at position 19, with positions 16 to 18 free.
        ring.word(19)
            .store(full(ring.lap(19), 9), Ordering::Relaxed);
        memory.head.store(20, Ordering::Relaxed);
        let found = (0..9).any(|_| {
            server.rest();
            drain(&mut server) == [9]
        });
        assert!(found);
        for slot in 0..20 {
            ring.push(slot).unwrap();
            assert_eq!(drain(&mut server), [slot]);
        }
    }

    #[test]
    fn ring_recovers_from_garbage_everywhere() {
        let seed = 0x5eed_0001;
        let mut random = fastrand::Rng::with_seed(seed);
        for round in 0..2000 {
            let (memory, mut server) = Memory::at(
                4,
                ((LAP_MASK + 1) * 4)
                    .wrapping_add(random.u64(..100))
                    .wrapping_sub(50),
            );
            let ring = memory.ring();
            memory.head.store(random.u64(..), Ordering::Relaxed);
            memory.tail.store(random.u64(..), Ordering::Relaxed);
            for word in &memory.words {
                word.store(
                    if random.bool() {
                        random.u64(..)
                    } else {
                        free(random.u64(..30)) | (random.u64(..2) * FULL)
                    },
                    Ordering::Relaxed,
                );
            }
            // The garbage may contain numbers of clients, and some polls may find nothing, but a
            // client's announcement is taken soon.
            let mut got = false;
            for _ in 0..64 {
                let sent = ring.push(7).is_ok();
                let seen = drain(&mut server);
                server.rest();
                if sent && seen.last() == Some(&7) {
                    got = true;
                    break;
                }
            }
            assert!(got, "seed {seed:#x} round {round}: {server:?}");
        }
    }
}

#[cfg(loom)]
mod model {
    use super::*;
    use copyrpc_shm::ready::{ARMED, HotSet, Lanes};
    use copyrpc_shm::sleep::{Sleep, Sleeper, Watch, Word, wait};
    use copyrpc_shm::sync::{LightBarrier, UnsafeCell, yield_now};

    struct Memory {
        head: AtomicU64,
        tail: AtomicU64,
        words: Box<[AtomicU64]>,
        /// The payload of each client's request, as in the region.
        requests: Box<[UnsafeCell<u64>]>,
    }

    // SAFETY: the cells are guarded by the ring, which is what the model checks.
    unsafe impl Sync for Memory {}
    // SAFETY: as above.
    unsafe impl Send for Memory {}

    /// A ring in its last lap, before the laps begin at 0 again.
    fn memory(depth: usize, requests: usize) -> loom::sync::Arc<Memory> {
        let position = LAP_MASK * depth as u64;
        loom::sync::Arc::new(Memory {
            head: AtomicU64::new(position),
            tail: AtomicU64::new(position),
            words: (0..depth).map(|_| AtomicU64::new(free(LAP_MASK))).collect(),
            requests: (0..requests).map(|_| UnsafeCell::new(0)).collect(),
        })
    }

    impl Memory {
        /// A view of the ring, which must not outlive it.
        fn ring(&self) -> Ring {
            view(&self.head, &self.tail, &self.words)
        }

        /// The server's view, before it has taken anything.
        fn server(&self) -> Ring {
            let position = self.tail.load(Ordering::Relaxed);
            Ring {
                next: position,
                released: position,
                ..self.ring()
            }
        }

        fn call(&self, slot: usize) -> Result<(), Full> {
            // SAFETY: the slot is this client's alone until it is announced; loom checks.
            self.requests[slot].with_mut(|p| unsafe { *p = 100 + slot as u64 });
            self.ring().push(slot)
        }

        /// Takes one request.
        fn serve(&self, server: &mut Ring) -> Option<usize> {
            let client = server.take()?;
            // SAFETY: announced (D1); loom checks.
            let payload = self.requests[client].with(|p| unsafe { *p });
            assert_eq!(
                payload,
                100 + client as u64,
                "announced before it was written"
            );
            Some(client)
        }
    }

    #[test]
    fn every_announced_request_is_taken_once_and_complete() {
        loom::model(|| {
            let memory = memory(2, 2);
            let clients: Vec<_> = (0..2)
                .map(|slot| {
                    let memory = memory.clone();
                    loom::thread::spawn(move || memory.call(slot).unwrap())
                })
                .collect();
            let mut server = memory.server();
            let mut taken: Vec<usize> = memory.serve(&mut server).into_iter().collect();
            clients.into_iter().for_each(|c| c.join().unwrap());
            taken.extend(std::iter::from_fn(|| memory.serve(&mut server)));
            taken.sort_unstable();
            assert_eq!(taken, [0, 1]);
        });
    }

    /// The lanes of two clients, of which only the messages are counted.
    struct Counted {
        messages: [AtomicU64; 2],
        armed: [AtomicU32; 2],
        ring: loom::sync::Arc<Memory>,
        server: Sleep,
    }

    impl Counted {
        fn new(armed: [u32; 2], depth: usize) -> loom::sync::Arc<Self> {
            let messages = [AtomicU64::new(0), AtomicU64::new(0)];
            loom::sync::Arc::new(Self {
                messages,
                armed: armed.map(AtomicU32::new),
                ring: memory(depth, 0),
                server: Sleep::default(),
            })
        }

        fn call(&self, client: usize) {
            self.messages[client].fetch_add(1, Ordering::Release);
            // As `ipc::Client` does.
            LightBarrier::of_process().execute();
            if self.armed[client].load(Ordering::Relaxed) == ARMED {
                self.ring.ring().announce(client, &self.armed[client]);
                self.server.wake();
            }
        }
    }

    fn visit(lanes: &mut &Counted, client: usize, _: usize) -> usize {
        lanes.messages[client].swap(0, Ordering::AcqRel) as usize
    }

    impl Lanes for &Counted {
        fn is_ready(&self, client: usize) -> bool {
            self.messages[client].load(Ordering::Acquire) != 0
        }
        fn armed(&self, client: usize) -> Option<&AtomicU32> {
            self.armed.get(client)
        }
    }

    struct Idle<'a> {
        set: &'a mut HotSet,
        lanes: &'a Counted,
        server: &'a mut Ring,
    }

    impl Watch for Idle<'_> {
        fn words(&mut self, show: &mut dyn FnMut(Word<'_>)) {
            show(self.lanes.server.word());
        }
        fn arm(&mut self) {
            self.set.arm(&self.lanes);
        }
        fn look(&mut self, is_told: bool) -> bool {
            !self.set.deactivate(&self.lanes, is_told) || self.server.any()
        }
    }

    /// R1, D1, W1 and W2 together. The second call finds the flag down that the first has lowered,
    /// or up again, as the server fell asleep between them. A call that is lost is a model that
    /// does not end.
    #[test]
    fn no_call_is_lost_when_a_client_announces_itself_to_a_server_that_falls_asleep() {
        for armed in [HOT, ARMED] {
            let mut model = loom::model::Builder::new();
            model.preemption_bound = Some(3);
            model.check(move || {
                let shared = Counted::new([armed, ARMED], 2);
                let calls = shared.clone();
                let client = loom::thread::spawn(move || (0..2).for_each(|_| calls.call(0)));
                let mut set = HotSet::new(2);
                let mut server = shared.ring.server();
                let mut taken = 0;
                // The server polls a lane whose flag is down.
                set.mend(&&*shared, usize::MAX, usize::MAX, 0);
                while taken < 2 {
                    let mut idle = Idle {
                        set: &mut set,
                        lanes: &shared,
                        server: &mut server,
                    };
                    assert!(wait([&mut idle as &mut dyn Sleeper], None));
                    taken += set.pass(&mut server, &mut &*shared, visit, || 0);
                }
                client.join().unwrap();
                assert_eq!(taken, 2);
            });
        }
    }

    /// R4: of two clients that announce themselves in a ring of one word, one may find it full. A
    /// call that is lost is a model that does not end.
    #[test]
    fn no_call_is_lost_when_the_ring_is_full() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let shared = Counted::new([ARMED, ARMED], 1);
            shared.call(0);
            let calls = shared.clone();
            let client = loom::thread::spawn(move || calls.call(1));
            let mut set = HotSet::new(2);
            let mut server = shared.ring.server();
            let mut taken = 0;
            while taken < 2 {
                let now = set.pass(&mut server, &mut &*shared, visit, || 0);
                taken += now;
                set.mend(&&*shared, usize::MAX, usize::MAX, 0);
                if now == 0 {
                    yield_now();
                }
            }
            client.join().unwrap();
        });
    }

    #[test]
    fn words_are_reused_in_the_next_lap_without_loss() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let memory = memory(1, 2);
            let clients: Vec<_> = (0..2)
                .map(|slot| {
                    let memory = memory.clone();
                    loom::thread::spawn(move || {
                        while memory.call(slot).is_err() {
                            yield_now();
                        }
                    })
                })
                .collect();
            let mut server = memory.server();
            let mut taken = vec![];
            while taken.len() < 2 {
                match memory.serve(&mut server) {
                    Some(slot) => taken.push(slot),
                    None => yield_now(),
                }
                server.release();
            }
            clients.into_iter().for_each(|c| c.join().unwrap());
            taken.sort_unstable();
            assert_eq!(taken, [0, 1]);
        });
    }
}
