//! TLS as the connection string asks for it, with the meaning that libpq gives to `sslmode`: which certificates of
//! servers are accepted, and which certificate the client shows. Knows no statement and no table.

use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::{Result, StoreError};

/// How much of the server must be proven.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Mode {
    /// No TLS.
    Disable,
    /// TLS if the server has it. Nothing is proven.
    #[default]
    Prefer,
    /// TLS. Nothing is proven, unless `sslrootcert` is given: then an authority of it must have signed.
    Require,
    /// An authority of `sslrootcert` has signed the certificate of the server.
    VerifyCa,
    /// The same, and the certificate is for the host of the connection string.
    VerifyFull,
}

/// What a connection string says about TLS.
#[derive(Debug, Clone, Default)]
pub(super) struct Settings {
    pub(super) mode: Mode,
    /// Files in PEM. `system` stands for the authorities that the machine trusts.
    pub(super) root: Option<String>,
    pub(super) certificate: Option<String>,
    pub(super) key: Option<String>,
    /// The handshake comes first on the connection, without a request for it.
    pub(super) is_direct: bool,
}

/// Where systems keep the authorities that they trust.
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

impl Settings {
    /// What connections are made with. Reads all files.
    pub(super) fn connector(&self) -> Result<MakeRustlsConnect> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = Verifier { roots: self.roots()?, names: self.names(), provider: provider.clone() };
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let builder = builder.map_err(|error| wrong("TLS", error))?;
        let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
        let mut config = match (&self.certificate, &self.key) {
            (None, None) => builder.with_no_client_auth(),
            (Some(certificate), Some(key)) => {
                let both = builder.with_client_auth_cert(certificates("sslcert", certificate)?, private_key(key)?);
                both.map_err(|error| wrong("sslcert and sslkey", error))?
            }
            _ => return Err(wrong("sslcert and sslkey", "one is given without the other")),
        };
        if self.is_direct {
            config.alpn_protocols = vec![b"postgresql".to_vec()];
        }
        Ok(MakeRustlsConnect::new(config))
    }

    /// The trusted authorities, if the mode asks for one.
    fn roots(&self) -> Result<Option<RootCertStore>> {
        let is_wanted = match (self.mode, self.root.as_deref()) {
            (Mode::Disable | Mode::Prefer, _) | (Mode::Require, None) => false,
            // A stranger can get a certificate from an authority of the system, for a name of its own.
            (Mode::Require | Mode::VerifyCa, Some("system")) => {
                return Err(wrong("sslrootcert=system", "it needs sslmode=verify-full"));
            }
            _ => true,
        };
        if !is_wanted {
            return Ok(None);
        }
        let file = match self.root.as_deref() {
            Some("system") => BUNDLES.into_iter().find(|file| Path::new(file).exists()),
            file => file,
        };
        let missing = "name the file with the authorities that may sign the certificate of the server";
        let file = file.ok_or_else(|| wrong("sslrootcert", missing))?;
        let mut roots = RootCertStore::empty();
        for certificate in certificates("sslrootcert", file)? {
            match roots.add(certificate) {
                // Systems trust some authorities that cannot be read here.
                Err(error) if self.root.as_deref() != Some("system") => {
                    return Err(wrong(&named("sslrootcert", file), error));
                }
                _ => {}
            }
        }
        Ok(Some(roots))
    }

    fn names(&self) -> bool {
        self.mode == Mode::VerifyFull
    }
}

fn wrong(setting: &str, reason: impl std::fmt::Display) -> StoreError {
    StoreError::Option { what: format!("the connection string of PostgreSQL: {setting}: {reason}") }
}

fn named(setting: &str, file: &str) -> String {
    format!("{setting} {file}")
}

fn certificates(setting: &str, file: &str) -> Result<Vec<CertificateDer<'static>>> {
    let error = |error: rustls::pki_types::pem::Error| wrong(&named(setting, file), error);
    let found = CertificateDer::pem_file_iter(file).map_err(error)?;
    let found: Vec<_> = found.collect::<Result<_, _>>().map_err(error)?;
    if found.is_empty() {
        return Err(wrong(&named(setting, file), "the file contains no certificate in PEM"));
    }
    Ok(found)
}

/// A key that others could read is refused, as libpq does.
fn private_key(file: &str) -> Result<PrivateKeyDer<'static>> {
    use std::os::unix::fs::MetadataExt;

    let about = std::fs::metadata(file).map_err(|error| wrong(&named("sslkey", file), error))?;
    let forbidden = if about.uid() == 0 { 0o037 } else { 0o077 };
    if about.is_file() && about.mode() & forbidden != 0 {
        return Err(wrong(&named("sslkey", file), "other users can read the file; use chmod 600"));
    }
    let reason = |error: rustls::pki_types::pem::Error| match error {
        rustls::pki_types::pem::Error::NoItemsFound => {
            wrong(&named("sslkey", file), "the file contains no private key in PEM without a password")
        }
        error => wrong(&named("sslkey", file), error),
    };
    PrivateKeyDer::from_pem_file(file).map_err(reason)
}

/// Decides whether the certificate of a server is accepted.
#[derive(Debug)]
struct Verifier {
    /// Without any, every certificate is accepted.
    roots: Option<RootCertStore>,
    /// Whether the name in the certificate counts.
    names: bool,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if let Some(roots) = &self.roots {
            let certificate = ParsedCertificate::try_from(certificate)?;
            let algorithms = self.provider.signature_verification_algorithms.all;
            verify_server_cert_signed_by_trust_anchor(&certificate, roots, between, now, algorithms)?;
            if self.names {
                verify_server_name(&certificate, name)?;
            }
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
