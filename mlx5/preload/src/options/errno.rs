//! Error numbers: the `errno` of a refused command, and their names for `--fault`.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) i32);

impl From<rustix::io::Errno> for Errno {
    fn from(errno: rustix::io::Errno) -> Self {
        Self(errno.raw_os_error())
    }
}

impl From<std::io::Error> for Errno {
    fn from(error: std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

macro_rules! names {
    ($($name:ident),*) => {
        /// The error numbers that have a name here.
        const NAMES: &[(&str, i32)] = &[$((stringify!($name), libc::$name)),*];
    };
}

names!(
    EACCES,
    EADDRINUSE,
    EADDRNOTAVAIL,
    EAGAIN,
    EBUSY,
    EFAULT,
    EHOSTUNREACH,
    EINVAL,
    EIO,
    EMFILE,
    ENETUNREACH,
    ENFILE,
    ENODEV,
    ENOENT,
    ENOMEM,
    ENOSPC,
    ENOSYS,
    ENOTTY,
    ENXIO,
    EOPNOTSUPP,
    EPERM,
    EPROTONOSUPPORT,
    ETIMEDOUT
);

impl Errno {
    /// Fails with this error if the condition holds.
    #[allow(dead_code, reason = "the launcher refuses no commands")]
    pub(crate) fn when(self, is_wrong: bool) -> Result<(), Self> {
        if is_wrong { Err(self) } else { Ok(()) }
    }

    pub(crate) fn parse(name: &str) -> Result<Self, String> {
        let known = NAMES.iter().find(|(known, _)| *known == name);
        known.map(|(_, number)| Self(*number)).ok_or_else(|| {
            let names: Vec<_> = NAMES.iter().map(|(name, _)| *name).collect();
            let names = names.join(", ");
            format!("`{name}` is not an error number known here; legal are {names}")
        })
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match NAMES.iter().find(|(_, number)| *number == self.0) {
            Some((name, _)) => f.write_str(name),
            None => write!(f, "errno {}", self.0),
        }
    }
}
