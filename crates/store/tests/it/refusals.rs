//! What a database may refuse: each gets an error that names its cause, and nothing that was answered is lost.

// A server takes its own time.
#![allow(clippy::disallowed_methods)]

use std::time::Duration;

use latchwork_store::*;

use crate::server::Server;

fn schema(name: &str) -> String {
    format!("t_{}_{name}", std::process::id())
}

fn options(name: &str) -> PostgresOptions {
    PostgresOptions::new().schema(schema(name)).connections(1)
}

async fn admin(url: &str) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// The same server for another role.
fn as_role(server: &Server, role: &str) -> String {
    server.url.replace("user=postgres", &format!("user={role}"))
}

fn fault<T>(result: Result<T>) -> (ServerFault, String) {
    match result {
        Err(error @ StoreError::Server { fault, .. }) => (fault, error.to_string()),
        Err(error) => panic!("another error: {error:?}"),
        Ok(_) => panic!("no error"),
    }
}

/// Writes a key with an id, so that it can be sent again.
fn named(store: &Store, space: &Space, key: &str) -> Commit {
    let key = space.key(key);
    Commit::new().id(store.commit_id()).absent(&key).put(&key, "1")
}

#[tokio::test]
async fn a_standby_takes_no_store_for_writing_and_shows_one_for_reading() {
    let primary = Server::start_own();
    let store = options("standby").connect(&primary.url).await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    store.commit(Commit::new().put(&space.key("k"), "1")).await.unwrap().applied().unwrap();
    let standby = primary.start_standby();
    let (found, said) = fault(options("standby").connect(&standby.url).await);
    assert!(found == ServerFault::ReadOnly && said.contains("takes writes"), "{said}");
    let reading = options("standby").connect_read_only(&standby.url).await.unwrap();
    let item = reading.view().await.unwrap().get(&space.key("k")).await.unwrap().unwrap();
    assert_eq!(item.value, "1");
    let refused = reading.commit(Commit::new().put(&space.key("k"), "2")).await;
    assert!(matches!(refused, Err(StoreError::ReadOnly)), "{refused:?}");
}

/// The connection string names both servers. What was answered was on both, because the standby is synchronous.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commits_go_on_when_a_standby_takes_over() {
    let mut primary = Server::start_with(|_| vec!["synchronous_standby_names=*".into()]);
    let standby = primary.start_standby();
    let host = |server: &Server| server.home().display().to_string();
    let both = format!("host={},{} user=postgres dbname=postgres", host(&primary), host(&standby));
    let store = options("failover").patience(Duration::from_secs(60)).connect(&both).await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    let writing = {
        let (store, space) = (store.clone(), space.clone());
        tokio::spawn(async move {
            let began = store.env().monotonic();
            let mut written = 0_u64;
            while store.env().monotonic() - began < Duration::from_secs(6) {
                let key = space.key(format!("{written}"));
                let receipt = store.commit(Commit::new().absent(&key).put(&key, "1")).await.unwrap();
                assert_eq!(receipt.applied().expect("no other caller writes it").revs, [Some(Rev(1))]);
                written += 1;
            }
            written
        })
    };
    tokio::time::sleep(Duration::from_secs(1)).await;
    primary.kill();
    let taking_over = admin(&standby.url).await;
    taking_over.batch_execute("SELECT pg_promote()").await.unwrap();
    let written = writing.await.unwrap();
    let found = store.view().await.unwrap().scan(&space.all(), Order::Ascending, usize::MAX).await.unwrap();
    assert_eq!(found.len() as u64, written, "nothing lost, nothing doubled");
    assert!(written > 10);
}

#[tokio::test]
async fn missing_rights_are_named_and_nothing_is_lost() {
    let server = Server::start();
    let (admin, role) = (admin(&server.url).await, schema("weak"));
    admin.batch_execute(&format!("CREATE ROLE {role} LOGIN")).await.unwrap();
    // It may not create a schema, nor look into one.
    let (found, said) = fault(options("rights").connect(&as_role(&server, &role)).await);
    assert!(found == ServerFault::NoRights && said.contains("its rights on the schema"), "{said}");
    let owner = options("rights").connect(&server.url).await.unwrap();
    let space = owner.space(SpaceSpec::new("a")).await.unwrap();
    let (found, said) = fault(options("rights").connect(&as_role(&server, &role)).await);
    assert!(found == ServerFault::NoRights && said.contains("permission denied for schema"), "{said}");
    let name = schema("rights");
    let grant =
        format!("GRANT USAGE ON SCHEMA {name} TO {role}; GRANT SELECT ON ALL TABLES IN SCHEMA {name} TO {role}");
    admin.batch_execute(&grant).await.unwrap();
    // It may read.
    owner.commit(Commit::new().put(&space.key("k"), "1")).await.unwrap().applied().unwrap();
    let reading = options("rights").connect_read_only(&as_role(&server, &role)).await.unwrap();
    assert!(reading.view().await.unwrap().get(&space.key("k")).await.unwrap().is_some());
    assert_eq!(fault(options("rights").connect(&as_role(&server, &role)).await).0, ServerFault::NoRights);
    // A right that is taken away while the store is open: the commit fails at once, and lands when it is back.
    let all = format!("GRANT ALL ON ALL TABLES IN SCHEMA {name} TO {role}");
    admin.batch_execute(&all).await.unwrap();
    let store = options("rights").connect(&as_role(&server, &role)).await.unwrap();
    admin.batch_execute(&format!("REVOKE UPDATE, INSERT ON {name}.current FROM {role}")).await.unwrap();
    let commit = named(&store, &space, "later");
    assert_eq!(fault(store.commit(commit.clone()).await).0, ServerFault::NoRights);
    assert!(store.view().await.unwrap().get(&space.key("later")).await.unwrap().is_none());
    admin.batch_execute(&all).await.unwrap();
    assert_eq!(store.commit(commit).await.unwrap().applied().unwrap().revs, [Some(Rev(1))]);
}

/// A schema that an administrator has made is used by a role that may not create one.
#[tokio::test]
async fn a_role_without_the_right_to_create_schemas_uses_one_that_is_there() {
    let server = Server::start();
    let (admin, role, name) = (admin(&server.url).await, schema("tenant"), schema("given"));
    let given = format!("CREATE ROLE {role} LOGIN; CREATE SCHEMA {name} AUTHORIZATION {role}");
    admin.batch_execute(&given).await.unwrap();
    let store = options("given").connect(&as_role(&server, &role)).await.unwrap();
    store.space(SpaceSpec::new("a")).await.unwrap();
}

/// Everything is stored as bytes, so most encodings make no difference. One that has no conversion is named.
#[tokio::test]
async fn a_database_with_another_encoding_works_or_says_why_not() {
    let server = Server::start();
    let admin = admin(&server.url).await;
    for (encoding, works) in [("LATIN1", true), ("SQL_ASCII", true), ("EUC_JP", true), ("MULE_INTERNAL", false)] {
        let database = schema(&encoding.to_lowercase());
        let create = format!("CREATE DATABASE {database} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0");
        admin.batch_execute(&create).await.unwrap();
        let url = server.url.replace("dbname=postgres", &format!("dbname={database}"));
        let opened = options("encoded").connect(&url).await;
        if !works {
            let (found, said) = fault(opened);
            assert!(found == ServerFault::Encoding && said.contains("encoding is UTF8"), "{said}");
            continue;
        }
        let store = opened.unwrap();
        let space = store.space(SpaceSpec::new("größe/大きさ")).await.unwrap();
        let key = space.key("schlüssel/鍵/\u{0}".as_bytes());
        store.commit(Commit::new().put(&key, "wert/値/\u{1F512}").meta("é")).await.unwrap().applied().unwrap();
        store.close().await.unwrap();
        let store = options("encoded").connect(&url).await.unwrap();
        let again = store.space(SpaceSpec::new("größe/大きさ")).await.unwrap();
        let item = store.view().await.unwrap().get(&again.key("schlüssel/鍵/\u{0}".as_bytes())).await.unwrap().unwrap();
        assert_eq!(item.value, "wert/値/\u{1F512}", "{encoding}");
        store.close().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_timeout_fails_a_commit_and_loses_nothing() {
    let server = Server::start();
    let owner = options("slow").connect(&server.url).await.unwrap();
    let space = owner.space(SpaceSpec::new("a")).await.unwrap();
    let hasty = format!("{} options='-c statement_timeout=200'", server.url);
    let store = options("slow").patience(Duration::from_secs(1)).connect(&hasty).await.unwrap();
    // Another transaction holds the head.
    let (holder, name) = (admin(&server.url).await, schema("slow"));
    holder.batch_execute(&format!("BEGIN; SELECT 1 FROM {name}.head FOR UPDATE")).await.unwrap();
    let commit = named(&store, &space, "k");
    let (found, said) = fault(store.commit(commit.clone()).await);
    assert!(found == ServerFault::Cancelled && said.contains("statement_timeout"), "{said}");
    holder.batch_execute("COMMIT").await.unwrap();
    assert!(store.view().await.unwrap().get(&space.key("k")).await.unwrap().is_none());
    assert_eq!(store.commit(commit).await.unwrap().applied().unwrap().revs, [Some(Rev(1))]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_free_connection_commits_wait_and_then_fail() {
    let server = Server::start();
    let (admin, role) = (admin(&server.url).await, schema("few"));
    let create = format!("CREATE ROLE {role} LOGIN CONNECTION LIMIT 0; GRANT ALL ON DATABASE postgres TO {role}");
    admin.batch_execute(&create).await.unwrap();
    let url = as_role(&server, &role);
    let (found, said) = fault(options("few").connect(&url).await);
    assert!(found == ServerFault::NoResources && said.contains("fewer connections"), "{said}");
    let limit = async |count: i32| {
        admin.batch_execute(&format!("ALTER ROLE {role} CONNECTION LIMIT {count}")).await.unwrap();
    };
    limit(20).await;
    let store = options("few").patience(Duration::from_secs(1)).connect(&url).await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    // All its connections are ended, and no new one is free.
    limit(0).await;
    let end = format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{role}'");
    admin.batch_execute(&end).await.unwrap();
    let commit = named(&store, &space, "k");
    let (found, said) = fault(store.commit(commit.clone()).await);
    assert!(matches!(found, ServerFault::NoResources | ServerFault::Unreachable), "{found:?}: {said}");
    limit(20).await;
    assert_eq!(store.commit(commit).await.unwrap().applied().unwrap().revs, [Some(Rev(1))]);
    // A commit waits for a connection that is free in time.
    limit(0).await;
    admin.batch_execute(&end).await.unwrap();
    let patient = {
        let (store, space) = (store.clone(), space.clone());
        tokio::spawn(async move { store.commit(named(&store, &space, "l")).await })
    };
    tokio::time::sleep(Duration::from_millis(300)).await;
    limit(20).await;
    assert!(patient.await.unwrap().unwrap().is_applied());
}

/// The user's own transaction meets the same: neither its SQL nor the commit lands.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_refused_to_the_users_sql_is_named_and_nothing_of_it_lands() {
    let server = Server::start();
    let (admin, role, table) = (admin(&server.url).await, schema("user"), format!("public.{}", schema("rows")));
    let create = format!(
        "CREATE ROLE {role} LOGIN; GRANT ALL ON DATABASE postgres TO {role}; CREATE TABLE {table} (n bigint);
         GRANT SELECT ON {table} TO {role}"
    );
    admin.batch_execute(&create).await.unwrap();
    let hasty = format!("{} options='-c statement_timeout=1000'", as_role(&server, &role));
    let store = options("refused").connect(&hasty).await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    let insert = format!("INSERT INTO {table} VALUES (1)");
    let (key, before) = (space.key("k"), store.generation().await.unwrap());
    let commit = || Commit::new().absent(&key).put(&key, "1");
    let begin = async || store.postgres().unwrap().begin().await;

    // A right that is missing. An ignored error does not commit the rest.
    let own = begin().await.unwrap();
    let refused = own.tx().execute(&insert, &[]).await.unwrap_err();
    assert!(refused.to_string().contains("permission denied for table") && !refused.runs_again(), "{refused}");
    assert!(matches!(own.commit(commit()).await.unwrap(), SqlEnded::RolledBack(_)));
    admin.batch_execute(&format!("GRANT INSERT ON {table} TO {role}")).await.unwrap();

    // A time limit of the role ends the SQL, or the commit that waits for another one.
    let own = begin().await.unwrap();
    let slow = own.tx().execute("SELECT pg_sleep(60)", &[]).await.unwrap_err();
    assert!(slow.to_string().contains("statement timeout"), "{slow}");
    own.roll_back().await;
    let own = begin().await.unwrap();
    own.tx().execute(&insert, &[]).await.unwrap();
    admin.batch_execute(&format!("BEGIN; SELECT 1 FROM {}.head FOR UPDATE", schema("refused"))).await.unwrap();
    let SqlEnded::RolledBack(slow) = own.commit(commit()).await.unwrap() else { panic!("it is too slow") };
    assert!(slow.to_string().contains("statement timeout"), "{slow}");
    admin.batch_execute("COMMIT").await.unwrap();

    // No connection is free for the second transaction. The first one goes on.
    let own = begin().await.unwrap();
    own.tx().execute(&insert, &[]).await.unwrap();
    admin.batch_execute(&format!("ALTER ROLE {role} CONNECTION LIMIT 0")).await.unwrap();
    // Connections of earlier transactions are used first.
    let mut others = Vec::new();
    let refused = loop {
        match begin().await {
            Ok(other) if others.len() < 3 => others.push(other),
            refused => break refused,
        }
    };
    let (found, said) = fault(refused);
    assert!(found == ServerFault::NoResources && said.contains("fewer connections"), "{said}");
    let view = store.view().await.unwrap();
    assert!(view.get(&key).await.unwrap().is_none() && view.generation() == before, "nothing has landed");
    assert!(matches!(own.commit(commit()).await.unwrap(), SqlEnded::Applied(_)));
    let rows = admin.query_one(&format!("SELECT count(*) FROM {table}"), &[]).await.unwrap();
    assert_eq!(rows.get::<_, i64>(0), 1, "only the SQL of the commit that has landed");
}

#[tokio::test]
async fn a_name_that_is_no_plain_schema_is_refused_before_anything_is_sent() {
    for name in ["a\"b", "a'b", "a;drop schema public cascade", "a b", "a.b", "pg_x", "", "Größe", "a--", "a\0", "a\\"]
    {
        // Nothing listens there.
        let refused = PostgresOptions::new().schema(name).connect("host=127.0.0.1 port=1 user=x").await.unwrap_err();
        assert!(matches!(refused, StoreError::Option { .. }), "{name:?}: {refused}");
        let reading = PostgresOptions::new().schema(name).connect_read_only("host=127.0.0.1 port=1 user=x").await;
        assert!(matches!(reading, Err(StoreError::Option { .. })), "{name:?}");
    }
}

/// Keys, values, names of spaces and meta are bound, never put into a statement.
#[tokio::test]
async fn what_looks_like_sql_is_stored_as_it_is() {
    let server = Server::start();
    let store = options("injected").connect(&server.url).await.unwrap();
    let text = "'; DROP TABLE current; --\" \\ $1 {s} %s \u{0}";
    let space = store.space(SpaceSpec::new("'; DROP SCHEMA public; --").history(History::Forever)).await.unwrap();
    let key = space.key(text.as_bytes());
    store.commit(Commit::new().put(&key, text).meta(text)).await.unwrap().applied().unwrap();
    let view = store.view().await.unwrap();
    assert_eq!(view.get(&key).await.unwrap().unwrap().value, text);
    let changes = view.changes_since(&space.all(), Generation(0), 10).await.unwrap();
    assert_eq!(changes.commits.last().unwrap().meta, text);
}

#[tokio::test]
async fn a_schema_without_a_store_is_not_created_by_looking() {
    let server = Server::start();
    let looked = options("nothing").connect_read_only(&server.url).await.unwrap_err();
    assert!(matches!(looked, StoreError::NoSchema { .. }) && looked.kind() == ErrorKind::NotFound, "{looked}");
    let asked = format!("SELECT 1 FROM pg_namespace WHERE nspname = '{}'", schema("nothing"));
    assert!(admin(&server.url).await.query(&asked, &[]).await.unwrap().is_empty());
}

/// A store that is opened for reading stays as it was, whatever other processes do.
#[tokio::test]
async fn a_store_opened_for_reading_stays_as_it_was() {
    let server = Server::start();
    let store = options("frozen").connect(&server.url).await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    let put = async |value: &'static str| {
        store.commit(Commit::new().put(&space.key("k"), value)).await.unwrap().applied().unwrap().generation
    };
    let at = put("1").await;
    let reading = options("frozen").connect_read_only(&server.url).await.unwrap();
    put("2").await;
    while store.maintain().await.unwrap() {}
    let view = reading.view().await.unwrap();
    assert_eq!((view.generation(), view.get(&space.key("k")).await.unwrap().unwrap().value), (at, "1".into()));
    assert!(!reading.maintain().await.unwrap());
    assert_eq!(reading.verify().await.unwrap(), []);
    let later = reading.view_at(at.next()).await;
    assert!(matches!(later, Err(StoreError::FutureGeneration { .. })), "{later:?}");
    let pins = format!("SELECT count(*) FROM {}.pins", schema("frozen"));
    let row = admin(&server.url).await.query_one(&pins, &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 1, "only the store that writes has a lease");
    reading.close().await.unwrap();
    assert!(matches!(reading.view().await, Err(StoreError::Closed)));
}
