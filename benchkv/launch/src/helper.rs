//! A process that does part of another's work. Its owner starts it from the same executable. Messages go both ways, and it never outlives
//! the owner.
//!
//! Messages are bytes of any meaning, over the socket that is the helper's standard input. Neither side blocks on the other for longer
//! than documented.

use std::ffi::OsString;
use std::io;
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::child::{Ended, OwnChild};
use crate::exchange::channel::Channel;
use crate::exchange::frame::Frame;
use crate::role_text::RoleText;
use crate::sys;

/// Why the other side is unusable.
#[derive(Debug, Error)]
pub enum HelperError {
    /// The helper ended.
    #[error("{0}")]
    Ended(Ended),
    /// The owner ended, or closed the connection.
    #[error("its owner has gone")]
    OwnerGone,
    /// The other side sent bytes that are not messages.
    #[error("it sent bytes that are not a message: {0}")]
    Protocol(String),
    /// The process could not be started, or a system call failed.
    #[error("{0}")]
    System(#[from] io::Error),
}

/// The owner's side. Dropping it kills the process.
#[derive(Debug)]
pub struct Helper {
    child: OwnChild,
    channel: Channel,
}

impl Helper {
    /// Starts this executable as a helper, with `args`. It is killed when the calling *thread* ends, and has no standard output.
    ///
    /// # Errors
    /// [`HelperError::System`].
    pub fn start(args: &[OsString]) -> Result<Self, HelperError> {
        let (ours, theirs) = UnixStream::pair()?;
        let child = OwnChild::spawn(&RoleText::Helper.encode(), args, &[], theirs, Stdio::null())?;
        Ok(Self { child, channel: Channel::new(ours)? })
    }

    /// Returns its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.pid()
    }

    /// Sends a message. [`receive`](Self::receive) sends the rest if the socket does not take all at once.
    ///
    /// # Errors
    /// [`HelperError::System`].
    pub fn send(&mut self, message: Vec<u8>) -> Result<(), HelperError> {
        Ok(self.channel.send(&Frame::Message(message))?)
    }

    /// Returns the next message; `None` if none arrives within `time`.
    ///
    /// # Errors
    /// [`HelperError`]; how it ended, after its last complete message.
    pub fn receive(&mut self, time: Duration) -> Result<Option<Vec<u8>>, HelperError> {
        let end = Instant::now() + time;
        loop {
            // Checked first: all bytes that it sent before it ended are then in the socket.
            let ended = self.child.ended()?;
            self.channel.push()?;
            while !self.channel.is_closed() && self.channel.pull()? {}
            match (next_message(&mut self.channel)?, ended) {
                (Some(message), _) => return Ok(Some(message)),
                (None, Some(how)) => return Err(HelperError::Ended(how)),
                (None, None) => {}
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let mut fds = vec![sys::interest(&self.child, libc::POLLIN)];
            if !self.channel.is_closed() {
                fds.push(sys::interest(&self.channel, self.channel.events()));
            }
            sys::poll(&mut fds, left)?;
        }
    }

    /// Ends the helper by closing the socket; kills it if it has not ended within `time`.
    pub fn end(self, time: Duration) {
        let Self { child, channel } = self;
        drop(channel);
        // Even if the wait fails, the drop of the child kills and reaps it.
        let _ = sys::poll(&mut [sys::interest(&child, libc::POLLIN)], time);
    }
}

/// The helper's side.
#[derive(Debug)]
pub struct Owner {
    channel: Channel,
}

impl Owner {
    pub(crate) fn new(socket: UnixStream) -> io::Result<Self> {
        Ok(Self { channel: Channel::new(socket)? })
    }

    /// Sends a message; returns when the socket has all of it.
    ///
    /// # Errors
    /// [`HelperError::OwnerGone`], or [`HelperError::System`].
    pub fn send(&mut self, message: Vec<u8>) -> Result<(), HelperError> {
        self.channel.send(&Frame::Message(message))?;
        while self.channel.events() & libc::POLLOUT != 0 {
            sys::poll(&mut [sys::interest(&self.channel, libc::POLLOUT)], Duration::MAX)?;
            self.channel.push()?;
        }
        Ok(())
    }

    /// Waits for the next message.
    ///
    /// # Errors
    /// [`HelperError`].
    pub fn receive(&mut self) -> Result<Vec<u8>, HelperError> {
        loop {
            if let Some(message) = next_message(&mut self.channel)? {
                return Ok(message);
            }
            if self.channel.is_closed() {
                return Err(HelperError::OwnerGone);
            }
            sys::poll(&mut [sys::interest(&self.channel, libc::POLLIN)], Duration::MAX)?;
            self.channel.pull()?;
        }
    }
}

fn next_message(channel: &mut Channel) -> Result<Option<Vec<u8>>, HelperError> {
    match channel.next().map_err(|error| HelperError::Protocol(error.to_string()))? {
        Some(Frame::Message(message)) => Ok(Some(message)),
        Some(_) => Err(HelperError::Protocol("a frame of another exchange".to_owned())),
        None => Ok(None),
    }
}
