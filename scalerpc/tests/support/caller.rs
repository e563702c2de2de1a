//! A client that checks each response.

use scalerpc::{CallFailure, CallToken, RdmaClient, State};

use super::plan::{SLOT_BYTES, WORK, request, response};

/// Makes a call and waits for its end, while no other call is outstanding (the paper's SyncCall).
/// Returns the number of payload bytes of the response; as many as fit are in `into`. Calls `idle`
/// between two polls.
pub(crate) fn call_sync(
    client: &mut RdmaClient,
    rpc_type: u16,
    payload: &[u8],
    into: &mut [u8],
    mut idle: impl FnMut(),
) -> Result<Result<usize, CallFailure>, CallFailure> {
    let call = client.call(rpc_type, payload)?;
    let outcome = loop {
        client.poll();
        if let Some(completion) = client.poll_completion(into) {
            assert_eq!(completion.call, call);
            break completion.outcome;
        }
        idle();
    };
    client.rest();
    Ok(outcome)
}

pub(crate) struct Caller {
    pub(crate) client: RdmaClient,
    pub(crate) name: u64,
    made: u64,
    outstanding: Vec<(CallToken, u64)>,
    /// The failures of calls that ended without a response.
    pub(crate) failures: Vec<CallFailure>,
}

impl Caller {
    pub(crate) fn new(client: RdmaClient, name: u64) -> Self {
        Self {
            client,
            name,
            made: 0,
            outstanding: Vec::new(),
            failures: Vec::new(),
        }
    }

    /// Makes one call, if there is a slot and a connection.
    pub(crate) fn call(&mut self) -> bool {
        match self.client.call(WORK, &request(self.name, self.made)) {
            Ok(token) => self.outstanding.push((token, self.made)),
            Err(CallFailure::Full | CallFailure::NotSent) => return false,
            Err(error) => panic!("client {}: {error}", self.name),
        }
        self.made += 1;
        true
    }

    /// Calls as often as the depth permits until it has made `quota` calls, then takes responses.
    /// Returns the number of calls made plus the number ended.
    pub(crate) fn step(&mut self, quota: u64) -> usize {
        let mut made = 0;
        while self.made < quota && self.call() {
            made += 1;
        }
        made + self.poll()
    }

    /// Takes and checks responses. Returns the number of calls ended.
    pub(crate) fn poll(&mut self) -> usize {
        self.client.poll();
        let (mut bytes, mut ended) = ([0; SLOT_BYTES as usize], 0);
        while let Some(completion) = self.client.poll_completion(&mut bytes) {
            let at = self
                .outstanding
                .iter()
                .position(|(token, _)| *token == completion.call)
                .expect("ended twice");
            let (_, number) = self.outstanding.swap_remove(at);
            match completion.outcome {
                Ok(len) => assert!(
                    bytes[..len] == response(self.name, number),
                    "response to call {number} of client {}",
                    self.name
                ),
                Err(failure) => self.failures.push(failure),
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
        self.client.state()
    }
}
