//! Lists of executions, and bulk operations. Lists are compared with a selection among all executions.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use latchwork::Cursor;
use latchwork::store::Timestamp;
use latchwork::testing::TestEngine;
use latchwork::workflow::{
    Attribute, Ctx, ExecutionFilter, ExecutionState, Failure, History, Listed, Status, Wait, WaitsFor, Workflow,
    WorkflowError, workflow,
};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Job {
    number: u64,
    end: End,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum End {
    Complete,
    Fail,
    Panic,
    Sleep,
    Signal,
    OtherSignal,
    Both,
    Retry,
    Stuck,
    /// Is cancelled from outside.
    Cancelled,
}

const ENDS: [End; 10] = [
    End::Complete,
    End::Fail,
    End::Panic,
    End::Sleep,
    End::Signal,
    End::OtherSignal,
    End::Both,
    End::Retry,
    End::Stuck,
    End::Cancelled,
];

/// The tags and attributes of a job.
fn labels(number: u64) -> (BTreeSet<String>, BTreeMap<String, Attribute>) {
    let (mut tags, mut attributes) = (BTreeSet::new(), BTreeMap::new());
    for (divisor, tag) in [(2, "even"), (3, "third"), (5, "fifth")] {
        if number.is_multiple_of(divisor) {
            tags.insert(tag.to_string());
        }
    }
    if !number.is_multiple_of(7) {
        let price = (number % 11) as i64 - 4;
        let price = if number.is_multiple_of(4) { Attribute::Real(price as f64 + 0.5) } else { price.into() };
        attributes.insert("price".to_string(), price);
    }
    if number.is_multiple_of(3) {
        attributes.insert("customer".to_string(), format!("c{}", number % 4).into());
    } else if number % 3 == 1 {
        attributes.insert("customer".to_string(), (number.is_multiple_of(2)).into());
    }
    (tags, attributes)
}

fn job(name: &str) -> Workflow<Job, u64> {
    workflow(name).timeout(Duration::from_secs(1000)).run(async |ctx: Ctx, job: Job| {
        let (tags, attributes) = labels(job.number);
        for tag in tags {
            ctx.tag(&tag).await?;
        }
        for (name, value) in attributes {
            ctx.set_attribute(&name, value).await?;
        }
        match job.end {
            End::Complete => {}
            End::Fail => return Err(Failure::new("as it was to")),
            End::Panic => panic!("as it was to"),
            End::Sleep => ctx.sleep(Duration::from_secs(86_400)).await?,
            End::Signal | End::Cancelled => ctx.receive::<()>("go").await?,
            End::OtherSignal => ctx.receive::<()>("stop").await?,
            End::Both => {
                let (signal, time) = ctx
                    .join((
                        async |ctx: Ctx| ctx.receive::<()>("go").await,
                        async |ctx: Ctx| ctx.sleep(Duration::from_secs(86_400)).await,
                    ))
                    .await;
                signal.and(time)?;
            }
            End::Retry => {
                let pause = Duration::from_secs(3600);
                let retry = latchwork::workflow::Retry::exponential().first_pause(pause).longest_pause(pause);
                ctx.run("busy", async || Err::<(), _>(Failure::new("busy"))).retry(retry).await?;
            }
            End::Stuck => ctx.run("stuck", async || std::future::pending::<Result<(), Failure>>().await).await?,
        }
        Ok(job.number)
    })
}

/// What is known about an execution without any list.
#[derive(Debug)]
struct Known {
    id: String,
    history: History,
    waits: Vec<Wait>,
    tags: BTreeSet<String>,
    attributes: BTreeMap<String, Attribute>,
}

impl Known {
    fn is(&self, is: Status) -> bool {
        let state = &self.history.state;
        let is_timed = |wait: &Wait| matches!(wait.what, WaitsFor::Timer | WaitsFor::Retry(_));
        match is {
            Status::Running => matches!(state, ExecutionState::Running),
            Status::Waiting => matches!(state, ExecutionState::Waiting),
            Status::Asleep => matches!(state, ExecutionState::Waiting) && self.waits.iter().all(is_timed),
            Status::Parked => matches!(state, ExecutionState::Parked(_)),
            Status::Completed => matches!(state, ExecutionState::Completed(_)),
            Status::Failed => matches!(state, ExecutionState::Failed(_)),
            Status::TimedOut => matches!(state, ExecutionState::TimedOut),
            Status::Cancelled => matches!(state, ExecutionState::Cancelled(_)),
        }
    }

    fn waits_for(&self, what: &WaitsFor) -> bool {
        match what {
            WaitsFor::Timer => self.is(Status::Asleep),
            what => self.is(Status::Waiting) && self.waits.iter().any(|wait| wait.what == *what),
        }
    }

    fn number(&self, name: &str) -> Option<f64> {
        match self.attributes.get(name)? {
            Attribute::Integer(value) => Some(*value as f64),
            Attribute::Real(value) => Some(*value),
            _ => None,
        }
    }

    fn text(&self, name: &str) -> Option<&str> {
        if let Attribute::Text(text) = self.attributes.get(name)? { Some(text) } else { None }
    }
}

/// Gives every task so many turns that no task has anything left to do.
async fn settle() {
    for _ in 0..2000 {
        tokio::task::yield_now().await;
    }
}

async fn populated() -> (TestEngine, Vec<Known>) {
    let (a, b) = (job("order"), job("orders"));
    let test = TestEngine::build(3).register(&a).register(&b).start().await.unwrap();
    let mut ids = Vec::new();
    for number in 0..160u64 {
        // Some start at the same time, and a few have timed out by then.
        if number.is_multiple_of(3) {
            test.run(test.env().sleep(Duration::from_millis(1))).await;
        }
        if number == 20 {
            settle().await;
            test.run(test.env().sleep(Duration::from_secs(1001))).await;
        }
        let end = ENDS[(number * 7 % 10) as usize];
        let workflow = if number % 5 < 3 { &a } else { &b };
        let id = format!("{:02}-{number}", number * 37 % 100);
        test.engine().start(workflow, Job { number, end }).id(id.as_str()).await.unwrap();
        if end == End::Cancelled {
            settle().await;
            match test.engine().cancel(id.as_str(), "as it was to").await {
                // The execution may have ended already.
                Ok(()) | Err(WorkflowError::Ended { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
        ids.push((id, number));
    }
    settle().await;
    let mut known = Vec::new();
    for (id, number) in ids {
        let history = test.history(id.as_str()).await.unwrap();
        let waits = test.engine().why(id.as_str()).await.unwrap().waits;
        let (tags, attributes) = labels(number);
        known.push(Known { id, history, waits, tags, attributes });
    }
    (test, known)
}

type Test = Box<dyn Fn(&Known) -> bool>;

const ALL: [Status; 8] = [
    Status::Running,
    Status::Waiting,
    Status::Asleep,
    Status::Parked,
    Status::Completed,
    Status::Failed,
    Status::TimedOut,
    Status::Cancelled,
];

/// A filter, and the condition that it stands for.
fn choices(known: &[Known]) -> Vec<Vec<(ExecutionFilter, Test)>> {
    fn choice(filter: ExecutionFilter, test: impl Fn(&Known) -> bool + 'static) -> (ExecutionFilter, Test) {
        (filter, Box::new(test))
    }
    let any = || choice(ExecutionFilter::new(), |_| true);
    let mut is = vec![any(), any(), any(), any(), any(), any()];
    is.extend(ALL.map(|is| choice(ExecutionFilter::new().is(is), move |known| known.is(is))));
    is.push(choice(ExecutionFilter::new().is(Status::Failed).is(Status::Asleep).is(Status::Waiting), |known| {
        known.is(Status::Failed) || known.is(Status::Waiting)
    }));
    let workflows = vec![
        any(),
        choice(ExecutionFilter::new().workflow("order"), |known| known.history.workflow == "order"),
        choice(ExecutionFilter::new().workflow("orders").workflow("order").workflow("none"), |_| true),
    ];
    let (go, stop) = (WaitsFor::Signal("go".into()), WaitsFor::Signal("stop".into()));
    let retry = WaitsFor::Retry("busy".into());
    let mut waits = vec![any(), any(), any(), any(), any(), any()];
    for what in [go.clone(), retry, WaitsFor::Timer] {
        waits.push(choice(ExecutionFilter::new().waits_for(what.clone()), move |known| known.waits_for(&what)));
    }
    let either = ExecutionFilter::new().waits_for(go.clone()).waits_for(stop.clone()).waits_for(WaitsFor::Timer);
    waits.push(choice(either, move |known| {
        known.waits_for(&go) || known.waits_for(&stop) || known.waits_for(&WaitsFor::Timer)
    }));
    let tags = vec![
        any(),
        choice(ExecutionFilter::new().tag("even"), |known| known.tags.contains("even")),
        choice(ExecutionFilter::new().tag("third").tag("even"), |known| {
            known.tags.contains("even") && known.tags.contains("third")
        }),
    ];
    let attributes = vec![
        any(),
        any(),
        choice(ExecutionFilter::new().attribute("customer", "c1"), |known| known.text("customer") == Some("c1")),
        choice(ExecutionFilter::new().attribute("price", 3.0), |known| known.number("price") == Some(3.0)),
        choice(ExecutionFilter::new().attribute("customer", false), |known| {
            known.attributes.get("customer") == Some(&Attribute::Boolean(false))
        }),
    ];
    let between = |low: f64, high: f64| {
        move |known: &Known| known.number("price").is_some_and(|price| low <= price && price <= high)
    };
    let limits = vec![
        any(),
        any(),
        choice(ExecutionFilter::new().at_least("price", 1), between(1.0, 100.0)),
        choice(ExecutionFilter::new().greater_than("price", 1.5).at_most("price", 4), between(1.6, 4.0)),
        choice(
            ExecutionFilter::new().less_than("price", 0).greater_than("price", -3).at_least("price", -4),
            between(-2.9, -0.1),
        ),
        choice(ExecutionFilter::new().at_least("customer", "c1").less_than("customer", "c3"), |known| {
            known.text("customer").is_some_and(|text| ("c1".."c3").contains(&text))
        }),
    ];
    let middle = known[known.len() / 2].history.started;
    let last = known[known.len() - 30].history.started;
    let is_old = move |known: &Known| known.history.started <= middle;
    let is_middle = move |known: &Known| (middle..last).contains(&known.history.started);
    let times = vec![
        any(),
        choice(ExecutionFilter::new().started(..=middle), is_old),
        choice(ExecutionFilter::new().started(middle..).started(..last), is_middle),
    ];
    vec![is, workflows, waits, tags, attributes, limits, times]
}

/// Several filters, combined into one.
fn merged(filters: &[&ExecutionFilter]) -> ExecutionFilter {
    let mut whole = serde_json::to_value(ExecutionFilter::new()).unwrap();
    for filter in filters {
        let more = serde_json::to_value(filter).unwrap();
        for (name, value) in more.as_object().unwrap() {
            match (&mut whole[name], value) {
                (serde_json::Value::Array(all), serde_json::Value::Array(more)) => all.extend(more.clone()),
                (slot, value) => *slot = value.clone(),
            }
        }
    }
    serde_json::from_value(whole).unwrap()
}

/// All pages of a list.
async fn pages(test: &TestEngine, filter: &ExecutionFilter, ascending: bool, limit: usize) -> Vec<Listed> {
    let (mut all, mut cursor) = (Vec::new(), None::<Cursor>);
    loop {
        let list = test.engine().list(filter.clone()).limit(limit).after(cursor);
        let page = if ascending { list.ascending() } else { list.descending() }.await.unwrap();
        assert!(page.items.len() == limit || page.next.is_none(), "{filter:?}");
        all.extend(page.items);
        let Some(next) = page.next else { return all };
        let text = next.to_string();
        cursor = Some(text.parse().unwrap());
        assert_eq!(serde_json::from_str::<Cursor>(&serde_json::to_string(&next).unwrap()).unwrap(), next);
    }
}

#[tokio::test]
async fn lists_hold_what_a_full_scan_finds() {
    let (test, known) = populated().await;
    for is in ALL {
        assert!(known.iter().filter(|known| known.is(is)).count() >= 4, "{is:?}");
    }
    let choices = choices(&known);
    let mut random = fastrand::Rng::with_seed(1);
    let mut found = 0;
    for round in 0..1500 {
        let chosen: Vec<&(ExecutionFilter, Test)> =
            choices.iter().map(|some| &some[random.usize(..some.len())]).collect();
        let filter = merged(&chosen.iter().map(|(filter, _)| filter).collect::<Vec<_>>());
        let mut expected: Vec<&Known> =
            known.iter().filter(|known| chosen.iter().all(|(_, test)| test(known))).collect();
        let limits = &chosen[5].0;
        let by_start = |known: &Known| (known.history.started, known.id.clone());
        expected.sort_by_key(|known| by_start(known));
        let valued = serde_json::to_value(limits).unwrap()["limits"][0]["name"].clone();
        match valued.as_str() {
            Some("price") => expected.sort_by(|a, b| a.number("price").partial_cmp(&b.number("price")).unwrap()),
            Some(name) => expected.sort_by(|a, b| a.text(name).cmp(&b.text(name))),
            None => {}
        }
        found += expected.len();
        let ascending = round % 2 == 0;
        if !ascending {
            expected.reverse();
        }
        let expected: Vec<&str> = expected.iter().map(|known| known.id.as_str()).collect();
        for limit in [1, 2, 7, 1000] {
            let listed = pages(&test, &filter, ascending, limit).await;
            let ids: Vec<&str> = listed.iter().map(|listed| &*listed.id).collect();
            assert_eq!(ids, expected, "{filter:?}, ascending: {ascending}, {limit} on a page");
            for listed in listed {
                let known = known.iter().find(|known| known.id == *listed.id).unwrap();
                assert_eq!((&listed.tags, &listed.attributes), (&known.tags, &known.attributes));
                assert_eq!((&listed.state, listed.started), (&known.history.state, known.history.started));
            }
        }
    }
    assert!(found > 5000, "{found} executions were found");
}

#[tokio::test]
async fn impossible_lists_are_refused() {
    let order = job("order");
    let test = TestEngine::new(&order, 1).await.unwrap();
    for number in 0..3 {
        test.engine().start(&order, Job { number, end: End::Complete }).await.unwrap();
    }
    let next = test.engine().list(ExecutionFilter::new()).limit(1).await.unwrap().next.unwrap();
    let text = next.to_string();
    assert!(text[..8].parse::<Cursor>().is_err());
    let truncated: Cursor = text[..text.len() - 2 * 40].parse().unwrap();
    let lists = [
        test.engine().list(ExecutionFilter::new()).ascending().after(next.clone()),
        test.engine().list(ExecutionFilter::new().at_least("price", 1)).after(next.clone()),
        test.engine().list(ExecutionFilter::new().is(Status::Completed)).after(next.clone()),
        test.engine().list(ExecutionFilter::new()).after(truncated),
    ];
    for list in lists {
        let refused = list.await;
        assert!(matches!(refused, Err(WorkflowError::Cursor(_))), "{refused:?}");
    }
    // The range of start times may differ: `latch workflow list --since 2d` computes it anew for each page.
    let late = ExecutionFilter::new().started(Timestamp(1)..);
    assert_eq!(test.engine().list(late).after(next).await.unwrap().items.len(), 2);
    let lists = [
        test.engine().list(ExecutionFilter::new().waits_for(WaitsFor::Store)),
        test.engine().list(ExecutionFilter::new().tag("a".repeat(100_000))),
        test.engine().list(ExecutionFilter::new().at_most("price", f64::NAN)),
    ];
    for list in lists {
        let refused = list.await;
        assert!(matches!(refused, Err(WorkflowError::List { .. })), "{refused:?}");
    }
}

fn patient() -> Workflow<u64, u64> {
    workflow("patient").run(async |ctx: Ctx, number: u64| {
        if number.is_multiple_of(2) {
            ctx.tag("even").await?;
        }
        let first = ctx.receive::<u64>("go").await?;
        let second = ctx.receive::<u64>("go").await?;
        Ok(first + second)
    })
}

#[tokio::test]
async fn many_are_signalled_once_under_one_operation() {
    let patient = patient();
    let test = TestEngine::new(&patient, 1).await.unwrap();
    let engine = test.engine();
    for number in 0..1201 {
        engine.start(&patient, number).id(format!("p{number}")).await.unwrap();
    }
    settle().await;
    let even = ExecutionFilter::new().tag("even");
    let counted = engine.bulk(even.clone()).dry_run().signal("go", &1u64).await.unwrap();
    assert_eq!((counted.matched, counted.done), (601, 0));
    for _ in 0..2 {
        let report = engine.bulk(even.clone()).operation("first").signal("go", &1u64).await.unwrap();
        assert_eq!((report.matched, report.done, report.failures), (601, 601, 0));
        settle().await;
    }
    let completed = engine.list(ExecutionFilter::new().is(Status::Completed)).await.unwrap();
    assert!(completed.items.is_empty(), "each has had one signal");
    // Another message under the same id is a mistake of the caller, and is reported.
    let report = engine.bulk(even.clone()).operation("first").signal("go", &2u64).await.unwrap();
    assert_eq!((report.done, report.failures, report.failed.len()), (0, 601, 601));
    let report = engine.bulk(even.clone()).signal("go", &2u64).await.unwrap();
    assert_eq!(report.done, 601);
    let handle = engine.handle(&patient, "p600");
    assert_eq!(test.run(handle.result()).await.unwrap(), 3);
    settle().await;
    let report = engine.bulk(ExecutionFilter::new()).terminate("enough").await.unwrap();
    assert_eq!((report.matched, report.done, report.passed_over), (1201, 600, 601));
    assert!(
        engine.list(ExecutionFilter::new().is(Status::Waiting).is(Status::Running)).await.unwrap().items.is_empty()
    );
}

#[tokio::test]
async fn many_that_are_parked_try_again_and_many_that_wait_are_cancelled() {
    let is_fixed = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let seen = is_fixed.clone();
    let broken = workflow("broken").run(move |_: Ctx, ()| {
        assert!(seen.load(std::sync::atomic::Ordering::SeqCst), "as it was to");
        async { Ok(()) }
    });
    let patient = patient();
    let test = TestEngine::build(1).register(&broken).register(&patient).start().await.unwrap();
    let engine = test.engine();
    for number in 0..10 {
        engine.start(&broken, ()).await.unwrap();
        engine.start(&patient, number).await.unwrap();
    }
    settle().await;
    let parked = ExecutionFilter::new().is(Status::Parked);
    assert_eq!(engine.list(parked.clone()).await.unwrap().items.len(), 10);
    is_fixed.store(true, std::sync::atomic::Ordering::SeqCst);
    let report = engine.bulk(ExecutionFilter::new()).retry().await.unwrap();
    assert_eq!((report.matched, report.done, report.passed_over), (20, 10, 10));
    settle().await;
    assert_eq!(
        engine.list(ExecutionFilter::new().workflow("broken").is(Status::Completed)).await.unwrap().items.len(),
        10
    );
    let report =
        engine.bulk(ExecutionFilter::new().is(Status::Waiting).is(Status::Running)).cancel("enough").await.unwrap();
    // Some may end before the bulk operation asks whether they are cancelled.
    assert_eq!((report.matched, report.done + report.passed_over, report.failures), (10, 10, 0));
    settle().await;
    assert_eq!(engine.list(ExecutionFilter::new().is(Status::Cancelled)).await.unwrap().items.len(), 10);
}
