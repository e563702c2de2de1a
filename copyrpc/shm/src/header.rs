//! The first page of a region's file: its identity, its owner, and the signs that the owner lives.

use std::io;
use std::mem::offset_of;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use zerocopy::{FromBytes, FromZeros, IntoBytes};

use crate::lock::LockFile;
use crate::robust::{self, ROBUST_BYTES, RobustWord};
use crate::sys;

/// "CPYRPSHM" read as a big-endian number.
pub(crate) const MAGIC: u64 = 0x4350_5952_5053_484d;
/// "CPYRPNEW": stored instead of [`MAGIC`] as long as a file has its [temporary
/// name](TEMPORARY_PREFIX) only.
pub(crate) const MAGIC_OF_TEMPORARY: u64 = 0x4350_5952_504e_4557;
/// Prefix of the names of files that are being made, in file systems without `O_TMPFILE`; 16
/// hexadecimal digits follow it.
pub(crate) const TEMPORARY_PREFIX: &str = ".new-";
pub(crate) const VERSION: u32 = 1;
/// Length of the header, after which the user's bytes begin.
pub(crate) const HEADER_BYTES: usize = 4096;
/// The byte whose lock the owner holds as long as it lives.
pub(crate) const OWNER_BYTE: u64 = 0;

/// The header in the file. After the file has got its name, only `closed` and `robust` change.
#[repr(C, align(4096))]
pub(crate) struct Header {
    /// [`MAGIC`], stored last (Release). Before that, [`MAGIC_OF_TEMPORARY`] if the file has a
    /// temporary name.
    pub(crate) magic: AtomicU64,
    pub(crate) version: u32,
    pub(crate) header_bytes: u32,
    pub(crate) kind: u64,
    pub(crate) user_bytes: u64,
    pub(crate) epoch: u64,
    /// The creator, for people who inspect a file; no decision depends on it.
    pub(crate) creator_pid: u32,
    /// 1 once the owner closed the region in good order.
    pub(crate) closed: AtomicU32,
    _reserved: [u8; 16],
    pub(crate) robust: RobustWord,
}

const _: () = {
    assert!(size_of::<Header>() == HEADER_BYTES);
    assert!(offset_of!(Header, magic) == 0);
    assert!(offset_of!(Header, version) == 8);
    assert!(offset_of!(Header, header_bytes) == 12);
    assert!(offset_of!(Header, kind) == 16);
    assert!(offset_of!(Header, user_bytes) == 24);
    assert!(offset_of!(Header, epoch) == 32);
    assert!(offset_of!(Header, creator_pid) == 40);
    assert!(offset_of!(Header, closed) == 44);
    assert!(offset_of!(Header, robust) == 64);
};

impl Header {
    /// Returns whether the region may have lost its owner: one load, no system call.
    #[inline(always)]
    pub(crate) fn may_be_ownerless(&self) -> bool {
        self.robust.owner_may_have_died()
    }

    /// Closes the region, for its owner (O3 of `docs/shm-protocols.md`).
    pub(crate) fn close(&self) {
        self.closed.store(1, Ordering::Release);
        self.robust.mark();
    }

    /// Returns whether the region is closed. Acquire (O3): the owner's earlier writes are visible.
    #[inline(always)]
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire) != 0
    }
}

/// The header of a file, copied and not trusted: the fields of [`Header`] up to the robust word.
#[derive(Debug, FromBytes, IntoBytes)]
#[repr(C)]
pub(crate) struct Claim {
    magic: u64,
    pub(crate) version: u32,
    _header_bytes: u32,
    pub(crate) kind: u64,
    pub(crate) user_bytes: u64,
    _epoch: u64,
    _creator_pid: u32,
    closed: u32,
    _reserved: [u8; 16],
    robust: [u8; ROBUST_BYTES],
}

const _: () = {
    assert!(size_of::<Claim>() == offset_of!(Header, robust) + ROBUST_BYTES);
    assert!(offset_of!(Claim, version) == offset_of!(Header, version));
    assert!(offset_of!(Claim, kind) == offset_of!(Header, kind));
    assert!(offset_of!(Claim, user_bytes) == offset_of!(Header, user_bytes));
    assert!(offset_of!(Claim, closed) == offset_of!(Header, closed));
    assert!(offset_of!(Claim, robust) == offset_of!(Header, robust));
};

impl Claim {
    /// Reads the header of `file`; `None` when the file is shorter or has another magic number.
    pub(crate) fn read(file: &LockFile) -> io::Result<Option<Self>> {
        let mut claim = Self::new_zeroed();
        let got = file.file()?.read_at(claim.as_mut_bytes(), 0)?;
        Ok((got == size_of::<Self>() && claim.magic == MAGIC).then_some(claim))
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed != 0
    }

    /// O2: a proof of death needs both: the lock is free, and the word is marked or the owner has
    /// closed the region. The lock alone may be free because another part of the process closed the
    /// file, and the word alone may be marked because only a thread has ended.
    pub(crate) fn is_dead(&self, file: &LockFile) -> bool {
        (robust::owner_died_in(&self.robust) || self.is_closed()) && !file.is_held(OWNER_BYTE)
    }
}

/// Returns whether a file of this name is being made, or was being made when its maker died.
pub(crate) fn is_temporary(name: &str) -> bool {
    let digits = name.strip_prefix(TEMPORARY_PREFIX).unwrap_or_default();
    digits.len() == 16
        && digits
            .bytes()
            .all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
}

/// Marks a file that is being made, whose owner's byte is locked. A file without the mark is not
/// removed by a sweep.
pub(crate) fn mark_temporary(file: &LockFile) {
    let mark = MAGIC_OF_TEMPORARY.to_ne_bytes();
    // Above the file-size limit a write would raise a signal: then the file stays unmarked.
    if let (Ok(file), None) = (file.file(), sys::file_size_limit_below(mark.len() as u64)) {
        let _ = file.write_at(&mark, 0);
    }
}

/// The state of a file that has the name of a region to be created or removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    Foreign,
    Alive,
    Dead,
}

pub(crate) fn standing(file: &LockFile) -> io::Result<Standing> {
    if file.file()?.metadata()?.uid() != sys::user() {
        return Ok(Standing::Foreign);
    }
    Ok(match Claim::read(file)? {
        Some(claim) if claim.version != VERSION => Standing::Foreign,
        Some(claim) if claim.is_dead(file) => Standing::Dead,
        Some(_) => Standing::Alive,
        None => Standing::Foreign,
    })
}

/// Returns the state of a file whose name [is temporary](is_temporary). For a marked file, only the
/// lock of the owner's byte counts: its maker holds the lock as long as it lives.
pub(crate) fn standing_of_temporary(file: &LockFile) -> io::Result<Standing> {
    let (mut magic, inner) = ([0; 8], file.file()?);
    let is_own = inner.metadata()?.uid() == sys::user();
    if !is_own
        || inner.read_at(&mut magic, 0)? != magic.len()
        || u64::from_ne_bytes(magic) != MAGIC_OF_TEMPORARY
    {
        return standing(file);
    }
    Ok(if file.is_held(OWNER_BYTE) {
        Standing::Alive
    } else {
        Standing::Dead
    })
}
