use super::*;
use crate::abi::verbs::{AllocPd, AllocPdResp};

fn plain(number: u32, in_words: u16, out_words: u16, rest: &[u8]) -> Vec<u8> {
    let header = CommandHeader {
        command: number,
        in_words,
        out_words,
    };
    [header.as_bytes(), rest].concat()
}

#[test]
fn a_plain_command_has_the_drivers_part_behind_its_request_and_its_response() {
    let mut response = [0xa5u8; 16];
    let request = [
        (&raw mut response as u64).to_ne_bytes(),
        0x1122_3344_5566_7788u64.to_ne_bytes(),
    ]
    .concat();
    let call = Call::parse(&plain(3, 6, 2, &request)).unwrap();
    assert_eq!((call.number, call.is_extended, call.room()), (3, false, 8));
    assert_eq!(
        call.request::<AllocPd, ()>().unwrap().response,
        &raw const response as u64
    );
    assert_eq!(call.driver::<u64>(), 0x1122_3344_5566_7788);
    assert_eq!(
        call.driver::<[u64; 2]>(),
        [0x1122_3344_5566_7788, 0],
        "what is missing is 0"
    );

    // Only 8 bytes of the response were announced.
    call.respond(&Reply::of(&AllocPdResp { pd_handle: 7 }).with(&[8u32, 9]))
        .unwrap();
    assert_eq!(
        response[..8],
        [7, 0, 0, 0, 8, 0, 0, 0],
        "the driver's part right behind, and no further than there is room"
    );
    assert_eq!(response[8..], [0xa5; 8]);
}

#[test]
fn an_extended_command_has_the_drivers_parts_at_their_own_places() {
    let mut response = [0xa5u8; 24];
    let header = CommandHeader {
        command: 1 | 1 << 31,
        in_words: 1,
        out_words: 1,
    };
    let extended = ExtendedHeader {
        response: &raw mut response as u64,
        provider_in_words: 1,
        provider_out_words: 1,
        cmd_hdr_reserved: 0,
    };
    let bytes = [header.as_bytes(), extended.as_bytes(), &[1; 8], &[2; 8]].concat();
    let call = Call::parse(&bytes).unwrap();
    assert_eq!((call.number, call.is_extended, call.room()), (1, true, 8));
    assert_eq!(call.request::<[u8; 8], ()>().unwrap(), [1; 8]);
    assert_eq!(call.driver::<[u8; 8]>(), [2; 8]);

    // Only 16 bytes of the response were announced.
    call.respond(&Reply::of(&[3u8; 4]).with(&[4u8; 12]))
        .unwrap();
    assert_eq!(response[..4], [3; 4]);
    assert_eq!(response[8..16], [4; 8]);
    assert_eq!(response[16..], [0xa5; 8]);
}

#[test]
fn commands_that_are_not_as_long_as_they_say_are_refused() {
    let refused = |bytes: &[u8]| Call::parse(bytes).unwrap_err() == Errno(libc::EINVAL);
    assert!(refused(&[0; 7]));
    assert!(refused(&plain(3, 5, 0, &[0; 8])));
    assert!(refused(&plain(3, 2, 2, &[])), "a response, but no address");
    assert!(
        refused(&plain(3 | 1 << 9, 4, 0, &[0; 8])),
        "an unknown flag"
    );
    let extended = |provider_in_words, response, reserved| {
        let header = CommandHeader {
            command: 1 | 1 << 31,
            in_words: 1,
            out_words: 0,
        };
        let extended = ExtendedHeader {
            response,
            provider_in_words,
            provider_out_words: 0,
            cmd_hdr_reserved: reserved,
        };
        [header.as_bytes(), extended.as_bytes(), &[0; 8]].concat()
    };
    assert!(Call::parse(&extended(0, 0, 0)).is_ok());
    assert!(refused(&extended(1, 0, 0)));
    assert!(refused(&extended(0, 8, 0)), "an address, but no response");
    assert!(refused(&extended(0, 0, 1)));
}

#[test]
fn a_request_that_is_too_short_is_refused() {
    let call = Call::parse(&plain(3, 3, 0, &[0; 4])).unwrap();
    assert_eq!(
        call.request::<AllocPd, ()>().unwrap_err(),
        Errno(libc::EINVAL)
    );
    assert_eq!(call.check_room(4), Err(Errno(libc::ENOSPC)));
}
