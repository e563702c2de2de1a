//! Messages of a known length that cross a stream in pieces of any length.

use std::io::{self, ErrorKind, Read, Write};

/// Returns the number of bytes that a read or write has moved; `None` if the stream would block.
/// `end` is the error to return if the stream has ended.
fn moved(outcome: io::Result<usize>, end: (ErrorKind, &str)) -> io::Result<Option<usize>> {
    match outcome {
        Ok(0) => Err(io::Error::new(end.0, end.1)),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
        Err(error) if error.kind() == ErrorKind::Interrupted => Ok(Some(0)),
        outcome => outcome.map(Some),
    }
}

/// `N` bytes being received.
#[derive(Clone, Debug)]
pub struct Incoming<const N: usize> {
    bytes: [u8; N],
    count: usize,
}

impl<const N: usize> Default for Incoming<N> {
    fn default() -> Self {
        Self {
            bytes: [0; N],
            count: 0,
        }
    }
}

impl<const N: usize> Incoming<N> {
    /// Receives the bytes that are available. Returns `None` if some are still missing and the
    /// stream would block.
    ///
    /// # Errors
    /// The errors of the stream; its end is [`ErrorKind::UnexpectedEof`].
    pub fn advance(&mut self, stream: &mut impl Read) -> io::Result<Option<&[u8; N]>> {
        while self.count < N && self.step(stream)?.is_some() {}
        Ok(self.whole())
    }

    pub(crate) fn whole(&self) -> Option<&[u8; N]> {
        (self.count == N).then_some(&self.bytes)
    }

    /// Reads missing bytes once. Returns all received bytes; `None` if the stream would block.
    pub(crate) fn step(&mut self, stream: &mut impl Read) -> io::Result<Option<&[u8]>> {
        let end = (
            ErrorKind::UnexpectedEof,
            "the other end went away before its record came",
        );
        let Some(bytes) = moved(stream.read(&mut self.bytes[self.count..]), end)? else {
            return Ok(None);
        };
        self.count += bytes;
        Ok(Some(&self.bytes[..self.count]))
    }
}

/// `N` bytes being sent.
#[derive(Clone, Debug)]
pub struct Outgoing<const N: usize> {
    bytes: [u8; N],
    sent: usize,
}

impl<const N: usize> From<[u8; N]> for Outgoing<N> {
    fn from(bytes: [u8; N]) -> Self {
        Self { bytes, sent: 0 }
    }
}

impl<const N: usize> Outgoing<N> {
    /// Sends the bytes that the stream takes. Returns whether all are sent; otherwise the stream
    /// would block.
    ///
    /// # Errors
    /// The errors of the stream; its end is [`ErrorKind::WriteZero`].
    pub fn advance(&mut self, stream: &mut impl Write) -> io::Result<bool> {
        while self.sent < N {
            let end = (ErrorKind::WriteZero, "the other end takes no more bytes");
            let Some(bytes) = moved(stream.write(&self.bytes[self.sent..]), end)? else {
                return Ok(false);
            };
            self.sent += bytes;
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream that moves at most `step` bytes in a call, and would block at every other call.
    struct Slow {
        bytes: Vec<u8>,
        step: usize,
        calls: usize,
    }

    impl Slow {
        fn turn(&mut self) -> io::Result<usize> {
            self.calls += 1;
            if self.calls % 2 == 0 {
                Err(ErrorKind::WouldBlock.into())
            } else {
                Ok(self.step)
            }
        }
    }

    impl Read for Slow {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let count = self.turn()?.min(buffer.len()).min(self.bytes.len());
            buffer[..count].copy_from_slice(&self.bytes[..count]);
            self.bytes.drain(..count);
            Ok(count)
        }
    }

    impl Write for Slow {
        fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
            let count = self.turn()?.min(buffer.len());
            self.bytes.extend(&buffer[..count]);
            Ok(count)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn bytes_cross_in_whatever_pieces_and_an_end_in_the_middle_is_an_error() {
        for step in 1..12 {
            let mut channel = Slow {
                bytes: Vec::new(),
                step,
                calls: 0,
            };
            let mut outgoing = Outgoing::from(*b"0123456789");
            while !outgoing.advance(&mut channel).unwrap() {}
            assert_eq!(channel.bytes, b"0123456789");
            let mut incoming = Incoming::<10>::default();
            let taken = loop {
                if let Some(taken) = incoming.advance(&mut channel).unwrap() {
                    break *taken;
                }
            };
            assert_eq!(taken, *b"0123456789");
        }
        let mut cut = io::Cursor::new(b"01234");
        let error = Incoming::<10>::default().advance(&mut cut).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    }
}
