//! The baseline: a closed loop over a Unix socket between two processes, one system call per
//! message and side.
//!
//! It shows the cost of the same exchange through the kernel. It is measured on the same machine,
//! with as many requests outstanding as the run with which it is compared, and shortly before that
//! run. The socket keeps message boundaries (`SOCK_SEQPACKET`), so two requests never share a
//! system call; an RPC over a socket cannot rely on sharing either. The server may use the cores of
//! the measuring thread. If that thread is pinned, both share its core and take turns, and no other
//! core has to be woken.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Failure;
use crate::clock::Clock;
use crate::hist::{LatencyHistogram, LatencySummary};
use crate::launch::child::OwnChild;
pub use crate::launch::role_text::MAX_MESSAGE_BYTES;
use crate::launch::role_text::RoleText;
use crate::launch::sys;

/// Maximum number of requests outstanding. This number of requests fits the default socket buffers
/// of both directions, so neither side blocks on the other.
pub const MAX_DEPTH: usize = 64;

/// Maximum time to wait for a reply. After it the server is taken for dead.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// The parameters of the baseline.
#[derive(Debug, Clone, Copy)]
pub struct Echo {
    /// Requests outstanding, 1 to [`MAX_DEPTH`].
    pub depth: usize,
    /// Bytes of a request, 1 to [`MAX_MESSAGE_BYTES`].
    pub request_bytes: usize,
    /// Bytes of a reply, 1 to [`MAX_MESSAGE_BYTES`].
    pub reply_bytes: usize,
    /// Length of the measurement. A warm-up of a quarter of this length precedes it.
    pub duration: Duration,
}

/// The result of the baseline.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct EchoResult {
    /// Number of requests that were outstanding.
    pub depth: usize,
    /// Round trips per second.
    pub rps: f64,
    /// Round-trip times.
    pub latency_ns: LatencySummary,
}

impl Echo {
    /// Starts the server process, runs the loop from this thread, ends the server.
    ///
    /// # Errors
    /// A parameter is outside its range, or the server or its socket failed; no process is left.
    pub fn measure(&self, clock: &Clock) -> Result<EchoResult, Failure> {
        let within = |what, given, limit| match (1..=limit).contains(&given) {
            true => Ok(()),
            false => Err(format!("{what} is {given}; legal are 1 to {limit}")),
        };
        within("the depth", self.depth, MAX_DEPTH)?;
        within("the request size", self.request_bytes, MAX_MESSAGE_BYTES)?;
        within("the reply size", self.reply_bytes, MAX_MESSAGE_BYTES)?;
        let (socket, theirs) = sys::seqpacket_pair()?;
        socket.set_read_timeout(Some(REPLY_TIMEOUT))?;
        socket.set_write_timeout(Some(REPLY_TIMEOUT))?;
        let reply_bytes = self.reply_bytes;
        let role = RoleText::Echo { reply_bytes }.encode();
        let server = OwnChild::spawn(&role, &[], &[], theirs, Stdio::null())?;
        let result = self.run(socket, clock);
        drop(server);
        result.map_err(|why| format!("the echo baseline failed: {why}").into())
    }

    fn run(&self, mut socket: UnixStream, clock: &Clock) -> io::Result<EchoResult> {
        let request = vec![0x5a; self.request_bytes];
        let mut reply = vec![0; MAX_MESSAGE_BYTES];
        // Replies arrive in order, so the oldest request, whose send time is at `turn`, is answered
        // next.
        let mut sent_ns = vec![0; self.depth];
        for sent in &mut sent_ns {
            *sent = clock.now_ns();
            socket.write_all(&request)?;
        }
        let mut latencies = LatencyHistogram::new();
        let duration_ns = self.duration.as_nanos() as u64;
        let start_ns = clock.now_ns() + duration_ns / 4;
        let mut finished_ns = start_ns;
        'measuring: loop {
            for sent in &mut sent_ns {
                if receive(&mut socket, &mut reply)? != self.reply_bytes {
                    let gone = "the echo server has gone";
                    return Err(io::Error::new(ErrorKind::UnexpectedEof, gone));
                }
                let now_ns = clock.now_ns();
                if *sent >= start_ns {
                    latencies.record(now_ns.saturating_sub(*sent));
                    finished_ns = now_ns;
                }
                if now_ns >= start_ns + duration_ns {
                    break 'measuring;
                }
                *sent = now_ns;
                socket.write_all(&request)?;
            }
        }
        let latency_ns = latencies.summary();
        let elapsed_ns = finished_ns.saturating_sub(start_ns).max(1);
        Ok(EchoResult {
            depth: self.depth,
            rps: latency_ns.count as f64 * 1e9 / elapsed_ns as f64,
            latency_ns,
        })
    }
}

/// Reads a message. A stopped and continued process is interrupted in a read with a time limit
/// (signal(7)), so the read is repeated.
fn receive(socket: &mut UnixStream, message: &mut [u8]) -> io::Result<usize> {
    loop {
        match socket.read(message) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            ended => return ended,
        }
    }
}

/// The other process of the baseline.
#[derive(Debug)]
pub(crate) struct EchoServer {
    socket: UnixStream,
    reply_bytes: usize,
}

impl EchoServer {
    pub(crate) const fn new(socket: UnixStream, reply_bytes: usize) -> Self {
        Self {
            socket,
            reply_bytes,
        }
    }

    /// Answers every request until the socket closes.
    ///
    /// # Errors
    /// The socket's error.
    pub(crate) fn serve(mut self) -> io::Result<()> {
        use ErrorKind::{BrokenPipe, ConnectionReset};
        match self.answer_all() {
            // When the measurement ends, the caller closes the socket with unread replies, which a
            // Unix socket reports as a reset. So a reset is no error.
            Err(error) if matches!(error.kind(), ConnectionReset | BrokenPipe) => Ok(()),
            ended => ended,
        }
    }

    fn answer_all(&mut self) -> io::Result<()> {
        let mut request = vec![0; MAX_MESSAGE_BYTES];
        let reply = vec![0xa5; self.reply_bytes];
        while receive(&mut self.socket, &mut request)? != 0 {
            self.socket.write_all(&reply)?;
        }
        Ok(())
    }
}
