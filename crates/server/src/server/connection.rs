//! Accepting connections and serving HTTP/1.1 on them, within limits on their number, on headers and on time. At the
//! end of the server, requests that are under way finish, and connections without one are closed.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use latchwork::store::Env;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

use crate::access::Peer;
use crate::api::{Closing, closed};
use crate::limits::Limits;
use crate::router::Home;
use crate::server::listen::Bound;

/// The time in which a client must have agreed on TLS.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// The pause after the system has refused to accept, for example because there are no more files.
const PAUSE: Duration = Duration::from_millis(100);

/// What connections are served with.
#[derive(Clone)]
pub(crate) struct Serving {
    pub(crate) router: Router,
    pub(crate) limits: Limits,
    pub(crate) env: Env,
    pub(crate) closing: Closing,
}

/// Accepts connections until the server ends, and then waits for them.
pub(crate) async fn accept(bound: Bound, serving: Serving) {
    let places = Arc::new(Semaphore::new(serving.limits.connections.clamp(1, Semaphore::MAX_PERMITS)));
    let mut closing = std::pin::pin!(closed(&serving.closing));
    let mut open = JoinSet::new();
    loop {
        // A connection without a place is not accepted: the system keeps it waiting.
        let accepted = async {
            let place = places.clone().acquire_owned().await.map_err(io::Error::other)?;
            accept_one(&bound, &serving, &mut open, place).await
        };
        tokio::select! {
            () = &mut closing => break,
            accepted = accepted => {
                if let Err(error) = accepted {
                    tracing::warn!(%error, "a connection was not accepted");
                    serving.env.sleep(PAUSE).await;
                }
            }
        }
        while open.try_join_next().is_some() {}
    }
    // The socket is removed before requests are waited for, so that no client connects to it any more.
    drop(bound);
    tokio::select! {
        () = async { while open.join_next().await.is_some() {} } => {}
        () = serving.env.sleep(serving.limits.drain_time) => {
            tracing::warn!(left = open.len(), "requests did not finish in time and are cut off");
        }
    }
}

async fn accept_one(
    bound: &Bound,
    serving: &Serving,
    open: &mut JoinSet<()>,
    place: OwnedSemaphorePermit,
) -> io::Result<()> {
    let serving = serving.clone();
    match bound {
        Bound::Tcp(listener, _, tls) => {
            let (stream, address) = listener.accept().await?;
            stream.set_nodelay(true)?;
            let peer = Peer::at(address);
            match tls.clone() {
                None => open.spawn(serve(stream, peer, Home::default(), serving, place)),
                Some(tls) => open.spawn(serve_tls(tls, stream, peer, serving, place)),
            };
        }
        Bound::Socket(socket, home) => {
            let (stream, _) = socket.listener().accept().await?;
            open.spawn(serve(stream, Peer::Owner, home.clone(), serving, place));
        }
    }
    Ok(())
}

async fn serve_tls<S>(tls: TlsAcceptor, stream: S, peer: Peer, serving: Serving, place: OwnedSemaphorePermit)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let agreed = tokio::select! {
        agreed = tls.accept(stream) => agreed,
        () = serving.env.sleep(HANDSHAKE) => return,
    };
    match agreed {
        Ok(stream) => serve(stream, peer, Home::default(), serving, place).await,
        Err(error) => tracing::debug!(%error, "a client did not agree on TLS"),
    }
}

async fn serve<S>(stream: S, peer: Peer, home: Home, serving: Serving, _place: OwnedSemaphorePermit)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let Serving { router, limits, closing, .. } = serving;
    let closing = closed(&closing);
    let service = service_fn(move |request: Request<Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(peer);
        request.extensions_mut().insert(home.clone());
        router.clone().oneshot(request)
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        .header_read_timeout(limits.header_time)
        .max_headers(limits.headers)
        .max_header_size(limits.header_bytes)
        .half_close(false);
    let mut connection = std::pin::pin!(http.serve_connection(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = closing => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}
