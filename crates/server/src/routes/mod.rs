//! The routes, one file for each noun of the library. Adding a group is one line in [`all`].

mod claims;
mod entities;
mod flows;
mod health;
mod locks;
mod nodes;
mod reviews;
mod schedules;
mod state;
mod store;
mod tasks;
mod workflows;

use utoipa_axum::router::OpenApiRouter;

use crate::api::Namespace;
use crate::group::Group;

pub(crate) use health::health;

/// All groups.
const GROUPS: &[fn(&Namespace) -> Group] = &[
    entities::group,
    workflows::group,
    schedules::group,
    reviews::group,
    flows::group,
    locks::group,
    state::group,
    claims::group,
    tasks::group,
    nodes::group,
    store::group,
];

/// The routes of a namespace, relative to its prefix, and their document.
pub(crate) fn all(namespace: &Namespace) -> OpenApiRouter<Namespace> {
    GROUPS.iter().fold(OpenApiRouter::new(), |all, group| all.merge(group(namespace).into_router()))
}
