//! The requester, which sends and takes answers, is stepped. Its target and a third party are in
//! this process.

use super::*;

/// A target in this process, whose receives a third party and the stepped process share.
pub(crate) struct Target {
    dir: PathBuf,
    /// The process that forks the stepped processes. `None` while a stepped process is alive, and
    /// before the first.
    helper: Option<Helper>,
    target: End,
    third: End,
    receives: Receives,
    next_of_third: u32,
    arrived_of_third: u32,
    of_stepped: Vec<u32>,
    sent: usize,
}

impl Target {
    pub(crate) fn new(dir: PathBuf) -> Self {
        let world = World::shared(&dir);
        let (mut target, third) = (
            End::new(&world, Service::Connected, true, ALL),
            End::new(&world, Service::Connected, false, ALL),
        );
        target.connect(third.qpn);
        third.connect(target.qpn);
        let receives = Receives::new(&mut target);
        target.hca.poll();
        Self {
            dir,
            helper: None,
            target,
            third,
            receives,
            next_of_third: OF_THIRD,
            arrived_of_third: OF_THIRD,
            of_stepped: vec![],
            sent: 0,
        }
    }

    fn start(&mut self, role: Role) -> (Tracee, u32) {
        let helper = self
            .helper
            .take()
            .unwrap_or_else(|| helper(&self.dir, role));
        let (mut tracee, words) = helper.fork();
        let words = numbers(&words);
        let receiver = self.target.add_receiver();
        self.target.connect_receiver(receiver, words[0] as u32);
        tracee.tell(&describe(&self.target, receiver));
        tracee.attach();
        self.target.data.put(WORD, 0u64.to_ne_bytes());
        (tracee, receiver)
    }

    fn word(&self) -> u64 {
        u64::from_ne_bytes(self.target.data.get(WORD))
    }

    fn poll(&mut self, refill: bool) {
        self.target.hca.poll();
        for done in self.target.poll() {
            let Done::Received {
                opcode: CqeOpcode::ResponderSendImm,
                wqe,
                imm,
                ..
            } = done
            else {
                panic!("{done:?}")
            };
            self.receives.take(&self.target, wqe, imm);
            if imm & OF_THIRD == 0 {
                self.of_stepped.push(imm);
            } else {
                assert_eq!(
                    imm, self.arrived_of_third,
                    "the third party's messages arrive once and in order"
                );
                self.arrived_of_third += 1;
            }
        }
        if refill {
            self.receives.post(&mut self.target);
        }
        self.third.hca.poll();
        self.sent += self
            .third
            .poll()
            .iter()
            .map(|done| assert!(matches!(done, Done::Sent { .. }), "{done:?}"))
            .count();
    }

    fn third_sends(&mut self) {
        post_send(&mut self.third, self.next_of_third);
        self.third.ring();
        self.next_of_third += 1;
        self.third.hca.poll();
    }

    /// The third party uses more receives than the queue has, and atomics on the next word.
    pub(crate) fn traffic(&mut self) {
        for _ in 0..RECEIVES + 3 {
            self.third_sends();
            until("a third party's message", || {
                self.poll(true);
                self.arrived_of_third == self.next_of_third
            });
        }
        let (before, beside) = (self.sent, self.target.remote(WORD + 8));
        post_fetch_add(&mut self.third, beside);
        self.third.ring();
        until("a third party's atomic", || {
            self.poll(true);
            self.sent > before
        });
    }

    /// Returns the number of receives that messages cannot use, of the full number.
    fn receives_lost(&mut self) -> usize {
        self.poll(true);
        self.poll(true);
        let before = self.arrived_of_third;
        // The send queue has no more WQEBBs.
        for _ in 0..RECEIVES {
            self.third_sends();
        }
        (0..100).for_each(|_| self.poll(false));
        let lost = RECEIVES - (self.arrived_of_third - before) as usize;
        self.poll(true);
        until("what had found no receive", || {
            self.poll(true);
            self.arrived_of_third == self.next_of_third
        });
        lost
    }

    /// Polls as often as the device needs to check for dead peers.
    fn sweep(&mut self) {
        (0..1100).for_each(|_| _ = self.target.hca.poll());
        self.poll(true);
    }

    fn end(self, tracee: Tracee) {
        tracee.kill();
        let dir = self.dir.clone();
        drop(self);
        remove_dir(&dir);
    }
}

/// Returns the number of instructions of the stepped poll. Nothing is lost by counting.
fn instructions(world: &mut Target, role: Role) -> usize {
    let (mut tracee, receiver) = world.start(role);
    tracee.stand("go");
    until("its request", || {
        world.poll(true);
        role == Role::Asker || world.word() == 1
    });
    let n = tracee.count();
    world.helper = Some(tracee.kill());
    world.target.hca.destroy_qp(receiver);
    world.sweep();
    world.of_stepped.clear();
    n
}

pub(crate) fn stop(role: Role) {
    watchdog(WATCHDOG * 4 * scale());
    let mut world = Target::new(new_dir(&format!("stop-{role:?}")));
    let instructions = instructions(&mut world, role);
    let (mut tracee, _) = world.start(role);
    let mut points = Points::new(instructions, SECONDS);
    let mut stops = 0;
    for point in points.by_ref() {
        tracee.stand("go");
        if role == Role::Taker {
            until("its request", || {
                world.poll(true);
                world.word() == stops + 1
            });
        }
        let inside = tracee.step(point);
        world.traffic();
        if inside {
            tracee.finish();
        }
        tracee.resume();
        stops += 1;
        until("the stopped one's atomic", || {
            world.poll(true);
            assert!(world.word() <= stops, "executed twice");
            world.word() == stops && (role == Role::Taker || world.of_stepped.len() as u64 == stops)
        });
        assert_eq!(world.receives_lost(), 0, "stopped at instruction {point}");
    }
    assert!(
        world
            .of_stepped
            .iter()
            .copied()
            .eq(0..world.of_stepped.len() as u32),
        "once each, in order"
    );
    println!(
        "{role:?}: {} of {instructions} instructions covered, {stops} stops, 0 stalls, {stops} atomics once each, 0 receives lost",
        points.taken
    );
    world.end(tracee);
}

pub(crate) fn kill(role: Role) {
    watchdog(WATCHDOG * 4 * scale());
    let mut world = Target::new(new_dir(&format!("kill-{role:?}")));
    let instructions = instructions(&mut world, role);
    let mut points = Points::new(instructions, SECONDS);
    let mut kills = 0;
    let mut executed = 0;
    let mut delivered = 0;
    for point in points.by_ref() {
        let (mut tracee, receiver) = world.start(role);
        tracee.stand("go");
        if role == Role::Taker {
            until("its request", || {
                world.poll(true);
                world.word() == 1
            });
        }
        tracee.step(point);
        world.helper = Some(tracee.kill());
        kills += 1;
        world.traffic();
        // Found by the check of the peers, or when the queue pair is destroyed.
        if kills % 2 == 0 {
            world.sweep();
            assert_eq!(world.receives_lost(), 0, "killed at instruction {point}");
        }
        world.target.hca.destroy_qp(receiver);
        assert_eq!(world.receives_lost(), 0, "killed at instruction {point}");
        assert!(
            world.word() <= 1 && world.of_stepped.len() <= 1,
            "killed at instruction {point}: twice"
        );
        executed += world.word();
        delivered += world.of_stepped.drain(..).count();
    }
    println!(
        "{role:?}: {} of {instructions} instructions covered, {kills} kills, {executed} atomics executed, {delivered} messages delivered, \
         0 stalls, 0 twice, 0 receives lost",
        points.taken
    );
    let (mut tracee, _) = world.start(role);
    tracee.stand("go");
    if role == Role::Asker {
        assert!(
            executed < kills && delivered < kills as usize,
            "it was killed before it asked"
        );
    } else {
        assert_eq!(executed, kills, "asked before");
    }
    world.end(tracee);
}
