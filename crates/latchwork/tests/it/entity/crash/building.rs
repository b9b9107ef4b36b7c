//! Writers between the commits of a declaration. There is no power loss here: the declaration stops at its commits
//! because it is not polled, as in a busy process. What the writers write meanwhile decides what the index must hold.

use std::collections::BTreeMap;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use latchwork::entity::{Entities, EntityError, Query, Remove, Update, field};
use latchwork::store::Store;
use latchwork::store::disk::sim::SimDisk;
use serde_json::json;

use super::life::{CITIES, What, open, person};
use super::number;

const PEOPLE: u64 = 250;

fn email(number: u64) -> String {
    format!("{number}@example.org")
}

async fn email_of(entities: &Entities, id: &str) -> Option<String> {
    let entity = entities.get(id).await.expect("it can be read")?;
    entity.data["email"].as_str().map(String::from)
}

/// One write, which may take the address of another person. A refusal must name the real owner of the address.
async fn write(entities: &Entities, random: &mut fastrand::Rng, number: u64) {
    // A few from the first batch and a few from the last, so that the writes meet.
    let any_person = |random: &mut fastrand::Rng| (random.u64(..8) + PEOPLE - 4) % PEOPLE;
    let person_id = format!("p{:04}", any_person(random));
    // Before and after all others in the order of the scan.
    let newcomer = format!("{}{number}", if random.bool() { "a" } else { "z" });
    let wanted = if random.bool() { email(any_person(random)) } else { email(1000 + number) };
    let city = random.u64(..CITIES);
    let written = match random.u8(..4) {
        0 => entities.add(person(&newcomer, city, &wanted)).await.map(|_| ()),
        1 => entities.remove(Remove::new(&person_id)).await.map(|_| ()),
        2 => entities.update(Update::new(&person_id).data(json!({"city": city, "email": wanted}))).await.map(|_| ()),
        _ => {
            let change = |draft: &mut latchwork::entity::Draft| draft.data["city"] = json!(city);
            entities.update_with(&person_id, 3, change).await.map(|_| ())
        }
    };
    match written {
        Ok(()) | Err(EntityError::NotFound { .. }) => {}
        Err(EntityError::UniqueViolation { id, owner, .. }) => {
            assert_ne!(id, owner);
            assert_eq!(email_of(entities, &owner).await, Some(wanted), "the address of {owner}, the reported owner");
        }
        Err(error) => panic!("{error}"),
    }
}

/// Returns the people by their addresses, as a full scan finds them.
async fn owners(entities: &Entities) -> BTreeMap<String, Vec<String>> {
    let mut owners: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for person in entities.find(&Query::all().limit(10_000)).await.expect("it can be read").items {
        owners.entry(person.data["email"].as_str().expect("a string").into()).or_default().push(person.id.to_string());
    }
    owners
}

async fn populate(entities: &Entities) {
    let people = (0..PEOPLE).map(|number| person(&format!("p{number:04}"), number % CITIES, &email(number)));
    entities.add_many(people).await.expect("all of them are new");
}

async fn interleave(seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let entities = open(&SimDisk::new(), seed).await.expect("an empty disk opens");
    populate(&entities).await;
    let what = if seed.is_multiple_of(4) { What::City } else { What::UniqueEmail };
    let mut declare = pin!(entities.declare(what.spec()));
    let mut writes = 0;
    let declared = loop {
        match declare.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(declared) => break declared,
            // Sometimes several writes, and at some time no more, so that the declaration ends.
            Poll::Pending => {
                while writes < 40 && random.u8(..3) > 0 {
                    writes += 1;
                    write(&entities, &mut random, writes).await;
                }
            }
        }
    };
    check(&entities, what, declared).await;
}

/// Checks the result of a declaration after all writers have ended.
async fn check(entities: &Entities, what: What, declared: latchwork::entity::Result<()>) {
    assert_eq!(entities.verify().await.expect("it can be read"), []);
    let owners = owners(entities).await;
    let query = |email: &str| Query::of("person").filter(field("data.email").equals(email));
    match declared {
        Ok(()) if what == What::City => {}
        Ok(()) => {
            for (email, ids) in owners {
                let by_email = entities.find_explained(&query(&email)).await.expect("it can be read");
                let found: Vec<_> = by_email.page.items.iter().map(|entity| entity.id.to_string()).collect();
                assert!(!by_email.plan.scans() && found == ids && ids.len() == 1, "{email} of {ids:?} is at {found:?}");
            }
        }
        Err(EntityError::UniqueViolation { id, owner, .. }) => {
            assert!(what == What::UniqueEmail && id != owner);
            assert!(entities.explain(&query("")).await.expect("it can be read").scans(), "it leaves no trace");
        }
        Err(error) => panic!("{error}"),
    }
}

/// `LATCHWORK_CASES` sets how many declarations are interrupted.
#[tokio::test]
async fn an_index_holds_what_is_written_while_it_is_built() {
    let first = number("LATCHWORK_SEED", 1);
    for seed in first..first + number("LATCHWORK_CASES", 60) {
        println!("LATCHWORK_SEED={seed}");
        interleave(seed).await;
    }
}

/// The same on two threads, so that writes also come between a read of the declaration and its commit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_index_holds_what_others_write_while_it_is_built() {
    let first = number("LATCHWORK_SEED", 1);
    for seed in first..first + number("LATCHWORK_CASES", 60) {
        println!("LATCHWORK_SEED={seed}");
        let store = Store::memory().await.expect("a store in memory");
        let entities = Entities::on(&store).await.expect("entities in memory");
        populate(&entities).await;
        let what = if seed.is_multiple_of(4) { What::City } else { What::UniqueEmail };
        let writer = entities.clone();
        let writes = tokio::spawn(async move {
            let mut random = fastrand::Rng::with_seed(seed);
            for number in 0..200 {
                write(&writer, &mut random, number).await;
            }
        });
        let declared = entities.declare(what.spec()).await;
        writes.await.expect("the writer ends");
        check(&entities, what, declared).await;
    }
}
