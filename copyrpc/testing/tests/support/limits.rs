//! Time limits of tests, the scale of tests, and addresses that no other test uses.

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Ends the test process if the test of this thread is not over in time.
pub fn watchdog(limit: Duration) {
    thread_local! {
        /// Dropped when the test's thread ends or begins its next test, which ends the watchdog.
        static TEST: RefCell<Option<Sender<()>>> = const { RefCell::new(None) };
    }
    let (test, ended) = channel();
    TEST.set(Some(test));
    std::thread::spawn(move || {
        if ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            eprintln!("watchdog: the test hangs");
            std::process::abort();
        }
    });
}

/// A thread that computes without a pause on one core, which this thread, and the threads that it
/// starts from now on, share with it. The drop ends the thread.
pub struct SharedCore(Arc<AtomicBool>);

impl SharedCore {
    /// Leaves this thread on the core that it has now.
    pub fn enter() -> Self {
        // SAFETY: the set is valid for both calls, and an empty set is all zeros.
        unsafe {
            let mut cores: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(libc::sched_getcpu() as usize, &mut cores);
            assert_eq!(
                libc::sched_setaffinity(0, size_of_val(&cores), &raw const cores),
                0
            );
        }
        let is_over = Arc::<AtomicBool>::default();
        let computes = Arc::clone(&is_over);
        std::thread::spawn(move || while !computes.load(Ordering::Relaxed) {});
        Self(is_over)
    }
}

impl Drop for SharedCore {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Raises the limit of descriptors of this process, and of processes that it starts, to 8,192, or
/// to the system's maximum.
pub fn permit_descriptors() {
    // SAFETY: `files` is a valid structure for both calls. It has two numbers, which may be zero.
    unsafe {
        let mut files: libc::rlimit = std::mem::zeroed();
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut files), 0);
        files.rlim_cur = files.rlim_max.min(8_192).max(files.rlim_cur);
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const files), 0);
    }
}

/// Returns the factor by which the tests run longer than by default: the number in the environment
/// variable, or 1.
pub fn scale_of(variable: &str) -> u32 {
    std::env::var(variable).map_or(1, |s| s.parse().unwrap())
}

/// Returns an address of the loopback network, with any free port: `127.N.P.P:0`, where N is a
/// counter and P.P the number of the process. The same address is returned again only after 253
/// others.
///
/// A port of `127.0.0.1` that a server has closed may be assigned to a server of another test at
/// once; clients of the first server would then connect to the second.
pub fn any_port() -> String {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let [high, low, ..] = (std::process::id() as u16).to_be_bytes();
    format!("127.{}.{high}.{low}:0", call % 254 + 1)
}

/// The name of a server that has moved. As an address it resolves to `first`. Clients that connect
/// again resolve the `Debug` text, which is `name`.
pub struct Moved {
    pub first: SocketAddr,
    pub name: String,
}

impl fmt::Debug for Moved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl ToSocketAddrs for Moved {
    type Iter = std::iter::Once<SocketAddr>;

    fn to_socket_addrs(&self) -> io::Result<Self::Iter> {
        Ok(std::iter::once(self.first))
    }
}
