//! Event channels. A channel is a pipe of events: either each is an `ib_uverbs_comp_event_desc`,
//! with the program's own name for a completion queue, or each is an `ib_uverbs_async_event_desc`,
//! which starts with the program's name for an object.
//!
//! The kernel does two things that a pipe does not. When an object is destroyed, the kernel returns
//! the number of its events that the program has *read*, and libibverbs waits until the program has
//! acknowledged all of these. The kernel also removes the object's unread events, so that `poll` does
//! not find them. So `read` is interposed: the library counts the events that the program reads.
//! Events of a destroyed object are taken out of the pipe; `read` skips those that a thread of the
//! program was reading at that time.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{Mode, OFlags};
use zerocopy::{Immutable, IntoBytes};

use crate::options::errno::Errno;
use crate::system::sys;

/// Length of the name at the start of every event, in bytes.
const NAME: usize = size_of::<u64>();

/// Maximum number of bytes in a pipe.
const PIPE_BYTES: usize = 1 << 16;

/// A channel of events of one size.
#[derive(Debug)]
pub(crate) struct Channel {
    writer: OwnedFd,
    event_bytes: usize,
    queues: Mutex<HashMap<u64, Events>>,
}

fn name_of(event: &[u8]) -> u64 {
    event
        .first_chunk::<NAME>()
        .copied()
        .map_or(0, u64::from_ne_bytes)
}

/// The events that were written under one name.
#[derive(Debug, Default)]
struct Events {
    written: u32,
    read: u32,
    /// Number of unread events of destroyed objects that had the same name. The program's reads
    /// find these events before all others of the name, and skip them.
    stale: u32,
}

impl Channel {
    /// Makes a channel of events of type `E` over this writing end of a pipe.
    pub(crate) fn new<E>(writer: OwnedFd) -> Self {
        Self {
            writer,
            event_bytes: size_of::<E>(),
            queues: Mutex::default(),
        }
    }

    pub(crate) fn event_bytes(&self) -> usize {
        self.event_bytes
    }

    fn queues(&self) -> MutexGuard<'_, HashMap<u64, Events>> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes an event to the channel.
    ///
    /// # Errors
    /// `EAGAIN`: the channel is full of events that the program has not read. `EPIPE`: the program
    /// closed the reading end.
    pub(crate) fn send(&self, event: &(impl IntoBytes + Immutable)) -> Result<(), Errno> {
        let mut queues = self.queues();
        sys::write(&self.writer, event.as_bytes())?;
        queues.entry(name_of(event.as_bytes())).or_default().written += 1;
        Ok(())
    }

    /// Counts an event that the program read. Returns `false` if the event's object was destroyed
    /// before; then the program must not get the event.
    pub(crate) fn received(&self, event: &[u8]) -> bool {
        let mut queues = self.queues();
        let Some(events) = queues.get_mut(&name_of(event)) else {
            return true;
        };
        if events.stale > 0 {
            events.stale -= 1;
            return false;
        }
        events.read += 1;
        true
    }

    /// Ends the events of a destroyed object: the program gets none of its unread events. Returns
    /// the number of its events that were read.
    pub(crate) fn forget(&self, user_handle: u64) -> u32 {
        let mut queues = self.queues();
        let Some(events) = queues.get_mut(&user_handle) else {
            return 0;
        };
        let read = events.read;
        let unread = events.stale + (events.written - events.read);
        let stale = match unread {
            0 => 0,
            _ => unread.saturating_sub(self.take_out(user_handle)),
        };
        *events = Events {
            stale,
            ..Events::default()
        };
        if stale == 0 {
            queues.remove(&user_handle);
        }
        read
    }

    /// Takes the events of a name out of the pipe. Returns their number: 0 if the reading end
    /// cannot be opened, as without `/proc`.
    fn take_out(&self, name: u64) -> u32 {
        let path = format!("/proc/self/fd/{}", self.writer.as_raw_fd());
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let Ok(reader) = rustix::fs::open(path, flags, Mode::empty()) else {
            return 0;
        };
        let mut bytes = vec![0; PIPE_BYTES];
        let len = rustix::io::read(&reader, &mut bytes).unwrap_or(0);
        let events = || bytes[..len].chunks_exact(self.event_bytes);
        // The others have room, because they were in the pipe before.
        for event in events().filter(|event| name_of(event) != name) {
            let _ = sys::write(&self.writer, event);
        }
        events().filter(|event| name_of(event) == name).count() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(fd: &OwnedFd) -> u64 {
        let mut event = 0u64;
        // SAFETY: `event` is writable memory of `NAME` bytes.
        let n = unsafe {
            libc::read(
                std::os::fd::AsRawFd::as_raw_fd(fd),
                (&raw mut event).cast(),
                NAME,
            )
        };
        assert_eq!(n, NAME as isize);
        event
    }

    #[test]
    fn events_of_a_destroyed_queue_are_counted_if_read_and_gone_if_not() {
        let (reader, writer) = sys::pipe().unwrap();
        let channel = Channel::new::<u64>(writer);
        for name in [7u64, 7, 8] {
            channel.send(&name).unwrap();
        }
        let read = || {
            let name = read(&reader);
            (name, channel.received(&name.to_ne_bytes()))
        };
        assert_eq!(read(), (7, true));
        assert_eq!(channel.forget(7), 1, "two were written, one was read");
        channel.send(&7u64).unwrap();

        assert_eq!(
            read(),
            (8, true),
            "that of the queue that is gone was removed"
        );
        assert_eq!(read(), (7, true), "of the queue that has the name now");
        assert_eq!(
            (channel.forget(7), channel.forget(8), channel.forget(9)),
            (1, 1, 0)
        );
    }

    #[test]
    fn an_event_that_is_being_read_while_its_queue_is_destroyed_is_skipped() {
        let (reader, writer) = sys::pipe().unwrap();
        let channel = Channel::new::<u64>(writer);
        channel.send(&7u64).unwrap();
        let name = read(&reader);
        assert_eq!(channel.forget(7), 0);
        assert!(!channel.received(&name.to_ne_bytes()));
        assert!(channel.received(&name.to_ne_bytes()), "of the next queue");
    }

    #[test]
    fn a_channel_that_is_full_or_closed_is_an_error() {
        let (reader, writer) = sys::pipe().unwrap();
        let channel = Channel::new::<u64>(writer);
        let full = (0..1 << 20).find_map(|_| channel.send(&1u64).err());
        assert_eq!(full, Some(Errno(libc::EAGAIN)));
        drop(reader);
        assert_eq!(channel.send(&1u64), Err(Errno(libc::EPIPE)));
    }
}
