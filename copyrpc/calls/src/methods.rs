//! Services whose requests have the number of a method: [`service!`](crate::service!) makes a
//! client with methods, and a trait for the server to implement. It works over every RPC whose
//! client is a [`Caller`], with handlers of bytes.
//!
//! ```
//! use copyrpc_calls::methods::{Caller, MethodError};
//! use copyrpc_calls::service;
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Debug, PartialEq, Serialize, Deserialize)]
//! pub struct Attributes { pub bytes: u64, pub is_directory: bool }
//!
//! #[derive(Debug, PartialEq, Serialize, Deserialize)]
//! pub enum Problem { Missing, Exists }
//!
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
//! #     fn call(&mut self, request: &[u8], _: Option<std::time::Duration>) -> Result<std::borrow::Cow<'_, [u8]>, Error> {
//! #         Ok(metadata::answer(&mut self.0, request).into())
//! #     }
//! # }
//! # fn main() {
//! # let caller = Direct(Root);
//! // The server's part is `server.serve(|request| metadata::answer(&mut root, &request))`. The client's:
//! let mut client = metadata::Client::new(caller);
//! assert_eq!(client.stat("/".to_owned()).unwrap(), Attributes { bytes: 4096, is_directory: true });
//! assert!(matches!(client.stat("/a".to_owned()), Err(MethodError::Failed(Problem::Missing))));
//! # }
//! ```
//!
//! # The bytes
//! A request is a header of 8 bytes, little-endian (method u16; 0 u16; remaining time of the call
//! in milliseconds u32, rounded up, 0 if it has no limit) and the arguments. A reply is one byte (0
//! the result, 1 the error of the handler, 2 unknown method, 3 undecodable request, 4 the outcome
//! has no bytes), and the value, or with 3 and 4 the byte of a [`PayloadError`]. [`payloads`] has
//! the bytes of values. Numbers of methods, arguments, fields and variants are the contract of both
//! ends; nothing else checks it.

use std::borrow::Cow;
use std::fmt::Debug;
use std::future::Future;
use std::time::Duration;

use crate::Ending;
pub use crate::context::{Context, Request, Wanted};
pub use crate::header::Header;
use crate::payloads;
#[doc(hidden)]
pub use crate::payloads::{Decoder, encode};
pub use crate::payloads::{Payload, PayloadError};

/// A client that sends bytes and waits for the reply.
pub trait Caller {
    /// The error of a call.
    type Error: Ending;

    /// Returns the maximum time of a call by default; `None`: without a limit.
    fn timeout(&self) -> Option<Duration>;

    /// Sends a request and waits for its reply, at most for `timeout`. A client may keep the reply
    /// until its next call, and lend it.
    ///
    /// # Errors
    /// The call has no reply.
    fn call(
        &mut self,
        request: &[u8],
        timeout: Option<Duration>,
    ) -> Result<Cow<'_, [u8]>, Self::Error>;
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
    /// The handler ran, and returned this error. The text of the variant has the `Debug` of the
    /// error, which need not have `Display`.
    #[error("the handler returned {0:?}")]
    Failed(E),
    /// The server has no method of this number. Nothing ran: client and server are of different
    /// versions.
    #[error("the server does not know this method: it is of another version")]
    UnknownMethod,
    /// The client could not encode the arguments, or the server could not decode them. Nothing ran:
    /// their types do not travel, or client and server are of different versions.
    #[error(
        "nothing ran: the arguments have no bytes, or the server, which may be of another version, does not take them: {0}"
    )]
    Arguments(PayloadError),
    /// The server could not encode its result, or the client could not decode it. The handler ran:
    /// the type does not travel, or client and server are of different versions.
    #[error(
        "the method ran: its outcome has no bytes, or the client, which may be of another version, does not take them: {0}"
    )]
    Reply(PayloadError),
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
            Self::Failed(_) | Self::Reply(_) => true,
            Self::UnknownMethod | Self::Arguments(_) => false,
            Self::Call(error) => error.may_have_executed(),
        }
    }
}

/// The first byte of a reply with the result of the handler, and with its error.
const DONE: u8 = 0;
const FAILED: u8 = 1;
/// The reply to a request of an unknown method.
#[doc(hidden)]
pub const UNKNOWN_METHOD: u8 = 2;
/// The first byte of the reply to a request that cannot be decoded.
const ARGUMENTS: u8 = 3;
/// The first byte of the reply of a handler whose outcome cannot be encoded.
const REPLY: u8 = 4;

/// Decodes the arguments of a method. If this fails, the error is the reply to send.
#[doc(hidden)]
#[inline]
pub fn arguments<T>(
    arguments: &[u8],
    decode: impl FnOnce(&mut Decoder<'_>) -> Result<T, PayloadError>,
) -> Result<T, Vec<u8>> {
    payloads::decode_all(arguments, decode).map_err(undecodable)
}

pub(crate) fn undecodable(error: PayloadError) -> Vec<u8> {
    vec![ARGUMENTS, error as u8]
}

/// Returns the reply to a request that has no header.
#[doc(hidden)]
#[must_use]
pub fn no_request() -> Vec<u8> {
    undecodable(PayloadError::Short)
}

/// Returns the reply to a request that was handled.
#[doc(hidden)]
pub fn reply<T: Payload, E: Payload>(outcome: Result<T, E>) -> Vec<u8> {
    let mut reply = Vec::with_capacity(4 * Header::BYTES);
    let encoded = match outcome {
        Ok(value) => {
            reply.push(DONE);
            encode(&value, &mut reply)
        }
        Err(error) => {
            reply.push(FAILED);
            encode(&error, &mut reply)
        }
    };
    encoded.map_or_else(|error| vec![REPLY, error as u8], |()| reply)
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
    encode: impl FnOnce(&mut Vec<u8>) -> Result<(), PayloadError>,
) -> Result<T, MethodError<E, C::Error>> {
    let left = timeout.or_else(|| caller.timeout());
    Header { method, left }.write(request);
    encode(request).map_err(MethodError::Arguments)?;
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
    encode: impl FnOnce(&mut Vec<u8>) -> Result<(), PayloadError>,
) -> Result<T, MethodError<E, C::Error>> {
    let left = timeout.or_else(|| caller.timeout());
    let mut request = Vec::new();
    Header { method, left }.write(&mut request);
    encode(&mut request).map_err(MethodError::Arguments)?;
    outcome(&caller.call(request, left).await?)
}

fn outcome<T: Payload, E: Payload, C>(reply: &[u8]) -> Result<T, MethodError<E, C>> {
    let of_peer = |byte| PayloadError::from_byte(byte).unwrap_or(PayloadError::Refused);
    match *reply {
        [DONE, ref value @ ..] => payloads::decode(value).map_err(MethodError::Reply),
        [FAILED, ref error @ ..] => {
            Err(payloads::decode(error).map_or_else(MethodError::Reply, MethodError::Failed))
        }
        [UNKNOWN_METHOD] => Err(MethodError::UnknownMethod),
        [ARGUMENTS, error] => Err(MethodError::Arguments(of_peer(error))),
        [REPLY, error] => Err(MethodError::Reply(of_peer(error))),
        _ => Err(MethodError::Reply(PayloadError::Malformed)),
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

/// Makes a module for a service: its methods have a number, arguments, and a `Result`. Arguments,
/// results and errors are of any owned type with serde's `Serialize` and `Deserialize`
/// ([`Payload`](crate::methods::Payload)): `String` in place of `&str`. The module has
///
/// - `Service`, the trait for the server to implement, whose methods take `&mut self`, and
///   `answer`, which calls the method of a [`Request`](crate::methods::Request), and returns the
///   bytes of the reply;
/// - `AsyncService` and `answer_async`, the same with methods that are futures and take `&self`, as
///   calls run at the same time;
/// - `Client` and `AsyncClient`, with the methods, over any [`Caller`](crate::methods::Caller) or
///   [`AsyncCaller`](crate::methods::AsyncCaller). Their methods return
///   [`MethodError`](crate::methods::MethodError).
///
/// If the declaration of a method begins with `&context`, the method of both traits gets the
/// [`Context`](crate::methods::Context) of the call first; the clients and the bytes stay the same:
///
/// ```
/// copyrpc_calls::service! {
///     pub mod leases {
///         /// Waits for the lease, and returns its number.
///         fn acquire(&context, name: String) -> Result<u64, ()> = 1;
///         fn release(lease: u64) -> Result<(), ()> = 2;
///     }
/// }
/// use copyrpc_calls::methods::Context;
///
/// struct Leases;
/// impl leases::Service for Leases {
///     fn acquire(&mut self, context: Context<'_>, name: String) -> Result<u64, ()> {
///         if context.is_wanted() { context.client().ok_or(()) } else { Err(()) }
///     }
///     fn release(&mut self, lease: u64) -> Result<(), ()> { Ok(()) }
/// }
/// ```
///
/// A number belongs to the same method in all versions; two methods of one number do not compile,
/// and neither does a method `new`:
///
/// ```compile_fail
/// copyrpc_calls::service! {
///     mod leases {
///         fn new(name: String) -> Result<u64, ()> = 1;
///     }
/// }
/// ```
///
/// Arguments may be of types with the names `Client` and `AsyncClient`, but not `Service` or
/// `AsyncService`. [`methods`](crate::methods) has an example, and the documentation of
/// `copyrpc-calls` shows the items for one method: `methods::example`.
#[macro_export]
macro_rules! service {
    ($(#[$attribute:meta])* $visibility:vis mod $name:ident {
        $($(#[$of_method:meta])* fn $method:ident($(&$context:ident)? $(,)? $($argument:ident: $type:ty),* $(,)?) -> Result<$ok:ty, $error:ty> = $number:literal;)*
    }) => {
        $(#[$attribute])*
        #[allow(dead_code, unreachable_pub, unused_imports, unused_variables, reason = "a program may need one end only")]
        $visibility mod $name {
            pub use made::{AsyncService, Service, answer, answer_async};

            const _: () = assert!($crate::methods::are_distinct(&[$($number),*]), "two methods have one number");
            $($crate::method_name!($method);)*

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

            // The clients are not in the scope of this module, so that types of the program may have
            // their names.
            mod made {
                use super::super::*;

                /// The methods at the server.
                pub trait Service {
                    $($(#[$of_method])* fn $method(&mut self, $($context: $crate::methods::Context<'_>,)? $($argument: $type),*) -> ::std::result::Result<$ok, $error>;)*
                }

                /// Calls the method that the request names, and returns the reply.
                pub fn answer(service: &mut impl Service, request: &(impl $crate::methods::Request + ?Sized)) -> ::std::vec::Vec<u8> {
                    let data = request.data();
                    let Some((header, arguments)) = $crate::methods::Header::read(&data) else { return $crate::methods::no_request() };
                    match header.method {
                        $($number => match $crate::methods::arguments(arguments, |from| Ok(($(from.value::<$type>()?,)*))) {
                            Ok(($($argument,)*)) => {
                                $(let $context = $crate::methods::Request::context(request);)?
                                $crate::methods::reply(service.$method($($context,)? $($argument),*))
                            }
                            Err(reply) => reply,
                        },)*
                        _ => ::std::vec![$crate::methods::UNKNOWN_METHOD],
                    }
                }

                /// The methods at the server, as futures.
                pub trait AsyncService: Sync {
                    $($(#[$of_method])* fn $method(&self, $($context: $crate::methods::Context<'_>,)? $($argument: $type),*) -> impl ::std::future::Future<Output = ::std::result::Result<$ok, $error>> + Send;)*
                }

                /// Calls the method that the request names, and returns the reply.
                pub async fn answer_async(service: &impl AsyncService, request: &(impl $crate::methods::Request + ?Sized)) -> ::std::vec::Vec<u8> {
                    let data = request.data();
                    let Some((header, arguments)) = $crate::methods::Header::read(&data) else { return $crate::methods::no_request() };
                    match header.method {
                        $($number => match $crate::methods::arguments(arguments, |from| Ok(($(from.value::<$type>()?,)*))) {
                            Ok(($($argument,)*)) => {
                                $(let $context = $crate::methods::Request::context(request);)?
                                $crate::methods::reply(service.$method($($context,)? $($argument),*).await)
                            }
                            Err(reply) => reply,
                        },)*
                        _ => ::std::vec![$crate::methods::UNKNOWN_METHOD],
                    }
                }

                impl<C: $crate::methods::Caller> super::Client<C> {
                    $($(#[$of_method])*
                    pub fn $method(&mut self, $($argument: $type),*) -> ::std::result::Result<$ok, $crate::methods::MethodError<$error, C::Error>> {
                        $crate::methods::call(&mut self.caller, &mut self.request, $number, self.timeout, |request| {
                            $($crate::methods::encode(&$argument, request)?;)*
                            Ok(())
                        })
                    })*
                }

                impl<C: $crate::methods::AsyncCaller> super::AsyncClient<C> {
                    $($(#[$of_method])*
                    pub async fn $method(&self, $($argument: $type),*) -> ::std::result::Result<$ok, $crate::methods::MethodError<$error, C::Error>> {
                        $crate::methods::call_async(&self.caller, $number, self.timeout, move |request| {
                            $($crate::methods::encode(&$argument, request)?;)*
                            Ok(())
                        }).await
                    })*
                }
            }
        }
    };
}

/// Refuses the names that a method cannot have.
#[doc(hidden)]
#[macro_export]
macro_rules! method_name {
    (new) => {
        compile_error!("a method cannot be `new`, as `Client::new` makes the client of the service: give the method another name");
    };
    ($method:ident) => {};
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
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;
    use std::path::PathBuf;

    use serde::{Deserialize, Serialize};

    use super::*;

    type ClientError = crate::CallFailure;

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    struct Entry {
        name: String,
        bytes: u64,
        parts: Vec<Option<(u8, bool)>>,
    }

    /// The error of a method that cannot fail.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum Never {}

    #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
    enum Problem {
        Missing,
        Full,
    }

    service! {
        mod old {
            fn find(name: String) -> Result<Entry, Problem> = 1;
            fn add(entry: Entry, times: u32) -> Result<u64, Problem> = 2;
            fn ping() -> Result<(), Never> = 65535;
        }
    }
    service! {
        mod new {
            fn find(name: Vec<u8>, depth: u64) -> Result<Entry, Problem> = 1;
            fn add(entry: Entry, times: u32) -> Result<u8, String> = 2;
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

        fn ping(&mut self) -> Result<(), Never> {
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
        type Error = ClientError;

        fn timeout(&self) -> Option<Duration> {
            Some(Duration::from_micros(1_001))
        }

        fn call(
            &mut self,
            request: &[u8],
            timeout: Option<Duration>,
        ) -> Result<Cow<'_, [u8]>, ClientError> {
            self.request = request.to_vec();
            assert!(timeout.is_some());
            if self.fails {
                Err(ClientError::TimedOut)
            } else {
                Ok(old::answer(&mut self.store, request).into())
            }
        }
    }

    fn request(method: u16, arguments: &impl Payload) -> Vec<u8> {
        let mut request = b"earlier bytes".to_vec();
        Header { method, left: None }.write(&mut request);
        encode(arguments, &mut request).unwrap();
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
            (
                &MethodError::UnknownMethod,
                &MethodError::Arguments(PayloadError::Long),
                0
            )
        );
        assert_eq!(
            (client.add(entry(), 1), client.caller.store.0),
            (Err(MethodError::Reply(PayloadError::Long)), 1)
        );
        assert_eq!(
            client.add(entry(), 10),
            Err(MethodError::Reply(PayloadError::Short)),
            "another type of error"
        );
        client.caller.fails = true;
        let late = client.remove("a".to_owned()).unwrap_err();
        let failed = MethodError::Failed(Problem::Missing);
        let full = MethodError::Call(ClientError::Full);
        let expected = [
            (unknown, false, false),
            (arguments, false, false),
            (MethodError::Reply(PayloadError::Long), false, true),
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

    service! {
        mod paths {
            fn path(bytes: Vec<u8>) -> Result<PathBuf, ()> = 1;
            fn len(path: PathBuf) -> Result<usize, ()> = 2;
        }
    }

    /// A service of paths, and a client that calls it directly. Counts the calls. Serde refuses
    /// paths that are not UTF-8.
    struct Paths(u32);

    impl paths::Service for Paths {
        fn path(&mut self, bytes: Vec<u8>) -> Result<PathBuf, ()> {
            Ok(OsString::from_vec(bytes).into())
        }

        fn len(&mut self, path: PathBuf) -> Result<usize, ()> {
            Ok(path.as_os_str().len())
        }
    }

    impl Caller for Paths {
        type Error = ClientError;

        fn timeout(&self) -> Option<Duration> {
            None
        }

        fn call(
            &mut self,
            request: &[u8],
            _: Option<Duration>,
        ) -> Result<Cow<'_, [u8]>, ClientError> {
            self.0 += 1;
            Ok(paths::answer(self, request).into())
        }
    }

    #[test]
    fn values_that_their_types_refuse_end_the_call_at_the_end_that_has_them() {
        let mut client = paths::Client::new(Paths(0));
        let refused = PayloadError::Refused;
        let no_result = client.path(vec![0xff]).unwrap_err();
        assert_eq!(no_result, MethodError::Reply(refused));
        assert!(no_result.may_have_executed() && client.caller.0 == 1);
        let no_argument = client.len(OsString::from_vec(vec![0xff]).into());
        assert_eq!(no_argument, Err(MethodError::Arguments(refused)));
        assert_eq!((client.len("ab".into()), client.caller.0), (Ok(2), 2));
    }

    #[test]
    fn bytes_that_are_no_request_reach_no_handler_and_no_bytes_panic() {
        let mut store = Store::default();
        let good = request(2, &(entry(), 1_u32));
        assert_eq!(old::answer(&mut store, &good)[0], DONE);
        for end in 0..good.len() {
            assert_eq!(
                old::answer(&mut store, &good[..end]),
                undecodable(PayloadError::Short),
                "cut at {end}"
            );
        }
        let longer = [&good[..], &[0]].concat();
        assert_eq!(
            old::answer(&mut store, &longer),
            undecodable(PayloadError::Long)
        );
        let reserved = [&good[..2], &[1], &good[3..]].concat();
        assert_eq!(
            (old::answer(&mut store, &reserved), store.0),
            (no_request(), 1)
        );
        for at in 0..good.len() {
            for byte in [0, 1, 0x7f, 0x80, 0xff] {
                let mut bad = good.clone();
                bad[at] = byte;
                let reply = old::answer(&mut store, &bad);
                assert!(matches!(reply[0], DONE..=ARGUMENTS));
                let _any: Result<u64, MethodError<Problem, ClientError>> = outcome(&bad);
            }
        }
    }

    /// A module often has its own `Result`, which the generated module imports, and types with the
    /// names of the generated clients.
    mod shadows {
        use serde::{Deserialize, Serialize};

        type Result<T> = std::result::Result<T, ()>;

        #[derive(Serialize, Deserialize)]
        pub(super) struct Unit {
            pub(super) number: u8,
        }

        #[derive(Serialize, Deserialize)]
        pub(super) struct Client(pub(super) u8);

        #[derive(Serialize, Deserialize)]
        pub(super) struct AsyncClient;

        service! {
            pub(super) mod shadowed {
                fn unit() -> Result<Unit, u8> = 1;
                fn shift(client: Client, by: AsyncClient) -> Result<Client, u8> = 2;
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

        fn shift(
            &mut self,
            client: shadows::Client,
            _: shadows::AsyncClient,
        ) -> Result<shadows::Client, u8> {
            Ok(shadows::Client(client.0 << 1))
        }
    }

    #[test]
    fn names_of_the_program_do_not_reach_into_a_service() {
        let request = [request(1, &()), request(2, &(3_u8, ()))];
        assert_eq!(
            request.map(|request| shadows::shadowed::answer(&mut Store::default(), &request)),
            [[DONE, 7], [DONE, 6]]
        );
    }

    #[test]
    fn two_methods_of_one_number_are_found() {
        assert!(are_distinct(&[]) && are_distinct(&[1, 2, 65535]));
        assert!(!are_distinct(&[1, 2, 1]));
    }
}
