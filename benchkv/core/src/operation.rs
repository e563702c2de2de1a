//! [`Operation`]: the record of an outstanding operation. The path that carries the operation keeps
//! it.

use std::num::NonZero;

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
    pub(crate) fn numbered(access: u32) -> Self {
        Self {
            access,
            moment: 0,
            intended_ns: 0,
            issued_ns: 0,
            place: 0,
            kind: Kind::GET.to(true),
        }
    }
}

/// The kind of an operation, as bits. It has 32 bits, so that an [`Operation`] has no padding, which
/// would split its copy into several; and it is never 0, so that an `Option<Operation>` is no longer
/// than an [`Operation`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kind(NonZero<u32>);

const _: () = assert!(size_of::<Option<Operation>>() == 32);

impl Kind {
    const PUT_BIT: u32 = 1;
    const REMOTE_BIT: u32 = 2;
    const PRIVATE_BIT: u32 = 4;

    pub(crate) const GET: Self = Self::of(0);
    pub(crate) const PUT: Self = Self::of(Self::PUT_BIT);
    pub(crate) const PRIVATE_GET: Self = Self::of(Self::PRIVATE_BIT);
    pub(crate) const PRIVATE_PUT: Self = Self::of(Self::PRIVATE_BIT | Self::PUT_BIT);

    /// Number of groups of operations, whose round trips are recorded separately.
    pub(crate) const GROUPS: usize = 4;

    /// Makes the kind with these bits, and one more above them.
    const fn of(bits: u32) -> Self {
        Self(NonZero::<u32>::MIN.saturating_add(7 + bits))
    }

    /// Returns the kind with the place of the key: another rank (`is_remote`), or the client's own.
    #[inline(always)]
    pub(crate) fn to(self, is_remote: bool) -> Self {
        Self(self.0 | (u32::from(is_remote) * Self::REMOTE_BIT))
    }

    /// Returns the group of the kind: 0 gets and 1 puts on the client's own rank, 2 gets and 3 puts
    /// on other ranks.
    #[inline(always)]
    pub(crate) const fn group(self) -> usize {
        (self.0.get() & (Self::PUT_BIT | Self::REMOTE_BIT)) as usize
    }

    #[inline(always)]
    pub(crate) const fn is_put(self) -> bool {
        self.0.get() & Self::PUT_BIT != 0
    }

    #[inline(always)]
    pub(crate) const fn is_private(self) -> bool {
        self.0.get() & Self::PRIVATE_BIT != 0
    }

    /// Returns whether the verification judges the outcome: of every operation except a put of a
    /// shared key.
    #[inline(always)]
    pub(crate) const fn is_judged(self) -> bool {
        self.0.get() & (Self::PUT_BIT | Self::PRIVATE_BIT) != Self::PUT_BIT
    }
}
