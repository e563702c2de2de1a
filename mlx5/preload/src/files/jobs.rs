//! An open device: the path of a command to the thread that owns its HCA, and of the result back.
//!
//! The HCA belongs to one thread for its whole life, because its peers take the end of that thread
//! for the end of the HCA. So every command runs on that thread. The thread that wrote the command
//! waits, so the memory to which the command points stays valid.

use std::io;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use crate::command::Call;
use crate::options::errno::Errno;

/// A command on the way to the thread. A drop without an answer means that the HCA has failed.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) call: Call,
    answer: SyncSender<Result<(), Errno>>,
}

impl Job {
    pub(crate) fn answer(self, result: Result<(), Errno>) {
        // The thread waits, and the channel has room for one answer, so the send does not fail.
        let _ = self.answer.send(result);
    }
}

/// An open device. Dropping it closes the device, and waits until it is closed. If the program
/// still has the device's registers mapped, the drop does not wait, and the device closes after
/// they are unmapped.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) index: usize,
    jobs: Option<Sender<Job>>,
    /// Receives a message if the thread outlives this value. Only the drop reads the message; the
    /// mutex allows threads to share this value.
    outlived: Mutex<Receiver<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Device {
    /// Starts the thread with `spawn`. The device is closed when the thread's receiver is
    /// disconnected. The thread then ends, or sends a message if it continues because the registers
    /// are mapped.
    ///
    /// # Errors
    /// `EAGAIN`: the system has no room for another thread.
    pub(crate) fn open(
        index: usize,
        spawn: impl FnOnce(Receiver<Job>, SyncSender<()>) -> io::Result<JoinHandle<()>>,
    ) -> Result<Self, Errno> {
        let (jobs, receiver) = channel();
        let (outlives, outlived) = sync_channel(1);
        let thread = spawn(receiver, outlives)
            .map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EAGAIN)))?;
        Ok(Self {
            index,
            jobs: Some(jobs),
            outlived: Mutex::new(outlived),
            thread: Some(thread),
        })
    }

    /// Passes a command to the thread, and waits for its result.
    ///
    /// # Errors
    /// The command's error, or `EIO` if the HCA has failed.
    ///
    /// # Safety
    /// The memory to which the command points fulfils a driver's contract with the kernel: it stays
    /// valid until the object that uses it is destroyed.
    pub(crate) unsafe fn execute(&self, call: Call) -> Result<(), Errno> {
        let (answer, result) = sync_channel(1);
        if let Some(jobs) = &self.jobs {
            // A thread that has failed drops the job, and with it the sender of the answer.
            let _ = jobs.send(Job { call, answer });
        }
        result.recv().unwrap_or(Err(Errno(libc::EIO)))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.jobs = None;
        let outlived = self
            .outlived
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        if let (Err(_), Some(thread)) = (outlived.recv(), self.thread.take()) {
            // The thread catches its own panics, so the join returns no error.
            let _ = thread.join();
        }
    }
}
