//! Colours of series, in order. All have a contrast of 3 to 1 with white, and any two can be
//! distinguished with each kind of colour blindness. Series also differ in their marks, and from
//! the eighth on in their dashes.

/// Colours on white: several of Okabe and Ito's, and others found by a search for the maximum
/// distance to the nearest colour.
pub const COLOURS: [&str; 7] = [
    "#0072b2", "#d55e00", "#222222", "#8f39e5", "#cc79a7", "#7f2f1f", "#332288",
];

/// Dash patterns. Each colour serves one series with each pattern.
pub const DASHES: [&str; 3] = ["", "6 3", "2 3"];

/// The style of a series.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    /// The colour, in SVG's syntax.
    pub colour: &'static str,
    /// The dashes, in SVG's syntax; empty is a line without gaps.
    pub dash: &'static str,
    /// The shape of its marks.
    pub shape: usize,
}

/// Maximum number of series in one chart.
pub const MOST: usize = COLOURS.len() * DASHES.len();

/// Returns the style of the series with this number.
#[must_use]
pub const fn style(number: usize) -> Style {
    let colour = COLOURS[number % COLOURS.len()];
    Style {
        colour,
        dash: DASHES[(number / COLOURS.len()) % DASHES.len()],
        shape: number % COLOURS.len(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the linear light of the three channels, 0 to 1.
    fn linear(colour: &str) -> [f64; 3] {
        [1, 3, 5].map(|at| {
            let channel = f64::from(u8::from_str_radix(&colour[at..at + 2], 16).unwrap()) / 255.0;
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

    /// Linear light as the colour-blind see it: Machado, Oliveira and Fernandes 2009, severity 1.
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
            assert!(contrast >= 3.0, "{colour}: {contrast:.2} to 1");
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
                        "{sight}: {} and {}: {distance:.1}",
                        COLOURS[first], COLOURS[second]
                    ));
                }
            }
        }
        assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    }

    #[test]
    fn no_two_series_look_alike() {
        let styles: Vec<Style> = (0..MOST).map(style).collect();
        for (number, one) in styles.iter().enumerate() {
            assert!(
                styles[..number]
                    .iter()
                    .all(|other| (other.colour, other.dash) != (one.colour, one.dash)),
                "{one:?}"
            );
        }
    }
}
