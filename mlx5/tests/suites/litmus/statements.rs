//! The texts of litmus programs, parsed.

use std::collections::BTreeSet;

/// Number of nodes.
pub(crate) const NODES: usize = 3;
/// Number of words of a node, and of registers: the letters.
pub(crate) const LETTERS: usize = 26;

/// A word: its node, and its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word {
    pub(crate) node: usize,
    pub(crate) index: usize,
}

/// A queue pair of a thread: the node to which it leads, and whether it is the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Way {
    pub(crate) to: usize,
    pub(crate) is_second: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Remote {
    Put,
    Get,
    FetchAdd(u64),
    CompareSwap(u64, u64),
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Statement {
    Store(Word, u64),
    Load(usize, Word),
    Wait(Word),
    Post {
        what: Remote,
        way: Way,
        local: Word,
        remote: Word,
        has_fence: bool,
    },
    Poll(Way),
}

/// A value of an outcome.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    Register(usize),
    Word(Word),
}

fn letter(text: &str) -> usize {
    let letter = text.as_bytes()[0];
    assert!(letter.is_ascii_lowercase(), "{text}");
    usize::from(letter - b'a')
}

fn word(text: &str) -> Word {
    let node = text[1..].parse().unwrap();
    assert!(node < NODES, "{text}");
    Word {
        node,
        index: letter(text),
    }
}

/// Parses the statements of a thread of `node`.
pub(crate) fn statements(node: usize, text: &str) -> Vec<Statement> {
    text.split(';')
        .map(|text| statement(node, text.trim()))
        .collect()
}

fn statement(node: usize, text: &str) -> Statement {
    let own = |text| {
        let word = word(text);
        assert_eq!(word.node, node, "{text}");
        word
    };
    let mut parts = text.split(' ').collect::<Vec<_>>();
    let has_fence = parts[0] == "fence";
    if has_fence {
        parts.remove(0);
    }
    let (name, is_second) = match parts[0].strip_suffix('\'') {
        Some(name) => (name, true),
        None => (parts[0], false),
    };
    let number = |at: usize| parts[at].parse::<u64>().unwrap();
    let what = match name {
        "poll" => {
            let to = number(1) as usize;
            return Statement::Poll(Way { to, is_second });
        }
        "wait" => return Statement::Wait(own(parts[1])),
        "put" => Remote::Put,
        "get" => Remote::Get,
        "faa" => Remote::FetchAdd(number(3)),
        "cas" => Remote::CompareSwap(number(3), number(4)),
        to if to.len() == 1 => return Statement::Load(letter(to), own(parts[2])),
        to => return Statement::Store(own(to), number(2)),
    };
    let (first, second) = (parts[1], parts[2]);
    let (local, remote) = if matches!(what, Remote::Put) {
        (own(second), word(first))
    } else {
        (own(first), word(second))
    };
    let to = remote.node;
    assert_ne!(to, node, "{text}");
    Statement::Post {
        what,
        way: Way { to, is_second },
        local,
        remote,
        has_fence,
    }
}

/// Parses a list of values, such as `a=1 y1=0`.
pub(crate) fn values(text: &str) -> Vec<(Place, u64)> {
    text.split_whitespace()
        .map(|text| {
            let (name, value) = text.split_once('=').unwrap();
            let place = match name.len() {
                1 => Place::Register(letter(name)),
                _ => Place::Word(word(name)),
            };
            (place, value.parse().unwrap())
        })
        .collect()
}

/// Returns the queue pairs that these statements use.
pub(crate) fn ways(statements: &[Statement]) -> BTreeSet<Way> {
    statements
        .iter()
        .filter_map(|statement| match statement {
            Statement::Post { way, .. } => Some(*way),
            _ => None,
        })
        .collect()
}
