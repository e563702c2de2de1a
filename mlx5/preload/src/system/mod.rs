//! System calls, and the descriptors that this library keeps from the program.

pub(crate) mod held;
pub(crate) mod sys;
