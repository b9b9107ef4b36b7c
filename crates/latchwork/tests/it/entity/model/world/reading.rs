//! Views and finds of the world.

use latchwork::entity::{Entity, EntityError, EntityView};
use latchwork::store::{Generation, Rev, StoreError};
use latchwork::{Cursor, Page};
use serde_json::json;

use super::super::command::{Command, TYPES};
use super::super::filter::{Asked, Condition, FIELDS, Place, Test};
use super::{Compared, Looked, World, dropped, same, time, told};

impl World {
    /// Opens a view.
    pub(super) async fn look(&mut self, command: &Command) -> Compared {
        let (found, expected) = match command {
            Command::AsOf(back) => {
                let wanted = self.ago(i64::from(*back));
                (told(self.entities().as_of(Generation(wanted)).await), Ok(wanted))
            }
            Command::AsOfTime(tenths) => {
                let asked = self.now().saturating_sub(u64::from(*tenths) * 100_000);
                let oldest = Generation(self.reference.floor);
                let gone = || EntityError::Store(StoreError::TimeDropped { asked: time(asked), oldest });
                let expected = self.reference.generation_at(asked).ok_or_else(|| format!("{:?}", gone()));
                (told(self.entities().as_of(time(asked)).await), expected)
            }
            _ => (told(self.entities().now().await), Ok(self.reference.generation)),
        };
        let generation = found.as_ref().map(|view| view.generation().0).map_err(Clone::clone);
        same("the view's generation", generation, expected)?;
        let looked = |view| Looked { view, released: false, entities: Vec::new(), finds: Vec::new() };
        self.views.extend(found.ok().map(looked));
        Ok(())
    }

    pub(super) async fn get(&mut self, view: Option<u8>, id: &str) -> Compared {
        let Some(view) = view.and_then(|view| self.number(view)) else {
            let expected = self.reference.entity(id, self.reference.generation);
            return same("get", told(self.entities().get(id).await), Ok(expected));
        };
        let at = self.views[view].view.generation().0;
        let found = told(self.views[view].view.get(id).await);
        if let Some(error) = self.unreadable(at, self.views[view].released) {
            return same("get", found, Err(error));
        }
        self.views[view].entities.push((id.into(), self.reference.rev_at(id, at)));
        same("get", found, Ok(self.reference.entity(id, at)))
    }

    /// The history of every id, with limits.
    pub(super) async fn read(&mut self, view: u8) -> Compared {
        let Some(view) = self.number(view) else { return Ok(()) };
        let at = self.views[view].view.generation().0;
        let ids: Vec<String> = self.reference.entities.keys().cloned().chain(["never".into()]).collect();
        for (number, id) in ids.iter().enumerate() {
            let limit = if number % 2 == 0 { 99 } else { 2 };
            let found = told(self.views[view].view.history(id).limit(limit).await);
            if let Some(error) = self.unreadable(at, self.views[view].released) {
                same("history", found.map(|_| ()), Err(error))?;
                continue;
            }
            self.views[view].entities.push((id.clone(), self.reference.rev_at(id, at)));
            let versions = self.reference.entities.get(id).into_iter().flatten().rev();
            let versions = versions.filter(|version| version.at.generation.0 <= at).take(limit);
            let expected: Vec<_> = versions
                .map(|version| {
                    let entity = self.reference.entity(id, version.at.generation.0);
                    (Rev(version.rev), version.at, entity, self.reference.author(version))
                })
                .collect();
            let found = found?.into_iter().map(|found| (found.rev, found.committed, found.entity, found.meta.author));
            same(&format!("history of {id}"), found.collect(), expected)?;
        }
        Ok(())
    }

    pub(super) async fn since(&mut self, view: u8, older: u8) -> Compared {
        let (Some(view), Some(older)) = (self.number(view), self.number(older)) else { return Ok(()) };
        let (newer, older) = (&self.views[view], &self.views[older]);
        let found = told(newer.view.since(&older.view).await);
        let released = [older, newer].into_iter().find(|looked| looked.released);
        if let Some(released) = released {
            let error = EntityError::Released { generation: released.view.generation() };
            return same("since", found, Err(format!("{error:?}")));
        }
        self.compare_since(found, older.view.generation().0, &newer.view)
    }

    pub(super) async fn since_generation(&mut self, view: u8, back: u8) -> Compared {
        let Some(view) = self.number(view).filter(|view| !self.views[*view].released) else { return Ok(()) };
        let (older, newer) = (self.ago(i64::from(back)), &self.views[view].view);
        self.compare_since(told(newer.since_generation(Generation(older)).await), older, newer)
    }

    fn compare_since(
        &self,
        found: Result<Vec<latchwork::entity::EntityId>, String>,
        older: u64,
        newer: &EntityView,
    ) -> Compared {
        let until = newer.generation();
        let expected = if older > until.0 {
            Err(format!("{:?}", EntityError::NotOlder { older: Generation(older), newer: until }))
        } else if older < until.0 && older < self.reference.floor {
            Err(dropped(self.reference.floor))
        } else {
            Ok(self.reference.touched(older, until.0))
        };
        let found = found.map(|ids| ids.iter().map(ToString::to_string).collect::<Vec<_>>());
        same(&format!("since {older} until {until}"), found, expected)
    }

    /// One page, through a view or at the present.
    async fn page(
        &mut self,
        view: Option<usize>,
        asked: &Asked,
        from: Option<(&Cursor, &Place)>,
    ) -> Result<Option<Page<Entity>>, String> {
        let query = from.iter().fold(asked.query(), |query, (cursor, _)| query.after((*cursor).clone()));
        let after = from.map(|(_, place)| place);
        let (at, found, explained) = match view {
            Some(view) => {
                let view = &self.views[view].view;
                (view.generation().0, view.find_explained(&query).await, view.explain(&query).await)
            }
            None => {
                let entities = self.entities();
                (self.reference.generation, entities.find_explained(&query).await, entities.explain(&query).await)
            }
        };
        if let Some(error) = self.unreadable(at, view.is_some_and(|view| self.views[view].released)) {
            same("find", told(found).map(|_| ()), Err(error))?;
            return Ok(None);
        }
        let found = told(found)?;
        let expected = self.reference.find(asked, at, after);
        let more = expected.len() > asked.limit;
        let expected: Vec<Entity> = expected.into_iter().take(asked.limit).map(|(_, entity)| entity).collect();
        same(&format!("find at {at} by {}", found.plan), &found.page.items, &expected)?;
        same("whether there is more", found.page.next.is_some(), more)?;
        same("the plan", &found.plan, &told(explained)?)?;
        let declared = asked.entity_type.map(|of| self.reference.declared_at(of, at)).unwrap_or_default();
        if declared.is_empty() || declared.iter().any(|(fields, _)| asked.needs_index(fields[0])) {
            same(&format!("whether {} scans with {declared:?}", found.plan), found.plan.scans(), declared.is_empty())?;
        }
        if let Some(view) = view {
            let gave = found.page.items.iter().map(|entity| (entity.id.to_string(), entity.rev.0)).collect();
            self.views[view].finds.push((asked.clone(), after.cloned(), gave, more));
        }
        Ok(Some(found.page))
    }

    fn place(&self, asked: &Asked, entity: &Entity) -> Place {
        let doc = self.reference.doc(&entity.id, entity.changed.generation.0).expect("what was found is there");
        asked.place(&entity.id, doc)
    }

    pub(super) async fn find(&mut self, view: Option<u8>, asked: &Asked) -> Compared {
        let view = view.and_then(|view| self.number(view));
        let Some(mut page) = self.page(view, asked, None).await? else { return Ok(()) };
        while let Some(cursor) = page.next {
            let place = self.place(asked, page.items.last().expect("a page with a next one has items"));
            // As text and back, as over a wire.
            let cursor: Cursor = cursor.to_string().parse().expect("the text of a cursor");
            page = self.page(view, asked, Some((&cursor, &place))).await?.expect("the view is still there");
        }
        Ok(())
    }

    pub(super) async fn begin(&mut self, asked: &Asked) -> Compared {
        let page = self.page(None, asked, None).await?.expect("the present can be read");
        if let (Some(cursor), Some(last)) = (page.next, page.items.last()) {
            let place = self.place(asked, last);
            self.begun.push((asked.clone(), cursor, place));
        }
        Ok(())
    }

    /// The entity at the cursor may have changed or been removed: the results still continue after its position.
    pub(super) async fn next_page(&mut self, view: Option<u8>, begun: u8) -> Compared {
        if self.begun.is_empty() {
            return Ok(());
        }
        let (asked, cursor, place) = self.begun[usize::from(begun) % self.begun.len()].clone();
        let view = view.and_then(|view| self.number(view));
        self.page(view, &Asked { limit: 2, ..asked }, Some((&cursor, &place))).await.map(|_| ())
    }

    pub(super) async fn misuse(&mut self, asked: &Asked, begun: u8) -> Compared {
        if self.begun.is_empty() {
            return Ok(());
        }
        let (of, cursor, _) = &self.begun[usize::from(begun) % self.begun.len()];
        if asked.is_same_query(of) {
            return Ok(());
        }
        match self.entities().find(&asked.query().after(cursor.clone())).await {
            Err(EntityError::Cursor { .. }) => Ok(()),
            other => Err(format!("a cursor of {of:?} was taken: {other:?}")),
        }
    }

    /// All results that each index returns for one value, in both directions.
    pub(super) async fn find_by_every_index(&mut self) -> Compared {
        for entity_type in TYPES {
            for (path, value) in FIELDS.iter().flat_map(|path| [json!(1), json!("x"), json!(null)].map(|v| (*path, v)))
            {
                for (down, test) in [(false, Test::Equals(value.clone())), (true, Test::OneOf(vec![value.clone()]))] {
                    let (condition, order) = (Condition::Is(path, test), vec![(path, down)]);
                    let asked = Asked { entity_type: Some(entity_type), condition, order, limit: 2, as_json: false };
                    self.find(None, &asked).await?;
                }
            }
            for (path, down) in FIELDS.iter().flat_map(|path| [(*path, false), (*path, true)]) {
                let (condition, order) = (Condition::All(Vec::new()), vec![(path, down)]);
                let asked = Asked { entity_type: Some(entity_type), condition, order, limit: 3, as_json: true };
                self.find(None, &asked).await?;
            }
        }
        Ok(())
    }
}
