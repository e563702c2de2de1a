//! The legal values of options: parsers that refuse a value outside its range, and [`RangeError`]
//! for a value that conflicts with others.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use thiserror::Error;

use crate::units;

/// An option with a value that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{flag} {given}: {why}; legal is {legal}")]
pub struct RangeError {
    /// The option.
    pub flag: &'static str,
    /// Value of the option, as typed.
    pub given: String,
    /// The reason.
    pub why: &'static str,
    /// The legal values, or the remedy.
    pub legal: String,
}

/// Makes the error of `flag` with the value `given`.
pub fn range(
    flag: &'static str,
    given: impl ToString,
    why: &'static str,
    legal: String,
) -> RangeError {
    RangeError {
        flag,
        given: given.to_string(),
        why,
        legal,
    }
}

/// Returns a parser of `legal` whole numbers.
pub fn whole<T: FromStr + Display + Clone + PartialOrd>(
    legal: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|number| legal.contains(number));
        number.ok_or_else(|| {
            format!(
                "use a whole number from {} to {}",
                legal.start(),
                legal.end()
            )
        })
    }
}

/// Returns a parser of `legal` decimal numbers.
pub fn decimal(legal: RangeInclusive<f64>) -> impl Fn(&str) -> Result<f64, String> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|number| legal.contains(number));
        number.ok_or_else(|| {
            format!(
                "use a number from {} to {}; a point begins its decimals",
                legal.start(),
                legal.end()
            )
        })
    }
}

/// Returns a parser of `legal` times, in seconds.
pub fn time(legal: RangeInclusive<f64>) -> impl Fn(&str) -> Result<f64, String> + Clone {
    move |text| {
        let seconds = units::seconds(text)?;
        let outside = || {
            format!(
                "use a time from {} to {} seconds",
                legal.start(),
                legal.end()
            )
        };
        if legal.contains(&seconds) {
            Ok(seconds)
        } else {
            Err(outside())
        }
    }
}
