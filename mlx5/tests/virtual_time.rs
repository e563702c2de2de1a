//! Time that is not immediate: what the NIC model adds up to, that a run repeats itself, and what only late gathering finds. All times are
//! virtual, so they are exact.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mlx5::*;

#[path = "support/time.rs"]
mod time;

use time::{Mode, Net};

const RIGHTS: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);
const SIZE: usize = 1 << 16;

/// Numbers that cannot be mistaken for one another when they are added up.
const NIC: NicParameters = NicParameters {
    doorbell_ns: 1_000_000,
    send_ns: 100_000,
    byte_ps: 1_000,
    link_ns: 10_000_000,
    receive_ns: 20_000,
    unordered_receive_ns: 50_000,
    context_entries: 8,
    context_miss_ns: 100_000_000,
    jitter_ns: 0,
    seed: 1,
};
/// From the doorbell to the effect of an empty WRITE, contexts held.
const WAY: u64 = NIC.doorbell_ns + NIC.send_ns + NIC.link_ns;

struct End {
    qp: RcQp,
    send_cq: Cq,
    recv_cq: Cq,
    srq: Srq,
    mr: Mr,
    pd: Pd,
    device: Device,
}

impl End {
    fn new(device: &Device) -> Self {
        let pd = device.alloc_pd();
        let (send_cq, recv_cq) = (device.create_cq(256).unwrap(), device.create_cq(256).unwrap());
        let srq = pd.create_srq(255, 0).unwrap();
        let qp =
            pd.create_qp(&send_cq, &recv_cq, &srq, &QpConfig { max_send_wr: 256, max_inline_data: 220, ..QpConfig::default() }).unwrap();
        let mr = pd.alloc(SIZE, RIGHTS).unwrap();
        Self { qp, send_cq, recv_cq, srq, mr, pd, device: device.clone() }
    }

    fn receives(&mut self, n: u64) {
        (0..n).for_each(|i| self.srq.post(&[], i).unwrap());
        self.srq.ring();
    }

    /// Users of the sends that are complete, and whether they succeeded.
    fn sent(&mut self) -> Vec<(Option<u64>, Result<(), Syndrome>)> {
        let mut got = vec![];
        self.send_cq.poll(256, |cqe| got.push((self.qp.complete(&cqe), cqe.result().map_err(|e| e.syndrome))));
        got
    }

    /// Immediates that have arrived.
    fn arrived(&mut self) -> Vec<u32> {
        let mut got = vec![];
        self.recv_cq.poll(256, |cqe| {
            cqe.result().unwrap();
            self.srq.complete(cqe.wqe_counter());
            got.push(cqe.imm());
        });
        got
    }
}

fn connect(a: &mut RcQp, b: &mut RcQp, options: &ConnectOptions) {
    a.connect(&b.address(), options).unwrap();
    b.connect(&a.address(), options).unwrap();
}

fn pair(simulation: &mut Simulation<'_>, options: &ConnectOptions) -> (End, End) {
    let (mut a, mut b) = (End::new(&simulation.device().unwrap()), End::new(&simulation.device().unwrap()));
    connect(&mut a.qp, &mut b.qp, options);
    (a, b)
}

fn imm(to: &End, imm: u32) -> WriteImm<()> {
    WriteImm { addr: to.mr.addr(), rkey: to.mr.rkey(), imm, payload: () }
}

/// A write, which has the contexts of both ends held after it; then the time is the second value.
fn warm_pair(simulation: &mut Simulation<'_>) -> (End, End, u64) {
    let (mut a, b) = pair(simulation, &ConnectOptions::default());
    a.qp.post(&Write { addr: b.mr.addr(), rkey: b.mr.rkey(), payload: () }, Signal::Always, 0).unwrap();
    a.qp.ring();
    simulation.run(u64::MAX);
    assert_eq!(a.sent(), [(Some(0), Ok(()))]);
    assert_eq!(simulation.now_ns(), WAY + NIC.link_ns + 2 * NIC.context_miss_ns, "a miss at either end");
    (a, b, simulation.now_ns())
}

/// When each immediate arrives and each send completes, from now on.
fn times(simulation: &mut Simulation<'_>, a: &mut End, b: &mut End) -> (Vec<(u32, u64)>, Vec<(u64, u64)>) {
    let start_ns = simulation.now_ns();
    let (mut arrivals, mut completions) = (vec![], vec![]);
    while let Some(at_ns) = simulation.step() {
        arrivals.extend(b.arrived().into_iter().map(|imm| (imm, at_ns - start_ns)));
        completions.extend(a.sent().into_iter().map(|(user, result)| {
            result.unwrap();
            (user.unwrap(), at_ns - start_ns)
        }));
    }
    (arrivals, completions)
}

#[test]
fn a_write_costs_its_wqe_its_bytes_and_the_way_and_is_acknowledged_after_the_way_back() {
    let mut simulation = Simulation::new(NIC);
    let (mut a, mut b, _) = warm_pair(&mut simulation);
    let write = |n: u32| Write { addr: b.mr.addr(), rkey: b.mr.rkey(), payload: a.mr.sge(0, n).unwrap() };
    a.qp.post(&write(1000), Signal::Always, 1).unwrap();
    a.qp.post(&write(3000), Signal::Always, 2).unwrap();
    a.qp.ring();
    let (_, sent) = times(&mut simulation, &mut a, &mut b);
    // 1 ns per byte; the second leaves behind the first.
    let first = WAY + 1000 + NIC.link_ns;
    assert_eq!(sent, [(1, first), (2, first + NIC.send_ns + 3000)]);
}

#[test]
fn a_read_and_an_atomic_take_their_bytes_on_the_way_back() {
    let mut simulation = Simulation::new(NIC);
    let (mut a, mut b, _) = warm_pair(&mut simulation);
    a.qp.post(&Read { addr: b.mr.addr(), rkey: b.mr.rkey(), into: a.mr.sge(0, 5000).unwrap() }, Signal::Always, 1).unwrap();
    a.qp.ring();
    let (_, sent) = times(&mut simulation, &mut a, &mut b);
    assert_eq!(sent, [(1, WAY + NIC.send_ns + 5000 + NIC.link_ns)]);
    let into = a.mr.sge(0, 8).unwrap();
    a.qp.post(&FetchAdd { addr: b.mr.addr(), rkey: b.mr.rkey(), add: 1, into }, Signal::Always, 2).unwrap();
    a.qp.ring();
    let (_, sent) = times(&mut simulation, &mut a, &mut b);
    assert_eq!(sent, [(2, WAY + NIC.send_ns + 8 + NIC.link_ns)]);
}

#[test]
fn a_fenced_write_leaves_when_the_read_before_it_is_back() {
    let mut simulation = Simulation::new(NIC);
    let (mut a, mut b, _) = warm_pair(&mut simulation);
    b.mr.write(0, b"brought by the read").unwrap();
    let sge = a.mr.sge(0, 19).unwrap();
    a.qp.post(&Read { addr: b.mr.addr(), rkey: b.mr.rkey(), into: sge }, Signal::Reclaim, 1).unwrap();
    a.qp.post(&Write { addr: b.mr.addr() + 100, rkey: b.mr.rkey(), payload: sge }, Signal::Always.fence(), 2).unwrap();
    a.qp.ring();
    let (_, sent) = times(&mut simulation, &mut a, &mut b);
    let read = WAY + NIC.send_ns + 19 + NIC.link_ns;
    assert_eq!(sent, [(2, read + WAY + 19 + NIC.link_ns)]);
    let mut bytes = [0; 19];
    b.mr.read(100, &mut bytes).unwrap();
    assert_eq!(&bytes, b"brought by the read");
}

#[test]
fn a_receiver_takes_receives_at_its_rate_and_slower_from_a_list_out_of_order() {
    let mut simulation = Simulation::new(NicParameters { send_ns: 0, ..NIC });
    let (mut a, mut b) = pair(&mut simulation, &ConnectOptions::default());
    let way = NIC.doorbell_ns + NIC.link_ns;
    b.receives(255);
    let mut burst = |simulation: &mut Simulation<'_>, b: &mut End| {
        (0..8).for_each(|i| a.qp.post(&imm(b, i), Signal::Reclaim, 0).unwrap());
        a.qp.ring();
        let mut counters = vec![];
        let mut at = vec![];
        let start_ns = simulation.now_ns();
        while let Some(at_ns) = simulation.step() {
            b.recv_cq.poll(8, |cqe| {
                counters.push(cqe.wqe_counter());
                at.push(at_ns - start_ns);
            });
        }
        a.sent();
        (counters, at)
    };
    burst(&mut simulation, &mut b);
    let (mut counters, at) = burst(&mut simulation, &mut b);
    assert_eq!(at, (1..=8).map(|i| way + i * NIC.receive_ns).collect::<Vec<_>>(), "a list in order");
    // The rest of the list, so that those of the next bursts are what is returned now, in an order with no neighbours.
    for _ in 0..29 {
        counters.extend(burst(&mut simulation, &mut b).0);
    }
    counters.sort_unstable();
    let mut order: Vec<u16> = counters.iter().copied().filter(|c| c % 2 == 0).collect();
    order.extend(counters.iter().copied().filter(|c| c % 2 == 1));
    for counter in order {
        b.srq.complete(counter).unwrap();
        b.srq.post(&[], 0).unwrap();
    }
    b.srq.ring();
    // What was left of the first posting: 255 less 31 bursts.
    burst(&mut simulation, &mut b);
    let (_, at) = burst(&mut simulation, &mut b);
    assert_eq!(at, (1..=8).map(|i| way + i * NIC.unordered_receive_ns).collect::<Vec<_>>(), "the same list out of order");
}

#[test]
fn more_queue_pairs_in_rotation_than_contexts_cost_a_miss_for_every_message() {
    let round_ns = |qps: usize| {
        let mut simulation = Simulation::new(NicParameters { doorbell_ns: 0, send_ns: 100, link_ns: 0, context_miss_ns: 300, ..NIC });
        let (server, client) = (End::new(&simulation.device().unwrap()), End::new(&simulation.device().unwrap()));
        let config = QpConfig { max_send_wr: 64, max_inline_data: 0, ..QpConfig::default() };
        let mut pairs: Vec<_> = (0..qps)
            .map(|_| {
                let mut qp = server.pd.create_qp(&server.send_cq, &server.recv_cq, &server.srq, &config).unwrap();
                let mut peer = client.pd.create_qp(&client.send_cq, &client.recv_cq, &client.srq, &config).unwrap();
                connect(&mut qp, &mut peer, &ConnectOptions::default());
                (qp, peer)
            })
            .collect();
        let mut round_ns = 0;
        // The first round fetches every context.
        for _ in 0..2 {
            let start_ns = simulation.now_ns();
            for (qp, _) in &mut pairs {
                qp.post(&Write { addr: client.mr.addr(), rkey: client.mr.rkey(), payload: () }, Signal::Reclaim, 0).unwrap();
                qp.ring();
            }
            simulation.run(u64::MAX);
            round_ns = simulation.now_ns() - start_ns;
        }
        round_ns
    };
    assert_eq!(round_ns(8), 8 * 100, "as many as there are contexts");
    // Least recently used, in rotation: the one that is needed next is the one that went. Both ends miss; the peer's only delays the last.
    assert_eq!(round_ns(9), 9 * (100 + 300) + 300);
    assert_eq!(round_ns(64), 64 * (100 + 300) + 300);
}

#[test]
fn messages_of_a_queue_pair_keep_their_order_under_jitter() {
    for seed in 0..20 {
        let mut simulation = Simulation::new(NicParameters { jitter_ns: 50_000_000, context_miss_ns: 0, seed, ..NIC });
        let (mut a, mut b) = pair(&mut simulation, &ConnectOptions::default());
        b.receives(100);
        for i in 0..100 {
            a.qp.post(&imm(&b, i), Signal::Always, i.into()).unwrap();
            a.qp.ring();
        }
        let (arrived, sent) = times(&mut simulation, &mut a, &mut b);
        assert_eq!(arrived.iter().map(|&(imm, _)| imm).collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
        assert_eq!(sent.iter().map(|&(user, _)| user).collect::<Vec<_>>(), (0..100).collect::<Vec<_>>());
        assert!(arrived.windows(2).any(|w| w[1].1 - w[0].1 > 5 * NIC.send_ns), "there is jitter");
    }
}

#[test]
fn a_delayed_operation_is_not_there_before_its_time() {
    let (fabric, now_ns) = (LocalFabric::new(), Arc::<AtomicU64>::default());
    let device = || {
        let clock = Clock::Manual(Arc::clone(&now_ns));
        let fabric = FabricSpec::Local(fabric.clone());
        let options = SoftOptions { fabric, clock, timing: Timing::Delay { ns: 2_000 }, strict: true, ..SoftOptions::default() };
        Device::open(&DeviceSpec::Soft(options)).unwrap()
    };
    let (mut a, mut b) = (End::new(&device()), End::new(&device()));
    connect(&mut a.qp, &mut b.qp, &ConnectOptions::default());
    b.receives(2);
    a.mr.write(0, b"early").unwrap();
    let payload = a.mr.sge(0, 5).unwrap();
    a.qp.post(&WriteImm { addr: b.mr.addr(), rkey: b.mr.rkey(), imm: 1, payload }, Signal::Always, 1).unwrap();
    a.qp.ring();
    now_ns.store(500, Ordering::Relaxed);
    a.qp.post(&imm(&b, 2), Signal::Always, 2).unwrap();
    a.qp.ring();
    let mut bytes = [0; 5];
    for (at_ns, users) in [(1_999, vec![]), (2_000, vec![1]), (2_499, vec![]), (2_500, vec![2])] {
        now_ns.store(at_ns, Ordering::Relaxed);
        b.mr.read(0, &mut bytes).unwrap();
        assert_eq!(bytes == *b"early", at_ns > 2_000, "{at_ns}");
        assert_eq!(a.sent(), users.iter().map(|&user| (Some(user), Ok(()))).collect::<Vec<_>>(), "{at_ns}");
        assert_eq!(b.arrived(), users.iter().map(|&user| user as u32).collect::<Vec<_>>(), "{at_ns}");
    }
    assert_eq!((a.device.violations(), b.device.violations()), (vec![], vec![]));
}

#[test]
fn rnr_timers_and_transport_time_outs_are_exact_in_virtual_time() {
    let options = ConnectOptions { rnr_retry: 3, rnr_timer_ns: 7_000_000, ..ConnectOptions::default() };
    let mut simulation = Simulation::new(NIC);
    let (mut a, mut b) = pair(&mut simulation, &options);
    // Contexts, and a receive each time, whose cost is the receiver's also if there is none.
    let first_ns = WAY + NIC.receive_ns + 2 * NIC.context_miss_ns;
    a.qp.post(&imm(&b, 1), Signal::Always, 1).unwrap();
    a.qp.ring();
    assert!(simulation.run(first_ns + 7_000_000 + 1));
    b.receives(1);
    let at_ns = simulation.now_ns();
    let (arrived, sent) = times(&mut simulation, &mut a, &mut b);
    let arrival_ns = first_ns + 2 * 7_000_000 - at_ns;
    assert_eq!((arrived, sent), (vec![(1, arrival_ns)], vec![(1, arrival_ns + NIC.link_ns)]), "at the second timer");

    let start_ns = simulation.now_ns();
    a.qp.post(&imm(&b, 2), Signal::Always, 2).unwrap();
    a.qp.ring();
    assert!(!simulation.run(u64::MAX));
    assert_eq!(a.sent(), [(Some(2), Err(Syndrome::RnrRetryExceeded))]);
    assert_eq!(simulation.now_ns() - start_ns, WAY + NIC.receive_ns + 3 * 7_000_000 + NIC.link_ns);

    // A peer that is there and not connected has the whole time-out.
    let mut simulation = Simulation::new(NIC);
    let (mut a, b) = (End::new(&simulation.device().unwrap()), End::new(&simulation.device().unwrap()));
    a.qp.connect(&b.qp.address(), &options).unwrap();
    a.qp.post(&Write { addr: b.mr.addr(), rkey: b.mr.rkey(), payload: () }, Signal::Always, 1).unwrap();
    a.qp.ring();
    assert!(!simulation.run(u64::MAX));
    assert_eq!(a.sent(), [(Some(1), Err(Syndrome::TransportRetryExceeded))]);
    assert_eq!(simulation.now_ns(), WAY + 2 * NIC.context_miss_ns + options.transport_timeout_ns() + NIC.link_ns);
}

/// Four devices, all to all, with faults that only the seed decides.
fn traced_run(seed: u64) -> (u64, u64) {
    let mut simulation = Simulation::new(NicParameters { jitter_ns: 5_000, seed, ..NicParameters::default() });
    let options = SoftOptions { faults: Faults { seed, rnr_permille: 50, ..Faults::default() }, ..simulation.options() };
    let ends: Vec<_> = (0..4).map(|_| Device::open(&DeviceSpec::Soft(options.clone())).unwrap()).map(|d| End::new(&d)).collect();
    let mut qps: Vec<Vec<RcQp>> = ends.iter().map(|_| vec![]).collect();
    for i in 0..4 {
        for j in 0..i {
            let qp = |e: &End| e.pd.create_qp(&e.send_cq, &e.recv_cq, &e.srq, &QpConfig::default()).unwrap();
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
                    // An empty message touches no memory, so the key is not looked at.
                    let op = WriteImm { addr: target.0, rkey: target.1, imm: posted, payload: () };
                    qp.post(&op, Signal::Always, 0).unwrap();
                    qp.ring();
                }
                return Did::Cost(700);
            }
            if arrived + completed > 0 { Did::Cost(100) } else { Did::IdleUntil(None) }
        };
        simulation.spawn(&[&device], actor).unwrap();
    }
    assert!(!simulation.run(u64::MAX));
    assert_eq!(received.get(), 4 * 300);
    (simulation.trace_hash(), simulation.now_ns())
}

#[test]
fn the_same_seed_is_the_same_run_and_another_seed_another() {
    let runs: Vec<_> = (1..=4).map(traced_run).collect();
    assert_eq!(runs, (1..=4).map(traced_run).collect::<Vec<_>>());
    let mut hashes: Vec<_> = runs.iter().map(|run| run.0).collect();
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 4);
}

#[test]
fn a_ping_pong_of_two_actors_takes_what_the_parameters_add_up_to_and_idle_actors_are_not_stepped() {
    const ROUNDS: u32 = 100;
    const WORK_NS: u64 = 77;
    let mut simulation = Simulation::new(NicParameters { context_miss_ns: 0, ..NIC });
    let (mut a, mut b) = pair(&mut simulation, &ConnectOptions::default());
    let bystander = End::new(&simulation.device().unwrap());
    a.receives(200);
    b.receives(200);
    let (to_a, to_b) = (imm(&a, 0), imm(&b, 0));
    let (devices, others) = ([a.device.clone(), b.device.clone()], bystander.device.clone());
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
    let (step_a, step_b, step_c) = (count(0), count(1), count(2));
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
            return if sent > ROUNDS { Did::IdleUntil(None) } else { post(&mut a.qp, &to_b) };
        }
        sent += 1;
        post(&mut a.qp, &to_b)
    };
    let server = move |_| {
        step_b();
        if b.arrived().is_empty() { Did::IdleUntil(None) } else { post(&mut b.qp, &to_a) }
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
    assert_eq!(*pongs.borrow(), (1..=u64::from(ROUNDS)).map(|i| i * 2 * one_way).collect::<Vec<_>>());
    let [client, server, idle] = steps.get();
    assert_eq!(idle, 1, "nothing ever happened to its device");
    // Woken once by the message, stepped again after its work, and woken by the few completions that the queue asks for.
    assert!((2 * ROUNDS..2 * ROUNDS + 10).contains(&client) && (2 * ROUNDS..2 * ROUNDS + 10).contains(&server), "{client} {server}");
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
    a.qp.post(&Write { addr, rkey, payload: Inline(&[9]) }, Signal::Reclaim, 0).unwrap();
    a.qp.ring();
    assert!(!simulation.run(u64::MAX));
    assert_eq!(*seen.borrow(), [(start_ns, 0), (start_ns + 500, 0), (start_ns + WAY + 1, 9)]);
}

#[test]
fn devices_of_another_network_are_refused_and_a_removed_one_is_dead_to_its_peers() {
    let mut simulation = Simulation::new(NIC);
    let mut other = Simulation::new(NIC);
    let foreign = other.device().unwrap();
    assert_eq!(simulation.add(&foreign), Err(ForeignDevice));
    assert_eq!(simulation.spawn(&[&foreign], |_| Did::IdleUntil(None)), Err(ForeignDevice));
    let (mut a, b) = pair(&mut simulation, &ConnectOptions::default());
    let op = Write { addr: b.mr.addr(), rkey: b.mr.rkey(), payload: () };
    simulation.remove(&b.device);
    drop(b);
    a.qp.post(&op, Signal::Always, 1).unwrap();
    a.qp.ring();
    assert!(!simulation.run(u64::MAX));
    assert_eq!(a.sent(), [(Some(1), Err(Syndrome::TransportRetryExceeded))]);
}

/// A deliberate bug: the source buffer is used again before the completion. What arrives, and what strict mode says.
fn early_reuse(mode: Mode) -> (Vec<u8>, Vec<Rule>) {
    let net = Net::in_mode(mode);
    let (mut a, mut b) = (End::new(&net.device()), End::new(&net.device()));
    connect(&mut a.qp, &mut b.qp, &ConnectOptions::default());
    let mut arrived = vec![];
    for message in [b"first ", b"second"] {
        a.mr.write(0, message).unwrap();
        let payload = a.mr.sge(0, 6).unwrap();
        let op = Write { addr: b.mr.addr() + 6 * arrived.len() as u64, rkey: b.mr.rkey(), payload };
        // The first is not even signaled: nobody could know that it is complete.
        let signal = if arrived.is_empty() { Signal::Reclaim } else { Signal::Always };
        a.qp.post(&op, signal, 0).unwrap();
        a.qp.ring();
        arrived.push(());
    }
    net.settle(|| !a.sent().is_empty());
    let mut bytes = vec![0; 12];
    b.mr.read(0, &mut bytes).unwrap();
    assert_eq!(b.device.violations(), []);
    (bytes, a.device.violations().iter().map(|v| v.rule).collect())
}

#[test]
fn a_source_used_again_before_its_completion_is_found_in_every_time_but_the_immediate() {
    assert_eq!(early_reuse(Mode::Immediate), (b"first second".to_vec(), vec![]), "immediate time hides it");
    for mode in [Mode::Delay, Mode::Virtual] {
        assert_eq!(early_reuse(mode), (b"secondsecond".to_vec(), vec![Rule::SourceChanged]), "{mode:?}");
    }
}

#[test]
fn a_source_used_again_between_effect_and_acknowledgement_is_found_too() {
    let mut simulation = Simulation::new(NIC);
    let (mut a, b, start_ns) = warm_pair(&mut simulation);
    a.mr.write(0, b"as it was").unwrap();
    let payload = (Inline(&b"inline "[..]), a.mr.sge(0, 9).unwrap());
    a.qp.post(&Write { addr: b.mr.addr(), rkey: b.mr.rkey(), payload }, Signal::Always, 3).unwrap();
    a.qp.ring();
    simulation.run(start_ns + WAY + 16);
    let mut bytes = [0; 16];
    b.mr.read(0, &mut bytes).unwrap();
    assert_eq!(&bytes, b"inline as it was", "it has arrived");
    assert_eq!(a.sent(), [], "and nobody may know");
    a.mr.write(8, b"?").unwrap();
    simulation.run(u64::MAX);
    assert_eq!(a.sent(), [(Some(3), Ok(()))]);
    let found = a.device.violations();
    assert_eq!(found.iter().map(|v| (v.queue, v.rule)).collect::<Vec<_>>(), [(Queue::Send(a.qp.qpn()), Rule::SourceChanged)]);
}
