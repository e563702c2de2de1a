//! Helpers of the tests of several modules: small jobs, and a directory of their own for shared
//! memory.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use benchkv_harness::launch::device::DeviceChoice;
use clap::Parser;
use copyrpc_shm::dir::Dir;

use crate::backend::plan::Site;
use crate::job::{Job, Sizes};
use crate::policy::PolicyOptions;
use crate::topology::{Backend, Carrier, Topology};
use crate::workload::{Distribution, PATTERN_LEN, Workload};

/// A directory for shared memory, removed with its content.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = PathBuf::from(format!(
            "/dev/shm/benchkv-test-{}-{number}",
            std::process::id()
        ));
        std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700)
            .create(&path)
            .unwrap();
        Self(path)
    }

    pub(crate) fn dir(&self) -> Dir {
        Dir::open(Some(&self.0)).unwrap()
    }

    /// Returns the site of a rank in this process, on the software device.
    pub(crate) fn site(&self, rank: usize) -> Site {
        Site {
            rank,
            devices: vec![DeviceChoice::Auto.spec(Some(&self.0))],
            dir: self.dir(),
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Returns a topology with this carrier and this backend.
pub(crate) const fn topology(
    backend: Backend,
    carrier: Carrier,
    ranks: usize,
    daemons: usize,
    clients: usize,
) -> Topology {
    Topology {
        backend,
        carrier,
        ranks,
        daemons,
        clients,
    }
}

/// Returns a verified job of `topology`.
pub(crate) fn job(topology: Topology) -> Job {
    let Topology { ranks, clients, .. } = topology;
    let remote_ratio = (ranks - 1) as f64 / ranks as f64;
    let distribution = Distribution::Uniform;
    let workload = Workload {
        ranks,
        clients,
        key_range: 1000,
        value_bytes: 8,
        empty: true,
        read_ratio: 0.5,
        remote_ratio,
        distribution,
        verify: true,
        seed: 1,
        accesses: PATTERN_LEN,
    };
    Job {
        topology,
        queue_depth: 32,
        ops: None,
        pace: None,
        runs: 1,
        is_frugal: false,
        sizes: Sizes::compute(None, &topology, 32, 8),
        workload,
        policies: PolicyOptions::default(),
        features: Vec::new(),
        ucx_errors: None,
        corrupts_value: false,
    }
}

/// Parses the flags of policies.
pub(crate) fn policies(args: &str) -> PolicyOptions {
    #[derive(Parser)]
    struct Args {
        #[command(flatten)]
        policies: PolicyOptions,
    }
    Args::try_parse_from(std::iter::once("test").chain(args.split_whitespace()))
        .unwrap()
        .policies
}
