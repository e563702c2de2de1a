//! A requester is single-stepped through a doorbell and stopped, or killed, after every
//! instruction. At every instruction third parties that use the same shared receive queue continue.
//! The requester's own messages arrive once or, if it was killed, at most once. No receive is lost.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::fabric::{new_dir, remove_dir};
use crate::stepped::{End, Kind, RECEIVES, Stepped, begin, length};
use copyrpc_testing::tracee::{Helper, Points, on_one_core};

/// Duration of each test, times `MLX5_TEST_SCALE`. Every instruction is tried at most once.
const SECONDS: u64 = 2;

/// The target, and a third party connected to it by queue pair 1.
struct World {
    dir: PathBuf,
    /// The process that forks the stepped processes. `None` while a stepped process is alive.
    helper: Option<Helper>,
    kind: Kind,
    target: End,
    third: End,
    sent: u32,
    received: u32,
    /// Immediates from the stepped process, and the number of its flushed receives.
    from_stepped: Vec<u32>,
    flushed: usize,
}

impl World {
    fn new(name: &str, kind: Kind) -> Self {
        let dir = new_dir(&format!("{name}-{kind:?}"));
        Self {
            helper: Some(Stepped::helper(&dir, kind)),
            ..Self::connect(&dir, kind)
        }
    }

    fn connect(dir: &Path, kind: Kind) -> Self {
        let (mut target, mut third) = (End::open(dir), End::open(dir));
        let (target_qp, third_qp) = (target.add(1, Kind::Send), third.add(1, Kind::Send));
        target.connect(1, &third_qp);
        third.connect(1, &target_qp);
        Self {
            dir: dir.to_owned(),
            helper: None,
            kind,
            target,
            third,
            sent: 0,
            received: 0,
            from_stepped: vec![],
            flushed: 0,
        }
    }

    fn start(&mut self) -> Stepped {
        let region = (self.target.mr.addr(), self.target.mr.rkey());
        let helper = self.helper.take().unwrap();
        let stepped = Stepped::start(helper, &mut self.target, 0, self.kind, region);
        if self.kind == Kind::Datagram {
            self.until("the first datagram", |world| world.from_stepped.len() == 1);
            self.from_stepped.clear();
        }
        stepped
    }

    /// Returns the number of instructions of a doorbell of `n` messages.
    fn instructions(&mut self, n: u32) -> usize {
        let mut stepped = self.start();
        let instructions = stepped.count(n);
        self.until("the first messages", |world| {
            world.from_stepped.len() == n as usize
        });
        self.end(stepped);
        instructions
    }

    fn kill(&mut self, stepped: Stepped) {
        self.helper = Some(stepped.kill());
    }

    /// Kills `stepped`, and forgets it.
    fn end(&mut self, stepped: Stepped) {
        self.kill(stepped);
        self.target.remove(0);
        self.take(true);
        self.from_stepped.clear();
        self.flushed = 0;
    }

    fn take(&mut self, refill: bool) {
        for arrival in self.target.arrived(refill) {
            match arrival.name {
                0 if arrival.is_ok => self.from_stepped.push(arrival.imm),
                0 => self.flushed += 1,
                _ => {
                    assert!(arrival.is_ok, "an error at the third party's connection");
                    assert_eq!(
                        arrival.imm, self.received,
                        "the third party's messages arrive once and in order"
                    );
                    self.received += 1;
                }
            }
        }
    }

    fn until(&mut self, what: &str, mut is_done: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + Duration::from_secs(10);
        while !is_done(self) {
            self.take(true);
            self.third.reap();
            assert!(
                Instant::now() < end,
                "{what} did not arrive: {} of {} of the third party's",
                self.received,
                self.sent
            );
        }
    }

    /// The third party sends a message, by WRITE and SEND in turn.
    fn third_party_sends(&mut self) {
        let kind = if self.sent % 2 == 0 {
            Kind::Send
        } else {
            Kind::WriteImm
        };
        self.third.post(
            1,
            kind,
            (self.target.mr.addr(), self.target.mr.rkey()),
            self.sent,
        );
        self.third.ring(1);
        self.sent += 1;
    }

    /// Makes the third party use more receives than the queue has. Fails if one of its messages
    /// does not arrive: then the stopped process stalls the third party.
    fn traffic(&mut self) {
        for _ in 0..RECEIVES + 3 {
            self.third_party_sends();
            self.until("a third party's message", |world| {
                world.received == world.sent
            });
        }
        self.third.reap();
    }

    /// Returns the number of receives that messages cannot use, of all posted. If there are any,
    /// begins again with new ends.
    fn receives_lost(&mut self) -> usize {
        self.take(true);
        let before = self.received;
        let mut lost = RECEIVES;
        for _ in 0..RECEIVES {
            self.third_party_sends();
        }
        for _ in 0..100 {
            self.take(false);
        }
        lost -= (self.received - before) as usize;
        if lost > 0 {
            let from_stepped = core::mem::take(&mut self.from_stepped);
            *self = Self {
                from_stepped,
                helper: self.helper.take(),
                ..Self::connect(&self.dir, self.kind)
            };
        } else {
            self.third.reap();
            self.target.refill();
        }
        lost
    }

    fn finish(self) {
        let dir = self.dir.clone();
        drop(self);
        remove_dir(&dir);
    }
}

/// Stops the process at an instruction while others continue, and then continues it.
fn stop(kind: Kind) {
    begin(8);
    let mut world = World::new("stop", kind);
    let instructions = world.instructions(1);
    let mut stepped = world.start();
    let mut points = Points::new(instructions, SECONDS);
    let (mut stops, mut leaked) = (0, 0);
    for point in points.by_ref() {
        stepped.go(1);
        // The path through the code differs a little from run to run; a step too many ends at the
        // marker.
        let inside = stepped.step(point);
        world.traffic();
        if inside {
            stepped.finish();
        }
        stepped.resume();
        stops += 1;
        world.until("the stopped one's message", |world| {
            world.from_stepped.len() == stops
        });
        if kind == Kind::Own {
            continue;
        }
        leaked += world.receives_lost();
        assert_eq!(leaked, 0, "stopped at instruction {point}");
    }
    let first = u32::from(kind == Kind::Datagram);
    assert_eq!(
        world.from_stepped,
        (first..first + stops as u32).collect::<Vec<_>>(),
        "once each, in order"
    );
    println!(
        "{kind:?}: {} of {instructions} instructions covered, {stops} stops, 0 stalls, 0 lost, 0 duplicated, {leaked} receives leaked",
        points.taken
    );
    world.end(stepped);
    world.finish();
}

/// Kills the process at an instruction while others continue.
fn kill(kind: Kind) {
    begin(8);
    let mut world = World::new("kill", kind);
    let instructions = world.instructions(1);
    let mut points = Points::new(instructions, SECONDS);
    let mut kills = 0;
    let mut delivered = 0;
    let mut leaked = 0;
    for point in points.by_ref() {
        let mut stepped = world.start();
        stepped.go(1);
        stepped.step(point);
        world.kill(stepped);
        kills += 1;
        world.traffic();
        if kind == Kind::Own {
            // The user gives up the connection: all its receives complete, in order.
            world.target.qps.get_mut(&0).unwrap().fail();
            world.target.sweep();
            world.take(true);
            leaked += 8 - world.from_stepped.len() - world.flushed;
            world.flushed = 0;
            world.target.remove(0);
        } else if kills % 2 == 0 {
            // The receive that the killed process had taken is returned by the check of the peers
            // (here), or when the queue pair is destroyed (below).
            world.target.sweep();
            leaked += world.receives_lost();
            world.target.remove(0);
        } else {
            world.target.remove(0);
        }
        world.take(true);
        leaked += world.receives_lost();
        assert!(
            world.from_stepped.len() <= 1,
            "killed at instruction {point}: delivered twice"
        );
        delivered += world.from_stepped.drain(..).count();
    }
    if kind != Kind::Own {
        let mut stepped = world.start();
        stepped.go(1);
        stepped.step(instructions);
        world.kill(stepped);
        world.traffic();
        world.take(true);
        assert_eq!(
            world.from_stepped.len(),
            1,
            "killed after its doorbell: what it sent arrives"
        );
        world.target.remove(0);
        world.take(true);
    }
    println!(
        "{kind:?}: {} of {instructions} instructions covered, {kills} kills, {delivered} delivered, 0 stalls, 0 lost, 0 duplicated, \
         {leaked} receives leaked",
        points.taken
    );
    assert_eq!(leaked, 0);
    assert!(delivered < kills, "it was killed before it sent");
    world.finish();
}

/// Stops the process at an instruction of a doorbell with several messages, destroys its queue
/// pair, and then continues or kills it.
fn destroy(kind: Kind) {
    begin(8);
    let mut world = World::new("destroy", kind);
    let instructions = world.instructions(3);
    let mut points = Points::new(instructions, SECONDS);
    let mut stops = 0;
    let mut kills = 0;
    let mut leaked = 0;
    let mut quarantined = 0;
    for point in points.by_ref() {
        let mut stepped = world.start();
        stepped.go(3);
        let inside = stepped.step(point);
        let before = world.target.device.info().quarantined;
        world.target.remove(0);
        quarantined += world.target.device.info().quarantined - before;
        world.take(true);
        world.traffic();
        if point % 2 == 0 && inside {
            stepped.finish();
        }
        stops += 1;
        kills += point % 2;
        if point % 2 == 0 {
            world.target.sweep();
            leaked += world.receives_lost();
        }
        world.kill(stepped);
        world.target.sweep();
        leaked += world.receives_lost();
        assert!(
            world.from_stepped.is_sorted_by(|a, b| a < b),
            "delivered twice"
        );
        world.from_stepped.clear();
    }
    println!(
        "{kind:?}: {} of {instructions} instructions covered, {stops} stops, {kills} of them killed, {quarantined} places quarantined, \
         0 stalls, {leaked} receives leaked",
        points.taken
    );
    assert_eq!(leaked, 0);
    assert!(quarantined > 0, "it was stopped in the middle");
    world.finish();
}

/// A reader may poll the end of a message. The end is visible after all earlier bytes, and at once
/// if it is aligned.
#[test]
fn the_last_eight_bytes_of_a_message_of_any_length_appear_behind_all_others() {
    const LAST: usize = 8;
    begin(8);
    on_one_core(|| {
        let dir = new_dir("length");
        let mut target = End::open(&dir);
        let region = (target.mr.addr(), target.mr.rkey());
        let mut stepped = Stepped::start(
            Stepped::helper(&dir, Kind::Length),
            &mut target,
            0,
            Kind::Length,
            region,
        );
        for imm in 0..2 * 130 {
            let (len, end) = length(imm);
            target.mr.write(0, &[0; 512]).unwrap();
            stepped.go(1);
            let mut seen = 0;
            while seen < len && stepped.step(1) {
                let mut bytes = [0; 512];
                target.mr.read(0, &mut bytes).unwrap();
                let message = &bytes[end - len..end];
                let (others, last) = message.split_at(len.saturating_sub(LAST));
                let [others_seen, last_seen] =
                    [others, last].map(|bytes| bytes.iter().filter(|&&b| b != 0).count());
                assert!(
                    last_seen == 0 || others_seen == others.len(),
                    "{len} bytes: {others_seen} and {last_seen}"
                );
                assert!(
                    len < LAST || end % LAST != 0 || [0, LAST].contains(&last_seen),
                    "{len} bytes: {last_seen} of the last eight"
                );
                seen = others_seen + last_seen;
            }
            assert_eq!(seen, len);
            stepped.finish();
            stepped.resume();
        }
        stepped.kill();
        drop(target);
        remove_dir(&dir);
    });
}

#[test]
fn a_requester_of_write_imm_stopped_anywhere_stalls_nobody_and_delivers_once() {
    on_one_core(|| stop(Kind::WriteImm));
}

#[test]
fn a_requester_of_send_stopped_anywhere_stalls_nobody_and_delivers_once() {
    on_one_core(|| stop(Kind::Send));
}

#[test]
fn a_sender_of_datagrams_stopped_anywhere_stalls_nobody_and_delivers_once() {
    on_one_core(|| stop(Kind::Datagram));
}

#[test]
fn a_requester_of_write_imm_killed_anywhere_stalls_nobody_and_leaks_nothing() {
    on_one_core(|| kill(Kind::WriteImm));
}

#[test]
fn a_requester_of_send_killed_anywhere_stalls_nobody_and_leaks_nothing() {
    on_one_core(|| kill(Kind::Send));
}

#[test]
fn a_sender_of_datagrams_killed_anywhere_stalls_nobody_and_leaks_nothing() {
    on_one_core(|| kill(Kind::Datagram));
}

#[test]
fn own_receives_of_a_requester_killed_anywhere_all_complete_in_order() {
    on_one_core(|| kill(Kind::Own));
}

#[test]
fn a_queue_pair_destroyed_under_a_requester_of_write_imm_takes_no_receives_with_it() {
    on_one_core(|| destroy(Kind::WriteImm));
}

#[test]
fn a_queue_pair_destroyed_under_a_requester_of_send_takes_no_receives_with_it() {
    on_one_core(|| destroy(Kind::Send));
}
