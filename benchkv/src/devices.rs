//! The devices of a rank: `--device`.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use benchkv_harness::launch::device::DeviceChoice;
use benchkv_harness::range::{RangeError, range};
use engine::topology::{Topology, Worker};
use mlx5::DeviceSpec;
use mlx5::verbs::VerbsError;

/// The value of `--device`: one device, or several devices of libibverbs. Daemon and client number
/// k open device k modulo the number of devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Devices(Vec<DeviceChoice>);

impl Default for Devices {
    fn default() -> Self {
        DeviceChoice::Auto.into()
    }
}

impl From<DeviceChoice> for Devices {
    fn from(only: DeviceChoice) -> Self {
        Self(vec![only])
    }
}

impl FromStr for Devices {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // The options of the software device contain commas too, so a comma does not make them a
        // list.
        if text.starts_with("soft") || !text.contains(',') {
            return text.parse().map(DeviceChoice::into);
        }
        let mut devices: Vec<DeviceChoice> = Vec::new();
        for part in text.split(',') {
            let device = part.parse();
            let device = device.map_err(|why| format!("{part:?} in a list: {why}"))?;
            if !matches!(device, DeviceChoice::Verbs { name: Some(_), .. }) {
                return Err(format!(
                    "{part} in a list: its devices are named, mlx5_N[:PORT], rxeN, verbs:NAME[:PORT] or relay:NAME[:PORT]"
                ));
            }
            if devices.contains(&device) {
                return Err(format!("{part} is in the list twice"));
            }
            devices.push(device);
        }
        Ok(Self(devices))
    }
}

/// Formats the devices as they are typed.
impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices: Vec<String> = self.0.iter().map(DeviceChoice::to_string).collect();
        f.write_str(&devices.join(","))
    }
}

impl Devices {
    /// Iterates over the devices, in the order of the list.
    pub fn iter(&self) -> impl Iterator<Item = &DeviceChoice> {
        self.0.iter()
    }

    /// Returns whether the device is `auto`, and so not chosen yet.
    pub fn is_auto(&self) -> bool {
        self.0 == [DeviceChoice::Auto]
    }

    /// Returns the devices to use, for `auto` with the reason; see [`DeviceChoice::resolve`].
    ///
    /// # Errors
    /// The errors of [`DeviceChoice::resolve`].
    pub fn resolve(self) -> Result<(Self, Option<String>), String> {
        match <[DeviceChoice; 1]>::try_from(self.0) {
            Ok([only]) => only.resolve().map(|(device, why)| (device.into(), why)),
            Err(several) => Ok((Self(several), None)),
        }
    }

    /// Returns whether the device connects only processes of one host.
    pub fn is_soft(&self) -> bool {
        self.0.iter().all(DeviceChoice::is_soft)
    }

    /// Returns the cores of the NUMA nodes of all devices.
    pub fn cores(&self) -> Vec<usize> {
        self.iter().flat_map(DeviceChoice::cores).collect()
    }

    /// Returns the devices to open. Software devices connect through `shm_dir`.
    pub fn specs(&self, shm_dir: &Path) -> Vec<DeviceSpec> {
        self.iter()
            .map(|device| device.spec(Some(shm_dir)))
            .collect()
    }

    /// Checks before a long run whether the devices exist. Opens nothing.
    ///
    /// # Errors
    /// The missing device or library.
    pub fn exist(&self) -> Result<(), VerbsError> {
        self.iter().try_for_each(DeviceChoice::check)
    }

    /// Refuses more devices than threads of a rank use.
    ///
    /// # Errors
    /// The legal number of devices.
    pub fn check(&self, topology: &Topology) -> Result<(), RangeError> {
        let has_peers = |worker| !topology.peers_of(0, worker).is_empty();
        let uses = |number| {
            let is_daemon = number < topology.daemons && has_peers(Worker::Daemon(number));
            is_daemon || (number < topology.clients && has_peers(Worker::Client(number)))
        };
        let numbers = 0..topology.daemons.max(topology.clients);
        let used = numbers.filter(|&number| uses(number)).count().max(1);
        if self.0.len() <= used {
            return Ok(());
        }
        let why = "threads without connections open no device";
        let devices = benchkv_harness::report::plural(used, "device");
        Err(range(
            "--device",
            self,
            why,
            format!("a list of at most {devices}"),
        ))
    }
}

#[cfg(test)]
mod tests {
    use engine::carrier::Carrier;
    use engine::topology::Backend;

    use super::*;

    #[test]
    fn a_list_has_named_devices_each_once_and_is_printed_as_typed() {
        for text in [
            "auto",
            "soft:rtt_us=6,jitter_us=1",
            "verbs",
            "mlx5_0",
            "mlx5_0:2,mlx5_1,verbs:rocep3s0:1",
        ] {
            assert_eq!(text.parse::<Devices>().unwrap().to_string(), text);
        }
        for (text, said) in [
            ("mlx5_0,soft", "soft in a list: its devices are named"),
            ("auto,mlx5_0", "auto in a list"),
            ("verbs,mlx5_0", "verbs in a list"),
            ("mlx5_0,", "\"\" in a list: use auto, soft"),
            ("mlx5_0,mlx5_1:0", "\"mlx5_1:0\" in a list: 0 is not a port"),
            ("mlx5_1,mlx5_0,mlx5_1", "mlx5_1 is in the list twice"),
        ] {
            let refused = text.parse::<Devices>().unwrap_err();
            assert!(refused.contains(said), "{refused}");
        }
    }

    #[test]
    fn a_list_is_not_longer_than_the_threads_with_connections() {
        let topology = |backend, daemons, clients| Topology {
            backend,
            carrier: Carrier::Copyrpc,
            ranks: 3,
            daemons,
            clients,
        };
        let longest = |topology: Topology| {
            let list = |count: usize| {
                (0..count)
                    .map(|number| format!("mlx5_{number}"))
                    .collect::<Vec<_>>()
                    .join(",")
                    .parse::<Devices>()
                    .unwrap()
            };
            (1..10)
                .take_while(|&count| list(count).check(&topology).is_ok())
                .count()
        };
        assert_eq!(longest(topology(Backend::Delegation, 4, 8)), 1);
        assert_eq!(longest(topology(Backend::Sharded, 4, 8)), 4);
        assert_eq!(
            longest(topology(Backend::Meta, 4, 8)),
            2,
            "one for each of two peers"
        );
        assert_eq!(longest(topology(Backend::Direct, 1, 8)), 8);
        assert_eq!(
            longest(Topology {
                ranks: 1,
                ..topology(Backend::Sharded, 4, 8)
            }),
            1
        );
        let refused = "mlx5_0,mlx5_1"
            .parse::<Devices>()
            .unwrap()
            .check(&topology(Backend::Delegation, 1, 8))
            .unwrap_err();
        let said = "--device mlx5_0,mlx5_1: threads without connections open no device; legal is a list of at most 1 device";
        assert_eq!(refused.to_string(), said);
    }
}
