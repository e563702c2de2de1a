//! Time that is not immediate: a run repeats itself, actors are stepped in the right order, and
//! late gathering finds early reuse.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mlx5::*;

use crate::simulation::simulated::*;
use crate::time::{Mode, Net};

#[test]
fn a_delayed_operation_is_not_there_before_its_time() {
    let (fabric, now_ns) = (LocalFabric::new(), Arc::<AtomicU64>::default());
    let device = || {
        let clock = Clock::Manual(Arc::clone(&now_ns));
        let fabric = FabricSpec::Local(fabric.clone());
        let options = SoftOptions {
            fabric,
            clock,
            timing: Timing::Delay { ns: 2_000 },
            strict: true,
            ..SoftOptions::default()
        };
        Device::open(DeviceSpec::Soft(options)).unwrap()
    };
    let (mut a, mut b) = (End::new(&device()), End::new(&device()));
    connect(&mut a.qp, &mut b.qp, &ConnectOptions::default());
    b.receives(2);
    a.mr.write(0, b"early").unwrap();
    let payload = a.mr.sge(0, 5).unwrap();
    a.qp.post(
        &WriteImm {
            addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            imm: 1,
            payload,
        },
        Signal::Always,
        1,
    )
    .unwrap();
    a.qp.ring();
    now_ns.store(500, Ordering::Relaxed);
    a.qp.post(&imm(&b, 2), Signal::Always, 2).unwrap();
    a.qp.ring();
    let mut bytes = [0; 5];
    for (at_ns, users) in [
        (1_999, vec![]),
        (2_000, vec![1]),
        (2_499, vec![]),
        (2_500, vec![2]),
    ] {
        now_ns.store(at_ns, Ordering::Relaxed);
        b.mr.read(0, &mut bytes).unwrap();
        assert_eq!(bytes == *b"early", at_ns > 2_000, "{at_ns}");
        assert_eq!(
            a.sent(),
            users
                .iter()
                .map(|&user| (Some(user), Ok(())))
                .collect::<Vec<_>>(),
            "{at_ns}"
        );
        assert_eq!(
            b.arrived(),
            users.iter().map(|&user| user as u32).collect::<Vec<_>>(),
            "{at_ns}"
        );
    }
    assert_eq!(
        (
            a.device.soft().unwrap().take_violations(),
            b.device.soft().unwrap().take_violations()
        ),
        (vec![], vec![])
    );
}

/// Four devices, all to all, with faults that only the seed decides.
fn traced_run(seed: u64) -> (u64, u64) {
    let mut simulation = Simulation::new(NicParameters {
        jitter_ns: 5_000,
        seed,
        ..NicParameters::default()
    });
    let options = SoftOptions {
        faults: Faults {
            seed,
            rnr_permille: 50,
            reorder_permille: 100,
            ..Faults::default()
        },
        ..simulation.options()
    };
    let ends: Vec<_> = (0..4)
        .map(|_| Device::open(DeviceSpec::Soft(options.clone())).unwrap())
        .map(|d| End::new(&d))
        .collect();
    let mut qps: Vec<Vec<RcQp>> = ends.iter().map(|_| vec![]).collect();
    for i in 0..4 {
        for j in 0..i {
            let qp = |e: &End| {
                e.pd.create_qp(&e.send_cq, &e.recv_cq, &e.srq, &QpConfig::default())
                    .unwrap()
            };
            let (mut x, mut y) = (qp(&ends[i]), qp(&ends[j]));
            connect(&mut x, &mut y, &ConnectOptions::default());
            qps[i].push(x);
            qps[j].push(y);
        }
    }
    let target = (ends[0].mr.addr(), ends[0].mr.rkey());
    let received = Rc::new(Cell::new(0));
    for (mut end, mut qps) in ends.into_iter().zip(qps) {
        end.receives(200);
        let received = Rc::clone(&received);
        let device = end.device.clone();
        let mut posted = 0;
        let actor = move |_| {
            let arrived = end.arrived().len();
            received.set(received.get() + arrived);
            end.receives(arrived as u64);
            let mut completed = 0;
            end.send_cq.poll(256, |cqe| {
                completed += 1;
                assert!(cqe.result().is_ok());
                assert!(qps.iter_mut().any(|qp| qp.complete(&cqe).is_some()));
            });
            if posted < 300 {
                for qp in &mut qps {
                    posted += 1;
                    // An empty message touches no memory, so the key is not checked.
                    let op = WriteImm {
                        addr: target.0,
                        rkey: target.1,
                        imm: posted,
                        payload: (),
                    };
                    qp.post(&op, Signal::Always, 0).unwrap();
                    qp.ring();
                }
                return Did::Cost(700);
            }
            if arrived + completed > 0 {
                Did::Cost(100)
            } else {
                Did::IdleUntil(None)
            }
        };
        simulation.spawn(&[&device], actor).unwrap();
    }
    assert!(!simulation.run(u64::MAX));
    assert_eq!(received.get(), 4 * 300);
    (simulation.trace_hash(), simulation.now_ns())
}

/// Set in the process that a test starts to repeat the run.
const CHILD: &str = "MLX5_TEST_IS_CHILD";

#[test]
fn the_same_seed_is_the_same_run_also_in_another_process_and_another_seed_another() {
    let runs: Vec<_> = (1..=4).map(traced_run).collect();
    let said = format!("the runs were {runs:x?}\n");
    if std::env::var_os(CHILD).is_some() {
        return print!("{said}");
    }
    assert_eq!(runs, (1..=4).map(traced_run).collect::<Vec<_>>());
    // The child process has different addresses, process id, keys and seeds of hash maps.
    let name = "simulation::virtual_time::the_same_seed_is_the_same_run_also_in_another_process_and_another_seed_another";
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    let output = child
        .args([name, "--exact", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    assert!(String::from_utf8(output.stdout).unwrap().contains(&said));
    let mut hashes: Vec<_> = runs.iter().map(|run| run.0).collect();
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 4);
}

#[test]
fn a_ping_pong_of_two_actors_takes_what_the_parameters_add_up_to_and_idle_actors_are_not_stepped() {
    const ROUNDS: u32 = 100;
    const WORK_NS: u64 = 77;
    let mut simulation = Simulation::new(NicParameters {
        context_miss_ns: 0,
        ..NIC
    });
    let (mut a, mut b) = pair(&mut simulation, &ConnectOptions::default());
    let bystander = End::new(&Device::simulated(&mut simulation).unwrap());
    a.receives(200);
    b.receives(200);
    let (to_a, to_b) = (imm(&a, 0), imm(&b, 0));
    let (devices, others) = (
        [a.device.clone(), b.device.clone()],
        bystander.device.clone(),
    );
    let steps = Rc::new(Cell::new([0u32; 3]));
    let pongs = Rc::new(RefCell::new(vec![]));
    let count = |i: usize| {
        let steps = Rc::clone(&steps);
        move || {
            let mut now = steps.get();
            now[i] += 1;
            steps.set(now);
        }
    };
    let step_a = count(0);
    let step_b = count(1);
    let step_c = count(2);
    let (mut sent, log) = (0, Rc::clone(&pongs));
    // Works, then sends, then sleeps until the answer.
    let mut has_worked = true;
    let client = move |now_ns| {
        step_a();
        if !a.arrived().is_empty() {
            log.borrow_mut().push(now_ns);
            has_worked = false;
        } else if has_worked && sent > 0 {
            return Did::IdleUntil(None);
        }
        if !has_worked {
            has_worked = true;
            sent += 1;
            return if sent > ROUNDS {
                Did::IdleUntil(None)
            } else {
                post(&mut a.qp, &to_b)
            };
        }
        sent += 1;
        post(&mut a.qp, &to_b)
    };
    let server = move |_| {
        step_b();
        if b.arrived().is_empty() {
            Did::IdleUntil(None)
        } else {
            post(&mut b.qp, &to_a)
        }
    };
    fn post(qp: &mut RcQp, op: &WriteImm<()>) -> Did {
        qp.post(op, Signal::Reclaim, 0).unwrap();
        qp.ring();
        Did::Cost(WORK_NS)
    }
    simulation.spawn(&[&devices[0]], client).unwrap();
    simulation.spawn(&[&devices[1]], server).unwrap();
    let idle = move |_| {
        step_c();
        Did::IdleUntil(None)
    };
    simulation.spawn(&[&others], idle).unwrap();
    assert!(!simulation.run(u64::MAX));
    let one_way = WAY + NIC.receive_ns;
    assert_eq!(
        *pongs.borrow(),
        (1..=u64::from(ROUNDS))
            .map(|i| i * 2 * one_way)
            .collect::<Vec<_>>()
    );
    let [client, server, idle] = steps.get();
    assert_eq!(idle, 1, "nothing ever happened to its device");
    // Woken once by the message, stepped again after its work, and woken by the few completions
    // that the queue requests.
    assert!(
        (2 * ROUNDS..2 * ROUNDS + 10).contains(&client)
            && (2 * ROUNDS..2 * ROUNDS + 10).contains(&server),
        "{client} {server}"
    );
}

#[test]
fn an_actor_that_watches_memory_is_woken_by_a_write_without_completion_and_by_its_own_timer() {
    let mut simulation = Simulation::new(NIC);
    let (mut a, b, start_ns) = warm_pair(&mut simulation);
    let seen = Rc::new(RefCell::new(vec![]));
    let (device, log) = (b.device.clone(), Rc::clone(&seen));
    let (addr, rkey) = (b.mr.addr(), b.mr.rkey());
    let watcher = move |now_ns| {
        let mut byte = [0];
        b.mr.read(0, &mut byte).unwrap();
        log.borrow_mut().push((now_ns, byte[0]));
        Did::IdleUntil((now_ns < start_ns + 500).then_some(start_ns + 500))
    };
    simulation.spawn(&[&device], watcher).unwrap();
    a.qp.post(
        &Write {
            addr,
            rkey,
            payload: Inline(&[9]),
        },
        Signal::Reclaim,
        0,
    )
    .unwrap();
    a.qp.ring();
    assert!(!simulation.run(u64::MAX));
    assert_eq!(
        *seen.borrow(),
        [(start_ns, 0), (start_ns + 500, 0), (start_ns + WAY + 1, 9)]
    );
}

#[test]
fn devices_of_another_network_are_refused_and_a_removed_one_is_dead_to_its_peers() {
    let mut simulation = Simulation::new(NIC);
    let mut other = Simulation::new(NIC);
    let foreign = Device::simulated(&mut other).unwrap();
    assert_eq!(simulation.add(&foreign), Err(ForeignDevice));
    assert_eq!(
        simulation.spawn(&[&foreign], |_| Did::IdleUntil(None)),
        Err(ForeignDevice)
    );
    let (mut a, b) = pair(&mut simulation, &ConnectOptions::default());
    let op = Write {
        addr: b.mr.addr(),
        rkey: b.mr.rkey(),
        payload: (),
    };
    simulation.remove(&b.device);
    drop(b);
    a.qp.post(&op, Signal::Always, 1).unwrap();
    a.qp.ring();
    assert!(!simulation.run(u64::MAX));
    assert_eq!(a.sent(), [(Some(1), Err(Syndrome::TransportRetryExceeded))]);
}

#[test]
fn what_a_device_had_under_way_when_its_host_lost_power_has_no_effect_and_its_peers_find_it_gone() {
    let mut simulation = Simulation::new(NIC);
    let (mut a, mut b) = pair(&mut simulation, &ConnectOptions::default());
    b.qp.post(
        &Write {
            addr: a.mr.addr(),
            rkey: a.mr.rkey(),
            payload: Inline(&[9]),
        },
        Signal::Always,
        1,
    )
    .unwrap();
    b.qp.ring();
    simulation.kill(&b.device);
    a.qp.post(
        &Write {
            addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            payload: (),
        },
        Signal::Always,
        1,
    )
    .unwrap();
    a.qp.ring();
    assert!(!simulation.run(u64::MAX));
    assert_eq!(a.sent(), [(Some(1), Err(Syndrome::TransportRetryExceeded))]);
    let mut byte = [1];
    a.mr.read(0, &mut byte).unwrap();
    assert_eq!(byte, [0]);
}

/// A deliberate bug: the source buffer is reused before the completion. Returns the arrived bytes,
/// and strict mode's report.
fn early_reuse(mode: Mode) -> (Vec<u8>, Vec<Rule>) {
    let net = Net::in_mode(mode);
    let (mut a, mut b) = (End::new(&net.device()), End::new(&net.device()));
    connect(&mut a.qp, &mut b.qp, &ConnectOptions::default());
    let mut arrived = vec![];
    for message in [b"first ", b"second"] {
        a.mr.write(0, message).unwrap();
        let payload = a.mr.sge(0, 6).unwrap();
        let op = Write {
            addr: b.mr.addr() + 6 * arrived.len() as u64,
            rkey: b.mr.rkey(),
            payload,
        };
        // The first WRITE is not even signaled, so its completion is unknown.
        let signal = if arrived.is_empty() {
            Signal::Reclaim
        } else {
            Signal::Always
        };
        a.qp.post(&op, signal, 0).unwrap();
        a.qp.ring();
        arrived.push(());
    }
    net.settle(|| !a.sent().is_empty());
    let mut bytes = vec![0; 12];
    b.mr.read(0, &mut bytes).unwrap();
    assert_eq!(b.device.soft().unwrap().take_violations(), []);
    (
        bytes,
        a.device
            .soft()
            .unwrap()
            .take_violations()
            .iter()
            .map(|v| v.rule)
            .collect(),
    )
}

#[test]
fn a_source_used_again_before_its_completion_is_found_in_every_time_but_the_immediate() {
    assert_eq!(
        early_reuse(Mode::Immediate),
        (b"first second".to_vec(), vec![]),
        "immediate time hides it"
    );
    for mode in [Mode::Delay, Mode::Virtual] {
        assert_eq!(
            early_reuse(mode),
            (b"secondsecond".to_vec(), vec![Rule::SourceChanged]),
            "{mode:?}"
        );
    }
}

#[test]
fn a_source_used_again_between_effect_and_acknowledgement_is_found_too() {
    let mut simulation = Simulation::new(NIC);
    let (mut a, b, start_ns) = warm_pair(&mut simulation);
    a.mr.write(0, b"as it was").unwrap();
    let payload = (Inline(&b"inline "[..]), a.mr.sge(0, 9).unwrap());
    a.qp.post(
        &Write {
            addr: b.mr.addr(),
            rkey: b.mr.rkey(),
            payload,
        },
        Signal::Always,
        3,
    )
    .unwrap();
    a.qp.ring();
    simulation.run(start_ns + WAY + 16);
    let mut bytes = [0; 16];
    b.mr.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"inline as it was", "it has arrived");
    assert_eq!(a.sent(), [], "and nobody may know");
    a.mr.write(8, b"?").unwrap();
    simulation.run(u64::MAX);
    assert_eq!(a.sent(), [(Some(3), Ok(()))]);
    let found = a.device.soft().unwrap().take_violations();
    assert_eq!(
        found.iter().map(|v| (v.queue, v.rule)).collect::<Vec<_>>(),
        [(Queue::Send(a.qp.qpn()), Rule::SourceChanged)]
    );
}

#[test]
fn arrivals_are_in_the_receivers_trace() {
    let mut simulation = Simulation::new(NIC);
    let (mut a, mut b) = pair(&mut simulation, &ConnectOptions::default());
    b.receives(2);
    let mut hashes = vec![b.device.soft().unwrap().trace_hash().unwrap()];
    for i in 0..2 {
        a.qp.post(&imm(&b, i), Signal::Reclaim, 0).unwrap();
        a.qp.ring();
        simulation.run(u64::MAX);
        hashes.push(b.device.soft().unwrap().trace_hash().unwrap());
    }
    assert!(
        hashes[0] != hashes[1] && hashes[1] != hashes[2],
        "{hashes:x?}"
    );
}

#[test]
fn an_actor_misses_no_arrival_however_many_queue_pairs_it_has() {
    const QPS: usize = 40;
    let mut simulation = Simulation::new(NicParameters {
        receive_ns: 0,
        ..NIC
    });
    let (mut server, client) = (
        End::new(&Device::simulated(&mut simulation).unwrap()),
        End::new(&Device::simulated(&mut simulation).unwrap()),
    );
    let config = QpConfig {
        max_send_wr: 16,
        max_inline_data: 0,
        ..QpConfig::default()
    };
    let mut pairs: Vec<_> = (0..QPS)
        .map(|_| {
            let mut qp = client
                .pd
                .create_qp(&client.send_cq, &client.recv_cq, &client.srq, &config)
                .unwrap();
            let mut peer = server
                .pd
                .create_qp(&server.send_cq, &server.recv_cq, &server.srq, &config)
                .unwrap();
            connect(&mut qp, &mut peer, &ConnectOptions::default());
            (qp, peer)
        })
        .collect();
    let op = imm(&server, 0);
    server.receives(200);
    let device = server.device.clone();
    let arrived = Rc::new(Cell::new(0));
    let count = Rc::clone(&arrived);
    let actor = move |_| {
        count.set(count.get() + server.arrived().len());
        Did::IdleUntil(None)
    };
    simulation.spawn(&[&device], actor).unwrap();
    for round in 1..=4 {
        for (qp, _) in &mut pairs {
            qp.post(&op, Signal::Reclaim, 0).unwrap();
            qp.ring();
        }
        assert!(!simulation.run(u64::MAX));
        assert_eq!(arrived.get(), round * QPS);
    }
}

#[test]
fn a_peer_that_nobody_steps_stops_its_sender_and_not_the_simulation() {
    let mut simulation = Simulation::new(NIC);
    let mut a = End::new(&Device::simulated(&mut simulation).unwrap());
    let mut b = End::new(&Device::open(DeviceSpec::Soft(simulation.options())).unwrap());
    connect(&mut a.qp, &mut b.qp, &ConnectOptions::default());
    b.receives(200);
    (0..200).for_each(|i| a.qp.post(&imm(&b, i), Signal::Always, i.into()).unwrap());
    a.qp.ring();
    assert!(simulation.run(1_000_000_000), "it is tried again and again");
    let first = a.sent().len();
    assert!(
        (100..200).contains(&first),
        "as many as a lane holds: {first}"
    );
    simulation.add(&b.device).unwrap();
    assert!(!simulation.run(u64::MAX));
    assert_eq!((first + a.sent().len(), b.arrived().len()), (200, 200));
}

#[test]
fn a_working_actor_is_not_interrupted() {
    let mut simulation = Simulation::new(NIC);
    let (mut a, mut b, start_ns) = warm_pair(&mut simulation);
    b.receives(1);
    let op = imm(&b, 0);
    let (device, steps) = (b.device.clone(), Rc::new(RefCell::new(vec![])));
    let log = Rc::clone(&steps);
    let actor = move |now_ns| {
        log.borrow_mut()
            .push((now_ns - start_ns, b.arrived().len()));
        if log.borrow().len() < 3 {
            Did::Cost(WAY)
        } else {
            Did::IdleUntil(None)
        }
    };
    simulation.spawn(&[&device], actor).unwrap();
    a.qp.post(&op, Signal::Reclaim, 0).unwrap();
    a.qp.ring();
    assert!(!simulation.run(u64::MAX));
    assert_eq!(
        *steps.borrow(),
        [(0, 0), (WAY, 0), (2 * WAY, 1)],
        "the message came at WAY + {}",
        NIC.receive_ns
    );
}

#[test]
fn a_message_that_a_fault_passed_over_arrives_when_nothing_else_happens() {
    let mut simulation = Simulation::new(NIC);
    let faults = Faults {
        seed: 3,
        reorder_permille: 700,
        ..Faults::default()
    };
    let device = Device::open(DeviceSpec::Soft(SoftOptions {
        faults,
        ..simulation.options()
    }))
    .unwrap();
    let (mut a, mut b) = (
        End::new(&Device::simulated(&mut simulation).unwrap()),
        End::new(&device),
    );
    simulation.add(&device).unwrap();
    connect(&mut a.qp, &mut b.qp, &ConnectOptions::default());
    b.receives(50);
    for i in 0..50 {
        a.qp.post(&imm(&b, i), Signal::Reclaim, 0).unwrap();
        a.qp.ring();
        assert!(!simulation.run(u64::MAX));
        a.sent();
        assert_eq!(b.arrived(), [i]);
    }
}

/// An actor whose next turn is at the maximum time.
struct Last;

impl Actor for Last {
    fn step(&mut self, _: u64) -> Did {
        Did::Cost(u64::MAX)
    }
}

#[test]
fn a_turn_at_the_end_of_time_never_comes() {
    let mut simulation = Simulation::new(NicParameters::default());
    simulation.spawn(&[], Last).unwrap();
    assert!(!simulation.run(u64::MAX));
    assert_eq!(simulation.actor_steps(), 1);
}
