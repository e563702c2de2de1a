//! Baselines between two threads of this process: the exchange of a bare cache line, which is the
//! lower bound of a round trip, and an echo over a Unix socket. The [`load`](crate::load) measures
//! them as it measures other transports.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::Failure;
use crate::clock::Clock;
use crate::load::{Answerer, Caller, Payload, Rate, between_threads};

/// Cache lines in each direction that are used in turn. On some CPUs this is faster than one line.
const ROTATING_LINES: usize = 32;

/// Measures the round trip of a cache line between the two `cores`, or between two threads that are
/// not pinned and yield while they wait. Measures twice, for half of `duration` each time: with one
/// line in each direction, and with lines that are used in turn. Returns the smaller of the two
/// results, in nanoseconds. A result is the median over blocks of round trips.
///
/// # Errors
/// A thread that cannot be pinned.
pub fn cache_line_ns(
    cores: Option<(usize, usize)>,
    clock: Clock,
    duration: Duration,
) -> Result<f64, Failure> {
    let fixed = rate_of_lines::<1>(cores, clock, duration / 2)?;
    let rotating = rate_of_lines::<ROTATING_LINES>(cores, clock, duration / 2)?;
    Ok(fixed.block_ns.min(rotating.block_ns))
}

fn rate_of_lines<const LINES: usize>(
    cores: Option<(usize, usize)>,
    clock: Clock,
    duration: Duration,
) -> Result<Rate, Failure> {
    let [here, there] = LinesEnd::<LINES>::pair();
    let run = |load: &mut crate::load::Load<'_, _>| load.run(1, duration);
    between_threads(cores, clock, || Ok(there), || Ok(here), run)
}

/// A message, in a pair of adjacent cache lines of its own, because some CPUs fetch lines in pairs.
#[derive(Debug, Default)]
#[repr(C, align(128))]
struct Line {
    /// Number of the message, which is written last.
    number: AtomicU64,
    words: [AtomicU64; 4],
}

/// An end of the exchange. Its messages use the lines of `outgoing` in turn, and the messages of
/// the other end use the lines of `incoming` in turn.
#[derive(Debug)]
struct LinesEnd<const LINES: usize> {
    outgoing: Arc<[Line; LINES]>,
    incoming: Arc<[Line; LINES]>,
    sent: u64,
    received: u64,
}

impl<const LINES: usize> LinesEnd<LINES> {
    fn pair() -> [Self; 2] {
        let [there, back] = [(); 2].map(|()| Arc::new([(); LINES].map(|()| Line::default())));
        let end = |outgoing: &Arc<_>, incoming: &Arc<_>| Self {
            outgoing: Arc::clone(outgoing),
            incoming: Arc::clone(incoming),
            sent: 0,
            received: 0,
        };
        [end(&there, &back), end(&back, &there)]
    }

    #[inline(always)]
    fn send(&mut self, payload: &Payload) {
        let line = &self.outgoing[self.sent as usize % LINES];
        for (word, value) in line.words.iter().zip(payload) {
            word.store(*value, Ordering::Relaxed);
        }
        self.sent += 1;
        line.number.store(self.sent, Ordering::Release);
    }

    #[inline(always)]
    fn receive(&mut self) -> Option<Payload> {
        let line = &self.incoming[self.received as usize % LINES];
        let has_arrived = line.number.load(Ordering::Acquire) > self.received;
        has_arrived.then(|| {
            self.received += 1;
            line.words
                .each_ref()
                .map(|word| word.load(Ordering::Relaxed))
        })
    }
}

impl<const LINES: usize> Caller for LinesEnd<LINES> {
    #[inline(always)]
    fn call(&mut self, _: u32, request: Payload) -> Result<bool, Failure> {
        self.send(&request);
        Ok(true)
    }

    #[inline(always)]
    fn poll(&mut self, mut f: impl FnMut(u32, Payload)) -> Result<usize, Failure> {
        Ok(self.receive().map(|reply| f(0, reply)).into_iter().count())
    }
}

impl<const LINES: usize> Answerer for LinesEnd<LINES> {
    #[inline(always)]
    fn step(&mut self, mut f: impl FnMut(&Payload) -> Payload) -> Result<usize, Failure> {
        let request = self.receive();
        Ok(request
            .map(|request| self.send(&f(&request)))
            .into_iter()
            .count())
    }
}

/// Measures an echo over a Unix socket, one message at a time. The threads share the cores that this
/// thread may use. Returns the round trips per second.
///
/// # Errors
/// A failed system call.
pub fn unix_echo_rps(clock: Clock, duration: Duration) -> Result<f64, Failure> {
    let (here, there) = UnixStream::pair()?;
    let (here, there) = (SocketEnd(here), SocketEnd(there));
    let run = |load: &mut crate::load::Load<'_, _>| load.run(1, duration);
    let rate = between_threads(None, clock, || Ok(there), || Ok(here), run)
        .map_err(|why| format!("the echo baseline failed: {why}"))?;
    Ok(rate.rate)
}

#[derive(Debug)]
struct SocketEnd(UnixStream);

impl SocketEnd {
    fn send(&mut self, payload: Payload) -> Result<(), Failure> {
        Ok(self
            .0
            .write_all(payload.map(u64::to_le_bytes).as_flattened())?)
    }

    /// Waits for a message.
    fn receive(&mut self) -> Result<Payload, Failure> {
        let mut words = [[0; 8]; 4];
        self.0.read_exact(words.as_flattened_mut())?;
        Ok(words.map(u64::from_le_bytes))
    }
}

impl Caller for SocketEnd {
    fn call(&mut self, _: u32, request: Payload) -> Result<bool, Failure> {
        self.send(request).map(|()| true)
    }

    fn poll(&mut self, mut f: impl FnMut(u32, Payload)) -> Result<usize, Failure> {
        f(0, self.receive()?);
        Ok(1)
    }
}

impl Answerer for SocketEnd {
    fn step(&mut self, mut f: impl FnMut(&Payload) -> Payload) -> Result<usize, Failure> {
        let request = self.receive()?;
        self.send(f(&request)).map(|()| 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Load;

    fn check(here: impl Caller, there: impl Answerer + Send) {
        let check = |load: &mut Load<'_, _>| load.check(1, 1000);
        between_threads(None, Clock::monotonic(), || Ok(there), || Ok(here), check).unwrap();
    }

    #[test]
    fn lines_carry_whole_messages_in_their_order() {
        let [here, there] = LinesEnd::<1>::pair();
        check(here, there);
        let [here, there] = LinesEnd::<ROTATING_LINES>::pair();
        check(here, there);
    }

    #[test]
    fn a_socket_carries_whole_messages_in_their_order() {
        let (here, there) = UnixStream::pair().unwrap();
        check(SocketEnd(here), SocketEnd(there));
    }
}
