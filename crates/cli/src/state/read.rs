//! `latch state get` and `watch`.

use anyhow::Result;
use clap::Args;
use latchwork::{Value, json};
use nix::sys::signal::Signal;

use crate::client::{ApiCall, Client};
use crate::output::{Ended, Exit, Format, Output, Problem, note, shortened};
use crate::shown::{document, word};
use crate::signals::{Signals, exit_code};
use crate::state::Place;
use crate::time::{Time, absolute};

/// The longest state in a line.
const LETTERS: usize = 120;

#[derive(Args)]
pub(crate) struct Get {
    #[command(flatten)]
    place: Place,
}

#[derive(Args)]
pub(crate) struct Watch {
    #[command(flatten)]
    place: Place,
    /// Continues after this position, which every change in JSON has. Without it, the first line is the state as it is.
    #[arg(long, value_name = "POSITION")]
    from: Option<u64>,
    /// Ends after this many lines.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
}

pub(super) async fn get(get: Get, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let place = get.place;
    let call =
        place.query()?.into_iter().fold(ApiCall::get(place.path()), |call, (name, value)| call.query(name, value));
    let found = client.call(call).await?;
    // A slot has a value, any other container a state.
    let state = found.get("state").or(found.get("value")).unwrap_or(&Value::Null);
    output.one(&found, |text| {
        text.line(format!("{place}, rev {}", found["rev"]));
        document(text, state);
    })
}

pub(super) async fn watch(watch: Watch, client: &Client, output: &mut Output<'_>) -> Result<()> {
    if client.is_alone() {
        let why = format!("no process changes {}: start your program, and watch then", watch.place);
        return Err(Problem::new(Exit::Busy, why).into());
    }
    let mut signals = Signals::listen(&[Signal::SIGINT, Signal::SIGTERM])?;
    let path = format!("{}/watch", watch.place.path());
    let mut events = client.events(&path, &watch.place.query()?, watch.from);
    let (mut all, mut count) = (Vec::new(), 0);
    let ended = loop {
        let event = tokio::select! {
            event = events.next() => event,
            signal = signals.next() => {
                if let Some(position) = events.position() {
                    note(&format!("to continue: --from {position}"));
                }
                break Err(Ended(exit_code(signal)).into());
            }
        };
        let event = match event {
            Ok(Some(event)) => event,
            Ok(None) => break Ok(()),
            // What was found before an error is printed, too.
            Err(error) => break Err(error),
        };
        let line = json!({"position": event.position, "change": event.data});
        match output.format() {
            Format::Json => all.push(line),
            Format::Jsonl => output.line(&line)?,
            Format::Table => output.one(&(), |text| text.line(said(&event.data)))?,
        }
        output.flush()?;
        count += 1;
        if watch.limit.is_some_and(|limit| count >= limit) {
            break Ok(());
        }
    };
    if output.format() == Format::Json {
        output.one(&json!({"changes": all, "position": events.position()}), |_| {})?;
    }
    ended
}

fn said(change: &Value) -> String {
    let time = absolute(word(change, "time")).map_or("now".into(), |time| Time(time).short());
    let state = if change["state"].is_null() { "removed".into() } else { change["state"].to_string() };
    shortened(&format!("{time:<23} rev {} {state}", change["rev"]), LETTERS)
}
