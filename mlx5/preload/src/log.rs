//! The log: one line per write(2), to a file that is opened for each line, so that a program which closes descriptors it does not know
//! loses nothing.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Write;

use crate::settings::{LogTarget, Settings};

/// A line, whatever was asked for: without a log it goes to standard error.
pub(crate) fn error(settings: &Settings, line: fmt::Arguments<'_>) {
    write(settings.log.as_ref().unwrap_or(&LogTarget::StandardError), line);
}

/// A line, if there is a log.
pub(crate) fn refused(settings: &Settings, line: fmt::Arguments<'_>) {
    if let Some(target) = &settings.log {
        write(target, line);
    }
}

/// A line about a command that succeeded, if those are asked for.
pub(crate) fn command(settings: &Settings, line: fmt::Arguments<'_>) {
    if settings.log_commands {
        refused(settings, line);
    }
}

fn write(target: &LogTarget, line: fmt::Arguments<'_>) {
    let line = format!("mlx5[{}] {line}\n", std::process::id());
    // There is nobody to tell that a log cannot be written.
    let _ = match target {
        LogTarget::StandardError => std::io::stderr().write_all(line.as_bytes()),
        LogTarget::File(path) => {
            OpenOptions::new().append(true).create(true).open(path).and_then(|mut file| file.write_all(line.as_bytes()))
        }
    };
}
