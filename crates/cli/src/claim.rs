//! `latch claim`: looks at configurations of claim workflows, and at the claims in a store, or through the server that
//! has it open. Operators end claims there. It runs no action: the next program that has the action runs it.

mod change;
mod complete;
mod dead;
mod diagram;
mod fields;
mod fire;
mod list;
mod release;
mod retry;
mod show;
mod validate;

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Subcommand;
use latchwork::claim::{self, Checked, StoredClaims};
use latchwork::store::{Env, Store};

use crate::api::{self, Need};
use crate::client::Client;
use crate::output::Output;
use crate::target::{Looked, Target};

#[derive(Subcommand)]
pub(crate) enum Claim {
    /// Reports everything that is wrong with configurations.
    Validate(validate::Validate),
    /// Prints the statuses and steps of a claim workflow as a Mermaid diagram, with claiming statuses dashed.
    Diagram(diagram::Diagram),
    /// Prints the JSON schema of configurations, for editors.
    Schema,
    /// Lists open claims by their entities.
    List(list::List),
    /// Shows the claim on an entity, its holder, and what claim workflows have done to the entity.
    Show(show::Show),
    /// Ends the claim on an entity, which goes back to the status that it came from.
    Release(change::Change),
    /// Makes the next program that has the action run it again, for a claim that needs review.
    Retry(change::Change),
    /// Makes the transition of a claim that needs review, without running its action. Use it if the action took effect.
    Complete(change::Change),
    /// Fires a step for an entity: claims the entity, runs the action, and makes the transition.
    Fire(Box<fire::Fire>),
    /// Tells which steps can be fired for an entity, and why the others cannot.
    Permitted(fire::Permitted),
    /// Lists after-effects that are not delivered yet.
    Outbox(fire::Outbox),
    /// Lists after-effects that could not be delivered, and delivers them again.
    Dead {
        #[command(subcommand)]
        command: dead::Dead,
    },
}

pub(crate) async fn run(command: Claim, target: &Target, output: &mut Output<'_>) -> Result<()> {
    let command = match command {
        Claim::Validate(validate) => return validate::run(&validate, output),
        Claim::Diagram(diagram) => return diagram::run(&diagram, output),
        Claim::Schema => {
            let schema = claim::json_schema();
            return output.one(&schema, |text| format!("{schema:#}").lines().for_each(|line| text.line(line)));
        }
        Claim::Fire(fire) => {
            return api::with(target, Need::Change, async |client| fire::fire(*fire, client, output).await).await;
        }
        Claim::Permitted(asked) => {
            return api::with(target, Need::Look, async |client| fire::permitted(asked, client, output).await).await;
        }
        Claim::Outbox(outbox) => {
            return api::with(target, Need::Look, async |client| fire::outbox(outbox, client, output).await).await;
        }
        command => command,
    };
    let store = match target.look().await? {
        Looked::Server(client) => return ask(command, &client, output).await,
        Looked::Store(store) => store,
    };
    let looked = look(&command, &store, output).await;
    store.close().await?;
    looked?;
    let store = target.store("claim")?;
    match command {
        Claim::Release(change) => release::run(change, store, output).await,
        Claim::Retry(change) => retry::run(change, store, output).await,
        Claim::Complete(change) => complete::run(change, store, output).await,
        Claim::Dead { command: dead::Dead::Retry(retry) } => dead::retry(retry, store, output).await,
        _ => Ok(()),
    }
}

/// The commands that change nothing.
async fn look(command: &Claim, store: &Store, output: &mut Output<'_>) -> Result<()> {
    let now = store.env().now();
    match command {
        Claim::List(list) => list::run(list, &StoredClaims::on(store).await?, now, output).await,
        Claim::Show(show) => show::run(show, &StoredClaims::on(store).await?, now, output).await,
        Claim::Dead { command: dead::Dead::List(list) } => {
            dead::list(list, &StoredClaims::on(store).await?, now, output).await
        }
        _ => Ok(()),
    }
}

/// The same through a server.
async fn ask(command: Claim, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let now = Env::system().now();
    match command {
        Claim::List(list) => list::ask(&list, client, now, output).await,
        Claim::Show(show) => show::ask(&show, client, now, output).await,
        Claim::Release(change) => change.ask(release::VERB, client, release::lines, output).await,
        Claim::Retry(change) => change.ask(retry::VERB, client, retry::lines, output).await,
        Claim::Complete(change) => change.ask(complete::VERB, client, complete::lines, output).await,
        Claim::Dead { command: dead::Dead::List(list) } => dead::ask(&list, client, now, output).await,
        Claim::Dead { command: dead::Dead::Retry(retry) } => dead::ask_retry(&retry, client, output).await,
        _ => Ok(()),
    }
}

fn read(file: &PathBuf) -> Result<Checked> {
    let text = std::fs::read_to_string(file).with_context(|| format!("{} cannot be read", file.display()))?;
    Ok(claim::check_json(&text))
}
