//! The frame of programs that measure two processes: their start, their exit statuses, the output.

use std::fmt::Display;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use crate::Failure;
use crate::report::{JsonSink, say};
use serde::Serialize;

use crate::launch::launcher::Launch;

/// Number of processes: rank 0 calls, rank 1 answers.
pub const RANKS: usize = 2;
/// Exit status for options that cannot be honoured; clap uses the same for options that it refuses.
pub const EXIT_OPTIONS: u8 = 2;
/// Exit status for a result that is not sound.
const EXIT_UNSOUND: u8 = 3;
/// Maximum time for the processes to end by themselves when the job has failed.
const GRACE: Duration = Duration::from_secs(5);

/// A program, by name.
#[derive(Debug, Clone, Copy)]
pub struct Program(pub &'static str);

impl Program {
    /// Reports an error on standard error. Returns the exit status. A closed standard error does
    /// not change it.
    pub fn fail(self, code: u8, error: &dyn Display) -> ExitCode {
        say(&format!("{}: {error}", self.0));
        ExitCode::from(code)
    }

    /// Runs the launcher: prints the `plan`, and starts both processes with its own arguments.
    pub fn launch(
        self,
        plan: &dyn Display,
        json: Option<&JsonSink>,
        time_limit: Duration,
    ) -> ExitCode {
        if let Err(error) = json.map_or(Ok(()), JsonSink::check) {
            return self.fail(EXIT_OPTIONS, &format!("--json: {error}"));
        }
        say(&plan.to_string());
        let args = std::env::args_os().skip(1).collect();
        match (Launch {
            ranks: RANKS,
            args,
            environment: Vec::new(),
            time_limit,
            grace: GRACE,
        })
        .run()
        {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => self.fail(error.exit_code(), &error),
        }
    }

    /// Prints the table, and writes the document where it was asked for; when that is standard
    /// output, the table makes room. Returns the exit status: a result with a `defect` is not
    /// sound.
    ///
    /// # Errors
    /// The output cannot be written.
    pub fn show(
        self,
        result: &(impl Display + Serialize),
        json: Option<&JsonSink>,
        defect: Option<String>,
    ) -> Result<ExitCode, Failure> {
        match json {
            Some(JsonSink::Stdout) => say(&result.to_string()),
            _ => writeln!(std::io::stdout(), "{result}")?,
        }
        json.map_or(Ok(()), |sink| sink.write(result))?;
        Ok(defect.map_or(ExitCode::SUCCESS, |defect| {
            self.fail(EXIT_UNSOUND, &format!("the result is unsound: {defect}"))
        }))
    }
}
