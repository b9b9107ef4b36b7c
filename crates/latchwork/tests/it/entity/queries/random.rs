//! Random queries over random entities: an index, a scan and the reference must all return the same, on every view.

use fastrand::Rng;
use latchwork::entity::{Add, Entities, EntityView, Query, TypeSpec, Update};

use super::reference::{Document, answer, condition, document, order, ordered, value};
use super::{ids, pages};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(an_index_a_scan_and_the_reference_agree);

const COUNT: usize = 120;

fn declared() -> TypeSpec {
    TypeSpec::new("declared")
        .index(["data.a"])
        .index(["data.b", "data.a"])
        .index(["metadata.m", "data.c.0", "data.b"])
        .index(["data.a", "metadata.m"])
        .index(["data"])
}

/// Adds or changes one document under both types.
async fn put(entities: &Entities, document: &Document, is_new: bool) {
    for name in ["declared", "plain"] {
        let id = format!("{name}/{}", document.id);
        if is_new {
            let add = Add::new(name).id(id).data(&document.data).metadata(&document.metadata);
            entities.add(add).await.unwrap();
        } else {
            let update = Update::new(id).data(&document.data).replace_metadata(&document.metadata);
            entities.update(update).await.unwrap();
        }
    }
}

async fn an_index_a_scan_and_the_reference_agree(bench: Bench) {
    let entities = bench.entities().await;
    let mut random = Rng::with_seed(2026);
    let mut documents: Vec<Document> = (0..COUNT).map(|n| document(&mut random, format!("{n:03}"))).collect();
    for document in &documents {
        put(&entities, document, true).await;
    }
    let mut views = vec![(entities.now().await.unwrap(), documents.clone())];
    entities.declare(declared()).await.unwrap();
    views.push((entities.now().await.unwrap(), documents.clone()));
    for _ in 0..COUNT {
        let at = random.usize(..documents.len());
        if random.u8(..5) == 0 {
            let gone = documents.remove(at);
            entities.remove(format!("declared/{}", gone.id)).await.unwrap();
            entities.remove(format!("plain/{}", gone.id)).await.unwrap();
        } else {
            documents[at].data["a"] = value(&mut random);
            documents[at] = Document { id: documents[at].id.clone(), ..document(&mut random, String::new()) };
            put(&entities, &documents[at], false).await;
        }
    }
    views.push((entities.now().await.unwrap(), documents.clone()));
    entities.undeclare(TypeSpec::new("declared").index(["data.a"])).await.unwrap();
    views.push((entities.now().await.unwrap(), documents));
    let mut indexed = 0;
    for round in 0..300 {
        let (view, documents) = &views[round % views.len()];
        indexed += check(&entities, view, documents, &mut random).await;
    }
    assert!(indexed > 60, "only {indexed} queries used an index");
    super::super::conformance::assert_sound(&entities).await;
}

/// One random query. Returns whether an index answered it.
async fn check(entities: &Entities, view: &EntityView, documents: &[Document], random: &mut Rng) -> usize {
    let (condition, order) = (condition(random, 3), order(random));
    let limit = random.usize(1..40);
    let expected = answer(documents, &condition, &order);
    let again = entities.as_of(view.generation()).await.unwrap();
    let mut indexed = 0;
    for name in ["declared", "plain"] {
        let expected: Vec<String> = expected.iter().map(|id| format!("{name}/{id}")).collect();
        let in_code = ordered(Query::of(name).filter(condition.filter()), &order);
        let in_json = ordered(Query::of(name).filter(condition.json()), &order);
        let found = view.find_explained(&in_code).await.unwrap();
        let shown = format!("{name}, {}, by {order:?}: {}", condition.json(), found.plan);
        assert_eq!(ids(&found.page.items), expected, "{shown}");
        assert_eq!(found.plan, view.explain(&in_code).await.unwrap(), "{shown}");
        assert!(found.plan.scans() || name == "declared", "{shown}");
        indexed += usize::from(!found.plan.scans());
        assert_eq!(ids(&again.find(&in_json).await.unwrap().items), expected, "as JSON: {shown}");
        let paged: Vec<_> = pages(&again, &in_code, limit).await.into_iter().flat_map(|found| found.page).collect();
        assert_eq!(ids(&paged), expected, "in pages of {limit}: {shown}");
    }
    indexed
}
