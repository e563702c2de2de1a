//! Exponentially weighted moving averages.

/// An exponentially weighted mean; the newest sample has the weight `alpha`.
#[derive(Debug, Clone, Copy)]
pub struct Ewma {
    alpha: f64,
    mean: Option<f64>,
}

impl Ewma {
    /// Makes a mean without a sample. The first sample is the mean.
    #[must_use]
    pub const fn new(alpha: f64) -> Self {
        Self { alpha, mean: None }
    }

    /// Makes a mean whose first value is `mean`.
    #[must_use]
    pub const fn starting_at(mean: f64, alpha: f64) -> Self {
        Self {
            alpha,
            mean: Some(mean),
        }
    }

    /// Adds a sample; ignores NaN and infinities.
    pub fn add(&mut self, sample: f64) {
        if sample.is_finite() {
            self.mean = Some(
                self.mean
                    .map_or(sample, |mean| mean + self.alpha * (sample - mean)),
            );
        }
    }

    /// Returns the mean; `None` without a sample.
    #[must_use]
    pub const fn mean(&self) -> Option<f64> {
        self.mean
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_sample_has_the_weight_asked_for() {
        let mut ewma = Ewma::new(0.125);
        assert_eq!(ewma.mean(), None);
        ewma.add(8.0);
        ewma.add(16.0);
        assert_eq!(ewma.mean(), Some(9.0));
        let mut ewma = Ewma::starting_at(8.0, 0.125);
        ewma.add(16.0);
        assert_eq!(ewma.mean(), Some(9.0));
    }

    #[test]
    fn nan_and_infinities_do_not_change_the_mean() {
        let mut ewma = Ewma::starting_at(8.0, 0.5);
        for sample in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            ewma.add(sample);
        }
        assert_eq!(ewma.mean(), Some(8.0));
    }
}
