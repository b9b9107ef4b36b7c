//! An endpoint: where a worker is called over HTTP, how it is trusted, and how often it is tried. It knows nothing of
//! what the calls are for.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper::Uri;
use latchwork::store::Env;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::sync::Semaphore;

use crate::workers::signature::Secret;

/// Why an endpoint cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// The text is not the address of an endpoint.
    #[error("the address of an endpoint is http://host/path or https://host/path, without a user and a password")]
    Url,
    /// Requests and answers could be read and changed on their way.
    #[error("{host} is another machine: use https, or allow plain HTTP explicitly")]
    Plain {
        /// The host.
        host: String,
    },
    /// The text is not a secret.
    #[error("a secret is `whsec_` and 24 to 64 bytes in Base64; there may be several, one a line")]
    Secret,
    /// The certificates cannot be used.
    #[error("cannot use {} for TLS: {reason}", path.display())]
    Tls {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
}

/// How often an endpoint is called, and how long it may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EndpointLimits {
    /// How long one call may take, from the connection to the end of the answer.
    pub timeout: Duration,
    /// How often a call is tried at most.
    pub attempts: u32,
    /// The pause after the first failure. It doubles with each further one.
    pub pause: Duration,
    /// The longest pause.
    pub longest_pause: Duration,
    /// How many calls may be under way at a time.
    pub concurrency: usize,
    /// Bytes of an answer.
    pub answer_bytes: usize,
}

impl Default for EndpointLimits {
    fn default() -> EndpointLimits {
        EndpointLimits {
            timeout: Duration::from_secs(30),
            attempts: 10,
            pause: Duration::from_secs(1),
            longest_pause: Duration::from_secs(60),
            concurrency: 16,
            answer_bytes: 1 << 20,
        }
    }
}

/// An address at which a worker is called over HTTP. Cheap to clone; the clones share the limit on concurrent calls.
///
/// ```
/// use latchwork_server::{Endpoint, EndpointLimits};
///
/// # fn example(secret: &str) -> Result<(), latchwork_server::EndpointError> {
/// let mut limits = EndpointLimits::default();
/// limits.attempts = 3;
/// let billing = Endpoint::builder("https://billing.example.org/latchwork")
///     .secret(secret)
///     .limits(limits)
///     .build()?;
/// # Ok(()) }
/// # example("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
/// ```
#[derive(Clone)]
pub struct Endpoint(Arc<Inner>);

struct Inner {
    place: EndpointPlace,
    secrets: Vec<Secret>,
    limits: EndpointLimits,
    permits: Semaphore,
}

/// Where an endpoint is.
pub(super) struct EndpointPlace {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) tls: Option<(ServerName<'static>, Arc<ClientConfig>)>,
    /// The path and the query.
    pub(super) target: String,
    /// The header `Host`.
    pub(super) authority: String,
}

/// An endpoint that is built up.
#[must_use = "it does nothing until it is built"]
pub struct EndpointBuilder {
    url: String,
    secrets: Option<String>,
    limits: EndpointLimits,
    insecure: bool,
    authorities: Option<PathBuf>,
}

impl Endpoint {
    /// An endpoint at an address: `https://host/path`, or `http://localhost:8000/path`.
    pub fn builder(url: impl Into<String>) -> EndpointBuilder {
        let limits = EndpointLimits::default();
        EndpointBuilder { url: url.into(), secrets: None, limits, insecure: false, authorities: None }
    }

    pub(super) fn place(&self) -> &EndpointPlace {
        &self.0.place
    }

    pub(super) fn secrets(&self) -> &[Secret] {
        &self.0.secrets
    }

    pub(super) fn permits(&self) -> &Semaphore {
        &self.0.permits
    }

    pub(super) fn limits(&self) -> EndpointLimits {
        self.0.limits
    }

    /// The pause after this attempt, shortened by up to a fifth, so that not all come back at the same moment.
    pub(super) fn pause(&self, attempt: u32, env: &Env) -> Duration {
        let EndpointLimits { pause, longest_pause, .. } = self.0.limits;
        let factor = 1_u32.checked_shl(attempt.saturating_sub(1)).unwrap_or(u32::MAX);
        let doubled = pause.saturating_mul(factor.max(1)).min(longest_pause);
        doubled.mul_f64(0.8 + (env.random() % 1000) as f64 / 5000.0)
    }
}

/// Without the path, which may hold a secret.
impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint").field("host", &self.0.place.authority).finish_non_exhaustive()
    }
}

impl EndpointBuilder {
    /// Signs each call with these secrets, as Standard Webhooks say: `whsec_…`, one a line. With several, each call has
    /// a signature by each, so that a secret can be replaced without a gap.
    pub fn secret(mut self, secrets: impl Into<String>) -> EndpointBuilder {
        self.secrets = Some(secrets.into());
        self
    }

    /// Sets how often the endpoint is called, and how long it may take.
    pub fn limits(mut self, limits: EndpointLimits) -> EndpointBuilder {
        self.limits = limits;
        self
    }

    /// Allows plain HTTP to another machine.
    pub fn insecure(mut self) -> EndpointBuilder {
        self.insecure = true;
        self
    }

    /// Trusts the certificates in this file (PEM) instead of those of the system.
    pub fn authorities(mut self, file: impl Into<PathBuf>) -> EndpointBuilder {
        self.authorities = Some(file.into());
        self
    }

    /// Checks everything. No connection is made.
    pub fn build(self) -> Result<Endpoint, EndpointError> {
        let EndpointBuilder { url, secrets, mut limits, insecure, authorities } = self;
        let uri: Uri = url.trim().parse().map_err(|_| EndpointError::Url)?;
        let authority = uri.authority().filter(|it| !it.as_str().contains('@')).ok_or(EndpointError::Url)?;
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_string();
        let (tls, default_port) = match uri.scheme_str() {
            Some("http") => (None, 80),
            Some("https") => {
                let name = ServerName::try_from(host.clone()).map_err(|_| EndpointError::Url)?;
                (Some((name, Arc::new(trust(authorities)?))), 443)
            }
            _ => return Err(EndpointError::Url),
        };
        if tls.is_none() && !insecure && !is_this_machine(&host) {
            return Err(EndpointError::Plain { host });
        }
        let port = authority.port_u16().unwrap_or(default_port);
        let target = uri.path_and_query().map_or("/", |target| target.as_str()).to_string();
        let place = EndpointPlace { host, port, tls, target, authority: authority.to_string() };
        let secrets = secrets.map_or_else(|| Ok(Vec::new()), |text| Secret::read_all(&text))?;
        (limits.attempts, limits.concurrency) = (limits.attempts.max(1), limits.concurrency.max(1));
        let permits = Semaphore::new(limits.concurrency.min(Semaphore::MAX_PERMITS));
        Ok(Endpoint(Arc::new(Inner { place, secrets, limits, permits })))
    }
}

fn is_this_machine(host: &str) -> bool {
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

fn trust(authorities: Option<PathBuf>) -> Result<ClientConfig, EndpointError> {
    let mut roots = RootCertStore::empty();
    match authorities {
        None => {
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        }
        Some(path) => {
            let wrong = |reason: String| EndpointError::Tls { path: path.clone(), reason };
            for read in CertificateDer::pem_file_iter(&path).map_err(|error| wrong(error.to_string()))? {
                let certificate = read.map_err(|error| wrong(error.to_string()))?;
                roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
            }
            if roots.is_empty() {
                return Err(wrong("it holds no certificate".into()));
            }
        }
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| EndpointError::Tls { path: PathBuf::new(), reason: error.to_string() })?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_checked() {
        let place = |url: &str| Endpoint::builder(url).build().map(|it| (it.place().port, it.place().target.clone()));
        assert_eq!(place("http://localhost:8000/a?b=1").unwrap(), (8000, "/a?b=1".into()));
        assert_eq!(place("http://[::1]").unwrap(), (80, "/".into()));
        assert_eq!(place("https://example.org/x").unwrap(), (443, "/x".into()));
        for wrong in ["", "example.org", "ftp://localhost/", "http://me:pass@localhost/", "unix:/x"] {
            assert!(matches!(place(wrong), Err(EndpointError::Url)), "{wrong}");
        }
        assert!(matches!(place("http://example.org/"), Err(EndpointError::Plain { .. })));
        assert!(Endpoint::builder("http://example.org/").insecure().build().is_ok());
        let shown = format!("{:?}", Endpoint::builder("http://localhost/secret").build().unwrap());
        assert!(!shown.contains("secret"), "{shown}");
    }
}
