//! Whole jobs in virtual time.

use std::time::Duration;

use super::simulated::*;
use crate::job::{Job, Sizes};
use crate::testing::{self, topology};
use crate::topology::{Routing, Transport};
use crate::workload::Workload;

fn world() -> World {
    World { cpu: Cpu::default(), nic: mlx5::NicParameters::default(), strict: true, trace_interval: None }
}

fn job(routing: Routing, transport: Transport, ranks: usize, clients: usize, depth: usize) -> Job {
    let topology = topology(routing, transport, ranks, 1, clients);
    let job = testing::job(topology);
    let workload = Workload { accesses: 1024, ..job.workload };
    Job { workload, queue_depth: depth, sizes: Sizes::compute(None, &topology, depth), ..job }
}

fn run(job: &Job, world: &World) -> (u64, Summary) {
    let simulated = Simulated::new(job, world).unwrap();
    let (ranks, summary) = simulated.run(Duration::from_micros(100), Duration::from_micros(500), 1).unwrap();
    let clients = ranks.iter().flat_map(|rank| &rank.clients);
    let mut completed = 0;
    for client in clients {
        completed += client.counts.completed;
        assert_eq!((client.counts.errors, client.outstanding), (0, 0));
        let verdict = client.verdict.as_ref().unwrap();
        assert_eq!((verdict.failures, &verdict.first), (0, &None));
    }
    (completed, summary)
}

#[test]
fn every_topology_runs_in_virtual_time_and_the_same_seed_gives_the_same_run() {
    let all = [Routing::Meta, Routing::Delegation, Routing::Sharded, Routing::Direct].map(|routing| (routing, Transport::Copyrpc));
    for (routing, transport) in all.into_iter().chain([(Routing::Delegation, Transport::RcSend)]) {
        let job = job(routing, transport, 3, 4, 2);
        let first = run(&job, &world());
        assert!(first.0 > 500, "{routing:?}: {} operations", first.0);
        assert_eq!(run(&job, &world()), first, "{routing:?}, {transport:?}");
        let other = Job { workload: Workload { seed: 2, ..job.workload }, ..job };
        assert_ne!(run(&other, &world()).1.trace_hash, first.1.trace_hash);
    }
}
