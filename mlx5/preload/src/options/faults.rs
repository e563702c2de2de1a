//! Faults on request, `--fault KEY=VALUE`. The launcher parses all of them, and applies those of the tree. The library applies the others.

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
    /// The device says that it has no shared receive queues.
    NoSrqs,
    /// The device file cannot be opened.
    Open(Errno),
    /// Commands with this number fail, except for the first `after`.
    Command {
        /// Number of the command.
        number: u8,
        /// The error.
        errno: Errno,
        /// Number of commands that succeed before the first failure.
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
            "srq" => fixed("none", Self::NoSrqs),
            "open" => Errno::parse(value).map(Self::Open),
            _ => {
                let number = names::number(key).ok_or_else(|| {
                    let commands: Vec<_> = names::all().collect();
                    format!("`{key}` is not a fault; legal are devices, device, gid, port, atomics, srq, open, {}", commands.join(", "))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_those_that_were_written() {
        let command = |number, errno, after| Fault::Command { number, errno: Errno(errno), after };
        for (text, fault) in [
            ("devices=none", Fault::NoDevices),
            ("gid=none", Fault::NoGid),
            ("port=down", Fault::PortDown),
            ("port=down@300", Fault::PortFails { at_ms: 300, for_ms: None }),
            ("port=down@300+50", Fault::PortFails { at_ms: 300, for_ms: Some(50) }),
            ("device=fatal@20", Fault::DeviceFails { at_ms: 20 }),
            ("atomics=none", Fault::NoAtomics),
            ("srq=none", Fault::NoSrqs),
            ("open=EACCES", Fault::Open(Errno(libc::EACCES))),
            ("reg_mr=ENOMEM", command(9, libc::ENOMEM, 0)),
            ("create_qp=ENOSPC@3", command(24, libc::ENOSPC, 3)),
            ("modify_cq=EIO@1", command(57, libc::EIO, 1)),
        ] {
            assert_eq!(Fault::parse(text), Ok(fault));
        }
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
