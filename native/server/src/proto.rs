//! Messages and services of `src/kvevents/service/proto/kvevents/v1/query.proto`. `make contract` generates the code of these messages.
//!
//! Each message has the fields of a body of `/v1`. For the control plane, requests are converted to such bodies, and its answers are
//! converted back. So both planes answer calls as they answer HTTP requests.

use std::marker::PhantomData;

use bytes::Buf;
use prost::Message;
use serde::{Deserialize, Deserializer, Serializer};
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstEncoder;

pub(crate) use generated::*;

#[allow(dead_code)]
#[rustfmt::skip]
mod generated {
    include!("generated/kvevents.v1.rs");
}

/// Writes `Tie` in the form of `/v1`.
fn tie<S: Serializer>(tie: &i32, to: S) -> Result<S::Ok, S::Error> {
    match Tie::try_from(*tie) {
        Ok(Tie::Unspecified | Tie::Rotate) => to.serialize_str("rotate"),
        Ok(Tie::Random) => to.serialize_str("random"),
        Ok(Tie::First) => to.serialize_str("first"),
        Err(_) => to.serialize_i32(*tie), // `/v1` refuses this text
    }
}

/// Reads `State` in the form of `/v1`.
fn state<'de, D: Deserializer<'de>>(from: D) -> Result<i32, D::Error> {
    let name = String::deserialize(from)?;
    Ok(State::from_str_name(&format!("STATE_{name}")).unwrap_or_default() as i32)
}

/// Reads a list, or null as an empty list.
fn list<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Vec<T>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

/// Decodes messages directly from the received bytes, in prost's encoding. A message that cannot be decoded is an error of the client, not
/// of the server.
struct MessageCodec<E, D>(PhantomData<(E, D)>);

impl<E, D> Default for MessageCodec<E, D> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<E: Message + 'static, D: Message + Default + 'static> Codec for MessageCodec<E, D> {
    type Encode = E;
    type Decode = D;
    type Encoder = ProstEncoder<E>;
    type Decoder = Self;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        Self::default()
    }
}

impl<E: Message + 'static, D: Message + Default> Decoder for MessageCodec<E, D> {
    type Item = D;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<D>, Status> {
        // To read many small numbers from `DecodeBuf` takes several times as long as to read them from bytes.
        let message = from.copy_to_bytes(from.remaining());
        let wrong = |error| Status::invalid_argument(format!("cannot decode the message: {error}"));
        D::decode(message).map(Some).map_err(wrong)
    }
}

#[cfg(test)]
mod tests {
    const CONTRACT: &[u8] = include_bytes!("../../../src/kvevents/service/proto/kvevents/v1/query.proto");
    const GENERATED: &str = include_str!("generated/kvevents.v1.rs");

    #[test]
    fn generated_code_is_that_of_the_contract() {
        let digest = ring::digest::digest(&ring::digest::SHA256, CONTRACT);
        let digest: String = digest.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        let first = GENERATED.lines().next().unwrap_or_default();
        assert!(first.ends_with(&digest), "the contract has changed: run `make contract`");
    }
}
