//! Zipf-distributed integers by rejection-inversion.
//!
//! W. Hörmann and G. Derflinger, "Rejection-inversion to generate variates from monotone discrete
//! distributions", ACM TOMACS 6(3), 1996: inversion of the continuous envelope x^-theta, rounded,
//! with a rejection that almost never happens. The sampler has no table, so it is as fast for 2^26
//! keys as for 10, and exact for every theta, 1 included.

use fastrand::Rng;

/// A sampler of `0..n` with probability proportional to `(i + 1)^-theta`.
#[derive(Debug, Clone, Copy)]
pub struct Zipf {
    n: f64,
    theta: f64,
    /// The envelope's integral at both ends; samples are taken uniformly between them.
    low: f64,
    high: f64,
    /// Distance from the rounded value within which a sample needs no test.
    sure: f64,
}

impl Zipf {
    /// Makes a sampler of `n >= 1` values with `theta > 0`.
    pub fn new(n: u64, theta: f64) -> Self {
        let mut zipf = Self {
            n: n as f64,
            theta,
            low: 0.0,
            high: 0.0,
            sure: 0.0,
        };
        zipf.low = zipf.integral(1.5) - 1.0;
        zipf.high = zipf.integral(zipf.n + 0.5);
        zipf.sure = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.density(2.0));
        zipf
    }

    /// Returns one value, below `n`.
    pub fn sample(&self, rng: &mut Rng) -> u64 {
        loop {
            let area = self.high + rng.f64() * (self.low - self.high);
            let x = self.inverse(area);
            let k = x.round().clamp(1.0, self.n);
            if k - x <= self.sure || area >= self.integral(k + 0.5) - self.density(k) {
                return k as u64 - 1;
            }
        }
    }

    fn density(&self, x: f64) -> f64 {
        (-self.theta * x.ln()).exp()
    }

    /// Returns the integral of the density from 1 to `x`: `(x^(1-theta) - 1) / (1-theta)`, which is
    /// `ln x` at theta 1.
    fn integral(&self, x: f64) -> f64 {
        let log = x.ln();
        let exponent = (1.0 - self.theta) * log;
        if exponent.abs() < 1e-8 {
            log * (1.0 + exponent / 2.0)
        } else {
            log * exponent.exp_m1() / exponent
        }
    }

    fn inverse(&self, area: f64) -> f64 {
        // Rounding can make the product smaller than -1, where the logarithm of 1 + product does
        // not exist, so it is clamped.
        let product = (area * (1.0 - self.theta)).max(-1.0);
        if product.abs() < 1e-8 {
            (area * (1.0 - product / 2.0)).exp()
        } else {
            (area * product.ln_1p() / product).exp()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the maximum distance between the distribution of `samples` values and the exact
    /// distribution.
    fn kolmogorov_smirnov(n: u64, theta: f64, samples: usize, seed: u64) -> f64 {
        let (zipf, mut rng) = (Zipf::new(n, theta), Rng::with_seed(seed));
        let mut counts = vec![0u64; n as usize];
        (0..samples).for_each(|_| counts[zipf.sample(&mut rng) as usize] += 1);
        let weights: Vec<f64> = (1..=n).map(|k| (k as f64).powf(-theta)).collect();
        let total: f64 = weights.iter().sum();
        let mut seen = 0.0;
        let mut exact = 0.0;
        let mut distance = 0.0f64;
        for (count, weight) in counts.iter().zip(&weights) {
            seen += *count as f64 / samples as f64;
            exact += weight / total;
            distance = distance.max((seen - exact).abs());
        }
        distance
    }

    #[test]
    fn samples_follow_the_exact_distribution() {
        const SAMPLES: usize = 200_000;
        // The limit is the 99.9 % point of the Kolmogorov-Smirnov statistic, which is conservative
        // for a discrete distribution.
        let limit = 1.949 / (SAMPLES as f64).sqrt();
        for (n, theta) in [
            (1, 0.99),
            (2, 0.5),
            (10, 1.0),
            (1000, 0.99),
            (1000, 1.0),
            (1000, 1.5),
            (100_000, 0.99),
            (50, 5.0),
        ] {
            let distance = kolmogorov_smirnov(n, theta, SAMPLES, 42);
            assert!(
                distance < limit,
                "n {n} theta {theta} seed 42: {distance} >= {limit}"
            );
        }
    }

    #[test]
    fn the_test_above_tells_neighbouring_exponents_apart() {
        let (zipf, mut rng) = (Zipf::new(1000, 0.9), Rng::with_seed(42));
        let firsts = (0..200_000).filter(|_| zipf.sample(&mut rng) == 0).count() as f64 / 200_000.0;
        let exact = 1.0 / (1..=1000).map(|k| f64::from(k).powf(-0.99)).sum::<f64>();
        assert!((firsts - exact).abs() > 1.949 / 200_000f64.sqrt());
    }

    #[test]
    fn values_stay_below_n_at_any_size() {
        let mut rng = Rng::with_seed(7);
        for n in [1, 2, 3, 1 << 26] {
            for theta in [0.01, 0.99, 1.0, 10.0] {
                let zipf = Zipf::new(n, theta);
                assert!(
                    (0..1000).all(|_| zipf.sample(&mut rng) < n),
                    "n {n} theta {theta}"
                );
            }
        }
    }
}
