//! Gathered starts: a debounce keeps the last input, a batch keeps all inputs. The first start stores the execution,
//! which waits. Each further start changes it, until it begins.

use crate::record::Record;
use crate::store::{Check, Timestamp, View};
use crate::workflow::admission::book::{Book, ChangedExecution, Ruling};
use crate::workflow::admission::policy::{Gather, Policy, StartNeeds};
use crate::workflow::admission::stored::{Gathering, Partition};
use crate::workflow::engine::EngineInner;
use crate::workflow::run::{hash_text, largest};
use crate::workflow::stored::kept::Inputs;
use crate::workflow::stored::keys::keyed_key;
use crate::workflow::stored::record::{
    Admission, Execution, Gathers, Keyed, StoredStatus, fetch, fetch_execution, next_page,
};
use crate::workflow::{ExecutionId, Result, WorkflowError};

impl Book<'_> {
    /// Adds a start to the execution that gathers under its key. Returns none if no execution gathers there.
    pub(super) async fn join(
        &mut self,
        policy: &Policy,
        asked: &StartNeeds,
        workflow: &str,
        first: &Execution,
    ) -> Result<Option<Ruling>> {
        let (Some(gather), Some(key)) = (policy.gather(), &asked.gathers) else { return Ok(None) };
        let partition = Partition::new(workflow, key.as_deref());
        if self.settled.contains(&partition) {
            return Ok(Some(Ruling::Later));
        }
        let is_batch = matches!(gather, Gather::All { .. });
        let Some(id) = self.gathering(&partition, key, is_batch).await? else { return Ok(None) };
        let item = match gather {
            Gather::Last { window, max_wait } => {
                let now = self.now;
                let after = self.after(&id);
                let since = Timestamp(after.gathers().map_or(now.0, |gathers| gathers.since_us));
                let last = max_wait.map(|most| since.plus(most));
                let begins = last.into_iter().chain([now.plus(window)]).min().unwrap_or(now);
                (after.input, after.labels) = (first.input.clone(), first.labels.clone());
                self.begin_gathered(&id, &partition, begins);
                None
            }
            Gather::All { max_size, .. } => match self.add_input(&id, &partition, first, max_size).await? {
                Some(item) => Some(item),
                None => return Ok(Some(Ruling::Later)),
            },
        };
        Ok(Some(Ruling::Joins(id, item)))
    }

    /// Decides a gathered start that has an idempotency key. If the key is known, the start gets the same answer again.
    /// The key is stored beside the execution that the start became a part of.
    pub(super) async fn decide_keyed(
        &mut self,
        policy: &Policy,
        asked: &StartNeeds,
        id: &ExecutionId,
        first: &mut Execution,
        key: &str,
    ) -> Result<Ruling> {
        let at = self.engine.spaces.keys.key(keyed_key(&first.workflow, key));
        let input = hash_text(&first.input);
        let known = match self.keyed.get(&at) {
            Some(known) => Some(known.clone()),
            None => {
                let found = fetch::<Keyed>(&self.view, &at, || format!("idempotency key {key:?}")).await?;
                found.map(|(known, _)| known)
            }
        };
        if let Some(known) = known {
            let id = ExecutionId::from(known.id);
            return Ok(match known.input == input {
                true => Ruling::Joins(id, known.item),
                false => Ruling::Rejected(WorkflowError::KeyReused { key: key.into(), id }),
            });
        }
        let ruling = self.decide_new(policy, asked, id, first).await?;
        let (id, item) = match &ruling {
            Ruling::Starts(item) => (id, *item),
            Ruling::Joins(id, item) => (id, *item),
            Ruling::Rejected(_) | Ruling::Later => return Ok(ruling),
        };
        let keyed = Keyed { id: id.to_string(), input, item };
        self.checks.push(Check::Absent(at.clone()));
        self.writes.insert(at.clone(), Some(keyed.encode()));
        self.writes.insert(self.engine.kept(id).start_key(key), Some(crate::store::Bytes::new()));
        self.keyed.insert(at, keyed);
        Ok(ruling)
    }

    /// Returns the execution that gathers under a key, if it has not begun.
    async fn gathering(
        &mut self,
        partition: &Partition,
        key: &Option<String>,
        is_batch: bool,
    ) -> Result<Option<ExecutionId>> {
        let place = || format!("the gathering execution of workflow {:?}", partition.workflow());
        let at = self.keys().gathering(partition, is_batch);
        let found = fetch::<Gathering>(&self.view, &at, place).await?;
        // A start that finds none stores a new one. The check ensures that only one start does so.
        let check = found.as_ref().map_or(Check::Absent(at.clone()), |(_, item)| Check::AtRev(at.clone(), item.rev));
        self.gatherings.insert(partition.clone(), check);
        let Some((Gathering { id }, _)) = found else { return Ok(None) };
        if self.changed.contains_key(&id) {
            return Ok(Some(id));
        }
        let found = fetch_execution(&self.view, &self.engine.spaces.executions, &id).await?;
        let gathers = |it: &Gathers| it.key == *key && it.batch.is_some() == is_batch;
        let is_its = |it: &Execution| it.status == StoredStatus::Waiting && it.gathers().is_some_and(gathers);
        let Some((before, item)) = found.filter(|(found, _)| is_its(found)) else { return Ok(None) };
        let after = before.clone();
        self.changed.insert(id.clone(), ChangedExecution { before, rev: item.rev, after });
        Ok(Some(id))
    }

    fn after(&mut self, id: &ExecutionId) -> &mut Execution {
        &mut self.changed.get_mut(id).expect("what gathers was looked up").after
    }

    /// Sets when a gathering execution begins. If it waits in a queue, this is only the earliest time.
    fn begin_gathered(&mut self, id: &ExecutionId, partition: &Partition, begins: Timestamp) {
        let (now, timeout) = (self.now, self.engine.timeout_of(partition.workflow()));
        let after = self.after(id);
        after.begins_us = Some(begins.0);
        let is_queued = after.admission.as_ref().is_some_and(|admission| admission.position.is_some());
        let is_over = begins <= now;
        if is_over {
            after.admission.iter_mut().for_each(|admission| admission.gathers = None);
        }
        if !is_queued {
            after.let_begin(now, timeout);
        }
        if is_over {
            self.settled.insert(partition.clone());
        }
    }

    /// Adds an input to a batch. Returns its number; none if the batch has no room for it, and then the batch begins.
    async fn add_input(
        &mut self,
        id: &ExecutionId,
        partition: &Partition,
        first: &Execution,
        max_size: u32,
    ) -> Result<Option<u32>> {
        let (limit, length) = (largest(self.engine) as u64, first.input.len() as u64 + 1);
        let (count, bytes) = self.after(id).gathers().and_then(|gathers| gathers.batch).unwrap_or_default();
        if bytes + length > limit || count >= max_size {
            self.flush(id, partition).await?;
            return Ok(None);
        }
        self.keep_input(id, count, first.input.clone());
        let (number, batch) = (count, Some((count + 1, bytes + length)));
        let after = self.after(id).admission.as_mut().and_then(|admission| admission.gathers.as_mut());
        after.into_iter().for_each(|gathers| gathers.batch = batch);
        if count + 1 == max_size {
            self.flush(id, partition).await?;
        }
        Ok(Some(number))
    }

    fn keep_input(&mut self, id: &ExecutionId, number: u32, input: String) {
        self.inputs.entry(id.clone()).or_insert_with(|| (number, Vec::new())).1.push(input);
    }

    /// Called when an execution begins that may have gathered starts: it gets the inputs gathered so far.
    pub(super) async fn end_gathering(
        &mut self,
        id: &ExecutionId,
        after: &mut Execution,
        admission: &mut Admission,
    ) -> Result<()> {
        let Some(gathers) = admission.gathers.take() else { return Ok(()) };
        self.settled.insert(Partition::new(&after.workflow, gathers.key.as_deref()));
        if gathers.batch.is_some() {
            after.input = self.take_inputs(id).await?;
        }
        Ok(())
    }

    /// Returns all inputs of a batch as a JSON list. The inputs stored beside the execution are deleted with it.
    async fn take_inputs(&mut self, id: &ExecutionId) -> Result<String> {
        let mut inputs = inputs_of(self.engine, &self.view, id).await?;
        inputs.extend(self.inputs.remove(id).into_iter().flat_map(|(_, inputs)| inputs));
        Ok(list(&inputs))
    }

    /// Lets a batch begin with the inputs gathered so far.
    async fn flush(&mut self, id: &ExecutionId, partition: &Partition) -> Result<()> {
        self.after(id).input = self.take_inputs(id).await?;
        self.begin_gathered(id, partition, self.now);
        Ok(())
    }

    /// Makes an execution that is about to be stored gather the starts that follow.
    pub(super) fn gather(
        &mut self,
        policy: &Policy,
        asked: &StartNeeds,
        id: &ExecutionId,
        first: &mut Execution,
        admission: &mut Admission,
    ) {
        let (Some(gather), Some(key)) = (policy.gather(), &asked.gathers) else { return };
        let partition = Partition::new(&first.workflow, key.as_deref());
        let (begins, batch) = match gather {
            Gather::Last { window, .. } => (self.now.plus(window), None),
            Gather::All { max_size: 1, .. } => {
                first.input = list(&[std::mem::take(&mut first.input)]);
                return;
            }
            Gather::All { max_wait, .. } => {
                let input = std::mem::replace(&mut first.input, "[]".into());
                let batch = Some((1, input.len() as u64 + 2));
                self.keep_input(id, 0, input);
                (self.now.plus(max_wait), batch)
            }
        };
        first.begin_at(self.now, begins);
        admission.gathers = Some(Gathers { key: key.clone(), since_us: self.now.0, batch });
        self.checks.extend(self.gatherings.get(&partition).cloned());
        self.writes
            .insert(self.keys().gathering(&partition, batch.is_some()), Some(Gathering { id: id.clone() }.encode()));
        self.settled.insert(partition);
    }
}

impl Execution {
    /// True if the execution waits in a queue. Its code must not run.
    pub(crate) fn is_queued(&self) -> bool {
        self.admission.as_ref().is_some_and(|admission| admission.position.is_some())
    }

    pub(crate) fn gathers(&self) -> Option<&Gathers> {
        self.admission.as_ref()?.gathers.as_ref()
    }

    /// True if its inputs are stored beside it.
    pub(crate) fn is_batch(&self) -> bool {
        self.gathers().is_some_and(|gathers| gathers.batch.is_some())
    }
}

/// The inputs of a batch that has not begun.
async fn inputs_of(engine: &EngineInner, view: &View, id: &ExecutionId) -> Result<Vec<String>> {
    let (mut rest, mut inputs) = (engine.kept(id).inputs(), Vec::new());
    while let Some(found) = next_page(view, &mut rest, 1000).await? {
        for (key, item) in found {
            let kept = Inputs::decode(&item.value).map_err(|why| why.at(format!("the inputs {key} of {id:?}")))?;
            inputs.extend(kept.0);
        }
    }
    Ok(inputs)
}

/// Joins inputs, each JSON text, to a JSON list.
pub(crate) fn list(inputs: &[String]) -> String {
    format!("[{}]", inputs.join(","))
}

impl EngineInner {
    /// The input of a batch that is about to begin.
    pub(crate) async fn gathered(&self, id: &ExecutionId) -> Result<String> {
        Ok(list(&inputs_of(self, &self.store.view().await?, id).await?))
    }
}
