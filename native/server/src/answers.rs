//! Bodies of answers.

use std::collections::HashMap;
use std::fmt::Write;

use crate::fleet::Table;
use kvevents_routing::{Tiers, Trust, WorkerTrust};

/// The match of one worker in tokens, cumulative over tiers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// Its place in the table.
    pub(crate) place: u32,
    pub(crate) gpu: u32,
    pub(crate) cpu: u32,
    pub(crate) disk: u32,
    /// Over all tiers.
    pub(crate) tokens: u32,
    /// How many of these it certainly holds: fewer if some of its blocks might be gone.
    pub(crate) certain: u32,
    /// Whether it certainly holds all of this, on each tier.
    pub(crate) is_certain: bool,
}

impl Row {
    /// The row of a worker that holds nothing.
    pub(crate) fn nothing(place: u32) -> Self {
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

/// Groups rows of the same instance, in the order of the first row of each.
fn by_instance(table: &Table, rows: &[Row]) -> Vec<Vec<Row>> {
    let mut places = HashMap::with_capacity(rows.len());
    let mut found: Vec<Vec<Row>> = Vec::with_capacity(rows.len());
    for row in rows {
        let place = *places.entry(table.instance_number(row.place)).or_insert(found.len());
        if place == found.len() {
            found.push(Vec::new());
        }
        found[place].push(*row);
    }
    found
}

/// An answer in the format of Dynamo's standalone indexer, with the trust of each rank.
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

/// An answer in the format of Mooncake Conductor, with the trust of each rank.
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

/// On any tier, on the device, and down to host and disk.
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

/// The match of one worker, with its trust.
#[derive(serde::Serialize)]
pub(crate) struct Held<'a> {
    instance: &'a str,
    rank: i64,
    tokens: u32,
    certain: u32,
    tiers: Tiers,
    trust: &'a Trust,
}

/// The matches of several workers.
pub(crate) fn held<'a>(table: &'a Table, rows: &[Row]) -> Vec<Held<'a>> {
    let held = |row: &Row| {
        let worker = table.worker(row.place);
        Held {
            instance: &worker.instance,
            rank: worker.rank,
            tokens: row.tokens,
            certain: row.certain,
            tiers: row.tiers(),
            trust: worker.trust_in(row.is_certain),
        }
    };
    rows.iter().map(held).collect()
}

/// `/v1/match`.
#[derive(serde::Serialize)]
pub(crate) struct MatchAnswer<'a> {
    pub(crate) prompt_tokens: usize,
    pub(crate) workers: Vec<Held<'a>>,
}

/// One prompt of `/v1/match_many`.
#[derive(serde::Serialize)]
pub(crate) struct PromptMatch<'a> {
    pub(crate) prompt_tokens: usize,
    pub(crate) holders: Vec<Held<'a>>,
}

/// `/v1/match_many`.
#[derive(serde::Serialize)]
pub(crate) struct MatchManyAnswer<'a> {
    pub(crate) matches: Vec<PromptMatch<'a>>,
    pub(crate) workers: Vec<WorkerTrust<'a>>,
}
