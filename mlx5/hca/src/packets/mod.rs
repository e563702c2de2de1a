//! Packets between devices that share no memory: RoCEv2 in UDP datagrams.
//!
//! - `requester`, `responder`: the protocol of a reliable connection, pure: no socket, no clock, no
//!   memory (InfiniBand Architecture Specification, volume 1, chapter 9, "Reliable Service").
//!   `message`: messages, and numbers that both compute. `held`: packets that a responder got too
//!   early. `flight`: the packets that a requester has under way. `timer`: the times at which it
//!   repeats. `congestion`: the number of packets that the connections to a device may have under
//!   way.
//! - `connection`: a connection of a queue pair by packets.
//! - `port`: encodes and decodes packets. `options`: its options. `network`: a bad network, for
//!   tests. `udp`: a socket. `source`: the sockets from which packets leave. `reports`: the reasons
//!   why packets do not arrive. `mads`: datagrams to queue pair 1. `share`: one UDP port for these and a device. `interface`: addresses of this host. `pcap`: a capture. `grh`: the headers of
//!   datagrams.
//!
//! A [`Requester`](requester::Requester) numbers the packets of the messages that are posted to it,
//! selects the packet to send next, and determines from responses and from the time which packets
//! arrived. A [`Responder`](responder::Responder) executes the packets of the other end once and in
//! order, on memory and receives that it reaches by [`Target`](responder::Target), and answers. A
//! connection has one of each at either end.
//!
//! Rules, by which the tests are named:
//!
//! - P1. Every message is executed once, in the order of posting, or its requester fails.
//! - P2. A message completes when its last packet is acknowledged: by an ACK of this PSN or a later
//!   PSN, or by its READ or atomic response. An ACK of a PSN after a READ or atomic whose response
//!   has not arrived acknowledges only the packets before that READ or atomic.
//! - P3. Without an answer for the timeout, all packets from the oldest that is not acknowledged
//!   are sent again; after a NAK, all packets from its PSN. This is done `retry_count` times
//!   without progress. Repeats before the timeout, each after 2 ms or more, do not count. Of a
//!   READ, the responses that are missing are requested again. To a software HCA only lost packets
//!   are sent again. A packet is lost if a later packet has overtaken it, and it does not arrive
//!   within the longest delay that overtaken packets were seen to have.
//! - P4. A responder without a receive answers RNR NAK, and the requester waits for the time in it;
//!   `rnr_retry` times.
//! - P5. A responder answers a gap with one NAK, and discards the packets behind the gap until the
//!   missing packet arrives. To a software HCA it sends no such NAK: it holds the packets behind
//!   the gap, and every ACK reports them. A responder acknowledges a duplicate SEND or WRITE,
//!   executes a duplicate READ again, and answers a duplicate atomic from its memory of the last
//!   [`MAX_RD_ATOMIC`](message::MAX_RD_ATOMIC).
//! - P6. After a NAK that is fatal both ends execute nothing more.
//! - P7. On an unreliable connection a message completes when its last packet is sent. The message
//!   is executed once, after the messages before it, or is lost: if a packet is missing, arrives
//!   late, or is refused. The loss is not reported. A packet is late if its PSN is at most 1,024
//!   before the expected PSN; any other packet that begins a message begins the next message.
//! - P8. A packet asks for an ACK at the end of its message, at each PSN that 16 divides, and at
//!   the middle and the end of its part of the congestion window. A message of one packet without a
//!   completion does not ask a software HCA, which acknowledges it with a later message, or after
//!   [`ACK_DELAY_NS`](message::ACK_DELAY_NS).
//! - P9. The requesters of connections to one device, with one traffic class, share a congestion
//!   window. They have at most this number of packets and READ responses under way, except that each
//!   may have an equal share of it, and at least one packet. Losses, queues and marks shrink the
//!   window, and acknowledgements let it grow. A responder reports marked packets in its next ACK to
//!   a software HCA. Packets of a window are spread over a round trip of more than 1 ms. An
//!   unreliable connection has no such window.

mod congestion;
pub(crate) mod connection;
mod flight;
pub(crate) mod grh;
mod held;
pub(crate) mod interface;
pub(crate) mod mads;
pub(crate) mod message;
pub(crate) mod network;
pub(crate) mod options;
pub(crate) mod pcap;
pub(crate) mod port;
mod reports;
pub(crate) mod requester;
pub(crate) mod responder;
mod share;
pub(crate) mod source;
mod timer;
pub(crate) mod udp;

#[cfg(test)]
mod tests;

use connection::Connection;
use port::WirePort;
use source::Peer;

/// A device's port for packets, if any, and its connections by packets.
#[derive(Default)]
pub(crate) struct Wire {
    pub(crate) port: Option<Box<WirePort>>,
    /// Connections, indexed by queue pair.
    pub(crate) connections: Vec<Option<Box<Connection>>>,
}

impl Wire {
    pub(crate) fn insert(&mut self, index: usize, mut connection: Connection) {
        let others = self.connections.iter().flatten();
        let device = |peer: &Peer| (peer.to.socket, peer.to.class);
        let _is_shared = others
            .filter(|other| device(&other.peer) == device(&connection.peer))
            .any(|other| connection.requester.share_window(&other.requester));
        if self.connections.len() <= index {
            self.connections.resize_with(index + 1, || None);
        }
        self.connections[index] = Some(Box::new(connection));
    }

    /// Passes every report that a packet did not arrive to all connections to that packet's
    /// receiver.
    #[cold]
    pub(crate) fn take_reports(&mut self) {
        let reports = self.port.as_mut().map(|port| port.take_reports());
        for (to, why) in reports.into_iter().flatten() {
            let connections = self.connections.iter_mut().flatten();
            connections
                .filter(|connection| connection.peer.to.socket == to)
                .for_each(|connection| connection.on_report(why));
        }
    }
}
