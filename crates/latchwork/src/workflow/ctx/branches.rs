//! Branches: operations of one execution side by side. Each branch has a journal of its own, so a replay gives each
//! what it had, whatever order they come in; which of them was first, where that counts, is recorded.

use std::collections::BTreeSet;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Context;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde::{Deserialize, Serialize};

use crate::workflow::Failure;
use crate::workflow::ctx::Ctx;
use crate::workflow::journal::place::Place;
use crate::workflow::journal::replay::Call;
use crate::workflow::run::Branch;
use crate::workflow::stored::record::{Entry, EntryState, Kind};

/// A future in a box: its caller need not know what it is made of.
pub type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A branch at work, which ends with its number.
type Numbered<'a, T> = Boxed<'a, (usize, T)>;

/// A fork that the code has come to.
struct Fork {
    /// The branch that it is in.
    here: Arc<Branch>,
    place: Place,
    entry: Entry,
    /// Whether a replay may find something of the branches.
    is_replayed: bool,
    /// Which branch was first, and how many had begun by then, if that was recorded.
    first: Option<(usize, usize)>,
    in_saga: bool,
    /// Whether those beside one that has failed come to their end, so that what they have done is undone.
    ends_all: bool,
}

impl Fork {
    /// Whether a branch is run: of those of which one was first only that one is again, unless all come to their end.
    fn runs(&self, branch: usize) -> bool {
        self.first.is_none_or(|(first, begun)| first == branch || self.ends_all && branch < begun)
    }

    /// Whether a branch is the first, or may be.
    fn is_first(&self, branch: usize) -> bool {
        self.first.is_none_or(|(first, _)| first == branch)
    }
}

/// Branches of a fork that are under way. Those that are left when this is dropped are given up.
struct Branches<'a, T> {
    ctx: &'a Ctx,
    fork: Place,
    running: FuturesUnordered<Numbered<'a, T>>,
    numbers: BTreeSet<usize>,
}

impl<'a, T: Send + 'a> Branches<'a, T> {
    fn new(ctx: &'a Ctx, fork: &Fork) -> Branches<'a, T> {
        Branches { ctx, fork: fork.place.clone(), running: FuturesUnordered::new(), numbers: BTreeSet::new() }
    }

    fn add(&mut self, branch: usize, running: Numbered<'a, T>) {
        self.numbers.insert(branch);
        self.running.push(running);
    }

    /// The next that has ended.
    async fn next(&mut self) -> Option<(usize, T)> {
        let (branch, done) = self.running.next().await?;
        self.numbers.remove(&branch);
        Some((branch, done))
    }
}

impl<T> Drop for Branches<'_, T> {
    fn drop(&mut self) {
        self.ctx.run.is_past(&self.fork);
        self.running.clear();
        for branch in &self.numbers {
            self.ctx.run.give_up(&self.fork.fork(*branch));
        }
    }
}

impl Ctx {
    async fn fork(&self, kind: Kind, count: usize) -> Fork {
        let here = self.begins().await;
        let call = Call { kind, name: "", argument: count as u64 };
        let (place, found) = self.take(&call).await;
        let is_replayed = found.is_some();
        let entry = found.unwrap_or_else(|| {
            let entry = call.entry(self.run.env().now(), EntryState::Begun);
            self.run.put(&place, entry.clone());
            entry
        });
        let first = match &entry.state {
            EntryState::Done(text) => Some(self.recorded(&place, &entry, serde_json::from_str(text)).await),
            _ => None,
        };
        let in_saga = Branch::polled(&self.run).is_some_and(|(_, in_saga)| in_saga);
        let ends_all = in_saga && kind == Kind::Join;
        match first {
            Some((first, _)) if ends_all => self.run.call_off(&place, first),
            Some((first, _)) => self.run.release_lost(&place, first).await,
            None => {}
        }
        Fork { here, place, entry, is_replayed, first, in_saga, ends_all }
    }

    /// A branch of a fork, if it is run: its code has a context of its own, and has to come to the journal's end.
    /// `give` makes of its output what the branch gives, with its number.
    fn branch<'a, T, U, F>(
        &'a self,
        fork: &Fork,
        branch: usize,
        code: impl FnOnce(Ctx) -> F + Send + 'a,
        give: fn(T) -> U,
    ) -> Option<Numbered<'a, U>>
    where
        F: Future<Output = T> + Send + 'a,
        T: Send + 'a,
        U: 'a,
    {
        if !fork.runs(branch) {
            return None;
        }
        let ctx = self.on(Branch::forked(fork.place.fork(branch), fork.is_replayed));
        let in_saga = fork.in_saga;
        Some(Box::pin(async move {
            let mut running = std::pin::pin!(ctx.branch.poll(&ctx.run, in_saga, || code(ctx.clone())));
            let poll =
                |context: &mut Context<'_>| ctx.branch.poll(&ctx.run, in_saga, || running.as_mut().poll(context));
            let done = std::future::poll_fn(poll).await;
            ctx.expect_end().await;
            (branch, give(done))
        }))
    }

    /// Records which branch was first, of so many that have begun.
    fn was_first(&self, fork: &Fork, branch: usize, begun: usize) {
        if fork.first.is_none() {
            let entry = Entry { state: EntryState::Done(format!("[{branch},{begun}]")), ..fork.entry.clone() };
            self.run.put(&fork.place, entry);
            if fork.ends_all {
                self.run.call_off(&fork.place, branch);
            }
        }
    }

    /// The branches beside the first were given up. One that has recorded something, and was not run since the
    /// execution was taken up again, may hold what only its code would let go of.
    async fn gave_up(&self, fork: &Fork, branch: usize) {
        if fork.is_replayed && fork.first.is_none() && !fork.ends_all {
            self.run.release_lost(&fork.place, branch).await;
        }
        fork.here.ends();
    }

    /// Runs the branches of a fork, so many at once at the most, until all have ended, or one has as is not to be.
    /// Gives what each gave, in their order, and the bad one.
    async fn all<'a, T: Send + 'a>(
        &'a self,
        fork: &Fork,
        waiting: impl IntoIterator<Item = Option<Numbered<'a, T>>>,
        at_once: usize,
        is_bad: fn(&T) -> bool,
    ) -> (Vec<T>, Option<T>) {
        let (mut branches, mut waiting) = (Branches::new(self, fork), waiting.into_iter());
        let (mut done, mut bad) = (Vec::new(), None);
        loop {
            while branches.numbers.len() < at_once.max(1)
                && (bad.is_none() || fork.first.is_some())
                && let Some(next) = waiting.next()
            {
                next.into_iter().for_each(|running| branches.add(done.len(), running));
                done.push(None);
            }
            let Some((branch, value)) = branches.next().await else { break };
            if !is_bad(&value) {
                done[branch] = Some(value);
            } else if bad.is_none() && fork.is_first(branch) {
                self.was_first(fork, branch, done.len());
                bad = Some((branch, value));
            }
            if bad.is_some() && !fork.ends_all {
                break;
            }
        }
        drop(branches);
        match (&bad, fork.first) {
            (Some((branch, _)), _) => self.gave_up(fork, *branch).await,
            (None, None) => fork.here.ends(),
            (None, Some((first, _))) => {
                let (path, place) = (fork.place.fork(first), &fork.place);
                let reason = format!("branch {path} has failed by the journal of operation {place}, and now has not");
                self.run.park(reason).await
            }
        }
        (done.into_iter().flatten().collect(), bad.map(|(_, value)| value))
    }

    /// Runs the branches of a fork until the first has ended. Gives which it was, and what it gave.
    async fn first<'a, T: Send + 'a>(
        &'a self,
        fork: &Fork,
        running: impl IntoIterator<Item = Option<Numbered<'a, T>>>,
    ) -> (usize, T) {
        let (mut branches, mut begun) = (Branches::new(self, fork), 0);
        for running in running {
            running.into_iter().for_each(|running| branches.add(begun, running));
            begun += 1;
        }
        let Some((branch, done)) = branches.next().await else { return std::future::pending().await };
        // First what is recorded: what was given up goes by it.
        self.was_first(fork, branch, begun);
        drop(branches);
        self.gave_up(fork, branch).await;
        (branch, done)
    }

    /// Runs branches side by side and waits for all of them: a tuple of functions that are given a context each. Gives
    /// a tuple of what they give.
    pub fn join<'a, B: JoinBranches<'a>>(&'a self, branches: B) -> Boxed<'a, B::Output> {
        branches.join(self)
    }

    /// Like [`Ctx::join`], for branches that may fail: with the first that does, the others are given up. In a saga,
    /// they are cancelled instead, and come to their end before what was done is undone.
    pub fn try_join<'a, B: TryJoinBranches<'a>>(&'a self, branches: B) -> Boxed<'a, Result<B::Output, Failure>> {
        branches.try_join(self)
    }

    /// Runs branches side by side until the first has ended, which is recorded; the others are given up. They may give
    /// different things: what comes back tells which it was.
    pub fn select<'a, B: SelectBranches<'a>>(&'a self, branches: B) -> Boxed<'a, B::Output> {
        branches.select(self)
    }

    /// Like [`Ctx::select`], for branches that all give the same, one for each item. Gives the place of the first to
    /// end, and what it gave. Without items it waits for ever.
    pub fn race<'a, I, T, F>(
        &'a self,
        items: impl IntoIterator<Item = I>,
        code: impl Fn(Ctx, I) -> F + Send + Sync + 'a,
    ) -> Boxed<'a, (usize, T)>
    where
        I: Send + 'a,
        F: Future<Output = T> + Send + 'a,
        T: Send + 'a,
    {
        let items: Vec<I> = items.into_iter().collect();
        Box::pin(async move {
            let fork = self.fork(Kind::Race, items.len()).await;
            let (fork, code) = (&fork, &code);
            let branch = |(branch, item)| self.branch(fork, branch, move |ctx| code(ctx, item), |done| done);
            self.first(fork, items.into_iter().enumerate().map(branch)).await
        })
    }

    /// Runs a branch for each item, so many at once at the most, and waits for all of them. Gives what they give, in
    /// the order of the items.
    pub fn map<'a, I, T, F>(
        &'a self,
        items: impl IntoIterator<Item = I>,
        at_once: usize,
        code: impl Fn(Ctx, I) -> F + Send + Sync + 'a,
    ) -> Boxed<'a, Vec<T>>
    where
        I: Send + 'a,
        F: Future<Output = T> + Send + 'a,
        T: Send + 'a,
    {
        let items: Vec<I> = items.into_iter().collect();
        Box::pin(async move { self.map_until(items, at_once, code, |_| false).await.0 })
    }

    /// Like [`Ctx::map`], for branches that may fail: with the first that does, the others are given up. In a saga,
    /// those that have begun are cancelled instead, and come to their end before what was done is undone.
    pub fn try_map<'a, I, T, F>(
        &'a self,
        items: impl IntoIterator<Item = I>,
        at_once: usize,
        code: impl Fn(Ctx, I) -> F + Send + Sync + 'a,
    ) -> Boxed<'a, Result<Vec<T>, Failure>>
    where
        I: Send + 'a,
        F: Future<Output = Result<T, Failure>> + Send + 'a,
        T: Send + 'a,
    {
        let items: Vec<I> = items.into_iter().collect();
        Box::pin(async move {
            let (done, failed) = self.map_until(items, at_once, code, |done| done.is_err()).await;
            done.into_iter().chain(failed).collect()
        })
    }

    /// Runs a branch for each item until all have ended, or one has as is not to be.
    async fn map_until<'a, I, T, F>(
        &'a self,
        items: Vec<I>,
        at_once: usize,
        code: impl Fn(Ctx, I) -> F + Send + Sync + 'a,
        is_bad: fn(&T) -> bool,
    ) -> (Vec<T>, Option<T>)
    where
        I: Send + 'a,
        F: Future<Output = T> + Send + 'a,
        T: Send + 'a,
    {
        let fork = self.fork(Kind::Join, items.len()).await;
        let (fork, code) = (&fork, &code);
        let branch = |(branch, item)| self.branch(fork, branch, move |ctx| code(ctx, item), |done| done);
        self.all(fork, items.into_iter().enumerate().map(branch), at_once, is_bad).await
    }
}

macro_rules! branches {
    ($selected:ident, $count:literal: $($code:ident $future:ident $output:ident $place:tt $name:ident),+) => {
        /// Which of several branches was first, and what it gave.
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[allow(missing_docs)] // They are counted.
        pub enum $selected<$($output),+> {
            $($name($output)),+
        }

        impl<$($output),+> $selected<$($output),+> {
            /// What all branches gave.
            fn in_order(done: Vec<Self>) -> ($($output,)+) {
                let mut done = done.into_iter();
                ($(match done.next() {
                    Some($selected::$name(value)) => value,
                    _ => unreachable!("each has ended once"),
                },)+)
            }
        }

        impl<'a, $($code, $future, $output),+> JoinBranches<'a> for ($($code,)+)
        where
            $($code: FnOnce(Ctx) -> $future + Send + 'a,
            $future: Future<Output = $output> + Send + 'a,
            $output: Send + 'a),+
        {
            type Output = ($($output,)+);

            fn join(self, ctx: &'a Ctx) -> Boxed<'a, Self::Output> {
                Box::pin(async move {
                    let fork = ctx.fork(Kind::Join, $count).await;
                    let running = [$(ctx.branch(&fork, $place, self.$place, $selected::$name)),+];
                    let (done, _) = ctx.all(&fork, running, $count, |_| false).await;
                    $selected::in_order(done)
                })
            }
        }

        impl<'a, $($code, $future, $output),+> TryJoinBranches<'a> for ($($code,)+)
        where
            $($code: FnOnce(Ctx) -> $future + Send + 'a,
            $future: Future<Output = Result<$output, Failure>> + Send + 'a,
            $output: Send + 'a),+
        {
            type Output = ($($output,)+);

            fn try_join(self, ctx: &'a Ctx) -> Boxed<'a, Result<Self::Output, Failure>> {
                Box::pin(async move {
                    let fork = ctx.fork(Kind::Join, $count).await;
                    let running = [$(ctx.branch(&fork, $place, self.$place, |done| done.map($selected::$name))),+];
                    let (done, failed) = ctx.all(&fork, running, $count, Result::is_err).await;
                    let done: Result<Vec<_>, Failure> = done.into_iter().chain(failed).collect();
                    done.map($selected::in_order)
                })
            }
        }

        impl<'a, $($code, $future, $output),+> SelectBranches<'a> for ($($code,)+)
        where
            $($code: FnOnce(Ctx) -> $future + Send + 'a,
            $future: Future<Output = $output> + Send + 'a,
            $output: Send + 'a),+
        {
            type Output = $selected<$($output),+>;

            fn select(self, ctx: &'a Ctx) -> Boxed<'a, Self::Output> {
                Box::pin(async move {
                    let fork = ctx.fork(Kind::Race, $count).await;
                    let running = [$(ctx.branch(&fork, $place, self.$place, $selected::$name)),+];
                    ctx.first(&fork, running).await.1
                })
            }
        }
    };
}

/// Branches for [`Ctx::join`]: tuples of two to six functions.
pub trait JoinBranches<'a>: Send {
    /// What they give.
    type Output: Send;

    /// Runs them.
    fn join(self, ctx: &'a Ctx) -> Boxed<'a, Self::Output>;
}

/// Branches for [`Ctx::try_join`]: tuples of two to six functions that may fail.
pub trait TryJoinBranches<'a>: Send {
    /// What they give.
    type Output: Send;

    /// Runs them.
    fn try_join(self, ctx: &'a Ctx) -> Boxed<'a, Result<Self::Output, Failure>>;
}

/// Branches for [`Ctx::select`]: tuples of two to six functions.
pub trait SelectBranches<'a>: Send {
    /// Which was first, and what it gave.
    type Output: Send;

    /// Runs them.
    fn select(self, ctx: &'a Ctx) -> Boxed<'a, Self::Output>;
}

branches!(First2, 2: A FA TA 0 First, B FB TB 1 Second);
branches!(First3, 3: A FA TA 0 First, B FB TB 1 Second, C FC TC 2 Third);
branches!(First4, 4: A FA TA 0 First, B FB TB 1 Second, C FC TC 2 Third, D FD TD 3 Fourth);
branches!(First5, 5: A FA TA 0 First, B FB TB 1 Second, C FC TC 2 Third, D FD TD 3 Fourth, E FE TE 4 Fifth);
branches!(
    First6, 6: A FA TA 0 First, B FB TB 1 Second, C FC TC 2 Third, D FD TD 3 Fourth, E FE TE 4 Fifth, F FF TF 5 Sixth
);
