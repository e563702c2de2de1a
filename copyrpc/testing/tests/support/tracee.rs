//! A process that is single-stepped from one of its markers to the next.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime};

use crate::limits::scale_of;

/// The type of a request of ptrace(2), which depends on the C library.
#[cfg(target_env = "musl")]
type Request = libc::c_int;
#[cfg(not(target_env = "musl"))]
type Request = libc::c_uint;

/// Returns the factor by which tests run longer than by default: the larger one of two variables.
fn scale() -> u32 {
    ["SHM_TEST_SCALE", "MLX5_TEST_SCALE"]
        .map(scale_of)
        .into_iter()
        .fold(1, u32::max)
}

/// In the helper: prints a line for the tracer, with the id of the calling thread, which is the
/// thread that is stepped.
pub fn hello(words: &str) {
    // SAFETY: gettid takes no arguments.
    let tid = unsafe { libc::syscall(libc::SYS_gettid) };
    println!("\nstepped {tid} {words}");
}

/// In the helper: stops at a marker. Stepping begins at the first marker and ends at the second.
pub fn marker() {
    // SAFETY: raise takes no pointers. The tracer takes the signal away, so it does not end this
    // process.
    unsafe { libc::raise(libc::SIGUSR1) };
}

/// In the helper: executes the operation that is stepped, between two markers.
pub fn stepped<R>(operation: impl FnOnce() -> R) -> R {
    marker();
    let result = operation();
    marker();
    result
}

/// Does `work` in a child of the helper whenever its tracer [requests a child](Helper::fork), until
/// the tracer closes the helper's input. A child has one thread, so it starts much faster than a
/// program: the kernel need not wait for all cores to register the child for barriers. The child
/// neither hangs nor outlives the helper.
pub fn again_and_again(mut work: impl FnMut()) {
    while is_asked_for_a_child() {
        // SAFETY: the helper's other threads only wait for this thread, so they hold no lock that
        // the child needs.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: both calls take no pointers.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::alarm(120 * scale());
            }
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut work));
            // SAFETY: the call only ends the child.
            unsafe { libc::_exit(outcome.is_err().into()) };
        }
        let mut status = 0;
        // SAFETY: `status` is valid for the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        if libc::WIFEXITED(status) {
            assert_eq!(libc::WEXITSTATUS(status), 0, "the child's status");
        }
    }
}

/// Waits for the next [`FORK`], and skips input that a killed child left unread. Returns `false` at
/// the end of the input.
fn is_asked_for_a_child() -> bool {
    let mut byte = 0;
    loop {
        // SAFETY: `byte` is valid for the call. This reads no more than one byte, because a child
        // would miss what is buffered here.
        match unsafe { libc::read(0, (&raw mut byte).cast(), 1) } {
            1 if byte == FORK => return true,
            1 => {}
            _ => return false,
        }
    }
}

/// Byte that asks the helper for a child. No line of text contains it.
const FORK: u8 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Instruction,
    /// The beginning or the end of a system call.
    SystemCall,
}

/// A process that forks the processes that are stepped, one at a time.
pub struct Helper {
    process: Child,
    /// Standard input of the process; `None` once closed.
    stdin: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    /// For each instruction that the child of the last [`count`](Tracee::count) reached: the number
    /// of steps before it was first reached, and its address; in ascending order of steps. All
    /// children have the same addresses.
    landmarks: Vec<(usize, usize)>,
}

/// A child of the helper, seen by its tracer.
pub struct Tracee {
    unit: Unit,
    helper: Helper,
    tid: libc::pid_t,
}

/// Offset of `rip` in x86-64's `struct user`, and the instruction `int3`.
const INSTRUCTION_POINTER: usize = 16 * 8;
const BREAKPOINT: libc::c_long = 0xcc;

#[derive(Debug, PartialEq)]
enum Stop {
    Step,
    Marker,
}

impl Helper {
    /// Starts this binary with these environment variables and only the test `stepped_process`,
    /// which calls [`again_and_again`].
    pub fn start(variables: &[(&str, &OsStr)]) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "stepped_process", "--ignored", "--nocapture"])
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let stdin = process.stdin.take();
        Self {
            process,
            stdin,
            output,
            landmarks: vec![],
        }
    }

    /// Makes a child, which is not attached yet. Returns it, and the words of its first [`hello`].
    pub fn fork(mut self) -> (Tracee, String) {
        let (tid, words) = self.child();
        (
            Tracee {
                unit: Unit::Instruction,
                tid,
                helper: self,
            },
            words,
        )
    }

    fn child(&mut self) -> (libc::pid_t, String) {
        self.stdin.as_mut().unwrap().write_all(&[FORK]).unwrap();
        let line = self.line();
        let (tid, words) = line.split_once(' ').unwrap();
        (tid.parse().unwrap(), words.to_owned())
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(
                self.output.read_line(&mut line).unwrap() > 0,
                "the helper ended early"
            );
            if let Some(line) = line.strip_prefix("stepped ") {
                return line.trim_end().to_owned();
            }
        }
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        drop(self.stdin.take());
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Tracee {
    /// Waits for the tracee's next [`hello`] with these words. The tracee must not be attached yet.
    pub fn wait_for(&mut self, words: &str) {
        let line = self.helper.line();
        assert!(line.ends_with(words), "{line}");
    }

    pub fn hear(&mut self) -> String {
        let line = self.helper.line();
        line.split_once(' ').unwrap().1.to_owned()
    }

    pub fn tell(&mut self, line: &str) {
        writeln!(self.helper.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    pub fn attach(&self) {
        self.ptrace(libc::PTRACE_SEIZE, 0);
    }

    fn ptrace(&self, request: Request, data: libc::c_long) {
        self.ptrace_at(request, 0, data);
    }

    fn ptrace_at(&self, request: Request, address: usize, data: libc::c_long) {
        // SAFETY: the requests touch no memory of this process, only that of the tracee.
        let done = unsafe { libc::ptrace(request, self.tid, address, data) };
        assert_eq!(
            done,
            0,
            "ptrace {request}: {}",
            std::io::Error::last_os_error()
        );
    }

    fn peek(&self, request: Request, address: usize) -> libc::c_long {
        // SAFETY: as in `ptrace_at`.
        unsafe { libc::ptrace(request, self.tid, address, 0) }
    }

    fn wait(&self) -> Stop {
        let mut status = 0;
        // SAFETY: `status` is valid for the call.
        let waited = unsafe { libc::waitpid(self.tid, &raw mut status, libc::__WALL) };
        assert_eq!(waited, self.tid);
        assert!(
            libc::WIFSTOPPED(status),
            "the helper ended with status {status:#x}"
        );
        match libc::WSTOPSIG(status) {
            libc::SIGTRAP => Stop::Step,
            libc::SIGUSR1 => Stop::Marker,
            other => panic!("stopped by signal {other}"),
        }
    }

    /// Sends a line, and waits until the tracee stops at its first marker.
    pub fn stand(&mut self, line: &str) {
        self.tell(line);
        assert_eq!(self.wait(), Stop::Marker);
    }

    /// Sets the unit of the steps from now on. The first unit is the instruction.
    pub fn step_by(&mut self, unit: Unit) {
        self.unit = unit;
    }

    /// Executes up to `n` steps. Returns `false` if the second marker was reached before.
    pub fn step(&self, n: usize) -> bool {
        let (request, done) = match self.unit {
            Unit::Instruction => (libc::PTRACE_SINGLESTEP, self.skip(n)),
            Unit::SystemCall => (libc::PTRACE_SYSCALL, Some(0)),
        };
        let step = |_| {
            self.ptrace(request, 0);
            self.wait() == Stop::Step
        };
        done.is_some_and(|done| (done..n).all(step))
    }

    /// Lets the tracee run at full speed to the last landmark within its next `n` steps. Returns
    /// the number of steps to it; `None` if the second marker was reached before.
    fn skip(&self, n: usize) -> Option<usize> {
        let landmarks = &self.helper.landmarks;
        let Some(&(steps, address)) =
            landmarks[..landmarks.partition_point(|(steps, _)| *steps <= n)].last()
        else {
            return Some(0);
        };
        let instruction = self.peek(libc::PTRACE_PEEKTEXT, address);
        self.ptrace_at(
            libc::PTRACE_POKETEXT,
            address,
            instruction & !0xff | BREAKPOINT,
        );
        self.ptrace(libc::PTRACE_CONT, 0);
        let stop = self.wait();
        self.ptrace_at(libc::PTRACE_POKETEXT, address, instruction);
        (stop == Stop::Step).then(|| {
            self.ptrace_at(
                libc::PTRACE_POKEUSER,
                INSTRUCTION_POINTER,
                address as libc::c_long,
            );
            steps
        })
    }

    /// Steps the tracee to the second marker. Returns the number of steps. From now on the helper's
    /// children run at full speed to the last landmark before the wanted step.
    pub fn count(&mut self) -> usize {
        self.helper.landmarks.clear();
        let (mut landmarks, mut seen) = (vec![], HashSet::new());
        let steps = (0..).find(|&steps| {
            if cfg!(target_arch = "x86_64") && self.unit == Unit::Instruction {
                let address = self.peek(libc::PTRACE_PEEKUSER, INSTRUCTION_POINTER) as usize;
                landmarks.extend(seen.insert(address).then_some((steps, address)));
            }
            !self.step(1)
        });
        self.helper.landmarks = landmarks;
        steps.unwrap()
    }

    /// Sends a line, on which the tracee runs through both markers, and continues.
    pub fn through(&mut self, line: &str) {
        self.stand(line);
        self.finish();
        self.resume();
    }

    /// Continues from between the markers to the second marker.
    pub fn finish(&self) {
        self.ptrace(libc::PTRACE_CONT, 0);
        assert_eq!(self.wait(), Stop::Marker);
    }

    /// Continues from the second marker. If the tracee is `inside` the two markers, first runs it
    /// to the second.
    pub fn go_on(&self, inside: bool) {
        if inside {
            self.finish();
        }
        self.resume();
    }

    pub fn resume(&self) {
        self.ptrace(libc::PTRACE_CONT, 0);
    }

    pub fn kill(self) -> Helper {
        self.end();
        self.helper
    }

    /// Kills the tracee. Another child of the same helper, attached, takes its place.
    pub fn replace(&mut self) {
        self.end();
        self.tid = self.helper.child().0;
        self.attach();
    }

    fn end(&self) {
        // SAFETY: the call involves no pointers. The child is not reaped yet, so the id is still
        // its own.
        unsafe { libc::kill(self.tid, libc::SIGKILL) };
        let mut status = 0;
        while !libc::WIFSIGNALED(status) {
            // The kernel reports the end to the tracer before the parent.
            assert_eq!(
                // SAFETY: `status` is valid for the call.
                unsafe { libc::waitpid(self.tid, &raw mut status, libc::__WALL) },
                self.tid
            );
        }
    }
}

/// Runs a test on one core, which its processes inherit: a switch between two processes that run in
/// turn costs less than a wake-up of another core.
pub fn on_one_core<R>(test: impl FnOnce() -> R) -> R {
    static TAKEN: Mutex<Vec<usize>> = Mutex::new(vec![]);
    // SAFETY: zeroed bytes are an empty set of cores; the call concerns this thread, and `set` is a
    // valid set of the given size.
    let set = |cores: &[usize]| unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        cores.iter().for_each(|&core| libc::CPU_SET(core, &mut set));
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set)
    };
    // SAFETY: zeroed bytes are an empty set of cores, and `set` is a valid buffer of the given
    // size.
    let allowed: Vec<usize> = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        assert_eq!(
            libc::sched_getaffinity(0, size_of_val(&set), &raw mut set),
            0
        );
        (0..libc::CPU_SETSIZE as usize)
            .filter(|&core| libc::CPU_ISSET(core, &set))
            .collect()
    };
    let core = {
        let mut taken = TAKEN.lock().unwrap();
        let free = allowed.iter().copied().find(|core| !taken.contains(core));
        taken.extend(free);
        free
    };
    if let Some(core) = core {
        assert_eq!(set(&[core]), 0);
    }
    let result = test();
    TAKEN.lock().unwrap().retain(|&taken| Some(taken) != core);
    result
}

/// Minimum number of points, however slow the machine is.
const MIN_POINTS: usize = 8;

/// [`Points`] reach every step in this number of runs, if `STEP_SHARE` modulo this number is
/// different in each run.
const SHARES: usize = 16;

/// The steps of `0..n` that are tested. If the environment variable `STEP_SHARE` is set, these are
/// every 16th step, beginning with the number in the variable, modulo 16. Otherwise they are in a
/// low-discrepancy order from a random start, each at most once. They end when the given time,
/// multiplied by the scale of the tests, is over, but not before 8 are tested.
pub struct Points {
    n: usize,
    order: Box<dyn Iterator<Item = usize>>,
    pub taken: usize,
    end: Option<Instant>,
}

impl Points {
    pub fn new(n: usize, seconds: u64) -> Self {
        Self::within(n, Duration::from_secs(seconds))
    }

    /// Like [`new`](Self::new), for a time other than whole seconds.
    pub fn within(n: usize, time: Duration) -> Self {
        if let Ok(share) = std::env::var("STEP_SHARE") {
            let first = share.parse::<usize>().unwrap() % SHARES;
            return Self {
                n,
                order: Box::new((first..n).step_by(SHARES)),
                taken: 0,
                end: None,
            };
        }
        let gcd = |mut a: usize, mut b: usize| {
            while b > 0 {
                (a, b) = (b, a % b);
            }
            a
        };
        // The smallest step, from the golden section of `n` on, that is coprime to `n`, so that
        // each point occurs once.
        let start = (n as f64 * 0.618_034) as usize;
        let step = (start.max(1)..).find(|&step| gcd(step, n) == 1).unwrap();
        let offset = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap()
            .subsec_nanos() as usize
            % n;
        let order = Box::new((0..n).map(move |taken| (offset + taken * step) % n));
        Self {
            n,
            order,
            taken: 0,
            end: Some(Instant::now() + time * scale()),
        }
    }

    /// Returns a text with the number of points taken and the number of all points.
    pub fn of(&self, unit: Unit) -> String {
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
        if self.taken >= MIN_POINTS && self.end.is_some_and(|end| Instant::now() > end) {
            return None;
        }
        let point = self.order.next()?;
        self.taken += 1;
        Some(point)
    }
}
