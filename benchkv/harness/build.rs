//! Records the commit from which the binaries were built, without running `git`.
//!
//! Reads `.git/HEAD` of the checkout that contains this crate. Outside a checkout (a source
//! archive, a linked worktree) nothing is set, and results have `unknown`.

use std::path::Path;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let Ok(manifest) = env::var("CARGO_MANIFEST_DIR") else {
        return;
    };
    let Some(git) = Path::new(&manifest)
        .ancestors()
        .map(|dir| dir.join(".git"))
        .find(|git| git.join("HEAD").is_file())
    else {
        return;
    };
    println!("cargo::rerun-if-changed={}", git.join("HEAD").display());
    if let Some(commit) = head_commit(&git) {
        println!("cargo::rustc-env=HARNESS_GIT_COMMIT={commit}");
    }
}

/// Returns the commit of `HEAD`, following one symbolic reference, loose or packed.
fn head_commit(git: &Path) -> Option<String> {
    let head = fs::read_to_string(git.join("HEAD")).ok()?;
    let Some(reference) = head.trim().strip_prefix("ref: ") else {
        return is_commit(head.trim()).then(|| head.trim().to_owned());
    };
    let loose = git.join(reference);
    if let Ok(commit) = fs::read_to_string(&loose) {
        println!("cargo::rerun-if-changed={}", loose.display());
        return is_commit(commit.trim()).then(|| commit.trim().to_owned());
    }
    let packed = fs::read_to_string(git.join("packed-refs")).ok()?;
    packed
        .lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(commit, name)| *name == reference && is_commit(commit))
        .map(|(commit, _)| commit.to_owned())
}

fn is_commit(text: &str) -> bool {
    text.len() >= 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}
