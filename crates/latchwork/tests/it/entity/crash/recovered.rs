//! Opens a disk after a crash: what must be there, what may be half done, and how it is finished.

use std::collections::BTreeMap;

use latchwork::entity::{Access, Entities, EntityError, Query, Update, field};
use latchwork::store::disk::sim::SimDisk;
use latchwork::store::{Generation, Rev};
use serde_json::json;

use super::life::{CITIES, Life, Progress, State, What, open, person};

pub(super) struct Recovered {
    entities: Entities,
    random: fastrand::Rng,
}

type Checked = Result<(), String>;

macro_rules! ensure {
    ($holds:expr, $($what:tt)+) => {
        if !$holds {
            return Err(format!($($what)+));
        }
    };
}

fn told<T>(result: latchwork::entity::Result<T>, doing: &str) -> Result<T, String> {
    result.map_err(|error| format!("{doing}: {error}"))
}

impl Recovered {
    /// Everything acknowledged is there and no commit is there by half; then writes continue.
    pub(super) async fn check(disk: &SimDisk, life: &Life, acknowledged: u64, seed: u64) -> Checked {
        let entities = told(open(disk, seed).await, "opening")?;
        let mut recovered = Recovered { entities, random: fastrand::Rng::with_seed(seed) };
        let at = recovered.generation().await?;
        ensure!(at >= acknowledged, "generation {at} was recovered, and {acknowledged} was acknowledged");
        // Opening a directory without all spaces takes generations of its own.
        let last = life.states.keys().next_back().copied().unwrap_or(0).max(3);
        ensure!(at <= last, "generation {at} was recovered and never attempted");
        recovered.contents(life, at).await?;
        recovered.verify("after the crash").await?;
        for what in What::ALL {
            let progress = life.progress(what, at);
            recovered.uses(what, progress == Progress::Ready).await?;
            if matches!(progress, Progress::Building | Progress::Dropping) {
                recovered.write_meanwhile(what).await?;
            }
            if (what, progress) == (What::UniqueEmail, Progress::Building) {
                recovered.double_meanwhile().await?;
            }
        }
        recovered.finish().await
    }

    /// Checks the disk after a second crash, which came while the work of the first was being finished.
    pub(super) async fn check_again(disk: &SimDisk, seed: u64) -> Checked {
        let entities = told(open(disk, seed).await, "opening again")?;
        let mut recovered = Recovered { entities, random: fastrand::Rng::with_seed(seed) };
        recovered.verify("after the second crash").await?;
        for id in ["double", "another"] {
            let removed = recovered.entities.remove(id).await;
            ensure!(matches!(removed, Ok(_) | Err(EntityError::NotFound { .. })), "removing {id}: {removed:?}");
        }
        recovered.finish().await
    }

    async fn generation(&self) -> Result<u64, String> {
        told(self.entities.store().generation().await.map_err(Into::into), "reading the generation").map(|at| at.0)
    }

    /// All entities, now and at some time since the record began.
    async fn contents(&mut self, life: &Life, at: u64) -> Checked {
        for generation in [at, self.random.u64(life.begin..=at)] {
            let view = told(self.entities.as_of(Generation(generation)).await, "opening a view")?;
            // Before the spaces are declared nothing can be read, and nothing is there.
            if generation < 3 {
                continue;
            }
            let found = told(view.find(&Query::all().limit(10_000)).await, "finding everything")?;
            let found = found.items.into_iter().map(|entity| (entity.id.to_string(), (entity.rev.0, entity.data)));
            let (found, wanted) = (found.collect::<State>(), life.at(generation));
            let wrong = found.iter().find(|(id, entity)| wanted.get(*id) != Some(*entity));
            let missing = wanted.iter().find(|(id, _)| !found.contains_key(*id));
            ensure!(
                wrong.is_none() && missing.is_none(),
                "at {generation} of {at}: {wrong:?} is wrong, {missing:?} missing"
            );
        }
        Ok(())
    }

    async fn verify(&self, when: &str) -> Checked {
        let damage = told(self.entities.verify().await, "verifying entities")?;
        ensure!(damage.is_empty(), "{when}, verify finds {damage:?}");
        Ok(())
    }

    /// A ready index is used. A half-built index is not: it would not find everything.
    async fn uses(&self, what: What, wanted: bool) -> Checked {
        let (query, fields) = match what {
            What::City => (field("data.city").equals(1), "data.city"),
            What::CityAndEmail => {
                (field("data.city").equals(1).and(field("data.email").equals("x")), "data.city,data.email")
            }
            What::UniqueEmail => (field("data.email").equals("x"), "data.email"),
        };
        let plan = told(self.entities.explain(&Query::of("person").filter(query)).await, "explaining")?;
        let used = matches!(&plan.access, Access::Index { fields: used, .. } if used.join(",") == fields);
        ensure!(used == wanted, "{what:?} is used: {used}, and should be: {wanted} ({plan})");
        Ok(())
    }

    async fn people(&self) -> Result<State, String> {
        let found = told(self.entities.find(&Query::all().limit(10_000)).await, "finding everything")?;
        Ok(found.items.into_iter().map(|entity| (entity.id.to_string(), (entity.rev.0, entity.data))).collect())
    }

    /// Writers come before the index is declared again: their changes may be in it or not.
    async fn write_meanwhile(&mut self, what: What) -> Checked {
        let ids: Vec<String> = self.people().await?.into_keys().collect();
        let writes = if ids.is_empty() { 0 } else { 6 };
        for _ in 0..writes {
            let id = &ids[self.random.usize(..ids.len())];
            let city = self.random.u64(..CITIES);
            match self.random.u8(..3) {
                0 => {
                    let change = |draft: &mut latchwork::entity::Draft| draft.data["city"] = json!(city);
                    let changed = self.entities.update_with(id, 0, change).await;
                    ensure!(matches!(changed, Ok(_) | Err(EntityError::NotFound { .. })), "updating {id}: {changed:?}");
                }
                1 => {
                    let data = json!({"city": city, "email": format!("{id}@late.org")});
                    let changed = self.entities.update(Update::new(id).data(data)).await;
                    ensure!(matches!(changed, Ok(_) | Err(EntityError::NotFound { .. })), "updating {id}: {changed:?}");
                }
                _ => {
                    let removed = self.entities.remove(id).await;
                    ensure!(matches!(removed, Ok(_) | Err(EntityError::NotFound { .. })), "removing {id}: {removed:?}");
                }
            }
        }
        self.verify(&format!("after writes while {what:?} was half done")).await
    }

    /// A second person takes an address while the index is half built, so the violation may not be found yet. Then the
    /// declaration fails and leaves no trace. It succeeds after one of the two is gone.
    async fn double_meanwhile(&mut self) -> Checked {
        let people: Vec<_> = self.people().await?.into_iter().collect();
        let Some((id, (_, data))) = people.get(self.random.usize(..people.len().max(1))) else { return Ok(()) };
        let Some(email) = data["email"].as_str() else { return Ok(()) };
        match self.entities.add(person("double", 1, email)).await {
            Err(EntityError::UniqueViolation { owner, .. }) if owner == **id => return Ok(()),
            Ok(_) => {}
            other => return Err(format!("adding another {email} of {id}: {other:?}")),
        }
        if self.random.bool() {
            return self.give_up(id, email).await;
        }
        let declared = self.entities.declare(What::UniqueEmail.spec()).await;
        let named = |one: &str, two: &str| (one == id && two == "double") || (one == "double" && two == id);
        ensure!(
            matches!(&declared, Err(EntityError::UniqueViolation { id, owner, .. }) if named(id, owner)),
            "declaring {email} of {id} and double: {declared:?}"
        );
        self.uses(What::UniqueEmail, false).await?;
        self.verify("after a declaration that cannot be").await?;
        told(self.entities.remove("double").await, "removing the double").map(|_| ())
    }

    /// The first owner gives up the address: the entry belongs to the second owner, and stays.
    async fn give_up(&mut self, id: &str, email: &str) -> Checked {
        let gone = match self.random.bool() {
            true => self.entities.remove(id).await,
            false => self.entities.update(Update::new(id).data(json!({"city": 2}))).await,
        };
        told(gone, "letting go of an address")?;
        self.verify("after one of two has let go").await?;
        told(self.entities.declare(What::UniqueEmail.spec()).await, "declaring what is unique again")?;
        let query = Query::of("person").filter(field("data.email").equals(email));
        let by_email = told(self.entities.find_explained(&query).await, "finding the address")?;
        let found: Vec<_> = by_email.page.items.iter().map(|entity| entity.id.as_str()).collect();
        let plan = &by_email.plan;
        ensure!(found == ["double"] && !plan.scans(), "{email} of double was found at {found:?} ({plan})");
        self.verify("after declaring again with one of two").await?;
        told(self.entities.remove("double").await, "removing the double").map(|_| ())
    }

    /// Declaring again finishes all half-done work. Then every index finds what a full scan finds, and unique values
    /// hold.
    async fn finish(&mut self) -> Checked {
        for what in What::ALL {
            told(self.entities.declare(what.spec()).await, "declaring again")?;
            self.uses(what, true).await?;
        }
        self.verify("after declaring again").await?;
        let people = self.people().await?;
        let mut cities: BTreeMap<u64, Vec<&String>> = BTreeMap::new();
        for (id, (_, data)) in &people {
            cities.entry(data["city"].as_u64().unwrap_or(99)).or_default().push(id);
        }
        for (city, ids) in &cities {
            let query = Query::of("person").filter(field("data.city").equals(city)).limit(10_000);
            let by_city = told(self.entities.find_explained(&query).await, "finding by city")?;
            let mut found: Vec<_> = by_city.page.items.iter().map(|entity| entity.id.as_str()).collect();
            found.sort_unstable();
            ensure!(!by_city.plan.scans() && found == *ids, "in {city} the index finds {found:?} instead of {ids:?}");
        }
        self.still_unique(&people).await
    }

    async fn still_unique(&mut self, people: &State) -> Checked {
        let some = people.iter().nth(self.random.usize(..people.len().max(1)));
        let Some((id, (rev, data))) = some else { return Ok(()) };
        // A person may have given up its address.
        let Some(email) = data["email"].as_str() else { return Ok(()) };
        let query = Query::of("person").filter(field("data.email").equals(email));
        let found = told(self.entities.add_if_missing(&query, person("another", 0, email)).await, "adding if missing")?;
        ensure!((&*found.id, found.rev) == (id.as_str(), Rev(*rev)), "{email} of {id} was found at {found:?}");
        let added = self.entities.add(person("another", 0, email)).await;
        ensure!(
            matches!(&added, Err(EntityError::UniqueViolation { owner, .. }) if **owner == **id),
            "a second {email} beside {id}: {added:?}"
        );
        let mine = json!({"city": 0, "email": format!("{id}.{rev}@mine.org")});
        told(self.entities.update(Update::new(id).data(mine).if_rev(Rev(*rev))).await, "giving up an address")?;
        told(self.entities.add(person("another", 0, email)).await, "taking it over").map(|_| ())?;
        told(self.entities.remove("another").await, "and giving it back").map(|_| ())
    }
}
