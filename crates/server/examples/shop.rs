//! A service with routes of its own, which serves the API of Latchwork beside them: docs/server/service.md.
//!
//! `cargo run -p latchwork-server --example shop -- ./shop-data 127.0.0.1:7420`

use std::net::SocketAddr;

use axum::Router;
use axum::routing::get;
use latchwork::claim::{ActionCtx, ActionError, ClaimStep, ClaimWorkflow, Claims, Outcome};
use latchwork::workflow::{Ctx, Engine, Failure, Workflow, workflow};
use latchwork_server::Api;

type Fault = Box<dyn std::error::Error + Send + Sync>;

/// An order: it is charged, waits for the parcel to be handed over, and ends.
fn order() -> Workflow<u64, String> {
    workflow("order").run(async |ctx: Ctx, cents: u64| {
        let paid = ctx.run("charge", async || Ok::<_, Failure>(format!("{cents} cents paid"))).await?;
        let parcel: String = ctx.receive("shipped").await?;
        Ok(format!("{paid}, parcel {parcel}"))
    })
}

/// An invoice that was sent is paid once, however many callers try.
fn invoice() -> ClaimWorkflow {
    let pay = ClaimStep::new(10, "pay", "sent", "paid").claimed("paying").action("Pay");
    ClaimWorkflow::new("invoice", "billing", "invoice").statuses(["sent", "paying", "paid"]).step(pay)
}

async fn pay(ctx: ActionCtx) -> Result<Outcome, ActionError> {
    // Call the bank here, with `ctx.key()` as its idempotency key.
    Ok(Outcome::output(ctx.input().clone()))
}

/// Serves until a signal asks for the end.
pub async fn serve<E>(store: &str, address: SocketAddr, end: E) -> Result<(), Fault>
where
    E: Future<Output = ()> + Send + 'static,
{
    let order = order();
    let engine = Engine::open(store).register(&order).start().await?;
    let claims = Claims::on(&engine).workflow(invoice()).action("Pay", pay).start().await?;
    let api = Api::on(&engine).claims(&claims).router();

    let application = Router::new().route("/", get(async || "the shop")).nest("/latchwork", api);
    let listener = tokio::net::TcpListener::bind(address).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let service = application.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).with_graceful_shutdown(end).await?;
    engine.shutdown().await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Fault> {
    let mut arguments = std::env::args().skip(1);
    let store = arguments.next().unwrap_or_else(|| "./shop-data".into());
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:7420".into()).parse()?;
    let interrupted = async {
        // Without a handler for the signal, the process ends at once.
        let _ = tokio::signal::ctrl_c().await;
    };
    serve(&store, address, interrupted).await
}
