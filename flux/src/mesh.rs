//! The memory that the nodes of one network share: a lane per ordered pair, and the words that wake
//! an idle node.

use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use copyrpc_calls::{Tag, Tagged};
use copyrpc_shm::dropped::{Dropped, Numbered};
use copyrpc_shm::lane::Slot;
use copyrpc_shm::ready::{ARMED, ReadyWords};
use copyrpc_shm::sleep::Sleep;
use copyrpc_shm::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering, light_barrier_within_process};
use crossbeam_utils::CachePadded;

/// Note of a message: the answer to a call.
pub(crate) const REPLY: u8 = copyrpc_calls::ANSWERED;
/// Note of a message: a call. The only note with this bit, by which the receiver recognises calls.
pub(crate) const CALL: u8 = Tag::LAST_BIT;
/// Note of a message: there will be no answer to a call. It has no payload.
pub(crate) const REJECTION: u8 = copyrpc_calls::DROPPED;

/// A message. Its payload is initialised unless its note is [`REJECTION`].
pub(crate) type Message<T> = Tagged<MaybeUninit<T>>;
type Lane<T> = Box<[Slot<Message<T>>]>;

/// A received call: its tag, the node that made it and the node that received it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Received {
    pub(crate) tag: Tag,
    pub(crate) from: u32,
    pub(crate) to: u32,
}

/// The signals by which other nodes announce their calls to a node.
struct Inbound {
    /// Flags that ask for a ready bit, by sender.
    armed: Box<[Line<AtomicU32>]>,
    ready: Box<[Line<AtomicU64>]>,
    /// Received calls whose tokens were dropped. They are announced by the node's own index in
    /// `armed` and `ready`, since it does not call itself.
    dropped: Dropped<Received>,
    /// The node was dropped.
    closed: AtomicBool,
    /// The words have a line of their own, because the node writes them before it sleeps, and all
    /// nodes read the other fields.
    sleep: CachePadded<Sleep>,
}

/// The words of one array, on cache lines that hold nothing else. They are read with every message
/// and rarely written, so they must not share a line with other words that are written. (Loom's
/// atomics are larger, and have no cache lines.)
#[cfg_attr(not(loom), repr(C, align(64)))]
#[cfg_attr(loom, repr(C))]
struct Line<W>([W; WORDS_PER_LINE]);

const WORDS_PER_LINE: usize = 8;

#[cfg(not(loom))]
const _: () = assert!(size_of::<Line<AtomicU64>>() == 64 && size_of::<Line<AtomicU32>>() == 64);

/// Makes the lines for `words` words.
fn lines<W>(words: usize, word: impl Fn() -> W) -> Box<[Line<W>]> {
    (0..words.div_ceil(WORDS_PER_LINE))
        .map(|_| Line(std::array::from_fn(|_| word())))
        .collect()
}

/// The words of another node that are read with every message to it. They live as long as the mesh.
#[derive(Clone, Copy)]
pub(crate) struct Towards {
    armed: NonNull<AtomicU32>,
    sleep: NonNull<Sleep>,
    closed: NonNull<AtomicBool>,
    ready: ReadyWords,
    from: usize,
}

// SAFETY: a `Towards` points to atomics of the mesh, which any thread may use; `notify` demands
// that the mesh exists.
unsafe impl Send for Towards {}

impl Towards {
    /// Notifies the node of a published message, if it does not poll the lane. Returns whether the
    /// node was found to be dropped.
    ///
    /// # Safety
    /// The mesh exists.
    #[inline(always)]
    pub(crate) unsafe fn notify(&self) -> bool {
        // R1 (`docs/shm-protocols.md`)
        light_barrier_within_process();
        // SAFETY: the mesh exists (contract of this function), and with it its words.
        let is_armed = unsafe { self.armed.as_ref() }.load(Ordering::Relaxed) == ARMED;
        // SAFETY: as above.
        is_armed && unsafe { self.announce() }
    }

    /// Announces a published message. Returns whether the node was found to be dropped.
    ///
    /// # Safety
    /// The mesh exists.
    #[cold]
    #[inline(never)]
    unsafe fn announce(&self) -> bool {
        // SAFETY: the mesh exists (contract of this function), and with it its words.
        let (closed, sleep) = unsafe { (self.closed.as_ref(), self.sleep.as_ref()) };
        // M4 (module `node`)
        let is_closed = closed.load(Ordering::Acquire);
        if !is_closed {
            self.ready.notify(self.from);
            sleep.wake();
        }
        is_closed
    }
}

/// The networks of this process, for tokens.
static NETWORKS: Numbered<Weak<Signals>> = Numbered::new();

/// The shared parts of the network except the lanes.
pub(crate) struct Signals {
    nodes: Box<[Inbound]>,
}

/// Everything that the nodes of a network share; the last node frees it.
pub(crate) struct Mesh<T> {
    /// Lanes by receiver, then by sender.
    lanes: Box<[Box<[Lane<T>]>]>,
    signals: Arc<Signals>,
    /// Number of the network in [`NETWORKS`].
    pub(crate) number: u64,
}

/// Asks the node that received a call to reject it; does nothing if the network was dropped. It may
/// be called from any thread.
#[cold]
pub(crate) fn reject(network: u64, received: Received) {
    if let Some(signals) = NETWORKS.with(network, Weak::upgrade).flatten() {
        signals.reject(received);
    }
}

impl<T> Drop for Mesh<T> {
    fn drop(&mut self) {
        NETWORKS.remove(self.number);
    }
}

// SAFETY: the sequence words of the lanes hand the slots from thread to thread (L1 of
// `docs/shm-protocols.md`); the rest is atomics.
unsafe impl<T: Send> Sync for Mesh<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Mesh<T> {}

impl<T> Mesh<T> {
    pub(crate) fn new(nodes: usize, capacity: usize) -> Self {
        // A node does not call itself: that lane has the minimum length.
        let lane = |from: usize, to: usize| {
            (0..if from == to { 1 } else { capacity })
                .map(|_| Slot::empty())
                .collect()
        };
        let inbound = |_| Inbound {
            armed: lines(nodes, || AtomicU32::new(ARMED)),
            ready: lines(ReadyWords::words(nodes), || AtomicU64::new(0)),
            dropped: Dropped::default(),
            closed: AtomicBool::new(false),
            sleep: CachePadded::default(),
        };
        let signals = Arc::new(Signals {
            nodes: (0..nodes).map(inbound).collect(),
        });
        let number = NETWORKS.add(Arc::downgrade(&signals));
        Self {
            lanes: (0..nodes)
                .map(|to| (0..nodes).map(|from| lane(from, to)).collect())
                .collect(),
            signals,
            number,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.lanes.len()
    }

    /// Returns the slots of the lane from one node to another, and their number.
    pub(crate) fn lane(&self, from: usize, to: usize) -> Option<(NonNull<Slot<Message<T>>>, u64)> {
        let lane = self.lanes.get(to)?.get(from)?;
        Some((NonNull::from(&**lane).cast(), lane.len() as u64))
    }

    pub(crate) fn signals(&self) -> &Signals {
        &self.signals
    }
}

impl Signals {
    #[inline(always)]
    pub(crate) fn armed(&self, from: usize, to: usize) -> Option<&AtomicU32> {
        self.nodes
            .get(to)?
            .armed
            .get(from / WORDS_PER_LINE)?
            .0
            .get(from % WORDS_PER_LINE)
    }

    /// Returns the words that `from` reads with every message to `to`.
    pub(crate) fn towards(&self, from: usize, to: usize) -> Option<Towards> {
        let armed = self.armed(from, to)?;
        let sleep = self.sleep(to)?;
        let closed = &self.nodes.get(to)?.closed;
        Some(Towards {
            armed: armed.into(),
            sleep: sleep.into(),
            closed: closed.into(),
            ready: self.ready(to)?,
            from,
        })
    }

    /// Returns the ready bits of the lanes to `to`.
    pub(crate) fn ready(&self, to: usize) -> Option<ReadyWords> {
        let words = &*self.nodes.get(to)?.ready;
        // SAFETY: these are at least `words(nodes)` consecutive atomics, because they fill each
        // line. They live as long as the mesh, and so as long as any node.
        Some(unsafe { ReadyWords::new(NonNull::from(words).cast(), self.nodes.len()) })
    }

    pub(crate) fn sleep(&self, node: usize) -> Option<&Sleep> {
        self.nodes.get(node).map(|inbound| &*inbound.sleep)
    }

    /// Returns the calls that `node` must reject.
    pub(crate) fn dropped(&self, node: usize) -> Option<&Dropped<Received>> {
        self.nodes.get(node).map(|inbound| &inbound.dropped)
    }

    fn reject(&self, received: Received) {
        let node = received.to as usize;
        let (Some(dropped), Some(armed), Some(ready)) =
            (self.dropped(node), self.armed(node, node), self.ready(node))
        else {
            return;
        };
        dropped.push(received);
        // R1, W1: as with a message from another node.
        if ready.notify_if_armed(node, armed) {
            self.nodes
                .get(node)
                .into_iter()
                .for_each(|inbound| inbound.sleep.wake());
        }
    }

    /// Marks `node` as closed: it takes no more messages.
    pub(crate) fn close(&self, node: usize) {
        if let Some(inbound) = self.nodes.get(node) {
            // M4
            inbound
                .armed
                .iter()
                .flat_map(|line| &line.0)
                .for_each(|armed| armed.store(ARMED, Ordering::Relaxed));
            // M3
            inbound.closed.store(true, Ordering::Release);
        }
    }

    /// Returns whether `node` was closed.
    pub(crate) fn is_closed(&self, node: usize) -> bool {
        // M3
        self.nodes
            .get(node)
            .is_some_and(|inbound| inbound.closed.load(Ordering::Acquire))
    }
}
