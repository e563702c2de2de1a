//! The window of copyrpc's connections, which obey it themselves: it is no rule of daemons.

use clap::Args;
use harness::range::{RangeError, range, within};
use harness::window::WindowChoice;
use serde::{Deserialize, Serialize};

use super::rule::{Asked, OUTSIDE, needs_others};
use crate::topology::Topology;

/// The flag of the window.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Args)]
pub struct WindowArgs {
    /// Small batches of each connection under way before the next ones gather, 1 to 256, and until when one is under way: until its WRITE
    /// completes, or until the peer has told that it was taken. Or off. Simulated: completion:1 repairs delegation from 8 ranks on, consumption:N
    /// harms it.
    #[arg(long, hide_short_help = true, value_name = "off|completion:N|consumption:N", default_value_t = WindowChoice::Off)]
    pub batch_window: WindowChoice,
}

impl Default for WindowArgs {
    fn default() -> Self {
        Self { batch_window: WindowChoice::Off }
    }
}

impl Asked for WindowArgs {
    fn typed(&self) -> Option<String> {
        self.batch_window.batches().map(|_| format!("batch-window {}", self.batch_window))
    }

    fn check(&self) -> Result<(), RangeError> {
        within("--batch-window", self.batch_window.batches().unwrap_or(1), 1..=WindowChoice::MAX_BATCHES, OUTSIDE, "")
    }

    fn suits(&self, topology: &Topology) -> Result<(), RangeError> {
        needs_others("--batch-window", topology)?;
        if topology.is_by_message() {
            let (why, legal) = ("the window is one of copyrpc's batches", "--carrier copyrpc".to_owned());
            return Err(range("--batch-window", format!("with --carrier {}", topology.transport), why, legal));
        }
        Ok(())
    }
}
