//! A chart of lines over two axes, as an SVG document.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, Ranged, ValueFormatter};
use plotters::prelude::*;

use crate::Failure;

/// Size of the drawing, in its own coordinates.
const SIZE: (u32, u32) = (720, 440);
/// Room for the labels and the titles of the axes.
const LEFT: u32 = 92;
const BOTTOM: u32 = 44;
/// Colours of series, in order, on white: several of Okabe and Ito's, and others found by a search
/// for the maximum distance to the nearest colour. All have a contrast of 3 to 1 with white, and
/// any two can be distinguished with each kind of colour blindness.
const COLOURS: [RGBColor; 7] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x22, 0x22, 0x22),
    RGBColor(0x8f, 0x39, 0xe5),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0x7f, 0x2f, 0x1f),
    RGBColor(0x33, 0x22, 0x88),
];
/// Maximum value. With larger values an axis's steps vanish in rounding, and the library hangs.
const HIGHEST: f64 = 1e15;

/// A line, with its name in the legend.
#[derive(Debug, Clone)]
pub struct Series {
    /// Name of the line.
    pub name: String,
    /// Points of the line, x and y, in the order in which the line connects them. The line goes
    /// through the median of successive points with the same x, which are repeats.
    pub points: Vec<(f64, f64)>,
}

/// An axis. Its range contains all values.
#[derive(Debug, Clone)]
pub struct Axis {
    /// The quantity.
    pub title: String,
    /// Returns the label of a value, with its unit.
    pub label: fn(f64) -> String,
    /// Labels of 1, 2 and so on, in place of `label`; empty: none.
    pub names: Vec<String>,
    /// Whether the axis is logarithmic, for values of 1 or more. A linear axis begins at zero.
    pub is_log: bool,
}

/// Lines over two axes.
#[derive(Debug, Clone)]
pub struct Chart {
    /// The quantities shown.
    pub title: String,
    /// The axis at the bottom.
    pub x: Axis,
    /// The axis at the left.
    pub y: Axis,
    /// The lines.
    pub series: Vec<Series>,
}

impl Chart {
    /// Returns the chart as an SVG document, which needs no other file.
    ///
    /// # Errors
    /// The library's reason why it cannot be drawn.
    pub fn svg(&self) -> Result<String, Failure> {
        let points = self.series.iter().flat_map(|series| &series.points);
        let xs = self.x.range(self.xs());
        let ys = self.y.range(points.map(|(_, y)| *y));
        let mut document = String::new();
        let area = SVGBackend::with_string(&mut document, SIZE).into_drawing_area();
        match (self.x.is_log, self.y.is_log) {
            (false, false) => self.draw(&area, xs, ys)?,
            (false, true) => self.draw(&area, xs, ys.log_scale())?,
            (true, false) => self.draw(&area, xs.log_scale(), ys)?,
            (true, true) => self.draw(&area, xs.log_scale(), ys.log_scale())?,
        }
        drop(area);
        Ok(document)
    }

    fn xs(&self) -> impl Iterator<Item = f64> + Clone {
        let points = self.series.iter().flat_map(|series| &series.points);
        points.map(|(x, _)| *x)
    }

    fn draw<X, Y>(
        &self,
        area: &DrawingArea<SVGBackend<'_>, Shift>,
        xs: X,
        ys: Y,
    ) -> Result<(), Failure>
    where
        X: AsRangedCoord<Value = f64>,
        Y: AsRangedCoord<Value = f64>,
        X::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
        Y::CoordDescType: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(area)
            .caption(&self.title, ("sans-serif", 18))
            .margin(10)
            .margin_right(30)
            .x_label_area_size(BOTTOM)
            .y_label_area_size(LEFT)
            .build_cartesian_2d(xs, ys)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .x_labels(Axis::labels(self.xs()))
            .x_desc(&self.x.title)
            .y_desc(&self.y.title)
            .x_label_formatter(&|value| self.x.label(*value))
            .y_label_formatter(&|value| self.y.label(*value))
            .label_style(("sans-serif", 14))
            .draw()?;
        for (series, colour) in self.series.iter().zip(COLOURS.into_iter().cycle()) {
            let style = colour.stroke_width(2);
            let place = |(x, y): (f64, f64)| (self.x.place(x), self.y.place(y));
            let points = series.points.iter().map(|point| place(*point));
            chart.draw_series(points.map(|point| Circle::new(point, 3, style)))?;
            chart
                .draw_series(LineSeries::new(series.medians().map(place), style))?
                .label(&series.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], style));
        }
        chart
            .configure_series_labels()
            .position(if self.y.is_log {
                SeriesLabelPosition::UpperLeft
            } else {
                // Lines over an axis that begins at zero are high.
                SeriesLabelPosition::LowerLeft
            })
            .background_style(WHITE.mix(0.8))
            .border_style(BLACK.mix(0.3))
            .label_font(("sans-serif", 14))
            .draw()?;
        Ok(area.present()?)
    }
}

impl Series {
    /// Returns the points of the line.
    fn medians(&self) -> impl Iterator<Item = (f64, f64)> {
        let repeats = self.points.chunk_by(|(x, _), (next, _)| x == next);
        repeats.filter_map(|repeats| {
            let mut ys: Vec<f64> = repeats.iter().map(|(_, y)| *y).collect();
            ys.sort_by(f64::total_cmp);
            Some((repeats.first()?.0, *ys.get(ys.len() / 2)?))
        })
    }
}

impl Axis {
    /// Returns the name of a value.
    #[must_use]
    pub fn name(&self, value: f64) -> Option<&str> {
        let name = (value as usize).checked_sub(1)?;
        self.names.get(name).map(String::as_str)
    }

    fn label(&self, value: f64) -> String {
        match self.name(value) {
            Some(name) => name.to_owned(),
            None if self.names.is_empty() => (self.label)(value),
            None => String::new(),
        }
    }

    /// Returns the maximum number of labels of an axis with these values. Between few whole numbers
    /// there are no labels.
    fn labels(mut values: impl Iterator<Item = f64> + Clone) -> usize {
        const MOST: usize = 11;
        let highest = values.clone().fold(1.0, f64::max);
        if values.all(|value| value.fract() == 0.0) && highest < MOST as f64 {
            highest as usize + 1
        } else {
            MOST
        }
    }

    /// Returns the legal value that is nearest to `value`.
    fn place(&self, value: f64) -> f64 {
        // The minimum replaces a value that is not a number.
        value.max(f64::from(u8::from(self.is_log))).min(HIGHEST)
    }

    /// Returns a range that contains all values with some room. The range is never empty.
    fn range(&self, values: impl Iterator<Item = f64>) -> Range<f64> {
        let (low, high) = values
            .map(|value| self.place(value))
            .fold((HIGHEST, 1.0), |(low, high): (f64, f64), value| {
                (low.min(value), high.max(value))
            });
        if self.is_log {
            low.min(high) / 1.5..high * 1.5
        } else {
            0.0..high * 1.05
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(is_log: bool, points: &[(f64, f64)]) -> Chart {
        let axis = |title: &str, is_log| Axis {
            title: title.to_owned(),
            label: |value| format!("{value} units"),
            names: Vec::new(),
            is_log,
        };
        Chart {
            title: "A & B".to_owned(),
            x: axis("clients", is_log),
            y: axis("throughput", is_log),
            series: ["first", "<second>"]
                .map(|name| Series {
                    name: name.to_owned(),
                    points: points.to_vec(),
                })
                .into(),
        }
    }

    #[test]
    fn a_document_has_all_that_a_reader_needs_and_nothing_from_elsewhere() {
        for is_log in [false, true] {
            let svg = chart(is_log, &[(1.5, 20.0), (3.0, 4000.0)]).svg().unwrap();
            for part in [
                "<svg ",
                "A &amp; B",
                "clients",
                "throughput",
                "first",
                "&lt;second&gt;",
                "1000 units",
                if is_log { "1 units" } else { "1.5 units" },
                "<polyline",
            ] {
                assert!(svg.contains(part), "{part}: {svg}");
            }
            assert!(!svg.contains("href") && !svg.contains("url("), "{svg}");
            assert!(svg.ends_with("</svg>\n"), "{svg}");
        }
    }

    #[test]
    fn an_axis_of_whole_numbers_has_each_label_once() {
        for (highest, labels) in [(1, 2), (2, 3), (3, 4), (7, 8), (40, 9)] {
            let mut chart = chart(false, &[(1.0, 20.0), (f64::from(highest), 4000.0)]);
            chart.x.label = |value| format!("commit {value:.0}.");
            let svg = chart.svg().unwrap();
            let mut seen: Vec<&str> = svg
                .lines()
                .filter(|line| line.starts_with("commit "))
                .collect();
            assert_eq!(seen.len(), labels, "{highest}: {seen:?}");
            seen.dedup();
            assert_eq!(seen.len(), labels, "{highest}: {seen:?}");
        }
    }

    #[test]
    fn values_with_names_have_their_names() {
        let mut chart = chart(false, &[(1.0, 20.0), (2.0, 30.0)]);
        chart.x.names = ["one", "two"].map(str::to_owned).into();
        let svg = chart.svg().unwrap();
        let seen = svg.lines().filter(|line| ["one", "two"].contains(line));
        assert_eq!(seen.count(), 2, "{svg}");
    }

    #[test]
    fn a_line_goes_through_the_medians_of_repeats() {
        let points = vec![(1.0, 9.0), (1.0, 2.0), (1.0, 3.0), (2.0, 4.0), (1.0, 5.0)];
        let series = Series {
            name: String::new(),
            points,
        };
        let line: Vec<_> = series.medians().collect();
        assert_eq!(line, [(1.0, 3.0), (2.0, 4.0), (1.0, 5.0)]);
    }

    #[test]
    fn nonsense_is_drawn_as_nonsense() {
        for points in [
            &[][..],
            &[(0.0, 0.0)],
            &[(f64::NAN, f64::INFINITY), (f64::MAX, -1.0)],
        ] {
            for is_log in [false, true] {
                assert!(chart(is_log, points).svg().unwrap().ends_with("</svg>\n"));
            }
        }
    }

    /// Returns the linear light of the three channels, 0 to 1.
    fn linear(RGBColor(red, green, blue): RGBColor) -> [f64; 3] {
        [red, green, blue].map(|channel| {
            let channel = f64::from(channel) / 255.0;
            if channel <= 0.04045 {
                channel / 12.92
            } else {
                ((channel + 0.055) / 1.055).powf(2.4)
            }
        })
    }

    fn times(matrix: [[f64; 3]; 3], [a, b, c]: [f64; 3]) -> [f64; 3] {
        matrix.map(|[x, y, z]| x * a + y * b + z * c)
    }

    /// Returns CIE L*a*b*, white D65.
    fn lab(light: [f64; 3]) -> [f64; 3] {
        let xyz = times(
            [
                [0.4124, 0.3576, 0.1805],
                [0.2126, 0.7152, 0.0722],
                [0.0193, 0.1192, 0.9505],
            ],
            light,
        );
        let f = |ratio: f64| {
            if ratio > 0.008_856 {
                ratio.cbrt()
            } else {
                7.787 * ratio + 16.0 / 116.0
            }
        };
        let [x, y, z] = [xyz[0] / 0.9505, xyz[1], xyz[2] / 1.089].map(f);
        [116.0 * y - 16.0, 500.0 * (x - y), 200.0 * (y - z)]
    }

    fn distance(a: [f64; 3], b: [f64; 3]) -> f64 {
        a.iter()
            .zip(b)
            .map(|(a, b)| (a - b).powi(2))
            .sum::<f64>()
            .sqrt()
    }

    /// Kinds of sight: the name, the matrix from linear light to the light that such an eye sees
    /// (Machado, Oliveira and Fernandes 2009, severity 1), and the minimum distance of two colours.
    const SIGHTS: [(&str, [[f64; 3]; 3], f64); 4] = [
        (
            "all colours",
            [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
            35.0,
        ),
        (
            "protanopia",
            [
                [0.1523, 1.0526, -0.2049],
                [0.1145, 0.7863, 0.0992],
                [-0.0039, -0.0481, 1.0520],
            ],
            20.0,
        ),
        (
            "deuteranopia",
            [
                [0.3673, 0.8606, -0.2280],
                [0.2801, 0.6727, 0.0472],
                [-0.0118, 0.0429, 0.9689],
            ],
            20.0,
        ),
        (
            "tritanopia",
            [
                [1.2555, -0.0767, -0.1788],
                [-0.0784, 0.9308, 0.1476],
                [0.0047, 0.6914, 0.3039],
            ],
            20.0,
        ),
    ];

    #[test]
    fn colours_can_be_told_from_white_and_from_each_other() {
        for colour in COLOURS {
            let [red, green, blue] = linear(colour);
            let contrast = 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05);
            assert!(contrast >= 3.0, "{colour:?}: {contrast:.2} to 1");
        }
        let mut complaints = Vec::new();
        for (sight, matrix, least) in SIGHTS {
            let seen = COLOURS.map(|colour| {
                lab(times(matrix, linear(colour)).map(|light| light.clamp(0.0, 1.0)))
            });
            for (first, second) in
                (0..COLOURS.len()).flat_map(|second| (0..second).map(move |first| (first, second)))
            {
                let distance = distance(seen[first], seen[second]);
                if distance < least {
                    complaints.push(format!(
                        "{sight}: {:?} and {:?}: {distance:.1}",
                        COLOURS[first], COLOURS[second]
                    ));
                }
            }
        }
        assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    }
}
