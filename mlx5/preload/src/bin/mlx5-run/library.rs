//! The libraries that the program needs: the preloaded one, and the vendor's.

use std::ffi::{CStr, OsString};
use std::path::{Path, PathBuf};
use std::{env, fs};

const NAME: &str = "libmlx5_preload.so";

/// The library itself, which `build.rs` embeds in release builds; empty in other builds.
static INSIDE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libmlx5_preload.so"));

/// Returns the path of the library. Where this program was built, the library is next to the
/// program; in a target directory of Cargo, the copy in `deps` is the latest build. Elsewhere the
/// embedded library is written into `dir`, which belongs to this run.
pub(crate) fn find(dir: &Path) -> Result<PathBuf, String> {
    let program = env::current_exe().map_err(|error| format!("where this program is: {error}"))?;
    let beside = program.parent().unwrap_or(Path::new("/"));
    if let Some(path) = [beside.join("deps").join(NAME), beside.join(NAME)]
        .into_iter()
        .find(|path| path.exists())
    {
        return Ok(path);
    }
    if INSIDE.is_empty() {
        return Err(format!(
            "{NAME} is not in {}, and only a release build has it inside: cargo build --release -p mlx5-preload",
            beside.display()
        ));
    }
    let path = dir.join(NAME);
    fs::write(&path, INSIDE).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(path)
}

/// Returns `LD_PRELOAD` with the library before its previous value.
pub(crate) fn preload(library: &Path) -> OsString {
    let old = env::var_os("LD_PRELOAD").unwrap_or_default();
    let others =
        env::split_paths(&old).filter(|other| other != library && !other.as_os_str().is_empty());
    // The join fails only if the library's path has a colon. The loader does not find such a path.
    env::join_paths([library.to_owned()].into_iter().chain(others))
        .unwrap_or_else(|_| library.into())
}

pub(crate) fn check_driver() -> Result<(), String> {
    is_loadable(
        c"libibverbs.so.1",
        "libibverbs1 (Debian), libibverbs (Fedora)",
    )?;
    is_loadable(
        c"libmlx5.so.1",
        "ibverbs-providers (Debian), libibverbs (Fedora)",
    )
}

fn is_loadable(name: &CStr, package: &str) -> Result<(), String> {
    // SAFETY: the name is a string. The library's constructors are constructors of rdma-core, which
    // the program will load too.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL) };
    if library.is_null() {
        return Err(format!(
            "{} cannot be loaded; it is in package {package}",
            name.to_string_lossy()
        ));
    }
    Ok(())
}
