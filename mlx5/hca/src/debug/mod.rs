//! Finding mistakes of drivers, and of programs under failures.
//!
//! - `strict`: strict mode, which reports what breaks a `rule`. `watch`: its state.
//! - `faults`: failures by seed. `trace`: a hash of a run. `vendor`: the texts of vendor syndromes. `testing`: corrupted words, for tests.

pub(crate) mod faults;
pub(crate) mod rule;
pub(crate) mod strict;
#[doc(hidden)]
pub mod testing;
pub(crate) mod trace;
pub(crate) mod vendor;
pub(crate) mod watch;
