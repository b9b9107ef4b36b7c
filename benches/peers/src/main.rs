//! One engine's turn in the suite `peers`: `peers latchwork|restate|duroxide|duroxide-tuned DIRECTORY [--quick]` runs
//! the three scenarios on that engine and prints one JSON object; `restate` also takes the addresses of its server's
//! ingress and admin. `cargo xtask bench peers` installs what is needed, gives each engine its turn and makes a table.

// Benchmarks measure the machine's own time.
#![allow(clippy::disallowed_methods)]

mod duroxide;
mod latchwork;
mod measure;
mod restate;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use measure::Plan;

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let quick = arguments.iter().position(|argument| argument == "--quick").map(|at| arguments.remove(at)).is_some();
    let mut arguments = arguments.into_iter();
    let engine = arguments.next().context("which engine?")?;
    let directory = PathBuf::from(arguments.next().context("in which directory?")?);
    let plan = if quick { Plan::quick() } else { Plan::full() };
    let figures = match engine.as_str() {
        "latchwork" => latchwork::run(&plan, &directory).await?,
        "restate" => {
            let ingress = arguments.next().context("where is the server's ingress?")?;
            let admin = arguments.next().context("where is the server's admin?")?;
            restate::run(&plan, &ingress, &admin).await?
        }
        "duroxide" => duroxide::run(&plan, &directory, duroxide::defaults()).await?,
        "duroxide-tuned" => duroxide::run(&plan, &directory, duroxide::tuned()).await?,
        other => bail!("there is no engine {other}"),
    };
    println!("{}", figures.to_json());
    Ok(())
}
