//! Charts as figures of a page: SVG with two axes, and a legend below it that wraps as the page needs it.

use std::fmt::Write;

use super::axis::Axis;
use super::page::escape;
use super::palette::{MOST, Style, style};

/// Size of the SVG's own coordinates; the page scales it to its column.
const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 290.0;
const TOP: f64 = 10.0;
const RIGHT: f64 = 24.0;
/// Room for the labels and the title of the x axis.
const BOTTOM: f64 = 46.0;
/// Room for the title of the y axis; its labels come on top.
const LEFT: f64 = 32.0;
/// Height of a bar with its gap.
const BAR: f64 = 26.0;
/// Width of a character at the size of labels, as wide as fonts have it; and the space between two labels.
const CHARACTER: f64 = 7.6;
const GAP: f64 = 8.0;
/// Longest label of a bar, in characters.
const LONGEST: usize = 24;
/// Marks on a line of many points, by which it is found in the legend.
const MARKS: usize = 8;

/// A value, and how far it was spread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Point {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) spread: Option<(f64, f64)>,
}

impl Point {
    pub(super) const fn new(x: f64, y: f64) -> Self {
        Self { x, y, spread: None }
    }
}

/// A line, with its name in the legend.
#[derive(Debug, Clone)]
pub(super) struct Series {
    pub(super) name: String,
    pub(super) points: Vec<Point>,
}

/// Lines over two axes.
#[derive(Debug, Clone)]
pub(super) struct Lines {
    pub(super) title: String,
    /// What else a reader has to know.
    pub(super) note: String,
    pub(super) x: Axis,
    pub(super) y: Axis,
    /// Ranges of the x axis that are shaded.
    pub(super) bands: Vec<(f64, f64)>,
    pub(super) series: Vec<Series>,
}

/// A bar of parts that lie end to end, one for each name of the legend.
#[derive(Debug, Clone)]
pub(super) struct Bar {
    pub(super) label: String,
    pub(super) parts: Vec<f64>,
    pub(super) spread: Option<(f64, f64)>,
}

/// Bars from left to right, below each other.
#[derive(Debug, Clone)]
pub(super) struct Bars {
    pub(super) title: String,
    pub(super) note: String,
    /// What the bars are, as the title of the other axis.
    pub(super) what: String,
    pub(super) x: Axis,
    pub(super) parts: Vec<String>,
    pub(super) bars: Vec<Bar>,
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
        let Self { left, top, width, height } = self;
        format!(r#"<rect class="frame" x="{left:.1}" y="{top:.1}" width="{width:.1}" height="{height:.1}"/>"#)
    }

    fn band(&self, axis: &Axis, from: f64, to: f64) -> String {
        let (left, right) = (self.x(axis, from), self.x(axis, to));
        let (top, width, height) = (self.top, right - left, self.height);
        format!(r#"<rect class="band" x="{left:.1}" y="{top:.1}" width="{:.1}" height="{height:.1}"/>"#, width.max(0.0))
    }

    /// Grid, labels and title of the x axis. Labels that would touch the one before, or the edge, are left out.
    fn x_axis(&self, axis: &Axis) -> String {
        let (mut svg, mut free_from) = (String::new(), f64::NEG_INFINITY);
        for (value, label) in &axis.ticks {
            let at = self.x(axis, *value);
            let _ = write!(svg, r#"<line class="grid" x1="{at:.1}" x2="{at:.1}" y1="{:.1}" y2="{:.1}"/>"#, self.top, self.bottom());
            let half = width(label) / 2.0;
            if at - half >= free_from && at + half <= WIDTH {
                let _ = write!(svg, r#"<text x="{at:.1}" y="{:.1}" text-anchor="middle">{}</text>"#, self.bottom() + 17.0, escape(label));
                free_from = at + half + GAP;
            }
        }
        let (middle, bottom) = (self.left + self.width / 2.0, self.bottom() + 38.0);
        svg + &format!(r#"<text class="x-title" x="{middle:.1}" y="{bottom:.1}" text-anchor="middle">{}</text>"#, escape(&axis.title))
    }

    fn y_axis(&self, axis: &Axis) -> String {
        let mut svg = String::new();
        for (value, label) in &axis.ticks {
            let at = self.y(axis, *value);
            let right = self.left + self.width;
            let _ = write!(svg, r#"<line class="grid" x1="{:.1}" x2="{right:.1}" y1="{at:.1}" y2="{at:.1}"/>"#, self.left);
            let _ = write!(svg, r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#, self.left - 6.0, at + 4.5, escape(label));
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
    /// The figure. Series beyond those that can be told apart are not drawn, which the note says.
    pub(super) fn figure(&self) -> String {
        let left = LEFT + self.y.ticks.iter().map(|(_, label)| width(label)).fold(0.0, f64::max);
        let area = Area { left, top: TOP, width: WIDTH - left - RIGHT, height: HEIGHT - TOP - BOTTOM };
        let mut svg: String = self.bands.iter().map(|(from, to)| area.band(&self.x, *from, *to)).collect();
        svg += &(area.x_axis(&self.x) + &area.y_axis(&self.y) + &area.frame());
        let drawn = || self.series.iter().take(MOST).enumerate();
        for (number, series) in drawn() {
            svg += &self.line(&area, series, style(number));
        }
        let names = drawn().map(|(number, series)| (series.name.as_str(), sample(style(number))));
        let note = match self.series.len() {
            all if all > MOST => format!("{} Only the first {MOST} of {all} series are drawn.", self.note),
            _ => self.note.clone(),
        };
        figure(&self.title, note.trim(), HEIGHT, &svg, &legend(names))
    }

    fn line(&self, area: &Area, series: &Series, Style { colour, dash, shape }: Style) -> String {
        let at = |point: &Point| (area.x(&self.x, point.x), area.y(&self.y, point.y));
        let mut svg = format!(r#"<g class="series" stroke="{colour}" fill="none"><title>{}</title>"#, escape(&series.name));
        let path: Vec<String> = series.points.iter().map(at).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        if path.len() > 1 {
            let _ = write!(
                svg,
                r#"<polyline points="{}" stroke-width="2" stroke-dasharray="{dash}" stroke-linejoin="round"/>"#,
                path.join(" ")
            );
        }
        for (low, high, x) in series.points.iter().filter_map(|point| point.spread.map(|(low, high)| (low, high, point.x))) {
            let (x, low, high) = (area.x(&self.x, x), area.y(&self.y, low), area.y(&self.y, high));
            let (left, right) = (x - 4.0, x + 4.0);
            let _ = write!(svg, r#"<path d="M{x:.1} {low:.1}V{high:.1}M{left:.1} {low:.1}H{right:.1}M{left:.1} {high:.1}H{right:.1}"/>"#);
        }
        // Where lines lie on each other, the marks of one do not hide those of another.
        let (every, first) = if series.points.len() > 3 * MARKS { (series.points.len() / MARKS, shape) } else { (1, 0) };
        series.points.iter().skip(first).step_by(every).map(at).for_each(|(x, y)| svg += &mark(shape, x, y, colour));
        svg + "</g>"
    }
}

impl Bars {
    /// The figure: as high as it has bars.
    pub(super) fn figure(&self) -> String {
        let labels: Vec<String> = self.bars.iter().map(|bar| shortened(&bar.label)).collect();
        let left = LEFT + labels.iter().map(|label| width(label)).fold(0.0, f64::max);
        let rows = self.bars.len().max(self.what.chars().count().div_ceil(3)) as f64;
        let area = Area { left, top: TOP, width: WIDTH - left - RIGHT, height: BAR * rows.max(3.0) };
        let step = area.height / self.bars.len().max(1) as f64;
        let mut svg = area.x_axis(&self.x) + &area.y_title(&self.what);
        for (row, label) in labels.iter().enumerate() {
            let middle = area.top + step * (row as f64 + 0.5);
            let _ = write!(svg, r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#, left - 6.0, middle + 4.5, escape(label));
        }
        for (number, name) in self.parts.iter().enumerate() {
            let colour = style(number).colour;
            let _ = write!(svg, r#"<g class="series" fill="{colour}"><title>{}</title>"#, escape(name));
            for (row, bar) in self.bars.iter().enumerate() {
                let begin: f64 = bar.parts.iter().take(number).sum();
                let (from, to) = (area.x(&self.x, begin), area.x(&self.x, begin + bar.parts.get(number).copied().unwrap_or(0.0)));
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
        for (row, (low, high)) in self.bars.iter().enumerate().filter_map(|(row, bar)| Some((row, bar.spread?))) {
            let (y, low, high) = (area.top + step * (row as f64 + 0.5), area.x(&self.x, low), area.x(&self.x, high));
            let (top, end) = (y - 5.0, y + 5.0);
            let path = format!("M{low:.1} {y:.1}H{high:.1}M{low:.1} {top:.1}V{end:.1}M{high:.1} {top:.1}V{end:.1}");
            let _ = write!(svg, r##"<path d="{path}" stroke="#fff" stroke-width="3"/><path d="{path}" stroke="#1a1a1a"/>"##);
        }
        svg += &area.frame();
        let names = self.parts.iter().enumerate().map(|(number, name)| {
            (name.as_str(), format!(r#"<rect x="2" y="1" width="26" height="10" fill="{}"/>"#, style(number).colour))
        });
        figure(&self.title, &self.note, area.bottom() + BOTTOM, &svg, &legend(names))
    }
}

fn figure(title: &str, note: &str, height: f64, svg: &str, legend: &str) -> String {
    let (title, note) = (escape(title), escape(note));
    let small = if note.is_empty() { String::new() } else { format!("<small>{note}</small>") };
    format!(
        "<figure><figcaption>{title}{small}</figcaption>\n\
         <svg class=\"chart\" viewBox=\"0 0 {WIDTH} {height:.0}\" role=\"img\" aria-label=\"{title}\">{svg}</svg>\n{legend}</figure>\n"
    )
}

fn legend<'a>(names: impl Iterator<Item = (&'a str, String)>) -> String {
    let entry =
        |(name, sample): (&str, String)| format!(r#"<li><svg viewBox="0 0 30 12" aria-hidden="true">{sample}</svg>{}</li>"#, escape(name));
    format!("<ul class=\"legend\">{}</ul>", names.map(entry).collect::<String>())
}

/// A piece of a line, for the legend.
fn sample(Style { colour, dash, shape }: Style) -> String {
    let line = format!(r#"<line x1="1" x2="29" y1="6" y2="6" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>"#);
    line + &format!(r#"<g stroke="{colour}">{}</g>"#, mark(shape, 15.0, 6.0, colour))
}

/// A mark at a place, 7 wide: a shape for each colour.
fn mark(shape: usize, x: f64, y: f64, colour: &str) -> String {
    let path = match shape {
        0 => format!("M{:.1} {y:.1}a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0", x - 3.5),
        1 => format!("M{:.1} {:.1}h6v6h-6z", x - 3.0, y - 3.0),
        2 => format!("M{x:.1} {:.1}l4 7h-8z", y - 4.0),
        3 => format!("M{x:.1} {:.1}l4 4l-4 4l-4 -4z", y - 4.0),
        4 => format!("M{x:.1} {:.1}l4 -7h-8z", y + 4.0),
        5 => format!("M{:.1} {:.1}l6 6m0 -6l-6 6", x - 3.0, y - 3.0),
        _ => format!("M{x:.1} {:.1}v8m-4 -4h8", y - 4.0),
    };
    // Crosses are lines; the rest is filled.
    let (fill, width) = if shape < 5 { (colour, 1) } else { ("none", 2) };
    format!(r#"<path d="{path}" fill="{fill}" stroke-width="{width}"/>"#)
}

fn width(label: &str) -> f64 {
    label.chars().count() as f64 * CHARACTER
}

fn shortened(label: &str) -> String {
    if label.chars().count() <= LONGEST { label.to_owned() } else { label.chars().take(LONGEST - 1).chain(['\u{2026}']).collect() }
}
