//! Options of a hardware device's port: the path of packets.

use benchkv_harness::launch::device::DeviceChoice;
use benchkv_harness::range::{RangeError, range, whole};
use clap::Args;
use mlx5::DeviceSpec;
use serde::{Deserialize, Serialize};

use crate::devices::Devices;

/// The options of the port; an option that is not given keeps the driver's default. Recorded in
/// results.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
#[group(skip)]
pub struct PortOptions {
    /// Port of a hardware --device, 1 to 255; also as --device NAME:PORT [default: the first active
    /// port].
    #[arg(help_heading = "Device", long, hide_short_help = true, value_name = "N", value_parser = whole(1..=u8::MAX))]
    pub port: Option<u8>,
    /// Index of the source address in the GID table of a hardware --device, 0 to 255 [default: on
    /// RoCE version 2 before 1, IPv4 before IPv6; on InfiniBand none, so that packets carry no
    /// GRH].
    #[arg(help_heading = "Device", long, hide_short_help = true, value_name = "N", value_parser = whole(0..=u8::MAX))]
    pub gid_index: Option<u8>,
    /// Service level of a hardware --device, 0 to 15; on RoCE the priority, 0 to 7 [default: 0].
    #[arg(help_heading = "Device", long, hide_short_help = true, value_name = "N", value_parser = whole(0..=15_u8))]
    pub sl: Option<u8>,
    /// Traffic class of a hardware --device, 0 to 255; on RoCE v2 the upper 6 bits are the DSCP
    /// [default: 0].
    #[arg(help_heading = "Device", long, hide_short_help = true, value_name = "N", value_parser = whole(0..=u8::MAX))]
    pub traffic_class: Option<u8>,
    /// Maximum payload of a packet of a hardware --device in bytes: 256, 512, 1024, 2048 or 4096
    /// [default: the active MTU of the port]. A connection uses the smaller value of its two ends.
    #[arg(help_heading = "Device", long, hide_short_help = true, value_name = "BYTES", value_parser = parse_mtu)]
    pub mtu: Option<u16>,
}

fn parse_mtu(text: &str) -> Result<u16, String> {
    let is_legal = |mtu: &u16| [256, 512, 1024, 2048, 4096].contains(mtu);
    let mtu = text.parse().ok().filter(is_legal);
    mtu.ok_or_else(|| "use 256, 512, 1024, 2048 or 4096".to_owned())
}

impl PortOptions {
    fn given(&self) -> impl Iterator<Item = (&'static str, u16)> {
        let Self {
            port,
            gid_index,
            sl,
            traffic_class,
            mtu,
        } = *self;
        let bytes = [
            ("--port", port),
            ("--gid-index", gid_index),
            ("--sl", sl),
            ("--traffic-class", traffic_class),
        ];
        bytes
            .map(|(flag, value)| (flag, value.map(u16::from)))
            .into_iter()
            .chain([("--mtu", mtu)])
            .filter_map(|(flag, value)| Some((flag, value?)))
    }

    /// Refuses options of a port for a software device, and a port that differs from the port in
    /// the name of a device.
    ///
    /// # Errors
    /// The first such option.
    pub fn check(&self, devices: &Devices) -> Result<(), RangeError> {
        devices.iter().try_for_each(|device| self.check_one(device))
    }

    fn check_one(&self, device: &DeviceChoice) -> Result<(), RangeError> {
        match (device, self.given().next()) {
            (
                DeviceChoice::Auto | DeviceChoice::Soft(_) | DeviceChoice::Roce(_),
                Some((flag, value)),
            ) => {
                let why = "the software device has no port";
                let legal = "no value without a hardware --device, such as mlx5_0";
                Err(range(flag, value, why, legal.to_owned()))
            }
            (
                DeviceChoice::Verbs {
                    port: Some(named), ..
                },
                _,
            ) => match self.port.filter(|port| port != named) {
                None => Ok(()),
                Some(given) => {
                    let legal = format!("{named}, or a --device without a port");
                    Err(range("--port", given, "--device names another port", legal))
                }
            },
            _ => Ok(()),
        }
    }

    /// Adds the options to a device.
    pub fn on(&self, device: DeviceSpec) -> DeviceSpec {
        let DeviceSpec::Verbs(mut options) = device else {
            return device;
        };
        options.port = self.port.or(options.port);
        options.gid_index = self.gid_index;
        options.service_level = self.sl.unwrap_or(options.service_level);
        options.traffic_class = self.traffic_class.unwrap_or(options.traffic_class);
        options.mtu = self.mtu;
        DeviceSpec::Verbs(options)
    }
}

/// Formats the options as they are typed.
impl std::fmt::Display for PortOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let given = self.given();
        let text: Vec<String> = given
            .map(|(flag, value)| format!("{flag} {value}"))
            .collect();
        f.write_str(&text.join(" "))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use mlx5::verbs::VerbsOptions;

    use super::*;
    use crate::cli::Cli;
    use crate::options::Options;

    fn parse(args: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(std::iter::once("benchkv").chain(args.split_whitespace()))
    }

    fn spec(args: &str) -> Result<VerbsOptions, String> {
        let options = Options::resolve(parse(args).unwrap()).map_err(|error| error.to_string())?;
        match &options.device_specs(std::path::Path::new("/dev/shm"))[..] {
            [DeviceSpec::Verbs(options)] => Ok(options.clone()),
            devices => Err(format!("{devices:?}")),
        }
    }

    #[test]
    fn options_of_the_port_reach_the_driver_and_are_printed() {
        let args = "--port 2 --gid-index 3 --sl 4 --traffic-class 104 --mtu 1024";
        let device = Some("mlx5_1".to_owned());
        let all = VerbsOptions {
            device: device.clone(),
            port: Some(2),
            gid_index: Some(3),
            service_level: 4,
            traffic_class: 104,
            mtu: Some(1024),
            ..VerbsOptions::default()
        };
        assert_eq!(spec(&format!("--device mlx5_1 {args}")), Ok(all));
        assert_eq!(
            spec("--device mlx5_1:7"),
            Ok(VerbsOptions {
                device: device.clone(),
                port: Some(7),
                ..VerbsOptions::default()
            })
        );
        assert_eq!(
            spec("--device mlx5_1:7 --port 7 --mtu 256").unwrap().port,
            Some(7)
        );
        let plan = Options::resolve(parse(&format!("--device mlx5_1 {args}")).unwrap())
            .unwrap()
            .to_string();
        assert!(plan.contains(args), "{plan}");
    }

    #[test]
    fn a_device_without_such_a_port_is_refused_with_what_to_do() {
        for (args, said) in [
            (
                "--device soft --gid-index 0",
                "--gid-index 0: the software device has no port; legal is no value without a hardware --device, such as mlx5_0",
            ),
            ("--device soft --mtu 256", "--mtu 256: "),
            (
                "--device mlx5_0:1 --port 2",
                "--port 2: --device names another port; legal is 1",
            ),
        ] {
            let refused = spec(args).unwrap_err();
            assert!(refused.starts_with(said), "{refused}");
        }
        for (args, legal) in [
            ("--sl 16", "from 0 to 15"),
            ("--port 0", "from 1 to 255"),
            ("--mtu 1500", "256, 512, 1024, 2048 or 4096"),
            ("--gid-index 256", "from 0 to 255"),
        ] {
            let refused = parse(&format!("--device mlx5_0 {args}")).unwrap_err();
            assert!(
                refused.exit_code() == 2 && refused.to_string().contains(legal),
                "{refused}"
            );
        }
    }
}
