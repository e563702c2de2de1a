//! The error of an option.

use std::borrow::Cow;

/// An option, or another number that the user of a crate chose, is outside its range. The same
/// choice is refused again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{option} is {value}: legal is {legal}")]
pub struct OptionError {
    /// Name of the option.
    pub option: &'static str,
    /// Value of the option.
    pub value: u64,
    /// Legal range, and what else to change.
    pub legal: Cow<'static, str>,
}

impl OptionError {
    /// Makes the error of an option.
    #[must_use]
    pub fn new(option: &'static str, value: u64, legal: impl Into<Cow<'static, str>>) -> Self {
        Self {
            option,
            value,
            legal: legal.into(),
        }
    }
}
