//! Garbage commands, and programs that treat their descriptors in unusual ways: the program
//! survives, with the error numbers of a kernel, and leaves no files.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsRawFd, FromRawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::nonsense::{Command, Device, Memory, REFUSALS, any, get_context};
use crate::random::Random;
use crate::support::{Place, scale};

const WHAT: &str = "MLX5_TEST_GARBAGE";
/// Length of one test, times `MLX5_TEST_SCALE`.
const FOR: Duration = Duration::from_secs(4);

/// Runs the program that the tests below start. It is not a test of its own.
#[test]
#[ignore = "helper process of the other tests, started by them"]
fn program() {
    let Ok(what) = std::env::var(WHAT) else {
        return;
    };
    println!("tree {}", std::env::var("SYSFS_PATH").unwrap());
    let (_, run) = PROGRAMS.iter().find(|(name, _)| *name == what).unwrap();
    run();
    println!("{what} is done");
}

const PROGRAMS: [(&str, fn()); 10] = [
    ("commands", commands),
    ("threads", threads),
    ("forks", forks),
    ("close-all", close_all),
    ("close-range", close_range),
    ("close-others", close_others_of_the_device),
    ("duplicates", duplicates),
    ("contexts", contexts),
    ("reuse", reuse),
    ("not-closed", || _ = Device::with_context(&Memory::new())),
];

/// Runs one of the programs under the front end. A program that closes descriptors also runs with a
/// socket for packets.
fn survives(what: &str) {
    survives_with(what, &[]);
    if what.starts_with("close") {
        survives_with(what, &["--link", "roce", "--address", "127.0.0.1"]);
    }
}

/// Runs a program with these options, and checks that no file is left afterwards.
fn survives_with(what: &str, options: &[&str]) {
    let place = Place::new(what);
    let mut command = place.mlx5_run(options);
    command
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "garbage::program", "--ignored", "--nocapture"])
        .env(WHAT, what);
    let finished = place.start(&mut command).finish();
    print!("{}", finished.output);
    finished.succeeded().said(&format!("{what} is done"));
    let tree = finished
        .output
        .lines()
        .find_map(|line| line.split_once("tree "))
        .map(|(_, path)| PathBuf::from(path))
        .unwrap();
    assert!(!tree.exists());
    if what == "not-closed" {
        // The next program removes the files that this program left, and leaves no files of its
        // own.
        survives_in(&place);
    }
    let left = place.left();
    assert!(left.is_empty(), "left in the fabric: {left:?}");
}

fn survives_in(place: &Place) {
    let mut command = place.mlx5_run(&[]);
    command
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "garbage::program", "--ignored"])
        .env(WHAT, "reuse");
    place.start(&mut command).finish().succeeded();
}

macro_rules! tests {
    ($($name:ident: $what:literal;)*) => {
        $(
            #[test]
            #[ignore = "needs libibverbs1 and ibverbs-providers"]
            fn $name() {
                survives($what);
            }
        )*
    };
}

tests! {
    nonsense_written_to_the_device_is_refused_as_a_kernel_does: "commands";
    commands_of_many_threads_and_a_close_among_them_are_carried_out_or_refused: "threads";
    children_of_a_fork_have_no_device_and_disturb_their_parents: "forks";
    a_program_that_closes_all_descriptors_can_open_the_device_again: "close-all";
    a_program_that_closes_a_range_of_descriptors_can_open_the_device_again: "close-range";
    a_program_that_closes_all_descriptors_but_the_devices_leaves_it_its_own: "close-others";
    a_duplicate_of_the_descriptor_is_the_device_too: "duplicates";
    two_hundred_contexts_come_and_go: "contexts";
    a_number_that_names_another_file_now_is_not_the_device: "reuse";
    a_device_that_was_not_closed_is_swept_by_the_next_program: "not-closed";
}

// ---- the programs ----

/// Sends right and wrong commands, until the time has passed.
fn commands() {
    let memory = Memory::new();
    let end = Instant::now() + FOR * scale();
    let mut counts = BTreeMap::<i32, u32>::new();
    for seed in 1.. {
        let random = &mut Random::new(seed);
        let before = open_descriptors();
        let device = Device::with_context(&memory);
        for _ in 0..2000 {
            let command = any(&memory, random);
            let bytes = if random.one_in(2) {
                command.bytes()
            } else {
                command.spoilt(&memory, random)
            };
            let result = device.write(&bytes);
            let errno = result.err().unwrap_or(0);
            assert!(
                errno == 0 || REFUSALS.contains(&errno),
                "seed {seed}: errno {errno} for {bytes:x?}"
            );
            *counts.entry(errno).or_default() += 1;
            if random.one_in(4) {
                memory.stir(random);
            }
        }
        // SAFETY: the address has no memory, or less memory than the length states.
        let writes = unsafe {
            [
                libc::write(device.0, std::ptr::without_provenance(8), 64),
                libc::write(device.0, memory.end() as *const _, usize::MAX / 2),
            ]
        };
        assert_eq!(writes, [-1, -1]);
        assert!(device.is_well(&memory), "seed {seed}");
        device.close();
        close_others(&before);
        if Instant::now() > end {
            break;
        }
    }
    println!("commands by errno: {counts:?}");
    for errno in [
        0,
        libc::EINVAL,
        libc::EFAULT,
        libc::EOPNOTSUPP,
        libc::ENOSPC,
    ] {
        assert!(
            counts.get(&errno).is_some_and(|count| *count > 10),
            "errno {errno}: {counts:?}"
        );
    }
}

fn open_descriptors() -> Vec<i32> {
    // SAFETY: the call only reads the flags of a descriptor.
    (3..1024)
        .filter(|&fd| unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0)
        .collect()
}

/// Closes a descriptor by number. Returns whether it was open; these tests close descriptors that
/// other code opened.
fn close_number(fd: i32) -> bool {
    // SAFETY: a plain number.
    unsafe { libc::close(fd) == 0 }
}

/// Closes the event and completion channels of a round.
fn close_others(before: &[i32]) {
    open_descriptors()
        .iter()
        .filter(|fd| !before.contains(fd))
        .for_each(|fd| _ = close_number(*fd));
}

/// Lets eight threads write to one device, which another thread closes and opens again.
fn threads() {
    let memory = &Memory::new();
    let end = Instant::now() + FOR * scale();
    let mut rounds = 0;
    while Instant::now() < end {
        let before = open_descriptors();
        let device = Device::with_context(memory);
        let (fd, is_over) = (device.0, &AtomicBool::new(false));
        std::thread::scope(|scope| {
            for thread in 0..8 {
                scope.spawn(move || {
                    let random = &mut Random::new(rounds << 8 | thread);
                    while !is_over.load(Ordering::Relaxed) {
                        let result = Device(fd).write(&any(memory, random).bytes());
                        assert!(
                            result.is_ok() || REFUSALS.contains(&result.unwrap_err()),
                            "{result:?}"
                        );
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(50));
            device.close();
            // A device without a context, or with the number of the first device's context.
            let other = Device::open();
            let _ = other.write(&get_context(memory).bytes());
            std::thread::sleep(Duration::from_millis(20));
            is_over.store(true, Ordering::Relaxed);
            other.close();
        });
        close_others(&before);
        rounds += 1;
    }
    println!("{rounds} rounds");
    let device = Device::with_context(memory);
    assert!(device.is_well(memory));
    device.close();
}

/// Runs `body` in a child. Returns the child's status.
fn in_child(body: impl FnOnce() -> i32) -> i32 {
    // SAFETY: the child calls `body`, which uses nothing that another thread may hold, and ends.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            let code = body();
            libc::_exit(code);
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        status
    }
}

/// Children write to the device, exit, execute another program, close all descriptors, or use the
/// parent's device. The parent continues.
fn forks() {
    let memory = Memory::new();
    let device = Device::with_context(&memory);
    let query = Command::plain(1, 176, memory.at(4096)).bytes();
    for round in 0..20 {
        assert_eq!(
            in_child(|| i32::from(std::io::stdout().write_all(b"a child\n").is_err())),
            0,
            "round {round}"
        );
        assert_eq!(
            in_child(|| i32::from((3..1024).filter(|&fd| close_number(fd)).count() == 0)),
            0,
            "a child closes what it has"
        );
        // Commands of another process cannot reach the parent's thread. The commands are refused,
        // and are not written to a file.
        assert_eq!(
            in_child(|| i32::from(device.write(&query).is_ok())),
            0,
            "a child's command looked as if it were carried out"
        );
        let echo = std::process::Command::new("sh")
            .args(["-c", "echo from the shell"])
            .output()
            .unwrap();
        assert_eq!(echo.stdout, b"from the shell\n");
        let other = in_child(|| {
            let own = Device::open();
            let is_well = own.write(&get_context(&memory).bytes()).is_ok() && own.is_well(&memory);
            own.close();
            i32::from(!is_well)
        });
        assert_eq!(other, 0, "a child has devices of its own");
        assert!(device.is_well(&memory));
    }
    device.close();
}

/// Makes files of the program. Returns them with their inodes.
fn files(n: usize) -> Vec<(File, u64)> {
    use std::os::unix::fs::MetadataExt;
    let file = |_| {
        // SAFETY: a string; this test owns the descriptor.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"program".as_ptr(), 0)) };
        let inode = file.metadata().unwrap().ino();
        (file, inode)
    };
    (0..n).map(file).collect()
}

/// Closes all descriptors by `close`. The program's next files get the same numbers, and keep them.
fn closes(close: impl Fn()) {
    use std::os::unix::fs::MetadataExt;
    let memory = Memory::new();
    for _ in 0..5 {
        let _closed_below = [(); 2].map(|()| Device::with_context(&memory));
        close();
        let files = files(40);
        // The library may detect only now that the program has closed its descriptors.
        let device = Device::with_context(&memory);
        for (file, inode) in &files {
            let is_written = (&mut &*file).write_all(b"what the program writes").is_ok();
            assert!(
                is_written && file.metadata().is_ok_and(|now| now.ino() == *inode),
                "descriptor {} was taken",
                file.as_raw_fd()
            );
        }
        assert!(device.is_well(&memory));
        device.close();
        assert!(
            files
                .iter()
                .all(|(file, inode)| file.metadata().is_ok_and(|now| now.ino() == *inode))
        );
    }
}

fn close_all() {
    closes(|| (3..1024).for_each(|fd| _ = close_number(fd)));
    closes(|| (3..1024).rev().for_each(|fd| _ = close_number(fd)));
}

fn close_range() {
    // SAFETY: plain numbers.
    closes(|| assert_eq!(unsafe { libc::close_range(3, u32::MAX, 0) }, 0));
}

/// Closes all descriptors that the program does not know, as a daemon or a sandbox does.
fn close_others_of_the_device() {
    let sockets = || {
        let links = std::fs::read_dir("/proc/self/fd")
            .unwrap()
            .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
        links
            .filter(|link| link.to_string_lossy().starts_with("socket:"))
            .count()
    };
    let memory = Memory::new();
    let device = Device::with_context(&memory);
    let before = sockets();
    (3..1024)
        .filter(|fd| *fd != device.0)
        .for_each(|fd| _ = close_number(fd));
    let number = device.0 as u32;
    for (first, last) in [(3, number - 1), (number + 1, u32::MAX)] {
        // SAFETY: plain numbers.
        assert!(first > last || unsafe { libc::close_range(first, last, 0) } == 0);
    }
    assert_eq!(sockets(), before, "the HCA's socket was closed");
    assert!(device.is_well(&memory));
    device.close();
}

fn duplicates() {
    let memory = Memory::new();
    let duplicate: [fn(i32) -> i32; 4] = [
        // SAFETY: plain numbers.
        |fd| unsafe { libc::dup(fd) },
        // SAFETY: as above.
        |fd| unsafe { libc::dup2(fd, 100) },
        // SAFETY: as above.
        |fd| unsafe { libc::dup3(fd, 101, libc::O_CLOEXEC) },
        // SAFETY: as above.
        |fd| unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 50) },
    ];
    for duplicate in duplicate {
        let device = Device::with_context(&memory);
        let other = Device(duplicate(device.0));
        assert!(other.0 > 2 && other.is_well(&memory) && device.is_well(&memory));
        device.close();
        assert!(
            other.is_well(&memory),
            "it lives as long as a descriptor of it"
        );
        other.close();
    }
}

fn contexts() {
    let memory = Memory::new();
    for _ in 0..200 {
        let device = Device::with_context(&memory);
        assert!(device.is_well(&memory));
        device.close();
    }
    let many: Vec<_> = (0..40).map(|_| Device::with_context(&memory)).collect();
    assert!(many.iter().all(|device| device.is_well(&memory)));
    many.into_iter().for_each(Device::close);
}

/// Closes the device without a call that the front end interposes.
fn reuse() {
    let memory = Memory::new();
    let device = Device::with_context(&memory);
    // SAFETY: plain numbers.
    unsafe { libc::syscall(libc::SYS_close, device.0) };
    let [(mut file, _)] = files(1).try_into().unwrap();
    assert_eq!(file.as_raw_fd(), device.0);
    file.write_all(b"not a command").unwrap();
    assert_eq!(file.metadata().unwrap().len(), 13);
    let again = Device::with_context(&memory);
    assert!(again.is_well(&memory));
    again.close();
}
