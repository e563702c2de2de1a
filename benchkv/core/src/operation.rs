//! [`Operation`]: the record of an outstanding operation. The path that carries the operation keeps
//! it.

/// An operation from its issue to its end. It cannot be copied, so no path can end it twice.
#[derive(Debug)]
pub struct Operation {
    /// Index of its access in the client's pattern.
    pub(crate) access: u32,
    /// Number of operations that the client had issued, including this operation, as its
    /// [`Verifier`](crate::verify::Verifier) counts.
    pub(crate) moment: u32,
    /// Start of the latency, in ns: the intended start in an open loop, the issue in a closed loop.
    pub(crate) intended_ns: u64,
    pub(crate) issued_ns: u64,
    /// The client's [place](crate::values) for the tail of the operation's value, if values have
    /// tails.
    pub(crate) place: u32,
    pub(crate) kind: Kind,
}

impl Operation {
    /// Returns a copy, which the client keeps in case the path refuses the operation.
    #[inline(always)]
    pub(crate) const fn again(&self) -> Self {
        Self { ..*self }
    }
}

#[cfg(test)]
impl Operation {
    /// Makes an operation whose `access` distinguishes it from others.
    pub(crate) const fn numbered(access: u32) -> Self {
        Self {
            access,
            moment: 0,
            intended_ns: 0,
            issued_ns: 0,
            place: 0,
            kind: Kind::RemoteGet,
        }
    }
}

/// The kind of an operation. It has 32 bits, so that an [`Operation`] has no padding, which would
/// split its copy into several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Kind {
    LocalGet,
    LocalPut,
    RemoteGet,
    RemotePut,
}

impl Kind {
    pub(crate) const ALL: [Self; 4] = [
        Self::LocalGet,
        Self::LocalPut,
        Self::RemoteGet,
        Self::RemotePut,
    ];

    #[inline(always)]
    pub(crate) const fn new(is_remote: bool, is_put: bool) -> Self {
        match (is_remote, is_put) {
            (false, false) => Self::LocalGet,
            (false, true) => Self::LocalPut,
            (true, false) => Self::RemoteGet,
            (true, true) => Self::RemotePut,
        }
    }

    #[inline(always)]
    pub(crate) const fn is_put(self) -> bool {
        self as u32 % 2 == 1
    }
}
