//! The RDMA device of a benchmark, as named on a command line.

mod soft;

use std::path::Path;

use mlx5::verbs::{VerbsError, VerbsOptions};
use mlx5::{DeviceSpec, FabricSpec, SoftOptions};
pub use soft::SoftDevice;

/// The value of `--device`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    #[default]
    /// The software device: hardware is used only if it is named.
    Auto,
    /// The software device.
    Soft(SoftDevice),
    /// A device behind libibverbs.
    Verbs {
        /// Its name; `None` is the first device with an active port.
        name: Option<String>,
        /// Its port; `None` is the first active port.
        port: Option<u8>,
    },
}

impl std::str::FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let device = match text {
            "auto" => return Ok(Self::Auto),
            "soft" => return Ok(Self::Soft(SoftDevice::default())),
            "verbs" => return Ok(Self::Verbs { name: None, port: None }),
            text if text.starts_with("mlx5_") => text,
            text => match (text.strip_prefix("soft:"), text.strip_prefix("verbs:").filter(|name| !name.is_empty())) {
                (Some(options), _) => return options.parse().map(Self::Soft),
                (None, Some(name)) => name,
                (None, None) => return Err("use auto, soft[:KEY=VALUE,...], verbs, mlx5_N[:PORT] or verbs:NAME[:PORT]".to_owned()),
            },
        };
        let (name, port) = match device.split_once(':') {
            Some((name, port)) => (name, Some(port_number(port)?)),
            None => (device, None),
        };
        Ok(Self::Verbs { name: Some(name.to_owned()), port })
    }
}

fn port_number(text: &str) -> Result<u8, String> {
    let number = text.parse().ok().filter(|number| *number > 0);
    number.ok_or_else(|| format!("{text} is not a port; ports are numbered from 1 to 255"))
}

/// Formats the device as it is typed.
impl std::fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Soft(options) => options.fmt(f),
            Self::Verbs { name, port } => {
                let name = name.as_deref();
                f.write_str(if name.is_some_and(|name| name.starts_with("mlx5_")) { "" } else { "verbs" })?;
                match name {
                    Some(name) if name.starts_with("mlx5_") => f.write_str(name)?,
                    Some(name) => write!(f, ":{name}")?,
                    None => {}
                }
                port.map_or(Ok(()), |port| write!(f, ":{port}"))
            }
        }
    }
}

impl DeviceChoice {
    /// Replaces `auto` by its meaning: hardware is used if it is named, and never by default.
    #[must_use]
    pub fn resolve(self) -> Self {
        if self == Self::Auto { Self::Soft(SoftDevice::default()) } else { self }
    }

    /// Returns whether it connects the processes of one host only.
    #[must_use]
    pub const fn is_soft(&self) -> bool {
        matches!(self, Self::Auto | Self::Soft(_))
    }

    /// Checks before a long run whether the device exists. Opens nothing; the software device always exists.
    ///
    /// # Errors
    /// The missing device or library.
    pub fn check(&self) -> Result<(), VerbsError> {
        match self.spec(None) {
            DeviceSpec::Verbs(options) => options.find(),
            _ => Ok(()),
        }
    }

    /// Returns the device to open. Software devices connect through `shm_dir`; `None` is the directory of this user.
    #[must_use]
    pub fn spec(&self, shm_dir: Option<&Path>) -> DeviceSpec {
        match self {
            Self::Auto => Self::Soft(SoftDevice::default()).spec(shm_dir),
            Self::Soft(options) => {
                let fabric = FabricSpec::Shared { dir: shm_dir.map(Path::to_owned) };
                DeviceSpec::Soft(SoftOptions { fabric, timing: options.timing(), faults: options.faults(), ..SoftOptions::default() })
            }
            Self::Verbs { name, port } => DeviceSpec::Verbs(VerbsOptions { device: name.clone(), port: *port, ..VerbsOptions::default() }),
        }
    }
}
