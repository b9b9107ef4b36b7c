//! Claims on a user's own table: the same engine, with rows in the place of entities.

// A lease takes its own time.
#![allow(clippy::disallowed_methods)]

use std::process::{Command, Stdio};
use std::time::Duration;

use latchwork::claim::{
    ActionCtx, ClaimError, ClaimStep, ClaimWorkflow, Claims, Fired, Outcome, Recovery, StoredClaims,
};
use latchwork::entity::Add;
use latchwork::json;
use latchwork::store::{SqlTx, Store};
use latchwork::workflow::{Ctx, Engine, workflow};

use crate::server::{Server, VARIABLE};
use crate::workflow::own::kit::{Place, number};

const SCHEMA: &str = "LATCHWORK_TABLE_SCHEMA";

/// Invoices that are paid. The payment is a row in another table of the user's.
pub(super) fn invoices(place: &Place) -> ClaimWorkflow {
    ClaimWorkflow::new("invoice", "billing", "invoice")
        .table(place.table("invoices"), "id", "version")
        .statuses(["sent", "paying", "paid", "void"])
        .step(pay())
        .step(ClaimStep::new(20, "void", "sent", "void"))
}

pub(super) fn pay() -> ClaimStep {
    ClaimStep::new(10, "pay", "sent", "paid").claimed("paying").action("Pay").after("Receipt")
}

pub(super) async fn create(place: &Place) -> latchwork::store::tokio_postgres::Client {
    let client = place.client().await;
    let text = format!(
        "CREATE TABLE {0} (id bigint PRIMARY KEY, status text NOT NULL, version bigint NOT NULL, cents bigint);
         CREATE TABLE {1} (invoice text, cents bigint); CREATE TABLE {2} (process text);
         INSERT INTO {0} SELECT n, 'sent', 1, n * 100 FROM generate_series(1, 20) AS n",
        place.table("invoices"),
        place.table("payments"),
        place.table("bodies"),
    );
    client.batch_execute(&text).await.unwrap();
    client
}

/// Notes that it runs, takes a while, and pays with the final status. A negative amount violates nothing but fails.
pub(super) async fn act(ctx: ActionCtx, place: Place) -> Result<Outcome, Box<dyn std::error::Error + Send + Sync>> {
    let client = place.client().await;
    let note = format!("INSERT INTO {} VALUES ($1)", place.table("bodies"));
    client.execute(&note, &[&std::process::id().to_string()]).await?;
    tokio::time::sleep(Duration::from_millis(ctx.input()["ms"].as_u64().unwrap_or(0))).await;
    let (insert, cents) =
        (format!("INSERT INTO {} VALUES ($1, $2)", place.table("payments")), ctx.entity().data["cents"].as_i64());
    let (invoice, fails) = (ctx.entity().id.to_string(), ctx.input()["fails"] == true);
    ctx.sql(move |tx: SqlTx| {
        let (insert, invoice) = (insert.clone(), invoice.clone());
        async move {
            tx.execute(&insert, &[&invoice, &cents]).await?;
            if fails {
                tx.execute("SELECT 1/0", &[]).await?;
            }
            Ok(())
        }
    });
    Ok(Outcome::output(json!({"paid": cents})))
}

async fn claims(engine: &Engine, place: &Place, workflow: ClaimWorkflow) -> Result<Claims, ClaimError> {
    let place = Place { url: place.url.clone(), schema: place.schema.clone() };
    let action = move |ctx: ActionCtx| act(ctx, Place { url: place.url.clone(), schema: place.schema.clone() });
    let receipt = async |_| Ok::<_, String>(());
    let builder = Claims::on(engine).workflow(workflow).action("Pay", action).after_effect("Receipt", receipt);
    builder.sweep_every(Duration::from_millis(50)).start().await
}

async fn row(client: &latchwork::store::tokio_postgres::Client, place: &Place, id: i64) -> (String, i64) {
    let query = format!("SELECT status, version FROM {} WHERE id = $1", place.table("invoices"));
    let row = client.query_one(&query, &[&id]).await.unwrap();
    (row.get(0), row.get(1))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_is_claimed_paid_and_finished_in_the_users_table() {
    let server = Server::start();
    let place = Place::new(&server, "rows");
    let client = create(&place).await;
    let engine = Engine::on(&place.store().await).start().await.unwrap();
    let claims = claims(&engine, &place, invoices(&place)).await.unwrap();
    let Fired::Done(done) = claims.fire("invoice", "pay", "7").await.unwrap() else { panic!("it is done") };
    assert_eq!((done.to.as_str(), done.rev.0, done.output), ("paid", 3, json!({"paid": 700})));
    assert_eq!(row(&client, &place, 7).await, ("paid".into(), 3));
    let sum = format!("SELECT sum(cents)::bigint FROM {}", place.table("payments"));
    assert_eq!(number(&client, &sum).await, 700);

    // The SQL of the action fails at the end: nothing is paid, and the row is free again.
    let failed = claims.fire("invoice", "pay", "8").input(json!({"fails": true})).await;
    assert!(matches!(&failed, Err(ClaimError::Action { error, .. }) if error.to_string().contains("division by zero")));
    assert_eq!(row(&client, &place, 8).await, ("sent".into(), 3));
    assert_eq!(number(&client, &sum).await, 700);
    assert!(claims.fire("invoice", "pay", "8").await.unwrap().is_done());

    // A step without an action; a row that does not exist; an id that is no number; text that is SQL.
    assert!(claims.fire("invoice", "void", "9").await.unwrap().is_done());
    assert_eq!(row(&client, &place, 9).await, ("void".into(), 2));
    for id in ["99", "nine", "'; DROP TABLE x; --", "1 OR true", "9\0"] {
        let missing = claims.fire("invoice", "pay", id).await;
        assert!(matches!(missing, Err(ClaimError::NotFound { .. })), "{id:?}: {missing:?}");
    }
    assert!(matches!(claims.fire("invoice", "pay", "9").await.unwrap(), Fired::NotPermitted(_)));
    assert_eq!(claims.permitted("invoice", "10", "system").await.unwrap().steps, ["pay", "void"]);
    let added = claims.add("invoice", Add::new("invoice").data(json!({"status": "sent"}))).await;
    assert!(matches!(added, Err(ClaimError::Table { .. })));
    let stored = StoredClaims::on(engine.store()).await.unwrap();
    let history = stored.history(format!("sql:{}:7", place.table("invoices"))).await.unwrap().items;
    assert_eq!(history.iter().map(|it| (it.from.as_str(), it.to.as_str())).collect::<Vec<_>>(), [("sent", "paid")]);
    assert_eq!(number(&client, &sum).await, 1500);
}

/// Not a test by itself: a process that fires the same step many times at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_pays() {
    let (Ok(schema), Ok(url)) = (std::env::var(SCHEMA), std::env::var(VARIABLE)) else { return };
    let place = Place { url, schema };
    let store = place.store().await;
    let engine = Engine::on(&store).idle().start().await.unwrap();
    let claims = claims(&engine, &place, invoices(&place)).await.unwrap();
    let mut fired = tokio::task::JoinSet::new();
    for _ in 0..25 {
        for invoice in 1..=4 {
            let fire = claims.fire("invoice", "pay", invoice.to_string()).input(json!({"ms": 300}));
            fired.spawn(fire.into_future());
        }
    }
    let (mut done, mut refused) = (0, 0);
    for fired in fired.join_all().await {
        let fired = fired.unwrap();
        done += u32::from(fired.is_done());
        refused += u32::from(fired.is_refused());
    }
    println!("fired {done} {refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_requests_of_two_processes_run_one_body() {
    let server = Server::start();
    let place = Place::new(&server, "races");
    let client = create(&place).await;
    let process = || {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "claim::table::the_process_that_pays", "--nocapture"])
            .env(SCHEMA, &place.schema)
            .env(VARIABLE, &place.url)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    };
    drop(place.store().await);
    let processes = [process(), process()];
    let (mut done, mut refused) = (0, 0);
    for process in processes {
        let output = process.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}");
        let fired = text.lines().find_map(|line| line.split_once("fired ")).expect("it says what came of it").1;
        let numbers: Vec<u32> = fired.split(' ').map(|number| number.parse().unwrap()).collect();
        (done, refused) = (done + numbers[0], refused + numbers[1]);
    }
    assert_eq!((done, refused), (4, 196), "each of four invoices is paid once, and 49 requests for it are refused");
    let bodies = number(&client, &format!("SELECT count(*) FROM {}", place.table("bodies"))).await;
    let payments = number(&client, &format!("SELECT count(*) FROM {}", place.table("payments"))).await;
    assert_eq!((bodies, payments), (4, 4));
    for invoice in 1..=4 {
        assert_eq!(row(&client, &place, invoice).await, ("paid".into(), 3));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_process_is_gone_reverts_its_row_and_a_changed_row_is_left() {
    let server = Server::start();
    let place = Place::new(&server, "gone");
    let client = create(&place).await;
    let config = |recovery| {
        let step = ClaimStep { lease: Some(Duration::from_secs(1)), recovery, ..pay() };
        let void = ClaimStep::new(20, "void", "sent", "void");
        ClaimWorkflow { steps: vec![step, void], ..invoices(&place) }
    };
    let store = place.store().await;
    let engine = Engine::on(&store).start().await.unwrap();
    let first = claims(&engine, &place, config(Recovery::Revert)).await.unwrap();
    for invoice in ["1", "2"] {
        let fire = first.fire("invoice", "pay", invoice).input(json!({"ms": 60_000}));
        tokio::spawn(fire.into_future());
    }
    for invoice in [1, 2] {
        while row(&client, &place, invoice).await.0 != "paying" {
            tokio::task::yield_now().await;
        }
    }
    // The user's own program changes one of them meanwhile, and raises the version as it must.
    let change = format!("UPDATE {} SET status = 'void', version = version + 1 WHERE id = 2", place.table("invoices"));
    client.execute(&change, &[]).await.unwrap();
    engine.stop();
    drop((first, engine));
    let store = place.store().await;
    let engine = Engine::on(&store).start().await.unwrap();
    let claims = claims(&engine, &place, config(Recovery::Revert)).await.unwrap();
    let open = StoredClaims::on(&store).await.unwrap();
    while !open.list().await.unwrap().items.is_empty() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(row(&client, &place, 1).await, ("sent".into(), 3));
    assert_eq!(row(&client, &place, 2).await, ("void".into(), 3));
    assert!(claims.fire("invoice", "pay", "1").await.unwrap().is_done());
    let payments = number(&client, &format!("SELECT count(*) FROM {}", place.table("payments"))).await;
    assert_eq!(payments, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_that_cannot_be_used_is_found_at_the_start() {
    let server = Server::start();
    let place = Place::new(&server, "boot");
    let client = create(&place).await;
    let table = |name: &str| place.table(name);
    let text = format!(
        "CREATE VIEW {view} AS SELECT * FROM {t};
         CREATE TABLE {plain} (id bigint PRIMARY KEY, status text NOT NULL);
         CREATE TABLE {twins} (id bigint, status text, version bigint NOT NULL);
         CREATE TABLE {texts} (id bigint PRIMARY KEY, status text, version text NOT NULL);
         CREATE TABLE {nullable} (id bigint PRIMARY KEY, status text, version bigint);
         CREATE TABLE {numbers} (id bigint PRIMARY KEY, status bigint, version bigint NOT NULL);
         CREATE TABLE {jumps} (LIKE {t} INCLUDING ALL); INSERT INTO {jumps} VALUES (1, 'sent', 1, 1);
         CREATE TABLE {empty} (LIKE {t} INCLUDING ALL);
         CREATE TABLE {stamped} (LIKE {t} INCLUDING ALL); INSERT INTO {stamped} VALUES (1, 'sent', 1, 1);
         CREATE FUNCTION {f}() RETURNS trigger LANGUAGE plpgsql AS
           $$ BEGIN NEW.version := OLD.version + 10; RETURN NEW; END $$;
         CREATE FUNCTION {g}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.cents := 5; RETURN NEW; END $$;
         CREATE TRIGGER jump BEFORE UPDATE ON {jumps} FOR EACH ROW EXECUTE FUNCTION {f}();
         CREATE TRIGGER jump BEFORE UPDATE ON {empty} FOR EACH ROW EXECUTE FUNCTION {f}();
         CREATE TRIGGER stamp BEFORE UPDATE ON {stamped} FOR EACH ROW EXECUTE FUNCTION {g}();",
        t = table("invoices"),
        view = table("a_view"),
        plain = table("plain"),
        twins = table("twins"),
        texts = table("texts"),
        nullable = table("nullable"),
        numbers = table("numbers"),
        jumps = table("jumps"),
        empty = table("empty"),
        stamped = table("stamped"),
        f = table("jump"),
        g = table("stamp"),
    );
    client.batch_execute(&text).await.unwrap();
    let engine = Engine::on(&place.store().await).start().await.unwrap();
    let on = |name: String| invoices(&place).table(name, "id", "version");
    for (workflow, said) in [
        (on(table("missing")), "there is no such table"),
        (on(table("a_view")), "it is a view"),
        (on(table("plain")), "it has no column \"version\""),
        (on(table("twins")), "column \"id\" is not unique"),
        (on(table("texts")), "a version is a bigint NOT NULL"),
        (on(table("nullable")), "a version is a bigint NOT NULL"),
        (on(table("numbers")), "a status is a text or an enum"),
        (on(table("jumps")), "a trigger (jump) changes the version: 1 became 11"),
        (on(table("empty")), "a trigger (jump) changes the version: \"jump\" assigns it"),
        (on(format!("{}\"; DROP TABLE x; --", table("invoices"))), "cannot be the name of a table"),
        (invoices(&place).table(table("invoices"), "id; --", "version"), "cannot be the name of a table or a column"),
        (invoices(&place).table(table("invoices"), "id", "ver sion"), "cannot be the name of a table or a column"),
    ] {
        let error = claims(&engine, &place, workflow).await.unwrap_err().to_string();
        assert!(error.contains(said), "{error} should contain {said}");
    }
    let memory = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
    let error = claims(&memory, &place, invoices(&place)).await.unwrap_err().to_string();
    assert!(error.contains("the store is not in PostgreSQL"), "{error}");
    // A trigger on other columns does no harm.
    let fine = claims(&engine, &place, on(table("stamped"))).await.unwrap();
    assert!(fine.fire("invoice", "void", "1").await.unwrap().is_done());
}

/// Each row: what is made of a copy of the table, in which `{t}` is its name, and what is said of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_changes_or_hides_rows_behind_an_update_is_found_at_the_start() {
    let server = Server::start();
    let place = Place::new(&server, "behind");
    let client = create(&place).await;
    let one = "INSERT INTO {t} VALUES (1, 'sent', 1, 1);";
    let raises = "CREATE FUNCTION {t}_f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                    IF pg_trigger_depth() = 1 THEN UPDATE {t} SET version = version + 10 WHERE id = 1; END IF;
                    RETURN NULL; END $$;";
    let assigns = "CREATE FUNCTION {t}_f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                     NEW.version = OLD.version + 10; RETURN NEW; END $$;";
    let runs = "EXECUTE FUNCTION {t}_f();";
    let after = "CREATE TRIGGER jump AFTER UPDATE ON {t} FOR EACH ROW";
    let statement = "CREATE TRIGGER jump AFTER UPDATE ON {t} FOR EACH STATEMENT";
    let of_status = "CREATE TRIGGER jump BEFORE UPDATE OF status ON {t} FOR EACH ROW";
    let deferred = "CREATE CONSTRAINT TRIGGER jump AFTER UPDATE ON {t} DEFERRABLE INITIALLY DEFERRED FOR EACH ROW";
    let disabled = "ALTER TABLE {t} DISABLE TRIGGER jump";
    let changed = "a trigger (jump) changes the version: 1 became 12";
    for (name, parts, said) in [
        ("after", &[one, raises, after, runs][..], Some(changed)),
        ("each", &[one, raises, statement, runs], Some(changed)),
        ("deferred", &[one, raises, deferred, runs], Some(changed)),
        ("status", &[one, assigns, of_status, runs], Some("a trigger (jump) changes the version: 1 became 11")),
        ("none", &[raises, after, runs], Some("\"jump\" assigns it")),
        ("equals", &[assigns, of_status, runs], Some("\"jump\" assigns it")),
        (
            "ruled",
            &["CREATE RULE quiet AS ON UPDATE TO {t} DO INSTEAD NOTHING"],
            Some("a rule (quiet) rewrites updates"),
        ),
        ("disabled", &[one, raises, after, runs, disabled], None),
    ] {
        let table = place.table(name);
        let copy = format!("CREATE TABLE {table} (LIKE {} INCLUDING ALL); ", place.table("invoices"));
        client.batch_execute(&(copy + &parts.join(" ").replace("{t}", &table))).await.unwrap();
        let engine = Engine::on(&place.store().await).idle().start().await.unwrap();
        let started = claims(&engine, &place, invoices(&place).table(table, "id", "version")).await;
        match (started, said) {
            (Ok(claims), None) => assert!(claims.fire("invoice", "pay", "1").await.unwrap().is_done()),
            (Err(error), Some(said)) => assert!(error.to_string().contains(said), "{name}: {error}"),
            (started, said) => panic!("{name}: {:?} instead of {said:?}", started.err()),
        }
    }
}

/// It does not fire at the trial, which leaves the status as it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trigger_that_runs_after_a_claim_is_noticed_before_the_action_runs() {
    let server = Server::start();
    let place = Place::new(&server, "noticed");
    let client = create(&place).await;
    let engine = Engine::on(&place.store().await).start().await.unwrap();
    let claims = claims(&engine, &place, invoices(&place)).await.unwrap();
    let (invoices, jump) = (place.table("invoices"), place.table("jump"));
    let text = format!(
        "CREATE FUNCTION {jump}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
           UPDATE {invoices} SET version = version + 10 WHERE id = NEW.id; RETURN NULL; END $$;
         CREATE TRIGGER jump AFTER UPDATE ON {invoices} FOR EACH ROW
           WHEN (OLD.status IS DISTINCT FROM NEW.status) EXECUTE FUNCTION {jump}()"
    );
    client.batch_execute(&text).await.unwrap();
    let error = claims.fire("invoice", "pay", "1").await.unwrap_err().to_string();
    assert!(error.contains("a trigger has set its version to 12 instead of 2"), "{error}");
    assert_eq!(row(&client, &place, 1).await, ("sent".into(), 1));
    assert_eq!(number(&client, &format!("SELECT count(*) FROM {}", place.table("bodies"))).await, 0);
}

/// A role that sees some rows only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_table_whose_rows_are_hidden_from_the_program_is_found_at_the_start() {
    let server = Server::start();
    let place = Place::new(&server, "rls");
    let client = create(&place).await;
    let (role, invoices_table) = (format!("rls_{}", std::process::id()), place.table("invoices"));
    let text = format!(
        "CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA {0}_user TO {role}; CREATE SCHEMA {0} AUTHORIZATION {role};
         GRANT SELECT, UPDATE ON {invoices_table} TO {role}; ALTER TABLE {invoices_table} ENABLE ROW LEVEL SECURITY;
         CREATE POLICY sent ON {invoices_table} USING (status = 'sent')",
        place.schema
    );
    client.batch_execute(&text).await.unwrap();
    let url = place.url.replace("user=postgres", &format!("user={role}"));
    let store = place.options().connect(&url).await.unwrap();
    let engine = Engine::on(&store).idle().start().await.unwrap();
    let error = claims(&engine, &place, invoices(&place)).await.unwrap_err().to_string();
    assert!(error.contains("row level security applies"), "{error}");
    engine.shutdown().await.unwrap();
    store.close().await.unwrap();
    let drop = format!("DROP SCHEMA {0} CASCADE; DROP SCHEMA {0}_user CASCADE; DROP ROLE {role}", place.schema);
    client.batch_execute(&drop).await.unwrap();
}

/// The SQL of an action is in the transaction of the final status also for an entity of the store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sql_of_an_action_lands_with_the_status_of_an_entity() {
    let server = Server::start();
    let place = Place::new(&server, "mixed");
    let client = create(&place).await;
    let nothing = workflow("nothing").run(async |_: Ctx, (): ()| Ok(()));
    let engine = Engine::on(&place.store().await).register(&nothing).start().await.unwrap();
    let mut config = invoices(&place);
    config.meta.table = None;
    let claims = claims(&engine, &place, config).await.unwrap();
    for id in ["a", "b"] {
        claims.add("invoice", Add::new("invoice").id(id).data(json!({"status": "sent", "cents": 5}))).await.unwrap();
    }
    assert!(claims.fire("invoice", "pay", "a").await.unwrap().is_done());
    assert!(claims.fire("invoice", "pay", "b").input(json!({"fails": true})).await.is_err());
    let status = |id: &'static str| {
        let entities = engine.entities().clone();
        async move { entities.get(id).await.unwrap().unwrap().data["status"].clone() }
    };
    assert_eq!((status("a").await, status("b").await), (json!("paid"), json!("sent")));
    let sum = number(&client, &format!("SELECT sum(cents)::bigint FROM {}", place.table("payments"))).await;
    assert_eq!(sum, 5);
}
