//! [`RangeError`]: an option that cannot be honoured, and its legal values.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

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

/// Makes the error of `flag` with the value `given`, whose text is cut if it is as long as that of 1e300.
pub fn range(flag: &'static str, given: impl ToString, why: &'static str, legal: String) -> RangeError {
    /// Maximum number of characters of a value in a message.
    const LONGEST: usize = 200;
    let given = given.to_string();
    let cut = given.char_indices().nth(LONGEST).map(|(at, _)| format!("{}...", given.get(..at).unwrap_or_default()));
    RangeError { flag, given: cut.unwrap_or(given), why, legal }
}

/// Returns a parser of whole numbers that says what is `legal` in the place of a text that is none, or too large for its type. It checks
/// no range: [`within`] does, with a reason.
pub fn whole<T: FromStr + Display + Clone>(legal: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| text.parse().map_err(|_| format!("use a whole number from {} to {}", legal.start(), legal.end()))
}

/// Returns a parser of numbers, as [`whole`] is of whole ones.
pub fn decimal(legal: RangeInclusive<f64>) -> impl Fn(&str) -> Result<f64, String> + Clone {
    move |text| text.parse().map_err(|_| format!("use a number from {} to {}; a point begins its decimals", legal.start(), legal.end()))
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
