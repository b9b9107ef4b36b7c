//! Steps with SQL: it lands with the record of the step or not at all, and the rules of steps hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use latchwork::store::{SqlTx, Store, StoreError};
use latchwork::workflow::{Ctx, Engine, Failure, NotPostgres, Retry, Workflow, WorkflowError, workflow};
use parking_lot::Mutex;

use super::kit::{Place, number};
use crate::server::Server;

/// A store, a table `notes` with a unique text, and a connection.
struct Notes {
    _server: Server,
    place: Place,
    client: latchwork::store::tokio_postgres::Client,
    table: String,
}

impl Notes {
    async fn new(name: &str) -> Notes {
        let server = Server::start();
        let place = Place::new(&server, name);
        let (client, table) = (place.client().await, place.table("notes"));
        client.batch_execute(&format!("CREATE TABLE {table} (note text PRIMARY KEY)")).await.unwrap();
        Notes { _server: server, place, client, table }
    }

    async fn count(&self) -> i64 {
        number(&self.client, &format!("SELECT count(*) FROM {}", self.table)).await
    }

    /// A workflow with one step, which inserts its input and then does something else.
    fn workflow<F, Fut>(&self, retry: Retry, then: F) -> Workflow<String, i64>
    where
        F: Fn(SqlTx) -> Fut + Send + Sync + Clone + 'static,
        Fut: Future<Output = Result<i64, Failure>> + Send + 'static,
    {
        let insert = format!("INSERT INTO {} VALUES ($1)", self.table);
        workflow("note").run(move |ctx: Ctx, note: String| {
            let (insert, retry, then) = (insert.clone(), retry.clone(), then.clone());
            async move {
                let step = ctx.sql("insert", async |tx: SqlTx| {
                    tx.execute(&insert, &[&note]).await?;
                    then(tx).await
                });
                step.retry(retry).timeout(Duration::from_secs(20)).await
            }
        })
    }

    async fn engine(&self, workflow: &Workflow<String, i64>) -> Engine {
        Engine::on(&self.place.store().await).register(workflow).start().await.unwrap()
    }
}

fn once() -> Retry {
    Retry::never()
}

fn code(error: WorkflowError) -> (String, String) {
    match error {
        WorkflowError::Failed { failure, .. } => (failure.code().to_string(), failure.message().to_string()),
        error => panic!("{error}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sql_and_the_record_of_the_step_land_together_and_a_replay_runs_no_sql() {
    let notes = Notes::new("together").await;
    let runs = Arc::new(AtomicU32::new(0));
    let (insert, counted) = (format!("INSERT INTO {} VALUES ($1)", notes.table), runs.clone());
    let waits = workflow("waits").run(move |ctx: Ctx, note: String| {
        let (insert, counted) = (insert.clone(), counted.clone());
        async move {
            let rows = ctx.sql("insert", async |tx: SqlTx| {
                counted.fetch_add(1, Ordering::SeqCst);
                Ok(tx.execute(&insert, &[&note]).await?)
            });
            let rows = rows.await?;
            let more: u64 = ctx.receive("more").await?;
            Ok(rows + more)
        }
    });
    let store = notes.place.store().await;
    let engine = Engine::on(&store).register(&waits).start().await.unwrap();
    engine.start(&waits, "a".to_string()).id("a").await.unwrap();
    while notes.count().await == 0 {
        tokio::task::yield_now().await;
    }
    engine.shutdown().await.unwrap();
    store.close().await.unwrap();
    let store = notes.place.store().await;
    let engine = Engine::on(&store).register(&waits).start().await.unwrap();
    engine.signal("a", "more", &41_u64).await.unwrap();
    assert_eq!(engine.handle(&waits, "a").result().await.unwrap(), 42, "the recorded number of rows, and 41");
    assert_eq!((notes.count().await, runs.load(Ordering::SeqCst)), (1, 1));
    assert_eq!(store.verify().await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_an_error_or_a_panic_the_sql_is_rolled_back_and_tried_again() {
    let notes = Notes::new("again").await;
    let tries = Arc::new(AtomicU32::new(0));
    let counted = tries.clone();
    let note = notes.workflow(Retry::exponential().first_pause(Duration::from_millis(1)).max_attempts(5), move |_| {
        let tried = counted.fetch_add(1, Ordering::SeqCst);
        async move {
            match tried {
                0 => Err("not yet".into()),
                1 => panic!("not yet"),
                tried => Ok(i64::from(tried)),
            }
        }
    });
    let engine = notes.engine(&note).await;
    assert_eq!(engine.start(&note, "a".to_string()).await.unwrap().result().await.unwrap(), 2);
    assert_eq!((notes.count().await, tries.load(Ordering::SeqCst)), (1, 3));
    let error = code(engine.start(&note, "a".to_string()).await.unwrap().result().await.unwrap_err());
    assert!(error.1.contains("duplicate key") && error.1.contains("[23505]"), "{error:?}");
    assert_eq!(notes.count().await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_time_limit_ends_the_statement_on_the_server() {
    let notes = Notes::new("limit").await;
    let insert = format!("INSERT INTO {} VALUES ($1)", notes.table);
    let slow = workflow("slow").run(move |ctx: Ctx, note: String| {
        let insert = insert.clone();
        async move {
            let step = ctx.sql("insert", async |tx: SqlTx| {
                tx.execute(&insert, &[&note]).await?;
                tx.execute("SELECT pg_sleep(600), 'slow step'", &[]).await?;
                Ok(1)
            });
            step.retry(once()).timeout(Duration::from_millis(300)).await
        }
    });
    let engine = notes.engine(&slow).await;
    let error = code(engine.start(&slow, "a".to_string()).await.unwrap().result().await.unwrap_err());
    assert_eq!(error.0, "latchwork.attempt.timeout");
    let running = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%''slow step''%' AND state = 'active'
                   AND pid <> pg_backend_pid()";
    while number(&notes.client, running).await > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(notes.count().await, 0);
    notes.client.execute(&format!("INSERT INTO {} VALUES ('a')", notes.table), &[]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_execution_rolls_its_sql_back() {
    let notes = Notes::new("cancel").await;
    let (begun, has_begun) = tokio::sync::mpsc::unbounded_channel();
    let note = notes.workflow(once(), move |_| {
        let _ = begun.send(());
        std::future::pending()
    });
    let mut has_begun = has_begun;
    let engine = notes.engine(&note).await;
    let handle = engine.start(&note, "a".to_string()).await.unwrap();
    has_begun.recv().await.unwrap();
    handle.cancel("no longer wanted").await.unwrap();
    assert!(matches!(handle.result().await, Err(WorkflowError::Cancelled { .. })));
    // The row is free again: another transaction can insert the same.
    notes.client.execute(&format!("INSERT INTO {} VALUES ('a')", notes.table), &[]).await.unwrap();
    assert_eq!(notes.count().await, 1);
}

#[tokio::test]
async fn on_another_store_the_step_fails_with_a_typed_error() {
    let note = workflow("note").run(async |ctx: Ctx, (): ()| {
        let step = ctx.sql("insert", async |tx: SqlTx| Ok(tx.execute("SELECT 1", &[]).await?));
        match step.await {
            Err(failure) if failure.get::<NotPostgres>().is_some() => Ok(failure.message().to_string()),
            other => Err(Failure::new(format!("{other:?}"))),
        }
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&note).start().await.unwrap();
    let said = engine.start(&note, ()).await.unwrap().result().await.unwrap();
    assert!(said.contains("not in PostgreSQL") && said.contains("Store::connect"), "{said}");
}

/// What a body must not do is noticed, and nothing of the store is written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_ends_its_transaction_or_ignores_a_failed_statement_is_noticed() {
    let notes = Notes::new("wrong").await;
    for (name, text, said) in [
        ("commit", "COMMIT", "has ended its transaction itself"),
        ("begin", "COMMIT; BEGIN", "has ended its transaction itself"),
        ("rollback", "ROLLBACK", "has ended its transaction itself"),
        ("failed", "SELECT 1/0", "current transaction is aborted"),
    ] {
        let note = notes.workflow(once(), move |tx: SqlTx| async move {
            let _ = tx.batch_execute(text).await;
            Ok(1)
        });
        let engine = notes.engine(&note).await;
        let handle = engine.start(&note, name.to_string()).id(name).await.unwrap();
        let error = code(handle.result().await.unwrap_err());
        assert!(error.1.contains(said), "{name}: {error:?}");
        assert_eq!(engine.store().verify().await.unwrap(), []);
        engine.shutdown().await.unwrap();
    }
    // Only what the bodies themselves have committed is there.
    assert_eq!(notes.count().await, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_constraint_that_is_checked_at_the_end_fails_the_step() {
    let notes = Notes::new("deferred").await;
    let other = notes.place.table("others");
    let create = format!("CREATE TABLE {other} (note text REFERENCES {} DEFERRABLE INITIALLY DEFERRED)", notes.table);
    notes.client.batch_execute(&create).await.unwrap();
    let insert = format!("INSERT INTO {other} VALUES ('nowhere')");
    let note = notes.workflow(once(), move |tx: SqlTx| {
        let insert = insert.clone();
        async move {
            tx.batch_execute(&insert).await?;
            Ok(1)
        }
    });
    let engine = notes.engine(&note).await;
    let error = code(engine.start(&note, "a".to_string()).await.unwrap().result().await.unwrap_err());
    assert!(error.1.contains("could not be committed") && error.1.contains("[23503]"), "{error:?}");
    assert_eq!(notes.count().await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handle_that_outlives_its_body_does_nothing() {
    let notes = Notes::new("outlives").await;
    let kept: Arc<Mutex<Option<SqlTx>>> = Arc::default();
    let keep = kept.clone();
    let note = notes.workflow(once(), move |tx: SqlTx| {
        *keep.lock() = Some(tx);
        async { Ok(1) }
    });
    let engine = notes.engine(&note).await;
    engine.start(&note, "a".to_string()).await.unwrap().result().await.unwrap();
    let tx = kept.lock().take().unwrap();
    let late = tx.execute(&format!("INSERT INTO {} VALUES ('late')", notes.table), &[]).await.unwrap_err();
    assert!(late.to_string().contains("the transaction has ended"), "{late}");
    assert_eq!(notes.count().await, 1);
}

/// Two executions lock two rows in opposite order, again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadlocks_and_lost_connections_run_the_sql_again_without_counting_an_attempt() {
    let notes = Notes::new("deadlock").await;
    let table = notes.place.table("counters");
    let create = format!(
        "CREATE TABLE {table} (id int PRIMARY KEY, n bigint NOT NULL); INSERT INTO {table} VALUES (1, 0), (2, 0)"
    );
    notes.client.batch_execute(&create).await.unwrap();
    let add = format!("UPDATE {table} SET n = n + 1 WHERE id = $1");
    let kills = Arc::new(AtomicU32::new(0));
    let cross = workflow("cross").run(move |ctx: Ctx, first: i32| {
        let (add, kills) = (add.clone(), kills.clone());
        async move {
            for _ in 0..10 {
                let step = ctx.sql("cross", async |tx: SqlTx| {
                    tx.batch_execute("SET LOCAL deadlock_timeout = '20ms'").await?;
                    tx.execute(&add, &[&first]).await?;
                    if kills.fetch_add(1, Ordering::SeqCst) % 7 == 6 {
                        tx.execute("SELECT pg_terminate_backend(pg_backend_pid())", &[]).await?;
                    }
                    tx.execute(&add, &[&(3 - first)]).await?;
                    Ok(())
                });
                step.retry(once()).await?;
            }
            Ok(())
        }
    });
    let engine = Engine::on(&notes.place.store().await).register(&cross).start().await.unwrap();
    let mut handles = Vec::new();
    for first in [1, 2, 1, 2] {
        handles.push(engine.start(&cross, first).await.unwrap());
    }
    for handle in handles {
        handle.result().await.unwrap();
    }
    let sum = number(&notes.client, &format!("SELECT sum(n)::bigint FROM {table}")).await;
    assert_eq!(sum, 80, "each of 40 steps has counted once in each row");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_steps_than_connections_wait_for_their_turn_and_branches_run_side_by_side() {
    let notes = Notes::new("turns").await;
    let insert = format!("INSERT INTO {} VALUES ($1)", notes.table);
    let branches = workflow("branches").run(move |ctx: Ctx, name: String| {
        let insert = insert.clone();
        async move {
            let (insert, name) = (&insert, &name);
            let step = async |ctx: Ctx, part: &'static str| {
                let note = format!("{name}/{part}");
                ctx.sql(part, async |tx: SqlTx| Ok(tx.execute(insert, &[&note]).await?)).await
            };
            let (left, right) = ctx.join((|ctx| step(ctx, "left"), |ctx| step(ctx, "right"))).await;
            Ok(left? + right?)
        }
    });
    let store = notes.place.options().transactions(2).connect(&notes.place.url).await.unwrap();
    let engine = Engine::on(&store).register(&branches).start().await.unwrap();
    let mut handles = Vec::new();
    for number in 0..20 {
        handles.push(engine.start(&branches, format!("n{number}")).await.unwrap());
    }
    for handle in handles {
        assert_eq!(handle.result().await.unwrap(), 2);
    }
    assert_eq!(notes.count().await, 40);
    let no_turns = notes.place.options().transactions(0).connect(&notes.place.url).await;
    assert!(matches!(no_turns, Err(StoreError::Option { .. })));
}
