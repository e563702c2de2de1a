//! The window of copyrpc's connections, which apply it themselves: daemons have no rule for it.

use std::ops::RangeInclusive;

use clap::Args;
use harness::range::{RangeError, range, whole};
use harness::window::WindowChoice;
use serde::{Deserialize, Serialize};

use super::rule::{Asked, Rule, needs_others};
use crate::topology::Topology;

/// Legal numbers of batches in flight.
const BATCHES: RangeInclusive<u32> = 1..=1024;

/// The flags of the window.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Args)]
pub struct WindowArgs {
    /// Limit the small batches in flight per connection; later messages are collected. completion:N
    /// counts a batch until its WRITE completes, consumption:N until the peer has read it (N: 1 to
    /// 256). Simulated: both lift the low state; completion:1 costs up to 3 % in the high one, 12 %
    /// at depth 1 where receivers have no limit, as on most NICs, and consumption:N harms at
    /// depth 1.
    #[arg(long, hide_short_help = true, value_name = "off|completion:N|consumption:N", default_value_t = WindowChoice::Off)]
    pub batch_window: WindowChoice,

    /// Limit all batches per connection that the peer has not read, 1 to 1024 [default: 32]: a
    /// limit of copyrpc's protocol. Simulated: the more, the deeper the low state.
    #[arg(long, hide_short_help = true, value_name = "N", value_parser = whole(BATCHES))]
    pub batches_in_flight: Option<u32>,
}

impl Default for WindowArgs {
    fn default() -> Self {
        Self {
            batch_window: WindowChoice::Off,
            batches_in_flight: None,
        }
    }
}

impl Asked for WindowArgs {
    fn typed(&self) -> Option<String> {
        let window = self
            .batch_window
            .batches()
            .map(|_| format!("batch-window {}", self.batch_window));
        let batches = self
            .batches_in_flight
            .map(|batches| format!("batches-in-flight {batches}"));
        let typed: Vec<String> = window.into_iter().chain(batches).collect();
        (!typed.is_empty()).then(|| typed.join(", "))
    }

    fn suits(&self, topology: &Topology) -> Result<(), RangeError> {
        let flag = if self.batches_in_flight.is_some() {
            "--batches-in-flight"
        } else {
            "--batch-window"
        };
        needs_others(flag, topology)?;
        if topology.is_by_message() {
            let (why, legal) = (
                "the window is one of copyrpc's batches",
                "--carrier copyrpc".to_owned(),
            );
            return Err(range(
                flag,
                format!("with --carrier {}", topology.carrier),
                why,
                legal,
            ));
        }
        Ok(())
    }

    fn rule(&self, _ranks: usize) -> Option<Box<dyn Rule>> {
        None
    }
}
