//! Claims: configured state machines of entities. The action of a claimed step runs for one caller at a time. This file
//! declares the modules, and checks configurations without an engine.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use latchwork::claim::{ActionCtx, ClaimStep, ClaimWorkflow, Claims, Outcome};
//! use latchwork::entity::Add;
//! use latchwork::json;
//! use latchwork::store::Store;
//! use latchwork::workflow::Engine;
//!
//! // An invoice goes from `sent` to `paid`. While the action runs, it is at `paying`.
//! let invoice = ClaimWorkflow::new("invoice", "billing", "invoice")
//!     .statuses(["sent", "paying", "paid"])
//!     .step(ClaimStep::new(10, "pay", "sent", "paid").claimed("paying").action("Pay"));
//! let engine = Engine::on(&Store::memory().await?).start().await?;
//! let claims = Claims::on(&engine)
//!     .workflow(invoice)
//!     .action("Pay", async |ctx: ActionCtx| {
//!         // Committed together with the status `paid`, or not at all.
//!         ctx.merge_data(json!({"amount": ctx.input()["amount"]}));
//!         Outcome::done()
//!     })
//!     .start()
//!     .await?;
//!
//! claims.add("invoice", Add::new("invoice").id("i-1").data(json!({"status": "sent"}))).await?;
//! let fired = claims.fire("invoice", "pay", "i-1").input(json!({"amount": 7})).await?;
//! assert_eq!(fired.done().unwrap().to, "paid");
//! assert_eq!(engine.entities().get("i-1").await?.unwrap().data["amount"], 7);
//! // However many callers ask, the action runs for one of them.
//! assert!(claims.fire("invoice", "pay", "i-1").await?.is_refused());
//! # Ok(()) }
//! ```

mod action;
mod claims;
mod config;
mod diagram;
mod durable;
mod error;
mod finding;
mod finish;
mod fire;
mod hold;
#[cfg(feature = "postgres")]
mod inspect;
mod janitor;
mod ledger;
mod lists;
mod machine;
mod operate;
mod outbox;
mod outcome;
mod read;
#[cfg_attr(not(feature = "postgres"), path = "no_rows.rs")]
mod rows;
mod stored;
mod table;
mod timers;
mod validate;

pub use action::{ActionCtx, ClaimLost, ClaimToken};
pub use claims::{Claims, ClaimsBuilder, DeclaredClaim};
pub use config::{
    ActionFacts, ClaimMeta, ClaimState, ClaimStep, ClaimWorkflow, Each, Janitor, Recovery, StepGuard, Timer,
};
pub use durable::{DurableAction, DurableCall, DurableFired, durable_action};
pub use error::{ActionError, ClaimError, Result, Uncovered};
pub use finding::{Finding, Position, Rule};
pub use fire::Fire;
pub use janitor::{Abandoned, Swept};
pub use lists::{ClaimList, DeadLetters, Strays, Transitions, Undelivered};
pub use operate::{ClaimOperator, OpenClaim, Permitted, StoredClaims, Transition, TransitionKind};
pub use outbox::{AfterEffect, DeadLetter};
pub use outcome::{
    ActionFailure, ClaimFailed, ClaimHolder, Conflict, Fired, IntoDelivery, IntoOutcome, Lost, NotPermitted, Outcome,
    Reason, Rejection, Transitioned,
};

pub use table::UserTable;

use finding::Findings;
use validate::Registered;

/// The claim workflows of a configuration, and what is wrong with them.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Checked {
    /// The workflows, as far as they could be read.
    pub workflows: Vec<ClaimWorkflow>,
    /// All errors and warnings, in the order of their positions.
    pub findings: Vec<Finding>,
}

impl Checked {
    /// True if there are no errors. There may be warnings.
    ///
    /// ```
    /// # use latchwork::claim::check_json;
    /// assert!(check_json("[]").is_valid());
    /// assert!(!check_json("this is not JSON").is_valid());
    /// ```
    pub fn is_valid(&self) -> bool {
        self.findings.iter().all(|finding| finding.rule.is_warning())
    }
}

/// Reads a configuration, one claim workflow or a list of them, and returns everything that is wrong with it.
///
/// ```
/// # use latchwork::claim::{Rule, check_json};
/// let checked = check_json("this is not JSON");
/// assert_eq!(checked.findings[0].rule, Rule::Format);
/// ```
pub fn check_json(text: &str) -> Checked {
    let mut source = read::read(text);
    let workflows = std::mem::take(&mut source.workflows);
    validate::validate(&workflows, &Registered::default(), &mut source.findings);
    Checked { workflows, findings: source.finish() }
}

/// Returns everything that is wrong with these claim workflows.
///
/// ```
/// # use latchwork::claim::{ClaimStep, ClaimWorkflow, Rule, check};
/// let invoice = ClaimWorkflow::new("invoice", "billing", "invoice").statuses(["sent", "paid"]);
/// let wrong = invoice.clone().step(ClaimStep::new(10, "pay", "sent", "payed"));
/// assert_eq!(check(&[wrong])[0].rule, Rule::UnknownStatus);
/// let right = invoice.step(ClaimStep::new(10, "pay", "sent", "paid"));
/// assert!(check(&[right]).is_empty());
/// ```
pub fn check(workflows: &[ClaimWorkflow]) -> Vec<Finding> {
    let mut findings = Findings::default();
    validate::validate(workflows, &Registered::default(), &mut findings);
    findings.found.into_iter().map(|(_, finding)| finding).collect()
}

/// The JSON schema of a configuration file, for editors.
///
/// ```
/// println!("{:#}", latchwork::claim::json_schema());
/// ```
#[cfg(feature = "schema")]
pub fn json_schema() -> serde_json::Value {
    #[derive(schemars::JsonSchema)]
    #[serde(untagged)]
    #[allow(dead_code)]
    enum File {
        One(Box<ClaimWorkflow>),
        List(Vec<ClaimWorkflow>),
    }
    let mut schema = schemars::schema_for!(File).to_value();
    // In files, the field of the claim has two names.
    if let Some(fields) = schema.pointer_mut("/$defs/Step/properties").and_then(serde_json::Value::as_object_mut)
        && let Some(claim) = fields.get("successful_claim_state").cloned()
    {
        fields.insert("claim_state".into(), claim);
    }
    schema
}
