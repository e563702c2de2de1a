//! The memory limit of this process's control groups, in both versions of the kernel's interface.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the smallest memory limit among the control groups of this process and their parents: its bytes, and its file. `None`: no
/// limit can be seen from here.
#[must_use]
pub fn memory_limit() -> Option<(u64, PathBuf)> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    limit_of(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"))
}

/// Returns the limit from the kernel's lists of a process's groups, and of its mounts.
fn limit_of(groups: &str, mounts: &str) -> Option<(u64, PathBuf)> {
    let of_mount = |mount: &Mount| {
        let group = group_in(groups, mount)?;
        // A process in a namespace may be in a group that its mount does not show: then the top of the mount is the closest group.
        let below = Path::new(group).strip_prefix(mount.root).unwrap_or(Path::new(""));
        let dir = Path::new(mount.point).join(below);
        let files = dir.ancestors().take_while(|dir| dir.starts_with(mount.point)).map(|dir| dir.join(mount.file()));
        // `max`, in version 2, is not a number.
        files.filter_map(|file| Some((fs::read_to_string(&file).ok()?.trim().parse::<u64>().ok()?, file))).min()
    };
    mounts.lines().filter_map(Mount::parse).filter_map(|mount| of_mount(&mount)).min()
}

/// A mounted hierarchy of groups that limits memory.
struct Mount<'a> {
    /// The group at its top.
    root: &'a str,
    point: &'a str,
    is_unified: bool,
}

impl<'a> Mount<'a> {
    /// Parses a line of proc_pid_mountinfo(5). Returns `None` for other file systems.
    fn parse(line: &'a str) -> Option<Self> {
        let (place, kind) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let (root, point) = (place.next()?, place.next()?);
        let mut kind = kind.split(' ');
        let (name, options) = (kind.next()?, kind.nth(1)?);
        let is_unified = name == "cgroup2";
        let is_memory = is_unified || name == "cgroup" && options.split(',').any(|option| option == "memory");
        is_memory.then_some(Self { root, point, is_unified })
    }

    const fn file(&self) -> &'static str {
        if self.is_unified { "memory.max" } else { "memory.limit_in_bytes" }
    }
}

/// Returns the group of a process in a hierarchy: a line of proc_pid_cgroup(5), `NUMBER:CONTROLLERS:GROUP`; version 2 names no
/// controllers.
fn group_in<'a>(groups: &'a str, mount: &Mount) -> Option<&'a str> {
    let of_line = |line: &'a str| {
        let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
        let is_it = if mount.is_unified { controllers.is_empty() } else { controllers.split(',').any(|name| name == "memory") };
        is_it.then_some(group)
    };
    groups.lines().find_map(of_line)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory that stands in for a mount, with these files.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let top = std::env::temp_dir().join(format!("harness-cgroup-{}-{name}", std::process::id()));
            for (file, content) in files {
                let file = top.join(file);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, content).unwrap();
            }
            Self(top)
        }

        fn mount(&self, root: &str, kind: &str) -> String {
            format!("31 23 0:27 {root} {} rw,nosuid shared:9 - {kind}\n", self.0.display())
        }

        fn file(&self, name: &str) -> Option<PathBuf> {
            Some(self.0.join(name))
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const OTHERS: &str = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n40 23 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";

    #[test]
    fn the_smallest_limit_on_the_way_up_counts() {
        let tree = Tree::new("v2", &[("a/memory.max", "5000\n"), ("a/b/memory.max", "max\n"), ("a/b/c/memory.max", "7000\n")]);
        let mounts = OTHERS.to_owned() + &tree.mount("/", "cgroup2 cgroup2 rw");
        let limit = |group: &str| limit_of(&format!("1:cpu:/x\n0::{group}\n"), &mounts);
        assert_eq!(limit("/a/b/c"), Some((5000, tree.file("a/memory.max").unwrap())));
        assert_eq!(limit("/"), None, "the top has no limit");
    }

    #[test]
    fn version_1_says_it_in_a_hierarchy_of_its_own() {
        let files = [("memory.limit_in_bytes", "9223372036854771712\n"), ("job/memory.limit_in_bytes", "4096\n")];
        let tree = Tree::new("v1", &files);
        let mounts = OTHERS.to_owned() + &tree.mount("/", "cgroup memory rw,memory");
        let limit = |groups: &str| limit_of(groups, &mounts).map(|(bytes, _)| bytes);
        assert_eq!(limit("9:cpu:/other\n4:hugetlb,memory:/job\n0::/\n"), Some(4096));
        assert_eq!((limit("4:memory:/\n"), limit("4:cpu:/job\n")), (Some(9_223_372_036_854_771_712), None));
    }

    /// A container sees its own group at the top of the mount, and itself in it under its outside name, or under none.
    #[test]
    fn a_container_finds_the_limit_at_the_top_of_its_mount() {
        let tree = Tree::new("container", &[("memory.max", "4096\n"), ("inner/memory.max", "1024\n")]);
        let mounts = tree.mount("/docker/7f", "cgroup2 cgroup rw,nsdelegate");
        for (group, bytes) in [("/docker/7f", 4096), ("/docker/7f/inner", 1024), ("/../elsewhere", 4096), ("/", 4096)] {
            assert_eq!(limit_of(&format!("0::{group}\n"), &mounts).map(|(bytes, _)| bytes), Some(bytes), "{group}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_no_limit() {
        assert_eq!(limit_of("", ""), None);
        assert_eq!(limit_of("0::/x\nnonsense\n7:memory\n", "31 23 0:27 / /nonexistent rw - cgroup2 cgroup2 rw\n - \nx - cgroup2\n"), None);
    }
}
