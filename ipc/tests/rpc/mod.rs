//! The crate as the tests of all shared-memory RPCs see it.

use ipc::ReadyWords;
use shm_testing::typed::{Sizes, Typed};

pub(crate) struct Bits;

impl Sizes for Bits {
    type Announced = ReadyWords;

    fn words(clients: usize, _: usize) -> usize {
        ReadyWords::words(clients)
    }
}

pub(crate) type Ipc = Typed<Bits>;
