//! The common part of programs that measure two processes: their start, their exit statuses, the
//! output.

use std::fmt::Display;
use std::process::ExitCode;
use std::time::Duration;

use serde::Serialize;

use crate::Failure;
use crate::launch::exchange::{Exchange, SocketExchange};
use crate::launch::launcher::{EXIT_FOLLOWS, Launch};
use crate::launch::role::role;
use crate::report::{JsonSink, say, to_stdout};

/// Number of processes: rank 0 calls, rank 1 answers.
pub const RANKS: usize = 2;
/// Exit status for options that cannot be honoured; clap uses it for options that it refuses.
pub const EXIT_OPTIONS: u8 = 2;
/// Exit status for a program that failed, and for a result that could not be written.
pub const EXIT_FAILED: u8 = 1;
/// Exit status for a result that is not sound.
pub const EXIT_UNSOUND: u8 = 3;
/// Maximum time for the processes to end by themselves when the job has failed.
const GRACE: Duration = Duration::from_secs(5);

/// A program, by name.
#[derive(Debug, Clone, Copy)]
pub struct Program(pub &'static str);

impl Program {
    /// Reports an error on standard error, which may be closed. Returns the exit status `code`.
    pub fn fail(self, code: u8, error: &dyn Display) -> ExitCode {
        say(&format!("{}: {error}", self.0));
        ExitCode::from(code)
    }

    /// Runs `rank` with its exchange if this process is a rank. Returns `None` in a process that a
    /// user started. If `rank` fails, and `follows` returns that another rank's failure is the
    /// cause, the exit status is [`EXIT_FOLLOWS`].
    pub fn child(
        self,
        rank: impl FnOnce(&mut SocketExchange) -> Result<ExitCode, Failure>,
        follows: impl FnOnce(&Failure) -> bool,
    ) -> Option<ExitCode> {
        match role() {
            Ok(None) => None,
            Ok(Some(mut exchange)) => Some(rank(&mut exchange).unwrap_or_else(|error| {
                let code = if follows(&error) {
                    EXIT_FOLLOWS
                } else {
                    EXIT_FAILED
                };
                self.fail(code, &format!("rank {}: {error}", exchange.rank()))
            })),
            Err(error) => Some(self.fail(EXIT_FAILED, &error)),
        }
    }

    /// Runs the launcher: prints the `plan`, and starts both ranks with the arguments of this
    /// process.
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

    /// Prints the table, and writes the document to the destination `json`. Returns the exit
    /// status: [`EXIT_UNSOUND`] if the result has a `defect`, else [`EXIT_FAILED`] if it could not
    /// be written.
    pub fn show(
        self,
        result: &(impl Display + Serialize),
        json: Option<&JsonSink>,
        defect: Option<String>,
    ) -> ExitCode {
        let unwritten = print(result, json).into_iter();
        let defect =
            defect.map(|defect| (EXIT_UNSOUND, format!("the result is unsound: {defect}")));
        self.fail_all(
            defect
                .into_iter()
                .chain(unwritten.map(|why| (EXIT_FAILED, why))),
        )
    }

    /// Reports all of these errors. Returns the exit status of the first; success if there is none.
    pub fn fail_all(self, errors: impl Iterator<Item = (u8, String)>) -> ExitCode {
        let codes = errors.map(|(code, error)| self.fail(code, &error));
        codes.reduce(|first, _| first).unwrap_or(ExitCode::SUCCESS)
    }
}

/// Writes the table to standard output, or to standard error if standard output is for the
/// document. Then writes the document to its destination, which may be a pipe whose reader is slow.
/// Each of the two is written even if the other fails. Returns the texts of the failures.
pub fn print(result: &(impl Display + Serialize), json: Option<&JsonSink>) -> Vec<String> {
    let shown = if json == Some(&JsonSink::Stdout) {
        say(&result.to_string());
        Ok(())
    } else {
        to_stdout(format!("{result}\n").as_bytes())
            .map_err(|error| format!("the table cannot be written to standard output: {error}"))
    };
    let written = json.map_or(Ok(()), |sink| sink.write(result));
    let written = written.map_err(|error| error.to_string());
    [written, shown]
        .into_iter()
        .filter_map(Result::err)
        .collect()
}
