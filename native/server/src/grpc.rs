//! gRPC on the port for HTTP: the queries of `/v1` as calls, and the standard health service.
//!
//! Theory of operation. A call is an HTTP request with the same connections, limits and rules as any other. [`METHODS`] names the query of
//! `/v1` that is equivalent to each method. First, the rules for the equivalent query decide whether the call is admitted, and its body is
//! received. Then tonic decodes the message with the generated code of `proto`, and calls the method of [`Call`]. The index answers a query
//! as it does over HTTP. Otherwise the equivalent query is forwarded to the control plane, and its answer is converted to a message or to a
//! status.
//!
//! A new method needs a row in [`METHODS`], and a function in the service. The answer of a unary call is encoded completely before it is
//! sent, so that its bytes count as unread.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Body as _, Frame, Incoming};
use hyper::header::{ACCEPT, CONTENT_TYPE, HeaderValue};
use hyper::http::request::Parts;
use hyper::{HeaderMap, Method, Request, Response, StatusCode, Uri, Version};
use prost::Message;
use serde::de::DeserializeOwned;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::WatchStream;
use tonic::codegen::{BoxStream, Service, async_trait};
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};

use crate::body::{Body, InProgress};
use crate::connections::count;
use crate::endpoints::{Endpoints, Question, RESERVATIONS, ReservationAction};
use crate::policy::TOO_LARGE;
use crate::problems::{JSON, Problem};
use crate::proto::query_server::{self, Query, QueryServer};
use crate::proto::{FinishReservationRequest, MatchManyRequest, MatchManyResponse, MatchRequest, MatchResponse};
use crate::proto::{Reservation, SelectRequest, SelectResponse, UpdateReservationRequest};
use crate::receive::{BodyFailure, receive};
use crate::requests::is_id;
use crate::server_state::ServerState;
use crate::settings::Access;

/// Name of the metadata that contains a reason code for programs, for example `unknown-model`.
const REASON_KEY: &str = "kvevents-reason";
/// Number of bytes of the prefix of a message, in the body of a request.
const PREFIX_BYTES: usize = 5;

/// The path of each method. The row of a method names the query of `/v1` whose rules decide whether a call is admitted.
const METHODS: [(&str, Question); 7] = [
    ("/kvevents.v1.Query/Match", Question::Match),
    ("/kvevents.v1.Query/MatchMany", Question::MatchMany),
    ("/kvevents.v1.Query/Select", Question::Select),
    (
        "/kvevents.v1.Query/UpdateReservation",
        Question::Reservation(ReservationAction::Update),
    ),
    (
        "/kvevents.v1.Query/FinishReservation",
        Question::Reservation(ReservationAction::Finish),
    ),
    (CHECK, Question::Match), // always admitted
    (WATCH, Question::Match),
];
const CHECK: &str = "/grpc.health.v1.Health/Check";
const WATCH: &str = "/grpc.health.v1.Health/Watch";
/// The path whose rules decide whether a call about a reservation is admitted. The name of the reservation is in the message, which is not
/// read before admission.
const ANY_RESERVATION: &str = "/v1/reservations/any";

/// Whether a request is a gRPC call.
pub(crate) fn is_call(head: &Parts) -> bool {
    let kind = head.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    head.version == Version::HTTP_2
        && head.method == Method::POST
        && kind.is_some_and(|kind| kind == b"application/grpc" || kind == b"application/grpc+proto")
}

/// Whether a call only checks health. Such a call needs no token, and is answered even on reserved connections.
pub(crate) fn is_probe(head: &Parts) -> bool {
    head.uri.path() == CHECK
}

/// Returns the answer to a call that is refused.
pub(crate) fn refuse(problem: &Problem) -> Response<Body> {
    refused(Status::from(problem))
}

fn refused(status: Status) -> Response<Body> {
    status.into_http::<()>().map(|()| Body::full(Bytes::new()))
}

// --- statuses

fn code(status: StatusCode) -> Code {
    match status.as_u16() {
        400 | 415 | 422 | 431 => Code::InvalidArgument,
        401 => Code::Unauthenticated,
        403 | 421 => Code::PermissionDenied,
        404 => Code::NotFound,
        408 => Code::DeadlineExceeded,
        409 => Code::FailedPrecondition,
        413 | 429 => Code::ResourceExhausted,
        500 => Code::Internal,
        503 => Code::Unavailable,
        _ => Code::Unknown,
    }
}

fn status(http: StatusCode, detail: &str, hint: &str, reason: &str) -> Status {
    let mut metadata = MetadataMap::new();
    if let Ok(reason) = MetadataValue::try_from(reason) {
        metadata.insert(REASON_KEY, reason);
    }
    Status::with_metadata(code(http), format!("{detail}; {hint}"), metadata)
}

impl From<&Problem> for Status {
    fn from(problem: &Problem) -> Self {
        status(problem.status, &problem.detail, problem.hint, problem.reason)
    }
}

/// Converts an error of the control plane to a status.
fn problem(http: StatusCode, body: &[u8]) -> Status {
    #[derive(serde::Deserialize)]
    struct Members {
        detail: String,
        reason: String,
        hint: String,
    }

    match serde_json::from_slice::<Members>(body) {
        Ok(problem) => status(http, &problem.detail, &problem.hint, &problem.reason),
        Err(_) => Status::new(code(http), http.to_string()),
    }
}

fn service_ending() -> Status {
    Status::from(&Problem::service_ending())
}

// --- calls

/// Answers a call.
pub(crate) async fn respond(
    shared: &Arc<ServerState>,
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
            .unwrap_or_else(|_| Err(Status::deadline_exceeded("the deadline of the call has passed"))),
    };
    answered.unwrap_or_else(refused)
}

/// Returns the time limit of a call, which is in the header `grpc-timeout`.
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
    shared: &Arc<ServerState>,
    progress: &InProgress,
    peer: &str,
    (head, body): (Parts, Incoming),
    began: Instant,
) -> Result<Response<Body>, Status> {
    let path = head.uri.path();
    let method = METHODS.iter().find(|(known, _)| *known == path);
    let &(path, question) = method.ok_or_else(|| Status::unimplemented(format!("unknown method {path}")))?;
    let equivalent = equivalent(&head, question);
    let mut call = Call {
        shared: shared.clone(),
        peer: peer.to_owned(),
        path,
        access: shared.settings.access(&equivalent),
        equivalent,
        body: Bytes::new(),
        began,
    };
    if body.size_hint().lower() > shared.settings.limits.max_body_bytes as u64 {
        call.access.refusal.get_or_insert(TOO_LARGE);
    }
    if path != CHECK && !call.access.is_granted() {
        return Err(call.refused().await);
    }
    call.body = match receive(progress, body, &shared.settings.limits).await {
        Ok(body) => body,
        Err(BodyFailure::TooLarge) => {
            call.access.refusal.get_or_insert(TOO_LARGE);
            return Err(call.refused().await);
        }
        Err(BodyFailure::ClientGone) => return Err(Status::cancelled("the client has left")),
        Err(BodyFailure::Refused(problem)) => {
            count(&shared.connections.refusals, problem.reason);
            return Err(Status::from(&problem));
        }
    };
    let size = call.body.len();
    // If a message arrives in one part with its prefix, tonic would copy the message twice.
    let mut message = call.body.clone();
    let prefix = message.split_to(PREFIX_BYTES.min(size));
    let parts = [prefix, message].map(|part| Ok::<_, Infallible>(Frame::data(part)));
    let request = Request::from_parts(head, StreamBody::new(tokio_stream::iter(parts)));
    let mut answered = pin!(call.serve(request));
    // The data plane does all of its work in the first poll. After that, the call waits for the control plane.
    let first = || answered.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    match shared.run(question, size, first).await {
        None => Err(service_ending()),
        Some(Poll::Ready(response)) => response,
        Some(Poll::Pending) => answered.await,
    }
}

/// Returns the head of the query of `/v1` that is equivalent to a call.
fn equivalent(head: &Parts, question: Question) -> Parts {
    let mut head = head.clone();
    head.uri = Uri::from_static(match question {
        Question::Reservation(_) => ANY_RESERVATION,
        question => question.path(),
    });
    if question == Question::Reservation(ReservationAction::Finish) {
        head.method = Method::DELETE;
    }
    head.headers.remove(ACCEPT);
    head.headers.insert(CONTENT_TYPE, JSON);
    head
}

/// A call whose body was received.
struct Call {
    shared: Arc<ServerState>,
    peer: String,
    path: &'static str,
    /// Head of the equivalent query of `/v1`.
    equivalent: Parts,
    /// Whether the caller may send the equivalent query.
    access: Access,
    /// The message without its prefix.
    body: Bytes,
    began: Instant,
}

impl Call {
    /// Passes a request to the generated code of the service.
    async fn serve<B>(self, request: Request<B>) -> Result<Response<Body>, Status>
    where
        B: hyper::body::Body<Error = Infallible> + Send + 'static,
    {
        let is_stream = self.path == WATCH;
        let service = self.path.strip_prefix('/').and_then(|path| path.split_once('/'));
        let Ok(response) = match service {
            Some((query_server::SERVICE_NAME, _)) => {
                let server = QueryServer::new(self);
                server.max_decoding_message_size(usize::MAX).call(request).await
            }
            _ => HealthServer::new(self).call(request).await,
        };
        let (head, body) = response.into_parts();
        let body = if is_stream {
            Body::Stream(body)
        } else {
            let body = body.collect().await?;
            let trailers = body.trailers().cloned();
            Body::message(body.to_bytes(), trailers)
        };
        Ok(Response::from_parts(head, body))
    }

    /// Returns the answer of the index. If the index cannot answer, returns the answer of the control plane.
    async fn query<Q, A>(
        &self,
        equivalent: &Parts,
        request: tonic::Request<Q>,
        from_index: impl FnOnce(&Endpoints, Q) -> Option<Result<Vec<u8>, Problem>>,
    ) -> Result<tonic::Response<A>, Status>
    where
        Q: Message + Default + serde::Serialize,
        A: DeserializeOwned,
    {
        let endpoints = &self.shared.endpoints;
        if self.shared.settings.answers_queries
            && let Some(answered) = from_index(endpoints, request.into_inner())
        {
            let status = answered.as_ref().map_or_else(|problem| problem.status.as_u16(), |_| 200);
            endpoints.metrics.request(self.path, status, self.began.elapsed());
            let json = answered.map_err(|problem| Status::from(&problem))?;
            let answer = serde_json::from_slice(&json).map_err(|error| Status::internal(error.to_string()))?;
            return Ok(tonic::Response::new(answer));
        }
        let internal = |error: &dyn std::error::Error| Status::internal(error.to_string());
        let message = Q::decode(self.body.slice(PREFIX_BYTES..)).map_err(|error| internal(&error))?;
        let json = serde_json::to_vec(&message).map_err(|error| internal(&error))?;
        let answer = self.ask(equivalent, json.into()).await?;
        let answer = serde_json::from_slice(&answer);
        let answer = answer.map_err(|_| Status::internal("the control plane's answer cannot be read"))?;
        Ok(tonic::Response::new(answer))
    }

    /// Returns the control plane's error, if the call is refused.
    async fn refused(&self) -> Status {
        let answer = self.ask(&self.equivalent, Bytes::new()).await;
        answer.err().unwrap_or_else(service_ending)
    }

    /// Returns the control plane's answer to a query.
    async fn ask(&self, head: &Parts, body: Bytes) -> Result<Bytes, Status> {
        let answer = self.shared.ask(head, &self.peer, &self.access, body).await;
        let answer = answer.ok_or_else(service_ending)?;
        let status = answer.status();
        let body = answer.into_body().collect().await.map_err(|_| service_ending())?.to_bytes();
        if status.is_success() {
            return Ok(body);
        }
        Err(problem(status, &body))
    }
}

impl Call {
    /// Answers a call about a reservation.
    async fn reservation<Q>(&self, verb: ReservationAction, id: &str, request: tonic::Request<Q>) -> QueryAnswer<Reservation>
    where
        Q: Message + Default + serde::Serialize,
    {
        let mut equivalent = self.equivalent.clone();
        let path = is_id(id).then(|| Uri::try_from(format!("{RESERVATIONS}{id}")).ok()).flatten();
        equivalent.uri = path.ok_or_else(|| Status::from(&Problem::no_such_reservation(id)))?;
        let answer = |endpoints: &Endpoints, message: Q| endpoints.answer_reservation(verb, id, &message);
        self.query(&equivalent, request, answer).await
    }
}

/// Rejects infinite numbers and NaN. JSON has neither, so the equivalent query would lose an optional one.
fn check_finite(mut numbers: impl Iterator<Item = f64>) -> Result<(), Status> {
    let is_finite = numbers.all(f64::is_finite);
    is_finite.then_some(()).ok_or_else(|| Status::from(&Problem::not_finite()))
}

type QueryAnswer<A> = Result<tonic::Response<A>, Status>;

#[async_trait]
impl Query for Call {
    async fn r#match(&self, request: tonic::Request<MatchRequest>) -> QueryAnswer<MatchResponse> {
        self.query(&self.equivalent, request, Endpoints::answer_match).await
    }

    async fn match_many(&self, request: tonic::Request<MatchManyRequest>) -> QueryAnswer<MatchManyResponse> {
        self.query(&self.equivalent, request, Endpoints::answer_match_many).await
    }

    async fn select(&self, request: tonic::Request<SelectRequest>) -> QueryAnswer<SelectResponse> {
        let query = request.get_ref();
        let loads = query.candidates.iter().filter_map(|one| one.load);
        check_finite(loads.chain(query.reserve.iter().filter_map(|reserve| reserve.seconds)))?;
        self.query(&self.equivalent, request, Endpoints::answer_select).await
    }

    async fn update_reservation(&self, request: tonic::Request<UpdateReservationRequest>) -> QueryAnswer<Reservation> {
        check_finite(request.get_ref().seconds.into_iter())?;
        let id = request.get_ref().id.clone();
        self.reservation(ReservationAction::Update, &id, request).await
    }

    async fn finish_reservation(&self, request: tonic::Request<FinishReservationRequest>) -> QueryAnswer<Reservation> {
        let id = request.get_ref().id.clone();
        self.reservation(ReservationAction::Finish, &id, request).await
    }
}

// --- health

fn is_known(request: &HealthCheckRequest) -> bool {
    request.service.is_empty() || request.service == query_server::SERVICE_NAME
}

#[async_trait]
impl Health for Call {
    async fn check(&self, request: tonic::Request<HealthCheckRequest>) -> QueryAnswer<HealthCheckResponse> {
        if !is_known(request.get_ref()) {
            let known = query_server::SERVICE_NAME;
            return Err(Status::not_found(format!(
                "unknown service: expected {known} or the empty name"
            )));
        }
        Ok(tonic::Response::new(HealthCheckResponse {
            status: self.shared.health() as i32,
        }))
    }

    type WatchStream = BoxStream<HealthCheckResponse>;

    /// Sends the health now and after each change, until the service ends.
    async fn watch(&self, request: tonic::Request<HealthCheckRequest>) -> QueryAnswer<Self::WatchStream> {
        let is_known = is_known(request.get_ref());
        let mut reported = None;
        let stream = WatchStream::new(self.shared.watched_health.subscribe()).filter_map(move |health| {
            let Some(health) = health else {
                return Some(Err(service_ending()));
            };
            let status = if is_known { health } else { ServingStatus::ServiceUnknown } as i32;
            (reported.replace(status) != Some(status)).then_some(Ok(HealthCheckResponse { status }))
        });
        Ok(tonic::Response::new(Box::pin(stream)))
    }
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
}
