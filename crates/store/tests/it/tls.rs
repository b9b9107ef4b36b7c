//! TLS to a server, as the connection string asks for it: whom the client trusts, and what it shows of itself. The
//! certificates are made by the test.

use std::path::Path;
use std::process::Command;

use latchwork_store::*;

use crate::server::Server;

/// A server with TLS on a port of this machine. Its certificate is for `localhost`.
struct Secure {
    server: Server,
    port: u16,
}

/// Which roles may connect, and how. The name of the role `certified` is in its certificate.
const RULES: &str = "local all all trust
hostssl all certified 127.0.0.1/32 cert
hostssl all keyed 127.0.0.1/32 scram-sha-256
hostnossl all plain 127.0.0.1/32 trust
hostssl all postgres 127.0.0.1/32 trust
";

impl Secure {
    fn start() -> Secure {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let server = Server::start_with(|home| {
            for authority in ["authority", "stranger"] {
                make_authority(home, authority);
            }
            make_certificate(home, "server", "subjectAltName=DNS:localhost");
            make_certificate(home, "certified", "extendedKeyUsage=clientAuth");
            std::fs::write(home.join("data/pg_hba.conf"), RULES).unwrap();
            let file = |name: &str| home.join(name).display().to_string();
            vec![
                "listen_addresses=127.0.0.1".into(),
                format!("port={port}"),
                "ssl=on".into(),
                format!("ssl_cert_file={}", file("server.pem")),
                format!("ssl_key_file={}", file("server.key")),
                format!("ssl_ca_file={}", file("authority.pem")),
            ]
        });
        Secure { server, port }
    }

    fn file(&self, name: &str) -> String {
        self.server.home().join(name).display().to_string()
    }

    /// A connection string over the network.
    fn url(&self, host: &str, more: &str) -> String {
        let name = format!("application_name=tls_{}", std::process::id());
        format!("host={host} hostaddr=127.0.0.1 port={} user=postgres dbname=postgres {name} {more}", self.port)
    }

    async fn open(&self, host: &str, more: &str) -> Result<Store> {
        PostgresOptions::new().schema("tls").connect(&self.url(host, more)).await
    }

    /// Opens the store, and gives how many of its connections are encrypted, and how many there are.
    async fn count(&self, host: &str, more: &str) -> (i64, i64) {
        let store = self.open(host, more).await.unwrap_or_else(|error| panic!("{more}: {error}"));
        let space = store.space(SpaceSpec::new("a")).await.unwrap();
        assert!(store.commit(Commit::new().put(&space.key("k"), "1")).await.unwrap().is_applied());
        let admin = admin(&self.server).await;
        let asked = "SELECT count(*) FILTER (WHERE ssl), count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid)
            WHERE application_name = $1";
        let row = admin.query_one(asked, &[&format!("tls_{}", std::process::id())]).await.unwrap();
        store.close().await.unwrap();
        drop(store);
        (row.get(0), row.get(1))
    }

    /// What is said if the store cannot be opened.
    async fn refused(&self, host: &str, more: &str) -> (ServerFault, String) {
        match self.open(host, more).await {
            Err(error @ StoreError::Server { fault, .. }) => (fault, error.to_string()),
            Err(error) => panic!("{more}: {error}"),
            Ok(_) => panic!("{more}: it opens"),
        }
    }
}

async fn admin(server: &Server) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(&server.url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

fn openssl(home: &Path, arguments: &[&str]) {
    let output = Command::new("openssl").current_dir(home).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

const NEW_KEY: [&str; 6] = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];

fn make_authority(home: &Path, name: &str) {
    let (key, certificate, subject) = (format!("{name}.key"), format!("{name}.pem"), format!("/CN={name}"));
    let more = ["-x509", "-days", "2", "-keyout", &key, "-out", &certificate, "-subj", &subject];
    openssl(home, &[&NEW_KEY[..], &more].concat());
}

fn make_certificate(home: &Path, name: &str, extension: &str) {
    let [key, request, certificate, about] = ["key", "csr", "pem", "ext"].map(|end| format!("{name}.{end}"));
    std::fs::write(home.join(&about), extension).unwrap();
    let subject = format!("/CN={name}");
    openssl(home, &[&NEW_KEY[..], &["-keyout", &key, "-out", &request, "-subj", &subject]].concat());
    let sign = ["x509", "-req", "-days", "2", "-in", &request, "-CA", "authority.pem", "-CAkey", "authority.key"];
    let more = ["-CAcreateserial", "-out", &certificate, "-extfile", &about];
    openssl(home, &[&sign[..], &more].concat());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_mode_decides_what_must_be_proven() {
    let secure = Secure::start();
    let (right, stranger) = (secure.file("authority.pem"), secure.file("stranger.pem"));
    for (host, more) in [
        ("localhost", "sslmode=prefer".to_string()),
        ("localhost", String::new()),
        ("localhost", "sslmode=require".into()),
        ("localhost", format!("sslmode=verify-ca sslrootcert={right}")),
        ("elsewhere", format!("sslmode=verify-ca sslrootcert={right}")),
        ("elsewhere", format!("sslmode=require sslrootcert={right}")),
        ("localhost", format!("sslmode=verify-full sslrootcert={right}")),
        ("localhost", format!("sslmode=prefer sslrootcert={stranger}")),
    ] {
        let (encrypted, all) = secure.count(host, &more).await;
        assert!(encrypted == all && all > 2, "{host} {more}: {encrypted} of {all} connections are encrypted");
    }
    // The wrong name, the wrong authority, and no encryption.
    for (host, more, says) in [
        ("elsewhere", format!("sslmode=verify-full sslrootcert={right}"), "not valid for name"),
        ("localhost", format!("sslmode=verify-full sslrootcert={stranger}"), "invalid peer certificate"),
        ("localhost", format!("sslmode=verify-ca sslrootcert={stranger}"), "invalid peer certificate"),
        ("localhost", format!("sslmode=require sslrootcert={stranger}"), "invalid peer certificate"),
    ] {
        let (fault, said) = secure.refused(host, &more).await;
        assert!(fault == ServerFault::Tls && said.contains(says), "{host} {more}: {said}");
        assert!(said.contains("check sslmode"), "it says what to do: {said}");
    }
    let (fault, said) = secure.refused("localhost", "sslmode=disable").await;
    assert!(fault == ServerFault::NoRights && said.contains("no encryption"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_shows_its_certificate_and_binds_its_password_to_the_channel() {
    let secure = Secure::start();
    let admin = admin(&secure.server).await;
    admin.batch_execute("CREATE ROLE certified LOGIN SUPERUSER; CREATE ROLE plain LOGIN SUPERUSER").await.unwrap();
    admin.batch_execute("CREATE ROLE keyed LOGIN SUPERUSER PASSWORD 'open sesame'").await.unwrap();
    let (certificate, key) = (secure.file("certified.pem"), secure.file("certified.key"));
    // The test may run as root, and the server's files belong to its user.
    let shown = format!("user=certified sslmode=require sslcert={certificate} sslkey={key}");
    let (encrypted, all) = secure.count("localhost", &shown).await;
    assert_eq!(encrypted, all);
    let (fault, said) = secure.refused("localhost", "user=certified sslmode=require").await;
    assert!(matches!(fault, ServerFault::NoRights | ServerFault::Unreachable | ServerFault::Tls), "{fault:?}: {said}");
    let bound = "user=keyed password='open sesame' sslmode=require channel_binding=require";
    let (encrypted, all) = secure.count("localhost", bound).await;
    assert_eq!(encrypted, all);
    let (fault, said) = secure.refused("localhost", "user=keyed password=wrong sslmode=require").await;
    assert!(fault == ServerFault::NoRights && !said.contains("wrong"), "{said}");
    // The server takes this role only without TLS.
    assert_eq!(secure.count("localhost", "user=plain sslmode=prefer").await.0, 0);
    let (fault, said) = secure.refused("localhost", "user=plain sslmode=require").await;
    assert_eq!(fault, ServerFault::NoRights, "{said}");
}

#[tokio::test]
async fn a_server_without_tls_is_refused_if_tls_is_required() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let settings = vec!["listen_addresses=127.0.0.1".into(), format!("port={port}")];
    let server = Server::start_with(|_| settings);
    let secure = Secure { server, port };
    let (fault, said) = secure.refused("localhost", "sslmode=require").await;
    assert!(fault == ServerFault::Tls && said.contains("does not support TLS"), "{said}");
    assert_eq!(secure.count("localhost", "sslmode=prefer").await.0, 0);
    // Over a socket of the machine, as to libpq, the mode does not count.
    let local = format!("{} sslmode=require", secure.server.url);
    PostgresOptions::new().schema("tls").connect(&local).await.unwrap().close().await.unwrap();
}

#[tokio::test]
async fn files_that_cannot_be_used_are_named() {
    let home = tempfile::tempdir().unwrap();
    let file = |name: &str| home.path().join(name).display().to_string();
    make_authority(home.path(), "authority");
    make_certificate(home.path(), "client", "extendedKeyUsage=clientAuth");
    std::fs::write(file("empty"), "nothing").unwrap();
    let open = Command::new("chmod").args(["644", &file("client.key")]).status().unwrap();
    assert!(open.success());
    let (certificate, key) = (file("client.pem"), file("client.key"));
    for (more, says) in [
        ("sslmode=verify-full".to_string(), "sslrootcert: name the file".to_string()),
        (format!("sslmode=verify-ca sslrootcert={}", file("missing")), file("missing")),
        (format!("sslmode=verify-ca sslrootcert={}", file("empty")), "no certificate".into()),
        ("sslmode=verify-ca sslrootcert=system".into(), "needs sslmode=verify-full".into()),
        (format!("sslcert={certificate}"), "without the other".into()),
        (format!("sslcert={certificate} sslkey={key}"), "chmod 600".into()),
        (format!("sslcert={certificate} sslkey={}", file("missing")), file("missing")),
    ] {
        let refused = Store::connect(&format!("host=127.0.0.1 port=1 user=x {more}")).await.unwrap_err();
        let said = refused.to_string();
        assert!(matches!(refused, StoreError::Option { .. }) && said.contains(&says), "{more}: {said}");
    }
}
