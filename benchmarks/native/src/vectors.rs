//! Block keys as the other routers' own functions compute them: `tests/data/block-keys.json`.

use std::fmt::Write;

use dynamo_kv_router::protocols::{
    BlockExtraInfo, BlockHashOptions, BlockMmObjectInfo, compute_block_hash_for_seq, compute_seq_hash_for_block,
};
use kv_index::salt::namespaced_request_content_hashes;
use kv_index::{SequenceHash, chain_prefix_hash};

/// One prompt, and the namespace of its blocks.
struct Case {
    name: &'static str,
    /// Token `i` is `(first + i * step) % 2^17`.
    first: u32,
    step: u32,
    tokens: usize,
    block_size: u32,
    lora: Option<&'static str>,
    salt: Option<&'static str>,
    /// The hash of a multimodal item in block 0.
    item: Option<u64>,
    eagle: bool,
}

const PLAIN: Case = Case {
    name: "plain",
    first: 1,
    step: 1,
    tokens: 32,
    block_size: 16,
    lora: None,
    salt: None,
    item: None,
    eagle: false,
};

const CASES: [Case; 8] = [
    PLAIN,
    Case {
        name: "lora",
        lora: Some("adapter-A"),
        ..PLAIN
    },
    Case {
        name: "salt",
        salt: Some("tenant-salt"),
        ..PLAIN
    },
    Case {
        name: "lora and salt",
        lora: Some("adapter-A"),
        salt: Some("tenant-salt"),
        ..PLAIN
    },
    Case {
        name: "multimodal item",
        item: Some(0xDEAD_BEEF),
        ..PLAIN
    },
    Case {
        name: "eagle",
        tokens: 33,
        eagle: true,
        ..PLAIN
    },
    Case {
        name: "chain",
        first: 7,
        step: 40_503,
        tokens: 1_024,
        ..PLAIN
    },
    Case {
        name: "blocks of 64",
        first: 11,
        step: 40_503,
        tokens: 1_024,
        block_size: 64,
        ..PLAIN
    },
];

/// Local hashes, then rolling keys.
type Hashes = (Vec<u64>, Vec<u64>);

impl Case {
    fn prompt(&self) -> Vec<u32> {
        let token = |at: u32| self.first.wrapping_add(at.wrapping_mul(self.step)) % (1 << 17);
        (0..self.tokens as u32).map(token).collect()
    }

    /// The keys that dynamo-kv-router computes.
    fn dynamo(&self) -> Hashes {
        let object = |mm_hash| BlockMmObjectInfo {
            mm_hash,
            offsets: Vec::new(),
        };
        let items = self.item.map(|item| {
            vec![Some(BlockExtraInfo {
                mm_objects: vec![object(item)],
            })]
        });
        let options = BlockHashOptions {
            block_mm_infos: items.as_deref(),
            lora_name: self.lora,
            cache_namespace: self.salt,
            is_eagle: Some(self.eagle),
        };
        let local = compute_block_hash_for_seq(&self.prompt(), self.block_size, options);
        let rolling = compute_seq_hash_for_block(&local);
        (local.iter().map(|hash| hash.0).collect(), rolling)
    }

    /// The keys that kv-index computes; it supports neither multimodal items nor EAGLE's windows.
    fn kv_index(&self) -> Option<Hashes> {
        if self.item.is_some() || self.eagle {
            return None;
        }
        let local = namespaced_request_content_hashes(&self.prompt(), self.block_size as usize, self.lora, self.salt);
        let mut rolling: Vec<SequenceHash> = Vec::new();
        for &hash in &local {
            let key = match rolling.last() {
                Some(&before) => chain_prefix_hash(before, hash),
                None => SequenceHash(hash.0),
            };
            rolling.push(key);
        }
        let numbers = |hash: &SequenceHash| hash.0;
        Some((
            local.iter().map(|hash| hash.0).collect(),
            rolling.iter().map(numbers).collect(),
        ))
    }
}

/// The cases with the hashes of both crates.
pub fn json() -> String {
    let mut out = String::from("[");
    for (at, case) in CASES.iter().enumerate() {
        let comma = if at > 0 { "," } else { "" };
        let text = |value: Option<&str>| value.map_or("null".to_owned(), |value| format!("{value:?}"));
        let (lora, salt) = (text(case.lora), text(case.salt));
        let item = case.item.map_or("null".to_owned(), |item| item.to_string());
        let _ = write!(
            out,
            "{comma}\n {{\"case\": {:?}, \"first\": {}, \"step\": {}, \"tokens\": {}, \"block_size\": {},\n  \
             \"lora\": {lora}, \"salt\": {salt}, \"item\": {item}, \"eagle\": {}",
            case.name, case.first, case.step, case.tokens, case.block_size, case.eagle
        );
        let found = [
            ("dynamo-kv-router 1.6.1", Some(case.dynamo())),
            ("kv-index 2.0.0", case.kv_index()),
        ];
        for (name, (local, rolling)) in found.into_iter().filter_map(|(name, hashes)| Some((name, hashes?))) {
            let _ = write!(
                out,
                ",\n  {name:?}: {{\n   \"local\": {local:?},\n   \"rolling\": {rolling:?}}}"
            );
        }
        out.push('}');
    }
    out.push_str("\n]\n");
    out
}
