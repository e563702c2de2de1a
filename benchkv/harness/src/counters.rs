//! Counters of RDMA devices, as the kernel publishes them:
//! `/sys/class/infiniband/DEVICE/ports/PORT/hw_counters/NAME`.
//!
//! The kernel counts since the driver was loaded, for all users of the port. So only differences
//! are meaningful, and only if the port has no other users.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The directory of the counters.
pub const SYSFS: &str = "/sys/class/infiniband";

/// The counters of each port, by `DEVICE:PORT`.
pub type PortCounters = BTreeMap<String, BTreeMap<String, u64>>;

/// Reads the counters of all ports below `sysfs`. Skips files that are missing or not a number.
pub fn read(sysfs: &Path) -> PortCounters {
    let mut all = PortCounters::new();
    for device in names(sysfs) {
        let ports = sysfs.join(&device).join("ports");
        for port in names(&ports) {
            let dir = ports.join(&port).join("hw_counters");
            let value =
                |name: &String| fs::read_to_string(dir.join(name)).ok()?.trim().parse().ok();
            let counters = names(&dir)
                .into_iter()
                .filter_map(|name| value(&name).map(|value| (name, value)));
            all.insert(format!("{device}:{port}"), counters.collect());
        }
    }
    all
}

fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten();
    entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_port_has_its_numbers() {
        let root = std::env::temp_dir().join(format!("harness-counters-{}", std::process::id()));
        for (port, name, value) in [
            ("1", "out_of_buffer", "7\n"),
            ("1", "lifespan", "ten\n"),
            ("2", "rnr_nak_retry_err", "18446744073709551615\n"),
        ] {
            let dir = root.join("mlx5_0/ports").join(port).join("hw_counters");
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join(name), value).unwrap();
        }
        fs::create_dir_all(root.join("mlx4_0/ports/1")).unwrap();
        let all = read(&root);
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(
            all.keys().collect::<Vec<_>>(),
            ["mlx4_0:1", "mlx5_0:1", "mlx5_0:2"]
        );
        assert_eq!(
            all["mlx5_0:1"],
            BTreeMap::from([("out_of_buffer".to_owned(), 7)])
        );
        assert_eq!(
            all["mlx5_0:2"],
            BTreeMap::from([("rnr_nak_retry_err".to_owned(), u64::MAX)])
        );
        assert_eq!(all["mlx4_0:1"], BTreeMap::new());
        assert_eq!(read(&root), PortCounters::new(), "no device, no counters");
    }
}
