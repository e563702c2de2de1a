//! A client that connected through a socket, and announces through it that it disconnects.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use scalerpc::mlx5::Device;
use scalerpc::rdma::RdmaOptions;
use scalerpc::rdma::SetupError;
use scalerpc::rdma::exchange::RecordError;
use scalerpc::{CallFailure, CloseReason, RdmaClient, State};

use crate::support::caller::Caller;

/// A timeout that no call reaches unless the client was stopped, in ns.
const TIMEOUT_NS: u64 = 100_000_000_000;

pub(crate) struct Guest {
    pub(crate) caller: Caller,
    channel: UnixStream,
}

impl Guest {
    /// Connects to the server over a socket, which gives the client its name. Returns `None` if the
    /// server is full now.
    pub(crate) fn connect(device: &Device, socket: &Path) -> Option<Self> {
        let mut channel = UnixStream::connect(socket).unwrap();
        let client = match RdmaClient::connect_on(device, &RdmaOptions::default(), &mut channel) {
            Ok(client) => client,
            // The server refused the client, or closed the channel.
            Err(SetupError::Channel(_) | SetupError::Record(RecordError::Refused(_))) => {
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let mut name = [0; 8];
        channel.read_exact(&mut name).unwrap();
        Some(Self::new(client, channel, u64::from_le_bytes(name)))
    }

    pub(crate) fn new(mut client: RdmaClient, channel: UnixStream, name: u64) -> Self {
        client.set_timeout_ns(TIMEOUT_NS);
        Self {
            caller: Caller::new(client, name),
            channel,
        }
    }

    /// Returns whether the server has ended the connection. If so, all calls have ended with it.
    pub(crate) fn was_evicted(&mut self) -> bool {
        let State::Closed(reason) = self.caller.state() else {
            return false;
        };
        self.caller.poll();
        assert_eq!(
            (reason, self.caller.outstanding()),
            (CloseReason::Disconnected, 0)
        );
        let is_typed = |failure: &CallFailure| {
            [CallFailure::Closed(reason), CallFailure::NotSent].contains(failure)
        };
        assert!(
            self.caller.failures.iter().all(is_typed),
            "{:?}",
            self.caller.failures
        );
        true
    }

    /// Announces that the client disconnects. Asserts that every call was answered.
    pub(crate) fn say_farewell(mut self) {
        let Caller { name, failures, .. } = &self.caller;
        assert!(
            self.caller.outstanding() == 0 && failures.is_empty(),
            "client {name}: {failures:?}"
        );
        assert!(
            !matches!(self.caller.state(), State::Closed(_)),
            "client {name}: {:?}",
            self.caller.state()
        );
        self.channel
            .write_all(&self.caller.made().to_le_bytes())
            .unwrap();
    }
}
