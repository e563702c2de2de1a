//! The directory of one run. It is locked while the run lives; later runs remove directories that
//! are not locked.

use std::ffi::{CString, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

/// Prefix of the names of directories that are locked, or that remain from killed runs.
const PREFIX: &str = "mlx5-run-";
/// Name of a file in each of these directories. Other directories, whose names may begin with the
/// prefix too, do not have this file.
const MARK: &str = ".private-directory-of-mlx5-run";

/// A directory that only this user can access. The drop removes the directory.
#[derive(Debug)]
pub(crate) struct PrivateDir {
    path: PathBuf,
    _lock: File,
}

impl PrivateDir {
    /// Makes a new directory, and removes the directories of killed runs.
    pub(crate) fn make(parent: &Path) -> io::Result<Self> {
        sweep(parent)?;
        // `sweep` ignores directories of this name, so the directory is locked before another run
        // can take it for the directory of a killed run.
        let unlocked = make_dir(&parent.join("mlx5-new-XXXXXX"))?;
        let lock = File::open(&unlocked)?;
        try_lock(&lock)?;
        File::create(unlocked.join(MARK))?;
        let name = unlocked.to_string_lossy().replace("mlx5-new-", PREFIX);
        fs::rename(&unlocked, &name)?;
        Ok(Self {
            path: name.into(),
            _lock: lock,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        // The removal fails only if the user has already removed the directory.
        let _ = fs::remove_dir_all(&self.path);
    }
}

fn make_dir(template: &Path) -> io::Result<PathBuf> {
    let mut path = CString::new(template.as_os_str().as_bytes())?.into_bytes_with_nul();
    // SAFETY: the pointer is to a string of this function; `mkdtemp` replaces its last six X.
    if unsafe { libc::mkdtemp(path.as_mut_ptr().cast()) }.is_null() {
        return Err(io::Error::last_os_error());
    }
    path.pop();
    Ok(OsString::from_vec(path).into())
}

fn try_lock(dir: &File) -> io::Result<()> {
    Ok(flock(dir, FlockOperation::NonBlockingLockExclusive)?)
}

/// Removes marked directories whose runs were killed. Keeps directories that this user cannot open.
/// If a directory cannot be removed, the next run tries again.
fn sweep(parent: &Path) -> io::Result<()> {
    for entry in fs::read_dir(parent)?.flatten() {
        let is_of_a_run = entry.file_name().as_bytes().starts_with(PREFIX.as_bytes())
            && entry.file_type().is_ok_and(|kind| kind.is_dir())
            && entry.path().join(MARK).symlink_metadata().is_ok();
        if is_of_a_run && File::open(entry.path()).is_ok_and(|dir| try_lock(&dir).is_ok()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_directory_is_private_and_goes_with_its_run_or_with_the_next_one() {
        let parent = make_dir(&std::env::temp_dir().join("mlx5-test-XXXXXX")).unwrap();
        let one = PrivateDir::make(&parent).unwrap();
        let other = PrivateDir::make(&parent).unwrap();
        assert_ne!(one.path(), other.path());
        assert_eq!(
            fs::metadata(one.path()).unwrap().permissions().mode() & 0o777,
            0o700
        );

        let path = one.path().to_owned();
        drop(one);
        assert!(!path.exists() && other.path().exists());

        let left_over = parent.join("mlx5-run-killed");
        fs::create_dir(&left_over).unwrap();
        fs::write(left_over.join("file"), "").unwrap();
        drop(PrivateDir::make(&parent).unwrap());
        assert!(
            left_over.exists(),
            "a user's, such as `--fabric /tmp/mlx5-run-a`"
        );
        fs::write(left_over.join(MARK), "").unwrap();
        drop(PrivateDir::make(&parent).unwrap());
        assert!(!left_over.exists() && other.path().exists());
        drop(other);
        fs::remove_dir(&parent).unwrap();
    }
}
