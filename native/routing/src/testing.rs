//! A choice among candidates that a test describes in msgpack.

use serde::Deserialize;

use crate::choice::{Contender, Labels, Question, ScoreWeights, Tiers, choose};
use crate::loads::Loads;
use crate::ties::{Tie, Ties};
use crate::trust::{State, Trust};
use kvevents_index::holders::placements::TIERS;

/// Returns the choice among the candidates in `question`, as msgpack. `ties` resolves ties.
///
/// # Errors
/// If the question has another form, or no candidates.
pub fn select_among(question: &[u8], ties: &Ties, loads: &Loads) -> Result<Vec<u8>, String> {
    #[derive(Deserialize)]
    struct CandidateInput {
        instance: String,
        rank: i64,
        #[serde(default)]
        url: Option<String>,
        #[serde(default)]
        labels: Labels,
        source: Option<String>,
        load: Option<f64>,
        stores_only: Vec<String>,
        trust: Trust,
        state: State,
        distance: u8,
        #[serde(default)]
        obstacle: String,
        tokens: u32,
        certain: u32,
        tiers: Option<[u32; TIERS.len()]>,
    }

    impl CandidateInput {
        fn contender(&self) -> Contender<'_> {
            Contender {
                instance: &self.instance,
                rank: self.rank,
                url: self.url.as_deref(),
                labels: &self.labels,
                source: self.source.as_deref(),
                load: self.load,
                stores_only: &self.stores_only,
                trust: &self.trust,
                state: self.state,
                distance: self.distance,
                obstacle: &self.obstacle,
                tokens: self.tokens,
                certain: self.certain,
                tiers: Tiers(self.tiers),
            }
        }
    }

    #[derive(Deserialize)]
    struct QuestionInput {
        scope: [String; 3],
        prompt_tokens: usize,
        tie: Tie,
        explain: bool,
        ignores_cache: bool,
        #[serde(default)]
        session: Option<String>,
        terms: ScoreWeights,
        candidates: Vec<CandidateInput>,
    }

    let input: QuestionInput = rmp_serde::from_slice(question).map_err(|error| error.to_string())?;
    let contenders: Vec<Contender<'_>> = input.candidates.iter().map(CandidateInput::contender).collect();
    let question = Question {
        scope: input.scope.each_ref().map(String::as_str),
        prompt_tokens: input.prompt_tokens,
        tie: input.tie,
        explain: input.explain,
        ignores_cache: input.ignores_cache,
        session: input.session.as_deref(),
        reserve: None,
    };
    let selected = choose(&contenders, &question, &input.terms, (ties, loads));
    let selected = selected.ok().flatten().ok_or("there are no candidates")?;
    rmp_serde::to_vec_named(&selected).map_err(|error| error.to_string())
}
