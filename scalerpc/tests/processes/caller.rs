//! One client, which checks each response.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use scalerpc::mlx5::DeviceSpec;
use scalerpc::rdma::exchange::MeetError;
use scalerpc::{CallError, CallFailure, CallHandle, CloseReason, RdmaClient, State};

use crate::plan::{SLOT_BYTES, WORK, request, response};

/// Longer than any call takes unless the client was stopped.
const TIMEOUT_NS: u64 = 100_000_000_000;

pub(crate) struct Caller {
    client: RdmaClient,
    /// To the server's process, which hears the farewell by it.
    channel: UnixStream,
    name: u64,
    made: u64,
    outstanding: Vec<(CallHandle, u64)>,
}

impl Caller {
    /// A client of the server behind a socket, which gives it its name. `None` if the server has no room now.
    pub(crate) fn connect(device: &DeviceSpec, socket: &Path) -> Option<Self> {
        let mut channel = UnixStream::connect(socket).unwrap();
        let client = match RdmaClient::connect_over(device, &mut channel) {
            Ok(client) => client,
            // It hung up instead of admitting.
            Err(MeetError::Channel(_)) => return None,
            Err(error) => panic!("{error}"),
        };
        let mut name = [0; 8];
        channel.read_exact(&mut name).unwrap();
        Some(Self::new(client, channel, u64::from_le_bytes(name)))
    }

    pub(crate) fn new(mut client: RdmaClient, channel: UnixStream, name: u64) -> Self {
        client.set_timeout_ns(TIMEOUT_NS);
        Self { client, channel, name, made: 0, outstanding: Vec::new() }
    }

    /// Makes one call, if there is a slot.
    pub(crate) fn call(&mut self) -> bool {
        match self.client.call(WORK, &request(self.name, self.made)) {
            Ok(handle) => self.outstanding.push((handle, self.made)),
            Err(CallError::NoSlot | CallError::Closed(CloseReason::Disconnected)) => return false,
            Err(error) => panic!("client {}: {error}", self.name),
        }
        self.made += 1;
        true
    }

    /// Takes and checks what came; how many calls ended.
    pub(crate) fn poll(&mut self) -> usize {
        self.client.poll();
        let (mut bytes, mut ended) = ([0; SLOT_BYTES as usize], 0);
        while let Some(completion) = self.client.poll_completion(&mut bytes) {
            let at = self.outstanding.iter().position(|(handle, _)| *handle == completion.handle).expect("ended twice");
            let (_, number) = self.outstanding.swap_remove(at);
            match completion.outcome {
                Ok(len) => assert!(bytes[..len] == response(self.name, number), "response to call {number} of client {}", self.name),
                // Of the client that was evicted; its owner asks for the state.
                Err(CallFailure::Closed(CloseReason::Disconnected)) => {}
                Err(failure) => panic!("call {number} of client {}: {failure}", self.name),
            }
            ended += 1;
        }
        ended
    }

    pub(crate) fn made(&self) -> u64 {
        self.made
    }

    pub(crate) fn outstanding(&self) -> usize {
        self.outstanding.len()
    }

    pub(crate) fn state(&self) -> State {
        self.client.core().state()
    }

    /// Leaves: every call that was made has been answered.
    pub(crate) fn say_farewell(mut self) {
        assert_eq!(self.outstanding(), 0);
        assert!(!matches!(self.state(), State::Closed(_)), "client {}: {:?}", self.name, self.state());
        self.channel.write_all(&self.made.to_le_bytes()).unwrap();
    }
}
