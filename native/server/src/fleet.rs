//! The routing table, which describes the fleet to the data plane. The control plane writes each change of the fleet to the table.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use kvevents_index::keys;
use kvevents_index::prefix_index::PrefixIndex;
use kvevents_index::store::members::Worker as Stream;
use kvevents_index::{Items, Scope as IndexScope};
use kvevents_routing::{Labels, State, Trust};
use parking_lot::RwLock;
use serde::Deserialize;

use crate::problems::{Declined, Problem};

/// Maximum number of scopes whose candidates are cached. Without a limit, clients could fill the memory with names of LoRAs and salts.
const MAX_REMEMBERED: usize = 256;
/// Maximum number of characters of a name that `/v1` admits.
const MAX_NAME: usize = 512;

/// A LoRA, by its name; or by its numeric ID, if the engine's events do not contain the name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(untagged)]
pub enum Lora {
    /// Numeric ID of the LoRA.
    Id(i64),
    /// Name of the LoRA.
    Name(String),
}

/// The scope of a prompt or a worker: equal tokens of two scopes never match.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
pub struct Scope {
    /// Name of the model.
    pub model: String,
    /// Tenant.
    pub tenant: String,
    /// Routing group.
    pub group: String,
    /// LoRA of the prompt. For a worker whose events do not name LoRAs, the LoRA of all of its blocks.
    pub lora: Option<Lora>,
    /// Cache salt of the prompt. For a worker whose events do not contain salts, the salt of all of its blocks.
    pub salt: Option<String>,
}

impl Scope {
    /// Whether each name has a length that `/v1` admits. `/query` also admits longer names, but scopes with such names are not cached.
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

/// One rank of an engine.
#[derive(Debug, Deserialize)]
pub(crate) struct Worker {
    /// Source of the worker in the index.
    pub(crate) source: String,
    pub(crate) rank: i64,
    pub(crate) instance: String,
    /// The URL at which the worker takes requests; None if it is not known.
    #[serde(default)]
    pub(crate) url: Option<String>,
    #[serde(default)]
    pub(crate) labels: Labels,
    pub(crate) scope: Scope,
    /// The label of the worker's stream in the index, which is its model.
    label: String,
    pub(crate) trust: Trust,
    /// Whether answers in the formats of other services omit the worker, since their clients might ignore its trust.
    pub(crate) is_hidden: bool,
    pub(crate) distance: u8,
    /// Why the worker takes no requests even if its stream is connected: `drained` or `not ready`; empty if only the stream decides.
    #[serde(default)]
    pub(crate) obstacle: String,
    /// Block size in tokens, as registered.
    pub(crate) block_size: Option<u64>,
    /// Block sizes in the worker's events; before the first event, the registered size.
    #[serde(default)]
    block_sizes: Vec<u32>,
    /// Tiers from which the engine announces no removals.
    #[serde(default)]
    pub(crate) stores_only: Vec<String>,
    /// The trust in an answer with blocks of the worker that might be gone.
    #[serde(skip)]
    pub(crate) trust_if_uncertain: Option<Trust>,
    /// The name of the instance as JSON.
    #[serde(skip)]
    pub(crate) json_name: String,
}

impl Worker {
    fn stream(&self) -> Stream {
        Stream {
            source: self.source.clone(),
            rank: self.rank,
        }
    }

    /// Computes the fields that follow from other fields, and returns the worker.
    fn completed(self) -> Self {
        Self {
            trust_if_uncertain: Some(self.trust.if_uncertain()),
            json_name: serde_json::Value::from(self.instance.as_str()).to_string(),
            ..self
        }
    }

    /// Returns the state whose weight the worker's tokens have in a score. A stream that only waits for a live batch to confirm its replay
    /// counts as EXACT: nothing contradicts it, and the streams of all idle engines are in this state.
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

/// A change of the table.
#[derive(Deserialize)]
pub(crate) struct Change {
    has_failed: bool,
    /// The positions of the workers that have left.
    removed: Vec<u32>,
    /// The workers that are new or have changed, each with its position. A free position can be assigned again.
    workers: HashMap<u32, Worker>,
    /// Scopes with a LoRA that requests may name as their model; None without a change.
    adapters: Option<Vec<Scope>>,
}

/// The workers that can hold a prompt of one scope, and the namespaces in which the prompt is looked up.
#[derive(Debug)]
pub(crate) struct Candidates {
    /// The scope; its model is the base model.
    pub(crate) scope: Scope,
    /// Scopes in which the index looks up the prompt.
    pub(crate) within: Vec<IndexScope>,
    /// Positions of the workers in the table.
    pub(crate) workers: Vec<u32>,
    /// Positions of those workers that are not EXACT.
    pub(crate) inexact: Vec<u32>,
    pub(crate) block_sizes: Vec<u32>,
}

/// A description of the fleet. A query reads one table. Later changes create other tables.
#[derive(Clone, Debug)]
pub struct Table {
    pub(crate) index: Arc<PrefixIndex>,
    has_failed: bool,
    /// The workers by position; None at a free position.
    workers: Vec<Option<Arc<Worker>>>,
    places: HashMap<Stream, u32>,
    adapters: Vec<Scope>,
    remembered: Arc<RwLock<HashMap<Scope, Arc<Candidates>>>>,
    /// Number of workers that have left.
    departures: u64,
}

impl Table {
    /// Creates a table without workers. Queries are answered from `index`.
    pub(crate) fn new(index: Arc<PrefixIndex>) -> Self {
        Self {
            index,
            has_failed: false,
            workers: Vec::new(),
            places: HashMap::new(),
            adapters: Vec::new(),
            remembered: Arc::default(),
            departures: 0,
        }
    }

    /// Applies a change of the fleet. After it, queries are answered from `index`.
    pub(crate) fn apply(&mut self, change: Change, index: Arc<PrefixIndex>) {
        (self.index, self.has_failed) = (index, change.has_failed);
        self.adapters = change.adapters.unwrap_or_else(|| std::mem::take(&mut self.adapters));
        self.remembered = Arc::default();
        for place in change.removed {
            if let Some(worker) = self.workers.get_mut(place as usize).and_then(Option::take) {
                self.places.remove(&worker.stream());
                self.departures += 1;
            }
        }
        for (place, worker) in change.workers {
            self.places.insert(worker.stream(), place);
            let size = self.workers.len().max(place as usize + 1);
            self.workers.resize(size, None);
            self.workers[place as usize] = Some(Arc::new(worker.completed()));
        }
    }

    /// All workers with their positions, in the order of the positions.
    pub(crate) fn workers(&self) -> impl Iterator<Item = (u32, &Worker)> {
        (0..)
            .zip(&self.workers)
            .filter_map(|(place, worker)| Some((place, worker.as_deref()?)))
    }

    fn serves(&self, scope: &Scope) -> bool {
        self.workers().any(|(_, worker)| worker.scope.is_same_fleet(scope))
    }

    /// Whether each worker of this table is also in the table `later`.
    pub(crate) fn is_part_of(&self, later: &Self) -> bool {
        self.departures == later.departures
    }

    /// The position of the worker that a stream belongs to.
    pub(crate) fn place(&self, stream: &Stream) -> Option<u32> {
        self.places.get(stream).copied()
    }

    /// Returns the workers that can hold prompts of a scope, and the namespaces in which these prompts are looked up.
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

    /// If the model of a scope is the name of a LoRA, returns the scope with the base model and this LoRA. A model of that name takes
    /// precedence.
    fn resolve_model(&self, scope: &Scope) -> Result<Scope, Declined> {
        let adapter = Some(Lora::Name(scope.model.clone()));
        if (scope.lora.is_some() && scope.lora != adapter) || self.serves(scope) {
            return Ok(scope.clone());
        }
        let is_adapter = |one: &&Scope| one.lora == adapter && one.tenant == scope.tenant && one.group == scope.group;
        let adapters = self.adapters.iter().filter(|one| self.serves(one));
        let adapters = adapters.chain(self.workers().map(|(_, worker)| &worker.scope));
        let bases: BTreeSet<&String> = adapters.filter(is_adapter).map(|one| &one.model).collect();
        match bases.into_iter().cloned().collect::<Vec<_>>().as_slice() {
            [] => Ok(scope.clone()),
            [base] => Ok(Scope {
                model: base.clone(),
                lora: adapter,
                ..scope.clone()
            }),
            bases => Err(Declined::Refused(Problem::ambiguous_adapter(&scope.model, bases))),
        }
    }

    fn find(&self, scope: Scope) -> Option<Candidates> {
        let of_fleet: Vec<_> = self
            .workers()
            .filter(|(_, worker)| worker.scope.is_same_fleet(&scope))
            .collect();
        if of_fleet.is_empty() {
            return None;
        }
        let (lora, salt) = (lora_seed(scope.lora.as_ref()), salt_seed(scope.salt.as_deref()));
        let mut within = Vec::new();
        // If a worker's events contain LoRA and salt, block keys include them. Usually the scope of such a worker does not contain them.
        for own_lora in none_and_value(scope.lora.as_ref()) {
            for own_salt in none_and_value(scope.salt.as_ref()) {
                let is_own = |own: &Scope| own.lora.as_ref() == own_lora && own.salt.as_ref() == own_salt;
                if let Some((_, worker)) = of_fleet.iter().find(|(_, worker)| is_own(&worker.scope)) {
                    for lora in possible_seeds(own_lora.is_some(), lora) {
                        for salt in possible_seeds(own_salt.is_some(), salt) {
                            let model = Some(worker.label.clone());
                            let items = Items::default();
                            within.push(IndexScope {
                                model,
                                lora,
                                salt,
                                items,
                            });
                        }
                    }
                }
            }
        }
        let admitted = || of_fleet.iter().filter(|(_, worker)| worker.scope.admits(&scope));
        let sizes: BTreeSet<u32> = of_fleet.iter().flat_map(|(_, worker)| &worker.block_sizes).copied().collect();
        Some(Candidates {
            within,
            workers: admitted().map(|&(place, _)| place).collect(),
            inexact: admitted()
                .filter(|(_, worker)| worker.trust.state != State::Exact)
                .map(|&(place, _)| place)
                .collect(),
            block_sizes: sizes.into_iter().collect(),
            scope,
        })
    }

    /// The worker at a position, which must not be free.
    pub(crate) fn worker(&self, place: u32) -> &Worker {
        self.workers[place as usize].as_deref().expect("places are those of workers")
    }

    /// Adds a speculative entry: for `seconds` seconds, the worker counts as holding the prompt.
    pub(crate) fn expect(&self, place: u32, prompt: &Scope, tokens: &[u32], seconds: f64) {
        let worker = self.worker(place);
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
        self.index.speculate(&worker.stream(), tokens, &scope, now, now + seconds);
    }
}

/// Whether a name has at most `MAX_NAME` characters.
pub(crate) fn is_short(name: &str) -> bool {
    name.len() <= MAX_NAME || name.chars().count() <= MAX_NAME
}

/// Yields None and, if the value is not None, then the value.
fn none_and_value<T>(value: Option<T>) -> impl Iterator<Item = Option<T>> {
    let given = value.map(Some);
    std::iter::once(None).chain(given)
}

/// Returns the parts of seeds that a LoRA or a salt can contribute to the blocks of a worker. If the worker is registered with it, its events
/// usually do not contain it, but they can.
fn possible_seeds(is_registered: bool, seed: u64) -> impl Iterator<Item = u64> + Clone {
    std::iter::once(seed).chain((is_registered && seed != 0).then_some(0))
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

/// Returns the time in seconds by the clock of Python's `time.monotonic`, which determines when speculative entries expire.
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

    /// A worker in the JSON form that the control plane writes.
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

    pub(crate) fn change(removed: &[u32], workers: &serde_json::Value) -> Vec<u8> {
        let change = serde_json::json!({"has_failed": false, "removed": removed, "workers": workers});
        change.to_string().into_bytes()
    }

    /// Returns the table after one more change.
    pub(crate) fn changed(table: &Table, removed: &[u32], workers: &serde_json::Value) -> Table {
        let mut table = table.clone();
        table.apply(serde_json::from_slice(&change(removed, workers)).unwrap(), index());
        table
    }

    fn states(table: &Table) -> Vec<(u32, &str, State)> {
        (table
            .workers()
            .map(|(place, worker)| (place, worker.instance.as_str(), worker.trust.state)))
        .collect()
    }

    #[test]
    fn a_change_has_only_the_workers_that_it_changes() {
        let empty = Table::new(index());
        let first = changed(
            &empty,
            &[],
            &serde_json::json!({"1": row("b", "EXACT"), "0": row("a", "STALE")}),
        );
        assert_eq!(states(&first), [(0, "a", State::Stale), (1, "b", State::Exact)]);
        let second = changed(
            &first,
            &[],
            &serde_json::json!({"2": row("c", "EXACT"), "1": row("b", "STALE")}),
        );
        assert_eq!(
            states(&second),
            [(0, "a", State::Stale), (1, "b", State::Stale), (2, "c", State::Exact)]
        );
        assert!(first.is_part_of(&second));
        let third = changed(&second, &[0, 1], &serde_json::json!({"1": row("d", "EXACT")}));
        assert!(!first.is_part_of(&third) && !second.is_part_of(&third));
        assert_eq!(states(&third), [(1, "d", State::Exact), (2, "c", State::Exact)]);
        let place = |name: &str| {
            let source = name.to_owned();
            third.place(&Stream { source, rank: 0 })
        };
        assert_eq!(["a", "b", "c", "d"].map(place), [None, None, Some(2), Some(1)]);
    }

    /// Adapters are found by the scopes of workers, and by the scopes that engines list for a served model.
    #[test]
    fn an_adapter_as_model_has_the_models_of_its_scopes() {
        let with_lora = |model: &str, lora: &str| {
            let mut row = row(&format!("{model}-{lora}"), "EXACT");
            (row["scope"]["model"], row["scope"]["lora"]) = (model.into(), lora.into());
            row
        };
        let mut change: serde_json::Value = serde_json::from_slice(&change(&[], &serde_json::json!({}))).unwrap();
        change["workers"] =
            serde_json::json!({"0": row("a", "EXACT"), "1": with_lora("m", "sql"), "2": with_lora("n", "both")});
        let listed = |model: &str, lora: &str| serde_json::json!([model, "default", "default", lora, null]);
        change["adapters"] = serde_json::json!([listed("m", "both"), listed("m", "own"), listed("gone", "own")]);
        let mut table = Table::new(index());
        table.apply(serde_json::from_value(change).unwrap(), index());
        let plain = table.worker(0).scope.clone();
        let model_of = |name: &str| {
            let model = name.to_owned();
            table
                .candidates(&Scope { model, ..plain.clone() })
                .map(|found| found.scope.model.clone())
        };
        assert_eq!(
            ["m", "sql", "own"].map(|name| model_of(name).ok()),
            ["m", "m", "m"].map(|name| Some(name.to_owned()))
        );
        assert!(matches!(model_of("both"), Err(Declined::Refused(_))) && matches!(model_of("none"), Err(Declined::Unread)));
    }

    #[test]
    fn only_scopes_with_short_names_are_remembered() {
        let table = changed(&Table::new(index()), &[], &serde_json::json!({"0": row("i", "EXACT")}));
        let plain = table.worker(0).scope.clone();
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
