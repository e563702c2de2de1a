//! A measurement: the contestants by name, and the values of the options for them.

use std::fmt;
use std::ops::RangeInclusive;

use benchkv_harness::range::whole;
use benchkv_harness::window::WindowChoice;
use clap::{ArgAction, ValueEnum};
use serde::Serialize;

/// Maximum number of receives of a shared receive queue, on software and mlx5 devices alike.
pub(crate) const MAX_SRQ_SIZE: u32 = (1 << 15) - 1;
/// The transport of the calls. Help, tables and documents use these names and descriptions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Kind {
    /// ScaleRPC: groups and time slices; the server WRITEs replies.
    Scalerpc,
    /// ScaleRPC without groups: all clients at once.
    ScalerpcOff,
    /// WRITE with immediate into a ring for each client, several messages in one.
    Copyrpc,
    /// A SEND for each message, a reliable connection for each client, one shared receive queue.
    RcSend,
    /// A datagram SEND for each message, as eRPC has it; not eRPC.
    UdSend,
}

impl Kind {
    /// Returns the maximum number of clients. With `ud-send` each client has a device of its own,
    /// because the software HCA keeps the datagrams of only one session between two devices without
    /// loss; a device takes 8 of the usual 1,024 descriptors of a process. With the other kinds all
    /// clients share a device.
    pub(crate) const fn max_clients(self) -> usize {
        if self.has_devices() { 112 } else { 1000 }
    }

    /// Returns the maximum number of calls that a client keeps unanswered. All contestants but
    /// copyrpc have the limit of datagrams: a software device keeps at most 32 datagrams of another
    /// software device without loss.
    pub(crate) const fn max_depth(self) -> usize {
        match self {
            Self::Copyrpc => 256,
            _ => 32,
        }
    }

    /// Returns the legal lengths of a request or a reply, in bytes. The minimum is the tag of a
    /// call. The maximum fits into a datagram with the header of its SEND, and into a ScaleRPC slot
    /// of 4 KiB. Only the rings limit copyrpc's messages, which need no tag, because copyrpc keeps
    /// their order.
    pub(crate) const fn payloads(self) -> RangeInclusive<usize> {
        match self {
            Self::Copyrpc => 0..=usize::MAX,
            _ => 8..=4056,
        }
    }

    /// Returns whether each client has a device of its own.
    pub(crate) const fn has_devices(self) -> bool {
        matches!(self, Self::UdSend)
    }

    /// Returns the help text of the variant, which explains the contestant's name under a table.
    pub(crate) fn what(self) -> String {
        self.to_possible_value()
            .and_then(|value| Some(value.get_help()?.to_string()))
            .unwrap_or_default()
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_possible_value()
            .map_or(Ok(()), |value| f.pad(value.get_name()))
    }
}

impl Serialize for Kind {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// The parameters of one measurement, which both processes know.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Case {
    pub(crate) kind: Kind,
    pub(crate) clients: usize,
    /// Number of endpoints with which each client calls.
    pub(crate) endpoints: usize,
    /// Calls that each endpoint keeps unanswered.
    pub(crate) depth: usize,
    pub(crate) settings: Settings,
}

/// The values of `--fault`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Fault {
    /// A caller flips a bit of one request.
    CorruptRequest,
    /// The answerer flips a bit of one reply.
    CorruptReply,
}

impl Fault {
    /// Flips a bit of message number 1, if `injected` is this fault.
    #[inline]
    pub(crate) fn inject(self, injected: Option<Self>, number: u64, message: &mut [u8]) {
        if injected == Some(self) && number == 1 {
            message.iter_mut().take(1).for_each(|byte| *byte ^= 1);
        }
    }
}

/// The options that contestants get.
#[derive(Debug, Clone, Copy, clap::Args, Serialize)]
pub(crate) struct Settings {
    /// Bytes of a request: 8 to 4056; with copyrpc from 0 to an eighth of the ring less 12.
    #[arg(long = "payload", value_name = "BYTES", default_value_t = 32)]
    pub(crate) payload_bytes: usize,

    /// Bytes of a reply: 8 to 4056; with copyrpc from 0 to 3/16 of the ring less 44 [default: as a
    /// request].
    #[arg(long = "reply", value_name = "BYTES")]
    reply_bytes: Option<usize>,

    /// Further endpoints that each client connects and does not use, 0 to 4096; with copyrpc only.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole(0..=4096_usize))]
    pub(crate) connected: usize,

    /// Bytes of each ring of copyrpc: a power of two, 4096 to 268435456 [default: four times what
    /// an endpoint keeps unanswered, 65536 to 1048576 where messages allow it].
    #[arg(long, value_name = "BYTES")]
    pub(crate) ring_size: Option<u64>,

    /// Batches each endpoint of copyrpc may have in flight [default: that of copyrpc, or fewer if
    /// the receives of a device are not enough].
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_SRQ_SIZE))]
    pub(crate) batches: Option<u32>,

    /// Limit of the small batches that an endpoint of copyrpc has under way, 1 to 256; further
    /// messages gather meanwhile. A batch is under way until its WRITE completes (completion), or
    /// until the peer reports that it has taken the batch (consumption). Or off.
    #[arg(
        long,
        value_name = "off|completion:N|consumption:N",
        default_value = "off"
    )]
    pub(crate) window: WindowChoice,

    /// Receives of copyrpc's shared receive queue, 1 to 32767 [default: that of copyrpc, or more
    /// for the endpoints].
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_SRQ_SIZE))]
    pub(crate) srq_size: Option<u32>,

    /// Entries of each completion queue of copyrpc, 1 to 4194304 [default: by the receives].
    #[arg(long, value_name = "N", value_parser = whole(1..=4_194_304_u32))]
    pub(crate) cq_size: Option<u32>,

    /// Clients of a group of ScaleRPC, 1 to 50.
    #[arg(long = "group", value_name = "N", default_value_t = scalerpc::protocol::groups::DEFAULT_GROUP_SIZE)]
    pub(crate) group_size: u32,

    /// Check every payload in both processes; the pattern and the check cost each side some tens of
    /// instructions per 32 bytes.
    #[arg(long, value_name = "BOOL", default_value_t = true, default_missing_value = "true", num_args = 0..=1, require_equals = true, action = ArgAction::Set)]
    pub(crate) verify: bool,

    /// Inject a fault, for tests.
    #[arg(long, value_enum, hide = true)]
    pub(crate) fault: Option<Fault>,
}

impl Settings {
    pub(crate) fn reply_bytes(&self) -> usize {
        self.reply_bytes.unwrap_or(self.payload_bytes)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Length {
    Seconds(f64),
    Calls(u64),
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser;

    use super::*;

    /// Makes a case of two clients. The settings are parsed from `args`.
    pub(crate) fn case(kind: Kind, depth: usize, args: &str) -> Case {
        #[derive(Debug, Parser)]
        struct Cli {
            #[command(flatten)]
            settings: Settings,
        }
        let args = std::iter::once("case").chain(args.split_whitespace());
        Case {
            kind,
            clients: 2,
            endpoints: 1,
            depth,
            settings: Cli::parse_from(args).settings,
        }
    }

    #[test]
    fn each_contestant_has_a_name_and_says_what_it_is() {
        let kinds = Kind::value_variants();
        assert_eq!(
            kinds.iter().map(Kind::to_string).collect::<Vec<_>>(),
            ["scalerpc", "scalerpc-off", "copyrpc", "rc-send", "ud-send"]
        );
        assert!(kinds.iter().all(|kind| !kind.what().is_empty()));
        assert!(Kind::UdSend.what().ends_with("not eRPC"));
    }
}
