//! The log: one line per write(2), to a file that is opened for each line, so that no line is lost
//! when a program closes unknown descriptors.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use crate::options::errno::Errno;
use crate::options::settings::Settings;

/// Logs a line in any case: without a log it is written to standard error.
pub(crate) fn error(settings: &Settings, line: fmt::Arguments<'_>) {
    write(settings.log.as_deref().unwrap_or(Path::new("-")), line);
}

/// Logs a line, if there is a log.
pub(crate) fn refused(settings: &Settings, line: fmt::Arguments<'_>) {
    if let Some(target) = &settings.log {
        write(target, line);
    }
}

/// Logs the refusal of a command or method. If the program's libraries then use another way
/// (`falls_back`), the line is logged only if successful commands are logged too.
pub(crate) fn answered(
    settings: &Settings,
    what: fmt::Arguments<'_>,
    errno: Errno,
    falls_back: bool,
) {
    if falls_back {
        command(settings, format_args!("{what} fell back: {errno}"));
    } else {
        refused(settings, format_args!("{what} refused: {errno}"));
    }
}

/// Logs a line about a successful command, if those are logged.
pub(crate) fn command(settings: &Settings, line: fmt::Arguments<'_>) {
    if settings.log_commands {
        refused(settings, line);
    }
}

/// Writes a line to a file, or for `-` to standard error.
fn write(target: &Path, line: fmt::Arguments<'_>) {
    let line = format!("mlx5[{}] {line}\n", std::process::id());
    // A failure to write the log cannot be reported anywhere.
    let _ = if target == Path::new("-") {
        std::io::stderr().write_all(line.as_bytes())
    } else {
        let file = OpenOptions::new().append(true).create(true).open(target);
        file.and_then(|mut file| file.write_all(line.as_bytes()))
    };
}
