//! Certificates: files in PEM, read once when the server starts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::server::ServerError;

/// The files of a certificate.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// The certificate and those between it and its authority, in PEM.
    pub certificate: PathBuf,
    /// The private key, in PEM.
    pub key: PathBuf,
}

impl TlsFiles {
    pub(crate) fn load(&self) -> Result<ServerConfig, ServerError> {
        let wrong = |path: &Path, reason: String| ServerError::Tls { path: path.into(), reason };
        let read: Result<Vec<_>, _> = CertificateDer::pem_file_iter(&self.certificate).and_then(Iterator::collect);
        let chain = read.map_err(|error| wrong(&self.certificate, error.to_string()))?;
        if chain.is_empty() {
            return Err(wrong(&self.certificate, "it holds no certificate".into()));
        }
        let key = PrivateKeyDer::from_pem_file(&self.key).map_err(|error| wrong(&self.key, error.to_string()))?;
        let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| wrong(&self.certificate, error.to_string()))?.with_no_client_auth();
        let mut config =
            builder.with_single_cert(chain, key).map_err(|error| wrong(&self.certificate, error.to_string()))?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }
}
