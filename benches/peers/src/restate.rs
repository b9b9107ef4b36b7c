//! Restate: its Rust SDK serves the workflow from this process. The caller of this program starts a server beside it,
//! which keeps the journal and is called through its ingress.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Request, Response};
use hyper_util::client::legacy::Client as Http;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use restate_sdk::ingress::{Client, RequestExecutor};
use restate_sdk::prelude::*;
use serde_json::json;
use tokio::net::TcpListener;

use crate::measure::{self, Engine, Figures, Plan, Rest, STEPS};

/// How long the server may take to start.
const START: Duration = Duration::from_secs(60);

struct Work;

#[service]
impl Work {
    #[handler]
    async fn work(&self, ctx: Context<'_>, steps: u32) -> Result<u32, HandlerError> {
        for _ in 0..steps {
            ctx.run(|| async {
                measure::step();
                Ok(())
            })
            .name("step")
            .await?;
        }
        Ok(steps)
    }
}

/// Plain HTTP/1.1 with one connection for each caller, for the SDK's typed client. One HTTP/2 connection is slower
/// here.
struct Transport(Http<HttpConnector, Full<Bytes>>);

impl RequestExecutor for Transport {
    type Error = std::io::Error;

    async fn execute(&self, request: Request<Bytes>) -> Result<Response<Bytes>, std::io::Error> {
        let response = self.0.request(request.map(Full::new)).await.map_err(std::io::Error::other)?;
        let (parts, body) = response.into_parts();
        let body = body.collect().await.map_err(std::io::Error::other)?;
        Ok(Response::from_parts(parts, body.to_bytes()))
    }
}

struct Restate {
    client: WorkIngressClient<Transport>,
}

impl Engine for Restate {
    async fn workflow(&self, steps: u32) -> Result<u32> {
        Ok(self.client.work(steps).call().await?.into_body()?)
    }
}

pub async fn run(plan: &Plan, ingress: &str, admin: &str) -> Result<Figures> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let endpoint = format!("http://{}", listener.local_addr()?);
    let server = HttpServer::new(Endpoint::builder().bind(Work).build());
    tokio::spawn(server.serve_with_cancel(listener, std::future::pending::<()>()));
    let transport = || {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Transport(Http::builder(TokioExecutor::new()).build(connector))
    };
    register(&transport(), admin, &endpoint).await?;
    let client = WorkIngressClient::from_client(Client::new(ingress.parse()?, transport())?);
    let engine = Arc::new(Restate { client });
    until(async || engine.workflow(1).await).await.context("the server does not run the workflow")?;
    let (step_us, workflow_us) = measure::sequential(plan, &*engine).await?;
    let mut figures = Figures { step_us, workflow_us, ..Figures::default() };
    for callers in [16, 64, 256, 1024] {
        figures.steps.push((callers, measure::rate(plan, &engine, STEPS, callers, Rest::Await).await?.0));
        figures.starts.push((callers, measure::rate(plan, &engine, 1, callers, Rest::Await).await?.1));
    }
    Ok(figures)
}

/// Registers the workflow's address with the server, as soon as the server listens.
async fn register(transport: &Transport, admin: &str, endpoint: &str) -> Result<()> {
    let body = Bytes::from(json!({"uri": endpoint}).to_string());
    let attempt = async || {
        let request = Request::post(format!("{admin}/deployments")).header("content-type", "application/json");
        let response = transport.execute(request.body(body.clone())?).await?;
        if !response.status().is_success() {
            bail!("{}: {}", response.status(), String::from_utf8_lossy(response.body()));
        }
        Ok(())
    };
    until(attempt).await.context("the server does not accept the deployment")
}

/// Tries until it works.
async fn until<T>(attempt: impl AsyncFn() -> Result<T>) -> Result<T> {
    let begin = Instant::now();
    loop {
        match attempt().await {
            Err(_) if begin.elapsed() < START => tokio::time::sleep(Duration::from_millis(100)).await,
            ended => return ended,
        }
    }
}
