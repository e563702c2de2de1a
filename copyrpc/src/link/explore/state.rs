//! The state of a [`World`] as bytes.

use super::Coder;
use super::names::Names;
use super::world::{Read, Turn, World};
use crate::link::Link;
use crate::ring::RingView;
use crate::wire::{FlowMetadata, FlowWords, Header, METADATA_SPAN, WRAP_MESSAGE_COUNT, padded};

impl World {
    /// Saves the state as bytes. Two states with the same bytes behave the same. If the sides have
    /// the same parameters, two states that are each other's mirror image have the same bytes too.
    pub(super) fn save(&mut self, bytes: &mut Vec<u8>) {
        let is_symmetric = self.setup.is_symmetric();
        // Of two mirror images, the image with the lesser bytes is saved. The first byte is the
        // turn, and is lesser in the image that begins with the side whose turn it is.
        let (first, has_image) = match self.turn {
            Turn::Takes(side) | Turn::Acts(side) if is_symmetric => (side, false),
            _ => (0, is_symmetric),
        };
        bytes.clear();
        self.walk_saving(first);
        bytes.extend_from_slice(self.coder.bytes());
        if has_image {
            self.walk_saving(1);
            if self.coder.bytes() < &bytes[..] {
                bytes.clear();
                bytes.extend_from_slice(self.coder.bytes());
            }
        }
    }

    pub(super) fn restore(&mut self, bytes: &[u8]) {
        self.coder.begin_restoring(bytes);
        self.walk(0);
    }

    fn walk_saving(&mut self, first: usize) {
        self.coder.begin_saving();
        self.walk(first);
    }

    fn walk(&mut self, first: usize) {
        let Self {
            setup: _,
            links,
            arrived,
            reads,
            turn,
            made,
            coder,
            names,
        } = self;
        let order = [first, 1 - first];
        names.begin();
        code_turn(coder, turn, first);
        for side in order {
            coder.count(&mut made[side]);
            std::mem::swap(&mut names.calls[side], &mut links[side].calls);
        }
        for side in order {
            links[side].tx.code(coder);
        }
        for side in order {
            code_direction(coder, names, links, side);
        }
        for side in order {
            code_words(coder, links, side);
            for (start, count) in links[side].tx.unposted_parts() {
                code_messages(coder, names, side, links[side].tx.view(), start, count);
            }
            code_arrived(coder, names, links, &mut arrived[1 - side], side);
            code_read(coder, &mut links[side], &mut reads[side]);
        }
        names.end(coder, order);
        for side in order {
            let link = &mut links[side];
            std::mem::swap(&mut names.calls[side], &mut link.calls);
            link.tx.await_notices(link.calls.untold().is_some());
        }
    }
}

fn code_turn(coder: &mut Coder, turn: &mut Turn, first: usize) {
    let mut code = match *turn {
        Turn::Nobody => 0,
        Turn::Takes(side) => 1 + (side ^ first) as u32,
        Turn::Acts(side) => 3 + (side ^ first) as u32,
    };
    coder.count(&mut code);
    *turn = match code as usize {
        0 => Turn::Nobody,
        code @ 1..=2 => Turn::Takes((code - 1) ^ first),
        code => Turn::Acts((code - 3) ^ first),
    };
}

/// Returns the newest words of its peer that `link` has taken.
fn known(link: &Link<u8>) -> FlowWords {
    let [consumer_pos, ..] = link.tx.positions();
    FlowWords {
        consumer_pos,
        credit: link.credit.granted(),
        batches_received: link.tx.batches_received(),
    }
}

/// Codes the receiver of `side`'s messages, and the credit it granted.
fn code_direction(coder: &mut Coder, names: &mut Names, links: &mut [Link<u8>; 2], side: usize) {
    let [consumer_pos, ..] = links[side].tx.positions();
    let batches_received = links[side].tx.batches_received();
    let receiver = &mut links[1 - side];
    receiver
        .rx
        .code(coder, consumer_pos, batches_received, |coder, held| {
            names.held(coder, side, held)
        });
    receiver.reservation.code(coder);
    let released = receiver.reservation.released();
    links[side].credit.code(coder, released);
}

/// Codes words on their way to an end that knows `known`. Words are only compared with the known
/// words, and the newer of the two counts (F1 of docs/copyrpc-protocol.md): so words older than
/// `known` are equivalent to words equal to it.
fn code_heard(coder: &mut Coder, words: &mut FlowWords, known: FlowWords) {
    let FlowWords {
        consumer_pos,
        credit,
        batches_received,
    } = words;
    if !coder.restores() {
        *consumer_pos = (*consumer_pos).max(known.consumer_pos);
        *credit = (*credit).max(known.credit);
        *batches_received = (*batches_received).max(known.batches_received);
    }
    coder.span(consumer_pos, known.consumer_pos);
    coder.span(credit, known.credit);
    coder.number(batches_received, known.batches_received, 1);
}

/// Codes the words that a link sent and received.
///
/// There is no clock here: no keep-alive, no heartbeat (a deadline is an early end, which can come
/// at any moment), no window, and no graceful end. The pause after READs without news is left out,
/// since it only postpones a READ by a bounded number of polls (L5). The minima of received words
/// are not coded: they matter only for peers that send false words. The world asserts that no word
/// decreases, when it is sent.
fn code_words(coder: &mut Coder, links: &mut [Link<u8>; 2], side: usize) {
    let (peer_knows, knows) = (known(&links[1 - side]), known(&links[side]));
    let link = &mut links[side];
    let ring = link.tx.size().bytes();
    let Link {
        limits: _,
        tx: _,
        rx,
        reservation,
        credit: _,
        calls: _,
        closed: _,
        ending: _,
        closing: _,
        told_by_batch,
        is_unpublished,
        heard_by_batch,
        heard_by_read,
        last_read,
        reads_whole_words: _,
        read_in_flight: _,
        read_is_probe: _,
        starved,
        backoff: _,
        window: _,
        watch: _,
        idle: _,
        heartbeat: _,
        heard_heartbeat: _,
        is_suspicious: _,
        asks_activity: _,
        heard_activity: _,
        stats,
    } = link;
    let mut published = rx.told();
    assert!(
        coder.restores() || !*is_unpublished,
        "each serve publishes what it told, or newer"
    );
    *is_unpublished = false;
    code_heard(coder, &mut published, peer_knows);
    coder.flag(starved);
    // L4 tests whether the news since the last batch has reached a limit. News only grows: above
    // the limit, its amount does not matter.
    let (mut consumed, mut granted) = (0, 0);
    if !coder.restores() {
        consumed = (rx.consumer_pos() - told_by_batch.consumer_pos).min(ring / 8);
        granted = (reservation.granted() - told_by_batch.credit).min(ring / 16);
    }
    coder.span(&mut consumed, 0);
    coder.span(&mut granted, 0);
    if coder.restores() {
        rx.note_told(published);
        told_by_batch.consumer_pos = rx.consumer_pos() - consumed;
        told_by_batch.credit = reservation.granted() - granted;
        (*heard_by_batch, *heard_by_read, *last_read) = (knows, knows, knows);
        *stats = Default::default();
    }
}

/// Codes consecutive messages in a ring, from `start`. Their payload has no effect, so it is not
/// kept.
fn code_messages(
    coder: &mut Coder,
    names: &mut Names,
    sender: usize,
    ring: &RingView,
    start: u64,
    count: u32,
) -> u64 {
    let mut at = start;
    for _ in 0..count {
        let mut header = Header::decode(&ring.copy_out(at));
        names.message(coder, sender, *ring, at, &mut header);
        if coder.restores() {
            ring.copy_in(at, &header.encode());
        }
        at += padded(u64::from(header.len));
    }
    at
}

/// Codes the batches that `side` sent and the other side has not polled.
fn code_arrived(
    coder: &mut Coder,
    names: &mut Names,
    links: &mut [Link<u8>; 2],
    arrived: &mut std::collections::VecDeque<u64>,
    side: usize,
) {
    let receiver = &links[1 - side];
    let (knows, ring) = (known(receiver), *receiver.rx.view());
    let mut at = receiver.rx.parsed();
    let mut batches = arrived.len() as u32;
    coder.count(&mut batches);
    arrived.resize(batches as usize, 0);
    for span in arrived {
        let mut metadata = FlowMetadata::decode(&ring.copy_out(at)).unwrap_or(FlowMetadata {
            words: knows,
            message_count: 0,
            is_closing: false,
        });
        let mut is_marker = metadata.message_count == WRAP_MESSAGE_COUNT;
        coder.flag(&mut is_marker);
        code_heard(coder, &mut metadata.words, knows);
        let end = if is_marker {
            metadata.message_count = WRAP_MESSAGE_COUNT;
            at + ring.size().to_end(at)
        } else {
            coder.count(&mut metadata.message_count);
            code_messages(
                coder,
                names,
                side,
                &ring,
                at + METADATA_SPAN,
                metadata.message_count,
            )
        };
        if coder.restores() {
            ring.copy_in(at, &metadata.encode());
            *span = end - at;
        }
        assert_eq!(*span, end - at, "the messages fill their batch");
        at = end;
    }
    let [_, posted, _] = links[side].tx.positions();
    assert_eq!(at, posted);
}

fn code_read(coder: &mut Coder, link: &mut Link<u8>, read: &mut Read) {
    let mut stage = match read {
        Read::None => 0,
        Read::Posted => 1,
        Read::Executed(_) => 2,
    };
    coder.count(&mut stage);
    let knows = known(link);
    let mut words = if let Read::Executed(words) = *read {
        words
    } else {
        knows
    };
    if stage == 2 {
        code_heard(coder, &mut words, knows);
    }
    if coder.restores() {
        *read = [Read::None, Read::Posted, Read::Executed(words)][stage as usize];
        link.read_in_flight = stage > 0;
    }
    assert_eq!(link.read_in_flight, stage > 0);
}
