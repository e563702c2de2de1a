//! The kernel's structures: `rdma/ib_user_verbs.h` ([`verbs`]), `rdma/mlx5-abi.h` ([`mlx5`]) and
//! `rdma/rdma_user_cm.h` ([`cm`]); and the kernel's table of [`transitions`]. The sizes and offsets
//! of the structures are checked at compile time; a test compares them with the headers.

pub(crate) mod cm;
pub(crate) mod mlx5;
pub(crate) mod transitions;
pub(crate) mod verbs;

#[cfg(test)]
mod tests;

/// Declares structures with the sizes and the offsets of the C structures.
macro_rules! structures {
    ($($(#[$meta:meta])* struct $name:ident = $c:literal: $size:literal { $($offset:literal $field:ident: $ty:ty),* $(,)? })*) => {
        $(
            $(#[$meta])*
            #[derive(Clone, Copy, Debug, zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable)]
            #[repr(C)]
            #[allow(dead_code, reason = "the structure is the kernel's, whichever of its fields are read here")]
            pub(crate) struct $name {
                $(pub(crate) $field: $ty,)*
            }
            const _: () = {
                assert!(size_of::<$name>() == $size);
                $(assert!(core::mem::offset_of!($name, $field) == $offset);)*
            };
        )*
        /// Name, size, and fields with their offsets, of each structure.
        #[cfg(test)]
        #[allow(dead_code, reason = "for the test against the headers")]
        pub(crate) const LAYOUT: &[(&str, usize, &[(&str, usize)])] =
            &[$(($c, $size, &[$((stringify!($field), $offset)),*])),*];
    };
}
use structures;

/// Maximum number of READs and atomics of a queue pair in flight.
pub(crate) const MAX_RD_ATOMIC: u32 = 16;
