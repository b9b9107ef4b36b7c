//! Kills the demonstration and starts it again until it ends by itself. This process does not open the directory.

use std::io::Read;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;
use latchwork::store::Env;

use crate::dev::Dev;
use crate::output::{Exit, Format, Problem};
use crate::store::StoreArgument;

/// The demonstration must make progress between two kills.
const SHORTEST: Duration = Duration::from_millis(100);

/// How often to check whether the demonstration has ended.
const LOOK: Duration = Duration::from_millis(10);

pub(crate) async fn run(dev: &Dev, every: Duration, store: &StoreArgument, format: Format) -> Result<()> {
    if every < SHORTEST {
        return Err(Problem::new(Exit::Usage, "--crash-every: must be at least 100ms").into());
    }
    let env = Env::system();
    let worker = env.uuid().to_string();
    for kills in 0_u32.. {
        let mut child = start(dev, &worker, store, format)?;
        // A random life of 50% to 150% of the time. It grows after many kills, so that the demonstration ends.
        let life = every.mul_f64(0.5 + (env.random() % 1000) as f64 / 1000.0).mul_f64(1.0 + f64::from(kills / 200));
        if let Some(status) = ended_within(&mut child, life, &env).await? {
            return ended(status);
        }
        child.kill().context("cannot kill the demonstration")?;
        // The process may have ended by itself in that moment.
        let status = child.wait()?;
        if status.code().is_some() {
            return ended(status);
        }
        if format == Format::Table {
            println!("\nKilled process {} after {:.1} s.\n", child.id(), life.as_secs_f64());
        }
    }
    Ok(())
}

fn start(dev: &Dev, worker: &str, store: &StoreArgument, format: Format) -> Result<Child> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let format = format.to_possible_value().map(|value| value.get_name().to_string()).unwrap_or_default();
    let mut command = Command::new(program);
    command.args(["dev", "--worker", worker, "--output", &format]).args(store.arguments());
    command.args(["--transfers", &dev.transfers.to_string(), "--accounts", &dev.accounts.to_string()]);
    if let Some(invoices) = dev.invoices {
        command.args(["--invoices", &invoices.to_string()]);
    }
    if dev.fresh {
        command.arg("--fresh");
    }
    // The child's standard input closes when this process ends, and then the child ends, too.
    command.stdin(Stdio::piped()).spawn().context("cannot start the demonstration")
}

async fn ended_within(child: &mut Child, life: Duration, env: &Env) -> Result<Option<ExitStatus>> {
    let end = env.monotonic() + life;
    while env.monotonic() < end {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        env.sleep(LOOK).await;
    }
    Ok(None)
}

/// Ends with the child's exit code. The child has printed the result.
fn ended(status: ExitStatus) -> Result<()> {
    match status.code() {
        Some(0) => Ok(()),
        Some(code) => std::process::exit(code),
        None => Err(Problem::new(Exit::Failed, format!("the demonstration was killed from outside: {status}")).into()),
    }
}

/// Ends this process when its parent ends.
pub(crate) fn end_with_parent() {
    std::thread::spawn(|| {
        let mut rest = Vec::new();
        let _ = std::io::stdin().read_to_end(&mut rest);
        std::process::exit(Exit::Failed as i32);
    });
}
