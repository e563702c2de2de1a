//! Diagnoses of machines that have everything, nothing, and a part of it.

use super::*;

const GIB: u64 = 1 << 30;

fn program(version: Result<&str, &str>) -> Program {
    Program {
        path: "/usr/bin/mpirun".into(),
        version: version.map(str::to_owned).map_err(str::to_owned),
    }
}

/// Returns a machine that lacks nothing.
fn complete() -> Machine {
    let port = |number| Port {
        number,
        is_active: true,
        text: "Active, Ethernet, LID 0, MTU 4096".to_owned(),
        reached_by: Some(Ok(
            "RoCE v2, GID index 3 (::ffff:10.0.0.1); direct, libmlx5.so.1.24.44.0".to_owned(),
        )),
    };
    let file = |name: &str| Ok(format!("{name}.14.44.0"));
    Machine {
        kernel: "6.1.0-18-amd64".to_owned(),
        usable_cores: Ok((0..8).collect::<Vec<_>>().into()),
        cores_online: 8,
        membarrier: true,
        shm: Ok((
            "/dev/shm/copyrpc-0".to_owned(),
            Space {
                size_bytes: 16 * GIB,
                free_bytes: 15 * GIB,
                is_memory: true,
            },
        )),
        open_files: Some(1 << 20),
        address_space: None,
        memlock: None,
        huge_pages: HugePages {
            page_bytes: 2 << 20,
            reserved: 0,
            shared: "advise".to_owned(),
        },
        driver: vec![
            ("libibverbs.so.1", file("libibverbs.so.1")),
            ("libmlx5.so.1", file("libmlx5.so.1")),
        ],
        devices: Ok(vec![Device {
            name: "mlx5_0".to_owned(),
            numa_node: Some(1),
            ports: Ok(vec![port(1), port(2)]),
        }]),
        mpi_library: Some("Open MPI v4.1.4".to_owned()),
        mpirun: Some(program(Ok("mpirun (Open MPI) 4.1.4"))),
        ucx: Ok("1.13.1".to_owned()),
    }
}

/// Returns the only check of this name on a machine that is complete except for `change`.
fn check(name: &str, change: impl FnOnce(&mut Machine)) -> Check {
    let mut machine = complete();
    change(&mut machine);
    let mut found: Vec<Check> = Diagnosis::of(&machine)
        .checks
        .into_iter()
        .filter(|check| check.name == name)
        .collect();
    assert_eq!(found.len(), 1, "{name}");
    found.remove(0)
}

#[track_caller]
fn assert_check(check: &Check, status: Status, found: &str, advice: &str) {
    assert_eq!(check.status, status, "{check:?}");
    assert!(
        check.found.contains(found)
            && check
                .advice
                .as_ref()
                .is_some_and(|text| text.contains(advice)),
        "{check:?}"
    );
}

#[test]
fn a_complete_machine_needs_no_advice() {
    let diagnosis = Diagnosis::of(&complete());
    assert!(
        diagnosis
            .checks
            .iter()
            .all(|check| check.status == Status::Ok && check.advice.is_none()),
        "{diagnosis}"
    );
    for part in [
        "6.1.0-18-amd64",
        "8 of 8 usable",
        "15.0 GiB free of 16.0 GiB",
        "libmlx5.so.1.14.44.0",
        "NUMA node 1; RoCE v2, GID index 3",
    ] {
        assert!(
            diagnosis.to_string().contains(part),
            "{part:?} is missing: {diagnosis}"
        );
    }
    assert!(
        diagnosis
            .checks
            .iter()
            .any(|check| check.name == "mlx5_0:2"),
        "{diagnosis}"
    );
}

#[test]
fn a_machine_without_nic_and_mpi_is_told_how_to_get_each() {
    let no_library = |m: &mut Machine| {
        m.driver[1].1 = Err("libmlx5.so.1: cannot open shared object file".to_owned())
    };
    assert_check(
        &check("libmlx5.so.1", no_library),
        Status::Missing,
        "cannot open shared",
        "apt-get install libibverbs1 ibverbs-providers",
    );
    let no_device = |m: &mut Machine| m.devices = Err("this machine has no RDMA device".to_owned());
    assert_check(
        &check("RDMA device", no_device),
        Status::Missing,
        "no RDMA device",
        "modprobe mlx5_ib ib_uverbs",
    );
    assert_check(
        &check("RDMA device", |m| m.devices = Ok(Vec::new())),
        Status::Missing,
        "no mlx5 device",
        "modprobe mlx5_ib",
    );
    assert_check(
        &check("MPI in this build", |m| m.mpi_library = None),
        Status::Missing,
        "without the feature mpi",
        "--features mpi",
    );
    assert_check(
        &check("mpirun", |m| m.mpirun = None),
        Status::Missing,
        "not in PATH",
        "apt-get install openmpi-bin",
    );
    let no_ucx = |m: &mut Machine| m.ucx = Err("libucp.so.0: cannot open".to_owned());
    assert_check(
        &check("UCX", no_ucx),
        Status::Missing,
        "libucp.so.0",
        "apt-get install libucx0",
    );
}

#[test]
fn what_a_device_lacks_is_said_by_port() {
    let set = |change: fn(&mut Port)| {
        move |m: &mut Machine| {
            m.devices.as_mut().unwrap()[0]
                .ports
                .as_mut()
                .unwrap()
                .iter_mut()
                .take(1)
                .for_each(change)
        }
    };
    let down = |port: &mut Port| {
        (port.is_active, port.reached_by, port.text) = (false, None, "Down, Ethernet".to_owned())
    };
    assert_check(
        &check("mlx5_0:1", set(down)),
        Status::Limited,
        "Down, Ethernet, NUMA node 1",
        "a cable",
    );
    let no_gid = |port: &mut Port| port.reached_by = Some(Err("its GID table is empty".to_owned()));
    assert_check(
        &check("mlx5_0:1", set(no_gid)),
        Status::Limited,
        "Active",
        "its GID table is empty",
    );
    let denied = |m: &mut Machine| {
        m.devices.as_mut().unwrap()[0].ports = Err("Permission denied".to_owned())
    };
    assert_check(
        &check("mlx5_0", denied),
        Status::Missing,
        "Permission denied",
        "the group that owns it",
    );
}

#[test]
fn limits_are_named_with_the_way_to_raise_them() {
    assert_check(
        &check("open files", |m| m.open_files = Some(20)),
        Status::Limited,
        "20 (ulimit -Hn), 48 in a rank",
        "nofile 65536",
    );
    assert_check(
        &check("address space", |m| m.address_space = Some(GIB)),
        Status::Limited,
        "1.0 GiB (ulimit -v), 128.0 GiB",
        "unlimited",
    );
    assert_eq!(
        check("address space", |m| m.address_space = Some(128 * GIB)).status,
        Status::Ok
    );
    assert_check(
        &check("locked memory", |m| m.memlock = Some(8 << 20)),
        Status::Limited,
        "8.0 MiB",
        "memlock unlimited",
    );
    let never = |m: &mut Machine| m.huge_pages.shared = "never".to_owned();
    assert_check(
        &check("huge pages", never),
        Status::Limited,
        "of 2.0 MiB; 0 reserved; in shared memory: never",
        "shmem_enabled",
    );
    assert_check(
        &check("huge pages", |m| m.huge_pages.page_bytes = 0),
        Status::Missing,
        "none",
        "CONFIG_HUGETLBFS",
    );
    assert_check(
        &check("membarrier", |m| m.membarrier = false),
        Status::Limited,
        "refused",
        "seccomp",
    );
    for kernel in ["5.2.21", "4.19.0-26-amd64", "unknown"] {
        assert_check(
            &check("kernel", |m| m.kernel = kernel.to_owned()),
            Status::Limited,
            kernel,
            "Linux 5.3 or later",
        );
    }
    assert_eq!(
        check("kernel", |m| m.kernel = "5.3".to_owned()).status,
        Status::Ok
    );
    let silent = |m: &mut Machine| m.mpirun = Some(program(Err("exit status: 1")));
    assert_check(
        &check("mpirun", silent),
        Status::Limited,
        "/usr/bin/mpirun does not say its version: exit status: 1",
        "mpirun -n 1",
    );
}

#[test]
fn cores_are_judged_by_whether_the_default_job_can_be_pinned() {
    let with = |usable: usize, online| {
        move |m: &mut Machine| {
            (m.usable_cores, m.cores_online) = (Ok((0..usable).collect::<Vec<_>>().into()), online)
        }
    };
    assert_eq!(check("cores", with(4, 4)).status, Status::Ok);
    assert!(
        check("cores", with(4, 4))
            .found
            .ends_with("4 of 4 usable, 4 threads in the default job: each is pinned to its own")
    );
    assert_check(
        &check("cores", with(2, 2)),
        Status::Limited,
        "2 of 2 usable",
        "use a host with 4 cores",
    );
    let shared = |m: &mut Machine| {
        m.usable_cores = Ok(Usable {
            cores: (0..8).collect(),
            at_once: 2,
        })
    };
    assert_check(
        &check("cores", shared),
        Status::Limited,
        "8 of 8 usable, 2 at a time, 4 threads",
        "hardware threads of one core",
    );
    assert_check(
        &check("cores", with(3, 8)),
        Status::Limited,
        "3 of 8 usable",
        "--bind-to none",
    );
    assert_check(
        &check("cores", |m| m.usable_cores = Err("refused".to_owned())),
        Status::Missing,
        "refused",
        "affinity mask",
    );
}

#[test]
fn shared_memory_is_judged_by_its_room_and_kind() {
    let with = |free_bytes, is_memory| {
        move |m: &mut Machine| {
            m.shm = Ok((
                "/dir".to_owned(),
                Space {
                    size_bytes: GIB,
                    free_bytes,
                    is_memory,
                },
            ))
        }
    };
    assert_eq!(
        check("shared memory", with(DEFAULT_SHM_BYTES, true)).status,
        Status::Ok
    );
    assert_check(
        &check("shared memory", with(DEFAULT_SHM_BYTES - 1, true)),
        Status::Limited,
        "/dir: 1024.0 KiB free of 1.0 GiB",
        "--shm-size",
    );
    assert_check(
        &check("shared memory", with(GIB, false)),
        Status::Limited,
        "/dir",
        "not a tmpfs",
    );
    let gone = |m: &mut Machine| m.shm = Err("/dir does not exist".to_owned());
    assert_check(
        &check("shared memory", gone),
        Status::Missing,
        "/dir does not exist",
        "--shm-dir DIR",
    );
}

#[test]
fn this_machine_is_looked_at() {
    let machine = probe::probe(None);
    let environment = benchkv_harness::environment::Environment::detect();
    assert!(
        environment.kernel.contains(&machine.kernel)
            && machine.kernel.starts_with(|c: char| c.is_ascii_digit()),
        "{machine:?}"
    );
    assert!(
        machine.shm.is_ok()
            && machine
                .usable_cores
                .as_ref()
                .is_ok_and(|usable| usable.at_once > 0),
        "{machine:?}"
    );
    let missing = probe::probe(Some(std::path::Path::new("/nonexistent")));
    assert!(
        missing
            .shm
            .unwrap_err()
            .contains("/nonexistent does not exist")
    );
}

#[test]
#[ignore = "needs an mlx5 device with an active port; mlx5-run makes one"]
fn a_device_of_this_machine_is_described_with_the_way_to_reach_it() {
    let devices = probe::probe(None).devices.unwrap();
    let ports: Vec<&Port> = devices
        .iter()
        .filter_map(|device| device.ports.as_ref().ok())
        .flatten()
        .collect();
    let active = ports.into_iter().find(|port| port.is_active).unwrap();
    assert!(
        active.text.starts_with("Active, ") && active.text.contains(", MTU "),
        "{active:?}"
    );
    let reached_by = active.reached_by.as_ref().unwrap().as_ref().unwrap();
    assert!(
        ["InfiniBand, LID ", "RoCE v"]
            .iter()
            .any(|start| reached_by.starts_with(start)),
        "{active:?}"
    );
    assert!(reached_by.contains("; direct, libmlx5.so.1."), "{active:?}");
}
