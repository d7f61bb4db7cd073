//! Access control: identifies the caller of a request, and decides whether the request is refused. The control plane reads the settings for
//! it, and writes the errors and the audit log.
//!
//! A web page can make a visitor's browser send requests to any address that the visitor's machine reaches, loopback included. The browser
//! states the origin of the page in `Origin` and `Sec-Fetch-Site`, which scripts cannot change. So requests of other origins are refused.
//! With DNS rebinding, the host name of the page resolves to the service. Then both headers say "same origin", but `Host` has the name of
//! the page. So if callers without a token have any role, `Host` must be an address or a configured name. If each request needs a token,
//! any `Host` is accepted, since a browser does not add a bearer token by itself.

use std::net::{IpAddr, Ipv6Addr};

use hyper::HeaderMap;
use hyper::header::{AUTHORIZATION, HOST, HeaderValue, ORIGIN};
use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use serde::Deserialize;
use subtle::ConstantTimeEq;

/// The roles of callers. Each role includes the permissions of all earlier roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Role {
    None,
    Read,
    Register,
}

/// A row of the table of endpoints, without the path and the method.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Endpoint {
    /// The role that a caller needs; None if the endpoint is public.
    pub(crate) role: Option<Role>,
    /// Whether orchestrators probe the endpoint; requests to it are allowed from any origin and with any host name.
    pub(crate) probe: bool,
}

#[derive(Clone, Debug, Deserialize)]
struct Token {
    /// The SHA-256 digest of the token.
    digest: [u8; SHA256_OUTPUT_LEN],
    role: Role,
    /// The name of the token's owner in logs.
    name: String,
}

/// The rules for callers and hosts.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Policy {
    tokens: Vec<Token>,
    /// Role of callers without a token.
    anonymous: Role,
    /// The address at which the service listens, in lower case.
    host: String,
    /// Whether only this machine reaches the listening address.
    is_loopback: bool,
    hosts: Hosts,
}

/// Further names and addresses of the service, in lower case.
#[derive(Clone, Debug, Deserialize)]
struct Hosts {
    names: Vec<String>,
    /// Suffixes of further names.
    suffixes: Vec<String>,
    /// First and last address of each further network.
    networks: Vec<(IpAddr, IpAddr)>,
}

/// The code of a reason for refusal; the control plane has a sentence for each code (`kvevents.service.http.app`).
pub(crate) type Refusal = &'static str;
/// The reason for refusing a body above the size limit.
pub(crate) const TOO_LARGE: Refusal = "too-large";

impl Policy {
    /// Returns the name of the caller and, if the request to an endpoint is refused, the reason. `reads` is whether the request changes
    /// nothing, so that a link on another site may open it in a browser.
    pub(crate) fn check(&self, headers: &HeaderMap, endpoint: &Endpoint, reads: bool) -> (&str, Option<Refusal>) {
        let (role, name) = self.caller(headers.get(AUTHORIZATION));
        let origin = || self.foreign_origin(headers, reads).filter(|_| !endpoint.probe);
        let refusal = origin().or_else(|| {
            endpoint.role.filter(|needed| role < *needed)?;
            Some(match headers.get(AUTHORIZATION).filter(|value| !value.is_empty()) {
                None => "token-missing",
                Some(_) if role == Role::None => "token-unknown",
                Some(_) => "forbidden",
            })
        });
        (name, refusal)
    }

    /// Returns the role and the name of the caller that sends this value of `Authorization`. An unknown token has no role, even if callers
    /// without a token have one, so that its owner notices the mistake. All bytes of all digests are compared, so that the time does not
    /// depend on the token.
    fn caller(&self, authorization: Option<&HeaderValue>) -> (Role, &str) {
        let Some(value) = authorization.filter(|_| !self.tokens.is_empty()) else {
            return (self.anonymous, "anonymous");
        };
        let mut parts = value.as_bytes().splitn(2, |byte| *byte == b' ');
        let (scheme, token) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        let given = digest(&SHA256, token.trim_ascii());
        let is_bearer = scheme.eq_ignore_ascii_case(b"bearer");
        let mut caller = (Role::None, "unknown token");
        for token in &self.tokens {
            if bool::from(token.digest.ct_eq(given.as_ref())) && is_bearer {
                caller = (token.role, &token.name);
            }
        }
        caller
    }

    /// Returns the reason for refusal if a page of another site sends, or might send, a request.
    fn foreign_origin(&self, headers: &HeaderMap, reads: bool) -> Option<Refusal> {
        let host = headers.get(HOST).map(text);
        if self.anonymous > Role::None && host.as_deref().is_some_and(|host| !self.is_own_host(host_of(host))) {
            return Some("unknown-host");
        }
        if headers
            .get(ORIGIN)
            .is_some_and(|origin| !self.is_own_origin(&text(origin), host.as_deref()))
        {
            return Some("foreign-origin");
        }
        let site = headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
        let is_own_site = matches!(site, None | Some(b"same-origin" | b"none"));
        let is_link = reads && headers.get("sec-fetch-mode").is_some_and(|mode| mode == "navigate");
        (!is_own_site && !is_link).then_some("foreign-page")
    }

    /// Whether the host of an origin is that of `Host`, or a configured name. The scheme of the origin does not matter, since a proxy can
    /// end TLS. Sandboxed frames and files have the origin `null`, which counts as another site.
    fn is_own_origin(&self, origin: &str, host: Option<&str>) -> bool {
        let place = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        place.is_some_and(|place| host == Some(place) || self.hosts.contains(host_of(place)))
    }

    fn is_own_host(&self, host: &str) -> bool {
        let is_name = host == self.host || host == "localhost" || host.ends_with(".localhost") || self.hosts.contains(host);
        is_name || address_of(host).is_some_and(|address| address.is_loopback() || !self.is_loopback)
    }
}

impl Hosts {
    fn contains(&self, host: &str) -> bool {
        let covers = |address| self.networks.iter().any(|(first, last)| (*first..=*last).contains(&address));
        self.names.iter().any(|name| name == host)
            || self.suffixes.iter().any(|suffix| host.ends_with(suffix.as_str()))
            || address_of(host).is_some_and(covers)
    }
}

/// Returns the value of a header, as text in lower case. Bytes above ASCII are read as Latin-1, so each value is a text.
fn text(value: &HeaderValue) -> String {
    let characters: String = value.as_bytes().iter().map(|byte| char::from(*byte)).collect();
    characters.trim_matches([' ', '\t']).to_lowercase()
}

/// Returns HOST, given `HOST`, `HOST:PORT`, `[HOST]` or `[HOST]:PORT`, without a final dot.
fn host_of(place: &str) -> &str {
    match place.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => {
            let host = place.split(':').next().unwrap_or_default();
            host.strip_suffix('.').unwrap_or(host)
        }
    }
}

/// Returns a host as an IP address, of which an IPv6 zone is dropped.
fn address_of(host: &str) -> Option<IpAddr> {
    let zoned = || host.split_once('%').and_then(|(address, _)| address.parse::<Ipv6Addr>().ok());
    host.parse().ok().or_else(|| zoned().map(IpAddr::V6))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const READER_TOKEN: &str = "reader-0123456789";
    const SECOND_TOKEN: &str = "second-0123456789";
    const FOREIGN_ORIGIN: &str = "https://evil.example";
    const OWN_HOST: (&str, &str) = ("host", "127.0.0.1:8090");

    fn token(text: &str, role: Role) -> Token {
        let digest = digest(&SHA256, text.as_bytes()).as_ref().try_into().unwrap();
        Token {
            digest,
            role,
            name: text[..6].into(),
        }
    }

    fn policy(host: &str, anonymous: Role) -> Policy {
        Policy {
            tokens: vec![
                token(READER_TOKEN, Role::Read),
                token("writer-0123456789", Role::Register),
                token(SECOND_TOKEN, Role::Register),
            ],
            anonymous,
            host: host.into(),
            is_loopback: host == "127.0.0.1",
            hosts: Hosts {
                names: vec!["kv.example.com".into()],
                suffixes: vec![".svc.cluster.local".into()],
                networks: [("10.9.0.0", "10.9.255.255"), ("fd00:1::", "fd00:1::ffff")]
                    .map(|(first, last)| (first.parse().unwrap(), last.parse().unwrap()))
                    .into(),
            },
        }
    }

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let value = |text: &str| HeaderValue::from_bytes(text.as_bytes()).unwrap();
        pairs
            .iter()
            .map(|(name, text)| (name.parse().unwrap(), value(text)))
            .collect()
    }

    fn caller(policy: &Policy, value: &[u8]) -> (Role, String) {
        let value = HeaderValue::from_bytes(value).unwrap();
        let (role, name) = policy.caller(Some(&value));
        (role, name.into())
    }

    /// Returns the reason why a request to an endpoint without a role is refused; None if it is not refused.
    fn origin(policy: &Policy, pairs: &[(&'static str, &str)], reads: bool) -> Option<Refusal> {
        let endpoint = Endpoint {
            role: None,
            probe: false,
        };
        let headers = headers(pairs);
        let refusal = policy.check(&headers, &endpoint, reads).1;
        assert_eq!(policy.check(&headers, &Endpoint { probe: true, ..endpoint }, reads).1, None);
        refusal
    }

    #[test]
    fn only_a_complete_bearer_token_has_a_role() {
        let strict = policy("127.0.0.1", Role::None);
        for (value, name) in [
            (format!("Bearer {READER_TOKEN}"), "reader"),
            (format!("bearer {SECOND_TOKEN}"), "second"),
            (format!("BEARER   {SECOND_TOKEN} "), "second"),
            (format!("Bearer \t{SECOND_TOKEN}\t"), "second"),
            (String::new(), "unknown token"),
            ("Bearer".into(), "unknown token"),
            ("Bearer ".into(), "unknown token"),
            (SECOND_TOKEN.into(), "unknown token"),
            (format!("Basic {SECOND_TOKEN}"), "unknown token"),
            (format!("Bearer {}", &SECOND_TOKEN[1..]), "unknown token"),
            (format!("Bearer {SECOND_TOKEN}x"), "unknown token"),
            (format!("Bearer {}", SECOND_TOKEN.to_uppercase()), "unknown token"),
            (format!("Bearer {READER_TOKEN} {SECOND_TOKEN}"), "unknown token"),
            (format!("Bearer\t{SECOND_TOKEN}"), "unknown token"),
        ] {
            let role = match name {
                "reader" => Role::Read,
                "second" => Role::Register,
                _ => Role::None,
            };
            assert_eq!(caller(&strict, value.as_bytes()), (role, name.into()), "{value}");
        }
        assert_eq!(strict.caller(None), (Role::None, "anonymous"));
    }

    proptest! {
        #[test]
        fn no_other_bytes_have_a_role(value in proptest::collection::vec(0x20_u8..=0xff, 0..200)) {
            let value: Vec<u8> = value.into_iter().filter(|byte| *byte != 0x7f).collect();
            let public = policy("127.0.0.1", Role::Read);
            prop_assert_eq!(caller(&public, &value), (Role::None, "unknown token".into()));
        }
    }

    #[test]
    fn without_tokens_the_header_is_ignored() {
        let mut open = policy("127.0.0.1", Role::Register);
        open.tokens.clear();
        for value in [&b""[..], b"Basic eDp5", b"Bearer whatever"] {
            assert_eq!(caller(&open, value), (Role::Register, "anonymous".into()));
        }
    }

    #[test]
    fn a_caller_needs_the_role_of_the_endpoint() {
        let reader = format!("Bearer {READER_TOKEN}");
        let writer = format!("Bearer {SECOND_TOKEN}");
        let (read, register) = (Some(Role::Read), Some(Role::Register));
        for (anonymous, value, role, refusal) in [
            (Role::None, None, None, None),
            (Role::None, None, read, Some("token-missing")),
            (Role::Read, None, read, None),
            (Role::Read, None, register, Some("token-missing")),
            (Role::Read, Some(""), read, Some("token-missing")),
            (Role::Read, Some("Bearer x"), read, Some("token-unknown")),
            (Role::None, Some("Bearer x"), None, None),
            (Role::None, Some(reader.as_str()), read, None),
            (Role::None, Some(reader.as_str()), register, Some("forbidden")),
            (Role::None, Some(writer.as_str()), register, None),
        ] {
            let pairs: Vec<_> = value.map(|value| ("authorization", value)).into_iter().collect();
            let endpoint = Endpoint { role, probe: false };
            let found = policy("127.0.0.1", anonymous).check(&headers(&pairs), &endpoint, true).1;
            assert_eq!(found, refusal, "{anonymous:?} {value:?} {role:?}");
        }
    }

    #[test]
    fn a_host_name_of_another_site_is_refused() {
        for (own, host, is_known) in [
            ("127.0.0.1", "127.0.0.1:8090", true),
            ("127.0.0.1", "localhost:8090", true),
            ("127.0.0.1", "LOCALHOST", true),
            ("127.0.0.1", "[::1]:8090", true),
            ("127.0.0.1", "kv.localhost:8090", true),
            ("127.0.0.1", "kv.example.com", true),
            ("127.0.0.1", "KV.example.com.:80", true),
            ("127.0.0.1", "a.svc.cluster.local:8090", true),
            ("127.0.0.1", "10.9.3.4:1", true),
            ("127.0.0.1", "[fd00:1::7]", true),
            ("127.0.0.1", "10.0.0.5:8090", false),
            ("127.0.0.1", "evil.example:8090", false),
            ("127.0.0.1", "localhost.evil.example", false),
            ("127.0.0.1", "127.0.0.1.evil.example", false),
            ("127.0.0.1", "svc.cluster.local", false),
            ("127.0.0.1", "other.example.com", false),
            ("127.0.0.1", "\u{e9}vil", false),
            ("127.0.0.1", "", false),
            ("0.0.0.0", "10.0.0.5:8090", true),
            ("0.0.0.0", "[fd00::5]:8090", true),
            ("0.0.0.0", "[fe80::1%eth0]", true),
            ("0.0.0.0", "1.2.3.4%x", false),
            ("0.0.0.0", "evil.example", false),
            ("indexer.lan", "Indexer.LAN:8090", true),
        ] {
            let refusal = (!is_known).then_some("unknown-host");
            assert_eq!(
                origin(&policy(own, Role::Read), &[("host", host)], false),
                refusal,
                "{own} {host}"
            );
            assert_eq!(origin(&policy(own, Role::None), &[("host", host)], false), None);
        }
        assert_eq!(origin(&policy("127.0.0.1", Role::Read), &[], false), None); // as in HTTP 1.0
    }

    #[test]
    fn only_own_origins_are_accepted() {
        for (text, is_own) in [
            ("http://127.0.0.1:8090", true),
            ("https://127.0.0.1:8090", true),
            ("https://kv.example.com", true),
            ("https://KV.example.com:8443", true),
            (FOREIGN_ORIGIN, false),
            ("http://127.0.0.1:3000", false),
            ("http://localhost:8090", false),
            ("null", false),
            ("", false),
            ("file://127.0.0.1:8090", false),
            ("http://kv.example.com.evil.example", false),
        ] {
            let refusal = (!is_own).then_some("foreign-origin");
            for (role, reads) in [(Role::Read, true), (Role::Read, false), (Role::None, false)] {
                let found = origin(&policy("127.0.0.1", role), &[OWN_HOST, ("origin", text)], reads);
                assert_eq!(found, refusal, "{text}");
            }
        }
    }

    /// Images, scripts and frames of another page are requested without `Origin`. A link on another page is allowed, a form is not.
    #[test]
    fn requests_of_other_sites_without_an_origin_are_refused() {
        let own = policy("127.0.0.1", Role::Read);
        for (site, is_own) in [
            ("cross-site", false),
            ("same-site", false),
            ("same-origin", true),
            ("none", true),
        ] {
            let refusal = (!is_own).then_some("foreign-page");
            let site = ("sec-fetch-site", site);
            assert_eq!(origin(&own, &[site], true), refusal);
            assert_eq!(origin(&own, &[site, ("sec-fetch-mode", "no-cors")], true), refusal);
            assert_eq!(origin(&own, &[site, ("sec-fetch-mode", "navigate")], false), refusal);
            assert_eq!(origin(&own, &[site, ("sec-fetch-mode", "navigate")], true), None);
        }
    }
}
