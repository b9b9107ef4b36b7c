//! A server: namespaces behind one router, on addresses and sockets, from its start to a graceful end. It knows how
//! requests arrive and nothing of what they ask.

mod connection;
mod listen;
mod metrics;
mod socket;
mod tls;

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use latchwork::lock::LockError;
use latchwork::store::Env;
use latchwork::workflow::Engine;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::access::{Access, AccessError};
use crate::api::{Api, Closing, DEFAULT};
use crate::limits::Limits;
use crate::router::{Beside, assemble};

pub use listen::{Address, Listen};
pub use tls::TlsFiles;

use connection::Serving;
use listen::Bound;
use metrics::Render;

/// Why a server did not start or end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    /// There is nothing to serve.
    #[error("a server needs a namespace {DEFAULT:?} or another one")]
    NoNamespace,
    /// The name cannot be a part of an address.
    #[error("{name:?} cannot name a namespace: use 1 to 64 letters a-z, digits, - and _")]
    NamespaceName {
        /// The name.
        name: String,
    },
    /// The address can be reached from other machines.
    #[error("{address} can be reached from other machines: it needs {needs}, or an explicit insecure access")]
    Exposed {
        /// The address.
        address: SocketAddr,
        /// What is missing.
        needs: &'static str,
    },
    /// A socket is for a namespace that the server does not have.
    #[error("there is no namespace {name:?} for a socket")]
    NoSuchNamespace {
        /// The name.
        name: String,
    },
    /// The host is not this machine, so requests may come from others.
    #[error("a public host is served without a token: add a token, or an explicit insecure access")]
    PublicHost,
    /// The system refused the address.
    #[error("cannot listen on {address}: {cause}")]
    Listen {
        /// The address or the path of the socket.
        address: String,
        /// What the system said.
        cause: io::Error,
    },
    /// Another process answers on the socket.
    #[error("{} belongs to another process that is running", path.display())]
    SocketInUse {
        /// The socket.
        path: PathBuf,
    },
    /// There is a file of another kind in the place of the socket.
    #[error("{} is not a socket; it is not replaced", path.display())]
    NotASocket {
        /// The file.
        path: PathBuf,
    },
    /// The certificate or its key cannot be used.
    #[error("cannot use {} for TLS: {reason}", path.display())]
    Tls {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A part of the access cannot be used.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// An engine did not end cleanly.
    #[error("namespace {name:?} did not end cleanly: {cause}")]
    End {
        /// The namespace.
        name: String,
        /// What went wrong.
        cause: LockError,
    },
}

/// A server that is about to start.
#[must_use = "a server does nothing until it is started"]
pub struct ServerBuilder {
    apis: BTreeMap<String, Api>,
    listens: Vec<Listen>,
    access: Access,
    limits: Limits,
    metrics: Option<Render>,
}

/// A server that runs. Dropping it ends it at once, without waiting for requests.
pub struct Server {
    addresses: Vec<Address>,
    engines: Vec<(String, Engine)>,
    closing: Closing,
    /// The loops of the listeners.
    loops: JoinSet<()>,
}

impl Server {
    /// A server without namespaces, for this machine only.
    ///
    /// ```no_run
    /// # async fn example(engine: latchwork::workflow::Engine) -> Result<(), latchwork_server::ServerError> {
    /// use latchwork_server::{Api, Listen, Server};
    ///
    /// let server = Server::builder()
    ///     .namespace("default", Api::on(&engine))
    ///     .listen(Listen::Tcp("127.0.0.1:7420".parse().unwrap()))
    ///     .listen(Listen::Socket("./data".into()))
    ///     .start()
    ///     .await?;
    /// # Ok(()) }
    /// ```
    pub fn builder() -> ServerBuilder {
        let (access, limits) = (Access::local(), Limits::default());
        ServerBuilder { apis: BTreeMap::new(), listens: Vec::new(), access, limits, metrics: None }
    }

    /// Where the server listens, with the ports that the system has chosen.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Ends gracefully: takes no more connections, ends streams, lets requests that are under way finish within the
    /// limit, and shuts down the engines. The stores that the program has opened stay open.
    pub async fn shutdown(mut self) -> Result<(), ServerError> {
        self.closing.send_replace(true);
        while self.loops.join_next().await.is_some() {}
        let mut ended = Ok(());
        for (name, engine) in std::mem::take(&mut self.engines) {
            if let Err(cause) = engine.shutdown().await {
                ended = ended.and(Err(ServerError::End { name, cause }));
            }
        }
        ended
    }
}

impl ServerBuilder {
    /// Serves this API under a name. The namespace `default` is at `/v1`, each other one at `/v1/ns/NAME`. Namespaces
    /// should be on stores of their own: then they share nothing.
    pub fn namespace(mut self, name: impl Into<String>, api: Api) -> ServerBuilder {
        self.apis.insert(name.into(), api);
        self
    }

    /// Listens there, too. Without any, the server listens on 127.0.0.1:7420.
    pub fn listen(mut self, listen: Listen) -> ServerBuilder {
        self.listens.push(listen);
        self
    }

    /// Who may use the server, instead of this machine only. It replaces the access of each [`Api`].
    pub fn access(mut self, access: Access) -> ServerBuilder {
        self.access = access;
        self
    }

    /// How much a request may ask for. It replaces the limits of each [`Api`].
    pub fn limits(mut self, limits: Limits) -> ServerBuilder {
        self.limits = limits;
        self
    }

    /// Serves metrics at `/metrics`, which this function renders as text for Prometheus: those of the whole process, so
    /// a token needs the role `read` in all namespaces. Requests are counted with the facade of the crate `metrics`.
    pub fn metrics(mut self, render: impl Fn() -> String + Send + Sync + 'static) -> ServerBuilder {
        self.metrics = Some(Arc::new(render));
        self
    }

    /// Starts to listen. When this returns, connections are accepted.
    pub async fn start(self) -> Result<Server, ServerError> {
        let ServerBuilder { apis, listens, access, limits, metrics } = self;
        let env = check_names(&apis)?;
        let listens = if listens.is_empty() { vec![Listen::default()] } else { listens };
        if access.has_public_hosts() && !access.has_tokens() && !access.is_insecure() {
            return Err(ServerError::PublicHost);
        }
        let mut bound = Vec::new();
        for listen in listens {
            listen.check(&access)?;
            if let Listen::SocketOf(_, name) = &listen
                && !apis.contains_key(name)
            {
                return Err(ServerError::NoSuchNamespace { name: name.clone() });
            }
            bound.push(listen.bind().await?);
        }
        let access = listen::with_own_hosts(access, &bound)?;
        let closing: Closing = Arc::new(watch::Sender::new(false));
        let engines = apis.iter().map(|(name, api)| (name.clone(), api.engine().clone())).collect();
        let names: Vec<String> = apis.keys().cloned().collect();
        let router = assemble(apis, access.clone(), limits, closing.clone(), Beside::Nothing);
        let router = match metrics {
            Some(render) => metrics::serve(router, render, access, names, &env),
            None => router,
        };
        let addresses = bound.iter().map(Bound::address).collect();
        let mut loops = JoinSet::new();
        for bound in bound {
            let serving = Serving { router: router.clone(), limits, env: env.clone(), closing: closing.clone() };
            loops.spawn(connection::accept(bound, serving));
        }
        Ok(Server { addresses, engines, closing, loops })
    }
}

/// Checks the names, and returns the environment of the first namespace: what a connection waits for is measured by it.
fn check_names(apis: &BTreeMap<String, Api>) -> Result<Env, ServerError> {
    let is_valid = |name: &str| {
        (1..=64).contains(&name.len())
            && name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte))
    };
    if let Some(name) = apis.keys().find(|name| !is_valid(name)) {
        return Err(ServerError::NamespaceName { name: name.clone() });
    }
    let (_, first) = apis.first_key_value().ok_or(ServerError::NoNamespace)?;
    Ok(first.engine().store().env().clone())
}
