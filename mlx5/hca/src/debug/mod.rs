//! Detects mistakes of drivers, and makes failures for tests of programs.
//!
//! - `strict`: strict mode, which checks the rules. `faults`: failures by seed. `trace`: a hash of
//!   a run.

pub(crate) mod faults;
pub(crate) mod strict;
pub(crate) mod trace;
