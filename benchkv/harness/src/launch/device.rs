//! The RDMA device of a benchmark, as named on a command line.

mod soft;

use std::env::VarError;
use std::path::Path;

use crate::affinity::cores_of_node;
use mlx5::verbs::{DeviceEntry, PortEntry, PortState, VerbsError, VerbsOptions};
use mlx5::{DeviceSpec, FabricSpec, RoceOptions, SoftOptions};
pub use soft::SoftDevice;

/// Environment variable with the device for `auto`; copyrpc's servers and clients use it too.
pub const DEVICE_VARIABLE: &str = "COPYRPC_DEVICE";

/// The beginnings of the names that the kernel's drivers give their devices. A device with any
/// other name is typed with `verbs:` before the name, so that `eth0` is refused.
const KERNEL_NAMES: [&str; 7] = ["mlx5_", "mlx4_", "rxe", "irdma", "bnxt_re", "hns_", "qedr"];

const LEGAL: &str = "use auto, soft[:KEY=VALUE,...], soft:roce=ADDRESS[/BITS], verbs, mlx5_N[:PORT], rxeN, verbs:NAME[:PORT] or \
                     relay:NAME[:PORT]";

fn is_kernel_name(text: &str) -> bool {
    KERNEL_NAMES.iter().any(|start| text.starts_with(start))
}

/// A device, as typed after `--device` or in [`DEVICE_VARIABLE`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    #[default]
    /// The device that [`resolve`](Self::resolve) finds.
    Auto,
    /// The software device.
    Soft(SoftDevice),
    /// The software device with a port for packets to other hosts.
    Roce(RoceOptions),
    /// A device of libibverbs.
    Verbs {
        /// Name of the device. `None`: the first device with an active port.
        name: Option<String>,
        /// Port of the device. `None`: the first active port.
        port: Option<u8>,
        /// Whether the device is used through the calls of libibverbs even if direct access is
        /// possible. A device that is not mlx5 is always used in this way.
        relay: bool,
    },
}

impl std::str::FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let device = match text {
            "auto" => return Ok(Self::Auto),
            "soft" => return Ok(Self::Soft(SoftDevice::default())),
            "verbs" => return Ok(Self::verbs(None)),
            text if is_kernel_name(text) => text,
            text => match text.split_once(':') {
                Some(("soft", options)) if options.starts_with("roce=") => {
                    return options["roce=".len()..].parse().map(Self::Roce);
                }
                Some(("soft", options)) => return options.parse().map(Self::Soft),
                Some(("verbs" | "relay", name)) if !name.is_empty() => name,
                _ => return Err(LEGAL.to_owned()),
            },
        };
        let relay = text.starts_with("relay:");
        let (name, port) = match device.split_once(':') {
            Some((name, port)) => (name, Some(port_number(port)?)),
            None => (device, None),
        };
        Ok(Self::Verbs {
            name: Some(name.to_owned()),
            port,
            relay,
        })
    }
}

fn port_number(text: &str) -> Result<u8, String> {
    let number = text.parse().ok().filter(|number| *number > 0);
    number.ok_or_else(|| format!("{text} is not a port; ports are numbered from 1 to 255"))
}

impl std::fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Soft(options) => options.fmt(f),
            Self::Roce(options) => write!(f, "soft:roce={options}"),
            Self::Verbs { name, port, relay } => {
                let way = if *relay { "relay" } else { "verbs" };
                match name {
                    Some(name) if is_kernel_name(name) && !relay => f.write_str(name)?,
                    Some(name) => write!(f, "{way}:{name}")?,
                    None => f.write_str(way)?,
                }
                port.map_or(Ok(()), |port| write!(f, ":{port}"))
            }
        }
    }
}

impl DeviceChoice {
    const fn verbs(name: Option<String>) -> Self {
        Self::Verbs {
            name,
            port: None,
            relay: false,
        }
    }

    /// Finds the device of `auto`, and the reason. Unless [`DEVICE_VARIABLE`] names the device,
    /// opens the mlx5 devices for the states of their ports, and closes them.
    fn detect() -> Result<(Self, String), String> {
        match std::env::var(DEVICE_VARIABLE) {
            Ok(name) => Self::by_variable(&name),
            Err(VarError::NotPresent) => Ok(Self::first_active(&DeviceEntry::all())),
            Err(VarError::NotUnicode(name)) => Err(format!(
                "{DEVICE_VARIABLE} is {}, which names no device",
                name.to_string_lossy()
            )),
        }
    }

    fn by_variable(name: &str) -> Result<(Self, String), String> {
        match name.parse() {
            Ok(Self::Auto) => Err(format!("{DEVICE_VARIABLE} is auto, which names no device")),
            Ok(device) => Ok((device, format!("{DEVICE_VARIABLE} names it"))),
            Err(why) => Err(format!("{DEVICE_VARIABLE} is {name:?}: {why}")),
        }
    }

    fn first_active(found: &Result<Vec<DeviceEntry>, VerbsError>) -> (Self, String) {
        let why = match found {
            Err(VerbsError::NotInstalled { library, .. }) => format!("{library} is not installed"),
            Err(VerbsError::NoDevice { .. }) => "there is no RDMA device".to_owned(),
            Err(other) => other.to_string(),
            Ok(devices) => {
                let mlx5 = devices.iter().filter(|device| device.is_mlx5);
                if let Some(DeviceEntry { name, .. }) = mlx5.clone().find(|one| is_active(one)) {
                    let why = format!("{name} is the first mlx5 device with an active port");
                    return (Self::verbs(Some(name.clone())), why);
                }
                match devices.first() {
                    // The list has mlx5 devices first: if its first device is not mlx5, none is.
                    Some(first) if !first.is_mlx5 => format!(
                        "no RDMA device is an mlx5 device; verbs:{} takes one that is reached through libibverbs",
                        first.name
                    ),
                    _ => {
                        let faults = list(mlx5.map(fault_of));
                        format!("no mlx5 device has an active port: {faults}")
                    }
                }
            }
        };
        (Self::Soft(SoftDevice::default()), why)
    }

    /// Returns the device to use, and the reason. `auto` is the device in [`DEVICE_VARIABLE`];
    /// without that variable the first mlx5 device with an active port; without such a device the
    /// software device. Any other choice is returned without a reason.
    ///
    /// # Errors
    /// The variable names no device.
    pub fn resolve(self) -> Result<(Self, Option<String>), String> {
        if self != Self::Auto {
            return Ok((self, None));
        }
        let (device, why) = Self::detect().map_err(|why| format!("--device auto: {why}"))?;
        Ok((device, Some(why)))
    }

    /// Returns whether the device connects only processes of one host. `Auto` counts as the
    /// software device.
    pub const fn is_soft(&self) -> bool {
        matches!(self, Self::Auto | Self::Soft(_))
    }

    /// Returns the cores of the device's NUMA node. Empty for a software device, or if the node is
    /// unknown.
    pub fn cores(&self) -> Vec<usize> {
        let Self::Verbs { name, .. } = self else {
            return Vec::new();
        };
        let devices = DeviceEntry::all().unwrap_or_default();
        let node = node_of(&devices, name.as_deref());
        node.and_then(cores_of_node).unwrap_or_default()
    }

    /// Checks before a long run whether the device exists, without opening it.
    ///
    /// # Errors
    /// The device or the library is missing.
    pub fn check(&self) -> Result<(), VerbsError> {
        match self.spec(None) {
            DeviceSpec::Verbs(options) => options.find(),
            _ => Ok(()),
        }
    }

    /// Returns the device to open. Software devices connect through `shm_dir`; `None` is the
    /// directory of this user.
    pub fn spec(&self, shm_dir: Option<&Path>) -> DeviceSpec {
        let soft = SoftOptions {
            fabric: FabricSpec::Shared {
                dir: shm_dir.map(Path::to_owned),
            },
            ..SoftOptions::default()
        };
        match self {
            Self::Auto => Self::Soft(SoftDevice::default()).spec(shm_dir),
            Self::Soft(options) => DeviceSpec::Soft(SoftOptions {
                timing: options.timing(),
                faults: options.faults.clone(),
                ..soft
            }),
            Self::Roce(roce) => DeviceSpec::Soft(SoftOptions {
                roce: Some(roce.clone()),
                ..soft
            }),
            Self::Verbs { name, port, relay } => DeviceSpec::Verbs(VerbsOptions {
                device: name.clone(),
                port: *port,
                relay: *relay,
                ..VerbsOptions::default()
            }),
        }
    }
}

/// Returns the NUMA node of the device with that name, or of the first device with an active port.
fn node_of(devices: &[DeviceEntry], name: Option<&str>) -> Option<u32> {
    let is_it =
        |device: &&DeviceEntry| name.map_or_else(|| is_active(device), |name| device.name == name);
    devices.iter().find(is_it)?.numa_node
}

fn list(parts: impl Iterator<Item = String>) -> String {
    parts.collect::<Vec<_>>().join("; ")
}

fn is_active(device: &DeviceEntry) -> bool {
    let mut ports = device.ports.iter().flatten();
    ports.any(|port| port.state == PortState::Active)
}

fn fault_of(DeviceEntry { name, ports, .. }: &DeviceEntry) -> String {
    match ports {
        Err(error) => error.to_string(),
        Ok(ports) if ports.is_empty() => format!("{name} has no port"),
        Ok(ports) => {
            let state =
                |port: &PortEntry| format!("port {} of {name} is {}", port.number, port.state);
            list(ports.iter().map(state))
        }
    }
}

#[cfg(test)]
mod tests {
    use mlx5::verbs::LinkLayer;

    use super::*;

    fn entry(name: &str, ports: Result<&[PortState], VerbsError>) -> DeviceEntry {
        let port = |(index, state): (usize, &PortState)| PortEntry {
            number: index as u8 + 1,
            state: *state,
            link_layer: LinkLayer::Ethernet,
            lid: 0,
            mtu: 1024,
        };
        let ports = ports.map(|states| states.iter().enumerate().map(port).collect());
        DeviceEntry {
            name: name.to_owned(),
            is_mlx5: !name.starts_with("rxe"),
            node_guid: 7,
            numa_node: None,
            ports,
        }
    }

    #[test]
    fn the_numa_node_is_that_of_the_named_device_or_of_the_first_with_an_active_port() {
        use PortState::{Active, Down};
        let at = |node, entry| DeviceEntry {
            numa_node: node,
            ..entry
        };
        let devices = [
            at(Some(0), entry("mlx5_0", Ok(&[Down]))),
            at(Some(1), entry("mlx5_1", Ok(&[Active]))),
            entry("mlx5_2", Ok(&[Active])),
        ];
        for (name, node) in [
            (Some("mlx5_0"), Some(0)),
            (None, Some(1)),
            (Some("mlx5_2"), None),
            (Some("mlx5_3"), None),
        ] {
            assert_eq!(node_of(&devices, name), node, "{name:?}");
        }
        assert_eq!(
            DeviceChoice::default().cores(),
            [0; 0],
            "software is beside no core"
        );
    }

    #[test]
    fn a_variable_names_the_device_of_auto_or_is_refused() {
        let (taken, why) = DeviceChoice::by_variable("soft:rtt_us=6").unwrap();
        assert_eq!(
            (taken.to_string().as_str(), why.as_str()),
            ("soft:rtt_us=6", "COPYRPC_DEVICE names it")
        );
        for (name, said) in [
            ("auto", "is auto, which names no device"),
            ("eth0", "is \"eth0\": use auto, soft"),
            ("mlx5_0:0", "0 is not a port"),
        ] {
            let refused = DeviceChoice::by_variable(name).unwrap_err();
            assert!(
                refused.starts_with("COPYRPC_DEVICE is ") && refused.contains(said),
                "{refused}"
            );
        }
    }

    #[test]
    fn a_device_that_is_named_is_taken_without_a_reason() {
        for name in ["soft:rtt_us=6", "verbs", "mlx5_3:1"] {
            let (taken, why) = name.parse::<DeviceChoice>().unwrap().resolve().unwrap();
            assert_eq!((taken.to_string().as_str(), why), (name, None));
        }
    }

    #[test]
    fn auto_takes_the_first_mlx5_device_with_an_active_port_and_else_software_and_gives_the_reason()
    {
        use PortState::{Active, Down, Initialize};
        let forbidden = || VerbsError::Permission {
            name: "mlx5_0".to_owned(),
            path: "/dev/infiniband/uverbs0".to_owned(),
        };
        let missing = |library| VerbsError::NotInstalled {
            library,
            reason: "no such file".to_owned(),
        };
        for (found, device, why) in [
            (
                Ok(vec![entry("mlx5_0", Ok(&[Active]))]),
                "mlx5_0",
                "mlx5_0 is the first mlx5 device with an active port",
            ),
            (
                Ok(vec![
                    entry("mlx5_0", Err(forbidden())),
                    entry("mlx5_1", Ok(&[Down])),
                    entry("rocep3s0", Ok(&[Down, Active])),
                    entry("mlx5_3", Ok(&[Active])),
                ]),
                "verbs:rocep3s0",
                "rocep3s0 is the first mlx5 device with an active port",
            ),
            (
                Ok(vec![
                    entry("mlx5_0", Ok(&[Down, Initialize])),
                    entry("mlx5_1", Ok(&[])),
                ]),
                "soft",
                "no mlx5 device has an active port: port 1 of mlx5_0 is down; port 2 of mlx5_0 is initializing; mlx5_1 has no port",
            ),
            (
                Ok(vec![entry("mlx5_0", Err(forbidden()))]),
                "soft",
                "no mlx5 device has an active port: no permission to open /dev/infiniband/uverbs0 of",
            ),
            (
                Ok(vec![entry("rxe0", Ok(&[Active]))]),
                "soft",
                "no RDMA device is an mlx5 device; verbs:rxe0 takes one that is reached through libibverbs",
            ),
            (
                Ok(vec![
                    entry("mlx5_0", Ok(&[Down])),
                    entry("rxe0", Ok(&[Active])),
                ]),
                "soft",
                "no mlx5 device has an active port: port 1 of mlx5_0 is down",
            ),
            (
                Err(missing("libmlx5.so.1")),
                "soft",
                "libmlx5.so.1 is not installed",
            ),
            (
                Err(VerbsError::NoDevice {
                    hint: "no NIC".to_owned(),
                }),
                "soft",
                "there is no RDMA device",
            ),
            (
                Err(VerbsError::OldCqes {
                    name: "mlx5_0".to_owned(),
                }),
                "soft",
                "mlx5_0 has CQEs of version 0",
            ),
        ] {
            let (taken, reason) = DeviceChoice::first_active(&found);
            assert!(
                taken.to_string() == device && reason.starts_with(why),
                "{found:?}: {taken}, {reason}"
            );
        }
    }
}
