//! Typed messages: their bytes, and what is not of the type.

use copyrpc::typed::zerocopy::little_endian::{U16, U32, U64};
use copyrpc::typed::zerocopy::{FromBytes, Immutable, IntoBytes};
use copyrpc::typed::{Call, SizeError};
use copyrpc::{Context, ReplyError};
use mlx5::LocalFabric;

use super::{builder, connect, next_request, small, step_until};

#[derive(Clone, Copy, Debug, PartialEq, FromBytes, IntoBytes, Immutable)]
#[zerocopy(crate = "copyrpc::typed::zerocopy")]
#[repr(C)]
struct Entry {
    key: U64,
    len: U16,
    flags: [u8; 2],
}

impl Call for Entry {
    type Reply = U32;
}

#[test]
fn structs_travel_as_their_bytes_and_come_back_as_structs() {
    let fabric = LocalFabric::new();
    let (near, far): (Context<u64>, Context<u64>) = (builder(&fabric).build().unwrap(), builder(&fabric).build().unwrap());
    let (endpoint, _peer) = connect(&near, &far, &small());
    let entry = Entry { key: 0x0102_0304_0506_0708.into(), len: 0x1112.into(), flags: [0x21, 0x22] };
    endpoint.call_typed(&entry, 9).unwrap();
    near.flush_endpoints().unwrap();
    let request = next_request(&far);
    assert_eq!(request.data().to_vec(), [8, 7, 6, 5, 4, 3, 2, 1, 0x12, 0x11, 0x21, 0x22]);
    assert_eq!(request.read_as(), Ok(entry));
    assert_eq!(request.read_as::<U64>(), Err(SizeError { received: 12, expected: 8 }), "longer than the type");
    assert_eq!(request.read_as::<[u8; 13]>(), Err(SizeError { received: 12, expected: 13 }), "shorter");
    // Rings count 32 bytes, so the allowance is rounded up.
    let large = [0_u8; 100];
    assert!(request.max_reply() < large.len());
    let Err(ReplyError::TooLarge { request, len: 100, .. }) = request.reply_typed(&large) else { panic!("a type above the allowance") };
    request.reply_typed(&U32::new(7)).unwrap();
    far.flush_endpoints().unwrap();
    let mut ended = None;
    step_until(|| {
        near.poll(|user, outcome| ended = Some((user, outcome.map(|bytes| (bytes.read_as::<U32>(), bytes.read_as::<U64>()))))).unwrap();
        ended.is_some()
    });
    assert_eq!(ended, Some((9, Ok((Ok(7.into()), Err(SizeError { received: 4, expected: 8 }))))));
}
