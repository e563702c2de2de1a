//! The core against simulated memory, and against peers that lie.

mod liars;
mod protocol;
