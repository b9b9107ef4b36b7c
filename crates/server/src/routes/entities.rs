//! Entities over HTTP. The rules are the library's; this file maps conditions to revs, and `write.rs` finds
//! what an earlier attempt at the same call has written.

mod write;

use axum::Extension;
use axum::extract::State;
use axum::http::header::{ETAG, LOCATION};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use latchwork::entity::{EntityError, EntityView, OpReceipt, Remove, Transaction};
use latchwork::store::{Generation, Timestamp};
use utoipa_axum::routes;

use crate::access::{Caller, Role};
use crate::api::Namespace;
use crate::calls::Call;
use crate::group::Group;
use crate::routes::entities::write::{Write, precondition_failed};
use crate::wire::answers::{ConditionFailed, ConditionMissing, NoSuchEntity};
use crate::wire::entity::{
    AsOfQuery, EffectWire, EntityChange, EntityContent, EntityQuery, EntityTransaction, EntityWire, NewEntity,
    PlanWire, ReceiptWire, RevisionWire, TypeDeclaration,
};
use crate::wire::etag::{Condition, etag, is_known};
use crate::wire::page::{PageQuery, PageWire, page_answer};
use crate::wire::problem::{Problem, ProblemCode, ProblemShape};
use crate::wire::request::{JsonBody, PathParams, QueryParams, json_answer, json_answer_at};

pub(crate) fn group(namespace: &Namespace) -> Group {
    Group::new(namespace, "entities")
        .reads(routes!(get_entity))
        .reads(routes!(entity_history))
        .reads(routes!(find_entities))
        .reads(routes!(explain_entities))
        .changes(Role::Operate, routes!(add_entity))
        .changes(Role::Operate, routes!(put_entity, patch_entity, remove_entity))
        .changes(Role::Operate, routes!(transact_entities))
        .changes(Role::Admin, routes!(declare_entity_type, undeclare_entity_type))
}

/// Reads an entity.
#[utoipa::path(
    get,
    path = "/entities/{id}",
    params(
        ("id" = String, Path, description = "The id, with its special characters encoded."),
        AsOfQuery,
        ("If-None-Match" = Option<String>, Header, description = "A known rev: the answer to it is 304."),
    ),
    responses(
        (status = 200, description = "The entity.", body = EntityWire, headers(("ETag" = String))),
        (status = 304, description = "The entity is still at the known rev."),
        NoSuchEntity,
    )
)]
async fn get_entity(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    QueryParams(when): QueryParams<AsOfQuery>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let found = match as_of(&namespace, &when).await? {
        Some(view) => view.get(&id).await?,
        None => namespace.entities().get(&id).await?,
    };
    let entity = found.ok_or(EntityError::NotFound { id: id.into() })?;
    let tag = etag(entity.rev);
    if is_known(&headers, entity.rev)? {
        return Ok((StatusCode::NOT_MODIFIED, [(ETAG, tag)]).into_response());
    }
    Ok(([(ETAG, tag)], json_answer(&EntityWire::from(entity))).into_response())
}

async fn as_of(namespace: &Namespace, when: &AsOfQuery) -> Result<Option<EntityView>, Problem> {
    Ok(match (when.as_of, when.as_of_us) {
        (None, None) => None,
        (Some(generation), None) => Some(namespace.entities().as_of(Generation(generation)).await?),
        (None, Some(time)) => Some(namespace.entities().as_of(Timestamp(time)).await?),
        (Some(_), Some(_)) => {
            return Err(Problem::new(ProblemCode::InvalidQuery, "as_of and as_of_us exclude each other"));
        }
    })
}

/// Lists the versions of an entity that are kept, newest first. Removals are versions, too.
#[utoipa::path(
    get,
    path = "/entities/{id}/history",
    params(("id" = String, Path), PageQuery),
    responses((status = 200, description = "A page of versions.", body = PageWire<RevisionWire>))
)]
async fn entity_history(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    QueryParams(page): QueryParams<PageQuery>,
    uri: Uri,
) -> Result<Response, Problem> {
    let view = namespace.entities().now().await?;
    let found = view.history(id).limit(page.limit()?).after(page.cursor()?).await?;
    Ok(page_answer(&uri, found, RevisionWire::from))
}

/// Which page of which point in time is wanted.
#[derive(Debug, serde::Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct FindQuery {
    /// Continues after an earlier page of the same query: its `next`.
    after: Option<String>,
    /// The number of items of a page: 1 to 1000, by default 100.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
    /// As this generation of the store left it.
    as_of: Option<u64>,
    /// As it was at this time, in microseconds since 1970.
    as_of_us: Option<u64>,
}

/// Finds entities by their contents.
#[utoipa::path(
    post,
    path = "/entities:find",
    params(FindQuery),
    request_body = EntityQuery,
    responses((status = 200, description = "A page of entities.", body = PageWire<EntityWire>))
)]
async fn find_entities(
    State(namespace): State<Namespace>,
    QueryParams(FindQuery { after, limit, as_of: generation, as_of_us }): QueryParams<FindQuery>,
    uri: Uri,
    JsonBody(query): JsonBody<EntityQuery>,
) -> Result<Response, Problem> {
    let page = PageQuery { after, limit };
    let query = query.into_query().limit(page.limit()?).after(page.cursor()?);
    let found = match as_of(&namespace, &AsOfQuery { as_of: generation, as_of_us }).await? {
        Some(view) => view.find(&query).await?,
        None => namespace.entities().find(query).await?,
    };
    Ok(page_answer(&uri, found, EntityWire::from))
}

/// Tells how a find would be answered: by which index, or by a scan.
#[utoipa::path(
    post,
    path = "/entities:explain",
    request_body = EntityQuery,
    responses((status = 200, description = "The plan.", body = PlanWire))
)]
async fn explain_entities(
    State(namespace): State<Namespace>,
    JsonBody(query): JsonBody<EntityQuery>,
) -> Result<Response, Problem> {
    let plan = namespace.entities().explain(query.into_query()).await?;
    Ok(json_answer(&PlanWire { plan: plan.to_string(), scans: plan.scans() }))
}

/// Adds an entity, with the given id or a new one.
#[utoipa::path(
    post,
    path = "/entities",
    request_body = NewEntity,
    responses(
        (status = 201, description = "It was added.", body = EffectWire,
            headers(("ETag" = String), ("Location" = String))),
        (status = 200, description = "It exists, and `if_absent` was true.", body = EffectWire),
        (status = 409, description = "The id or a unique value is taken.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn add_entity(
    State(namespace): State<Namespace>,
    Extension(caller): Extension<Caller>,
    call: Call,
    JsonBody(mut new): JsonBody<NewEntity>,
) -> Result<Response, Problem> {
    let write = Write { namespace: &namespace, caller: &caller, call: &call };
    if let (None, Some(call)) = (&new.id, call.id()) {
        // Each attempt adds the same entity.
        new.id = Some(call.to_string());
    }
    let landed = match &new.id {
        Some(id) => write.landed(id).await?,
        None => None,
    };
    let receipt = match landed {
        Some(receipt) => receipt,
        None => write.commit(Transaction::new().add(new.into_add())).await?,
    };
    if !receipt.was_added() {
        return Ok(effect_answer(StatusCode::OK, receipt));
    }
    // Relative to the address of the request: it holds wherever the router is mounted.
    let location = HeaderValue::try_from(format!("entities/{}", encoded(&receipt.id)));
    let mut answer = effect_answer(StatusCode::CREATED, receipt);
    if let Ok(location) = location {
        answer.headers_mut().insert(LOCATION, location);
    }
    Ok(answer)
}

fn effect_answer(status: StatusCode, receipt: OpReceipt) -> Response {
    let tag = etag(receipt.rev);
    ([(ETAG, tag)], json_answer_at(status, &EffectWire::from(receipt))).into_response()
}

/// Text as a segment of a path.
pub(crate) fn encoded(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    text.bytes().map(|byte| if is_plain(byte) { char::from(byte).into() } else { format!("%{byte:02X}") }).collect()
}

/// Replaces an entity, or adds it.
#[utoipa::path(
    put,
    path = "/entities/{id}",
    params(
        ("id" = String, Path),
        ("If-Match" = Option<String>, Header, description = "The rev that was read, or * for any."),
        ("If-None-Match" = Option<String>, Header, description = "* to add it, and never to replace it."),
    ),
    request_body = EntityContent,
    responses(
        (status = 200, description = "It was replaced.", body = EffectWire, headers(("ETag" = String))),
        (status = 201, description = "It was added.", body = EffectWire, headers(("ETag" = String))),
        ConditionFailed,
        ConditionMissing,
    )
)]
async fn put_entity(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    Extension(caller): Extension<Caller>,
    call: Call,
    headers: HeaderMap,
    JsonBody(content): JsonBody<EntityContent>,
) -> Result<Response, Problem> {
    let write = Write { namespace: &namespace, caller: &caller, call: &call };
    let condition = Condition::of(&headers)?;
    let status = if condition == Condition::Absent { StatusCode::CREATED } else { StatusCode::OK };
    let receipt = match (write.landed(&id).await?, condition) {
        (Some(receipt), _) => receipt,
        (None, Condition::Matches(tags)) => write.replace(&id, &tags, content).await?,
        (None, Condition::Absent) => {
            let added = write.commit(Transaction::new().add(content.into_add(&id))).await;
            added.map_err(precondition_failed)?
        }
    };
    Ok(effect_answer(status, receipt))
}

/// Changes an entity. What is missing stays as it is.
#[utoipa::path(
    patch,
    path = "/entities/{id}",
    params(
        ("id" = String, Path),
        ("If-Match" = String, Header, description = "The rev that was read, or * for any."),
    ),
    request_body = EntityChange,
    responses(
        (status = 200, description = "It was changed.", body = EffectWire, headers(("ETag" = String))),
        NoSuchEntity,
        ConditionFailed,
        ConditionMissing,
    )
)]
async fn patch_entity(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    Extension(caller): Extension<Caller>,
    call: Call,
    headers: HeaderMap,
    JsonBody(change): JsonBody<EntityChange>,
) -> Result<Response, Problem> {
    let write = Write { namespace: &namespace, caller: &caller, call: &call };
    let tags = Condition::of_existing(&headers)?;
    let receipt = match write.landed(&id).await? {
        Some(receipt) => receipt,
        None => {
            let rev = write.rev(&id, &tags).await?;
            let update = rev.into_iter().fold(change.into_update(&id), |update, rev| update.if_rev(rev));
            write.commit(Transaction::new().update(update)).await.map_err(precondition_failed)?
        }
    };
    Ok(effect_answer(StatusCode::OK, receipt))
}

/// Removes an entity. Its rev goes on: an entity that is added again under the id continues above it.
#[utoipa::path(
    delete,
    path = "/entities/{id}",
    params(
        ("id" = String, Path),
        ("If-Match" = String, Header, description = "The rev that was read, or * for any."),
    ),
    responses(
        (status = 200, description = "It was removed.", body = EffectWire),
        NoSuchEntity,
        ConditionFailed,
        ConditionMissing,
    )
)]
async fn remove_entity(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    Extension(caller): Extension<Caller>,
    call: Call,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let write = Write { namespace: &namespace, caller: &caller, call: &call };
    let tags = Condition::of_existing(&headers)?;
    let receipt = match write.landed(&id).await? {
        Some(receipt) => receipt,
        None => {
            let rev = write.rev(&id, &tags).await?;
            let remove = rev.into_iter().fold(Remove::new(&id), Remove::if_rev);
            write.commit(Transaction::new().remove(remove)).await.map_err(precondition_failed)?
        }
    };
    Ok(json_answer(&EffectWire::from(receipt)))
}

/// Does all operations of a transaction, or none.
#[utoipa::path(
    post,
    path = "/entities:transact",
    request_body = EntityTransaction,
    responses(
        (status = 200, description = "It landed.", body = ReceiptWire),
        (status = 404, description = "An entity that it needs is missing.", body = ProblemShape,
            content_type = "application/problem+json"),
        (status = 409, description = "Some checks failed: `failed` lists all of them.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn transact_entities(
    State(namespace): State<Namespace>,
    Extension(caller): Extension<Caller>,
    call: Call,
    JsonBody(asked): JsonBody<EntityTransaction>,
) -> Result<Response, Problem> {
    let write = Write { namespace: &namespace, caller: &caller, call: &call };
    Ok(json_answer(&write.transact(asked).await?))
}

/// Adds the indexes that a type needs and does not have. Over existing entities this takes a while.
#[utoipa::path(
    put,
    path = "/entity-types/{name}",
    params(("name" = String, Path)),
    request_body = TypeDeclaration,
    responses((status = 204, description = "All of them are there."))
)]
async fn declare_entity_type(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    JsonBody(declaration): JsonBody<TypeDeclaration>,
) -> Result<Response, Problem> {
    // What is there already is left as it is, so that a repeated call changes nothing.
    namespace.entities().declare(declaration.into_spec(name)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Removes indexes of a type. The body names them as for the declaration.
#[utoipa::path(
    delete,
    path = "/entity-types/{name}",
    params(("name" = String, Path)),
    request_body = TypeDeclaration,
    responses((status = 204, description = "None of them is there."))
)]
async fn undeclare_entity_type(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    JsonBody(declaration): JsonBody<TypeDeclaration>,
) -> Result<Response, Problem> {
    namespace.entities().undeclare(declaration.into_spec(name)).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}
