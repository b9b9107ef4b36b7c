//! Invoices that are paid once, also if many clients race to pay them: the claim workflows of invoices.json.
//!
//! `cargo run -p latchwork --example invoices -- ./data` races 50 clients for one invoice, regenerates one, pays one
//! that is overdue, and closes a billing period. With `--kill` the process kills itself in the middle of an action. The
//! next run shows that the invoice was reverted, and pays it. With `--wait` the process waits there until you kill it.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use latchwork::claim::{ActionCtx, AfterEffect, Claims, Fired, Outcome, TransitionKind};
use latchwork::entity::{Add, Entities, Entity, EntityId, Query, field};
use latchwork::json;
use latchwork::workflow::Engine;

const CLIENTS: usize = 50;

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// What happens in the middle of a payment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Middle {
    /// The payment continues.
    GoesOn,
    /// The process kills itself.
    Kills,
    /// The process waits until it is killed.
    Waits,
}

/// Regenerates an invoice: a clone with the same number supersedes the original. Both writes are part of the
/// transition.
async fn regenerate(ctx: ActionCtx) -> Result<Outcome> {
    let original = ctx.entity();
    let mut clone = original.data.clone();
    clone["status"] = json!("sent");
    clone["regenerated_from"] = json!(original.id);
    let id = format!("{}-regenerated", &*original.id);
    ctx.add(Add::new("invoice").id(id.clone()).data(clone));
    ctx.merge_data(json!({"superseded_by": id}));
    Ok(Outcome::output(id))
}

/// Applies a payment: the payment exists if, and only if, the invoice is paid.
async fn apply_payment(ctx: ActionCtx, bodies: &AtomicUsize, middle: Middle) -> Result<Outcome> {
    bodies.fetch_add(1, Ordering::SeqCst);
    let (invoice, due) = (ctx.entity(), ctx.entity().data["amount"].as_u64());
    let amount = ctx.input()["amount"].as_u64();
    if amount.is_none() || amount != due {
        return Ok(Outcome::rejection(format!("the invoice is over {due:?}, but the payment is {amount:?}")));
    }
    // The bank is slow: meanwhile other clients find the invoice claimed.
    ctx.entities().store().env().sleep(Duration::from_millis(50)).await;
    ctx.add(Add::new("payment").data(json!({"invoice": invoice.id, "amount": amount, "key": ctx.key()})));
    if middle != Middle::GoesOn {
        println!("in the middle of the payment of {}, process {}", &*invoice.id, std::process::id());
    }
    if middle == Middle::Kills {
        std::process::Command::new("kill").args(["-9", &std::process::id().to_string()]).status()?;
    }
    if middle != Middle::GoesOn {
        pending::<()>().await;
    }
    Ok(Outcome::output(json!({"paid": amount})))
}

/// Closes a billing period. The mails are not part of the transition: they are an after-effect.
async fn close_billing(ctx: ActionCtx) -> Result<Outcome> {
    let invoices = invoices_of(ctx.entities(), &ctx.entity().id).await?;
    ctx.merge_data(json!({"invoices": invoices.len()}));
    Ok(Outcome::done())
}

/// Sends one mail for each invoice of a period. After a crash it may be called again: each mail has its own id, so no
/// mail is sent twice.
async fn mail_invoices(entities: &Entities, closed: AfterEffect) -> Result {
    for invoice in invoices_of(entities, &closed.entity).await? {
        send(entities, format!("{}/{}", closed.key, &*invoice.id), &invoice.id, "your invoice").await?;
    }
    Ok(())
}

/// Stands for a mail server that accepts idempotency keys.
async fn send(entities: &Entities, key: String, invoice: &EntityId, subject: &str) -> Result {
    let mail = json!({"invoice": invoice, "subject": subject});
    entities.add(Add::new("mail").id(key).data(mail).if_absent(true)).await?;
    Ok(())
}

/// The invoices of a period, without those that were superseded.
async fn invoices_of(entities: &Entities, period: &EntityId) -> Result<Vec<Entity>> {
    let is_of = field("data.period").equals(&**period).and(field("data.status").not("superseded"));
    Ok(entities.find(&Query::of("invoice").filter(is_of).limit(1000)).await?.items)
}

/// The engine, the claims and a counter.
pub struct Invoices {
    engine: Engine,
    claims: Claims,
    /// The billing period that is open.
    period: String,
    /// The number of payment bodies that this process has begun.
    bodies: Arc<AtomicUsize>,
}

impl Invoices {
    /// Starts the claim workflows of the configuration file.
    pub async fn open(directory: &str, middle: Middle) -> Result<Invoices> {
        let engine = Engine::open(directory).start().await?;
        let bodies = Arc::new(AtomicUsize::new(0));
        let (counted, mails, receipts) = (bodies.clone(), engine.entities().clone(), engine.entities().clone());
        let claims = Claims::on(&engine)
            .configure(include_str!("invoices.json"))
            .action("RegenerateInvoice", regenerate)
            .action("ApplyPayment", move |ctx| {
                let bodies = counted.clone();
                async move { apply_payment(ctx, &bodies, middle).await }
            })
            .action("CloseBilling", close_billing)
            .after_effect("MailInvoices", move |closed| {
                let entities = mails.clone();
                async move { mail_invoices(&entities, closed).await }
            })
            .after_effect("SendReceipt", move |paid: AfterEffect| {
                let entities = receipts.clone();
                async move { send(&entities, paid.key, &paid.entity, "your receipt").await }
            })
            .start()
            .await?;
        let closed = Query::of("billing_period").filter(field("data.status").equals("closed"));
        let closed = engine.entities().find(&closed).await?.items.len();
        Ok(Invoices { engine, claims, period: format!("2026-{:02}", closed + 1), bodies })
    }

    /// Waits until the janitor has recovered the claims of the previous process, and prints what it did.
    pub async fn look_around(&self) -> Result {
        let operator = self.claims.operate().await?;
        while !operator.stored().list().await?.items.is_empty() {
            self.claims.sweep().await?;
            self.pause().await;
        }
        for invoice in self.all("invoice").await? {
            let last = operator.stored().history(invoice.id.clone()).limit(1).await?.items;
            if let Some(last) = last.first().filter(|last| last.kind == TransitionKind::Released) {
                println!("{} was reverted from {} to {}: {}", &*invoice.id, last.from, last.to, last.reason);
            }
        }
        Ok(())
    }

    /// Returns the first invoice at `sent`, or a new one.
    async fn some_invoice(&self) -> Result<EntityId> {
        let invoices = self.all("invoice").await?;
        if let Some(sent) = invoices.iter().find(|invoice| invoice.data["status"] == "sent") {
            return Ok(sent.id.clone());
        }
        let originals = invoices.iter().filter(|invoice| invoice.data["regenerated_from"].is_null());
        let number = format!("invoice-{:03}", originals.count() + 1);
        let data = json!({"status": "sent", "invoice_number": number, "period": self.period, "amount": 120});
        Ok(self.claims.add("invoice", Add::new("invoice").id(number).data(data)).await?.id)
    }

    async fn pay(&self, id: EntityId, client: usize) -> Result<Fired> {
        let fire = self.claims.fire("invoice", "apply_payment", id).by("admin").actor(format!("client {client}"));
        Ok(fire.input(json!({"amount": 120})).await?)
    }

    /// Many clients apply a payment to one invoice at the same time.
    pub async fn race(self: &Arc<Invoices>) -> Result {
        let (id, before) = (self.some_invoice().await?, self.bodies.load(Ordering::SeqCst));
        println!("{CLIENTS} clients pay {} at once", &*id);
        let client = |client| {
            let (invoices, id) = (self.clone(), id.clone());
            tokio::spawn(async move { invoices.pay(id, client).await })
        };
        let clients: Vec<_> = (1..=CLIENTS).map(client).collect();
        let (mut done, mut refused) = (Vec::new(), Vec::new());
        for client in clients {
            match client.await?? {
                Fired::ClaimFailed(failed) => refused.push(failed),
                fired => done.push(fired),
            }
        }
        let bodies = self.bodies.load(Ordering::SeqCst) - before;
        for fired in &done {
            println!("{bodies} body has run: {}", serde_json::to_string(fired)?);
        }
        let actor = refused.iter().find_map(|failed| failed.holder.as_ref()?.actor.as_deref()).unwrap_or_default();
        let told = refused.iter().filter(|it| it.holder.as_ref().is_some_and(|it| it.actor.as_deref() == Some(actor)));
        println!("{} were refused, {} of them with {actor} as the holder; the first:", refused.len(), told.count());
        println!("{}", serde_json::to_string(&refused.first())?);
        Ok(())
    }

    /// Two clients regenerate an invoice at the same time. Its clone becomes overdue and is paid.
    pub async fn regenerate(&self) -> Result {
        let id = self.some_invoice().await?;
        let fire = || self.claims.fire("invoice", "regenerate", &*id).by("admin");
        let (one, other) = tokio::join!(fire(), fire());
        let outcomes = [one?, other?];
        let done = outcomes.iter().filter(|fired| fired.is_done()).count();
        let clones = self.all("invoice").await?.into_iter().filter(|it| it.data["regenerated_from"] == *id);
        let clones: Vec<EntityId> = clones.map(|clone| clone.id).collect();
        println!("{} was regenerated {done} time by 2 clients: {} clone", &*id, clones.len());
        let clone = clones.into_iter().next().ok_or("there is no clone")?;
        self.claims.fire("invoice", "mark_overdue", clone.clone()).await?;
        let paid = self.pay(clone, 1).await?;
        println!("its clone was overdue: {}", serde_json::to_string(&paid)?);
        Ok(())
    }

    /// Two clients close a billing period: the second commit is refused, and each invoice has one mail.
    pub async fn close(&self) -> Result {
        let period = self.period.as_str();
        let approved = Add::new("billing_period").id(period).data(json!({"status": "approved"})).if_absent(true);
        self.claims.add("billing", approved).await?;
        let fire = || self.claims.fire("billing", "close", period).by("admin");
        let (one, other) = tokio::join!(fire(), fire());
        let words = [serde_json::to_value(one?)?, serde_json::to_value(other?)?];
        println!("{period} was closed by 2 clients: {}, {}", words[0]["outcome"], words[1]["outcome"]);
        while self.claims.undelivered() > 0 {
            self.pause().await;
        }
        Ok(())
    }

    /// Counts the entities. There must be one payment for each paid invoice.
    pub async fn count(&self) -> Result<(usize, usize)> {
        let invoices = self.all("invoice").await?;
        let paid = invoices.iter().filter(|invoice| invoice.data["status"] == "paid").count();
        let (payments, mails) = (self.all("payment").await?.len(), self.all("mail").await?.len());
        println!("{} invoices, {paid} paid, {payments} payments, {mails} mails", invoices.len());
        if payments == paid { Ok((paid, payments)) } else { Err("an invoice was paid twice, or not at all".into()) }
    }

    async fn all(&self, kind: &str) -> Result<Vec<Entity>> {
        Ok(self.engine.entities().find(&Query::of(kind).limit(1000)).await?.items)
    }

    async fn pause(&self) {
        self.engine.store().env().sleep(Duration::from_millis(5)).await;
    }
}

/// The whole program.
pub async fn run(directory: &str, middle: Middle) -> Result {
    let invoices = Arc::new(Invoices::open(directory, middle).await?);
    invoices.look_around().await?;
    invoices.race().await?;
    invoices.regenerate().await?;
    invoices.close().await?;
    invoices.count().await?;
    invoices.engine.shutdown().await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let directory = arguments.iter().find(|argument| !argument.starts_with("--"));
    let middle = match arguments.iter().find(|argument| argument.starts_with("--")).map(String::as_str) {
        Some("--kill") => Middle::Kills,
        Some("--wait") => Middle::Waits,
        _ => Middle::GoesOn,
    };
    run(directory.ok_or("usage: invoices DIRECTORY [--kill | --wait]")?, middle).await
}
