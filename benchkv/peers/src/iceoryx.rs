//! iceoryx2's request/response between two processes, one call at a time.

use std::path::PathBuf;

use iceoryx2::config::Config;
use iceoryx2::pending_response::PendingResponse;
use iceoryx2::port::client::Client;
use iceoryx2::port::server::Server;
use iceoryx2::prelude::{Node, NodeBuilder, ipc};
use iceoryx2::service::port_factory::request_response::PortFactory;

use benchkv_harness::Failure;
use benchkv_harness::load::{Answerer, Caller, Payload};

type Pending = PendingResponse<ipc::Service, Payload, (), Payload, ()>;
type Factory = PortFactory<ipc::Service, Payload, (), Payload, ()>;

pub(crate) struct IceoryxServer {
    server: Server<ipc::Service, Payload, (), Payload, ()>,
    _service: Factory,
    _node: Node<ipc::Service>,
}

/// The calling process, with at most one call unanswered.
pub(crate) struct IceoryxClient {
    pending: Option<(u32, Pending)>,
    client: Client<ipc::Service, Payload, (), Payload, ()>,
    _service: Factory,
    _node: Node<ipc::Service>,
}

/// The place of iceoryx2's files. iceoryx2 does not remove some of them. The files have a prefix of
/// their own, so that they can be distinguished from the files of other programs.
#[derive(Debug)]
pub(crate) struct Place {
    /// Prefix of the names of the shared memory.
    pub(crate) prefix: String,
}

impl Place {
    fn root(&self) -> PathBuf {
        std::env::temp_dir().join(&self.prefix)
    }

    fn config(&self) -> Result<Config, Failure> {
        let mut config = Config::default();
        config.global.prefix = self.prefix.as_str().try_into()?;
        let root = self.root();
        let root = root
            .to_str()
            .ok_or("the temporary directory's name is not UTF-8")?;
        config.global.set_root_path(&root.try_into()?);
        Ok(config)
    }
}

fn service(place: &Place, name: &str) -> Result<(Node<ipc::Service>, Factory), Failure> {
    let node = NodeBuilder::new()
        .config(&place.config()?)
        .create::<ipc::Service>()?;
    let service = node
        .service_builder(&name.try_into()?)
        .request_response::<Payload, Payload>()
        .open_or_create()?;
    Ok((node, service))
}

impl IceoryxServer {
    pub(crate) fn create(place: &Place, name: &str) -> Result<Self, Failure> {
        let (node, service) = service(place, name)?;
        Ok(Self {
            server: service.server_builder().create()?,
            _service: service,
            _node: node,
        })
    }
}

impl IceoryxClient {
    pub(crate) fn connect(place: &Place, name: &str) -> Result<Self, Failure> {
        let (node, service) = service(place, name)?;
        Ok(Self {
            pending: None,
            client: service.client_builder().create()?,
            _service: service,
            _node: node,
        })
    }
}

impl Answerer for IceoryxServer {
    #[inline]
    fn step(&mut self, mut f: impl FnMut(&Payload) -> Payload) -> Result<usize, Failure> {
        let mut answered = 0;
        while let Some(request) = self.server.receive()? {
            request.send_copy(f(&request))?;
            answered += 1;
        }
        Ok(answered)
    }
}

impl Caller for IceoryxClient {
    #[inline]
    fn call(&mut self, slot: u32, request: Payload) -> Result<bool, Failure> {
        if self.pending.is_some() {
            return Ok(false);
        }
        self.pending = Some((slot, self.client.send_copy(request)?));
        Ok(true)
    }

    #[inline]
    fn poll(&mut self, mut f: impl FnMut(u32, Payload)) -> Result<usize, Failure> {
        let Some((slot, pending)) = &self.pending else {
            return Ok(0);
        };
        let Some(reply) = pending.receive()? else {
            return Ok(0);
        };
        f(*slot, *reply);
        drop(reply);
        self.pending = None;
        Ok(1)
    }
}
