//! A server with default options, and clients in processes of their own that come one after the
//! other and leave in each of four ways. Nothing of them remains at the server.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests"
)]

#[path = "support/mod.rs"]
mod support;

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use copyrpc::{CloseReason, Context, ContextBuilder, Endpoint, EndpointConfig};

/// Time after which a hang ends the process; the long form, with `COPYRPC_TEST_SCALE`, has more.
const WATCHDOG: Duration = Duration::from_secs(150);
/// Time limit of a step of the exchange; a step usually takes a few milliseconds.
const PATIENCE: Duration = Duration::from_secs(60);
/// Clients of one way in one round, times `COPYRPC_TEST_SCALE`.
const CLIENTS: usize = 6;
const ROUNDS: usize = 2;
/// Maximum number of clients at a time, fewer than a context has room for.
const AT_ONCE: usize = 100;

/// The way in which a client ends, after calls that were answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Way {
    /// The client drops all its values, then the process ends.
    Returned,
    /// The process is killed while idle.
    Killed,
    /// The context is dropped; its endpoint is kept, and its process continues.
    ContextDropped,
    /// The process is stopped forever, with a request outstanding.
    Stopped,
}

const WAYS: [Way; 4] = [
    Way::Returned,
    Way::Killed,
    Way::ContextDropped,
    Way::Stopped,
];

/// Returns whether the server may see this reason when a client ends in this way. The last message
/// of a peer can be lost with its queue pair.
const fn is_end_of(way: Way, reason: CloseReason) -> bool {
    match way {
        Way::Returned | Way::ContextDropped => matches!(
            reason,
            CloseReason::ClosedByPeer | CloseReason::Disconnected
        ),
        Way::Killed => matches!(reason, CloseReason::Disconnected),
        Way::Stopped => matches!(reason, CloseReason::PeerStalled),
    }
}

/// Runs a client of this way.
fn client(way: Way, dir: &Path, socket: &Path) {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(&[way as u8]).unwrap();
    let context: Context<u64> = ContextBuilder::new(support::spec_in(dir.to_owned()))
        .build()
        .unwrap();
    let endpoint = context
        .connect_over(&EndpointConfig::default(), &stream)
        .unwrap();
    for serial in 0..3 {
        endpoint.call(b"answered", serial, 32).unwrap();
        let mut is_answered = false;
        while !is_answered {
            context.wait(None).unwrap();
            context
                .poll(|_, outcome| is_answered = outcome.unwrap().to_vec() == b"answered")
                .unwrap();
        }
    }
    match way {
        Way::Returned => {}
        // SAFETY: kill(2) of this process.
        Way::Killed => assert_eq!(unsafe { libc::kill(libc::getpid(), libc::SIGKILL) }, 0),
        Way::ContextDropped => {
            drop(context);
            // Waits until the server has dropped this client.
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        }
        Way::Stopped => {
            endpoint.call(b"never taken", 3, 32).unwrap();
            context.flush_endpoints().unwrap();
            // SAFETY: kill(2) of this process.
            assert_eq!(unsafe { libc::kill(libc::getpid(), libc::SIGSTOP) }, 0);
        }
    }
}

/// A process without threads, forked before the server has anything that a child would inherit: it
/// forks the clients, and kills the remaining clients on command or when its own parent is dead.
struct Nursery {
    commands: UnixStream,
    process: libc::pid_t,
}

/// The command to kill all clients; each other command is the number of a [`Way`].
const KILL_ALL: u8 = 0xff;

impl Nursery {
    fn start(dir: &Path, socket: &Path) -> Self {
        let (commands, theirs) = UnixStream::pair().unwrap();
        // SAFETY: the child uses nothing that another thread of this process may have locked but
        // the allocator, which libc keeps usable.
        let process = unsafe { libc::fork() };
        if process == 0 {
            drop(commands);
            let ended = catch_unwind(AssertUnwindSafe(|| Self::run(theirs, dir, socket)));
            // SAFETY: _exit(2).
            unsafe { libc::_exit(i32::from(ended.is_err())) };
        }
        assert!(process > 0);
        Self { commands, process }
    }

    fn run(mut commands: UnixStream, dir: &Path, socket: &Path) {
        let (mut command, mut children) = ([0], Vec::new());
        while commands.read(&mut command).unwrap() == 1 {
            if let Some(way) = WAYS.into_iter().find(|way| *way as u8 == command[0]) {
                // SAFETY: this process has one thread.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: prctl(2): nothing is left running when the parent is gone.
                    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
                    let ended = catch_unwind(AssertUnwindSafe(|| client(way, dir, socket)));
                    // SAFETY: _exit(2).
                    unsafe { libc::_exit(i32::from(ended.is_err())) };
                }
                assert!(child > 0);
                children.push((way, child));
            } else {
                for (way, child) in children.drain(..) {
                    let mut status = 0;
                    // SAFETY: kill(2) and waitpid(2) of a child that was not waited for.
                    let waited = unsafe {
                        if way == Way::Stopped {
                            libc::kill(child, libc::SIGKILL);
                        }
                        libc::waitpid(child, &raw mut status, 0)
                    };
                    let is_killed =
                        libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL;
                    let is_right = if matches!(way, Way::Killed | Way::Stopped) {
                        is_killed
                    } else {
                        status == 0
                    };
                    assert!(waited == child && is_right, "{way:?}: {status:#x}");
                }
                commands.write_all(&command).unwrap();
            }
        }
    }

    fn fork(&mut self, way: Way) {
        self.commands.write_all(&[way as u8]).unwrap();
    }

    /// Kills the remaining clients. Returns when no client is left, and asserts that all other
    /// clients ended without an error.
    fn kill_all(&mut self) {
        self.commands.write_all(&[KILL_ALL]).unwrap();
        self.commands.read_exact(&mut [0]).expect("a client failed");
    }

    fn end(self) {
        drop(self.commands);
        let mut status = 0;
        assert_eq!(
            (
                // SAFETY: waitpid(2) of a child.
                unsafe { libc::waitpid(self.process, &raw mut status, 0) },
                status
            ),
            (self.process, 0)
        );
    }
}

/// The resources of the server's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Usage {
    endpoints: usize,
    descriptors: usize,
    mappings: usize,
    /// Kilobytes of private writable memory, mapped or not.
    data_kb: u64,
}

impl Usage {
    fn now(context: &Context<u64>) -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let data = status
            .lines()
            .find_map(|line| line.strip_prefix("VmData:"))
            .unwrap();
        Self {
            endpoints: context.endpoints(),
            descriptors: std::fs::read_dir("/proc/self/fd").unwrap().count(),
            mappings: std::fs::read_to_string("/proc/self/maps")
                .unwrap()
                .lines()
                .count(),
            data_kb: data.trim().trim_end_matches(" kB").parse().unwrap(),
        }
    }
}

struct Server {
    context: Context<u64>,
    listener: UnixListener,
    clients: Vec<(Way, Endpoint<u64>, UnixStream)>,
    ended: BTreeMap<Way, usize>,
}

impl Server {
    fn admit(&mut self) {
        let mut stream = self.listener.accept().unwrap().0;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut way = [0];
        stream.read_exact(&mut way).unwrap();
        let way = WAYS
            .into_iter()
            .find(|other| *other as u8 == way[0])
            .unwrap();
        let endpoint = self
            .context
            .connect_over(&EndpointConfig::default(), &stream)
            .unwrap();
        self.clients.push((way, endpoint, stream));
    }

    /// Answers the requests, and drops the clients that have disconnected.
    fn step(&mut self) {
        self.context.poll(|_, _| ()).unwrap();
        while let Some(request) = self.context.recv() {
            let data = request.data().to_vec();
            // A client that is gone needs no answer.
            let _answered = request.reply(&data);
        }
        self.clients.retain(|(way, endpoint, _)| {
            let Some(reason) = endpoint.closed() else {
                return true;
            };
            assert!(is_end_of(*way, reason), "{way:?}: {reason}");
            *self.ended.entry(*way).or_default() += 1;
            false
        });
    }
}

#[test]
fn clients_that_leave_in_any_way_leave_nothing_at_a_server_with_default_options() {
    let scale: usize =
        std::env::var("COPYRPC_TEST_SCALE").map_or(1, |scale| scale.parse().unwrap());
    std::thread::spawn(move || {
        std::thread::sleep(WATCHDOG * scale.div_ceil(4) as u32);
        eprintln!("watchdog: a client that left is not noticed");
        std::process::abort();
    });
    let dir = PathBuf::from(format!(
        "/dev/shm/copyrpc-test-leavers-{}",
        std::process::id()
    ));
    let socket = std::env::temp_dir().join(format!("copyrpc-test-leavers-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    let mut nursery = Nursery::start(&dir, &socket);
    let context = ContextBuilder::new(support::spec_in(dir.clone()))
        .build()
        .unwrap();
    let mut server = Server {
        context,
        listener,
        clients: Vec::new(),
        ended: BTreeMap::new(),
    };
    let each = CLIENTS * scale;
    let mut usages = Vec::new();
    for _ in 0..ROUNDS {
        let mut to_come = WAYS.into_iter().cycle().take(WAYS.len() * each).peekable();
        while to_come.peek().is_some() || server.context.endpoints() > 0 {
            if server.clients.len() < AT_ONCE {
                if let Some(way) = to_come.next() {
                    nursery.fork(way);
                    server.admit();
                }
            } else {
                server.context.wait(None).unwrap();
            }
            if to_come.peek().is_none() {
                server.context.wait(None).unwrap();
            }
            server.step();
        }
        nursery.kill_all();
        usages.push(Usage::now(&server.context));
    }
    nursery.end();
    eprintln!("leavers: {:?}, then {usages:?}", server.ended);
    assert_eq!(
        server.ended,
        WAYS.into_iter().map(|way| (way, ROUNDS * each)).collect()
    );
    let [first, .., last] = usages[..] else {
        panic!("{ROUNDS} rounds")
    };
    // The allocator may keep some of the memory of clients that existed at the same time.
    assert!(last.data_kb <= first.data_kb + 1024, "{usages:?}");
    assert_eq!(
        last,
        Usage {
            data_kb: last.data_kb,
            ..first
        }
    );
    drop(server);
    // Opening and closing a device removes the files that dead processes left in the directory.
    drop::<Context<()>>(
        ContextBuilder::new(support::spec_in(dir.clone()))
            .build()
            .unwrap(),
    );
    std::fs::remove_dir(&dir).expect("nothing is left behind");
    std::fs::remove_file(&socket).unwrap();
}
