//! Findings: what is wrong with a configuration, each with its rule and its position. This file checks nothing:
//! `read.rs` and `validate.rs` do.

use std::fmt;

use serde::Serialize;

/// An error or a warning about a configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Finding {
    /// The rule that is broken.
    pub rule: Rule,
    /// The workflow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workflow: Option<String>,
    /// The step, by its key and number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// The requester.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requester: Option<String>,
    /// The position in the file, if the configuration was read from one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub position: Option<Position>,
    /// What is wrong, and what to do about it.
    pub message: String,
}

/// A position in a file. Line and column count from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Position {
    /// The line.
    pub line: usize,
    /// The character in the line.
    pub column: usize,
}

/// The rules of a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Rule {
    /// The file is JSON and has the right structure.
    Format,
    /// A field occurs only once.
    DuplicateField,
    /// A claim is in the field `successful_claim_state` or in `claim_state`, not in both.
    TwoClaimNames,
    /// A claim consists of two statuses.
    ClaimPair,
    /// Both statuses of a claim are declared.
    ClaimStatuses,
    /// A claim does not revert to the status it claims into.
    ClaimNoOp,
    /// A step does not claim into the status it starts at: otherwise a second caller could claim, too.
    ClaimFromItself,
    /// A step does not claim into the status it leads to.
    ClaimIntoFinal,
    /// All steps that claim into one status revert to the same status.
    ClaimAmbiguous,
    /// A claim reverts to the status of its step.
    RevertElsewhere,
    /// No step starts at a claiming status.
    StartsClaiming,
    /// A status is declared.
    UnknownStatus,
    /// An action is known.
    UnknownAction,
    /// An after-effect is known.
    UnknownAfterEffect,
    /// A guard is known.
    UnknownGuard,
    /// A requester is known.
    UnknownRequester,
    /// A status can be reached.
    UnreachableStatus,
    /// Names and numbers are unique.
    DuplicateId,
    /// A requester of a step has a status to lead to.
    NoSuccessfulState,
    /// A step is claimed if its action does harm when it runs twice.
    Unclaimed,
    /// A duration or a number is in its range.
    Limits,
    /// A step is claimed for all of its requesters or for none.
    PartlyClaimed,
    /// A claimed action writes something.
    ClaimedForNothing,
}

impl Rule {
    /// True if a configuration that breaks the rule can still be used.
    ///
    /// ```
    /// # use latchwork::claim::Rule;
    /// assert!(Rule::PartlyClaimed.is_warning());
    /// assert!(!Rule::UnknownStatus.is_warning());
    /// ```
    pub fn is_warning(self) -> bool {
        matches!(self, Rule::PartlyClaimed | Rule::ClaimedForNothing)
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(Position { line, column }) = self.position {
            write!(f, "{line}:{column}: ")?;
        }
        f.write_str(if self.rule.is_warning() { "warning: " } else { "error: " })?;
        let places = [("workflow", &self.workflow), ("step", &self.step), ("requester", &self.requester)];
        for (what, name) in places {
            if let Some(name) = name {
                write!(f, "{what} {name}: ")?;
            }
        }
        write!(f, "{} [{}]", self.message, self.rule)
    }
}

/// A path in a configuration: names of fields and indexes in lists, from the outside in.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(crate) struct Route(Vec<String>);

impl Route {
    pub(crate) fn to(&self, field: impl ToString) -> Route {
        let mut route = self.0.clone();
        route.push(field.to_string());
        Route(route)
    }

    /// The path without its last element.
    pub(crate) fn outer(&self) -> Option<Route> {
        let (_, outer) = self.0.split_last()?;
        Some(Route(outer.to_vec()))
    }
}

/// Collects findings, each with its path.
#[derive(Default)]
pub(crate) struct Findings {
    pub(crate) found: Vec<(Route, Finding)>,
    workflow: Option<String>,
    step: Option<String>,
}

impl Findings {
    /// The findings from here on are about this workflow, and not about a step.
    pub(crate) fn in_workflow(&mut self, workflow: &str) {
        (self.workflow, self.step) = (Some(workflow.into()), None);
    }

    /// The findings from here on are about this step of the workflow.
    pub(crate) fn in_step(&mut self, key: &str, id: u64) {
        self.step = Some(format!("{key} ({id})"));
    }

    pub(crate) fn out_of_step(&mut self) {
        self.step = None;
    }

    /// True if the whole workflow could be read. A part that could not be read may contain a step to a status.
    pub(crate) fn is_whole(&self, workflow: &str) -> bool {
        let is_unread = |finding: &Finding| matches!(finding.rule, Rule::Format | Rule::ClaimPair);
        !self.found.iter().any(|(_, finding)| is_unread(finding) && finding.workflow.as_deref() == Some(workflow))
    }

    pub(crate) fn add(&mut self, rule: Rule, route: Route, requester: Option<&str>, message: impl Into<String>) {
        let (workflow, step) = (self.workflow.clone(), self.step.clone());
        let (requester, message) = (requester.map(str::to_string), message.into());
        self.found.push((route, Finding { rule, workflow, step, requester, position: None, message }));
    }
}
