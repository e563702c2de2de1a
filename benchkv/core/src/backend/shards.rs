//! The channel between the daemons of a rank: flux, and the calls that wait for answers from it.

use std::convert::Infallible;

use copyrpc_shm::clock::Clock;
use flux::{CallError, CallFailure, Config, Node};

use super::backlog::{Backlog, SendError};
use super::{BackendError, OrSetup};
use crate::job::Sizes;
use crate::message::{Request, Response};

#[derive(Debug, Clone, Copy)]
#[doc(alias = "DelegatePayload")]
pub(super) enum Hop {
    /// A request for the other daemon's shard, or for a rank to which the other daemon carries
    /// requests.
    Request(Request),
    Response(Response),
    /// The request could not be carried.
    Failed,
}

/// A daemon's end of the channel before it is moved to the daemon's thread. Its callers have the
/// type `Infallible`, so it can make no call.
pub(super) type ShardNode = Node<Hop, Infallible>;

/// Makes the channel between the daemons of a rank. Returns one end for each daemon.
pub(super) fn mesh(
    clock: &Clock,
    daemons: usize,
    sizes: &Sizes,
) -> Result<Vec<ShardNode>, BackendError> {
    let config = Config {
        capacity: sizes.flux_capacity,
        in_flight: sizes.flux_in_flight,
    };
    flux::network_by(clock, daemons, config).or_setup("the channel between daemons")
}

/// A daemon's end of the channel with the calls that it has made. `W` is the caller to answer.
#[derive(Debug)]
pub(super) struct Shards<W> {
    pub(super) node: Node<Hop, W>,
    backlog: Backlog<W>,
}

impl<W> Shards<W> {
    pub(super) fn new(node: ShardNode, daemons: usize) -> Self {
        let node = node.map(|never| match never {});
        Self {
            node,
            backlog: Backlog::new(daemons),
        }
    }

    pub(super) fn backlogged(&self) -> usize {
        self.backlog.waiting()
    }

    /// Sends a request to another daemon. The request waits in the backlog if there is no room, or
    /// if earlier requests to the daemon wait.
    #[inline(always)]
    pub(super) fn call(
        &mut self,
        daemon: usize,
        request: Request,
        whom: W,
    ) -> Result<(), Box<BackendError>> {
        let whom = if self.backlog.is_empty(daemon) {
            match send(&mut self.node, daemon, &request, whom) {
                Ok(()) => return Ok(()),
                Err(SendError::Full(whom)) => whom,
                Err(SendError::Down(error)) => return Err(Box::new(error)),
            }
        } else {
            whom
        };
        self.backlog.push(daemon, request, whom)
    }

    /// Tries again to send the waiting requests. Returns the number of requests sent.
    pub(super) fn retry(&mut self) -> Result<usize, BackendError> {
        let send = |daemon, request: &Request, whom| send(&mut self.node, daemon, request, whom);
        self.backlog.retry(send)
    }

    /// Takes arrived messages, and calls `answer` with each answer and its caller. Returns the
    /// number of answers. The requests that have arrived are not counted; the caller takes them
    /// from `node`.
    pub(super) fn poll(&mut self, answer: impl FnMut(W, Option<Response>)) -> usize {
        let mut answers = 0;
        self.node.poll(ending(&mut answers, answer));
        answers
    }

    /// Polls like [`poll`](Self::poll), and answers each request at once with the result of
    /// `serve`. Returns the number of answers and requests.
    pub(super) fn step(
        &mut self,
        answer: impl FnMut(W, Option<Response>),
        mut serve: impl FnMut(&Request) -> Response,
    ) -> usize {
        let (mut answers, mut served) = (0, 0);
        self.node.step(ending(&mut answers, answer), |_, hop| {
            served += 1;
            match hop {
                Hop::Request(request) => Hop::Response(serve(request)),
                Hop::Response(_) | Hop::Failed => Hop::Failed,
            }
        });
        answers + served
    }
}

#[inline(always)]
fn send<W>(
    node: &mut Node<Hop, W>,
    daemon: usize,
    request: &Request,
    whom: W,
) -> Result<(), SendError<W>> {
    match node.call(daemon, Hop::Request(*request), whom) {
        Ok(_) => Ok(()),
        Err(CallError::Full { user_data, .. }) => Err(SendError::Full(user_data)),
        Err(error) => {
            let (what, error) = ("the channel between daemons", error.to_string());
            Err(SendError::Down(BackendError::transport(what, error)))
        }
    }
}

/// Returns a function that ends calls: the function counts each call in `answers`, and passes the
/// call's result and caller to `answer`.
fn ending<W>(
    answers: &mut usize,
    mut answer: impl FnMut(W, Option<Response>),
) -> impl FnMut(W, Result<Hop, CallFailure>) {
    move |whom, outcome| {
        *answers += 1;
        let response = match outcome {
            Ok(Hop::Response(response)) => Some(response),
            Ok(Hop::Request(_) | Hop::Failed) | Err(_) => None,
        };
        answer(whom, response);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Outcome;

    #[test]
    fn requests_between_daemons_keep_their_order_also_where_some_wait_for_room() {
        let mut nodes = flux::network(
            2,
            Config {
                capacity: 8,
                in_flight: 2,
            },
        )
        .unwrap();
        let (mut answering, asking): (ShardNode, ShardNode) =
            (nodes.pop().unwrap(), nodes.pop().unwrap());
        let mut asking = Shards::new(asking, 2);
        let (mut arrived, mut answered) = (Vec::new(), Vec::new());
        let mut serve = |asking: &mut Shards<u64>| {
            answering.poll(|_, _| ());
            while let Some((_, token, hop)) = answering.recv() {
                let Hop::Request(request) = hop else {
                    panic!("{hop:?}")
                };
                arrived.push(request.key());
                answering
                    .reply(token, Hop::Response(Response::new(Outcome::PutOk)))
                    .unwrap();
            }
            asking.poll(|key, response| {
                assert!(response.is_some());
                answered.push(key);
            });
        };
        let call =
            |asking: &mut Shards<u64>, key| asking.call(1, Request::get(0, key), key).unwrap();
        (0..5).for_each(|key| call(&mut asking, key));
        assert_eq!(asking.backlogged(), 3);
        // There is room now, but three requests wait for it already.
        serve(&mut asking);
        call(&mut asking, 5);
        assert_eq!(asking.backlogged(), 4);
        // Two requests are sent at a time.
        for left in [2, 0] {
            assert_eq!(asking.retry().unwrap(), 2);
            assert_eq!(asking.backlogged(), left);
            serve(&mut asking);
        }
        assert_eq!((arrived, answered), ((0..6).collect(), (0..6).collect()));
    }
}
