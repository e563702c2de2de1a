mod policies;

use benchkv_harness::launch::exchange::{Exchange, ExchangeError};
use clap::Parser;
use engine::ucx::PeerErrors;

use super::*;
use crate::cli::Cli;
use crate::devices::Devices;

fn resolve(args: &str) -> Result<Options, String> {
    let cli = Cli::try_parse_from(std::iter::once("benchkv").chain(args.split_whitespace()))
        .map_err(|error| error.to_string())?;
    Options::resolve(cli).map_err(|error| error.to_string())
}

/// The records of the places of a job's ranks: hosts and cores.
struct Places(Vec<Vec<u8>>);

impl Exchange for Places {
    fn rank(&self) -> usize {
        2
    }

    fn size(&self) -> usize {
        self.0.len()
    }

    fn all_gather(
        &mut self,
        _: &[u8],
        _: Duration,
        _: &dyn Fn() -> bool,
    ) -> Result<Vec<Vec<u8>>, ExchangeError> {
        Ok(self.0.clone())
    }

    fn sleep(&mut self, _: Duration, _: &dyn Fn() -> bool) -> Result<(), ExchangeError> {
        Ok(())
    }
}

/// Resolves options as rank 2 of ranks on these hosts. Each rank is bound to four of 64 cores, rank
/// 0 to the first four.
fn resolve_on(hosts: &[&str], args: &str) -> Result<Options, Failure> {
    resolve_started_by(Some("an MPI"), hosts, args)
}

fn resolve_started_by(
    library: Option<&str>,
    hosts: &[&str],
    args: &str,
) -> Result<Options, Failure> {
    let place = |(rank, host): (usize, &&str)| {
        let cores: Vec<usize> = (4 * rank..4 * rank + 4).collect();
        serde_json::json!({"boot_id": host, "host": host, "cores": cores, "allowed": 64})
            .to_string()
            .into_bytes()
    };
    let hosts = Hosts::gather(
        &mut Places(hosts.iter().enumerate().map(place).collect()),
        Duration::ZERO,
    )
    .unwrap();
    let cli =
        Cli::try_parse_from(std::iter::once("benchkv").chain(args.split_whitespace())).unwrap();
    Options::resolve_on(cli, &hosts, library.map(str::to_owned))
}

#[test]
fn a_launcher_that_started_another_number_is_contradicted() {
    assert_eq!(resolve_on(&["a"; 4], "").unwrap().job.workload.ranks, 4);
    assert_eq!(
        resolve_on(&["a"; 4], "--ranks 4")
            .unwrap()
            .job
            .workload
            .ranks,
        4
    );
    let refused = resolve_on(&["a"; 4], "--ranks 2").unwrap_err().to_string();
    assert!(
        refused.starts_with("--ranks 2: 4 were started;") && refused.contains("mpirun -n 2"),
        "{refused}"
    );
}

#[test]
fn the_software_device_does_not_connect_hosts() {
    let refused = resolve_on(&["a", "b", "a"], "--device soft")
        .unwrap_err()
        .to_string();
    assert!(
        refused.starts_with("--device soft: ")
            && refused.contains("on 2: a, b; name a device")
            && refused.contains("soft:roce=10.1.0.0/24"),
        "{refused}"
    );
    resolve_on(&["a", "b", "a"], "--device mlx5_0").unwrap();
}

#[test]
fn cores_are_given_out_by_the_place_of_a_rank_on_its_host() {
    let options = resolve_on(&["a", "b", "a"], "--device mlx5_0").unwrap();
    // Ranks 0 and 2 are the two on this host: two threads each, on cores 0 to 3 and 8 to 11.
    assert_eq!(
        (
            options.launcher.local_rank(2),
            options.launcher.local_rank(1),
            options.plan.threads
        ),
        (Some(1), None, 4)
    );
    assert_eq!(
        [
            options.plan.daemon_core(0, 0),
            options.plan.client_core(0, 0)
        ],
        [Some(0), Some(1)]
    );
    assert_eq!(
        [
            options.plan.daemon_core(1, 0),
            options.plan.client_core(1, 0)
        ],
        [Some(8), Some(9)]
    );
    assert!(
        options
            .to_string()
            .contains("an MPI: hosts a, b; on this one ranks [0, 2], bound to cores by"),
        "{options}"
    );
}

#[test]
fn a_rank_alone_on_its_host_is_told_where_it_was_left_too_few_cores() {
    let hosts = ["a", "b", "c"];
    let told = |library, args: &str| {
        let options =
            resolve_started_by(library, &hosts, &format!("--device mlx5_0 {args}")).unwrap();
        let is_said = options
            .to_string()
            .contains("bound to cores by their launcher (mpirun --bind-to none leaves them all)");
        assert_eq!(options.launcher.bound, is_said, "{options}");
        is_said
    };
    assert!(told(Some("an MPI"), "--client-threads 46"));
    assert!(
        !told(Some("an MPI"), "--client-threads 3"),
        "four threads on four cores"
    );
    assert!(
        !told(None, "--client-threads 46"),
        "a user who binds the local launcher knows it"
    );
}

#[test]
fn memory_is_that_of_the_ranks_of_one_host() {
    let args = "--backend direct --device mlx5_0 --client-threads 46";
    let [one, four] =
        [["a"; 4], ["a", "b", "c", "d"]].map(|hosts| resolve_on(&hosts, args).unwrap().memory);
    assert_eq!(
        (one.total_bytes, one.endpoints),
        (4 * four.total_bytes, 4 * four.endpoints)
    );
    let limit = |limit| {
        resolve_on(
            &["a", "b", "c", "d"],
            &format!("{args} --memory-limit {limit}"),
        )
    };
    limit(four.total_bytes).unwrap();
    let refused = limit(four.total_bytes - 1).unwrap_err().to_string();
    assert!(
        refused.contains(&format!("the job needs about {} bytes", four.total_bytes)),
        "{refused}"
    );
}

#[test]
fn illegal_values_are_refused_with_the_legal_ones() {
    for (args, expected) in [
        ("--ranks 0", "use a whole number from 1 to 256"),
        ("--ranks 257", "use a whole number from 1 to 256"),
        ("--server-threads 0", "use a whole number from 1 to 64"),
        ("--client-threads 0", "use a whole number from 1 to 256"),
        ("--queue-depth 0", "use a whole number from 1 to 4096"),
        ("--runs 0", "use a whole number from 1 to 32"),
        ("--ops 0", "use a whole number from 1 to 4294967295"),
        (
            "--ops 4294967296",
            "use a whole number from 1 to 4294967295",
        ),
        ("--key-range 0", "use a whole number from 1 to 67108864"),
        ("--duration 0", "use a time from 0.01 to 3600 seconds"),
        ("--duration 10us", "use a time from 0.01 to 3600 seconds"),
        ("--duration nan", "use a time from 0.01 to 3600 seconds"),
        ("--duration -1", "use a time from 0.01 to 3600 seconds"),
        ("--warmup 1e9", "use a time from 0 to 3600 seconds"),
        (
            "--report-interval 99ms",
            "use a time from 0.1 to 3600 seconds",
        ),
        (
            "--report-interval nan",
            "use a time from 0.1 to 3600 seconds",
        ),
        (
            "--duration 300 --runs 3",
            "600 seconds in all, or --no-verify",
        ),
        ("--read-ratio 1.5", "use a number from 0 to 1"),
        ("--read-ratio=-0.1", "use a number from 0 to 1"),
        ("--remote-ratio nan", "use a number from 0 to 1"),
        (
            "--ranks 1 --remote-ratio 0.5",
            "one rank has no other to talk to",
        ),
        ("--rate 0", "use a number from 1 to 1000000000"),
        ("--rate nan", "use a number from 1 to 1000000000"),
        (
            "--ring-size 2048",
            "--ring-size 2048: too small to hold a batch; legal is auto, or a power of two from 4096 to 268435456",
        ),
        ("--ring-size 5000", "not a power of two"),
        ("--ring-size 536870912", "more than is supported"),
        ("--hold=-1us", "use off, a time from 0.5us to 100us"),
        (
            "--ranks 256 --client-threads 256",
            "fewer clients, or --no-verify",
        ),
        (
            "--pin 65535",
            "--pin: core 65535 may not be used by this process",
        ),
        (
            "--fault corrupt-value --no-verify",
            "legal is only with a --read-ratio above 0",
        ),
    ] {
        let message = resolve(args).unwrap_err();
        assert!(message.contains(expected), "{args}: {message}");
    }
}

#[test]
fn values_at_the_borders_are_legal() {
    for args in [
        "--ranks 256 --client-threads 255 --memory-limit 2199023255552",
        "--duration 0.01 --warmup 0",
        "--ring-size 4096",
        "--ring-size 268435456",
        "--read-ratio 0",
        "--read-ratio 1",
        "--ranks 1 --remote-ratio 0",
    ] {
        resolve(args).unwrap();
    }
    resolve("--duration 3600 --runs 32 --no-verify").unwrap();
}

#[test]
fn auto_values_follow_their_rules() {
    let sizes = resolve("--ranks 2 --client-threads 46 --queue-depth 32")
        .unwrap()
        .job
        .sizes;
    // 46 x 32 = 1472 operations of 64 bytes, times 4, is 376,832.
    assert_eq!(
        (
            sizes.ring_bytes,
            sizes.ring_slots,
            sizes.flux_in_flight,
            sizes.flux_capacity
        ),
        (524_288, 128, 4096, 16_384)
    );
    let small = resolve("--ranks 1 --queue-depth 1").unwrap();
    assert_eq!(
        (
            small.job.sizes.ring_bytes,
            small.job.sizes.ring_slots,
            small.job.sizes.flux_in_flight
        ),
        (4096, 8, 256)
    );
    assert_eq!(small.job.workload.remote_ratio, 0.0);
    assert_eq!(
        resolve("--ranks 8").unwrap().job.workload.remote_ratio,
        0.875
    );
}

#[test]
fn a_window_holds_what_is_in_flight_and_what_a_rank_can_have_receives_for() {
    let sizes = |args: &str| {
        resolve(&format!(
            "--backend rc-send --memory-limit 1099511627776 {args}"
        ))
        .unwrap()
        .job
        .sizes
    };
    let window = |args: &str| sizes(args).window;
    assert_eq!(
        [
            window("--queue-depth 1"),
            window("--client-threads 3"),
            window("--queue-depth 4096")
        ],
        [16, 128, 1024]
    );
    assert_eq!(
        [
            window("--queue-depth 4096 --ranks 32"),
            window("--queue-depth 4096 --ranks 33"),
            window("--queue-depth 4096 --ranks 256")
        ],
        [1024, 512, 128]
    );
    assert_eq!(
        (sizes("").ring_bytes, resolve("").unwrap().job.sizes.window),
        (0, 0),
        "rings or windows, not both"
    );
    let refused = resolve("--backend rc-send --ring-size 4096")
        .unwrap_err()
        .to_string();
    assert!(
        refused.starts_with("--ring-size 4096: ") && refused.contains("leave it out"),
        "{refused}"
    );
}

#[test]
fn any_backend_goes_with_any_carrier_and_names_may_say_both() {
    let axes = |args: &str| {
        let topology = resolve(args).unwrap().job.topology;
        format!("{} {}", topology.backend, topology.carrier)
    };
    for backend in ["meta", "delegation", "sharded", "direct"] {
        for carrier in ["copyrpc", "rc-send", "ucx-am"] {
            assert_eq!(
                axes(&format!("--backend {backend} --carrier {carrier}")),
                format!("{backend} {carrier}")
            );
        }
        assert_eq!(
            axes(&format!("--backend {backend}")),
            format!("{backend} copyrpc")
        );
    }
    for (name, both) in [
        ("rc-send", "delegation rc-send"),
        ("ucx-am", "delegation ucx-am"),
        ("copyrpc-direct", "direct copyrpc"),
        ("direct --carrier ucx-am", "direct ucx-am"),
    ] {
        assert_eq!(axes(&format!("--backend {name}")), both);
    }
    let refused = resolve("--backend copyrpc-direct --carrier rc-send").unwrap_err();
    assert!(
        refused.starts_with("--carrier rc-send: ")
            && refused.ends_with("legal is no value, or --backend direct"),
        "{refused}"
    );
}

#[test]
fn a_window_is_of_one_client_where_it_has_connections_of_its_own() {
    let window = |args: &str| {
        resolve(&format!(
            "--backend direct --carrier rc-send --memory-limit 1152921504606846976 {args}"
        ))
        .unwrap()
        .job
        .sizes
        .window
    };
    assert_eq!(
        [
            window("--client-threads 8"),
            window("--queue-depth 64"),
            window("--queue-depth 4096")
        ],
        [32, 64, 1024]
    );
    assert_eq!(
        [
            window("--queue-depth 4096 --client-threads 33"),
            window("--ranks 256 --client-threads 256 --no-verify")
        ],
        [512, 16]
    );
}

#[test]
fn ucx_notices_dead_peers_where_that_costs_no_shared_memory_or_it_is_told_to() {
    let errors = |hosts: &[&str], args: &str| resolve_on(hosts, args).unwrap().job.ucx_errors;
    assert_eq!(
        errors(&["a", "b", "a"], "--backend ucx-am"),
        Some(PeerErrors::Peer),
        "and the software device is no reason to refuse them"
    );
    assert_eq!(
        errors(&["a", "b", "a"], "--backend ucx-am --ucx-errors none"),
        Some(PeerErrors::None)
    );
    assert_eq!(
        errors(&["a"; 3], "--backend ucx-am"),
        Some(PeerErrors::None)
    );
    assert_eq!(
        errors(&["a"; 3], "--backend ucx-am --ucx-errors peer"),
        Some(PeerErrors::Peer)
    );
    assert_eq!(errors(&["a"; 3], ""), None);
    for (args, said) in [
        (
            "--ucx-errors peer",
            "--ucx-errors peer: this --carrier has no part in UCX; ",
        ),
        (
            "--backend ucx-am --device soft",
            "--device soft: UCX chooses its transports itself; legal is no value with --carrier ucx-am; UCX_TLS and ",
        ),
        (
            "--backend ucx-am --sl 1",
            "--device auto --sl 1: UCX chooses ",
        ),
    ] {
        let refused = resolve(args).unwrap_err();
        assert!(refused.starts_with(said), "{refused}");
    }
    let plan = resolve("--backend ucx-am").unwrap().to_string();
    assert!(
        plan.contains("backend delegation, carrier ucx-am, ucx device")
            && plan.contains("errors of UCX's endpoints: none"),
        "{plan}"
    );
}

#[test]
fn more_threads_than_cores_yield() {
    assert_eq!(resolve("--ranks 256").unwrap().wait, WaitStrategy::Yield);
    assert_eq!(resolve("--wait event").unwrap().wait, WaitStrategy::Event);
    assert_eq!(
        resolve("--ranks 256 --wait busy").unwrap().wait,
        WaitStrategy::Busy
    );
}

/// The device that `auto` chooses depends on the machine.
#[test]
fn the_device_of_auto_and_its_reason_are_in_the_plan_and_in_the_record() {
    let (device, why) = Devices::default().resolve().unwrap();
    let options = resolve("").unwrap();
    assert_eq!(
        (&options.asked.device, &options.asked.device_by_auto),
        (&device, &why)
    );
    let why = why.unwrap();
    assert!(
        options
            .to_string()
            .contains(&format!("\n--device auto is {device}: {why}\n")),
        "{options}"
    );
    let record = serde_json::to_value(options.asked.recorded().unwrap()).unwrap();
    assert_eq!(
        (&record["device"], &record["device_by_auto"]),
        (&device.to_string().into(), &why.into())
    );
    let named = resolve("--device soft").unwrap();
    assert!(
        named.asked.device_by_auto.is_none() && !named.to_string().contains("auto is"),
        "{named}"
    );
    // UCX chooses its devices itself.
    let ucx = resolve("--backend ucx-am").unwrap();
    assert!(
        ucx.asked.device_by_auto.is_none() && !ucx.to_string().contains("auto is"),
        "{ucx}"
    );
}

#[test]
fn the_plan_names_every_computed_value() {
    let text = resolve("--device soft --ranks 2").unwrap().to_string();
    let limits = "at most 48 open files of a rank (ulimit -n), 128.0 GiB of addresses (ulimit -v)";
    for part in [
        limits,
        "soft device",
        "ring 8.0 KiB",
        "delegation ring 8 slots",
        "flux 256 in flight",
        "wait ",
        "usable cores",
        "seed 1",
    ] {
        assert!(text.contains(part), "{part} is missing: {text}");
    }
    let looks = |args: &str| {
        resolve(args)
            .unwrap()
            .to_string()
            .contains("sleep for 100µs at most: what other ranks send does not wake them")
    };
    assert_eq!(
        [
            "--backend ucx-am --wait event",
            "--wait event",
            "--backend ucx-am"
        ]
        .map(looks),
        [true, false, false]
    );
    let text = resolve("--backend rc-send").unwrap().to_string();
    assert!(
        text.contains("\nwindow 32 requests, delegation ring") && !text.contains("\nring"),
        "{text}"
    );
}

#[test]
fn the_options_of_a_port_reach_its_device() {
    let options = resolve("--device mlx5_1 --port 2 --gid-index 3 --mtu 1024").unwrap();
    let site = options.site(0).unwrap();
    let [DeviceSpec::Verbs(port)] = &site.devices[..] else {
        panic!("{site:?}")
    };
    assert_eq!(
        (port.port, port.gid_index, port.mtu),
        (Some(2), Some(3), Some(1024))
    );
}

#[test]
fn a_plan_says_how_few_of_many_keys_its_clients_can_touch() {
    let plan = |args: &str| resolve(&format!("--ranks 2 {args}")).unwrap().to_string();
    let few = plan("--key-range 10000000 --value-size 100 --memory-limit 1024G");
    assert!(
        few.contains("FEW KEYS")
            && few.contains("65536 accesses")
            && few.contains("at most 0.66 % of the keys"),
        "{few}"
    );
    for enough in [
        "",
        "--key-range 10000000 --client-threads 64 --memory-limit 1024G",
    ] {
        assert!(!plan(enough).contains("FEW KEYS"), "{enough}");
    }
}
