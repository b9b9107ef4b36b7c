//! One engine's turn in the suite `peers`: `peers latchwork|restate|duroxide|duroxide-tuned DIRECTORY [--quick]` runs
//! the three scenarios on that engine and prints one JSON object. `restate` also takes the addresses of its server's
//! ingress and admin. `cargo xtask bench peers` installs the engines, runs each in turn and prints a table.

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
    let engine = arguments.next().context("the name of the engine is missing")?;
    let directory = PathBuf::from(arguments.next().context("the directory is missing")?);
    let plan = if quick { Plan::quick() } else { Plan::full() };
    let figures = match engine.as_str() {
        "latchwork" => latchwork::run(&plan, &directory).await?,
        "restate" => {
            let ingress = arguments.next().context("the address of the server's ingress is missing")?;
            let admin = arguments.next().context("the address of the server's admin is missing")?;
            restate::run(&plan, &ingress, &admin).await?
        }
        "duroxide" => duroxide::run(&plan, &directory, duroxide::defaults()).await?,
        "duroxide-tuned" => duroxide::run(&plan, &directory, duroxide::tuned()).await?,
        other => bail!("unknown engine {other}"),
    };
    println!("{}", figures.to_json());
    Ok(())
}
