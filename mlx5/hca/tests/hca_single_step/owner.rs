//! The owner is stepped. The processes that need it are played by this process.

use super::requester::Target;
use super::*;

/// An owner in another process, one device that requests atomics of it, and one device that sends
/// to it.
struct Users {
    dir: PathBuf,
    /// `None` while an owner is alive.
    helper: Option<Helper>,
    asker: End,
    third: End,
    sent: u32,
}

impl Users {
    fn new(dir: PathBuf) -> Self {
        let world = World::shared(&dir);
        let [asker, third] = [(); 2].map(|()| End::new(&world, Service::Connected, false, ALL));
        Self {
            helper: Some(helper(&dir, Role::Owner)),
            dir,
            asker,
            third,
            sent: 0,
        }
    }

    fn start(&mut self) -> (Tracee, Vec<u64>) {
        let (mut tracee, words) = self.helper.take().unwrap().fork();
        let owner = numbers(&words);
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

    /// Runs each verb that needs no owner. Each is complete at once, or a receive is lost.
    fn traffic(&mut self, owner: &[u64], sends: u32) {
        let (place, result) = (self.third.sge(512, 8), self.third.sge(520, 8));
        self.third.data.put(512, u64::from(self.sent).to_ne_bytes());
        self.third
            .post(Opcode::RdmaWrite, 0, &[remote(owner, AREA), place]);
        self.third
            .post(Opcode::RdmaRead, 0, &[remote(owner, AREA), result]);
        for _ in 0..sends {
            post_send(&mut self.third, OF_THIRD + self.sent);
            self.sent += 1;
        }
        self.third.ring();
        let mut due = 2 + sends as usize;
        until("a third party's operation", || {
            self.third.hca.poll();
            let done = self.third.poll();
            assert!(
                done.iter().all(|done| matches!(done, Done::Sent { .. })),
                "{done:?}"
            );
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
        self.helper = Some(tracee.kill());
        self.end_of_asker();
        n
    }

    /// Waits for the end of an atomic whose owner is dead. Returns whether the owner had answered
    /// it; otherwise it must end with an error.
    fn end_of_asker(&mut self) -> bool {
        let mut end = None;
        until("the end of the atomic", || {
            end = self.atomic();
            end.is_some()
        });
        match end.unwrap() {
            Done::Sent { .. } => true,
            Done::Failed {
                opcode: CqeOpcode::RequesterError,
                syndrome: Syndrome::TransportRetryExceeded,
                ..
            } => false,
            done => panic!("{done:?}"),
        }
    }
}

pub(crate) fn stop() {
    watchdog(WATCHDOG * 4 * scale());
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
        assert_eq!(
            u64::from_ne_bytes(users.asker.data.get(0)),
            stops,
            "stopped at instruction {point}: every atomic once"
        );
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

pub(crate) fn kill() {
    watchdog(WATCHDOG * 4 * scale());
    let mut users = Users::new(new_dir("kill-owner"));
    // Devices of a second fabric, which have no connection to the owner.
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
        // A dead peer has not answered, whatever its words contain.
        let is_answered = (0..100).any(|_| users.atomic().is_some());
        users.helper = Some(tracee.kill());
        kills += 1;
        others.traffic();
        answered += u32::from(is_answered || users.end_of_asker());
        // A request that is posted now also ends with an error.
        post_send(&mut users.third, OF_THIRD);
        users.third.ring();
        until("the end of a SEND", || {
            users.third.hca.poll();
            let done = users.third.poll();
            assert!(
                !done.iter().any(|done| matches!(done, Done::Sent { .. })),
                "{done:?}"
            );
            done.iter().any(|done| {
                matches!(
                    done,
                    Done::Failed {
                        syndrome: Syndrome::TransportRetryExceeded,
                        ..
                    }
                )
            })
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
