//! `latch flow questions`, `question` and `answer`: what requests ask people.

use anyhow::Result;
use clap::{ArgGroup, Args};
use latchwork::{Page, Value};

use crate::client::{ApiCall, Client, encoded, object};
use crate::given;
use crate::output::Output;
use crate::paging::Paging;
use crate::shown::{Field, How, about, table};

const LISTED: [Field; 6] = [
    ("QUESTION", "/id", How::Plain),
    ("REQUEST", "/request", How::Plain),
    ("REASON", "/reason", How::Plain),
    ("MESSAGE", "/message", How::Plain),
    ("ANSWERS", "/allow", How::Words),
    ("OPENED", "/opened_at", How::Time),
];

const ABOUT: [Field; 13] = [
    ("id", "/id", How::Plain),
    ("request", "/request", How::Plain),
    ("block", "/path", How::Plain),
    ("reason", "/reason", How::Plain),
    ("message", "/message", How::Plain),
    ("data", "/data", How::Json),
    ("schema", "/schema", How::Json),
    ("answers", "/allow", How::Words),
    ("opened", "/opened_at", How::Time),
    ("until", "/until", How::Time),
    ("open", "/is_open", How::Plain),
    ("answer", "/decision/option", How::Plain),
    ("by", "/decision/by", How::Plain),
];

#[derive(Args)]
#[command(group = ArgGroup::new("of").args(["action", "request"]).required(true))]
pub(crate) struct Questions {
    /// The name of the flow.
    flow: String,
    /// The questions of all requests to this action.
    #[arg(long)]
    action: Option<String>,
    /// The questions of this request.
    #[arg(long, value_name = "ID")]
    request: Option<String>,
    #[command(flatten)]
    paging: Paging,
}

/// A question.
#[derive(Args)]
pub(crate) struct One {
    /// The name of the flow.
    flow: String,
    /// The id of the question.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    id: String,
}

#[derive(Args)]
pub(crate) struct Answer {
    #[command(flatten)]
    question: One,
    /// One of the allowed answers: approve, reject, submit or skip.
    answer: String,
    /// The value, if the question asks for one: JSON, @FILE, or - for the standard input.
    #[arg(long, value_name = "JSON", value_parser = given::json)]
    value: Option<Value>,
    /// The person or program that answers; by default the name of the token.
    #[arg(long, value_name = "NAME")]
    by: Option<String>,
    /// Why.
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
}

impl One {
    fn path(&self) -> String {
        format!("/flows/{}/suspensions/{}", encoded(&self.flow), encoded(&self.id))
    }
}

fn tell(question: &Value, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let now = client.env().now();
    output.one(question, |text| about(text, question, &ABOUT, now))
}

pub(super) async fn list(questions: Questions, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Questions { flow, action, request, paging } = questions;
    let now = client.env().now();
    let drawn = |found: &[Value]| table(found, &LISTED, now);
    if let Some(request) = request {
        // There are few: all of them are on one page.
        let path = format!("/flows/{}/requests/{}/suspensions", encoded(&flow), encoded(&request));
        let page: Page<Value> = client.get(&path, &[]).await?;
        return output.many("questions", &page.items, None, drawn);
    }
    let path = format!("/flows/{}/actions/{}/suspensions", encoded(&flow), encoded(&action.unwrap_or_default()));
    paging.write("questions", output, drawn, async |limit, after| client.page(&path, &[], limit, after).await).await
}

pub(super) async fn show(one: One, client: &Client, output: &mut Output<'_>) -> Result<()> {
    tell(&client.call(ApiCall::get(one.path())).await?, client, output)
}

pub(super) async fn answer(answer: Answer, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Answer { question, answer, value, by, reason } = answer;
    let body = object([
        ("answer", Some(answer.into())),
        ("value", value),
        ("by", by.map(Value::from)),
        ("reason", reason.map(Value::from)),
    ]);
    let call = ApiCall::post(format!("{}/answer", question.path())).body(body);
    tell(&client.call(call).await?, client, output)
}
