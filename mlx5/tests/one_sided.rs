//! RDMA is one-sided: a stopped target (SIGSTOP) is written and read, and a killed one is detected.
//! Conversely, memory is not reused while a stopped requester is still copying to it.
//!
//! This is a separate program: a process has to be stopped in the middle of a copy, which would
//! happen rarely with other tests at the same time.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test"
)]

#[path = "support/addresses.rs"]
mod addresses;
#[path = "support/fabric.rs"]
mod fabric;
#[path = "support/time.rs"]
mod time;

use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use addresses::{describe, parse};
use copyrpc_testing::limits::{scale_of, watchdog};
use mlx5::*;

/// Watchdog, far above the duration of a test.
const WATCHDOG: Duration = Duration::from_secs(120);
const TARGET: &str = "MLX5_TEST_TARGET";
/// If set, the other process does not sleep: it writes its whole region to its peer's without
/// pause.
const WRITES: &str = "MLX5_TEST_WRITES";
const BYTES: usize = 4 << 20;
/// The byte that the writing process writes.
const FOREIGN: u8 = 0xee;

struct End {
    qp: RcQp,
    send_cq: Cq,
    recv_cq: MonoCq<()>,
    srq: Srq,
    mr: Mr,
    pd: Pd,
    device: Device,
}

fn open(dir: &Path) -> End {
    let device = Device::open(DeviceSpec::Soft(fabric::options(dir))).unwrap();
    let pd = device.alloc_pd().unwrap();
    let send_cq = device.create_cq(64).unwrap();
    let recv_cq = device.create_mono_cq(64).unwrap();
    let mut srq = pd.create_srq(32, 0).unwrap();
    while srq.post(&[], 0).is_ok() {}
    srq.ring();
    let qp = pd
        .create_qp(
            &send_cq,
            &recv_cq,
            &srq,
            &QpConfig {
                max_inline_data: 220,
                ..Default::default()
            },
        )
        .unwrap();
    let mr = pd
        .alloc(
            BYTES,
            Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
        )
        .unwrap();
    End {
        qp,
        send_cq,
        recv_cq,
        srq,
        mr,
        pd,
        device,
    }
}

fn description(end: &End) -> String {
    describe(&end.qp.address(), end.mr.addr(), end.mr.rkey())
}

/// Runs the other process of the two tests below, which re-execute this binary. It is not a test of
/// its own.
#[test]
#[ignore = "helper process of the other tests, started by them"]
fn target_process() {
    let Some(dir) = std::env::var_os(TARGET) else {
        return;
    };
    watchdog(WATCHDOG);
    let mut end = open(Path::new(&dir));
    end.mr.write(0, b"written by the target").unwrap();
    println!("\naddress {}", description(&end));
    std::io::stdout().flush().unwrap();
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    end.qp
        .connect(&parse(&line).0, &ConnectOptions::default())
        .unwrap();
    println!("\nconnected");
    if std::env::var_os(WRITES).is_some() {
        return write_for_ever(end, parse(&line));
    }
    // From here on this process does nothing until the end of its input.
    while std::io::stdin()
        .read_line(&mut String::new())
        .is_ok_and(|n| n > 0)
    {}
}

fn write_for_ever(mut end: End, (_, addr, rkey): (QpAddress, u64, u32)) {
    end.mr.write(0, &vec![FOREIGN; BYTES]).unwrap();
    loop {
        let payload = end.mr.sge(0, BYTES as u32).unwrap();
        if end
            .qp
            .post(
                &Write {
                    addr,
                    rkey,
                    payload,
                },
                Signal::Always,
                0,
            )
            .is_err()
        {
            return;
        }
        end.qp.ring();
        let _ = completion(&mut end);
    }
}

struct Target {
    child: Child,
    /// Kept open so that the child can write its last lines.
    _output: BufReader<ChildStdout>,
    peer: (QpAddress, u64, u32),
    end: End,
    dir: PathBuf,
}

fn start(name: &str, writes: bool) -> Target {
    watchdog(WATCHDOG * scale_of("MLX5_TEST_SCALE"));
    let dir = fabric::new_dir(name);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "target_process", "--ignored", "--nocapture"])
        .env(TARGET, &dir)
        .envs(writes.then_some((WRITES, "1")))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut lines = output.by_ref().lines().map(Result::unwrap);
    let address = lines
        .find_map(|l| l.strip_prefix("address ").map(str::to_owned))
        .unwrap();
    let mut end = open(&dir);
    writeln!(child.stdin.as_mut().unwrap(), "{}", description(&end)).unwrap();
    assert!(lines.any(|l| l == "connected"));
    let peer = parse(&address);
    end.qp.connect(&peer.0, &ConnectOptions::default()).unwrap();
    Target {
        child,
        _output: output,
        peer,
        end,
        dir,
    }
}

/// Returns the state letter of proc(5).
fn state(child: &Child) -> char {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
    stat.rsplit(") ").next().unwrap().chars().next().unwrap()
}

impl Target {
    fn signal(&self, signal: i32) {
        assert_eq!(
            // SAFETY: kill(2) of our own child.
            unsafe { libc::kill(self.child.id().try_into().unwrap(), signal) },
            0
        );
    }

    fn finish(mut self, succeeds: bool) {
        drop(self.child.stdin.take());
        assert_eq!(self.child.wait().unwrap().success(), succeeds);
        drop(self.end);
        fabric::remove_dir(&self.dir);
    }
}

fn completion(end: &mut End) -> Result<(), Syndrome> {
    let End { qp, send_cq, .. } = end;
    loop {
        let mut result = None;
        send_cq.poll(1, |cqe| {
            qp.complete(&cqe).unwrap();
            result = Some(cqe.result().map_err(|e| e.syndrome));
        });
        if let Some(result) = result {
            return result;
        }
    }
}

#[test]
fn a_stopped_process_is_written_and_read() {
    let mut target = start("stopped", false);
    target.signal(libc::SIGSTOP);
    while state(&target.child) != 'T' {
        std::thread::yield_now();
    }
    let (_, addr, rkey) = target.peer;
    let read = |target: &mut Target, at: u64, len: u32| {
        let into = target.end.mr.sge(0, len).unwrap();
        target
            .end
            .qp
            .post(
                &Read {
                    addr: addr + at,
                    rkey,
                    into,
                },
                Signal::Always,
                0,
            )
            .unwrap();
        target.end.qp.ring();
        completion(&mut target.end).unwrap();
        let mut bytes = vec![0; len as usize];
        target.end.mr.read(0, &mut bytes).unwrap();
        bytes
    };
    assert_eq!(read(&mut target, 0, 21), b"written by the target");
    for i in 0..100u64 {
        let at = (i * 7919) % (BYTES as u64 - 200);
        let payload = [i as u8 + 1; 200];
        let write = WriteImm {
            addr: addr + at,
            rkey,
            imm: 0,
            payload: Inline(&payload),
        };
        // The first 32 WRITEs take a receive each. The other WRITEs have no immediate, because an
        // immediate would make them wait for a receive.
        if i < 32 {
            target.end.qp.post(&write, Signal::Always, 0).unwrap();
        } else {
            target
                .end
                .qp
                .post(
                    &Write {
                        addr: write.addr,
                        rkey,
                        payload: write.payload,
                    },
                    Signal::Always,
                    0,
                )
                .unwrap();
        }
        target.end.qp.ring();
        completion(&mut target.end).unwrap();
        assert_eq!(read(&mut target, at, 200), payload);
    }
    assert_eq!(state(&target.child), 'T', "it was stopped all the time");
    target.signal(libc::SIGCONT);
    target.finish(true);
}

#[test]
fn a_killed_process_is_noticed_and_leaves_nothing() {
    let mut target = start("killed", false);
    let (_, addr, rkey) = target.peer;
    target.signal(libc::SIGKILL);
    target.child.wait().unwrap();
    let started = Instant::now();
    let op = Write {
        addr,
        rkey,
        payload: Inline(b"late"),
    };
    target.end.qp.post(&op, Signal::Always, 0).unwrap();
    target.end.qp.ring();
    assert_eq!(
        completion(&mut target.end),
        Err(Syndrome::TransportRetryExceeded)
    );
    println!("noticed after {:?}", started.elapsed());
    target.finish(false);
}

#[test]
fn memory_that_a_stopped_process_is_writing_to_is_not_used_again() {
    let mut quarantined = 0;
    for round in 0..20 * u64::from(scale_of("MLX5_TEST_SCALE")) {
        let Target {
            mut child,
            _output,
            end,
            dir,
            ..
        } = start(&format!("copying{round}"), true);
        let pid = child.id().try_into().unwrap();
        std::thread::sleep(Duration::from_millis(10 + round % 20));
        // SAFETY: kill(2) of our own child. The child is nearly always in the middle of a copy.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGSTOP) }, 0);
        while state(&child) != 'T' {
            std::thread::yield_now();
        }
        let End {
            qp,
            send_cq,
            recv_cq,
            srq,
            mr,
            pd,
            device,
        } = end;
        // The connection is destroyed before its memory in even rounds, after it in odd rounds.
        if round % 2 == 0 {
            drop(qp);
            drop(mr);
        } else {
            drop(mr);
            drop(qp);
        }
        drop((send_cq, recv_cq, srq));
        quarantined += device.info().quarantined;
        let next = pd.alloc(BYTES, Access::LOCAL_WRITE).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGCONT) }, 0);
        std::thread::sleep(Duration::from_millis(30));
        let mut bytes = vec![FOREIGN; BYTES];
        next.read(0, &mut bytes).unwrap();
        assert!(
            bytes.iter().all(|&b| b == 0),
            "round {round}: a region that was never shared was written"
        );
        child.kill().unwrap();
        child.wait().unwrap();
        drop((next, pd, device));
        fabric::remove_dir(&dir);
    }
    assert!(
        quarantined > 0,
        "no round caught the other process in the middle of a copy"
    );
}

/// A reader that polls the end of a message in its memory, instead of a CQE, finds all of the
/// message, with an immediate and without.
#[test]
fn the_end_of_a_message_is_seen_after_everything_before_it() {
    const LONGEST: u64 = 4096;
    watchdog(WATCHDOG * scale_of("MLX5_TEST_SCALE"));
    let dir = fabric::new_dir("ends");
    let rounds = 50_000 * u64::from(scale_of("MLX5_TEST_SCALE"));
    let (tell, told) = std::sync::mpsc::channel();
    let (meet, met) = std::sync::mpsc::channel();
    let (seen, torn) = (AtomicU64::new(0), AtomicU64::new(0));
    let in_words = |round: u64| 2 + round.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (LONGEST / 8 - 1);
    std::thread::scope(|scope| {
        let at = &dir;
        let reader_seen = &seen;
        let reader_torn = &torn;
        scope.spawn(move || {
            let mut end = open(at);
            tell.send((end.qp.address(), end.mr.addr(), end.mr.rkey()))
                .unwrap();
            end.qp
                .connect(&met.recv().unwrap(), &ConnectOptions::default())
                .unwrap();
            let End {
                qp,
                recv_cq,
                srq,
                mr,
                ..
            } = &mut end;
            // SAFETY: inside the region, aligned; all threads access it by atomics or by the
            // device.
            let word = |nth: u64| unsafe {
                AtomicU64::from_ptr((mr.addr() as *mut u64).add(nth as usize))
            };
            tell.send((qp.address(), 0, 0)).unwrap();
            for round in 1..=rounds {
                let last = LONGEST / 8 - 1;
                while word(last).load(Ordering::Acquire) != round {
                    // If the reader has a core of its own, the yield returns at once, and the
                    // reader polls without pause.
                    std::thread::yield_now();
                }
                let is_whole = (LONGEST / 8 - in_words(round)..last)
                    .all(|nth| word(nth).load(Ordering::Relaxed) == round);
                reader_torn.fetch_add(u64::from(!is_whole), Ordering::Relaxed);
                while round % 2 == 0
                    && recv_cq.poll(1, |_, cqe| assert!(srq.complete_receive(&cqe).is_some())) == 0
                {
                }
                if round % 2 == 0 {
                    srq.post(&[], 0).unwrap();
                    srq.ring();
                }
                reader_seen.store(round, Ordering::Release);
            }
        });
        let mut end = open(&dir);
        let (peer, addr, rkey) = told.recv().unwrap();
        meet.send(end.qp.address()).unwrap();
        end.qp.connect(&peer, &ConnectOptions::default()).unwrap();
        told.recv().unwrap();
        for round in 1..=rounds {
            let bytes = 8 * in_words(round);
            end.mr
                .write(0, &round.to_le_bytes().repeat(bytes as usize / 8))
                .unwrap();
            let (addr, payload) = (addr + LONGEST - bytes, end.mr.sge(0, bytes as u32).unwrap());
            let posted = match round % 2 {
                0 => end.qp.post(
                    &WriteImm {
                        addr,
                        rkey,
                        imm: 0,
                        payload,
                    },
                    Signal::Always,
                    0,
                ),
                _ => end.qp.post(
                    &Write {
                        addr,
                        rkey,
                        payload,
                    },
                    Signal::Always,
                    0,
                ),
            };
            posted.unwrap();
            end.qp.ring();
            completion(&mut end).unwrap();
            while seen.load(Ordering::Acquire) != round {
                std::thread::yield_now();
            }
        }
    });
    assert_eq!(
        torn.into_inner(),
        0,
        "messages whose end was seen before the rest, of {rounds}"
    );
    fabric::remove_dir(&dir);
}

/// A writer that is not stopped finishes its copy, in a small part of the time limit.
#[test]
fn memory_that_a_running_process_is_writing_to_is_waited_for() {
    let rounds = 12 * u64::from(scale_of("MLX5_TEST_SCALE"));
    let mut quarantined = 0;
    for round in 0..rounds {
        let Target {
            mut child,
            _output,
            end,
            dir,
            ..
        } = start(&format!("running{round}"), true);
        let mut first = [0];
        while first[0] != FOREIGN {
            end.mr.read(0, &mut first).unwrap();
        }
        let End {
            qp,
            send_cq,
            recv_cq,
            srq,
            mr,
            pd,
            device,
        } = end;
        drop(mr);
        quarantined += device.info().quarantined;
        let next = pd.alloc(BYTES, Access::LOCAL_WRITE).unwrap();
        std::thread::sleep(Duration::from_millis(2));
        let mut bytes = vec![FOREIGN; BYTES];
        next.read(0, &mut bytes).unwrap();
        assert!(
            bytes.iter().all(|&b| b == 0),
            "round {round}: a region that was never shared was written"
        );
        child.kill().unwrap();
        child.wait().unwrap();
        drop((qp, send_cq, recv_cq, srq, next, pd, device));
        fabric::remove_dir(&dir);
    }
    // The writer is nearly always in the middle of a copy. On a busy machine the wait may rarely
    // time out, and the region is then quarantined.
    println!("{quarantined} of {rounds} regions quarantined");
    assert!(quarantined < rounds / 2, "nobody waited");
}
