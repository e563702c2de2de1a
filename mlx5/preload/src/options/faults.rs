//! Faults on request, `--fault KEY=VALUE`. The launcher parses them, and applies those in the tree; the library applies the others.

use std::fmt;

use super::errno::Errno;
use super::names;

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// No device in the tree.
    NoDevices,
    /// No GID at the port.
    NoGid,
    /// The port reports that it is down.
    PortDown,
    /// The port goes down `at_ms` after the device was opened, and up again `for_ms` later.
    PortFails {
        /// Time of the failure.
        at_ms: u32,
        /// Duration; `None`: without end.
        for_ms: Option<u32>,
    },
    /// The device fails `at_ms` after it was opened.
    DeviceFails {
        /// Time of the failure.
        at_ms: u32,
    },
    /// The device has no atomics.
    NoAtomics,
    /// The device file cannot be opened.
    Open(Errno),
    /// Commands with this number fail, except for the first `after`.
    Command {
        /// Number of the command.
        number: u8,
        /// The error.
        errno: Errno,
        /// Number of commands that succeed before.
        after: u32,
    },
}

impl Fault {
    /// Parses `port=down`, `port=down@100+50`, `device=fatal@100`, `reg_mr=ENOMEM`, `create_qp=ENOMEM@3`, …
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let (key, value) = text.split_once('=').ok_or_else(|| format!("`{text}` is not KEY=VALUE"))?;
        let fixed = |legal: &str, fault| if value == legal { Ok(fault) } else { Err(format!("{key} is `{value}`; legal is `{legal}`")) };
        match key {
            "devices" => fixed("none", Self::NoDevices),
            "gid" => fixed("none", Self::NoGid),
            "port" => match value.strip_prefix("down@") {
                None => fixed("down", Self::PortDown),
                Some(when) => {
                    let (at, length) = when.split_once('+').map_or((when, None), |(at, length)| (at, Some(length)));
                    Ok(Self::PortFails { at_ms: milliseconds(at)?, for_ms: length.map(milliseconds).transpose()? })
                }
            },
            "device" => match value.strip_prefix("fatal@") {
                None => Err(format!("device is `{value}`; legal is `fatal@MS`")),
                Some(at) => Ok(Self::DeviceFails { at_ms: milliseconds(at)? }),
            },
            "atomics" => fixed("none", Self::NoAtomics),
            "open" => Errno::parse(value).map(Self::Open),
            _ => {
                let number = names::number(key).ok_or_else(|| {
                    let commands: Vec<_> = names::all().collect();
                    format!("`{key}` is not a fault; legal are devices, device, gid, port, atomics, open, {}", commands.join(", "))
                })?;
                let (errno, after) = match value.split_once('@') {
                    Some((errno, after)) => (errno, after.parse().map_err(|_| format!("`{after}` is not a number of commands"))?),
                    None => (value, 0),
                };
                Ok(Self::Command { number, errno: Errno::parse(errno)?, after })
            }
        }
    }
}

fn milliseconds(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("`{text}` is not a number of milliseconds"))
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevices => f.write_str("devices=none"),
            Self::NoGid => f.write_str("gid=none"),
            Self::PortDown => f.write_str("port=down"),
            Self::PortFails { at_ms, for_ms: None } => write!(f, "port=down@{at_ms}"),
            Self::PortFails { at_ms, for_ms: Some(for_ms) } => write!(f, "port=down@{at_ms}+{for_ms}"),
            Self::DeviceFails { at_ms } => write!(f, "device=fatal@{at_ms}"),
            Self::NoAtomics => f.write_str("atomics=none"),
            Self::Open(errno) => write!(f, "open={errno}"),
            Self::Command { number, errno, after } => write!(f, "{}={errno}@{after}", names::command(*number).unwrap_or("?")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_what_they_were_written_as() {
        for text in [
            "devices=none",
            "gid=none",
            "port=down",
            "port=down@300",
            "port=down@300+50",
            "device=fatal@20",
            "atomics=none",
            "open=EACCES",
            "reg_mr=ENOMEM@0",
            "create_qp=ENOSPC@3",
            "modify_cq=EIO@1",
        ] {
            assert_eq!(Fault::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Fault::parse("reg_mr=ENOMEM"), Fault::parse("reg_mr=ENOMEM@0"));
    }

    #[test]
    fn bad_faults_are_refused_with_the_legal_ones() {
        let error = |text| Fault::parse(text).unwrap_err();
        assert!(error("port").contains("KEY=VALUE"));
        assert!(error("port=up").contains("`down`"));
        assert!(error("port=down@now").contains("`now`"));
        assert!(error("port=down@1+").contains("``"));
        assert!(error("device=down").contains("`fatal@MS`"));
        assert!(error("reg_mr=ENOTHING").contains("ENOMEM"));
        assert!(error("reg_mr=ENOMEM@x").contains("`x`"));
        assert!(error("register=ENOMEM").contains("reg_mr"));
    }
}
