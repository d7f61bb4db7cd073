//! Errors of connections, and errors that the fleet causes. The control plane writes all other errors. All errors are problem details of
//! RFC 9457 with the fields of `kvevents.client.schemas.Problem`.

use bytes::Bytes;
use hyper::header::{CONNECTION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{Response, StatusCode};
use serde::Serialize;
use serde::ser::{SerializeStruct, Serializer};

use crate::body::Body;
use kvevents_routing::Labels;

pub(crate) const JSON: HeaderValue = HeaderValue::from_static("application/json");
const PROBLEM: &str = "application/problem+json";
pub(crate) const CLOSE: HeaderValue = HeaderValue::from_static("close");

/// Maximum number of names that an error lists.
const MAX_LISTED: usize = 8;

/// An error, as clients receive it.
#[derive(Debug)]
pub struct Problem {
    /// A sentence about the error.
    pub detail: String,
    /// Code of the reason, for programs.
    pub reason: &'static str,
    /// A sentence about what the client can do.
    pub hint: &'static str,
    /// The HTTP status.
    pub status: StatusCode,
}

impl Serialize for Problem {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let words = self.reason.replace('-', " ");
        let (first, rest) = words.split_at(1);
        let mut problem = to.serialize_struct("Problem", 7)?;
        problem.serialize_field("type", &format!("urn:kvevents:problem:{}", self.reason))?;
        problem.serialize_field("title", &format!("{}{rest}", first.to_ascii_uppercase()))?;
        problem.serialize_field("status", &self.status.as_u16())?;
        problem.serialize_field("detail", &self.detail)?;
        problem.serialize_field("reason", self.reason)?;
        problem.serialize_field("hint", self.hint)?;
        problem.serialize_field("error", &self.detail)?;
        problem.end()
    }
}

/// Why the data plane does not answer a query.
#[derive(Debug)]
pub(crate) enum Declined {
    /// The query was not read, no worker serves its model, or the index has failed. The control plane then answers the query.
    Unread,
    /// The fleet does not permit the request, for the reason in the error.
    Refused(Problem),
    /// A worker has left the fleet during the lookup, which might have missed blocks of the worker. The query is answered again.
    Outdated,
}

fn quoted(name: &str) -> String {
    format!("'{}'", name.escape_debug())
}

impl Problem {
    pub(crate) fn too_slow(seconds: f64) -> Self {
        Self {
            detail: format!("the request was not complete after {seconds} s"),
            reason: "too-slow",
            hint: "send the request faster",
            status: StatusCode::REQUEST_TIMEOUT,
        }
    }

    pub(crate) fn too_much_at_once(limit: usize) -> Self {
        Self {
            detail: format!("the requests in progress hold more than {limit} bytes"),
            reason: "too-much-at-once",
            hint: "send the request again, or raise limits.max_received_bytes",
            status: StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    pub(crate) fn too_many_clients(limit: usize) -> Self {
        Self {
            detail: format!("{limit} clients are connected, and each has a request in progress"),
            reason: "too-many-clients",
            hint: "send the request again in a second, or raise limits.max_clients",
            status: StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    pub(crate) fn ambiguous_adapter(name: &str, models: &[String]) -> Self {
        Self {
            detail: format!(
                "{} is an adapter of {} models: {}",
                quoted(name),
                models.len(),
                models[..models.len().min(MAX_LISTED)].join(", ")
            ),
            reason: "ambiguous-adapter",
            hint: "send the name of a model as the model, and the adapter as lora_name",
            status: StatusCode::CONFLICT,
        }
    }

    pub(crate) fn too_many_rows(limit: usize) -> Self {
        Self {
            detail: format!("the answer has more than {limit} matches"),
            reason: "too-many-matches",
            hint: "send fewer prompts at once, or raise limits.max_rows",
            status: StatusCode::PAYLOAD_TOO_LARGE,
        }
    }

    /// The error if none of the `named` candidates can be chosen. If `named` is 0, the request has named no candidates, and no worker
    /// serves its model.
    pub(crate) fn no_candidates(model: &str, named: usize) -> Self {
        let (detail, hint) = if named == 0 {
            let hint = "name candidates in `candidates`, or register engines that serve the model";
            (format!("no candidate serves model {}", quoted(model)), hint)
        } else {
            let hint = "leave `candidates` out, or name workers of /v1/sources";
            let model = quoted(model);
            (
                format!("none of the {named} candidates serves model {model} with this LoRA and salt"),
                hint,
            )
        };
        Self {
            detail,
            reason: "no-candidates",
            hint,
            status: StatusCode::BAD_REQUEST,
        }
    }

    pub(crate) fn duplicate_candidate(instance: &str, rank: i64) -> Self {
        Self {
            detail: format!("{} rank {rank} is named twice", quoted(instance)),
            reason: "duplicate-candidate",
            hint: "name each worker once",
            status: StatusCode::BAD_REQUEST,
        }
    }

    pub(crate) fn not_finite() -> Self {
        Self {
            detail: "a load, a weight or a number of seconds is not finite".into(),
            reason: "bad-number",
            hint: "send finite numbers",
            status: StatusCode::BAD_REQUEST,
        }
    }

    pub(crate) fn no_such_reservation(id: &str) -> Self {
        Self {
            detail: format!("no reservation {} is open", quoted(id)),
            reason: "no-such-reservation",
            hint: "the reservation was finished or has expired; extend reservations of long requests",
            status: StatusCode::NOT_FOUND,
        }
    }

    pub(crate) fn too_many_reservations(limit: usize) -> Self {
        Self {
            detail: format!("{limit} reservations are open"),
            reason: "too-many-reservations",
            hint: "finish the reservations of ended requests, or raise limits.max_reservations",
            status: StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// The error if no candidate has these labels.
    pub(crate) fn no_such_labels(labels: &Labels) -> Self {
        let labels: Vec<String> = labels
            .iter()
            .take(MAX_LISTED)
            .map(|(name, value)| quoted(&format!("{name}={value}")))
            .collect();
        Self {
            detail: format!("no candidate has the labels {}", labels.join(", ")),
            reason: "no-candidates",
            hint: "see the labels in /v1/sources, or leave `labels` out",
            status: StatusCode::BAD_REQUEST,
        }
    }

    pub(crate) fn malformed(detail: impl Into<String>) -> Self {
        Self {
            detail: detail.into(),
            reason: "malformed-request",
            hint: "speak HTTP/1.1",
            status: StatusCode::BAD_REQUEST,
        }
    }

    pub(crate) fn unknown_coding(coding: &str) -> Self {
        Self {
            hint: "send the body with no other Transfer-Encoding than chunked",
            status: StatusCode::NOT_IMPLEMENTED,
            ..Self::malformed(format!("Transfer-Encoding {coding:?} is not supported"))
        }
    }

    pub(crate) fn not_a_proxy() -> Self {
        Self {
            detail: "CONNECT is not supported".into(),
            reason: "not-a-proxy",
            hint: "send only requests that this service itself answers",
            status: StatusCode::BAD_REQUEST,
        }
    }

    /// `limit` is a number with its unit.
    pub(crate) fn headers_too_large(limit: &str) -> Self {
        Self {
            detail: format!("the request has more than {limit}"),
            reason: "headers-too-large",
            hint: "send long values in the body",
            status: StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        }
    }

    pub(crate) fn service_ending() -> Self {
        Self {
            detail: "the service is ending, and the request was not complete".into(),
            reason: "ending",
            hint: "send the request again",
            status: StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    fn json(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Returns the response; the connection is closed after it.
    pub(crate) fn response(&self) -> Response<Body> {
        let mut response = Response::new(Body::full(Bytes::from(self.json())));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(PROBLEM));
        headers.insert(CONNECTION, CLOSE);
        if self.reason == "too-many-clients" {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }

    /// Returns the response as bytes of HTTP/1.1.
    pub(crate) fn as_http1(&self) -> Vec<u8> {
        let (body, status) = (self.json(), self.status);
        let phrase = status.canonical_reason().unwrap_or_default();
        let mut text = format!(
            "HTTP/1.1 {} {phrase}\r\ncontent-type: {PROBLEM}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            status.as_u16(),
            body.len()
        )
        .into_bytes();
        text.extend_from_slice(&body);
        text
    }
}
