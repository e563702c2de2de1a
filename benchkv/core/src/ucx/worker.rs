//! A UCX worker and its endpoints, for one thread: it sends and receives active messages.
//!
//! Memory that is given to UCX stays in place until UCX is done with it: a message from the send to
//! the end of its request, the inbox until the worker is destroyed. No reference to the inbox is
//! held across a call of UCX, because callbacks write to it. Callbacks run inside such calls, on
//! this thread, copy some bytes, call nothing of UCX and cannot panic.

use core::ffi::{c_char, c_uint, c_void};
use core::ptr::NonNull;
use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use super::ffi::*;
use super::{OLDEST, PeerErrors, UcxError};

/// Id of the only handler of active messages.
const MESSAGE_ID: c_uint = 1;
/// Maximum rounds of UCX's progress in one call of [`Worker::progress`].
const PROGRESS_ROUNDS: usize = 16;
/// Maximum time for endpoints to close.
const CLOSE_LIMIT: Duration = Duration::from_millis(200);

#[derive(Debug, Clone)]
pub(crate) struct Message {
    short: [u8; Self::SHORT_BYTES],
    /// All bytes of a message that does not fit `short`.
    long: Box<[u8]>,
    length: usize,
}

impl Message {
    /// Maximum length of a message that needs no allocation, in bytes.
    pub(crate) const SHORT_BYTES: usize = 64;

    /// Returns the bytes of the message, but at least 64 bytes: the bytes after the end of a
    /// shorter message are zeros. All bytes of a message that was not kept are zeros.
    pub(crate) fn head(&self) -> &[u8] {
        if self.long.is_empty() {
            &self.short
        } else {
            &self.long
        }
    }

    /// Returns the bytes of the message.
    ///
    /// # Errors
    /// The length of the message, which was too long to be kept.
    pub(crate) fn bytes(&self) -> Result<&[u8], usize> {
        self.head().get(..self.length).ok_or(self.length)
    }
}

/// State that the callback [`receive`] writes.
struct Inbox {
    messages: VecDeque<Message>,
    /// Maximum length of a message that is kept, in bytes.
    longest: usize,
}

struct Endpoint {
    handle: Handle,
    /// Status of the endpoint's failure; `UCS_OK` before a failure. The error callback and
    /// [`has_ended`](Self::has_ended) write it.
    failure: NonNull<Status>,
    /// Requests that the library has not finished, and their messages, in the order of sending.
    going: VecDeque<(NonNull<c_void>, Box<[u8]>)>,
    /// A flush that ends when the connection is established; `None` once it has ended.
    connecting: Option<NonNull<c_void>>,
}

impl Endpoint {
    /// Checks whether the operation of `request` has ended. If so, frees the request, records a
    /// failure of the operation, and returns `true`. Then the caller must not use the request any
    /// more.
    fn has_ended(&self, api: &Api, request: NonNull<c_void>) -> bool {
        // SAFETY: `request` belongs to this worker, and has not been freed.
        let status = unsafe { (api.functions.ucp_request_check_status)(request.as_ptr()) };
        if status == UCS_INPROGRESS {
            return false;
        }
        // SAFETY: `request` belongs to this worker, and has not been freed. No caller uses it after
        // `true`, so it is freed once.
        unsafe { (api.functions.ucp_request_free)(request.as_ptr()) };
        if status != UCS_OK {
            // SAFETY: `failure` points to a status that lives as long as the worker, and no
            // callback, which could also write it, runs now.
            unsafe { self.failure.write(status) };
        }
        true
    }
}

/// A worker of UCX. It belongs to the thread that opened it.
pub(crate) struct Worker {
    api: &'static Api,
    context: Handle,
    handle: Handle,
    inbox: NonNull<Inbox>,
    errors: PeerErrors,
    endpoints: Vec<Endpoint>,
    /// Buffers for messages, not in use now. They are boxed, because the library reads a message in
    /// place until the request of the message has ended.
    spare: Vec<Box<[u8]>>,
    longest: usize,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker")
            .field("endpoints", &self.endpoints.len())
            .field("errors", &self.errors)
            .finish_non_exhaustive()
    }
}

impl Worker {
    /// Opens a worker without endpoints, on the transports that UCX chooses (`UCX_TLS`,
    /// `UCX_NET_DEVICES`), for messages of at most `longest` bytes.
    pub(crate) fn open(errors: PeerErrors, longest: usize) -> Result<Self, UcxError> {
        let api = Api::get()?;
        let params = Params {
            field_mask: UCP_PARAM_FIELD_FEATURES,
            features: UCP_FEATURE_AM,
            ..Params::default()
        };
        let mut context: Handle = core::ptr::null_mut();
        // SAFETY: `params` and `context` are live during the call. A null configuration selects the
        // configuration of the environment.
        let status = unsafe {
            (api.functions.ucp_init_version)(
                OLDEST.0,
                OLDEST.1,
                &raw const params,
                core::ptr::null(),
                &raw mut context,
            )
        };
        api.check("ucp_init", status)?;
        let (params, mut handle) = (WorkerParams::default(), core::ptr::null_mut());
        // SAFETY: `context` was created above; `params` and `handle` are live during the call.
        let status = unsafe {
            (api.functions.ucp_worker_create)(context, &raw const params, &raw mut handle)
        };
        if let Err(error) = api.check("ucp_worker_create", status) {
            // SAFETY: `context` was created above and has no worker. It is destroyed once.
            unsafe { (api.functions.ucp_cleanup)(context) };
            return Err(error);
        }
        let inbox = NonNull::from(Box::leak(Box::new(Inbox {
            messages: VecDeque::new(),
            longest,
        })));
        // From here on the drop of the worker destroys everything that was created.
        let worker = Self {
            api,
            context,
            handle,
            inbox,
            errors,
            endpoints: Vec::new(),
            spare: Vec::new(),
            longest,
        };
        let handler = HandlerParams {
            field_mask: UCP_AM_HANDLER_PARAM_FIELD_ID
                | UCP_AM_HANDLER_PARAM_FIELD_CB
                | UCP_AM_HANDLER_PARAM_FIELD_ARG,
            id: MESSAGE_ID,
            flags: 0,
            cb: Some(receive),
            arg: inbox.as_ptr().cast(),
        };
        // SAFETY: `handle` is the worker created above, and `handler` is live during the call. The
        // callback has the type that the library calls, and its argument lives until the worker is
        // destroyed.
        let status =
            unsafe { (api.functions.ucp_worker_set_am_recv_handler)(handle, &raw const handler) };
        api.check("ucp_worker_set_am_recv_handler", status)?;
        Ok(worker)
    }

    pub(crate) fn version(&self) -> String {
        self.api.version()
    }

    /// Returns the address by which peers reach the worker.
    pub(crate) fn address(&self) -> Result<Vec<u8>, UcxError> {
        let (mut address, mut length) = (core::ptr::null_mut(), 0);
        // SAFETY: `self.handle` is a live worker; `address` and `length` are live during the call,
        // which writes them.
        let status = unsafe {
            (self.api.functions.ucp_worker_get_address)(
                self.handle,
                &raw mut address,
                &raw mut length,
            )
        };
        self.api.check("ucp_worker_get_address", status)?;
        // SAFETY: the library returned `length` as the length of the bytes at `address`, which are
        // valid until they are released.
        let bytes = unsafe { core::slice::from_raw_parts(address, length) }.to_vec();
        // SAFETY: `address` belongs to this worker, and is released once.
        unsafe { (self.api.functions.ucp_worker_release_address)(self.handle, address) };
        Ok(bytes)
    }

    /// Makes an endpoint to the worker with this address, and returns the endpoint's number. The
    /// connection is established while both workers make progress.
    ///
    /// # Safety
    /// `address` must have been returned by [`address`](Self::address) of a worker: the library
    /// reads it without knowing its length.
    pub(crate) unsafe fn connect(&mut self, address: &[u8]) -> Result<usize, UcxError> {
        let failure = NonNull::from(Box::leak(Box::new(UCS_OK)));
        let (mode, callback): (_, Option<ErrorCallback>) = match self.errors {
            PeerErrors::Peer => (UCP_ERR_HANDLING_MODE_PEER, Some(fail)),
            PeerErrors::None => (UCP_ERR_HANDLING_MODE_NONE, None),
        };
        let mut params = EndpointParams {
            field_mask: UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
            address: address.as_ptr(),
            err_mode: mode,
            err_handler_cb: callback,
            err_handler_arg: failure.as_ptr().cast(),
            unused: [0; 8],
        };
        if callback.is_some() {
            params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER;
        }
        let mut handle = core::ptr::null_mut();
        // SAFETY: `self.handle` is a live worker. `params` is live during the call and contains the
        // address of a worker, as the caller guarantees, and a callback of the type that the
        // library calls, whose argument lives as long as the worker.
        let status = unsafe {
            (self.api.functions.ucp_ep_create)(self.handle, &raw const params, &raw mut handle)
        };
        if let Err(error) = self.api.check("ucp_ep_create", status) {
            // SAFETY: `failure` was leaked above, and no endpoint has it.
            drop(unsafe { Box::from_raw(failure.as_ptr()) });
            return Err(error);
        }
        let options = RequestParams::default();
        // SAFETY: `handle` is the endpoint created above; `options`, in which no field is set, is
        // live during the call.
        let flush = Started::of(unsafe {
            (self.api.functions.ucp_ep_flush_nbx)(handle, &raw const options)
        });
        let connecting = match flush {
            Started::Going(request) => Some(request),
            Started::Done | Started::Failed(_) => None,
        };
        self.endpoints.push(Endpoint {
            handle,
            failure,
            going: VecDeque::new(),
            connecting,
        });
        if let Started::Failed(status) = flush {
            Err(UcxError::Peer(self.api.text(status)))
        } else {
            Ok(self.endpoints.len() - 1)
        }
    }

    /// Makes progress. Returns whether all connections are established.
    ///
    /// # Errors
    /// [`UcxError::Peer`]: a connection cannot be established.
    pub(crate) fn settle(&mut self) -> Result<bool, UcxError> {
        self.progress();
        for endpoint in &mut self.endpoints {
            let connecting = endpoint.connecting.take();
            endpoint.connecting =
                connecting.filter(|request| !endpoint.has_ended(self.api, *request));
        }
        (0..self.endpoints.len()).try_for_each(|endpoint| self.check(endpoint))?;
        let mut endpoints = self.endpoints.iter();
        Ok(endpoints.all(|endpoint| endpoint.connecting.is_none()))
    }

    /// Sends a message of these parts, of at most `longest` bytes together. The library queues
    /// messages that it cannot send at once, without limit.
    ///
    /// # Errors
    /// [`UcxError::Peer`]: the endpoint has failed. [`UcxError::Call`]: there is no such endpoint,
    /// or the parts are longer than `longest`.
    #[inline]
    pub(crate) fn send(&mut self, endpoint: usize, parts: &[&[u8]]) -> Result<(), UcxError> {
        self.check(endpoint)?;
        let refuse = |status: &str| UcxError::Call {
            call: "ucp_am_send_nbx",
            status: status.to_owned(),
        };
        let endpoint = self.endpoints.get_mut(endpoint);
        let endpoint = endpoint.ok_or_else(|| refuse("no such endpoint"))?;
        let message = self.spare.pop();
        let mut message = message.unwrap_or_else(|| vec![0; self.longest].into());
        let mut length = 0;
        for part in parts {
            let place = message.get_mut(length..length + part.len());
            let place = place.ok_or_else(|| refuse("a longer message than any"))?;
            place.copy_from_slice(part);
            length += part.len();
        }
        let params = RequestParams {
            op_attr_mask: UCP_OP_ATTR_FIELD_FLAGS,
            flags: UCP_AM_SEND_FLAG_EAGER,
            ..RequestParams::default()
        };
        // SAFETY: `endpoint.handle` is a live endpoint, the header is empty, and `params` is live
        // during the call. The bytes of `message` stay in place until its request has ended or the
        // worker is destroyed.
        let started = Started::of(unsafe {
            (self.api.functions.ucp_am_send_nbx)(
                endpoint.handle,
                MESSAGE_ID,
                core::ptr::null(),
                0,
                message.as_ptr().cast(),
                length,
                &raw const params,
            )
        });
        match started {
            Started::Done => self.spare.push(message),
            Started::Going(request) => endpoint.going.push_back((request, message)),
            Started::Failed(status) => return Err(UcxError::Peer(self.api.text(status))),
        }
        Ok(())
    }

    /// Makes progress in a bounded number of rounds. Returns whether the library did any work.
    pub(crate) fn progress(&mut self) -> bool {
        let mut rounds = 0;
        while rounds < PROGRESS_ROUNDS
            // SAFETY: `self.handle` is a live worker, and there is no reference to the memory that
            // callbacks write.
            && unsafe { (self.api.functions.ucp_worker_progress)(self.handle) } > 0
        {
            rounds += 1;
        }
        for endpoint in &mut self.endpoints {
            while let Some((request, message)) = endpoint.going.pop_front() {
                if !endpoint.has_ended(self.api, request) {
                    endpoint.going.push_front((request, message));
                    break;
                }
                self.spare.push(message);
            }
        }
        rounds > 0
    }

    /// Takes the next message, of any peer.
    #[inline]
    pub(crate) fn next_message(&mut self) -> Option<Message> {
        // SAFETY: the inbox lives as long as the worker. Callbacks also write it, but they run only
        // inside calls of the library, and this is no such call.
        unsafe { self.inbox.as_mut() }.messages.pop_front()
    }

    /// Checks whether an endpoint is usable.
    ///
    /// # Errors
    /// [`UcxError::Peer`] with UCX's reason.
    #[inline]
    pub(crate) fn check(&self, endpoint: usize) -> Result<(), UcxError> {
        let Some(endpoint) = self.endpoints.get(endpoint) else {
            return Ok(());
        };
        // SAFETY: the status lives as long as the worker. Callbacks write it, but they run only
        // inside calls of the library, and this is no such call.
        let status = unsafe { endpoint.failure.read() };
        if status == UCS_OK {
            Ok(())
        } else {
            Err(UcxError::Peer(self.api.text(status)))
        }
    }

    /// Returns the transports that the worker's endpoints use, each once, for example
    /// `posix/memory` and `rc_mlx5/mlx5_0:1`. They are parsed from UCX's printout of an endpoint,
    /// the only report of them that all versions make.
    pub(crate) fn transports(&self) -> Vec<String> {
        let endpoints = self.endpoints.iter();
        let mut found: Vec<String> = endpoints
            .flat_map(|endpoint| lanes(&self.print(endpoint)))
            .collect();
        found.sort();
        found.dedup();
        found
    }

    fn print(&self, endpoint: &Endpoint) -> String {
        let (mut text, mut length): (*mut c_char, usize) = (core::ptr::null_mut(), 0);
        // SAFETY: `text` and `length` are live until the stream is closed.
        let Some(stream) =
            NonNull::new(unsafe { libc::open_memstream(&raw mut text, &raw mut length) })
        else {
            return String::new();
        };
        // SAFETY: `endpoint.handle` is a live endpoint, and `stream` is an open stream.
        unsafe { (self.api.functions.ucp_ep_print_info)(endpoint.handle, stream.as_ptr()) };
        // SAFETY: `stream` is open, and is closed once.
        unsafe { libc::fclose(stream.as_ptr()) };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: closing the stream has set `text` and `length`, so `text` points to `length`
        // bytes, which nothing writes any more.
        let bytes = unsafe { core::slice::from_raw_parts(text.cast(), length) };
        let printed = String::from_utf8_lossy(bytes).into_owned();
        // SAFETY: `text` was allocated by the stream for its owner, and is freed once.
        unsafe { libc::free(text.cast()) };
        printed
    }

    /// Closes all endpoints, and waits at most [`CLOSE_LIMIT`] until they are closed. With
    /// [`PeerErrors::Peer`] endpoints close at once; otherwise they close when all messages were
    /// sent, for which both ends have to make progress.
    fn close(&self) {
        let force = self.errors == PeerErrors::Peer;
        let flags = if force { UCP_EP_CLOSE_FLAG_FORCE } else { 0 };
        let params = RequestParams {
            op_attr_mask: UCP_OP_ATTR_FIELD_FLAGS,
            flags,
            ..RequestParams::default()
        };
        let close = |endpoint: &Endpoint| {
            // SAFETY: `endpoint.handle` is a live endpoint, which is closed once, and `params` is
            // live during the call. The endpoint's messages live until the worker is destroyed.
            let started = unsafe {
                (self.api.functions.ucp_ep_close_nbx)(endpoint.handle, &raw const params)
            };
            match Started::of(started) {
                Started::Going(request) => Some(request),
                Started::Done | Started::Failed(_) => None,
            }
        };
        let closing: Vec<NonNull<c_void>> = self.endpoints.iter().filter_map(close).collect();
        let start = Instant::now();
        // SAFETY: `request` belongs to this worker, and has not been freed.
        let is_going =
            |request: &NonNull<c_void>| unsafe { (self.api.functions.ucp_request_check_status)(request.as_ptr()) } == UCS_INPROGRESS;
        while closing.iter().any(is_going) && start.elapsed() < CLOSE_LIMIT {
            // SAFETY: `self.handle` is a live worker, and there is no reference to the memory that
            // callbacks write.
            unsafe { (self.api.functions.ucp_worker_progress)(self.handle) };
            std::thread::yield_now();
        }
        let endpoints = || self.endpoints.iter();
        let sends = endpoints().flat_map(|endpoint| &endpoint.going);
        let sends = sends.map(|(request, _)| *request);
        let flushes = endpoints().filter_map(|endpoint| endpoint.connecting);
        for request in sends.chain(flushes).chain(closing) {
            // SAFETY: `request` belongs to this worker, and is freed once. A request may be freed
            // while its operation is under way.
            unsafe { (self.api.functions.ucp_request_free)(request.as_ptr()) };
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.close();
        // SAFETY: `self.handle` and `self.context` are live, and are destroyed once. The worker,
        // which destroys endpoints that are not closed yet, is destroyed before the context, which
        // has no other worker.
        unsafe {
            (self.api.functions.ucp_worker_destroy)(self.handle);
            (self.api.functions.ucp_cleanup)(self.context);
        }
        // SAFETY: the inbox was leaked when the worker was opened; no object of the library exists
        // any more that could write to it.
        drop(unsafe { Box::from_raw(self.inbox.as_ptr()) });
        for endpoint in &self.endpoints {
            // SAFETY: the status was leaked when the endpoint was made, and no object of the
            // library exists any more that could write to it.
            drop(unsafe { Box::from_raw(endpoint.failure.as_ptr()) });
        }
    }
}

/// Appends an arrived message to the inbox: `ucp_am_recv_callback_t`. A correct peer sends every
/// message eagerly. A message by rendezvous has not arrived yet, and its bytes are never fetched.
unsafe extern "C" fn receive(
    arg: *mut c_void,
    _header: *const c_void,
    header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const ReceiveParams,
) -> Status {
    // SAFETY: `param` is null or points to the library's struct, which is valid during the call.
    let is_rendezvous = unsafe { param.as_ref() }
        .is_some_and(|param| param.recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV != 0);
    // SAFETY: `arg` is the inbox of a live worker, and there is no other reference to the inbox
    // during a call of the library.
    let Some(inbox) = (unsafe { arg.cast::<Inbox>().as_mut() }) else {
        return UCS_OK;
    };
    let mut message = Message {
        short: [0; Message::SHORT_BYTES],
        long: Box::default(),
        length,
    };
    if is_rendezvous || header_length > 0 || length > inbox.longest {
        // No correct peer sends such a message. The message is kept without bytes, and with a
        // length that no correct message has.
        message.length = length.max(inbox.longest.max(Message::SHORT_BYTES) + 1);
    } else {
        let bytes = if length > Message::SHORT_BYTES {
            message.long = vec![0; length].into();
            &mut message.long[..]
        } else {
            &mut message.short[..]
        };
        // SAFETY: `data` points to `length` bytes of the library, which are valid during the call.
        // `bytes` is other memory, and has at least `length` bytes.
        unsafe {
            bytes
                .as_mut_ptr()
                .copy_from_nonoverlapping(data.cast(), length)
        };
    }
    inbox.messages.push_back(message);
    UCS_OK
}

/// Records why an endpoint failed: `ucp_err_handler_cb_t`.
unsafe extern "C" fn fail(arg: *mut c_void, _endpoint: Handle, status: Status) {
    // SAFETY: `arg` points to the status of that endpoint, which lives as long as the worker, and
    // there is no reference to it.
    unsafe { arg.cast::<Status>().write(status) };
}

/// Returns the transports in the output of `ucp_ep_print_info`:
/// `lane[0]:  2:posix/memory.0 md[1] ...`, one line for each lane.
fn lanes(text: &str) -> Vec<String> {
    let lane = |line: &str| {
        let (_, rest) = line.split_once("lane[")?;
        let (_, rest) = rest.split_once("]:")?;
        let word = rest.split_whitespace().next()?;
        let name = word.split_once(':').map_or(word, |(_, name)| name);
        // The number after the last dot is the index of the lane's path.
        let name_and_place = name.rsplit_once('.');
        let name = name_and_place
            .filter(|(_, place)| place.parse::<u32>().is_ok())
            .map_or(name, |(name, _)| name);
        Some(name.to_owned())
    };
    text.lines().filter_map(lane).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_transports_are_found_in_what_ucx_prints() {
        let text = "# UCP endpoint \n#  peer: <no debug data>\n\
            #    lane[0]:  1:tcp/lo.0 md[1]                -> md[1]/tcp/sysdev[255] am am_bw#0 keepalive wireup\n\
            #    lane[1]:  6:rc_mlx5/mlx5_0:1.0 md[5]    -> md[5]/ib/sysdev[0] rma_bw#0\n\
            #    lane[2]:  cm rdmacm\n#    am_send: 0..<egr/short>..8185\n";
        assert_eq!(lanes(text), ["tcp/lo", "rc_mlx5/mlx5_0:1", "cm"]);
        assert_eq!(lanes("another form"), [""; 0]);
    }

    fn pair(errors: PeerErrors, longest: usize) -> [Worker; 2] {
        let mut pair = [(); 2].map(|()| Worker::open(errors, longest).unwrap());
        let addresses = [0, 1].map(|end: usize| pair[end].address().unwrap());
        for end in [0, 1] {
            // SAFETY: the argument is the address that the other worker returned.
            assert_eq!(unsafe { pair[end].connect(&addresses[1 - end]) }, Ok(0));
        }
        pair
    }

    fn until<T>(pair: &mut [Worker; 2], mut look: impl FnMut(&mut [Worker; 2]) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(found) = look(pair) {
                return found;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "it never came");
            pair.iter_mut().for_each(|end| _ = end.progress());
        }
    }

    #[test]
    #[ignore = "needs libucx0"]
    fn messages_arrive_whole_and_in_order() {
        for errors in [PeerErrors::Peer, PeerErrors::None] {
            let mut pair = pair(errors, Message::SHORT_BYTES);
            for number in 0..2000_u32 {
                pair[0].send(0, &[&number.to_le_bytes()]).unwrap();
            }
            let mut next = 0_u32;
            until(&mut pair, |[_, taking]| {
                while let Some(message) = taking.next_message() {
                    assert_eq!(message.bytes(), Ok(&next.to_le_bytes()[..]));
                    next += 1;
                }
                (next == 2000).then_some(())
            });
            assert_eq!(pair[0].check(0), Ok(()));
            assert!(
                !pair[0].transports().is_empty(),
                "what it prints has another form"
            );
            assert!(
                pair[0]
                    .send(0, &[&[7; Message::SHORT_BYTES], &[7]])
                    .is_err()
            );
        }
    }

    #[test]
    #[ignore = "needs libucx0"]
    fn long_messages_arrive_whole_too() {
        const LONGEST: usize = Message::SHORT_BYTES + 65_528;
        for errors in [PeerErrors::Peer, PeerErrors::None] {
            let mut pair = pair(errors, LONGEST);
            for length in [0, 1, 64, 65, 4096, 20_000, LONGEST] {
                let sent: Vec<u8> = (0..length).map(|at| (at * 7 + length) as u8).collect();
                let (one, other) = sent.split_at(length / 3);
                pair[0].send(0, &[one, other]).unwrap();
                let message = until(&mut pair, |[_, taking]| taking.next_message());
                assert!(message.bytes() == Ok(&sent[..]), "{length} bytes");
            }
            assert!(pair[0].send(0, &[&[7; LONGEST], &[7]]).is_err());
        }
    }

    /// Calls the callback as the library does, for messages that no correct peer sends.
    #[test]
    fn a_message_that_is_longer_or_not_there_yet_has_its_length_and_no_bytes() {
        let mut inbox = Inbox {
            messages: VecDeque::new(),
            longest: Message::SHORT_BYTES,
        };
        let mut data = [7; Message::SHORT_BYTES + 1];
        for (length, recv_attr, header_length) in [
            (data.len(), 0, 0),
            (8, UCP_AM_RECV_ATTR_FLAG_RNDV, 0),
            (8, 0, 4),
            (8, 0, 0),
            (0, 0, 0),
        ] {
            let param = ReceiveParams {
                recv_attr,
                reply_ep: core::ptr::null_mut(),
            };
            let arg = (&raw mut inbox).cast();
            // SAFETY: the arguments are a live inbox, and a pointer to as many bytes as the length
            // states.
            unsafe {
                receive(
                    arg,
                    core::ptr::null(),
                    header_length,
                    data.as_mut_ptr().cast(),
                    length,
                    &raw const param,
                )
            };
        }
        let lengths: Vec<_> = inbox
            .messages
            .iter()
            .map(|message| message.bytes().map(<[u8]>::len))
            .collect();
        assert_eq!(lengths, [Err(65), Err(65), Err(65), Ok(8), Ok(0)]);
        assert_eq!(inbox.messages[0].head(), &[0; Message::SHORT_BYTES]);
    }
}
