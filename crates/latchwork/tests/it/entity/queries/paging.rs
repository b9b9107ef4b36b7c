//! Pages: every plan visits everything exactly once, whatever the size of the pages.

use latchwork::entity::{Add, Direction, Filter, Query, Transaction, TypeSpec, Update, field};
use serde_json::json;

use super::{fill, ids, pages};
use crate::backends::{Bench, on_every_backend};

use Direction::{Ascending, Descending};

on_every_backend!(
    every_plan_visits_everything_exactly_once,
    pages_of_a_pinned_view_do_not_move,
    pages_of_the_present_continue_after_the_last_seen_entity,
    the_value_at_a_cursor_may_have_a_new_owner,
    a_page_reads_only_what_follows_its_cursor,
    the_last_page_says_that_it_is_the_last,
);

async fn every_plan_visits_everything_exactly_once(bench: Bench) {
    let entities = bench.entities().await;
    let spec = TypeSpec::new("t").index(["data.g"]).index(["data.g", "data.n"]).unique(["data.u"]).index(["data.s"]);
    entities.declare(spec.unique(["data.g", "data.u"])).await.unwrap();
    for n in 0..100u32 {
        let mut data = json!({"g": n % 4, "n": n / 8, "s": format!("{}{}", ["a", "ab", "b"][n as usize % 3], n % 5)});
        match n % 5 {
            0 => {}
            1 => data["u"] = json!(null),
            2 => data["u"] = json!(format!("text {n}")),
            _ => data["u"] = json!(n),
        }
        entities.add(Add::new("t").id(format!("{:02}", (n * 37) % 100)).data(data)).await.unwrap();
    }
    fill(&entities, "other", [("000", json!({"g": 1})), ("999", json!({"g": 1}))]).await;
    let (g, u, s, n) = (|| field("data.g"), || field("data.u"), || field("data.s"), || field("data.n"));
    let filters = [
        Filter::all(),
        g().equals(1),
        g().not(1),
        g().at_least(2),
        g().greater(0).and(g().less(3)),
        g().one_of([0, 2, 9]),
        g().one_of([3]),
        g().equals(2).and(n().between(2, 7)),
        g().equals(2).and(n().one_of([1, 5, 3])),
        g().equals(2).and(u().exists()),
        g().equals(1).or(n().equals(3)),
        s().starts_with("a"),
        s().starts_with("ab"),
        u().equals(()),
        u().exists().negate(),
        u().at_least(10),
        u().starts_with("text"),
        u().one_of([json!(null), json!(3), json!(4), json!("text 2")]),
    ];
    let orders: [&[(&str, Direction)]; 10] = [
        &[],
        &[("data.g", Ascending)],
        &[("data.g", Descending)],
        &[("data.u", Ascending)],
        &[("data.u", Descending)],
        &[("data.g", Ascending), ("data.n", Ascending)],
        &[("data.g", Descending), ("data.n", Descending)],
        &[("data.n", Descending)],
        &[("data.s", Descending), ("data.u", Ascending)],
        &[("data.g", Descending), ("data.u", Descending)],
    ];
    let view = entities.now().await.unwrap();
    let mut plans = std::collections::BTreeSet::new();
    for filter in &filters {
        for order in orders {
            let query = Query::of("t").filter(filter.clone());
            let query = order.iter().fold(query, |query, (path, direction)| query.order_by(path, *direction));
            let whole = view.find_explained(&query).await.unwrap();
            plans.insert(whole.plan.to_string());
            for limit in [1, 3, 16, 17, 99, 100] {
                let pages = pages(&view, &query, limit).await;
                assert!(pages.iter().rev().skip(1).all(|found| found.page.items.len() == limit), "{query:?}");
                assert!(pages.iter().all(|found| found.plan == whole.plan), "{query:?}");
                let seen: Vec<_> = pages.into_iter().flat_map(|found| found.page).collect();
                assert_eq!(ids(&seen), ids(&whole.page.items), "{query:?} by {limit}, {}", whole.plan);
            }
        }
    }
    assert!(plans.len() >= 12, "{plans:#?}");
    let everything = pages(&view, &Query::all(), 7).await;
    assert_eq!(everything.iter().map(|found| found.page.items.len()).sum::<usize>(), 102);
}

async fn pages_of_a_pinned_view_do_not_move(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").index(["data.n"])).await.unwrap();
    entities.add_many((0..20).map(|n| Add::new("t").id(format!("{n:02}")).data(json!({"n": n})))).await.unwrap();
    let view = entities.now().await.unwrap();
    let query = Query::of("t").order_by("data.n", Ascending).limit(6);
    let first = view.find(&query).await.unwrap();
    let turned = (0..20)
        .fold(Transaction::new(), |turned, n| turned.update(Update::new(format!("{n:02}")).data(json!({"n": 20 - n}))));
    entities.transact(turned).await.unwrap();
    entities.undeclare(TypeSpec::new("t").index(["data.n"])).await.unwrap();
    let second = view.find(&query.clone().after(first.next.unwrap())).await.unwrap();
    assert_eq!(ids(&second.items), ["06", "07", "08", "09", "10", "11"]);
}

async fn pages_of_the_present_continue_after_the_last_seen_entity(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").index(["data.n"])).await.unwrap();
    for order in [vec![], vec![("data.n", Ascending)], vec![("data.m", Ascending)]] {
        let add = |n: u32| Add::new("t").id(format!("{n:02}")).data(json!({"n": n, "m": n}));
        entities.add_many((0..20).filter(|n| n % 2 == 0).map(add)).await.unwrap();
        let query = order.iter().fold(Query::of("t"), |query, (path, way)| query.order_by(path, *way)).limit(3);
        let first = entities.find(&query).await.unwrap();
        assert_eq!(ids(&first.items), ["00", "02", "04"]);
        // The last entity of the page is removed, one is added before it and one after it.
        entities.remove("04").await.unwrap();
        entities.add_many([add(3), add(5)]).await.unwrap();
        let second = entities.find(&query.clone().after(first.next.unwrap())).await.unwrap();
        assert_eq!(ids(&second.items), ["05", "06", "08"], "by {order:?}");
        let all = entities.find(&Query::of("t")).await.unwrap().items;
        entities.transact(all.iter().fold(Transaction::new(), |gone, e| gone.remove(&e.id))).await.unwrap();
    }
}

/// The second page must have every entity behind the cursor once, also an entity that has taken the value at the cursor
/// since the first page. The key of a unique value has no id, so it does not show whether its entity stands before or
/// behind the cursor. A key of the cursor's value and id can also be longer than an index allows.
async fn the_value_at_a_cursor_may_have_a_new_owner(bench: Bench) {
    let entities = bench.entities().await;
    // Its key is one byte below the limit, so only an id of one letter fits behind it.
    let long = "v".repeat(bench.limits.key_bytes - 9);
    let cases = [("v", "m", "l"), ("v", "m", "n"), (&*long, "m", "l"), (&*long, "m", "n")];
    let too_long = [(&*long, "many letters", "m"), (&*long, "many letters", "n")];
    let mut types = (0..).map(|number| format!("{number:02}"));
    for (value, shown, owner) in cases.into_iter().chain(too_long) {
        for direction in [Ascending, Descending] {
            for (unique, late) in [(true, false), (true, true), (false, true)] {
                let name = types.next().unwrap();
                let spec = TypeSpec::new(&*name);
                let spec = if unique { spec.unique(["data.u"]) } else { spec.index(["data.u"]) };
                let query = Query::of(&*name).order_by("data.u", direction);
                if !late {
                    entities.declare(spec.clone()).await.unwrap();
                }
                let last = if direction == Ascending { "w" } else { "u" };
                fill(&entities, &name, [(shown, json!({"u": value})), ("z", json!({"u": last}))]).await;
                let first = entities.find(query.clone().limit(1)).await.unwrap();
                assert_eq!(ids(&first.items), [shown]);
                let taken = Add::new(&*name).id(owner).data(json!({"u": value}));
                entities.transact(Transaction::new().remove(shown).add(taken)).await.unwrap();
                entities.declare(spec).await.unwrap();
                let second = entities.find_explained(query.after(first.next)).await.unwrap();
                assert_eq!(second.plan.to_string(), "index on data.u: 0 equal");
                let is_behind = (owner > shown) == (direction == Ascending);
                let expected = if is_behind { vec![owner, "z"] } else { vec!["z"] };
                let case = format!("{owner} after {shown}, {direction:?}, {} bytes", value.len());
                assert_eq!(ids(&second.page.items), expected, "{case}, unique {unique}, late {late}");
                entities.transact(Transaction::new().remove(owner).remove("z")).await.unwrap();
            }
        }
    }
    // A filter that binds the value leaves only the id to order by.
    let query = Query::of("t").filter(field("data.u").equals("v"));
    fill(&entities, "t", [("l", json!({"u": "v"})), ("n", json!({"u": "v"}))]).await;
    let first = entities.find(query.clone().limit(1)).await.unwrap();
    entities.remove("l").await.unwrap();
    entities.declare(TypeSpec::new("t").unique(["data.u"])).await.unwrap();
    let second = entities.find_explained(query.after(first.next)).await.unwrap();
    assert_eq!((ids(&second.page.items), second.examined), (vec!["n".to_string()], 1));
}

/// A page does not read again what the pages before have shown, however many entities have the value at the cursor.
async fn a_page_reads_only_what_follows_its_cursor(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").index(["data.n"]).unique(["data.u"])).await.unwrap();
    let item = |n: u32| Add::new("t").id(format!("{n:02}")).data(json!({"n": 7, "u": null}));
    entities.add_many((0..60).map(item)).await.unwrap();
    let view = entities.now().await.unwrap();
    let of = |field: &str, direction| Query::of("t").order_by(field, direction);
    let null = Query::of("t").filter(field("data.u").equals(()));
    let queries = [of("data.n", Ascending), of("data.n", Descending), of("data.u", Ascending), null];
    for query in queries.into_iter().chain([of("data.u", Descending), Query::of("t")]) {
        let pages = pages(&view, &query, 20).await;
        let examined: Vec<_> = pages.iter().map(|found| found.examined).collect();
        assert_eq!(examined, [21, 21, 20], "{query:?}");
    }
}

async fn the_last_page_says_that_it_is_the_last(bench: Bench) {
    let entities = bench.entities().await;
    assert!(entities.find(&Query::of("t").limit(1)).await.unwrap().next.is_none());
    entities.add_many((0..1001).map(|n| Add::new("t").id(format!("{n:04}")))).await.unwrap();
    let page = entities.find(&Query::of("t")).await.unwrap();
    assert_eq!((page.items.len(), page.next.is_some()), (1000, true), "1,000 by default");
    let last = entities.find(&Query::of("t").after(page.next.unwrap())).await.unwrap();
    assert_eq!((ids(&last.items), last.next), (vec!["1000".to_string()], None));
}
