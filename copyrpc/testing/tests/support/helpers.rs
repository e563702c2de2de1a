//! Shared parts of tests with several processes: a scratch directory and helper processes. A helper
//! is this test binary, run again with a role. A test file that uses helpers has a test
//! `helper_process`, which plays the role that [`role`] returns, and does nothing without a role.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use copyrpc_shm::dir::Dir;

use crate::limits::{scale_of, watchdog};

/// Returns the factor, from `SHM_TEST_SCALE`, by which the tests with several processes run longer
/// than by default.
pub fn scale() -> u32 {
    scale_of("SHM_TEST_SCALE")
}

/// Maximum time that a test waits for something that takes milliseconds.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Time after which a test with many processes counts as hanging. Nothing in such a test takes
/// long.
const HANG: Duration = Duration::from_secs(300);

/// A directory of regions that is removed at the end of the test.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let path = PathBuf::from(format!(
            "/dev/shm/copyrpc-test-{name}-{}",
            std::process::id()
        ));
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .unwrap();
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn dir(&self) -> Dir {
        Dir::open(Some(&self.0)).unwrap()
    }

    pub fn names(&self) -> Vec<String> {
        std::fs::read_dir(&self.0)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A helper process; it is killed and reaped when it is dropped, even if the test panics.
#[derive(Debug)]
pub struct Helper {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Helper {
    /// Starts this test binary in a role, with a scratch directory.
    pub fn start(role: &str, scratch: &Scratch) -> Self {
        Self::start_with(role, scratch, |_| ())
    }

    /// Like [`start`](Self::start), with the changes that `change` makes to the command.
    pub fn start_with(role: &str, scratch: &Scratch, change: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args([
                "--exact",
                "helper_process",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("SHM_TEST_ROLE", role)
            .env("SHM_TEST_DIR", scratch.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        change(&mut command);
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// Returns the next line that the helper prints for the test. Such lines begin with `>`, which
    /// distinguishes them from the lines of the test harness.
    pub fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(
                self.lines.read_line(&mut line).unwrap() > 0,
                "the helper ended early"
            );
            if let Some(at) = line.find('>') {
                return line[at + 1..].trim().to_owned();
            }
        }
    }

    pub fn tell(&mut self, word: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{word}").unwrap();
    }

    pub fn hang_up(&mut self) {
        drop(self.child.stdin.take());
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: no pointers are involved; the child is not reaped yet, so the pid is still the
        // child's.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    pub fn is_stopped(&self) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        stat.rsplit(") ").next().unwrap().starts_with('T')
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub fn kill(&mut self) {
        assert!(!self.has_ended(), "the helper ended early");
        self.signal(libc::SIGKILL);
        self.child.wait().unwrap();
    }

    pub fn wait(&mut self) {
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In a helper: sends the test one line.
pub fn say(line: impl std::fmt::Display) {
    println!(">{line}");
    std::io::stdout().flush().unwrap();
}

/// In a helper: waits for the next line of the test, and returns it; empty if the test has ended.
pub fn next_word() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim().to_owned()
}

/// In a helper: returns whether the test has closed the input or has ended, or has sent a further
/// line.
pub fn is_over() -> bool {
    let mut stdin = libc::pollfd {
        fd: 0,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: `stdin` is one valid `pollfd` for the whole call, which does not wait.
    unsafe { libc::poll(&raw mut stdin, 1, 0) > 0 }
}

/// In a helper: returns its role and its directory; `None` without a role. Sets a watchdog: a
/// helper that hangs ends, and so fails the test that waits for its lines.
pub fn role() -> Option<(String, Dir)> {
    let role = std::env::var("SHM_TEST_ROLE").ok()?;
    // SAFETY: alarm(2) takes no pointer.
    unsafe { libc::alarm(120 * scale()) };
    let path = PathBuf::from(std::env::var_os("SHM_TEST_DIR").unwrap());
    Some((role, Dir::open(Some(&path)).unwrap()))
}

/// Runs `test` in `runs` separate processes, one after the other. Each process is this binary with
/// only the test called `name`, which calls this function. So other tests and this test do not
/// disturb each other.
pub fn alone(name: &str, runs: usize, test: impl FnOnce()) {
    const ALONE: &str = "COPYRPC_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return limited(test);
    }
    for _ in 0..runs {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--include-ignored", "--nocapture"])
            .env(ALONE, "1")
            .output()
            .unwrap();
        let [printed, errors] = [output.stdout, output.stderr]
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        assert!(
            output.status.success() && printed.contains("1 passed"),
            "{name}, alone: {}\n{printed}{errors}",
            output.status
        );
    }
}

pub fn limited(test: impl FnOnce()) {
    watchdog(HANG * scale());
    test();
}

/// Returns the number of times that the calling thread has given up its core voluntarily.
pub fn voluntary_switches() -> i64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel writes one `rusage` into the buffer, and zeroed bytes are a valid `rusage`
    // too.
    let usage = unsafe {
        assert_eq!(libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()), 0);
        usage.assume_init()
    };
    usage.ru_nvcsw
}

/// Waits until `get` returns a value. Fails after [`PATIENCE`].
pub fn wait_for_some<T>(what: &str, mut get: impl FnMut() -> Option<T>) -> T {
    let mut got = None;
    wait_for(what, || {
        got = get();
        got.is_some()
    });
    got.unwrap()
}

/// Waits until `done` returns `true`. Fails after [`PATIENCE`].
pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        std::thread::yield_now();
    }
}
