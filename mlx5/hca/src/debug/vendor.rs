//! The meanings of the software HCA's vendor syndromes, in one table.
//!
//! | range | meaning | type |
//! |---|---|---|
//! | 0x01.. | a remote access, or one by key, was refused | [`Fault`] |
//! | 0x10.. | the WQE cannot be decoded | [`Malformed`] |
//! | 0x20.. | the WQE was decoded and cannot be executed | [`Limit`] |
//! | 0x40.. | strict mode: a rule was broken | [`Rule`] |

use crate::debug::rule::Rule;
use crate::requester::outcome::{Limit, Malformed};
use crate::shared::memory::Fault;

const TEXTS: [(u8, &str); 20] = [
    (
        Fault::Key as u8,
        "no such key, or its region was deregistered",
    ),
    (Fault::Bounds as u8, "not inside the memory region"),
    (
        Fault::Access as u8,
        "the memory region does not allow this access",
    ),
    (
        Fault::Domain as u8,
        "the memory region is of another protection domain",
    ),
    (
        Fault::Copy as u8,
        "the kernel refused the copy between processes",
    ),
    (Fault::Gone as u8, "the process has no memory any more"),
    (
        Fault::QueuePair as u8,
        "the peer's queue pair does not allow this access, or has no resources for READs and atomics",
    ),
    (
        Malformed::Control as u8,
        "wrong index, queue pair number or length in the control segment",
    ),
    (
        Malformed::Opcode as u8,
        "an opcode that this kind of queue pair does not have",
    ),
    (Malformed::Header as u8, "a header segment is missing"),
    (
        Malformed::InlineResult as u8,
        "the result of a READ or an atomic cannot go into the WQE",
    ),
    (
        Malformed::NotConnected as u8,
        "the queue pair is not connected",
    ),
    (
        Malformed::InlineLength as u8,
        "inline data reaches beyond the WQE",
    ),
    (
        Malformed::AtomicLength as u8,
        "the result of an atomic is 8 bytes",
    ),
    (
        Limit::ReceiveTooShort as u8,
        "the buffers of the receive end before the message",
    ),
    (Limit::MessageTooLong as u8, "longer than 2^30 bytes"),
    (
        Limit::DatagramTooLong as u8,
        "a datagram longer than 4096 bytes",
    ),
    (
        Limit::AtomicAlignment as u8,
        "the address of an atomic is not a multiple of 8",
    ),
    (
        Limit::PacketsRefused as u8,
        "the kernel refuses packets to the peer: they are longer than the path's MTU (mtu=N), or there is no route",
    ),
    (Limit::OnPurpose as u8, "a fault that was asked for"),
];

/// Returns the meaning of `vendor`. `None` for 0 and for numbers that the software HCA does not
/// use.
#[must_use]
pub fn text(vendor: u8) -> Option<&'static str> {
    let listed = TEXTS
        .iter()
        .find(|(number, _)| *number == vendor)
        .map(|(_, text)| *text);
    listed.or_else(|| {
        Rule::ALL
            .iter()
            .find(|rule| rule.vendor() == vendor)
            .map(|rule| rule.text())
    })
}
