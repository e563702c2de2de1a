//! The litmus programs: what each thread executes, and which outcomes the model forbids or allows.
//!
//! The facts come from G. Ambal, B. Dongol, H. Eran, V. Klimis, O. Lahav and A. Raad, "Semantics
//! of Remote Direct Memory Access: Operational and Declarative Models of RDMA on TSO Architectures"
//! (OOPSLA 2024), which calls its model RDMA^TSO; those of remote atomics come from G. Ambal, M.
//! Stupple, B. Dongol and A. Raad, "Specifying and Verifying RDMA Synchronisation" (2026). The
//! programs are written for this suite. In the model
//! - an operation takes effect after all loads and stores that its thread executed before the post;
//! - a put (RDMA WRITE) reads its source at any time until its completion is polled, and later
//!   writes its target, perhaps even after the poll;
//! - a get (RDMA READ) reads its source, and then writes its target, at any time until its
//!   completion is polled;
//! - the puts of one queue pair read their sources, and write their targets, in the order of the
//!   posts; a get or an atomic behind a put of the same queue pair reads what this put wrote;
//! - a put or get behind a get does not wait for it, unless it has a fence;
//! - operations of different queue pairs have no order, except that a polled get is over before
//!   all that its thread does later;
//! - remote atomics are atomic to each other.

/// A litmus program.
///
/// A word is a letter and the number of the node that has it; a register is a letter. All are 0 at
/// first, but for those in `init`. The statements of a thread, separated by `;`:
///
/// | statement | meaning |
/// |---|---|
/// | `x0 = 1` | stores a number in a word of the thread's node |
/// | `a = x0` | loads a word of the thread's node into a register |
/// | `wait x0` | loads a word of the thread's node until it is not 0 |
/// | `put y1 x0` | posts a WRITE of the own word `x0` to word `y1` of node 1 |
/// | `get x0 y1` | posts a READ of `y1` into the own word `x0` |
/// | `faa x0 y1 2` | posts a fetch-and-add of 2 to `y1`, whose old value comes into `x0` |
/// | `cas x0 y1 0 2` | posts a compare-and-swap of `y1` from 0 to 2 |
/// | `poll 1` | waits for the completion of the thread's oldest operation on node 1 |
///
/// A thread has two queue pairs to each node; `put'`, `get'` and `poll'` use the second.
/// `fence` before an operation gives it the fence flag. An outcome is a list of values of registers
/// and, when all operations are complete, of words.
pub(crate) struct Program {
    pub(crate) name: &'static str,
    pub(crate) init: &'static str,
    /// The node of each thread, and its statements.
    pub(crate) threads: &'static [(usize, &'static str)],
    pub(crate) forbidden: &'static [&'static str],
    /// Outcomes that the model allows and that no interleaving of whole operations has; and the
    /// runs that must show them.
    pub(crate) weak: &'static [(&'static str, Shown)],
}

/// The runs that must show a weak outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    /// Runs with delays.
    Late,
    /// Runs by packets.
    Packets,
    /// Runs with delays, and runs by packets.
    Both,
}
use Shown::{Both, Late, Packets};

const fn program(
    name: &'static str,
    init: &'static str,
    threads: &'static [(usize, &'static str)],
    forbidden: &'static [&'static str],
    weak: &'static [(&'static str, Shown)],
) -> Program {
    Program {
        name,
        init,
        threads,
        forbidden,
        weak,
    }
}

#[rustfmt::skip]
pub(crate) const PROGRAMS: &[Program] = &[
    // One operation and its thread.
    program("a put reads what was stored before it", "",
        &[(0, "x0 = 1; put y1 x0; poll 1")], &["y1=0"], &[]),
    program("a put that was polled has read its source", "x0=1",
        &[(0, "put y1 x0; poll 1; x0 = 2")], &["y1=2", "y1=0"], &[]),
    program("a put reads its source late", "x0=1",
        &[(0, "put y1 x0; x0 = 2; poll 1")], &["y1=0"], &[("y1=2", Late)]),
    program("a get that was polled has written its target", "y1=1",
        &[(0, "get x0 y1; poll 1; a = x0")], &["a=0"], &[]),
    program("a get writes its target late", "y1=1",
        &[(0, "get x0 y1; a = x0; poll 1")], &["x0=0"], &[("a=0", Both)]),
    program("a get overwrites a later store", "y1=1",
        &[(0, "get x0 y1; x0 = 2; poll 1")], &["x0=0"], &[("x0=1", Both)]),
    program("an atomic that was polled has written its result", "y1=3",
        &[(0, "faa x0 y1 2; poll 1; a = x0")], &["a=0", "a=5", "y1=3"], &[]),
    program("an atomic writes its result late", "y1=3",
        &[(0, "faa x0 y1 2; a = x0; poll 1")], &["a=5"], &[("a=0", Both)]),

    // Two operations of a queue pair.
    program("puts of a queue pair are in order", "v0=1",
        &[(0, "put y1 v0; put z1 v0"), (1, "wait z1; b = y1")], &["b=0"], &[]),
    program("the later of two puts stays", "v0=1 w0=2",
        &[(0, "put y1 v0; put y1 w0"), (1, "a = y1; b = y1")],
        &["y1=1", "a=2 b=1", "a=2 b=0", "a=1 b=0"], &[]),
    program("a get reads what the put before it wrote", "v0=1",
        &[(0, "put y1 v0; get x0 y1; poll 1; poll 1; a = x0")], &["a=0"], &[]),
    program("an atomic finds what the put before it wrote", "v0=1",
        &[(0, "put y1 v0; cas x0 y1 1 2; poll 1; poll 1; a = x0")], &["a=0", "y1=1"], &[]),
    program("an atomic behind a put is seen after it", "v0=1",
        &[(0, "put y1 v0; faa x0 z1 1"), (1, "wait z1; b = y1")], &["b=0"], &[]),
    program("a put does not wait for the get before it", "y1=1",
        &[(0, "get x0 y1; put z1 x0")], &[], &[("z1=0", Packets)]),
    program("a put with a fence sends what the get before it read", "y1=1",
        &[(0, "get x0 y1; fence put z1 x0")], &["z1=0"], &[]),
    program("a put behind a polled get sends what it read", "y1=1",
        &[(0, "get x0 y1; poll 1; put z1 x0")], &["z1=0"], &[]),
    program("a put overtakes the get before it", "w0=1",
        &[(0, "get x0 y1; put y1 w0")], &["y1=0"], &[("x0=1", Packets)]),
    program("a put with a fence does not overtake the get before it", "w0=1",
        &[(0, "get x0 y1; fence put y1 w0")], &["x0=1", "y1=0"], &[]),
    program("a put does not overtake a polled get", "w0=1",
        &[(0, "get x0 y1; poll 1; put y1 w0")], &["x0=1", "y1=0"], &[]),
    program("a put with a fence sends what the atomic before it found", "y1=3",
        &[(0, "faa x0 y1 2; fence put z1 x0")], &["z1=0", "z1=5"], &[]),
    program("a put with a fence is seen after the atomic before it", "w0=1",
        &[(0, "faa x0 y1 1; fence put z1 w0"), (1, "wait z1; b = y1")], &["b=0"], &[]),

    // Two queue pairs of a thread.
    program("puts of two queue pairs have no order", "v0=1",
        &[(0, "put y1 v0; put' z1 v0"), (1, "wait z1; b = y1")], &[], &[("b=0", Both)]),
    program("the earlier of two puts of two queue pairs may stay", "v0=1 w0=2",
        &[(0, "put y1 v0; put' y1 w0")], &["y1=0"], &[("y1=1", Both)]),
    program("a get of another queue pair may miss a put", "v0=1",
        &[(0, "put y1 v0; get' x0 y1; poll' 1; a = x0")], &[], &[("a=0", Both)]),
    program("puts to two nodes have no order", "v0=1",
        &[(0, "put y1 v0; put z2 v0"), (2, "wait z2; get x2 y1; poll 1; b = x2")],
        &[], &[("b=0", Both)]),
    program("polled gets are in order", "v0=1",
        &[(0, "put y1 v0; put z1 v0"), (2, "get a2 z1; poll 1; get b2 y1; poll 1; a = a2; b = b2")],
        &["a=1 b=0"], &[]),
    program("polled gets of two queue pairs are in order", "v0=1",
        &[(0, "put y1 v0; put z1 v0"),
          (2, "get a2 z1; poll 1; get' b2 y1; poll' 1; a = a2; b = b2")], &["a=1 b=0"], &[]),

    // Threads of two and three nodes.
    program("message passing by stores and gets", "",
        &[(0, "x0 = 1; y0 = 1"), (1, "get a1 y0; poll 0; get b1 x0; poll 0; a = a1; b = b1")],
        &["a=1 b=0"], &[]),
    program("a word that is read twice does not go back", "",
        &[(0, "y0 = 1; y0 = 2"), (1, "get a1 y0; poll 0; get b1 y0; poll 0; a = a1; b = b1")],
        &["a=2 b=1", "a=2 b=0", "a=1 b=0"], &[]),
    program("stores before gets", "",
        &[(0, "x0 = 1; get a0 y1; poll 1; a = a0"), (1, "y1 = 1; get b1 x0; poll 0; b = b1")],
        &["a=0 b=0"], &[]),
    program("puts before loads", "v0=1 v1=1",
        &[(0, "put y1 v0; a = x0"), (1, "put x0 v1; b = y1")], &[], &[("a=0 b=0", Both)]),
    program("puts, made visible by gets, before loads", "v0=1 v1=1",
        &[(0, "put y1 v0; get w0 y1; poll 1; poll 1; a = x0"),
          (1, "put x0 v1; get w1 x0; poll 0; poll 0; b = y1")], &["a=0 b=0"], &[]),
    program("loads before puts", "v0=1 v1=1",
        &[(0, "a = x0; put y1 v0"), (1, "b = y1; put x0 v1")], &["a=1 b=1"], &[]),
    program("polled gets before puts", "v0=1 v1=1",
        &[(0, "get a0 x1; poll 1; a = a0; put y1 v0"), (1, "b = y1; x1 = 1")],
        &["a=1 b=1"], &[]),
    program("a store by a thread that has seen the second put", "v0=2 w0=1",
        &[(0, "put y1 v0; put z1 w0"), (1, "wait z1; y1 = 1")], &["y1=2"], &[]),
    program("two orders of two words", "a0=1 b0=2 c1=1 d1=2",
        &[(0, "put x2 a0; put y2 b0"), (1, "put y2 c1; put x2 d1")], &["x2=1 y2=1"], &[]),
    program("a word that was passed along", "v0=1",
        &[(0, "put y1 v0"), (1, "wait y1; put z2 y1"), (2, "wait z2; get w2 y1; poll 1; b = w2")],
        &["b=0"], &[]),
    program("all readers of a node see one order", "v0=1 v1=1",
        &[(0, "put y2 v0"), (1, "put z2 v1"), (2, "a = y2; b = z2"), (2, "c = z2; d = y2")],
        &["a=1 b=0 c=1 d=0"], &[]),

    // Remote atomics.
    program("two additions both count", "",
        &[(0, "faa a0 y2 1; poll 2; a = a0"), (1, "faa b1 y2 1; poll 2; b = b1")],
        &["a=0 b=0", "a=1 b=1", "y2=1"], &[]),
    program("two swaps exclude each other", "",
        &[(0, "cas a0 y2 0 1; poll 2; a = a0"), (1, "cas b1 y2 0 2; poll 2; b = b1")],
        &["a=0 b=0", "a=2 b=1", "y2=0"], &[]),
    program("what a lock protects", "",
        &[(0, "cas a0 l2 0 1; poll 2; a = a0; faa w0 x2 1; poll 2; faa w0 l2 1; poll 2"),
          (1, "get b1 l2; poll 2; get c1 x2; poll 2; b = b1; c = c1")],
        &["b=2 c=0"], &[]),
    program("an addition between two of another node", "",
        &[(0, "faa a0 y2 1; faa b0 y2 1; poll 2; poll 2; a = a0; b = b0"),
          (1, "faa c1 y2 1; poll 2; c = c1")],
        &["y2=2", "y2=1", "a=0 b=1 c=0", "a=0 b=1 c=1", "a=0 b=2 c=2", "a=1 b=2 c=1"], &[]),
];

impl Shown {
    /// Returns whether `run`, which is not [`Both`], must show the outcome.
    pub(crate) fn includes(self, run: Self) -> bool {
        self == run || self == Both
    }
}
