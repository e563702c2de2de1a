//! The text that gives a child process its role.

use shm::memfd::MemfdId;

/// Maximum size of an echoed message, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 4096;

/// A role as a text, which the child parses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RoleText {
    Rank {
        rank: usize,
        size: usize,
    },
    Echo {
        reply_bytes: usize,
    },
    /// Both sides yield while they wait, unless each has a `core` of its own.
    PingPong {
        memory: MemfdId,
        core: Option<usize>,
    },
}

impl RoleText {
    pub(crate) fn encode(self) -> String {
        match self {
            Self::Rank { rank, size } => format!("rank:{rank}:{size}"),
            Self::Echo { reply_bytes } => format!("echo:{reply_bytes}"),
            Self::PingPong { memory: MemfdId { token, bytes, pid, fd }, core } => {
                let core = core.map_or_else(|| "any".to_owned(), |core| core.to_string());
                format!("ping-pong:{token}:{bytes}:{pid}:{fd}:{core}")
            }
        }
    }

    pub(crate) fn decode(text: &str) -> Option<Self> {
        let mut words = text.split(':');
        let role = words.next()?;
        let mut number = || words.next()?.parse::<u64>().ok();
        let decoded = match role {
            "rank" => Self::Rank { rank: number()? as usize, size: number()? as usize },
            "echo" => Self::Echo { reply_bytes: number()? as usize },
            "ping-pong" => {
                let (token, bytes) = (number()?, number()?);
                let memory = MemfdId { token, bytes, pid: number()?.try_into().ok()?, fd: number()?.try_into().ok()? };
                let core = words.next()?;
                Self::PingPong { memory, core: if core == "any" { None } else { Some(core.parse().ok()?) } }
            }
            _ => return None,
        };
        let sound = match decoded {
            Self::Rank { rank, size } => rank < size,
            Self::Echo { reply_bytes } => (1..=MAX_MESSAGE_BYTES).contains(&reply_bytes),
            // Attaching checks the memory.
            Self::PingPong { .. } => true,
        };
        (sound && words.next().is_none()).then_some(decoded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_reads_back_as_written() {
        let memory = MemfdId { token: u64::MAX, bytes: 4096, pid: 7, fd: 3 };
        let ping_pongs = [None, Some(5)].map(|core| RoleText::PingPong { memory, core });
        for text in [RoleText::Rank { rank: 3, size: 8 }, RoleText::Echo { reply_bytes: 16 }].into_iter().chain(ping_pongs) {
            assert_eq!(RoleText::decode(&text.encode()), Some(text));
        }
    }

    #[test]
    fn a_role_nobody_wrote_is_refused() {
        for text in [
            "",
            "rank",
            "rank:1",
            "rank:2:2",
            "rank:0:2:9",
            "rank:-1:2",
            "echo:0",
            "echo:1:2",
            "launcher",
            "echo:9999999",
            "ping-pong:1:2:3:4",
            "ping-pong:1:2:3:4:x",
        ] {
            assert_eq!(RoleText::decode(text), None, "{text:?}");
        }
    }
}
