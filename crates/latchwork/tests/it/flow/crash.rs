//! A crash before and after every commit of a flow that uses every verb: the output and the states are always the same,
//! no block runs again whose trace is recorded, and nothing is counted twice.

use std::sync::Arc;

use latchwork::flow::{AnswerKind, Block, Flow, RequestInput, handler, otherwise, router, sequencer, when};
use latchwork::testing::Crashes;
use latchwork::workflow::{Engine, Failure};
use parking_lot::Mutex;

use super::{Log, Tally, add, fails, input, note, only, sleeps, tally};

/// Asks, and adds one if the answer is yes.
fn asks(name: &str, log: &Log) -> Block<i64, i64> {
    let (own, log) = (name.to_string(), log.clone());
    handler(name).run(move |ctx, value: i64| {
        let (own, log) = (own.clone(), log.clone());
        async move {
            log.add(&own);
            let answer = ctx.suspend("go-on").message("Go on?").data(value).await?;
            Ok(value + i64::from(answer.is_approved()))
        }
    })
}

fn everything(log: &Log) -> Block<i64, i64> {
    let inner = sequencer("inner").state::<Tally>().step(&add("deep", log)).step(&sleeps("deeper", log));
    let inner = inner.map(|v, ctx| v + ctx.state().total).build().unwrap();
    let choose = |v: &i64, _: &_| if v % 2 == 0 { "even".to_string() } else { "odd".to_string() };
    let route = router("route", choose, &[&add("even", log), &add("odd", log)]).unwrap();
    let mends = handler("mends").run(async |_, _: Failure| Ok(1000_i64));
    let broken = sequencer("broken").state::<Tally>().step(&add("before", log)).step(&fails("breaks", log));
    let broken = broken.rescue(|_, _| true, &mends).build().unwrap();
    sequencer("all")
        .state::<Tally>()
        .step(&add("first", log))
        .step_if(|v, _| *v > 0, &add("if", log))
        .map(|v, ctx| v * 2 + ctx.state().total)
        .tap(&note("tap", log))
        .tap_if(|_, ctx| ctx.state().total == 3, &note("tap-if", log))
        .work(&note("work", log))
        .work_if(|_, _| true, &sleeps("slow-work", log))
        .wait_for_condition(|_, ctx| ctx.state().by.contains_key("work"))
        .parallel((&add("left", log), &sleeps("right", log)))
        .map(|(left, right), _| left + right)
        .wait_for_work()
        .step_all(&[&add("one", log), &add("two", log)])
        .for_each(2, &add("each", log))
        .map(|list: Vec<i64>, _| list.iter().sum::<i64>())
        .race(&[&add("quick", log), &sleeps("never", log)])
        .step_any(&[&fails("bad", log), &add("good", log)])
        .do_while(|_, ctx| ctx.state().by.get("while").is_none_or(|n| *n < 3), &add("while", log))
        .do_until(|v, _| v % 5 == 0, &add("until", log))
        .step(&add("again", log))
        .loop_back("again", |_, ctx| ctx.state().by["again"] < 3)
        .branch(vec![when(|v, _| *v < 0, &add("less", log)), otherwise(&add("more", log))])
        .step(&inner)
        .step(&route)
        .step(&asks("asks", log))
        .map(|v, _| vec![v, v])
        .for_each_background(&note("background", log))
        .map(|list: Vec<i64>, _| list[0])
        .throw_if(|_, _| None)
        .exit_if(|v, _| *v < 0)
        .step(&broken)
        .exit_if(|v, _| *v == 1000)
        .step(&fails("unreached", log))
        .build()
        .unwrap()
}

/// Answers every question, once.
async fn answers(flow: Flow, engine: Engine) {
    loop {
        for question in engine.flow(&flow).suspensions("run").await.unwrap_or_default() {
            let _ = engine.flow(&flow).answer(&question.id, AnswerKind::Approve, (), "ada").await;
        }
        engine.store().env().sleep(std::time::Duration::from_secs(60)).await;
    }
}

#[tokio::test]
async fn a_crash_anywhere_changes_neither_the_output_nor_the_states() {
    let current: Arc<Mutex<(Log, Option<Flow>)>> = Arc::default();
    let made = current.clone();
    let make = move || {
        let log = Log::default();
        let flow = only(everything(&log));
        let workflow = flow.workflow::<i64, i64>("run").unwrap();
        *made.lock() = (log, Some(flow));
        workflow
    };
    let asked = current.clone();
    let crashes = Crashes::of(make, input(1)).outside(move |engine| {
        let flow = asked.lock().1.clone().unwrap();
        answers(flow, engine)
    });
    let mut expected = None;
    let count = crashes
        .run(async |outcome| {
            let (log, flow) = current.lock().clone();
            let (flow, crash) = (flow.unwrap(), &outcome.crash);
            let output = *outcome.result.as_ref().unwrap_or_else(|error| panic!("{crash}: {error}"));
            assert_eq!(output, 1000, "{crash}");
            let checkpoints = outcome.engine().flow(&flow).request("execution").checkpoints().await.unwrap();
            let states = ["all", "all/inner", "all/broken"].map(|path| {
                let mut state = tally(&checkpoints, path);
                state.seen.sort();
                state
            });
            let expected = expected.get_or_insert_with(|| states.clone());
            assert_eq!(states, *expected, "{crash}");
            let all = &states[0];
            assert_eq!(
                (all.by["while"], all.by["again"], all.by["each"], all.by["background"]),
                (3, 3, 2, 2),
                "{crash}"
            );
            assert!(!all.seen.contains(&"never".to_string()), "{crash}");
            // The bodies of the chain: when one begins, the trace of the one before it is recorded.
            let chain = ["first", "if", "tap", "tap-if", "again", "more", "deep", "deeper", "asks", "before", "breaks"];
            let bodies = log.all();
            for pair in chain.windows(2) {
                let next =
                    bodies.iter().position(|body| body == pair[1]).unwrap_or_else(|| panic!("{crash}: {bodies:?}"));
                let again = bodies[next..].iter().any(|body| body == pair[0]);
                assert!(!again, "{crash}: {:?} ran again after {:?} had begun: {bodies:?}", pair[0], pair[1]);
            }
            assert_eq!(log.count("unreached"), 0, "{crash}");
        })
        .await;
    assert!(count > 50, "{count} crashes");
}

/// The room that a request without crashes needs: one commit for each boundary, and two for its start and its end.
#[tokio::test]
async fn a_boundary_is_one_commit() {
    for steps in [1_u64, 10] {
        let make = move || {
            let log = Log::default();
            let chain = (0..steps)
                .fold(sequencer("chain").state::<Tally>(), |chain, step| chain.step(&add(&format!("s{step}"), &log)));
            only(chain.build().unwrap()).workflow::<i64, i64>("run").unwrap()
        };
        let crashes = Crashes::of(make, RequestInput::new(1)).run(async |outcome| {
            assert_eq!(*outcome.result.as_ref().unwrap(), 1 + steps as i64);
        });
        assert_eq!(crashes.await, 2 * (steps + 1), "a crash before and after each commit of {steps} steps");
    }
}
