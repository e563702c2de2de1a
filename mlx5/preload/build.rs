//! Embeds the library in the launcher, in release builds: cargo installs programs, but no
//! libraries.

use std::error::Error;
use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

/// Environment variable that is set for the inner cargo run, which builds the library.
const INNER: &str = "MLX5_PRELOAD_BUILDS_ITS_LIBRARY";
const NAME: &str = "libmlx5_preload.so";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    let var = |name| env::var(name).map_err(|error| format!("{name}: {error}"));
    let out = PathBuf::from(var("OUT_DIR")?);
    if var("PROFILE")? != "release" || env::var_os(INNER).is_some() {
        // A debug build of the launcher runs where it was built, with the library in the same
        // directory: it embeds an empty file.
        return Ok(fs::write(out.join(NAME), "")?);
    }
    let manifest = PathBuf::from(var("CARGO_MANIFEST_DIR")?);
    // Cargo runs this script again when a source of this package changes and, in a clone of the
    // repository, when a source of a dependency changes.
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
    // The target directory of the inner build is large, and the next inner build makes a new one.
    Ok(fs::remove_dir_all(built)?)
}
