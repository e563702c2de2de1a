//! Faults on request, `--fault KEY=VALUE`. The launcher parses all faults, and applies the faults
//! of the tree. The library applies the other faults.

use std::str::FromStr;

use mlx5_hca::wire::Syndrome;
use mlx5_hca::{Faults, Timing};

use super::errno::Errno;
use super::names;

/// The statuses that a completion can be made to have, without `IBV_WC_`, and their syndromes.
const STATUSES: [(&str, Syndrome); 13] = [
    ("LOC_LEN_ERR", Syndrome::LocalLength),
    ("LOC_QP_OP_ERR", Syndrome::LocalQpOperation),
    ("LOC_PROT_ERR", Syndrome::LocalProtection),
    ("WR_FLUSH_ERR", Syndrome::WorkRequestFlushed),
    ("MW_BIND_ERR", Syndrome::MemoryWindowBind),
    ("BAD_RESP_ERR", Syndrome::BadResponse),
    ("LOC_ACCESS_ERR", Syndrome::LocalAccess),
    ("REM_INV_REQ_ERR", Syndrome::RemoteInvalidRequest),
    ("REM_ACCESS_ERR", Syndrome::RemoteAccess),
    ("REM_OP_ERR", Syndrome::RemoteOperation),
    ("RETRY_EXC_ERR", Syndrome::TransportRetryExceeded),
    ("RNR_RETRY_EXC_ERR", Syndrome::RnrRetryExceeded),
    ("REM_ABORT_ERR", Syndrome::RemoteAborted),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// No device in the tree.
    NoDevices,
    /// No GID at the port.
    NoGid,
    /// The port reports that it is down.
    PortDown,
    /// The port is down from `at_ms` after the device was opened, for `for_ms`.
    PortFails {
        at_ms: u32,
        /// Duration; `None` if the port stays down.
        for_ms: Option<u32>,
    },
    /// The device fails `at_ms` after it was opened.
    DeviceFails {
        at_ms: u32,
    },
    NoAtomics,
    /// The device reports that it has no shared receive queues.
    NoSrqs,
    Open(Errno),
    /// A work request of a send queue fails, after `after` work requests that do not fail.
    Completion {
        /// Place of the queue pair (the lower 14 bits of its number) whose work requests are
        /// counted; `None` if the work requests of all queue pairs of the device are counted.
        only: Option<u16>,
        syndrome: Syndrome,
        after: u64,
    },
    Loss {
        /// Place of the queue pair (the lower 14 bits of its number) whose messages are lost;
        /// `None` if messages of all queue pairs of the device are lost.
        only: Option<u16>,
        /// Lost attempts in a thousand.
        permille: u16,
    },
    /// Work requests and their completions are late, each by a time in this range, in us.
    Delay {
        us: (u32, u32),
    },
    /// Seed of the random times of [`Delay`](Self::Delay).
    Seed(u64),
    /// Some work requests fail. The seed determines which work requests fail, and their errors.
    Random(u64),
    /// Commands with this number fail, except for the first `after`.
    Command {
        number: u8,
        errno: Errno,
        after: u32,
    },
}

impl Fault {
    /// Parses `port=down`, `port=down@100+50`, `device=fatal@100`, `create_qp=ENOMEM@3`, …
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let (key, value) = text
            .split_once('=')
            .ok_or_else(|| format!("`{text}` is not KEY=VALUE"))?;
        let (key, only) = match key.split_once('.') {
            Some((key @ ("wc" | "loss"), place)) => {
                (key, Some(number(place, "the place of a queue pair")?))
            }
            _ => (key, None),
        };
        let fixed = |legal: &str, fault| {
            if value == legal {
                Ok(fault)
            } else {
                Err(format!("{key} is `{value}`; legal is `{legal}`"))
            }
        };
        match key {
            "devices" => fixed("none", Self::NoDevices),
            "gid" => fixed("none", Self::NoGid),
            "wc" => {
                let (status, after) = value.split_once('@').unwrap_or((value, "0"));
                let known = STATUSES.iter().find(|(name, _)| *name == status);
                let (_, syndrome) = *known.ok_or_else(|| {
                    format!(
                        "`{status}` is not a status; legal are {}",
                        STATUSES.map(|(name, _)| name).join(", ")
                    )
                })?;
                Ok(Self::Completion {
                    only,
                    syndrome,
                    after: number(after, "a number of work requests")?,
                })
            }
            "loss" => {
                let percent: Option<f64> = value
                    .strip_suffix('%')
                    .and_then(|percent| percent.parse().ok());
                let percent = percent.filter(|percent| (0.1..=100.0).contains(percent));
                let percent =
                    percent.ok_or_else(|| format!("loss is `{value}`; legal are 0.1% to 100%"))?;
                Ok(Self::Loss {
                    only,
                    permille: (percent * 10.0).round() as u16,
                })
            }
            "delay" => {
                let (from, to) = value.split_once("..").unwrap_or((value, value));
                let us = (number(from, US)?, number(to, US)?);
                if us.0 > us.1 || us.1 == 0 {
                    return Err(format!(
                        "delay is `{value}`; legal is `MIN..MAX` in us, 0..1 or more"
                    ));
                }
                Ok(Self::Delay { us })
            }
            "seed" => number(value, "a number").map(Self::Seed),
            "random" => number(value, "a number").map(Self::Random),
            "port" => match value.strip_prefix("down@") {
                None => fixed("down", Self::PortDown),
                Some(when) => {
                    let (at, length) = when
                        .split_once('+')
                        .map_or((when, None), |(at, length)| (at, Some(length)));
                    Ok(Self::PortFails {
                        at_ms: number(at, MS)?,
                        for_ms: length.map(|length| number(length, MS)).transpose()?,
                    })
                }
            },
            "device" => match value.strip_prefix("fatal@") {
                None => Err(format!("device is `{value}`; legal is `fatal@MS`")),
                Some(at) => Ok(Self::DeviceFails {
                    at_ms: number(at, MS)?,
                }),
            },
            "atomics" => fixed("none", Self::NoAtomics),
            "srq" => fixed("none", Self::NoSrqs),
            "open" => Errno::parse(value).map(Self::Open),
            _ => {
                let command = names::number(key).ok_or_else(|| {
                    let commands: Vec<_> = names::all().collect();
                    format!(
                        "`{key}` is not a fault; legal are devices, device, gid, port, atomics, srq, open, wc, loss, delay, seed, random, {}",
                        commands.join(", ")
                    )
                })?;
                let (errno, after) = value.split_once('@').unwrap_or((value, "0"));
                Ok(Self::Command {
                    number: command,
                    after: number(after, "a number of commands")?,
                    errno: Errno::parse(errno)?,
                })
            }
        }
    }
}

/// Returns the faults that the HCA makes.
///
/// # Errors
/// There are two faults `wc`, two faults `loss`, or one of each for different queue pairs.
pub(crate) fn of_hca(faults: &[Fault]) -> Result<Faults, String> {
    let (mut made, mut of) = (Faults::default(), None);
    for fault in faults {
        let (only, is_second) = match *fault {
            Fault::Completion {
                only,
                syndrome,
                after,
            } => (only, made.fail.replace((after, syndrome)).is_some()),
            Fault::Loss { only, permille } => (
                only,
                core::mem::replace(&mut made.loss_permille, permille) != 0,
            ),
            Fault::Random(seed) => {
                (made.seed, made.fail_permille) = (seed, FAIL_PERMILLE);
                continue;
            }
            _ => continue,
        };
        if is_second || of.is_some_and(|of| of != only) {
            return Err("there can be one fault `wc` and one `loss`, both for the same queue pair or for all".to_owned());
        }
        of = Some(only);
    }
    Ok(Faults {
        only: of.flatten(),
        ..made
    })
}

/// Returns the time at which the HCA executes work requests. The check of buffers works only if the
/// HCA reads the buffers late.
pub(crate) fn timing(faults: &[Fault], checks_buffers: bool) -> Timing {
    let seed = faults.iter().find_map(|fault| match fault {
        Fault::Seed(seed) => Some(*seed),
        _ => None,
    });
    let delay = faults.iter().find_map(|fault| match fault {
        Fault::Delay { us } => Some(*us),
        _ => None,
    });
    match delay.or(checks_buffers.then_some(CHECKED_US)) {
        None => Timing::Immediate,
        Some((from, to)) => Timing::Random {
            ns: (u64::from(from) * 1000, u64::from(to) * 1000),
            seed: seed.unwrap_or(0),
        },
    }
}

/// Work requests in a thousand that fail with `random`.
const FAIL_PERMILLE: u16 = 10;
/// Delays in us with which buffers are checked, if no delays were requested.
const CHECKED_US: (u32, u32) = (20, 200);
const US: &str = "a number of microseconds";
const MS: &str = "a number of milliseconds";

pub(super) fn number<T: FromStr>(text: &str, what: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("`{text}` is not {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_those_that_were_written() {
        let command = |number, errno, after| Fault::Command {
            number,
            errno: Errno(errno),
            after,
        };
        for (text, fault) in [
            ("devices=none", Fault::NoDevices),
            ("gid=none", Fault::NoGid),
            ("port=down", Fault::PortDown),
            (
                "port=down@300",
                Fault::PortFails {
                    at_ms: 300,
                    for_ms: None,
                },
            ),
            (
                "port=down@300+50",
                Fault::PortFails {
                    at_ms: 300,
                    for_ms: Some(50),
                },
            ),
            ("device=fatal@20", Fault::DeviceFails { at_ms: 20 }),
            ("atomics=none", Fault::NoAtomics),
            ("srq=none", Fault::NoSrqs),
            ("open=EACCES", Fault::Open(Errno(libc::EACCES))),
            (
                "wc=RETRY_EXC_ERR",
                Fault::Completion {
                    only: None,
                    syndrome: Syndrome::TransportRetryExceeded,
                    after: 0,
                },
            ),
            (
                "wc.2=REM_ACCESS_ERR@100",
                Fault::Completion {
                    only: Some(2),
                    syndrome: Syndrome::RemoteAccess,
                    after: 100,
                },
            ),
            (
                "loss=0.5%",
                Fault::Loss {
                    only: None,
                    permille: 5,
                },
            ),
            (
                "loss.0=100%",
                Fault::Loss {
                    only: Some(0),
                    permille: 1000,
                },
            ),
            ("delay=10..200", Fault::Delay { us: (10, 200) }),
            ("delay=50", Fault::Delay { us: (50, 50) }),
            ("seed=7", Fault::Seed(7)),
            ("random=3", Fault::Random(3)),
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
        assert!(
            error("wc=BROKEN").contains("RETRY_EXC_ERR")
                && error("wc=REM_OP_ERR@").contains("``")
                && error("wc.x=REM_OP_ERR").contains("`x`")
        );
        assert!(
            error("loss=1").contains("`1`")
                && error("loss=101%").contains("100%")
                && error("open.1=EIO").contains("`open.1`")
        );
        assert!(error("delay=9..1").contains("MIN..MAX") && error("delay=x").contains("`x`"));
        assert!(error("device=down").contains("`fatal@MS`"));
        assert!(error("reg_mr=ENOTHING").contains("ENOMEM"));
        assert!(error("reg_mr=ENOMEM@x").contains("`x`"));
        assert!(error("register=ENOMEM").contains("reg_mr"));
    }

    #[test]
    fn the_hca_makes_one_fault_of_each_kind() {
        let of = |texts: &[&str]| {
            of_hca(
                &texts
                    .iter()
                    .map(|text| Fault::parse(text).unwrap())
                    .collect::<Vec<_>>(),
            )
        };
        let both = Faults {
            fail: Some((3, Syndrome::RemoteOperation)),
            loss_permille: 20,
            only: Some(1),
            ..Faults::default()
        };
        assert_eq!(
            of(&["port=down", "wc.1=REM_OP_ERR@3", "loss.1=2%"]),
            Ok(both)
        );
        assert_eq!(of(&["port=down"]), Ok(Faults::default()));
        let random = Faults {
            seed: 3,
            fail_permille: FAIL_PERMILLE,
            ..Faults::default()
        };
        assert_eq!(of(&["random=3"]), Ok(random));
        let delay = [Fault::Delay { us: (1, 2) }, Fault::Seed(7)];
        assert!(matches!(
            timing(&delay, true),
            Timing::Random {
                ns: (1000, 2000),
                seed: 7
            }
        ));
        assert!(matches!(timing(&[], false), Timing::Immediate));
        for refused in [["loss=1%", "loss=2%"], ["wc=REM_OP_ERR", "loss.1=2%"]] {
            assert!(of(&refused).unwrap_err().contains("one"));
        }
    }
}
