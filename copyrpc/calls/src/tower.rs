//! Clients and servers as services of the crate `tower`, and the requests of a server as a stream.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use tower_service::Service;

use crate::async_server::{AsyncServer, ServerRequest};
use crate::connection::{Connection, ErrorOf};
use crate::futures::{AsyncCall, AsyncClient};
use crate::serving::Serving;

/// A task that answers a request.
pub type Answering = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The client is always ready: calls for which the connection has no room wait in the client's
/// queue. A layer with a limit bounds the number of waiting calls.
impl<C: Connection> Service<<C::Request as ToOwned>::Owned> for AsyncClient<C> {
    type Response = C::Reply;
    type Error = ErrorOf<C>;
    type Future = AsyncCall<C>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: <C::Request as ToOwned>::Owned) -> AsyncCall<C> {
        Self::call(self, request)
    }
}

/// The requests, until the server is stopped: [`AsyncServer::recv`].
impl<S: Serving> Stream for &AsyncServer<S> {
    type Item = Result<ServerRequest<S>, S::Error>;

    fn poll_next(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_recv(task).map(Result::transpose)
    }
}

impl<S: Serving + 'static> AsyncServer<S> {
    /// Answers each request with the response of `service`, until the server is stopped. If the
    /// service returns an error, the request is refused. If the client disconnects or gives the call
    /// up, the future of the response is dropped. No request is received before the service is
    /// ready; a service whose readiness fails refuses each request. `spawn` starts the tasks that
    /// answer: with tokio, `|task| drop(tokio::spawn(task))`.
    ///
    /// # Errors
    /// The server cannot continue.
    pub async fn serve_by<T>(
        &self,
        mut service: T,
        spawn: impl Fn(Answering),
    ) -> Result<(), S::Error>
    where
        T: Service<Vec<u8>, Response: Into<Vec<u8>> + Send, Error: Send, Future: Send + 'static>,
    {
        loop {
            let ready = poll_fn(|task| service.poll_ready(task)).await;
            let Some(mut request) = self.recv().await? else {
                return Ok(());
            };
            if ready.is_err() {
                request.refuse();
                continue;
            }
            let answer = service.call(request.take_data());
            spawn(Box::pin(async move {
                match request.while_wanted(None, answer).await {
                    Some(Ok(reply)) => request.reply(reply),
                    Some(Err(_)) => request.refuse(),
                    None => drop(request),
                }
            }));
        }
    }
}
