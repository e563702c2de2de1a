//! The reasons why a region could not be created or opened.

use std::io;
use std::path::PathBuf;

use crate::dir::NAME_BYTES_MAX;
use crate::header::VERSION;

/// The reason why a region could not be created. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The name is not usable.
    #[error(
        "region name {0:?} must be 1 to {NAME_BYTES_MAX} letters, digits, '-', '_' or '.', and not start with '.'"
    )]
    BadName(String),
    /// A living process owns a region of that name.
    #[error("{} belongs to a living process: choose another name, or end that process", .0.display())]
    Exists(PathBuf),
    /// A file that is not a region of this version and user is in the way. The file is not touched.
    #[error("{} exists and is not a region of this version and user: remove it or choose another name", .0.display())]
    Foreign(PathBuf),
    /// Another process is replacing a dead region in this directory; try again.
    #[error("{} is being replaced by another process: try again", .0.display())]
    Busy(PathBuf),
    /// The file system is too full.
    #[error("{} needs {need} bytes and {have} are free: make room, ask for less, or choose another directory", path.display())]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// Bytes needed.
        need: u64,
        /// Bytes free in the file system.
        have: u64,
    },
    /// The process may not have files of that size.
    #[error("{} needs {need} bytes and RLIMIT_FSIZE allows {limit}: raise it (ulimit -f) or ask for less", path.display())]
    FileLimit {
        /// The file.
        path: PathBuf,
        /// Bytes needed.
        need: u64,
        /// Bytes allowed.
        limit: u64,
    },
    /// The kernel refused for another reason, a lack of permission among them.
    #[error("cannot create {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

/// The reason why a region could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The name is not usable.
    #[error(
        "region name {0:?} must be 1 to {NAME_BYTES_MAX} letters, digits, '-', '_' or '.', and not start with '.'"
    )]
    BadName(String),
    /// No region has this name: its owner has not started yet, or ended in good order.
    #[error("{} does not exist: is its owner running, as user {}, with the same directory?", .0.display(), crate::sys::user())]
    NotFound(PathBuf),
    /// The owner died or closed the region; its successor will replace the file.
    #[error("the owner of {} is gone: start it again", .0.display())]
    OwnerGone(PathBuf),
    /// The file belongs to another user, who could write anything into it.
    #[error("{} belongs to user {owner}, not to {user}: remove it", path.display())]
    ForeignOwner {
        /// The file.
        path: PathBuf,
        /// User id of the file's owner.
        owner: u32,
        /// The effective user id of this process.
        user: u32,
    },
    /// The file is not a region of this crate.
    #[error("{} is not a region of this crate", .0.display())]
    Foreign(PathBuf),
    /// The file is a region of another layout version.
    #[error("{} has layout version {found}, this program needs {VERSION}: use programs of one build", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// The version in the file.
        found: u32,
    },
    /// The file is a region of another kind, for another purpose.
    #[error("{} holds a region of kind {found:#x}, not {wanted:#x}: wrong name, another kind of server, or programs of different builds", path.display())]
    Kind {
        /// The file.
        path: PathBuf,
        /// The kind in the file.
        found: u64,
        /// The kind asked for.
        wanted: u64,
    },
    /// The region has fewer bytes than were asked for, or the file has fewer than its header
    /// claims.
    #[error("{} holds {have} bytes where {need} are needed: it is truncated, or made by another configuration", path.display())]
    TooSmall {
        /// The file.
        path: PathBuf,
        /// User bytes needed.
        need: u64,
        /// User bytes present.
        have: u64,
    },
    /// The kernel refused for another reason, a lack of permission among them.
    #[error("cannot open {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

impl OpenError {
    /// Returns whether trying again may help soon: the owner has not started yet, or is gone and
    /// will be replaced.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::NotFound { .. } | Self::OwnerGone { .. })
    }
}
