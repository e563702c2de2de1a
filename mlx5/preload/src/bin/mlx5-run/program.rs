//! The file of the program: whether the loader will load the library into it.

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::getxattr;
use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};

/// Set-user-ID and set-group-ID bits.
const SET_ID: u32 = 0o6000;
/// Number of the program header that names the loader (`PT_INTERP`).
const INTERPRETER: u32 = 3;

/// Returns the file of a program, as execvp(3) finds it.
fn find(program: &OsStr) -> Option<PathBuf> {
    let is_program =
        |path: &PathBuf| fs::metadata(path).is_ok_and(|of| of.is_file() && of.mode() & 0o111 != 0);
    if program.as_bytes().contains(&b'/') {
        return Some(program.into()).filter(is_program);
    }
    env::split_paths(&env::var_os("PATH")?)
        .map(|dir| dir.join(program))
        .find(is_program)
}

/// Returns a warning if the program is linked statically.
///
/// # Errors
/// The program gets more rights than its user has, so the loader would ignore `LD_PRELOAD`, in the
/// program and in its children.
pub(crate) fn check(program: &OsStr) -> Result<Option<String>, String> {
    find(program).map_or(Ok(None), |path| judge(&path, geteuid().is_root()))
}

fn judge(path: &Path, is_root: bool) -> Result<Option<String>, String> {
    let name = path.display();
    let mode = fs::metadata(path).map_or(0, |of| of.mode());
    // No value is written, because its length is 0.
    let has_capabilities =
        getxattr(path, "security.capability", &mut [0; 0][..]).is_ok_and(|len| len > 0);
    for (gets, what) in [
        (mode & SET_ID != 0, "is setuid or setgid (chmod ug-s)"),
        (has_capabilities, "has capabilities (setcap -r)"),
    ] {
        if gets && !is_root {
            return Err(format!(
                "{name} {what}, so the loader ignores LD_PRELOAD and it would see no device: run a copy without these rights"
            ));
        }
    }
    Ok(is_static(path).unwrap_or(false).then(|| {
        format!(
            "{name} is linked statically, so it does not see the device; programs that it starts do"
        )
    }))
}

/// Returns whether an ELF file of 64 bits names no loader. `None` if the file is no such ELF file.
fn is_static(path: &Path) -> Option<bool> {
    let mut bytes = vec![0; 4096];
    let len = File::open(path).ok()?.read(&mut bytes).ok()?;
    let bytes = &bytes[..len];
    let number = |at: usize| {
        bytes
            .get(at..at + 2)
            .map(|b| u16::from_ne_bytes([b[0], b[1]]))
    };
    let is_elf = bytes.starts_with(b"\x7fELF\x02");
    // `e_phoff`, `e_phentsize` and `e_phnum`; `p_type` is the first word of a program header.
    let (start, size, count) = (number(32)?, number(54)?, number(56)?);
    let mut types = (0..count).map(|nth| number(usize::from(start) + usize::from(nth * size)));
    is_elf.then(|| !types.any(|kind| kind.is_some_and(|kind| u32::from(kind) == INTERPRETER)))
}

/// Raises the limit of descriptors to the hard limit: the library needs descriptors for each
/// connection, but with a kernel a connection needs none.
pub(crate) fn raise_descriptors() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: maximum,
        maximum,
    };
    // The limit stays if it cannot be raised.
    let _ = setrlimit(Resource::Nofile, raised);
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_program_into_which_the_library_is_not_loaded_is_refused_or_said_to_be_static() {
        let dir = env::temp_dir().join(format!("mlx5-run-program-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let path = dir.join("program");
        fs::copy(find(OsStr::new("true")).unwrap(), &path).unwrap();
        assert_eq!(judge(&path, false), Ok(None));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o4755)).unwrap();
        assert!(judge(&path, false).unwrap_err().contains("is setuid"));
        assert_eq!(judge(&path, true), Ok(None), "root gets no more rights");

        let script = dir.join("script");
        fs::write(&script, "#!/bin/sh").unwrap();
        assert_eq!(judge(&script, false), Ok(None));
        // A header of a file without program headers.
        let mut elf = [0; 64];
        elf[..5].copy_from_slice(b"\x7fELF\x02");
        fs::write(&script, elf).unwrap();
        let warning = judge(&script, false).unwrap().unwrap();
        assert!(warning.contains("statically"), "{warning}");
        assert!(find(OsStr::new("no-such-program")).is_none());
        fs::remove_dir_all(dir).unwrap();
    }
}
