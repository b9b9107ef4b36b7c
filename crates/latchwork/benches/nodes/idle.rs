//! How many statements an idle node sends while very many executions sleep. The server counts them.

use std::time::Duration;

use latchwork::workflow::{Ctx, Engine, workflow};
use tokio::runtime::Runtime;

use crate::process::store;
use crate::report::{Figure, Report};
use crate::server::Server;

pub(crate) fn idle(runtime: &Runtime, report: &Report) {
    if !report.wants("nodes.idle") {
        return;
    }
    let server = Server::start_with(|_| vec!["shared_preload_libraries=pg_stat_statements".into()]);
    let (count, seconds) = if report.quick { (5_000, 15) } else { (1_000_000, 60) };
    let calls = runtime.block_on(async {
        let (client, connection) =
            tokio_postgres::connect(&server.url, tokio_postgres::NoTls).await.expect("the server answers");
        tokio::spawn(connection);
        client.batch_execute("CREATE EXTENSION pg_stat_statements").await.expect("the extension");
        let store = store(&server.url, "bench").await;
        let sleeps =
            workflow("sleeps").run(async |ctx: Ctx, (): ()| ctx.sleep(Duration::from_secs(365 * 24 * 3600)).await);
        let engine = Engine::on(&store).register(&sleeps).start().await.expect("an engine");
        let mut callers = tokio::task::JoinSet::new();
        for _ in 0..256 {
            let (engine, sleeps) = (engine.clone(), sleeps.clone());
            callers.spawn(async move {
                for _ in 0..count / 256 {
                    engine.start(&sleeps, ()).await.expect("a start");
                }
            });
        }
        callers.join_all().await;
        // The clean-up of what the starts have left is work, and takes minutes.
        loop {
            client.batch_execute("SELECT pg_stat_statements_reset()").await.expect("a reset");
            tokio::time::sleep(Duration::from_secs(15)).await;
            let cleaned = "SELECT count(*) FROM pg_stat_statements WHERE query LIKE 'DELETE FROM bench.touched%'";
            if client.query_one(cleaned, &[]).await.expect("a count").get::<_, i64>(0) == 0 {
                break;
            }
        }
        client.batch_execute("SELECT pg_stat_statements_reset()").await.expect("a reset");
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let asked = "SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements
            WHERE query NOT LIKE '%pg_stat_statements%'";
        let calls: i64 = client.query_one(asked, &[]).await.expect("a count").get(0);
        if std::env::var_os("LATCHWORK_STATS").is_some() {
            let asked = "SELECT calls, query FROM pg_stat_statements ORDER BY calls DESC LIMIT 16";
            for row in client.query(asked, &[]).await.expect("statements") {
                eprintln!("{:>6} {}", row.get::<_, i64>(0), row.get::<_, &str>(1).replace('\n', " "));
            }
        }
        engine.stop();
        calls
    });
    let value = calls as f64 / seconds as f64;
    report.add(Figure { name: "nodes.idle", value, unit: "statements/s", floor: 1.0, target: "≤ 2" });
}
