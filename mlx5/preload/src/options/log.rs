//! The log: one line per write(2), to a file that is opened for each line, so that no line is lost
//! when a program closes unknown descriptors.

use std::fmt;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use crate::options::errno::Errno;
use crate::options::settings::Settings;

/// The reason of `EMFILE` and `ENFILE`, and the remedy.
pub(crate) const NO_FILE: &str =
    "the process has no descriptor left: raise its hard limit (`ulimit -n`)";

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
/// (`falls_back`), the line is logged only if successful commands are logged too. The lack of
/// descriptors is logged in any case, because the program may print any other error for it.
pub(crate) fn answered(
    settings: &Settings,
    what: fmt::Arguments<'_>,
    errno: Errno,
    falls_back: bool,
) {
    match errno.0 {
        _ if falls_back => command(settings, format_args!("{what} fell back: {errno}")),
        libc::EMFILE | libc::ENFILE => error(settings, format_args!("{what} refused: {NO_FILE}")),
        _ => refused(settings, format_args!("{what} refused: {errno}")),
    }
}

/// Logs a line about a command that succeeded, or whose caller uses another way, if such lines are
/// logged.
pub(crate) fn command(settings: &Settings, line: fmt::Arguments<'_>) {
    if settings.log_commands {
        refused(settings, line);
    }
}

/// Writes a line to a file. Writes it to standard error for `-`, or if the file cannot be written:
/// the process may have no free descriptor.
fn write(target: &Path, line: fmt::Arguments<'_>) {
    let line = format!("mlx5[{}] {line}\n", std::process::id());
    let is_file = target != Path::new("-");
    let file = is_file.then(|| OpenOptions::new().append(true).create(true).open(target));
    let is_written = file.is_some_and(|file| {
        file.and_then(|mut file| file.write_all(line.as_bytes()))
            .is_ok()
    });
    if !is_written {
        // A failure to write to standard error cannot be reported anywhere.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}
