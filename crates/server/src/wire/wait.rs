//! Bounded waiting: `?wait=30s`. A request waits for something at most so long, at most as long as the server allows,
//! and not beyond its shutdown. What is answered when the time is up is the business of the route.

use std::time::Duration;

use serde::Deserialize;
use utoipa::IntoParams;

use crate::api::Namespace;
use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::time::{duration, millis};

/// How long a request waits. A route with more parameters repeats this one.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct WaitQuery {
    /// Waits at most this long, such as `30s` or `500ms`; at most 60 s. Without it, the answer comes at once.
    pub(crate) wait: Option<String>,
}

/// The time that a parameter `wait` asks for; `None` if there is no such parameter.
pub(crate) fn asked(namespace: &Namespace, wait: Option<&str>) -> Result<Option<Duration>, Problem> {
    let Some(text) = wait else { return Ok(None) };
    let limit = namespace.limits().wait;
    let wrong = |detail: String| Problem::new(ProblemCode::InvalidQuery, detail).with("limit_ms", millis(limit));
    let asked = duration(text).ok_or_else(|| wrong(format!("{text:?} is not a duration: write 30s, or 500ms")))?;
    match asked <= limit {
        true => Ok(Some(asked)),
        false => Err(wrong(format!("a request waits at most {limit:?}, not {asked:?}"))),
    }
}

/// Waits for something at most this long. `None` if the time is up, or if the server shuts down.
pub(crate) async fn within<T>(namespace: &Namespace, time: Duration, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        done = work => Some(done),
        () = namespace.closing() => None,
        () = namespace.env().sleep(time) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use latchwork::store::Store;
    use latchwork::workflow::Engine;

    #[tokio::test]
    async fn a_wait_has_a_limit_and_ends_with_the_server() {
        let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
        let closing = crate::api::Closing::new(tokio::sync::watch::Sender::new(false));
        let (access, limits) = (crate::access::Access::local(), crate::limits::Limits::default());
        let namespace = crate::api::Api::on(&engine).into_namespace("default", access, limits, closing.clone());
        assert_eq!(asked(&namespace, None).unwrap(), None);
        assert_eq!(asked(&namespace, Some("60s")).unwrap(), Some(Duration::from_secs(60)));
        for wrong in ["61s", "x", "", "-1s"] {
            assert_eq!(asked(&namespace, Some(wrong)).unwrap_err().code(), ProblemCode::InvalidQuery);
        }
        let long = Duration::from_secs(3600);
        assert_eq!(within(&namespace, long, async { 7 }).await, Some(7));
        assert_eq!(within(&namespace, Duration::ZERO, std::future::pending::<()>()).await, None);
        closing.send_replace(true);
        assert_eq!(within(&namespace, long, std::future::pending::<()>()).await, None);
    }
}
