//! The text that gives a child process its role.

use copyrpc_shm::memfd::MemfdId;
use serde::{Deserialize, Serialize};

/// Maximum size of an echoed message, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 4096;

/// A role as a text, which the child parses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) enum RoleText {
    Rank {
        rank: usize,
        size: usize,
    },
    Echo {
        reply_bytes: usize,
    },
    /// The two sides yield their cores while they wait, unless each side has a `core` of its own.
    PingPong {
        #[serde(with = "Memory")]
        memory: MemfdId,
        core: Option<usize>,
    },
}

/// The fields of a [`MemfdId`].
#[derive(Serialize, Deserialize)]
#[serde(remote = "MemfdId", deny_unknown_fields)]
struct Memory {
    token: u64,
    bytes: u64,
    pid: u32,
    fd: u32,
}

impl RoleText {
    pub(crate) fn encode(self) -> String {
        // Encoding fails only for maps, and a role contains none.
        serde_json::to_string(&self).unwrap_or_default()
    }

    pub(crate) fn decode(text: &str) -> Option<Self> {
        let is_sound = |role: &Self| match *role {
            Self::Rank { rank, size } => rank < size,
            Self::Echo { reply_bytes } => (1..=MAX_MESSAGE_BYTES).contains(&reply_bytes),
            // The child checks the memory when it attaches it.
            Self::PingPong { .. } => true,
        };
        serde_json::from_str(text).ok().filter(is_sound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_reads_back_as_written() {
        let memory = MemfdId {
            token: u64::MAX,
            bytes: 4096,
            pid: 7,
            fd: 3,
        };
        let ping_pongs = [None, Some(5)].map(|core| RoleText::PingPong { memory, core });
        for text in [
            RoleText::Rank { rank: 3, size: 8 },
            RoleText::Echo { reply_bytes: 16 },
        ]
        .into_iter()
        .chain(ping_pongs)
        {
            assert_eq!(RoleText::decode(&text.encode()), Some(text));
        }
    }

    #[test]
    fn a_role_nobody_wrote_is_refused() {
        for text in [
            "",
            r#""rank""#,
            r#"{"rank":{"rank":1}}"#,
            r#"{"rank":{"rank":2,"size":2}}"#,
            r#"{"rank":{"rank":0,"size":2,"more":9}}"#,
            r#"{"rank":{"rank":0,"size":2}}9"#,
            r#"{"rank":{"rank":-1,"size":2}}"#,
            r#"{"echo":{"reply_bytes":0}}"#,
            r#"{"echo":{"reply_bytes":1,"size":2}}"#,
            r#""launcher""#,
            r#"{"launcher":{}}"#,
            r#"{"echo":{"reply_bytes":9999999}}"#,
            r#"{"ping-pong":{"memory":{"token":1,"bytes":2,"pid":3},"core":null}}"#,
            r#"{"ping-pong":{"memory":{"token":1,"bytes":2,"pid":3,"fd":4},"core":"x"}}"#,
        ] {
            assert_eq!(RoleText::decode(text), None, "{text:?}");
        }
    }
}
