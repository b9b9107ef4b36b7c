//! Tokens: somebody outside completes what an execution waits for, once.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::lane::Part;
use crate::record::Record;
use crate::store::{Check, Timestamp, Uuid, Write};
use crate::workflow::ctx::{Call, Ctx, hash};
use crate::workflow::engine::{Engine, Inner};
use crate::workflow::kept::{Letter, Message, Token};
use crate::workflow::record::{EntryState, Kind, WaitsFor, failure_text};
use crate::workflow::signal::written;
use crate::workflow::{ExecutionId, Failure, Result, WorkflowError};

/// Something that somebody outside is to complete.
pub struct Completion<T> {
    ctx: Ctx,
    name: String,
    token: Uuid,
    value: PhantomData<fn() -> T>,
}

impl Ctx {
    /// Something that is to be completed from outside, by whoever has the token: give [`Completion::token`] away in a
    /// step, then wait.
    pub async fn completion<T: DeserializeOwned>(&self, name: &str) -> Completion<T> {
        let token = self.operation(WaitsFor::Store, |_| async move {
            let run = &self.run;
            let call = Call { kind: Kind::Token, name, argument: 0 };
            let (place, found) = self.take(&call).await;
            if let Some(EntryState::Done(text)) = found.map(|found| found.state) {
                return self.recorded(&call, &place, &text).await;
            }
            let token = run.env().uuid();
            let record = Token { name: name.into(), is_used: false };
            let part = Part::default().put(&run.kept().token(token), record.encode());
            let entry = call.entry(run.env().now(), EntryState::Done(format!("\"{token}\"")));
            run.put_with(&place, entry, Some(part.into()));
            token.to_string()
        });
        let text: String = token.await;
        let token = match text.parse() {
            Ok(token) => token,
            Err(_) => self.run.park(format!("token {text:?} of {name:?} cannot be read")).await,
        };
        Completion { ctx: self.clone(), name: name.into(), token, value: PhantomData }
    }
}

impl<T: DeserializeOwned> Completion<T> {
    /// What to give away: whoever has it can complete this, once.
    pub fn token(&self) -> String {
        format!("{}/{}", self.token, self.ctx.run.id)
    }

    /// Waits until it is completed, or has failed.
    pub async fn wait(&self) -> std::result::Result<T, Failure> {
        self.receive(None).await?.ok_or_else(Failure::time)
    }

    /// The same, for so long at the most: then there is nothing.
    pub async fn wait_at_most(&self, timeout: Duration) -> std::result::Result<Option<T>, Failure> {
        self.receive(Some(timeout)).await
    }

    async fn receive(&self, timeout: Option<Duration>) -> std::result::Result<Option<T>, Failure> {
        let argument = timeout.map_or(0, |timeout| hash(&(timeout.as_micros() as u64)));
        let call = Call { kind: Kind::Completion, name: &self.name, argument };
        let its = self.token.as_u128();
        let is_it = |message: &Message| matches!(&message.body, Letter::Completed { token, .. } if *token == its);
        let read = |letter: &Letter| match letter {
            Letter::Completed { result, .. } => result.clone(),
            _ => Ok("null".into()),
        };
        let what = WaitsFor::Completion(self.name.clone());
        let until = |now: Timestamp| timeout.map(|timeout| now.plus(timeout));
        let (.., received) = self.ctx.await_message(call, what, until, is_it, read).await;
        let Some(text) = received? else { return Ok(None) };
        let wrong = |error| Failure::misfit(format!("what completed {:?}", self.name), &error);
        serde_json::from_str(&text).map(Some).map_err(wrong)
    }
}

impl Engine {
    /// Completes what an execution waits for under a token. That can be done once.
    pub async fn complete(&self, token: &str, value: &impl Serialize) -> Result<()> {
        let text = written(&self.inner, "what completes something", value)?;
        complete(&self.inner, token, Ok(text)).await
    }

    /// Has what an execution waits for under a token fail. That can be done once, in place of completing it.
    pub async fn fail(&self, token: &str, failure: impl Into<Failure>) -> Result<()> {
        complete(&self.inner, token, Err(failure_text(&failure.into()))).await
    }
}

async fn complete(engine: &Arc<Inner>, text: &str, result: std::result::Result<String, String>) -> Result<()> {
    let unknown = || WorkflowError::UnknownToken { token: text.into() };
    let (token, id) = text.split_once('/').ok_or_else(unknown)?;
    let (token, id): (Uuid, ExecutionId) = (token.parse().map_err(|_| unknown())?, id.into());
    let key = engine.kept(&id).token(token);
    loop {
        let item = engine.store.view().await?.get(&key).await?.ok_or_else(unknown)?;
        let record = Token::decode(&item.value).map_err(|why| why.at(format!("token {text:?}")))?;
        if record.is_used {
            return Err(WorkflowError::TokenUsed { token: text.into() });
        }
        let used = Token { is_used: true, ..record };
        let letter = Letter::Completed { token: token.as_u128(), result: result.clone() };
        let (check, write) = (Check::AtRev(key.clone(), item.rev), Write::Put(key.clone(), used.encode()));
        if engine.deliver(&id, letter, Some((vec![check], write))).await? {
            return Ok(());
        }
    }
}
