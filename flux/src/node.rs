//! A node: calls others, receives their calls, answers them in any order.
//!
//! Calls and replies from `a` to `b` share one lane. No word tells `a` up to which message `b` has
//! read the lane, and none is needed:
//! - **M1** At most `F = in_flight` calls of a node to another are unanswered, cancelled ones
//!   included. An answer or a rejection is published once per call, since its [`Token`] can be used
//!   once. A lane is taken in order.
//! - **M2** So when `a` publishes a message, the message `capacity` positions earlier has been
//!   taken, and `a` knows that. `capacity` exceeds `2F`, so the messages since the earlier one
//!   contain more than `F` calls or more than `F` replies. More than `F` calls: one of them was
//!   answered, so `b` took it, and all messages before it. More than `F` replies: `b` made a later
//!   call with fewer than `F` other calls unanswered, after it had taken one of these replies, and
//!   all messages before it. In both cases `a` received a message that `b` sent after it had
//!   finished with the slot (L1 of the lane, `docs/shm-protocols.md`).
//! - **M3** `closed` is stored (Release) after a node's last message and loaded (Acquire) before
//!   its lane is emptied for the last time, so answers that a node sent before its drop still end
//!   their calls.
//! - **M4** A node that is dropped arms all its lanes before it stores `closed`. A caller reads
//!   `armed` after each message anyway (R1 of `docs/shm-protocols.md`), and then, if it is set,
//!   `closed` (Acquire). So a caller that has seen `closed` once sees it at each later call, and
//!   takes the call back: the message of the call will not be taken. The slot of that call is never
//!   free again, but the lane has no reader that could be overtaken.

use std::collections::VecDeque;
use std::fmt;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use copyrpc_calls::{CallError, CallFailure, Calls, OptionError, SessionEnd, Tag};
use copyrpc_shm::clock::Clock;
use copyrpc_shm::dropped::Dropped;
use copyrpc_shm::lane::{Ahead, LaneRx, LaneTx};
use copyrpc_shm::ready::{self, HotSet, ReadyWords};
use copyrpc_shm::sleep::{self, Sleep, Sleeper, Watch, Word};
use copyrpc_shm::sync::{AtomicU32, FIRST, LightBarrier};

use crate::config::Config;
use crate::error::ForeignToken;
use crate::mesh::{CALL, Mesh, Message, REJECTION, REPLY, Received, Towards};
use crate::token::{CallToken, Token};

/// Number of empty polls between two checks for dropped nodes.
const POLLS_PER_CHECK: u32 = 64;

/// A node of a network, for one thread. `T` is the payload of calls and replies, `U` the type of
/// the user data of a call; the node returns them with the reply.
///
/// `Send`: make the nodes, then give each to its thread. The drop ends the calls of other nodes to
/// it with [`CallFailure::Closed`].
pub struct Node<T, U> {
    hot: HotSet,
    ready: ReadyWords,
    polls_to_check: u32,
    clock: Clock,
    /// Whether there may be calls with deadlines.
    is_timed: bool,
    /// The last field: the other fields point into its mesh, and are dropped before it.
    ends: Ends<T, U>,
}

/// The ends of the node's lanes, and the received calls.
struct Ends<T, U> {
    /// All nodes, by number. The entry of this node itself never has calls.
    peers: Vec<Peer<T, U>>,
    /// Received calls that are neither answered nor rejected.
    held: usize,
    /// The held calls that wait for [`Node::recv`].
    inbox: VecDeque<(Received, T)>,
    /// The last field: the ends of the lanes point into the mesh, and are dropped before it.
    mesh: Joined<T>,
}

/// A node's share in the mesh. The drop closes the node.
struct Joined<T> {
    index: usize,
    mesh: Arc<Mesh<T>>,
}

impl<T> Deref for Joined<T> {
    type Target = Mesh<T>;

    #[inline(always)]
    fn deref(&self) -> &Mesh<T> {
        &self.mesh
    }
}

impl<T> Drop for Joined<T> {
    fn drop(&mut self) {
        self.signals().close(self.index);
        (0..self.len())
            .filter_map(|node| self.signals().sleep(node))
            .for_each(Sleep::wake);
    }
}

struct Peer<T, U> {
    out: Outgoing<T>,
    rx: LaneRx<Message<T>>,
    /// Unanswered calls to the other node (M1).
    calls: Calls<U>,
    /// Whether the other node was dropped, and all calls to it have ended.
    gone: bool,
}

struct Outgoing<T> {
    tx: LaneTx<Message<T>>,
    towards: Towards,
}

impl<T: Copy + Send> Outgoing<T> {
    /// Publishes a message. By M2 there is room, unless the peer was dropped. `is_one_of_several`:
    /// other messages are under way. Returns `true` if the peer was found to be dropped, which is
    /// checked only if the peer does not poll this lane.
    #[inline(always)]
    fn publish(&mut self, is_one_of_several: bool, tag: u64, payload: MaybeUninit<T>) -> bool {
        self.tx.publish_tagged(
            tag,
            payload,
            if is_one_of_several {
                Ahead::Line
            } else {
                Ahead::Nothing
            },
        );
        // SAFETY: the node of this lane keeps the mesh as long as the lane, so the mesh exists.
        unsafe { self.towards.notify() }
    }
}

impl<T, U> Node<T, U> {
    /// Returns the number of this node's calls, to all other nodes, that have not ended.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.ends
            .peers
            .iter()
            .map(|peer| peer.calls.waiting())
            .sum()
    }

    /// Returns the same node, with the user data of its calls replaced by the values that `f`
    /// returns for them. A node is `Send` if its user data is `Send`. A node whose user data is not
    /// `Send` can be made from a node that cannot call, on its own thread:
    ///
    /// ```
    /// use std::{convert::Infallible, rc::Rc};
    /// # fn main() -> Result<(), flux::OptionError> {
    /// for node in flux::network::<u64, Infallible>(2, flux::Config::default())? {
    ///     std::thread::spawn(|| {
    ///         let mut node = node.map(|never| match never {});
    ///         let _ = node.call(1, 7, Rc::new("kept here"));
    ///     });
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn map<V>(self, mut f: impl FnMut(U) -> V) -> Node<T, V> {
        let Self {
            hot,
            ready,
            polls_to_check,
            clock,
            is_timed,
            ends:
                Ends {
                    peers,
                    held,
                    inbox,
                    mesh,
                },
        } = self;
        let peer = |Peer {
                        out,
                        rx,
                        calls,
                        gone,
                    }| Peer {
            out,
            rx,
            calls: calls.map(&mut f),
            gone,
        };
        let ends = Ends {
            peers: peers.into_iter().map(peer).collect(),
            held,
            inbox,
            mesh,
        };
        Node {
            hot,
            ready,
            polls_to_check,
            clock,
            is_timed,
            ends,
        }
    }
}

impl<T, U> fmt::Debug for Node<T, U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("index", &self.ends.mesh.index)
            .field("nodes", &self.ends.mesh.len())
            .field("in_flight", &self.in_flight())
            .field("held", &self.ends.held)
            .finish_non_exhaustive()
    }
}

/// Makes a network of `nodes` nodes, each of which can call every other. Allocates all memory that
/// they will use for messages: `nodes x (nodes - 1) x capacity` slots.
///
/// # Errors
/// [`OptionError`].
pub fn network<T: Copy + Send, U>(
    nodes: usize,
    config: Config,
) -> Result<Vec<Node<T, U>>, OptionError> {
    network_by(&Clock::default(), nodes, config)
}

/// Like [`network`], with deadlines by `clock`.
///
/// # Errors
/// [`OptionError`].
pub fn network_by<T: Copy + Send, U>(
    clock: &Clock,
    nodes: usize,
    config: Config,
) -> Result<Vec<Node<T, U>>, OptionError> {
    config.check(nodes)?;
    // Registers this process for barriers, which may take long: now, and not in the first call.
    let _ = LightBarrier::of_process();
    let mesh = Arc::new(Mesh::new(nodes, config.capacity));
    Ok((0..nodes)
        .filter_map(|index| Node::new(index, config, clock.clone(), Arc::clone(&mesh)))
        .collect())
}

impl<T: Copy + Send, U> Node<T, U> {
    /// Makes a node. Called once for each `index` of the mesh; `None` if there is no such index.
    fn new(index: usize, config: Config, clock: Clock, mesh: Arc<Mesh<T>>) -> Option<Self> {
        let peer = |other: usize| {
            let ((to, capacity), (from, _)) = (mesh.lane(index, other)?, mesh.lane(other, index)?);
            // SAFETY: the slots live as long as the mesh, which this node keeps. Each lane gets one
            // end of a kind: `network` makes one node per index. All slots are empty. `publish`
            // below has room by M2.
            let (tx, rx) = unsafe {
                (
                    LaneTx::new(to, capacity, FIRST.into()),
                    LaneRx::new(from, capacity, FIRST.into()),
                )
            };
            let out = Outgoing {
                tx,
                towards: mesh.signals().towards(index, other)?,
            };
            // A node's call to itself finds no free slot.
            let calls = Calls::new(if index == other { 0 } else { config.in_flight });
            Some(Peer {
                out,
                rx,
                calls,
                gone: false,
            })
        };
        let nodes = mesh.len();
        Some(Self {
            hot: HotSet::new(nodes),
            ready: mesh.signals().ready(index)?,
            polls_to_check: POLLS_PER_CHECK,
            clock,
            is_timed: false,
            ends: Ends {
                peers: (0..nodes).map(peer).collect::<Option<_>>()?,
                held: 0,
                inbox: VecDeque::with_capacity((nodes - 1) * config.in_flight),
                mesh: Joined { index, mesh },
            },
        })
    }

    /// Returns this node's number.
    #[must_use]
    pub fn index(&self) -> usize {
        self.ends.mesh.index
    }

    /// Returns the number of nodes of the network, including this node.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.ends.mesh.len()
    }

    /// Calls node `to`, which sees the calls at once and in their order. [`poll`](Self::poll)
    /// returns `user_data` with the reply, exactly once. Replies arrive in any order.
    ///
    /// # Errors
    /// [`CallError`], with the payload and the user data; nothing was sent.
    #[inline(always)]
    pub fn call(
        &mut self,
        to: usize,
        payload: T,
        user_data: U,
    ) -> Result<CallToken, CallError<T, U>> {
        let Some(Peer { out, calls, .. }) = self.ends.peers.get_mut(to) else {
            return Err(self.refusal(to, payload, user_data));
        };
        let tag = match calls.insert(user_data) {
            Ok(tag) => tag,
            Err(user_data) => return Err(self.refusal(to, payload, user_data)),
        };
        let word = tag.pack(CALL);
        // M4: if the receiver is closed, it does not take the message, so the call is taken back.
        if out.publish(
            calls.len() + self.ends.held > 1,
            word,
            MaybeUninit::new(payload),
        ) {
            if let Some(user_data) = take_back(calls, word) {
                return Err(self.refusal(to, payload, user_data));
            }
        }
        Ok(CallToken { to: to as u32, tag })
    }

    #[cold]
    fn refusal(&self, to: usize, request: T, user_data: U) -> CallError<T, U> {
        match self.ends.peers.get(to) {
            Some(_) if self.ends.is_closed(to) => CallError::Closed {
                request,
                user_data,
                reason: SessionEnd::PeerGone,
            },
            Some(peer) if to != self.ends.mesh.index => CallError::Full {
                request,
                user_data,
                depth: peer.calls.capacity(),
            },
            _ => CallError::NoSuchNode {
                request,
                user_data,
                to,
                last: self.ends.peers.len() - 1,
            },
        }
    }

    /// Like [`call`](Self::call), with a deadline: without a reply the call ends with
    /// [`CallFailure::TimedOut`] in the first poll after `timeout`. The call keeps its slot like a
    /// [cancelled](Self::cancel) call.
    ///
    /// # Errors
    /// Like [`call`](Self::call).
    pub fn call_within(
        &mut self,
        to: usize,
        payload: T,
        user_data: U,
        timeout: Duration,
    ) -> Result<CallToken, CallError<T, U>> {
        let call = self.call(to, payload, user_data)?;
        if let Some(peer) = self.ends.peer(call.to) {
            peer.calls
                .end_within(call.tag, self.clock.now_ns(), timeout);
            self.is_timed = true;
        }
        Ok(call)
    }

    /// Ends a call at once and returns its user data; `None` if the call has ended. Nothing is sent
    /// to the other node. The reply is discarded; the call keeps its slot until the reply arrives.
    pub fn cancel(&mut self, call: CallToken) -> Option<U> {
        self.ends.peer(call.to)?.calls.abandon(call.tag)
    }

    /// Ends the calls whose deadline has passed, after the replies of this poll.
    #[cold]
    fn expire(&mut self, f: &mut impl FnMut(U, Result<T, CallFailure>)) -> usize {
        let mut ended = 0;
        let mut now_ns = None;
        let mut is_timed = false;
        for peer in self
            .ends
            .peers
            .iter_mut()
            .filter(|peer| peer.calls.has_deadlines())
        {
            if peer.calls.is_timed() {
                let now_ns = *now_ns.get_or_insert_with(|| self.clock.now_ns());
                ended += peer.calls.expire(now_ns, |_, user_data| {
                    f(user_data, Err(CallFailure::TimedOut))
                });
            }
            is_timed |= peer.calls.has_deadlines();
        }
        // `is_timed` is set last: if `f` panics, the next poll ends the other calls.
        self.is_timed = is_timed;
        ended
    }

    fn until_deadline(&self) -> Option<Duration> {
        if !self.is_timed {
            return None;
        }
        let now_ns = self.clock.now_ns();
        self.ends
            .peers
            .iter()
            .filter_map(|peer| peer.calls.until_deadline(|| now_ns))
            .min()
    }

    /// Does one bounded pass over the nodes that have sent messages: at most 16 messages of each of
    /// at most 8 nodes, in rotation. Passes replies to `f`; calls wait for [`recv`](Self::recv),
    /// and calls whose [`Token`] was dropped are rejected. Returns the number of messages taken, of
    /// calls rejected, and of calls that ended without a message. Idle nodes cost nothing.
    ///
    /// Unanswered calls to a dropped node end through `f`, within 64 empty polls.
    #[inline(always)]
    pub fn poll(&mut self, f: impl FnMut(U, Result<T, CallFailure>)) -> usize {
        self.pass(f, Keep)
    }

    /// Like [`poll`](Self::poll), and answers every call that it takes with the result of
    /// `handler`, which gets the caller's number and the payload. Answers calls that an earlier
    /// poll has found, too. A call whose handler panics is rejected. `step` takes the fewest
    /// instructions. To reply later or out of order, use [`poll`](Self::poll) and
    /// [`recv`](Self::recv).
    #[inline(always)]
    pub fn step(
        &mut self,
        f: impl FnMut(U, Result<T, CallFailure>),
        mut handler: impl FnMut(usize, &T) -> T,
    ) -> usize {
        if !self.ends.inbox.is_empty() {
            self.answer_waiting(&mut handler);
        }
        self.pass(f, handler)
    }

    #[cold]
    fn answer_waiting(&mut self, handler: &mut impl FnMut(usize, &T) -> T) {
        while let Some((from, token, payload)) = self.recv() {
            // The reply cannot fail: this node received the call of the token.
            let _ = self.reply(token, handler(from, &payload));
        }
    }

    #[inline(always)]
    fn pass(
        &mut self,
        mut f: impl FnMut(U, Result<T, CallFailure>),
        mut handler: impl Handle<T>,
    ) -> usize {
        let Self {
            ends,
            hot,
            ready,
            clock,
            ..
        } = self;
        let visit =
            |ends: &mut Ends<T, U>, from, budget| ends.take(from, budget, &mut f, &mut handler);
        let mut taken = hot.pass(ready, ends, visit, || clock.now_ns());
        if self.is_timed {
            taken += self.expire(&mut f);
        }
        if taken == 0 {
            self.polls_to_check -= 1;
            if self.polls_to_check == 0 {
                return self.end_calls_to_the_gone(&mut f);
            }
        }
        taken
    }

    /// Sleeps until there is something to [`poll`](Self::poll) for or to take with
    /// [`recv`](Self::recv), the end of a node that was called included; at most for `timeout`
    /// (`None`: without a limit). Returns whether there is something. Does not spin.
    pub fn wait(&mut self, timeout: Option<Duration>) -> bool {
        sleep::wait([self as &mut dyn Sleeper], timeout)
    }

    fn is_a_called_node_gone(&self) -> bool {
        let is_waited_for = |peer: &Peer<T, U>| !peer.gone && !peer.calls.is_empty();
        (0..)
            .zip(&self.ends.peers)
            .any(|(node, peer)| is_waited_for(peer) && self.ends.is_closed(node))
    }

    #[cold]
    fn end_calls_to_the_gone(&mut self, f: &mut impl FnMut(U, Result<T, CallFailure>)) -> usize {
        self.polls_to_check = POLLS_PER_CHECK;
        let ends = &mut self.ends;
        let mut ended = 0;
        for to in 0..ends.mesh.len() {
            // M3: the last messages of a closed node are taken before the calls to it end.
            if !ends.is_closed(to) || ends.peers.get(to).is_none_or(|peer| peer.gone) {
                continue;
            }
            ended += ends.take(to, usize::MAX, f, &mut Keep);
            if let Some(peer) = ends.peers.get_mut(to) {
                let end = |user_data| {
                    ended += 1;
                    f(user_data, Err(CallFailure::Closed(SessionEnd::PeerGone)));
                };
                peer.calls.take_all(end);
                // `gone` is set last: if `f` panics, the next check ends the other calls.
                peer.gone = true;
            }
        }
        ended
    }

    /// Returns the oldest received call: the node that made it, the token to answer it with, and
    /// its payload. The caller waits until the token is answered or dropped; tokens may be kept,
    /// and answered in any order.
    #[inline(always)]
    pub fn recv(&mut self) -> Option<(usize, Token, T)> {
        let (received, payload) = self.ends.inbox.pop_front()?;
        Some((
            received.from as usize,
            Token {
                received,
                network: self.ends.mesh.number,
            },
            payload,
        ))
    }

    /// Answers a call. The caller can see the answer when this returns. There is always room.
    ///
    /// # Errors
    /// [`ForeignToken`], with token and payload, for the token of a call that another node
    /// received. An answer to a node that was dropped is no error.
    #[inline(always)]
    pub fn reply(&mut self, token: Token, payload: T) -> Result<(), ForeignToken<T>> {
        if token.network != self.ends.mesh.number
            || token.received.to as usize != self.ends.mesh.index
        {
            return Err(ForeignToken { token, payload });
        }
        let Received { from, tag, .. } = token.received;
        std::mem::forget(token);
        self.ends.held -= 1;
        let is_busy = self.ends.held > 0;
        if let Some(Peer { out, calls, .. }) = self.ends.peer(from) {
            out.publish(
                is_busy || calls.len() > 1,
                tag.pack(REPLY),
                MaybeUninit::new(payload),
            );
        }
        Ok(())
    }
}

impl<T, U> Ends<T, U> {
    #[inline(always)]
    fn peer(&mut self, node: u32) -> Option<&mut Peer<T, U>> {
        self.peers.get_mut(node as usize)
    }

    /// Returns whether a node was dropped: if so, its last messages can be taken (M3).
    fn is_closed(&self, node: usize) -> bool {
        self.mesh.signals().is_closed(node)
    }
}

/// The handler of the calls that a pass takes.
trait Handle<T> {
    /// Returns the answer, or `None` to leave the call in the inbox.
    fn handle(&mut self, from: usize, payload: &T) -> Option<T>;
}

struct Keep;

impl<T> Handle<T> for Keep {
    #[inline(always)]
    fn handle(&mut self, _: usize, _: &T) -> Option<T> {
        None
    }
}

impl<T, F: FnMut(usize, &T) -> T> Handle<T> for F {
    #[inline(always)]
    fn handle(&mut self, from: usize, payload: &T) -> Option<T> {
        Some(self(from, payload))
    }
}

/// A call whose handler runs. If the handler panics, the drop rejects the call.
struct Unanswered<'a, T: Copy + Send> {
    out: &'a mut Outgoing<T>,
    tag: Tag,
}

impl<T: Copy + Send> Drop for Unanswered<'_, T> {
    #[cold]
    fn drop(&mut self) {
        self.out
            .publish(false, self.tag.pack(REJECTION), MaybeUninit::uninit());
    }
}

#[cold]
fn take_back<U>(calls: &mut Calls<U>, word: u64) -> Option<U> {
    calls.take(Tag::unpack(word).0)
}

/// Takes a message that is neither a call nor the reply to a waiting call. A rejection ends its
/// call; any other message is discarded.
#[cold]
fn end_rejected<T, U>(
    calls: &mut Calls<U>,
    word: u64,
    f: &mut impl FnMut(U, Result<T, CallFailure>),
) {
    let (tag, note) = Tag::unpack(word);
    if let Some(user_data) = if note == REJECTION {
        calls.take(tag)
    } else {
        None
    } {
        f(user_data, Err(CallFailure::Dropped));
    }
}

impl<T: Copy + Send, U> Ends<T, U> {
    #[cold]
    fn reject_dropped(&mut self) -> usize {
        let dropped = self
            .mesh
            .signals()
            .dropped(self.mesh.index)
            .map_or_else(Vec::new, Dropped::take);
        for &Received { from, tag, .. } in &dropped {
            self.held -= 1;
            let is_busy = self.held > 0;
            if let Some(Peer { out, .. }) = self.peer(from) {
                out.publish(is_busy, tag.pack(REJECTION), MaybeUninit::uninit());
            }
        }
        dropped.len()
    }

    /// Takes up to `budget` messages of a node: replies go to `f`, calls to `handler`.
    #[inline(always)]
    fn take(
        &mut self,
        from: usize,
        budget: usize,
        f: &mut impl FnMut(U, Result<T, CallFailure>),
        handler: &mut impl Handle<T>,
    ) -> usize {
        let Self {
            peers,
            held,
            inbox,
            mesh: Joined { index, .. },
        } = self;
        let Some(Peer { out, rx, calls, .. }) = peers.get_mut(from) else {
            return 0;
        };
        let taken = rx.pop_each(budget, |is_first, word, payload| {
            // SAFETY: this is used for calls and replies only, which have a payload. Their sender
            // does not write the slot before this end has passed the message (M2).
            let lent = || unsafe { (*payload.as_ptr()).assume_init_ref() };
            if let Some(user_data) = calls.take(Tag::without_note(word)) {
                f(user_data, Ok(*lent()));
                return;
            }
            let Some(tag) = Tag::with_last_bit(word) else {
                end_rejected(calls, word, f);
                return;
            };
            let unanswered = Unanswered { out, tag };
            let answer = handler.handle(from, lent());
            std::mem::forget(unanswered);
            if let Some(answer) = answer {
                out.publish(
                    !is_first || calls.len() > 1,
                    tag.pack(REPLY),
                    MaybeUninit::new(answer),
                );
            } else {
                *held += 1;
                inbox.push_back((
                    Received {
                        tag,
                        from: from as u32,
                        to: *index as u32,
                    },
                    *lent(),
                ));
            }
        });
        if taken > 0 {
            return taken;
        }
        // A node does not call itself: a visit of its own index rejects the received calls whose
        // tokens were dropped.
        if from == self.mesh.index {
            self.reject_dropped()
        } else {
            0
        }
    }
}

impl<T: Copy + Send, U> ready::Lanes for Ends<T, U> {
    fn is_ready(&self, from: usize) -> bool {
        let is_own =
            from == self.mesh.index && self.mesh.signals().dropped(from).is_some_and(Dropped::any);
        is_own || self.peers.get(from).is_some_and(|peer| peer.rx.is_ready())
    }

    fn armed(&self, from: usize) -> Option<&AtomicU32> {
        self.mesh.signals().armed(from, self.mesh.index)
    }
}

/// The condition of [`Node::wait`], for a [`sleep::wait`] on several things.
impl<T: Copy + Send, U> Watch for Node<T, U> {
    fn words(&mut self, show: &mut dyn FnMut(Word<'_>)) {
        if let Some(sleep) = self.ends.mesh.signals().sleep(self.ends.mesh.index) {
            show(sleep.word());
        }
    }

    fn arm(&mut self) {
        self.hot.arm(&self.ends);
    }

    fn look(&mut self, is_told: bool) -> bool {
        let are_empty = self.hot.deactivate(&self.ends, is_told);
        let is_due = self.until_deadline().is_some_and(|left| left.is_zero());
        if is_due || !are_empty || !self.ends.inbox.is_empty() || self.ready.any() {
            return true;
        }
        if !self.is_a_called_node_gone() {
            return false;
        }
        self.polls_to_check = 1;
        true
    }

    /// Returns the time until the earliest deadline: every other event sends a wake-up.
    fn slice(&mut self) -> Duration {
        self.until_deadline().unwrap_or(Duration::MAX)
    }

    fn check(&mut self) -> bool {
        self.until_deadline().is_some_and(|left| left.is_zero())
    }
}

#[cfg(loom)]
#[cfg(test)]
mod model {
    use super::*;
    use copyrpc_shm::sync::yield_now;

    const CALLS: u64 = 3;

    /// Makes the calls of a node in turn, and answers the other node's, until all have ended.
    fn run(mut node: Node<u64, u64>) -> Node<u64, u64> {
        let other = 1 - node.index();
        let mut ended = 0;
        let mut answered = 0;
        while ended < CALLS || answered < CALLS {
            if node.in_flight() == 0 && ended < CALLS {
                node.call(other, ended, ended).unwrap();
            }
            let taken = node.poll(|user, reply| {
                assert_eq!((user, reply), (ended, Ok(user + 1)));
                ended += 1;
            });
            while let Some((_, token, payload)) = node.recv() {
                assert_eq!(payload, answered);
                node.reply(token, payload + 1).unwrap();
                answered += 1;
            }
            if taken == 0 {
                yield_now();
            }
        }
        node
    }

    /// M3, M4. An earlier call may already have found that the node is closed.
    #[test]
    fn a_call_to_a_node_that_is_dropped_is_refused_or_ends() {
        loom::model(|| {
            let mut nodes = network::<u64, ()>(
                2,
                Config {
                    capacity: 4,
                    in_flight: 1,
                },
            )
            .unwrap();
            let (mut b, mut a) = (nodes.pop().unwrap(), nodes.pop().unwrap());
            // Node 1 polls the lane from now on, and messages there are not announced to it.
            a.call(1, 0, ()).unwrap();
            assert_eq!(b.step(|(), _| (), |_, payload| *payload), 1);
            assert_eq!(a.poll(|(), reply| assert_eq!(reply, Ok(0))), 1);
            let b = loom::thread::spawn(move || drop(b));
            let (mut made, mut ended) = (0, 0);
            let mut look = |a: &mut Node<u64, ()>| {
                a.polls_to_check = 1;
                a.poll(|(), outcome| {
                    assert_eq!(outcome, Err(CallFailure::Closed(SessionEnd::PeerGone)));
                    ended += 1;
                });
            };
            for _ in 0..2 {
                made += usize::from(a.call(1, 0, ()).is_ok());
                look(&mut a);
            }
            b.join().unwrap();
            look(&mut a);
            assert_eq!((made, a.in_flight()), (ended, 0));
            assert!(matches!(a.call(1, 0, ()), Err(CallError::Closed { .. })));
        });
    }

    /// M2: loom reports any slot that is written before its reader is done.
    #[test]
    fn slots_are_reused_only_when_they_have_been_taken() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.max_branches = 100_000;
        model.check(|| {
            let mut nodes = network::<u64, u64>(
                2,
                Config {
                    capacity: 4,
                    in_flight: 1,
                },
            )
            .unwrap();
            let (b, a) = (nodes.pop().unwrap(), nodes.pop().unwrap());
            let b = loom::thread::spawn(move || run(b));
            let _a = run(a);
            let _b = b.join().unwrap();
        });
    }
}
