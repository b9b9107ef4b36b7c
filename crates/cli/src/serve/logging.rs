//! Log lines of a server, on the standard error: text for people, or JSON for programs. Traces listen at the same
//! place.

use std::io::IsTerminal;

use latchwork_server::SpanLayer;
use tracing_subscriber::filter::{LevelFilter, Targets, filter_fn};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

use crate::config::options::LogFormat;
use crate::output::{Exit, Problem};

/// The targets of this project start with this. What other crates log in detail may hold data, so a level without a
/// target does not concern them.
const OWN: &str = "latch";

/// Starts to log, and to make traces if there is a layer for them. A program does that once.
pub(crate) fn start(format: LogFormat, level: &str, spans: Option<SpanLayer>) -> Result<(), Problem> {
    let filter = filter(level).ok_or_else(|| {
        let why = format!("{level:?} is not a level: write error, warn, info, debug, trace or off, or TARGET=LEVEL,…");
        Problem::new(Exit::Usage, why)
    })?;
    let layer = fmt::layer().with_writer(std::io::stderr);
    let layer = match format {
        LogFormat::Text => layer.with_ansi(std::io::stderr().is_terminal()).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    };
    let logs = tracing_subscriber::registry().with(layer.with_filter(filter));
    let started = match spans {
        None => logs.try_init(),
        Some(spans) => {
            let wanted = filter_fn(SpanLayer::wants).with_max_level_hint(LevelFilter::DEBUG);
            logs.with(spans.with_filter(wanted)).try_init()
        }
    };
    started.map_err(|error| Problem::new(Exit::Failed, format!("cannot start to log: {error}")))
}

fn filter(level: &str) -> Option<Targets> {
    match level.parse::<LevelFilter>() {
        _ if level.is_empty() => None,
        Ok(level) => Some(Targets::new().with_default(level.min(LevelFilter::WARN)).with_target(OWN, level)),
        Err(_) => level.parse().ok().filter(|_| level.contains('=')),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::Level;

    #[test]
    fn a_level_without_a_target_is_about_this_project() {
        let debug = filter("debug").unwrap();
        assert!(debug.would_enable("latchwork_server::server", &Level::DEBUG));
        assert!(!debug.would_enable("tokio_postgres::query", &Level::INFO));
        assert!(debug.would_enable("hyper", &Level::WARN));
        let off = filter("off").unwrap();
        assert!(!off.would_enable("latch", &Level::ERROR) && !off.would_enable("hyper", &Level::ERROR));
        let named = filter("hyper=debug,latchwork=warn").unwrap();
        assert!(named.would_enable("hyper", &Level::DEBUG) && !named.would_enable("latchwork", &Level::INFO));
        for wrong in ["", "loud", "latch=loud"] {
            assert!(filter(wrong).is_none(), "{wrong}");
        }
    }
}
