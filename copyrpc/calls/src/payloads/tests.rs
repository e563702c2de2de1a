use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU8;
use std::time::Duration;

use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serializer};

use super::*;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Tree {
    children: Vec<Tree>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Unit;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Shape {
    Empty,
    Circle(f64),
    Line(i16, i64),
    Polygon {
        name: String,
        corners: Vec<(f32, f32)>,
    },
    Both(Box<(Shape, Shape)>),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Page<T> {
    items: Vec<T>,
    next: Option<Box<Page<T>>>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Wrapped(Option<Option<u128>>);

type Everything = (
    (
        u8,
        u16,
        u32,
        u64,
        u128,
        usize,
        i8,
        i16,
        i32,
        i64,
        i128,
        isize,
    ),
    (bool, char, f32, f64, String, Vec<u8>, [u16; 3], Unit, ()),
    (
        HashMap<String, Vec<Shape>>,
        BTreeMap<i32, Wrapped>,
        Option<Duration>,
        Result<SocketAddr, String>,
        Page<Shape>,
        Vec<i64>,
    ),
);

/// Returns a number of any length in bits.
fn number(random: &mut fastrand::Rng) -> u128 {
    let bits = random.u128(..) >> random.u32(..128);
    if random.bool() { bits } else { !bits }
}

fn word(random: &mut fastrand::Rng) -> String {
    (0..random.usize(..5)).map(|_| random.char(..)).collect()
}

fn shape(random: &mut fastrand::Rng, deep: u32) -> Shape {
    match random.u32(..if deep == 0 { 4 } else { 5 }) {
        0 => Shape::Empty,
        1 => Shape::Circle(random.f64()),
        2 => Shape::Line(number(random) as i16, number(random) as i64),
        3 => Shape::Polygon {
            name: word(random),
            corners: vec![(random.f32(), -random.f32()); random.usize(..3)],
        },
        _ => Shape::Both(Box::new((shape(random, deep - 1), shape(random, deep - 1)))),
    }
}

fn everything(random: &mut fastrand::Rng) -> Everything {
    let mut any = || number(random);
    let numbers = (
        any() as u8,
        any() as u16,
        any() as u32,
        any() as u64,
        any(),
        any() as usize,
        any() as i8,
        any() as i16,
        any() as i32,
        any() as i64,
        any() as i128,
        any() as isize,
    );
    let simple = (
        random.bool(),
        random.char(..),
        random.f32(),
        random.f64(),
        word(random),
        word(random).into_bytes(),
        [number(random) as u16; 3],
        Unit,
        (),
    );
    let wrapped = |random: &mut fastrand::Rng| {
        Wrapped(random.bool().then(|| random.bool().then(|| number(random))))
    };
    let page = |random: &mut fastrand::Rng, next| Page {
        items: vec![shape(random, 2); random.usize(..3)],
        next,
    };
    let last = random.bool().then(|| Box::new(page(random, None)));
    let compound = (
        (0..random.usize(..4))
            .map(|_| (word(random), vec![shape(random, 3)]))
            .collect(),
        (0..random.usize(..4))
            .map(|_| (number(random) as i32, wrapped(random)))
            .collect(),
        random
            .bool()
            .then(|| Duration::from_nanos(number(random) as u64)),
        if random.bool() {
            Ok(SocketAddr::new(
                IpAddr::from(number(random).to_le_bytes()),
                number(random) as u16,
            ))
        } else {
            Err(word(random))
        },
        page(random, last),
        (0..random.usize(..9))
            .map(|_| number(random) as i64)
            .collect(),
    );
    (numbers, simple, compound)
}

fn bytes_of<T: Payload>(value: &T) -> Vec<u8> {
    let mut bytes = Vec::new();
    encode(value, &mut bytes).unwrap();
    bytes
}

#[test]
fn values_come_back_as_they_were() {
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..2_000 {
        let value = everything(&mut random);
        let bytes = bytes_of(&value);
        assert_eq!(decode::<Everything>(&bytes).unwrap(), value);
        for end in [0, bytes.len() / 2, bytes.len() - 1] {
            assert!(matches!(
                decode::<Everything>(&bytes[..end]),
                Err(PayloadError::Short | PayloadError::TooMany)
            ));
        }
        let longer = [&bytes[..], &[0]].concat();
        assert_eq!(decode::<Everything>(&longer), Err(PayloadError::Long));
    }
}

/// Returns whether the bytes are a value. Asserts that the value has these bytes.
fn check<T: Payload>(bytes: &[u8]) -> bool {
    let value = decode::<T>(bytes);
    assert!(value.as_ref().is_ok_and(|value| bytes_of(value) == bytes) || value.is_err());
    value.is_ok()
}

#[test]
fn any_bytes_are_a_value_with_these_bytes_or_are_refused() {
    let mut random = fastrand::Rng::with_seed(2);
    let mut values = 0;
    for _ in 0..50_000 {
        let mut bytes: Vec<u8> = (0..random.usize(..40)).map(|_| random.u8(..)).collect();
        if random.bool() {
            // Short lengths, and indices of existing variants, have many zeros.
            (bytes.iter_mut().filter(|byte| **byte > 9)).for_each(|byte| *byte = 0);
        }
        values += u32::from(check::<(u8, i32, char, Option<i128>)>(&bytes));
        values += u32::from(check::<(bool, Wrapped, Vec<String>)>(&bytes));
        values += u32::from(check::<Vec<Shape>>(&bytes) || check::<Vec<u8>>(&bytes));
        values += u32::from(check::<Page<i8>>(&bytes) || check::<Tree>(&bytes));
        let _any = decode::<HashMap<u8, BTreeMap<char, Duration>>>(&bytes);
        let mut damaged = bytes_of(&shape(&mut random, 4));
        let at = random.usize(..damaged.len());
        damaged[at] = random.u8(..);
        check::<Shape>(&damaged);
    }
    assert!(values > 1_000, "{values}");
}

/// The bytes are a contract with peers of other versions.
#[test]
fn values_have_the_bytes_that_the_documentation_says() {
    let polygon = Shape::Polygon {
        name: "a".to_owned(),
        corners: vec![(1.0, -2.0)],
    };
    let value = (0x0102_u16, -2_i64, true, 'é', Some(3_usize), polygon, Unit);
    let expected: [&[u8]; 10] = [
        &[2, 1],
        &[0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
        &[1],
        "é".as_bytes(),
        &[1, 3, 0, 0, 0, 0, 0, 0, 0],
        &[3, 0, 0, 0],
        &[1, 0, 0, 0, b'a'],
        &[1, 0, 0, 0],
        &[0, 0, 0x80, 0x3f],
        &[0, 0, 0, 0xc0],
    ];
    assert_eq!(bytes_of(&value), expected.concat());
    let map = BTreeMap::from([(7_u8, [1_i16, 2])]);
    let expected: [&[u8]; 2] = [&[1, 0, 0, 0], &[7, 1, 0, 2, 0]];
    assert_eq!(bytes_of(&map), expected.concat());
}

/// A peer can send a level in a few bytes, and each level takes frames of the stack.
#[test]
fn values_that_are_too_deep_are_refused() {
    // A struct and its sequence are two levels.
    const TREES: usize = MAX_DEPTH as usize / 2;
    let of_depth = |trees: usize| [bytes_of(&1_u32).repeat(trees - 1), vec![0; 4]].concat();
    let deepest = decode::<Tree>(&of_depth(TREES)).unwrap();
    assert_eq!(bytes_of(&deepest), of_depth(TREES));
    for trees in [TREES + 1, 1 << 20] {
        assert_eq!(decode::<Tree>(&of_depth(trees)), Err(PayloadError::TooDeep));
    }
    let pages = [0, 0, 0, 0, 1].repeat(1 << 16);
    assert_eq!(decode::<Page<u8>>(&pages), Err(PayloadError::TooDeep));
    let both = [4, 0, 0, 0].repeat(1 << 16);
    // A quarter of the stack that a thread has by default.
    let in_a_small_stack = std::thread::Builder::new().stack_size(512 << 10);
    let decoded = in_a_small_stack
        .spawn(move || decode::<Shape>(&both))
        .unwrap();
    assert_eq!(decoded.join().unwrap(), Err(PayloadError::TooDeep));
    let beside = vec![Tree { children: vec![] }; 2 * MAX_DEPTH as usize];
    assert_eq!(decode(&bytes_of(&beside)), Ok(beside));
}

/// The number of elements for which a sequence would reserve memory before its first element.
#[derive(Debug, PartialEq)]
struct Greedy(usize);

impl Serialize for Greedy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(std::iter::repeat_n(self.0, self.0))
    }
}

impl<'de> Deserialize<'de> for Greedy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Told;
        impl<'de> Visitor<'de> for Told {
            type Value = Greedy;

            fn expecting(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
                text.write_str("a sequence")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Greedy, A::Error> {
                let told = seq.size_hint().unwrap();
                while seq.next_element::<u8>()?.is_some() {}
                Ok(Greedy(told))
            }
        }
        deserializer.deserialize_seq(Told)
    }
}

#[test]
fn the_elements_that_all_sequences_are_told_are_not_more_than_the_bytes() {
    let sequence = |len: u32| [bytes_of(&len), vec![0; len as usize]].concat();
    assert_eq!(decode(&sequence(100)), Ok(Greedy(100)));
    let two = [sequence(40), sequence(60)].concat();
    assert_eq!(decode(&two), Ok((Greedy(40), Greedy(60))));
    for (told, error) in [
        (1_u32 << 30, PayloadError::TooMany),
        (16, PayloadError::Short),
    ] {
        let bytes = [bytes_of(&told), vec![0; 15]].concat();
        assert_eq!(decode::<Greedy>(&bytes), Err(error));
    }
}

/// A peer can send a large length in a few bytes, and its elements would take memory and time.
#[test]
fn lengths_beyond_the_bytes_are_refused() {
    let huge = [0xff; 10];
    assert_eq!(decode::<Vec<u64>>(&huge), Err(PayloadError::TooMany));
    assert_eq!(decode::<Vec<()>>(&huge), Err(PayloadError::TooMany));
    assert_eq!(
        decode::<HashMap<u64, [u64; 32]>>(&huge),
        Err(PayloadError::TooMany)
    );
    assert_eq!(decode::<String>(&huge), Err(PayloadError::Short));
    assert_eq!(decode::<Vec<u8>>(&huge), Err(PayloadError::Short));
    // Each of these sequences announces fewer elements than there are bytes, but all sequences
    // together announce more.
    let nested = bytes_of(&vec![100_u32; 100]);
    assert_eq!(decode::<Vec<Vec<()>>>(&nested), Err(PayloadError::TooMany));
    assert_eq!(
        decode::<Vec<()>>(&bytes_of(&vec![(); 5])),
        Err(PayloadError::TooMany)
    );
}

#[test]
fn bytes_that_are_no_value_are_refused_for_their_reason() {
    use PayloadError::{Malformed, Refused, Short, Unsupported};
    assert_eq!(decode::<u16>(&[1]), Err(Short));
    assert_eq!(decode::<bool>(&[2]), Err(Malformed));
    assert_eq!(decode::<String>(&[1, 0, 0, 0, 0xff]), Err(Malformed));
    assert_eq!(decode::<char>(&[0x80, 0x80]), Err(Malformed));
    assert_eq!(decode::<char>(&[0xe2, 0x82]), Err(Short));
    assert_eq!(decode::<Option<u8>>(&[2, 0]), Err(Malformed));
    assert_eq!(decode::<Shape>(&[9, 0, 0, 0]), Err(Refused));
    assert_eq!(decode::<NonZeroU8>(&[0]), Err(Refused));
    for byte in 0..=255 {
        let error = PayloadError::from_byte(byte);
        assert_eq!(error.is_some(), (1..9).contains(&byte));
        assert!(error.is_none_or(|error| error as u8 == byte));
    }

    #[derive(Debug, PartialEq)]
    struct Odd(bool);
    impl Serialize for Odd {
        fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            if self.0 {
                return Err(serde::ser::Error::custom("odd"));
            }
            serializer.collect_seq(Some(1_u8).into_iter().filter(|_| true))
        }
    }
    impl<'de> Deserialize<'de> for Odd {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            IgnoredAny::deserialize(deserializer).map(|_| Self(true))
        }
    }
    assert_eq!(decode::<Odd>(&[1]), Err(Unsupported));
    assert_eq!(encode(&Odd(true), &mut vec![]), Err(Refused));
    assert_eq!(encode(&Odd(false), &mut vec![]), Err(Unsupported));
}

/// The decoder would take the byte of `b` for that of `a`.
#[test]
fn a_field_that_is_left_out_is_refused() {
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Skips {
        #[serde(skip_serializing_if = "Option::is_none", default)]
        a: Option<u8>,
        b: u8,
    }
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum Variant {
        Skips {
            #[serde(skip_serializing_if = "Option::is_none", default)]
            a: Option<u8>,
        },
    }
    let whole = Skips { a: Some(3), b: 1 };
    assert_eq!(decode::<Skips>(&bytes_of(&whole)), Ok(whole));
    for a in [None, Some(3)] {
        let expected = a.map_or(Err(PayloadError::Unsupported), |_| Ok(()));
        assert_eq!(encode(&Skips { a, b: 1 }, &mut vec![]), expected);
        assert_eq!(encode(&Variant::Skips { a }, &mut vec![]), expected);
    }
}

/// The buffer may be in a struct or a tuple at one end, and alone at the other end.
#[test]
fn a_byte_buffer_has_the_bytes_of_a_sequence() {
    for len in [0, 1, 127, 128, 1 << 16] {
        let buffer: Vec<u8> = (0..len).map(|at| at as u8).collect();
        let bytes = bytes_of(&buffer);
        assert_eq!(bytes, bytes_of(&(buffer.clone(),)));
        assert_eq!(decode::<Vec<u8>>(&bytes).unwrap(), buffer);
        assert_eq!(decode::<(Vec<u8>,)>(&bytes).unwrap(), (buffer,));
    }
}
