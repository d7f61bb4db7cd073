//! gRPC on the port of HTTP: the queries of `/v1` as unary calls, and the standard health service.
//!
//! Theory of operation. A call is an HTTP/2 request whose content type is `application/grpc`. Its body is one message after five
//! bytes (whether it is compressed, and its length), and its answer the same with the status in trailers. A query is answered from
//! the index like one over HTTP; what is not answered here goes to the control plane as the equivalent request of `/v1`, and
//! its answer or its problem comes back as a message or a status. So both have the same rules, limits and messages.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::{Body as _, Incoming};
use hyper::header::{ACCEPT, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, Response, StatusCode, Uri, Version};
use prost::Message;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

use crate::body::{Body, InProgress};
use crate::connections::{Order, SWEEP, count};
use crate::endpoints::{Endpoints, Question};
use crate::forward::Sent;
use crate::messages::{
    HealthCheckRequest, HealthCheckResponse, MatchManyRequest, MatchManyResponse, MatchRequest, MatchResponse, SelectRequest,
    SelectResponse,
};
use crate::problems::{JSON, Problem};
use crate::receive::{Unreceived, receive};
use crate::server_state::Shared;

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// The reason code for programs, for example `unknown-model`.
const REASON: HeaderName = HeaderName::from_static("kvevents-reason");
const SERVICE: &str = "kvevents.v1.Query";
const CHECK: &str = "/grpc.health.v1.Health/Check";
/// Bytes before each message.
const PREFIX: usize = 5;

/// Whether a request is a call.
pub(crate) fn is_call(head: &Parts) -> bool {
    let kind = head.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    head.version == Version::HTTP_2
        && head.method == Method::POST
        && kind.is_some_and(|kind| kind == b"application/grpc" || kind == b"application/grpc+proto")
}

/// Whether a call only checks health: it is answered without a token, and also when all places for other calls are taken.
pub(crate) fn is_probe(head: &Parts) -> bool {
    head.uri.path() == CHECK
}

enum Call {
    Query(&'static str, Question),
    Check,
    Watch,
}

impl Call {
    fn from_path(path: &str) -> Option<Self> {
        Some(match path {
            "/kvevents.v1.Query/Match" => Self::Query("/kvevents.v1.Query/Match", Question::Match),
            "/kvevents.v1.Query/MatchMany" => Self::Query("/kvevents.v1.Query/MatchMany", Question::MatchMany),
            "/kvevents.v1.Query/Select" => Self::Query("/kvevents.v1.Query/Select", Question::Select),
            CHECK => Self::Check,
            "/grpc.health.v1.Health/Watch" => Self::Watch,
            _ => return None,
        })
    }
}

/// gRPC status codes that are used here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Code {
    Cancelled = 1,
    Unknown = 2,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    Unauthenticated = 16,
}

impl Code {
    fn of(status: StatusCode) -> Self {
        match status.as_u16() {
            400 | 415 | 422 | 431 => Self::InvalidArgument,
            401 => Self::Unauthenticated,
            403 | 421 => Self::PermissionDenied,
            404 => Self::NotFound,
            408 => Self::DeadlineExceeded,
            409 => Self::FailedPrecondition,
            413 | 429 => Self::ResourceExhausted,
            500 => Self::Internal,
            503 => Self::Unavailable,
            _ => Self::Unknown,
        }
    }
}

/// Why a call has no answer.
#[derive(Debug)]
pub(crate) struct Status {
    code: Code,
    message: String,
    reason: Option<String>,
}

impl Status {
    fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            reason: None,
        }
    }

    fn trailers(&self) -> HeaderMap {
        let mut found = HeaderMap::new();
        found.insert(STATUS, HeaderValue::from(self.code as u16));
        if let Ok(message) = HeaderValue::from_str(&percent_encoded(&self.message)) {
            found.insert(MESSAGE, message);
        }
        if let Some(reason) = self.reason.as_deref().and_then(|reason| HeaderValue::from_str(reason).ok()) {
            found.insert(REASON, reason);
        }
        found
    }

    /// The answer, without a message.
    pub(crate) fn response(&self) -> Response<Body> {
        let mut response = Response::new(Body::full(Bytes::new()));
        *response.headers_mut() = self.trailers();
        response.headers_mut().insert(CONTENT_TYPE, GRPC);
        response
    }
}

impl From<&Problem> for Status {
    fn from(problem: &Problem) -> Self {
        Self {
            code: Code::of(problem.status),
            message: format!("{}; {}", problem.detail, problem.hint),
            reason: Some(problem.reason.into()),
        }
    }
}

impl From<prost::DecodeError> for Status {
    fn from(error: prost::DecodeError) -> Self {
        Self::new(Code::InvalidArgument, format!("cannot decode the message: {error}"))
    }
}

/// Text encoded for `grpc-message`.
fn percent_encoded(text: &str) -> String {
    let mut found = String::with_capacity(text.len());
    for byte in text.bytes() {
        if matches!(byte, b' '..=b'~') && byte != b'%' {
            found.push(char::from(byte));
        } else {
            found.push_str(&format!("%{byte:02X}"));
        }
    }
    found
}

/// Answers a call.
pub(crate) async fn respond(
    shared: &Arc<Shared>,
    progress: &InProgress,
    peer: &str,
    (head, body): (Parts, Incoming),
    began: Instant,
) -> Response<Body> {
    let time = deadline(&head.headers);
    let answered = answer(shared, progress, peer, (head, body), began);
    let answered = match time {
        None => answered.await,
        Some(time) => tokio::time::timeout(time, answered)
            .await
            .unwrap_or_else(|_| Err(Status::new(Code::DeadlineExceeded, "the deadline of the call has passed"))),
    };
    answered.unwrap_or_else(|status| status.response())
}

/// The time that a call has, by `grpc-timeout`.
fn deadline(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get("grpc-timeout")?.to_str().ok()?;
    let (number, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    let number: u64 = number.parse().ok().filter(|_| number.len() <= 8)?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3_600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

async fn answer(
    shared: &Arc<Shared>,
    progress: &InProgress,
    peer: &str,
    (head, body): (Parts, Incoming),
    began: Instant,
) -> Result<Response<Body>, Status> {
    let path = head.uri.path();
    let (path, question) = match Call::from_path(path) {
        None => return Err(Status::new(Code::Unimplemented, format!("unknown method {path}"))),
        Some(Call::Check) => {
            let message = received(shared, progress, body).await?.map_err(|()| too_large())?;
            return check(shared, &message);
        }
        Some(Call::Watch) => {
            admit(shared, peer, &as_http(&head, Question::Match)).await?;
            let message = received(shared, progress, body).await?.map_err(|()| too_large())?;
            return watch(shared, progress, &message);
        }
        Some(Call::Query(path, question)) => (path, question),
    };
    let forwarded = as_http(&head, question);
    let limit = shared.settings.limits.max_body_bytes as u64;
    let is_admitted = body.size_hint().lower() <= limit && shared.policy.admits(&head.headers);
    if !is_admitted {
        admit(shared, peer, &forwarded).await?;
    }
    let Ok(message) = received(shared, progress, body).await? else {
        // The control plane reports what is too large.
        return Err(
            match ask(shared, peer, &forwarded, Sent::Announced((limit + 1).to_string())).await? {
                Ok(_) => too_large(),
                Err(status) => status,
            },
        );
    };
    if is_admitted && shared.settings.answers_queries {
        let work = || from_index(&shared.endpoints, question, message.clone());
        let found = shared.run(question, message.len(), work).await;
        if let Some(found) = found.transpose()?.flatten() {
            shared.endpoints.metrics.request(path, 200, began.elapsed());
            return Ok(found);
        }
    }
    let json = shared
        .run(question, message.len(), || as_json(question, message.clone()))
        .await;
    let json = json.unwrap_or_else(|| Err(Status::from(&Problem::ending())))?;
    let found = ask(shared, peer, &forwarded, Sent::Whole(json.into())).await??;
    from_json(question, &found).ok_or_else(|| Status::new(Code::Internal, "the control plane's answer cannot be read"))
}

fn too_large() -> Status {
    Status::new(Code::ResourceExhausted, "the message is too large; see limits.max_body_bytes")
}

/// Returns the message of a body. The inner error means that it is too large.
async fn received(shared: &Shared, progress: &InProgress, body: Incoming) -> Result<Result<Bytes, ()>, Status> {
    let body = match receive(progress, body, &shared.settings.limits).await {
        Ok(body) => body,
        Err(Unreceived::TooLarge) => return Ok(Err(())),
        Err(Unreceived::Gone) => return Err(Status::new(Code::Cancelled, "the client has left")),
        Err(Unreceived::Refused(problem)) => {
            count(&shared.connections.refusals, problem.reason);
            return Err(Status::from(&problem));
        }
    };
    unframed(&body).map(Ok)
}

fn unframed(body: &Bytes) -> Result<Bytes, Status> {
    let wrong = || Status::new(Code::InvalidArgument, "the body is not one message with its length");
    let (prefix, _) = body.split_first_chunk::<PREFIX>().ok_or_else(wrong)?;
    let [is_compressed, length @ ..] = *prefix;
    if is_compressed != 0 {
        return Err(Status::new(Code::Unimplemented, "messages are not to be compressed"));
    }
    if u32::from_be_bytes(length) as usize != body.len() - PREFIX {
        return Err(wrong());
    }
    Ok(body.slice(PREFIX..))
}

fn framed(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut found = BytesMut::with_capacity(PREFIX + length);
    found.put_u8(0);
    found.put_u32(length as u32);
    message.encode_raw(&mut found);
    found.freeze()
}

fn answered_with(message: &impl Message) -> Response<Body> {
    let mut trailers = HeaderMap::new();
    trailers.insert(STATUS, HeaderValue::from_static("0"));
    let mut response = Response::new(Body::Message {
        data: Some(framed(message)),
        trailers: Some(trailers),
    });
    response.headers_mut().insert(CONTENT_TYPE, GRPC);
    response
}

// --- queries

fn from_index(endpoints: &Endpoints, question: Question, message: Bytes) -> Result<Option<Response<Body>>, Status> {
    let json = match question {
        Question::Match => endpoints.answer_match(MatchRequest::decode(message)?),
        Question::MatchMany => endpoints.answer_match_many(MatchManyRequest::decode(message)?),
        Question::Select => endpoints.answer_select(SelectRequest::decode(message)?),
        Question::Query | Question::QueryByHash => None,
    };
    Ok(json.and_then(|json| from_json(question, &json)))
}

fn from_json(question: Question, json: &[u8]) -> Option<Response<Body>> {
    fn read<M: Message + DeserializeOwned>(json: &[u8]) -> Option<Response<Body>> {
        let message: M = serde_json::from_slice(json).ok()?;
        Some(answered_with(&message))
    }

    match question {
        Question::Match => read::<MatchResponse>(json),
        Question::MatchMany => read::<MatchManyResponse>(json),
        Question::Select => read::<SelectResponse>(json),
        Question::Query | Question::QueryByHash => None,
    }
}

/// The request of `/v1` that is equivalent to a message.
fn as_json(question: Question, message: Bytes) -> Result<Vec<u8>, Status> {
    let json = match question {
        Question::Match => serde_json::to_vec(&MatchRequest::decode(message)?),
        Question::MatchMany => serde_json::to_vec(&MatchManyRequest::decode(message)?),
        Question::Select | Question::Query | Question::QueryByHash => serde_json::to_vec(&SelectRequest::decode(message)?),
    };
    json.map_err(|error| Status::new(Code::Internal, error.to_string()))
}

fn as_http(head: &Parts, question: Question) -> Parts {
    let mut found = head.clone();
    found.uri = Uri::from_static(question.path());
    found.headers.remove(ACCEPT);
    found.headers.insert(CONTENT_TYPE, JSON);
    found
}

/// Sends the head of a request to the control plane, which accepts or refuses it.
async fn admit(shared: &Shared, peer: &str, head: &Parts) -> Result<(), Status> {
    if shared.policy.admits(&head.headers) {
        return Ok(());
    }
    ask(shared, peer, head, Sent::Announced("chunked".into())).await?.map(drop)
}

/// Returns the control plane's answer. The inner error is an error of the control plane.
async fn ask(shared: &Shared, peer: &str, head: &Parts, sent: Sent) -> Result<Result<Bytes, Status>, Status> {
    let ending = || Status::from(&Problem::ending());
    let answer = shared.upstream.ask(head, peer, sent).await.ok_or_else(ending)?;
    let status = answer.status();
    let body = answer.into_body().collect().await.map_err(|_| ending())?.to_bytes();
    if status.is_success() {
        return Ok(Ok(body));
    }
    Ok(Err(problem(status, &body)))
}

/// A problem of the control plane as a status.
fn problem(status: StatusCode, body: &[u8]) -> Status {
    #[derive(Deserialize)]
    struct Members {
        detail: String,
        reason: String,
        hint: String,
    }

    let code = Code::of(status);
    match serde_json::from_slice::<Members>(body) {
        Ok(problem) => Status {
            code,
            message: format!("{}; {}", problem.detail, problem.hint),
            reason: Some(problem.reason),
        },
        Err(_) => Status::new(code, status.to_string()),
    }
}

// --- health

fn is_known(message: &Bytes) -> Result<bool, Status> {
    let service = HealthCheckRequest::decode(message.clone())?.service;
    Ok(service.is_empty() || service == SERVICE)
}

fn health(shared: &Shared) -> HealthCheckResponse {
    HealthCheckResponse {
        status: if shared.is_ready() { 1 } else { 2 },
    }
}

fn check(shared: &Shared, message: &Bytes) -> Result<Response<Body>, Status> {
    if !is_known(message)? {
        return Err(Status::new(
            Code::NotFound,
            format!("unknown service: expected {SERVICE} or the empty name"),
        ));
    }
    Ok(answered_with(&health(shared)))
}

/// Sends the health now and after each change, until the connection ends.
fn watch(shared: &Arc<Shared>, progress: &InProgress, message: &Bytes) -> Result<Response<Body>, Status> {
    let is_known = is_known(message)?;
    let (sender, messages) = mpsc::channel(1);
    let (shared, connection) = (shared.clone(), progress.connection.clone());
    tokio::spawn(async move {
        let mut reported = None;
        while connection.order() == Order::GoOn && !sender.is_closed() {
            let found = if is_known {
                health(&shared)
            } else {
                HealthCheckResponse { status: 3 }
            };
            if reported.as_ref() != Some(&found) {
                if sender.send(framed(&found)).await.is_err() {
                    return;
                }
                reported = Some(found);
            }
            tokio::time::sleep(SWEEP).await;
        }
    });
    let mut response = Response::new(Body::Messages {
        messages,
        trailers: Some(Status::from(&Problem::ending()).trailers()),
    });
    response.headers_mut().insert(CONTENT_TYPE, GRPC);
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadlines_are_read() {
        let read = |value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", HeaderValue::from_static(value));
            deadline(&headers)
        };
        assert_eq!(read("100m"), Some(Duration::from_millis(100)));
        assert_eq!(read("99999999H"), Some(Duration::from_secs(99_999_999 * 3_600)));
        for wrong in ["", "m", "100", "1x", "999999999S", "-1S"] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_body_is_one_message() {
        let request = HealthCheckRequest { service: "x".into() };
        let body = framed(&request);
        assert_eq!(HealthCheckRequest::decode(unframed(&body).unwrap()).unwrap(), request);
        for wrong in [&body[..3], &body[..body.len() - 1], &[&body[..], &[0]].concat()] {
            assert_eq!(
                unframed(&Bytes::copy_from_slice(wrong)).unwrap_err().code,
                Code::InvalidArgument
            );
        }
        let compressed = [&[1], &body[1..]].concat();
        assert_eq!(unframed(&compressed.into()).unwrap_err().code, Code::Unimplemented);
    }

    #[test]
    fn sentences_are_percent_encoded() {
        assert_eq!(percent_encoded("100 % é\n"), "100 %25 %C3%A9%0A");
    }
}
