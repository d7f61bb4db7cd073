//! Access control for the simple cases. The control plane decides about all others (`kvevents.service.access`,
//! `kvevents.service.http.app`): a request that is admitted here is admitted there too.

use std::net::IpAddr;

use hyper::HeaderMap;
use hyper::header::{AUTHORIZATION, HOST, ORIGIN};
use ring::digest::{SHA256, SHA256_OUTPUT_LEN, digest};
use subtle::{Choice, ConstantTimeEq};

use crate::settings::Settings;

type Digest = [u8; SHA256_OUTPUT_LEN];

/// The rules for callers and hosts.
pub(crate) struct Policy {
    tokens: Vec<Digest>,
    has_tokens: bool,
    is_open: bool,
    checks_host: bool,
    host: String,
    names: Vec<String>,
    is_loopback: bool,
}

impl Policy {
    /// Returns an error for a token that is not a SHA-256 digest.
    pub(crate) fn new(settings: &Settings) -> Result<Self, &'static str> {
        let host = settings.host.to_lowercase();
        let tokens: Option<Vec<Digest>> = settings.tokens.iter().map(|digits| from_hex(digits)).collect();
        Ok(Self {
            tokens: tokens.ok_or("invalid digest of a token: expected 64 hexadecimal digits")?,
            has_tokens: settings.has_tokens,
            is_open: settings.is_open,
            checks_host: settings.checks_host,
            names: settings.names.iter().map(|name| name.to_lowercase()).collect(),
            is_loopback: host
                .parse::<IpAddr>()
                .map_or(host == "localhost", |address| address.is_loopback()),
            host,
        })
    }

    /// Whether a request with these headers is certainly allowed.
    pub(crate) fn admits(&self, headers: &HeaderMap) -> bool {
        let is_from_browser = headers.contains_key(ORIGIN) || headers.contains_key("sec-fetch-site");
        !is_from_browser && self.is_own_host(headers) && self.is_known(headers)
    }

    fn is_known(&self, headers: &HeaderMap) -> bool {
        let Some(value) = headers.get(AUTHORIZATION).filter(|_| self.has_tokens) else {
            return self.is_open;
        };
        let value = value.as_bytes();
        let Some(at) = value.iter().position(|byte| *byte == b' ') else {
            return false;
        };
        let (scheme, token) = value.split_at(at);
        let given = digest(&SHA256, trim_token(token));
        // All bytes of all digests are compared, so the time does not depend on the token.
        let is_same = |known: &Digest| known.as_slice().ct_eq(given.as_ref());
        let is_known = self.tokens.iter().fold(Choice::from(0), |any, known| any | is_same(known));
        scheme.eq_ignore_ascii_case(b"bearer") && is_known.into()
    }

    fn is_own_host(&self, headers: &HeaderMap) -> bool {
        let Some(value) = headers.get(HOST).filter(|_| self.checks_host) else {
            return true;
        };
        let Ok(place) = value.to_str() else { return false };
        let place = place.trim().to_lowercase();
        let host = match place.strip_prefix('[') {
            Some(rest) => rest.split(']').next(),
            None => place.split(':').next().map(|host| host.strip_suffix('.').unwrap_or(host)),
        };
        let host = host.unwrap_or_default();
        if host == "localhost"
            || host == self.host
            || host.ends_with(".localhost")
            || self.names.iter().any(|name| name == host)
        {
            return true;
        }
        let address = host.parse::<IpAddr>();
        address.is_ok_and(|address| address.is_loopback() || !self.is_loopback)
    }
}

/// Decodes a digest of hexadecimal digits. None if it has another length or other characters.
fn from_hex(digits: &str) -> Option<Digest> {
    let mut bytes = [0; SHA256_OUTPUT_LEN];
    let (pairs, []) = digits.as_bytes().as_chunks::<2>() else {
        return None;
    };
    if pairs.len() != bytes.len() || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(pairs) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

fn trim_token(token: &[u8]) -> &[u8] {
    let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let start = token.iter().position(|byte| !is_blank(byte)).unwrap_or(token.len());
    let end = token.iter().rposition(|byte| !is_blank(byte)).map_or(start, |last| last + 1);
    &token[start..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(change: impl FnOnce(&mut Policy)) -> Policy {
        let mut made = Policy {
            tokens: vec![digest(&SHA256, b"0123456789abcdef").as_ref().try_into().unwrap()],
            has_tokens: true,
            is_open: false,
            checks_host: false,
            host: "127.0.0.1".into(),
            names: vec!["indexer.example".into()],
            is_loopback: true,
        };
        change(&mut made);
        made
    }

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
            .collect()
    }

    #[test]
    fn tokens_are_distinguished() {
        let strict = policy(|_| {});
        assert!(!strict.admits(&headers(&[])));
        assert!(strict.admits(&headers(&[("authorization", "bearer  0123456789abcdef")])));
        for wrong in [
            "Bearer 0123456789abcdeg",
            "Basic 0123456789abcdef",
            "0123456789abcdef",
            "Bearer",
        ] {
            assert!(!strict.admits(&headers(&[("authorization", wrong)])), "{wrong}");
        }
        let open = policy(|policy| (policy.has_tokens, policy.is_open) = (false, true));
        assert!(open.admits(&headers(&[("authorization", "whatever")])));
    }

    #[test]
    fn only_whole_digests_are_configured() {
        let digits = "09af".repeat(16);
        assert_eq!(from_hex(&digits).unwrap()[..2], [0x09, 0xaf]);
        for wrong in [
            "",
            "0",
            "09",
            &digits[..62],
            &digits[..63],
            &(digits.clone() + "00"),
            &digits.replace("09", "+9"),
        ] {
            assert_eq!(from_hex(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn only_plain_hosts_are_admitted() {
        let open = policy(|policy| (policy.has_tokens, policy.is_open, policy.checks_host) = (false, true, true));
        for own in ["localhost:1", "127.0.0.1", "[::1]:80", "a.localhost", "INDEXER.example.:9"] {
            assert!(open.admits(&headers(&[("host", own)])), "{own}");
        }
        for foreign in ["evil.example", "10.0.0.1", "127.0.0.1.evil.example"] {
            assert!(!open.admits(&headers(&[("host", foreign)])), "{foreign}");
        }
        assert!(!open.admits(&headers(&[("host", "localhost"), ("origin", "http://localhost")])));
    }
}
