//! Embeds the library in the launcher, in release builds: cargo installs programs, but no
//! libraries.

use std::error::Error;
use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

/// Set for the cargo run that builds the library.
const INNER: &str = "MLX5_PRELOAD_BUILDS_ITS_LIBRARY";
const NAME: &str = "libmlx5_preload.so";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    let var = |name| env::var(name).map_err(|error| format!("{name}: {error}"));
    let out = PathBuf::from(var("OUT_DIR")?);
    if var("PROFILE")? != "release" || env::var_os(INNER).is_some() {
        // A debug build runs where it was built, with the library in the same directory.
        return Ok(fs::write(out.join(NAME), "")?);
    }
    let manifest = PathBuf::from(var("CARGO_MANIFEST_DIR")?);
    // Cargo rebuilds this package when its sources change, and in a clone when the sources of its
    // dependencies change.
    for source in [
        "src",
        "Cargo.toml",
        "../hca/src",
        "../wire/src",
        "../../copyrpc/shm/src",
        "../../copyrpc/calls/src",
    ] {
        let source = manifest.join(source);
        if source.exists() {
            println!("cargo::rerun-if-changed={}", source.display());
        }
    }
    let (target, built) = (var("TARGET")?, out.join("library"));
    let mut cargo = Command::new(var("CARGO")?);
    cargo
        .args([
            "build",
            "--quiet",
            "--release",
            "--locked",
            "--lib",
            "--target",
            &target,
        ])
        .arg("--target-dir")
        .arg(&built);
    cargo
        .arg("--manifest-path")
        .arg(manifest.join("Cargo.toml"))
        .env(INNER, "1");
    if !cargo.status()?.success() {
        return Err(format!("{cargo:?} failed").into());
    }
    fs::copy(
        built.join(target).join("release").join(NAME),
        out.join(NAME),
    )?;
    // The directory is large, and not needed before its sources change.
    Ok(fs::remove_dir_all(built)?)
}
