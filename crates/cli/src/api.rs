//! The API of a target: that of a server, or that of the server crate on a store that the command opens itself. So the
//! commands built on it know routes alone, and a store and a server answer alike.

use anyhow::Result;
use latchwork::Value;
use latchwork::entity::EntityError;
use latchwork::lock::LockError;
use latchwork::state::StateError;
use latchwork::store::StoreError;
use latchwork::workflow::{Engine, WorkflowError};
use latchwork_server::Api;

use crate::client::Client;
use crate::output::{Exit, Problem};
use crate::store::StoreArgument;
use crate::target::{Target, live};

/// What a command does with a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// It looks at one state of the store.
    Look,
    /// It looks at what others do meanwhile. A directory that the command opens is changed by no other process.
    Follow,
    /// It changes something.
    Change,
}

/// Opens the API of a target, does something with it, and closes it again.
pub(crate) async fn with<T>(target: &Target, need: Need, does: impl AsyncFnOnce(&Client) -> Result<T>) -> Result<T> {
    let argument = match target {
        Target::Server(client) => return does(client).await,
        Target::Store { argument, .. } => argument,
    };
    let engine = match open(argument, need).await {
        Ok(engine) => engine,
        Err(error) => match live(argument, &error).await {
            Some(client) => return does(&client).await,
            None => return Err(error),
        },
    };
    let client = Client::here(Api::on(&engine).router(), argument.directory().is_some());
    let done = does(&client).await;
    drop(client);
    engine.stop();
    let closed = engine.store().close().await;
    let done = done?;
    closed?;
    Ok(done)
}

/// Explains on a store why a workflow, a flow or an action is not found there: they are in the programs that register
/// them.
pub(crate) fn explained(error: anyhow::Error, client: &Client) -> anyhow::Error {
    // What is registered, and known by name, is told with the problem.
    let is_code = |problem: &Problem| {
        let code = problem.fields.get("problem").and_then(Value::as_str);
        problem.exit == Exit::NotFound
            && (code == Some("workflow-not-registered") || problem.fields.contains_key("known"))
    };
    match error.downcast::<Problem>() {
        Ok(mut problem) if client.is_here() && is_code(&problem) => {
            problem.message += "; this program registers no code: ask one that does, with --server, or with --store \
                                on a directory in which it serves its socket";
            problem.into()
        }
        Ok(problem) => problem.into(),
        Err(error) => error,
    }
}

/// An engine that runs nothing. To look at a store, it changes nothing there, either; but a store without the spaces of
/// an engine gets them.
async fn open(argument: &StoreArgument, need: Need) -> Result<Engine> {
    let is_read_only = match need {
        Need::Look => true,
        Need::Follow => argument.directory().is_some(),
        Need::Change => false,
    };
    if !is_read_only {
        return argument.operate().await;
    }
    let store = argument.look().await?;
    match Engine::on(&store).idle().start().await {
        Ok(engine) => Ok(engine),
        Err(error) => {
            store.close().await?;
            match is_without_spaces(&error) {
                true => argument.operate().await,
                false => Err(error.into()),
            }
        }
    }
}

/// True if an engine could not declare what it needs, because it must not write.
fn is_without_spaces(error: &WorkflowError) -> bool {
    let below = match error {
        WorkflowError::Store(error)
        | WorkflowError::Lock(LockError::Store(error))
        | WorkflowError::State(StateError::Store(error))
        | WorkflowError::Entity(EntityError::Store(error)) => error,
        _ => return false,
    };
    matches!(below, StoreError::ReadOnly)
}
