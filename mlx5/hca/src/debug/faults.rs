//! Faults on purpose, from one seed.

use mlx5_wire::{ConnectOptions, Syndrome};

use crate::queues::qp::SoftQp;
use crate::random::Random;
use crate::{Clock, Hca, Timing};

/// Faults that a software HCA makes; the default makes none.
/// [`DeviceInfo::modes`](crate::DeviceInfo::modes) lists them.
///
/// Operations are counted from 0 over all queue pairs of the device, or over the queue pair in
/// `only`, in the order of their first attempts. A WQE that only fills the end of a send queue does
/// not count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Seed of the random numbers: the same seed gives the same faults for the same operations.
    pub seed: u64,
    /// Operations in a thousand that start late.
    pub delay_permille: u16,
    /// Delay of the operations that start late, in ns of the device's clock.
    pub delay_ns: u64,
    /// Messages in a thousand whose first attempt finds no receive, even if one is posted.
    pub rnr_permille: u16,
    /// Lanes (queues of arrived messages) in a thousand that a poll skips. So CQEs of different
    /// queue pairs change their order; CQEs of one queue pair do not.
    pub reorder_permille: u16,
    /// The number of the operation that fails, and its syndrome.
    pub fail: Option<(u64, Syndrome)>,
    /// Operations in a thousand that fail, each with one of the syndromes that a peer or the network
    /// causes.
    pub fail_permille: u16,
    /// Number of the operation from which on no peer answers: this operation and all later
    /// operations fail after the timeout of their queue pair.
    pub drop_peers_after: Option<u64>,
    /// Transmissions in a thousand that are lost. The send of a lost datagram completes. Any other
    /// lost message is sent again after the timeout of its queue pair; if all its transmissions are
    /// lost, it fails at once.
    pub loss_permille: u16,
    /// The place of the queue pair that gets the faults of operations: the lower 14 bits of its
    /// number. `None`: all queue pairs.
    pub only: Option<u16>,
}

/// Syndromes of operations that fail at random.
const AT_RANDOM: [Syndrome; 5] = [
    Syndrome::RemoteInvalidRequest,
    Syndrome::RemoteAccess,
    Syndrome::RemoteOperation,
    Syndrome::TransportRetryExceeded,
    Syndrome::RnrRetryExceeded,
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Normal,
    /// The operation starts after [`Injector::delay_ns`].
    Delayed,
    NotReady,
    /// The send of a datagram completes, and the datagram is not delivered.
    Lost,
    Fails(Syndrome),
}

pub(crate) struct Injector {
    faults: Faults,
    random: Random,
    /// Number of operations started.
    count: u64,
    /// Delay of the last operation that was delayed, in ns.
    delay_ns: u64,
}

impl Injector {
    /// Returns `None` if no fault is requested.
    pub(crate) fn new(faults: &Faults) -> Option<Box<Self>> {
        let is_quiet = *faults
            == Faults {
                seed: faults.seed,
                ..Faults::default()
            };
        (!is_quiet).then(|| {
            Box::new(Self {
                faults: faults.clone(),
                random: Random::new(faults.seed),
                count: 0,
                delay_ns: 0,
            })
        })
    }

    pub(crate) fn delay_ns(&self) -> u64 {
        self.delay_ns
    }

    fn concerns(&self, qp: &SoftQp) -> bool {
        self.faults
            .only
            .is_none_or(|only| usize::from(only) == qp.index)
    }

    /// Decides the fate of the next operation. The caller asks once, at the first attempt.
    pub(crate) fn fate(&mut self, qp: &SoftQp, takes_receive: bool) -> Fate {
        if !self.concerns(qp) {
            return Fate::Normal;
        }
        let number = self.count;
        self.count += 1;
        if let Some((_, syndrome)) = self.faults.fail.filter(|&(n, _)| n == number) {
            return Fate::Fails(syndrome);
        }
        if self.random.happens(self.faults.fail_permille) {
            let nth = self.random.below(AT_RANDOM.len() as u64);
            return Fate::Fails(AT_RANDOM[nth as usize]);
        }
        if takes_receive && self.random.happens(self.faults.rnr_permille) {
            return Fate::NotReady;
        }
        let delay_ns = if self.random.happens(self.faults.delay_permille) {
            self.faults.delay_ns
        } else {
            0
        };
        match (self.lost_attempts(qp), delay_ns) {
            (0, 0) => Fate::Normal,
            (1.., _) if qp.is_datagram() => Fate::Lost,
            (lost, _) if lost > qp.options.retry_count => {
                Fate::Fails(Syndrome::TransportRetryExceeded)
            }
            (lost, _) => {
                let once_ns = ConnectOptions {
                    retry_count: 0,
                    ..qp.options
                }
                .transport_timeout_ns();
                self.delay_ns = once_ns.saturating_mul(lost.into()).saturating_add(delay_ns);
                Fate::Delayed
            }
        }
    }

    /// Returns the number of attempts of a message that are lost in a row, at most one more than
    /// its retries.
    fn lost_attempts(&mut self, qp: &SoftQp) -> u8 {
        (0..=qp.options.retry_count)
            .take_while(|_| self.random.happens(self.faults.loss_permille))
            .count() as u8
    }

    /// Returns whether the peers of a queue pair have stopped answering.
    pub(crate) fn dropped_peers(&self, qp: &SoftQp) -> bool {
        self.faults.drop_peers_after.is_some_and(|n| self.count > n) && self.concerns(qp)
    }

    /// Returns whether the next lane is skipped.
    pub(crate) fn passes_over(&mut self) -> bool {
        self.random.happens(self.faults.reorder_permille)
    }
}

/// Describes, for people, the timing, the clock, strict mode and the faults.
pub(crate) fn modes(hca: &Hca, injector: Option<&Injector>) -> String {
    let mut modes = match &hca.timing {
        Timing::Immediate => "immediate".to_owned(),
        Timing::Delay { ns } => format!("delay {ns} ns"),
        Timing::Random { ns, seed } => format!("delay {} to {} ns, seed {seed}", ns.0, ns.1),
        Timing::Model(_) => "NIC model".to_owned(),
    };
    modes += match &hca.clock {
        Clock::System => ", system clock",
        Clock::Manual(_) => ", manual clock",
        Clock::Stepping { .. } => ", stepping clock",
    };
    if hca.strict {
        modes += ", strict";
    }
    if let Some(Injector { faults, .. }) = injector {
        modes += &format!(", {faults:?}");
    }
    modes
}
