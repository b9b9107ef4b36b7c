//! Endpoints over TLS: certificates that the test makes, and whom a call trusts.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use latchwork::store::Store;
use latchwork::workflow::Engine;
use latchwork::{Value, json};
use latchwork_server::{Api, Endpoint, EndpointLimits, Workers};
use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsAcceptor;

use crate::client::{ask, start_api};

fn openssl(home: &Path, arguments: &str) {
    let output = Command::new("openssl").current_dir(home).args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "{arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Two authorities, and certificates of the first: one for this machine, one for another, and one that is over.
fn make_certificates(home: &Path) {
    let new_key = "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";
    for name in ["authority", "stranger"] {
        openssl(home, &format!("{new_key} -x509 -days 2 -keyout {name}.key -out {name}.pem -subj /CN={name}"));
    }
    for (name, host, time) in [
        ("good", "DNS:localhost,IP:127.0.0.1", "-days 2"),
        ("other", "DNS:billing.example.org", "-days 2"),
        ("over", "DNS:localhost", "-days -1"),
    ] {
        std::fs::write(home.join("about"), format!("subjectAltName={host}")).unwrap();
        openssl(home, &format!("{new_key} -keyout {name}.key -out {name}.csr -subj /CN={name}"));
        let sign = "x509 -req -CA authority.pem -CAkey authority.key -CAcreateserial -extfile about";
        openssl(home, &format!("{sign} {time} -in {name}.csr -out {name}.pem"));
    }
}

/// An endpoint with this certificate, which answers every call by 7. Returns its port.
async fn serve(home: &Path, certificate: &str) -> u16 {
    let chain = CertificateDer::pem_file_iter(home.join(format!("{certificate}.pem"))).unwrap();
    let key = PrivateKeyDer::from_pem_file(home.join(format!("{certificate}.key"))).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    let config = config.with_single_cert(chain.map(Result::unwrap).collect(), key).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                // A caller that does not trust the certificate ends the handshake.
                let Ok(mut stream) = acceptor.accept(stream).await else { return };
                let (mut read, mut piece) = (Vec::new(), [0; 4096]);
                while !read.ends_with(b"}") {
                    match stream.read(&mut piece).await {
                        Ok(length @ 1..) => read.extend_from_slice(&piece[..length]),
                        _ => return,
                    }
                }
                let answer = "HTTP/1.1 200 OK\r\ncontent-length: 1\r\nconnection: close\r\n\r\n7";
                let _ = stream.write_all(answer.as_bytes()).await;
                let _ = stream.shutdown().await;
            });
        }
    });
    port
}

/// The end of a workflow whose step is done at this address.
async fn done_at(url: &str, authorities: &Path) -> Value {
    let mut limits = EndpointLimits::default();
    (limits.timeout, limits.attempts, limits.pause) = (Duration::from_secs(10), 2, Duration::from_millis(10));
    let endpoint = Endpoint::builder(url).limits(limits).authorities(authorities).build().unwrap();
    let store = Store::memory().await.unwrap();
    let workers = Workers::on(&store);
    let worker = workers.endpoint(&endpoint);
    let workers = workers.workflow("order", [("charge", worker)]);
    let engine = workers.register(Engine::on(&store)).start().await.unwrap();
    let running = start_api(engine.clone(), Api::on(&engine).workers(&workers)).await;
    let new = json!({"workflow": "order", "id": "x", "input": {"price": 5}});
    assert_eq!(ask("POST", "/v1/workflows").json(new).of(&running).await.status, 201);
    ask("GET", "/v1/workflows/x/result?wait=30s").of(&running).await.json()
}

#[tokio::test]
async fn an_endpoint_is_called_if_its_certificate_is_trusted() {
    let directory = tempfile::tempdir().unwrap();
    let home = directory.path();
    make_certificates(home);
    let (authority, stranger) = (home.join("authority.pem"), home.join("stranger.pem"));
    let good = serve(home, "good").await;
    for host in ["localhost", "127.0.0.1"] {
        let ended = done_at(&format!("https://{host}:{good}/work"), &authority).await;
        assert_eq!((&ended["status"], &ended["output"]), (&json!("completed"), &json!(7)), "{host}: {ended}");
    }
    for (certificate, trusted) in [("good", &stranger), ("other", &authority), ("over", &authority)] {
        let port = serve(home, certificate).await;
        let ended = done_at(&format!("https://localhost:{port}/work"), trusted).await;
        assert_eq!(ended["status"], "failed", "{certificate}: {ended}");
        assert!(ended["failure"]["message"].as_str().unwrap().contains("certificate"), "{certificate}: {ended}");
    }
}

#[tokio::test]
async fn a_file_of_authorities_is_read_before_the_first_call() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("authorities.pem");
    let build = || Endpoint::builder("https://localhost/").authorities(&file).build();
    assert!(build().is_err(), "it does not exist");
    std::fs::write(&file, "no certificate").unwrap();
    assert!(build().is_err());
    make_certificates(directory.path());
    std::fs::copy(directory.path().join("authority.pem"), &file).unwrap();
    assert!(build().is_ok());
}
