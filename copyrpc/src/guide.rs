//! The rules of [`Context`] and [`Endpoint`], their limits, what there is in addition to calls, and
//! what makes them fast.
//!
//! ## Rules
//!
//! - **Threads.** A context belongs to the thread that built it, with everything made from it
//!   (`!Send`); [`ContextBuilder`] is `Send`.
//! - **Stepping.** Nothing happens outside [`Context::poll`], [`serve`](Context::serve),
//!   [`drain`](Context::drain), [`drain_serving`](Context::drain_serving),
//!   [`flush_endpoints`](Context::flush_endpoints) and [`wait`](Context::wait). A poll is bounded,
//!   and is a drain and a flush: a loop of those two does all that polls do. The same holds for
//!   `serve` and `drain_serving`. Callbacks may call, reply and receive; a nested poll is refused
//!   with an error. A callback that panics loses nothing but its own call.
//! - **Ends.** Each call that was taken ends exactly once: by a reply, a [`CallFailure`], or
//!   [`Endpoint::cancel`]. A deadline ([`Endpoint::call_within`]) is never early. A reply that
//!   arrives too late reaches no call. A reply that breaks the protocol ends its own connection
//!   only. To continue with a peer, connect a new endpoint.
//! - **Peers that end.** While requests are unanswered or replies not taken, a peer whose process
//!   died is detected within about two [keep-alive](EndpointConfig::keepalive) intervals, and a
//!   peer that is stopped, or does not poll, after the [stall
//!   timeout](EndpointConfig::stall_timeout); a handler of [`serve`](Context::serve) may take any
//!   time. A stopped peer that has taken all replies and waits for the answer to its own call owes
//!   nothing: it stays connected, and its call [wanted](RecvHandle::is_wanted), until it is sent a
//!   message that it does not take (K1, K2 of the protocol). On an idle connection a dead peer is detected within about two [idle
//!   keep-alive](EndpointConfig::idle_keepalive) intervals, plus half a second for the device's
//!   retries; a living peer stays, unless there is an [idle timeout](EndpointConfig::idle_timeout).
//!   An endpoint that has ended has released its queue pair, its share of the queues, and its
//!   rings, even while handles of it are kept. Only a receive ring in which the application has
//!   requests stays.
//! - **Close.** [`Endpoint::close`] ends a connection when all that is outstanding has ended, on
//!   both sides, and so does dropping the last handle of an endpoint; [`Endpoint::abort`] ends it
//!   at once. Dropping the context sends the answers that were given, and a close to all peers, and
//!   waits until these have arrived, 20 ms at most.
//! - **Order.** Requests are received in the order of the calls; replies may be given in any order,
//!   and a request may be held as long as needed. The bytes of a request, and those that arrived
//!   after them, stay in the ring until the request is answered.
//! - **Limits.** A request has at most `ring_size / 8 - 12` bytes, a response
//!   `3 * ring_size / 16 - 44`. Larger messages are always refused; `RingFull` and
//!   `InsufficientCredit` pass after polls ([`CallError::is_retryable`]).
//! - **Queues.** The endpoints of a context share its queues, which [`ContextBuilder::endpoints`]
//!   sizes: two thirds of the SRQ's receives for their batches in flight, and of the send CQ their
//!   batches in flight + their one-sided operations + 8 each, and the batches of a
//!   [`Window::Completion`]. One endpoint too many is refused with the size needed, and its peer
//!   gets the refusal.
//!
//!   | `endpoints` | batches in flight of each | receives | entries of a CQ | memory of the queues | of all rings of 1 MiB | of 64 KiB |
//!   |---|---|---|---|---|---|---|
//!   | 1 | 32 | 48 | 56 | 9 KiB | 2 MiB | 128 KiB |
//!   | 128, the default | 32 | 6,144 | 7,168 | 1.1 MiB | 256 MiB | 16 MiB |
//!   | 512 | 32 | 24,576 | 28,672 | 4.5 MiB | 1 GiB | 64 MiB |
//!   | 1,024 ([`endpoints_with`](ContextBuilder::endpoints_with)) | 16 | 24,576 | 40,960 | 6.5 MiB | 2 GiB | 128 MiB |
//!   | 4,096 | 4 | 24,576 | 114,688 | 10.5 MiB | 8 GiB | 512 MiB |
//!
//!   Devices round receives and entries up to powers of two. Most have about 32,000 receives in a
//!   queue: the maximum that was tested is 10,000 endpoints with 2 batches each.
//! - **Memory.** An endpoint has two rings, 64 bytes of a registered region that 64 endpoints
//!   share, a send queue as long as its batches in flight need
//!   ([`EndpointConfig::send_queue_wqebbs`]), and the entries of outstanding calls and requests.
//!   After warm-up nothing is allocated for a call.
//! - **Fork.** A forked child has none of the registered memory and queues: it must not touch a
//!   context or anything made from one, nor drop it, and should `exec` or `_exit`. The parent is
//!   not disturbed, and the child keeps nothing of it alive: peers detect the parent's end.
//! - **Trust.** A peer's bytes are validated before use. [`RecvBytes`] lie in memory that the
//!   peer's NIC can write: copy them out, or vouch for the peer with `as_slice`.
//!
//! ## In addition to plain calls
//!
//! - **Waiting.** A poll that finds nothing costs about a hundred instructions, and a core if it is
//!   repeated forever. [`Context::wait`] sleeps until there is something to poll for, and wakes for
//!   deadlines and to watch peers; an idle server that waits does not poll at all. A thread that
//!   polls other things as well sleeps on the context and on them with `copyrpc_shm::sleep::wait`.
//! - **Futures.** [`AsyncClient`] and [`AsyncServer`] have a thread that sleeps on the device, so
//!   that their futures can be polled by any thread and any executor.
//! - **Methods.** [`service!`](crate::service!) makes a client with methods, and a trait for the
//!   server to implement: [`methods`](crate::methods). Arguments, results and errors are of any
//!   types with serde's `Serialize` and `Deserialize`.
//! - **Bulk data.** Data larger than a message are sent in [`parts`](crate::parts), or outside of
//!   the messages: one side puts the [`RemoteMemory`] of a [`Memory`] into a request, the other
//!   [READs](Endpoint::rdma_read) or [WRITEs](Endpoint::rdma_write) it piece by piece and then
//!   answers (`examples/bulk.rs`). A WRITE posted before a call or reply of the same endpoint is
//!   done when that message arrives. Every peer that has the `RemoteMemory` of a memory can read
//!   and write the memory until the `Memory` is dropped.
//! - **Fabric.** The device determines how its peers are reached:
//!   [`DeviceSpec::Verbs`](mlx5::DeviceSpec::Verbs) takes the port, GID index, P_Key index, service
//!   level, traffic class, MTU and READs in flight ([`VerbsOptions`](mlx5::verbs::VerbsOptions)).
//!   [`EndpointConfig::connect`] has timeout, retries and RNR timer of one connection
//!   ([`ConnectOptions`](mlx5::ConnectOptions)). Values that the device lacks are refused. Two ends
//!   of unequal MTUs use the smaller one ([`Endpoint::path_mtu`]).
//!
//! ## What makes it fast
//!
//! - **Depth.** All calls between two polls share a WRITE, and the peer's NIC handles WRITEs, not
//!   messages. Keep calls outstanding, and do not flush after each: [`Stats`] shows messages per
//!   batch.
//! - **Window.** An owner that polls often sends many small WRITEs. With [`EndpointConfig::window`]
//!   a WRITE waits for earlier WRITEs, so that more messages gather in it: a [`Window`] of one or
//!   two batches, paced by their completion at this end or by their arrival at the peer.
//! - **Rings.** [`EndpointConfig::ring_size`] bounds the bytes in flight: about half of the ring
//!   are requests, a quarter the replies to them. When [`Stats::ring_full`] or
//!   [`Stats::insufficient_credit`] grow steadily, the ring is too small, or the response
//!   allowances are larger than the replies.
//! - **Batches in flight.** [`EndpointConfig::batches_in_flight`] bounds the number of WRITEs under
//!   way; [`Stats::batch_stalls`] counts the flushes that this limit stopped.
//! - **Copies.** One into the ring at each end, one out of it. [`RecvBytes::read`] and
//!   [`RecvBytes::copy_to`] allocate nothing.
//! - **Idle endpoints** cost a poll nothing, and a READ per [`EndpointConfig::idle_keepalive`]
//!   each; a context may have thousands.

#[cfg(doc)]
use crate::{
    AsyncClient, AsyncServer, CallError, CallFailure, Client, Context, ContextBuilder, Endpoint,
    EndpointConfig, Memory, RecvBytes, RecvHandle, RemoteMemory, Reply, Server, Stats, Window,
    mlx5,
};
