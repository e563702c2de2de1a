//! Times and sizes as people write them.

/// Suffixes of times, and their seconds: a factor and a divisor, so that a decimal number stays
/// exact. A suffix comes after all suffixes that end with it.
const TIMES: [(&str, f64, f64); 6] = [
    ("ns", 1.0, 1e9),
    ("us", 1.0, 1e6),
    ("ms", 1.0, 1e3),
    ("s", 1.0, 1.0),
    ("m", 60.0, 1.0),
    ("h", 3600.0, 1.0),
];
/// Suffixes of sizes, also valid with iB at the end, and their power of 1024.
const SIZES: [(&str, u32); 3] = [("K", 1), ("M", 2), ("G", 3)];

/// Parses a time in seconds: a number with an optional unit, such as `0.5`, `500ms` or `2m`.
///
/// # Errors
/// The legal forms of a time. The function checks no range.
pub fn seconds(text: &str) -> Result<f64, String> {
    let with_unit = TIMES
        .into_iter()
        .find_map(|(end, times, per)| Some((text.strip_suffix(end)?, times, per)));
    let (number, times, per) = with_unit.unwrap_or((text, 1.0, 1.0));
    let number: f64 = number.parse().map_err(|_| {
        "use a number of seconds, or one with ns, us, ms, s, m or h, such as 500ms".to_owned()
    })?;
    Ok(number * times / per)
}

/// Parses a size in bytes: a whole number with an optional unit, such as `65536`, `64K` or `64KiB`.
/// Units are powers of 1024.
///
/// # Errors
/// The legal forms.
pub fn bytes(text: &str) -> Result<u64, String> {
    let short = text.strip_suffix("iB").unwrap_or(text);
    let with_unit = SIZES
        .into_iter()
        .find_map(|(end, power)| Some((short.strip_suffix(end)?, 1 << (10 * power))));
    let (number, unit) = with_unit.unwrap_or((text, 1));
    let bytes = number
        .parse()
        .ok()
        .and_then(|number: u64| number.checked_mul(unit));
    bytes
        .ok_or_else(|| "use a whole number of bytes, or one with K, M or G, such as 64K".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units_and_seconds_need_none() {
        let times: [(&str, f64); 8] = [
            ("2", 2.0),
            ("0.25", 0.25),
            ("500ms", 0.5),
            ("10us", 1e-5),
            ("7ns", 7e-9),
            ("1.5s", 1.5),
            ("2m", 120.0),
            ("1h", 3600.0),
        ];
        for (text, expected) in times {
            let found = seconds(text).unwrap();
            assert_eq!(found.to_bits(), expected.to_bits(), "{text}: {found}");
        }
        for text in ["", "s", "ms", "fast", "1 s", "1d", "1mss", "--1"] {
            assert!(seconds(text).unwrap_err().contains("500ms"), "{text}");
        }
    }

    #[test]
    fn sizes_have_units_and_bytes_need_none() {
        for (text, expected) in [
            ("0", 0),
            ("4096", 4096),
            ("64K", 65_536),
            ("4M", 4 << 20),
            ("1G", 1 << 30),
            ("8KiB", 8192),
            ("2GiB", 2 << 30),
        ] {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for text in [
            "",
            "K",
            "iB",
            "1.5K",
            "-1",
            "4k",
            "4KB",
            "1iB",
            "99999999999G",
            "big",
        ] {
            assert!(bytes(text).unwrap_err().contains("64K"), "{text}");
        }
    }
}
