//! The programs whose instructions `scripts/instructions` counts. A program does one of its
//! operations a given number of times, in one thread.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use crate::report::say;

/// An operation whose instructions are counted.
pub struct Operation {
    /// The first word that the program is started with.
    pub name: &'static str,
    /// Maximum number of instructions of one operation; `None` if there is no bound.
    pub bound: Option<u32>,
    /// Numbers of operations of the script's two runs, whose difference counts.
    pub counts: (u64, u64),
    /// The part of the program that the script counts: `all`; `hca`, only the software HCA;
    /// `nohca`, all but the software HCA; `in NAME`, only the function NAME.
    /// scripts/measuring/instructions.py has the other forms.
    pub collect: &'static str,
    /// Description of the operation.
    pub what: &'static str,
    /// Does the operation the given number of times.
    pub run: fn(u64),
}

impl fmt::Debug for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Operation")
            .field("name", &self.name)
            .field("collect", &self.collect)
            .finish_non_exhaustive()
    }
}

/// Runs this process: lists `operations`, or does one. Reports wrong arguments on standard error.
pub fn main(operations: &[Operation]) -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let Some(text) = answer(operations, &words) else {
        say(&format!(
            "instructions: use --list, or one of its operations and how many, not {args:?}"
        ));
        return ExitCode::FAILURE;
    };
    match io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Does what `args` ask for. Returns the text to print; `None` for arguments that ask for nothing.
fn answer(operations: &[Operation], args: &[&str]) -> Option<String> {
    match args {
        ["--list"] => Some(operations.iter().map(line).collect()),
        // `cargo bench` passes this argument to every benchmark, `cargo test --benches` none.
        [] | [.., "--bench"] => Some("instructions: counted by scripts/instructions\n".to_owned()),
        [name, count] => {
            let operation = operations
                .iter()
                .find(|operation| operation.name == *name)?;
            (operation.run)(count.parse().ok()?);
            Some(String::new())
        }
        _ => None,
    }
}

/// Formats an operation as the script reads it.
fn line(operation: &Operation) -> String {
    let Operation {
        name,
        bound,
        counts: (first, second),
        collect,
        what,
        ..
    } = operation;
    let bound = bound.map_or("-".to_owned(), |bound| bound.to_string());
    format!("{name}|{bound}|{first}|{second}|{collect}|{what}\n")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const OPERATIONS: &[Operation] = &[
        Operation {
            name: "one",
            bound: Some(7),
            counts: (1, 2),
            collect: "all",
            what: "the first",
            run: |_| (),
        },
        Operation {
            name: "two",
            bound: None,
            counts: (3, 4),
            collect: "in f",
            what: "the second",
            run: |count| WORK.store(count, Ordering::Relaxed),
        },
    ];

    static WORK: AtomicU64 = AtomicU64::new(0);

    fn text(args: &[&str]) -> Option<String> {
        answer(OPERATIONS, args)
    }

    #[test]
    fn operations_are_listed_as_the_script_reads_them() {
        assert_eq!(
            text(&["--list"]).unwrap(),
            "one|7|1|2|all|the first\ntwo|-|3|4|in f|the second\n"
        );
    }

    #[test]
    fn cargo_bench_and_test_do_no_work() {
        for args in [&[][..], &["--bench"], &["--test", "--bench"]] {
            assert!(text(args).is_some(), "{args:?}");
        }
    }

    #[test]
    fn work_is_found_by_name_and_anything_else_refused() {
        assert_eq!(text(&["two", "9"]).as_deref(), Some(""));
        assert_eq!(WORK.load(Ordering::Relaxed), 9);
        for args in [
            &["three", "9"][..],
            &["two"],
            &["two", "x"],
            &["two", "9", "9"],
        ] {
            assert!(text(args).is_none(), "{args:?}");
        }
    }
}
