//! `latch lock list`: locks by their names.

use anyhow::Result;
use clap::Args;
use latchwork::lock::{LockName, LockScope, StoredLocks};

use crate::lock::Scope;
use crate::lock::fields::LockFields;
use crate::output::{Cell, Format, Output, Table, Tone};

/// The page size of reads.
const PAGE: usize = 1000;

#[derive(Args)]
pub(crate) struct List {
    #[command(flatten)]
    scope: Scope,
    /// Only locks that are held.
    #[arg(long)]
    held: bool,
    /// Lists at most this many.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Lists all.
    #[arg(long, conflicts_with = "limit")]
    all: bool,
    /// Continues after an earlier list: its `next`, or the name of a lock.
    #[arg(long, value_name = "NAME")]
    after: Option<String>,
}

pub(crate) async fn run(list: List, locks: &StoredLocks, output: &mut Output<'_>) -> Result<()> {
    let scope = list.scope.scope();
    let mut after = list.after.as_deref().map(|text| read(text, scope.as_ref()));
    let most = if list.all { usize::MAX } else { usize::try_from(list.limit).unwrap_or(usize::MAX) };
    let (mut found, mut told, mut last, mut next) = (Vec::new(), 0, None, None);
    'all: loop {
        let page = locks.list(scope.as_ref(), after.as_ref(), PAGE).await?;
        for lock in page.locks.into_iter().filter(|lock| !list.held || lock.used > 0) {
            if told == most {
                next = last;
                break 'all;
            }
            found.push(LockFields::of(&lock));
            (told, last) = (told + 1, Some(lock.name));
        }
        after = page.next;
        if after.is_none() {
            break;
        }
        if output.format() == Format::Jsonl {
            // Each page is written at once, so that a long list does not fill memory.
            found.drain(..).try_for_each(|lock| output.line(&lock))?;
        }
    }
    let next = next.map(|next| written(&next));
    output.many("locks", &found, next.as_deref(), table)
}

fn table(found: &[LockFields]) -> Table {
    let mut table = Table::new(&["NAME", "SHARED BY", "KIND", "HELD", "WAITING"]);
    for lock in found {
        let held = lock.held();
        let tone = if held == "free" { Tone::Dim } else { Tone::Plain };
        let waiting = if lock.waiting > 0 { Tone::Attention } else { Tone::Dim };
        table.row([
            lock.name.name.clone().into(),
            lock.name.scope().into(),
            lock.kind().into(),
            Cell::new(held, tone),
            Cell::new(lock.waiting.to_string(), waiting),
        ]);
    }
    table
}

/// A lock as the cursor of a list: its name, after its scope if it has one.
fn written(lock: &LockName) -> String {
    let part = |text: &str| text.replace('%', "%25").replace('/', "%2F");
    match &lock.scope {
        LockScope::Workflow(workflow) => format!("workflow/{}/{}", part(workflow), part(&lock.name)),
        LockScope::Tree(root) => format!("tree/{}/{}", part(root), part(&lock.name)),
        _ => part(&lock.name),
    }
}

/// Reads a cursor of [`written`], or the plain name of a lock of this scope.
fn read(text: &str, scope: Option<&LockScope>) -> LockName {
    let part = |text: &str| text.replace("%2F", "/").replace("%25", "%");
    let parts: Vec<&str> = text.split('/').collect();
    match parts[..] {
        ["workflow", workflow, name] => LockName::of_workflow(part(workflow), part(name)),
        ["tree", root, name] => LockName::of_tree(part(root), part(name)),
        _ => LockName { scope: scope.cloned().unwrap_or(LockScope::Global), name: part(text) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_continues_after_its_cursor() {
        for name in ["a", "a/b", "workflow/a/b", "50%", "%2F", "a%2Fb/", "/"] {
            for lock in [LockName::global(name), LockName::of_workflow(name, "x"), LockName::of_tree("x", name)] {
                assert_eq!(read(&written(&lock), None), lock, "{}", written(&lock));
            }
        }
        let scope = LockScope::Workflow("order".into());
        assert_eq!(read("a/b", Some(&scope)), LockName::of_workflow("order", "a/b"));
    }
}
