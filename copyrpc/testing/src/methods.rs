//! A service over every RPC of bytes, and the checks of its clients, which are the same for all.

use std::collections::HashMap;
use std::time::Duration;

use copyrpc_calls::methods::{AsyncCaller, Caller, MethodError, PayloadError};
use copyrpc_calls::{parts, service};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Problem {
    TooLarge,
    Unknown { name: String, known: usize },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Query {
    All,
    Named(String),
    Older { than: Duration, at_most: Option<u8> },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    pub name: String,
    pub age: Duration,
    pub places: Vec<(u16, Option<char>)>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Page<T> {
    pub items: Vec<T>,
    pub next: Option<Box<Page<T>>>,
}

service! {
    pub mod numbers {
        fn double(number: u64) -> Result<u64, Problem> = 1;
        fn sum(numbers: Vec<u64>, more: u64) -> Result<u64, Problem> = 2;
        fn name(word: String) -> Result<String, u32> = 4;
        fn sleep(millis: u64) -> Result<u64, u32> = 5;
        fn find(ages: HashMap<String, Duration>, query: Query) -> Result<Page<Entry>, Problem> = 6;
        fn keep(bytes: Vec<u8>, size: (i8, f32)) -> Result<Vec<u8>, Problem> = 7;
    }
}

service! {
    /// Another version of `numbers`.
    mod others {
        fn double(number: String) -> Result<u64, Problem> = 1;
        fn sum(numbers: Vec<u64>, more: u64) -> Result<(u8, u8), Problem> = 2;
        fn halve(number: u64) -> Result<u64, Problem> = 3;
    }
}

pub struct Sums;

impl numbers::Service for Sums {
    fn double(&mut self, number: u64) -> Result<u64, Problem> {
        number.checked_mul(2).ok_or(Problem::TooLarge)
    }

    fn sum(&mut self, numbers: Vec<u64>, more: u64) -> Result<u64, Problem> {
        Ok(numbers.iter().sum::<u64>() + more)
    }

    fn name(&mut self, word: String) -> Result<String, u32> {
        if word.is_empty() {
            Err(7)
        } else {
            Ok(word.to_uppercase())
        }
    }

    fn sleep(&mut self, millis: u64) -> Result<u64, u32> {
        std::thread::sleep(Duration::from_millis(millis));
        Ok(millis)
    }

    /// Returns the first entry in the first page, and the other entries in the next.
    fn find(
        &mut self,
        ages: HashMap<String, Duration>,
        query: Query,
    ) -> Result<Page<Entry>, Problem> {
        let known = ages.len();
        let mut items: Vec<_> = ages
            .into_iter()
            .map(|(name, age)| Entry {
                places: name.chars().map(|char| (7, Some(char))).collect(),
                name,
                age,
            })
            .collect();
        items.sort_by_key(|entry| entry.age);
        match query {
            Query::All => {}
            Query::Named(name) => {
                items.retain(|entry| entry.name == name);
                if items.is_empty() {
                    return Err(Problem::Unknown { name, known });
                }
            }
            Query::Older { than, at_most } => {
                items.retain(|entry| entry.age > than);
                items.truncate(at_most.map_or(usize::MAX, usize::from));
            }
        }
        let others = items.split_off(items.len().min(1));
        let next = (!others.is_empty()).then(|| {
            Box::new(Page {
                items: others,
                next: None,
            })
        });
        Ok(Page { items, next })
    }

    fn keep(&mut self, bytes: Vec<u8>, size: (i8, f32)) -> Result<Vec<u8>, Problem> {
        if size == (-3, 0.5) {
            Ok(bytes)
        } else {
            Err(Problem::TooLarge)
        }
    }
}

impl numbers::AsyncService for Sums {
    async fn double(&self, number: u64) -> Result<u64, Problem> {
        numbers::Service::double(&mut Self, number)
    }

    async fn sum(&self, numbers: Vec<u64>, more: u64) -> Result<u64, Problem> {
        numbers::Service::sum(&mut Self, numbers, more)
    }

    async fn name(&self, word: String) -> Result<String, u32> {
        numbers::Service::name(&mut Self, word)
    }

    async fn sleep(&self, millis: u64) -> Result<u64, u32> {
        numbers::Service::sleep(&mut Self, millis)
    }

    async fn find(
        &self,
        ages: HashMap<String, Duration>,
        query: Query,
    ) -> Result<Page<Entry>, Problem> {
        numbers::Service::find(&mut Self, ages, query)
    }

    async fn keep(&self, bytes: Vec<u8>, size: (i8, f32)) -> Result<Vec<u8>, Problem> {
        numbers::Service::keep(&mut Self, bytes, size)
    }
}

/// A query of `find`, and its outcome.
type Find = (Query, Result<Page<Entry>, Problem>);

/// Two ages, and queries with their outcomes for these.
fn finds() -> (HashMap<String, Duration>, Vec<Find>) {
    let [young, old] = [("é", 1_500), ("ab", 70_000)].map(|(name, millis)| Entry {
        name: name.to_owned(),
        age: Duration::from_millis(millis),
        places: name.chars().map(|char| (7, Some(char))).collect(),
    });
    let ages = [&young, &old]
        .map(|entry| (entry.name.clone(), entry.age))
        .into();
    let page = |items, next| Page { items, next };
    let both = page(
        vec![young.clone()],
        Some(Box::new(page(vec![old.clone()], None))),
    );
    let older = |at_most| Query::Older {
        than: young.age,
        at_most,
    };
    let unknown = Problem::Unknown {
        name: "c".to_owned(),
        known: 2,
    };
    let outcomes = vec![
        (Query::All, Ok(both)),
        (older(None), Ok(page(vec![old], None))),
        (older(Some(0)), Ok(page(vec![], None))),
        (Query::Named("c".to_owned()), Err(unknown)),
    ];
    (ages, outcomes)
}

/// Returns the outcome of the handler.
fn of_handler<T, C: std::fmt::Debug>(
    outcome: Result<T, MethodError<Problem, C>>,
) -> Result<T, Problem> {
    match outcome {
        Ok(value) => Ok(value),
        Err(MethodError::Failed(problem)) => Err(problem),
        Err(other) => panic!("{other:?}"),
    }
}

/// Calls a server of [`Sums`], and checks that a method ends with its result or its own error, and
/// that a method of another version ends with the error for that case. `is_late` returns whether an
/// error means that the call's time ended before its reply.
pub fn check<C: Caller>(caller: C, is_late: impl Fn(&C::Error) -> bool) {
    let mut client = numbers::Client::new(caller);
    assert_eq!(client.double(21).unwrap(), 42);
    assert_eq!(client.sum((0..20).collect(), 50).unwrap(), 240);
    assert_eq!(client.name("ping".to_owned()).unwrap(), "PING");
    assert!(matches!(
        client.double(u64::MAX),
        Err(MethodError::Failed(Problem::TooLarge))
    ));
    assert!(matches!(
        client.name(String::new()),
        Err(MethodError::Failed(7))
    ));
    let (ages, outcomes) = finds();
    for (query, expected) in outcomes {
        assert_eq!(of_handler(client.find(ages.clone(), query)), expected);
    }
    let kept = client.keep(vec![0x5a; 100], (-3, 0.5)).unwrap();
    assert_eq!(kept, [0x5a; 100]);
    client.timeout = Some(Duration::ZERO);
    // A reply that has arrived when the clock is first read is in time. A thread that is kept from
    // its processor for as long as the server sleeps finds such a reply, so the call is repeated.
    assert!(
        (0..20)
            .any(|_| matches!(client.sleep(50), Err(MethodError::Call(error)) if is_late(&error)))
    );
    let mut client = others::Client::new(client.caller);
    assert!(matches!(
        client.double("a".repeat(9)),
        Err(MethodError::Arguments(PayloadError::Long))
    ));
    assert!(matches!(
        client.sum(vec![], 1),
        Err(MethodError::Reply(PayloadError::Long))
    ));
    assert!(matches!(client.halve(2), Err(MethodError::UnknownMethod)));
    assert_eq!(
        client.caller.call(b"raw bytes", None).unwrap(),
        [3, PayloadError::Short as u8],
        "a header of no method"
    );
}

pub async fn check_async<C: AsyncCaller>(caller: C, is_late: impl Fn(&C::Error) -> bool) {
    let mut client = numbers::AsyncClient::new(caller);
    assert_eq!(client.double(21).await.unwrap(), 42);
    assert_eq!(client.sum((0..20).collect(), 50).await.unwrap(), 240);
    assert_eq!(client.name("ping".to_owned()).await.unwrap(), "PING");
    assert!(matches!(
        client.double(u64::MAX).await,
        Err(MethodError::Failed(Problem::TooLarge))
    ));
    assert!(matches!(
        client.name(String::new()).await,
        Err(MethodError::Failed(7))
    ));
    let (ages, outcomes) = finds();
    for (query, expected) in outcomes {
        assert_eq!(of_handler(client.find(ages.clone(), query).await), expected);
    }
    let kept = client.keep(vec![0x5a; 100], (-3, 0.5)).await.unwrap();
    assert_eq!(kept, [0x5a; 100]);
    client.timeout = Some(Duration::ZERO);
    assert!(matches!(client.double(1).await, Err(MethodError::Call(error)) if is_late(&error)));
    let client = others::AsyncClient::new(client.caller);
    assert!(matches!(
        client.double("a".repeat(9)).await,
        Err(MethodError::Arguments(PayloadError::Long))
    ));
    assert!(matches!(
        client.sum(vec![], 1).await,
        Err(MethodError::Reply(PayloadError::Long))
    ));
    assert!(matches!(
        client.halve(2).await,
        Err(MethodError::UnknownMethod)
    ));
    assert_eq!(
        client
            .caller
            .call(b"raw bytes".to_vec(), None)
            .await
            .unwrap(),
        [3, PayloadError::Short as u8],
        "a header of no method"
    );
}

/// Maximum length of a message, so short that almost every call is made in parts.
const SHORT: usize = 44;

/// Calls a server of [`Sums`] that takes parts: first in very short parts, then with 3 MiB in each
/// direction in messages of up to `max_request` and `max_reply` bytes.
pub fn check_in_parts<C: Caller<Error: 'static>>(caller: C, max_request: usize, max_reply: usize) {
    let mut short = numbers::Client::new(parts::Client::new(caller, SHORT, SHORT));
    assert_eq!(short.sum((0..20).collect(), 50).unwrap(), 240);
    assert!(matches!(
        short.name(String::new()),
        Err(MethodError::Failed(7))
    ));
    let mut long = numbers::Client::new(parts::Client::new(
        short.caller.caller,
        max_request,
        max_reply,
    ));
    let word = "abc".repeat(1 << 20);
    assert_eq!(long.name(word.clone()).unwrap(), word.to_uppercase());
    let bytes = word.into_bytes();
    assert!(long.keep(bytes.clone(), (-3, 0.5)).unwrap() == bytes);
}

pub async fn check_async_in_parts<C: AsyncCaller<Error: Send + 'static> + Sync>(
    caller: C,
    max_request: usize,
    max_reply: usize,
) {
    let short = numbers::AsyncClient::new(parts::Client::new(caller, SHORT, SHORT));
    assert_eq!(short.sum((0..20).collect(), 50).await.unwrap(), 240);
    assert!(matches!(
        short.name(String::new()).await,
        Err(MethodError::Failed(7))
    ));
    let long = numbers::AsyncClient::new(parts::Client::new(
        short.caller.caller,
        max_request,
        max_reply,
    ));
    let word = "abc".repeat(1 << 20);
    assert_eq!(long.name(word.clone()).await.unwrap(), word.to_uppercase());
    let bytes = word.into_bytes();
    assert!(long.keep(bytes.clone(), (-3, 0.5)).await.unwrap() == bytes);
}
