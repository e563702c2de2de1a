//! Tests of the inside of the crate: bytes in the send queue, bytes of CQEs.

use std::rc::Rc;

use crate::config::NullOptions;
use crate::provider::control::Control;
use crate::provider::null::Null;

mod compact;
mod destroyed;
mod doorbell_order;
mod events;
mod golden;
mod hostile;
mod peers;
#[path = "../../tests/support/random.rs"]
pub(crate) mod random;
mod receives;
mod send_queue;

/// A null device, and its control path.
pub(crate) fn null() -> (Rc<Null>, Control) {
    let null = Rc::new(Null::new(NullOptions::default()));
    (Rc::clone(&null), Control::new(null, None))
}
