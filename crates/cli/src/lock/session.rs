//! `latch lock session`, `acquire`, `withdraw` and `remove`: locks held by a session that a script renews itself. Where
//! a command runs under the lock, `latch lock run` does all of it.

use std::time::Duration;

use anyhow::Result;
use clap::{Args, Subcommand, ValueEnum};
use hyper::Method;
use latchwork::{Value, json};

use crate::api::{self, Need};
use crate::ask::confirm;
use crate::client::{ApiCall, Client, encoded, object};
use crate::lock::Scope;
use crate::output::{Exit, Output, Problem};
use crate::shown::{Field, How, about, table, word};
use crate::target::Target;
use crate::time::{duration, exact};

const ABOUT: [Field; 5] = [
    ("session", "/id", How::Plain),
    ("label", "/label", How::Plain),
    ("since", "/since", How::Time),
    ("renewed", "/lease_renewed_at", How::Time),
    ("lease until", "/lease_until", How::Time),
];

const LOCKS: [Field; 4] = [
    ("LOCK", "/name", How::Plain),
    ("WORKFLOW", "/workflow", How::Plain),
    ("EXECUTION", "/tree", How::Plain),
    ("TOKEN", "/token", How::Plain),
];

/// The longest wait of one request.
const MOST: Duration = Duration::from_secs(30);

#[derive(Subcommand)]
pub(crate) enum SessionCommand {
    /// Begins a session, which holds locks as long as it is renewed.
    Begin(Begin),
    /// Shows a session, and what it holds or waits for.
    Show(One),
    /// Renews a session: it has a full lease again.
    Renew(One),
    /// Ends a session, and releases everything that it holds.
    End(One),
}

#[derive(Args)]
pub(crate) struct Begin {
    /// How long it holds its locks after its last renewal; 30s by default.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    lease: Option<Duration>,
    /// The label that operators see.
    #[arg(long, value_name = "TEXT")]
    label: Option<String>,
}

/// One session.
#[derive(Args)]
pub(crate) struct One {
    /// The session's id.
    id: String,
}

#[derive(Args)]
pub(crate) struct Acquire {
    /// The lock's name.
    name: String,
    #[command(flatten)]
    scope: Scope,
    /// The session that shall hold it.
    #[arg(long, value_name = "ID")]
    session: String,
    /// The id of the request: under one id it counts once, and keeps its place. A new one without this.
    #[arg(long, value_name = "ID")]
    request: Option<String>,
    /// How the lock is shared.
    #[arg(long, value_enum, default_value = "mutex")]
    mode: Mode,
    /// How many permits the semaphore has.
    #[arg(long, value_name = "N", required_if_eq("mode", "semaphore"))]
    slots: Option<u32>,
    /// How many permits of the semaphore are acquired.
    #[arg(long, value_name = "N", requires = "slots")]
    permits: Option<u32>,
    /// Waits at most this long. If the time is up, the request keeps its place in the queue.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    wait: Option<Duration>,
}

/// How a lock is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Mode {
    Mutex,
    Semaphore,
    Read,
    Write,
}

#[derive(Args)]
pub(crate) struct Withdraw {
    /// The lock's name.
    name: String,
    #[command(flatten)]
    scope: Scope,
    /// The session that holds it, or waits for it.
    #[arg(long, value_name = "ID")]
    session: String,
    /// The token of the request.
    #[arg(long, value_name = "N")]
    token: u64,
}

#[derive(Args)]
pub(crate) struct Remove {
    /// The lock's name.
    name: String,
    #[command(flatten)]
    scope: Scope,
    /// Does not ask for confirmation.
    #[arg(long)]
    yes: bool,
}

/// What works through the API alone.
pub(crate) enum LockCall {
    Session(SessionCommand),
    Acquire(Acquire),
    Withdraw(Withdraw),
    Remove(Remove),
}

pub(crate) async fn run(command: LockCall, target: &Target, output: &mut Output<'_>) -> Result<()> {
    let need = if matches!(command, LockCall::Session(SessionCommand::Show(_))) { Need::Look } else { Need::Change };
    api::with(target, need, async |client| match command {
        LockCall::Session(command) => session(command, client, output).await,
        LockCall::Acquire(acquire) => self::acquire(acquire, client, output).await,
        LockCall::Withdraw(withdraw) => self::withdraw(withdraw, client, output).await,
        LockCall::Remove(remove) => self::remove(remove, client, output).await,
    })
    .await
}

/// A request about a lock, in its scope.
fn of_lock(scope: &Scope, method: Method, path: String) -> ApiCall {
    scope.query().into_iter().fold(ApiCall::change(method, path), |call, (name, value)| call.query(name, value))
}

async fn session(command: SessionCommand, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let path = |one: &One| format!("/sessions/{}", encoded(&one.id));
    let found = match command {
        SessionCommand::Begin(Begin { lease, label }) => {
            let lease = lease.map(|lease| Value::from(exact(lease)));
            let body = object([("lease", lease), ("label", label.map(Value::from))]);
            client.call(ApiCall::post("/sessions").body(body)).await?
        }
        SessionCommand::Show(one) => client.call(ApiCall::get(path(&one))).await?,
        SessionCommand::Renew(one) => client.call(ApiCall::post(format!("{}/renew", path(&one)))).await?,
        SessionCommand::End(one) => {
            client.call(ApiCall::change(Method::DELETE, path(&one))).await?;
            let ended = json!({"id": one.id});
            return output.one(&ended, |text| text.line(format!("Session {} has ended, now or before.", one.id)));
        }
    };
    let now = client.env().now();
    output.one(&found, |text| {
        about(text, &found, &ABOUT, now);
        let locks = found["locks"].as_array().filter(|locks| !locks.is_empty());
        if let Some(locks) = locks {
            text.line("");
            text.table(table(locks, &LOCKS, now));
        }
    })
}

async fn acquire(acquire: Acquire, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Acquire { name, scope, session, request, mode, slots, permits, wait } = acquire;
    let mode = match mode {
        Mode::Mutex => "mutex",
        Mode::Semaphore => "semaphore",
        Mode::Read => "read",
        Mode::Write => "write",
    };
    // Each further request asks for the same grant.
    let request = request.unwrap_or_else(|| client.env().uuid().to_string());
    let body = object([
        ("session", Some(session.into())),
        ("request", Some(request.into())),
        ("mode", Some(mode.into())),
        ("capacity", slots.map(Value::from)),
        ("permits", permits.map(Value::from)),
    ]);
    let until = wait.map(|wait| client.env().monotonic() + wait);
    let standing = loop {
        let left = until.map(|until| until.saturating_sub(client.env().monotonic()));
        let call = of_lock(&scope, Method::POST, format!("/locks/{}/acquire", encoded(&name))).body(body.clone());
        let standing = client.call(call.maybe("wait", left.map(|left| exact(left.min(MOST))))).await?;
        if standing["granted"] == true || left.is_none_or(|left| left.is_zero()) {
            break standing;
        }
    };
    let token = &standing["token"];
    output.one(&standing, |text| match standing["granted"] == true {
        true => text.line(format!("The session holds lock {name:?} under token {token}.")),
        false => text.line(format!("The request waits for lock {name:?}, and will have token {token}.")),
    })?;
    match standing["granted"] == true {
        true => Ok(()),
        false => {
            let why = format!("the request still waits; ask again with --request {}", word(&standing, "request"));
            Err(Problem::new(Exit::Busy, why).into())
        }
    }
}

async fn withdraw(withdraw: Withdraw, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Withdraw { name, scope, session, token } = withdraw;
    let call = of_lock(&scope, Method::POST, format!("/locks/{}/release", encoded(&name)));
    let done = client.call(call.body(json!({"session": session, "token": token}))).await?;
    output.one(&done, |text| match done["released"] == true {
        true => text.line(format!("The session no longer holds lock {name:?}, nor waits for it, under token {token}.")),
        false => text.line(format!("The session had no request for lock {name:?} under token {token} any more.")),
    })
}

async fn remove(remove: Remove, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Remove { name, scope, yes } = remove;
    confirm(&format!("Remove lock {name:?}?"), yes, "nothing was removed")?;
    client.call(of_lock(&scope, Method::DELETE, format!("/locks/{}", encoded(&name)))).await?;
    output.one(&json!({"name": name}), |text| text.line(format!("Lock {name:?} is removed; its tokens go on.")))
}
