//! A named piece of shared memory that appears whole, and whose owner's death is detected and
//! followed by a clean-up.
//!
//! **O1**: the file is made without a name (`O_TMPFILE`), or with a temporary name where the file
//! system requires one; it gets its space, its lock, its header and its contents, and only then its
//! name. So a process that can open the file by its name sees a finished region, and nothing
//! remains of an owner that is killed meanwhile, except, on such a file system, the file with the
//! temporary name.
//!
//! **O2**: the owner holds the record lock of byte 0 ([`crate::lock`]) and a robust futex word; the
//! kernel releases the first and marks the second when the owner ends, even by `SIGKILL`. Each
//! alone can be wrong: the lock is lost when another part of the process opens and closes the file,
//! and the word is marked when the *thread* that created the region ends. An owner is dead if both
//! show its end, or if it closed the region and the lock is free. Both show it within about a
//! millisecond of the end.
//!
//! A forked child inherits neither the mapping nor the lock nor the word.

mod error;
mod fresh;

use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

pub use error::{CreateError, OpenError};
use fresh::Fresh;

pub use crate::robust::owner_may_be_gone;

use crate::clock::Clock;
use crate::dir::{Dir, Memory, NAME_BYTES_MAX, Parts, Removal};
use crate::header::{Claim, HEADER_BYTES, Header, MAGIC, OWNER_BYTE, VERSION};
use crate::lock::{ByteLock, LockFile};
use crate::sys::{self, Mapping};

/// Maximum number of attempts of [`Region::create`] to give a file its name. If the name is taken,
/// a dead region of that name is removed before the next attempt.
const REPLACE_ATTEMPTS: usize = 16;

/// The known state of a region's owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnerState {
    /// The death of the owner is not proven.
    Alive,
    /// The owner closed the region in good order; its earlier writes are complete.
    Closed,
    /// The death of the owner is proven.
    Dead,
}

/// The user bytes of a region: an address and a length, with checked arithmetic. Other processes
/// write the bytes, so access them through atomics or validated copies.
#[derive(Debug, Clone, Copy)]
pub struct RegionView<'a> {
    base: NonNull<u8>,
    len: usize,
    _region: PhantomData<&'a Region>,
}

impl RegionView<'_> {
    /// Returns the first user byte, aligned to 4096.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the number of user bytes.
    #[must_use]
    #[expect(
        clippy::len_without_is_empty,
        reason = "a length in bytes, not a collection"
    )]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the address of a `T` at `offset`; `None` unless all of the `T` lies inside the
    /// region and is aligned.
    #[must_use]
    pub fn at<T>(&self, offset: usize) -> Option<NonNull<T>> {
        self.array_at(offset, 1)
    }

    /// Returns the address of `count` consecutive `T`s at `offset`; `None` unless all of them lie
    /// inside the region and are aligned.
    #[must_use]
    pub fn array_at<T>(&self, offset: usize, count: usize) -> Option<NonNull<T>> {
        let bytes = count.checked_mul(size_of::<T>())?;
        if offset.checked_add(bytes)? > self.len {
            return None;
        }
        // SAFETY: `offset` is at most the length of the mapping behind `base`.
        let address = unsafe { self.base.add(offset) }.cast::<T>();
        address.is_aligned().then_some(address)
    }
}

/// A mapped region. Its owner maps it by [`Region::create`], and a peer by [`Region::open`].
///
/// `Send + Sync`. The owner of a region in a file is best dropped by the thread that created it:
/// otherwise the first page, and with it the file's memory, stays until the process ends, because
/// the mutex in this page is linked into the creating thread's list of robust futexes. In a forked
/// child the memory is not mapped: do not touch it; dropping the region is harmless.
#[derive(Debug)]
pub struct Region {
    /// Unmapped in `drop`, except for the first page if another thread created the region.
    map: ManuallyDrop<Mapping>,
    file: LockFile,
    dir: Dir,
    name: String,
    epoch: u64,
    /// The lock of byte 0; `None` in a peer.
    owner: Option<ByteLock>,
}

impl Region {
    /// Creates the region `name` of `kind` with `user_bytes` zeroed bytes, runs `init` on them, and
    /// only then lets others see it.
    ///
    /// The file has `user_bytes + 4096` bytes, all allocated, mode 0600. `kind` is the caller's
    /// magic number and layout version in one. A region of the same name whose owner is proven dead
    /// is replaced.
    ///
    /// Dropping the region closes it (peers see [`OwnerState::Closed`]) and removes the name.
    ///
    /// # Errors
    /// [`CreateError`]; nothing is left behind.
    pub fn create(
        dir: &Dir,
        name: &str,
        kind: u64,
        user_bytes: usize,
        init: impl FnOnce(RegionView<'_>),
    ) -> Result<Self, CreateError> {
        if !is_valid_name(name) {
            return Err(CreateError::BadName(name.to_owned()));
        }
        if let Some(memory) = dir.memory() {
            return Self::create_in_memory(memory, dir, name, kind, user_bytes, init);
        }
        let path = dir.path().join(name);
        let fresh = Fresh::new(dir).map_err(|source| CreateError::Io { path, source })?;
        Self::create_in(fresh, dir, name, kind, user_bytes, init)
    }

    fn create_in_memory(
        memory: &Memory,
        dir: &Dir,
        name: &str,
        kind: u64,
        user_bytes: usize,
        init: impl FnOnce(RegionView<'_>),
    ) -> Result<Self, CreateError> {
        let path = || dir.path().join(name);
        let io_error = |source| CreateError::Io {
            path: path(),
            source,
        };
        let map = Mapping::of_no_file(HEADER_BYTES.saturating_add(user_bytes)).map_err(io_error)?;
        prepare(&map, kind, user_bytes, init).map_err(io_error)?;
        let file = LockFile::of_no_file();
        let lock = file
            .try_lock(OWNER_BYTE)
            .map_err(|error| io_error(io::Error::other(error)))?;
        let region = Parts { map, file };
        header_of(&region.map).robust.hold();
        // O1: header and contents are complete.
        header_of(&region.map).magic.store(MAGIC, Ordering::Release);
        if !memory.add(name, &region) {
            return Err(CreateError::Exists(path()));
        }
        Ok(Self::of(region, dir, name, Some(lock)))
    }

    fn create_in(
        fresh: Fresh,
        dir: &Dir,
        name: &str,
        kind: u64,
        user_bytes: usize,
        init: impl FnOnce(RegionView<'_>),
    ) -> Result<Self, CreateError> {
        let io_error = |source| CreateError::Io {
            path: dir.path().join(name),
            source,
        };
        let file_bytes = fresh::allocate(&fresh.file, user_bytes, &dir.path().join(name))?;
        let map = Mapping::new(&fresh.file, file_bytes, true, true).map_err(io_error)?;
        prepare(&map, kind, user_bytes, init).map_err(io_error)?;
        let header = header_of(&map);
        // SAFETY: the mutex is zeroed and not shared yet; the drop of the region unlocks the mutex,
        // or keeps its page mapped.
        unsafe { header.robust.lock_new() }.map_err(io_error)?;
        // O1: header and contents are complete, and the file is locked.
        header.magic.store(MAGIC, Ordering::Release);
        // `_temporary` lives to the end of this function, so the file keeps its temporary name, if
        // it has one, until `publish` has given it its own.
        let Fresh {
            file,
            lock,
            temporary: _temporary,
        } = fresh;
        let region = Self::of(Parts { map, file }, dir, name, Some(lock));
        region.publish()?;
        Ok(region)
    }

    /// Gives the finished file its name. Replaces a dead region of that name.
    fn publish(&self) -> Result<(), CreateError> {
        let path = || self.dir.path().join(&self.name);
        for _ in 0..REPLACE_ATTEMPTS {
            match fresh::link(&self.file, self.dir.at(&self.name)) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                done => {
                    return done.map_err(|source| CreateError::Io {
                        path: path(),
                        source,
                    });
                }
            }
            match self.dir.remove_dead(&self.name) {
                Ok(Removal::Gone) => {}
                Ok(Removal::Alive) => return Err(CreateError::Exists(path())),
                Ok(Removal::Foreign) => return Err(CreateError::Foreign(path())),
                Ok(Removal::Busy) => break,
                Err(source) => {
                    return Err(CreateError::Io {
                        path: path(),
                        source,
                    });
                }
            }
        }
        Err(CreateError::Busy(path()))
    }

    /// Opens the region `name` of `kind`, which has at least `min_bytes` user bytes and a living
    /// owner.
    ///
    /// Everything is checked before anything is mapped: magic number, version, kind, and the length
    /// of the file, which must not be below the length in its header. Peers can read the header's
    /// page and not write it. The owner's own process may open its region too.
    ///
    /// # Errors
    /// [`OpenError`]. After [`OpenError::NotFound`] and [`OpenError::OwnerGone`] wait for the owner
    /// and try again.
    pub fn open(dir: &Dir, name: &str, kind: u64, min_bytes: usize) -> Result<Self, OpenError> {
        if !is_valid_name(name) {
            return Err(OpenError::BadName(name.to_owned()));
        }
        let path = dir.path().join(name);
        if let Some(memory) = dir.memory() {
            let parts = memory.get(name).ok_or(OpenError::NotFound(path.clone()))?;
            let header = header_of(&parts.map);
            fits(
                &path,
                (header.kind, header.user_bytes),
                kind,
                min_bytes as u64,
            )?;
            return Ok(Self::of(parts, dir, name, None));
        }
        let file = LockFile::open(&dir.at(name)).map_err(|source| match source.raw_os_error() {
            Some(libc::ENOENT) => OpenError::NotFound(path.clone()),
            Some(libc::ELOOP | libc::EINVAL) => OpenError::Foreign(path.clone()),
            _ => OpenError::Io {
                path: path.clone(),
                source,
            },
        })?;
        let user_bytes = check(&file, &path, kind, min_bytes as u64)?;
        let map = Mapping::new(&file, HEADER_BYTES + user_bytes, true, true)
            .and_then(|map| map.protect_front(HEADER_BYTES).map(|()| map))
            .map_err(|source| OpenError::Io { path, source })?;
        Ok(Self::of(Parts { map, file }, dir, name, None))
    }

    fn of(parts: Parts, dir: &Dir, name: &str, owner: Option<ByteLock>) -> Self {
        let Parts { map, file } = parts;
        Self {
            epoch: header_of(&map).epoch,
            map: ManuallyDrop::new(map),
            file,
            dir: dir.clone(),
            name: name.to_owned(),
            owner,
        }
    }

    #[inline(always)]
    fn header(&self) -> &Header {
        header_of(&self.map)
    }

    /// Returns the clock of the region's directory.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        self.dir.clock()
    }

    /// Returns the user bytes.
    #[must_use]
    pub fn view(&self) -> RegionView<'_> {
        view_of(&self.map)
    }

    /// Returns the directory of the region.
    #[must_use]
    pub fn dir(&self) -> &Dir {
        &self.dir
    }

    /// Returns the name of the region in its directory.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the random number of this creation of the region. Never 0.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns whether the memory is mapped. In a forked child it is not: the child must not access
    /// [`view`](Self::view). Costs a system call.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.map.is_here()
    }

    /// Returns the region's file, for further locks: byte 0 is the owner's, the other bytes are
    /// free.
    #[must_use]
    pub fn lock_file(&self) -> &LockFile {
        &self.file
    }

    /// Returns whether the owner may be gone, so that [`owner_state`](Self::owner_state) is worth
    /// its system call. This is one load of a line that is written only when the owner ends: cheap
    /// enough for every call.
    #[must_use]
    #[inline(always)]
    pub fn owner_hint(&self) -> bool {
        self.header().may_be_ownerless()
    }

    /// Returns the word that [`owner_hint`](Self::owner_hint) reads, for users that read the word
    /// with every operation: [`owner_may_be_gone`] of its value is the hint. The word is mapped as
    /// long as this value lives.
    #[must_use]
    pub fn owner_word(&self) -> NonNull<AtomicU32> {
        NonNull::from(self.header().robust.word())
    }

    /// Returns the proven state of the owner. Makes no system call as long as
    /// [`owner_hint`](Self::owner_hint) is false; otherwise takes about 200 ns.
    #[must_use]
    pub fn owner_state(&self) -> OwnerState {
        let header = self.header();
        if header.is_closed() {
            OwnerState::Closed
        } else if header.robust.owner_died() && !self.file.is_held(OWNER_BYTE) {
            OwnerState::Dead
        } else {
            OwnerState::Alive
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: each path of this drop takes the mapping once, and does not use it afterwards.
        let map = |map: &mut ManuallyDrop<Mapping>| unsafe { ManuallyDrop::take(map) };
        if self.owner.is_none() || !self.is_here() {
            drop(map(&mut self.map));
            return;
        }
        // Once the region is closed and unlocked, any process may remove its name. So the name is
        // removed here, before the drop of the fields releases the lock (O3 of
        // `docs/shm-protocols.md`).
        self.header().close();
        if let Some(memory) = self.dir.memory() {
            memory.remove(&self.name);
            drop(map(&mut self.map));
            return;
        }
        let _ = self.dir.unlink_if_same(&self.name, &self.file);
        // SAFETY: `create_in` locked the mutex, only this drop unlocks it, and this process is no
        // forked child.
        if unsafe { self.header().robust.unlock() } {
            drop(map(&mut self.map));
        } else {
            map(&mut self.map).leak_first_page();
        }
    }
}

/// The check of a region's owner in a loop that polls. While the hint is not set, a check is one
/// load; while it is set, one check in 64 asks the kernel.
#[derive(Debug, Default)]
pub struct OwnerWatch {
    calls_to_ask: u32,
    is_gone: bool,
}

/// Number of calls between two system calls while the hint is set. The hint stays set if only the
/// creating thread has ended.
const CALLS_PER_ASK: u32 = 64;

impl OwnerWatch {
    /// Returns whether the owner of `region` closed it or is proven dead. Once `true`, always
    /// `true`.
    #[inline]
    pub fn is_gone(&mut self, region: &Region) -> bool {
        self.is_gone || (region.owner_hint() && self.ask(region))
    }

    /// Makes the next [`is_gone`](Self::is_gone) ask the kernel if the hint is set.
    pub fn ask_next(&mut self) {
        self.calls_to_ask = 0;
    }

    #[cold]
    fn ask(&mut self, region: &Region) -> bool {
        if self.calls_to_ask > 0 {
            self.calls_to_ask -= 1;
            return false;
        }
        self.calls_to_ask = CALLS_PER_ASK - 1;
        self.is_gone = region.owner_state() != OwnerState::Alive;
        self.is_gone
    }
}

/// Returns the header of a region, which [`prepare`] has written.
#[inline(always)]
fn header_of(map: &Mapping) -> &Header {
    // SAFETY: the mapping starts with a whole header, page aligned. Its fields are no longer
    // written except for atomics and the robust word, which is in an `UnsafeCell`.
    unsafe { map.base().cast::<Header>().as_ref() }
}

/// Writes the header of a new region, and calls `init` for the rest.
fn prepare(
    map: &Mapping,
    kind: u64,
    user_bytes: usize,
    init: impl FnOnce(RegionView<'_>),
) -> io::Result<()> {
    let epoch = sys::random_nonzero()?;
    // SAFETY: the mapping is at least a header long, page aligned and zeroed but for the magic
    // number, and no other process has it yet.
    unsafe {
        let header = map.base().cast::<Header>().as_ptr();
        (&raw mut (*header).version).write(VERSION);
        (&raw mut (*header).header_bytes).write(HEADER_BYTES as u32);
        (&raw mut (*header).kind).write(kind);
        (&raw mut (*header).user_bytes).write(user_bytes as u64);
        (&raw mut (*header).epoch).write(epoch);
        (&raw mut (*header).creator_pid).write(std::process::id());
    }
    init(view_of(map));
    Ok(())
}

fn view_of(map: &Mapping) -> RegionView<'_> {
    // SAFETY: every mapping of a region has a header before its user bytes, so the address is
    // inside the mapping, or at its end.
    let base = unsafe { map.base().add(HEADER_BYTES) };
    RegionView {
        base,
        len: map.len() - HEADER_BYTES,
        _region: PhantomData,
    }
}

fn is_valid_name(name: &str) -> bool {
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    (1..=NAME_BYTES_MAX).contains(&name.len()) && name.bytes().all(legal) && !name.starts_with('.')
}

/// Compares a region's kind and user bytes with the expected values. Returns the user bytes.
fn fits(path: &Path, (found, have): (u64, u64), wanted: u64, need: u64) -> Result<u64, OpenError> {
    let path = || path.to_owned();
    if found != wanted {
        return Err(OpenError::Kind {
            path: path(),
            found,
            wanted,
        });
    }
    if have < need {
        return Err(OpenError::TooSmall {
            path: path(),
            need,
            have,
        });
    }
    Ok(have)
}

/// O5: checks the header of a file. Returns the number of its user bytes.
fn check(file: &LockFile, path: &Path, kind: u64, min_bytes: u64) -> Result<usize, OpenError> {
    let io_error = |source| OpenError::Io {
        path: path.to_owned(),
        source,
    };
    let metadata = file.file().and_then(File::metadata).map_err(io_error)?;
    let (owner, user) = (metadata.uid(), sys::user());
    if owner != user {
        return Err(OpenError::ForeignOwner {
            path: path.to_owned(),
            owner,
            user,
        });
    }
    let claim = Claim::read(file)
        .map_err(io_error)?
        .ok_or_else(|| OpenError::Foreign(path.to_owned()))?;
    if claim.version != VERSION {
        return Err(OpenError::Version {
            path: path.to_owned(),
            found: claim.version,
        });
    }
    let present = metadata.len().saturating_sub(HEADER_BYTES as u64);
    let user_bytes = fits(path, (claim.kind, claim.user_bytes), kind, min_bytes)?;
    if user_bytes > present {
        return Err(OpenError::TooSmall {
            path: path.to_owned(),
            need: user_bytes,
            have: present,
        });
    }
    if claim.is_closed() || claim.is_dead(file) {
        return Err(OpenError::OwnerGone(path.to_owned()));
    }
    usize::try_from(user_bytes).map_err(|error| io_error(io::Error::other(error)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::{MAGIC_OF_TEMPORARY, TEMPORARY_PREFIX};
    use std::os::unix::fs::DirBuilderExt;

    fn scratch(name: &str) -> Dir {
        let path =
            std::path::PathBuf::from(format!("/dev/shm/shm-unit-{name}-{}", std::process::id()));
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .unwrap();
        Dir::open(Some(&path)).unwrap()
    }

    fn names(dir: &Dir) -> Vec<String> {
        std::fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect()
    }

    #[test]
    fn without_o_tmpfile_a_region_is_just_as_whole() {
        let dir = scratch("fallback");
        let fresh = Fresh::with_temporary_name(&dir).unwrap();
        assert_eq!(names(&dir).len(), 1);
        assert_eq!(dir.sweep().unwrap(), 0, "a file in the making was swept");
        let init = |_: RegionView<'_>| {
            assert!(matches!(
                Region::open(&dir, "r", 1, 1),
                Err(OpenError::NotFound { .. })
            ))
        };
        let region = Region::create_in(fresh, &dir, "r", 1, 64, init).unwrap();
        assert_eq!(names(&dir), ["r"]);
        let fresh = Fresh::with_temporary_name(&dir).unwrap();
        assert!(matches!(
            Region::create_in(fresh, &dir, "r", 1, 64, |_| {}),
            Err(CreateError::Exists { .. })
        ));
        assert_eq!(names(&dir), ["r"], "the failed creation left something");
        drop(region);
        assert!(names(&dir).is_empty());
        std::fs::remove_dir(dir.path()).unwrap();
    }

    #[test]
    fn temporary_file_of_a_dead_maker_is_swept() {
        let dir = scratch("temporary");
        // The state after a death, as far as possible here: the lock is dropped, the name stays.
        let Fresh {
            temporary,
            file,
            lock,
        } = Fresh::with_temporary_name(&dir).unwrap();
        std::mem::forget(temporary);
        assert_eq!(dir.sweep().unwrap(), 0, "its maker holds the lock");
        drop((file, lock));
        assert_eq!(dir.sweep().unwrap(), 1);
        // A sweep also removes the temporary name of a finished file whose owner has closed it.
        let temporary = dir
            .path()
            .join(format!("{TEMPORARY_PREFIX}0123456789abcdef"));
        let region = Region::create(&dir, "r", 1, 64, |_| {}).unwrap();
        std::fs::hard_link(dir.path().join("r"), &temporary).unwrap();
        assert_eq!(dir.sweep().unwrap(), 0, "its owner lives");
        drop(region);
        assert_eq!(dir.sweep().unwrap(), 1);
        assert!(names(&dir).is_empty());
        std::fs::remove_dir(dir.path()).unwrap();
    }

    #[test]
    fn sweep_leaves_what_it_did_not_make() {
        let dir = scratch("thesis");
        let of_users = [
            (".new-thesis.txt", "years of work"),
            (
                ".new-0123456789abcdef",
                "as long a name, and other contents",
            ),
            (".new-0123456789abcde0", ""),
            (".new-0123456789ABCDEF", "WENPRYPC"),
            (".new-0123456789abcdef0", "WENPRYPC"),
            ("WENPRYPC", "WENPRYPC"),
            ("thesis.txt", "more of it"),
        ];
        for (name, contents) in of_users {
            std::fs::write(dir.path().join(name), contents).unwrap();
        }
        assert_eq!(dir.sweep().unwrap(), 0);
        for (name, contents) in of_users {
            assert_eq!(
                std::fs::read_to_string(dir.path().join(name)).unwrap(),
                contents
            );
        }
        // The mark in the byte order of this machine.
        std::fs::write(
            dir.path().join(".new-0123456789abcdef"),
            MAGIC_OF_TEMPORARY.to_ne_bytes(),
        )
        .unwrap();
        assert_eq!(dir.sweep().unwrap(), 1);
        std::fs::remove_dir_all(dir.path()).unwrap();
    }

    #[test]
    fn removal_gives_up_on_a_stopped_remover() {
        let dir = scratch("busy");
        let region = Region::create(&dir, "r", 1, 64, |_| {}).unwrap();
        // The state after an owner's death, as far as possible here: closed, unlocked and named.
        region.header().closed.store(1, Ordering::Release);
        std::fs::hard_link(dir.path().join("r"), dir.path().join("s")).unwrap();
        drop(region);
        assert_eq!(names(&dir), ["s"]);
        let remover = dir.lock_removals().unwrap().unwrap();
        assert!(matches!(
            Region::create(&dir, "s", 1, 64, |_| {}),
            Err(CreateError::Busy { .. })
        ));
        drop(remover);
        drop(Region::create(&dir, "s", 1, 64, |_| {}).unwrap());
        std::fs::remove_dir(dir.path()).unwrap();
    }

    #[test]
    fn peers_look_at_every_step_of_a_close() {
        let dir = scratch("closing");
        let region = Region::create(&dir, "r", 1, 64, |_| {}).unwrap();
        let peer = Region::open(&dir, "r", 1, 64).unwrap();
        // SAFETY: the word is an atomic of the region, which `peer` keeps mapped.
        let word_hints =
            || owner_may_be_gone(unsafe { peer.owner_word().as_ref() }.load(Ordering::Relaxed));
        assert!(!peer.owner_hint() && !word_hints());
        region.header().close();
        assert!(peer.owner_hint() && word_hints());
        // The owner of the region may be killed here: the write of the unlock must not clear the
        // hint. SAFETY: this thread has locked the mutex, and nothing else unlocks it.
        assert!(unsafe { region.header().robust.unlock() });
        assert!(peer.owner_hint());
        assert_eq!(peer.owner_state(), OwnerState::Closed);
        // The region is half closed, and must not be closed again.
        std::mem::forget(region);
        drop(peer);
        std::fs::remove_dir_all(dir.path()).unwrap();
    }
}
