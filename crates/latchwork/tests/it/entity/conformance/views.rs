//! The present and the past, pinned; the history of an entity; and views that were released.

use std::time::Duration;

use latchwork::entity::{Add, Entities, EntityError, Query, Transaction, TypeSpec, Update, field};
use latchwork::store::{ErrorKind, Generation, History, Rev, StoreError, Timestamp};
use serde_json::json;

use super::{fill, found, generation, get, ids};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    nothing_seen_through_a_view_changes,
    as_of_sees_every_generation_as_it_was,
    as_of_a_time_sees_all_commits_up_to_it,
    generations_that_are_not_yet_or_no_longer_there_are_typed_errors,
    a_released_view_returns_a_typed_error_from_every_method,
    since_returns_exactly_the_ids_that_were_touched,
    since_over_many_commits_misses_nothing,
    since_a_view_that_is_not_older_is_refused,
    history_lists_versions_newest_first_with_removals,
    history_ends_at_the_view_and_at_the_limit,
    a_view_keeps_versions_that_the_history_would_forget,
    a_past_view_knows_the_declarations_of_its_time,
);

async fn nothing_seen_through_a_view_changes(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(1)), ("b", json!(2))]).await;
    let view = entities.now().await.unwrap();
    assert_eq!(view.generation().0, generation(&entities).await);
    let before = (view.get("a").await.unwrap(), view.find(&Query::of("t")).await.unwrap().items);
    entities.update(Update::new("a").data(json!(9))).await.unwrap();
    entities.remove("b").await.unwrap();
    fill(&entities, "t", [("c", json!(3))]).await;
    let after = (view.get("a").await.unwrap(), view.find(&Query::of("t")).await.unwrap().items);
    assert_eq!((after, view.get("c").await.unwrap()), (before, None));
    assert_eq!(found(&entities, &Query::of("t")).await, ["a", "c"]);
}

async fn as_of_sees_every_generation_as_it_was(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").index(["data.n"])).await.unwrap();
    let start = generation(&entities).await;
    let mut pictures = vec![(start, Vec::new())];
    for step in 0..60u64 {
        let id = format!("e{}", step % 7);
        match (entities.get(&id).await.unwrap(), step % 4) {
            (None, _) => drop(entities.add(Add::new("t").id(&id).data(json!({"n": step % 3}))).await.unwrap()),
            (Some(_), 0) => drop(entities.remove(&id).await.unwrap()),
            (Some(_), _) => drop(entities.update(Update::new(&id).data(json!({"n": step % 3}))).await.unwrap()),
        }
        let items = entities.find(&Query::of("t")).await.unwrap().items;
        pictures.push((generation(&entities).await, items));
    }
    for (at, items) in pictures {
        let view = entities.as_of(Generation(at)).await.unwrap();
        assert_eq!(view.find(&Query::of("t")).await.unwrap().items, items, "at {at}");
        assert_eq!(view.find(&Query::all()).await.unwrap().items, items, "at {at}");
        for n in 0..3 {
            let expected: Vec<_> = items.iter().filter(|entity| entity.data["n"] == n).cloned().collect();
            let found = view.find_explained(&Query::of("t").filter(field("data.n").equals(n))).await.unwrap();
            assert!(!found.plan.scans() && found.page.items == expected, "at {at}");
        }
        for entity in &items {
            assert_eq!(view.get(&entity.id).await.unwrap().as_ref(), Some(entity));
        }
    }
    let nothing = entities.as_of(Generation(0)).await.unwrap();
    assert_eq!(nothing.find(&Query::of("t")).await.unwrap().items, []);
}

async fn as_of_a_time_sees_all_commits_up_to_it(bench: Bench) {
    let entities = bench.entities().await;
    let start = bench.env.now();
    fill(&entities, "t", [("a", json!(0))]).await;
    for n in 1..5u64 {
        bench.clock.advance(Duration::from_secs(10));
        entities.update(Update::new("a").data(json!(n * 10))).await.unwrap();
        // Within one tick of the clock the newest commit counts.
        entities.update(Update::new("a").data(json!(n))).await.unwrap();
    }
    for (seconds, expected) in [(0, 0), (9, 0), (10, 1), (19, 1), (20, 2), (39, 3), (40, 4), (4000, 4)] {
        let view = entities.as_of(start.plus(Duration::from_secs(seconds))).await.unwrap();
        assert_eq!(view.get("a").await.unwrap().unwrap().data, json!(expected), "after {seconds} s");
    }
}

async fn generations_that_are_not_yet_or_no_longer_there_are_typed_errors(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(0))]).await;
    let at = generation(&entities).await;
    let future = entities.as_of(Generation(at + 1)).await.unwrap_err();
    let EntityError::Store(StoreError::FutureGeneration { asked, latest }) = future else { panic!("{future}") };
    assert_eq!((asked.0, latest.0), (at + 1, at));

    let entities = Entities::with_history(entities.store(), History::Generations(5)).await.unwrap();
    for n in 0..20 {
        entities.update(Update::new("a").data(json!(n))).await.unwrap();
    }
    while entities.store().maintain().await.unwrap() {}
    let view = entities.as_of(Generation(at)).await.unwrap();
    let dropped = [
        view.get("a").await.map(drop),
        view.find(&Query::of("t")).await.map(drop),
        view.find(&Query::all()).await.map(drop),
    ];
    for error in dropped.map(Result::unwrap_err) {
        let EntityError::Store(StoreError::HistoryDropped { asked, oldest, .. }) = error else { panic!("{error}") };
        assert!(asked.0 == at && oldest > asked);
    }
    drop(view);
    let latest = generation(&entities).await;
    let kept = entities.as_of(Generation(latest - 5)).await.unwrap();
    assert_eq!(kept.get("a").await.unwrap().unwrap().data, json!(14));
    let too_early = entities.as_of(Timestamp(1)).await.map(drop).unwrap_err();
    assert_eq!(too_early.kind(), ErrorKind::NotFound, "{too_early}");
}

async fn a_released_view_returns_a_typed_error_from_every_method(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(0))]).await;
    let older = entities.now().await.unwrap();
    let view = entities.now().await.unwrap();
    let fresh = entities.now().await.unwrap();
    let pins = entities.store().stats().await.unwrap().pins;
    view.release();
    view.release();
    assert_eq!(entities.store().stats().await.unwrap().pins, pins - 1);
    let errors = [
        view.get("a").await.map(drop),
        view.find(&Query::of("t")).await.map(drop),
        view.explain(&Query::of("t")).await.map(drop),
        view.history("a").await.map(drop),
        view.since(&older).await.map(drop),
        view.since_generation(Generation(0)).await.map(drop),
        view.persist(bench.path("nothing")).await,
        fresh.since(&view).await.map(drop),
    ];
    for (at, error) in errors.into_iter().enumerate() {
        let error = error.expect_err("it is released");
        assert!(matches!(&error, EntityError::Released { generation } if *generation == view.generation()), "{at}");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
    assert_eq!(fresh.get("a").await.unwrap().unwrap().data, json!(0), "other views are not concerned");
    drop((older, fresh));
    assert_eq!(entities.store().stats().await.unwrap().pins, pins - 3);
    assert!(entities.find(&Query::of("t")).await.is_ok());
    assert_eq!(entities.store().stats().await.unwrap().pins, pins - 3, "a find pins no view");
}

async fn since_returns_exactly_the_ids_that_were_touched(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(0)), ("b", json!(0)), ("c", json!(0)), ("d", json!(0))]).await;
    let mut views = vec![entities.now().await.unwrap()];
    let steps: [(Transaction, &[&str]); 6] = [
        (Transaction::new().update(Update::new("b")), &["b"]),
        (Transaction::new().remove("c"), &["c"]),
        (Transaction::new().add(Add::new("u").id("e")).add(Add::new("t").id("f")), &["e", "f"]),
        (Transaction::new().require_exists("a").add(Add::new("t").id("c")), &["c"]),
        (Transaction::new().remove("f").update(Update::new("e")), &["e", "f"]),
        (Transaction::new().add(Add::new("t").id("a").if_absent(true)), &[]),
    ];
    let touched: Vec<_> = steps.iter().map(|(_, ids)| *ids).collect();
    for (transaction, _) in steps {
        entities.transact(transaction).await.unwrap();
        // A declaration touches no entity.
        entities.declare(TypeSpec::new(format!("t{}", views.len())).index(["data.x"])).await.unwrap();
        views.push(entities.now().await.unwrap());
    }
    for older in 0..views.len() {
        for newer in older..views.len() {
            let mut expected: Vec<&str> = touched[older..newer].concat();
            expected.sort();
            expected.dedup();
            let since = views[newer].since(&views[older]).await.unwrap();
            assert_eq!(since, expected, "from {older} to {newer}");
            let by_generation = views[newer].since_generation(views[older].generation()).await.unwrap();
            assert_eq!(by_generation, since);
        }
    }
    let all = views[6].since_generation(Generation(0)).await.unwrap();
    assert_eq!(all, ["a", "b", "c", "d", "e", "f"]);
}

async fn since_over_many_commits_misses_nothing(bench: Bench) {
    let entities = bench.entities().await;
    let before = entities.now().await.unwrap();
    for n in 0..2500 {
        entities.add(Add::new("t").id(format!("{n:04}"))).await.unwrap();
    }
    let after = entities.now().await.unwrap();
    fill(&entities, "t", [("later", json!(1))]).await;
    let since = after.since(&before).await.unwrap();
    assert!(since.len() == 2500 && since.is_sorted() && since[2499] == "2499");
}

async fn since_a_view_that_is_not_older_is_refused(bench: Bench) {
    let entities = bench.entities().await;
    let older = entities.now().await.unwrap();
    fill(&entities, "t", [("a", json!(0))]).await;
    let newer = entities.now().await.unwrap();
    let error = older.since(&newer).await.unwrap_err();
    let EntityError::NotOlder { older: asked, newer: than } = error else { panic!("{error}") };
    assert_eq!((asked, than), (newer.generation(), older.generation()));
    assert_eq!(newer.since(&newer).await.unwrap(), [] as [&str; 0]);
}

async fn history_lists_versions_newest_first_with_removals(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(1)), ("b", json!(1))]).await;
    let mut expected = vec![Some(get(&entities, "a").await)];
    for step in 2..10u64 {
        bench.clock.advance(Duration::from_secs(1));
        match step {
            4 => drop(entities.remove("a").await.unwrap()),
            5 => drop(entities.add(Add::new("other").id("a").data(json!(step))).await.unwrap()),
            _ => drop(entities.update(Update::new("a").data(json!(step))).await.unwrap()),
        }
        entities.update(Update::new("b")).await.unwrap();
        expected.push(entities.get("a").await.unwrap());
    }
    let history = entities.now().await.unwrap().history("a").limit(100).await.unwrap().items;
    assert_eq!(history.len(), 9);
    for (at, (version, expected)) in history.iter().rev().zip(&expected).enumerate() {
        assert_eq!((version.rev, &version.entity), (Rev(at as u64 + 1), expected));
        if let Some(entity) = expected {
            assert_eq!(version.committed, entity.changed);
        }
    }
    assert_eq!(history[5].entity, None, "the removal");
    assert_eq!(entities.now().await.unwrap().history("unknown").limit(5).await.unwrap().items, []);
}

async fn history_ends_at_the_view_and_at_the_limit(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!(1))]).await;
    for n in 2..=10 {
        entities.update(Update::new("a").data(json!(n))).await.unwrap();
    }
    let at_five = entities.now().await.unwrap().history("a").limit(100).await.unwrap().items[5].committed.generation;
    let revs = |history: Vec<latchwork::entity::Revision>| history.iter().map(|v| v.rev.0).collect::<Vec<_>>();
    let past = entities.as_of(at_five).await.unwrap();
    assert_eq!(revs(past.history("a").limit(100).await.unwrap().items), [5, 4, 3, 2, 1]);
    let first = past.history("a").limit(2).await.unwrap();
    assert_eq!(revs(first.items), [5, 4]);
    let second = past.history("a").limit(2).after(first.next.clone()).await.unwrap();
    assert_eq!(revs(second.items), [3, 2]);
    let last = past.history("a").limit(2).after(second.next).await.unwrap();
    assert_eq!((revs(last.items), last.next), (vec![1], None));
    let later = entities.now().await.unwrap();
    assert_eq!(revs(later.history("a").after(first.next.clone()).await.unwrap().items), [3, 2, 1], "on any view");
    let other = later.history("b").after(first.next).await.unwrap_err();
    assert!(matches!(other, EntityError::Cursor(_)), "{other}");
    assert_eq!(revs(entities.now().await.unwrap().history("a").limit(3).await.unwrap().items), [10, 9, 8]);
}

async fn a_view_keeps_versions_that_the_history_would_forget(bench: Bench) {
    let entities = Entities::with_history(&bench.open().await, History::None).await.unwrap();
    fill(&entities, "t", [("a", json!(0)), ("b", json!(0))]).await;
    let view = entities.now().await.unwrap();
    for n in 1..50 {
        entities.update(Update::new("a").data(json!(n))).await.unwrap();
    }
    entities.remove("b").await.unwrap();
    while entities.store().maintain().await.unwrap() {}
    assert_eq!(view.get("a").await.unwrap().unwrap().data, json!(0));
    assert_eq!(ids(&view.find(&Query::of("t")).await.unwrap().items), ["a", "b"]);
    view.release();
    assert_eq!(found(&entities, &Query::of("t")).await, ["a"]);
    super::assert_sound(&entities).await;
}

async fn a_past_view_knows_the_declarations_of_its_time(bench: Bench) {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!({"n": 1})), ("b", json!({"n": 2}))]).await;
    let query = Query::of("t").filter(field("data.n").at_least(1));
    let undeclared = entities.now().await.unwrap();
    entities.declare(TypeSpec::new("t").index(["data.n"])).await.unwrap();
    let declared = entities.now().await.unwrap();
    entities.update(Update::new("a").data(json!({"n": 0}))).await.unwrap();
    entities.undeclare(TypeSpec::new("t").index(["data.n"])).await.unwrap();
    let after = entities.now().await.unwrap();
    for (view, scans, expected) in
        [(&undeclared, true, &["a", "b"][..]), (&declared, false, &["a", "b"]), (&after, true, &["b"])]
    {
        let again = entities.as_of(view.generation()).await.unwrap();
        for view in [view, &again] {
            let found = view.find_explained(&query).await.unwrap();
            assert_eq!(
                (found.plan.scans(), ids(&found.page.items)),
                (scans, expected.iter().map(|id| id.to_string()).collect())
            );
            assert_eq!(view.explain(&query).await.unwrap(), found.plan);
        }
    }
}
