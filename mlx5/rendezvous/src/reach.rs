//! The client's side: it waits for a server that has not started yet.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Time between two attempts to reach a server that does not listen, and between two checks whether
/// the connection is still wanted.
pub(crate) const ATTEMPT_INTERVAL: Duration = Duration::from_millis(20);
/// Minimum time of an attempt: a socket does not take the time limit 0.
const MIN_WAIT: Duration = Duration::from_millis(1);

/// A stream to a server to which the client connects. Its reads and writes end as
/// [`TimedOut`](ErrorKind::TimedOut) when the time of the attempt is over, and when the connection
/// is not wanted any more.
pub struct Meeting<'a> {
    stream: TcpStream,
    /// End of the attempt; `None` if it is beyond the range of the clock.
    end: Option<Instant>,
    is_wanted: &'a mut dyn FnMut() -> bool,
}

impl fmt::Debug for Meeting<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meeting")
            .field("stream", &self.stream)
            .field("end", &self.end)
            .finish_non_exhaustive()
    }
}

impl Meeting<'_> {
    /// Makes the stream non-blocking and returns it. The client can check later whether the stream
    /// has ended.
    pub(crate) fn into_lifeline(self) -> io::Result<TcpStream> {
        self.stream.set_nonblocking(true)?;
        Ok(self.stream)
    }

    /// Repeats `step` each time that the time limit of the socket cuts it short, until the attempt
    /// is over or the connection is not wanted any more.
    fn wait(
        &mut self,
        mut step: impl FnMut(&mut TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            match step(&mut self.stream) {
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                outcome => return outcome,
            }
            if is_over(self.end) || !(self.is_wanted)() {
                return Err(ErrorKind::TimedOut.into());
            }
        }
    }
}

impl Read for Meeting<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.wait(|stream| stream.read(bytes))
    }
}

impl Write for Meeting<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.wait(|stream| stream.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Connects to the first of the `addresses` that has a server, and lets `meet` exchange records
/// with it. Retries for `patience`, while `is_wanted` returns true, in two cases: no server
/// listens, or `may_pass` accepts the error of `meet`, for example because the server was closing
/// or full. `unreachable` converts an error of the socket.
///
/// If a host or server does not answer, the next address is tried after a share of the time that is
/// left: half of it with two addresses, a third with three.
///
/// # Errors
/// The errors of `meet` and of `unreachable`: of the last attempt, or of the previous attempt if
/// the end of the time cut the last attempt short.
pub(crate) fn reach<T, E>(
    addresses: &[SocketAddr],
    patience: Duration,
    mut is_wanted: impl FnMut() -> bool,
    mut meet: impl FnMut(Meeting<'_>) -> Result<T, E>,
    may_pass: impl Fn(&E) -> bool,
    unreachable: impl Fn(io::Error) -> E,
) -> Result<T, E> {
    let start = Instant::now();
    // The error of an attempt that the end of the time cuts short is less specific than the error
    // of the previous attempt.
    let more_telling = |error, before: Option<E>| {
        before
            .filter(|_| start.elapsed() >= patience)
            .unwrap_or(error)
    };
    let mut before = None;
    loop {
        let mut failure = unreachable(ErrorKind::AddrNotAvailable.into());
        let mut may_come = false;
        for address in addresses {
            let left = patience.saturating_sub(start.elapsed());
            let share = (left / u32::try_from(addresses.len()).unwrap_or(u32::MAX)).max(MIN_WAIT);
            let end = Instant::now().checked_add(share);
            match connect(address, share, end, &mut is_wanted) {
                Ok(meeting) => match meet(meeting) {
                    Ok(met) => return Ok(met),
                    // The server may be hung, busy in a handler, or about to take this client.
                    Err(error) if may_pass(&error) || addresses.len() > 1 && is_over(end) => {
                        (may_come, failure) = (true, error)
                    }
                    Err(error) => return Err(more_telling(error, before)),
                },
                Err(error) => {
                    let is_for_now = may_listen(&error);
                    // The error of a host without a server is more specific than the error of an
                    // address without a host.
                    if is_for_now || !may_come {
                        failure = unreachable(error);
                    }
                    may_come |= is_for_now;
                }
            }
        }
        if !may_come {
            return Err(more_telling(failure, before));
        }
        if start.elapsed() >= patience || !is_wanted() {
            return Err(failure);
        }
        before = Some(failure);
        std::thread::sleep(ATTEMPT_INTERVAL);
    }
}

fn is_over(end: Option<Instant>) -> bool {
    end.is_some_and(|end| Instant::now() >= end)
}

/// Returns whether a server may soon listen at the address: none listens yet, or the last server
/// closed its socket before it took this client.
fn may_listen(error: &io::Error) -> bool {
    error.kind() == ErrorKind::ConnectionRefused || stream_has_ended(error)
}

/// Connects in at most the time `within`, for a meeting that ends at `end`.
fn connect<'a>(
    address: &SocketAddr,
    within: Duration,
    end: Option<Instant>,
    is_wanted: &'a mut dyn FnMut() -> bool,
) -> io::Result<Meeting<'a>> {
    let stream = TcpStream::connect_timeout(address, within)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(ATTEMPT_INTERVAL))?;
    stream.set_write_timeout(Some(ATTEMPT_INTERVAL))?;
    Ok(Meeting {
        stream,
        end,
        is_wanted,
    })
}

/// Interval at which a client whose calls wait checks the server's socket. After a pause of at
/// least this time, it checks the socket before the next call too. Only the end of the socket shows
/// at once that the server has died.
pub const LIFELINE_INTERVAL: Duration = Duration::from_millis(10);

/// Returns whether the other end of a stream that does not block is closed. The system closes the
/// other end when its process dies.
pub(crate) fn has_hung_up(stream: &TcpStream) -> bool {
    stream.peek(&mut [0]).map_or_else(
        |error| error.kind() != ErrorKind::WouldBlock,
        |bytes| bytes == 0,
    )
}

/// Returns whether an error of a stream means that the other end has disconnected, rather than that
/// it is silent.
#[must_use]
pub(crate) fn stream_has_ended(error: &io::Error) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(
        error.kind(),
        ConnectionReset | ConnectionAborted | BrokenPipe | UnexpectedEof
    )
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

    use rustix::io::Errno;

    use super::*;

    /// Returns an address with a free port on a loopback address that nothing else uses. A free
    /// port of a shared address may be assigned to another listener at once.
    fn free_address() -> SocketAddr {
        static CALLS: AtomicU8 = AtomicU8::new(1);
        let address = ([127, 18, 0, CALLS.fetch_add(1, Ordering::Relaxed)], 0);
        TcpListener::bind(SocketAddr::from(address))
            .unwrap()
            .local_addr()
            .unwrap()
    }

    /// A connection is reset by a server that is restarted while the client connects.
    #[test]
    fn a_server_that_refuses_or_resets_may_listen_soon() {
        let errors = [
            (Errno::CONNREFUSED, true),
            (Errno::CONNRESET, true),
            (Errno::NETUNREACH, false),
            (Errno::TIMEDOUT, false),
        ];
        for (error, expected) in errors {
            assert_eq!(may_listen(&error.into()), expected, "{error}");
        }
    }

    /// Listens at `address` after 100 ms, and accepts `clients` clients.
    fn late_server(address: SocketAddr, clients: usize) -> std::thread::JoinHandle<()> {
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            let listener = TcpListener::bind(address).unwrap();
            (0..clients).for_each(|_| drop(listener.accept().unwrap()));
        })
    }

    /// Connects to the first of the addresses that has a server. Returns the address.
    fn first_of(addresses: &[SocketAddr], patience: Duration) -> io::Result<SocketAddr> {
        reach(
            addresses,
            patience,
            || true,
            |meeting| meeting.stream.peer_addr(),
            |_| false,
            |error| error,
        )
    }

    /// An address without a route: TCP has no broadcast.
    fn no_route() -> SocketAddr {
        SocketAddr::from(([255; 4], 9))
    }

    /// A listener that answers no client: it has room for one connection, which the stream takes.
    fn black_hole() -> (TcpListener, TcpStream) {
        let listener = TcpListener::bind("127.19.0.1:0").unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (listener, stream)
    }

    #[test]
    fn a_server_is_waited_for_at_one_address_while_another_has_no_route() {
        for is_first in [true, false] {
            let address = free_address();
            let addresses = if is_first {
                [no_route(), address]
            } else {
                [address, no_route()]
            };
            let refused = first_of(&addresses, Duration::from_millis(50)).unwrap_err();
            assert_eq!(
                refused.kind(),
                ErrorKind::ConnectionRefused,
                "no server is there yet"
            );
            let server = late_server(address, 1);
            assert_eq!(
                first_of(&addresses, Duration::from_secs(20)).unwrap(),
                address
            );
            server.join().unwrap();
        }
        assert_ne!(
            first_of(&[no_route()], Duration::from_secs(3600))
                .unwrap_err()
                .kind(),
            ErrorKind::ConnectionRefused
        );
    }

    #[test]
    fn an_address_that_does_not_answer_leaves_time_for_the_others() {
        let (hole, _stream) = black_hole();
        let hole = hole.local_addr().unwrap();
        let patience = Duration::from_secs(4);
        assert_eq!(
            first_of(&[hole], Duration::from_millis(100))
                .unwrap_err()
                .kind(),
            ErrorKind::TimedOut
        );
        for is_first in [true, false] {
            let address = free_address();
            let server = late_server(address, 1);
            let addresses = if is_first {
                [hole, address]
            } else {
                [address, hole]
            };
            assert_eq!(first_of(&addresses, patience).unwrap(), address);
            server.join().unwrap();
        }
    }

    /// The kernel connects clients to a process that is stopped, or in a handler. A client that is
    /// not wanted any more does not wait for the process.
    #[test]
    fn a_server_that_does_not_answer_leaves_time_for_the_others() {
        let hung = TcpListener::bind("127.0.0.1:0").unwrap();
        let idle = TcpListener::bind("127.0.0.1:0").unwrap();
        let addresses = [hung.local_addr().unwrap(), idle.local_addr().unwrap()];
        let server = std::thread::spawn(move || idle.accept().unwrap().0.write_all(b"x").unwrap());
        let meet = |mut meeting: Meeting<'_>| {
            meeting
                .read_exact(&mut [0])
                .map(|()| meeting.stream.peer_addr())
        };
        let met = reach(
            &addresses,
            Duration::from_secs(4),
            || true,
            meet,
            stream_has_ended,
            |error| error,
        );
        assert_eq!(met.unwrap().unwrap(), addresses[1]);
        server.join().unwrap();
        let failed = reach(
            &addresses[..1],
            Duration::from_millis(100),
            || true,
            meet,
            stream_has_ended,
            |error| error,
        );
        assert_eq!(failed.unwrap_err().kind(), ErrorKind::TimedOut);
        let (start, mut questions) = (Instant::now(), 0);
        let is_wanted = || {
            questions += 1;
            questions < 3
        };
        let failed = reach(
            &addresses[..1],
            Duration::MAX,
            is_wanted,
            meet,
            stream_has_ended,
            |error| error,
        );
        assert_eq!(failed.unwrap_err().kind(), ErrorKind::TimedOut);
        assert!(start.elapsed() < Duration::from_secs(60));
    }

    #[test]
    fn a_server_that_comes_late_or_leaves_at_first_is_waited_for() {
        let address = free_address();
        let server = late_server(address, 2);
        let mut attempts = 0;
        let met = reach(
            &[address],
            Duration::from_secs(20),
            || true,
            |_| {
                attempts += 1;
                if attempts == 1 {
                    Err(io::Error::from(ErrorKind::UnexpectedEof))
                } else {
                    Ok(attempts)
                }
            },
            stream_has_ended,
            |error| error,
        );
        assert_eq!(met.unwrap(), 2);
        server.join().unwrap();
    }

    #[test]
    fn the_error_is_that_of_an_attempt_that_had_its_time() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut attempts = 0;
        // The first two attempts find a reason; the third one takes until the end of the time, like
        // a peer that does not answer any more.
        let patience = Duration::from_millis(300);
        let meet = |_: Meeting<'_>| -> io::Result<()> {
            attempts += 1;
            if attempts < 3 {
                return Err(io::Error::new(
                    ErrorKind::UnexpectedEof,
                    format!("reason {attempts}"),
                ));
            }
            std::thread::sleep(patience);
            Err(ErrorKind::TimedOut.into())
        };
        let failed = reach(
            &[address],
            patience,
            || true,
            meet,
            stream_has_ended,
            |error| error,
        );
        assert_eq!(failed.unwrap_err().to_string(), "reason 2");
    }

    #[test]
    fn what_does_not_pass_and_who_is_not_wanted_end_it_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let long = Duration::from_secs(3600);
        let refused: Result<(), _> = reach(
            &[address],
            long,
            || true,
            |_| Err(io::Error::other("no")),
            stream_has_ended,
            |error| error,
        );
        assert_eq!(refused.unwrap_err().to_string(), "no");
        drop(listener);
        let is_wanted = AtomicBool::new(true);
        let given_up: Result<(), _> = reach(
            &[address],
            long,
            || is_wanted.swap(false, Ordering::Relaxed),
            |_| Ok(()),
            stream_has_ended,
            |error| error,
        );
        assert_eq!(given_up.unwrap_err().kind(), ErrorKind::ConnectionRefused);
        let none: Result<(), _> = reach(
            &[],
            long,
            || true,
            |_| Ok(()),
            stream_has_ended,
            |error| error,
        );
        assert_eq!(none.unwrap_err().kind(), ErrorKind::AddrNotAvailable);
    }
}
