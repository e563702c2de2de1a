//! Compares the crate's constants and structs with the header `infiniband/mlx5dv.h`. A C program
//! (`oracle.c`), compiled here with the system's compiler, prints the header's values. The bytes of
//! WQEs and CQEs are compared with libmlx5 itself (`tests/libmlx5`).
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

mod constants;
mod verbs;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

/// Compiles the oracle, and returns its answer: values by name.
fn ask(question: &str) -> BTreeMap<String, u64> {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/mlx5dv_oracle/oracle.c");
    let program = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("oracle-{question}"));
    // `oracle.c` includes the file `verbs.inc`. Each program has its own copy of the file, because
    // the programs are compiled at the same time.
    let include = program.with_extension("d");
    std::fs::create_dir_all(&include).unwrap();
    std::fs::write(include.join("verbs.inc"), verbs::questions()).unwrap();
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"])
        .arg("-I")
        .arg(include)
        .arg("-o")
        .arg(&program)
        .arg(source);
    assert!(
        cc.status().expect("cc").success(),
        "the oracle needs infiniband/mlx5dv.h (package libibverbs-dev)"
    );
    let output = Command::new(&program).arg(question).output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let words: Vec<_> = std::str::from_utf8(&output.stdout)
        .unwrap()
        .split_whitespace()
        .collect();
    words
        .chunks(2)
        .map(|pair| {
            (
                pair[0].to_owned(),
                u64::from_str_radix(pair[1], 16).unwrap(),
            )
        })
        .collect()
}

fn report(subject: &str, comparisons: usize, at_least: usize) {
    assert!(
        comparisons >= at_least,
        "{comparisons} comparisons, of {at_least} at least"
    );
    println!("{subject}: {comparisons} comparisons with infiniband/mlx5dv.h, 0 differences");
}
