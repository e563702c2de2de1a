//! The tree that programs read in place of a part of `/sys`: it has a PCI function for each device,
//! and `mlx5_0` is the device of the first function. The layout is the kernel's, because UCX
//! expects the function's directory two levels above the device's directory.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use mlx5_hca::{Gid, GidKind, PortAddress};

use crate::config::{DEVICE_ID, FIRMWARE, GID_ENTRIES, Link, NO_GID, PCI_BUS, guid};
use crate::private_dir::PrivateDir;

/// Major and minor number of the first device file.
pub(crate) const DEVICE: [u32; 2] = [231, 192];

/// Name of the network device that programs find for a port's addresses. Every machine has it.
const NETWORK_DEVICE: &str = "lo";

/// Directories and names of a port's counters, which programs read before and after a run. Only the
/// counters that the library knows ever change.
const COUNTERS: [(&str, &str); 2] = [
    (
        "counters",
        "VL15_dropped excessive_buffer_overrun_errors link_downed link_error_recovery local_link_integrity_errors multicast_rcv_packets \
        multicast_xmit_packets port_rcv_constraint_errors port_rcv_data port_rcv_errors port_rcv_packets port_rcv_remote_physical_errors \
        port_rcv_switch_relay_errors port_xmit_constraint_errors port_xmit_data port_xmit_discards port_xmit_packets port_xmit_wait \
        symbol_error",
    ),
    (
        "hw_counters",
        "duplicate_request implied_nak_seq_err lifespan local_ack_timeout_err out_of_buffer out_of_sequence packet_seq_err req_cqe_error \
        req_cqe_flush_error req_remote_access_errors req_remote_invalid_request resp_cqe_error resp_cqe_flush_error \
        resp_local_length_error resp_remote_access_errors rnr_nak_retry_err rx_atomic_requests rx_read_requests rx_write_requests",
    ),
];

/// Maximum length of the root's path, in bytes. libibverbs accepts paths of less than 256 bytes;
/// the longest path below the root has about 110.
const MAX_ROOT: usize = 128;

#[derive(Clone, Debug)]
pub(crate) struct TreeOptions {
    pub(crate) link: Link,
    /// GID table. If it is empty, the port has the table of a real port.
    pub(crate) gids: Vec<Gid>,
    pub(crate) devices: usize,
    pub(crate) has_gid: bool,
    pub(crate) is_port_up: bool,
}

/// A tree of one run, in a directory of its own. The drop removes the tree.
#[derive(Debug)]
pub(crate) struct Tree(PrivateDir);

impl Tree {
    /// Makes the tree. No other process knows the path of the tree before the tree is complete.
    pub(crate) fn make(options: &TreeOptions) -> Result<Self, String> {
        let parent = env::var_os("XDG_RUNTIME_DIR")
            .map(PathBuf::from)
            .filter(|dir| dir.is_dir())
            .unwrap_or_else(|| "/tmp".into());
        let of_parent = |error: io::Error| format!("a directory in {}: {error}", parent.display());
        let tree = Self(PrivateDir::make(&parent).map_err(of_parent)?);
        if tree.path().as_os_str().len() > MAX_ROOT {
            return Err(format!(
                "{} is too long a path for libibverbs: set XDG_RUNTIME_DIR",
                tree.path().display()
            ));
        }
        tree.fill(options).map_err(of_parent)?;
        Ok(tree)
    }

    /// Returns the value for `SYSFS_PATH`.
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    fn fill(&self, options: &TreeOptions) -> io::Result<()> {
        self.file("class/infiniband_verbs/abi_version", "6")?;
        self.dir("class/infiniband")?;
        if options.devices == 0 {
            return Ok(());
        }
        let bus = format!("devices/pci{PCI_BUS}");
        self.link(&format!("{bus}/pci_bus/{PCI_BUS}/device"), "../../")?;
        self.link(
            &format!("class/pci_bus/{PCI_BUS}"),
            &format!("../../{bus}/pci_bus/{PCI_BUS}"),
        )?;
        let ports = options.link.network(options.devices, &options.gids);
        ports
            .iter()
            .enumerate()
            .try_for_each(|(index, port)| self.fill_one(&bus, index, port, options))
    }

    /// Makes the PCI function, and on it the device with this index.
    fn fill_one(
        &self,
        bus: &str,
        index: usize,
        port: &PortAddress,
        options: &TreeOptions,
    ) -> io::Result<()> {
        let address = format!("{PCI_BUS}:{index:02x}.0");
        let function = format!("{bus}/{address}");
        let device = format!("{function}/infiniband/mlx5_{index}");
        let uverbs = format!("{function}/infiniband_verbs/uverbs{index}");
        let [major, minor] = DEVICE;
        self.fill_function(&function)?;
        self.fill_device(&device, &guid(index), port, options)?;
        for (name, text) in [
            ("ibdev", format!("mlx5_{index}")),
            ("dev", format!("{major}:{}", minor as usize + index)),
            ("abi_version", "1".to_owned()),
        ] {
            self.file(&format!("{uverbs}/{name}"), &text)?;
        }
        for (path, target) in [
            (
                format!("bus/pci/devices/{address}"),
                format!("../{function}"),
            ),
            (
                format!("class/infiniband_verbs/uverbs{index}"),
                uverbs.clone(),
            ),
            (format!("class/infiniband/mlx5_{index}"), device),
        ] {
            self.link(&path, &format!("../../{target}"))?;
        }
        self.link(&format!("{uverbs}/device"), "../..")
    }

    fn fill_function(&self, function: &str) -> io::Result<()> {
        // SAFETY: the argument is a plain number.
        let cpus = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) }.max(1) as usize;
        let id = format!("{DEVICE_ID:08X}");
        for (name, text) in [
            (
                "modalias",
                format!("pci:v000015B3d{id}sv000015B3sd00000001bc02sc07i00"),
            ),
            ("vendor", "0x15b3".to_owned()),
            ("device", format!("{DEVICE_ID:#06x}")),
            ("subsystem_vendor", "0x15b3".to_owned()),
            ("subsystem_device", "0x0001".to_owned()),
            ("class", "0x020700".to_owned()),
            ("revision", "0x00".to_owned()),
            ("numa_node", "-1".to_owned()),
            ("local_cpus", cpu_mask(cpus)),
            ("local_cpulist", format!("0-{}", cpus - 1)),
            ("current_link_speed", "16.0 GT/s PCIe".to_owned()),
            ("current_link_width", "16".to_owned()),
            ("max_link_speed", "16.0 GT/s PCIe".to_owned()),
            ("max_link_width", "16".to_owned()),
        ] {
            self.file(&format!("{function}/{name}"), &text)?;
        }
        self.link(
            &format!("{function}/net/{NETWORK_DEVICE}"),
            &format!("/sys/class/net/{NETWORK_DEVICE}"),
        )
    }

    fn fill_device(
        &self,
        device: &str,
        guid: &[u8],
        port: &PortAddress,
        options: &TreeOptions,
    ) -> io::Result<()> {
        let is_ethernet = matches!(options.link, Link::Ethernet(_));
        let up = |up: &'static str, down: &'static str| if options.is_port_up { up } else { down };
        let [major, minor, sub_minor] = FIRMWARE;
        let guid = groups(guid);
        let lid = format!("{:#x}", port.lid);
        let version = format!("{major}.{minor}.{sub_minor:04}");
        let files = [
            ("node_type", "1: CA"),
            ("node_guid", &guid),
            ("sys_image_guid", &guid),
            ("node_desc", "software HCA"),
            ("fw_ver", &version),
            ("hw_rev", "0x0"),
            ("hca_type", "MT4123"),
            ("board_id", "SOFT0000000000"),
            ("ports/1/state", up("4: ACTIVE", "1: DOWN")),
            ("ports/1/phys_state", up("5: LinkUp", "3: Disabled")),
            ("ports/1/rate", "200 Gb/sec (4X HDR)"),
            ("ports/1/lid", &lid),
            ("ports/1/sm_lid", &lid),
            ("ports/1/lid_mask_count", "0"),
            ("ports/1/sm_sl", "0"),
            ("ports/1/cap_mask", "0x00010000"),
            (
                "ports/1/link_layer",
                if is_ethernet {
                    "Ethernet"
                } else {
                    "InfiniBand"
                },
            ),
            ("ports/1/pkeys/0", "0xffff"),
        ];
        let file = |name: &str, text: &str| self.file(&format!("{device}/{name}"), text);
        for (name, text) in files {
            file(name, text)?;
        }
        let gids = if options.has_gid { port.gids } else { &[] };
        for index in 0..GID_ENTRIES {
            let gid = gids.get(index).filter(|gid| **gid != NO_GID);
            file(
                &format!("ports/1/gids/{index}"),
                &groups(gid.map_or(&[0; 16], |gid| &gid.bytes)),
            )?;
            // Each entry has a type file, also without a GID: the kernel has a file there that
            // cannot be read, and libibverbs takes a missing file for an error of the table.
            let is_v2 = gid.is_some_and(|gid| gid.kind == GidKind::RoceV2);
            file(
                &format!("ports/1/gid_attrs/types/{index}"),
                if is_v2 { "RoCE v2" } else { "IB/RoCE v1" },
            )?;
            if is_ethernet && gid.is_some() {
                file(&format!("ports/1/gid_attrs/ndevs/{index}"), NETWORK_DEVICE)?;
            }
        }
        for (dir, counters) in COUNTERS {
            counters
                .split(' ')
                .try_for_each(|counter| file(&format!("ports/1/{dir}/{counter}"), "0"))?;
        }
        self.link(&format!("{device}/device"), "../..")
    }

    fn dir(&self, path: &str) -> io::Result<()> {
        fs::create_dir_all(self.path().join(path))
    }

    fn file(&self, path: &str, text: &str) -> io::Result<()> {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().unwrap_or(self.path()))?;
        fs::write(path, format!("{text}\n"))
    }

    fn link(&self, path: &str, target: &str) -> io::Result<()> {
        let path = self.path().join(path);
        fs::create_dir_all(path.parent().unwrap_or(self.path()))?;
        symlink(target, path)
    }
}

/// Formats bytes in pairs, as in GUIDs and GIDs.
fn groups(bytes: &[u8]) -> String {
    let groups: Vec<_> = bytes
        .chunks(2)
        .map(|pair| {
            pair.iter()
                .map(|byte| format!("{byte:02x}"))
                .collect::<String>()
        })
        .collect();
    groups.join(":")
}

/// Returns the mask of all of `cpus` CPUs, in words of 32 bits, the highest first.
fn cpu_mask(cpus: usize) -> String {
    let word = |low: usize| match cpus - low {
        32.. => u32::MAX,
        some => (1 << some) - 1,
    };
    let words: Vec<_> = (0..cpus)
        .step_by(32)
        .rev()
        .map(|low| format!("{:08x}", word(low)))
        .collect();
    words.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPTIONS: TreeOptions = TreeOptions {
        link: Link::InfiniBand,
        gids: Vec::new(),
        devices: 1,
        has_gid: true,
        is_port_up: true,
    };

    fn read(tree: &Tree, path: &str) -> String {
        fs::read_to_string(tree.path().join(path))
            .unwrap()
            .trim_end()
            .to_owned()
    }

    #[test]
    fn the_device_is_two_below_its_pci_function() {
        let tree = Tree::make(&OPTIONS).unwrap();
        let device = fs::canonicalize(tree.path().join("class/infiniband/mlx5_0")).unwrap();
        let function = device.parent().unwrap().parent().unwrap();
        assert_eq!(
            fs::read_to_string(function.join("vendor")).unwrap(),
            "0x15b3\n"
        );
        assert_eq!(fs::canonicalize(device.join("device")).unwrap(), function);
        assert_eq!(
            read(&tree, "class/infiniband/mlx5_0/device/device"),
            "0x101b"
        );
        assert!(
            read(&tree, "class/infiniband/mlx5_0/device/modalias")
                .starts_with("pci:v000015B3d0000101Bsv")
        );
        assert_eq!(
            read(&tree, "class/infiniband_verbs/uverbs0/ibdev"),
            "mlx5_0"
        );
        assert_eq!(read(&tree, "class/infiniband_verbs/uverbs0/dev"), "231:192");
        assert_eq!(read(&tree, "class/infiniband_verbs/abi_version"), "6");
    }

    #[test]
    fn the_port_is_what_was_asked_for() {
        let port = "class/infiniband/mlx5_0/ports/1";
        let tree = Tree::make(&OPTIONS).unwrap();
        assert_eq!(read(&tree, &format!("{port}/state")), "4: ACTIVE");
        assert_eq!(read(&tree, &format!("{port}/lid")), "0x1");
        assert_eq!(
            read(&tree, &format!("{port}/gids/0")),
            "fe80:0000:0000:0000:0200:00ff:fe00:0001"
        );
        let [gids, kinds] = ["gids", "gid_attrs/types"].map(|name| {
            fs::read_dir(tree.path().join(port).join(name))
                .unwrap()
                .count()
        });
        assert_eq!((gids, kinds), (GID_ENTRIES, GID_ENTRIES));
        assert_eq!(
            read(&tree, &format!("{port}/gids/{}", GID_ENTRIES - 1)),
            "0000:0000:0000:0000:0000:0000:0000:0000"
        );
        let tree = Tree::make(&TreeOptions {
            link: Link::Ethernet(None),
            ..OPTIONS
        })
        .unwrap();
        let table = [0, 1, 2, 3].map(|index| {
            ["gids", "gid_attrs/types", "gid_attrs/ndevs"]
                .map(|name| read(&tree, &format!("{port}/{name}/{index}")))
        });
        let [link_local, ipv4] = [
            "fe80:0000:0000:0000:0200:00ff:fe00:0001",
            "0000:0000:0000:0000:0000:ffff:7f00:0001",
        ];
        let entry = |gid, kind| [gid, kind, "lo"];
        let want = [
            entry(link_local, "IB/RoCE v1"),
            entry(link_local, "RoCE v2"),
            entry(ipv4, "IB/RoCE v1"),
            entry(ipv4, "RoCE v2"),
        ];
        assert_eq!(table, want);
        let tree = Tree::make(&TreeOptions {
            link: Link::Ethernet(None),
            has_gid: false,
            is_port_up: false,
            ..OPTIONS
        })
        .unwrap();
        assert_eq!(read(&tree, &format!("{port}/state")), "1: DOWN");
        assert_eq!(read(&tree, &format!("{port}/link_layer")), "Ethernet");
        assert_eq!(
            read(&tree, &format!("{port}/gids/0")),
            "0000:0000:0000:0000:0000:0000:0000:0000"
        );
        assert!(!tree.path().join(port).join("gid_attrs/ndevs").exists());
    }

    #[test]
    fn every_device_has_a_function_and_addresses_of_its_own() {
        let tree = Tree::make(&TreeOptions {
            link: Link::Ethernet(None),
            devices: 2,
            ..OPTIONS
        })
        .unwrap();
        assert_eq!(
            read(&tree, "class/infiniband/mlx5_1/node_guid"),
            "0200:00ff:fe00:0002"
        );
        assert_eq!(
            read(&tree, "class/infiniband/mlx5_1/ports/1/gids/2"),
            "0000:0000:0000:0000:0000:ffff:7f00:0002"
        );
        assert_eq!(read(&tree, "class/infiniband_verbs/uverbs1/dev"), "231:193");
        let function =
            fs::canonicalize(tree.path().join("class/infiniband/mlx5_1/device")).unwrap();
        assert!(function.ends_with("7357:00:01.0"), "{function:?}");
        let tree = Tree::make(&TreeOptions {
            devices: 2,
            ..OPTIONS
        })
        .unwrap();
        assert_eq!(read(&tree, "class/infiniband/mlx5_1/ports/1/lid"), "0x2");
    }

    #[test]
    fn without_a_device_the_tree_has_none() {
        let tree = Tree::make(&TreeOptions {
            devices: 0,
            ..OPTIONS
        })
        .unwrap();
        assert_eq!(
            fs::read_dir(tree.path().join("class/infiniband"))
                .unwrap()
                .count(),
            0
        );
        assert!(!tree.path().join("devices").exists());
    }

    #[test]
    fn cpu_masks_are_written_in_words() {
        assert_eq!(
            (cpu_mask(1), cpu_mask(2), cpu_mask(32)),
            ("00000001".into(), "00000003".into(), "ffffffff".into())
        );
        assert_eq!(cpu_mask(40), "000000ff,ffffffff");
    }
}
