//! Refusals of regions, directories, locks and memfds, and their promises within one process.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::sync::atomic::{AtomicU64, Ordering};

use copyrpc_shm::clock::Clock;
use copyrpc_shm::dir::{Dir, DirError};
use copyrpc_shm::memfd::{Memfd, MemfdAttachError, MemfdCreateError, MemfdId, MemfdRangeError};
use copyrpc_shm::region::{CreateError, OpenError, OwnerState, Region, RegionView};
use copyrpc_testing::helpers::Scratch;

const KIND: u64 = 0x7275_6c65;

#[test]
fn directory_must_exist_and_be_ours_alone() {
    let scratch = Scratch::new("dir");
    assert!(matches!(
        Dir::open(Some(&scratch.path().join("none"))),
        Err(DirError::Missing { .. })
    ));
    std::fs::write(scratch.path().join("file"), "").unwrap();
    assert!(matches!(
        Dir::open(Some(&scratch.path().join("file"))),
        Err(DirError::NotADirectory { .. })
    ));
    symlink(scratch.path(), scratch.path().join("link")).unwrap();
    for link in ["link", "link/", "link//", "link/."] {
        assert!(
            matches!(
                Dir::open(Some(&scratch.path().join(link))),
                Err(DirError::NotADirectory { .. })
            ),
            "{link} was followed"
        );
    }
    assert_eq!(
        Dir::open(Some(&scratch.path().join(""))).unwrap().path(),
        scratch.path()
    );
    std::fs::set_permissions(scratch.path(), PermissionsExt::from_mode(0o770)).unwrap();
    assert!(matches!(
        Dir::open(Some(scratch.path())),
        Err(DirError::OpenToOthers { mode: 0o770, .. })
    ));
    std::fs::set_permissions(scratch.path(), PermissionsExt::from_mode(0o700)).unwrap();
    scratch.dir();
}

#[test]
fn directory_that_cannot_be_written_is_refused() {
    // /proc/sys refuses every user, even root.
    let refused = Dir::open(Some(std::path::Path::new("/proc/sys"))).unwrap_err();
    assert!(
        matches!(
            refused,
            DirError::NotWritable { .. } | DirError::ForeignOwner { .. }
        ),
        "{refused}"
    );
}

#[test]
fn names_that_leave_the_directory_are_refused() {
    let scratch = Scratch::new("names");
    let long = "x".repeat(129);
    for name in ["", ".", "..", ".hidden", "a/b", "a\0b", "ü", &long] {
        assert!(
            matches!(
                Region::create(&scratch.dir(), name, KIND, 1, |_| {}),
                Err(CreateError::BadName { .. })
            ),
            "{name:?}"
        );
        assert!(
            matches!(
                Region::open(&scratch.dir(), name, KIND, 1),
                Err(OpenError::BadName { .. })
            ),
            "{name:?}"
        );
    }
}

#[test]
fn contents_of_init_are_there_and_the_rest_is_zero() {
    let scratch = Scratch::new("init");
    let owner = Region::create(&scratch.dir(), "r", KIND, 10_000, |view| {
        // SAFETY: in bounds and aligned, and no other thread has the region yet.
        unsafe { view.at::<u64>(8).unwrap().write(7) };
    })
    .unwrap();
    let path = scratch.path().join("r");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 14_096);
    assert_eq!(
        std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
        0o600
    );
    let peer = Region::open(&scratch.dir(), "r", KIND, 10_000).unwrap();
    assert_eq!(peer.epoch(), owner.epoch());
    for (offset, value) in [(0, 0), (8, 7), (9_992, 0)] {
        // SAFETY: in bounds and aligned; only atomics are used from here on.
        let word = unsafe { peer.view().at::<AtomicU64>(offset).unwrap().as_ref() };
        assert_eq!(word.load(Ordering::Acquire), value);
    }
    // SAFETY: as above.
    let (here, there) = unsafe {
        (
            owner.view().at::<AtomicU64>(16).unwrap().as_ref(),
            peer.view().at::<AtomicU64>(16).unwrap().as_ref(),
        )
    };
    here.store(99, Ordering::Release);
    assert_eq!(there.load(Ordering::Acquire), 99);
}

#[test]
fn view_refuses_what_is_outside_or_unaligned() {
    let scratch = Scratch::new("view");
    let region = Region::create(&scratch.dir(), "r", KIND, 100, |_| {}).unwrap();
    let view = region.view();
    assert!(view.at::<u64>(88).is_some());
    assert!(view.at::<u64>(96).is_none());
    assert!(view.at::<u64>(4).is_none());
    assert!(view.at::<u64>(usize::MAX - 7).is_none());
    assert!(view.array_at::<u32>(0, 25).is_some());
    assert!(view.array_at::<u32>(0, 26).is_none());
    assert!(view.array_at::<u32>(4, usize::MAX / 2).is_none());
}

#[test]
fn opener_checks_kind_size_and_shape() {
    let scratch = Scratch::new("open");
    let dir = scratch.dir();
    let _region = Region::create(&dir, "r", KIND, 100, |_| {}).unwrap();
    assert!(matches!(
        Region::open(&dir, "none", KIND, 1),
        Err(OpenError::NotFound { .. })
    ));
    assert!(matches!(
        Region::open(&dir, "r", KIND + 1, 1),
        Err(OpenError::Kind { found: KIND, .. })
    ));
    assert!(matches!(
        Region::open(&dir, "r", KIND, 101),
        Err(OpenError::TooSmall {
            need: 101,
            have: 100,
            ..
        })
    ));
    std::fs::write(scratch.path().join("text"), [b'x'; 9000]).unwrap();
    assert!(matches!(
        Region::open(&dir, "text", KIND, 1),
        Err(OpenError::Foreign { .. })
    ));
    std::fs::write(scratch.path().join("empty"), []).unwrap();
    assert!(matches!(
        Region::open(&dir, "empty", KIND, 1),
        Err(OpenError::Foreign { .. })
    ));
    symlink(scratch.path().join("r"), scratch.path().join("link")).unwrap();
    assert!(matches!(
        Region::open(&dir, "link", KIND, 1),
        Err(OpenError::Foreign { .. })
    ));
    assert!(matches!(
        Region::create(&dir, "text", KIND, 1, |_| {}),
        Err(CreateError::Foreign { .. })
    ));
    assert_eq!(dir.sweep().unwrap(), 0);
    assert!(
        scratch.path().join("text").exists(),
        "a foreign file was removed"
    );
}

#[test]
#[ignore = "needs root: gives a file to another user"]
fn region_of_another_user_is_refused_and_left_alone() {
    let scratch = Scratch::new("foreign");
    let dir = scratch.dir();
    let temporary = scratch.path().join(".new-0123456789abcdef");
    let region = Region::create(&dir, "r", KIND, 64, |_| {}).unwrap();
    std::fs::hard_link(scratch.path().join("r"), &temporary).unwrap();
    // SAFETY: no pointers are involved.
    let user = unsafe { libc::geteuid() };
    std::os::unix::fs::chown(&temporary, Some(user + 1), None).unwrap();
    match Region::open(&dir, "r", KIND, 64) {
        Err(OpenError::ForeignOwner {
            owner, user: own, ..
        }) => assert_eq!((owner, own), (user + 1, user)),
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        Region::create(&dir, "r", KIND, 64, |_| {}),
        Err(CreateError::Foreign { .. })
    ));
    // The region is closed and its own name is gone. The file with the temporary name would be
    // removed as dead if it belonged to this user.
    drop(region);
    assert_eq!(dir.sweep().unwrap(), 0);
    assert!(temporary.exists());
    std::os::unix::fs::chown(&temporary, Some(user), None).unwrap();
    assert_eq!(dir.sweep().unwrap(), 1);
}

/// The error names the owner of the directory, although this user may not read the directory.
#[test]
#[ignore = "needs root: becomes another user"]
fn directory_of_another_user_is_refused_by_the_name_of_its_owner() {
    let scratch = Scratch::new("closed");
    let user = std::fs::metadata(scratch.path()).unwrap().uid();
    assert_eq!(
        // SAFETY: no pointers are involved. The system call changes this thread alone, unlike the
        // function of libc.
        unsafe { libc::syscall(libc::SYS_setresuid, -1, user + 1, -1) },
        0
    );
    match Dir::open(Some(scratch.path())) {
        Err(DirError::ForeignOwner {
            owner, user: own, ..
        }) => assert_eq!((owner, own), (user, user + 1)),
        other => panic!("{other:?}"),
    }
    assert_eq!(
        // SAFETY: as above; the real user is the old one.
        unsafe { libc::syscall(libc::SYS_setresuid, -1, user, -1) },
        0
    );
}

/// Writes a changed copy of a region's file.
fn forged(scratch: &Scratch, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(scratch.path().join("r")).unwrap();
    change(&mut bytes);
    std::fs::write(scratch.path().join(name), bytes).unwrap();
}

#[test]
fn header_that_lies_is_refused_before_anything_is_mapped() {
    let scratch = Scratch::new("forged");
    let dir = scratch.dir();
    let region = Region::create(&dir, "r", KIND, 8192, |_| {}).unwrap();
    // The copies are made in another process: an open and close here would drop this process's
    // locks.
    drop(region);
    let make = |name: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let other = Region::create(&dir, "r", KIND, 8192, |_| {}).unwrap();
        forged(&scratch, name, |bytes| change(bytes));
        drop(other);
    };
    make("version", &|b| b[8] = 99);
    assert!(matches!(
        Region::open(&dir, "version", KIND, 1),
        Err(OpenError::Version { found: 99, .. })
    ));
    make("cut", &|b| b.truncate(5000));
    assert!(matches!(
        Region::open(&dir, "cut", KIND, 1),
        Err(OpenError::TooSmall {
            need: 8192,
            have: 904,
            ..
        })
    ));
    make("huge", &|b| b[24..32].fill(0xff));
    assert!(matches!(
        Region::open(&dir, "huge", KIND, 1),
        Err(OpenError::TooSmall { need: u64::MAX, .. })
    ));
    make("magic", &|b| b[0] ^= 1);
    assert!(matches!(
        Region::open(&dir, "magic", KIND, 1),
        Err(OpenError::Foreign { .. })
    ));
}

#[test]
fn too_large_a_region_says_need_and_have_and_leaves_nothing() {
    let scratch = Scratch::new("space");
    for bytes in [usize::MAX, 1 << 50] {
        match Region::create(&scratch.dir(), "r", KIND, bytes, |_| {
            panic!("initialised without space")
        }) {
            Err(CreateError::NoSpace { need, have, .. }) => {
                assert!(need > have && have > 0, "{need} {have}")
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0);
}

#[test]
fn regions_of_one_process_live_and_end_independently() {
    let scratch = Scratch::new("two");
    let dir = scratch.dir();
    let a = Region::create(&dir, "a", KIND, 64, |_| {}).unwrap();
    let b = Region::create(&dir, "b", KIND, 64, |_| {}).unwrap();
    assert!(matches!(
        Region::create(&dir, "a", KIND, 64, |_| {}),
        Err(CreateError::Exists { .. })
    ));
    let peer = Region::open(&dir, "a", KIND, 64).unwrap();
    // Closing a file of the region must not drop the owner's lock.
    drop(Region::open(&dir, "a", KIND, 64).unwrap());
    assert_eq!(dir.sweep().unwrap(), 0);
    assert_eq!(peer.owner_state(), OwnerState::Alive);
    drop(a);
    assert_eq!(peer.owner_state(), OwnerState::Closed);
    assert!(b.lock_file().is_held(0));
    let again = Region::create(&dir, "a", KIND, 64, |_| {}).unwrap();
    assert_ne!(again.epoch(), peer.epoch());
    assert_eq!(peer.owner_state(), OwnerState::Closed);
}

#[test]
fn owner_may_be_dropped_by_another_thread() {
    let scratch = Scratch::new("moved");
    let dir = scratch.dir();
    for _ in 0..3 {
        let region = Region::create(&dir, "r", KIND, 64, |_| {}).unwrap();
        let peer = Region::open(&dir, "r", KIND, 64).unwrap();
        std::thread::spawn(move || drop(region)).join().unwrap();
        assert_eq!(peer.owner_state(), OwnerState::Closed);
    }
    // The creating thread ends while the leaked words are in its list of robust futexes, which the
    // kernel then walks.
    std::thread::spawn(move || {
        let region = Region::create(&dir, "s", KIND, 64, |_| {}).unwrap();
        std::thread::spawn(move || drop(region)).join().unwrap();
    })
    .join()
    .unwrap();
}

#[test]
fn one_lock_at_a_time_within_a_process_too() {
    let scratch = Scratch::new("locks");
    let region = Region::create(&scratch.dir(), "r", KIND, 64, |_| {}).unwrap();
    let peer = Region::open(&scratch.dir(), "r", KIND, 64).unwrap();
    let lock = peer.lock_file().try_lock(3).unwrap();
    assert_eq!(lock.byte(), 3);
    assert!(region.lock_file().is_held(3));
    assert!(region.lock_file().try_lock(3).is_err());
    drop(peer);
    assert!(
        region.lock_file().is_held(3),
        "the lock ended with the region it was taken through"
    );
    drop(lock);
    assert!(!region.lock_file().is_held(3));
    assert!(region.lock_file().try_lock(u64::MAX).is_err());
}

#[test]
fn memfd_is_sealed_sparse_and_found_by_its_token() {
    let memory = Memfd::create("test", 1 << 40).unwrap();
    memory.commit(4096..12_288).unwrap();
    let peer = Memfd::attach(&memory.id(), true).unwrap();
    // SAFETY: committed above and aligned; only atomics are used.
    let (here, there) = unsafe {
        (
            memory.base().add(4096).cast::<AtomicU64>().as_ref(),
            peer.base().add(4096).cast::<AtomicU64>().as_ref(),
        )
    };
    here.store(5, Ordering::Release);
    assert_eq!(there.load(Ordering::Acquire), 5);
    memory.release(4096..8192).unwrap();
    assert_eq!(there.load(Ordering::Acquire), 0);

    let path = format!("/proc/self/fd/{}", memory.id().fd);
    let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    assert!(file.set_len(4096).is_err(), "a peer can truncate it");
    assert!(file.set_len(1 << 41).is_err(), "a peer can grow it");

    let read_only = Memfd::attach(&memory.id(), false).unwrap();
    assert_eq!(read_only.len(), 1 << 40);
    assert!(mapping_at(read_only.base().as_ptr() as usize).contains(" r--s "));
}

/// Returns the kernel's description of the mapping that starts at an address.
fn mapping_at(address: usize) -> String {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let start = maps
        .find(&format!("{address:x}-"))
        .expect("nothing is mapped there");
    let end = maps[start..]
        .find("VmFlags:")
        .map_or(maps.len(), |flags| start + flags);
    let line_end = maps[end..]
        .find('\n')
        .map_or(maps.len(), |length| end + length);
    maps[start..line_end].to_owned()
}

#[test]
fn peers_cannot_write_the_header_and_children_inherit_nothing() {
    let scratch = Scratch::new("rules-maps");
    let owner = Region::create(&scratch.dir(), "r", KIND, 8192, |_| {}).unwrap();
    let peer = Region::open(&scratch.dir(), "r", KIND, 8192).unwrap();
    let memory = Memfd::create("test", 4096).unwrap();
    let bytes = |region: &Region| region.view().base().as_ptr() as usize;
    assert!(mapping_at(bytes(&peer) - 4096).contains(" r--s "));
    assert!(mapping_at(bytes(&peer)).contains(" rw-s "));
    // The flag "dc" means that a fork does not copy the mapping.
    for address in [
        bytes(&owner) - 4096,
        bytes(&peer) - 4096,
        bytes(&peer),
        memory.base().as_ptr() as usize,
    ] {
        let mapping = mapping_at(address);
        let flags = mapping.lines().last().unwrap();
        assert!(
            flags.starts_with("VmFlags:") && flags.contains(" dc"),
            "{mapping}"
        );
    }
}

#[test]
fn memfd_that_was_replaced_or_never_was_is_refused() {
    let memory = Memfd::create("test", 4096).unwrap();
    let id = memory.id();
    assert!(matches!(
        Memfd::attach(
            &MemfdId {
                token: id.token ^ 1,
                ..id
            },
            true
        ),
        Err(MemfdAttachError::Stale { .. })
    ));
    assert!(matches!(
        Memfd::attach(&MemfdId { bytes: 8192, ..id }, true),
        Err(MemfdAttachError::Unsealed { found: 4096, .. })
    ));
    assert!(matches!(
        Memfd::attach(&MemfdId { fd: u32::MAX, ..id }, true),
        Err(MemfdAttachError::NotFound { .. })
    ));
    assert!(matches!(
        Memfd::attach(
            &MemfdId {
                pid: u32::MAX,
                ..id
            },
            true
        ),
        Err(MemfdAttachError::NotFound { .. })
    ));
    let (a, _b) = std::os::unix::net::UnixStream::pair().unwrap();
    let socket = std::os::fd::AsRawFd::as_raw_fd(&a).unsigned_abs();
    assert!(matches!(
        Memfd::attach(&MemfdId { fd: socket, ..id }, true),
        Err(MemfdAttachError::Stale { .. })
    ));
    drop(memory);
    assert!(matches!(
        Memfd::attach(&id, true),
        Err(MemfdAttachError::NotFound { .. } | MemfdAttachError::Stale { .. })
    ));
}

#[test]
fn stale_memfd_id_that_names_a_region_by_now_does_not_cost_its_lock() {
    let scratch = Scratch::new("rules-stale");
    let region = Region::create(&scratch.dir(), "r", KIND, 64, |_| {}).unwrap();
    let fd = std::os::fd::AsRawFd::as_raw_fd(region.lock_file()).unsigned_abs();
    let id = MemfdId {
        token: 1,
        bytes: 4096,
        pid: std::process::id(),
        fd,
    };
    for writable in [true, false] {
        assert!(matches!(
            Memfd::attach(&id, writable),
            Err(MemfdAttachError::Stale { .. })
        ));
    }
    // The kernel is asked, because `is_held` answers from this process's own record.
    let inode = std::os::unix::fs::MetadataExt::ino(
        &std::fs::symlink_metadata(scratch.path().join("r")).unwrap(),
    );
    let locks = std::fs::read_to_string("/proc/locks").unwrap();
    assert!(
        locks
            .lines()
            .any(|line| line.contains("POSIX") && line.contains(&format!(":{inode} 0 0"))),
        "{locks}"
    );
    drop(region);
}

#[test]
fn memfd_sizes_and_ranges_are_checked() {
    assert!(matches!(
        Memfd::create("test", 0),
        Err(MemfdCreateError::BadSize { .. })
    ));
    assert!(matches!(
        Memfd::create("test", 100),
        Err(MemfdCreateError::BadSize { .. })
    ));
    assert!(Memfd::create("test", usize::MAX & !0xffff).is_err());
    let memory = Memfd::create("test", 1 << 20).unwrap();
    #[expect(clippy::reversed_empty_ranges, reason = "that is the point")]
    for range in [0..0, 8192..4096, 0..100, 1..4096, 0..memory.len() + 4096] {
        assert!(
            matches!(
                memory.commit(range.clone()),
                Err(MemfdRangeError::BadRange { .. })
            ),
            "{range:?}"
        );
    }
}

#[test]
fn region_in_memory_is_checked_like_one_in_a_file_and_goes_with_its_last_user() {
    let hands = std::sync::Arc::new(AtomicU64::new(5));
    let dir = Dir::in_memory(Clock::by_hand(std::sync::Arc::clone(&hands)));
    assert!(matches!(
        Region::open(&dir, "r", KIND, 1),
        Err(OpenError::NotFound { .. })
    ));
    assert!(matches!(
        Region::create(&dir, ".r", KIND, 64, |_| ()),
        Err(CreateError::BadName { .. })
    ));
    assert!(matches!(
        Region::create(&dir, "r", KIND, usize::MAX, |_| ()),
        Err(CreateError::Io { .. })
    ));
    let init = |view: RegionView<'_>| {
        assert!(matches!(
            Region::open(&dir, "r", KIND, view.len()),
            Err(OpenError::NotFound { .. })
        ))
    };
    let owner = Region::create(&dir, "r", KIND, 64, init).unwrap();
    assert!(matches!(
        Region::create(&dir, "r", KIND, 64, |_| ()),
        Err(CreateError::Exists { .. })
    ));
    assert!(matches!(
        Region::open(&dir, "r", KIND + 1, 64),
        Err(OpenError::Kind { found: KIND, .. })
    ));
    assert!(matches!(
        Region::open(&dir, "r", KIND, 65),
        Err(OpenError::TooSmall {
            need: 65,
            have: 64,
            ..
        })
    ));
    let (peer, elsewhere) = (
        Region::open(&dir.clone(), "r", KIND, 64).unwrap(),
        Dir::in_memory(Clock::default()),
    );
    assert!(matches!(
        Region::open(&elsewhere, "r", KIND, 64),
        Err(OpenError::NotFound { .. })
    ));
    let word = |region: &Region| region.view().at::<AtomicU64>(8).unwrap();
    // SAFETY: inside the region, which is mapped.
    let load = |region: &Region| unsafe { word(region).as_ref() }.load(Ordering::Acquire);
    // SAFETY: as above.
    unsafe { word(&owner).as_ref() }.store(7, Ordering::Release);
    assert_eq!(
        (load(&peer), peer.owner_state(), peer.epoch()),
        (7, OwnerState::Alive, owner.epoch())
    );
    let lock = peer.lock_file().try_lock(3).unwrap();
    assert!(
        owner.lock_file().is_held(3)
            && owner.lock_file().try_lock(3).is_err()
            && !owner.lock_file().is_held(4)
    );
    drop(lock);
    assert!(!owner.lock_file().is_held(3));
    hands.store(9, Ordering::Relaxed);
    assert_eq!((peer.clock().now_ns(), dir.sweep().unwrap()), (9, 0));
    drop(owner);
    assert_eq!((load(&peer), peer.owner_state()), (7, OwnerState::Closed));
    let next = Region::create(&dir, "r", KIND, 64, |_| ()).unwrap();
    assert_eq!((load(&next), load(&peer)), (0, 7));
    assert_ne!(next.epoch(), peer.epoch());
}
