//! Which plan answers a query, and that the plan says so: a declared index, or a scan.

use latchwork::entity::{Access, Add, Direction, Filter, Query, TypeSpec, field};
use serde_json::json;

use super::{fill, found};
use crate::backends::{Bench, on_every_backend};

use Direction::{Ascending, Descending};

on_every_backend!(
    a_plan_names_the_index_it_uses,
    without_an_index_the_plan_says_that_everything_is_scanned,
    an_index_scans_few_entities,
    a_field_without_an_index_is_still_found,
);

async fn a_plan_names_the_index_it_uses(bench: Bench) {
    let entities = bench.entities().await;
    let spec =
        TypeSpec::new("t").index(["data.a"]).index(["data.a", "data.b"]).unique(["data.u"]).index(["metadata.m"]);
    entities.declare(spec).await.unwrap();
    fill(&entities, "t", [("x", json!({"a": 1, "b": 2, "u": 3}))]).await;
    let (a, b, u, m) = (|| field("data.a"), || field("data.b"), || field("data.u"), || field("metadata.m"));
    let of = |filter: Filter| Query::of("t").filter(filter);
    let cases = [
        (of(a().equals(1)), "index on data.a: 1 equal"),
        (of(json!({"data.a": 1}).into()), "index on data.a: 1 equal"),
        (of(a().equals(1).and(b().equals(2))), "index on data.a, data.b: 2 equal"),
        (of(b().equals(2).and(a().equals(1))), "index on data.a, data.b: 2 equal"),
        (of(a().equals(1).and(b().greater(2))), "index on data.a, data.b: 1 equal, 1 bounded, then sort"),
        (of(u().equals(3)), "index on data.u: 1 equal"),
        (of(u().greater(3)), "index on data.u: 0 equal, 1 bounded, then sort"),
        (of(u().between(3, 4)).order_by("data.u", Descending), "index on data.u: 0 equal, 1 bounded"),
        (of(u().one_of([1, 2])), "index on data.u: 0 equal, 1 bounded, then sort"),
        (of(m().starts_with("x")), "index on metadata.m: 0 equal, 1 bounded, then sort"),
        (Query::of("t").order_by("data.u", Ascending), "index on data.u: 0 equal"),
        (of(a().equals(1)).order_by("data.b", Descending), "index on data.a, data.b: 1 equal"),
        (
            Query::of("t").order_by("data.a", Ascending).order_by("data.b", Ascending),
            "index on data.a, data.b: 0 equal",
        ),
        (of(b().equals(2)), "scan of the type"),
        (of(a().not(1)), "scan of the type"),
        (of(a().equals(1).or(u().equals(1))), "scan of the type"),
        (of(a().exists()), "scan of the type"),
        (of(a().contains(1)), "scan of the type"),
        (Query::of("t").order_by("data.b", Ascending), "scan of the type, then sort"),
        (Query::of("other").filter(a().equals(1)), "scan of the type"),
        (Query::all().filter(a().equals(1)), "scan of everything"),
        (Query::all().order_by("data.a", Ascending), "scan of everything, then sort"),
    ];
    for (query, expected) in cases {
        let plan = entities.explain(&query).await.unwrap();
        assert_eq!(plan.to_string(), expected, "{query:?}");
        assert_eq!(
            (plan.scans(), &plan),
            (expected.starts_with("scan"), &entities.find_explained(&query).await.unwrap().plan)
        );
    }
    let plan = entities.explain(&of(a().equals(1).and(b().less(2)))).await.unwrap();
    let expected = Access::Index { fields: vec!["data.a".into(), "data.b".into()], equal: 1, bounded: true };
    assert_eq!(plan.access, expected);
}

async fn without_an_index_the_plan_says_that_everything_is_scanned(bench: Bench) {
    let entities = bench.entities().await;
    entities.add_many((0..50).map(|n| Add::new("t").id(format!("{n:02}")).data(json!({"n": n})))).await.unwrap();
    entities.add_many((0..10).map(|n| Add::new("other").id(format!("x{n}")).data(json!({"n": n})))).await.unwrap();
    let found = entities.find_explained(&Query::of("t").filter(field("data.n").equals(7))).await.unwrap();
    assert_eq!((super::ids(&found.page.items), found.examined), (vec!["07".to_string()], 50));
    assert!(found.plan.scans() && found.plan.access == Access::ScanType);
    let found = entities.find_explained(&Query::all().filter(field("data.n").equals(7))).await.unwrap();
    assert_eq!((super::ids(&found.page.items), found.examined), (vec!["07".to_string(), "x7".into()], 60));
    assert!(found.plan.scans() && found.plan.access == Access::ScanAll);
}

async fn an_index_scans_few_entities(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").index(["data.n"]).unique(["data.u"])).await.unwrap();
    let item = |n: u32| Add::new("t").id(format!("{n:03}")).data(json!({"n": n % 10, "u": n}));
    entities.add_many((0..300).map(item)).await.unwrap();
    let n = || field("data.n");
    let cases = [
        (Query::of("t").filter(n().equals(7)), 30, 30),
        (Query::of("t").filter(n().equals(7)).limit(5), 5, 6),
        (Query::of("t").filter(n().between(2, 3)), 60, 60),
        (Query::of("t").filter(n().one_of([1, 5])), 60, 60),
        (Query::of("t").filter(field("data.u").equals(77)), 1, 1),
        (Query::of("t").filter(field("data.u").equals(777)), 0, 0),
        (Query::of("t").filter(n().greater(20)), 0, 0),
        (Query::of("t").filter(n().greater(5).and(n().less(5))), 0, 0),
        (Query::of("t").order_by("data.u", Descending).limit(10), 10, 11),
        (Query::of("t").limit(10), 10, 11),
    ];
    for (query, count, examined) in cases {
        let found = entities.find_explained(&query).await.unwrap();
        assert_eq!((found.page.items.len(), found.examined), (count, examined), "{query:?}");
    }
}

async fn a_field_without_an_index_is_still_found(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").index(["data.a"]).unique(["data.u"])).await.unwrap();
    let item = |n: u32| Add::new("t").id(format!("{n:02}")).data(json!({"a": n, "b": n, "c": [n], "u": null}));
    entities.add_many((0..20).map(|n| item(n).metadata(json!({"m": n})))).await.unwrap();
    let filters = [
        field("data.b").equals(7),
        field("metadata.m").equals(7),
        field("data.c.0").equals(7),
        field("data.c").contains(7),
        field("data.b").equals(7).and(field("data.a").at_least(0)),
        field("data.b").equals(7).and(field("data.u").equals(())),
        field("data.b").equals(7).and(field("data.none").exists().negate()),
        field("data.b").equals(7).or(field("data.a").equals(99)),
    ];
    for filter in filters {
        assert_eq!(found(&entities, &Query::of("t").filter(filter.clone())).await, ["07"], "{filter:?}");
    }
}
