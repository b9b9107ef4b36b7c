//! What `release`, `retry` and `complete` share. They read the claim, ask for confirmation at a terminal, and make the
//! change through an engine that runs nothing.

use anyhow::Result;
use clap::Args;
use latchwork::claim::{ClaimError, ClaimOperator, StoredClaims};
use latchwork::store::{Env, Timestamp};
use serde::{Deserialize, Serialize};

use crate::ask::confirm;
use crate::claim::fields::ClaimFields;
use crate::claim::show::Shown;
use crate::client::{Client, encoded};
use crate::output::Output;
use crate::store::StoreArgument;

#[derive(Args)]
pub(crate) struct Change {
    /// The entity's id.
    pub(crate) entity: String,
    /// The reason, which stays in the entity's history.
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) reason: String,
    /// The name of the operator, for the history.
    #[arg(long, value_name = "NAME", default_value = "operator")]
    pub(crate) actor: String,
    /// Does not ask for confirmation.
    #[arg(long)]
    yes: bool,
}

/// What an operator does to a claim.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Verb {
    /// The beginning of the question for confirmation.
    pub(crate) question: &'static str,
    /// The last part of the path of the route.
    pub(crate) path: &'static str,
}

/// What a server is asked to change.
#[derive(Serialize)]
struct AskedChange<'a> {
    reason: &'a str,
    actor: &'a str,
}

/// The change, as it is printed.
#[derive(Serialize, Deserialize)]
struct Changed {
    entity: String,
    /// The claim before the change. A server does not know it if it has made the change before.
    claim: Option<ClaimFields>,
    /// The entity's status now.
    status: String,
    reason: String,
    actor: String,
}

impl Change {
    /// Returns the claim as it is now. Asks for confirmation at a terminal, unless `--yes` is given.
    pub(crate) async fn look(&self, store: &StoreArgument, verb: Verb) -> Result<(ClaimFields, Timestamp)> {
        let store = store.look().await?;
        let now = store.env().now();
        let found = match StoredClaims::on(&store).await {
            Ok(claims) => claims.get(self.entity.as_str()).await,
            Err(error) => Err(error),
        };
        store.close().await?;
        let missing = || ClaimError::NotClaimed { id: self.entity.as_str().into() };
        let claim = ClaimFields::of(found?.ok_or_else(missing)?);
        self.confirm(verb, &claim, now)?;
        Ok((claim, now))
    }

    /// Makes the change through a server, and prints it.
    pub(crate) async fn ask(
        self,
        verb: Verb,
        client: &Client,
        lines: impl FnOnce(&ClaimFields, Timestamp) -> Vec<String>,
        output: &mut Output<'_>,
    ) -> Result<()> {
        let (path, now) = (format!("/claims/{}", encoded(&self.entity)), Env::system().now());
        if !self.yes {
            let missing = || ClaimError::NotClaimed { id: self.entity.as_str().into() };
            let shown: Shown = client.get(&path, &[("events", "0".into())]).await?;
            self.confirm(verb, &shown.claim.ok_or_else(missing)?, now)?;
        }
        let asked = AskedChange { reason: &self.reason, actor: &self.actor };
        let changed: Changed = client.post(&format!("{path}/{}", verb.path), &[], &asked).await?;
        let lines = match &changed.claim {
            Some(claim) => lines(claim, now),
            None => vec![format!("Entity {:?} is at {:?}.", changed.entity, changed.status)],
        };
        output.one(&changed, |text| lines.iter().for_each(|line| text.line(line)))
    }

    fn confirm(&self, verb: Verb, claim: &ClaimFields, now: Timestamp) -> Result<()> {
        confirm(&format!("{} {}?", verb.question, claim.words(now)), self.yes, "nothing was changed")
    }

    /// Prints the change.
    pub(crate) fn tell(
        self,
        claim: ClaimFields,
        status: String,
        lines: &[String],
        output: &mut Output<'_>,
    ) -> Result<()> {
        let Change { entity, reason, actor, .. } = self;
        let changed = Changed { entity, claim: Some(claim), status, reason, actor };
        output.one(&changed, |text| lines.iter().for_each(|line| text.line(line)))
    }
}

/// Makes a change through an engine that runs nothing, and closes the data directory. It does not create a directory
/// that does not exist.
pub(crate) async fn operate<T>(
    store: &StoreArgument,
    does: impl AsyncFnOnce(&ClaimOperator) -> latchwork::claim::Result<T>,
) -> Result<T> {
    let engine = store.operate().await?;
    let done = match ClaimOperator::on(&engine).await {
        Ok(operator) => does(&operator).await,
        Err(error) => Err(error),
    };
    engine.stop();
    engine.store().close().await?;
    Ok(done?)
}
