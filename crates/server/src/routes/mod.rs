//! The routes, one file for each noun of the library. Adding a group is one line in [`all`].

mod entities;
mod health;

use utoipa_axum::router::OpenApiRouter;

use crate::api::Namespace;
use crate::group::Group;

pub(crate) use health::health;

/// All groups.
const GROUPS: &[fn(&Namespace) -> Group] = &[entities::group];

/// The routes of a namespace, relative to its prefix, and their document.
pub(crate) fn all(namespace: &Namespace) -> OpenApiRouter<Namespace> {
    GROUPS.iter().fold(OpenApiRouter::new(), |all, group| all.merge(group(namespace).into_router()))
}
