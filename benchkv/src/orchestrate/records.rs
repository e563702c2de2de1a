//! The connection records of all endpoints of all ranks: after one gather each endpoint has the record of its other end.
//!
//! A record in a rank's part: its maker (4 bytes), the rank it is for (4), the thread of that rank (4), its length (4), its bytes.
//! Numbers are little-endian. A thread is twice its number, plus 1 for a client.

use std::collections::HashMap;

use engine::backend::Records;
use engine::topology::{Peer, Worker};

const HEADER_BYTES: usize = 16;

/// A record with its addressee.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Record {
    pub(super) from: Worker,
    pub(super) to: Peer,
    pub(super) bytes: Vec<u8>,
}

/// By thread: the records that other ranks made for its endpoints, each with its maker.
pub(super) type Mail = HashMap<Worker, Records>;

pub(super) fn encode(records: &[Record]) -> Vec<u8> {
    let mut part = Vec::with_capacity(records.iter().map(|record| HEADER_BYTES + record.bytes.len()).sum());
    for Record { from, to, bytes } in records {
        for number in [code_of(*from), to.rank as u32, code_of(to.worker), bytes.len() as u32] {
            part.extend_from_slice(&number.to_le_bytes());
        }
        part.extend_from_slice(bytes);
    }
    part
}

/// Decodes a part. Returns `None` for bytes that are not records.
fn decode(mut part: &[u8]) -> Option<Vec<Record>> {
    let mut records = Vec::new();
    while !part.is_empty() {
        let (header, rest) = part.split_first_chunk::<HEADER_BYTES>()?;
        let number = |at: usize| header.get(4 * at..4 * at + 4)?.try_into().ok().map(u32::from_le_bytes);
        let (bytes, rest) = rest.split_at_checked(number(3)? as usize)?;
        let to = Peer { rank: number(1)? as usize, worker: worker_of(number(2)?) };
        records.push(Record { from: worker_of(number(0)?), to, bytes: bytes.to_vec() });
        part = rest;
    }
    Some(records)
}

/// Finds, for each of `mine`, the record of its other end among the parts of all ranks.
///
/// # Errors
/// The rank whose part is malformed or lacks a record.
pub(super) fn deliver(rank: usize, mine: &[Record], parts: &[Vec<u8>]) -> Result<Mail, usize> {
    let mut for_me = HashMap::new();
    for (sender, part) in parts.iter().enumerate().filter(|(sender, _)| *sender != rank) {
        let records = decode(part).ok_or(sender)?;
        let addressed = records.into_iter().filter(|record| record.to.rank == rank);
        for_me.extend(addressed.map(|record| ((Peer { rank: sender, worker: record.from }, record.to.worker), record.bytes)));
    }
    let mut mail = Mail::new();
    for Record { from, to, .. } in mine {
        let bytes = for_me.remove(&(*to, *from)).ok_or(to.rank)?;
        mail.entry(*from).or_default().push((*to, bytes));
    }
    Ok(mail)
}

const fn code_of(worker: Worker) -> u32 {
    match worker {
        Worker::Daemon(number) => 2 * number as u32,
        Worker::Client(number) => 2 * number as u32 + 1,
    }
}

const fn worker_of(code: u32) -> Worker {
    let number = (code / 2) as usize;
    if code % 2 == 0 { Worker::Daemon(number) } else { Worker::Client(number) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Worker::{Client, Daemon};

    fn record(from: Worker, rank: usize, worker: Worker, text: &str) -> Record {
        Record { from, to: Peer { rank, worker }, bytes: text.as_bytes().to_vec() }
    }

    #[test]
    fn each_end_gets_the_record_of_the_other_end() {
        let zero = [record(Client(0), 1, Daemon(1), "a"), record(Client(1), 1, Daemon(1), "bc"), record(Daemon(1), 2, Client(0), "d")];
        let one = [record(Daemon(1), 0, Client(1), "to 1"), record(Daemon(1), 0, Client(0), ""), record(Daemon(0), 2, Daemon(0), "e")];
        let two = [record(Client(0), 0, Daemon(1), "f"), record(Daemon(0), 1, Daemon(0), "g")];
        let parts = [&zero[..], &one, &two].map(encode);
        let peer = |rank, worker| Peer { rank, worker };
        let mail = deliver(0, &zero, &parts).unwrap();
        assert_eq!(mail[&Client(0)], [(peer(1, Daemon(1)), b"".to_vec())]);
        assert_eq!(mail[&Client(1)], [(peer(1, Daemon(1)), b"to 1".to_vec())]);
        assert_eq!(mail[&Daemon(1)], [(peer(2, Client(0)), b"f".to_vec())]);
        assert_eq!(deliver(2, &two, &parts).unwrap()[&Daemon(0)], [(peer(1, Daemon(0)), b"e".to_vec())]);
    }

    #[test]
    fn a_part_that_lacks_a_record_or_is_none_names_its_rank() {
        let mine = [record(Daemon(0), 1, Daemon(0), "mine")];
        let theirs = encode(&[record(Daemon(0), 0, Daemon(0), "theirs")]);
        let deliver = |part: &[u8]| deliver(0, &mine, &[encode(&mine), part.to_vec()]);
        assert_eq!(deliver(&theirs).unwrap().len(), 1);
        assert_eq!(deliver(&encode(&[record(Daemon(1), 0, Daemon(0), "theirs")])), Err(1), "by another thread");
        assert_eq!(deliver(&encode(&[record(Daemon(0), 0, Client(0), "theirs")])), Err(1), "for another thread");
        for length in 0..theirs.len() {
            assert_eq!(deliver(&theirs[..length]), Err(1), "cut after {length} bytes");
        }
    }
}
