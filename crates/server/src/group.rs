//! Groups of routes. The one place where a route gets its role and its part of the OpenAPI document: what is declared
//! here is enforced and shown.

use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use utoipa::PartialSchema;
use utoipa::openapi::extensions::ExtensionsBuilder;
use utoipa::openapi::path::{Operation, Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::{PathItem, Required};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};

use crate::access::Role;
use crate::api::Namespace;
use crate::calls;
use crate::spans;
use crate::wire::answers::problem;

/// Routes of one namespace. Each is registered with the role that it needs.
pub(crate) struct Group {
    namespace: Namespace,
    tag: &'static str,
    router: OpenApiRouter<Namespace>,
}

/// What is checked before the routes of one registration.
#[derive(Clone)]
struct Gate {
    namespace: Namespace,
    role: Role,
    changes: bool,
}

impl Group {
    /// A group without routes. The tag is the noun under which the document lists them.
    pub(crate) fn new(namespace: &Namespace, tag: &'static str) -> Group {
        Group { namespace: namespace.clone(), tag, router: OpenApiRouter::new() }
    }

    /// Adds routes that change nothing, for the role `read`.
    pub(crate) fn reads(self, routes: UtoipaMethodRouter<Namespace>) -> Group {
        self.add(Role::Read, false, routes)
    }

    /// Adds routes that change nothing, for this role: what they show is for operators only, or costs much to find.
    pub(crate) fn reads_for(self, role: Role, routes: UtoipaMethodRouter<Namespace>) -> Group {
        self.add(role, false, routes)
    }

    /// Adds routes that change something, for this role. They take an `Idempotency-Key`.
    pub(crate) fn changes(self, role: Role, routes: UtoipaMethodRouter<Namespace>) -> Group {
        self.add(role, true, routes)
    }

    fn add(self, role: Role, changes: bool, routes: UtoipaMethodRouter<Namespace>) -> Group {
        let Group { namespace, tag, router } = self;
        let (schemas, mut paths, routes) = routes;
        for operation in paths.paths.values_mut().flat_map(operations) {
            describe(operation, tag, role, changes);
        }
        let gate = Gate { namespace: namespace.clone(), role, changes };
        let routes = routes.route_layer(middleware::from_fn_with_state(gate, admit));
        Group { namespace, tag, router: router.routes((schemas, paths, routes)) }
    }

    /// The routes and their part of the document.
    pub(crate) fn into_router(self) -> OpenApiRouter<Namespace> {
        self.router
    }
}

async fn admit(State(gate): State<Gate>, request: Request, next: Next) -> Response {
    spans::matched(gate.namespace.name(), &request);
    let (mut parts, body) = request.into_parts();
    let caller = match gate.namespace.access().admit(&parts, gate.role, gate.namespace.name()) {
        Ok(caller) => caller,
        Err(problem) => return problem.into_response(),
    };
    parts.extensions.insert(caller.clone());
    let request = Request::from_parts(parts, body);
    if gate.changes { calls::run(&gate.namespace, &caller, request, next).await } else { next.run(request).await }
}

/// The operations of a path.
pub(crate) fn operations(path: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    let PathItem { get, put, post, delete, options, head, patch, trace, .. } = path;
    [get, put, post, delete, options, head, patch, trace].into_iter().flatten()
}

/// The extension of an operation that names its role.
pub(crate) const ROLE: &str = "x-latchwork-role";

fn describe(operation: &mut Operation, tag: &str, role: Role, changes: bool) {
    operation.tags = Some(vec![tag.into()]);
    let extensions = operation.extensions.get_or_insert_default();
    extensions.merge(ExtensionsBuilder::new().add(ROLE, role.word()).build());
    operation.responses.responses.insert("default".into(), problem("What went wrong.").into());
    if changes {
        operation.parameters.get_or_insert_default().push(idempotency_key().into());
    }
}

fn idempotency_key() -> Parameter {
    let about =
        "Makes the call safe to repeat: a repeated call under the same key gets the stored answer, for 24 hours.";
    ParameterBuilder::new()
        .name("Idempotency-Key")
        .parameter_in(ParameterIn::Header)
        .required(Required::False)
        .description(Some(about))
        .schema(Some(String::schema()))
        .build()
}
