//! Services whose requests have the number of a method: [`service!`](crate::service!) makes a
//! client with methods, and a trait for the server to implement. It works over every RPC whose
//! client is a [`Caller`], with handlers of bytes.
//!
//! ```
//! use copyrpc_calls::methods::{Caller, MethodError};
//! use copyrpc_calls::{payload, service};
//!
//! payload! {
//!     #[derive(Debug, PartialEq)]
//!     pub struct Attributes { pub bytes: u64, pub is_directory: bool }
//! }
//! payload! {
//!     #[derive(Debug, PartialEq)]
//!     pub enum Problem { Missing = 1, Exists = 2 }
//! }
//! service! {
//!     /// Files and their attributes.
//!     pub mod metadata {
//!         /// Returns the attributes of a file.
//!         fn stat(path: String) -> Result<Attributes, Problem> = 1;
//!         /// Renames a file.
//!         fn rename(from: String, to: String) -> Result<(), Problem> = 2;
//!     }
//! }
//!
//! struct Root;
//! impl metadata::Service for Root {
//!     fn stat(&mut self, path: String) -> Result<Attributes, Problem> {
//!         if path == "/" { Ok(Attributes { bytes: 4096, is_directory: true }) } else { Err(Problem::Missing) }
//!     }
//!     fn rename(&mut self, _: String, _: String) -> Result<(), Problem> {
//!         Err(Problem::Exists)
//!     }
//! }
//!
//! # type Error = copyrpc_calls::ClientError<std::convert::Infallible, copyrpc_calls::SessionEnd>;
//! # struct Direct(Root);
//! # impl Caller for Direct {
//! #     type Error = Error;
//! #     fn timeout(&self) -> Option<std::time::Duration> { None }
//! #     fn call(&mut self, request: &[u8], _: Option<std::time::Duration>) -> Result<Vec<u8>, Error> {
//! #         Ok(metadata::answer(&mut self.0, request))
//! #     }
//! # }
//! # fn main() {
//! # let caller = Direct(Root);
//! // The server's part is `server.serve(|request| metadata::answer(&mut root, request))`, with `&request.to_vec()` in copyrpc, whose
//! // requests lie where the peer can write. The client's:
//! let mut client = metadata::Client::new(caller);
//! assert_eq!(client.stat("/".to_owned()).unwrap(), Attributes { bytes: 4096, is_directory: true });
//! assert!(matches!(client.stat("/a".to_owned()), Err(MethodError::Failed(Problem::Missing))));
//! # }
//! ```
//!
//! # The bytes
//! A request is a header of 8 bytes (method u16; 0 u16; remaining time of the call in milliseconds
//! u32, rounded up, 0 if it has no limit) and the arguments, a reply one byte (0 the result, 1 the
//! error of the handler, 2 unknown method, 3 undecodable request) and the value. All is
//! little-endian, without padding. Numbers of methods, arguments and fields are the contract of
//! both ends; nothing else checks it.

use std::fmt::Debug;
use std::future::Future;
use std::time::Duration;

use crate::Ending;
pub use crate::payloads::Payload;
#[doc(hidden)]
pub use crate::payloads::decode;

/// A client that sends bytes and waits for the reply.
pub trait Caller {
    /// The error of a call.
    type Error: Ending;

    /// Returns the maximum time of a call by default; `None`: without a limit.
    fn timeout(&self) -> Option<Duration>;

    /// Sends a request and waits for its reply, at most for `timeout`.
    ///
    /// # Errors
    /// The call has no reply.
    fn call(&mut self, request: &[u8], timeout: Option<Duration>) -> Result<Vec<u8>, Self::Error>;
}

/// A client whose calls are futures.
pub trait AsyncCaller {
    /// The error of a call.
    type Error: Ending;

    /// Returns the maximum time of a call by default; `None`: without a limit.
    fn timeout(&self) -> Option<Duration>;

    /// Sends a request and waits for its reply, like [`Caller::call`].
    fn call(
        &self,
        request: Vec<u8>,
        timeout: Option<Duration>,
    ) -> impl Future<Output = Result<Vec<u8>, Self::Error>> + Send;
}

/// The error of a method. `E` is the handler's own error, `C` the client's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MethodError<E, C> {
    /// The handler ran, and returned this error.
    #[error("the handler returned {0:?}")]
    Failed(E),
    /// The server has no method of this number. Nothing ran: client and server are of different
    /// versions.
    #[error("the server does not know this method: it is of another version")]
    UnknownMethod,
    /// The server could not decode the arguments. Nothing ran: client and server are of different
    /// versions.
    #[error("the server could not decode the arguments: it is of another version")]
    Arguments,
    /// The client could not decode the reply. The handler ran: client and server are of different
    /// versions.
    #[error("the reply could not be decoded: the server is of another version")]
    Reply,
    /// The call has no reply.
    #[error(transparent)]
    Call(#[from] C),
}

impl<E: Debug, C: Ending + 'static> Ending for MethodError<E, C> {
    fn is_retryable(&self) -> bool {
        matches!(self, Self::Call(error) if error.is_retryable())
    }

    fn may_have_executed(&self) -> bool {
        match self {
            Self::Failed(_) | Self::Reply => true,
            Self::UnknownMethod | Self::Arguments => false,
            Self::Call(error) => error.may_have_executed(),
        }
    }
}

/// Length of the header in bytes.
const HEADER: usize = 8;

/// The first byte of a reply with the result of the handler, and with its error.
const DONE: u8 = 0;
const FAILED: u8 = 1;
/// The reply to a request of an unknown method.
#[doc(hidden)]
pub const UNKNOWN_METHOD: u8 = 2;
/// The reply to a request that cannot be decoded.
#[doc(hidden)]
pub const ARGUMENTS: u8 = 3;

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The number of the method.
    pub method: u16,
    /// The time that the caller had left when it made the call, rounded up to milliseconds; `None`:
    /// the caller waits without a limit.
    pub left: Option<Duration>,
}

impl Header {
    /// Reads the header of a request of a [`service!`](crate::service!). Returns the arguments too.
    /// `None`: the request has no such header.
    #[must_use]
    #[inline]
    pub fn read(request: &[u8]) -> Option<(Self, &[u8])> {
        let mut rest = request;
        let (method, reserved, left_ms) = <(u16, u16, u32)>::decode(&mut rest)?;
        let left = Some(left_ms)
            .filter(|left_ms| *left_ms > 0)
            .map(|left_ms| Duration::from_millis(left_ms.into()));
        if reserved == 0 {
            Some((Self { method, left }, rest))
        } else {
            None
        }
    }

    /// Writes the request with these arguments into `request`, in place of the bytes there.
    fn write(self, arguments: &impl Payload, request: &mut Vec<u8>) {
        let left_ms = self.left.map_or(0, rounded_up_ms);
        request.clear();
        request.reserve(4 * HEADER);
        // The reserved u16 is the upper half of the first of these two numbers.
        (u32::from(self.method), left_ms).encode(request);
        arguments.encode(request);
    }
}

/// Returns the time in milliseconds for the header, rounded up; at least 1, since 0 is no limit.
fn rounded_up_ms(left: Duration) -> u32 {
    u32::try_from(left.as_nanos().div_ceil(1_000_000))
        .unwrap_or(u32::MAX)
        .max(1)
}

/// Returns the reply to a request that was handled.
#[doc(hidden)]
pub fn reply<T: Payload, E: Payload>(outcome: Result<T, E>) -> Vec<u8> {
    let mut reply = Vec::with_capacity(4 * HEADER);
    match outcome {
        Ok(value) => (DONE, value).encode(&mut reply),
        Err(error) => (FAILED, error).encode(&mut reply),
    }
    reply
}

/// Calls a method. The bytes of the request are written to `request`.
///
/// # Errors
/// [`MethodError`].
#[doc(hidden)]
pub fn call<C: Caller, T: Payload, E: Payload>(
    caller: &mut C,
    request: &mut Vec<u8>,
    method: u16,
    timeout: Option<Duration>,
    arguments: &impl Payload,
) -> Result<T, MethodError<E, C::Error>> {
    let left = timeout.or_else(|| caller.timeout());
    Header { method, left }.write(arguments, request);
    outcome(&caller.call(request, left)?)
}

/// Calls a method.
///
/// # Errors
/// [`MethodError`].
#[doc(hidden)]
pub async fn call_async<C: AsyncCaller, T: Payload, E: Payload>(
    caller: &C,
    method: u16,
    timeout: Option<Duration>,
    arguments: impl Payload,
) -> Result<T, MethodError<E, C::Error>> {
    let left = timeout.or_else(|| caller.timeout());
    let mut request = Vec::new();
    Header { method, left }.write(&arguments, &mut request);
    drop(arguments);
    outcome(&caller.call(request, left).await?)
}

fn outcome<T: Payload, E: Payload, C>(reply: &[u8]) -> Result<T, MethodError<E, C>> {
    match reply.split_first() {
        Some((&DONE, value)) => decode(value).ok_or(MethodError::Reply),
        Some((&FAILED, error)) => {
            Err(decode(error).map_or(MethodError::Reply, MethodError::Failed))
        }
        Some((&UNKNOWN_METHOD, [])) => Err(MethodError::UnknownMethod),
        Some((&ARGUMENTS, [])) => Err(MethodError::Arguments),
        _ => Err(MethodError::Reply),
    }
}

/// Returns whether no number occurs twice.
#[doc(hidden)]
#[must_use]
pub const fn are_distinct(numbers: &[u16]) -> bool {
    let mut at = 0;
    while at < numbers.len() {
        let mut before = 0;
        while before < at {
            if numbers[before] == numbers[at] {
                return false;
            }
            before += 1;
        }
        at += 1;
    }
    true
}

/// Makes a module for a service: its methods have a number, up to 6 arguments that are
/// [`Payload`](crate::methods::Payload)s, and a `Result` of two payloads. The module has
///
/// - `Service`, the trait for the server to implement, whose methods take `&mut self`, and
///   `answer`, which calls the method of a request, and returns the bytes of the reply;
/// - `AsyncService` and `answer_async`, the same with methods that are futures and take `&self`, as
///   calls run at the same time;
/// - `Client` and `AsyncClient`, with the methods, over any [`Caller`](crate::methods::Caller) or
///   [`AsyncCaller`](crate::methods::AsyncCaller). Their methods return
///   [`MethodError`](crate::methods::MethodError).
///
/// A number belongs to the same method in all versions; two methods of one number do not compile.
/// [`methods`](crate::methods) has an example, and the documentation of `copyrpc-calls` shows the
/// items for one method: `methods::example`.
#[macro_export]
macro_rules! service {
    ($(#[$attribute:meta])* $visibility:vis mod $name:ident {
        $($(#[$of_method:meta])* fn $method:ident($($argument:ident: $type:ty),* $(,)?) -> Result<$ok:ty, $error:ty> = $number:literal;)*
    }) => {
        $(#[$attribute])*
        #[allow(dead_code, unreachable_pub, unused_imports, reason = "a program may need one end only")]
        $visibility mod $name {
            use super::*;

            const _: () = assert!($crate::methods::are_distinct(&[$($number),*]), "two methods have one number");

            /// The methods at the server.
            pub trait Service {
                $($(#[$of_method])* fn $method(&mut self, $($argument: $type),*) -> ::std::result::Result<$ok, $error>;)*
            }

            /// Calls the method that the request names, and returns the reply.
            pub fn answer(service: &mut impl Service, request: &[u8]) -> ::std::vec::Vec<u8> {
                let Some((header, arguments)) = $crate::methods::Header::read(request) else { return ::std::vec![$crate::methods::ARGUMENTS] };
                match header.method {
                    $($number => match $crate::methods::decode::<($($type,)*)>(arguments) {
                        Some(($($argument,)*)) => $crate::methods::reply(service.$method($($argument),*)),
                        None => ::std::vec![$crate::methods::ARGUMENTS],
                    },)*
                    _ => ::std::vec![$crate::methods::UNKNOWN_METHOD],
                }
            }

            /// The methods at the server, as futures.
            pub trait AsyncService: Sync {
                $($(#[$of_method])* fn $method(&self, $($argument: $type),*) -> impl ::std::future::Future<Output = ::std::result::Result<$ok, $error>> + Send;)*
            }

            /// Calls the method that the request names, and returns the reply.
            pub async fn answer_async(service: &impl AsyncService, request: &[u8]) -> ::std::vec::Vec<u8> {
                let Some((header, arguments)) = $crate::methods::Header::read(request) else { return ::std::vec![$crate::methods::ARGUMENTS] };
                match header.method {
                    $($number => match $crate::methods::decode::<($($type,)*)>(arguments) {
                        Some(($($argument,)*)) => $crate::methods::reply(service.$method($($argument),*).await),
                        None => ::std::vec![$crate::methods::ARGUMENTS],
                    },)*
                    _ => ::std::vec![$crate::methods::UNKNOWN_METHOD],
                }
            }

            /// A client with the methods. It keeps the memory of its longest request.
            #[derive(Clone, Debug)]
            pub struct Client<C> {
                /// The client that sends the requests.
                pub caller: C,
                /// Maximum time of a call; `None`: the timeout of `caller`.
                pub timeout: ::std::option::Option<::std::time::Duration>,
                request: ::std::vec::Vec<u8>,
            }

            impl<C> Client<C> {
                /// Returns a client whose calls have the caller's timeout.
                pub const fn new(caller: C) -> Self {
                    Self { caller, timeout: None, request: ::std::vec::Vec::new() }
                }
            }

            impl<C: $crate::methods::Caller> Client<C> {
                $($(#[$of_method])*
                pub fn $method(&mut self, $($argument: $type),*) -> ::std::result::Result<$ok, $crate::methods::MethodError<$error, C::Error>> {
                    $crate::methods::call(&mut self.caller, &mut self.request, $number, self.timeout, &($($argument,)*))
                })*
            }

            /// A client with the methods, as futures.
            #[derive(Clone, Copy, Debug)]
            pub struct AsyncClient<C> {
                /// The client that sends the requests.
                pub caller: C,
                /// Maximum time of a call; `None`: the timeout of `caller`.
                pub timeout: ::std::option::Option<::std::time::Duration>,
            }

            impl<C> AsyncClient<C> {
                /// Returns a client whose calls have the caller's timeout.
                pub const fn new(caller: C) -> Self {
                    Self { caller, timeout: None }
                }
            }

            impl<C: $crate::methods::AsyncCaller> AsyncClient<C> {
                $($(#[$of_method])*
                pub async fn $method(&self, $($argument: $type),*) -> ::std::result::Result<$ok, $crate::methods::MethodError<$error, C::Error>> {
                    $crate::methods::call_async(&self.caller, $number, self.timeout, ($($argument,)*)).await
                })*
            }
        }
    };
}

#[cfg(doc)]
crate::service! {
    /// The items that [`service!`](crate::service!) makes for
    /// `fn stat(path: String) -> Result<u64, u32> = 1`, in the documentation only.
    pub mod example {
        /// Returns the length of a file in bytes.
        fn stat(path: String) -> Result<u64, u32> = 1;
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;
    use crate::{ClientError, SessionEnd, payload};

    type AskError = ClientError<Infallible, SessionEnd>;

    payload! {
        #[derive(Clone, Debug, PartialEq)]
        struct Entry {
            name: String,
            bytes: u64,
            parts: Vec<Option<(u8, bool)>>,
        }
    }
    payload! {
        #[derive(Clone, Copy, Debug, PartialEq)]
        enum Problem {
            Missing = 3,
            Full = 200,
        }
    }
    service! {
        mod old {
            fn find(name: String) -> Result<Entry, Problem> = 1;
            fn add(entry: Entry, times: u32) -> Result<u64, Problem> = 2;
            fn ping() -> Result<(), Infallible> = 65535;
        }
    }
    service! {
        mod new {
            fn find(name: Vec<u8>, depth: u64) -> Result<Entry, Problem> = 1;
            fn add(entry: Entry, times: u32) -> Result<u8, u32> = 2;
            fn remove(name: String) -> Result<(), Problem> = 3;
        }
    }

    fn entry() -> Entry {
        Entry {
            name: "a".to_owned(),
            bytes: 1 << 40,
            parts: vec![None, Some((7, true)), Some((0, false))],
        }
    }

    /// A server that counts the runs of its handlers.
    #[derive(Default)]
    struct Store(u32);

    impl old::Service for Store {
        fn find(&mut self, name: String) -> Result<Entry, Problem> {
            self.0 += 1;
            if name == "a" {
                Ok(entry())
            } else {
                Err(Problem::Missing)
            }
        }

        fn add(&mut self, entry: Entry, times: u32) -> Result<u64, Problem> {
            self.0 += 1;
            if times > 9 {
                Err(Problem::Full)
            } else {
                Ok(entry.bytes * u64::from(times))
            }
        }

        fn ping(&mut self) -> Result<(), Infallible> {
            self.0 += 1;
            Ok(())
        }
    }

    /// Calls `Store`. Keeps the last request.
    #[derive(Default)]
    struct Direct {
        store: Store,
        request: Vec<u8>,
        fails: bool,
    }

    impl Caller for Direct {
        type Error = AskError;

        fn timeout(&self) -> Option<Duration> {
            Some(Duration::from_micros(1_001))
        }

        fn call(&mut self, request: &[u8], timeout: Option<Duration>) -> Result<Vec<u8>, AskError> {
            self.request = request.to_vec();
            assert!(timeout.is_some());
            if self.fails {
                Err(ClientError::TimedOut)
            } else {
                Ok(old::answer(&mut self.store, request))
            }
        }
    }

    fn request(method: u16, arguments: &impl Payload) -> Vec<u8> {
        let mut request = b"earlier bytes".to_vec();
        Header { method, left: None }.write(arguments, &mut request);
        request
    }

    #[test]
    fn methods_return_what_their_handlers_do() {
        let mut client = old::Client::new(Direct::default());
        assert_eq!(client.find("a".to_owned()), Ok(entry()));
        assert_eq!(
            client.find("b".to_owned()),
            Err(MethodError::Failed(Problem::Missing))
        );
        assert_eq!(client.add(entry(), 3), Ok(3 << 40));
        assert_eq!(
            client.add(entry(), 10),
            Err(MethodError::Failed(Problem::Full))
        );
        assert_eq!((client.ping(), client.caller.store.0), (Ok(()), 5));
    }

    #[test]
    fn a_request_says_how_much_time_its_caller_has() {
        let mut client = old::Client::new(Direct::default());
        for (timeout, left_ms) in [
            (None, 2),
            (Some(Duration::ZERO), 1),
            (Some(Duration::from_secs(3)), 3_000),
        ] {
            client.timeout = timeout;
            client.ping().unwrap();
            assert_eq!(client.caller.request[..4], [0xff, 0xff, 0, 0]);
            let (header, arguments) = Header::read(&client.caller.request).unwrap();
            assert_eq!(
                (header, arguments),
                (
                    Header {
                        method: 65535,
                        left: Some(Duration::from_millis(left_ms))
                    },
                    &[][..]
                )
            );
        }
    }

    /// Checks every end of a call with the results of both functions of [`Ending`].
    #[test]
    fn each_bad_input_has_an_end_of_its_own() {
        let mut client = new::Client::new(Direct::default());
        let unknown = client.remove("a".to_owned()).unwrap_err();
        let arguments = client.find(vec![], 1).unwrap_err();
        assert_eq!(
            (&unknown, &arguments, client.caller.store.0),
            (&MethodError::UnknownMethod, &MethodError::Arguments, 0)
        );
        // The handler ran.
        assert_eq!(
            (client.add(entry(), 1), client.caller.store.0),
            (Err(MethodError::Reply), 1)
        );
        assert_eq!(
            client.add(entry(), 10),
            Err(MethodError::Reply),
            "another type of error"
        );
        client.caller.fails = true;
        let late = client.remove("a".to_owned()).unwrap_err();
        let failed = MethodError::Failed(Problem::Missing);
        let full = MethodError::Call(AskError::Full);
        let expected = [
            (unknown, false, false),
            (arguments, false, false),
            (MethodError::Reply, false, true),
            (late, false, true),
            (failed, false, true),
        ];
        for (error, is_retryable, may_have_executed) in
            expected.into_iter().chain([(full, true, false)])
        {
            assert_eq!(
                (error.is_retryable(), error.may_have_executed()),
                (is_retryable, may_have_executed),
                "{error}"
            );
        }
    }

    #[test]
    fn bytes_that_are_no_request_reach_no_handler_and_no_bytes_panic() {
        let mut store = Store::default();
        let good = request(2, &(entry(), 1_u32));
        assert_eq!(old::answer(&mut store, &good)[0], DONE);
        for end in 0..good.len() {
            assert_eq!(
                old::answer(&mut store, &good[..end]),
                [ARGUMENTS],
                "cut at {end}"
            );
        }
        let longer = [&good[..], &[0]].concat();
        assert_eq!(old::answer(&mut store, &longer), [ARGUMENTS]);
        let reserved = [&good[..2], &[1], &good[3..]].concat();
        assert_eq!(
            (old::answer(&mut store, &reserved), store.0),
            (vec![ARGUMENTS], 1)
        );
        for at in 0..good.len() {
            for byte in [0, 1, 0x7f, 0x80, 0xff] {
                let mut bad = good.clone();
                bad[at] = byte;
                let reply = old::answer(&mut store, &bad);
                assert!(matches!(reply[0], DONE..=ARGUMENTS));
                let _any: Result<u64, MethodError<Problem, AskError>> = outcome(&bad);
            }
        }
    }

    /// A module often has its own `Result`, which the generated module imports.
    mod shadows {
        use crate::payload;

        type Result<T> = std::result::Result<T, ()>;

        payload! {
            pub(super) struct Unit {
                pub(super) number: u8,
            }
        }
        service! {
            pub(super) mod shadowed {
                fn unit() -> Result<Unit, u8> = 1;
            }
        }

        pub(super) const NOTHING: Result<()> = Ok(());
    }

    impl shadows::shadowed::Service for Store {
        fn unit(&mut self) -> Result<shadows::Unit, u8> {
            shadows::NOTHING
                .map(|()| shadows::Unit { number: 7 })
                .map_err(|()| 1)
        }
    }

    #[test]
    fn names_of_the_program_do_not_reach_into_a_service() {
        let request = request(1, &());
        assert_eq!(
            shadows::shadowed::answer(&mut Store::default(), &request),
            [DONE, 7]
        );
    }

    #[test]
    fn two_methods_of_one_number_are_found() {
        assert!(are_distinct(&[]) && are_distinct(&[1, 2, 65535]));
        assert!(!are_distinct(&[1, 2, 1]));
    }
}
