//! A program with an open device may fork, and its connections continue. The child does not use the
//! device, and writes all its other memory.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test"
)]

#[path = "support/end.rs"]
mod end;
#[path = "support/time.rs"]
mod time;

use std::time::Duration;

use copyrpc_testing::limits;
use end::*;
use mlx5::*;
use time::Net;

const ROUNDS: u32 = 20;
const LEN: usize = 256;

/// A child that lives until it gets the command to end.
struct Child {
    pid: libc::pid_t,
    tell: libc::c_int,
}

impl Child {
    /// Forks a child that writes every page of `pages`, so that the pages are not shared any more,
    /// and waits.
    fn fork(pages: &mut [u8]) -> Self {
        let mut pipe = [0; 2];
        // SAFETY: room for two descriptors. The child makes system calls and stores only, and ends
        // without running anything of its parent.
        unsafe {
            assert_eq!(libc::pipe(pipe.as_mut_ptr()), 0);
            let pid = libc::fork();
            assert!(pid >= 0);
            if pid == 0 {
                libc::close(pipe[1]);
                for page in pages.chunks_mut(4096) {
                    page.as_mut_ptr().write_volatile(0xee);
                }
                libc::read(pipe[0], pages.as_mut_ptr().cast(), 1);
                libc::_exit(7);
            }
            libc::close(pipe[0]);
            Self { pid, tell: pipe[1] }
        }
    }

    fn end(self) {
        let mut status = 0;
        // SAFETY: a child that was not waited for yet, and room for its status.
        unsafe {
            // The child ends when it reads this byte. Closing the pipe alone would not end it,
            // because later children hold this end of the pipe too.
            assert_eq!(libc::write(self.tell, [0u8].as_ptr().cast(), 1), 1);
            libc::close(self.tell);
            assert_eq!(libc::waitpid(self.pid, &raw mut status, 0), self.pid);
        }
        assert!(
            libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 7,
            "{status:#x}"
        );
    }
}

/// Does a WRITE with immediate, a SEND and a READ, each with bytes of its own.
fn exchange(net: &Net, a: &mut End, b: &mut End, round: u32) {
    let bytes: Vec<u8> = (0..LEN).map(|i| (i as u32 * 7 + round) as u8).collect();
    a.mr.write(0, &bytes).unwrap();
    b.receives(2, LEN as u32);
    let (addr, rkey) = (b.mr.addr() + (INTO + 8 * LEN) as u64, b.mr.rkey());
    let payload = a.mr.sge(0, LEN as u32).unwrap();
    a.post(
        &WriteImm {
            addr,
            rkey,
            imm: round,
            payload,
        },
        0,
    );
    a.post(&Send { payload }, 1);
    a.post(
        &Read {
            addr,
            rkey,
            into: a.mr.sge(INTO, LEN as u32).unwrap(),
        },
        2,
    );
    let sent = net.collect(3, || a.sent());
    assert!(sent.iter().all(|(_, result)| result.is_ok()), "{sent:?}");
    let received = net.collect(2, || b.received());
    assert_eq!(received[0].unwrap().imm, round);
    assert_eq!(
        (
            b.bytes(INTO + 8 * LEN, LEN),
            b.bytes(INTO + LEN, LEN),
            a.bytes(INTO, LEN)
        ),
        (bytes.clone(), bytes.clone(), bytes)
    );
}

#[test]
fn connections_go_on_while_children_live_and_after_they_have_ended() {
    limits::watchdog(Duration::from_secs(60));
    let net = Net::new();
    let (mut a, mut b) = pair(&net, SHARED);
    let mut pages = vec![1u8; 1 << 20];
    let mut children = vec![];
    for round in 0..ROUNDS {
        exchange(&net, &mut a, &mut b, round);
        children.push(Child::fork(&mut pages));
        exchange(&net, &mut a, &mut b, ROUNDS + round);
        if round % 2 == 1 {
            children.remove(0).end();
        }
    }
    children.into_iter().for_each(Child::end);
    exchange(&net, &mut a, &mut b, 2 * ROUNDS);
    assert!(
        pages.iter().all(|&byte| byte == 1),
        "what the children wrote is theirs"
    );
    // Objects that are made after a fork work as well.
    let (mut c, mut d) = pair(&net, OWN);
    exchange(&net, &mut c, &mut d, 0);
}
