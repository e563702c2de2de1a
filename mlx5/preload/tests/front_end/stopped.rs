//! A peer stops in the middle of a copy into a region that is deregistered or changed.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use zerocopy::FromZeros;

use crate::abi::verbs::{self, number};
use crate::raw::{Device, INIT, Memory, RTR, RTS, errno, under_the_library};

/// Length of a copy that takes milliseconds, in which the peer is stopped.
const BYTES: usize = 32 << 20;
/// Number of attempts: a copy may end before the peer is stopped.
const ROUNDS: u8 = 14;
const REMOTE_WRITE: u32 = 3;

fn say(stream: &mut UnixStream, words: [u64; 3]) {
    words
        .iter()
        .for_each(|word| stream.write_all(&word.to_ne_bytes()).unwrap());
}

fn hear(stream: &mut UnixStream) -> [u64; 3] {
    [0; 3].map(|_: u64| {
        let mut word = [0; 8];
        stream.read_exact(&mut word).unwrap();
        u64::from_ne_bytes(word)
    })
}

/// Runs the peer: on each command, it fills its memory with a byte and writes it to an address and
/// a key.
fn write_as_told(mut parent: UnixStream) {
    let device = Device::start();
    let memory = Memory::new();
    let mut bytes = vec![0u8; BYTES];
    let pd = device.alloc_pd().unwrap();
    let source = device
        .reg_mr(
            pd,
            bytes.as_ptr() as u64,
            BYTES as u64,
            bytes.as_ptr() as u64,
            1,
        )
        .unwrap();
    let cq = device.create_cq(&memory, 16).unwrap();
    let made = device.create_qp(&memory, pd, cq, None).unwrap();
    say(&mut parent, [made.qpn.into(), 0, 0]);
    let [qpn, ..] = hear(&mut parent);
    for to in [INIT, RTR, RTS] {
        device
            .modify_qp(made.qp_handle, to, (1, qpn as u32))
            .unwrap();
    }
    for index in 0.. {
        let [byte, addr, rkey] = hear(&mut parent);
        bytes.fill(byte as u8);
        memory.write_wqe(index, 0x08, made.qpn);
        // SAFETY: a place of the send queue: three segments.
        unsafe {
            let wqe = (memory.sq() + u64::from(index % 4) * 64) as *mut u32;
            wqe.add(1).write((made.qpn << 8 | 3).to_be());
            wqe.add(4)
                .cast::<[u64; 2]>()
                .write([addr.to_be(), (rkey << 32).to_be()]);
            wqe.add(8).cast::<[u64; 2]>().write([
                ((BYTES as u64) << 32 | u64::from(source.lkey)).to_be(),
                (bytes.as_ptr() as u64).to_be(),
            ]);
        }
        memory.announce(index + 1);
        // SAFETY: the last byte of a CQE.
        while unsafe { ((memory.cq() + u64::from(index) * 64 + 63) as *const u8).read_volatile() }
            == 0xf0
        {
            thread::yield_now();
        }
        // SAFETY: as above. 0: a completion without an error.
        let op_own =
            unsafe { ((memory.cq() + u64::from(index) * 64 + 63) as *const u8).read_volatile() };
        say(&mut parent, [u64::from(op_own >> 4), 0, 0]);
    }
}

/// The owner of the memory, and its peer.
struct Pair {
    device: Device,
    pd: u32,
    bytes: Vec<u8>,
    child: libc::pid_t,
    peer: UnixStream,
    rounds: u8,
}

impl Pair {
    fn new() -> Self {
        let (mut peer, parent) = UnixStream::pair().unwrap();
        // SAFETY: the child only makes calls that a program may make, and is killed.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: all arguments are plain numbers. The child does not outlive its parent, even
            // if the child is stopped.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            drop(peer);
            let ended = std::panic::catch_unwind(|| write_as_told(parent));
            // SAFETY: a plain number.
            unsafe { libc::_exit(ended.is_err().into()) };
        }
        let (device, memory) = (Device::start(), Memory::new());
        let pd = device.alloc_pd().unwrap();
        let cq = device.create_cq(&memory, 16).unwrap();
        let made = device.create_qp(&memory, pd, cq, None).unwrap();
        let [qpn, ..] = hear(&mut peer);
        for to in [INIT, RTR, RTS] {
            device
                .modify_qp_with(made.qp_handle, to, (1, qpn as u32), |request| {
                    request.qp_access_flags = REMOTE_WRITE
                })
                .unwrap();
        }
        say(&mut peer, [made.qpn.into(), 0, 0]);
        Self {
            device,
            pd,
            bytes: vec![0; BYTES],
            child,
            peer,
            rounds: 0,
        }
    }

    fn register(&self) -> verbs::RegMrResp {
        let start = self.bytes.as_ptr() as u64;
        self.device
            .reg_mr(self.pd, start, BYTES as u64, start, REMOTE_WRITE)
            .unwrap()
    }

    /// Lets the peer write.
    fn tell(&mut self, rkey: u32) {
        self.rounds += 1;
        assert!(
            self.rounds <= ROUNDS,
            "the peer was never stopped in the middle"
        );
        say(
            &mut self.peer,
            [self.rounds.into(), self.bytes.as_ptr() as u64, rkey.into()],
        );
    }

    /// Stops the peer as soon as its bytes begin to arrive.
    fn stop_in_the_middle(&mut self, rkey: u32) {
        self.tell(rkey);
        // SAFETY: a byte of this memory, which the peer writes.
        while unsafe { self.bytes.as_ptr().read_volatile() } != self.rounds {
            core::hint::spin_loop();
        }
        let mut status = 0;
        // SAFETY: the child, and a place for its status.
        unsafe {
            libc::kill(self.child, libc::SIGSTOP);
            libc::waitpid(self.child, &raw mut status, libc::WUNTRACED);
        }
        assert!(libc::WIFSTOPPED(status));
    }

    /// Continues the peer, and waits for the end of its WRITE: 0 is success.
    fn go_on(&mut self) -> u64 {
        // SAFETY: the child.
        unsafe { libc::kill(self.child, libc::SIGCONT) };
        hear(&mut self.peer)[0]
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // SAFETY: the child.
        unsafe { libc::kill(self.child, libc::SIGKILL) };
    }
}

#[test]
fn a_region_that_waits_for_a_stopped_peer_keeps_no_other_command_waiting() {
    under_the_library(
        "stopped::a_region_that_waits_for_a_stopped_peer_keeps_no_other_command_waiting",
        "",
        &[],
        || {
            let mut pair = Pair::new();
            loop {
                let mr = pair.register();
                pair.stop_in_the_middle(mr.rkey);
                let (is_gone, since) = (AtomicBool::new(false), Instant::now());
                let has_waited = thread::scope(|scope| {
                    let dereg = scope.spawn(|| {
                        let done = pair.device.tell(
                            number::DEREG_MR,
                            &verbs::DeregMr {
                                mr_handle: mr.mr_handle,
                            },
                        );
                        is_gone.store(true, Ordering::Relaxed);
                        done
                    });
                    while since.elapsed() < Duration::from_millis(300)
                        && !is_gone.load(Ordering::Relaxed)
                    {
                        pair.device.alloc_pd().unwrap();
                    }
                    let has_waited = !is_gone.load(Ordering::Relaxed);
                    // SAFETY: the child.
                    unsafe { libc::kill(pair.child, libc::SIGCONT) };
                    // On a busy machine the command may have waited for too long.
                    dereg.join().unwrap().is_ok() && has_waited
                });
                pair.go_on();
                if has_waited {
                    break;
                }
            }
        },
    );
}

#[test]
fn a_region_whose_peer_does_not_go_on_stays_as_it_was() {
    under_the_library(
        "stopped::a_region_whose_peer_does_not_go_on_stays_as_it_was",
        "",
        &["rereg_mr (11) refused: EBUSY"],
        || {
            let mut pair = Pair::new();
            let elsewhere = vec![0u8; 4096];
            let start = elsewhere.as_ptr() as u64;
            loop {
                let mr = pair.register();
                pair.stop_in_the_middle(mr.rkey);
                let request = verbs::ReregMr {
                    mr_handle: mr.mr_handle,
                    flags: 1,
                    start,
                    length: 4096,
                    hca_va: start,
                    ..verbs::ReregMr::new_zeroed()
                };
                let replaced = pair.device.ask::<verbs::ReregMrResp, [u8; 0]>(
                    number::REREG_MR,
                    &request,
                    &[0u8; 0],
                );
                assert_eq!(pair.go_on(), 0, "it began before");
                if replaced.is_ok() {
                    continue;
                }
                assert_eq!(errno(replaced), libc::EBUSY);
                pair.tell(mr.rkey);
                assert_eq!(
                    (pair.go_on(), pair.bytes[BYTES - 1]),
                    (0, pair.rounds),
                    "its key is valid"
                );
                pair.device
                    .tell(
                        number::DEREG_MR,
                        &verbs::DeregMr {
                            mr_handle: mr.mr_handle,
                        },
                    )
                    .unwrap();
                break;
            }
        },
    );
}
