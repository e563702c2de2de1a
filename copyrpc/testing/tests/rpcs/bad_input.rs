//! Refusals of every shared-memory RPC of the workspace, and bad input that it survives: invalid
//! files, directories and memory.

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;

use copyrpc_calls::SessionEnd;
use copyrpc_shm::dir::Dir;
use copyrpc_shm::region::{CreateError, OpenError, Region};
use copyrpc_shm::sync::{AtomicU32, AtomicU64, Ordering};

use crate::rpc::{Refused, Rpc};
use crate::start_with;
use copyrpc_testing::helpers::{Scratch, next_word, say, wait_for, wait_for_some};

/// Number of clients of a server with one call each. [`Rpc::entries`] gets the same number of
/// calls.
const CLIENTS: usize = 8;

/// Answers all requests that wait.
fn serve<R: Rpc>(server: &mut R::Server) {
    R::serve_poll(server);
    while let Some((held, number)) = R::recv(server) {
        R::reply(server, held, number);
    }
}

/// Makes a call; the server answers this call and all other requests.
fn round_trip<R: Rpc>(
    server: &mut R::Server,
    client: &mut R::Client,
    number: u64,
) -> Result<(), SessionEnd> {
    if let Err(refused) = R::call(client, number, number) {
        let Refused::Ended(_, _, end) = refused else {
            panic!("{refused:?}")
        };
        return Err(end);
    }
    finish::<R>(server, client, number)
}

fn finish<R: Rpc>(
    server: &mut R::Server,
    client: &mut R::Client,
    number: u64,
) -> Result<(), SessionEnd> {
    wait_for_some("a call is neither answered nor ended", || {
        serve::<R>(server);
        let mut is_answered = false;
        let polled = R::poll(client, |user, outcome| {
            if let Ok(answer) = outcome {
                assert_eq!((user, answer), (number, number));
                is_answered = true;
            }
        });
        polled.map(|_| is_answered.then_some(())).transpose()
    })
}

/// Returns the word at an offset of the region.
fn word(region: &Region, offset: usize) -> &AtomicU64 {
    // SAFETY: in bounds, and all access to these words is atomic.
    unsafe { region.view().at::<AtomicU64>(offset).unwrap().as_ref() }
}

pub(crate) fn files_that_are_no_server_are_refused_and_left_alone<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let (dir, path) = (scratch.dir(), scratch.path().join("s"));
    let server = R::create(&dir, 2, 4);
    // The close of this file drops the server's lock; the server ends next, so the lock is not
    // needed.
    let whole = std::fs::read(&path).unwrap();
    drop(server);
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = whole.clone();
        change(&mut bytes);
        bytes
    };
    type Is = fn(&OpenError) -> bool;
    let files: [(Vec<u8>, Is); 7] = [
        (vec![], |e| matches!(e, OpenError::Foreign { .. })),
        (vec![b'x'; 9000], |e| matches!(e, OpenError::Foreign { .. })),
        (changed(&|b| b[0] ^= 1), |e| {
            matches!(e, OpenError::Foreign { .. })
        }),
        (changed(&|b| b[8] += 1), |e| {
            matches!(e, OpenError::Version { .. })
        }),
        (changed(&|b| b[16] += 1), |e| {
            matches!(e, OpenError::Kind { .. })
        }),
        (changed(&|b| b.truncate(b.len() - 1)), |e| {
            matches!(e, OpenError::TooSmall { .. })
        }),
        (changed(&|b| b[24..32].fill(0xff)), |e| {
            matches!(e, OpenError::TooSmall { .. })
        }),
    ];
    for (n, (bytes, is_named)) in files.into_iter().enumerate() {
        std::fs::write(&path, &bytes).unwrap();
        let error = R::connect_refused(&dir);
        assert!(is_named(&error), "file {n}: {error:?}");
        let error = R::create_refused(&dir, 2, 4);
        assert!(
            matches!(
                error,
                CreateError::Foreign { .. } | CreateError::Exists { .. }
            ),
            "file {n}: {error:?}"
        );
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "file {n} was touched");
    }
    assert_eq!(scratch.names(), ["s"]);
}

pub(crate) fn path_of_a_living_server_is_refused_and_one_client_too_many<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let dir = scratch.dir();
    let mut server = R::create(&dir, 2, 4);
    let mut clients: Vec<_> = (0..2).map(|_| R::connect(&dir).unwrap()).collect();
    assert!(matches!(
        R::create_refused(&dir, 2, 4),
        CreateError::Exists { .. }
    ));
    assert!(R::connect(&dir).is_none(), "there are two entries");
    for client in &mut clients {
        round_trip::<R>(&mut server, client, 5).unwrap();
    }
    drop(clients.pop());
    serve::<R>(&mut server);
    round_trip::<R>(&mut server, &mut R::connect(&dir).unwrap(), 6).unwrap();
}

pub(crate) fn directory_that_is_gone_is_an_error<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let path = scratch.path().join("gone");
    std::fs::DirBuilder::new()
        .mode(0o700)
        .create(&path)
        .unwrap();
    let dir = Dir::open(Some(&path)).unwrap();
    std::fs::remove_dir(&path).unwrap();
    assert!(matches!(
        R::create_refused(&dir, 2, 4),
        CreateError::Io { .. }
    ));
    assert!(matches!(
        R::connect_refused(&dir),
        OpenError::NotFound { .. }
    ));
}

/// The other side of the tests below.
pub(crate) fn helper<R: Rpc>(role: &str, dir: &Dir) {
    match role {
        "limited" => {
            let limit = libc::rlimit {
                rlim_cur: 100_000,
                rlim_max: 100_000,
            };
            assert_eq!(
                // SAFETY: a valid limit.
                unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) },
                0
            );
            say(matches!(
                R::create_refused(dir, 8, 512),
                CreateError::FileLimit {
                    limit: 100_000,
                    need: 100_001..,
                    ..
                }
            ));
            serve_one::<R>(dir);
        }
        "full" => {
            let error = R::create_refused(dir, 8, 512);
            say(matches!(
                error,
                CreateError::NoSpace {
                    need: SMALL..,
                    have: 1..=SMALL,
                    ..
                }
            ));
            assert_eq!(
                std::fs::read_dir(dir.path()).unwrap().count(),
                0,
                "the failed creation left something"
            );
            serve_one::<R>(dir);
        }
        other => panic!("unknown role {other}"),
    }
    next_word();
}

/// Reports whether a new server works.
fn serve_one<R: Rpc>(dir: &Dir) {
    let mut server = R::create(dir, 2, 4);
    let served = round_trip::<R>(&mut server, &mut R::connect(dir).unwrap(), 1);
    say(served.is_ok());
}

const SMALL: u64 = 256 << 10;

/// Mounts a small file system on `path`, for this process only, which must have one thread.
fn mount_small(path: &CStr) -> io::Result<()> {
    let done = |code| {
        if code == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    };
    // SAFETY: no pointers are involved.
    let (user, group, alone) = unsafe {
        (
            libc::getuid(),
            libc::getgid(),
            libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS),
        )
    };
    done(alone)?;
    // The same user and group inside as outside.
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", format!("{user} {user} 1"))?;
    std::fs::write("/proc/self/gid_map", format!("{group} {group} 1"))?;
    let (tmpfs, options) = (c"tmpfs".as_ptr(), c"size=256k,mode=700".as_ptr().cast());
    // SAFETY: all strings end with NUL and outlive the call.
    done(unsafe { libc::mount(tmpfs, path.as_ptr(), tmpfs, 0, options) })
}

fn create_in_a_helper<R: Rpc>(role: &str, name: &str) {
    let scratch = Scratch::new(name);
    let path = CString::new(scratch.path().to_str().unwrap()).unwrap();
    let is_full = role == "full";
    let mount = move || if is_full { mount_small(&path) } else { Ok(()) };
    let mut helper = start_with::<R>(&format!("bad input: {role}"), &scratch, |command| {
        // SAFETY: it makes system calls, of a child that has the parent's memory to itself and one
        // thread.
        unsafe { command.pre_exec(mount) };
    });
    assert_eq!(
        helper.hear(),
        "true",
        "a server that is too large is not refused as such"
    );
    assert_eq!(helper.hear(), "true", "a small one does not serve");
    helper.tell("end");
    helper.wait();
    assert!(scratch.names().is_empty());
}

pub(crate) fn limit_of_file_sizes_is_named_and_leaves_nothing<R: Rpc>(name: &str) {
    create_in_a_helper::<R>("limited", name);
}

pub(crate) fn full_directory_is_named_and_leaves_nothing<R: Rpc>(name: &str) {
    create_in_a_helper::<R>("full", name);
}

/// R4, I4: a broken client stores any values in the words with which clients announce their calls
/// to the server.
pub(crate) fn garbled_announcements_cost_a_delay_and_no_call<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let dir = scratch.dir();
    let mut server = R::create(&dir, CLIENTS, 1);
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| R::connect(&dir).unwrap()).collect();
    let (region, entries) = R::entries(&dir, 8);
    let mut random = fastrand::Rng::with_seed(0xbad_0001);
    for n in 0..40 {
        let garbage: Box<dyn Fn(u64) -> u64> = match n % 4 {
            0 => Box::new(|_| 0),
            1 => Box::new(|_| u64::MAX),
            2 => Box::new(|word| !word),
            _ => {
                let noise = random.u64(..);
                Box::new(move |word| word ^ noise)
            }
        };
        let victim = random.usize(..CLIENTS);
        // After this wait without a request, the server polls no client's lane.
        while R::serve_wait(&mut server, Some(std::time::Duration::from_millis(2))) {
            serve::<R>(&mut server);
        }
        let after = |offset: usize| {
            word(&region, offset).store(
                garbage(word(&region, offset).load(Ordering::Relaxed)),
                Ordering::Relaxed,
            )
        };
        let armed = |value: u32| {
            let at = entries + 64 * (1 + victim) + 8;
            // SAFETY: in bounds, and all access to this word is atomic.
            unsafe { region.view().at::<AtomicU32>(at).unwrap().as_ref() }
                .store(value, Ordering::Relaxed);
        };
        if n % 3 == 0 {
            armed([0, 7, u32::MAX][n % 7 % 3]);
        }
        R::call(&mut clients[victim], n as u64, n as u64).unwrap();
        (R::WAKES..entries).step_by(8).for_each(after);
        finish::<R>(&mut server, &mut clients[victim], n as u64).unwrap();
    }
    for client in &mut clients {
        round_trip::<R>(&mut server, client, 100).unwrap();
    }
}

/// C5: the client whose entry is overwritten loses its session, and other clients lose nothing; the
/// entry is free for the next client.
pub(crate) fn overwritten_entry_costs_its_own_session_only<R: Rpc>(name: &str) {
    let scratch = Scratch::new(name);
    let dir = scratch.dir();
    let mut server = R::create(&dir, CLIENTS, 1);
    let mut bystander = R::connect(&dir).unwrap();
    let (region, entries) = R::entries(&dir, 8);
    // All states of an entry and numbers that are no state, of the same generation and of another.
    for garbage in [77 << 32, 77 << 32 | 1, 2, 3, 9, 77 << 32 | 9, u64::MAX] {
        let mut victim = R::connect(&dir).unwrap();
        round_trip::<R>(&mut server, &mut victim, 1).unwrap();
        let session = word(&region, entries + 64 * (1 + R::id(&victim)));
        let same_generation = session.load(Ordering::Acquire) >> 32 << 32;
        session.store(
            if garbage < 10 {
                same_generation | garbage
            } else {
                garbage
            },
            Ordering::Release,
        );
        R::call(&mut victim, 2, 2).unwrap_err();
        assert_eq!(
            R::poll(&mut victim, |_, _| {}),
            Err(SessionEnd::Evicted),
            "{garbage:#x}"
        );
        round_trip::<R>(&mut server, &mut bystander, 3).unwrap();
        drop(victim);
        // All entries can be used: a client that gets an entry which the server cannot interpret
        // gets an error at once.
        let mut others = vec![];
        wait_for("an entry is lost", || {
            serve::<R>(&mut server);
            if let Some(mut client) = R::connect(&dir) {
                others.extend(
                    round_trip::<R>(&mut server, &mut client, 4)
                        .is_ok()
                        .then_some(client),
                );
            }
            others.len() == CLIENTS - 1
        });
        drop(others);
        serve::<R>(&mut server);
    }
}

suite! {
    ipc bytes delegation: {
        files_that_are_no_server_are_refused_and_left_alone
        path_of_a_living_server_is_refused_and_one_client_too_many
        directory_that_is_gone_is_an_error
        limit_of_file_sizes_is_named_and_leaves_nothing
        #[ignore = "needs user namespaces"]
        full_directory_is_named_and_leaves_nothing
        garbled_announcements_cost_a_delay_and_no_call
        overwritten_entry_costs_its_own_session_only
    }
}
