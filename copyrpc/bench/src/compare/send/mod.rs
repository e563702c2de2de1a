//! SENDs as a contestant: each message takes one receive and one completion. Reliable connections
//! ([`rc`]) and datagrams ([`ud`]) share everything but the queue pairs, which are hidden by
//! [`Port`].
//!
//! A client has a session with the server: one slot for each call that may be unanswered. A slot is
//! one credit. For each slot of each session a receive is posted at either end, and posted again
//! before the slot can be used again. So no message meets a queue without receives, and no credits
//! travel. As in eRPC, a request carries three numbers: the number of its session, the number of
//! its slot, and its own. Unlike in eRPC, nothing is sent again: the software device loses no
//! datagram of sessions of up to 32 slots, and a loss in a network ends the measurement.
//!
//! Each slot has a send buffer at either end. A client writes it again after the reply to the
//! slot's last request, and the server writes it again after the slot's next request. Both show
//! that the earlier message has arrived, so the device no longer reads the buffer.

mod rc;
mod ud;

use std::collections::VecDeque;
use std::ops::Range;

use benchkv_harness::Failure;
use mlx5::{
    Access, Cqe, Device, DeviceInfo, DeviceSpec, Inline, Mr, Payload, Pd, PostError, QpAddress, Sge,
};
pub(crate) use rc::RcPort;
pub(crate) use ud::UdPort;

use super::calls::{Calls, Content};
use super::case::Case;
use super::contestant::{Answers, Client, Server, record};

/// Maximum bytes of a message that is carried in its WQE.
const MAX_INLINE_BYTES: usize = 64;
/// Maximum number of completions that one poll takes from a queue.
const POLL_BUDGET: usize = 64;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    /// Number of sessions.
    peers: usize,
    /// Number of slots of each session.
    depth: usize,
    /// Length in bytes of a message that this end sends, and of one that it receives, with header.
    sent_bytes: usize,
    received_bytes: usize,
}

impl Shape {
    fn of_server(case: &Case) -> Self {
        Self {
            peers: case.clients,
            depth: case.depth,
            sent_bytes: Header::BYTES + case.settings.reply_bytes(),
            received_bytes: Header::BYTES + case.settings.payload_bytes,
        }
    }

    fn of_client(case: &Case) -> Self {
        let server = Self::of_server(case);
        Self {
            peers: 1,
            sent_bytes: server.received_bytes,
            received_bytes: server.sent_bytes,
            ..server
        }
    }

    /// Returns the maximum number of messages under way in each direction.
    const fn messages(&self) -> usize {
        self.peers * self.depth
    }

    /// Returns the number of bytes of a send buffer, in whole cache lines.
    const fn buffer_bytes(&self) -> usize {
        self.sent_bytes.next_multiple_of(64)
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrival {
    /// The sender, if the queue pair identifies it.
    peer: Option<usize>,
    /// Number of the receive that holds the message.
    place: usize,
    /// Number of bytes that were written into the receive.
    bytes: usize,
}

impl Arrival {
    fn of(cqe: &Cqe<'_>, peer: Option<usize>, place: u64) -> Self {
        Self {
            peer,
            place: place as usize,
            bytes: cqe.byte_count() as usize,
        }
    }
}

/// Returns whether a message was posted; `false` if there is no room for the message now.
#[inline]
fn is_posted(posted: Result<(), PostError>) -> Result<bool, Failure> {
    match posted {
        Ok(()) => Ok(true),
        Err(PostError::QueueFull { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Decodes the record of a peer's queue pair.
fn address(said: &[u8]) -> Result<QpAddress, Failure> {
    let address = QpAddress::from_bytes(record(said)?);
    Ok(address.ok_or("the record is not the address of a queue pair")?)
}

/// The queue pairs of one end.
pub(crate) trait Port: Sized {
    /// Bytes in a receive before the message.
    const HEADROOM_BYTES: usize;

    fn open(device: &Device, pd: &Pd, shape: &Shape) -> Result<Self, Failure>;
    /// Returns the record with which the peer `peer` reaches this end.
    fn record(&self, peer: usize) -> Vec<u8>;
    fn connect(&mut self, peer: usize, record: &[u8]) -> Result<(), Failure>;
    /// Posts a receive, which is active after the next [`ring`](Self::ring). There is room for a
    /// receive for each slot.
    fn post_receive(&mut self, buffer: Sge, place: usize) -> Result<(), Failure>;
    /// Posts a message. Returns `false` if there is no room now.
    fn post(&mut self, peer: usize, message: impl Payload) -> Result<bool, Failure>;
    fn ring(&mut self);
    /// Takes completions, and appends the messages that arrived. Returns the number of completions.
    fn take(&mut self, arrived: &mut Vec<Arrival>) -> Result<usize, Failure>;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Header {
    session: u16,
    slot: u16,
    /// Number of the request within its session.
    number: u32,
}

impl Header {
    const BYTES: usize = 8;

    const fn encode(self) -> [u8; Self::BYTES] {
        let ids = self.session as u64 | (self.slot as u64) << 16;
        (ids | (self.number as u64) << 32).to_le_bytes()
    }

    fn decode(message: &[u8]) -> Option<(Self, &[u8])> {
        let (header, rest) = message.split_first_chunk()?;
        let word = u64::from_le_bytes(*header);
        let header = Self {
            session: word as u16,
            slot: (word >> 16) as u16,
            number: (word >> 32) as u32,
        };
        Some((header, rest))
    }
}

/// An end: the port, and the memory of its messages.
struct End<P> {
    port: P,
    device: Device,
    shape: Shape,
    /// Sessions of the peers, in the order of the peers.
    sessions: Range<usize>,
    receives: Mr,
    sends: Mr,
    /// Peer and number of the send buffer of each message that found no room.
    unsent: VecDeque<(usize, usize)>,
    arrived: Vec<Arrival>,
    /// Buffer for the message that is being read.
    message: Vec<u8>,
}

impl<P: Port> End<P> {
    fn open(device: &Device, shape: Shape, first_session: usize) -> Result<Self, Failure> {
        let pd = device.alloc_pd()?;
        let mut port = P::open(device, &pd, &shape)?;
        let message_bytes = P::HEADROOM_BYTES + shape.received_bytes;
        let (messages, receive_bytes) = (shape.messages(), Self::receive_bytes(&shape));
        let receives = pd.alloc(messages * receive_bytes, Access::LOCAL_WRITE)?;
        let sends = pd.alloc(messages * shape.buffer_bytes(), Access::empty())?;
        for place in 0..messages {
            let buffer = receives.sge(place * receive_bytes, message_bytes as u32)?;
            port.post_receive(buffer, place)?;
        }
        port.ring();
        let sessions = first_session..first_session + shape.peers;
        Ok(Self {
            port,
            device: device.clone(),
            shape,
            sessions,
            receives,
            sends,
            unsent: VecDeque::with_capacity(messages),
            arrived: Vec::with_capacity(POLL_BUDGET),
            message: vec![0; message_bytes],
        })
    }

    const fn receive_bytes(shape: &Shape) -> usize {
        (P::HEADROOM_BYTES + shape.received_bytes).next_multiple_of(64)
    }

    /// Sends the message that [`write`](Self::write) has put into the buffer `place`.
    #[inline]
    fn send(&mut self, peer: usize, place: usize) -> Result<(), Failure> {
        self.unsent.push_back((peer, place));
        self.post()
    }

    /// Posts unsent messages as far as there is room.
    #[inline]
    fn post(&mut self) -> Result<(), Failure> {
        while let Some(&(peer, place)) = self.unsent.front() {
            let (at, bytes) = (place * self.shape.buffer_bytes(), self.shape.sent_bytes);
            let mut inline = [0; MAX_INLINE_BYTES];
            let is_posted = match inline.get_mut(..bytes) {
                Some(inline) => {
                    self.sends.read(at, inline)?;
                    self.port.post(peer, Inline(inline))?
                }
                None => self.port.post(peer, self.sends.sge(at, bytes as u32)?)?,
            };
            if !is_posted {
                break;
            }
            self.unsent.pop_front();
        }
        Ok(())
    }

    #[inline]
    fn write(&self, place: usize, header: Header, payload: &[u8]) -> Result<(), Failure> {
        let at = place * self.shape.buffer_bytes();
        self.sends.write(at, &header.encode())?;
        Ok(self.sends.write(at + Header::BYTES, payload)?)
    }

    /// Copies a message out, posts its receive again, and checks the message. Returns the header
    /// and payload.
    #[inline]
    fn read(&mut self, arrival: Arrival) -> Result<(Header, &[u8]), Failure> {
        let Self {
            port,
            shape,
            sessions,
            receives,
            message,
            ..
        } = self;
        let at = arrival.place * Self::receive_bytes(shape);
        let bytes = message
            .get_mut(..arrival.bytes)
            .ok_or("a message that is longer than a receive")?;
        receives.read(at, bytes)?;
        let buffer = receives.sge(at, (P::HEADROOM_BYTES + shape.received_bytes) as u32)?;
        port.post_receive(buffer, arrival.place)?;
        let (header, payload) = bytes
            .get(P::HEADROOM_BYTES..)
            .and_then(Header::decode)
            .ok_or("a message without a header")?;
        let (session, slot) = (usize::from(header.session), usize::from(header.slot));
        let peer = arrival.peer.map_or(session, |peer| sessions.start + peer);
        let is_sound = sessions.contains(&session)
            && peer == session
            && slot < shape.depth
            && payload.len() == shape.received_bytes - Header::BYTES;
        if !is_sound {
            let bytes = payload.len();
            return Err(format!("a message that is none: {header:?} and {bytes} bytes").into());
        }
        Ok((header, payload))
    }
}

pub(crate) struct SendServer<P> {
    end: End<P>,
    answers: Answers,
    reply: Vec<u8>,
}

impl<P: Port> Server for SendServer<P> {
    fn open(
        case: &Case,
        device: &DeviceSpec,
        answers: Answers,
    ) -> Result<(Self, Vec<Vec<u8>>), Failure> {
        let end = End::<P>::open(&Device::open(device)?, Shape::of_server(case), 0)?;
        let offers = (0..case.clients).map(|peer| end.port.record(peer));
        let offers = offers.collect();
        let server = Self {
            end,
            answers,
            reply: vec![0; case.settings.reply_bytes()],
        };
        Ok((server, offers))
    }

    fn admit(&mut self, said: &[&[u8]]) -> Result<Vec<Vec<u8>>, Failure> {
        said.iter()
            .enumerate()
            .try_for_each(|(peer, said)| self.end.port.connect(peer, said))?;
        Ok(vec![Vec::new(); said.len()])
    }

    #[inline]
    fn step(&mut self) -> Result<usize, Failure> {
        let Self {
            end,
            answers,
            reply,
        } = self;
        let mut arrived = std::mem::take(&mut end.arrived);
        let taken = end.port.take(&mut arrived)?;
        for arrival in arrived.drain(..) {
            let (header, request) = end.read(arrival)?;
            answers.answer(request, reply);
            let session = usize::from(header.session);
            let place = session * end.shape.depth + usize::from(header.slot);
            end.write(place, header, reply)?;
            end.send(session, place)?;
        }
        end.arrived = arrived;
        end.post()?;
        end.port.ring();
        Ok(taken)
    }

    fn answers(&self) -> &Answers {
        &self.answers
    }

    fn registered_bytes(&self) -> u64 {
        (self.end.receives.len() + self.end.sends.len()) as u64
    }

    fn device_info(&self) -> DeviceInfo {
        self.end.device.info()
    }
}

pub(crate) struct SendClient<P> {
    end: End<P>,
    session: u16,
    next: u32,
    /// Numbers of the unanswered requests, by slot.
    unanswered: Vec<Option<u32>>,
}

impl<P: Port> Client for SendClient<P> {
    type Pending = Self;

    fn open(
        case: &Case,
        device: &Device,
        number: usize,
        offer: &[u8],
    ) -> Result<(Self::Pending, Vec<u8>), Failure> {
        let mut end = End::<P>::open(device, Shape::of_client(case), number)?;
        let said = end.port.record(0);
        end.port.connect(0, offer)?;
        let client = Self {
            end,
            session: number as u16,
            next: 0,
            unanswered: vec![None; case.depth],
        };
        Ok((client, said))
    }

    fn admitted(pending: Self::Pending, _: &[u8]) -> Result<Self, Failure> {
        Ok(pending)
    }

    #[inline]
    fn issue(&mut self, slot: u32, request: &[u8]) -> Result<bool, Failure> {
        let number = self.next;
        let place = slot as usize;
        let waits = self.unanswered.get_mut(place);
        *waits.ok_or("there is no such slot")? = Some(number);
        self.next = number.wrapping_add(1);
        let header = Header {
            session: self.session,
            slot: slot as u16,
            number,
        };
        self.end.write(place, header, request)?;
        self.end.send(0, place)?;
        Ok(true)
    }

    #[inline]
    fn poll<W: Content>(&mut self, calls: &mut Calls<'_, W>) -> Result<(), Failure> {
        let Self {
            end, unanswered, ..
        } = self;
        end.post()?;
        end.port.ring();
        let mut arrived = std::mem::take(&mut end.arrived);
        end.port.take(&mut arrived)?;
        for arrival in arrived.drain(..) {
            let (header, reply) = end.read(arrival)?;
            let waits = unanswered
                .get_mut(usize::from(header.slot))
                .and_then(Option::take);
            if waits != Some(header.number) {
                return Err(format!("a reply that nothing waits for: {header:?}").into());
            }
            calls.ended(header.slot.into(), Some(reply));
        }
        end.arrived = arrived;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use benchkv_harness::clock::Clock;
    use mlx5::{FabricSpec, LocalFabric, SoftOptions};

    use super::super::calls::Shared;
    use super::super::case::Kind;
    use super::super::case::tests::case;
    use super::super::load::{Caller, Patterns};
    use super::*;

    #[test]
    fn a_header_reads_back_as_written() {
        let header = Header {
            session: 0x1234,
            slot: 0x5678,
            number: 0x9abc_def0,
        };
        let message = [&header.encode()[..], b"payload"].concat();
        assert_eq!(Header::decode(&message), Some((header, &b"payload"[..])));
        assert_eq!(Header::decode(&message[..7]), None);
    }

    /// Makes a server, and the second of its two clients.
    fn ends<P: Port>() -> (SendServer<P>, SendClient<P>) {
        let fabric = FabricSpec::Local(LocalFabric::new());
        let device = DeviceSpec::Soft(SoftOptions {
            fabric,
            arena_bytes: 1 << 30,
            ..SoftOptions::default()
        });
        let case = case(Kind::RcSend, 2, "--payload 16");
        let (mut server, offers) =
            SendServer::<P>::open(&case, &device, Answers::new(&case)).unwrap();
        let clients: Vec<_> = (0..2)
            .map(|number| {
                SendClient::<P>::open(
                    &case,
                    &Device::open(&device).unwrap(),
                    number,
                    &offers[number],
                )
                .unwrap()
            })
            .collect();
        server
            .admit(
                &clients
                    .iter()
                    .map(|(_, said)| &said[..])
                    .collect::<Vec<_>>(),
            )
            .unwrap();
        (server, clients.into_iter().nth(1).unwrap().0)
    }

    fn sound_calls_are_answered_and_others_end_the_run<P: Port>() {
        let forge = |end: &mut End<P>, peer, place, header| {
            end.write(place, header, &[0; 16]).unwrap();
            end.send(peer, place).unwrap();
            end.port.ring();
        };
        let (mut server, client) = ends::<P>();
        let patterns = Patterns(server.answers.settings);
        let mut caller = Caller::new(client, patterns, 1, 1, 2);
        let mut shared = Shared::new(Clock::monotonic(), 16);
        // The number of calls is many times the number of receives.
        for number in 1..=100 {
            shared.left = 1;
            caller.call(&mut shared).unwrap();
            caller.take(&mut shared).unwrap();
            assert_eq!(caller.book.unanswered(), 1);
            assert!(server.step().unwrap() > 0);
            caller.take(&mut shared).unwrap();
            assert_eq!((caller.book.ended, caller.book.bad_replies), (number, 0));
        }
        assert_eq!(
            (server.answers.answered(), server.answers.bad_requests()),
            (100, 0)
        );
        // Forge a reply to a call that has ended.
        forge(
            &mut server.end,
            1,
            3,
            Header {
                session: 1,
                slot: 1,
                number: 99,
            },
        );
        assert!(
            caller
                .take(&mut shared)
                .unwrap_err()
                .to_string()
                .contains("nothing waits for")
        );

        for header in [
            Header {
                session: 2,
                slot: 0,
                number: 0,
            },
            Header {
                session: 1,
                slot: 2,
                number: 0,
            },
        ] {
            let (mut server, mut client) = ends::<P>();
            forge(&mut client.end, 0, 0, header);
            assert!(
                server
                    .step()
                    .unwrap_err()
                    .to_string()
                    .contains("a message that is none"),
                "{header:?}"
            );
            assert_eq!(server.answers.answered(), 0);
        }
    }

    #[test]
    fn on_connections() {
        sound_calls_are_answered_and_others_end_the_run::<RcPort>();
        // Forge a request of another client's session. Only connections detect it: datagrams do not
        // identify their sender.
        let (mut server, mut client) = ends::<RcPort>();
        client
            .end
            .write(
                0,
                Header {
                    session: 0,
                    slot: 0,
                    number: 0,
                },
                &[0; 16],
            )
            .unwrap();
        client.end.send(0, 0).unwrap();
        client.end.port.ring();
        assert!(
            server
                .step()
                .unwrap_err()
                .to_string()
                .contains("a message that is none")
        );
    }

    #[test]
    fn as_datagrams() {
        sound_calls_are_answered_and_others_end_the_run::<UdPort>();
    }
}
