//! Sessions of clients: begun, renewed and ended over HTTP. They are lasting sessions of the library, so a restart of
//! the server ends none, and each server on the store knows all of them.

use axum::Extension;
use axum::extract::State;
use axum::http::header::LOCATION;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use latchwork::lock::{Owner, Session};
use latchwork::store::Uuid;

use crate::access::Caller;
use crate::api::Namespace;
use crate::calls::Call;
use crate::routes::locks::session;
use crate::wire::answers::NoSession;
use crate::wire::lock::{NewSession, SessionShownWire, SessionWire, session_lost};
use crate::wire::problem::Problem;
use crate::wire::request::{JsonBody, PathParams, json_answer, json_answer_at};

/// Begins a session, which holds locks for a client as long as the client renews it.
///
/// Renew it well before its lease is over, for example every third of it. The session and its locks outlast a restart
/// of the server: then it has a full lease again.
#[utoipa::path(
    post,
    path = "/sessions",
    request_body = NewSession,
    responses((status = 201, description = "It has begun.", body = SessionWire, headers(("Location" = String))))
)]
pub(super) async fn begin_session(
    State(namespace): State<Namespace>,
    Extension(caller): Extension<Caller>,
    call: Call,
    JsonBody(new): JsonBody<NewSession>,
) -> Result<Response, Problem> {
    // The id of the session is the call: the next attempt finds the session that this one has begun. If it finds none,
    // it may have ended already, and its id must not be used again; a session that no client knows ends by itself.
    let locks = namespace.engine().locks();
    let earlier = match (call.id(), call.repeated_since()) {
        (Some(id), Some(_)) => locks.lasting_session(id).await?,
        _ => None,
    };
    let session = match earlier {
        Some(session) => session,
        None => {
            let id = call.id().filter(|_| call.repeated_since().is_none()).unwrap_or_else(|| namespace.env().uuid());
            let builder =
                new.lease()?.into_iter().fold(locks.session().lasting(id), |builder, lease| builder.lease(lease));
            builder.label(new.label.unwrap_or_else(|| caller.subject.to_string())).await?
        }
    };
    let location = HeaderValue::try_from(format!("sessions/{}", session.id()));
    let mut answer = json_answer_at(StatusCode::CREATED, &stored(&session).await?);
    if let Ok(location) = location {
        answer.headers_mut().insert(LOCATION, location);
    }
    Ok(answer)
}

async fn stored(session: &Session) -> Result<SessionWire, Problem> {
    Ok(session.state().await?.ok_or_else(|| session_lost(session.id()))?.into())
}

/// Shows a session, with everything that it holds or waits for.
#[utoipa::path(
    get,
    path = "/sessions/{id}",
    params(("id" = String, Path, format = "uuid")),
    responses(
        (status = 200, description = "The session.", body = SessionShownWire),
        NoSession,
    )
)]
pub(super) async fn show_session(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<Uuid>,
) -> Result<Response, Problem> {
    let session = session(&namespace, id).await?;
    let state = session.state().await?.ok_or_else(|| session_lost(id))?;
    let held = namespace.engine().locks().of(&Owner::Session(id)).await?;
    Ok(json_answer(&SessionShownWire::new(state, held)))
}

/// Renews a session: from now on it has a full lease.
///
/// If the answer is 410, other owners may have held its locks since.
#[utoipa::path(
    post,
    path = "/sessions/{id}/renew",
    params(("id" = String, Path, format = "uuid")),
    responses(
        (status = 200, description = "It is renewed.", body = SessionWire),
        NoSession,
    )
)]
pub(super) async fn renew_session(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<Uuid>,
) -> Result<Response, Problem> {
    // A repeated renewal is one more renewal.
    let session = session(&namespace, id).await?;
    match session.renew().await? {
        true => Ok(json_answer(&stored(&session).await?)),
        false => Err(session_lost(id)),
    }
}

/// Ends a session: releases everything that it holds, and withdraws its requests.
///
/// A session that has ended before is answered in the same way.
#[utoipa::path(
    delete,
    path = "/sessions/{id}",
    params(("id" = String, Path, format = "uuid")),
    responses((status = 204, description = "It has ended, now or before."))
)]
pub(super) async fn end_session(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<Uuid>,
) -> Result<Response, Problem> {
    // An id is used for one session, so that a repeated end does nothing.
    if let Some(session) = namespace.engine().locks().lasting_session(id).await? {
        session.end().await?;
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}
