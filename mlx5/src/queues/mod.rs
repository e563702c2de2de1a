//! Work queues: operations become WQEs in them, and the doorbell announces the WQEs to the device.

pub(crate) mod batch;
pub(crate) mod doorbell;
pub(crate) mod qp;
pub(crate) mod rc_qp;
pub(crate) mod rq;
pub(crate) mod sq;
pub(crate) mod srq;
pub(crate) mod ud_qp;
