//! Strangers that attack the address of a server.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use crate::limits;

/// Duration of the attack. A server that serves only a stranger until the stranger stops delays the
/// calls of its clients by nearly this time.
const ATTACK: Duration = Duration::from_secs(2);
/// Maximum time of a call during the attack, also on a busy machine.
const CALL: Duration = Duration::from_secs(1);
/// Pause between the bytes of a stranger that sends one byte at a time.
const PAUSE: Duration = Duration::from_millis(20);
const SOCKETS: usize = 1_000;
/// The first record of a client that knows a secret.
const CHALLENGE: &[u8; 48] = b"secretHS\x01\0\x30\0\0\0\0\0................................";

/// Attacks the server at an address: strangers send without a pause or one byte at a time, and
/// 1,000 sockets stop after nothing or half a record. Meanwhile a client continues its calls, and
/// other clients connect. `connect` makes a client, and returns a function that makes a call.
///
/// # Panics
/// A call of the first client takes 1 s, or a client panics.
pub fn attack<C: FnMut()>(address: SocketAddr, connect: impl Fn() -> C + Sync) {
    limits::permit_descriptors();
    let mut call = connect();
    let is_over = AtomicBool::new(false);
    let goes_on = || !is_over.load(Ordering::Relaxed);
    let open = || {
        let stream = TcpStream::connect_timeout(&address, CALL)?;
        stream.set_write_timeout(Some(CALL))?;
        std::io::Result::Ok(stream)
    };
    let stranger = |hello: &[u8], then: &[u8], pause| {
        while goes_on() {
            // The server closes the connection; then the loop opens the next connection.
            let _closed = open().and_then(|mut stream| {
                stream.write_all(hello)?;
                while goes_on() {
                    sleep(pause);
                    stream.write_all(then)?;
                }
                Ok(())
            });
        }
    };
    let longest = thread::scope(|scope| {
        scope.spawn(|| stranger(CHALLENGE, &[0; 1 << 16], Duration::ZERO));
        scope.spawn(|| stranger(b"", &[1; 1 << 16], Duration::ZERO));
        scope.spawn(|| stranger(b"", b"s", PAUSE));
        scope.spawn(|| {
            let stopped: Vec<_> = (0..SOCKETS)
                .take_while(|_| goes_on())
                .map(|number| {
                    open().and_then(|mut stream| {
                        stream.write_all(&CHALLENGE[..number % 2 * 24])?;
                        Ok(stream)
                    })
                })
                .collect();
            while goes_on() {
                sleep(PAUSE);
            }
            drop(stopped);
        });
        scope.spawn(|| {
            while goes_on() {
                connect()();
            }
        });
        let (start, mut longest) = (Instant::now(), Duration::ZERO);
        // The strangers stop after this time even while a call waits, so that a server that they
        // delay answers the call in the end.
        scope.spawn(|| {
            sleep(ATTACK);
            is_over.store(true, Ordering::Relaxed);
        });
        while start.elapsed() < ATTACK {
            let called = Instant::now();
            call();
            longest = longest.max(called.elapsed());
            sleep(Duration::from_millis(1));
        }
        longest
    });
    assert!(longest < CALL, "a call took {longest:?}");
}
