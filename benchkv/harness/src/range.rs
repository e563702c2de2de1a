//! [`RangeError`]: an option that cannot be honoured, and its legal values.

use std::fmt::Display;
use std::ops::RangeInclusive;

use thiserror::Error;

/// The value of an option cannot be honoured.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{flag} {given}: {why}; legal is {legal}")]
pub struct RangeError {
    /// The option.
    pub flag: &'static str,
    /// Its value as given.
    pub given: String,
    /// The reason.
    pub why: &'static str,
    /// The legal values, or the remedy.
    pub legal: String,
}

/// Makes the error of `flag` with the value `given`.
pub fn range(flag: &'static str, given: impl ToString, why: &'static str, legal: String) -> RangeError {
    RangeError { flag, given: given.to_string(), why, legal }
}

/// Checks a number: refuses one outside `legal`, or NaN, with `why`. `unit` is that of the legal values, with a space before it.
///
/// # Errors
/// [`RangeError`]: the number is outside its range.
pub fn within<T: PartialOrd + Display>(
    flag: &'static str,
    given: T,
    legal: RangeInclusive<T>,
    why: &'static str,
    unit: &str,
) -> Result<(), RangeError> {
    let text = || format!("{} to {}{unit}", legal.start(), legal.end());
    if legal.contains(&given) { Ok(()) } else { Err(range(flag, given, why, text())) }
}

/// Checks an amount: refuses too small an amount with `need`.
///
/// # Errors
/// [`RangeError`]: the amount is too small, or above the supported range.
pub fn amount<T: PartialOrd + Display>(
    flag: &'static str,
    given: T,
    legal: RangeInclusive<T>,
    need: &'static str,
    unit: &str,
) -> Result<(), RangeError> {
    let why = if given > *legal.end() { "more than is supported" } else { need };
    within(flag, given, legal, why, unit)
}
