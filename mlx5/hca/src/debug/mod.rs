//! Detects mistakes of drivers, and makes failures for tests of programs.
//!
//! - `strict`: strict mode, which checks the rules in `rule`. `watch`: the state of strict mode.
//! - `faults`: failures by seed. `trace`: a hash of a run. `vendor`: the texts of vendor syndromes.
//!   `testing`: corrupted words, for tests.

pub(crate) mod faults;
pub(crate) mod rule;
pub(crate) mod strict;
#[doc(hidden)]
pub mod testing;
pub(crate) mod trace;
pub(crate) mod vendor;
pub(crate) mod watch;
