//! A helper process that is single-stepped from one of its markers to the next.
#![allow(dead_code, reason = "each test uses what it needs")]

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use super::support::scale;

/// In the helper: what it says first, and the thread that says it is the one to be stepped.
pub(crate) fn hello(words: &str) {
    // SAFETY: gettid takes no arguments.
    let tid = unsafe { libc::syscall(libc::SYS_gettid) };
    println!("\nstepped {tid} {words}");
}

/// In the helper: where stepping begins and ends.
pub(crate) fn marker() {
    // SAFETY: raise sends a signal to this thread; the tracer sees it and takes it away.
    unsafe { libc::raise(libc::SIGUSR1) };
}

/// In the helper: does `work` in a child, and in another one whenever a child is killed, until one ends by itself. A child has one thread, so
/// it starts much faster than a program: the kernel need not wait for all cores to register it for barriers.
pub(crate) fn again_and_again(mut work: impl FnMut()) {
    loop {
        // SAFETY: the helper's other threads do nothing but wait for this one.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut work));
            // SAFETY: it ends the process.
            unsafe { libc::_exit(outcome.is_err().into()) };
        }
        let mut status = 0;
        // SAFETY: `status` is valid for the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        if libc::WIFEXITED(status) {
            assert_eq!(libc::WEXITSTATUS(status), 0, "the child's status");
            return;
        }
    }
}

/// What a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Instruction,
    /// To the beginning, or to the end, of the next system call.
    SystemCall,
}

/// The helper process, or its child of the moment, seen by its tracer.
pub(crate) struct Tracee {
    unit: Unit,
    child: Child,
    /// The helper steps nothing itself but works [`again_and_again`].
    forks: bool,
    tid: libc::pid_t,
    /// `None` when it is to hear no more.
    stdin: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

#[derive(Debug, PartialEq)]
enum Stop {
    Step,
    Marker,
}

impl Tracee {
    /// Starts the test called `stepped_process`, which is not a test of its own, with these variables. What it says in [`hello`] is returned too.
    pub(crate) fn start(variables: &[(&str, &OsStr)]) -> (Self, String) {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "stepped_process", "--ignored", "--nocapture"])
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (output, stdin) = (BufReader::new(child.stdout.take().unwrap()), child.stdin.take());
        let mut tracee = Self { unit: Unit::Instruction, child, forks: false, tid: 0, stdin, output };
        let words = tracee.meet();
        (tracee, words)
    }

    /// As [`start`](Self::start), of a helper that works [`again_and_again`].
    pub(crate) fn start_forking(variables: &[(&str, &OsStr)]) -> Self {
        let (mut tracee, _) = Self::start(variables);
        tracee.forks = true;
        tracee
    }

    /// Its first [`hello`].
    fn meet(&mut self) -> String {
        let line = self.line();
        let (tid, words) = line.split_once(' ').unwrap();
        self.tid = tid.parse().unwrap();
        words.to_owned()
    }

    /// Its thread and words of its next [`hello`].
    fn line(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the helper ended early");
            if let Some(line) = line.strip_prefix("stepped ") {
                return line.trim_end().to_owned();
            }
        }
    }

    /// Waits for its next [`hello`], not attached yet.
    pub(crate) fn wait_for(&mut self, words: &str) {
        let line = self.line();
        assert!(line.ends_with(words), "{line}");
    }

    /// The words of its next [`hello`].
    pub(crate) fn hear(&mut self) -> String {
        let line = self.line();
        line.split_once(' ').unwrap().1.to_owned()
    }

    /// Writes it a line.
    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// From now on it can be stepped.
    pub(crate) fn attach(&self) {
        self.ptrace(libc::PTRACE_SEIZE, 0);
    }

    fn ptrace(&self, request: libc::c_uint, data: libc::c_long) {
        // SAFETY: requests without an address, on a thread of our own child.
        let done = unsafe { libc::ptrace(request, self.tid, 0, data) };
        assert_eq!(done, 0, "ptrace {request}: {}", std::io::Error::last_os_error());
    }

    fn wait(&self) -> Stop {
        let mut status = 0;
        // SAFETY: `status` is valid for the call.
        let waited = unsafe { libc::waitpid(self.tid, &raw mut status, libc::__WALL) };
        assert_eq!(waited, self.tid);
        assert!(libc::WIFSTOPPED(status), "the helper ended with status {status:#x}");
        match libc::WSTOPSIG(status) {
            libc::SIGTRAP => Stop::Step,
            libc::SIGUSR1 => Stop::Marker,
            other => panic!("stopped by signal {other}"),
        }
    }

    /// Tells it something, upon which it comes to its first marker.
    pub(crate) fn stand(&mut self, line: &str) {
        self.tell(line);
        assert_eq!(self.wait(), Stop::Marker);
    }

    /// What its steps are from now on; instructions at first.
    pub(crate) fn step_by(&mut self, unit: Unit) {
        self.unit = unit;
    }

    /// Executes up to `n` steps; false if the second marker came before.
    pub(crate) fn step(&self, n: usize) -> bool {
        let request = match self.unit {
            Unit::Instruction => libc::PTRACE_SINGLESTEP,
            Unit::SystemCall => libc::PTRACE_SYSCALL,
        };
        (0..n).all(|_| {
            self.ptrace(request, 0);
            self.wait() == Stop::Step
        })
    }

    /// The steps to the second marker, where it stands then.
    pub(crate) fn count(&self) -> usize {
        (0..).find(|_| !self.step(1)).unwrap()
    }

    /// Tells it something that is done between its markers, and lets it go on.
    pub(crate) fn through(&mut self, line: &str) {
        self.stand(line);
        self.finish();
        self.resume();
    }

    /// From between the markers to the second.
    pub(crate) fn finish(&self) {
        self.ptrace(libc::PTRACE_CONT, 0);
        assert_eq!(self.wait(), Stop::Marker);
    }

    /// From the second marker on.
    pub(crate) fn resume(&self) {
        self.ptrace(libc::PTRACE_CONT, 0);
    }

    /// Ends it for good.
    pub(crate) fn kill(mut self) {
        if self.forks {
            // Its successor hears nothing, and ends.
            self.kill_child();
            drop(self.stdin.take());
        } else {
            self.child.kill().unwrap();
        }
        self.reap();
        self.child.wait().unwrap();
    }

    /// Kills it. Another one, forked by the same helper and attached as this one was, takes its place.
    pub(crate) fn replace(&mut self) {
        self.kill_child();
        self.reap();
        self.meet();
        self.attach();
    }

    fn kill_child(&self) {
        // SAFETY: no pointers are involved; nobody has reaped it yet, so the number is its.
        unsafe { libc::kill(self.tid, libc::SIGKILL) };
    }

    /// Its traced thread is reaped by its tracer first.
    fn reap(&mut self) {
        let mut status = 0;
        while !libc::WIFSIGNALED(status) {
            // SAFETY: `status` is valid for the call.
            assert_eq!(unsafe { libc::waitpid(self.tid, &raw mut status, libc::__WALL) }, self.tid);
        }
    }
}

impl Drop for Tracee {
    /// Of a test that failed: what it started does not outlive it.
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            if self.forks {
                self.kill_child();
            }
        }
    }
}

/// The steps `0..n` in an order in which every beginning is evenly spread, from a place that differs from run to run; as many as
/// `seconds` allow, times [`scale`], and each once.
pub(crate) struct Points {
    n: usize,
    step: usize,
    next: usize,
    pub(crate) taken: usize,
    end: Instant,
}

impl Points {
    pub(crate) fn new(n: usize, seconds: u64) -> Self {
        Self::within(n, Duration::from_secs(seconds))
    }

    /// As [`new`](Self::new), for a time other than whole seconds.
    pub(crate) fn within(n: usize, time: Duration) -> Self {
        let gcd = |mut a: usize, mut b: usize| {
            while b > 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        // The golden section, as near as it has no common factor with `n`: every point once.
        let start = (n as f64 * 0.618_034) as usize;
        let step = (start.max(1)..).find(|&step| gcd(step, n) == 1).unwrap();
        let offset = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().subsec_nanos() as usize % n;
        let end = Instant::now() + time * scale();
        Self { n, step, next: offset, taken: 0, end }
    }

    /// In words: how many were taken, of how many.
    pub(crate) fn of(&self, unit: Unit) -> String {
        let unit = match unit {
            Unit::Instruction => "instructions",
            Unit::SystemCall => "beginnings and ends of system calls",
        };
        format!("{} of {} {unit}", self.taken, self.n)
    }
}

impl Iterator for Points {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.taken == self.n || Instant::now() > self.end {
            return None;
        }
        self.taken += 1;
        self.next = (self.next + self.step) % self.n;
        Some(self.next)
    }
}
