#![doc = include_str!("../README.md")]
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
