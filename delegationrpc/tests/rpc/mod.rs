//! The crate as the tests of all shared-memory RPCs see it.

use delegationrpc::Ring;
use shm_testing::typed::{Sizes, Typed};

/// The smallest ring that is never full, so that it laps often.
pub(crate) struct Smallest;

impl Sizes for Smallest {
    type Announced = Ring;

    fn words(_: usize, calls: usize) -> usize {
        calls.next_power_of_two()
    }
}

pub(crate) type Delegation = Typed<Smallest>;
