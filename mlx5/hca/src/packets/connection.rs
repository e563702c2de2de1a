//! The state of a connected queue pair whose peer is reached by packets.

use std::collections::VecDeque;
use std::net::SocketAddr;

use mlx5_wire::roce::{Aeth, Headers, Opcode, PacketOpcode, Psn, Syndrome, Transport};
use mlx5_wire::{ConnectOptions, rnr_timer_code};

use super::message::{GONE, MAX_RD_ATOMIC, Options};
use super::port::WirePort;
use super::requester::Requester;
use super::responder::Responder;
use super::source::{Peer, source_port};
use super::udp::Receiver;
use crate::shared::layout::Taking;
use crate::types::outcome::End;
use crate::types::request::PacketAddress;
use crate::types::vendor::Limit;

/// Number of reserved bytes in a congestion notification.
const CNP_RESERVED: usize = 16;

/// A WQE that was taken off the send queue, and is not complete.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Posted {
    /// Place of the WQE in the send queue.
    pub(crate) counter: u16,
    /// Outcome of the WQE, reported once the WQEs before it are complete.
    pub(crate) end: End,
}

/// The end of a connection by packets that belongs to this device.
pub(crate) struct Connection {
    pub(crate) peer: Peer,
    pub(crate) requester: Requester,
    pub(crate) responder: Responder,
    pub(crate) posted: VecDeque<Posted>,
    /// Counters of the WQEs whose messages the requester has, in order. The first WQE belongs to
    /// message number `completed`.
    pub(crate) messages: VecDeque<u16>,
    pub(crate) completed: u64,
    /// The receive of the message that is arriving.
    pub(crate) open: Option<Taking>,
    /// Whether a WQE has failed and is not complete. No further WQE is taken before it is complete.
    pub(crate) is_ending: bool,
    /// The reason in the last report that a packet to the peer did not arrive. `None` if the peer
    /// has advanced the connection since.
    why: Option<Limit>,
    /// Time of the last congestion notification.
    notified_ns: Option<u64>,
    pub(crate) scheduled_ns: Option<u64>,
    /// Whether the connection is among [`WirePort::active`].
    pub(crate) is_active: bool,
}

/// Minimum time between two congestion notifications of a connection, in ns.
const NOTIFY_NS: u64 = 50_000;
/// Minimum time, in ns, for which requests to a software HCA that does not answer are repeated. A
/// longer time would delay the report of a dead peer.
const POLLED_PATIENCE_NS: u64 = 2_000_000_000;

impl Connection {
    /// Makes a connection to queue pair `qpn`, whose packets go to `to` and have this flow label. The
    /// first packet of this end has the PSN `first`.
    pub(crate) fn new(
        (qpn, to, flow_label): (u32, Receiver, u32),
        remote: PacketAddress,
        first: Psn,
        options: &ConnectOptions,
        is_unreliable: bool,
    ) -> Self {
        let (mtu, timeout_ns) = (u32::from(remote.mtu), options.ack_timeout_ns());
        let is_polled = remote.port.is_some();
        let patient = if is_polled {
            (POLLED_PATIENCE_NS / timeout_ns).min(u8::MAX.into()) as u8
        } else {
            0
        };
        let requester = Options {
            qpn,
            mtu,
            timeout_ns,
            retry_count: options.retry_count.min(7).max(patient),
            rnr_retry: options.rnr_retry.min(7),
            rd_atomic: MAX_RD_ATOMIC as u8,
            is_unreliable,
            is_polled,
        };
        Self {
            peer: Peer {
                to,
                sources: remote
                    .port
                    .map(|port| [port, source_port(port, flow_label)]),
            },
            requester: Requester::new(requester, first),
            responder: Responder::new(
                qpn,
                mtu,
                rnr_timer_code(options.rnr_timer_ns),
                Psn::new(remote.psn),
                is_polled,
            ),
            posted: VecDeque::new(),
            messages: VecDeque::new(),
            completed: 0,
            open: None,
            is_ending: false,
            why: None,
            notified_ns: None,
            scheduled_ns: None,
            is_active: false,
        }
    }

    /// Sets the options and the first PSN of the packets to be sent. Nothing was sent yet.
    pub(crate) fn restart(&mut self, options: &ConnectOptions, first: Psn, rd_atomic: u8) {
        let before = self.requester.options();
        let options = Options {
            timeout_ns: options.ack_timeout_ns(),
            retry_count: options.retry_count,
            rnr_retry: options.rnr_retry,
            rd_atomic: rd_atomic.clamp(1, MAX_RD_ATOMIC as u8),
            ..before
        };
        let mut requester = Requester::new(options, first);
        requester.share_window(&self.requester);
        self.requester = requester;
    }

    /// Returns the answer to requests that arrive after the queue pair of this connection failed or
    /// was destroyed. If a NAK ended the connection, the answer is this NAK, because the first copy
    /// may be lost. Otherwise it is a NAK with syndrome `GONE`. Returns `None` if the peer does not
    /// understand the answer.
    pub(crate) fn last_answer(&self) -> Option<Headers> {
        let Options {
            qpn,
            is_polled,
            is_unreliable,
            ..
        } = self.requester.options();
        let opcode = PacketOpcode {
            transport: Transport::Rc,
            opcode: Opcode::Acknowledge,
        };
        let syndrome = self
            .responder
            .fatal()
            .map_or(Syndrome::Reserved(GONE), Syndrome::Nak);
        let aeth = Aeth { syndrome, msn: 0 };
        (is_polled && !is_unreliable).then(|| Headers {
            aeth,
            ..Headers::new(opcode, qpn, self.responder.expected())
        })
    }

    /// Notes that a packet of the peer advanced the connection. The peer's later packets have its
    /// source port.
    pub(crate) const fn on_progress(&mut self, from: &SocketAddr) {
        self.why = None;
        self.peer.sources = Some([from.port(); 2]);
    }

    /// Sends a congestion notification, because the network marks the packets of the peer. Does
    /// nothing if the peer is a software HCA, to which ACKs report the marks.
    #[cold]
    pub(crate) fn notify(&mut self, wire: &mut WirePort, now_ns: u64) {
        let is_recent = |notified_ns: u64| now_ns < notified_ns + NOTIFY_NS;
        let Options { qpn, is_polled, .. } = self.requester.options();
        if is_polled || self.notified_ns.is_some_and(is_recent) || !wire.has_room(&self.peer.to) {
            return;
        }
        self.notified_ns = Some(now_ns);
        let mut headers = Headers::new(PacketOpcode::CNP, qpn, Psn::new(0));
        headers.bth.has_becn = true;
        let _: Result<(), ()> = wire.send(&self.peer.to, &headers, CNP_RESERVED, |reserved| {
            reserved.fill(0);
            Ok(())
        });
    }

    /// Notes a report that a packet to the peer did not arrive.
    pub(crate) fn on_report(&mut self, why: Limit) {
        self.why = Some(why);
        if matches!(why, Limit::NoPort | Limit::PacketTooLong) {
            self.requester.on_unreachable();
        }
    }

    /// Returns the reason, as far as it is known, why the peer did not answer.
    pub(crate) fn why_silent(&self) -> Limit {
        self.why.unwrap_or(if self.requester.is_peer_gone() {
            Limit::PeerGone
        } else {
            Limit::Silent
        })
    }

    /// Returns numbers that change when a packet of the peer advances the connection.
    pub(crate) fn progress(&self) -> (Psn, u64) {
        (self.responder.expected(), self.requester.completed())
    }

    /// Returns the counter of a message's WQE.
    pub(crate) fn wqe_of(&self, message: u64) -> Option<u16> {
        self.messages
            .get(message.checked_sub(self.completed)? as usize)
            .copied()
    }

    /// Makes the next poll of the port run the queue pair.
    pub(crate) fn activate(&mut self, wire: &mut WirePort, index: usize) {
        if !self.is_active {
            self.is_active = true;
            wire.active.push(index);
        }
    }
}
