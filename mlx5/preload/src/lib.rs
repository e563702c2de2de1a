//! The library that `mlx5-run` puts in front of a program (`LD_PRELOAD`): it stands in front of a few calls of the C library, so that libibverbs and libmlx5
//! find a device, whose commands and queues the software HCA ([`mlx5_hca`]) executes. A program never links it; the README says how to use it.
//!
//! # Inside, in the order a command takes
//!
//! | module | what |
//! |---|---|
//! | `interpose`, `sys` | the C library's calls; for other descriptors one load from a table |
//! | `fds`, `held` | which descriptors are ours, in which process; those that the program must not close |
//! | `settings`, `config`, `faults`, `errno` | what the launcher asked for |
//! | `abi` | the kernel's structures, checked when compiled, and by a test against the headers |
//! | `command` | framing: header, request, the driver's part, and where the response goes |
//! | `context`, `mailbox`, `poller` | the way to the thread that owns the HCA, and that thread |
//! | `session`, `objects` | which command is whose; what an open device has |
//! | `device`, `regions`, `cq`, `srq`, `qp`, `modify`, `transitions`, `bfregs` | the commands, by object |
//! | `channel`, `asynchronous` | events of completion channels; asynchronous ones |
//! | `doorbells` | `--check-doorbells` |
//! | `log`, `names`, `methods` | what is logged, and the names of it |
//! | `bin/mlx5-run` | the launcher |
//!
//! - **write() commands only.** `ioctl(RDMA_VERBS_IOCTL)` fails with `EPROTONOSUPPORT`, as in a kernel that does not have the method called. libibverbs
//!   writes the command then; for what has none, as DEVX, programs learn that the device cannot do it.
//! - **The device file is a sealed, sparse memfd**, which `fstat` calls a character device. libmlx5 maps its doorbell registers from it at the offsets it
//!   uses with a kernel, and nobody has to stand in front of `mmap`.
//! - **One thread owns the HCA of an open device**, from `open` to `close`: its end is what tells peers that the HCA is dead. The program's threads
//!   hand it their commands and wait. It sleeps between looks at the doorbell records, 20 us when something happened lately and up to 1 ms when nothing
//!   did for long, and never spins: a program that spins needs the cores itself. A panic in it ends that context (`EIO`), not the program.
//! - **Addresses in commands are the kernel's to check**: commands are read and answers written by its cross-process copy, and queues and regions
//!   must be readable, or writable, when they are named. So wrong ones are `EFAULT`, as from a kernel, and no crash.
//! - **Descriptors**: a duplicate (`dup`, `dup2`, `dup3`, `fcntl`) is the device too, which lives as long as one of them. What the HCA has open for itself
//!   the program cannot close (`EBADF`), also not with all others by `close_range` or `closefrom`; by a system call that goes past the C library it can.
//! - **A child of fork** has the files, but not the thread: commands to the parent's device fail there (`EIO`), and it may open its own.
//! - **Doorbells are seen in the doorbell records**, where a NIC acts on the register. So a driver that forgets the register, or stores the wrong bytes
//!   there, works here, unless `--check-doorbells` is given: then the register of each queue pair is looked at when its record has moved, and must hold,
//!   within a second, the WQE up to which the record goes: whole, or its first 8 bytes, or a batch that ends with it. A doorbell that another one of the
//!   same register has followed before the next look is counted as overtaken, and cannot be judged; programs that wait for each completion have none of
//!   those. Registers that a program takes from elsewhere (`mlx5dv_devx_alloc_uar`) are not looked at.
#![deny(unsafe_op_in_unsafe_fn)]
#![cfg_attr(
    test,
    allow(dead_code, reason = "the test program must not stand in front of its own C library, so nothing calls what is exported")
)]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("the front end is for 64-bit Linux, whose C library's calls it stands in front of");

// What the program calls, and whether it is for us.
mod fds;
mod held;
mod interpose;
mod sys;

// What the launcher asked for; shared with it.
mod config;
mod doorbells;
mod errno;
mod faults;
mod names;
mod settings;

// The bytes of a command.
mod abi;
#[cfg(test)]
mod abi_header_tests;
mod command;
mod log;
mod methods;

// From the program's thread to the one that owns the HCA.
mod channel;
mod context;
mod mailbox;
mod poller;

// Commands, by object; and what happens without any.
mod asynchronous;
mod bfregs;
mod cq;
mod device;
mod modify;
mod objects;
mod qp;
mod regions;
mod session;
mod srq;
mod table;
mod transitions;
