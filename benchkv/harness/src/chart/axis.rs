//! One axis of a chart: the places of values, the labelled ticks, and the unit in its title.

/// The scale of an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scale {
    /// Values are spread evenly.
    Linear,
    /// Values are spread by their logarithm; all are positive.
    Log,
}

/// An axis: a range of values that is not empty, and its ticks.
#[derive(Debug, Clone)]
pub struct Axis {
    /// The quantity, with the unit in parentheses.
    pub title: String,
    scale: Scale,
    low: f64,
    high: f64,
    /// Tick values, ascending, with their labels.
    pub ticks: Vec<(f64, String)>,
}

/// A prefix to a unit, and its factor.
type Prefix = (&'static str, f64);

const RATES: [Prefix; 4] = [("G ", 1e9), ("M ", 1e6), ("k ", 1e3), ("", 1.0)];
const TIMES: [Prefix; 4] = [("s", 1e9), ("ms", 1e6), ("\u{b5}s", 1e3), ("ns", 1.0)];

impl Axis {
    /// Makes an axis of rates, from zero to the maximum of `values`.
    #[must_use]
    pub fn rates(what: &str, unit: &str, values: impl Iterator<Item = f64>) -> Self {
        let high = largest(values);
        let (prefix, factor) = prefix_of(&RATES, high);
        Self::from_zero(format!("{what} ({prefix}{unit})"), high, factor)
    }

    /// Makes an axis of counts, shares and other quantities without prefixes, from zero; `what`
    /// names the unit.
    #[must_use]
    pub fn plain(what: &str, values: impl Iterator<Item = f64>) -> Self {
        Self::from_zero(what.to_owned(), largest(values), 1.0)
    }

    /// Makes an axis of times in nanoseconds, from zero.
    #[must_use]
    pub fn times_from_zero(what: &str, values: impl Iterator<Item = f64>) -> Self {
        let high = largest(values);
        let (unit, factor) = prefix_of(&TIMES, high);
        Self::from_zero(format!("{what} ({unit})"), high, factor)
    }

    /// Makes an axis of times in nanoseconds, from zero to exactly the last of `values`.
    #[must_use]
    pub fn elapsed(what: &str, values: impl Iterator<Item = f64>) -> Self {
        let last = largest(values);
        let mut axis = Self::times_from_zero(what, [last].into_iter());
        if last > 0.0 {
            axis.high = last;
            axis.ticks.retain(|(value, _)| *value <= last);
        }
        axis
    }

    /// Makes an axis of times in nanoseconds by their logarithm. Values below 1 ns are at 1 ns.
    #[must_use]
    pub fn log_times(what: &str, values: impl Iterator<Item = f64>) -> Self {
        let values: Vec<f64> = values.map(|value| value.max(1.0)).collect();
        let high = largest(values.iter().copied()).max(1.0);
        let low = values.into_iter().fold(high, f64::min);
        let (unit, factor) = prefix_of(&TIMES, (low * high).sqrt());
        let (low, high) = (
            10f64.powf(low.log10().floor()),
            10f64.powf((high.log10() + 1e-9).ceil()).max(low * 10.0),
        );
        let decades = (low.log10().round() as i32)..=(high.log10().round() as i32);
        let ticks = decades
            .map(|decade| (10f64.powi(decade), number(10f64.powi(decade) / factor)))
            .collect();
        Self {
            title: format!("{what} ({unit}, log scale)"),
            scale: Scale::Log,
            low,
            high,
            ticks,
        }
    }

    /// Makes an axis of settings, each with a tick; evenly spread by their logarithm if they span a
    /// factor of four.
    #[must_use]
    pub fn settings(title: String, values: &[f64]) -> Self {
        let mut sorted: Vec<f64> = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted.dedup();
        let (first, last) = (
            sorted.first().copied().unwrap_or(0.0),
            sorted.last().copied().unwrap_or(1.0),
        );
        let scale = if first > 0.0 && last >= 4.0 * first {
            Scale::Log
        } else {
            Scale::Linear
        };
        let (low, high) = match scale {
            _ if first == last => (first - 1.0, last + 1.0),
            Scale::Linear => (first - 0.05 * (last - first), last + 0.05 * (last - first)),
            Scale::Log => (
                first / (last / first).powf(0.05),
                last * (last / first).powf(0.05),
            ),
        };
        let ticks = sorted
            .into_iter()
            .map(|value| (value, number(value)))
            .collect();
        Self {
            title,
            scale,
            low,
            high,
            ticks,
        }
    }

    /// Makes an axis of shares of all operations, from none to all but one in `operations`, by the
    /// logarithm of the rest: 90 %, 99 %, 99.9 % are evenly spread. A value on this axis is 1 /
    /// (1 - share).
    #[must_use]
    pub fn percentiles(operations: f64) -> Self {
        let decades = (operations.max(10.0).log10().ceil() as i32).max(1);
        let label = |decade| match decade {
            0 => "0".to_owned(),
            1 => "90".to_owned(),
            2 => "99".to_owned(),
            more => format!("99.{}", "9".repeat(more as usize - 2)),
        };
        let ticks = (0..=decades)
            .map(|decade| (10f64.powi(decade), label(decade)))
            .collect();
        let title = "operations that are faster (%, log scale of the rest)".to_owned();
        Self {
            title,
            scale: Scale::Log,
            low: 1.0,
            high: 10f64.powi(decades),
            ticks,
        }
    }

    /// Returns the place of `value`: 0 at the low end, 1 at the high end, never outside.
    #[must_use]
    pub fn place(&self, value: f64) -> f64 {
        let place = match self.scale {
            Scale::Linear => (value - self.low) / (self.high - self.low),
            Scale::Log => {
                (value.max(f64::MIN_POSITIVE) / self.low).ln() / (self.high / self.low).ln()
            }
        };
        if place.is_nan() {
            0.0
        } else {
            place.clamp(0.0, 1.0)
        }
    }

    /// Makes an axis from zero to a round number above `high`; labels are values divided by
    /// `factor`.
    fn from_zero(title: String, high: f64, factor: f64) -> Self {
        let high = if high > 0.0 { high / factor } else { 1.0 };
        let step = round_step(high / 4.0);
        let steps = (high / step - 1e-9).ceil().max(1.0) as u32;
        let ticks = (0..=steps)
            .map(|count| f64::from(count) * step)
            .map(|value| (value * factor, number(value)))
            .collect();
        Self {
            title,
            scale: Scale::Linear,
            low: 0.0,
            high: f64::from(steps) * step * factor,
            ticks,
        }
    }
}

/// Returns the maximum finite value; 0 without one.
fn largest(values: impl Iterator<Item = f64>) -> f64 {
    values.filter(|value| value.is_finite()).fold(0.0, f64::max)
}

fn prefix_of(prefixes: &[Prefix], value: f64) -> Prefix {
    let fits = prefixes.iter().find(|(_, factor)| value >= *factor);
    fits.or(prefixes.last()).copied().unwrap_or(("", 1.0))
}

/// Returns the smallest of 1, 2, 2.5 or 5 times a power of ten that is at least `least`.
fn round_step(least: f64) -> f64 {
    let decade = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 2.5, 5.0]
        .map(|digit| digit * decade)
        .into_iter()
        .find(|step| *step >= least * (1.0 - 1e-9))
        .unwrap_or(10.0 * decade)
}

/// Formats a number as short as possible: at most four digits after the point, thousands separated.
#[must_use]
pub fn number(value: f64) -> String {
    let text = format!("{value:.4}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    let (whole, fraction) = text
        .split_once('.')
        .map_or((text, ""), |(whole, fraction)| (whole, fraction));
    let digits = whole.trim_start_matches('-');
    let mut grouped = String::from(if whole.starts_with('-') { "-" } else { "" });
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    if fraction.is_empty() {
        grouped
    } else {
        format!("{grouped}.{fraction}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|(_, label)| label.as_str()).collect()
    }

    #[test]
    fn ticks_are_round_and_in_the_unit_of_the_title() {
        let axis = Axis::rates("throughput", "operations/s", [3e5, 1.7e6].into_iter());
        assert_eq!(
            (axis.title.as_str(), labels(&axis)),
            (
                "throughput (M operations/s)",
                vec!["0", "0.5", "1", "1.5", "2"]
            )
        );
        assert_eq!(
            (axis.place(0.0), axis.place(1e6), axis.place(3e6)),
            (0.0, 0.5, 1.0)
        );
        let axis = Axis::times_from_zero("hold", [4_200.0].into_iter());
        assert_eq!(
            (axis.title.as_str(), labels(&axis)),
            ("hold (\u{b5}s)", vec!["0", "2", "4", "6"])
        );
        let axis = Axis::elapsed("since", [4_200.0].into_iter());
        assert_eq!(
            (labels(&axis), axis.place(4_200.0)),
            (vec!["0", "2", "4"], 1.0)
        );
        assert_eq!(
            labels(&Axis::plain("share (%)", [100.0].into_iter())),
            ["0", "25", "50", "75", "100"]
        );
        assert_eq!(
            labels(&Axis::plain("nothing (count)", [].into_iter())),
            ["0", "0.25", "0.5", "0.75", "1"]
        );
    }

    #[test]
    fn logarithmic_times_are_whole_decades() {
        let axis = Axis::log_times("round trip", [230.0, 41_000.0].into_iter());
        assert_eq!(axis.title, "round trip (\u{b5}s, log scale)");
        assert_eq!(labels(&axis), ["0.1", "1", "10", "100"]);
        assert!((axis.place(1e3) - 1.0 / 3.0).abs() < 1e-9 && axis.place(0.0) == 0.0);
        assert_eq!(
            labels(&Axis::log_times("round trip", [1000.0].into_iter())),
            ["1", "10"],
            "a range is never empty"
        );
    }

    #[test]
    fn percentiles_leave_equal_room_to_each_nine() {
        let axis = Axis::percentiles(52_000.0);
        assert_eq!(labels(&axis), ["0", "90", "99", "99.9", "99.99", "99.999"]);
        assert!((axis.place(1.0 / (1.0 - 0.99)) - 0.4).abs() < 1e-9);
    }

    #[test]
    fn settings_have_a_tick_each() {
        let axis = Axis::settings("ranks (processes)".into(), &[8.0, 2.0, 4.0, 2.0]);
        assert_eq!(
            (labels(&axis), axis.scale),
            (vec!["2", "4", "8"], Scale::Log)
        );
        assert!((axis.place(4.0) - 0.5).abs() < 1e-9);
        assert_eq!(
            Axis::settings(String::new(), &[0.0, 0.5, 1.0]).scale,
            Scale::Linear
        );
        assert_eq!(Axis::settings(String::new(), &[3.0]).place(3.0), 0.5);
    }

    #[test]
    fn numbers_are_short_and_readable() {
        assert_eq!(
            [0.0, 0.25, 1e3, 1_234_567.0, 0.1 + 0.2, -1500.0].map(number),
            ["0", "0.25", "1,000", "1,234,567", "0.3", "-1,500"].map(str::to_owned)
        );
    }
}
