//! The guide of docs/entities.md as one program: `cargo run -p latchwork --example entities`.

use latchwork::entity::{
    Add, Direction, Entities, EntityError, Filter, Query, Remove, Transaction, TypeSpec, Update, field,
};
use latchwork::json;
use latchwork::store::{Confirm, Store};
use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize, PartialEq)]
struct Person {
    name: String,
    email: String,
    city: String,
    age: u32,
}

fn person(name: &str, city: &str, age: u32) -> Person {
    Person { name: name.into(), email: format!("{}@example.org", name.to_lowercase()), city: city.into(), age }
}

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

#[tokio::main]
async fn main() -> Result {
    let home = std::env::temp_dir().join(format!("latchwork-guide-{}", std::process::id()));
    // Entities::open(directory) does both of these.
    let store = Store::open(home.join("data")).await?;
    let entities = Entities::on(&store).await?;

    documents(&entities).await?;
    revisions(&entities).await?;
    transactions(&entities).await?;
    unique_values(&entities).await?;
    finding(&entities).await?;
    time_travel(&entities, &home).await?;

    store.close().await?;
    std::fs::remove_dir_all(home)?;
    Ok(())
}

async fn documents(entities: &Entities) -> Result {
    let ada = Add::new("person").id("ada").data(person("Ada", "London", 36)).metadata(json!({"source": "import"}));
    let receipt = entities.add(ada.clone()).await?;
    assert!(receipt.was_added() && receipt.rev.0 == 1);

    // With if_absent, an existing entity is not changed: nothing is written and no rev rises.
    assert!(!entities.add(ada.if_absent(true)).await?.was_added());

    // Without an id, a UUIDv7 is generated.
    let made = entities.add(Add::new("person").data(person("Grace", "New York", 37))).await?.id;

    // Data is replaced, metadata is merged.
    entities.update(Update::new(&made).metadata(json!({"verified": true}))).await?;
    let grace = entities.get(&made).await?.expect("it was just added");
    assert_eq!(grace.parse::<Person>()?, person("Grace", "New York", 37));
    assert_eq!(grace.rev.0, 2);

    entities.remove(&made).await?;
    assert!(matches!(entities.remove(&made).await, Err(EntityError::NotFound { .. })));
    Ok(())
}

async fn revisions(entities: &Entities) -> Result {
    let seen = entities.get("ada").await?.expect("ada exists");
    let older = Person { age: 37, ..seen.parse()? };
    entities.update(Update::new("ada").data(&older).if_rev(seen.rev)).await?;

    // A caller that read before gets an error, and may read again.
    match entities.update(Update::new("ada").data(&older).if_rev(seen.rev)).await {
        Err(EntityError::RevisionConflict { expected, actual, .. }) => println!("rev {expected} became {actual}"),
        other => panic!("a stale rev was accepted: {other:?}"),
    }

    // Reads, changes and writes, and tries again if another caller was faster; at most five more times.
    entities.update_with("ada", 5, |ada| ada.data["age"] = json!(38)).await?;
    Ok(())
}

async fn transactions(entities: &Entities) -> Result {
    let ada = entities.get("ada").await?.expect("ada exists");
    let letter = Transaction::new()
        .add(Add::new("letter").id("letter-1").data(json!({"to": "ada"})))
        .update(Update::new("ada").metadata(json!({"letters": 1})).if_rev(ada.rev))
        .require_absent("letter-0")
        .author("grace")
        .reason("first letter");
    let receipt = entities.transact(letter).await?;
    println!("generation {}: {:?}", receipt.generation, receipt.ops);

    // The error lists everything that is wrong, and nothing was done.
    let wrong = Transaction::new()
        .add(Add::new("letter").id("letter-1"))
        .remove(Remove::new("ada").if_rev(ada.rev))
        .update(Update::new("missing"));
    match entities.transact(wrong).await {
        Err(EntityError::Rejected { failed }) => failed.iter().for_each(|failed| println!("{failed}")),
        other => panic!("it was accepted: {other:?}"),
    }

    // A commit that depends only on what was read: ids, and the entries that a find read.
    let view = entities.now().await?;
    let letters = view.find(&Query::of("letter")).await?.items.len();
    entities.add(Add::new("note").data(json!("this changes nothing that was read"))).await?;
    let count = Update::new("ada").metadata(json!({"letters": letters}));
    entities.transact(Transaction::new().update(count).if_unchanged(&view)).await?;
    Ok(())
}

async fn unique_values(entities: &Entities) -> Result {
    entities.declare(TypeSpec::new("person").unique(["data.email"]).index(["data.city", "data.age"])).await?;

    let twin = Add::new("person").id("twin").data(person("Ada", "Paris", 20));
    match entities.add(twin).await {
        Err(EntityError::UniqueViolation { owner, .. }) => println!("{owner} has that e-mail"),
        other => panic!("two have the same e-mail: {other:?}"),
    }

    let by_email = Query::of("person").filter(field("data.email").equals("alan@example.org"));
    let alan = Add::new("person").data(person("Alan", "London", 41));
    let first = entities.add_if_missing(&by_email, alan.clone()).await?;
    let again = entities.add_if_missing(&by_email, alan).await?;
    assert!(first.id == again.id && first.was_added() && !again.was_added());
    Ok(())
}

async fn finding(entities: &Entities) -> Result {
    let londoners = Query::of("person")
        .filter(field("data.city").equals("London"))
        .order_by("data.age", Direction::Descending)
        .limit(1);
    let mut cursor = None;
    loop {
        let page = entities.find(londoners.clone().after(cursor)).await?;
        page.items.iter().for_each(|person| println!("{}", person.data["name"]));
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    println!("found by {}", entities.explain(&londoners).await?);

    // The same as JSON. No index helps here, and the plan says so.
    let filter: Filter = json!({"or": [{"data.age": {"less": 30}}, {"metadata.source": "import"}]}).into();
    let found = entities.find_explained(&Query::of("person").filter(filter)).await?;
    assert!(found.plan.scans() && found.page.items.len() == 1);
    Ok(())
}

async fn time_travel(entities: &Entities, home: &std::path::Path) -> Result {
    let before = entities.now().await?;
    entities.update_with("ada", 5, |ada| ada.data["city"] = json!("Paris")).await?;
    let after = entities.now().await?;
    assert_eq!(before.get("ada").await?.expect("ada").data["city"], "London");
    assert_eq!(after.since(&before).await?, ["ada"]);

    for revision in after.history("ada").limit(10).await? {
        println!("rev {} at generation {}: {:?}", revision.rev, revision.committed.generation, revision.meta.reason);
    }
    let changed = after.get("ada").await?.expect("ada").changed;
    assert_eq!(entities.as_of(changed.time).await?.generation(), changed.generation);

    before.persist(home.join("snapshot")).await?;
    before.release();
    after.release();
    entities.restore(home.join("snapshot"), Confirm::ReplaceEverything).await?;
    assert_eq!(entities.get("ada").await?.expect("ada").data["city"], "London");
    Ok(())
}
