//! An open device: the mailbox through which the program's threads reach the thread that owns its HCA.
//!
//! The HCA belongs to one thread for its whole life, because its peers take that thread's death for the HCA's. So every command runs on
//! that thread. The thread that wrote the command waits, so the memory it points to stays valid.

use std::sync::Arc;
use std::thread::JoinHandle;

use crate::command::Call;
use crate::files::fds::Execute;
use crate::objects::doorbells::Registers;
use crate::options::errno::Errno;
use crate::options::settings::Settings;
use crate::thread::mailbox::Mailbox;
use crate::thread::poller;

/// An open device. Dropping it closes the device, and waits until it is closed.
#[derive(Debug)]
pub(crate) struct Context {
    mailbox: Arc<Mailbox>,
    thread: Option<JoinHandle<()>>,
}

impl Context {
    /// Starts the thread. It checks doorbells if it is given `registers`.
    ///
    /// # Errors
    /// `EAGAIN`: the system has no room for another thread.
    pub(crate) fn open(settings: &'static Settings, registers: Option<Registers>) -> Result<Self, Errno> {
        let mailbox = Arc::new(Mailbox::default());
        let thread = poller::spawn(Arc::clone(&mailbox), settings, registers)
            .map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EAGAIN)))?;
        Ok(Self { mailbox, thread: Some(thread) })
    }
}

impl Execute for Context {
    unsafe fn execute(&self, call: Call) -> Result<(), Errno> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.mailbox.execute(call) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.mailbox.close();
        if let Some(thread) = self.thread.take() {
            // The thread catches its own panics.
            let _ = thread.join();
        }
    }
}
