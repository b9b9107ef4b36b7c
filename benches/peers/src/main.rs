//! One engine's turn in the suite `peers`: `peers ENGINE DIRECTORY [ADDRESS…] [--quick]` runs the three scenarios on
//! that engine and prints one JSON object. `restate` also takes the addresses of its server's ingress and admin, and
//! the engines in PostgreSQL take the folder of the server's socket, `dbos` then the size of its pool.
//! `cargo xtask bench peers` installs the engines and starts the servers, runs each engine in turn and prints a table.

// Benchmarks measure the machine's own time.
#![allow(clippy::disallowed_methods)]

mod dbos;
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
    let mut address = |of: &str| arguments.next().with_context(|| format!("the address of {of} is missing"));
    let figures = match engine.as_str() {
        "latchwork" => latchwork::run(&plan, &directory).await?,
        "latchwork-postgres" => latchwork::run_in_postgres(&plan, &address("the server")?).await?,
        "restate" => {
            let (ingress, admin) = (address("the server's ingress")?, address("the server's admin")?);
            restate::run(&plan, &ingress, &admin).await?
        }
        "dbos" => {
            let host = address("the server")?;
            let connections = arguments.next().context("the number of connections is missing")?.parse()?;
            dbos::run(&plan, &host, connections).await?
        }
        "duroxide" => duroxide::run(&plan, &directory, duroxide::defaults()).await?,
        "duroxide-tuned" => duroxide::run(&plan, &directory, duroxide::tuned()).await?,
        other => bail!("unknown engine {other}"),
    };
    println!("{}", figures.to_json());
    Ok(())
}
