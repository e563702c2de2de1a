//! Memory is deregistered, and queue pairs are destroyed, while a peer is stopped in the middle of
//! using them. Both calls wait for a bounded time. After that, nothing is reused that the peer
//! could still write when it resumes.

use std::path::Path;
use std::ptr::NonNull;

use crate::fabric::{new_dir, remove_dir};
use crate::stepped::{End, Kind, RECEIVES, Stepped, WRITE, begin};
use copyrpc_testing::tracee::Points;
use mlx5::*;

/// Duration of each test, times `MLX5_TEST_SCALE`. Every instruction is tried at most once.
const SECONDS: u64 = 4;
/// The byte that the stepped process writes.
const WRITTEN: u8 = 0xee;

/// Returns the number of instructions of a doorbell that writes `region`.
fn instructions(dir: &Path, target: &mut End, kind: Kind, region: (u64, u32)) -> usize {
    let mut stepped = Stepped::start(Stepped::helper(dir, kind), target, 0, kind, region);
    let instructions = stepped.count(1);
    stepped.kill();
    target.remove(0);
    while !target.arrived(true).is_empty() {}
    instructions
}

/// Makes a requester that has stopped at instruction `point` of the doorbell. Returns the
/// requester, and whether it is inside the doorbell.
fn stopped_at(
    dir: &Path,
    target: &mut End,
    name: u32,
    region: (u64, u32),
    point: usize,
) -> (Stepped, bool) {
    let mut stepped = Stepped::start(
        Stepped::helper(dir, Kind::Write),
        target,
        name,
        Kind::Write,
        region,
    );
    stepped.go(1);
    let inside = stepped.step(point);
    (stepped, inside)
}

fn bytes(mr: &Mr) -> Vec<u8> {
    let mut bytes = vec![0; mr.len()];
    mr.read(0, &mut bytes).unwrap();
    bytes
}

fn written(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&b| b == WRITTEN).count()
}

fn region_of(mr: &Mr) -> (u64, u32) {
    (mr.addr(), mr.rkey())
}

fn alloc(end: &End) -> Mr {
    end.pd
        .alloc(WRITE, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
        .unwrap()
}

#[test]
fn memory_of_the_arena_deregistered_under_a_stopped_writer_is_not_used_again() {
    begin(4);
    let dir = new_dir("arena");
    let mut target = End::open(&dir);
    let mr = alloc(&target);
    let instructions = instructions(&dir, &mut target, Kind::Write, region_of(&mr));
    drop(mr);
    let mut points = Points::new(instructions, SECONDS);
    let mut in_copy = 0;
    for point in points.by_ref() {
        let mr = alloc(&target);
        let (stepped, inside) = stopped_at(&dir, &mut target, 0, region_of(&mr), point);
        let copied = written(&bytes(&mr));
        let before = target.device.info().quarantined;
        // The connection is destroyed before its memory at even points, after it at odd points.
        if point % 2 == 0 {
            target.remove(0);
            drop(mr);
        } else {
            drop(mr);
            target.remove(0);
        }
        let quarantined = target.device.info().quarantined - before;
        let next = alloc(&target);
        assert_eq!(written(&bytes(&next)), 0);
        if inside {
            stepped.finish();
        }
        assert_eq!(
            written(&bytes(&next)),
            0,
            "stopped at instruction {point}: a region that was never shared was written"
        );
        if copied > 0 && copied < WRITE {
            in_copy += 1;
            assert_eq!(
                quarantined, 2,
                "stopped at instruction {point}, in the copy: the region and the queue pair's place"
            );
        }
        stepped.kill();
    }
    println!(
        "{} of {instructions} instructions covered, {in_copy} in the copy, 0 bytes written after",
        points.taken
    );
    assert!(in_copy > 0);
    // The quarantine lasts only while the peer is in the middle of the doorbell, so now it is over.
    let before = target.device.info().quarantined;
    drop(alloc(&target));
    assert_eq!(target.device.info().quarantined, before);
    drop(target);
    remove_dir(&dir);
}

#[test]
fn foreign_memory_under_a_stopped_writer_is_busy_until_it_goes_on_or_dies() {
    begin(4);
    let dir = new_dir("foreign");
    let mut target = End::open(&dir);
    let mut buffer = vec![0u8; WRITE].into_boxed_slice();
    let at = NonNull::new(buffer.as_mut_ptr()).unwrap();
    // SAFETY: the buffer outlives the region, which is deregistered with success before the buffer
    // is filled; it is accessed through `at` only.
    let register = |end: &End| unsafe {
        end.pd
            .register(at, WRITE, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
            .unwrap()
    };
    // SAFETY: as above.
    let fill = |byte: u8| unsafe { at.write_bytes(byte, WRITE) };
    // SAFETY: as above.
    let look = || written(unsafe { core::slice::from_raw_parts(at.as_ptr(), WRITE) });
    let mr = register(&target);
    // The kernel copies the whole message during one instruction of the stepped process. `copy` is
    // the number of instructions before it.
    let mut stepped = Stepped::start(
        Stepped::helper(&dir, Kind::Write),
        &mut target,
        0,
        Kind::Write,
        region_of(&mr),
    );
    stepped.go(1);
    let copy = (1..)
        .take_while(|_| stepped.step(1) && look() == 0)
        .last()
        .unwrap();
    stepped.kill();
    target.remove(0);
    let instructions = instructions(&dir, &mut target, Kind::Write, region_of(&mr));
    mr.deregister().unwrap();
    let mut points = Points::new(instructions, SECONDS);
    let mut busy = 0;
    let mut late = 0;
    let mut kills = 0;
    for point in (copy - 6..copy).chain(&mut points) {
        fill(0);
        let mr = register(&target);
        let (stepped, inside) = stopped_at(&dir, &mut target, 0, region_of(&mr), point);
        let before = look();
        match mr.deregister() {
            Ok(()) => {
                fill(0);
                if inside {
                    stepped.finish();
                }
                stepped.kill();
            }
            Err(Busy(mr)) => {
                busy += 1;
                let Err(Busy(mr)) = mr.deregister() else {
                    panic!("instruction {point}: it has not moved")
                };
                if point % 2 == 0 {
                    stepped.finish();
                    late += u32::from(before == 0 && look() > 0);
                    mr.deregister().unwrap();
                    stepped.kill();
                } else {
                    kills += 1;
                    stepped.kill();
                    mr.deregister().unwrap();
                }
                fill(0);
            }
        }
        assert_eq!(
            look(),
            0,
            "stopped at instruction {point}: memory was written after it was deregistered"
        );
        target.remove(0);
    }
    println!(
        "{} of {instructions} instructions covered, {busy} times busy ({kills} killed then), {late} times written meanwhile, 0 times after",
        points.taken
    );
    assert!(busy > 0 && kills > 0 && late > 0);
    drop((target, buffer));
    remove_dir(&dir);
}

/// The second peer's queue pair is destroyed while the first peer is stopped. The device must
/// remember that the second is in the middle too.
#[test]
fn of_two_stopped_writers_both_are_waited_for() {
    begin(4);
    let dir = new_dir("two");
    let mut target = End::open(&dir);
    let mr = alloc(&target);
    let instructions = instructions(&dir, &mut target, Kind::Write, region_of(&mr));
    let mut points = Points::new(instructions, SECONDS);
    let mut both = 0;
    for point in points.by_ref() {
        mr.write(0, &[0; WRITE]).unwrap();
        let mr = alloc(&target);
        let (first, first_inside) = stopped_at(&dir, &mut target, 0, region_of(&mr), point);
        let (second, second_inside) = stopped_at(&dir, &mut target, 2, region_of(&mr), point);
        let copied = written(&bytes(&mr));
        target.remove(0);
        target.remove(2);
        if first_inside {
            first.finish();
        }
        drop(mr);
        let next = alloc(&target);
        if second_inside {
            second.finish();
        }
        assert_eq!(
            written(&bytes(&next)),
            0,
            "stopped at instruction {point}: a region that was never shared was written"
        );
        both += u32::from(copied > 0 && copied < WRITE);
        first.kill();
        second.kill();
    }
    println!(
        "{} of {instructions} instructions covered, {both} with both in the copy",
        points.taken
    );
    assert!(both > 0);
    drop((mr, target));
    remove_dir(&dir);
}

/// Destroys queues under a stopped requester. The queues that replace them get no message of the
/// destroyed queues, and lose no receive to the requester.
fn next_queues_are_their_own(kind: Kind) {
    begin(4);
    let dir = new_dir(&format!("next-{kind:?}"));
    let mut target = End::open(&dir);
    let region = region_of(&target.mr);
    let instructions = instructions(&dir, &mut target, kind, region);
    let mut points = Points::new(instructions, SECONDS);
    let mut third = End::open(&dir);
    let mut quarantined = 0;
    for point in points.by_ref() {
        let mut stepped = Stepped::start(Stepped::helper(&dir, kind), &mut target, 0, kind, region);
        while target.arrived(true).is_empty() && kind == Kind::Datagram {}
        stepped.go(1);
        let inside = stepped.step(point);
        let before = target.device.info().quarantined;
        target.remove(0);
        quarantined += target.device.info().quarantined - before;
        if kind == Kind::Datagram {
            // The receives stay; only the queue pair is a new one.
            target.add(1, kind);
            if inside {
                stepped.finish();
            }
            target.sweep();
            assert_eq!(
                target.arrived(true),
                [],
                "instruction {point}: a datagram for another queue pair arrived"
            );
            target.remove(1);
            stepped.kill();
            continue;
        }
        target.renew_srq();
        let (target_qp, third_qp) = (target.add(1, kind), third.add(1, Kind::WriteImm));
        target.connect(1, &third_qp);
        third.connect(1, &target_qp);
        if inside {
            stepped.finish();
        }
        let receives = if kind == Kind::Own { 8 } else { RECEIVES };
        for imm in 0..receives as u32 {
            third.post(
                1,
                if kind == Kind::Own {
                    Kind::WriteImm
                } else {
                    kind
                },
                region,
                imm,
            );
            third.ring(1);
        }
        let mut got = vec![];
        for _ in 0..100 {
            got.extend(target.arrived(false));
        }
        assert_eq!(
            got.len(),
            receives,
            "stopped at instruction {point}: the old requester took a receive of the new queue"
        );
        assert!(
            got.iter()
                .zip(0..)
                .all(|(a, imm)| a.is_ok && a.name == 1 && a.imm == imm)
        );
        third.reap();
        third.remove(1);
        target.renew_srq();
        stepped.kill();
    }
    println!(
        "{kind:?}: {} of {instructions} instructions covered, {quarantined} places quarantined, 0 receives lost",
        points.taken
    );
    // Datagrams wait in their sender's memory, so its receivers need not wait for it.
    assert_eq!(quarantined > 0, kind != Kind::Datagram);
    drop((target, third));
    remove_dir(&dir);
}

#[test]
fn a_shared_receive_queue_destroyed_under_a_stopped_requester_shares_nothing_with_the_next_one() {
    next_queues_are_their_own(Kind::Send);
}

#[test]
fn an_own_receive_queue_destroyed_under_a_stopped_requester_shares_nothing_with_the_next_one() {
    next_queues_are_their_own(Kind::Own);
}

#[test]
fn a_datagram_queue_pair_destroyed_under_a_stopped_sender_shares_nothing_with_the_next_one() {
    next_queues_are_their_own(Kind::Datagram);
}
