//! Branches: operations of one execution side by side. Each branch has its own journal, so a replay returns the
//! recorded results to each branch in whatever order the branches run. Where it matters which branch was first, that is
//! recorded.

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
use crate::workflow::journal::replay::OpCall;
use crate::workflow::run::Branch;
use crate::workflow::stored::record::{Entry, EntryState, Kind};

/// A boxed future.
pub type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A running branch. It returns its index with its output.
type Numbered<'a, T> = Boxed<'a, (usize, T)>;

/// A fork in the code.
struct CodeFork {
    /// The branch that the fork is in.
    here: Arc<Branch>,
    place: Place,
    entry: Entry,
    /// True if the journal may hold entries of the branches.
    is_replayed: bool,
    /// The index of the first branch and how many had begun by then, if that is recorded.
    first: Option<(usize, usize)>,
    in_saga: bool,
    /// True if the branches beside a failed one run to their end, so that their work can be undone.
    ends_all: bool,
}

impl CodeFork {
    /// True if a branch runs. If one is recorded as the first, only that one runs again, unless all run to their end.
    fn runs(&self, branch: usize) -> bool {
        self.first.is_none_or(|(first, begun)| first == branch || self.ends_all && branch < begun)
    }

    /// True if a branch is the first, or may still be.
    fn is_first(&self, branch: usize) -> bool {
        self.first.is_none_or(|(first, _)| first == branch)
    }
}

/// The running branches of a fork. Branches that still run when this is dropped are dropped.
struct Branches<'a, T> {
    ctx: &'a Ctx,
    fork: Place,
    running: FuturesUnordered<Numbered<'a, T>>,
    numbers: BTreeSet<usize>,
}

impl<'a, T: Send + 'a> Branches<'a, T> {
    fn new(ctx: &'a Ctx, fork: &CodeFork) -> Branches<'a, T> {
        Branches { ctx, fork: fork.place.clone(), running: FuturesUnordered::new(), numbers: BTreeSet::new() }
    }

    fn add(&mut self, branch: usize, running: Numbered<'a, T>) {
        self.numbers.insert(branch);
        self.running.push(running);
    }

    /// The next branch that has ended.
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
    async fn fork(&self, kind: Kind, count: usize) -> CodeFork {
        let here = self.begins().await;
        let call = OpCall { kind, name: "", argument: count as u64 };
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
        CodeFork { here, place, entry, is_replayed, first, in_saga, ends_all }
    }

    /// A branch of a fork, if it runs: its code has its own context, and has to end where its journal ends. `give`
    /// converts the output of the branch.
    fn branch<'a, T, U, F>(
        &'a self,
        fork: &CodeFork,
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

    /// Records which branch was first, and how many had begun.
    fn was_first(&self, fork: &CodeFork, branch: usize, begun: usize) {
        if fork.first.is_none() {
            let entry = Entry { state: EntryState::Done(format!("[{branch},{begun}]")), ..fork.entry.clone() };
            self.run.put(&fork.place, entry);
            if fork.ends_all {
                self.run.call_off(&fork.place, branch);
            }
        }
    }

    /// The branches beside the first were dropped. A branch that has recorded something, and has not run since the
    /// execution was loaded again, may hold locks or reviews that only its code would release.
    async fn gave_up(&self, fork: &CodeFork, branch: usize) {
        if fork.is_replayed && fork.first.is_none() && !fork.ends_all {
            self.run.release_lost(&fork.place, branch).await;
        }
        fork.here.ends();
    }

    /// Runs the branches of a fork, at most `at_once` at a time, until all have ended, or until one output is bad.
    /// Returns the outputs in the order of the branches, and the bad one.
    async fn all<'a, T: Send + 'a>(
        &'a self,
        fork: &CodeFork,
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
                let reason = format!("branch {path} failed in the journal of operation {place}, and did not fail now");
                self.run.park(reason).await
            }
        }
        (done.into_iter().flatten().collect(), bad.map(|(_, value)| value))
    }

    /// Runs the branches of a fork until the first has ended. Returns its index and its output.
    async fn first<'a, T: Send + 'a>(
        &'a self,
        fork: &CodeFork,
        running: impl IntoIterator<Item = Option<Numbered<'a, T>>>,
    ) -> (usize, T) {
        let (mut branches, mut begun) = (Branches::new(self, fork), 0);
        for running in running {
            running.into_iter().for_each(|running| branches.add(begun, running));
            begun += 1;
        }
        let Some((branch, done)) = branches.next().await else { return std::future::pending().await };
        // The record comes first: the drop of the other branches depends on it.
        self.was_first(fork, branch, begun);
        drop(branches);
        self.gave_up(fork, branch).await;
        (branch, done)
    }

    /// Runs branches side by side and waits for all of them. The branches are a tuple of functions, each called with
    /// its own context. Returns the tuple of their outputs.
    ///
    /// An output may have any type, so the type of an error is not known from here. A branch that uses `?` says what it
    /// returns: `async |ctx: Ctx| -> Result<u64, Failure> { … }`. The branches of [`Ctx::try_join`] need not.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let both = ctx.join((
    ///     async |ctx: Ctx| ctx.run("stock", async || Ok(3u64)).await,
    ///     async |ctx: Ctx| ctx.run("price", async || Ok(8u64)).await,
    /// ));
    /// let (stock, price) = both.await;
    /// println!("{} pieces for {} each", stock?, price?);
    /// # Ok(()) }
    /// ```
    pub fn join<'a, B: JoinBranches<'a>>(&'a self, branches: B) -> Boxed<'a, B::Output> {
        branches.join(self)
    }

    /// Like [`Ctx::join`], for branches that may fail: with the first failure, the others are dropped. In a saga, they
    /// are cancelled instead, and end before the saga undoes its work.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let both = ctx.try_join((
    ///     async |ctx: Ctx| ctx.run("stock", async || Ok(3u64)).await,
    ///     async |ctx: Ctx| ctx.run("price", async || Ok(8u64)).await,
    /// ));
    /// let (stock, price) = both.await?;
    /// # Ok(()) }
    /// ```
    pub fn try_join<'a, B: TryJoinBranches<'a>>(&'a self, branches: B) -> Boxed<'a, Result<B::Output, Failure>> {
        branches.try_join(self)
    }

    /// Runs branches side by side until the first has ended, and records which it was; the others are dropped. The
    /// outputs may have different types: the result says which branch was first. As in [`Ctx::join`], a branch that
    /// uses
    /// `?` says what it returns.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure, First2};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let first = ctx.select((
    ///     async |ctx: Ctx| ctx.receive::<String>("answer").await,
    ///     async |ctx: Ctx| ctx.sleep(Duration::from_secs(60)).await,
    /// ));
    /// match first.await {
    ///     First2::First(answer) => println!("the answer is {}", answer?),
    ///     First2::Second(_) => println!("there is no answer"),
    /// }
    /// # Ok(()) }
    /// ```
    pub fn select<'a, B: SelectBranches<'a>>(&'a self, branches: B) -> Boxed<'a, B::Output> {
        branches.select(self)
    }

    /// Like [`Ctx::select`], for branches with the same output type, one for each item. Returns the index of the first
    /// branch that ended, and its output. Without items it waits for ever.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let seconds = [50u64, 10, 30];
    /// let (first, _) = ctx.race(seconds, async |ctx: Ctx, s| ctx.sleep(Duration::from_secs(s)).await).await;
    /// # Ok(()) }
    /// ```
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

    /// Runs a branch for each item, at most `at_once` at a time, and waits for all of them. Returns the outputs in the
    /// order of the items.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let squares = ctx.map([1u64, 2], 2, async |ctx: Ctx, n: u64| ctx.run("square", async || Ok(n * n)).await);
    /// for square in squares.await {
    ///     println!("{}", square?);
    /// }
    /// # Ok(()) }
    /// ```
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

    /// Like [`Ctx::map`], for branches that may fail: with the first failure, the others are dropped. In a saga, the
    /// branches that have begun are cancelled instead, and end before the saga undoes its work.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let squares = ctx.try_map([1u64, 2], 2, async |ctx: Ctx, n: u64| ctx.run("square", async || Ok(n * n)).await);
    /// let squares: Vec<u64> = squares.await?;
    /// # Ok(()) }
    /// ```
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

    /// Runs a branch for each item until all have ended, or until one output is bad.
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
        /// The first of several branches, and its output.
        #[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
        #[allow(missing_docs)] // They are counted.
        pub enum $selected<$($output),+> {
            $($name($output)),+
        }

        impl<$($output),+> $selected<$($output),+> {
            /// The outputs of all branches, in order.
            fn in_order(done: Vec<Self>) -> ($($output,)+) {
                let mut done = done.into_iter();
                ($(match done.next() {
                    Some($selected::$name(value)) => value,
                    _ => unreachable!("each branch has ended once"),
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
    /// The outputs.
    type Output: Send;

    /// Runs the branches.
    fn join(self, ctx: &'a Ctx) -> Boxed<'a, Self::Output>;
}

/// Branches for [`Ctx::try_join`]: tuples of two to six functions that may fail.
pub trait TryJoinBranches<'a>: Send {
    /// The outputs.
    type Output: Send;

    /// Runs the branches.
    fn try_join(self, ctx: &'a Ctx) -> Boxed<'a, Result<Self::Output, Failure>>;
}

/// Branches for [`Ctx::select`]: tuples of two to six functions.
pub trait SelectBranches<'a>: Send {
    /// The first branch, and its output.
    type Output: Send;

    /// Runs the branches.
    fn select(self, ctx: &'a Ctx) -> Boxed<'a, Self::Output>;
}

branches!(First2, 2: A FA TA 0 First, B FB TB 1 Second);
branches!(First3, 3: A FA TA 0 First, B FB TB 1 Second, C FC TC 2 Third);
branches!(First4, 4: A FA TA 0 First, B FB TB 1 Second, C FC TC 2 Third, D FD TD 3 Fourth);
branches!(First5, 5: A FA TA 0 First, B FB TB 1 Second, C FC TC 2 Third, D FD TD 3 Fourth, E FE TE 4 Fifth);
branches!(
    First6, 6: A FA TA 0 First, B FB TB 1 Second, C FC TC 2 Third, D FD TD 3 Fourth, E FE TE 4 Fifth, F FF TF 5 Sixth
);
