//! Bodies of answers about matches.

use std::collections::HashMap;
use std::fmt::Write;

use crate::fleet::Table;
use kvevents_routing::{Labels, Tiers, Trust, WorkerTrust};

/// The match of one worker: numbers of tokens, cumulative over tiers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// Position of the worker in the table.
    pub(crate) place: u32,
    pub(crate) gpu: u32,
    pub(crate) cpu: u32,
    pub(crate) disk: u32,
    /// Number of tokens that the worker holds, over all tiers.
    pub(crate) tokens: u32,
    /// Number of tokens that the worker certainly holds; it is lower than `tokens` if some blocks might be gone.
    pub(crate) certain: u32,
    /// Whether the worker certainly holds all tokens of the row, on each tier.
    pub(crate) is_certain: bool,
}

impl Row {
    /// Returns the row of a worker that holds no token.
    pub(crate) fn empty(place: u32) -> Self {
        Self {
            place,
            gpu: 0,
            cpu: 0,
            disk: 0,
            tokens: 0,
            certain: 0,
            is_certain: true,
        }
    }

    pub(crate) fn tiers(&self) -> Tiers {
        Tiers(Some([self.gpu, self.cpu, self.disk]))
    }
}

/// Groups rows by instance. The groups are in the order of their first rows.
fn by_instance(table: &Table, rows: &[Row]) -> Vec<Vec<Row>> {
    let mut places = HashMap::with_capacity(rows.len());
    let mut found: Vec<Vec<Row>> = Vec::with_capacity(rows.len());
    for row in rows {
        let place = *places.entry(table.worker(row.place).instance.as_str()).or_insert(found.len());
        if place == found.len() {
            found.push(Vec::new());
        }
        found[place].push(*row);
    }
    found
}

/// An answer in the format of Dynamo's standalone indexer, with the trust of each rank in addition.
pub(crate) fn dynamo(table: &Table, rows: &[Row]) -> Vec<u8> {
    let (mut scores, mut instances) = (String::new(), String::with_capacity(128 * rows.len()));
    for ranks in by_instance(table, rows) {
        let name = &table.worker(ranks[0].place).json_name;
        let on_device: Vec<Row> = ranks.iter().copied().filter(|row| row.gpu > 0).collect();
        if !on_device.is_empty() {
            separate(&mut scores);
            let _ = write!(scores, "{name}:{{");
            by_rank(table, &on_device, &mut scores, |row, out| write!(out, "{}", row.gpu));
            scores.push('}');
        }
        separate(&mut instances);
        let [longest, gpu, cpu, disk] = longest_by_level(&ranks);
        let _ = write!(instances, "{name}:{{\"longest_matched\":{longest},\"gpu\":{gpu},\"dp\":{{");
        by_rank(table, &ranks, &mut instances, |row, out| write!(out, "{}", row.gpu));
        let _ = write!(instances, "}},\"cpu\":{cpu},\"disk\":{disk},\"trust\":{{");
        trust(table, &ranks, &mut instances);
        instances.push_str("}}");
    }
    format!("{{\"scores\":{{{scores}}},\"frequencies\":[],\"instances\":{{{instances}}}}}").into_bytes()
}

/// An answer in the format of Mooncake Conductor, with the trust of each rank in addition.
pub(crate) fn mooncake(table: &Table, tenant: &str, rows: &[Row]) -> Vec<u8> {
    let mut instances = String::with_capacity(128 * rows.len());
    for ranks in by_instance(table, rows) {
        separate(&mut instances);
        let [longest, gpu, cpu, disk] = longest_by_level(&ranks);
        let name = &table.worker(ranks[0].place).json_name;
        let _ = write!(instances, "{name}:{{\"longest_matched\":{longest},\"GPU\":{gpu},\"DP\":{{");
        by_rank(table, &ranks, &mut instances, |row, out| write!(out, "{}", row.tokens));
        let _ = write!(instances, "}},\"CPU\":{cpu},\"DISK\":{disk},\"trust\":{{");
        trust(table, &ranks, &mut instances);
        instances.push_str("}}");
    }
    let tenant = serde_json::to_string(tenant).unwrap_or_default();
    format!("{{{tenant}:{{{instances}}}}}").into_bytes()
}

fn separate(out: &mut String) {
    if !out.is_empty() {
        out.push(',');
    }
}

/// Maximum number of tokens that one of several ranks holds: over all tiers, on the device, on the device and the host, and on the device,
/// the host and disks.
fn longest_by_level(ranks: &[Row]) -> [u32; 4] {
    let most = |of: fn(&Row) -> u32| ranks.iter().map(of).max().unwrap_or(0);
    [
        most(|row| row.tokens),
        most(|row| row.gpu),
        most(|row| row.cpu),
        most(|row| row.disk),
    ]
}

fn by_rank(table: &Table, ranks: &[Row], out: &mut String, value: impl Fn(&Row, &mut String) -> std::fmt::Result) {
    for (number, row) in ranks.iter().enumerate() {
        let separator = if number > 0 { "," } else { "" };
        let _ = write!(out, "{separator}\"{}\":", table.worker(row.place).rank);
        let _ = value(row, out);
    }
}

fn trust(table: &Table, ranks: &[Row], out: &mut String) {
    by_rank(table, ranks, out, |row, out| {
        write!(out, "\"{}\"", table.worker(row.place).trust_in(row.is_certain).state.name())
    });
}

/// The match of one worker, and its trust.
#[derive(serde::Serialize)]
pub(crate) struct TrustedMatch<'a> {
    instance: &'a str,
    rank: i64,
    url: Option<&'a str>,
    labels: &'a Labels,
    tokens: u32,
    certain: u32,
    tiers: Tiers,
    trust: &'a Trust,
}

/// The matches of several workers.
pub(crate) fn trusted_matches<'a>(table: &'a Table, rows: &[Row]) -> Vec<TrustedMatch<'a>> {
    let held = |row: &Row| {
        let worker = table.worker(row.place);
        TrustedMatch {
            instance: &worker.instance,
            rank: worker.rank,
            url: worker.url.as_deref(),
            labels: &worker.labels,
            tokens: row.tokens,
            certain: row.certain,
            tiers: row.tiers(),
            trust: worker.trust_in(row.is_certain),
        }
    };
    rows.iter().map(held).collect()
}

/// The answer of `/v1/match`.
#[derive(serde::Serialize)]
pub(crate) struct MatchAnswer<'a> {
    pub(crate) prompt_tokens: usize,
    pub(crate) workers: Vec<TrustedMatch<'a>>,
}

/// The answer for one prompt of `/v1/match_many`.
#[derive(serde::Serialize)]
pub(crate) struct PromptMatch<'a> {
    pub(crate) prompt_tokens: usize,
    pub(crate) holders: Vec<TrustedMatch<'a>>,
}

/// The answer of `/v1/match_many`.
#[derive(serde::Serialize)]
pub(crate) struct MatchManyAnswer<'a> {
    pub(crate) matches: Vec<PromptMatch<'a>>,
    pub(crate) workers: Vec<WorkerTrust<'a>>,
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::fleet::tests::{changed, index};

    /// Name and rank of a worker, and the numbers of tokens that it holds: cumulative for the GPU, the host and disks, and over all tiers.
    type TrustedMatch = (String, i64, [u32; 4]);

    fn table(rows: &[TrustedMatch]) -> Table {
        let worker = |(name, rank, _): &TrustedMatch| {
            json!({"source": format!("{name}-{rank}"), "rank": rank, "instance": name, "label": "m", "is_hidden": false, "distance": 0,
                "block_size": null, "scope": {"model": "m", "tenant": "t", "group": "g", "lora": null, "salt": null},
                "trust": {"state": "EXACT", "reason": "", "reason_codes": [], "attested": false}})
        };
        let workers: serde_json::Map<String, Value> = (0..)
            .zip(rows)
            .map(|(number, row)| (i32::to_string(&number), worker(row)))
            .collect();
        changed(&Table::new(index()), &[], &workers.into())
    }

    fn by_rank(own: &[&TrustedMatch], value: impl Fn(&TrustedMatch) -> Value) -> Value {
        own.iter().map(|row| (row.1.to_string(), value(row))).collect()
    }

    proptest! {
        /// Both formats are valid JSON for any names, and group the ranks of an instance. Scores contain only ranks with blocks on the GPU.
        #[test]
        fn both_formats_say_the_same(
            given in prop::collection::vec((r#"[a7%d"\\é ]{1,4}"#, 0..4_i64, prop::array::uniform4(0..9_u32)), 0..6),
        ) {
            let mut seen = HashSet::new();
            let given: Vec<TrustedMatch> = given.into_iter().filter(|row| seen.insert((row.0.clone(), row.1))).collect();
            let table = table(&given);
            let rows: Vec<Row> = (0..)
                .zip(&given)
                .map(|(place, (_, _, [gpu, cpu, disk, tokens]))| Row {
                    gpu: *gpu, cpu: *cpu, disk: *disk, tokens: *tokens, certain: *tokens, ..Row::empty(place)
                })
                .collect();
            let one: Value = serde_json::from_slice(&dynamo(&table, &rows)).unwrap();
            let other: Value = serde_json::from_slice(&mooncake(&table, "t\"", &rows)).unwrap();
            let names: HashSet<&str> = given.iter().map(|row| row.0.as_str()).collect();
            prop_assert_eq!(one["instances"].as_object().unwrap().len(), names.len());
            prop_assert_eq!(other["t\""].as_object().unwrap().len(), names.len());
            for name in names {
                let own: Vec<&TrustedMatch> = given.iter().filter(|row| row.0 == name).collect();
                let most = |at: usize| own.iter().map(|row| row.2[at]).max();
                let trust = by_rank(&own, |_| json!("EXACT"));
                let dp = by_rank(&own, |row| json!(row.2[0]));
                let expected = json!({"longest_matched": most(3), "gpu": most(0), "dp": dp, "cpu": most(1), "disk": most(2), "trust": trust});
                prop_assert_eq!(&one["instances"][name], &expected);
                let dp = by_rank(&own, |row| json!(row.2[3]));
                let expected = json!({"longest_matched": most(3), "GPU": most(0), "DP": dp, "CPU": most(1), "DISK": most(2), "trust": trust});
                prop_assert_eq!(&other["t\""][name], &expected);
                let scored: Vec<&TrustedMatch> = own.into_iter().filter(|row| row.2[0] > 0).collect();
                let scores = if scored.is_empty() { Value::Null } else { by_rank(&scored, |row| json!(row.2[0])) };
                prop_assert_eq!(&one["scores"][name], &scores);
            }
        }
    }
}
