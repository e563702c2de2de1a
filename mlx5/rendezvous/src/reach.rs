//! The client's side: it waits for a server that has not started yet.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Time between two attempts to reach a server that does not listen.
const ATTEMPT_INTERVAL: Duration = Duration::from_millis(20);

/// Connects to the first of the `addresses` that has a server, and lets `meet` exchange records with it. Retries for `patience`, while
/// `is_wanted` returns true, if no server listens, or if `may_pass` accepts the error of `meet` because the server was leaving. Reads and
/// writes of the stream time out at the end of that time. `unreachable` converts an error of the socket.
///
/// # Errors
/// The errors of `meet` and of `unreachable`: of the last attempt, or of the one before if the end of the time cut the last one short.
pub fn reach<T, E>(
    addresses: &[SocketAddr],
    patience: Duration,
    mut is_wanted: impl FnMut() -> bool,
    mut meet: impl FnMut(TcpStream) -> Result<T, E>,
    may_pass: impl Fn(&E) -> bool,
    unreachable: impl Fn(io::Error) -> E,
) -> Result<T, E> {
    let start = Instant::now();
    let left = || patience.saturating_sub(start.elapsed()).max(Duration::from_millis(1));
    // An attempt that the end of the time cuts short says less than the one before.
    let more_telling = |error, before: Option<E>| before.filter(|_| start.elapsed() >= patience).unwrap_or(error);
    let mut before = None;
    loop {
        let mut failure = unreachable(ErrorKind::AddrNotAvailable.into());
        let mut may_come = false;
        for address in addresses {
            match connect(address, left()) {
                Ok(stream) => match meet(stream) {
                    Ok(met) => return Ok(met),
                    Err(error) if may_pass(&error) => (may_come, failure) = (true, error),
                    Err(error) => return Err(more_telling(error, before)),
                },
                Err(error) => {
                    may_come = error.kind() == ErrorKind::ConnectionRefused;
                    failure = unreachable(error);
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

fn connect(address: &SocketAddr, within: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(address, within)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(within))?;
    stream.set_write_timeout(Some(within))?;
    Ok(stream)
}

/// Returns whether an error of a stream means that the other end has gone, rather than that it is silent.
#[must_use]
pub fn stream_has_ended(error: &io::Error) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), ConnectionReset | ConnectionAborted | BrokenPipe | UnexpectedEof)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// At a loopback address that no other test uses: a port that is left may be given to another listener at once.
    fn free_address() -> SocketAddr {
        TcpListener::bind("127.18.0.1:0").unwrap().local_addr().unwrap()
    }

    #[test]
    fn a_server_that_comes_late_or_leaves_at_first_is_waited_for() {
        let address = free_address();
        let server = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            let listener = TcpListener::bind(address).unwrap();
            (0..2).for_each(|_| drop(listener.accept().unwrap()));
        });
        let mut attempts = 0;
        let met = reach(
            &[address],
            Duration::from_secs(20),
            || true,
            |_| {
                attempts += 1;
                if attempts == 1 { Err(io::Error::from(ErrorKind::UnexpectedEof)) } else { Ok(attempts) }
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
        // The first two attempts find a reason; the third one takes until the end of the time, like a peer that does not answer any more.
        let patience = Duration::from_millis(300);
        let meet = |_| -> io::Result<()> {
            attempts += 1;
            if attempts < 3 {
                return Err(io::Error::new(ErrorKind::UnexpectedEof, format!("reason {attempts}")));
            }
            std::thread::sleep(patience);
            Err(ErrorKind::TimedOut.into())
        };
        let failed = reach(&[address], patience, || true, meet, stream_has_ended, |error| error);
        assert_eq!(failed.unwrap_err().to_string(), "reason 2");
    }

    #[test]
    fn what_does_not_pass_and_who_is_not_wanted_end_it_at_once() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let long = Duration::from_secs(3600);
        let refused: Result<(), _> = reach(&[address], long, || true, |_| Err(io::Error::other("no")), stream_has_ended, |error| error);
        assert_eq!(refused.unwrap_err().to_string(), "no");
        drop(listener);
        let is_wanted = AtomicBool::new(true);
        let given_up: Result<(), _> =
            reach(&[address], long, || is_wanted.swap(false, Ordering::Relaxed), |_| Ok(()), stream_has_ended, |error| error);
        assert_eq!(given_up.unwrap_err().kind(), ErrorKind::ConnectionRefused);
        let none: Result<(), _> = reach(&[], long, || true, |_| Ok(()), stream_has_ended, |error| error);
        assert_eq!(none.unwrap_err().kind(), ErrorKind::AddrNotAvailable);
    }
}
