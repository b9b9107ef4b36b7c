//! Mistakes of a first workflow, each under a `cfg` of its own. Without one this compiles. `it/workflow/mistakes.rs`
//! checks what the compiler says of each, and where: at the line with the comment of that name.
#![allow(unexpected_cfgs, dead_code, unused_imports, unused_variables, missing_docs)]

use std::rc::Rc;

use latchwork::workflow::{Ctx, Failure, Tx, Workflow, workflow};

/// Can be neither written nor read.
#[derive(Debug, Clone)]
struct Opaque;

async fn charge(price: u64) -> std::io::Result<u64> {
    Ok(price)
}

#[cfg(mistake = "not_serializable")]
async fn place(ctx: Ctx, price: u64) -> Result<u64, Failure> {
    let opaque = ctx.run("charge", async || Ok(Opaque)).await?; // not_serializable
    Ok(price)
}

#[cfg(mistake = "not_serializable_transaction")]
async fn place(ctx: Ctx, price: u64) -> Result<u64, Failure> {
    let opaque = ctx.transaction("charge", async |_: Tx| Ok(Opaque)).await?; // not_serializable_transaction
    Ok(price)
}

#[cfg(mistake = "not_send")]
async fn place(ctx: Ctx, price: u64) -> Result<u64, Failure> {
    let body = async || {
        let shared = Rc::new(price);
        std::future::ready(()).await; // not_send
        Ok(*shared)
    };
    ctx.run("charge", body).await
}

#[cfg(mistake = "other_error")]
async fn place(ctx: Ctx, price: u64) -> Result<u64, Failure> {
    ctx.run("charge", async || charge(price).await).await // other_error
}

#[cfg(mistake = "no_await")]
async fn place(ctx: Ctx, price: u64) -> Result<u64, Failure> {
    ctx.run("charge", async || Ok(charge(price).await?)); // no_await
    Ok(price)
}

#[cfg(mistake = "no_await_in_body")]
async fn place(ctx: Ctx, price: u64) -> Result<u64, Failure> {
    ctx.run("charge", async || Ok(charge(price)?)).await // no_await_in_body
}

#[cfg(not(any(
    mistake = "not_serializable",
    mistake = "not_serializable_transaction",
    mistake = "not_send",
    mistake = "other_error",
    mistake = "no_await",
    mistake = "no_await_in_body"
)))]
async fn place(ctx: Ctx, price: u64) -> Result<u64, Failure> {
    ctx.run("charge", async || Ok(charge(price).await?)).await
}

#[cfg(mistake = "no_output")]
fn chain() -> latchwork::flow::Result<latchwork::flow::Block<u64, u64>> {
    let notes = latchwork::flow::handler("notes").tap(async |_, _: u64| Ok(()));
    latchwork::flow::sequencer("chain").step(&notes).map(|_, _| 1).build() // no_output
}

#[cfg(mistake = "other_value")]
fn chain() -> latchwork::flow::Result<latchwork::flow::Block<u64, u64>> {
    let first = latchwork::flow::handler("first").run(async |_, n: u64| Ok(n.to_string()));
    let second = latchwork::flow::handler("second").run(async |_, n: u64| Ok(n));
    latchwork::flow::sequencer("chain").step(&first).step(&second).build() // other_value
}

#[cfg(mistake = "input")]
fn order() -> Workflow<Opaque, u64> {
    workflow("order").run(async |_: Ctx, _: Opaque| Ok(1)) // input
}

#[cfg(not(mistake = "input"))]
fn order() -> Workflow<u64, u64> {
    workflow("order").run(place)
}

fn main() {
    order();
}
