//! Payloads that may cross a process boundary.

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Plain old data: any bytes are a valid value (a peer's bytes are not trusted), there is no
/// padding (which would copy this process's memory to another process), and a copy of the bytes is
/// a valid value. Implemented for every type that derives the four traits. An `enum` can derive
/// them only if every pattern of its bits is a variant. Three of the traits are from the crate
/// `zerocopy` 0.8: to derive them, a program adds that crate, with its feature `derive`, to its own
/// dependencies.
pub trait Plain: FromBytes + IntoBytes + Immutable + Copy + 'static {}

impl<T: FromBytes + IntoBytes + Immutable + Copy + 'static> Plain for T {}

/// Sizes, alignments and tag of the payload types of an RPC, on which both ends must agree. The
/// value lies in shared memory, and takes 24 bytes.
///
/// The sizes catch most mistakes; `tag` is a number of the application, which the application
/// changes when the meaning of the fields changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct TypeShape {
    /// Size of a request in bytes.
    pub request_bytes: u32,
    /// Alignment of a request in bytes.
    pub request_align: u32,
    /// Size of a response in bytes.
    pub response_bytes: u32,
    /// Alignment of a response in bytes.
    pub response_align: u32,
    /// The application's own type tag.
    pub tag: u64,
}

const _: () = assert!(size_of::<TypeShape>() == 24);

impl TypeShape {
    /// Returns the shape of an RPC from `Req` to `Resp`. Sizes beyond `u32` become `u32::MAX`,
    /// which no region can hold.
    #[must_use]
    pub const fn of<Req: Plain, Resp: Plain>(tag: u64) -> Self {
        const fn clamp(n: usize) -> u32 {
            if n > u32::MAX as usize {
                u32::MAX
            } else {
                n as u32
            }
        }
        Self {
            request_bytes: clamp(size_of::<Req>()),
            request_align: clamp(align_of::<Req>()),
            response_bytes: clamp(size_of::<Resp>()),
            response_align: clamp(align_of::<Resp>()),
            tag,
        }
    }
}

impl std::fmt::Display for TypeShape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            request_bytes,
            request_align,
            response_bytes,
            response_align,
            tag,
        } = self;
        write!(
            f,
            "requests of {request_bytes} B (align {request_align}), responses of {response_bytes} B (align {response_align}), tag {tag:#x}"
        )
    }
}
