//! Each verb: what it gives, what it does on a failure, what it changes, and what a second life does in its middle.

use latchwork::flow::{Block, BlockError, SequencerBuilder, otherwise, router, sequencer, when};
use latchwork::workflow::Failure;

use super::{Log, Tally, add, fails, failure, note, only, requested, sleeps, tally};

type Build = fn(SequencerBuilder<Tally, i64, i64>, &Log) -> SequencerBuilder<Tally, i64, i64>;

fn chain(log: &Log, build: Build) -> Block<i64, i64> {
    build(sequencer("chain").state::<Tally>(), log).build().unwrap()
}

/// A verb, how it is used, its input, the output, and the bodies that have run, in order.
type Row = (&'static str, Build, i64, i64, &'static [&'static str]);

fn steps() -> Vec<Row> {
    vec![
        ("step", |chain, log| chain.step(&add("a", log)).step(&add("b", log)), 1, 3, &["a", "b"]),
        ("step_if, yes", |chain, log| chain.step_if(|v, _| *v == 1, &add("a", log)), 1, 2, &["a"]),
        ("step_if, no", |chain, log| chain.step_if(|v, _| *v == 2, &add("a", log)), 1, 1, &[]),
        ("step_with", |chain, log| chain.step_with(|v, _| v * 10, &add("a", log)), 1, 11, &["a"]),
        ("map", |chain, log| chain.step(&add("a", log)).map(|v, ctx| v * 10 + ctx.state().total), 1, 21, &["a"]),
        ("tap", |chain, log| chain.tap(&note("a", log)).tap(&add("b", log)), 1, 1, &["a", "b"]),
        (
            "tap_if",
            |chain, log| {
                chain
                    .tap_if(|_, ctx| ctx.state().total == 0, &note("a", log))
                    .tap_if(|_, ctx| ctx.state().total == 0, &note("b", log))
            },
            1,
            1,
            &["a"],
        ),
    ]
}

fn background() -> Vec<Row> {
    vec![
        (
            "work",
            |chain, log| chain.work(&note("a", log)).wait_for_work().map(|v, ctx| v + ctx.state().total),
            1,
            2,
            &["a"],
        ),
        ("work that fails", |chain, log| chain.work(&fails("a", log)).step(&add("b", log)), 1, 2, &["a", "b"]),
        // A body that sleeps leaves memory, and runs again up to its sleep.
        ("work at the end", |chain, log| chain.work(&sleeps("a", log)), 1, 1, &["a", "a"]),
        ("work_if", |chain, log| chain.work_if(|v, _| *v > 5, &note("a", log)), 1, 1, &[]),
        (
            "wait_for_condition",
            |chain, log| {
                let waits = chain.work(&sleeps("a", log)).wait_for_condition(|_, ctx| ctx.state().seen.len() == 1);
                waits.map(|v, ctx| v + ctx.state().seen.len() as i64)
            },
            1,
            2,
            &["a", "a"],
        ),
    ]
}

fn side_by_side() -> Vec<Row> {
    vec![
        (
            "parallel",
            |chain, log| chain.parallel((&add("a", log), &sleeps("b", log))).map(|(a, b), _| a * 10 + b),
            1,
            22,
            &["a", "b", "b"],
        ),
        (
            "step_all",
            |chain, log| {
                let all = chain.step_all(&[&sleeps("a", log), &add("b", log)]);
                all.map(|list: Vec<i64>, _| list[0] * 10 + list[1])
            },
            1,
            22,
            &["a", "b", "a"],
        ),
        ("step_any", |chain, log| chain.step_any(&[&fails("a", log), &sleeps("b", log)]), 1, 2, &["a", "b", "b"]),
        ("race", |chain, log| chain.race(&[&sleeps("a", log), &add("b", log)]).map(|v, _| v), 1, 2, &["a", "b"]),
    ]
}

fn repeated() -> Vec<Row> {
    vec![
        (
            "for_each",
            |chain, log| {
                let each = chain.map(|v, _| vec![v, v + 1, v + 2]).for_each(2, &add("a", log));
                each.map(|list: Vec<i64>, _| list.iter().fold(0, |sum, v| sum * 10 + v))
            },
            1,
            234,
            &["a", "a", "a"],
        ),
        (
            "for_each over nothing",
            |chain, log| {
                let each = chain.map(|_, _| Vec::<i64>::new()).for_each(2, &add("a", log));
                each.map(|list: Vec<i64>, _| list.len() as i64)
            },
            1,
            0,
            &[],
        ),
        (
            "for_each_background",
            |chain, log| {
                let each = chain.map(|v, _| vec![v, v]).for_each_background(&note("a", log)).wait_for_work();
                each.map(|_, ctx| ctx.state().total)
            },
            1,
            2,
            &["a", "a"],
        ),
        ("do_while", |chain, log| chain.do_while(|v, _| *v < 4, &add("a", log)), 1, 4, &["a", "a", "a"]),
        ("do_while, never", |chain, log| chain.do_while(|v, _| *v < 1, &add("a", log)), 1, 1, &[]),
        (
            "do_while with a tap",
            |chain, log| chain.do_while(|_, ctx| ctx.state().total < 3, &note("a", log)),
            7,
            7,
            &["a", "a", "a"],
        ),
        ("do_until tests after", |chain, log| chain.do_until(|_, _| true, &add("a", log)), 1, 2, &["a"]),
        (
            "loop_back",
            |chain, log| chain.step(&add("a", log)).step(&add("b", log)).loop_back("a", |v, _| *v < 5),
            1,
            5,
            &["a", "b", "a", "b"],
        ),
    ]
}

fn choices() -> Vec<Row> {
    vec![
        (
            "branch",
            |chain, log| chain.branch(vec![when(|v, _| *v > 1, &add("a", log)), otherwise(&add("b", log))]),
            1,
            2,
            &["b"],
        ),
        ("exit_if", |chain, log| chain.exit_if(|v, _| *v == 1).step(&add("a", log)), 1, 1, &[]),
        ("throw_if", |chain, log| chain.throw_if(|_, _| None).step(&add("a", log)), 1, 2, &["a"]),
        (
            "router",
            |chain, log| {
                let choose = |v: &i64, _: &_| if *v == 1 { "b".to_string() } else { "a".to_string() };
                chain.step(&router("route", choose, &[&add("a", log), &add("b", log)]).unwrap())
            },
            1,
            2,
            &["b"],
        ),
        (
            "rescue",
            |chain, log| {
                let mends = latchwork::flow::handler("mends")
                    .run(async |_, failure: Failure| Ok(if failure.code() == "broken" { 7_i64 } else { 8 }));
                chain
                    .step(&fails("a", log))
                    .step(&add("b", log))
                    .rescue(|failure, _| failure.code() == "broken", &mends)
            },
            1,
            7,
            &["a"],
        ),
        (
            "a sequencer in a sequencer",
            |chain, log| {
                let inner =
                    sequencer("inner").state::<Tally>().step(&add("a", log)).map(|v, ctx| v + ctx.state().total);
                chain.step(&add("b", log)).step(&inner.build().unwrap()).map(|v, ctx| v * 10 + ctx.state().total)
            },
            1,
            41,
            &["b", "a"],
        ),
    ]
}

#[tokio::test]
async fn each_verb_gives_what_it_says_and_runs_what_it_says() {
    let tables = [steps(), background(), side_by_side(), repeated(), choices()];
    for (verb, build, input, output, bodies) in tables.into_iter().flatten() {
        let log = Log::default();
        let (result, _, _) = requested(&only(chain(&log, build)), input).await;
        assert_eq!(result.unwrap_or_else(|error| panic!("{verb}: {error}")), output, "{verb}");
        assert_eq!(log.all(), bodies, "{verb}");
    }
}

/// Each row: a verb, and the path and the words of its failure.
#[tokio::test]
async fn a_failure_names_the_path_of_its_block() {
    let table: Vec<(&str, Build, &str, &str)> = vec![
        ("step", |chain, log| chain.step(&fails("a", log)), "chain/a", "it is broken"),
        ("tap", |chain, log| chain.tap(&fails("a", log)), "chain/a", "it is broken"),
        (
            "parallel",
            |chain, log| chain.parallel((&sleeps("a", log), &fails("b", log))).map(|(a, _), _| a),
            "chain/b",
            "it is broken",
        ),
        ("race", |chain, log| chain.race(&[&sleeps("a", log), &fails("b", log)]), "chain/b", "it is broken"),
        ("step_any", |chain, log| chain.step_any(&[&fails("a", log), &fails("b", log)]), "chain/b", "it is broken"),
        (
            "for_each",
            |chain, log| chain.map(|v, _| vec![v]).for_each(1, &fails("a", log)).map(|list, _| list[0]),
            "chain/a/a",
            "it is broken",
        ),
        ("do_while", |chain, log| chain.do_while(|_, _| true, &fails("a", log)), "chain/a/a", "it is broken"),
        ("throw_if", |chain, _| chain.throw_if(|_, _| Some(Failure::new("thrown"))), "chain", "thrown"),
        (
            "rescue of another failure",
            |chain, log| {
                let mends = latchwork::flow::handler("mends").run(async |_, _: Failure| Ok(7_i64));
                chain.step(&fails("a", log)).rescue(|failure, _| failure.code() == "other", &mends)
            },
            "chain/a",
            "it is broken",
        ),
        (
            "a panic",
            |chain, _| {
                let panics = latchwork::flow::handler("p").run(async |_, v: i64| {
                    assert_eq!(v, 0, "a broken body");
                    Ok(v)
                });
                chain.step(&panics)
            },
            "chain/p",
            "a broken body",
        ),
    ];
    for (verb, build, path, words) in table {
        let log = Log::default();
        let (result, _, _) = requested(&only(chain(&log, build)), 1).await;
        let failure = failure(result);
        assert_eq!(failure.step(), Some(path), "{verb}: {failure}");
        assert!(failure.message().contains(words), "{verb}: {failure}");
    }
}

/// Each row: a verb, and the error that it makes itself.
#[tokio::test]
async fn the_failures_of_verbs_are_typed() {
    let table: Vec<(Build, BlockError)> = vec![
        (
            |chain, log| chain.branch(vec![when(|v, _| *v > 9, &add("a", log))]),
            BlockError::NoMatch { path: "chain/branch>a".into() },
        ),
        (
            |chain, log| chain.most_rounds(3).do_while(|_, _| true, &add("a", log)),
            BlockError::Endless { path: "chain/a".into(), rounds: 3 },
        ),
        (
            |chain, log| chain.most_rounds(3).step(&add("a", log)).loop_back("a", |_, _| true),
            BlockError::Endless { path: "chain/loop_back>a".into(), rounds: 3 },
        ),
        (
            |chain, log| chain.work(&note("a", log)).wait_for_condition(|_, ctx| ctx.state().total > 5),
            BlockError::NeverHolds { path: "chain/a>wait_for_condition".into() },
        ),
        (
            |chain, log| {
                let choose = |_: &i64, _: &_| "c".to_string();
                chain.step(&router("route", choose, &[&add("a", log)]).unwrap())
            },
            BlockError::NoSuchBlock { path: "chain/route".into(), chosen: "c".into() },
        ),
    ];
    for (build, expected) in table {
        let (result, _, _) = requested(&only(chain(&Log::default(), build)), 1).await;
        assert_eq!(failure(result).get::<BlockError>(), Some(expected));
    }
}

#[tokio::test]
async fn the_changes_of_all_blocks_are_in_the_last_checkpoint() {
    let log = Log::default();
    let block = chain(&log, |chain, log| {
        chain
            .step(&add("a", log))
            .parallel((&add("b", log), &add("c", log)))
            .map(|(b, _), _| b)
            .do_while(|v, _| *v < 6, &add("d", log))
    });
    let (result, checkpoints, _) = requested(&only(block), 1).await;
    assert_eq!(result.unwrap(), 6);
    let tally = tally(&checkpoints, "chain");
    assert_eq!((tally.total, tally.seen.len(), tally.by["d"]), (6, 6, 3));
}
