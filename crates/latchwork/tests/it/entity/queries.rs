//! Finding: every operator, every plan, every order; the same results whichever plan is used.

mod malformed;
mod operators;
mod order;
mod paging;
mod plans;
mod random;
mod reference;

use latchwork::Cursor;
use latchwork::entity::{Add, Entities, Entity, EntityView, Explained, Query};
use serde_json::Value;

fn ids(items: &[Entity]) -> Vec<String> {
    items.iter().map(|entity| entity.id.to_string()).collect()
}

async fn found(entities: &Entities, query: &Query) -> Vec<String> {
    ids(&entities.find(query).await.unwrap().items)
}

async fn fill<'a>(entities: &Entities, entity_type: &str, items: impl IntoIterator<Item = (&'a str, Value)>) {
    for (id, data) in items {
        entities.add(Add::new(entity_type).id(id).data(data)).await.unwrap();
    }
}

/// All pages of a query, one after the other.
async fn pages(view: &EntityView, query: &Query, limit: usize) -> Vec<Explained> {
    let mut pages = Vec::new();
    let mut query = query.clone().limit(limit);
    loop {
        let found = view.find_explained(&query).await.unwrap();
        let next = found.page.next.clone();
        pages.push(found);
        match next {
            // A cursor survives the way through its text.
            Some(cursor) => query = query.after(cursor.to_string().parse::<Cursor>().unwrap()),
            None => return pages,
        }
    }
}
