use std::io;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tranship_types::{GroupId, GroupReport, MigrationId, NodeName, Outcome, Report};

use crate::{
    ApiError, Begun, Companions, ContainerInfo, ErrorBody, GroupPlan, GroupRequest, HeldAddresses, KeptPath, Leftover,
    MoveRequest, NodeInfo, Plan, PlanRequest, RecoverRequest, Watched,
};

/// The header that names the node whose agent is to answer.
pub const NODE_HEADER: &str = "tranship-node";
/// The longest answer that is accepted: a long history of long reports.
const MAX_ANSWER_BYTES: usize = 64 << 20;
/// The longest single report that is accepted while following.
const MAX_REPORT_BYTES: usize = 8 << 20;
/// How long an agent may take over a question (a move's preflight is not one: it may read whole file systems).
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// Why an agent could not be asked, or what it answered instead.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The socket is not there, or nobody listens on it.
    #[error(
        "the agent of this node is not running (nobody answers on {}); start it with `systemctl start transhipd` or \
         `tranship agent`, or name its socket with --socket",
        .0.display()
    )]
    NotRunning(PathBuf),
    /// The socket is for root.
    #[error("this user may not talk to the agent (permission denied on {}); run as root", .0.display())]
    PermissionDenied(PathBuf),
    /// Connecting failed in some other way.
    #[error("cannot connect to the agent on {}: {source}; check the socket's path", socket.display())]
    Connect {
        /// The socket.
        socket: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The connection broke before the answer was complete.
    #[error("the agent went away before it had answered {call} ({why}); see its log (`journalctl -u transhipd`)")]
    Lost {
        /// The call, e.g. `GET /v1/node`.
        call: String,
        /// What was seen of it.
        why: String,
    },
    /// No answer in time.
    #[error("the agent has not answered {call} for {} s; see its log (`journalctl -u transhipd`)", ANSWER_WITHIN.as_secs())]
    TimedOut {
        /// The call.
        call: String,
    },
    /// The agent refused, or failed; `body` says why.
    #[error("{body}")]
    Refused {
        /// The HTTP status.
        status: u16,
        /// What the agent says.
        body: ErrorBody,
    },
    /// The answer is not what the API promises.
    #[error(
        "the agent's answer to {call} makes no sense ({why}); check that the agent and this program have the same version"
    )]
    Unintelligible {
        /// The call.
        call: String,
        /// What is wrong with it.
        why: String,
    },
}

impl ClientError {
    /// Whether the agent could not be reached or was lost, as opposed to an answer that says no; also that of another node, to which the
    /// call was to be passed on.
    pub fn is_unreachable(&self) -> bool {
        const GATEWAY_TIMEOUT: u16 = 504;
        match self {
            Self::Refused { status, .. } => *status == GATEWAY_TIMEOUT,
            Self::Unintelligible { .. } => false,
            _ => true,
        }
    }
}

/// Talks to the agent behind a Unix socket; each call makes its own connection. To be used within a tokio runtime.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
    node: Option<NodeName>,
}

impl Client {
    /// A client of the agent that listens on `socket`; nothing is connected yet.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { socket: socket.into(), node: None }
    }

    /// The same, with the agent of another node giving the answers: the agent behind the socket passes calls on to it.
    pub fn of_node(self, node: Option<NodeName>) -> Self {
        Self { node, ..self }
    }

    /// The socket that it connects to.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// `GET /v1/node`.
    pub async fn node(&self) -> Result<NodeInfo, ClientError> {
        self.question("/v1/node").await
    }

    /// `GET /v1/peers`: names of the nodes that the node knows, without asking them.
    pub async fn peers(&self) -> Result<Vec<NodeName>, ClientError> {
        self.question("/v1/peers").await
    }

    /// `GET /v1/containers`.
    pub async fn containers(&self) -> Result<Vec<ContainerInfo>, ClientError> {
        self.question("/v1/containers").await
    }

    /// `GET /v1/companions`. Waits for as long as the agent inspects the containers.
    pub async fn companions(&self, to: &[NodeName]) -> Result<Vec<Companions>, ClientError> {
        let to: Vec<&str> = to.iter().map(NodeName::as_str).collect();
        let call = Call { method: Method::GET, path: format!("/v1/companions?to={}", to.join(",")) };
        read(&call, self.send(&call, Vec::new()).await?).await
    }

    /// `GET /v1/migrations`: newest first.
    pub async fn reports(&self) -> Result<Vec<Report>, ClientError> {
        self.question("/v1/migrations").await
    }

    /// `GET /v1/migrations/ID`.
    pub async fn report(&self, id: &MigrationId) -> Result<Report, ClientError> {
        self.question(&format!("/v1/migrations/{id}")).await
    }

    /// `POST /v1/migrations`. Waits for as long as the agent looks for blockers. Where the connection is lost
    /// ([`ClientError::Lost`]) the move may have begun all the same.
    pub async fn begin_move(&self, request: &MoveRequest) -> Result<Begun, ClientError> {
        let call = Call { method: Method::POST, path: "/v1/migrations".to_owned() };
        let body = serde_json::to_vec(request).map_err(|e| call.unintelligible(&e))?;
        let answer = self.send(&call, body).await?;
        if answer.status() == StatusCode::ACCEPTED {
            return Ok(Begun::Started(Box::new(read::<Report>(&call, answer).await?)));
        }
        Ok(Begun::Planned(Box::new(read(&call, answer).await?)))
    }

    /// `POST /v1/plans`. Waits for as long as the agent watches, looks and probes.
    pub async fn plan(&self, request: &PlanRequest) -> Result<Plan, ClientError> {
        let call = Call { method: Method::POST, path: "/v1/plans".to_owned() };
        let body = serde_json::to_vec(request).map_err(|e| call.unintelligible(&e))?;
        read(&call, self.send(&call, body).await?).await
    }

    /// `POST /v1/group-plans`. Waits for as long as the agent watches one container after the other.
    pub async fn plan_group(&self, request: &GroupRequest) -> Result<GroupPlan, ClientError> {
        let call = Call { method: Method::POST, path: "/v1/group-plans".to_owned() };
        let body = serde_json::to_vec(request).map_err(|e| call.unintelligible(&e))?;
        read(&call, self.send(&call, body).await?).await
    }

    /// `POST /v1/recoveries`. Waits for as long as the agent tries to reach the destination.
    pub async fn recover(&self, request: &RecoverRequest) -> Result<Report, ClientError> {
        let call = Call { method: Method::POST, path: "/v1/recoveries".to_owned() };
        let body = serde_json::to_vec(request).map_err(|e| call.unintelligible(&e))?;
        in_time(&call, async { read(&call, self.send(&call, body).await?).await }).await
    }

    /// `DELETE /v1/migrations/ID`, by the migration's id or the name of its container.
    pub async fn cancel(&self, named: &str) -> Result<Report, ClientError> {
        let call = Call { method: Method::DELETE, path: format!("/v1/migrations/{}", encoded(named)) };
        in_time(&call, async { read(&call, self.send(&call, Vec::new()).await?).await }).await
    }

    /// `DELETE /v1/groups/ID`.
    pub async fn cancel_group(&self, id: &GroupId) -> Result<GroupReport, ClientError> {
        let call = Call { method: Method::DELETE, path: format!("/v1/groups/{id}") };
        in_time(&call, async { read(&call, self.send(&call, Vec::new()).await?).await }).await
    }

    /// `GET /v1/leftovers`.
    pub async fn leftovers(&self) -> Result<Vec<Leftover>, ClientError> {
        self.question("/v1/leftovers").await
    }

    /// `DELETE /v1/leftovers`. Waits for as long as the agent is removing them.
    pub async fn remove_leftovers(&self) -> Result<Vec<Leftover>, ClientError> {
        let call = Call { method: Method::DELETE, path: "/v1/leftovers".to_owned() };
        read(&call, self.send(&call, Vec::new()).await?).await
    }

    /// `GET /v1/held-addresses`.
    pub async fn held_addresses(&self) -> Result<Vec<HeldAddresses>, ClientError> {
        self.question("/v1/held-addresses").await
    }

    /// `GET /v1/paths`.
    pub async fn kept_paths(&self) -> Result<Vec<KeptPath>, ClientError> {
        self.question("/v1/paths").await
    }

    /// `DELETE /v1/held-addresses/CONTAINER`.
    pub async fn release(&self, container: &str, even_if_alive: bool) -> Result<Vec<HeldAddresses>, ClientError> {
        let path = format!("/v1/held-addresses/{}?even_if_alive={even_if_alive}", encoded(container));
        let call = Call { method: Method::DELETE, path };
        in_time(&call, async { read(&call, self.send(&call, Vec::new()).await?).await }).await
    }

    /// `POST /v1/groups`. Waits for as long as the agent looks for the containers.
    pub async fn begin_group(&self, request: &GroupRequest) -> Result<GroupReport, ClientError> {
        let call = Call { method: Method::POST, path: "/v1/groups".to_owned() };
        let body = serde_json::to_vec(request).map_err(|e| call.unintelligible(&e))?;
        read(&call, self.send(&call, body).await?).await
    }

    /// `GET /v1/groups`: newest first.
    pub async fn groups(&self) -> Result<Vec<GroupReport>, ClientError> {
        self.question("/v1/groups").await
    }

    /// `GET /v1/groups/ID`.
    pub async fn group(&self, id: &GroupId) -> Result<GroupReport, ClientError> {
        self.question(&format!("/v1/groups/{id}")).await
    }

    /// `GET /v1/migrations/ID/events` or `/v1/groups/ID/events`: the reports from now on.
    pub async fn events<R: Watched>(&self, id: &R::Id) -> Result<Events<R>, ClientError> {
        let call = Call { method: Method::GET, path: format!("{}/{id}/events", R::PATH) };
        let answer = in_time(&call, self.send(&call, Vec::new())).await?;
        Ok(Events { call, body: answer.into_body(), buffer: Vec::new(), ended: false, reports: PhantomData })
    }

    /// Calls `see` for each report from now on and returns the last one, in which the migration or group has ended.
    pub async fn follow<R: Watched>(&self, id: &R::Id, mut see: impl FnMut(&R)) -> Result<R, ClientError> {
        let mut events = self.events(id).await?;
        loop {
            let report = events.next().await?;
            see(&report);
            if report.outcome() != Outcome::Running {
                return Ok(report);
            }
        }
    }

    async fn question<T: DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let call = Call { method: Method::GET, path: path.to_owned() };
        in_time(&call, async { read(&call, self.send(&call, Vec::new()).await?).await }).await
    }

    /// Sends a call and returns the answer if it is a success.
    async fn send(&self, call: &Call, body: Vec<u8>) -> Result<Response<Incoming>, ClientError> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|source| self.not_connected(source))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|e| call.lost(&e))?;
        // It ends with the answer's body; its errors show there.
        tokio::spawn(connection);
        let request = Request::builder()
            .method(call.method.clone())
            .uri(&call.path)
            .header(header::HOST, "transhipd")
            .header(header::CONTENT_TYPE, "application/json");
        let request = match &self.node {
            Some(node) => request.header(NODE_HEADER, node.as_str()),
            None => request,
        };
        let request = request.body(Full::new(Bytes::from(body))).map_err(|e| call.unintelligible(&e))?;
        let answer = sender.send_request(request).await.map_err(|e| call.lost(&e))?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let status = answer.status().as_u16();
        Err(match read::<ApiError>(call, answer).await {
            Ok(ApiError { error: body }) => ClientError::Refused { status, body },
            Err(ClientError::Unintelligible { call, why }) => {
                ClientError::Unintelligible { call, why: format!("status {status}, {why}") }
            }
            Err(other) => other,
        })
    }

    fn not_connected(&self, source: io::Error) -> ClientError {
        let socket = self.socket.clone();
        match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ClientError::NotRunning(socket),
            io::ErrorKind::PermissionDenied => ClientError::PermissionDenied(socket),
            _ => ClientError::Connect { socket, source },
        }
    }
}

/// A call as errors name it.
#[derive(Debug)]
struct Call {
    method: Method,
    path: String,
}

impl Call {
    fn name(&self) -> String {
        format!("{} {}", self.method, self.path)
    }

    fn lost(&self, why: &dyn std::fmt::Display) -> ClientError {
        ClientError::Lost { call: self.name(), why: why.to_string() }
    }

    fn unintelligible(&self, why: &dyn std::fmt::Display) -> ClientError {
        ClientError::Unintelligible { call: self.name(), why: why.to_string() }
    }
}

async fn in_time<T>(call: &Call, answer: impl Future<Output = Result<T, ClientError>>) -> Result<T, ClientError> {
    match tokio::time::timeout(ANSWER_WITHIN, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(ClientError::TimedOut { call: call.name() }),
    }
}

async fn read<T: DeserializeOwned>(call: &Call, answer: Response<Incoming>) -> Result<T, ClientError> {
    let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES);
    let bytes = body.collect().await.map_err(|e| call.lost(&e))?.to_bytes();
    serde_json::from_slice(&bytes).map_err(|e| call.unintelligible(&e))
}

/// A migration's or group's reports as they come.
#[derive(Debug)]
pub struct Events<R> {
    call: Call,
    body: Incoming,
    buffer: Vec<u8>,
    ended: bool,
    reports: PhantomData<R>,
}

impl<R: Watched> Events<R> {
    /// Waits for the next report. Dropping the future loses nothing. An error after the report in which the migration has
    /// ended only says that there is none after it.
    pub async fn next(&mut self) -> Result<R, ClientError> {
        loop {
            if let Some(end) = self.buffer.iter().position(|b| *b == b'\n') {
                let report = serde_json::from_slice(&self.buffer[..end]).map_err(|e| self.call.unintelligible(&e));
                self.buffer.drain(..=end);
                return report;
            }
            if self.buffer.len() > MAX_REPORT_BYTES {
                return Err(self.call.unintelligible(&format!("a report of more than {MAX_REPORT_BYTES} bytes")));
            }
            if self.ended {
                return Err(self.call.lost(&"it stopped reporting"));
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        self.buffer.extend_from_slice(data);
                    }
                }
                Some(Err(e)) => {
                    self.ended = true;
                    return Err(self.call.lost(&e));
                }
                None => self.ended = true,
            }
        }
    }
}

/// A text as one segment of a path (RFC 3986, section 2.3).
fn encoded(text: &str) -> String {
    text.bytes().fold(String::new(), |mut path, byte| {
        match byte {
            b'-' | b'.' | b'_' | b'~' => path.push(byte.into()),
            byte if byte.is_ascii_alphanumeric() => path.push(byte.into()),
            byte => path.push_str(&format!("%{byte:02X}")),
        }
        path
    })
}
