//! The rules of [`Context`] and [`Endpoint`], their limits, what there is beside calls, and what
//! makes them fast.
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
//!   comes too late reaches no call. A reply that breaks the protocol ends its own connection only.
//!   To go on with a peer, connect a new endpoint.
//! - **Peers that leave.** While requests are unanswered or replies not taken, a peer whose process
//!   died is noticed at latest about two [keep-alive](EndpointConfig::keepalive) intervals later,
//!   and one that is stopped, or does not poll, after its [stall
//!   timeout](EndpointConfig::stall_timeout); a handler of [`serve`](Context::serve) may take any
//!   time. On an idle connection a dead peer is noticed within about two [idle
//!   keep-alive](EndpointConfig::idle_keepalive) intervals, half a second of the device's retries
//!   added; a living one is kept, unless there is an [idle timeout](EndpointConfig::idle_timeout).
//!   An endpoint that has ended has given everything back, even while handles of it are kept: queue
//!   pair, share of the queues, and rings. Only a receive ring in which the application has
//!   requests stays.
//! - **Close.** [`Endpoint::close`] ends a connection when all that is outstanding has ended, on
//!   both sides, and so does dropping the last handle of an endpoint; [`Endpoint::abort`] ends it
//!   at once. Dropping the context sends what was answered and tells the peers that it goes, and
//!   waits until that has arrived, 20 ms at most.
//! - **Order.** Requests are received in the order they were called; replies may be given in any
//!   order, and a request may be held as long as needed. Its bytes stay in the ring until it is
//!   answered, and so does what came behind it.
//! - **Limits.** A request has at most `ring_size / 8 - 12` bytes, a response
//!   `3 * ring_size / 16 - 44`. Larger ones are always refused; `RingFull` and `InsufficientCredit`
//!   pass after polls ([`CallError::is_retryable`]).
//! - **Queues.** The endpoints of a context share its queues, which [`ContextBuilder::endpoints`]
//!   sizes: two thirds of the SRQ's receives for their batches in flight, and of the send CQ that
//!   number + their one-sided operations + 8 each, and the batches of a [`Window::Completion`]. One
//!   endpoint too many is refused with the size needed, and its peer hears so.
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
//!   queue: 10,000 endpoints with 2 batches each are what was tried (`tests/many.rs`).
//! - **Memory.** An endpoint has two rings, 64 bytes of a registered region that 64 endpoints
//!   share, a send queue as long as its batches in flight need
//!   ([`EndpointConfig::send_queue_wqebbs`]), and what calls and requests outstanding need. After
//!   warm-up nothing is allocated for a call.
//! - **Fork.** A forked child has none of the registered memory and queues: it must not touch a
//!   context or anything made from one, nor drop it, and should `exec` or `_exit`. The parent is
//!   not disturbed, and the child keeps nothing of it alive: peers notice the parent's end.
//! - **Trust.** A peer's bytes are validated before use. [`RecvBytes`] lie in memory that the
//!   peer's NIC can write: copy them out, or vouch for the peer with `as_slice`.
//!
//! ## Beside plain calls
//!
//! - **Waiting.** A poll that finds nothing costs about a hundred instructions, and a core if it is
//!   repeated forever. [`Context::wait`] sleeps until there is something to poll for, and wakes for
//!   deadlines and to watch peers; an idle server that waits does not poll at all. A thread that
//!   polls other things as well sleeps on the context and on them with `copyrpc_shm::sleep::wait`.
//! - **Futures.** [`AsyncClient`] and [`AsyncServer`] have a thread that sleeps on the device, so
//!   that their futures are of any thread and executor.
//! - **Methods.** [`service!`](crate::service!) makes a client with methods, and a trait for the
//!   server to implement: [`methods`](crate::methods).
//! - **Bulk data.** What is larger than a message goes in [`parts`](crate::parts), or around the
//!   messages: one side puts the [`RemoteMemory`] of a [`Memory`] into a request, the other
//!   [READs](Endpoint::rdma_read) or [WRITEs](Endpoint::rdma_write) it piece by piece and then
//!   answers (`examples/bulk.rs`). A WRITE posted before a call or reply of the same endpoint is
//!   done when that message arrives. Every peer that was told a memory can read and write it until
//!   it is dropped.
//! - **Fabric.** The device says how its peers are reached:
//!   [`DeviceSpec::Verbs`](mlx5::DeviceSpec::Verbs) takes the port, GID index, P_Key index, service
//!   level, traffic class, MTU and READs in flight ([`VerbsOptions`](mlx5::verbs::VerbsOptions)).
//!   [`EndpointConfig::connect`] has timeout, retries and RNR timer of one connection
//!   ([`ConnectOptions`](mlx5::ConnectOptions)). Values that the device lacks are refused. Two ends
//!   of unequal MTUs use the smaller one ([`Endpoint::path_mtu`]).
//!
//! ## What makes it fast
//!
//! - **Depth.** Whatever is called between two polls shares a WRITE, and the peer's NIC handles
//!   WRITEs, not messages. Keep calls outstanding, and do not flush after each: [`Stats`] shows
//!   messages per batch.
//! - **Window.** An owner that polls often sends many small WRITEs. With [`EndpointConfig::window`]
//!   they wait for those before them, so that more gathers in each: a [`Window`] of one or two
//!   batches, in the clock of their completion here or of their arrival there.
//! - **Rings.** [`EndpointConfig::ring_size`] bounds the bytes in flight: about half of the ring
//!   are requests, a quarter the replies to them. When [`Stats::ring_full`] or
//!   [`Stats::insufficient_credit`] grow steadily, it is too small, or the response allowances are
//!   larger than the replies.
//! - **Batches in flight.** [`EndpointConfig::batches_in_flight`] bounds the WRITEs under way;
//!   [`Stats::batch_stalls`] counts the flushes it stopped.
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
