//! `if_unchanged`: a transaction is rejected exactly if something that was read through the view has changed since.

use latchwork::entity::{
    Add, Direction, Entities, EntityError, EntityView, Query, Remove, Transaction, TypeSpec, Update, field,
};
use serde_json::json;

use super::{failed, generation};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    a_transaction_depends_on_its_reads_and_on_nothing_else,
    only_the_part_of_a_paged_find_that_was_read_counts,
    a_view_of_the_past_counts_changes_from_its_generation,
    a_transaction_may_write_what_it_has_read,
    several_views_are_checked_together,
    more_reads_than_a_commit_can_check_are_refused,
    a_rejection_names_everything_that_has_changed,
    if_unchanged_after_a_page_by_a_long_unique_value_can_be_checked,
);

/// Ten numbered entities of type `t` with an index on `data.n`, and one of another type.
async fn numbered(bench: &Bench) -> Entities {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").index(["data.n"])).await.unwrap();
    reset(&entities).await;
    entities
}

async fn reset(entities: &Entities) {
    let all = entities.find(&Query::all()).await.unwrap();
    let gone = all.items.iter().fold(Transaction::new(), |gone, entity| gone.remove(&entity.id));
    entities.transact(gone).await.unwrap();
    let items = (0..10).map(|n| Add::new("t").id(format!("e{n}")).data(json!({"n": n, "even": n % 2 == 0})));
    entities.add_many(items.chain([Add::new("other").id("o")])).await.unwrap();
}

#[derive(Debug, Clone, Copy)]
enum Read {
    Nothing,
    Id(&'static str),
    History(&'static str),
    /// By the index, `n` in a range.
    Range(i64, i64),
    /// By a scan of the type.
    Even,
    Everything,
    Explained,
}

async fn read(view: &EntityView, read: Read) {
    let of = || Query::of("t");
    match read {
        Read::Nothing => {}
        Read::Id(id) => drop(view.get(id).await.unwrap()),
        Read::History(id) => drop(view.history(id).limit(5).await.unwrap()),
        Read::Range(low, high) => {
            let found = view.find_explained(&of().filter(field("data.n").between(low, high))).await.unwrap();
            assert!(!found.plan.scans());
        }
        Read::Even => {
            let found = view.find_explained(&of().filter(field("data.even").equals(true))).await.unwrap();
            assert!(found.plan.scans() && found.page.items.len() == 5);
        }
        Read::Everything => assert_eq!(view.find(&Query::all()).await.unwrap().items.len(), 11),
        Read::Explained => drop(view.explain(&of()).await.unwrap()),
    }
}

#[derive(Debug, Clone, Copy)]
enum Write {
    Update(&'static str),
    /// Moves an entity to another `n`.
    Move(&'static str, i64),
    Remove(&'static str),
    Readd(&'static str),
    /// A new entity of type `t` with this `n`.
    New(i64),
    Other,
    Declare,
}

async fn write(entities: &Entities, write: Write) {
    match write {
        Write::Update(id) => drop(entities.update(Update::new(id)).await.unwrap()),
        Write::Move(id, n) => drop(entities.update_with(id, 0, |draft| draft.data["n"] = json!(n)).await.unwrap()),
        Write::Remove(id) => drop(entities.remove(id).await.unwrap()),
        Write::Readd(id) => {
            let was = entities.get(id).await.unwrap().unwrap();
            entities.remove(id).await.unwrap();
            entities.add(Add::new(was.entity_type).id(id).data(was.data)).await.unwrap();
        }
        Write::New(n) => drop(entities.add(Add::new("t").id("new").data(json!({"n": n}))).await.unwrap()),
        Write::Other => drop(entities.add(Add::new("other").id("more")).await.unwrap()),
        Write::Declare => entities.declare(TypeSpec::new("elsewhere").index(["data.x"])).await.unwrap(),
    }
}

async fn a_transaction_depends_on_its_reads_and_on_nothing_else(bench: Bench) {
    use {Read::*, Write::*};
    // (what is read, what is written then, whether a transaction on that view is rejected)
    let cases = [
        (Nothing, Update("e1"), false),
        (Explained, Update("e1"), false),
        (Id("e1"), Update("e1"), true),
        (Id("e1"), Remove("e1"), true),
        (Id("e1"), Readd("e1"), true),
        (Id("e1"), Update("e2"), false),
        (Id("e1"), New(1), false),
        (Id("e1"), Declare, false),
        (Id("new"), New(1), true),
        (Id("new"), Other, false),
        (Id("more"), Other, true),
        (History("e1"), Update("e1"), true),
        (History("e1"), Update("e2"), false),
        (Range(3, 5), Update("e4"), true),
        (Range(3, 5), Update("e3"), true),
        (Range(3, 5), Update("e5"), true),
        (Range(3, 5), Update("e6"), false),
        (Range(3, 5), Update("e2"), false),
        (Range(3, 5), Move("e4", 9), true),
        (Range(3, 5), Move("e9", 4), true),
        (Range(3, 5), Move("e9", 8), false),
        (Range(3, 5), Remove("e4"), true),
        (Range(3, 5), Readd("e4"), true),
        (Range(3, 5), Remove("e6"), false),
        (Range(3, 5), New(4), true),
        (Range(3, 5), New(6), false),
        (Range(3, 5), Other, false),
        (Range(30, 50), New(40), true),
        (Range(30, 50), New(4), false),
        (Range(30, 50), Move("e1", 31), true),
        (Even, Update("e2"), true),
        (Even, Update("e3"), true),
        (Even, New(1), true),
        (Even, Remove("e3"), true),
        (Even, Other, false),
        (Everything, Other, true),
        (Everything, Update("o"), true),
        (Everything, Declare, false),
    ];
    let entities = numbered(&bench).await;
    for (what, then, rejected) in cases {
        reset(&entities).await;
        let view = entities.now().await.unwrap();
        read(&view, what).await;
        write(&entities, then).await;
        let at = generation(&entities).await;
        let transaction = Transaction::new().add(Add::new("log").id("log")).if_unchanged(&view);
        let result = entities.transact(transaction).await;
        assert_eq!(result.is_err(), rejected, "{what:?}, then {then:?}: {result:?}");
        if rejected {
            let failed = failed(result);
            let read_at = view.generation();
            let all =
                |error: &EntityError| matches!(error, EntityError::ReadChanged { read_at: at, .. } if *at == read_at);
            assert!(failed.iter().all(|failed| failed.op.is_none() && all(&failed.error)), "{failed:?}");
        }
        let taken = u64::from(!rejected);
        assert_eq!(generation(&entities).await, at + taken, "{what:?}, then {then:?}");
    }
}

const NAMES: [&str; 10] = ["e0", "e1", "e2", "e3", "e4", "e5", "e6", "e7", "e8", "e9"];

async fn only_the_part_of_a_paged_find_that_was_read_counts(bench: Bench) {
    let entities = numbered(&bench).await;
    // (the query, the entities in its order, whether a change of data can move them)
    let up: Vec<usize> = (0..10).collect();
    let down: Vec<usize> = (0..10).rev().collect();
    let queries = [
        (Query::of("t"), &up, false),
        (Query::of("t").order_by("data.n", Direction::Ascending), &up, true),
        (Query::of("t").order_by("data.n", Direction::Descending), &down, true),
        (Query::of("t").filter(field("data.n").at_least(0)).order_by("data.n", Direction::Descending), &down, true),
    ];
    for (query, order, ordered) in queries {
        for changed in 0..10 {
            reset(&entities).await;
            let view = entities.now().await.unwrap();
            let first = view.find(&query.clone().limit(3)).await.unwrap();
            let names: Vec<String> = order[..3].iter().map(|n| format!("e{n}")).collect();
            assert_eq!(super::ids(&first.items), names);
            entities.update(Update::new(format!("e{}", order[changed]))).await.unwrap();
            let transaction = Transaction::new().add(Add::new("log").id("log")).if_unchanged(&view);
            let result = entities.transact(transaction).await;
            // A find reads the first entity of the next page, to know whether there is one.
            match changed {
                0..3 => assert!(result.is_err(), "{query:?} does not depend on its result {changed}"),
                3 => {}
                _ => assert!(result.is_ok(), "{query:?} depends on result {changed}, which it did not read"),
            }
        }
        // Entities that are added, removed or moved after the part that was read do not matter; before its end they do.
        for (then, rejected) in [
            (Write::Remove(NAMES[order[7]]), false),
            (Write::Move(NAMES[order[8]], order[7] as i64), false),
            (Write::Remove(NAMES[order[1]]), true),
            (Write::Move(NAMES[order[8]], order[1] as i64), ordered),
        ] {
            reset(&entities).await;
            let view = entities.now().await.unwrap();
            view.find(&query.clone().limit(3)).await.unwrap();
            write(&entities, then).await;
            let result = entities.transact(Transaction::new().if_unchanged(&view)).await;
            assert_eq!(result.is_err(), rejected, "{query:?}, then {then:?}");
        }
        // With the second page, the view depends on that page as well.
        reset(&entities).await;
        let view = entities.now().await.unwrap();
        let first = view.find(&query.clone().limit(3)).await.unwrap();
        view.find(&query.clone().limit(3).after(first.next.unwrap())).await.unwrap();
        entities.update(Update::new(format!("e{}", order[5]))).await.unwrap();
        assert!(entities.transact(Transaction::new().if_unchanged(&view)).await.is_err(), "{query:?}");
        let view = entities.now().await.unwrap();
        let first = view.find(&query.clone().limit(3)).await.unwrap();
        view.find(&query.clone().limit(3).after(first.next.unwrap())).await.unwrap();
        entities.update(Update::new(format!("e{}", order[8]))).await.unwrap();
        assert!(entities.transact(Transaction::new().if_unchanged(&view)).await.is_ok(), "{query:?}");
    }
}

async fn a_view_of_the_past_counts_changes_from_its_generation(bench: Bench) {
    let entities = numbered(&bench).await;
    let before = entities.now().await.unwrap().generation();
    entities.update(Update::new("e1")).await.unwrap();
    let past = entities.as_of(before).await.unwrap();
    read(&past, Read::Id("e2")).await;
    read(&past, Read::Range(5, 7)).await;
    entities.transact(Transaction::new().update(Update::new("e3")).if_unchanged(&past)).await.unwrap();
    read(&past, Read::Range(0, 1)).await;
    let refused = failed(entities.transact(Transaction::new().if_unchanged(&past)).await);
    assert!(matches!(&refused[0].error, EntityError::ReadChanged { read_at, .. } if *read_at == before));
}

async fn a_transaction_may_write_what_it_has_read(bench: Bench) {
    let entities = numbered(&bench).await;
    let view = entities.now().await.unwrap();
    read(&view, Read::Range(3, 5)).await;
    read(&view, Read::Id("new")).await;
    let write = || {
        Transaction::new()
            .update(Update::new("e3").data(json!({"n": 4})))
            .remove(Remove::new("e5"))
            .add(Add::new("t").id("new").data(json!({"n": 5})).if_absent(true))
            .if_unchanged(&view)
    };
    entities.transact(write()).await.unwrap();
    assert!(entities.transact(write()).await.is_err(), "the transaction before has changed it");
}

async fn several_views_are_checked_together(bench: Bench) {
    let entities = numbered(&bench).await;
    let (one, two) = (entities.now().await.unwrap(), entities.now().await.unwrap());
    read(&one, Read::Id("e1")).await;
    read(&two, Read::Id("e2")).await;
    let both = || Transaction::new().update(Update::new("e9")).if_unchanged(&one).if_unchanged(&two);
    entities.transact(both()).await.unwrap();
    entities.update(Update::new("e2")).await.unwrap();
    assert_eq!(failed(entities.transact(both()).await).len(), 1);
    entities.update(Update::new("e1")).await.unwrap();
    assert_eq!(failed(entities.transact(both()).await).len(), 2);
    // Reads also count after the view has been released.
    one.release();
    drop(two);
    assert_eq!(failed(entities.transact(Transaction::new().if_unchanged(&one)).await).len(), 1);
}

async fn more_reads_than_a_commit_can_check_are_refused(bench: Bench) {
    let entities = numbered(&bench).await;
    let limit = bench.limits.operations;
    let view = entities.now().await.unwrap();
    for n in 0..limit {
        view.get(format!("absent-{n}")).await.unwrap();
    }
    assert!(entities.transact(Transaction::new().if_unchanged(&view)).await.is_ok());
    view.get("one more").await.unwrap();
    let error = entities.transact(Transaction::new().if_unchanged(&view)).await.unwrap_err();
    assert!(
        matches!(error, EntityError::ReadSetTooLarge { reads, limit: most } if reads == limit + 1 && most == limit)
    );
}

async fn a_rejection_names_everything_that_has_changed(bench: Bench) {
    let entities = numbered(&bench).await;
    let view = entities.now().await.unwrap();
    read(&view, Read::Id("e1")).await;
    read(&view, Read::Id("new")).await;
    read(&view, Read::Range(40, 50)).await;
    write(&entities, Write::Update("e1")).await;
    write(&entities, Write::New(45)).await;
    let failed = failed(entities.transact(Transaction::new().if_unchanged(&view)).await);
    let what: Vec<String> = failed
        .into_iter()
        .map(|failed| match failed.error {
            EntityError::ReadChanged { what, .. } => what,
            other => panic!("{other}"),
        })
        .collect();
    assert_eq!(what, ["entity \"e1\"", "entity \"new\"", "the result of the index of \"t\" on data.n"]);
}

/// The key of a unique entry has no id; the position of a cursor has one, and is longer than any key may be.
async fn if_unchanged_after_a_page_by_a_long_unique_value_can_be_checked(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").unique(["data.u"])).await.unwrap();
    for n in 0..6 {
        let (id, value) = (format!("{n}{}", "i".repeat(500)), format!("{n}{}", "v".repeat(2000)));
        entities.add(Add::new("t").id(id).data(json!({"u": value}))).await.unwrap();
    }
    for direction in [Direction::Ascending, Direction::Descending] {
        let view = entities.now().await.unwrap();
        let query = Query::of("t").order_by("data.u", direction).limit(2);
        let first = view.find(&query).await.unwrap();
        let second = view.find(&query.clone().after(first.next.unwrap())).await.unwrap();
        assert_eq!(second.items.len(), 2);
        let transaction = Transaction::new().add(Add::new("log")).if_unchanged(&view);
        let result = entities.transact(transaction).await;
        assert!(result.is_ok(), "{direction:?}: {}", result.unwrap_err());
    }
}
