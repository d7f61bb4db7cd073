//! The routing table: the control plane's description of the fleet, as one immutable value.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kvevents_index::keys;
use kvevents_index::prefix_index::PrefixIndex;
use kvevents_index::store::members::Worker as Stream;
use kvevents_index::{Items, Scope as IndexScope};
use kvevents_routing::{Labels, State, Trust};
use parking_lot::RwLock;
use serde::Deserialize;

use crate::problems::{Declined, Problem};

/// Maximum number of scopes whose candidates are cached. Without a limit, clients could name any number of LoRAs and salts.
const MAX_REMEMBERED: usize = 256;
/// Maximum number of characters of a name that `/v1` admits.
const MAX_NAME: usize = 512;

/// A LoRA by its name, or by its number for engines whose events have no name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(untagged)]
pub enum Lora {
    /// Number of the LoRA.
    Id(i64),
    /// Name of the LoRA.
    Name(String),
}

/// The scope of prompts: equal tokens of two scopes never match.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
pub struct Scope {
    /// Name of the model.
    pub model: String,
    /// Tenant.
    pub tenant: String,
    /// Routing group.
    pub group: String,
    /// LoRA of the prompt; for a worker, the LoRA that its events do not contain.
    pub lora: Option<Lora>,
    /// Cache salt of the prompt; for a worker, the salt that its events do not contain.
    pub salt: Option<String>,
}

impl Scope {
    fn fleet(&self) -> Fleet {
        (self.model.clone(), self.tenant.clone(), self.group.clone())
    }

    /// Whether each name has a length that `/v1` admits. `/query` admits longer names, but scopes with these are not cached.
    fn has_short_names(&self) -> bool {
        let lora = match &self.lora {
            Some(Lora::Name(name)) => name,
            Some(Lora::Id(_)) | None => "",
        };
        let salt = self.salt.as_deref().unwrap_or_default();
        [&self.model, &self.tenant, &self.group, lora, salt].into_iter().all(is_short)
    }

    fn is_same_fleet(&self, other: &Self) -> bool {
        self.model == other.model && self.tenant == other.tenant && self.group == other.group
    }

    /// Whether a worker of this scope can hold blocks of a prompt.
    pub(crate) fn admits(&self, prompt: &Self) -> bool {
        self.is_same_fleet(prompt)
            && (self.lora.is_none() || self.lora == prompt.lora)
            && (self.salt.is_none() || self.salt == prompt.salt)
    }
}

/// Model, tenant and routing group.
type Fleet = (String, String, String);

/// One rank of an engine.
#[derive(Debug, Deserialize)]
pub(crate) struct Worker {
    /// Source name of the worker in the index.
    pub(crate) source: String,
    pub(crate) rank: i64,
    pub(crate) instance: String,
    /// Where the worker takes requests, if that is known.
    #[serde(default)]
    pub(crate) url: Option<String>,
    #[serde(default)]
    pub(crate) labels: Labels,
    pub(crate) scope: Scope,
    /// The model with which the index labels the stream.
    label: String,
    pub(crate) trust: Trust,
    /// Whether the worker is left out of answers in formats whose clients might ignore trust.
    pub(crate) is_hidden: bool,
    pub(crate) distance: u8,
    /// Registered number of tokens per block.
    pub(crate) block_size: Option<u64>,
    /// Tiers from which the engine announces no removals.
    #[serde(default)]
    pub(crate) stores_only: Vec<String>,
    /// The trust in an answer in which some blocks of the worker might be gone.
    #[serde(skip)]
    pub(crate) trust_if_uncertain: Option<Trust>,
    /// The instance's name as JSON.
    #[serde(skip)]
    pub(crate) json_name: String,
}

impl Worker {
    /// Returns the worker with the fields that are derived from others.
    fn completed(self) -> Self {
        Self {
            trust_if_uncertain: Some(self.trust.if_uncertain()),
            json_name: serde_json::Value::from(self.instance.as_str()).to_string(),
            ..self
        }
    }

    /// Returns the state by which the worker's tokens are weighted. A stream that waits only for a live batch to confirm replay counts as
    /// exact: nothing contradicts it, and the stream of every idle engine is in this state.
    pub(crate) fn weighed_state(&self) -> State {
        let is_unproven = self.trust.reason_codes.iter().eq(["replay-unproven"]);
        if is_unproven && self.trust.state == State::Degraded {
            State::Exact
        } else {
            self.trust.state
        }
    }

    /// Returns the trust in an answer about the worker. `is_certain` is whether all blocks of the answer certainly exist.
    pub(crate) fn trust_in(&self, is_certain: bool) -> &Trust {
        match &self.trust_if_uncertain {
            Some(trust) if !is_certain => trust,
            _ => &self.trust,
        }
    }
}

#[derive(Deserialize)]
struct TableMessage {
    has_failed: bool,
    /// The numbers of all workers, in the order of the table.
    order: Vec<u64>,
    /// The workers that are new or have changed since the previous table.
    workers: HashMap<u64, Worker>,
    /// Tokens per block, the smallest first, by fleet.
    block_sizes: Vec<(String, String, String, Vec<u32>)>,
    /// Models that have a LoRA, by the LoRA's name, tenant and group.
    bases: Vec<(String, String, String, Vec<String>)>,
}

/// The namespaces in which a prompt of one scope is looked up, and the workers that can hold it.
#[derive(Debug)]
pub(crate) struct Candidates {
    /// The scope, in which the model is the base model.
    pub(crate) scope: Scope,
    /// Scopes in which the index looks up the prompt.
    pub(crate) within: Vec<IndexScope>,
    /// Positions of workers in the table.
    pub(crate) workers: Vec<u32>,
    /// Positions of the workers that are not EXACT.
    pub(crate) inexact: Vec<u32>,
    pub(crate) block_sizes: Vec<u32>,
}

/// A description of the fleet.
#[derive(Debug)]
pub struct Table {
    pub(crate) index: Arc<PrefixIndex>,
    has_failed: bool,
    pub(crate) workers: Vec<Arc<Worker>>,
    /// Workers by the control plane's numbers.
    rows: HashMap<u64, Arc<Worker>>,
    /// For each position, a number that all workers of one instance name share.
    instance_numbers: Vec<u32>,
    places: HashMap<Stream, u32>,
    labels: HashMap<Scope, String>,
    fleets: HashSet<Fleet>,
    block_sizes: HashMap<Fleet, Vec<u32>>,
    bases: HashMap<Fleet, Vec<String>>,
    remembered: RwLock<HashMap<Scope, Arc<Candidates>>>,
    /// Number of replacements of a table so far in which workers have left.
    departures: u64,
}

impl Table {
    /// Creates a table from the previous one, `before`, and the control plane's JSON, which has the changes. `index` answers its lookups.
    ///
    /// # Errors If the JSON has another shape, or lacks a worker that the previous table lacks too.
    pub fn read(json: &[u8], index: Arc<PrefixIndex>, before: Option<&Self>) -> Result<Self, String> {
        let message: TableMessage = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        let mut changed = message.workers;
        let mut table = Self {
            index,
            has_failed: message.has_failed,
            workers: Vec::with_capacity(message.order.len()),
            rows: HashMap::with_capacity(message.order.len()),
            instance_numbers: Vec::with_capacity(message.order.len()),
            places: HashMap::with_capacity(message.order.len()),
            labels: HashMap::new(),
            fleets: HashSet::new(),
            block_sizes: message.block_sizes.into_iter().map(keyed_by_fleet).collect(),
            bases: message.bases.into_iter().map(keyed_by_fleet).collect(),
            remembered: RwLock::default(),
            departures: 0,
        };
        let mut instances = HashMap::new();
        for number in message.order {
            let worker = match (changed.remove(&number), before.and_then(|table| table.rows.get(&number))) {
                (Some(worker), _) => Arc::new(worker.completed()),
                (None, Some(known)) => known.clone(),
                (None, None) => return Err(format!("worker {number} is not described")),
            };
            let next = instances.len() as u32;
            table
                .instance_numbers
                .push(*instances.entry(worker.instance.clone()).or_insert(next));
            table.add(number, worker);
        }
        if let Some(before) = before {
            let has_left = before.places.keys().any(|stream| !table.places.contains_key(stream));
            table.departures = before.departures + u64::from(has_left);
        }
        Ok(table)
    }

    fn add(&mut self, number: u64, worker: Arc<Worker>) {
        let stream = Stream {
            source: worker.source.clone(),
            rank: worker.rank,
        };
        self.places.insert(stream, self.workers.len() as u32);
        if !self.labels.contains_key(&worker.scope) {
            self.labels.insert(worker.scope.clone(), worker.label.clone());
            self.fleets.insert(worker.scope.fleet());
        }
        self.rows.insert(number, worker.clone());
        self.workers.push(worker);
    }

    /// Whether all workers of this table are also in the table `later`.
    pub(crate) fn is_part_of(&self, later: &Self) -> bool {
        self.departures == later.departures
    }

    /// The position of a stream's worker.
    pub(crate) fn place(&self, stream: &Stream) -> Option<u32> {
        self.places.get(stream).copied()
    }

    /// Returns where prompts of a scope are looked up.
    pub(crate) fn candidates(&self, scope: &Scope) -> Result<Arc<Candidates>, Declined> {
        if self.has_failed || self.index.is_damaged() {
            return Err(Declined::Unread);
        }
        if let Some(found) = self.remembered.read().get(scope) {
            return Ok(found.clone());
        }
        let found = self.find(self.resolve_model(scope)?);
        let found = Arc::new(found.ok_or(Declined::Unread)?);
        if !scope.has_short_names() {
            return Ok(found);
        }
        let mut remembered = self.remembered.write();
        if remembered.len() >= MAX_REMEMBERED {
            remembered.clear();
        }
        remembered.insert(scope.clone(), found.clone());
        Ok(found)
    }

    /// Returns the scope with base model and LoRA if its model is the name of a LoRA. If a model has the same name, it takes precedence.
    fn resolve_model(&self, scope: &Scope) -> Result<Scope, Declined> {
        let fleet = scope.fleet();
        let is_adapter = match &scope.lora {
            None => true,
            Some(Lora::Name(name)) => *name == scope.model,
            Some(Lora::Id(_)) => false,
        };
        match self.bases.get(&fleet).map_or(&[][..], Vec::as_slice) {
            [] => Ok(scope.clone()),
            _ if !is_adapter || self.fleets.contains(&fleet) => Ok(scope.clone()),
            [base] => Ok(Scope {
                model: base.clone(),
                lora: Some(Lora::Name(scope.model.clone())),
                ..scope.clone()
            }),
            bases => Err(Declined::Refused(Problem::ambiguous_adapter(&scope.model, bases))),
        }
    }

    fn find(&self, scope: Scope) -> Option<Candidates> {
        if !self.fleets.contains(&scope.fleet()) {
            return None;
        }
        let (lora, salt) = (lora_seed(scope.lora.as_ref()), salt_seed(scope.salt.as_deref()));
        let mut within = Vec::new();
        // A worker's scope has no LoRA or salt that the worker's events contain, since block keys contain these.
        for own_lora in distinct(scope.lora.clone()) {
            for own_salt in distinct(scope.salt.clone()) {
                let view = Scope {
                    lora: own_lora.clone(),
                    salt: own_salt.clone(),
                    ..scope.clone()
                };
                if let Some(label) = self.labels.get(&view) {
                    within.push(IndexScope {
                        model: Some(label.clone()),
                        lora: if own_lora.is_none() { lora } else { 0 },
                        salt: if own_salt.is_none() { salt } else { 0 },
                        items: Items::default(),
                    });
                }
            }
        }
        let places = 0..self.workers.len() as u32;
        let workers: Vec<u32> = places.filter(|&place| self.worker(place).scope.admits(&scope)).collect();
        let is_inexact = |place: &u32| self.worker(*place).trust.state != State::Exact;
        Some(Candidates {
            within,
            inexact: workers.iter().copied().filter(is_inexact).collect(),
            workers,
            block_sizes: self.block_sizes.get(&scope.fleet()).cloned().unwrap_or_default(),
            scope,
        })
    }

    /// The number that all workers with the instance name of this worker share.
    pub(crate) fn instance_number(&self, place: u32) -> u32 {
        self.instance_numbers[place as usize]
    }

    /// The worker at a position.
    pub(crate) fn worker(&self, place: u32) -> &Worker {
        &self.workers[place as usize]
    }

    /// Adds a speculative entry: for some seconds the worker counts as holding the prompt.
    pub(crate) fn expect(&self, place: u32, prompt: &Scope, tokens: &[u32], seconds: f64) {
        let worker = self.worker(place);
        let stream = Stream {
            source: worker.source.clone(),
            rank: worker.rank,
        };
        let own = &worker.scope;
        let scope = IndexScope {
            model: Some(worker.label.clone()),
            lora: if own.lora.is_none() {
                lora_seed(prompt.lora.as_ref())
            } else {
                0
            },
            salt: if own.salt.is_none() {
                salt_seed(prompt.salt.as_deref())
            } else {
                0
            },
            items: Items::default(),
        };
        let now = monotonic();
        self.index.speculate(&stream, tokens, &scope, now, now + seconds);
    }
}

/// Whether a name has at most `MAX_NAME` characters.
pub(crate) fn is_short(name: &str) -> bool {
    name.len() <= MAX_NAME || name.chars().count() <= MAX_NAME
}

fn keyed_by_fleet<T>((model, tenant, group, of): (String, String, String, T)) -> (Fleet, T) {
    ((model, tenant, group), of)
}

/// Yields None and then, if there is one, the value.
fn distinct<T>(value: Option<T>) -> impl Iterator<Item = Option<T>> {
    let given = value.map(Some);
    std::iter::once(None).chain(given)
}

fn lora_seed(lora: Option<&Lora>) -> u64 {
    match lora {
        None => 0,
        Some(Lora::Name(name)) => keys::lora_name(name.as_bytes()),
        Some(Lora::Id(id)) => keys::lora_id(*id),
    }
}

fn salt_seed(salt: Option<&str>) -> u64 {
    salt.map_or(0, |salt| keys::salt(salt.as_bytes()))
}

/// Time in seconds of the clock by which speculative entries expire: Python's `time.monotonic`.
pub(crate) fn monotonic() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a valid `timespec`, which the call fills.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use kvevents_index::limits::Limits;
    use kvevents_index::wire::scan::{Limits as ScanLimits, Schema};

    /// A worker as the control plane writes it.
    pub(crate) fn row(instance: &str, state: &str) -> serde_json::Value {
        serde_json::json!({
            "source": instance, "rank": 0, "instance": instance, "label": "m", "is_hidden": false, "distance": 0, "block_size": null,
            "scope": {"model": "m", "tenant": "default", "group": "default", "lora": null, "salt": null},
            "trust": {"state": state, "reason": "", "reason_codes": [], "attested": false}})
    }

    pub(crate) fn index() -> Arc<PrefixIndex> {
        Arc::new(PrefixIndex::new(
            Schema::new(ScanLimits::default()).unwrap(),
            Limits::default(),
        ))
    }

    pub(crate) fn changes(order: &[u64], workers: &serde_json::Value) -> Vec<u8> {
        let changes = serde_json::json!({
            "has_failed": false, "order": order, "workers": workers, "block_sizes": [["m", "default", "default", [16]]], "bases": []});
        changes.to_string().into_bytes()
    }

    fn read(order: &[u64], workers: serde_json::Value, before: Option<&Table>) -> Result<Table, String> {
        Table::read(&changes(order, &workers), index(), before)
    }

    fn states(table: &Table) -> Vec<(&str, State)> {
        table
            .workers
            .iter()
            .map(|worker| (worker.instance.as_str(), worker.trust.state))
            .collect()
    }

    #[test]
    fn what_is_not_described_again_is_as_before() {
        let first = read(
            &[7, 3],
            serde_json::json!({"3": row("b", "EXACT"), "7": row("a", "STALE")}),
            None,
        )
        .unwrap();
        assert_eq!(states(&first), [("a", State::Stale), ("b", State::Exact)]);
        let second = read(
            &[3, 9, 7],
            serde_json::json!({"9": row("c", "EXACT"), "3": row("b", "STALE")}),
            Some(&first),
        )
        .unwrap();
        assert_eq!(
            states(&second),
            [("b", State::Stale), ("c", State::Exact), ("a", State::Stale)]
        );
        assert!(first.is_part_of(&second));
        let third = read(&[9], serde_json::json!({}), Some(&second)).unwrap();
        assert!(!first.is_part_of(&third) && !second.is_part_of(&third));
        assert_eq!(states(&third), [("c", State::Exact)]);
        assert_eq!(
            third.place(&Stream {
                source: "c".to_owned(),
                rank: 0
            }),
            Some(0)
        );
        assert_eq!(
            third.place(&Stream {
                source: "a".to_owned(),
                rank: 0
            }),
            None
        );
        assert!(
            read(&[7], serde_json::json!({}), Some(&third)).is_err(),
            "a worker that has left is described again"
        );
    }

    #[test]
    fn only_scopes_with_short_names_are_remembered() {
        let table = read(&[1], serde_json::json!({"1": row("i", "EXACT")}), None).unwrap();
        let plain = table.workers[0].scope.clone();
        let mut remembered = 0;
        for (length, is_remembered) in [(1, true), (512, true), (513, false), (2_000_000, false)] {
            let name = "ä".repeat(length);
            let (lora, salt) = (Some(Lora::Name(name.clone())), Some(name));
            for scope in [Scope { lora, ..plain.clone() }, Scope { salt, ..plain.clone() }] {
                assert_eq!(table.candidates(&scope).unwrap().workers, [0]);
                remembered += usize::from(is_remembered);
                assert_eq!(table.remembered.read().len(), remembered, "{length} characters");
            }
        }
    }
}
