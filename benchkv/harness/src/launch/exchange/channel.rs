//! Frames over a stream socket that never blocks, so that neither the launcher nor a rank hangs
//! when the other is stopped.

use std::io::ErrorKind::{BrokenPipe, ConnectionReset, Interrupted, WouldBlock};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use rustix::event::PollFlags;

use super::frame::{Frame, FrameError};

/// Maximum bytes that one [`Channel::pull`] takes from the socket; the next pull takes the rest.
const PULL_BYTES: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct Channel {
    stream: UnixStream,
    inbound: Vec<u8>,
    outbound: Vec<u8>,
    sent: usize,
    closed: bool,
}

impl Channel {
    pub(crate) fn new(stream: UnixStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            inbound: Vec::new(),
            outbound: Vec::new(),
            sent: 0,
            closed: false,
        })
    }

    /// Returns whether the peer has closed its end, and all bytes that it sent were pulled.
    pub(crate) const fn is_closed(&self) -> bool {
        self.closed
    }

    pub(crate) fn events(&self) -> PollFlags {
        let out = if self.sent < self.outbound.len() {
            PollFlags::OUT
        } else {
            PollFlags::empty()
        };
        PollFlags::IN | out
    }

    /// Queues a frame and sends as much as the socket takes now.
    pub(crate) fn send(&mut self, frame: &Frame) -> io::Result<()> {
        self.outbound.extend(frame.encode());
        self.push()
    }

    /// Sends more bytes of the queue. If the peer has exited, [`pull`](Self::pull) detects that.
    pub(crate) fn push(&mut self) -> io::Result<()> {
        while let Some(rest @ [_, ..]) = self.outbound.get(self.sent..) {
            match self.stream.write(rest) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == WouldBlock => return Ok(()),
                Err(error) if error.kind() == Interrupted => {}
                Err(error) if matches!(error.kind(), BrokenPipe | ConnectionReset) => break,
                Err(error) => return Err(error),
            }
        }
        self.outbound.clear();
        self.sent = 0;
        Ok(())
    }

    /// Receives the bytes that have arrived, at most [`PULL_BYTES`]. Returns `false` if no bytes
    /// had arrived.
    pub(crate) fn pull(&mut self) -> io::Result<bool> {
        let before = self.inbound.len();
        self.inbound.resize(before + PULL_BYTES, 0);
        let place = self.inbound.get_mut(before..).unwrap_or_default();
        let outcome = self.stream.read(place);
        let count = outcome.as_ref().map_or(0, |count| *count);
        self.inbound.truncate(before + count);
        match outcome {
            Ok(count) => self.closed = count == 0,
            Err(error) if error.kind() == ConnectionReset => self.closed = true,
            Err(error) if matches!(error.kind(), WouldBlock | Interrupted) => {}
            Err(error) => return Err(error),
        }
        Ok(self.inbound.len() > before)
    }

    /// Returns the next whole frame that has been pulled.
    pub(crate) fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        let Some((frame, length)) = Frame::decode(&self.inbound)? else {
            return Ok(None);
        };
        self.inbound.drain(..length);
        Ok(Some(frame))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}
