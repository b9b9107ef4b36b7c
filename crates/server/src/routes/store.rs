//! The store over HTTP: its figures, a check of all that it holds, and backups. A restore replaces everything, so it is
//! left to the command, on a store that no engine uses.

mod archive;
mod backup;

use axum::extract::State;
use axum::response::Response;
use utoipa_axum::routes;

use crate::access::Role;
use crate::api::Namespace;
use crate::group::Group;
use crate::wire::problem::Problem;
use crate::wire::request::json_answer;
use crate::wire::store::{StatsWire, VerifiedWire};

pub(crate) fn group(namespace: &Namespace) -> Group {
    Group::new(namespace, "store")
        .reads(routes!(store_stats))
        .reads_for(Role::Admin, routes!(verify_store))
        .reads_for(Role::Admin, routes!(backup::back_up))
}

/// Shows figures about the store.
#[utoipa::path(get, path = "/store", responses((status = 200, description = "The figures.", body = StatsWire)))]
async fn store_stats(State(namespace): State<Namespace>) -> Result<Response, Problem> {
    Ok(json_answer(&StatsWire::from(namespace.engine().store().stats().await?)))
}

/// Reads everything from the medium, and reports all damage. This takes as long as the medium needs.
#[utoipa::path(
    post,
    path = "/store:verify",
    responses((status = 200, description = "The damage, if there is any.", body = VerifiedWire))
)]
async fn verify_store(State(namespace): State<Namespace>) -> Result<Response, Problem> {
    Ok(json_answer(&VerifiedWire::from(namespace.engine().store().verify().await?)))
}
