//! The addresses of a server by its name, which is resolved again whenever a client connects again.

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::ops::Deref;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::reach::ATTEMPT_INTERVAL;

/// Returns an address as its user wrote it, `HOST:PORT` for both a text and a tuple. Reads the
/// `Debug` format, because not every type of an address can be displayed.
#[must_use]
pub fn name_of(address: &impl fmt::Debug) -> String {
    let text = format!("{address:?}");
    let tuple = text
        .strip_prefix("(\"")
        .and_then(|text| text.strip_suffix(')'));
    match tuple.and_then(|text| text.split_once("\", ")) {
        Some((host, port)) => format!("{host}:{port}"),
        None => text.trim_matches('"').to_owned(),
    }
}

/// The addresses of a server, as the last answer of the resolver has them.
#[derive(Debug)]
pub(crate) struct Addresses {
    known: Vec<SocketAddr>,
    /// Receives the answer to a query of the resolver that was not answered in time.
    answer: Option<Receiver<io::Result<Vec<SocketAddr>>>>,
}

impl Addresses {
    /// Resolves an address for the first time, which blocks as long as the resolver does.
    ///
    /// # Errors
    /// The errors of the resolver.
    pub(crate) fn of(address: impl ToSocketAddrs) -> io::Result<Self> {
        Ok(Self {
            known: address.to_socket_addrs()?.collect(),
            answer: None,
        })
    }

    /// Resolves a [name](name_of) again, for a client whose connection has ended: the server may
    /// have moved. Waits for `patience` at most, and only while the client `is_wanted`. The
    /// resolver runs in another thread; if it takes longer, the next call takes its answer. The
    /// addresses stay the same if there is no answer, or if `name` is itself an address or a list
    /// of addresses.
    pub(crate) fn refresh(
        &mut self,
        name: &str,
        patience: Duration,
        mut is_wanted: impl FnMut() -> bool,
    ) {
        if name.parse::<SocketAddr>().is_ok() {
            return;
        }
        let start = Instant::now();
        let Some(answer) = self.answer.take().or_else(|| ask(name.to_owned())) else {
            return;
        };
        loop {
            let left = patience.saturating_sub(start.elapsed());
            match answer.recv_timeout(left.min(ATTEMPT_INTERVAL)) {
                Ok(Ok(addresses)) if !addresses.is_empty() => return self.known = addresses,
                Err(RecvTimeoutError::Timeout) if left.is_zero() || !is_wanted() => {
                    return self.answer = Some(answer);
                }
                Err(RecvTimeoutError::Timeout) => {}
                _ => return,
            }
        }
    }
}

impl Deref for Addresses {
    type Target = [SocketAddr];

    fn deref(&self) -> &[SocketAddr] {
        &self.known
    }
}

/// Starts a thread that asks the resolver. Returns the channel on which the answer arrives; `None`
/// if no thread can be started.
fn ask(name: String) -> Option<Receiver<io::Result<Vec<SocketAddr>>>> {
    let (tell, answer) = channel();
    let resolve = move || {
        // The send fails if the client was dropped.
        let _told = tell.send(name.to_socket_addrs().map(Vec::from_iter));
    };
    thread::Builder::new()
        .name("resolver".to_owned())
        .spawn(resolve)
        .ok()
        .map(|_| answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn addresses_are_named_without_quotes() {
        assert_eq!(name_of(&"localhost:80"), "localhost:80");
        assert_eq!(name_of(&"localhost:80".to_owned()), "localhost:80");
        assert_eq!(name_of(&address("255.255.255.255:9")), "255.255.255.255:9");
        assert_eq!(name_of(&("localhost", 80)), "localhost:80");
        assert_eq!(name_of(&("localhost".to_owned(), 80)), "localhost:80");
    }

    #[test]
    fn a_name_is_resolved_again_and_what_is_none_keeps_the_addresses() {
        let long = Duration::from_secs(20);
        let before = [address("127.1.2.3:80"), address("127.1.2.4:80")];
        let mut addresses = Addresses::of(&before[..]).unwrap();
        for no_name in [&*name_of(&&before[..]), "127.9.9.9:80", "no port"] {
            addresses.refresh(no_name, long, || true);
            assert_eq!(*addresses, before, "{no_name}");
        }
        addresses.refresh(&name_of(&("127.1.2.5", 81)), long, || true);
        assert_eq!(*addresses, before, "an address");
        addresses.refresh("localhost:80", long, || true);
        assert!(addresses.iter().all(|address| address.ip().is_loopback()));
        assert_ne!(*addresses, before);
    }

    /// The resolver can take longer than a call.
    #[test]
    fn a_late_answer_is_waited_for_in_its_time_and_taken_the_next_time() {
        let (tell, answer) = channel();
        let before = [address("127.1.2.3:80")];
        let mut addresses = Addresses::of(&before[..]).unwrap();
        addresses.answer = Some(answer);
        addresses.refresh("localhost:80", Duration::from_millis(1), || true);
        addresses.refresh("localhost:80", Duration::MAX, || false);
        assert_eq!(*addresses, before);
        let after = vec![address("127.1.2.5:80")];
        tell.send(Ok(after.clone())).unwrap();
        addresses.refresh("localhost:80", Duration::ZERO, || true);
        assert_eq!(*addresses, *after);
    }
}
