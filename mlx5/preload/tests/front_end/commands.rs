//! Commands written to the device file, and the errors of refused commands.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};
use std::{fs, io};

use crate::abi::verbs::{self, number};
use crate::raw::{
    DEVICE, Device, INIT, Memory, RTR, RTS, errno, under_the_library, under_the_library_with,
};

const ERROR: (u8, u32) = (6, 1);

/// The only LID, and a QPN that no queue pair has: the upper ten bits of a QPN are never all ones.
const NOBODY: (u16, u32) = (1, 0x3ff << 14);

#[test]
fn the_device_file_is_a_character_device() {
    under_the_library(
        "commands::the_device_file_is_a_character_device",
        "",
        &[],
        || {
            let device = Device::open().unwrap();
            // SAFETY: a string, and places for two structures.
            let (by_path, by_fd) = unsafe {
                let (mut by_path, mut by_fd) = (
                    core::mem::zeroed::<libc::stat>(),
                    core::mem::zeroed::<libc::stat>(),
                );
                assert_eq!(libc::stat(DEVICE.as_ptr(), &raw mut by_path), 0);
                assert_eq!(libc::fstat(device.file.as_raw_fd(), &raw mut by_fd), 0);
                (by_path, by_fd)
            };
            for status in [by_path, by_fd] {
                assert_eq!(status.st_mode & libc::S_IFMT, libc::S_IFCHR);
                assert_eq!(status.st_rdev, libc::makedev(231, 192));
            }
            assert_eq!(
                // SAFETY: plain numbers.
                unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW, 20) },
                -1
            );
            assert_eq!(
                io::Error::last_os_error().raw_os_error(),
                Some(libc::EPROTONOSUPPORT)
            );
        },
    );
}

#[test]
fn there_is_one_context_and_nothing_before_it() {
    under_the_library(
        "commands::there_is_one_context_and_nothing_before_it",
        "",
        &["alloc_pd (3) refused: EINVAL"],
        || {
            let device = Device::open().unwrap();
            assert_eq!(errno(device.alloc_pd()), libc::EINVAL);
            let context = device.get_context().unwrap();
            assert_eq!(
                (context.tot_bfregs, context.bf_reg_size, context.cqe_version),
                (16, 512, 1)
            );
            assert_eq!(errno(device.get_context()), libc::EINVAL);
            device.alloc_pd().unwrap();
        },
    );
}

#[test]
fn what_there_is_not_is_refused_and_logged_by_name() {
    let logged = [
        "resize_cq (19) refused: EOPNOTSUPP",
        "alloc_mw (14) refused: EOPNOTSUPP",
        "ioctl MR.ADVISE_MR refused: EOPNOTSUPP",
    ];
    under_the_library(
        "commands::what_there_is_not_is_refused_and_logged_by_name",
        "",
        &logged,
        || {
            let device = Device::start();
            for number in [14, 19, 38, 200] {
                assert_eq!(errno(device.write(number, &[0; 24], 0)), libc::EOPNOTSUPP);
            }
            for (object, method, errno) in [
                (7, 2, libc::EOPNOTSUPP),      // MR.ADVISE_MR, as its manual page says
                (7, 1, libc::EPROTONOSUPPORT), // MR.MR_DESTROY: libibverbs writes it
                (14, 0, libc::EOPNOTSUPP),     // DM.DM_ALLOC
                (0, 0, libc::EPROTONOSUPPORT), // DEVICE.INVOKE_WRITE
            ] {
                assert_eq!(
                    device.ioctl(object, method),
                    errno,
                    "object {object}, method {method}"
                );
            }
            assert_eq!(errno((&device.file).write_short()), libc::EINVAL);
        },
    );
}

trait WriteShort {
    fn write_short(&mut self) -> io::Result<usize>;
}

impl WriteShort for &fs::File {
    /// Writes fewer bytes than a command's header has.
    fn write_short(&mut self) -> io::Result<usize> {
        io::Write::write(self, &[0; 5])
    }
}

#[test]
fn objects_in_use_are_not_destroyed() {
    under_the_library(
        "commands::objects_in_use_are_not_destroyed",
        "",
        &[],
        || {
            let (device, memory) = (Device::start(), Memory::new());
            let pd = device.alloc_pd().unwrap();
            let cq = device.create_cq(&memory, 16).unwrap();
            let srq = device.create_srq(&memory, pd).unwrap();
            let qp = device
                .create_qp(&memory, pd, cq, Some(srq))
                .unwrap()
                .qp_handle;
            let dealloc_pd =
                || device.tell(number::DEALLOC_PD, &verbs::DeallocPd { pd_handle: pd });
            assert_eq!(errno(device.destroy(number::DESTROY_CQ, cq)), libc::EBUSY);
            assert_eq!(errno(device.destroy(number::DESTROY_SRQ, srq)), libc::EBUSY);
            assert_eq!(errno(dealloc_pd()), libc::EBUSY);
            assert_eq!(
                errno(device.destroy(number::DESTROY_QP, qp + 1)),
                libc::EINVAL
            );
            device.destroy(number::DESTROY_QP, qp).unwrap();
            assert_eq!(errno(device.destroy(number::DESTROY_QP, qp)), libc::EINVAL);
            assert_eq!(device.destroy(number::DESTROY_CQ, cq).unwrap(), 0);
            device.destroy(number::DESTROY_SRQ, srq).unwrap();

            let mr = device
                .reg_mr(pd, memory.sq(), 64, memory.sq(), 1)
                .unwrap()
                .mr_handle;
            assert_eq!(errno(dealloc_pd()), libc::EBUSY);
            device
                .tell(number::DEREG_MR, &verbs::DeregMr { mr_handle: mr })
                .unwrap();
            dealloc_pd().unwrap();
            assert_eq!(errno(dealloc_pd()), libc::EINVAL);
        },
    );
}

#[test]
fn memory_that_cannot_be_registered_is_refused() {
    under_the_library(
        "commands::memory_that_cannot_be_registered_is_refused",
        "reg_mr=ENOMEM@6",
        &["reg_mr (9) refused: ENOMEM"],
        || {
            let (device, memory) = (Device::start(), Memory::new());
            let pd = device.alloc_pd().unwrap();
            let at = memory.sq();
            let reg_mr =
                |start, length, hca_va, access| device.reg_mr(pd, start, length, hca_va, access);
            assert_eq!(errno(reg_mr(at, 64, at + 4096, 1)), libc::EOPNOTSUPP);
            assert_eq!(errno(reg_mr(at, 0, at, 1)), libc::EINVAL);
            assert_eq!(errno(reg_mr(at, 64, at, 2)), libc::EINVAL);
            assert_eq!(errno(reg_mr(4096, 64, 4096, 1)), libc::EFAULT);
            assert_eq!(errno(device.reg_mr(pd + 1, at, 64, at, 1)), libc::EINVAL);
            let mr = reg_mr(at, 64, at, 0xf).unwrap();
            assert_eq!(mr.lkey, mr.rkey);
            assert_eq!(
                errno(reg_mr(at, 64, at, 1)),
                libc::ENOMEM,
                "the fault that was asked for"
            );
        },
    );
}

#[test]
fn queue_pairs_go_where_the_specification_lets_them() {
    under_the_library(
        "commands::queue_pairs_go_where_the_specification_lets_them",
        "",
        &[],
        || {
            let (device, memory) = (Device::start(), Memory::new());
            let pd = device.alloc_pd().unwrap();
            let cq = device.create_cq(&memory, 16).unwrap();
            let qp = device.create_qp(&memory, pd, cq, None).unwrap().qp_handle;
            let modify = |to| device.modify_qp(qp, to, NOBODY);
            assert_eq!(errno(modify(RTR)), libc::EINVAL);
            modify(INIT).unwrap();
            assert_eq!(errno(modify(RTS)), libc::EINVAL);
            assert_eq!(
                errno(modify((RTR.0, RTR.1 & !0x80))),
                libc::EINVAL,
                "without a path"
            );
            modify(RTR).unwrap();
            modify(RTS).unwrap();
            let is = device.query_qp(qp).unwrap();
            assert_eq!(
                (is.qp_state, is.cur_qp_state, is.dest_qp_num, is.dest.dlid),
                (3, 3, 0x3ff << 14, 1)
            );
            assert_eq!(
                (is.timeout, is.min_rnr_timer, is.path_mtu, is.max_send_wr),
                (1, 1, 3, 3)
            );
            modify(ERROR).unwrap();
            assert_eq!(device.query_qp(qp).unwrap().qp_state, 6);
            assert_eq!(errno(modify(RTS)), libc::EINVAL);
            modify((0, 1)).unwrap();
            assert_eq!(device.query_qp(qp).unwrap().dest_qp_num, 0, "RESET forgets");
            modify(INIT).unwrap();
        },
    );
}

#[test]
fn attributes_above_what_the_device_reports_are_refused() {
    under_the_library(
        "commands::attributes_above_what_the_device_reports_are_refused",
        "",
        &[],
        || {
            let (device, memory) = (Device::start(), Memory::new());
            let pd = device.alloc_pd().unwrap();
            assert_eq!(
                errno(device.create_cq_on(&memory, 16, 4)),
                libc::EINVAL,
                "four completion vectors"
            );
            let cq = device.create_cq_on(&memory, 16, 3).unwrap();
            let qp = device.create_qp(&memory, pd, cq, None).unwrap().qp_handle;
            assert_eq!(
                errno(device.modify_qp(qp, ERROR, NOBODY)),
                libc::EINVAL,
                "RESET leads to INIT only"
            );
            device.modify_qp(qp, INIT, NOBODY).unwrap();
            let to_rtr = |count| {
                device.modify_qp_with(qp, RTR, NOBODY, |request| {
                    request.max_dest_rd_atomic = count
                })
            };
            let to_rts = |count| {
                device.modify_qp_with(qp, RTS, NOBODY, |request| request.max_rd_atomic = count)
            };
            assert_eq!(errno(to_rtr(17)), libc::EINVAL);
            let no_port = device.modify_qp_with(qp, RTR, NOBODY, |at| at.dest.port_num = 0);
            assert_eq!(errno(no_port), libc::EINVAL, "the path has no port");
            to_rtr(16).unwrap();
            assert_eq!(errno(to_rts(17)), libc::EINVAL);
            to_rts(16).unwrap();
        },
    );
}

#[test]
fn a_receive_queue_is_as_large_as_its_driver_made_it() {
    under_the_library(
        "commands::a_receive_queue_is_as_large_as_its_driver_made_it",
        "",
        &[],
        || {
            let (device, memory) = (Device::start(), Memory::new());
            let pd = device.alloc_pd().unwrap();
            let cq = device.create_cq(&memory, 16).unwrap();
            let qp = device
                .create_qp_with(&memory, pd, cq, None, 4)
                .unwrap()
                .qp_handle;
            let is = device.query_qp(qp).unwrap();
            assert_eq!((is.max_recv_wr, is.max_recv_sge), (4, 4));
        },
    );
}

#[test]
fn a_region_whose_access_changes_keeps_its_keys() {
    under_the_library(
        "commands::a_region_whose_access_changes_keeps_its_keys",
        "",
        &[],
        || {
            let (device, memory) = (Device::start(), Memory::new());
            let pd = device.alloc_pd().unwrap();
            let mr = device.reg_mr(pd, memory.sq(), 64, memory.sq(), 1).unwrap();
            let changed = device.rereg_access(mr.mr_handle, 7).unwrap();
            assert_eq!((changed.lkey, changed.rkey), (mr.lkey, mr.rkey));
            assert_eq!(
                errno(device.rereg_access(mr.mr_handle, 2)),
                libc::EINVAL,
                "remote write without local write"
            );
            device
                .tell(
                    number::DEREG_MR,
                    &verbs::DeregMr {
                        mr_handle: mr.mr_handle,
                    },
                )
                .unwrap();
        },
    );
}

/// Posts a SEND to `dlid` and `qpn` (default: the queue pair's own number), and waits for the error
/// state. Returns the syndrome.
fn failure_of(dlid: u16, qpn: Option<u32>) -> u8 {
    let (device, memory) = (Device::start(), Memory::new());
    let pd = device.alloc_pd().unwrap();
    let cq = device.create_cq(&memory, 16).unwrap();
    let made = device.create_qp(&memory, pd, cq, None).unwrap();
    for to in [INIT, RTR, RTS] {
        device
            .modify_qp(made.qp_handle, to, (dlid, qpn.unwrap_or(made.qpn)))
            .unwrap();
    }
    memory.post_send(made.qpn);
    let since = Instant::now();
    while device.query_qp(made.qp_handle).unwrap().qp_state != 6 {
        assert!(
            since.elapsed() < Duration::from_secs(20),
            "nobody answers, and nothing fails"
        );
    }
    assert_eq!(
        errno(device.modify_qp(made.qp_handle, RTS, NOBODY)),
        libc::EINVAL
    );
    // SAFETY: the last byte of the first CQE, and the syndrome.
    let [syndrome, op_own] =
        [55, 63].map(|offset| unsafe { ((memory.cq() + offset) as *const u8).read_volatile() });
    assert_eq!(op_own, 13 << 4, "requester error");
    syndrome
}

#[test]
fn a_queue_pair_whose_operation_failed_is_in_the_error_state() {
    const TRANSPORT_RETRY_EXCEEDED: u8 = 0x15;
    const RNR_RETRY_EXCEEDED: u8 = 0x16;
    let logged = ["no peer will answer queue pair", "in this fabric"];
    under_the_library(
        "commands::a_queue_pair_whose_operation_failed_is_in_the_error_state",
        "",
        &logged,
        || {
            assert_eq!(
                failure_of(1, Some(NOBODY.1)),
                TRANSPORT_RETRY_EXCEEDED,
                "nobody has the number"
            );
            assert_eq!(
                failure_of(2, None),
                TRANSPORT_RETRY_EXCEEDED,
                "nobody has the LID"
            );
            assert_eq!(failure_of(1, None), RNR_RETRY_EXCEEDED, "it answers itself");
        },
    );
}

#[test]
fn a_child_of_fork_does_not_disturb_its_parent() {
    under_the_library(
        "commands::a_child_of_fork_does_not_disturb_its_parent",
        "",
        &[],
        || {
            let device = Device::start();
            // SAFETY: the child only makes calls that a program may make, and exits at once.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let is_refused = device
                    .alloc_pd()
                    .is_err_and(|error| error.raw_os_error() == Some(libc::EIO));
                drop(device);
                let is_good = is_refused
                    && Device::open().is_ok_and(|device| {
                        device.get_context().is_ok() && device.alloc_pd().is_ok()
                    });
                // SAFETY: a plain number.
                unsafe { libc::_exit(if is_good { 0 } else { 1 }) };
            }
            let mut status = -1;
            // SAFETY: a place for the status.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            assert_eq!(status, 0, "the child has a device of its own");
            device.alloc_pd().unwrap();
            let threads = || fs::read_dir("/proc/self/task").unwrap().count();
            let before = threads();
            drop(device);
            assert_eq!(threads(), before - 1, "closing ends the thread");
            Device::start().alloc_pd().unwrap();
        },
    );
}

#[test]
fn a_child_of_vfork_that_closes_everything_does_not_disturb_its_parent() {
    extern "C" fn close_all(_: *mut libc::c_void) -> i32 {
        for fd in 3..64 {
            // SAFETY: the child has descriptors of its own.
            unsafe { libc::close(fd) };
        }
        0
    }
    under_the_library(
        "commands::a_child_of_vfork_that_closes_everything_does_not_disturb_its_parent",
        "",
        &[],
        || {
            let device = Device::start();
            let mut stack = vec![0u128; 1 << 12];
            let (flags, mut status) = (libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD, -1);
            // SAFETY: the child has a stack of its own, and this thread waits until it has ended.
            unsafe {
                let child = libc::clone(
                    close_all,
                    stack.as_mut_ptr_range().end.cast(),
                    flags,
                    core::ptr::null_mut(),
                );
                assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            }
            assert_eq!(status, 0);
            device.alloc_pd().unwrap();
        },
    );
}

/// A seccomp filter forbids the copies, as in some containers.
#[test]
fn copies_across_processes_that_are_forbidden_are_named_when_the_device_is_opened() {
    let logged = [
        "process_vm_writev, by which commands are read and peers reached, is forbidden",
        "refused: EPERM",
    ];
    under_the_library(
        "commands::copies_across_processes_that_are_forbidden_are_named_when_the_device_is_opened",
        "",
        &logged,
        || {
            let step = |code: u32, jt, jf, k| libc::sock_filter {
                code: code as u16,
                jt,
                jf,
                k,
            };
            let mut steps = [
                step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
                step(
                    libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
                    0,
                    1,
                    libc::SYS_process_vm_writev as u32,
                ),
                step(
                    libc::BPF_RET | libc::BPF_K,
                    0,
                    0,
                    libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32,
                ),
                step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
            ];
            let filter = libc::sock_fprog {
                len: 4,
                filter: steps.as_mut_ptr(),
            };
            // SAFETY: a filter of this thread, which is read during the call.
            unsafe {
                assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
                assert_eq!(
                    libc::prctl(
                        libc::PR_SET_SECCOMP,
                        libc::SECCOMP_MODE_FILTER,
                        &raw const filter
                    ),
                    0
                );
            }
            assert_eq!(errno(Device::open().map(drop)), libc::EPERM);
        },
    );
}

#[test]
fn opening_can_be_refused() {
    let logged = ["open /dev/infiniband/uverbs0 refused: EACCES"];
    under_the_library(
        "commands::opening_can_be_refused",
        "open=EACCES",
        &logged,
        || {
            assert_eq!(errno(Device::open().map(|_| ())), libc::EACCES);
        },
    );
}

unsafe extern "C-unwind" {
    /// `read(2)`. A thread that is cancelled in it unwinds.
    fn read(fd: i32, bytes: *mut u64, count: usize) -> isize;
    /// `pthread_create(3)`, of a thread that may unwind.
    fn pthread_create(
        thread: *mut libc::pthread_t,
        attributes: *const libc::pthread_attr_t,
        start: extern "C-unwind" fn(*mut libc::c_void) -> *mut libc::c_void,
        argument: *mut libc::c_void,
    ) -> i32;
    fn pthread_cancel(thread: libc::pthread_t) -> i32;
}

extern "C-unwind" fn wait_for_event(fd: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: the buffer has room for an event, which never comes.
    unsafe { read(fd.addr() as i32, &mut 0, 8) };
    core::ptr::null_mut()
}

#[test]
fn a_thread_that_is_cancelled_while_it_waits_for_an_event_leaks_no_descriptor() {
    under_the_library(
        "commands::a_thread_that_is_cancelled_while_it_waits_for_an_event_leaks_no_descriptor",
        "",
        &[],
        || {
            let device = Device::start();
            let descriptors = || fs::read_dir("/proc/self/fd").unwrap().count();
            let before = descriptors();
            for _ in 0..20 {
                let request = verbs::CreateCompChannel { response: 0 };
                let (channel, _): (verbs::CreateCompChannelResp, [u8; 0]) = device
                    .ask(number::CREATE_COMP_CHANNEL, &request, &[0u8; 0])
                    .unwrap();
                let mut thread = 0;
                // SAFETY: a place for the thread, which is joined; its argument is a number.
                unsafe {
                    let argument = core::ptr::without_provenance_mut(channel.fd as usize);
                    assert_eq!(
                        pthread_create(
                            &raw mut thread,
                            core::ptr::null(),
                            wait_for_event,
                            argument
                        ),
                        0
                    );
                    std::thread::sleep(Duration::from_millis(2));
                    assert_eq!(
                        (
                            pthread_cancel(thread),
                            libc::pthread_join(thread, core::ptr::null_mut())
                        ),
                        (0, 0)
                    );
                    assert_eq!(libc::close(channel.fd as i32), 0);
                }
            }
            assert_eq!(descriptors(), before);
        },
    );
}

#[test]
fn a_limit_of_the_launcher_is_said_and_kept() {
    under_the_library_with(
        "commands::a_limit_of_the_launcher_is_said_and_kept",
        (
            "MLX5_PRELOAD_LIMITS",
            "max_qp=1,max_qp_wr=3,max_cqe=15,max_mr_size=4096,max_srq_wr=14",
        ),
        &[
            "16 is above --limit max_cqe=15",
            "2 is above --limit max_qp=1",
        ],
        || {
            let device = Device::start();
            let of: verbs::QueryDeviceResp = device
                .ask::<_, [u8; 0]>(
                    number::QUERY_DEVICE,
                    &verbs::QueryDevice { response: 0 },
                    &[0u8; 0],
                )
                .unwrap()
                .0;
            assert_eq!(
                (of.max_qp, of.max_qp_wr, of.max_cqe, of.max_mr_size),
                (1, 3, 15, 4096)
            );
            assert_eq!(of.max_sge, 30, "no limit was set");
            let (memory, pd) = (Memory::new(), device.alloc_pd().unwrap());
            assert_eq!(errno(device.create_cq(&memory, 17)), libc::EINVAL);
            let cq = device.create_cq(&memory, 16).unwrap();
            let at = memory.cq();
            assert_eq!(errno(device.reg_mr(pd, at, 4097, at, 1)), libc::EINVAL);
            device.reg_mr(pd, at, 4096, at, 1).unwrap();
            assert_eq!(errno(device.create_srq(&memory, pd)), libc::EINVAL);
            device.create_qp(&memory, pd, cq, None).unwrap();
            let another = device.create_qp(&memory, pd, cq, None);
            assert_eq!(errno(another), libc::ENOMEM);
        },
    );
}
