//! `latch state`: the state of requests, sessions, users and organisations, and slots. All of them are containers with
//! the same verbs; a place names one of them.

mod change;
mod read;

use anyhow::Result;
use clap::{Args, Subcommand};

use crate::api::{self, Need};
use crate::client::{Client, encoded};
use crate::output::{Exit, Output, Problem};
use crate::target::Target;

#[derive(Subcommand)]
pub(crate) enum State {
    /// Shows a state.
    Get(read::Get),
    /// Tells of each change of a state, until it is ended.
    Watch(read::Watch),
    /// Replaces a state; with --new, creates it.
    Put(change::Put),
    /// Merges an object into a state: null removes. A missing state is created.
    Patch(change::Patch),
    /// Adds to a number in a state. A missing number counts as zero.
    Increment(change::Increment),
    /// Adds to the end of a list in a state.
    Push(change::Push),
    /// Sets an entry of a record in a state.
    SetRecord(change::SetRecord),
    /// Removes an entry of a record in a state.
    DeleteRecord(change::DeleteRecord),
    /// Removes a state.
    Remove(change::Remove),
}

/// Which state is meant.
#[derive(Args)]
struct Place {
    /// The place: request/ID, session/ID, user/ID, org/ID or slot/NAME.
    #[arg(value_name = "PLACE", value_parser = place)]
    place: (String, String),
    /// The slot is shared by the executions of this workflow.
    #[arg(long, value_name = "WORKFLOW", conflicts_with_all = ["execution", "tree"])]
    workflow: Option<String>,
    /// The slot belongs to this execution.
    #[arg(long, value_name = "ID", conflicts_with = "tree")]
    execution: Option<String>,
    /// The slot is shared by this execution and all its descendants.
    #[arg(long, value_name = "ID")]
    tree: Option<String>,
}

fn place(text: &str) -> Result<(String, String), String> {
    match text.split_once('/') {
        Some((kind @ ("request" | "session" | "user" | "org" | "slot"), id)) if !id.is_empty() => {
            Ok((kind.into(), id.into()))
        }
        _ => Err("write request/ID, session/ID, user/ID, org/ID or slot/NAME".into()),
    }
}

impl Place {
    fn path(&self) -> String {
        let (kind, id) = &self.place;
        match kind.as_str() {
            "slot" => format!("/slots/{}", encoded(id)),
            kind => format!("/state/{kind}/{}", encoded(id)),
        }
    }

    /// The API has no routes for the records of a slot.
    fn has_records(&self) -> Result<()> {
        match self.place.0.as_str() {
            "slot" => Err(Problem::new(Exit::Usage, "a slot has no records here: use latch state patch").into()),
            _ => Ok(()),
        }
    }

    /// The scope of a slot, as parameters of a query.
    fn query(&self) -> Result<Vec<(&'static str, String)>, Problem> {
        let scopes = [("workflow", &self.workflow), ("execution", &self.execution), ("tree", &self.tree)];
        let query: Vec<_> = scopes.into_iter().filter_map(|(name, value)| Some((name, value.clone()?))).collect();
        match self.place.0 == "slot" || query.is_empty() {
            true => Ok(query),
            false => Err(Problem::new(Exit::Usage, "--workflow, --execution and --tree are for slots")),
        }
    }
}

/// For people.
impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.place.0, self.place.1)
    }
}

pub(crate) async fn run(command: State, target: &Target, output: &mut Output<'_>) -> Result<()> {
    let need = match command {
        State::Get(_) => Need::Look,
        State::Watch(_) => Need::Follow,
        _ => Need::Change,
    };
    api::with(target, need, async |client| call(command, client, output).await).await
}

async fn call(command: State, client: &Client, output: &mut Output<'_>) -> Result<()> {
    match command {
        State::Get(get) => read::get(get, client, output).await,
        State::Watch(watch) => read::watch(watch, client, output).await,
        State::Put(put) => change::put(put, client, output).await,
        State::Patch(patch) => change::patch(patch, client, output).await,
        State::Increment(increment) => change::increment(increment, client, output).await,
        State::Push(push) => change::push(push, client, output).await,
        State::SetRecord(set) => change::set_record(set, client, output).await,
        State::DeleteRecord(delete) => change::delete_record(delete, client, output).await,
        State::Remove(remove) => change::remove(remove, client, output).await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_kind_and_an_id() {
        for (text, kind, id) in [("user/42", "user", "42"), ("slot/a/b", "slot", "a/b"), ("org/é", "org", "é")] {
            assert_eq!(place(text), Ok((kind.into(), id.into())));
        }
        for wrong in ["", "user", "user/", "room/1", "/1"] {
            assert!(place(wrong).is_err(), "{wrong}");
        }
    }
}
