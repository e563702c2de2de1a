//! The progress of a running job, on one line of a terminal.
//!
//! The line is drawn only if standard error is a terminal, not to a file or pipe, and is as wide as
//! the terminal. It is cleared before anything else is printed.

use std::time::Duration;

use benchkv_harness::report::{plural, say};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use engine::phase::Phase;

/// Maximum number of redraws per second, which is low because the core that draws the line may be
/// one of the measured cores.
const DRAWS_PER_SECOND: u8 = 4;

/// The progress line. A drop clears the line.
#[derive(Debug)]
pub struct Progress {
    bar: ProgressBar,
    runs: usize,
}

impl Progress {
    /// Makes a line on standard error, for a job of `warmup`, then `runs` of `duration`.
    pub fn on_terminal(warmup: Duration, runs: usize, duration: Duration) -> Self {
        let target = ProgressDrawTarget::stderr_with_hz(DRAWS_PER_SECOND);
        let bar =
            ProgressBar::with_draw_target(Some(millis(warmup + duration * runs as u32)), target);
        let style = ProgressStyle::with_template("{msg:>12} [{wide_bar}] {prefix}");
        Self {
            bar: bar.with_style(
                style
                    .unwrap_or_else(|_| ProgressStyle::default_bar())
                    .progress_chars("=> "),
            ),
            runs,
        }
    }

    /// Makes a progress that draws nothing.
    pub fn hidden() -> Self {
        Self {
            bar: ProgressBar::hidden(),
            runs: 0,
        }
    }

    /// Shows the beginning of a phase.
    pub fn enter(&self, phase: Phase) {
        // The time between runs is too short to be shown.
        if let Some(name) = name_of(phase, self.runs) {
            self.bar.set_message(name);
            // The line is drawn at once, because a short run may be over before the next redraw is
            // due.
            self.bar.suspend(|| ());
        }
    }

    /// Prints a line on standard error, above the progress line.
    pub fn print(&self, line: &str) {
        self.bar.suspend(|| say(line));
    }

    /// Shows the time since load began.
    pub fn advance(&self, elapsed: Duration) {
        if self.bar.is_hidden() {
            return;
        }
        let total_ms = self.bar.length().unwrap_or(0);
        let elapsed_ms = millis(elapsed).min(total_ms);
        let left_s = (total_ms - elapsed_ms).div_ceil(1000);
        self.bar
            .set_prefix(format!("{} left", plural(left_s as usize, "second")));
        self.bar.set_position(elapsed_ms);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Returns the name of a phase in a job of `runs` runs; `None` for the time between two runs.
pub(crate) fn name_of(phase: Phase, runs: usize) -> Option<String> {
    Some(match phase {
        Phase::Ready => "setting up".to_owned(),
        Phase::WarmUp => "warming up".to_owned(),
        Phase::Window(run) => format!("run {} of {runs}", run + 1),
        Phase::Between => return None,
        Phase::Drain | Phase::GiveUp => "draining".to_owned(),
    })
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
