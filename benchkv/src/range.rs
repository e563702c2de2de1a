//! [`RangeError`]: an option that cannot be honoured, and what is legal.

use thiserror::Error;

/// The value of an option cannot be honoured.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{flag} {given}: {why}; legal is {legal}")]
pub struct RangeError {
    /// The option.
    pub flag: &'static str,
    /// Its value as given.
    pub given: String,
    /// What is wrong with it.
    pub why: &'static str,
    /// The legal values, or what to do.
    pub legal: String,
}

pub(crate) fn range(flag: &'static str, given: impl ToString, why: &'static str, legal: String) -> RangeError {
    RangeError { flag, given: given.to_string(), why, legal }
}
