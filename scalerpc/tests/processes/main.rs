//! Clients in processes of their own: hundreds at once, which join, leave, are stopped and are
//! killed.
//!
//! A test has the server ([`desk`]); its helper processes execute this binary again, as a [`crowd`]
//! of clients, as one client that stops or dies in a [state](states) of its own choice, or as a
//! server that is killed and [returns].
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "tests; helpers outside #[test] functions are not covered by clippy's allow-*-in-tests"
)]

mod crowd;
mod desk;
mod guest;
mod load;
mod returns;
mod states;
#[path = "../support/mod.rs"]
mod support;
#[path = "../../../mlx5/tests/support/time.rs"]
mod time;

/// Runs the helper processes of the other tests. It is not a test of its own.
#[test]
fn helper_process() {
    let Ok(role) = std::env::var("SHM_TEST_ROLE") else {
        return;
    };
    // Sets the watchdog.
    let _dir = copyrpc_testing::helpers::role();
    match role.split(' ').collect::<Vec<_>>()[..] {
        ["crowd"] => crowd::run(crowd::SIZE, false),
        ["crowd", size] => crowd::run(size.parse().unwrap(), true),
        ["serve", address] => returns::run(address),
        [deed, state] => states::run(deed, state),
        _ => panic!("no role is called {role}"),
    }
}
