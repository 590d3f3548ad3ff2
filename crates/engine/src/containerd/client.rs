//! containerd's API: gRPC on a Unix socket, one connection for each question.

use std::io;
use std::path::Path;
use std::time::Duration;

use http::uri::PathAndQuery;
use prost::Message;
use tonic::client::Grpc;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Response, Status};
use tonic_prost::ProstCodec;

use super::Containerd;
use crate::EngineError;

/// How long containerd may take for an answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes that an answer may have.
const LARGEST: usize = 64 << 20;

/// A method of containerd's API: its path, and what it is in a message to the user.
pub(super) type Method = (&'static str, &'static str);

/// A connection that is ready, and the request for it.
async fn prepared<Q>(socket: &Path, namespace: &str, message: Q) -> Result<(Grpc<Channel>, Request<Q>), Status> {
    let unavailable = |e: tonic::transport::Error| Status::unavailable(e.to_string());
    let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).map_err(unavailable)?;
    let mut client = Grpc::new(endpoint.connect().await.map_err(unavailable)?).max_decoding_message_size(LARGEST);
    client.ready().await.map_err(unavailable)?;
    let mut request = Request::new(message);
    request.set_timeout(PATIENCE);
    let named = namespace.parse().map_err(|_| Status::invalid_argument(format!("{namespace:?} is no namespace")))?;
    request.metadata_mut().insert("containerd-namespace", named);
    Ok((client, request))
}

async fn exchange<Q, A>(socket: &Path, namespace: &str, path: &'static str, message: Q) -> Result<A, Status>
where
    Q: Message + Send + Sync + 'static,
    A: Message + Default + Send + Sync + 'static,
{
    let (mut client, request) = prepared(socket, namespace, message).await?;
    let codec = ProstCodec::<Q, A>::default();
    client.unary(request, PathAndQuery::from_static(path), codec).await.map(Response::into_inner)
}

/// The same for a method whose answer comes in pieces: all of them, as long as they are not too many.
async fn exchange_all<Q, A>(socket: &Path, namespace: &str, path: &'static str, message: Q) -> Result<Vec<A>, Status>
where
    Q: Message + Send + Sync + 'static,
    A: Message + Default + Send + Sync + 'static,
{
    let (mut client, request) = prepared(socket, namespace, message).await?;
    let codec = ProstCodec::<Q, A>::default();
    let mut stream = client.server_streaming(request, PathAndQuery::from_static(path), codec).await?.into_inner();
    let (mut pieces, mut bytes) = (Vec::new(), 0);
    while let Some(piece) = stream.message().await? {
        bytes += piece.encoded_len();
        if bytes > LARGEST {
            return Err(Status::resource_exhausted("it is too long to be read at once"));
        }
        pieces.push(piece);
    }
    Ok(pieces)
}

/// Waits for an answer, for so long as containerd may take. On a thread of its own, because whoever asks may be a task of a runtime.
fn wait<T: Send>(answer: impl Future<Output = Result<T, Status>> + Send) -> Result<T, Status> {
    let run = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| Status::unavailable(e.to_string()))?;
        let answer = async { tokio::time::timeout(PATIENCE, answer).await };
        runtime.block_on(answer).unwrap_or_else(|_| Err(Status::unavailable("no answer in time")))
    };
    tranship_sys::threads::apart("containerd", run).unwrap_or_else(|error| Err(Status::unavailable(error.to_string())))
}

impl Containerd {
    /// Asks containerd something about `name` in a namespace; `None` if there is no such thing.
    pub(super) fn call<Q, A>(
        &self,
        namespace: &str,
        (path, what): Method,
        name: &str,
        message: Q,
    ) -> Result<Option<A>, EngineError>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        self.judged(what, name, wait(exchange(&self.socket, namespace, path, message)))
    }

    /// The same where the answer comes in pieces.
    pub(super) fn call_all<Q, A>(
        &self,
        namespace: &str,
        (path, what): Method,
        name: &str,
        message: Q,
    ) -> Result<Option<Vec<A>>, EngineError>
    where
        Q: Message + Send + Sync + 'static,
        A: Message + Default + Send + Sync + 'static,
    {
        self.judged(what, name, wait(exchange_all(&self.socket, namespace, path, message)))
    }

    fn judged<T>(&self, what: &'static str, name: &str, answer: Result<T, Status>) -> Result<Option<T>, EngineError> {
        let status = match answer {
            Ok(answer) => return Ok(Some(answer)),
            Err(status) => status,
        };
        match status.code() {
            Code::NotFound => Ok(None),
            Code::Unavailable | Code::DeadlineExceeded => Err(EngineError::Silent {
                engine: Self::NAME,
                socket: self.socket.clone(),
                source: io::Error::other(status.message().to_owned()),
            }),
            _ => {
                let why = status.message().to_owned();
                Err(EngineError::Refused { engine: Self::NAME, what, name: name.to_owned(), why })
            }
        }
    }
}
