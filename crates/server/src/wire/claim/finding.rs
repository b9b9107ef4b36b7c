//! Configurations of claim workflows on the wire: what is wrong with them, and their diagrams.

use latchwork::Value;
use latchwork::claim::Finding;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::wire::problem::{Problem, ProblemCode};

/// Everything that is wrong with a configuration.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ClaimFindings)]
pub(crate) struct FindingsWire {
    /// True if there are no errors. There may be warnings.
    pub(crate) is_valid: bool,
    /// Errors and warnings, in the order of their positions.
    pub(crate) findings: Vec<FindingWire>,
}

/// An error or a warning about a configuration.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ClaimFinding)]
pub(crate) struct FindingWire {
    severity: Severity,
    /// The rule that is broken, such as `unknown_status`.
    rule: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    workflow: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    requester: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<PositionWire>,
    /// What is wrong, and what to do about it.
    message: String,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Severity {
    Error,
    Warning,
}

/// A place in a configuration. Line and column count from 1.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = TextPosition)]
pub(crate) struct PositionWire {
    line: usize,
    column: usize,
}

impl From<Finding> for FindingWire {
    fn from(finding: Finding) -> FindingWire {
        let Finding { rule, workflow, step, requester, position, message, .. } = finding;
        FindingWire {
            severity: if rule.is_warning() { Severity::Warning } else { Severity::Error },
            rule: rule.to_string(),
            workflow,
            step,
            requester,
            position: position.map(|at| PositionWire { line: at.line, column: at.column }),
            message,
        }
    }
}

/// A configuration, and which of its workflows is drawn.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DiagramRequest {
    /// One claim workflow, or a list of them.
    #[schema(value_type = Value)]
    pub(crate) configuration: Value,
    /// The name of the workflow, if there are several.
    pub(crate) workflow: Option<String>,
}

/// A claim workflow as a diagram.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ClaimDiagram)]
pub(crate) struct DiagramWire {
    pub(crate) workflow: String,
    /// A state diagram in the language of Mermaid.
    pub(crate) mermaid: String,
}

/// The problem of a configuration that is wrong.
pub(crate) fn wrong_configuration(findings: Vec<Finding>) -> Problem {
    let errors = findings.iter().filter(|finding| !finding.rule.is_warning()).count();
    let findings: Vec<FindingWire> = findings.into_iter().map(FindingWire::from).collect();
    let detail = format!("the configuration has {errors} errors; `findings` lists them");
    Problem::new(ProblemCode::Invalid, detail).with("findings", findings)
}

#[cfg(test)]
mod tests {
    use super::*;
    use latchwork::claim::check_json;
    use latchwork::json;

    #[test]
    fn a_wrong_configuration_lists_everything() {
        let checked = check_json("{\n  \"x\": 1\n}");
        let problem = wrong_configuration(checked.findings).document();
        assert_eq!((&problem["code"], &problem["findings"][0]["severity"]), (&json!("invalid"), &json!("error")));
        assert!(problem["findings"][0]["position"]["line"].is_u64(), "{problem}");
    }
}
