//! The choice of a client among several servers.

/// The policy of a client that chooses among equal servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Choice {
    /// Each server in turn.
    RoundRobin,
    /// The server with the fewest calls outstanding; among equals, the server whose turn is next.
    LeastOutstanding,
}

/// A chooser of servers, which remembers whose turn is next.
#[derive(Clone, Debug)]
pub struct Chooser {
    choice: Choice,
    next: usize,
}

impl Chooser {
    /// Makes a chooser that begins with server 0.
    #[must_use]
    pub const fn new(choice: Choice) -> Self {
        Self { choice, next: 0 }
    }

    /// Returns the number of a server. `outstanding` has the calls under way of each server. Returns `None` if there are no servers.
    pub fn choose(&mut self, outstanding: &[usize]) -> Option<usize> {
        let servers = outstanding.len();
        let mut in_turn = (0..servers).map(|i| (self.next + i) % servers);
        let chosen = match self.choice {
            Choice::RoundRobin => in_turn.next(),
            Choice::LeastOutstanding => in_turn.min_by_key(|server| outstanding[*server]),
        }?;
        self.next = (chosen + 1) % servers;
        Some(chosen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_server_has_its_turn_or_the_least_loaded_has() {
        let mut chooser = Chooser::new(Choice::RoundRobin);
        assert_eq!([(); 4].map(|()| chooser.choose(&[9, 0, 0])), [Some(0), Some(1), Some(2), Some(0)]);
        assert_eq!(chooser.choose(&[5]), Some(0));
        assert_eq!(chooser.choose(&[]), None);
        let mut chooser = Chooser::new(Choice::LeastOutstanding);
        assert_eq!(chooser.choose(&[2, 1, 3]), Some(1));
        assert_eq!([(); 3].map(|()| chooser.choose(&[1, 1, 1])), [Some(2), Some(0), Some(1)]);
    }
}
