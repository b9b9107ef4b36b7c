//! What the user's SQL leaves on its connection counts neither for the next transaction nor for the writes of the
//! store: roles, settings, locks, temporary tables.

use latchwork_store::tokio_postgres::{Client, NoTls, connect};
use latchwork_store::*;

use crate::server::Server;

/// A server, a connection of its administrator, and a role that may write one table only.
struct Place {
    server: Server,
    client: Client,
    role: String,
    notes: String,
    name: String,
}

impl Place {
    async fn new(name: &str) -> Place {
        let server = Server::start();
        let (client, connection) = connect(&server.url, NoTls).await.unwrap();
        tokio::spawn(connection);
        let name = format!("{name}_{}", std::process::id());
        let (role, notes) = (format!("r_{name}"), format!("public.n_{name}"));
        let text = format!(
            "CREATE ROLE {role}; CREATE TABLE {notes} (note text, who text DEFAULT current_user);
             GRANT INSERT ON {notes} TO {role}"
        );
        client.batch_execute(&text).await.unwrap();
        Place { server, client, role, notes, name }
    }

    /// One connection serves all transactions.
    async fn store(&self, more: &str) -> (Store, Space) {
        let url = format!("{} {more}", self.server.url);
        let options = PostgresOptions::new().schema(format!("t_{}", self.name)).connections(1).transactions(1);
        let store = options.connect(&url).await.unwrap();
        let space = store.space(SpaceSpec::new("work")).await.unwrap();
        (store, space)
    }

    async fn text(&self, query: &str) -> String {
        self.client.query_one(query, &[]).await.unwrap().get(0)
    }

    /// Roles belong to the whole server, which other tests use.
    async fn end(self) {
        self.client.batch_execute(&format!("DROP TABLE {}; DROP ROLE {}", self.notes, self.role)).await.unwrap();
    }
}

async fn begin(store: &Store) -> SqlTransaction {
    store.postgres().expect("the store is in PostgreSQL").begin().await.unwrap()
}

async fn told(own: &SqlTransaction, query: &str) -> String {
    own.tx().query_one(query, &[]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sql_that_changes_its_role_lands_and_the_next_transaction_has_the_role_of_the_program() {
    let place = Place::new("roles").await;
    let (store, space) = place.store("").await;
    for change in ["SET LOCAL ROLE", "SET ROLE", "SET LOCAL SESSION AUTHORIZATION", "SET SESSION AUTHORIZATION"] {
        for is_rolled_back in [true, false] {
            let own = begin(&store).await;
            assert_eq!(told(&own, "SELECT current_user::text").await, "postgres", "before {change}");
            own.tx().batch_execute(&format!("{change} {}", place.role)).await.unwrap();
            let insert = format!("INSERT INTO {} (note) VALUES ($1)", place.notes);
            own.tx().execute(&insert, &[&change]).await.unwrap();
            if is_rolled_back {
                own.roll_back().await;
                continue;
            }
            let ended = own.commit(Commit::new().put(&space.key(change), "1")).await.unwrap();
            assert!(matches!(ended, SqlEnded::Applied(_)), "{change}: {ended:?}");
        }
    }
    let own = begin(&store).await;
    assert_eq!(told(&own, "SELECT current_user || '/' || session_user").await, "postgres/postgres");
    own.roll_back().await;
    let who = format!("SELECT string_agg(DISTINCT who, ',') || count(*) FROM {}", place.notes);
    assert_eq!(place.text(&who).await, format!("{}4", place.role), "the SQL ran as the role it had chosen");
    store.close().await.unwrap();
    place.end().await;
}

/// A role that the connection string asks for stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_of_the_connection_is_the_role_of_every_transaction() {
    let place = Place::new("chosen").await;
    let grant = format!(
        "DO $$ BEGIN EXECUTE format('GRANT CREATE ON DATABASE %I TO {}', current_database()); END $$",
        place.role
    );
    place.client.batch_execute(&grant).await.unwrap();
    let (store, space) = place.store(&format!("options='-c role={}'", place.role)).await;
    for key in ["1", "2"] {
        let own = begin(&store).await;
        assert_eq!(told(&own, "SELECT current_user::text").await, place.role);
        own.tx().batch_execute("RESET ROLE; SET ROLE NONE").await.unwrap();
        let ended = own.commit(Commit::new().put(&space.key(key), "1")).await.unwrap();
        assert!(matches!(ended, SqlEnded::Applied(_)), "{ended:?}");
    }
    store.close().await.unwrap();
    let role = &place.role;
    let drop = format!("DROP SCHEMA t_{} CASCADE; DROP OWNED BY {role}", place.name);
    place.client.batch_execute(&drop).await.unwrap();
    place.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_temporary_tables_and_settings_do_not_outlive_their_transaction() {
    let place = Place::new("left").await;
    let (store, space) = place.store("").await;
    let number = i64::from(std::process::id()) << 8;
    let lock = format!("SELECT pg_advisory_lock({number})");
    // The connection is cleaned beside the caller, who does not wait for it.
    let is_free = format!("BEGIN; SET LOCAL lock_timeout = '30s'; SELECT pg_advisory_xact_lock({number}); COMMIT");
    let table = "CREATE TEMP TABLE left_over (n bigint)";
    let no_table = "SELECT (to_regclass('pg_temp.left_over') IS NULL)::text";
    let setting = "SET work_mem = '3MB'; SET app.tenant = '7'";
    let no_setting = "SELECT (current_setting('work_mem') <> '3MB'
                             AND coalesce(current_setting('app.tenant', true), '') = '')::text";
    let cursor = "DECLARE left_open CURSOR WITH HOLD FOR SELECT 1";
    let no_cursor = "SELECT (count(*) = 0)::text FROM pg_cursors WHERE name = 'left_open'";
    for is_rolled_back in [true, false] {
        for (leave, ask) in [(table, no_table), (setting, no_setting), (cursor, no_cursor), (&lock, "SELECT 'true'")] {
            let own = begin(&store).await;
            own.tx().batch_execute(leave).await.unwrap();
            match is_rolled_back {
                true => own.roll_back().await,
                false => {
                    let ended = own.commit(Commit::new().put(&space.key("k"), "1")).await.unwrap();
                    assert!(matches!(ended, SqlEnded::Applied(_)), "{leave}: {ended:?}");
                }
            }
            place.client.batch_execute(&is_free).await.expect("no lock is held while the connection is not in use");
            let own = begin(&store).await;
            assert_eq!(told(&own, ask).await, "true", "after {leave}, rolled back: {is_rolled_back}");
            own.roll_back().await;
        }
    }
    store.close().await.unwrap();
    place.end().await;
}

/// A trigger on the store's own table notes what each commit waits for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_body_and_no_default_makes_a_commit_less_durable_and_a_stronger_default_stays() {
    let place = Place::new("durable").await;
    let (store, _) = place.store("").await;
    store.close().await.unwrap();
    let trigger = format!(
        "CREATE FUNCTION t_{0}.noted() RETURNS trigger LANGUAGE plpgsql AS
           $$ BEGIN INSERT INTO {1} (note) VALUES (current_setting('synchronous_commit')); RETURN NULL; END $$;
         CREATE TRIGGER noted AFTER UPDATE ON t_{0}.head FOR EACH ROW EXECUTE FUNCTION t_{0}.noted()",
        place.name, place.notes,
    );
    place.client.batch_execute(&trigger).await.unwrap();
    for (default, expected) in [("off", "on"), ("local", "on"), ("on", "on"), ("remote_apply", "remote_apply")] {
        let (store, space) = place.store(&format!("options='-c synchronous_commit={default}'")).await;
        let notes = async || {
            let all = format!("SELECT coalesce(string_agg(DISTINCT note, ','), '') FROM {}", place.notes);
            let all = place.text(&all).await;
            place.client.batch_execute(&format!("TRUNCATE {}", place.notes)).await.unwrap();
            all
        };
        store.commit(Commit::new().put(&space.key("k"), "1")).await.unwrap().applied().unwrap();
        assert_eq!(notes().await, expected, "a commit, with {default} as the default");
        for body in ["SET LOCAL synchronous_commit = off", "SET synchronous_commit = local", "SELECT 1"] {
            let own = begin(&store).await;
            own.tx().batch_execute(body).await.unwrap();
            let ended = own.commit(Commit::new().put(&space.key("k"), "1")).await.unwrap();
            assert!(matches!(ended, SqlEnded::Applied(_)), "{body}: {ended:?}");
            assert_eq!(notes().await, expected, "{body}, with {default} as the default");
        }
        let own = begin(&store).await;
        own.tx().batch_execute("SET LOCAL synchronous_commit = remote_apply").await.unwrap();
        own.commit(Commit::new().put(&space.key("k"), "1")).await.unwrap();
        assert_eq!(notes().await, "remote_apply", "a body may ask for more");
        store.close().await.unwrap();
    }
    place.end().await;
}
