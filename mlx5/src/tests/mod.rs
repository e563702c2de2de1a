//! Tests that need private items of the crate: bytes of WQEs and CQEs, the order of a doorbell's
//! stores, sleeps, receive queues, queue pairs that fail or are destroyed, hostile peers.

use std::rc::Rc;

use crate::config::NullOptions;
use crate::control::{Control, Hook};
use crate::provider::null::NullDevice;
use crate::provider::soft::Soft;

mod compact;
mod destroyed;
mod doorbell_order;
mod events;
mod golden;
mod hostile;
#[path = "../../tests/support/null.rs"]
pub(crate) mod null_device;
mod peers;
#[path = "../../tests/support/random.rs"]
pub(crate) mod random;
mod receives;
mod send_queue;

/// A null device, and its control path.
pub(crate) fn null() -> (NullDevice, Control) {
    let soft = Rc::new(Soft::null(NullOptions::default()).unwrap());
    let null = NullDevice::new(Rc::clone(&soft));
    (null, Control::new(soft, Hook::Nothing))
}
