//! The connection records of all endpoints of all ranks: after one gather each endpoint has the
//! record of its other end.

use std::collections::HashMap;

use engine::backend::Records;
use engine::topology::{Peer, Worker};
use serde::{Deserialize, Serialize};

/// A connection record, the thread that made it, and the peer that needs it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) from: Worker,
    pub(super) to: Peer,
    pub(super) bytes: Vec<u8>,
}

/// The records that other ranks made for the endpoints of each thread, each record with its maker.
pub(super) type Mail = HashMap<Worker, Records>;

pub(super) fn encode(records: &[Record]) -> Vec<u8> {
    // Encoding fails only for types without a length, and a record has none of these.
    postcard::to_allocvec(records).unwrap_or_default()
}

/// Finds the record of the other end for each of `mine`. `parts` has the encoded records of each
/// rank.
///
/// # Errors
/// The rank whose part is malformed or lacks a record.
pub(super) fn deliver(rank: usize, mine: &[Record], parts: &[Vec<u8>]) -> Result<Mail, usize> {
    let mut for_me = HashMap::new();
    for (sender, part) in parts
        .iter()
        .enumerate()
        .filter(|(sender, _)| *sender != rank)
    {
        let records: Vec<Record> = postcard::from_bytes(part).map_err(|_| sender)?;
        let addressed = records.into_iter().filter(|record| record.to.rank == rank);
        for_me.extend(addressed.map(|record| {
            (
                (
                    Peer {
                        rank: sender,
                        worker: record.from,
                    },
                    record.to.worker,
                ),
                record.bytes,
            )
        }));
    }
    let mut mail = Mail::new();
    for Record { from, to, .. } in mine {
        let bytes = for_me.remove(&(*to, *from)).ok_or(to.rank)?;
        mail.entry(*from).or_default().push((*to, bytes));
    }
    Ok(mail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use Worker::{Client, Daemon};

    fn record(from: Worker, rank: usize, worker: Worker, text: &str) -> Record {
        Record {
            from,
            to: Peer { rank, worker },
            bytes: text.as_bytes().to_vec(),
        }
    }

    #[test]
    fn each_end_gets_the_record_of_the_other_end() {
        let zero = [
            record(Client(0), 1, Daemon(1), "a"),
            record(Client(1), 1, Daemon(1), "bc"),
            record(Daemon(1), 2, Client(0), "d"),
        ];
        let one = [
            record(Daemon(1), 0, Client(1), "to 1"),
            record(Daemon(1), 0, Client(0), ""),
            record(Daemon(0), 2, Daemon(0), "e"),
        ];
        let two = [
            record(Client(0), 0, Daemon(1), "f"),
            record(Daemon(0), 1, Daemon(0), "g"),
        ];
        let parts = [&zero[..], &one, &two].map(encode);
        let peer = |rank, worker| Peer { rank, worker };
        let mail = deliver(0, &zero, &parts).unwrap();
        assert_eq!(mail[&Client(0)], [(peer(1, Daemon(1)), b"".to_vec())]);
        assert_eq!(mail[&Client(1)], [(peer(1, Daemon(1)), b"to 1".to_vec())]);
        assert_eq!(mail[&Daemon(1)], [(peer(2, Client(0)), b"f".to_vec())]);
        assert_eq!(
            deliver(2, &two, &parts).unwrap()[&Daemon(0)],
            [(peer(1, Daemon(0)), b"e".to_vec())]
        );
    }

    #[test]
    fn a_part_that_lacks_a_record_or_is_none_names_its_rank() {
        let mine = [record(Daemon(0), 1, Daemon(0), "mine")];
        let theirs = encode(&[record(Daemon(0), 0, Daemon(0), "theirs")]);
        let deliver = |part: &[u8]| deliver(0, &mine, &[encode(&mine), part.to_vec()]);
        assert_eq!(deliver(&theirs).unwrap().len(), 1);
        assert_eq!(
            deliver(&encode(&[record(Daemon(1), 0, Daemon(0), "theirs")])),
            Err(1),
            "by another thread"
        );
        assert_eq!(
            deliver(&encode(&[record(Daemon(0), 0, Client(0), "theirs")])),
            Err(1),
            "for another thread"
        );
        for length in 0..theirs.len() {
            assert_eq!(
                deliver(&theirs[..length]),
                Err(1),
                "cut after {length} bytes"
            );
        }
    }
}
