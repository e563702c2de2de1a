//! The shares of a context's endpoints in its queues, so that no queue can overrun or run dry.

use std::cell::Cell;
use std::rc::Rc;

use copyrpc_calls::OptionError;

use crate::config::{DEFAULT_BATCHES, DEFAULT_RAW_OPERATIONS, EndpointConfig};
use crate::error::SetupError;

/// Maximum number of outstanding send completions that a connection has besides one for each batch
/// in flight (B2 of docs/copyrpc-protocol.md). It is reached when the queue pair fails and flushes:
/// three batches that arrived and were signaled to reclaim the queue, one batch that fails after it
/// arrived, one READ, and three NOPs at the end of the send queue.
const SEND_CQES_BESIDE_BATCHES: u32 = 8;

/// The sum of the shares of all endpoints of a context.
#[derive(Debug, Default)]
pub(crate) struct Used {
    /// Batches in flight granted to the peers (B1).
    batches: Cell<u32>,
    /// Maximum number of outstanding send completions (B2).
    completions: Cell<u32>,
    endpoints: Cell<u32>,
}

impl Used {
    /// Returns the number of endpoints that have a share: those that connect, that are connected,
    /// and that have ended and are not released.
    pub(crate) fn endpoints(&self) -> u32 {
        self.endpoints.get()
    }
}

/// The limits of an endpoint's outstanding operations.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outstanding {
    pub(crate) batches: u32,
    pub(crate) raw_operations: u32,
    /// Maximum number of batches that arrived and whose completions the window waits for (W1).
    pub(crate) windowed: u32,
}

impl Outstanding {
    pub(crate) const DEFAULT: Self = Self {
        batches: DEFAULT_BATCHES,
        raw_operations: DEFAULT_RAW_OPERATIONS,
        windowed: 0,
    };

    pub(crate) const fn of(config: &EndpointConfig) -> Self {
        Self {
            batches: config.batches_in_flight,
            raw_operations: config.raw_operations,
            windowed: config.window.completions(),
        }
    }

    /// Returns the number of receives for `endpoints` endpoints: 3/2 of their batches, since at
    /// least two thirds of the receives are posted whenever receipts are reported.
    pub(crate) const fn receives(&self, endpoints: u32) -> u64 {
        (self.batches as u64 * endpoints as u64)
            .saturating_mul(3)
            .div_ceil(2)
    }

    /// Returns the number of endpoints for which `receives` are enough.
    pub(crate) const fn endpoints(&self, receives: u64) -> u64 {
        let batches = if self.batches == 0 { 1 } else { self.batches };
        receives * 2 / 3 / batches as u64
    }

    /// Returns the maximum number of send completions of one endpoint (B2).
    pub(crate) const fn completions(&self) -> u32 {
        self.batches
            .saturating_add(self.raw_operations)
            .saturating_add(self.windowed)
            .saturating_add(SEND_CQES_BESIDE_BATCHES)
    }
}

/// The share of one endpoint in the queues; freed by its drop.
pub(crate) struct QueueShare {
    batches: u32,
    raw_operations: u32,
    completions: u32,
    used: Rc<Used>,
}

impl QueueShare {
    /// Takes a share for an endpoint with these limits and `send_capacity` WQEBBs, of an SRQ of
    /// `depth` receives and a send CQ of `entries`. At least two thirds of the receives are posted
    /// whenever receipts are reported, so that number of batches may be in flight (B1). An endpoint
    /// has at most one completion for each WQE, so its share of the send CQ is at most
    /// `send_capacity` (B2).
    pub(crate) fn take(
        used: &Rc<Used>,
        outstanding: Outstanding,
        send_capacity: usize,
        depth: usize,
        entries: u32,
    ) -> Result<Self, SetupError> {
        let (
            Outstanding {
                batches,
                raw_operations,
                ..
            },
            endpoints,
        ) = (outstanding, used.endpoints.get());
        let all_batches = u64::from(used.batches.get()) + u64::from(batches);
        let needed = (all_batches * 3).div_ceil(2);
        if batches == 0 {
            return Err(OptionError::new("batches_in_flight", 0, "at least 1").into());
        }
        let full = |option, size, needed| {
            let legal =
                format!("at least {needed}, or ContextBuilder::endpoints of more than {endpoints}");
            SetupError::Full(OptionError::new(option, size, legal))
        };
        if needed > depth as u64 {
            return Err(full("srq_size", depth as u64, needed));
        }
        let completions = outstanding.completions().min(send_capacity as u32);
        let needed = u64::from(used.completions.get()) + u64::from(completions);
        if needed > u64::from(entries) {
            return Err(full("cq_size", entries.into(), needed));
        }
        used.batches.set(all_batches as u32);
        used.completions.set(needed as u32);
        used.endpoints.set(endpoints + 1);
        Ok(Self {
            batches,
            raw_operations,
            completions,
            used: Rc::clone(used),
        })
    }

    pub(crate) const fn raw_operations(&self) -> u32 {
        self.raw_operations
    }
}

impl Drop for QueueShare {
    fn drop(&mut self) {
        self.used
            .batches
            .set(self.used.batches.get() - self.batches);
        self.used
            .completions
            .set(self.used.completions.get() - self.completions);
        self.used.endpoints.set(self.used.endpoints.get() - 1);
    }
}
