//! The library that `mlx5-run` preloads into a program (`LD_PRELOAD`). It interposes a few calls of
//! the C library, so that libibverbs and libmlx5 find a device; the software HCA ([`mlx5_hca`])
//! executes that device's commands and queues. A program never links this library; the README
//! explains its use.
//!
//! # Inside, in the order of a command's path
//!
//! | module | what |
//! |---|---|
//! | `interpose` | the interposed calls, which cost one load from a table for other descriptors |
//! | `files` | the library's descriptors, by process; event channels; counters; paths of `/sys` |
//! | `command`, `abi` | framing of commands; the kernel's structures, which are checked at compile time and by a test against the headers; its table of transitions |
//! | `cm` | `/dev/infiniband/rdma_cm`: ids, their states, and the sockets between them; messages to other hosts |
//! | `thread` | the path to the thread that owns the HCA, and that thread |
//! | `objects` | the commands, by object; asynchronous events; `--check-doorbells` |
//! | `options` | the launcher's options, and the log |
//! | `system` | system calls; descriptors that the program must not close |
//! | `bin/mlx5-run` | the launcher; the gate, which sends and receives the messages of rdma_cm between hosts |
//!
//! - **write() commands only.** `ioctl(RDMA_VERBS_IOCTL)` fails with `EPROTONOSUPPORT`, as in a
//!   kernel without the called method. libibverbs then writes the command. For a method without a
//!   command, such as the methods of DEVX, libibverbs reports that the device does not support it.
//!   For methods of regions and device memory, such as `ibv_advise_mr`, the error is `EOPNOTSUPP`,
//!   as in their manual pages.
//! - **Paths of `/sys`** that lead to the device are replaced by paths of the launcher's tree, in
//!   all of the C library's calls that NCCL, hwloc, perftest, coreutils, shells, Python and the
//!   like make. A mount namespace would show the tree to direct system calls too. But an
//!   unprivileged process needs a user namespace for it, where the system allows one at all, and
//!   processes of different user namespaces may not copy each other's memory.
//! - **The device file is a sealed, sparse memfd**, which `fstat` reports as a character device.
//!   libmlx5 maps its doorbell registers from it, at the same offsets as from a kernel. So `mmap`
//!   need not be interposed.
//! - **One thread owns the HCA of an open device**, from `open` until the descriptors of the device
//!   are closed and its registers unmapped: the end of the thread shows peers that the HCA is dead.
//!   The program's threads pass their commands to this thread and wait. This thread sleeps between
//!   polls of the doorbell records: 20 us after recent work, and up to 1 ms after a long idle time.
//!   It never spins, because a spinning program needs the cores itself. A panic in this thread ends
//!   the context (`EIO`), not the program.
//! - **A command waits only** for a peer in the middle of a copy into or from a region that the
//!   command deregisters or changes. The thread tries such a command again, while it carries out
//!   other commands. After 2 s the waiting command is refused (`EBUSY`), and the region is
//!   unchanged.
//! - **The kernel checks the addresses in commands**: its cross-process copy reads commands and
//!   writes responses. The memory of a queue or region must be readable, or writable, when a
//!   command passes its address. So a wrong address is an `EFAULT`, as from a kernel, and not a
//!   crash.
//! - **Descriptors**: a duplicate (`dup`, `dup2`, `dup3`, `fcntl`) refers to the same open device.
//!   The device stays open while one of these descriptors is open, or while the program has a page
//!   of the device file mapped. So a program that closes all descriptors, and keeps a page mapped,
//!   keeps its queue pairs, as with a kernel. The program cannot close the descriptors that the HCA
//!   opened for itself (`EBADF`), not even with all others by `close_range` or `closefrom`; a
//!   system call that bypasses the C library can close them.
//! - **A child of fork** has the files, but not the thread: the child's commands to the parent's
//!   device fail (`EIO`), and the child may open a device of its own.
//! - **Doorbells are seen in the doorbell records**; a NIC acts on the register. So a driver that
//!   forgets the register, or stores the wrong bytes there, works here, unless `--check-doorbells`
//!   is given. Then the register of each queue pair is checked after the queue pair's record has
//!   moved. Within a second the register must hold the last WQE before the counter in the record:
//!   the whole WQE, its first 8 bytes, or a batch that ends with this WQE. If another doorbell on
//!   the same register follows before the next check, the first doorbell is counted as overtaken,
//!   and cannot be checked. Programs that wait for each completion have no such doorbells.
//!   Registers from another source (`mlx5dv_devx_alloc_uar`) are not checked.
#![deny(unsafe_op_in_unsafe_fn)]
#![cfg_attr(
    test,
    allow(
        dead_code,
        reason = "the test program must not interpose its own C library, so nothing calls the exported functions"
    )
)]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("the front end is for 64-bit Linux, whose C library it interposes");

mod interpose;

mod abi;
mod cm;
mod command;
mod files;
mod objects;
mod options;
mod system;
mod thread;
