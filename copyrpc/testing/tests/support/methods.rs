//! A service over every RPC of bytes, and the checks of its clients, which are the same for all.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use copyrpc_calls::methods::{AsyncCaller, Caller, Context, MethodError, PayloadError};
use copyrpc_calls::{Ending, parts, service};
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
        fn left(&context) -> Result<Option<Duration>, ()> = 8;
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

    fn left(&mut self, context: Context<'_>) -> Result<Option<Duration>, ()> {
        assert!(context.is_wanted());
        let left = |end: Instant| end.saturating_duration_since(Instant::now());
        Ok(context.deadline().map(left))
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

    async fn left(&self, context: Context<'_>) -> Result<Option<Duration>, ()> {
        numbers::Service::left(&mut Self, context)
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

const LONG: Duration = Duration::from_secs(600);

/// The body of [`check`] and of [`check_async`]: the calls of a client type, each followed by the
/// tokens that wait for its result. `$late` is a method whose reply takes longer than a timeout of
/// 1 ns; it is called up to `$times` times, until `$is_late` returns `true` for its error. `$mode`
/// is `mut` if calls need a mutable client.
macro_rules! check {
    ($client:ident, $caller:ident, $is_late:ident, $raw:expr, $late:ident($argument:expr) $times:expr, [$($wait:tt)*], $($mode:tt)?) => {
        let mut client = numbers::$client::new($caller);
        assert_eq!(client.double(21)$($wait)*.unwrap(), 42);
        assert_eq!(client.sum((0..20).collect(), 50)$($wait)*.unwrap(), 240);
        assert_eq!(client.name("ping".to_owned())$($wait)*.unwrap(), "PING");
        let double = client.double(u64::MAX)$($wait)*;
        assert!(matches!(double, Err(MethodError::Failed(Problem::TooLarge))));
        let name = client.name(String::new())$($wait)*;
        assert!(matches!(name, Err(MethodError::Failed(7))));
        let (ages, outcomes) = finds();
        for (query, expected) in outcomes {
            let found = client.find(ages.clone(), query)$($wait)*;
            assert_eq!(of_handler(found), expected);
        }
        let kept = client.keep(vec![0x5a; 100], (-3, 0.5))$($wait)*;
        assert_eq!(kept.unwrap(), [0x5a; 100]);
        client.timeout = Some(LONG);
        let left = client.left()$($wait)*.unwrap().unwrap();
        assert!(left > LONG / 2 && left <= LONG, "{left:?}");
        client.timeout = Some(Duration::ZERO);
        let not_sent = client.double(1)$($wait)*;
        assert!(matches!(not_sent, Err(MethodError::Call(error)) if error.is_retryable() && !error.may_have_executed()));
        client.timeout = Some(Duration::from_nanos(1));
        let mut times = 1..$times;
        while !matches!(client.$late($argument)$($wait)*, Err(MethodError::Call(error)) if $is_late(&error)) {
            times.next().unwrap();
        }
        let $($mode)? client = others::$client::new(client.caller);
        let double = client.double("a".repeat(9))$($wait)*;
        assert!(matches!(double, Err(MethodError::Arguments(PayloadError::Long))));
        let sum = client.sum(vec![], 1)$($wait)*;
        assert!(matches!(sum, Err(MethodError::Reply(PayloadError::Long))));
        assert!(matches!(client.halve(2)$($wait)*, Err(MethodError::UnknownMethod)));
        let raw = client.caller.call($raw, None)$($wait)*;
        assert_eq!(raw.unwrap()[..], [3, PayloadError::Short as u8], "a header of no method");
    };
}

/// Calls a server of [`Sums`], and checks that a method ends with its result or its own error, and
/// that a method of another version ends with the error for that case. `is_late` returns whether an
/// error means that the call's time ended before its reply.
pub fn check<C: Caller>(caller: C, is_late: impl Fn(&C::Error) -> bool) {
    // A reply that has arrived when the clock is first read is in time. A thread that is kept from
    // its processor for as long as the server sleeps finds such a reply, so the call is repeated.
    check!(Client, caller, is_late, b"raw bytes", sleep(50) 20, [], mut);
}

pub async fn check_async<C: AsyncCaller>(caller: C, is_late: impl Fn(&C::Error) -> bool) {
    check!(AsyncClient, caller, is_late, b"raw bytes".to_vec(), double(1) 1, [.await],);
}

/// Maximum length of a message, so short that almost every call is made in parts.
const SHORT: usize = 44;

/// The body of [`check_in_parts`] and of [`check_async_in_parts`], like [`check!`].
macro_rules! check_in_parts {
    ($client:ident, $caller:ident, $max_request:ident, $max_reply:ident, [$($wait:tt)*], $($mode:tt)?) => {
        let $($mode)? short = numbers::$client::new(parts::Client::new($caller, SHORT, SHORT));
        assert_eq!(short.sum((0..20).collect(), 50)$($wait)*.unwrap(), 240);
        let name = short.name(String::new())$($wait)*;
        assert!(matches!(name, Err(MethodError::Failed(7))));
        let caller = parts::Client::new(short.caller.caller, $max_request, $max_reply);
        let $($mode)? long = numbers::$client::new(caller);
        let word = "abc".repeat(1 << 20);
        let name = long.name(word.clone())$($wait)*;
        assert_eq!(name.unwrap(), word.to_uppercase());
        let bytes = word.into_bytes();
        let kept = long.keep(bytes.clone(), (-3, 0.5))$($wait)*;
        assert!(kept.unwrap() == bytes);
    };
}

/// Calls a server of [`Sums`] that takes parts: first in very short parts, then with 3 MiB in each
/// direction in messages of up to `max_request` and `max_reply` bytes.
pub fn check_in_parts<C: Caller<Error: 'static>>(caller: C, max_request: usize, max_reply: usize) {
    check_in_parts!(Client, caller, max_request, max_reply, [], mut);
}

pub async fn check_async_in_parts<C: AsyncCaller<Error: Send + 'static> + Sync>(
    caller: C,
    max_request: usize,
    max_reply: usize,
) {
    check_in_parts!(AsyncClient, caller, max_request, max_reply, [.await],);
}
