//! Detects mistakes of drivers, and makes failures for tests of programs.
//!
//! - `strict`: strict mode, which checks the rules. `faults`: failures by seed. `trace`: a hash of
//!   a run. `testing`: corrupted words, for tests.

pub(crate) mod faults;
pub(crate) mod strict;
#[doc(hidden)]
pub mod testing;
pub(crate) mod trace;
