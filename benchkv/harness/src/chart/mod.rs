//! Charts: SVG with two axes, as the figure of a page, with a legend below it that wraps with the
//! page, or as a file of its own.
//!
//! [`axis`]: the places of values; [`palette`]: the styles of series; [`text`]: escaped text.

use std::fmt::Write;

use axis::Axis;
use palette::{MOST, Style, style};
use text::escape;

pub mod axis;
pub mod palette;
pub mod text;

/// Size of the SVG's own coordinates; the page scales it to its column.
const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 290.0;
const TOP: f64 = 10.0;
const RIGHT: f64 = 24.0;
/// Room for the labels and the title of the x axis.
const BOTTOM: f64 = 46.0;
/// Room for the title of the y axis; room for its labels is added.
const LEFT: f64 = 32.0;
/// Height of a bar with its gap.
const BAR: f64 = 26.0;
/// Width of a character at the size of labels, as wide as fonts have it; and the space between two
/// labels.
const CHARACTER: f64 = 7.6;
const GAP: f64 = 8.0;
/// Maximum length of a bar's label, in characters.
const LONGEST: usize = 24;
/// Number of marks on a line of many points, by which it is found in the legend.
const MARKS: usize = 8;
/// Height of a line of text in a file; in a page, the page decides.
const FILE_LINE: f64 = 18.0;
/// The style of a page for its charts.
const FILE_STYLE: &str = "text { font: 12.5px system-ui, 'DejaVu Sans', sans-serif; fill: #333 } .title { font-weight: 600; font-size: 14px } \
     .note { fill: #555; font-size: 11.5px } .grid { stroke: #e3e3e3 } .band { fill: #eaf1f7 } .frame { stroke: #777; fill: none }";

/// A value, and its spread.
#[derive(Debug, Clone, Copy)]
pub struct Point {
    /// Value on the x axis.
    pub x: f64,
    /// Value on the y axis.
    pub y: f64,
    /// Minimum and maximum, on the y axis.
    pub spread: Option<(f64, f64)>,
}

impl Point {
    /// Makes a value without spread.
    #[must_use]
    pub const fn new(x: f64, y: f64) -> Self {
        Self { x, y, spread: None }
    }
}

/// A line, with its name in the legend.
#[derive(Debug, Clone)]
pub struct Series {
    /// Its name.
    pub name: String,
    /// Its points, from left to right.
    pub points: Vec<Point>,
}

/// Lines over two axes.
#[derive(Debug, Clone)]
pub struct Lines {
    /// The quantity shown.
    pub title: String,
    /// Further information for the reader.
    pub note: String,
    /// The axis at the bottom.
    pub x: Axis,
    /// The axis at the left.
    pub y: Axis,
    /// Ranges of the x axis that are shaded.
    pub bands: Vec<(f64, f64)>,
    /// The lines.
    pub series: Vec<Series>,
}

/// A bar of parts in a row, one for each name of the legend.
#[derive(Debug, Clone)]
pub struct Bar {
    /// Its name, at the left.
    pub label: String,
    /// Lengths of its parts.
    pub parts: Vec<f64>,
    /// Minimum and maximum of its whole length.
    pub spread: Option<(f64, f64)>,
}

/// Bars from left to right, one below the other.
#[derive(Debug, Clone)]
pub struct Bars {
    /// The quantity shown.
    pub title: String,
    /// Further information for the reader.
    pub note: String,
    /// The meaning of the bars, as the title of the other axis.
    pub what: String,
    /// The axis at the bottom.
    pub x: Axis,
    /// Names of the parts.
    pub parts: Vec<String>,
    /// The bars, from top to bottom.
    pub bars: Vec<Bar>,
}

/// The part of the SVG between the axes.
#[derive(Debug, Clone, Copy)]
struct Area {
    left: f64,
    top: f64,
    width: f64,
    height: f64,
}

impl Area {
    fn x(&self, axis: &Axis, value: f64) -> f64 {
        self.left + self.width * axis.place(value)
    }

    fn y(&self, axis: &Axis, value: f64) -> f64 {
        self.top + self.height * (1.0 - axis.place(value))
    }

    fn bottom(&self) -> f64 {
        self.top + self.height
    }

    fn frame(&self) -> String {
        let Self {
            left,
            top,
            width,
            height,
        } = self;
        format!(
            r#"<rect class="frame" x="{left:.1}" y="{top:.1}" width="{width:.1}" height="{height:.1}"/>"#
        )
    }

    fn band(&self, axis: &Axis, from: f64, to: f64) -> String {
        let (left, right) = (self.x(axis, from), self.x(axis, to));
        let top = self.top;
        let width = right - left;
        let height = self.height;
        format!(
            r#"<rect class="band" x="{left:.1}" y="{top:.1}" width="{:.1}" height="{height:.1}"/>"#,
            width.max(0.0)
        )
    }

    /// Draws grid, labels and title of the x axis. Leaves out labels that would touch the one
    /// before, or the edge.
    fn x_axis(&self, axis: &Axis) -> String {
        let (mut svg, mut free_from) = (String::new(), f64::NEG_INFINITY);
        for (value, label) in &axis.ticks {
            let at = self.x(axis, *value);
            let _ = write!(
                svg,
                r#"<line class="grid" x1="{at:.1}" x2="{at:.1}" y1="{:.1}" y2="{:.1}"/>"#,
                self.top,
                self.bottom()
            );
            let half = width(label) / 2.0;
            if at - half >= free_from && at + half <= WIDTH {
                let _ = write!(
                    svg,
                    r#"<text x="{at:.1}" y="{:.1}" text-anchor="middle">{}</text>"#,
                    self.bottom() + 17.0,
                    escape(label)
                );
                free_from = at + half + GAP;
            }
        }
        let (middle, bottom) = (self.left + self.width / 2.0, self.bottom() + 38.0);
        svg + &format!(
            r#"<text class="x-title" x="{middle:.1}" y="{bottom:.1}" text-anchor="middle">{}</text>"#,
            escape(&axis.title)
        )
    }

    fn y_axis(&self, axis: &Axis) -> String {
        let mut svg = String::new();
        for (value, label) in &axis.ticks {
            let at = self.y(axis, *value);
            let right = self.left + self.width;
            let _ = write!(
                svg,
                r#"<line class="grid" x1="{:.1}" x2="{right:.1}" y1="{at:.1}" y2="{at:.1}"/>"#,
                self.left
            );
            let _ = write!(
                svg,
                r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
                self.left - 6.0,
                at + 4.5,
                escape(label)
            );
        }
        svg + &self.y_title(&axis.title)
    }

    fn y_title(&self, title: &str) -> String {
        let middle = self.top + self.height / 2.0;
        format!(
            r#"<text class="y-title" x="14" y="{middle:.1}" text-anchor="middle" transform="rotate(-90 14 {middle:.1})">{}</text>"#,
            escape(title)
        )
    }
}

impl Lines {
    /// Returns the figure of a page. Series beyond the maximum are not drawn, and the note says so.
    #[must_use]
    pub fn figure(&self) -> String {
        let names = self
            .drawn()
            .map(|(number, series)| (series.name.as_str(), sample(style(number))));
        figure(
            &self.title,
            self.whole_note().trim(),
            HEIGHT,
            &self.drawing(),
            &legend(names),
        )
    }

    /// Returns the chart as a self-contained SVG document: title, note, chart and legend, one below
    /// the other.
    #[must_use]
    pub fn document(&self) -> String {
        let note = self.whole_note();
        let notes = textwrap::wrap(note.trim(), (WIDTH / CHARACTER) as usize);
        let chart_top = FILE_LINE * (2.0 + notes.len() as f64);
        let legend_top = chart_top + HEIGHT + FILE_LINE / 2.0;
        let height = legend_top + FILE_LINE * self.drawn().count() as f64 + FILE_LINE / 2.0;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height:.0}\" width=\"{:.0}\" height=\"{:.0}\" role=\"img\">\n\
             <title>{}</title>\n<style>{FILE_STYLE}</style>\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
             <text class=\"title\" x=\"8\" y=\"{FILE_LINE}\">{}</text>\n",
            2.0 * WIDTH,
            2.0 * height,
            escape(&self.title),
            escape(&self.title)
        );
        for (row, note) in notes.iter().enumerate() {
            let _ = writeln!(
                svg,
                r#"<text class="note" x="8" y="{:.0}">{}</text>"#,
                FILE_LINE * (2.0 + row as f64),
                escape(note)
            );
        }
        let _ = writeln!(
            svg,
            r#"<g transform="translate(0 {chart_top:.0})">{}</g>"#,
            self.drawing()
        );
        for (number, series) in self.drawn() {
            let top = legend_top + FILE_LINE * number as f64;
            let (sample, name) = (sample(style(number)), escape(&series.name));
            let _ = writeln!(
                svg,
                r#"<g transform="translate(8 {top:.0})">{sample}<text x="38" y="10.5">{name}</text></g>"#
            );
        }
        svg + "</svg>\n"
    }

    fn drawn(&self) -> impl Iterator<Item = (usize, &Series)> {
        self.series.iter().take(MOST).enumerate()
    }

    fn whole_note(&self) -> String {
        match self.series.len() {
            all if all > MOST => format!(
                "{} Only the first {MOST} of {all} series are drawn.",
                self.note
            ),
            _ => self.note.clone(),
        }
    }

    /// Draws the content of the SVG.
    fn drawing(&self) -> String {
        let left = LEFT
            + self
                .y
                .ticks
                .iter()
                .map(|(_, label)| width(label))
                .fold(0.0, f64::max);
        let area = Area {
            left,
            top: TOP,
            width: WIDTH - left - RIGHT,
            height: HEIGHT - TOP - BOTTOM,
        };
        let mut svg: String = self
            .bands
            .iter()
            .map(|(from, to)| area.band(&self.x, *from, *to))
            .collect();
        svg += &(area.x_axis(&self.x) + &area.y_axis(&self.y) + &area.frame());
        for (number, series) in self.drawn() {
            svg += &self.line(&area, series, style(number));
        }
        svg
    }

    fn line(
        &self,
        area: &Area,
        series: &Series,
        Style {
            colour,
            dash,
            shape,
        }: Style,
    ) -> String {
        let at = |point: &Point| (area.x(&self.x, point.x), area.y(&self.y, point.y));
        let mut svg = format!(
            r#"<g class="series" stroke="{colour}" fill="none"><title>{}</title>"#,
            escape(&series.name)
        );
        let path: Vec<String> = series
            .points
            .iter()
            .map(at)
            .map(|(x, y)| format!("{x:.1},{y:.1}"))
            .collect();
        if path.len() > 1 {
            let _ = write!(
                svg,
                r#"<polyline points="{}" stroke-width="2" stroke-dasharray="{dash}" stroke-linejoin="round"/>"#,
                path.join(" ")
            );
        }
        for (low, high, x) in series
            .points
            .iter()
            .filter_map(|point| point.spread.map(|(low, high)| (low, high, point.x)))
        {
            let x = area.x(&self.x, x);
            let low = area.y(&self.y, low);
            let high = area.y(&self.y, high);
            let (left, right) = (x - 4.0, x + 4.0);
            let _ = write!(
                svg,
                r#"<path d="M{x:.1} {low:.1}V{high:.1}M{left:.1} {low:.1}H{right:.1}M{left:.1} {high:.1}H{right:.1}"/>"#
            );
        }
        // Where lines overlap, the marks of one do not hide those of another.
        let (every, first) = if series.points.len() > 3 * MARKS {
            (series.points.len() / MARKS, shape)
        } else {
            (1, 0)
        };
        series
            .points
            .iter()
            .skip(first)
            .step_by(every)
            .map(at)
            .for_each(|(x, y)| svg += &mark(shape, x, y, colour));
        svg + "</g>"
    }
}

impl Bars {
    /// Returns the figure of a page, as high as its bars need.
    #[must_use]
    pub fn figure(&self) -> String {
        let labels: Vec<String> = self.bars.iter().map(|bar| shortened(&bar.label)).collect();
        let left = LEFT + labels.iter().map(|label| width(label)).fold(0.0, f64::max);
        let rows = self.bars.len().max(self.what.chars().count().div_ceil(3)) as f64;
        let area = Area {
            left,
            top: TOP,
            width: WIDTH - left - RIGHT,
            height: BAR * rows.max(3.0),
        };
        let step = area.height / self.bars.len().max(1) as f64;
        let mut svg = area.x_axis(&self.x) + &area.y_title(&self.what);
        for (row, label) in labels.iter().enumerate() {
            let middle = area.top + step * (row as f64 + 0.5);
            let _ = write!(
                svg,
                r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
                left - 6.0,
                middle + 4.5,
                escape(label)
            );
        }
        for (number, name) in self.parts.iter().enumerate() {
            let colour = style(number).colour;
            let _ = write!(
                svg,
                r#"<g class="series" fill="{colour}"><title>{}</title>"#,
                escape(name)
            );
            for (row, bar) in self.bars.iter().enumerate() {
                let begin: f64 = bar.parts.iter().take(number).sum();
                let (from, to) = (
                    area.x(&self.x, begin),
                    area.x(
                        &self.x,
                        begin + bar.parts.get(number).copied().unwrap_or(0.0),
                    ),
                );
                let (top, wide) = (area.top + step * (row as f64 + 0.5) - 8.0, to - from);
                if wide > 0.0 {
                    let _ = write!(
                        svg,
                        r##"<rect x="{from:.1}" y="{top:.1}" width="{wide:.1}" height="16" stroke="#fff" stroke-width="0.5"/>"##
                    );
                }
            }
            svg += "</g>";
        }
        for (row, (low, high)) in self
            .bars
            .iter()
            .enumerate()
            .filter_map(|(row, bar)| Some((row, bar.spread?)))
        {
            let y = area.top + step * (row as f64 + 0.5);
            let low = area.x(&self.x, low);
            let high = area.x(&self.x, high);
            let (top, end) = (y - 5.0, y + 5.0);
            let path = format!(
                "M{low:.1} {y:.1}H{high:.1}M{low:.1} {top:.1}V{end:.1}M{high:.1} {top:.1}V{end:.1}"
            );
            let _ = write!(
                svg,
                r##"<path d="{path}" stroke="#fff" stroke-width="3"/><path d="{path}" stroke="#1a1a1a"/>"##
            );
        }
        svg += &area.frame();
        let names = self.parts.iter().enumerate().map(|(number, name)| {
            (
                name.as_str(),
                format!(
                    r#"<rect x="2" y="1" width="26" height="10" fill="{}"/>"#,
                    style(number).colour
                ),
            )
        });
        figure(
            &self.title,
            &self.note,
            area.bottom() + BOTTOM,
            &svg,
            &legend(names),
        )
    }
}

fn figure(title: &str, note: &str, height: f64, svg: &str, legend: &str) -> String {
    let (title, note) = (escape(title), escape(note));
    let small = if note.is_empty() {
        String::new()
    } else {
        format!("<small>{note}</small>")
    };
    format!(
        "<figure><figcaption>{title}{small}</figcaption>\n\
         <svg class=\"chart\" viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{title}\">{svg}</svg>\n{legend}</figure>\n"
    )
}

fn legend<'a>(names: impl Iterator<Item = (&'a str, String)>) -> String {
    let entry = |(name, sample): (&str, String)| {
        format!(
            r#"<li><svg viewBox="0 0 30 12" aria-hidden="true">{sample}</svg>{}</li>"#,
            escape(name)
        )
    };
    format!(
        "<ul class=\"legend\">{}</ul>",
        names.map(entry).collect::<String>()
    )
}

/// Draws a piece of a line, for the legend.
fn sample(
    Style {
        colour,
        dash,
        shape,
    }: Style,
) -> String {
    let line = format!(
        r#"<line x1="1" x2="29" y1="6" y2="6" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>"#
    );
    line + &format!(
        r#"<g stroke="{colour}">{}</g>"#,
        mark(shape, 15.0, 6.0, colour)
    )
}

/// Draws a mark at a place, 7 wide: a shape for each colour.
fn mark(shape: usize, x: f64, y: f64, colour: &str) -> String {
    let path = match shape {
        0 => format!(
            "M{:.1} {y:.1}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0",
            x - 3.5
        ),
        1 => format!("M{:.1} {:.1}h6v6h-6z", x - 3.0, y - 3.0),
        2 => format!("M{x:.1} {:.1}l4 7h-8z", y - 4.0),
        3 => format!("M{x:.1} {:.1}l4 4l-4 4l-4 -4z", y - 4.0),
        4 => format!("M{x:.1} {:.1}l4 -7h-8z", y + 4.0),
        5 => format!("M{:.1} {:.1}l6 6m0 -6l-6 6", x - 3.0, y - 3.0),
        _ => format!("M{x:.1} {:.1}v8m-4 -4h8", y - 4.0),
    };
    // Crosses are lines; the other marks are filled.
    let (fill, width) = if shape < 5 { (colour, 1) } else { ("none", 2) };
    format!(r#"<path d="{path}" fill="{fill}" stroke-width="{width}"/>"#)
}

fn width(label: &str) -> f64 {
    label.chars().count() as f64 * CHARACTER
}

fn shortened(label: &str) -> String {
    if label.chars().count() <= LONGEST {
        label.to_owned()
    } else {
        label
            .chars()
            .take(LONGEST - 1)
            .chain(['\u{2026}'])
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_has_all_that_a_reader_needs_and_nothing_from_elsewhere() {
        let series = |name: &str| Series {
            name: name.to_owned(),
            points: vec![Point::new(1.0, 2.0), Point::new(3.0, 4.0)],
        };
        let lines = Lines {
            title: "A & B".to_owned(),
            note: "word ".repeat(40),
            x: Axis::settings("clients (count)".to_owned(), &[1.0, 3.0]),
            y: Axis::rates("throughput", "requests/s", [4.0].into_iter()),
            bands: vec![(1.0, 2.0)],
            series: vec![series("first"), series("second")],
        };
        let svg = lines.document();
        for part in [
            "<svg xmlns=",
            "A &amp; B",
            "clients (count)",
            "throughput (requests/s)",
            ">first</text>",
            ">second</text>",
            "class=\"band\"",
        ] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        assert_eq!(
            svg.matches("class=\"note\"").count(),
            4,
            "200 characters, 60 to a line: {svg}"
        );
        assert!(!svg.contains("href") && !svg.contains("url(") && svg.ends_with("</svg>\n"));
        assert_eq!(svg.matches("<g").count(), svg.matches("</g>").count());
    }
}
