//! A process in which membarrier(2) does not work: under a strict seccomp profile, or in gVisor.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test"
)]

use std::time::Duration;

use mlx5::*;

/// Makes membarrier(2) fail with ENOSYS, for this thread and those that it starts.
fn refuse_membarrier() {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const SKIP_UNLESS: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let line = |code, jf, k| libc::sock_filter { code, jt: 0, jf, k };
    // The number of the system call is the first word.
    let mut filter = [
        line(LOAD, 0, 0),
        line(SKIP_UNLESS, 1, libc::SYS_membarrier as u32),
        line(RETURN, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
        line(RETURN, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: integers, and a program that lives as long as the call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(
            libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program
            ),
            0
        );
        assert_eq!(libc::syscall(libc::SYS_membarrier, 0, 0, 0), -1);
    }
}

/// The only test of this process, because a process checks once whether the system call works.
#[test]
fn memory_is_taken_away_from_under_peers_that_live() {
    copyrpc_testing::limits::watchdog(Duration::from_secs(120));
    refuse_membarrier();
    let fabric = LocalFabric::new();
    let end = || {
        let options = SoftOptions {
            fabric: FabricSpec::Local(fabric.clone()),
            arena_bytes: 1 << 24,
            ..SoftOptions::default()
        };
        let device = Device::open(DeviceSpec::Soft(options)).unwrap();
        let pd = device.alloc_pd().unwrap();
        let (cq, srq) = (device.create_cq(64).unwrap(), pd.create_srq(4, 0).unwrap());
        let qp = pd.create_qp(&cq, &cq, &srq, &QpConfig::default()).unwrap();
        (qp, pd, cq, srq, device)
    };
    let (mut a, mut b) = (end(), end());
    a.0.connect(&b.0.address(), &ConnectOptions::default())
        .unwrap();
    b.0.connect(&a.0.address(), &ConnectOptions::default())
        .unwrap();
    let mr =
        b.1.alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
            .unwrap();
    let (addr, rkey) = (mr.addr(), mr.rkey());
    let mut write = || {
        a.0.post(
            &Write {
                addr,
                rkey,
                payload: Inline(b"ping"),
            },
            Signal::Always,
            0,
        )
        .unwrap();
        a.0.ring();
        let mut result = None;
        while result.is_none() {
            a.2.poll(1, |cqe| result = Some(cqe.result().is_ok()));
        }
        result
    };
    assert_eq!(write(), Some(true));
    mr.deregister().unwrap();
    assert_eq!(write(), Some(false), "the key names nothing");
    drop(b.0);
    assert_eq!(b.4.info().quarantined, 0);
}
