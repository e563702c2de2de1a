//! Starts the binary with a watchdog, and examines its processes.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use benchkv_harness::launch::device::DEVICE_VARIABLE;
use serde_json::Value;

/// Backends that need nothing but this build; `ucx-am` has tests of its own.
pub(crate) const BACKENDS: [&str; 5] = ["meta", "delegation", "sharded", "direct", "rc-send"];

/// Backends whose messages are written into rings.
pub(crate) const WITH_RINGS: [&str; 4] = ["meta", "delegation", "sharded", "direct"];

/// Backends for tests that do not depend on the backend: the default, and one whose clients have
/// endpoints.
pub(crate) const TWO_BACKENDS: [&str; 2] = ["delegation", "direct"];

/// Options of the shortest job that still does something on a loaded machine.
pub(crate) const SHORT: [&str; 6] = ["--duration", "0.1", "--runs", "1", "--warmup", "0.05"];

/// Time limit of a job; a longer job is killed and fails the test.
const WATCHDOG: Duration = Duration::from_secs(60);
/// Clock ticks of a rank's client thread after which the rank is about to run, or runs.
pub(crate) const TICKS_OF_LOAD: u64 = 5;
/// Clock ticks after which the rank is in mid-run: the accesses are made, and the barriers passed,
/// which take few ticks.
pub(crate) const TICKS_OF_RUN: u64 = 12;

/// Time limit for a state that a test waits for.
const STATE_WATCHDOG: Duration = Duration::from_secs(20);
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// Takes the turn of a test. Tests run in parallel, jobs do not: each has more threads than small
/// machines have cores.
pub(crate) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    // A test that failed in its turn leaves nothing that affects the next test.
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the command of the binary, to which a test adds options.
pub(crate) fn benchkv(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_benchkv"));
    // A job uses no device of the machine unless its test names one.
    command.args(args).env(DEVICE_VARIABLE, "soft");
    command
}

/// Runs a short job in the directory `dir` to its end; `args` may make it longer.
pub(crate) fn run(dir: &Scratch, args: &[&str]) -> Ended {
    Job::start(benchkv(&SHORT).args(args).arg("--shm-dir").arg(dir.path())).end()
}

/// A running job. Dropping it kills all of its processes.
pub(crate) struct Job {
    /// The leader of a process group, which contains its ranks.
    launcher: Child,
    stdout: File,
    stderr: File,
    is_reaped: bool,
}

/// A job that has ended.
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Job {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self::try_start(command).unwrap()
    }

    /// Starts a job. Fails if the process cannot be started by `command`.
    pub(crate) fn try_start(command: &mut Command) -> io::Result<Self> {
        let stderr = nameless_file();
        command.stderr(stderr.try_clone().unwrap());
        Self::spawn(command, nameless_file(), stderr)
    }

    /// Starts a job with this standard output.
    pub(crate) fn start_into(stdout: File, command: &mut Command) -> Self {
        let stderr = nameless_file();
        command.stderr(stderr.try_clone().unwrap());
        Self::spawn(command, stdout, stderr).unwrap()
    }

    /// Starts a job with a terminal as standard error, which the test reads.
    pub(crate) fn start_on(terminal: File, command: &mut Command) -> Self {
        Self::spawn(command.stderr(terminal), nameless_file(), nameless_file()).unwrap()
    }

    fn spawn(command: &mut Command, stdout: File, stderr: File) -> io::Result<Self> {
        command
            .stdin(Stdio::null())
            .stdout(stdout.try_clone().unwrap())
            .process_group(0);
        // SAFETY: signal is async-signal-safe.
        unsafe {
            command.pre_exec(|| {
                // The shell that runs the tests may have these signals ignored, as for nohup and
                // background jobs of a script. Without this call a job would inherit the setting.
                for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
                    libc::signal(signal, libc::SIG_DFL);
                }
                Ok(())
            });
        }
        Ok(Self {
            launcher: command.spawn()?,
            stdout,
            stderr,
            is_reaped: false,
        })
    }

    pub(crate) fn launcher(&self) -> Process {
        Process(self.launcher.id() as libc::pid_t)
    }

    /// Returns every process of the job, as a terminal and `timeout` signal them.
    pub(crate) fn group(&self) -> Process {
        Process(-self.launcher().0)
    }

    /// Returns the process of a rank, as soon as the process exists.
    pub(crate) fn rank(&self, rank: usize) -> Process {
        self.child_with(&format!("BENCH_HARNESS_ROLE={{\"rank\":{rank},"))
    }

    /// Returns the launcher's child with an environment variable that starts like this.
    pub(crate) fn child_with(&self, variable: &str) -> Process {
        self.child_of(self.launcher(), variable)
    }

    fn child_of(&self, parent: Process, variable: &str) -> Process {
        self.until("a child is started", || {
            parent
                .children()
                .into_iter()
                .find(|child| child.has_variable(variable))
        })
    }

    /// Waits for a state of the job. A job that never reaches it fails the test.
    pub(crate) fn until<T>(&self, state: &str, mut look: impl FnMut() -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(found) = look() {
                return found;
            }
            assert!(
                start.elapsed() < STATE_WATCHDOG,
                "it never came to this: {state}; {}",
                self.stderr()
            );
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    /// Waits until a thread of a rank has used `ticks` of processor time.
    pub(crate) fn until_used(&self, rank: Process, thread: &str, ticks: u64) {
        self.until("every thread has work", || {
            rank.thread_ticks(thread).filter(|used| *used >= ticks)
        });
    }

    /// Returns the content of standard error until now.
    pub(crate) fn stderr(&self) -> String {
        content(&self.stderr)
    }

    /// Waits for the end of the launcher.
    pub(crate) fn end(mut self) -> Ended {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.launcher.try_wait().unwrap() {
                break status;
            }
            assert!(
                start.elapsed() < WATCHDOG,
                "the job did not end: {}",
                self.stderr()
            );
            std::thread::sleep(LOOK_INTERVAL);
        };
        self.is_reaped = true;
        Ended {
            status,
            stdout: content(&self.stdout),
            stderr: self.stderr(),
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // Once the launcher is reaped, its number may belong to another process, and its ranks have
        // ended.
        if !self.is_reaped {
            self.group().signal(libc::SIGKILL);
            let _ = self.launcher.wait();
        }
    }
}

impl Ended {
    /// Returns the result of a job that had to succeed with `--json -`.
    pub(crate) fn result(&self) -> Value {
        assert!(self.status.success(), "{}: {}", self.status, self.stderr);
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("not one JSON document: {error}: {}", self.stdout))
    }

    /// Asserts that the job failed with status `code`, and that standard error has every one of
    /// `parts`.
    #[track_caller]
    pub(crate) fn assert_failed(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.status.code(), Some(code), "{}", self.stderr);
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        for part in parts {
            assert!(
                self.stderr.contains(part),
                "{part:?} is missing in: {}",
                self.stderr
            );
        }
    }
}

/// The id of a process of a job; negative for a process group.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Process(libc::pid_t);

impl Process {
    pub(crate) fn signal(self, signal: libc::c_int) {
        assert_eq!(
            // SAFETY: no pointers are involved.
            unsafe { libc::kill(self.0, signal) },
            0,
            "signal {signal} to {self:?}: {}",
            io::Error::last_os_error()
        );
    }

    /// Signals a process that may have ended.
    pub(crate) fn try_signal(self, signal: libc::c_int) {
        // SAFETY: no pointers are involved.
        unsafe { libc::kill(self.0, signal) };
    }

    /// Returns whether the process has ended; its parent may not have reaped it yet.
    pub(crate) fn has_ended(self) -> bool {
        matches!(
            self.stat(),
            None | Some(Stat {
                state: 'Z' | 'X',
                ..
            })
        )
    }

    pub(crate) fn is_stopped(self) -> bool {
        self.stat().is_some_and(|stat| stat.state == 'T')
    }

    /// Returns the clock ticks that the thread of this name has used; `None` without such a thread.
    pub(crate) fn thread_ticks(self, name: &str) -> Option<u64> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.0)).ok()?;
        let stats = tasks.filter_map(|task| Stat::read(&task.ok()?.path()));
        stats
            .into_iter()
            .find(|stat| stat.name == name)
            .map(|stat| stat.ticks)
    }

    /// Returns how often the thread of this name has slept; `None` without such a thread.
    pub(crate) fn thread_sleeps(self, name: &str) -> Option<u64> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.0)).ok()?;
        let mut named = tasks
            .filter_map(Result::ok)
            .filter(|task| Stat::read(&task.path()).is_some_and(|stat| stat.name == name));
        let status = fs::read_to_string(named.next()?.path().join("status")).ok()?;
        status
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?
            .trim()
            .parse()
            .ok()
    }
    pub(crate) fn children(self) -> Vec<Self> {
        let pids = fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok().map(Self));
        pids.filter(|child| child.stat().is_some_and(|stat| stat.parent == self.0))
            .collect()
    }

    fn has_variable(self, start: &str) -> bool {
        let environment = fs::read(format!("/proc/{}/environ", self.0)).unwrap_or_default();
        environment
            .split(|byte| *byte == 0)
            .any(|variable| variable.starts_with(start.as_bytes()))
    }

    fn stat(self) -> Option<Stat> {
        Stat::read(Path::new(&format!("/proc/{}", self.0)))
    }
}

/// The kernel's record of a process or thread; see proc_pid_stat(5).
struct Stat {
    name: String,
    state: char,
    parent: libc::pid_t,
    ticks: u64,
}

impl Stat {
    fn read(dir: &Path) -> Option<Self> {
        let text = fs::read_to_string(dir.join("stat")).ok()?;
        // The name is in parentheses and may contain parentheses.
        let (head, tail) = text.rsplit_once(") ")?;
        let fields: Vec<&str> = tail.split(' ').collect();
        let number = |field: usize| fields.get(field)?.parse::<u64>().ok();
        Some(Self {
            name: head.split_once('(')?.1.to_owned(),
            state: fields.first()?.chars().next()?,
            parent: number(1)? as libc::pid_t,
            ticks: number(11)? + number(12)?,
        })
    }
}

fn nameless_file() -> File {
    let path = unique(&std::env::temp_dir(), "output");
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    fs::remove_file(path).unwrap();
    file
}

/// Returns the content of a file, without moving the position at which a child process may be
/// writing.
fn content(file: &File) -> String {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    String::from_utf8(bytes).unwrap()
}

fn unique(parent: &Path, name: &str) -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    parent.join(format!(
        "benchkv-test-{}-{}-{name}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    ))
}

/// A directory with mode 0700 that is removed after the test.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Makes a directory for files.
    pub(crate) fn on_disk() -> Self {
        Self::made(unique(&std::env::temp_dir(), "files"))
    }

    /// Makes a directory for shared memory.
    pub(crate) fn in_memory() -> Self {
        Self::made(unique(Path::new("/dev/shm"), "shm"))
    }

    fn made(path: PathBuf) -> Self {
        fs::DirBuilder::new().mode(0o700).create(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn names(&self) -> Vec<String> {
        fs::read_dir(&self.0)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    /// Returns the bytes that the directory's files take now. A file may disappear during the call.
    pub(crate) fn allocated_bytes(&self) -> u64 {
        let files = fs::read_dir(&self.0)
            .unwrap()
            .filter_map(|entry| entry.ok()?.metadata().ok());
        files.map(|file| file.blocks() * 512).sum()
    }

    #[track_caller]
    pub(crate) fn assert_empty(&self) {
        assert_eq!(self.names(), [""; 0], "something was left behind");
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
