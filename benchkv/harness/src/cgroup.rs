//! The limits of this process's control groups, version 1 and 2, on memory and CPU time.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the smallest memory limit among the control groups of this process and their parents, in
/// bytes, and the file with this limit. `None` if no limit is visible.
pub fn memory_limit() -> Option<(u64, PathBuf)> {
    let (groups, mounts) = here();
    limit_of(&groups, &mounts)
}

/// Returns the smallest CPU quota among the control groups of this process and their parents, in
/// CPUs: 1.5 is 150 ms of CPU time in 100 ms. `None` if no quota is visible.
pub fn cpu_limit() -> Option<f64> {
    let (groups, mounts) = here();
    quota_of(&groups, &mounts)
}

/// Returns the kernel's lists of this process's groups, and of its mounts.
fn here() -> (String, String) {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    (read("/proc/self/cgroup"), read("/proc/self/mountinfo"))
}

fn limit_of(groups: &str, mounts: &str) -> Option<(u64, PathBuf)> {
    let of_dir = |dir: &Path, mount: &Mount| {
        let name = if mount.is_unified {
            "memory.max"
        } else {
            "memory.limit_in_bytes"
        };
        let file = dir.join(name);
        // Version 2 writes `max` in place of a number if there is no limit.
        let limit = fs::read_to_string(&file).ok()?.trim().parse::<u64>().ok()?;
        Some((limit, file))
    };
    in_dirs(groups, mounts, "memory", of_dir).into_iter().min()
}

fn quota_of(groups: &str, mounts: &str) -> Option<f64> {
    let of_dir = |dir: &Path, mount: &Mount| {
        let read = |file| fs::read_to_string(dir.join(file)).ok();
        let both = if mount.is_unified {
            read("cpu.max")?
        } else {
            read("cpu.cfs_quota_us")? + " " + &read("cpu.cfs_period_us")?
        };
        // Without a quota the first word is `max`, or -1 in version 1; neither is a quota above 0.
        let words = both.split_whitespace();
        let mut words = words.map_while(|word| word.parse::<f64>().ok());
        Some(words.next()? / words.next()?).filter(|cpus| *cpus > 0.0)
    };
    let quotas = in_dirs(groups, mounts, "cpu", of_dir).into_iter();
    quotas.reduce(f64::min)
}

/// Applies `of_dir` to the directories of a process's groups under `controller`, and to their
/// parent directories.
fn in_dirs<T>(
    groups: &str,
    mounts: &str,
    controller: &str,
    of_dir: impl Fn(&Path, &Mount) -> Option<T>,
) -> Vec<T> {
    let of_mount = |mount: Mount| {
        let group = group_in(groups, &mount, controller)?;
        // A process in a namespace may be in a group that the mount does not show. Then the top of
        // the mount is the closest visible group.
        let below = Path::new(group).strip_prefix(mount.root);
        let dir = Path::new(mount.point).join(below.unwrap_or(Path::new("")));
        let dirs = dir.ancestors();
        let dirs = dirs.take_while(|dir| dir.starts_with(mount.point));
        let found = dirs.filter_map(|dir| of_dir(dir, &mount));
        Some(found.collect::<Vec<_>>())
    };
    let mounts = mounts.lines();
    let mounts = mounts.filter_map(|line| Mount::parse(line, controller));
    mounts.filter_map(of_mount).flatten().collect()
}

/// A mounted hierarchy of control groups that has a controller, such as `memory`.
struct Mount<'a> {
    /// The group at the top of the mount.
    root: &'a str,
    point: &'a str,
    is_unified: bool,
}

impl<'a> Mount<'a> {
    /// Parses a line of proc_pid_mountinfo(5). Returns `None` for other file systems.
    fn parse(line: &'a str, controller: &str) -> Option<Self> {
        let (place, kind) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let (root, point) = (place.next()?, place.next()?);
        let mut kind = kind.split(' ');
        let (name, options) = (kind.next()?, kind.nth(1)?);
        let is_unified = name == "cgroup2";
        let is_it =
            is_unified || name == "cgroup" && options.split(',').any(|option| option == controller);
        is_it.then_some(Self {
            root,
            point,
            is_unified,
        })
    }
}

/// Returns the group of a process in a hierarchy, from a line `NUMBER:CONTROLLERS:GROUP` of
/// proc_pid_cgroup(5). In version 2 the list of controllers is empty.
fn group_in<'a>(groups: &'a str, mount: &Mount, controller: &str) -> Option<&'a str> {
    let of_line = |line: &'a str| {
        let (controllers, group) = line.split_once(':')?.1.split_once(':')?;
        let is_it = if mount.is_unified {
            controllers.is_empty()
        } else {
            controllers.split(',').any(|name| name == controller)
        };
        is_it.then_some(group)
    };
    groups.lines().find_map(of_line)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A temporary directory with the given files, in place of a mount.
    struct Tree(PathBuf);

    impl Tree {
        fn new(name: &str, files: &[(&str, &str)]) -> Self {
            let top =
                std::env::temp_dir().join(format!("harness-cgroup-{}-{name}", std::process::id()));
            for (file, content) in files {
                let file = top.join(file);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, content).unwrap();
            }
            Self(top)
        }

        fn mount(&self, root: &str, kind: &str) -> String {
            format!(
                "31 23 0:27 {root} {} rw,nosuid shared:9 - {kind}\n",
                self.0.display()
            )
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
        let tree = Tree::new(
            "v2",
            &[
                ("a/memory.max", "5000\n"),
                ("a/b/memory.max", "max\n"),
                ("a/b/c/memory.max", "7000\n"),
            ],
        );
        let mounts = OTHERS.to_owned() + &tree.mount("/", "cgroup2 cgroup2 rw");
        let limit = |group: &str| limit_of(&format!("1:cpu:/x\n0::{group}\n"), &mounts);
        assert_eq!(
            limit("/a/b/c"),
            Some((5000, tree.file("a/memory.max").unwrap()))
        );
        assert_eq!(limit("/"), None, "the top has no limit");
    }

    #[test]
    fn a_cpu_quota_is_told_in_cpus_by_both_versions() {
        let files = [
            ("a/cpu.max", "max 100000\n"),
            ("a/b/cpu.max", "150000 100000\n"),
            ("a/b/c/cpu.max", "800000 100000\n"),
        ];
        let tree = Tree::new("quota", &files);
        let quota = |group: &str| {
            quota_of(
                &format!("0::{group}\n"),
                &tree.mount("/", "cgroup2 cgroup2 rw"),
            )
        };
        assert_eq!(
            (quota("/a/b/c"), quota("/a"), quota("/")),
            (Some(1.5), None, None)
        );
        let files = [
            ("j/cpu.cfs_quota_us", "50000"),
            ("j/cpu.cfs_period_us", "100000"),
            ("cpu.cfs_quota_us", "-1"),
            ("cpu.cfs_period_us", "1"),
        ];
        let tree = Tree::new("quota-v1", &files);
        let quota = |group: &str| {
            quota_of(
                &format!("3:cpu,cpuacct:{group}\n"),
                &tree.mount("/", "cgroup cgroup rw,cpu,cpuacct"),
            )
        };
        assert_eq!((quota("/j"), quota("/")), (Some(0.5), None));
    }

    #[test]
    fn version_1_says_it_in_a_hierarchy_of_its_own() {
        let files = [
            ("memory.limit_in_bytes", "9223372036854771712\n"),
            ("job/memory.limit_in_bytes", "4096\n"),
        ];
        let tree = Tree::new("v1", &files);
        let mounts = OTHERS.to_owned() + &tree.mount("/", "cgroup memory rw,memory");
        let limit = |groups: &str| limit_of(groups, &mounts).map(|(bytes, _)| bytes);
        assert_eq!(
            limit("9:cpu:/other\n4:hugetlb,memory:/job\n0::/\n"),
            Some(4096)
        );
        assert_eq!(
            (limit("4:memory:/\n"), limit("4:cpu:/job\n")),
            (Some(9_223_372_036_854_771_712), None)
        );
    }

    /// In a container, the container's own group is at the top of the mount. `/proc/self/cgroup`
    /// names the group by its path on the host, or as `/`.
    #[test]
    fn a_container_finds_the_limit_at_the_top_of_its_mount() {
        let tree = Tree::new(
            "container",
            &[("memory.max", "4096\n"), ("inner/memory.max", "1024\n")],
        );
        let mounts = tree.mount("/docker/7f", "cgroup2 cgroup rw,nsdelegate");
        for (group, bytes) in [
            ("/docker/7f", 4096),
            ("/docker/7f/inner", 1024),
            ("/../elsewhere", 4096),
            ("/", 4096),
        ] {
            assert_eq!(
                limit_of(&format!("0::{group}\n"), &mounts).map(|(bytes, _)| bytes),
                Some(bytes),
                "{group}"
            );
        }
    }

    #[test]
    fn what_cannot_be_read_is_no_limit() {
        assert_eq!(limit_of("", ""), None);
        assert_eq!(
            limit_of(
                "0::/x\nnonsense\n7:memory\n",
                "31 23 0:27 / /nonexistent rw - cgroup2 cgroup2 rw\n - \nx - cgroup2\n"
            ),
            None
        );
    }
}
