//! The invoices of the demonstration. Clients race to pay each invoice, the claim lets only one of them do it, and the
//! payments prove at the end that no invoice was paid twice.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Result, bail};
use latchwork::claim::{ActionCtx, ClaimStep, ClaimWorkflow, Claims, Fired, Outcome, StoredClaims, TransitionKind};
use latchwork::entity::{Add, Entities, EntityId};
use latchwork::store::Env;
use latchwork::workflow::Engine;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::dev::bank::{Demo, all};

const WORKFLOW: &str = "demo-invoice";
const STEP: &str = "apply_payment";

/// How many clients race for each invoice.
pub(crate) const CLIENTS: u32 = 5;

/// The time between the begins of two races.
const APART: Duration = Duration::from_millis(300);

/// The time until the next race for an invoice that was not paid, for example because its claim is not reverted yet.
const AGAIN: Duration = Duration::from_millis(20);

#[derive(Debug, Serialize, Deserialize)]
struct Invoice {
    number: u32,
    status: String,
    amount: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Payment {
    invoice: EntityId,
    amount: u64,
}

/// The counts of this process.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    paid: AtomicU32,
    refused: AtomicU32,
    bodies: AtomicU32,
}

impl Counts {
    pub(crate) fn paid(&self) -> u32 {
        self.paid.load(Ordering::Relaxed)
    }

    pub(crate) fn refused(&self) -> u32 {
        self.refused.load(Ordering::Relaxed)
    }

    pub(crate) fn bodies(&self) -> u32 {
        self.bodies.load(Ordering::Relaxed)
    }
}

/// The counts at the end.
#[derive(Debug, Serialize)]
pub(crate) struct Paid {
    pub(crate) invoices: u32,
    /// Invoices that are at `paid`.
    pub(crate) paid: u32,
    /// All payments.
    pub(crate) payments: u32,
    /// Invoices with more than one payment.
    pub(crate) paid_twice: u32,
    /// Claims that were reverted because the process was killed in the middle of a payment.
    pub(crate) reverted: u32,
}

impl Paid {
    pub(crate) fn is_right(&self) -> bool {
        (self.paid, self.payments, self.paid_twice) == (self.invoices, self.invoices, 0)
    }
}

fn invoices(round: u32) -> String {
    format!("demo-{round}-invoice")
}

fn payments(round: u32) -> String {
    format!("demo-{round}-payment")
}

fn id(round: u32, number: u32) -> EntityId {
    format!("demo-{round}/invoice-{number:04}").into()
}

/// The invoices of a demonstration, with the claims that pay them.
#[derive(Clone)]
pub(crate) struct Invoices {
    demo: Demo,
    claims: Claims,
    entities: Entities,
    counts: Arc<Counts>,
}

impl Invoices {
    /// Starts the claims, which reverts the claims of a killed process.
    pub(crate) async fn open(demo: &Demo, engine: &Engine) -> Result<Invoices> {
        let workflow = ClaimWorkflow::new(WORKFLOW, "demo", invoices(demo.round))
            .statuses(["sent", "applying_payment", "paid"])
            .step(ClaimStep::new(20, STEP, "sent", "paid").claimed("applying_payment").action("ApplyPayment"));
        let (round, counts) = (demo.round, Arc::<Counts>::default());
        let counted = counts.clone();
        let claims = Claims::on(engine)
            .workflow(workflow)
            .action("ApplyPayment", move |ctx: ActionCtx| {
                counted.bodies.fetch_add(1, Ordering::Relaxed);
                apply_payment(ctx, round)
            })
            .start()
            .await?;
        let invoices = Invoices { demo: demo.clone(), claims, entities: engine.entities().clone(), counts };
        for number in 1..=demo.invoices {
            let invoice = Invoice { number, status: "sent".into(), amount: 10 + u64::from(number % 90) };
            let add = Add::new(self::invoices(round)).id(id(round, number)).data(&invoice).if_absent(true);
            invoices.claims.add(WORKFLOW, add).await?;
        }
        Ok(invoices)
    }

    pub(crate) fn counts(&self) -> &Arc<Counts> {
        &self.counts
    }

    /// The numbers of the unpaid invoices.
    pub(crate) async fn unpaid(&self) -> Result<Vec<u32>> {
        let found: Vec<Invoice> = all(&self.entities.now().await?, &invoices(self.demo.round)).await?;
        let unpaid = found.into_iter().filter(|invoice| invoice.status != "paid");
        Ok(unpaid.map(|invoice| invoice.number).collect())
    }

    /// Lets clients race to pay an invoice until it is paid. `place` is the number of races that begin before.
    pub(crate) async fn race(self, number: u32, place: u32) -> Result<()> {
        let env = self.entities.store().env().clone();
        env.sleep(APART * place).await;
        let id = id(self.demo.round, number);
        loop {
            let clients: Vec<_> =
                (1..=CLIENTS).map(|client| tokio::spawn(self.clone().pay(id.clone(), client))).collect();
            for client in clients {
                if client.await?? {
                    self.counts.paid.fetch_add(1, Ordering::Relaxed);
                }
            }
            match self.entities.get(id.clone()).await? {
                Some(invoice) if invoice.data["status"] == "paid" => return Ok(()),
                Some(_) => env.sleep(AGAIN).await,
                None => bail!("invoice {id:?} was removed while it was paid"),
            }
        }
    }

    /// One client's request. Returns true if it has paid the invoice.
    async fn pay(self, id: EntityId, client: u32) -> Result<bool> {
        let fire = self.claims.fire(WORKFLOW, STEP, id).by("client").actor(format!("client {client}"));
        match fire.await {
            Ok(Fired::Done(_)) => Ok(true),
            Ok(fired) if fired.is_refused() => {
                self.counts.refused.fetch_add(1, Ordering::Relaxed);
                Ok(false)
            }
            // An operator may have released the claim.
            Ok(_) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

/// Calls a slow bank. Then one commit adds the payment and sets the status of the invoice.
async fn apply_payment(ctx: ActionCtx, round: u32) -> Result<Outcome, std::io::Error> {
    let env = Env::system();
    env.sleep(Duration::from_millis(50 + env.random() % 101)).await;
    let amount = ctx.entity().data["amount"].as_u64().unwrap_or_default();
    let payment = Payment { invoice: ctx.entity().id.clone(), amount };
    ctx.add(Add::new(payments(round)).data(&payment));
    Ok(Outcome::output(json!({"paid": amount})))
}

/// Counts the invoices and their payments.
pub(crate) async fn verdict(demo: &Demo, engine: &Engine) -> Result<Paid> {
    let view = engine.entities().now().await?;
    let found: Vec<Invoice> = all(&view, &invoices(demo.round)).await?;
    let payments: Vec<Payment> = all(&view, &payments(demo.round)).await?;
    let mut by_invoice = BTreeMap::new();
    for payment in &payments {
        *by_invoice.entry(payment.invoice.to_string()).or_insert(0_u32) += 1;
    }
    let (stored, mut reverted) = (StoredClaims::on(engine.store()).await?, 0);
    for number in 1..=demo.invoices {
        let history = stored.history(id(demo.round, number)).limit(1000).await?;
        reverted += history.into_iter().filter(|it| it.kind == TransitionKind::Released).count() as u32;
    }
    Ok(Paid {
        invoices: demo.invoices,
        paid: found.iter().filter(|invoice| invoice.status == "paid").count() as u32,
        payments: payments.len() as u32,
        paid_twice: by_invoice.values().filter(|payments| **payments > 1).count() as u32,
        reverted,
    })
}
