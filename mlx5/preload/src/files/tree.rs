//! Paths of `/sys` that lead into the launcher's tree.
//!
//! libibverbs reads the tree because of `SYSFS_PATH`. Other programs read `/sys/class/infiniband`
//! itself. So a call of the C library that gets such a path continues with the path in the tree.

use std::ffi::{CStr, CString, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::options::config::PCI_BUS;
use crate::options::settings;
use crate::system::sys;

const SYS: &[u8] = b"/sys";

/// The class directories: `infiniband`, `infiniband_verbs`, and the directories that the tree does
/// not have, such as `infiniband_mad`.
const CLASSES: &[u8] = b"/class/infiniband";

/// The texts before the bus number in those paths of the tree that contain the number of the bus.
const BEFORE_BUS: [&[u8]; 3] = [b"/devices/pci", b"/bus/pci/devices/", b"/class/pci_bus/"];

/// Returns the path in the tree that replaces `path`; `None` if no path does. A relative `path`
/// begins at the directory `dir`.
///
/// # Safety
/// `path` is null or a string.
pub(crate) unsafe fn find(dir: c_int, path: *const c_char) -> Option<CString> {
    if path.is_null() {
        return None;
    }
    // SAFETY: guaranteed by the caller.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    // A relative path may lead into the tree only if it contains a name that only the tree has.
    let may_be = if path.first() == Some(&b'/') {
        path.starts_with(SYS)
    } else {
        has(path, b"infiniband") || has(path, PCI_BUS.as_bytes())
    };
    if may_be {
        settings::get().and_then(|settings| translate(&settings.tree, &absolute(dir, path)?))
    } else {
        None
    }
}

fn has(path: &[u8], name: &[u8]) -> bool {
    path.windows(name.len()).any(|part| part == name)
}

#[cold]
fn absolute(dir: c_int, path: &[u8]) -> Option<Vec<u8>> {
    if path.first() == Some(&b'/') {
        return Some(path.to_vec());
    }
    let mut whole = sys::directory(dir).ok()?;
    if whole.last() != Some(&b'/') {
        whole.push(b'/');
    }
    whole.extend_from_slice(path);
    Some(whole)
}

#[cold]
fn translate(tree: &Path, path: &[u8]) -> Option<CString> {
    let below = path.strip_prefix(SYS)?;
    let names_bus = |before: &&[u8]| {
        below
            .strip_prefix(*before)
            .is_some_and(|rest| rest.starts_with(PCI_BUS.as_bytes()))
    };
    if below.starts_with(CLASSES) || BEFORE_BUS.iter().any(names_bus) {
        CString::new([tree.as_os_str().as_bytes(), below].concat()).ok()
    } else {
        None
    }
}

/// Returns the path of `/sys` for a path in the tree, as a program gets it from `realpath(3)`.
pub(crate) fn name(path: &CStr) -> Option<CString> {
    let below = path
        .to_bytes()
        .strip_prefix(settings::get()?.tree.as_os_str().as_bytes())?;
    CString::new([SYS, below].concat()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(dir: c_int, path: &str) -> Option<String> {
        translate(Path::new("/t"), &absolute(dir, path.as_bytes())?)
            .map(|path| path.into_string().unwrap())
    }

    #[test]
    fn paths_of_the_classes_and_of_the_pci_function_lead_into_the_tree_and_no_others() {
        for below in [
            "/class/infiniband",
            "/class/infiniband/mlx5_0/../..",
            "/class/infiniband_verbs/uverbs0",
            "/devices/pci7357:00/7357:00:00.0/vendor",
            "/bus/pci/devices/7357:00:00.0",
            "/class/pci_bus/7357:00/../../7357:00:00.0",
        ] {
            assert_eq!(
                translated(libc::AT_FDCWD, &format!("/sys{below}")),
                Some(format!("/t{below}"))
            );
        }
        for other in [
            "/class/infiniband",
            "/sys",
            "/sys/class",
            "/sys/class/net/lo",
            "/sys/devices/pci0000:00/0000:03:00.0",
            "/system",
        ] {
            assert_eq!(translated(libc::AT_FDCWD, other), None);
        }
    }

    /// hwloc opens the root, and everything else relative to it.
    #[test]
    fn relative_paths_begin_at_their_directory() {
        let root = std::fs::File::open("/").unwrap();
        let root = std::os::fd::AsRawFd::as_raw_fd(&root);
        assert_eq!(
            translated(root, "sys/class/infiniband"),
            Some("/t/class/infiniband".to_owned())
        );
        assert_eq!(translated(root, "class/infiniband"), None);
        assert_eq!(translated(libc::AT_FDCWD, "sys/class/infiniband"), None);
        assert_eq!(
            translated(-2, "sys/class/infiniband"),
            None,
            "no such descriptor"
        );
    }
}
