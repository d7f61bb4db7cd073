//! Writes the messages and services of the gRPC contract as Rust, with the attributes by which serde reads and writes their JSON.

use std::path::Path;

use sha2::{Digest, Sha256};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const FOLDER: &str = "src/kvevents/service/proto";
const CONTRACT: &str = "kvevents/v1/query.proto";
const GENERATED: &str = "native/server/src/generated";

const REQUESTS: [&str; 9] = [
    "MatchRequest",
    "MatchManyRequest",
    "SelectRequest",
    "Media",
    "Prompt",
    "Candidate",
    "Reserve",
    "UpdateReservationRequest",
    "FinishReservationRequest",
];
const ANSWERS: [&str; 9] = [
    "MatchResponse",
    "MatchManyResponse",
    "SelectResponse",
    "PromptMatch",
    "Held",
    "Considered",
    "Trust",
    "WorkerTrust",
    "Reservation",
];
/// Fields that the JSON of a request lacks while they are empty.
const OPTIONAL: [(&str, &[&str]); 4] = [
    (
        "String::is_empty",
        &[
            "model",
            "tenant",
            "group",
            "lora",
            "salt",
            "SelectRequest.session",
            "Reserve.id",
        ],
    ),
    (
        "Option::is_none",
        &[
            "lora_id",
            "Candidate.load",
            "SelectRequest.load_weight",
            "SelectRequest.wait_weight",
            "SelectRequest.reserve",
            "Reserve.seconds",
            "UpdateReservationRequest.output_tokens",
            "UpdateReservationRequest.seconds",
        ],
    ),
    ("Vec::is_empty", &["SelectRequest.candidates"]),
    (
        "::std::collections::HashMap::is_empty",
        &["SelectRequest.tiers", "SelectRequest.trust", "SelectRequest.labels"],
    ),
];
/// Fields whose JSON is not that of their type, with the functions of `native/server/src/proto.rs`.
const CONVERTED: [(&str, &str); 6] = [
    ("SelectRequest.tie", "serialize_with = \"super::tie\""),
    // Their place is the path.
    ("UpdateReservationRequest.id", "skip_serializing"),
    ("FinishReservationRequest.id", "skip_serializing"),
    ("Trust.state", "deserialize_with = \"super::state\""),
    ("SelectResponse.considered", "deserialize_with = \"super::list\""),
    ("SelectResponse.unreachable", "deserialize_with = \"super::list\""),
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = Path::new(ROOT).join(GENERATED);
    std::fs::create_dir_all(&folder)?;
    let mut builder = tonic_prost_build::configure()
        .out_dir(&folder)
        .build_client(false)
        .build_transport(false)
        .codec_path("super::super::MessageCodec");
    for name in REQUESTS {
        builder = builder.message_attribute(name, "#[derive(serde::Serialize)]");
    }
    for name in ANSWERS {
        builder = builder.message_attribute(name, "#[derive(serde::Deserialize)]");
    }
    for (is_empty, fields) in OPTIONAL {
        for field in fields {
            builder = builder.field_attribute(field, format!("#[serde(skip_serializing_if = \"{is_empty}\")]"));
        }
    }
    for (field, conversion) in CONVERTED {
        builder = builder.field_attribute(field, format!("#[serde({conversion})]"));
    }
    builder
        .type_attribute("Media.id", "#[derive(serde::Serialize)]\n#[serde(untagged)]")
        .message_attribute("Prompt", "#[serde(transparent)]")
        .compile_fds(protox::compile([CONTRACT], [Path::new(ROOT).join(FOLDER)])?)?;
    let contract = std::fs::read(Path::new(ROOT).join(FOLDER).join(CONTRACT))?;
    let path = folder.join("kvevents.v1.rs");
    let code = std::fs::read_to_string(&path)?;
    std::fs::write(
        path,
        format!("// SHA-256 of {CONTRACT}: {:x}\n{code}", Sha256::digest(contract)),
    )?;
    Ok(())
}
