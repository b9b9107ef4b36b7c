//! Latchwork over HTTP: the whole library for every language and every shell.
//!
//! Two ways to use it:
//!
//! - In an application of your own, built with axum: [`Api::on`] an engine with your workflows, and [`Api::router`] is
//!   mounted like any other router.
//! - As a program: [`Server::builder`] takes one [`Api`] for each namespace, listens on addresses and sockets, and ends
//!   gracefully.
//!
//! ```no_run
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use latchwork::workflow::Engine;
//! use latchwork_server::{Api, Server};
//!
//! let engine = Engine::open("./data").start().await?;
//! let server = Server::builder().namespace("default", Api::on(&engine)).start().await?;
//! println!("listening on {:?}", server.addresses());
//! // … until the program shall end:
//! server.shutdown().await?;
//! # Ok(()) }
//! ```
//!
//! Requests are checked before any route sees them: the `Host` header, the origin of browsers, the token and its role.
//! See [`Access`]. Every error is a problem document (RFC 9457) with a stable code: [`ProblemCode`].

mod access;
mod api;
mod calls;
mod document;
mod group;
mod limits;
mod router;
mod routes;
mod server;
mod spans;
mod tasks;
mod wire;
mod workers;

#[cfg(doctest)]
#[doc = include_str!("../../../docs/server/service.md")]
struct ServiceGuide;

pub use access::{Access, AccessError, NewToken, Role, Token};
pub use api::Api;
pub use limits::Limits;
pub use server::{Address, Listen, Server, ServerBuilder, ServerError, TlsFiles};
pub use spans::{EndedSpan, SpanContext, SpanKind, SpanLayer, SpanValue};
pub use wire::problem::{Problem, ProblemCode};
pub use workers::{Endpoint, EndpointBuilder, EndpointError, EndpointLimits, Worker, Workers};
