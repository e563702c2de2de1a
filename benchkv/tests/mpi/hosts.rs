//! Jobs on two hosts, as far as one machine has them: `scripts/two-hosts`.
//!
//! `mlx5-run cargo test -p benchkv --features mpi --test mpi -- --ignored two_hosts`

use crate::job::{Ended, Job, SHORT, turn};
use crate::{Dirs, assert_sound};

const TWO_HOSTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/two-hosts");

/// Runs a job with `ranks` ranks on each host.
fn run(dirs: &Dirs, ranks: usize, args: &[&str]) -> Ended {
    let mut command = dirs.launcher(TWO_HOSTS);
    command.args([
        "mpirun",
        "-H",
        &format!("a:{ranks},b:{ranks}"),
        "--map-by",
        &format!("ppr:{ranks}:node"),
        "--bind-to",
        "none",
    ]);
    dirs.benchkv(&mut command, &[&SHORT, args].concat());
    Job::start(&mut command).end()
}

/// Runs every backend with this device between the hosts.
fn carry_every_backend(device: &str) {
    let _turn = turn();
    for (backend, ranks) in [
        ("meta", 1),
        ("delegation", 2),
        ("direct", 1),
        ("rc-send", 1),
    ] {
        let dirs = Dirs::new();
        let result = run(
            &dirs,
            ranks,
            &["--backend", backend, "--device", device, "--json", "-"],
        )
        .result();
        assert_sound(&result, 2 * ranks);
        assert_eq!(
            result["launcher"]["hosts"],
            serde_json::json!(["a", "b"]),
            "{backend}"
        );
        assert_eq!(
            result["launcher"]["ranks_here"],
            (0..ranks).collect::<serde_json::Value>(),
            "those on the host of rank 0"
        );
        for rank in result["per_rank"].as_array().unwrap() {
            assert!(rank["remote_ops"].as_u64() > Some(0), "{backend}: {rank}");
        }
        dirs.shm.assert_empty();
    }
}

/// Requests pass between the NICs, and the messages of MPI by TCP, the only transport of MPI
/// between these hosts.
#[test]
#[ignore = "needs user namespaces, and mlx5-run"]
fn two_hosts_carry_every_backend_between_their_nics() {
    carry_every_backend("mlx5_0");
}

/// The hosts have no NIC, and in the second job packets are lost. The hosts of `scripts/two-hosts`
/// share memory, so `packets=all` makes all traffic packets.
#[test]
#[ignore = "needs user namespaces"]
fn two_hosts_carry_every_backend_by_packets() {
    carry_every_backend("soft:roce=10.77.0.0/24,packets=all");
    carry_every_backend("soft:roce=10.77.0.0/24,packets=all,loss=10");
}

#[test]
#[ignore = "needs user namespaces"]
fn two_hosts_are_refused_on_the_software_device_by_their_names() {
    let (_turn, dirs) = (turn(), Dirs::new());
    for device in ["soft", "auto"] {
        run(&dirs, 1, &["--device", device]).assert_failed(2, &["--device soft", "a, b"]);
    }
    dirs.shm.assert_empty();
}

/// The launcher kills the ranks of the other host too.
#[test]
#[ignore = "needs user namespaces, and mlx5-run"]
fn two_hosts_end_together_when_a_rank_finds_a_fault() {
    let (_turn, dirs) = (turn(), Dirs::new());
    run(
        &dirs,
        1,
        &["--device", "mlx5_0", "--fault", "corrupt-value"],
    )
    .assert_failed(
        3,
        &["the result is unsound: 0 operations lost, 1 verify failures"],
    );
    dirs.shm.assert_empty();
}
