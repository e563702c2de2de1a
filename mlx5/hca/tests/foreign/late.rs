//! WQEs that are executed late, and whose completions are late again.

use std::sync::atomic::Ordering;

use mlx5_hca::Rule;
use mlx5_hca::wire::*;

use super::driver::{ALL, End, World};
use super::{received, sent};

/// The longest delay of a WQE, and of its completion.
const LATE_NS: u64 = 2_000_000;

#[test]
fn a_receive_completes_before_the_late_send_that_caused_it_and_the_order_of_a_queue_stays() {
    let world = World::late();
    let [mut a, mut b] = End::pair(&world, false, ALL);
    b.receive_at(&[4096, 4200, 4304], 32);
    b.hca.poll();
    for _ in 0..3 {
        a.post(Opcode::Send, 0, &[a.sge(64, 32)]);
    }
    a.ring();
    assert_eq!(a.exchange(&mut b), (vec![], vec![]), "nothing is due");
    let (mut done, mut arrived, mut was_early) = (vec![], vec![], false);
    for _ in 0..40 {
        world.now_ns.fetch_add(LATE_NS / 20, Ordering::Relaxed);
        let (new, there) = a.exchange(&mut b);
        done.extend(new);
        arrived.extend(there);
        was_early |= arrived.len() > done.len();
    }
    assert_eq!(done, [0, 1, 2].map(sent));
    let opcode = CqeOpcode::ResponderSend;
    assert_eq!(arrived, [0, 1, 2].map(|wqe| received(opcode, wqe, 0)));
    assert!(was_early);
    assert_eq!(a.hca.take_violations(), []);
}

#[test]
fn a_buffer_that_is_written_before_the_completion_is_a_violation_and_one_written_later_is_not() {
    for is_early in [true, false] {
        let world = World::late();
        let [mut a, mut b] = End::pair(&world, false, ALL);
        a.post_now(Opcode::RdmaWrite, 0, &[b.remote(0), a.sge(64, 32)]);
        a.exchange(&mut b);
        if is_early {
            a.data.put(64, [9u8]);
        }
        for _ in 0..2 {
            world.pass_a_second();
            a.exchange(&mut b);
        }
        a.data.put(64, [8u8]);
        let rules: Vec<_> = a.hca.take_violations().iter().map(|it| it.rule).collect();
        let expected: &[_] = if is_early {
            &[Rule::SourceChanged]
        } else {
            &[]
        };
        assert_eq!(rules, expected);
        assert_eq!(b.data.get(0), if is_early { [9u8] } else { [0u8] });
    }
}
