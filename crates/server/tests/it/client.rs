//! A server in a scratch directory, and a client that sends one request on a connection.

use std::path::Path;

use axum::body::Body;
use http_body_util::BodyExt;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use latchwork::workflow::Engine;
use latchwork::{Value, json};
use latchwork_server::{Access, Address, Api, Limits, Server, ServerBuilder};
use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

/// A server that runs, with its store.
pub(crate) struct Running {
    pub(crate) server: Server,
    pub(crate) engine: Engine,
    pub(crate) place: String,
    _directory: TempDir,
}

impl Running {
    /// A server that the test has started on a directory.
    pub(crate) fn on(server: Server, engine: Engine, directory: TempDir) -> Running {
        let place = address(&server);
        Running { server, engine, place, _directory: directory }
    }
}

/// Starts a server on a new store, on a free port.
pub(crate) async fn start() -> Running {
    start_with(|server| server).await
}

pub(crate) async fn start_with(change: impl FnOnce(ServerBuilder) -> ServerBuilder) -> Running {
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::open(directory.path()).start().await.unwrap();
    let server = Server::builder().namespace("default", Api::on(&engine)).listen(free());
    Running::on(change(server).start().await.unwrap(), engine, directory)
}

/// Starts a server on an engine of the test.
pub(crate) async fn start_api(engine: Engine, api: Api) -> Running {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::builder().namespace("default", api).listen(free()).start().await.unwrap();
    Running::on(server, engine, directory)
}

pub(crate) fn free() -> latchwork_server::Listen {
    latchwork_server::Listen::Tcp("127.0.0.1:0".parse().unwrap())
}

pub(crate) fn address(server: &Server) -> String {
    match &server.addresses()[0] {
        Address::Tcp(address) => address.to_string(),
        other => panic!("{other:?}"),
    }
}

pub(crate) fn with_access(access: Access) -> impl FnOnce(ServerBuilder) -> ServerBuilder {
    move |server| server.access(access)
}

pub(crate) fn with_limits(change: impl FnOnce(&mut Limits)) -> impl FnOnce(ServerBuilder) -> ServerBuilder {
    let mut limits = Limits::default();
    change(&mut limits);
    move |server| server.limits(limits)
}

/// An answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    /// The body; as text it is lossy.
    pub(crate) bytes: Vec<u8>,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(other, _)| other == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Checks that this is a problem of that code.
    pub(crate) fn is_problem(&self, status: u16, code: &str) -> Value {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
        let document = self.json();
        assert_eq!(document["code"], code, "{self:?}");
        assert_eq!(document["status"], status);
        assert_eq!(document["type"], format!("urn:latchwork:problem:{code}"));
        document
    }
}

/// A request that is built up.
pub(crate) struct Ask {
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    body: Option<Vec<u8>>,
}

pub(crate) fn ask(method: &str, path: &str) -> Ask {
    Ask { method: method.into(), path: path.into(), headers: Vec::new(), body: None }
}

impl Ask {
    pub(crate) fn header(mut self, name: &str, value: &str) -> Ask {
        self.headers.push((name.into(), value.into()));
        self
    }

    pub(crate) fn json(self, body: Value) -> Ask {
        self.body(body.to_string().into_bytes()).header("content-type", "application/json")
    }

    pub(crate) fn body(mut self, body: Vec<u8>) -> Ask {
        self.body = Some(body);
        self
    }

    pub(crate) async fn of(self, running: &Running) -> Answer {
        self.at(&running.place).await
    }

    pub(crate) async fn at(self, place: &str) -> Answer {
        let stream = TcpStream::connect(place).await.unwrap();
        self.on(stream, place).await
    }

    pub(crate) async fn at_socket(self, path: &Path) -> Answer {
        self.on(UnixStream::connect(path).await.unwrap(), "localhost").await
    }

    /// The status of the answer. Its body is not read: a stream may have no end.
    pub(crate) async fn status_of(self, running: &Running) -> u16 {
        let stream = TcpStream::connect(&running.place).await.unwrap();
        let (answer, driver) = self.sent(stream, &running.place).await;
        driver.abort();
        answer.status().as_u16()
    }

    /// The answer, unless the connection breaks before its end.
    pub(crate) async fn try_on(self, stream: TcpStream, host: &str) -> Option<Answer> {
        let (sent, driver) = self.try_sent(stream, host).await;
        let (parts, body) = sent.ok()?.into_parts();
        let bytes = body.collect().await.ok()?.to_bytes().to_vec();
        driver.abort();
        Some(whole(&parts, bytes))
    }

    async fn on<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(self, stream: S, host: &str) -> Answer {
        let (answer, driver) = self.sent(stream, host).await;
        let (parts, body) = answer.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes().to_vec();
        driver.abort();
        whole(&parts, bytes)
    }

    /// The answer as it begins, and the task that drives its connection.
    async fn sent<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(self, stream: S, host: &str) -> Sent {
        let (answer, driver) = self.try_sent(stream, host).await;
        (answer.unwrap(), driver)
    }

    async fn try_sent<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(self, stream: S, host: &str) -> TrySent {
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        let driver = tokio::spawn(connection);
        let mut request = axum::http::Request::builder().method(self.method.as_str()).uri(self.path);
        if !self.headers.iter().any(|(name, _)| name == "host") {
            request = request.header("host", host);
        }
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let request = request.body(Body::from(self.body.unwrap_or_default())).unwrap();
        (sender.send_request(request).await, driver)
    }
}

type Begun = axum::http::Response<hyper::body::Incoming>;
type Driver = tokio::task::JoinHandle<hyper::Result<()>>;
type Sent = (Begun, Driver);
type TrySent = (hyper::Result<Begun>, Driver);

fn whole(parts: &axum::http::response::Parts, bytes: Vec<u8>) -> Answer {
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let headers = parts.headers.iter();
    let headers = headers.map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_string())).collect();
    Answer { status: parts.status.as_u16(), headers, bytes, text }
}

/// Sends bytes, and returns what is answered until the server closes the connection.
pub(crate) async fn raw(place: &str, bytes: &[u8]) -> Answer {
    let mut stream = TcpStream::connect(place).await.unwrap();
    // The server may close before it has read everything.
    let _ = stream.write_all(bytes).await;
    let mut read = Vec::new();
    let _ = stream.read_to_end(&mut read).await;
    parsed(&String::from_utf8(read).unwrap())
}

fn parsed(text: &str) -> Answer {
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let headers = lines.filter_map(|line| line.split_once(": "));
    let headers = headers.map(|(name, value)| (name.to_lowercase(), value.to_string())).collect();
    Answer { status, headers, bytes: body.into(), text: body.to_string() }
}

/// Adds an entity.
pub(crate) async fn add(running: &Running, id: &str, data: Value) {
    let added = ask("POST", "/v1/entities").json(json!({"id": id, "type": "person", "data": data})).of(running).await;
    assert_eq!(added.status, 201, "{added:?}");
}
