//! A block that runs: its path, its state, and the block around it. It runs the body of a handler in a branch of its
//! own, so that the operations of the body are replayed. It does not know the verbs.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Poll;

use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::flow::block::BlockNode;
use crate::flow::ctx::BlockCtx;
use crate::flow::request::{FlowRequest, FoundTrace, shown};
use crate::flow::state::{StateCell, ToldChange};
use crate::flow::stream::{FlowEvent, StepState};
use crate::flow::untold::Untold;
use crate::flow::work::Works;
use crate::workflow::Failure;
use crate::workflow::ctx::Ctx;
use crate::workflow::ctx::step::caught;
use crate::workflow::journal::place::BranchPath;
use crate::workflow::run::{Branch, Doing, OpInProgress, hash_text};
use crate::workflow::stored::record::{EntryState, Kind, WaitsFor};

/// The result of an effect, once there is one. Its lock is held while the effect runs.
type KeyedEffect = tokio::sync::Mutex<Option<Result<Value, Failure>>>;

/// The longest key of an effect that its place shows; the place of a longer one has a hash of it.
const KEY_BYTES: usize = 64;

pub(crate) struct Frame {
    pub(crate) request: Arc<FlowRequest>,
    pub(crate) path: BranchPath,
    pub(crate) node: Arc<BlockNode>,
    pub(crate) parent: Option<Arc<Frame>>,
    /// Its state, if it declares any.
    pub(crate) own: Option<Arc<StateCell>>,
    /// The block whose trace covers what is changed here.
    pub(crate) covered_by: BranchPath,
    /// True if the block itself has a trace; and if the blocks in it have traces.
    pub(crate) has_trace: bool,
    pub(crate) records: bool,
    /// The states of the blocks that have begun in here, in order.
    pub(crate) begun: Mutex<Vec<(Arc<str>, Arc<StateCell>)>>,
    pub(crate) works: Works,
    /// The results of the effects of the body, by their keys.
    effects: Mutex<BTreeMap<String, Arc<KeyedEffect>>>,
    /// How many blocks sabotage has counted in here.
    blocks: AtomicU32,
    /// The events since the last boundary.
    untold: Arc<Mutex<Untold>>,
}

impl Frame {
    /// The outermost block of a request. It has no trace: its end is that of the request, and the traces in it are kept
    /// as long as the request is.
    pub(crate) fn outermost(request: FlowRequest, node: &Arc<BlockNode>) -> Arc<Frame> {
        let path = BranchPath::default().named(&node.name, 0);
        let own = node.shape.as_ref().map(|shape| request.cell(&path, shape, (node.is_durable, true)));
        Arc::new(Frame {
            request: Arc::new(request),
            covered_by: path.clone(),
            path,
            node: node.clone(),
            parent: None,
            own,
            has_trace: false,
            records: node.is_durable,
            begun: Mutex::default(),
            works: Works::default(),
            effects: Mutex::default(),
            blocks: AtomicU32::default(),
            untold: Arc::default(),
        })
    }

    /// A block in this one.
    pub(crate) fn child(self: &Arc<Frame>, node: &Arc<BlockNode>, path: BranchPath) -> Arc<Frame> {
        let is_durable = self.records && node.is_durable;
        let own = node.shape.as_ref().map(|shape| self.request.cell(&path, shape, (is_durable, self.records)));
        if let Some(cell) = &own {
            // Of several rounds, the last one counts.
            let mut begun = self.begun.lock();
            begun.retain(|(name, _)| *name != node.name);
            begun.push((node.name.clone(), cell.clone()));
        }
        let (covered_by, untold) = match self.records {
            true => (path.clone(), Arc::default()),
            false => (self.covered_by.clone(), self.untold.clone()),
        };
        Arc::new(Frame {
            request: self.request.clone(),
            path,
            node: node.clone(),
            parent: Some(self.clone()),
            own,
            covered_by,
            has_trace: self.records,
            records: is_durable,
            begun: Mutex::default(),
            works: Works::default(),
            effects: Mutex::default(),
            blocks: AtomicU32::default(),
            untold,
        })
    }

    /// The nearest state of a sequencer around this block.
    pub(crate) fn enclosing(&self) -> Option<&Arc<StateCell>> {
        let mut around = self.parent.as_ref();
        while let Some(frame) = around {
            if let Some(own) = frame.own.as_ref().filter(|_| frame.node.kind == Kind::Sequencer) {
                return Some(own);
            }
            around = frame.parent.as_ref();
        }
        None
    }

    /// The state of a block of this name: one before this block, the most recent first; then one around it.
    pub(crate) fn target(&self, name: &str) -> Option<Arc<StateCell>> {
        let mut around = self.parent.as_ref();
        while let Some(frame) = around {
            let begun = frame.begun.lock();
            let is_it = |(its, cell): &&(Arc<str>, Arc<StateCell>)| **its == *name && cell.path != self.path;
            if let Some((_, found)) = begun.iter().rev().find(is_it) {
                return Some(found.clone());
            }
            drop(begun);
            if let Some(own) = frame.own.as_ref().filter(|_| *frame.node.name == *name) {
                return Some(own.clone());
            }
            around = frame.parent.as_ref();
        }
        None
    }

    /// Keeps an event until the next boundary.
    pub(crate) fn tell(&self, event: FlowEvent) {
        self.untold.lock().tell(event);
    }

    /// Keeps a change of the state of a block until the next boundary.
    pub(crate) fn tell_change(&self, owner: &BranchPath, change: ToldChange) {
        self.untold.lock().change(owner, change);
    }

    pub(crate) fn take_events(&self) -> Vec<FlowEvent> {
        self.untold.lock().take()
    }

    /// The position of the next block in the chain, for sabotage.
    pub(crate) fn position(&self) -> String {
        self.blocks.fetch_add(1, Ordering::SeqCst).to_string()
    }

    /// The block runs, for the first time or once more.
    pub(crate) fn runs(&self) {
        self.request.runs(&self.path, self.node.kind, &self.untold);
    }

    /// The block begins, unless it has begun before.
    pub(crate) fn begins(&self) {
        let BlockNode { kind, name, .. } = &*self.node;
        self.request.note(&self.path, self.request.entry(*kind, name, EntryState::Begun));
        self.request.tell(&FlowEvent::step(&self.path, *kind, StepState::Begun));
    }

    /// A boundary of this block: its trace is at the path `at`, its own or that of the loop that it is a round of.
    pub(crate) fn ends(&self, at: &BranchPath, kind: Kind, state: EntryState, progress: Option<String>) {
        let mut events = self.take_events();
        events.push(FlowEvent::ended(&self.path, self.node.kind, &state));
        let mut entry = self.request.entry(kind, &self.node.name, state);
        entry.progress = progress;
        self.request.boundary(&self.path, at, entry, events);
    }

    /// What a function between blocks chooses, once for the request. The next commit records it. A recorded choice that
    /// does not fit its type any more is made again.
    pub(crate) async fn choose<T: Serialize + DeserializeOwned>(
        &self,
        label: &str,
        nth: u32,
        choose: impl FnOnce() -> T,
    ) -> Result<T, Failure> {
        if !self.records {
            return Ok(choose());
        }
        let path = self.path.named(label, nth);
        if let FoundTrace::Done(text) = self.request.found(&path, Kind::Choice, label).await
            && let Ok(value) = serde_json::from_str(&text)
        {
            return Ok(value);
        }
        self.request.run().effect().await;
        let value = choose();
        let text = self.request.run().text("the value", &value).map_err(|failure| failure.in_step(&shown(&path)))?;
        self.request.note(&path, self.request.entry(Kind::Choice, &label.into(), EntryState::Done(text)));
        Ok(value)
    }

    /// What was chosen in an earlier life, if anything was.
    pub(crate) async fn chosen<T: DeserializeOwned>(&self, label: &str, nth: u32) -> Option<T> {
        if !self.records {
            return None;
        }
        match self.request.found(&self.path.named(label, nth), Kind::Choice, label).await {
            FoundTrace::Done(text) => serde_json::from_str(&text).ok(),
            _ => None,
        }
    }

    /// Runs the body of a handler in a branch of its own. The body runs after the commit that holds everything before
    /// it, and may run again after a crash.
    pub(crate) async fn handle<P, T, F>(self: &Arc<Frame>, body: impl FnOnce(BlockCtx<P>) -> F) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Failure>>,
    {
        let (request, run) = (&self.request, self.request.run());
        // A body may do more than its recorded operations: a replay does not run it again.
        run.effect().await;
        if self.has_trace {
            request.flush().await;
        }
        request.unless_cancelled(&self.path)?;
        let branch = Branch::forked(self.path.clone(), request.has_operations(&self.path));
        let ctx = request.ctx.on(branch.clone());
        let given = BlockCtx::new(ctx.clone(), self.clone());
        let mut running = std::pin::pin!(caught(|| body(given)));
        let mut busy: Option<OpInProgress> = None;
        let result = std::future::poll_fn(|context| {
            let polled = branch.poll(run, false, || running.as_mut().poll(context));
            if let Poll::Ready(result) = polled {
                return Poll::Ready(Some(result));
            }
            if branch.operates() {
                busy = None;
                return Poll::Pending;
            }
            // The body waits for something that the engine does not know: meanwhile the request stays in memory.
            let what = || WaitsFor::Step(shown(&self.path));
            let busy = busy.get_or_insert_with(|| OpInProgress(Doing::begin(run, what(), Some(self.path.clone()))));
            if busy.poll_cancelled(context) { Poll::Ready(None) } else { Poll::Pending }
        })
        .await;
        drop(busy);
        match result {
            Some(result) => {
                ctx.expect_end().await;
                result
            }
            None => Err(run.why_cancelled(&self.path.at(0))),
        }
    }

    /// What is known of an effect of the body.
    pub(crate) fn effect(&self, key: &str) -> Arc<KeyedEffect> {
        self.effects.lock().entry(key.into()).or_default().clone()
    }

    /// Runs an operation of the body at a place that has the name of its key, and not a number.
    pub(crate) async fn aside<T, F>(&self, ctx: &Ctx, key: &str, operate: impl FnOnce(Ctx) -> F) -> T
    where
        F: Future<Output = T>,
    {
        let run = self.request.run();
        let name = match key.len() {
            0..=KEY_BYTES => format!("once>{key}"),
            _ => format!("once>{:016x}", hash_text(key)),
        };
        let path = self.path.named(&name, 0);
        // Meanwhile the branch of the caller does nothing else.
        let here = ctx.begins().await;
        let branch = Branch::forked(path.clone(), self.request.has_operations(&path));
        let in_saga = Branch::polled(run).is_some_and(|(_, in_saga)| in_saga);
        let mut running = std::pin::pin!(operate(ctx.on(branch.clone())));
        let done = std::future::poll_fn(|context| branch.poll(run, in_saga, || running.as_mut().poll(context))).await;
        here.ends();
        done
    }
}
