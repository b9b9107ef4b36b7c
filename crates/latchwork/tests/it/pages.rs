//! Pages and cursors of every list: each list is walked once, and takes no cursor but its own.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::time::Duration;

use latchwork::claim::{ActionCtx, ClaimError, ClaimStep, ClaimWorkflow, Claims, Outcome, StoredClaims};
use latchwork::entity::{Add, EntityError, Query, Update, field};
use latchwork::lock::LockError;
use latchwork::store::{Env, ErrorKind, Store};
use latchwork::workflow::{Ctx, Engine, ExecutionFilter, Overlap, Schedule, Workflow, WorkflowError, workflow};
use latchwork::{Cursor, CursorError, Page, json};

/// All lists, by the names that errors have for them.
const LISTS: [&str; 13] = [
    "entities",
    "versions",
    "executions",
    "operations",
    "reviews",
    "schedules",
    "past runs",
    "locks",
    "claims",
    "transitions",
    "after-effects",
    "dead letters",
    "strays",
];

/// A store in which every list has at least three items.
struct World {
    engine: Engine,
    claims: Claims,
    stored: StoredClaims,
}

fn asks() -> Workflow<String, ()> {
    workflow("asks").run(async |ctx: Ctx, name: String| {
        ctx.run("first", async || Ok(())).await?;
        ctx.run("second", async || Ok(())).await?;
        ctx.review(&name, &"Is this right?", ["yes"]).await?;
        Ok(())
    })
}

fn notes() -> ClaimWorkflow {
    ClaimWorkflow::new("note", "notes", "note")
        .statuses(["open", "doing", "done"])
        .step(ClaimStep::new(1, "hang", "open", "done").claimed("doing").action("Hang"))
        .step(ClaimStep::new(2, "tell", "open", "done").after("Tell"))
        .step(ClaimStep::new(3, "fail", "open", "done").after("Fail"))
        .step(ClaimStep::new(4, "close", "open", "done"))
        .step(ClaimStep::new(5, "reopen", "done", "open"))
}

async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    for _ in 0..10_000 {
        if is_so().await {
            return;
        }
        Env::system().sleep(Duration::from_millis(1)).await;
    }
    panic!("{what} did not come");
}

impl World {
    async fn new() -> World {
        let (asks, done) = (asks(), workflow("done").run(async |_: Ctx, ()| Ok(())));
        let engine = Engine::on(&Store::memory().await.unwrap()).register(&asks).register(&done).start().await.unwrap();
        let claims = Claims::on(&engine)
            .workflow(notes())
            .action("Hang", async |_: ActionCtx| std::future::pending::<Result<Outcome, String>>().await)
            .after_effect("Tell", async |_| std::future::pending::<Result<(), String>>().await)
            .after_effect("Fail", async |_| Err::<(), _>("the mail server is away"))
            .after_effect_attempts(1);
        let claims = claims.start().await.unwrap();
        let stored = StoredClaims::on(engine.store()).await.unwrap();
        let world = World { engine, claims, stored };
        world.fill(&asks, &done).await;
        world.fill_claims().await;
        world
    }

    async fn fill(&self, asks: &Workflow<String, ()>, done: &Workflow<(), ()>) {
        let engine = &self.engine;
        for name in ["a", "b", "c"] {
            engine.start(asks, name.to_string()).id(name).await.unwrap();
            engine.mutex(name).acquire().await.unwrap().release().await.unwrap();
            let schedule = Schedule::every(name, Duration::from_secs(3600)).workflow(done, ());
            engine.schedules().put(schedule.overlap(Overlap::Allow)).await.unwrap();
            engine.schedules().trigger("a").await.unwrap();
        }
        engine.entities().add(Add::new("versioned").id("v")).await.unwrap();
        for number in 0..2 {
            engine.entities().update(Update::new("v").data(number)).await.unwrap();
        }
        until("reviews", async || engine.reviews().await.unwrap().items.len() == 3).await;
        until("past runs", async || engine.schedules().runs("a").await.unwrap().items.len() == 3).await;
    }

    async fn fill_claims(&self) {
        let note = |id: &str| Add::new("note").id(id).data(json!({"status": "open"}));
        for number in 0..3 {
            for step in ["tell", "fail", "hang"] {
                let id = format!("{step}-{number}");
                self.claims.add("note", note(&id)).await.unwrap();
                let fire = self.claims.fire("note", step, id.as_str()).into_future();
                match step {
                    "hang" => drop(tokio::spawn(fire)),
                    _ => assert!(fire.await.unwrap().is_done()),
                }
            }
            let lost = Add::new("note").id(format!("lost-{number}")).data(json!({"status": "lost"}));
            self.engine.entities().add(lost).await.unwrap();
        }
        self.claims.add("note", note("h")).await.unwrap();
        for step in ["close", "reopen", "close"] {
            assert!(self.claims.fire("note", step, "h").await.unwrap().is_done());
        }
        until("claims", async || self.stored.list().await.unwrap().items.len() == 3).await;
        until("dead letters", async || self.stored.dead_letters().await.unwrap().items.len() == 3).await;
    }

    /// A page of a list. Items are named.
    async fn page(&self, list: &str, limit: usize, after: Option<Cursor>) -> Result<Page<String>, CursorError> {
        let (engine, stored) = (&self.engine, &self.stored);
        match list {
            "entities" => {
                let notes = Query::of("note").limit(limit).after(after);
                named(engine.entities().find(notes).await, |it| it.id.to_string())
            }
            "versions" => {
                let view = engine.entities().now().await.unwrap();
                named(view.history("v").limit(limit).after(after).await, |it| it.rev.to_string())
            }
            "executions" => {
                let list = engine.list(ExecutionFilter::new().workflow("asks")).limit(limit).after(after);
                named(list.await, |it| it.id.to_string())
            }
            "operations" => named(engine.operations("a").limit(limit).after(after).await, |it| it.place.to_string()),
            "reviews" => named(engine.reviews().limit(limit).after(after).await, |it| it.id),
            "schedules" => named(engine.schedules().list().limit(limit).after(after).await, |it| it.name),
            "past runs" => named(engine.schedules().runs("a").limit(limit).after(after).await, |it| it.id.to_string()),
            "locks" => named(engine.locks().list().limit(limit).after(after).await, |it| it.name.to_string()),
            "claims" => named(stored.list().limit(limit).after(after).await, |it| it.entity.to_string()),
            "transitions" => named(stored.history("h").limit(limit).after(after).await, |it| it.rev.to_string()),
            "after-effects" => named(stored.undelivered().limit(limit).after(after).await, |it| it.key),
            "dead letters" => named(stored.dead_letters().limit(limit).after(after).await, |it| it.effect.key),
            "strays" => named(self.claims.strays("note").limit(limit).after(after).await, |(id, _)| id.to_string()),
            other => panic!("there is no list of {other}"),
        }
    }

    async fn cursor(&self, list: &str) -> Cursor {
        self.page(list, 1, None).await.unwrap().next.unwrap()
    }
}

/// An error that must be about a cursor.
trait AboutCursor: Debug {
    fn about(self) -> CursorError;
}

macro_rules! about_cursors {
    ($($error:ident),*) => {$(
        impl AboutCursor for $error {
            fn about(self) -> CursorError {
                assert_eq!(self.kind(), ErrorKind::Invalid, "{self}");
                match self {
                    $error::Cursor(error) => error,
                    other => panic!("{other}"),
                }
            }
        }
    )*};
}

about_cursors!(EntityError, WorkflowError, LockError, ClaimError);

fn named<T, E: AboutCursor>(page: Result<Page<T>, E>, name: impl Fn(T) -> String) -> Result<Page<String>, CursorError> {
    page.map(|page| page.map(name)).map_err(AboutCursor::about)
}

fn nothing<T>(_: T) -> String {
    String::new()
}

#[tokio::test]
async fn pages_of_one_item_walk_each_list_once() {
    let world = World::new().await;
    for list in LISTS {
        let whole = world.page(list, 1000, None).await.unwrap();
        assert!(whole.items.len() >= 3 && whole.next.is_none(), "{list}: {whole:?}");
        assert_eq!(whole.items.iter().collect::<BTreeSet<_>>().len(), whole.items.len(), "{list}: {whole:?}");
        let (mut found, mut after) = (Vec::new(), None);
        loop {
            let page = world.page(list, 1, after).await.unwrap();
            assert_eq!(page.items.len(), 1, "{list}");
            found.extend(page.items);
            assert!(found.len() <= whole.items.len(), "{list}: {found:?}");
            match page.next {
                // As text and back, as over a wire.
                Some(next) => after = Some(next.to_string().parse::<Cursor>().unwrap()),
                None => break,
            }
        }
        assert_eq!(found, whole.items, "{list}");
    }
}

#[tokio::test]
async fn a_cursor_of_another_list_is_refused() {
    let world = World::new().await;
    for found in LISTS {
        let cursor = world.cursor(found).await;
        assert_eq!(world.page(found, 1, Some(cursor.clone())).await.unwrap().items.len(), 1, "{found}");
        for expected in LISTS.into_iter().filter(|list| *list != found) {
            let refused = world.page(expected, 1, Some(cursor.clone())).await.unwrap_err();
            assert_eq!(refused, CursorError::OtherList { expected: expected.into(), found: found.into() });
        }
    }
}

#[tokio::test]
async fn a_cursor_of_another_filter_is_refused() {
    let world = World::new().await;
    let World { engine, stored, .. } = &world;
    let after = async |list| Some(world.cursor(list).await);
    let view = engine.entities().now().await.unwrap();
    let query = Query::of("note").filter(field("data.status").equals("open")).after(after("entities").await);
    let refused = [
        ("entities", named(engine.entities().find(query).await, nothing)),
        ("versions", named(view.history("h").after(after("versions").await).await, nothing)),
        ("executions", named(engine.list(ExecutionFilter::new()).after(after("executions").await).await, nothing)),
        ("operations", named(engine.operations("b").after(after("operations").await).await, nothing)),
        ("reviews", named(engine.reviews().name("b").after(after("reviews").await).await, nothing)),
        ("schedules", named(engine.schedules().list().paused().after(after("schedules").await).await, nothing)),
        ("past runs", named(engine.schedules().runs("b").after(after("past runs").await).await, nothing)),
        ("locks", named(engine.locks().list().held().after(after("locks").await).await, nothing)),
        ("claims", named(stored.list().needs_review().after(after("claims").await).await, nothing)),
        ("transitions", named(stored.history("tell-0").after(after("transitions").await).await, nothing)),
    ];
    for (list, refused) in refused {
        assert_eq!(refused.unwrap_err(), CursorError::OtherQuery { list: list.into() });
    }
}

/// Whatever happens to its text, a cursor is refused, or continues somewhere in its own list.
#[tokio::test]
async fn a_garbled_cursor_does_no_harm() {
    let world = World::new().await;
    let mut random = fastrand::Rng::with_seed(7);
    for list in LISTS {
        let good = world.cursor(list).await.to_string();
        let count = world.page(list, 1000, None).await.unwrap().items.len();
        for round in 0..100 {
            let mut text = good.clone().into_bytes();
            match round % 3 {
                0 => text.truncate(random.usize(..text.len())),
                1 => text.extend((0..random.usize(1..20)).map(|_| *random.choice(b"0123456789abcdef").unwrap())),
                _ => {}
            }
            for _ in 0..random.usize(..3) {
                if let Some(letter) = random.choice(&mut text) {
                    *letter = b"0123456789abcdefg"[random.usize(..17)];
                }
            }
            let Ok(cursor) = String::from_utf8(text).unwrap().parse::<Cursor>() else { continue };
            if let Ok(page) = world.page(list, 1000, Some(cursor)).await {
                assert!(page.items.len() <= count, "{list}");
            }
        }
    }
}
