//! A process with an `mlx5::hca::Hca` is single-stepped through one `poll`, and stopped, or killed, after every instruction: as the one that
//! asks for an atomic and sends into a queue that is copied, as the one that takes the answer, and as the owner that copies receives, answers
//! atomics and makes CQEs. Whatever it was doing, third parties go on; an atomic is executed once if who asked lives, and at most once if not;
//! no receive is lost or comes twice; and a stopped owner stops those who want its atomics, nobody else.
#![cfg(target_arch = "x86_64")]
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, clippy::print_stdout, clippy::print_stderr, reason = "a test")]

#[path = "hca/driver.rs"]
mod driver;
#[allow(dead_code, reason = "each test uses what it needs")]
mod support;
#[path = "support/tracee.rs"]
mod tracee;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use driver::{ALL, Done, ENTRIES, End, World};
use mlx5::hca::Service;
use mlx5::wire::*;
use mlx5::{CqeOpcode, Syndrome};
use support::{scale, watchdog};
use tracee::{Points, Tracee, hello, marker};

const DIR: &str = "MLX5_TEST_HCA_DIR";
const ROLE: &str = "MLX5_TEST_HCA_ROLE";
/// Nothing here takes long; this only ends a hang.
const WATCHDOG: Duration = Duration::from_secs(240);
/// Of each test, times `MLX5_TEST_SCALE`; every instruction is tried at most once.
const SECONDS: u64 = 5;
/// Receives that a target keeps posted: one WQE of a list is its end.
const RECEIVES: usize = ENTRIES as usize - 1;
/// The word of atomics, where WRITEs go, and where receives have their buffers.
const WORD: usize = 64;
const AREA: usize = 1024;
const BUFFERS: usize = 4096;
const BUFFER: usize = 64;
/// In the immediate of a third party's message.
const OF_THIRD: u32 = 1 << 31;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Sends, and asks for an atomic.
    Asker,
    /// Takes the answer of one.
    Taker,
    /// Copies receives, answers an atomic, makes CQEs.
    Owner,
}

const ROLES: [Role; 3] = [Role::Asker, Role::Taker, Role::Owner];

/// Keeps a target's receives posted, all with a buffer.
struct Receives {
    free: VecDeque<u16>,
}

impl Receives {
    fn new(end: &mut End) -> Self {
        let mut receives = Self { free: (0..ENTRIES as u16).collect() };
        receives.post(end);
        receives
    }

    fn post(&mut self, end: &mut End) {
        let n = self.free.len() - 1;
        for _ in 0..n {
            let (index, next) = (self.free[0], self.free[1]);
            end.write_receive(index, next, end.sge(BUFFERS + usize::from(index) * BUFFER, BUFFER as u32));
            self.free.pop_front();
        }
        end.ring_receives(n as u16);
    }

    /// The message's immediate, whose buffer has it too.
    fn take(&mut self, end: &End, wqe: u16, imm: u32) {
        assert!(!self.free.contains(&wqe), "receive {wqe} came twice");
        assert_eq!(u32::from_ne_bytes(end.data.get(BUFFERS + usize::from(wqe) * BUFFER)), imm, "what message {imm:#x} brought");
        self.free.push_back(wqe);
    }
}

/// Posts message `imm` from `from`, not told yet. Its bytes are a place of its own.
fn post_send(from: &mut End, imm: u32) {
    let place = 2048 + (imm as usize % 32) * 8;
    from.data.put(place, imm.to_ne_bytes());
    let sge = from.sge(place, 4);
    from.post(Opcode::SendImm, imm, &[sge]);
}

fn post_fetch_add(from: &mut End, to: [u8; SEGMENT]) {
    let sge = from.sge(0, 8);
    from.post(Opcode::AtomicFetchAdd, 0, &[to, AtomicSegment { swap_add: 1, compare: 0 }.emit(), sge]);
}

fn remote(words: &[u64], offset: usize) -> [u8; SEGMENT] {
    RaddrSegment { addr: words[1] + offset as u64, rkey: words[2] as u32 }.emit()
}

fn describe(end: &End, qpn: u32) -> String {
    format!("{qpn} {} {}", end.addr(0), end.key)
}

fn numbers(line: &str) -> Vec<u64> {
    line.split_whitespace().map(|word| word.parse().unwrap()).collect()
}

// ---- the process that is stepped ----

/// Not a test of its own: the process that the tests below stop and kill.
#[test]
#[ignore = "helper process of the other tests, started by them"]
fn stepped_process() {
    let Some(dir) = std::env::var_os(DIR) else { return };
    watchdog(WATCHDOG * scale());
    let world = World::shared(Path::new(&dir));
    match ROLES[std::env::var(ROLE).unwrap().parse::<usize>().unwrap()] {
        Role::Owner => own(&world),
        role => ask(&world, role),
    }
}

fn polled_between_markers(end: &End) {
    marker();
    end.hca.poll();
    marker();
}

/// Each line is an operation, the first is where to.
fn ask(world: &World, role: Role) {
    let mut end = End::new(world, Service::Connected, false, ALL);
    hello(&describe(&end, end.qpn));
    let mut lines = std::io::stdin().lines().map(Result::unwrap);
    let to = numbers(&lines.next().unwrap());
    end.connect(to[0] as u32);
    for (imm, _) in (0..).zip(lines) {
        let mut due = 1;
        if role == Role::Asker {
            post_send(&mut end, imm);
            due += 1;
        }
        post_fetch_add(&mut end, remote(&to, WORD));
        end.ring();
        if role == Role::Taker {
            end.hca.poll();
        }
        polled_between_markers(&end);
        while due > 0 {
            for done in end.poll() {
                assert!(matches!(done, Done::Sent { .. }), "{done:?}");
                due -= 1;
            }
            end.hca.poll();
        }
        assert_eq!(u64::from_ne_bytes(end.data.get(0)), u64::from(imm), "the atomic before found one less");
    }
}

/// The first line is who asks and who sends; each other line: something of theirs is there.
fn own(world: &World) {
    let mut end = End::new(world, Service::Connected, true, ALL);
    let receiver = end.add_receiver();
    hello(&format!("{} {receiver}", describe(&end, end.qpn)));
    let mut lines = std::io::stdin().lines().map(Result::unwrap);
    let peers = numbers(&lines.next().unwrap());
    end.connect(peers[0] as u32);
    end.connect_receiver(receiver, peers[1] as u32);
    let mut receives = Receives::new(&mut end);
    end.hca.poll();
    hello("connected");
    let mut next = OF_THIRD;
    for _ in lines {
        receives.post(&mut end);
        polled_between_markers(&end);
        for _ in 0..50 {
            for done in end.poll() {
                let Done::Received { opcode: CqeOpcode::ResponderSendImm, wqe, imm, .. } = done else { panic!("{done:?}") };
                assert_eq!(imm, next, "messages arrive once and in order");
                receives.take(&end, wqe, imm);
                next += 1;
            }
            end.hca.poll();
        }
        // What comes now is for the next time.
        marker();
    }
}

// ---- the others ----

/// The tests stop and kill processes by turns.
fn begin() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    watchdog(WATCHDOG * 4 * scale());
    guard
}

fn new_dir(name: &str) -> PathBuf {
    let dir = PathBuf::from(format!("/dev/shm/mlx5-test-hca-{name}-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    dir
}

/// The next HCA cleans up what the killed ones left; then nothing is there.
fn remove_dir(dir: &Path) {
    drop(World::shared(dir).hca());
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), 0, "nothing is left behind");
    std::fs::remove_dir(dir).unwrap();
}

fn start(dir: &Path, role: Role) -> (Tracee, Vec<u64>) {
    let number = ROLES.iter().position(|&r| r == role).unwrap().to_string();
    let (tracee, words) = Tracee::start(&[(DIR, dir.as_os_str()), (ROLE, number.as_ref())]);
    (tracee, numbers(&words))
}

/// Does `work` until it says that it is done.
fn until(what: &str, mut work: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !work() {
        assert!(Instant::now() < end, "{what} does not come");
    }
}

/// A target in this process, whose receives a third party and the stepped process share.
struct Target {
    dir: PathBuf,
    target: End,
    third: End,
    receives: Receives,
    next_of_third: u32,
    arrived_of_third: u32,
    of_stepped: Vec<u32>,
    sent: usize,
}

impl Target {
    fn new(dir: PathBuf) -> Self {
        let world = World::shared(&dir);
        let (mut target, third) = (End::new(&world, Service::Connected, true, ALL), End::new(&world, Service::Connected, false, ALL));
        target.connect(third.qpn);
        third.connect(target.qpn);
        let receives = Receives::new(&mut target);
        target.hca.poll();
        Self { dir, target, third, receives, next_of_third: OF_THIRD, arrived_of_third: OF_THIRD, of_stepped: vec![], sent: 0 }
    }

    fn start(&mut self, role: Role) -> (Tracee, u32) {
        let (mut tracee, words) = start(&self.dir, role);
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
            let Done::Received { opcode: CqeOpcode::ResponderSendImm, wqe, imm, .. } = done else { panic!("{done:?}") };
            self.receives.take(&self.target, wqe, imm);
            if imm & OF_THIRD == 0 {
                self.of_stepped.push(imm);
            } else {
                assert_eq!(imm, self.arrived_of_third, "the third party's messages arrive once and in order");
                self.arrived_of_third += 1;
            }
        }
        if refill {
            self.receives.post(&mut self.target);
        }
        self.third.hca.poll();
        self.sent += self.third.poll().iter().map(|done| assert!(matches!(done, Done::Sent { .. }), "{done:?}")).count();
    }

    fn third_sends(&mut self) {
        post_send(&mut self.third, self.next_of_third);
        self.third.ring();
        self.next_of_third += 1;
        self.third.hca.poll();
    }

    /// The third party uses more receives than there are, and atomics on the word beside.
    fn traffic(&mut self) {
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

    /// Receives, of the full number, that messages cannot use.
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

    /// As often as the device takes to look for the dead.
    fn patrol(&mut self) {
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

/// How many instructions the stepped poll has; nothing is lost by it.
fn instructions(world: &mut Target, role: Role) -> usize {
    let (mut tracee, receiver) = world.start(role);
    tracee.stand("go");
    until("its request", || {
        world.poll(true);
        role == Role::Asker || world.word() == 1
    });
    let n = tracee.count();
    tracee.kill();
    world.target.hca.destroy_qp(receiver);
    world.patrol();
    world.of_stepped.clear();
    n
}

fn stop_requester(role: Role) {
    let _one = begin();
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
    assert!(world.of_stepped.iter().copied().eq(0..world.of_stepped.len() as u32), "once each, in order");
    println!(
        "{role:?}: {} of {instructions} instructions covered, {stops} stops, 0 stalls, {stops} atomics once each, 0 receives lost",
        points.taken
    );
    world.end(tracee);
}

fn kill_requester(role: Role) {
    let _one = begin();
    let mut world = Target::new(new_dir(&format!("kill-{role:?}")));
    let instructions = instructions(&mut world, role);
    let mut points = Points::new(instructions, SECONDS);
    let (mut kills, mut executed, mut delivered) = (0, 0, 0);
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
        tracee.kill();
        kills += 1;
        world.traffic();
        // Found by the patrol, or when the queue pair is destroyed.
        if kills % 2 == 0 {
            world.patrol();
            assert_eq!(world.receives_lost(), 0, "killed at instruction {point}");
        }
        world.target.hca.destroy_qp(receiver);
        assert_eq!(world.receives_lost(), 0, "killed at instruction {point}");
        assert!(world.word() <= 1 && world.of_stepped.len() <= 1, "killed at instruction {point}: twice");
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
        assert!(executed < kills && delivered < kills as usize, "it was killed before it asked");
    } else {
        assert_eq!(executed, kills, "asked before");
    }
    world.end(tracee);
}

/// An owner in another process, one device that wants its atomics, and one that sends to it.
struct Users {
    dir: PathBuf,
    asker: End,
    third: End,
    sent: u32,
}

impl Users {
    fn new(dir: PathBuf) -> Self {
        let world = World::shared(&dir);
        let [asker, third] = [(); 2].map(|()| End::new(&world, Service::Connected, false, ALL));
        Self { dir, asker, third, sent: 0 }
    }

    fn start(&mut self) -> (Tracee, Vec<u64>) {
        let (mut tracee, owner) = start(&self.dir, Role::Owner);
        for end in [&mut self.asker, &mut self.third] {
            end.poll();
            end.reset();
        }
        self.asker.connect(owner[0] as u32);
        self.third.connect(owner[3] as u32);
        tracee.tell(&format!("{} {}", self.asker.qpn, self.third.qpn));
        tracee.wait_for("connected");
        tracee.attach();
        self.sent = 0;
        (tracee, owner)
    }

    fn ask(&mut self, owner: &[u64]) {
        post_fetch_add(&mut self.asker, remote(owner, WORD));
        self.asker.ring();
        self.asker.hca.poll();
    }

    /// Each of the verbs that need no owner: done at once, or a receive is lost.
    fn traffic(&mut self, owner: &[u64], sends: u32) {
        let (place, result) = (self.third.sge(512, 8), self.third.sge(520, 8));
        self.third.data.put(512, u64::from(self.sent).to_ne_bytes());
        self.third.post(Opcode::RdmaWrite, 0, &[remote(owner, AREA), place]);
        self.third.post(Opcode::RdmaRead, 0, &[remote(owner, AREA), result]);
        for _ in 0..sends {
            post_send(&mut self.third, OF_THIRD + self.sent);
            self.sent += 1;
        }
        self.third.ring();
        let mut due = 2 + sends as usize;
        until("a third party's operation", || {
            self.third.hca.poll();
            let done = self.third.poll();
            assert!(done.iter().all(|done| matches!(done, Done::Sent { .. })), "{done:?}");
            due -= done.len();
            due == 0
        });
        assert_eq!(self.third.data.get::<8>(512), self.third.data.get::<8>(520));
    }

    fn atomic(&mut self) -> Option<Done> {
        self.asker.hca.poll();
        self.asker.poll().pop()
    }

    fn instructions(&mut self) -> usize {
        let (mut tracee, owner) = self.start();
        self.ask(&owner);
        self.traffic(&owner, 3);
        tracee.stand("go");
        let n = tracee.count();
        tracee.kill();
        self.end_of_asker();
        n
    }

    /// The owner is dead: the atomic was answered before, or ends with an error.
    fn end_of_asker(&mut self) -> bool {
        let mut end = None;
        until("the end of the atomic", || {
            end = self.atomic();
            end.is_some()
        });
        match end.unwrap() {
            Done::Sent { .. } => true,
            Done::Failed { opcode: CqeOpcode::RequesterError, syndrome: Syndrome::TransportRetryExceeded, .. } => false,
            done => panic!("{done:?}"),
        }
    }
}

fn stop_owner() {
    let _one = begin();
    let mut users = Users::new(new_dir("stop-owner"));
    let instructions = users.instructions();
    let (mut tracee, owner) = users.start();
    let mut points = Points::new(instructions, SECONDS);
    let (mut stops, mut waited) = (0, 0);
    for point in points.by_ref() {
        users.ask(&owner);
        users.traffic(&owner, 3);
        tracee.stand("go");
        let inside = tracee.step(point);
        users.traffic(&owner, 3);
        let mut done = (0..100).find_map(|_| users.atomic());
        waited += u32::from(done.is_none());
        if inside {
            tracee.finish();
        }
        tracee.finish();
        until("the atomic", || {
            done = done.or_else(|| users.atomic());
            done.is_some()
        });
        assert!(matches!(done, Some(Done::Sent { .. })), "{done:?}");
        assert_eq!(u64::from_ne_bytes(users.asker.data.get(0)), stops, "stopped at instruction {point}: every atomic once");
        tracee.resume();
        stops += 1;
    }
    println!(
        "owner: {} of {instructions} instructions covered, {stops} stops, {stops} atomics once each, {waited} waited for the owner, {} messages \
         in order, 0 stalls of others",
        points.taken, users.sent
    );
    assert!(0 < waited && u64::from(waited) < stops);
    tracee.kill();
    let dir = users.dir.clone();
    drop(users);
    remove_dir(&dir);
}

fn kill_owner() {
    let _one = begin();
    let mut users = Users::new(new_dir("kill-owner"));
    // Others of the fabric, who have nothing to do with it.
    let bystander = new_dir("kill-owner-bystander");
    let mut others = Target::new(bystander.clone());
    let instructions = users.instructions();
    let mut points = Points::new(instructions, SECONDS);
    let (mut kills, mut answered) = (0, 0);
    for point in points.by_ref() {
        let (mut tracee, owner) = users.start();
        users.ask(&owner);
        users.traffic(&owner, 3);
        tracee.stand("go");
        tracee.step(point);
        users.traffic(&owner, 3);
        // A peer that is dead has not answered, whatever it said before.
        let is_answered = (0..100).any(|_| users.atomic().is_some());
        tracee.kill();
        kills += 1;
        others.traffic();
        answered += u32::from(is_answered || users.end_of_asker());
        // And what is asked now.
        post_send(&mut users.third, OF_THIRD);
        users.third.ring();
        until("the end of a SEND", || {
            users.third.hca.poll();
            let done = users.third.poll();
            assert!(!done.iter().any(|done| matches!(done, Done::Sent { .. })), "{done:?}");
            done.iter().any(|done| matches!(done, Done::Failed { syndrome: Syndrome::TransportRetryExceeded, .. }))
        });
    }
    println!(
        "owner: {} of {instructions} instructions covered, {kills} kills, {answered} atomics answered before, {} ended with an error, 0 stalls",
        points.taken,
        kills - answered
    );
    assert!(0 < answered && answered < kills);
    let dir = users.dir.clone();
    drop((users, others));
    remove_dir(&dir);
    remove_dir(&bystander);
}

#[test]
fn who_asks_for_an_atomic_stopped_anywhere_stalls_nobody_and_has_it_once() {
    stop_requester(Role::Asker);
}

#[test]
fn who_takes_an_answer_stopped_anywhere_stalls_nobody_and_has_it_once() {
    stop_requester(Role::Taker);
}

#[test]
fn who_asks_for_an_atomic_killed_anywhere_stalls_nobody_and_has_it_at_most_once() {
    kill_requester(Role::Asker);
}

#[test]
fn who_takes_an_answer_killed_anywhere_stalls_nobody() {
    kill_requester(Role::Taker);
}

#[test]
fn an_owner_stopped_anywhere_stops_its_atomics_and_nothing_else() {
    stop_owner();
}

#[test]
fn the_atomics_of_an_owner_killed_anywhere_end() {
    kill_owner();
}
