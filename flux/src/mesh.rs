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

/// Note of an answer. A note is 8 bits of a message's tag word, beside the tag: see [`Tag::pack`].
pub(crate) const REPLY: u8 = copyrpc_calls::ANSWERED;
/// Note of a call: the only note with the bit that [`Tag::with_last_bit`] checks.
pub(crate) const CALL: u8 = Tag::LAST_BIT;
/// Note of a message without payload: its call gets no answer.
pub(crate) const REJECTION: u8 = copyrpc_calls::DROPPED;

/// A message. Its payload is initialised unless its note is [`REJECTION`].
pub(crate) type Message<T> = Tagged<MaybeUninit<T>>;
type Lane<T> = Box<[Slot<Message<T>>]>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Received {
    pub(crate) tag: Tag,
    pub(crate) from: u32,
    pub(crate) to: u32,
}

/// The signals by which other nodes announce their messages to a node.
struct Inbound {
    /// Flags by sender: a sender whose flag is set announces its messages by its ready bit.
    armed: Box<[Line<AtomicU32>]>,
    ready: Box<[Line<AtomicU64>]>,
    /// Received calls whose tokens were dropped. The node's own index in `armed` and `ready`
    /// announces them, since the node does not call itself.
    dropped: Dropped<Received>,
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

fn lines<W>(words: usize, word: impl Fn() -> W) -> Box<[Line<W>]> {
    (0..words.div_ceil(WORDS_PER_LINE))
        .map(|_| Line(std::array::from_fn(|_| word())))
        .collect()
}

/// The words of another node by which a message to it is announced. They live as long as the mesh.
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
    /// Announces a published message if the receiver does not poll the lane. Returns whether the
    /// receiver was found to be dropped.
    ///
    /// # Safety
    /// The mesh exists.
    #[inline(always)]
    pub(crate) unsafe fn notify(&self) -> bool {
        // R1 (`docs/shm-protocols.md`): the message is published before the flag is loaded.
        light_barrier_within_process();
        // SAFETY: the mesh exists (contract of this function), and with it its words.
        let is_armed = unsafe { self.armed.as_ref() }.load(Ordering::Relaxed) == ARMED;
        // SAFETY: as above.
        is_armed && unsafe { self.announce() }
    }

    /// Announces a published message. Returns whether the receiver was found to be dropped.
    ///
    /// # Safety
    /// The mesh exists.
    #[cold]
    #[inline(never)]
    unsafe fn announce(&self) -> bool {
        // SAFETY: the mesh exists (contract of this function), and with it its words.
        let (closed, sleep) = unsafe { (self.closed.as_ref(), self.sleep.as_ref()) };
        // M4 (module `node`): a node that is dropped sets its flags before it stores `closed`.
        let is_closed = closed.load(Ordering::Acquire);
        if !is_closed {
            self.ready.notify(self.from);
            sleep.wake();
        }
        is_closed
    }
}

/// The networks of this process by number: a token holds the number of its network.
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

/// Asks the receiver of a call to reject the call, if the network exists. Any thread may call this.
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
        // A node does not call itself: its lane to itself has the minimum length.
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

    pub(crate) fn ready(&self, to: usize) -> Option<ReadyWords> {
        let words = &*self.nodes.get(to)?.ready;
        // SAFETY: `words` has at least `ReadyWords::words(nodes)` atomics without gaps, as 8 of
        // them fill a line. They live as long as the mesh, which has at least one node.
        Some(unsafe { ReadyWords::new(NonNull::from(words).cast(), self.nodes.len()) })
    }

    pub(crate) fn sleep(&self, node: usize) -> Option<&Sleep> {
        self.nodes.get(node).map(|inbound| &*inbound.sleep)
    }

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
        // Announces the rejection like a message from another node (R1 and W1 of
        // `docs/shm-protocols.md`).
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
            // M4: a sender that finds its flag set then checks `closed`.
            inbound
                .armed
                .iter()
                .flat_map(|line| &line.0)
                .for_each(|armed| armed.store(ARMED, Ordering::Relaxed));
            // M3 (module `node`): the node has sent its last message.
            inbound.closed.store(true, Ordering::Release);
        }
    }

    pub(crate) fn is_closed(&self, node: usize) -> bool {
        // M3: if this is `true`, all messages of the node are visible.
        self.nodes
            .get(node)
            .is_some_and(|inbound| inbound.closed.load(Ordering::Acquire))
    }
}
