//! Calls that an agent passes on to the agent of another node, and their answers.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::stream;
use http_body_util::BodyExt;
use tokio::sync::mpsc;
use tower::ServiceExt;
use tranship_types::NodeName;

use crate::client::NODE_HEADER;
use crate::server::{MAX_REQUEST_BYTES, ask};
use crate::{AgentService, ErrorKind, ServiceError};

/// The longest part of an answer, in bytes.
const MAX_PART_BYTES: usize = 256 << 10;

/// A call of the API, without what belongs to its connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PassedCall {
    /// The method of HTTP.
    pub method: String,
    /// The path, with its query.
    pub path: String,
    /// The body: JSON, or empty.
    pub body: String,
}

/// The answer to a call that was passed on.
#[derive(Debug)]
pub struct PassedAnswer {
    /// The status of HTTP.
    pub status: u16,
    /// The parts of the body as they come. Without a last part, the link has broken.
    pub parts: mpsc::Receiver<Result<String, std::io::Error>>,
}

/// Answers a call from another agent with `router`. `part` gets the status and each part of the body, at least one; `last` says
/// that none follows. The answer is given up when `part` returns false.
pub async fn answer(router: Router, call: PassedCall, mut part: impl FnMut(u16, &str, bool) -> bool) {
    let request = Request::builder()
        .method(call.method.as_str())
        .uri(&call.path)
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(call.body));
    let response = match request {
        Ok(request) => router.oneshot(request).await.unwrap_or_else(|never| match never {}),
        Err(error) => invalid(&error).into_response(),
    };
    let status = response.status().as_u16();
    let mut body = response.into_body();
    while let Some(Ok(frame)) = body.frame().await {
        let text = frame.data_ref().map(|data| String::from_utf8_lossy(data).into_owned()).unwrap_or_default();
        if !pieces(&text).all(|piece| part(status, piece, false)) {
            return;
        }
    }
    part(status, "", true);
}

/// A text in pieces that fit into a message.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let most = MAX_PART_BYTES.min(rest.len());
        let end = (0..=most).rev().find(|end| rest.is_char_boundary(*end)).unwrap_or(most);
        let (piece, left) = rest.split_at(end);
        rest = left;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Passes a call on to the agent of the node that its header names, or lets it be answered here.
pub(crate) async fn pass_on(State(service): State<Arc<dyn AgentService>>, request: Request, next: Next) -> Response {
    let Some(name) = request.headers().get(NODE_HEADER) else { return next.run(request).await };
    let node: NodeName =
        match name.to_str().map_err(|e| e.to_string()).and_then(|n| n.parse().map_err(|e| format!("{e}"))) {
            Ok(node) => node,
            Err(error) => return invalid(&error).into_response(),
        };
    let (head, body) = request.into_parts();
    let body = match axum::body::to_bytes(body, MAX_REQUEST_BYTES).await {
        Ok(body) => body,
        Err(error) => return invalid(&error).into_response(),
    };
    let call = PassedCall {
        method: head.method.to_string(),
        path: head.uri.path_and_query().map_or_else(|| "/".to_owned(), ToString::to_string),
        body: String::from_utf8_lossy(&body).into_owned(),
    };
    match ask(service, move |s| s.pass_on(&node, call)).await {
        Ok(None) => next.run(Request::from_parts(head, Body::from(body))).await,
        Ok(Some(PassedAnswer { status, parts })) => {
            let parts = stream::unfold(parts, async |mut parts| parts.recv().await.map(|part| (part, parts)));
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY);
            (status, [(header::CONTENT_TYPE, "application/json")], Body::from_stream(parts)).into_response()
        }
        Err(error) => error.into_response(),
    }
}

fn invalid(error: &dyn std::fmt::Display) -> ServiceError {
    ServiceError::new(ErrorKind::Invalid, format!("the call cannot be read: {error}"), "see GET /v1/openapi.json")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_come_in_pieces() {
        assert_eq!(pieces("").count(), 0);
        assert_eq!(pieces("abc").collect::<Vec<_>>(), ["abc"]);
        let long = "ü".repeat(MAX_PART_BYTES);
        let whole: String = pieces(&long).inspect(|piece| assert!(piece.len() <= MAX_PART_BYTES)).collect();
        assert_eq!(whole, long);
    }
}
