//! Where the API is: behind a connection (TCP, TLS or a socket), which is made here, or in this process.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::Router;
use hyper::Uri;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;

use crate::output::{Exit, Problem};

/// Where the API is.
pub(crate) enum Place {
    /// In this process, on a store that the command has opened.
    Here {
        router: Router,
        /// True if no other process can change the store meanwhile.
        is_alone: bool,
    },
    Plain {
        host: String,
        port: u16,
    },
    Tls {
        host: String,
        port: u16,
        name: ServerName<'static>,
        config: Arc<ClientConfig>,
    },
    Socket(PathBuf),
}

/// Any kind of connection.
pub(crate) type Stream = Box<dyn Connection>;

/// What a connection can do.
pub(crate) trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Connection for T {}

fn usage(why: impl Into<String>) -> Problem {
    Problem::new(Exit::Usage, why)
}

impl Place {
    /// Reads an address. Returns the path in it, too.
    pub(crate) fn read(url: &str, authorities: Option<&Path>) -> Result<(Place, String), Problem> {
        let wrong = || usage("--server: write http://host:7420, https://host or unix:PATH");
        if let Some(path) = url.strip_prefix("unix:") {
            return Ok((Place::Socket(path.into()), String::new()));
        }
        let uri: Uri = url.parse().map_err(|_| wrong())?;
        let authority = uri.authority().ok_or_else(wrong)?;
        // Other users of the machine can read a command line.
        if authority.as_str().contains('@') || uri.query().is_some() {
            return Err(usage(
                "--server: put the token into the environment variable LATCH_TOKEN, not into the address",
            ));
        }
        let host = authority.host().to_string();
        let base = uri.path().trim_end_matches('/').to_string();
        match uri.scheme_str() {
            Some("http") => Ok((Place::Plain { host, port: authority.port_u16().unwrap_or(80) }, base)),
            Some("https") => {
                let bare = host.trim_start_matches('[').trim_end_matches(']').to_string();
                let name = ServerName::try_from(bare).map_err(|_| wrong())?;
                let config = Arc::new(tls(authorities)?);
                Ok((Place::Tls { host, port: authority.port_u16().unwrap_or(443), name, config }, base))
            }
            _ => Err(wrong()),
        }
    }

    /// True if what is sent there can be read on its way.
    pub(crate) fn is_open(&self) -> bool {
        match self {
            Place::Plain { host, .. } => {
                let bare = host.trim_start_matches('[').trim_end_matches(']');
                bare != "localhost" && !bare.parse().is_ok_and(|address: std::net::IpAddr| address.is_loopback())
            }
            Place::Tls { .. } | Place::Socket(_) | Place::Here { .. } => false,
        }
    }

    /// The header `Host`.
    pub(crate) fn host(&self) -> String {
        match self {
            Place::Plain { host, port } | Place::Tls { host, port, .. } => format!("{host}:{port}"),
            Place::Socket(_) | Place::Here { .. } => "localhost".into(),
        }
    }

    pub(crate) async fn connect(&self) -> io::Result<Stream> {
        Ok(match self {
            Place::Plain { host, port } => Box::new(tcp(host, *port).await?),
            Place::Tls { host, port, name, config } => {
                let stream = tcp(host, *port).await?;
                Box::new(TlsConnector::from(config.clone()).connect(name.clone(), stream).await?)
            }
            Place::Socket(path) => Box::new(UnixStream::connect(path).await?),
            Place::Here { .. } => return Err(io::ErrorKind::Unsupported.into()),
        })
    }
}

async fn tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let stream = TcpStream::connect((bare, port)).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// The authorities that are trusted: those of the system, or those in a file instead.
fn tls(authorities: Option<&Path>) -> Result<ClientConfig, Problem> {
    let mut roots = RootCertStore::empty();
    match authorities {
        None => {
            let found = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(found.certs);
        }
        Some(file) => {
            let wrong = |why: String| usage(format!("--tls-ca: {}: {why}", file.display()));
            let read = CertificateDer::pem_file_iter(file).map_err(|error| wrong(error.to_string()))?;
            for certificate in read {
                let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
                roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
            }
            if roots.is_empty() {
                return Err(wrong("it holds no certificate".into()));
            }
        }
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(|error| usage(error.to_string()))?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Plain { host, port } => write!(f, "http://{host}:{port}"),
            Place::Tls { host, port, .. } => write!(f, "https://{host}:{port}"),
            Place::Socket(path) => write!(f, "the server at {}", path.display()),
            Place::Here { .. } => f.write_str("this program"),
        }
    }
}
