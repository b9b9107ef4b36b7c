//! Checks that lists, timers and families agree with the records of executions. All of them follow from the records, so
//! they can be computed again and compared with what a store holds.

use std::collections::BTreeSet;

use crate::node::alarm::alarm_key;
use crate::record::Record;
use crate::store::{Key, Order, Range, Store, Timestamp, View};
use crate::testing::locks;
use crate::workflow::engine::{EXECUTIONS, EngineSpaces, KEPT, TIMERS};
use crate::workflow::operate::reviews::OpenKey;
use crate::workflow::stored::kept::{Kept, ReviewRecord};
use crate::workflow::stored::listed::{LISTED, Lists, RUNNING};
use crate::workflow::stored::record::{Execution, fetch_execution};
use crate::workflow::{ExecutionId, Result};

/// All differences between lists and records.
pub(crate) async fn differences(store: &Store) -> Result<Vec<String>> {
    let spaces = store.spaces().await?;
    let space = |name: &str| spaces.iter().find(|space| space.name() == name).cloned();
    let (Some(executions), Some(listed), Some(running), Some(timers), Some(kept)) =
        (space(EXECUTIONS), space(LISTED), space(RUNNING), space(TIMERS), space(KEPT))
    else {
        return Ok(Vec::new());
    };
    let in_lists = Lists { listed: listed.clone(), running: running.clone() };
    let view = store.view().await?;
    let (mut lists, mut active) = (BTreeSet::new(), BTreeSet::new());
    let (mut alarms, mut children) = (BTreeSet::new(), BTreeSet::new());
    let mut differences = Vec::new();
    for (key, item) in view.scan(&executions.all(), Order::Ascending, usize::MAX).await? {
        let id = ExecutionId::from(String::from_utf8_lossy(key.bytes()).as_ref());
        let Ok(execution) = Execution::decode(&item.value) else {
            differences.push(format!("{id} cannot be read"));
            continue;
        };
        let (its, runs): (Vec<Key>, Vec<Key>) =
            in_lists.keys(&id, &execution).into_iter().partition(|key| key.space() == listed.id());
        lists.extend(its);
        active.extend(runs);
        alarms.extend(execution.timer_us.map(|timer| timers.key(alarm_key(Timestamp(timer), &id))));
        if let Some(parent) = execution.parent.as_ref().filter(|_| !execution.status.is_terminal()) {
            children.insert(Kept::new(&kept, &parent.id).child(&id));
        }
    }
    differences.extend(compared(&view, "lists", listed.all(), &lists, |_| true).await?);
    differences.extend(compared(&view, "running", running.all(), &active, |_| true).await?);
    differences.extend(compared(&view, "timers", timers.all(), &alarms, |_| true).await?);
    differences.extend(compared(&view, "children", kept.all(), &children, Kept::is_child).await?);
    differences.extend(open_reviews(store, &view).await?);
    differences.extend(locks::differences(store).await?);
    Ok(differences)
}

/// Reviews that are listed as open but must not be: decided ones, and those that no execution waits for.
async fn open_reviews(store: &Store, view: &View) -> Result<Vec<String>> {
    let mut wrong = Vec::new();
    let Some(spaces) = EngineSpaces::find(store).await? else { return Ok(wrong) };
    let Some(space) = &spaces.reviews else { return Ok(wrong) };
    for (key, _) in view.scan(&space.all(), Order::Ascending, usize::MAX).await? {
        let Some(OpenKey { name, token, execution, .. }) = OpenKey::read(&key) else {
            wrong.push(format!("{key} is not the key of a review"));
            continue;
        };
        let record = view.get(&Kept::new(&spaces.kept, &execution).review(token, name)).await?;
        let is_undecided = |value: &[u8]| ReviewRecord::decode(value).is_ok_and(|record| record.decision.is_none());
        let waits = fetch_execution(view, &spaces.executions, &execution).await?;
        let is_waited = waits.is_some_and(|(it, _)| !it.status.is_terminal() && it.has_reviews);
        if !is_waited || !record.is_some_and(|item| is_undecided(&item.value)) {
            wrong.push(format!("reviews: {name:?} of {execution} should not be open"));
        }
    }
    Ok(wrong)
}

async fn compared(
    view: &View,
    what: &str,
    range: Range,
    expected: &BTreeSet<Key>,
    counts: impl Fn(&Key) -> bool,
) -> Result<Vec<String>> {
    let found = view.scan(&range, Order::Ascending, usize::MAX).await?;
    let found: BTreeSet<Key> = found.into_iter().map(|(key, _)| key).filter(|key| counts(key)).collect();
    let told = |key: &Key, wrong: &str| format!("{what}: {:?} should {wrong}", String::from_utf8_lossy(key.bytes()));
    let missing = expected.difference(&found).map(|key| told(key, "exist"));
    Ok(missing.chain(found.difference(expected).map(|key| told(key, "not exist"))).collect())
}
