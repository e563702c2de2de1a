//! The path of a command from the program's thread to the thread that owns the HCA, and that thread.

pub(crate) mod context;
mod mailbox;
mod poller;
mod session;
