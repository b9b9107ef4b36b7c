//! What `release`, `retry` and `complete` share. They read the claim, ask for confirmation at a terminal, and make the
//! change through an engine that runs nothing.

use std::io::{BufRead, IsTerminal, Write};

use anyhow::Result;
use clap::Args;
use latchwork::claim::{ClaimError, ClaimOperator, StoredClaims};
use latchwork::store::Timestamp;
use serde::Serialize;

use crate::claim::fields::ClaimFields;
use crate::output::{Exit, Output, Problem, plain};
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

/// The change, as it is printed.
#[derive(Serialize)]
struct Changed {
    entity: String,
    /// The claim before the change.
    claim: ClaimFields,
    /// The entity's status now.
    status: String,
    reason: String,
    actor: String,
}

impl Change {
    /// Returns the claim as it is now. Asks for confirmation at a terminal, unless `--yes` is given.
    pub(crate) async fn look(&self, store: &StoreArgument, verb: &str) -> Result<(ClaimFields, Timestamp)> {
        let store = store.look().await?;
        let now = store.env().now();
        let found = match StoredClaims::on(&store).await {
            Ok(claims) => claims.get(self.entity.as_str()).await,
            Err(error) => Err(error),
        };
        store.close().await?;
        let missing = || ClaimError::NotClaimed { id: self.entity.as_str().into() };
        let claim = ClaimFields::of(found?.ok_or_else(missing)?);
        if self.yes {
            return Ok((claim, now));
        }
        if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
            return Err(Problem::new(Exit::Usage, "no terminal to ask for confirmation: use --yes").into());
        }
        let mut err = std::io::stderr();
        write!(err, "{}", plain(&format!("{verb} {}? [y/N] ", claim.words(now))))?;
        err.flush()?;
        let mut answer = String::new();
        std::io::stdin().lock().read_line(&mut answer)?;
        match answer.trim().to_ascii_lowercase().as_str() {
            "y" | "yes" => Ok((claim, now)),
            _ => Err(Problem::new(Exit::Failed, "nothing was changed").into()),
        }
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
        let changed = Changed { entity, claim, status, reason, actor };
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
