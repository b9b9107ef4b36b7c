//! Where a server listens, and which addresses are safe. A listener accepts streams of bytes; what is on them is not
//! its business.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpSocket};
use tokio_rustls::TlsAcceptor;

use crate::access::Access;
use crate::router::Home;
use crate::server::ServerError;
use crate::server::socket::OwnSocket;
use crate::server::tls::TlsFiles;

/// The port if none is given.
const PORT: u16 = 7420;

/// Connections that the system keeps until they are accepted; it may allow fewer. Those beyond are delayed by a second
/// or more, or reset, which must not happen to a thousand clients that connect again at the same time.
const BACKLOG: u32 = 4096;

/// A place to listen.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Listen {
    /// Plain HTTP. An address that other machines can reach needs an insecure [`Access`].
    Tcp(SocketAddr),
    /// HTTPS.
    Tls(SocketAddr, TlsFiles),
    /// A socket `api.sock` in this directory, which only the user of the process can open.
    Socket(PathBuf),
    /// The same for the data directory of a namespace: on this socket, the namespace of this name is the default one.
    SocketOf(PathBuf, String),
}

impl Default for Listen {
    /// 127.0.0.1, port 7420.
    fn default() -> Listen {
        Listen::Tcp((Ipv4Addr::LOCALHOST, PORT).into())
    }
}

/// Where a server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Address {
    /// Plain HTTP.
    Tcp(SocketAddr),
    /// HTTPS.
    Tls(SocketAddr),
    /// The path of the socket.
    Socket(PathBuf),
}

/// A listener.
pub(crate) enum Bound {
    Tcp(TcpListener, SocketAddr, Option<TlsAcceptor>),
    Socket(OwnSocket, Home),
}

impl Listen {
    /// Refuses an address that is open to other machines without protection.
    pub(crate) fn check(&self, access: &Access) -> Result<(), ServerError> {
        let (address, has_tls) = match self {
            Listen::Tcp(address) => (*address, false),
            Listen::Tls(address, _) => (*address, true),
            Listen::Socket(_) | Listen::SocketOf(..) => return Ok(()),
        };
        if address.ip().is_loopback() || access.is_insecure() {
            return Ok(());
        }
        match (access.has_tokens(), has_tls) {
            (true, true) => Ok(()),
            (true, false) => Err(ServerError::Exposed { address, needs: "TLS" }),
            (false, true) => Err(ServerError::Exposed { address, needs: "a token" }),
            (false, false) => Err(ServerError::Exposed { address, needs: "a token and TLS" }),
        }
    }

    pub(crate) async fn bind(self) -> Result<Bound, ServerError> {
        let (address, tls) = match self {
            Listen::Tcp(address) => (address, None),
            Listen::Tls(address, files) => (address, Some(acceptor(files.load()?))),
            Listen::Socket(directory) => {
                return Ok(Bound::Socket(OwnSocket::bind(&directory).await?, Home::default()));
            }
            Listen::SocketOf(directory, namespace) => {
                return Ok(Bound::Socket(OwnSocket::bind(&directory).await?, Home(namespace.into())));
            }
        };
        let refused = |cause: io::Error| ServerError::Listen { address: address.to_string(), cause };
        let listener = listener(address).map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        Ok(Bound::Tcp(listener, address, tls))
    }
}

fn listener(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A server that has just ended leaves connections behind, which must not keep the next one from its address.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

fn acceptor(config: ServerConfig) -> TlsAcceptor {
    TlsAcceptor::from(Arc::new(config))
}

impl Bound {
    pub(crate) fn address(&self) -> Address {
        match self {
            Bound::Tcp(_, address, None) => Address::Tcp(*address),
            Bound::Tcp(_, address, Some(_)) => Address::Tls(*address),
            Bound::Socket(socket, _) => Address::Socket(socket.path().to_path_buf()),
        }
    }
}

/// Adds the addresses themselves to the hosts that are served. An address that stands for all of them is no host.
pub(crate) fn with_own_hosts(access: Access, bound: &[Bound]) -> Result<Access, ServerError> {
    let addresses = bound.iter().filter_map(|bound| match bound {
        Bound::Tcp(_, address, _) if !address.ip().is_unspecified() => Some(address.to_string()),
        Bound::Tcp(..) | Bound::Socket(..) => None,
    });
    Ok(addresses.into_iter().try_fold(access, |access, address| access.host(&address))?)
}
