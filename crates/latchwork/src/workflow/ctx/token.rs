//! Tokens: code outside of the workflow completes what an execution waits for, once.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::lane::Part;
use crate::record::Record;
use crate::store::{Check, Uuid, Write};
use crate::workflow::ctx::Ctx;
use crate::workflow::ctx::signal::written;
use crate::workflow::engine::post::Along;
use crate::workflow::engine::{Engine, EngineInner};
use crate::workflow::journal::replay::OpCall;
use crate::workflow::stored::kept::{MessageBody, Token};
use crate::workflow::stored::record::{Kind, WaitsFor, failure_text, fetch};
use crate::workflow::{ExecutionId, Failure, Result, WorkflowError};

/// A wait that code outside of the workflow completes.
pub struct Completion<T> {
    ctx: Ctx,
    name: String,
    token: Uuid,
    value: PhantomData<fn() -> T>,
}

impl Ctx {
    /// Creates a token that code outside of the workflow completes: pass [`Completion::token`] on in a step, then wait.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn mail(text: &str) -> std::io::Result<()> { Ok(()) }
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let verdict = ctx.completion::<bool>("verdict").await;
    /// let token = verdict.token();
    /// ctx.run("ask", async || Ok(mail(&token).await?)).await?;
    /// let is_accepted = verdict.wait().await?;
    /// # Ok(()) }
    /// ```
    pub async fn completion<T: DeserializeOwned>(&self, name: &str) -> Completion<T> {
        let text = self.value_with(Kind::Token, name, |run| {
            let token = run.env().uuid();
            let record = Token { name: name.into(), is_used: false };
            let part = Part::default().put(&run.kept().token(token), record.encode());
            (token.to_string(), Some(part.into()))
        });
        let text: String = text.await;
        let token = match text.parse() {
            Ok(token) => token,
            Err(_) => self.run.park(format!("token {text:?} of {name:?} cannot be read")).await,
        };
        Completion { ctx: self.clone(), name: name.into(), token, value: PhantomData }
    }
}

impl<T: DeserializeOwned> Completion<T> {
    /// The token to pass on. Any program that has it can complete this wait, once.
    ///
    /// ```
    /// # use latchwork::workflow::{Completion, Failure};
    /// # async fn example(verdict: Completion<bool>) -> Result<(), Failure> {
    /// println!("answer with {}", verdict.token());
    /// # Ok(()) }
    /// ```
    pub fn token(&self) -> String {
        format!("{}/{}", self.token, self.ctx.run.id)
    }

    /// Waits until the token is completed, or fails.
    ///
    /// ```
    /// # use latchwork::workflow::{Completion, Failure};
    /// # async fn example(verdict: Completion<bool>) -> Result<(), Failure> {
    /// let is_accepted = verdict.wait().await?;
    /// # Ok(()) }
    /// ```
    pub async fn wait(&self) -> Result<T, Failure> {
        self.receive(None).await?.ok_or_else(Failure::time)
    }

    /// Like [`Completion::wait`], with a time limit. Returns `None` when the time is up.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Completion, Failure};
    /// # async fn example(verdict: Completion<bool>) -> Result<(), Failure> {
    /// let is_accepted = verdict.wait_within(Duration::from_secs(3600)).await?.unwrap_or(false);
    /// # Ok(()) }
    /// ```
    pub async fn wait_within(&self, timeout: Duration) -> Result<Option<T>, Failure> {
        self.receive(Some(timeout)).await
    }

    async fn receive(&self, timeout: Option<Duration>) -> Result<Option<T>, Failure> {
        let its = self.token.as_u128();
        let call = OpCall::timed(Kind::Completion, &self.name, timeout);
        let is_it = |body: &MessageBody| matches!(body, MessageBody::Completed { token, .. } if *token == its);
        let what = WaitsFor::Completion(self.name.clone());
        let received = self.ctx.await_text(call, what, timeout, is_it).await?;
        received.map(|text| Failure::read(format!("the value that completed {:?}", self.name), &text)).transpose()
    }
}

impl Engine {
    /// Completes what an execution waits for under a token. This is possible once.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine, token: &str) -> Result<()> {
    /// engine.complete(token, &true).await?;
    /// # Ok(()) }
    /// ```
    pub async fn complete(&self, token: &str, value: &(impl Serialize + ?Sized)) -> Result<()> {
        let text = written(&self.inner, "the value that completes a token", value)?;
        complete(&self.inner, token, Ok(text)).await
    }

    /// Makes the wait for a token fail. This is possible once, in place of completing it.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine, token: &str) -> Result<()> {
    /// engine.fail(token, "the reviewer is ill").await?;
    /// # Ok(()) }
    /// ```
    pub async fn fail(&self, token: &str, failure: impl Into<Failure>) -> Result<()> {
        complete(&self.inner, token, Err(failure_text(&failure.into()))).await
    }
}

async fn complete(engine: &Arc<EngineInner>, text: &str, result: Result<String, String>) -> Result<()> {
    let unknown = || WorkflowError::UnknownToken { token: text.into() };
    let (token, id) = text.split_once('/').ok_or_else(unknown)?;
    let (token, id): (Uuid, ExecutionId) = (token.parse().map_err(|_| unknown())?, id.into());
    let key = engine.kept(&id).token(token);
    loop {
        let found = fetch::<Token>(&engine.store.view().await?, &key, || format!("token {text:?}")).await?;
        let (record, item) = found.ok_or_else(unknown)?;
        if record.is_used {
            return Err(WorkflowError::TokenUsed { token: text.into() });
        }
        let used = Token { is_used: true, ..record };
        let body = MessageBody::Completed { token: token.as_u128(), result: result.clone() };
        let (check, write) = (Check::AtRev(key.clone(), item.rev), Write::Put(key.clone(), used.encode()));
        if engine.deliver(&id, body, Along::with((vec![check], vec![write]))).await? {
            return Ok(());
        }
    }
}
