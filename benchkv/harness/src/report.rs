//! The two forms of a result: a table for people, one JSON document for programs.

use std::fmt;
use std::io::{self, Write};
use std::path::PathBuf;
use std::str::FromStr;

use serde::Serialize;

use crate::Failure;
use crate::file::{self, WriteError};

/// Columns under a header: the first is aligned to the left, the others to the right.
#[derive(Debug, Clone, Default)]
pub struct Table {
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Makes a table whose first row is `header`.
    pub fn new<S: Into<String>>(header: impl IntoIterator<Item = S>) -> Self {
        let mut table = Self::default();
        table.row(header);
        table
    }

    /// Appends a row. Rows may differ in length.
    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width_of = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
        };
        let widths: Vec<usize> = (0..columns)
            .map(|column| width_of(column).unwrap_or(0))
            .collect();
        for row in &self.rows {
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                match column {
                    0 => write!(f, "{cell:<width$}")?,
                    _ => write!(f, "  {cell:>width$}")?,
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// Writes a line to standard error. Uses one write, because the processes of a job share standard
/// error and lines must not mix. A closed standard error is not a failure.
pub fn say(text: &str) {
    let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// Writes all bytes to standard output. A reader that has closed it is not a failure.
///
/// # Errors
/// The system's reason.
pub fn to_stdout(bytes: &[u8]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// Formats operations per second with a unit for people.
pub fn rate(per_second: f64) -> String {
    match per_second {
        r if r >= 1e6 => format!("{:.2} M/s", r / 1e6),
        r if r >= 1e3 => format!("{:.1} k/s", r / 1e3),
        r => format!("{r:.0} /s"),
    }
}

/// Formats nanoseconds with a unit for people.
pub fn nanos(ns: f64) -> String {
    match ns {
        t if t >= 1e9 => format!("{:.2} s", t / 1e9),
        t if t >= 1e6 => format!("{:.2} ms", t / 1e6),
        t if t >= 1e3 => format!("{:.2} us", t / 1e3),
        t => format!("{t:.0} ns"),
    }
}

/// Formats a share in per cent.
pub fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// Formats bytes with a binary unit.
pub fn bytes(count: u64) -> String {
    match count {
        b if b >= 1 << 30 => format!("{:.1} GiB", b as f64 / (1u64 << 30) as f64),
        b if b >= 1 << 20 => format!("{:.1} MiB", b as f64 / (1u64 << 20) as f64),
        b if b >= 1 << 10 => format!("{:.1} KiB", b as f64 / 1024.0),
        b => format!("{b} B"),
    }
}

/// Formats a number of things: `1 daemon`, `2 daemons`.
pub fn plural(count: usize, noun: &str) -> String {
    let ending = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{ending}")
}

/// Median, minimum and maximum of values; all 0 without a value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// The middle value, or the mean of the two middle values.
    pub median: f64,
    /// Minimum.
    pub min: f64,
    /// Maximum.
    pub max: f64,
}

impl Spread {
    /// Returns the spread of `values`.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let at = |index: usize| values.get(index).copied().unwrap_or(0.0);
        let last = values.len().saturating_sub(1);
        Self {
            median: f64::midpoint(at(last / 2), at(last.div_ceil(2))),
            min: at(0),
            max: at(last),
        }
    }
}

/// The destination of the JSON document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JsonSink {
    /// Standard output, which then carries nothing else.
    Stdout,
    /// A file. A regular file is replaced as a whole when the document is complete. Any other file
    /// (a pipe, `/dev/null`) is opened and written.
    File(PathBuf),
}

impl FromStr for JsonSink {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(if text == "-" {
            Self::Stdout
        } else {
            Self::File(PathBuf::from(text))
        })
    }
}

impl JsonSink {
    /// Checks before a long run whether the result can be written after it. Leaves everything
    /// unchanged.
    ///
    /// # Errors
    /// The system's reason.
    pub fn check(&self) -> Result<(), Failure> {
        match self {
            Self::Stdout => Ok(()),
            Self::File(path) => file::check(path).map_err(of_file),
        }
    }

    /// Writes `value` and a newline.
    ///
    /// # Errors
    /// The destination's reason; a regular file is then unchanged.
    pub fn write(&self, value: &impl Serialize) -> Result<(), Failure> {
        let mut text = serde_json::to_vec_pretty(value)
            .map_err(|why| format!("the result has no JSON form: {why}"))?;
        text.push(b'\n');
        match self {
            Self::Stdout => to_stdout(&text).map_err(|why| {
                format!("the JSON result cannot be written to standard output: {why}").into()
            }),
            Self::File(path) => file::write(path, &text).map_err(of_file),
        }
    }
}

fn of_file(why: WriteError) -> Failure {
    format!("the JSON result: {why}, or -").into()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn scratch(name: &str) -> PathBuf {
        let dir =
            std::env::temp_dir().join(format!("harness-report-{}-{name}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(["rank", "ops", "p50"]);
        table.row(["0", "1234567", "4"]);
        table.row(["all", "9"]);
        assert_eq!(
            table.to_string(),
            "rank      ops  p50\n0     1234567    4\nall         9\n"
        );
    }

    #[test]
    fn units_change_at_their_borders() {
        assert_eq!(
            (rate(999.0), rate(1e3), rate(4.76e6)),
            ("999 /s".into(), "1.0 k/s".into(), "4.76 M/s".into())
        );
        assert_eq!(
            (nanos(999.0), nanos(1e3), nanos(2.5e6)),
            ("999 ns".into(), "1.00 us".into(), "2.50 ms".into())
        );
        assert_eq!(
            (plural(1, "rank"), plural(2, "rank")),
            ("1 rank".into(), "2 ranks".into())
        );
        assert_eq!(
            (bytes(1023), bytes(1024), bytes(1 << 20)),
            ("1023 B".into(), "1.0 KiB".into(), "1.0 MiB".into())
        );
    }

    #[test]
    fn a_spread_is_of_the_values_in_their_order() {
        assert_eq!(
            Spread::of([3.0, 1.0, 2.0]),
            Spread {
                median: 2.0,
                min: 1.0,
                max: 3.0
            }
        );
        assert_eq!(
            Spread::of([4.0, 1.0]),
            Spread {
                median: 2.5,
                min: 1.0,
                max: 4.0
            }
        );
        assert_eq!(
            Spread::of([]),
            Spread {
                median: 0.0,
                min: 0.0,
                max: 0.0
            }
        );
    }

    #[test]
    fn a_file_is_replaced_whole_and_nothing_else_is_left() {
        let dir = scratch("replace");
        let path = dir.join("result.json");
        let sink: JsonSink = path.to_str().unwrap().parse().unwrap();
        for value in [vec![1, 2, 3], vec![4]] {
            sink.check().unwrap();
            sink.write(&value).unwrap();
            assert_eq!(
                serde_json::from_slice::<Vec<i32>>(&fs::read(&path).unwrap()).unwrap(),
                value
            );
        }
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_place_that_cannot_be_written_is_found_before_the_run() {
        let dir = scratch("refuse");
        for place in [dir.join("missing/result.json"), dir.clone()] {
            let message = JsonSink::File(place.clone())
                .check()
                .unwrap_err()
                .to_string();
            assert!(message.contains(place.to_str().unwrap()), "{message}");
        }
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_device_is_written_to_not_replaced() {
        let sink = JsonSink::File(PathBuf::from("/dev/null"));
        sink.check().unwrap();
        sink.write(&1).unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }
}
