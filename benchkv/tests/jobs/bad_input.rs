//! A job that cannot run is refused: the message names the error and the legal values, nothing
//! hangs, no file or process remains. Exit status 2 means a refusal before a process was started.

use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use benchkv::doctor::DEFAULT_SHM_BYTES;
use benchkv_harness::launch::device::DEVICE_VARIABLE;

use crate::job::{Ended, Job, SHORT, Scratch, benchkv, turn};

/// Runs benchkv. Asserts a refusal that contains every one of `parts`, and nothing on standard
/// output.
#[track_caller]
fn refused(args: &[&str], parts: &[&str]) {
    let ended = Job::start(&mut benchkv(args)).end();
    ended.assert_failed(2, parts);
    assert_eq!(ended.stdout, "", "{args:?}");
}

#[track_caller]
fn directory_refused(path: &Path, parts: &[&str]) {
    let path = path.to_str().unwrap();
    refused(
        &["--shm-dir", path],
        &[&["--shm-dir", path], parts].concat(),
    );
}

#[test]
fn illegal_options_are_refused_with_the_legal_ones() {
    refused(
        &["--backend", "tcp"],
        &["tcp", "meta", "delegation", "sharded", "direct"],
    );
    refused(&["--device", "eth0"], &["eth0", "auto", "soft", "mlx5_N"]);
    for flag in [
        "--ranks",
        "--server-threads",
        "--client-threads",
        "--queue-depth",
        "--runs",
        "--key-range",
    ] {
        refused(&[flag, "0"], &[flag, "from 1 to"]);
    }
    let ended = Job::start(benchkv(&[]).env(DEVICE_VARIABLE, "eth0")).end();
    ended.assert_failed(
        2,
        &["--device auto: COPYRPC_DEVICE is \"eth0\": use auto, soft"],
    );
    refused(
        &["--ring-size", "1024"],
        &["too small", "power of two from 4096"],
    );
    refused(
        &["--ring-size", "536870912"],
        &["more than is supported", "from 4096 to 268435456"],
    );
    refused(
        &["--ring-size", "5000"],
        &["not a power of two", "power of two from 4096"],
    );
    refused(
        &["--value-size", "7"],
        &["--value-size", "use 8 to 16777216 bytes"],
    );
    refused(
        &["--value-size", "16777217"],
        &["--value-size", "use 8 to 16777216 bytes"],
    );
    refused(
        &["--value-size", "64K", "--ring-size", "512K"],
        &[
            "--ring-size 524288",
            "--value-size",
            "power of two from 1048576",
        ],
    );
    refused(&["--read-ratio", "1.01"], &["--read-ratio", "from 0 to 1"]);
    refused(&["--read-ratio=-1"], &["from 0 to 1"]);
    refused(&["--read-ratio", "NaN"], &["--read-ratio", "from 0 to 1"]);
    refused(
        &["--remote-ratio", "0.5", "--ranks", "1"],
        &["--remote-ratio", "no other"],
    );
    refused(&["--distribution", "zipfian:99"], &["at most 10"]);
    refused(&["--pin", "60000"], &["core 60000", "usable are"]);
}

#[test]
fn a_job_that_needs_more_memory_than_it_may_take_is_refused_with_both() {
    let args = [
        "--backend",
        "direct",
        "--ranks",
        "24",
        "--client-threads",
        "46",
        "--memory-limit",
        "1000000000",
    ];
    refused(
        &args,
        &[
            "the job needs about ",
            " and may take 1000000000 ",
            "connections between ranks",
            "--memory-limit",
            "--ring-size",
            "--no-verify",
        ],
    );
}

#[test]
fn a_result_that_could_not_be_written_is_refused_before_the_run() {
    refused(
        &["--json", "/nonexistent/result.json"],
        &["--json", "/nonexistent/result.json", "No such file"],
    );
    let files = Scratch::on_disk();
    refused(
        &["--json", files.path().to_str().unwrap()],
        &["--json", files.path().to_str().unwrap(), "directory"],
    );
    let new = |name: &str| files.path().join(name).to_str().unwrap().to_owned();
    let nameless = "does not end in the name of a file";
    refused(&["--json", ""], &["--json: ", nameless]);
    refused(&["--json", &new("dir/")], &["--json: ", nameless]);
    refused(&["--output", &new("dir.csv/")], &["--output: ", nameless]);
    refused(
        &["--json", &new(&"b".repeat(256))],
        &["--json: ", "File name too long", "give it a shorter name"],
    );
    assert_eq!(files.names(), [""; 0]);
}

/// Two results with one file are refused, because the later result would replace the earlier one
/// without an error.
#[test]
fn results_in_each_others_place_are_refused_before_the_run_by_whatever_names() {
    let files = Scratch::on_disk();
    let (dir, link) = (files.path().to_str().unwrap(), files.path().join("link"));
    let of = |name: &str| format!("{dir}/{name}");
    std::os::unix::fs::symlink(files.path(), &link).unwrap();
    fs::write(of("there.csv"), b"").unwrap();
    std::os::unix::fs::symlink("there.csv", of("other.csv")).unwrap();
    for [flag, one, other_flag, other] in [
        ["--json", "a.csv", "--output", "a.csv"],
        ["--json", "a.csv", "--output", "./a.csv"],
        ["--json", "a.csv", "--output", "link/a.csv"],
        ["--json", "there.csv", "--output", "other.csv"],
        ["--json", "new", "--trace", "new"],
        ["--output", "rank-0-daemon-1.csv", "--trace", "."],
    ] {
        let (one, other) = (of(one), of(other));
        refused(
            &[flag, &one, other_flag, &other],
            &[&format!(
                "{flag} {one} and {other_flag} {other} are the same file"
            )],
        );
    }
    assert!(!files.path().join("new").exists());
}

/// The job is refused whether the libraries, all devices, or only this device is missing.
#[test]
fn a_hardware_device_that_is_missing_is_refused_before_the_run() {
    refused(&["--device", "mlx5_99"], &["benchkv: --device mlx5_99: "]);
}

#[test]
fn a_directory_that_is_missing_or_none_is_refused() {
    directory_refused(Path::new("/nonexistent"), &["does not exist"]);
    let files = Scratch::on_disk();
    let (file, link) = (files.path().join("file"), files.path().join("link"));
    fs::write(&file, b"").unwrap();
    directory_refused(&file, &["is not a directory"]);
    std::os::unix::fs::symlink("/dev/shm", &link).unwrap();
    directory_refused(&link, &["symbolic link"]);
}

#[test]
fn a_directory_that_others_may_write_to_is_refused() {
    let dir = Scratch::in_memory();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    directory_refused(dir.path(), &["mode 0777", "chmod 0700"]);
    dir.assert_empty();
}

#[test]
fn a_directory_of_another_user_is_refused() {
    if is_root() {
        let dir = Scratch::in_memory();
        chown(dir.path(), Some(65_534), None).unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        directory_refused(dir.path(), &["belongs to user 65534"]);
        dir.assert_empty();
    } else {
        directory_refused(Path::new("/dev"), &["belongs to user 0"]);
    }
}

/// Permission bits do not bind root. So root tries file systems of the kernel, in which no file can
/// be made.
#[test]
fn a_directory_where_no_file_can_be_made_is_refused() {
    if is_root() {
        let refused = |dir| {
            directory_refused(
                Path::new(dir),
                &["no file can be made in it: ", "; name another"],
            )
        };
        refused("/proc");
        // Under chroot, `/sys` may not be mounted.
        if Path::new("/sys/kernel").exists() {
            refused("/sys");
        }
    } else {
        let dir = Scratch::in_memory();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o500)).unwrap();
        directory_refused(dir.path(), &["is not writable", "Permission denied"]);
    }
}

#[cfg(not(feature = "mpi"))]
#[test]
fn a_job_under_mpirun_without_mpi_is_refused() {
    let ended = Job::start(benchkv(&[]).env("OMPI_COMM_WORLD_SIZE", "4")).end();
    ended.assert_failed(
        2,
        &[
            "mpirun announces 4 processes, but this build has no MPI",
            "--features mpi",
            "--ranks 4",
        ],
    );
}

#[test]
fn a_limit_on_file_sizes_is_named_with_what_is_needed() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    // The limit is enough for the server of the rank's clients, which is made first, and not for
    // the ring.
    let ended = Job::start(limit(
        benchkv(&SHORT).arg("--shm-dir").arg(dir.path()),
        libc::RLIMIT_FSIZE,
        8800,
        8800,
    ))
    .end();
    ended.assert_failed(
        1,
        &[
            "the delegation ring",
            "needs 8896 bytes",
            "RLIMIT_FSIZE allows 8800",
            "status 1",
        ],
    );
    dir.assert_empty();
}

#[test]
fn a_full_directory_is_named_with_what_is_needed_and_what_is_free() {
    // The size is too small for one rank, in any order of the ranks and of their files.
    match run_in_tmpfs(c"size=16k,mode=0700") {
        Some(ended) => ended.assert_failed(
            1,
            &[
                ": the ",
                " needs ",
                " bytes and ",
                " are free: make room",
                "status 1",
            ],
        ),
        None => a_limit_on_file_sizes_is_named_with_what_is_needed(),
    }
}

#[test]
fn the_default_job_fits_into_the_shared_memory_that_doctor_asks_for() {
    assert_eq!(DEFAULT_SHM_BYTES, 1 << 20);
    let ended = run_in_tmpfs(c"size=1m,mode=0700").unwrap_or_else(|| {
        let _turn = turn();
        let dir = Scratch::in_memory();
        let mut most = 0;
        let job = Job::start(benchkv(&SHORT).arg("--shm-dir").arg(dir.path()));
        job.until("the job has ended", || {
            most = most.max(dir.allocated_bytes());
            job.launcher().has_ended().then_some(())
        });
        assert!((1..DEFAULT_SHM_BYTES).contains(&most), "{most} bytes");
        job.end()
    });
    assert!(
        ended.status.success() && ended.stdout.contains("round trip"),
        "{}",
        ended.stderr
    );
}

/// Runs a short job whose directory is a file system of its own. Returns `None`, and prints why, if
/// this process may not mount.
fn run_in_tmpfs(size: &'static CStr) -> Option<Ended> {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let mount_point = CString::new(dir.path().to_str().unwrap()).unwrap();
    let mount = move || {
        // SAFETY: all strings are live and end with NUL; the calls are bare system calls, hence
        // async-signal-safe.
        let is_mounted = unsafe {
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(
                    std::ptr::null(),
                    c"/".as_ptr(),
                    std::ptr::null(),
                    libc::MS_REC | libc::MS_PRIVATE,
                    std::ptr::null(),
                ) == 0
                && libc::mount(
                    c"none".as_ptr(),
                    mount_point.as_ptr(),
                    c"tmpfs".as_ptr(),
                    0,
                    size.as_ptr().cast(),
                ) == 0
        };
        if is_mounted {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    };
    let mut command = benchkv(&SHORT);
    command.arg("--shm-dir").arg(dir.path());
    // SAFETY: the closure makes system calls only and allocates nothing.
    unsafe { command.pre_exec(mount) };
    match Job::try_start(&mut command) {
        Ok(job) => Some(job.end()),
        Err(error) => {
            // In a root directory that is no mount point (chroot), the mount fails because of an
            // invalid argument.
            assert!(
                matches!(
                    error.kind(),
                    io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidInput
                ),
                "{error}"
            );
            eprintln!("this process may not mount a tmpfs: another way stands in for it");
            None
        }
    }
}

fn is_root() -> bool {
    // SAFETY: no pointers are involved.
    unsafe { libc::geteuid() == 0 }
}

/// The soft limit of many systems is about the number of files that a job with several endpoints
/// opens.
#[test]
fn a_job_that_opens_more_files_than_the_soft_limit_allows_raises_it_as_far_as_it_may() {
    let args = [
        "--backend",
        "direct",
        "--ranks",
        "3",
        "--server-threads",
        "2",
        "--client-threads",
        "3",
    ];
    let start = |soft, hard| {
        let (_turn, dir) = (turn(), Scratch::in_memory());
        let mut command = benchkv(&["--ops", "20"]);
        let ended = Job::start(limit(
            command.args(args).arg("--shm-dir").arg(dir.path()),
            libc::RLIMIT_NOFILE,
            soft,
            hard,
        ))
        .end();
        dir.assert_empty();
        ended
    };
    let ended = start(64, 1024);
    assert!(
        ended.status.success() && ended.stdout.contains("round trip"),
        "{}",
        ended.stderr
    );
    start(32, 64).assert_failed(
        1,
        &[
            "rank 0: ",
            " open files are needed and at most 64 are allowed: raise the hard limit (ulimit -Hn)",
        ],
    );
}

/// Batch systems limit addresses (`h_vmem`), and devices map far more than they use.
#[test]
fn a_job_runs_in_few_gigabytes_of_addresses() {
    let (_turn, dir) = (turn(), Scratch::in_memory());
    let mut command = benchkv(&SHORT);
    let ended = Job::start(limit(
        command.arg("--shm-dir").arg(dir.path()),
        libc::RLIMIT_AS,
        4 << 30,
        4 << 30,
    ))
    .end();
    assert!(
        ended.status.success() && ended.stdout.contains("round trip"),
        "{}",
        ended.stderr
    );
}

/// The type of a resource's number, which depends on the C library.
#[cfg(target_env = "musl")]
type Resource = libc::c_int;
#[cfg(not(target_env = "musl"))]
type Resource = libc::__rlimit_resource_t;

/// Limits the job to `soft` of a resource, with `hard` as the maximum that it can set itself.
fn limit(command: &mut Command, resource: Resource, soft: u64, hard: u64) -> &mut Command {
    let limit = move || {
        let limit = libc::rlimit {
            rlim_cur: soft,
            rlim_max: hard,
        };
        // SAFETY: `limit` is live for the call.
        let status = unsafe { libc::setrlimit(resource, &raw const limit) };
        if status == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    };
    // SAFETY: the closure makes one async-signal-safe system call and allocates nothing.
    unsafe { command.pre_exec(limit) }
}
