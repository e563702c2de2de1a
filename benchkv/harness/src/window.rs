//! copyrpc's window of batches in flight, as named on a command line.

use std::fmt;
use std::str::FromStr;

use copyrpc::Window;
use serde::{Deserialize, Serialize};

/// The value of a window flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WindowChoice {
    /// No window.
    Off,
    /// Maximum number of batches whose WRITEs have not completed. If more bytes than
    /// [`Window::DEFAULT_EXEMPT_BYTES`] wait, they are sent in any case.
    Completion(u32),
    /// Maximum number of batches that the peer has not yet confirmed to have consumed, with the
    /// same exception.
    Consumption(u32),
}

impl WindowChoice {
    /// Maximum number of batches that a benchmark accepts.
    pub const MAX_BATCHES: u32 = 256;

    /// Returns the maximum number of batches in flight; `None` without a window.
    pub const fn batches(self) -> Option<u32> {
        match self {
            Self::Off => None,
            Self::Completion(batches) | Self::Consumption(batches) => Some(batches),
        }
    }

    /// Returns the window of an endpoint.
    pub const fn window(self) -> Window {
        let exempt_bytes = Window::DEFAULT_EXEMPT_BYTES;
        match self {
            Self::Off => Window::Off,
            Self::Completion(batches) => Window::Completion {
                batches,
                exempt_bytes,
            },
            Self::Consumption(batches) => Window::Consumption {
                batches,
                exempt_bytes,
            },
        }
    }
}

impl fmt::Display for WindowChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Completion(batches) => write!(f, "completion:{batches}"),
            Self::Consumption(batches) => write!(f, "consumption:{batches}"),
        }
    }
}

impl FromStr for WindowChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let known = "use off, completion:N or consumption:N with N from 1 to 256";
        let number = |text: &str| {
            text.parse()
                .ok()
                .filter(|batches| (1..=Self::MAX_BATCHES).contains(batches))
                .ok_or(known)
        };
        match text.split_once(':') {
            None if text == "off" => Ok(Self::Off),
            Some(("completion", batches)) => number(batches).map(Self::Completion),
            Some(("consumption", batches)) => number(batches).map(Self::Consumption),
            _ => Err(known),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_named_as_they_are_printed() {
        for (text, window) in [
            ("off", Window::Off),
            (
                "completion:2",
                Window::Completion {
                    batches: 2,
                    exempt_bytes: 4096,
                },
            ),
            (
                "consumption:3",
                Window::Consumption {
                    batches: 3,
                    exempt_bytes: 4096,
                },
            ),
        ] {
            let choice: WindowChoice = text.parse().unwrap();
            assert_eq!(
                (choice.to_string().as_str(), choice.window()),
                (text, window)
            );
        }
        for text in [
            "",
            "on",
            "completion",
            "completion:",
            "completion:-1",
            "consumption:x",
            "completion:0",
            "consumption:257",
        ] {
            assert!(
                text.parse::<WindowChoice>()
                    .unwrap_err()
                    .contains(&format!("N from 1 to {}", WindowChoice::MAX_BATCHES)),
                "{text}"
            );
        }
    }
}
