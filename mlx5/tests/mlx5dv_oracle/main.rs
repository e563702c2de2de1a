//! Compares the crate's formats with those of `infiniband/mlx5dv.h`: a C program (`oracle.c`) compiled here with the system's
//! compiler answers with the header's own structs and inline functions.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, reason = "a test")]

mod constants;
mod cqes;
mod segments;
mod verbs;
mod wqes;

use std::fmt::Write as _;
use std::fs::File;
use std::path::PathBuf;
use std::process::Command;

/// The compiled oracle; which of the header's variants it is to use.
struct Oracle {
    program: PathBuf,
    variant: &'static str,
}

/// Questions with what the crate says to each; [`Oracle::compare`] asks them.
#[derive(Default)]
struct Questions {
    text: String,
    ours: Vec<Vec<u8>>,
}

impl Questions {
    fn ask(&mut self, question: std::fmt::Arguments<'_>, ours: &[u8]) {
        writeln!(self.text, "{question}").unwrap();
        self.ours.push(ours.to_vec());
    }
}

impl Oracle {
    fn compile(name: &str, variant: &'static str) -> Self {
        let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/mlx5dv_oracle/oracle.c");
        let program = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("oracle-{name}-{variant}"));
        // Included by the source; each program has its own, as they are compiled side by side.
        let include = program.with_extension("d");
        std::fs::create_dir_all(&include).unwrap();
        std::fs::write(include.join("verbs.inc"), verbs::questions()).unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"]).arg("-I").arg(include);
        if variant == "x86" {
            cc.arg("-mssse3");
        }
        let status = cc.arg("-o").arg(&program).arg(source).status().expect("cc");
        assert!(status.success(), "the oracle needs infiniband/mlx5dv.h (package libibverbs-dev)");
        Self { program, variant }
    }

    /// One answer per line of `questions`.
    fn run(&self, questions: &str) -> Vec<String> {
        let file = self.program.with_extension("questions");
        std::fs::write(&file, questions).unwrap();
        let output = Command::new(&self.program).arg(self.variant).stdin(File::open(&file).unwrap()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    /// Asks all and compares byte by byte; bytes the header leaves unset must be 0. Returns how many answers were compared.
    fn compare(&self, questions: &Questions) -> usize {
        let answers = self.run(&questions.text);
        assert_eq!(answers.len(), questions.ours.len());
        let mut wrong = Vec::new();
        for ((question, answer), ours) in questions.text.lines().zip(&answers).zip(&questions.ours) {
            let text: String = ours.iter().map(|byte| format!("{byte:02x}")).collect();
            let theirs = answer.replace('.', "0");
            if text != theirs {
                wrong.push(format!("{question}\n  mlx5dv.h {answer}\n  ours     {text}"));
            }
        }
        assert!(wrong.is_empty(), "{} of {} differ; first:\n{}", wrong.len(), answers.len(), wrong[..wrong.len().min(5)].join("\n"));
        answers.len()
    }
}

/// The header's plain functions, and its SSE ones where there are such.
fn variants(name: &str) -> Vec<Oracle> {
    let mut oracles = vec![Oracle::compile(name, "plain")];
    if cfg!(target_arch = "x86_64") {
        oracles.push(Oracle::compile(name, "x86"));
    }
    oracles
}

fn report(subject: &str, comparisons: usize, at_least: usize) {
    assert!(comparisons >= at_least, "{comparisons} comparisons, of {at_least} at least");
    println!("{subject}: {comparisons} comparisons with infiniband/mlx5dv.h, 0 differences");
}

/// xorshift64*: the same numbers in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}
