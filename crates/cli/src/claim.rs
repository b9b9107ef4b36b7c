//! `latch claim`: looks at configurations of claim workflows, and at the claims in a data directory that no process has
//! open. Operators end claims there. It runs no action: the next program that has the action runs it.

mod change;
mod complete;
mod dead;
mod diagram;
mod fields;
mod list;
mod release;
mod retry;
mod show;
mod validate;

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Subcommand;
use latchwork::claim::{self, Checked, StoredClaims};

use crate::output::Output;
use crate::store::StoreArgument;

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
    /// Lists after-effects that could not be delivered, and delivers them again.
    Dead {
        #[command(subcommand)]
        command: dead::Dead,
    },
}

pub(crate) async fn run(command: Claim, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    match command {
        Claim::Validate(validate) => validate::run(&validate, output),
        Claim::Diagram(diagram) => diagram::run(&diagram, output),
        Claim::Schema => {
            let schema = claim::json_schema();
            output.one(&schema, |text| format!("{schema:#}").lines().for_each(|line| text.line(line)))
        }
        Claim::Release(change) => release::run(change, store, output).await,
        Claim::Retry(change) => retry::run(change, store, output).await,
        Claim::Complete(change) => complete::run(change, store, output).await,
        Claim::Dead { command: dead::Dead::Retry(retry) } => dead::retry(retry, store, output).await,
        looks => look(looks, store, output).await,
    }
}

/// The commands that change nothing.
async fn look(command: Claim, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let store = store.look().await?;
    let claims = StoredClaims::on(&store).await?;
    let now = store.env().now();
    let done = match command {
        Claim::List(list) => list::run(list, &claims, now, output).await,
        Claim::Show(show) => show::run(show, &claims, now, output).await,
        Claim::Dead { command: dead::Dead::List(list) } => dead::list(list, &claims, now, output).await,
        _ => Ok(()),
    };
    store.close().await?;
    done
}

fn read(file: &PathBuf) -> Result<Checked> {
    let text = std::fs::read_to_string(file).with_context(|| format!("{} cannot be read", file.display()))?;
    Ok(claim::check_json(&text))
}
