//! The launcher's options, read once when the library is loaded.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use mlx5_hca::{PortAddress, Timing};

use crate::options::config::{
    CHECK_BUFFERS, CHECK_DOORBELLS, DEVICE, DEVICES, FABRIC, FAULTS, GIDS, LIMITS, LINK, LOG,
    LOG_COMMANDS, Link, TREE, parse_gids,
};
use crate::options::errno::Errno;
use crate::options::faults::{Fault, of_hca, timing};
use crate::options::limits::{self, Limit};

#[derive(Debug)]
pub(crate) struct Settings {
    /// `st_rdev` of the first device's file. The numbers of the other files follow.
    pub(crate) device: libc::dev_t,
    pub(crate) network: &'static [PortAddress],
    pub(crate) tree: PathBuf,
    pub(crate) link: Link,
    pub(crate) fabric: PathBuf,
    /// The faults, each with the number of commands that matched it until now.
    faults: Vec<(Fault, AtomicU64)>,
    /// Changes that an open device makes without a command, the earliest first, with their times in
    /// ms after the device was opened.
    pub(crate) changes: Vec<(u32, Change)>,
    pub(crate) of_hca: mlx5_hca::Faults,
    limits: Vec<(Limit, u64)>,
    /// Time at which the HCA executes work requests.
    pub(crate) timing: Timing,
    pub(crate) check_doorbells: bool,
    pub(crate) check_buffers: bool,
    /// File to which log lines are appended; `-` is standard error.
    pub(crate) log: Option<PathBuf>,
    pub(crate) log_commands: bool,
}

/// A change of an open device that a fault requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Port {
        /// Whether the port is up after the change.
        is_up: bool,
    },
    Fatal,
}

static SETTINGS: OnceLock<Option<Settings>> = OnceLock::new();

/// Returns the launcher's options; `None` without a launcher.
pub(crate) fn get() -> Option<&'static Settings> {
    SETTINGS
        .get_or_init(|| Settings::new(|name| std::env::var_os(name)))
        .as_ref()
}

impl Settings {
    /// Reads the variables. Returns `None` if a required variable is missing, or if a variable has
    /// a value that no launcher sets.
    pub(crate) fn new(variable: impl Fn(&str) -> Option<OsString>) -> Option<Self> {
        let text = |name| variable(name)?.into_string().ok();
        let (major, minor) = text(DEVICE)?
            .split_once(':')
            .map(|(major, minor)| (major.parse().ok(), minor.parse().ok()))?;
        let faults = text(FAULTS).unwrap_or_default();
        let faults = faults.split(',').filter(|one| !one.is_empty());
        let faults: Vec<_> = faults.map(Fault::parse).collect::<Result<_, _>>().ok()?;
        let limits = text(LIMITS).unwrap_or_default();
        let limits = limits.split(',').filter(|one| !one.is_empty());
        let link = Link::parse(&text(LINK)?).ok()?;
        Some(Self {
            device: libc::makedev(major?, minor?),
            network: link.network(
                text(DEVICES)?.parse().ok()?,
                &parse_gids(&text(GIDS).unwrap_or_default()).ok()?,
            ),
            tree: variable(TREE)?.into(),
            link,
            fabric: variable(FABRIC)?.into(),
            changes: changes(&faults),
            of_hca: of_hca(&faults).ok()?,
            limits: limits.map(limits::parse).collect::<Result<_, _>>().ok()?,
            timing: timing(&faults, variable(CHECK_BUFFERS).is_some()),
            faults: faults
                .into_iter()
                .map(|fault| (fault, AtomicU64::new(0)))
                .collect(),
            check_doorbells: variable(CHECK_DOORBELLS).is_some(),
            check_buffers: variable(CHECK_BUFFERS).is_some(),
            log: variable(LOG).map(PathBuf::from),
            log_commands: variable(LOG_COMMANDS).is_some(),
        })
    }

    /// Returns the lowest of the limits that the launcher sets and the limit of the software HCA.
    pub(crate) fn limit(&self, limit: Limit, of_hca: u64) -> u64 {
        let all = self.limits.iter().filter(|(known, _)| *known == limit);
        all.map(|(_, value)| *value).fold(of_hca, u64::min)
    }

    pub(crate) fn has(&self, fault: Fault) -> bool {
        self.faults.iter().any(|(known, _)| *known == fault)
    }

    /// Fails with the error of the fault `open=ERRNO`, if that fault was requested.
    pub(crate) fn open_fault(&self) -> Result<(), Errno> {
        let errno = self.faults.iter().find_map(|(fault, _)| match *fault {
            Fault::Open(errno) => Some(errno),
            _ => None,
        });
        errno.map_or(Ok(()), Err)
    }

    /// Counts the command, and fails if a fault of the command is due.
    pub(crate) fn command_fault(&self, number: u8) -> Result<(), Errno> {
        for (fault, attempts) in &self.faults {
            match *fault {
                Fault::Command {
                    number: of,
                    errno,
                    after,
                } if of == number && attempts.fetch_add(1, Ordering::Relaxed) >= after.into() => {
                    return Err(errno);
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Returns the changes that the faults make, the earliest first.
fn changes(faults: &[Fault]) -> Vec<(u32, Change)> {
    let mut changes = Vec::new();
    for fault in faults {
        match *fault {
            Fault::PortFails { at_ms, for_ms } => {
                changes.push((at_ms, Change::Port { is_up: false }));
                let up = |for_ms| (at_ms.saturating_add(for_ms), Change::Port { is_up: true });
                changes.extend(for_ms.map(up));
            }
            Fault::DeviceFails { at_ms } => changes.push((at_ms, Change::Fatal)),
            // The other faults have no time at which they change an open device.
            _ => {}
        }
    }
    changes.sort_by_key(|&(at_ms, _)| at_ms);
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Option<Settings> {
        Settings::new(|name| {
            variables
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| value.into())
        })
    }

    #[test]
    fn settings_are_those_of_the_launcher() {
        let of_launcher = [
            (DEVICE, "231:192"),
            (DEVICES, "2"),
            (TREE, "/t"),
            (LINK, "roce"),
            (FABRIC, "/x"),
            (FAULTS, "port=down,open=EACCES"),
            (LOG, "/log"),
        ];
        let it = settings(&of_launcher).unwrap();
        assert_eq!(
            (it.device, it.link, !it.has(Fault::PortDown)),
            (libc::makedev(231, 192), Link::Ethernet(None), false)
        );
        assert_eq!(it.network.len(), 2);
        assert_eq!(it.open_fault(), Err(Errno(libc::EACCES)));
        assert!(it.log.is_some_and(|path| path.as_os_str() == "/log"));
        assert!(!it.log_commands);
    }

    #[test]
    fn without_a_launcher_there_are_none() {
        assert!(settings(&[]).is_none());
        assert!(settings(&[(DEVICE, "231:192"), (LINK, "ib")]).is_none());
        assert!(
            settings(&[
                (DEVICE, "231"),
                (DEVICES, "1"),
                (TREE, "/t"),
                (LINK, "ib"),
                (FABRIC, "/x")
            ])
            .is_none()
        );
    }

    #[test]
    fn a_fault_comes_after_as_many_commands_as_it_says() {
        let of_launcher = [
            (DEVICE, "1:2"),
            (DEVICES, "1"),
            (TREE, "/t"),
            (LINK, "ib"),
            (FABRIC, "/x"),
            (FAULTS, "reg_mr=ENOMEM@2,create_qp=EIO"),
        ];
        let it = settings(&of_launcher).unwrap();
        let results: Vec<_> = (0..4).map(|_| it.command_fault(9).is_ok()).collect();
        assert_eq!(results, [true, true, false, false]);
        assert_eq!(it.command_fault(24), Err(Errno(libc::EIO)));
        assert_eq!(it.command_fault(3), Ok(()));
    }
}
