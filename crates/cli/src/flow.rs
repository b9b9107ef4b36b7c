//! `latch flow`: requests to the actions of flows, and the questions that they ask. Flows are in the programs that
//! register them, so most of it needs one that serves its API.

mod question;
mod request;

use anyhow::Result;
use clap::Subcommand;

use crate::api::{self, Need};
use crate::client::Client;
use crate::output::Output;
use crate::target::Target;

#[derive(Subcommand)]
pub(crate) enum Flow {
    /// Lists the flows that the program has registered, with their actions.
    List,
    /// Makes a request to an action.
    Run(Box<request::Run>),
    /// Shows a request.
    Show(request::One),
    /// Shows how a request has ended, and waits for its end.
    Result(request::GetResult),
    /// Shows the latest states of the blocks of a request.
    Checkpoints(request::One),
    /// Lists the open questions of a request, or of all requests to an action.
    Questions(question::Questions),
    /// Shows a question, open or not.
    Question(question::One),
    /// Answers an open question, once.
    Answer(question::Answer),
}

pub(crate) async fn run(command: Flow, target: &Target, output: &mut Output<'_>) -> Result<()> {
    let need = match command {
        Flow::Run(_) | Flow::Answer(_) => Need::Change,
        Flow::Result(_) => Need::Follow,
        _ => Need::Look,
    };
    api::with(target, need, async |client| {
        let done = call(command, client, output).await;
        done.map_err(|error| api::explained(error, client))
    })
    .await
}

async fn call(command: Flow, client: &Client, output: &mut Output<'_>) -> Result<()> {
    match command {
        Flow::List => request::list(client, output).await,
        Flow::Run(run) => request::run(*run, client, output).await,
        Flow::Show(one) => request::show(one, client, output).await,
        Flow::Result(asked) => request::result(asked, client, output).await,
        Flow::Checkpoints(one) => request::checkpoints(one, client, output).await,
        Flow::Questions(questions) => question::list(questions, client, output).await,
        Flow::Question(one) => question::show(one, client, output).await,
        Flow::Answer(answer) => question::answer(answer, client, output).await,
    }
}
