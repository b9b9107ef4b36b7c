//! `latch entity declare` and `undeclare`: the indexes and unique values of a type of entities.

use anyhow::Result;
use clap::{ArgGroup, Args};
use hyper::Method;
use latchwork::{Value, json};

use crate::client::{ApiCall, Client, encoded};
use crate::output::Output;

#[derive(Args)]
#[command(group = ArgGroup::new("wanted").args(["unique", "index"]).required(true).multiple(true))]
pub(crate) struct Declare {
    /// The type.
    #[arg(value_name = "TYPE")]
    name: String,
    /// No two entities of the type have the same values in all of these fields: data.email, or data.shop,data.number.
    /// It may be given several times.
    #[arg(long, value_name = "FIELDS")]
    unique: Vec<String>,
    /// An index over these fields, for example data.city,data.age. It may be given several times.
    #[arg(long, value_name = "FIELDS")]
    index: Vec<String>,
}

impl Declare {
    fn call(&self, method: Method) -> ApiCall {
        let lists = |lists: &[String]| -> Vec<Value> { lists.iter().map(|list| list.split(',').collect()).collect() };
        let body = json!({"unique": lists(&self.unique), "index": lists(&self.index)});
        ApiCall::change(method, format!("/entity-types/{}", encoded(&self.name))).body(body)
    }

    fn tell(&self, said: &str, output: &mut Output<'_>) -> Result<()> {
        let done = json!({"type": self.name, "unique": self.unique, "index": self.index});
        output.one(&done, |text| text.line(said))
    }
}

pub(crate) async fn declare(declare: Declare, client: &Client, output: &mut Output<'_>) -> Result<()> {
    client.call(declare.call(Method::PUT)).await?;
    declare.tell(&format!("Type {:?} has all of them.", declare.name), output)
}

pub(crate) async fn undeclare(declare: Declare, client: &Client, output: &mut Output<'_>) -> Result<()> {
    client.call(declare.call(Method::DELETE)).await?;
    declare.tell(&format!("Type {:?} has none of them.", declare.name), output)
}
