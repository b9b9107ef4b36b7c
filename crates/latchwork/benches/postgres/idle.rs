//! How many statements an engine sends that has nothing to do. The server counts them.

use std::time::Duration;

use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, workflow};
use tokio::runtime::Runtime;

use crate::report::{Figure, Report};
use crate::server::Server;

pub(crate) fn idle(runtime: &Runtime, report: &Report) {
    if !report.wants("postgres.idle") {
        return;
    }
    let server = Server::start_with(|_| vec!["shared_preload_libraries=pg_stat_statements".into()]);
    let seconds = if report.quick { 5 } else { 60 };
    let calls = runtime.block_on(async {
        let (client, connection) =
            tokio_postgres::connect(&server.url, tokio_postgres::NoTls).await.expect("the server answers");
        tokio::spawn(connection);
        client.batch_execute("CREATE EXTENSION pg_stat_statements").await.expect("the extension");
        let store = Store::connect(&server.url).await.expect("a store");
        let add = workflow("add").run(async |ctx: Ctx, n: u32| ctx.run("add", async || Ok(n + 1)).await);
        let engine = Engine::on(&store).register(&add).start().await.expect("an engine");
        for n in 0..20 {
            engine.start(&add, n).await.expect("a start").result().await.expect("a result");
        }
        tokio::time::sleep(Duration::from_secs(3)).await;
        client.batch_execute("SELECT pg_stat_statements_reset()").await.expect("a reset");
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let asked = "SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements
            WHERE query NOT LIKE '%pg_stat_statements%'";
        let calls: i64 = client.query_one(asked, &[]).await.expect("a count").get(0);
        if std::env::var_os("LATCHWORK_STATS").is_some() {
            let asked = "SELECT calls, query FROM pg_stat_statements ORDER BY calls DESC LIMIT 12";
            for row in client.query(asked, &[]).await.expect("statements") {
                eprintln!("{:>6} {}", row.get::<_, i64>(0), row.get::<_, &str>(1).replace('\n', " "));
            }
        }
        engine.stop();
        store.close().await.expect("it closes");
        calls
    });
    let value = calls as f64 / seconds as f64;
    report.add(Figure { name: "postgres.idle", value, unit: "statements/s", floor: 1.0, target: "≤ 2" });
}
