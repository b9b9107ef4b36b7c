//! A client of the API: over HTTP/1.1 to a server (TCP, TLS or a socket), or in this process on a store that the
//! command has opened. It knows how requests are sent and what problems mean to a command; routes and shapes belong to
//! the commands.

mod answer;
pub(crate) mod connect;
mod events;
mod request;

use std::fmt::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, USER_AGENT};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use latchwork::store::Env;
use latchwork::{Cursor, Page};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tower::ServiceExt;

use crate::client::answer::problem;
use crate::client::connect::{Place, Stream};
use crate::output::{Exit, Problem};

pub(crate) use answer::Download;
pub(crate) use events::StreamEvent;
pub(crate) use request::{ApiCall, Condition, object};

/// The variable that holds the token. It has no flag: other users of the machine can read a command line.
const TOKEN: &str = "LATCH_TOKEN";
/// How long a server may take to be connected to.
const CONNECTING: Duration = Duration::from_secs(10);
/// How long a server may take to answer. It waits for at most 60 s itself.
const ANSWERING: Duration = Duration::from_secs(75);
/// How often a change is sent if the connection breaks: it takes effect once, under its key.
const TRIES: u32 = 3;
/// The pause before the next try.
const PAUSE: Duration = Duration::from_millis(200);

/// A server, and how it is reached.
#[derive(Clone)]
pub(crate) struct Client(Arc<Parts>);

struct Parts {
    place: Place,
    /// The path of the API in the server, without an end.
    base: String,
    namespace: Option<String>,
    token: Option<String>,
    env: Env,
}

/// A request, which may be sent several times.
struct Ask {
    method: Method,
    target: String,
    body: Option<Bytes>,
    key: Option<String>,
    /// Conditions, and where a stream continues.
    headers: Vec<(HeaderName, String)>,
}

impl Client {
    /// The server at this address: `http://…`, `https://…` or `unix:PATH`.
    pub(crate) fn new(url: &str, namespace: Option<String>, authorities: Option<&Path>) -> Result<Client, Problem> {
        let (place, base) = Place::read(url, authorities)?;
        let token = std::env::var(TOKEN).ok().filter(|token| !token.is_empty());
        Ok(Client(Arc::new(Parts { place, base, namespace, token, env: Env::system() })))
    }

    /// The server behind the socket in a data directory, which needs no token.
    pub(crate) fn socket(path: PathBuf) -> Client {
        let (place, base, env) = (Place::Socket(path), String::new(), Env::system());
        Client(Arc::new(Parts { place, base, namespace: None, token: None, env }))
    }

    /// The API in this process. It is alone if no other process can change the store meanwhile.
    pub(crate) fn here(router: Router, is_alone: bool) -> Client {
        let (place, base, env) = (Place::Here { router, is_alone }, String::new(), Env::system());
        Client(Arc::new(Parts { place, base, namespace: None, token: None, env }))
    }

    /// True if the API is in this process, which runs nothing.
    pub(crate) fn is_here(&self) -> bool {
        matches!(self.0.place, Place::Here { .. })
    }

    /// True if nothing happens meanwhile: no process runs what is stored.
    pub(crate) fn is_alone(&self) -> bool {
        matches!(self.0.place, Place::Here { is_alone: true, .. })
    }

    pub(crate) fn env(&self) -> &Env {
        &self.0.env
    }

    /// True if a server listens there.
    pub(crate) async fn is_listening(&self) -> bool {
        self.connect().await.is_ok()
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str, query: &[(&str, String)]) -> Result<T> {
        self.within(ANSWERING, self.json(&self.ask(Method::GET, path, query))).await
    }

    /// A page of a list.
    pub(crate) async fn page<T: DeserializeOwned>(
        &self,
        path: &str,
        filter: &[(&str, String)],
        limit: usize,
        after: Option<Cursor>,
    ) -> Result<Page<T>> {
        let mut query = filter.to_vec();
        query.push(("limit", limit.to_string()));
        query.extend(after.map(|after| ("after", after.to_string())));
        self.get(path, &query).await
    }

    /// Sends a change. If the connection breaks, it is sent again under the same key.
    pub(crate) async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        query: &[(&str, String)],
        body: &impl Serialize,
    ) -> Result<T> {
        let mut ask = self.ask(Method::POST, path, query);
        ask.body = Some(serde_json::to_vec(body)?.into());
        self.change(ask).await
    }

    /// Sends a request whose body names it, so that it may be sent again and again without a key.
    pub(crate) async fn post_named<T: DeserializeOwned>(
        &self,
        path: &str,
        query: &[(&str, String)],
        body: &impl Serialize,
    ) -> Result<T> {
        let mut ask = self.ask(Method::POST, path, query);
        ask.body = Some(serde_json::to_vec(body)?.into());
        self.within(ANSWERING, self.json(&ask)).await
    }

    pub(crate) async fn put<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        let mut ask = self.ask(Method::PUT, path, &[]);
        ask.body = Some(serde_json::to_vec(body)?.into());
        self.change(ask).await
    }

    pub(crate) async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.change(self.ask(Method::DELETE, path, &[])).await
    }

    /// A request that takes as long as the server needs.
    pub(crate) async fn long_post<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        self.json(&self.ask(Method::POST, path, &[])).await
    }

    /// An answer that is read in pieces.
    pub(crate) async fn download(&self, path: &str) -> Result<Download> {
        self.send(&self.ask(Method::GET, path, &[])).await
    }

    async fn change<T: DeserializeOwned>(&self, mut ask: Ask) -> Result<T> {
        // In this process no connection can break.
        ask.key = (!self.is_here()).then(|| self.0.env.uuid().to_string());
        let mut tries = 1;
        loop {
            match self.within(ANSWERING, self.json(&ask)).await {
                Err(error) if tries < TRIES && is_unreachable(&error) => {
                    tries += 1;
                    self.0.env.sleep(PAUSE).await;
                }
                answer => return answer,
            }
        }
    }

    fn ask(&self, method: Method, path: &str, query: &[(&str, String)]) -> Ask {
        let mut target = format!("{}/v1", self.0.base);
        if let Some(namespace) = &self.0.namespace {
            let _ = write!(target, "/ns/{}", encoded(namespace));
        }
        target.push_str(path);
        for (index, (name, value)) in query.iter().enumerate() {
            let sign = if index == 0 { '?' } else { '&' };
            let _ = write!(target, "{sign}{name}={}", encoded(value));
        }
        Ask { method, target, body: None, key: None, headers: Vec::new() }
    }

    async fn json<T: DeserializeOwned>(&self, ask: &Ask) -> Result<T> {
        let text = self.send(ask).await?.text().await?;
        // An answer without a body is that of a thing without fields.
        let text = if text.is_empty() { "null" } else { &text };
        let unreadable = |error| Problem::new(Exit::Failed, format!("the answer of {self} cannot be read: {error}"));
        Ok(serde_json::from_str(text).map_err(unreadable)?)
    }

    /// Sends a request, and returns the answer. A problem becomes an error.
    async fn send(&self, ask: &Ask) -> Result<Download> {
        let request = self.request(ask)?;
        let answer = match &self.0.place {
            Place::Here { router, .. } => {
                here(router, request).await.map(|body| body.map_err(Into::into).boxed_unsync())
            }
            _ => {
                let stream = self.connect().await?;
                let failed = |error: hyper::Error| self.unreachable(&error);
                let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(failed)?;
                tokio::spawn(connection);
                let answer = sender.send_request(request).await.map_err(failed)?;
                answer.map(|body| body.map_err(Into::into).boxed_unsync())
            }
        };
        let status = answer.status();
        let answer = Download::new(answer, self.to_string());
        if status.is_success() {
            return Ok(answer);
        }
        Err(problem(self, status, &answer.text().await.unwrap_or_default()).into())
    }

    fn request(&self, ask: &Ask) -> Result<Request<Full<Bytes>>, Problem> {
        let Ask { method, target, body, key, headers } = ask;
        let mut request = Request::builder().method(method).uri(target).header(HOST, self.0.place.host());
        request =
            request.header(ACCEPT, "application/json").header(USER_AGENT, concat!("latch/", env!("CARGO_PKG_VERSION")));
        if let Some(token) = &self.0.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        request = headers.iter().fold(request, |request, (name, value)| request.header(name, value));
        request.body(Full::new(body.clone().unwrap_or_default())).map_err(|_| {
            Problem::new(Exit::Usage, format!("a request to {self} cannot be written: is LATCH_TOKEN a token?"))
        })
    }

    async fn connect(&self) -> Result<Stream> {
        let connected = self.within(CONNECTING, async { Ok(self.0.place.connect().await) }).await?;
        Ok(connected.map_err(|error| self.unreachable(&error))?)
    }

    async fn within<T>(&self, time: Duration, work: impl Future<Output = Result<T>>) -> Result<T> {
        tokio::select! {
            done = work => done,
            () = self.0.env.sleep(time) => {
                let why = format!("{self} does not answer within {}", crate::time::exact(time));
                Err(Problem::new(Exit::Unreachable, why).into())
            }
        }
    }

    fn unreachable(&self, error: &dyn std::error::Error) -> Problem {
        let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
        let problem = Problem::new(Exit::Unreachable, format!("cannot reach {self}: {error}{cause}"));
        problem.with("server", self.to_string())
    }
}

/// The answer of the API in this process. The routes see a caller on this machine.
async fn here(router: &Router, request: Request<Full<Bytes>>) -> hyper::Response<Body> {
    let mut request = request.map(Body::new);
    request.extensions_mut().insert(ConnectInfo(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))));
    match router.clone().oneshot(request).await {
        Ok(answer) => answer,
        Err(never) => match never {},
    }
}

/// The address, without secrets.
impl std::fmt::Display for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.place.fmt(f)
    }
}

/// True if the connection broke, so that it is not known whether the request had an effect.
pub(crate) fn is_unreachable(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Problem>().is_some_and(|problem| problem.exit == Exit::Unreachable)
}

/// A text as a part of a path or a query.
pub(crate) fn encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(char::from(byte)),
            // A name of dots alone would be taken for a step in the path.
            _ => {
                let _ = write!(out, "%{byte:02X}");
            }
        }
    }
    if matches!(text, "." | "..") { out.replace('.', "%2E") } else { out }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_encoded() {
        for (text, encoded_text) in
            [("a-b_c.d~", "a-b_c.d~"), ("a/b c", "a%2Fb%20c"), ("é", "%C3%A9"), ("..", "%2E%2E")]
        {
            assert_eq!(encoded(text), encoded_text);
        }
    }

    #[test]
    fn a_path_is_in_its_namespace() {
        let client = |url: &str, namespace: Option<&str>| Client::new(url, namespace.map(Into::into), None).unwrap();
        let target = |client: Client| client.ask(Method::GET, "/locks", &[("held", "true".into())]).target;
        assert_eq!(target(client("http://a:1", None)), "/v1/locks?held=true");
        assert_eq!(target(client("http://a/latch/", Some("b"))), "/latch/v1/ns/b/locks?held=true");
    }
}
