//! The process that is stepped.

use super::*;
use copyrpc_testing::tracee::{hello, marker};

fn polled_between_markers(end: &End) {
    marker();
    end.hca.poll();
    marker();
}

/// Runs the requester. Each line is an operation; the first line is the target.
pub(crate) fn ask(world: &World, role: Role) {
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
        assert_eq!(
            u64::from_ne_bytes(end.data.get(0)),
            u64::from(imm),
            "the atomic before found one less"
        );
    }
}

/// Runs the owner. The first line names the requester and the sender; each other line announces
/// work from them.
pub(crate) fn own(world: &World) {
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
                let Done::Received {
                    opcode: CqeOpcode::ResponderSendImm,
                    wqe,
                    imm,
                    ..
                } = done
                else {
                    panic!("{done:?}")
                };
                assert_eq!(imm, next, "messages arrive once and in order");
                receives.take(&end, wqe, imm);
                next += 1;
            }
            end.hca.poll();
        }
        // Later work is for the next round.
        marker();
    }
}
