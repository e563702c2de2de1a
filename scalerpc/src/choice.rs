//! Which of several servers a client asks.

/// How a client chooses among equal servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Choice {
    /// One after the other.
    RoundRobin,
    /// The one with the fewest calls outstanding; of equals the one whose turn is next.
    LeastOutstanding,
}

/// Chooses servers; remembers whose turn is next.
#[derive(Clone, Debug)]
pub struct Chooser {
    choice: Choice,
    next: usize,
}

impl Chooser {
    /// Begins with server 0.
    #[must_use]
    pub const fn new(choice: Choice) -> Self {
        Self { choice, next: 0 }
    }

    /// Number of a server; `outstanding` has the calls under way of each. `None` if there are no servers.
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
