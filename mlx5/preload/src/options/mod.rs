//! The launcher's options, and the log. The launcher shares all modules except `log` and
//! `settings`.

pub(crate) mod config;
pub(crate) mod errno;
pub(crate) mod faults;
pub(crate) mod limits;
pub(crate) mod log;
pub(crate) mod names;
pub(crate) mod settings;
