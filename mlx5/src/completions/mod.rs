//! Completion queues: the ring of CQEs, plain or compressed, and the two types of queue that hand
//! out its CQEs.

pub(crate) mod cq;
pub(crate) mod cq_object;
pub(crate) mod cqe;
pub(crate) mod fast_map;
pub(crate) mod mono_cq;
