use std::convert::Infallible;
use std::fmt::Display;
use std::future::{Future, IntoFuture};
use std::io;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::{StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, delete, get, post};
use futures::stream::{self, Stream};
use tokio::net::UnixListener;
use tokio::sync::{oneshot, watch};
use tranship_types::{GroupId, GroupReport, MigrationId, NodeName, Outcome, Report};

use crate::accept::Accepting;
use crate::passed;
use crate::{
    AgentService, ApiError, Begun, Companions, ContainerInfo, ErrorKind, GroupPlan, GroupRequest, HeldAddresses,
    KeptPath, Leftover, MoveRequest, NodeInfo, Plan, PlanRequest, RecoverRequest, ServiceError, Watched,
};

/// Requests are small; anything longer is a mistake.
pub(crate) const MAX_REQUEST_BYTES: usize = 64 * 1024;

/// How long answers that are being written at the end of the agent's life may take.
const GRACE: Duration = Duration::from_millis(500);

type Service = Arc<dyn AgentService>;

/// The API of `service`.
pub fn router(service: Arc<dyn AgentService>) -> Router {
    routes()
        .into_iter()
        .fold(Router::new(), |router, (path, methods)| router.route(path, methods))
        .fallback(async || not_found("there is no such call").into_response())
        .method_not_allowed_fallback(async || {
            let error = ServiceError::new(ErrorKind::Invalid, "the call does not know this method", SEE_OPENAPI);
            (StatusCode::METHOD_NOT_ALLOWED, Json(ApiError { error: error.body })).into_response()
        })
        .layer(DefaultBodyLimit::max(MAX_REQUEST_BYTES))
        .layer(middleware::from_fn_with_state(Arc::clone(&service), passed::pass_on))
        .with_state(service)
}

/// Every call: one table, so that a test can hold the description against it.
pub(crate) fn routes() -> Vec<(&'static str, MethodRouter<Service>)> {
    vec![
        ("/v1/node", get(node)),
        ("/v1/peers", get(peers)),
        ("/v1/containers", get(containers)),
        ("/v1/companions", get(companions)),
        ("/v1/plans", post(plan)),
        ("/v1/recoveries", post(recover)),
        ("/v1/leftovers", get(leftovers).delete(remove_leftovers)),
        ("/v1/held-addresses", get(held_addresses)),
        ("/v1/held-addresses/{container}", delete(release)),
        ("/v1/paths", get(kept_paths)),
        ("/v1/migrations", get(reports).post(begin_move)),
        ("/v1/migrations/{id}", get(report).delete(cancel)),
        ("/v1/migrations/{id}/events", get(events)),
        ("/v1/groups", get(groups).post(begin_group)),
        ("/v1/group-plans", post(plan_group)),
        ("/v1/groups/{id}", get(group).delete(cancel_group)),
        ("/v1/groups/{id}/events", get(group_events)),
        ("/v1/openapi.json", get(openapi)),
    ]
}

const SEE_OPENAPI: &str = "see GET /v1/openapi.json for the calls that there are";

/// Serves `router` on `listener` until `shutdown` completes. Answers that are being written then get half a second; followers
/// of a migration are not waited for, because it may last longer than the agent: the end of the runtime cuts them off.
pub async fn serve(
    listener: UnixListener,
    router: Router,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let (stopping, stopped) = oneshot::channel();
    let serving = axum::serve(Accepting::new(listener), router).with_graceful_shutdown(async move {
        shutdown.await;
        // Nobody listens only where serving has ended already.
        let _ = stopping.send(());
    });
    tokio::select! {
        done = serving.into_future() => done,
        () = async {
            match stopped.await {
                Ok(()) => tokio::time::sleep(GRACE).await,
                Err(_) => std::future::pending().await,
            }
        } => Ok(()),
    }
}

impl ErrorKind {
    fn status(self) -> StatusCode {
        match self {
            ErrorKind::Invalid => StatusCode::BAD_REQUEST,
            ErrorKind::Forbidden => StatusCode::FORBIDDEN,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Busy | ErrorKind::TooLate => StatusCode::CONFLICT,
            ErrorKind::Blocked => StatusCode::UNPROCESSABLE_ENTITY,
            ErrorKind::Unreachable => StatusCode::GATEWAY_TIMEOUT,
            ErrorKind::Unusable => StatusCode::SERVICE_UNAVAILABLE,
            ErrorKind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl IntoResponse for ServiceError {
    fn into_response(self) -> Response {
        if self.kind == ErrorKind::Internal {
            tracing::error!(error = %self.body, "a call failed");
        }
        (self.kind.status(), Json(ApiError { error: self.body })).into_response()
    }
}

fn not_found(message: &str) -> ServiceError {
    ServiceError::new(ErrorKind::NotFound, message, SEE_OPENAPI)
}

/// Runs a call of the service on a thread where it may block.
pub(crate) async fn ask<T: Send + 'static>(
    service: Service,
    call: impl FnOnce(&dyn AgentService) -> Result<T, ServiceError> + Send + 'static,
) -> Result<T, ServiceError> {
    match tokio::task::spawn_blocking(move || call(&*service)).await {
        Ok(answer) => answer,
        Err(e) => Err(ServiceError::new(
            ErrorKind::Internal,
            format!("the agent failed to answer: {e}"),
            "see the agent's log, and report this as a bug",
        )),
    }
}

fn parse_id<Id: FromStr<Err: Display>>(id: &str) -> Result<Id, ServiceError> {
    id.parse().map_err(|e| {
        let remedy = "see `tranship history` for the ids that this node knows";
        ServiceError::new(ErrorKind::NotFound, format!("there is no such migration: {e}"), remedy)
    })
}

/// The node's name, version, peers, and whether its criu and engines are usable.
#[utoipa::path(get, path = "/v1/node", responses(
    (status = 200, body = NodeInfo),
    (status = 500, body = ApiError),
))]
pub(crate) async fn node(State(service): State<Service>) -> Result<Json<NodeInfo>, ServiceError> {
    ask(service, AgentService::node).await.map(Json)
}

/// Names of the nodes that this node knows, without asking them.
#[utoipa::path(get, path = "/v1/peers", responses(
    (status = 200, body = [NodeName]),
    (status = 500, body = ApiError),
))]
pub(crate) async fn peers(State(service): State<Service>) -> Result<Json<Vec<NodeName>>, ServiceError> {
    ask(service, AgentService::peers).await.map(Json)
}

/// The node's containers.
#[utoipa::path(get, path = "/v1/containers", responses(
    (status = 200, body = [ContainerInfo]),
    (status = 503, body = ApiError, description = "no engine on this node is usable"),
))]
pub(crate) async fn containers(State(service): State<Service>) -> Result<Json<Vec<ContainerInfo>>, ServiceError> {
    ask(service, AgentService::containers).await.map(Json)
}

/// Where containers leave for.
#[derive(Debug, serde::Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct CompanionsQuery {
    /// The nodes, separated by commas.
    to: String,
}

/// Those of the node's running containers that belong together.
#[utoipa::path(get, path = "/v1/companions", params(CompanionsQuery), responses(
    (status = 200, body = [Companions]),
    (status = 400, body = ApiError, description = "no name of a node"),
    (status = 503, body = ApiError, description = "no engine on this node is usable"),
))]
pub(crate) async fn companions(
    State(service): State<Service>,
    query: Result<Query<CompanionsQuery>, QueryRejection>,
) -> Result<Json<Vec<Companions>>, ServiceError> {
    let invalid = |why: String| ServiceError::new(ErrorKind::Invalid, why, SEE_OPENAPI);
    let Query(query) = query.map_err(|error| invalid(error.body_text()))?;
    let to: Result<Vec<NodeName>, _> = query.to.split(',').map(str::parse).collect();
    let to = to.map_err(|error| invalid(error.to_string()))?;
    ask(service, move |s| s.companions(&to)).await.map(Json)
}

/// What was asked, or why it cannot be read.
fn body<T>(request: Result<Json<T>, JsonRejection>) -> Result<T, ServiceError> {
    let invalid = |e: JsonRejection| ServiceError::new(ErrorKind::Invalid, e.body_text(), SEE_OPENAPI);
    request.map(|Json(request)| request).map_err(invalid)
}

/// Begins a move, or plans one.
#[utoipa::path(post, path = "/v1/migrations", request_body = MoveRequest, responses(
    (status = 202, body = Report, description = "the move has begun"),
    (status = 200, body = Plan, description = "what a move would do (dry run)"),
    (status = 400, body = ApiError, description = "the request makes no sense"),
    (status = 404, body = ApiError, description = "no such container"),
    (status = 409, body = ApiError, description = "a move of the container is under way"),
    (status = 422, body = ApiError, description = "something stands in the way: see its blockers"),
    (status = 503, body = ApiError, description = "this node cannot move anything as it stands"),
))]
pub(crate) async fn begin_move(
    State(service): State<Service>,
    request: Result<Json<MoveRequest>, JsonRejection>,
) -> Result<Response, ServiceError> {
    let request = body(request)?;
    Ok(match ask(service, |s| s.begin_move(request)).await? {
        Begun::Started(report) => (StatusCode::ACCEPTED, Json(report)).into_response(),
        Begun::Planned(plan) => Json(*plan).into_response(),
    })
}

/// Says how a move would go: watches what the container writes, probes the link, stops and moves nothing.
#[utoipa::path(post, path = "/v1/plans", request_body = PlanRequest, responses(
    (status = 200, body = Plan, description = "what a move would do; with blockers there is no prediction"),
    (status = 400, body = ApiError, description = "the request makes no sense"),
    (status = 404, body = ApiError, description = "no such container"),
    (status = 409, body = ApiError, description = "the container is watched for another plan"),
    (status = 503, body = ApiError, description = "this node cannot move anything as it stands"),
))]
pub(crate) async fn plan(
    State(service): State<Service>,
    request: Result<Json<PlanRequest>, JsonRejection>,
) -> Result<Json<Plan>, ServiceError> {
    let request = body(request)?;
    if !PlanRequest::SAMPLE_MS.contains(&request.sample_ms) {
        let range = PlanRequest::SAMPLE_MS;
        let message = format!("sample_ms of {} is out of range", request.sample_ms);
        let remedy = format!("use {} to {}", range.start(), range.end());
        return Err(ServiceError::new(ErrorKind::Invalid, message, remedy));
    }
    ask(service, |s| s.plan(request)).await.map(Json)
}

/// Gives a migration up whose destination is lost after the commit point: the original runs again, as it was at the freeze.
#[utoipa::path(post, path = "/v1/recoveries", request_body = RecoverRequest, responses(
    (status = 202, body = Report, description = "the word will be acted on; the outcome of the report says how it ended"),
    (status = 400, body = ApiError, description = "the request makes no sense"),
    (status = 404, body = ApiError, description = "no such migration"),
    (status = 422, body = ApiError, description = "there is nothing to recover, or the destination may be alive"),
))]
pub(crate) async fn recover(
    State(service): State<Service>,
    request: Result<Json<RecoverRequest>, JsonRejection>,
) -> Result<Response, ServiceError> {
    let request = body(request)?;
    let report = ask(service, |s| s.recover(request)).await?;
    Ok((StatusCode::ACCEPTED, Json(report)).into_response())
}

/// What moves have left on the node that no move owns any more.
#[utoipa::path(get, path = "/v1/leftovers", responses(
    (status = 200, body = [Leftover]),
    (status = 500, body = ApiError),
))]
pub(crate) async fn leftovers(State(service): State<Service>) -> Result<Json<Vec<Leftover>>, ServiceError> {
    ask(service, AgentService::leftovers).await.map(Json)
}

/// Removes what moves have left on the node.
#[utoipa::path(delete, path = "/v1/leftovers", responses(
    (status = 200, body = [Leftover], description = "all that was found, and which of it is removed"),
    (status = 500, body = ApiError),
))]
pub(crate) async fn remove_leftovers(State(service): State<Service>) -> Result<Json<Vec<Leftover>>, ServiceError> {
    ask(service, AgentService::remove_leftovers).await.map(Json)
}

/// The addresses that the node holds for containers that have left it.
#[utoipa::path(get, path = "/v1/held-addresses", responses(
    (status = 200, body = [HeldAddresses]),
    (status = 500, body = ApiError),
))]
pub(crate) async fn held_addresses(State(service): State<Service>) -> Result<Json<Vec<HeldAddresses>>, ServiceError> {
    ask(service, AgentService::held_addresses).await.map(Json)
}

/// The bridge networks of the node that are held together with other nodes'.
#[utoipa::path(get, path = "/v1/paths", responses(
    (status = 200, body = [KeptPath]),
    (status = 500, body = ApiError),
))]
pub(crate) async fn kept_paths(State(service): State<Service>) -> Result<Json<Vec<KeptPath>>, ServiceError> {
    ask(service, AgentService::kept_paths).await.map(Json)
}

/// How addresses are given back.
#[derive(Debug, serde::Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ReleaseQuery {
    /// Also where the container's node answers that it has the addresses.
    #[serde(default)]
    even_if_alive: bool,
}

/// Gives back the addresses that the node holds for a container.
#[utoipa::path(delete, path = "/v1/held-addresses/{container}",
    params(("container" = String, Path, description = "the container that has left"), ReleaseQuery),
    responses(
    (status = 200, body = [HeldAddresses], description = "what was held"),
    (status = 404, body = ApiError, description = "nothing is held for it"),
    (status = 422, body = ApiError, description = "the container has them still, on another node"),
))]
pub(crate) async fn release(
    State(service): State<Service>,
    Path(container): Path<String>,
    Query(query): Query<ReleaseQuery>,
) -> Result<Json<Vec<HeldAddresses>>, ServiceError> {
    ask(service, move |s| s.release(&container, query.even_if_alive)).await.map(Json)
}

/// All migrations that the node knows, newest first.
#[utoipa::path(get, path = "/v1/migrations", responses(
    (status = 200, body = [Report]),
    (status = 500, body = ApiError),
))]
pub(crate) async fn reports(State(service): State<Service>) -> Result<Json<Vec<Report>>, ServiceError> {
    ask(service, AgentService::reports).await.map(Json)
}

/// One migration.
#[utoipa::path(get, path = "/v1/migrations/{id}", params(("id" = String, Path, description = "the migration's id")), responses(
    (status = 200, body = Report),
    (status = 404, body = ApiError),
))]
pub(crate) async fn report(
    State(service): State<Service>,
    Path(id): Path<String>,
) -> Result<Json<Report>, ServiceError> {
    let id: MigrationId = parse_id(&id)?;
    ask(service, move |s| s.report(&id)).await.map(Json)
}

/// Cancels a migration before its commit point: it is undone, whatever it is doing, and the container goes on on this node.
#[utoipa::path(delete, path = "/v1/migrations/{id}", params(("id" = String, Path, description = "the migration's id, or the name of a container whose migration is under way")), responses(
    (status = 202, body = Report, description = "it is being undone; the outcome of the report says when that is done"),
    (status = 404, body = ApiError),
    (status = 409, body = ApiError, description = "it has ended, or is past its commit point; the remedy says what can be done instead"),
    (status = 422, body = ApiError, description = "another node decides about it"),
))]
pub(crate) async fn cancel(
    State(service): State<Service>,
    Path(named): Path<String>,
) -> Result<Response, ServiceError> {
    let report = ask(service, move |s| s.cancel(&named)).await?;
    Ok((StatusCode::ACCEPTED, Json(report)).into_response())
}

/// One migration's reports, one a line, from now until it has ended. A reader that is slower than the changes misses some
/// of them, never the last.
#[utoipa::path(get, path = "/v1/migrations/{id}/events", params(("id" = String, Path, description = "the migration's id")), responses(
    (status = 200, body = Report, content_type = "application/x-ndjson"),
    (status = 404, body = ApiError),
))]
pub(crate) async fn events(State(service): State<Service>, Path(id): Path<String>) -> Result<Response, ServiceError> {
    let id: MigrationId = parse_id(&id)?;
    ask(service, move |s| s.watch(&id)).await.map(stream_of)
}

/// Begins to move a group of containers.
#[utoipa::path(post, path = "/v1/groups", request_body = GroupRequest, responses(
    (status = 202, body = GroupReport, description = "the first move has begun, or will"),
    (status = 400, body = ApiError, description = "the request makes no sense: there is no such order"),
    (status = 404, body = ApiError, description = "no such container"),
    (status = 409, body = ApiError, description = "a move of one of the containers is under way"),
    (status = 422, body = ApiError, description = "something stands in the way: see its blockers"),
))]
pub(crate) async fn begin_group(
    State(service): State<Service>,
    request: Result<Json<GroupRequest>, JsonRejection>,
) -> Result<Response, ServiceError> {
    let request = body(request)?;
    let report = ask(service, |s| s.begin_group(request)).await?;
    Ok((StatusCode::ACCEPTED, Json(report)).into_response())
}

/// Says how each move of a group would go; stops and moves nothing.
#[utoipa::path(post, path = "/v1/group-plans", request_body = GroupRequest, responses(
    (status = 200, body = GroupPlan, description = "what moving the group would do; it lists what stands in the way"),
    (status = 400, body = ApiError, description = "the request makes no sense: there is no such order"),
    (status = 404, body = ApiError, description = "nothing has the label"),
    (status = 503, body = ApiError, description = "this node cannot move anything as it stands"),
))]
pub(crate) async fn plan_group(
    State(service): State<Service>,
    request: Result<Json<GroupRequest>, JsonRejection>,
) -> Result<Json<GroupPlan>, ServiceError> {
    let request = body(request)?;
    ask(service, |s| s.plan_group(request)).await.map(Json)
}

/// All groups that the node has moved, newest first.
#[utoipa::path(get, path = "/v1/groups", responses(
    (status = 200, body = [GroupReport]),
    (status = 500, body = ApiError),
))]
pub(crate) async fn groups(State(service): State<Service>) -> Result<Json<Vec<GroupReport>>, ServiceError> {
    ask(service, AgentService::groups).await.map(Json)
}

/// One group.
#[utoipa::path(get, path = "/v1/groups/{id}", params(("id" = String, Path, description = "the group's id")), responses(
    (status = 200, body = GroupReport),
    (status = 404, body = ApiError),
))]
pub(crate) async fn group(
    State(service): State<Service>,
    Path(id): Path<String>,
) -> Result<Json<GroupReport>, ServiceError> {
    let id: GroupId = parse_id(&id)?;
    ask(service, move |s| s.group(&id)).await.map(Json)
}

/// Cancels the migrations of a group that are not past their commit points; those that have not begun do not begin.
#[utoipa::path(delete, path = "/v1/groups/{id}", params(("id" = String, Path, description = "the group's id")), responses(
    (status = 202, body = GroupReport, description = "they are being undone; the outcome of the report says when that is done"),
    (status = 404, body = ApiError),
    (status = 409, body = ApiError, description = "it has ended, or all that still move are past their commit points"),
))]
pub(crate) async fn cancel_group(
    State(service): State<Service>,
    Path(id): Path<String>,
) -> Result<Response, ServiceError> {
    let id: GroupId = parse_id(&id)?;
    let report = ask(service, move |s| s.cancel_group(&id)).await?;
    Ok((StatusCode::ACCEPTED, Json(report)).into_response())
}

/// One group's reports, one a line, from now until it has ended; as those of a migration.
#[utoipa::path(get, path = "/v1/groups/{id}/events", params(("id" = String, Path, description = "the group's id")), responses(
    (status = 200, body = GroupReport, content_type = "application/x-ndjson"),
    (status = 404, body = ApiError),
))]
pub(crate) async fn group_events(
    State(service): State<Service>,
    Path(id): Path<String>,
) -> Result<Response, ServiceError> {
    let id: GroupId = parse_id(&id)?;
    ask(service, move |s| s.watch_group(&id)).await.map(stream_of)
}

fn stream_of<R: Watched>(reports: watch::Receiver<R>) -> Response {
    ([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines(reports))).into_response()
}

/// This description.
#[utoipa::path(get, path = "/v1/openapi.json", responses((status = 200, content_type = "application/json")))]
pub(crate) async fn openapi() -> Response {
    Json(crate::description()).into_response()
}

/// The reports as lines. The stream makes a line only when the connection has room for it, from whatever report is the
/// newest then: that is all the memory that a slow reader can cost.
fn lines<R: Watched>(mut reports: watch::Receiver<R>) -> impl Stream<Item = Result<Bytes, Infallible>> {
    reports.mark_changed();
    stream::unfold(Some(reports), |reports| async {
        let mut reports = reports?;
        // An error says that the sender is gone and that its last report has been seen.
        reports.changed().await.ok()?;
        let (line, ended) = {
            let report = reports.borrow_and_update();
            let mut line = serde_json::to_vec(&*report).unwrap_or_else(|e| {
                tracing::error!(id = %report.id(), "a report cannot be written as JSON: {e}");
                Vec::new()
            });
            line.push(b'\n');
            (line, report.outcome() != Outcome::Running)
        };
        Some((Ok(Bytes::from(line)), (!ended).then_some(reports)))
    })
}
