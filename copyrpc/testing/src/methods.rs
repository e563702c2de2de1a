//! A service over every RPC of bytes, and the checks of its clients, which are the same for all.

use std::time::Duration;

use copyrpc_calls::methods::{AsyncCaller, Caller, MethodError};
use copyrpc_calls::{parts, payload, service};

payload! {
    #[derive(Debug, PartialEq)]
    pub enum Problem {
        TooLarge = 1,
    }
}

service! {
    pub mod numbers {
        fn double(number: u64) -> Result<u64, Problem> = 1;
        fn sum(numbers: Vec<u64>, more: u64) -> Result<u64, Problem> = 2;
        fn name(word: String) -> Result<String, u32> = 4;
        fn sleep(millis: u64) -> Result<u64, u32> = 5;
    }
}

service! {
    /// Another version of `numbers`.
    mod others {
        fn double(number: u32) -> Result<u64, Problem> = 1;
        fn sum(numbers: Vec<u64>, more: u64) -> Result<u8, Problem> = 2;
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
    client.timeout = Some(Duration::ZERO);
    // A reply that has arrived when the clock is first read is in time. A thread that is kept from
    // its processor for as long as the server sleeps finds such a reply, so the call is repeated.
    assert!(
        (0..20)
            .any(|_| matches!(client.sleep(50), Err(MethodError::Call(error)) if is_late(&error)))
    );
    let mut client = others::Client::new(client.caller);
    assert!(matches!(client.double(21), Err(MethodError::Arguments)));
    assert!(matches!(client.sum(vec![], 1), Err(MethodError::Reply)));
    assert!(matches!(client.halve(2), Err(MethodError::UnknownMethod)));
    assert_eq!(
        client.caller.call(b"raw bytes", None).unwrap(),
        [3],
        "no header"
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
    client.timeout = Some(Duration::ZERO);
    assert!(matches!(client.double(1).await, Err(MethodError::Call(error)) if is_late(&error)));
    let client = others::AsyncClient::new(client.caller);
    assert!(matches!(
        client.double(21).await,
        Err(MethodError::Arguments)
    ));
    assert!(matches!(
        client.sum(vec![], 1).await,
        Err(MethodError::Reply)
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
        [3],
        "no header"
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
}
