//! Rows of the result, and how they are printed.

use std::fmt::Write;

use crate::sides::SIDES;

/// What a row has to reach, if anything.
#[derive(Clone, Copy, Debug)]
pub enum Reach {
    /// At most this much of the best other side.
    Best(f64),
    /// At most this much of the best of Dynamo's three.
    Dynamo(f64),
    /// At most this much of `ChainIndex`.
    ChainIndex(f64),
}

/// One figure of each side.
#[derive(Clone, Debug)]
pub struct Row {
    what: String,
    cells: Vec<String>,
    measured: Option<f64>,
    reach: String,
    met: Option<bool>,
}

impl Row {
    /// A figure that is better when it is smaller, in the order of `SIDES`; None where a side has none.
    pub fn least(what: String, figures: &[Option<f64>], reach: Reach) -> Self {
        let best = |from: usize, to: usize| figures[from..to].iter().flatten().copied().fold(f64::INFINITY, f64::min);
        let ours = figures[0].expect("ours is always measured");
        let (measured, limit, words) = match reach {
            Reach::Best(limit) => (ours / best(1, SIDES.len()), limit, "of the best"),
            Reach::Dynamo(limit) => (ours / best(1, SIDES.len() - 1), limit, "of Dynamo's best"),
            Reach::ChainIndex(limit) => (ours / best(SIDES.len() - 1, SIDES.len()), limit, "of ChainIndex"),
        };
        let cells = figures.iter().map(|figure| figure.map_or(String::new(), short)).collect();
        Self::new(what, cells).judged(measured, limit, false, words)
    }

    /// A row of such cells that is not judged.
    pub fn new(what: String, mut cells: Vec<String>) -> Self {
        cells.resize(SIDES.len(), String::new());
        Self {
            what,
            cells,
            measured: None,
            reach: String::new(),
            met: None,
        }
    }

    /// The same judged by one number.
    pub fn judged(self, measured: f64, limit: f64, at_least: bool, words: &str) -> Self {
        let sign = if at_least { "at least" } else { "at most" };
        Self {
            measured: Some(measured),
            reach: format!("{sign} {limit} {words}"),
            met: Some(if at_least { measured >= limit } else { measured <= limit }),
            ..self
        }
    }

    /// The same with a reason for not being judged.
    pub fn unjudged(self, reason: String) -> Self {
        Self { reach: reason, ..self }
    }

    /// Whether it is judged and was not reached.
    pub fn is_missed(&self) -> bool {
        self.met == Some(false)
    }
}

/// Three digits of a number.
pub fn short(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        1.0.. => format!("{value:.2}"),
        0.0 => "0".to_owned(),
        _ => format!("{value:.3}"),
    }
}

/// The same as an object of JSON. What is quoted is plain ASCII, so that Rust's quotes are those of JSON.
pub fn json(title: &str, rows: &[Row]) -> String {
    let cell = |row: &Row| {
        let (measured, met) = (
            row.measured.map_or("null".to_owned(), short),
            row.met.map_or("null".to_owned(), |met| met.to_string()),
        );
        format!(
            "{{\"what\": {:?}, \"cells\": {:?}, \"measured\": {measured}, \"reach\": {:?}, \"met\": {met}}}",
            row.what, row.cells, row.reach
        )
    };
    let rows: Vec<_> = rows.iter().map(cell).collect();
    format!(
        "{{\"title\": {title:?}, \"sides\": {SIDES:?}, \"rows\": [{}]}}",
        rows.join(", ")
    )
}

/// A table in Markdown.
pub fn markdown(title: &str, rows: &[Row]) -> String {
    let mut out = format!("### {title}\n\n| |");
    for side in SIDES {
        let _ = write!(out, " {side} |");
    }
    out.push_str(" judged | to reach | |\n|---");
    out.push_str(&"|---".repeat(SIDES.len() + 3));
    out.push_str("|\n");
    for row in rows {
        let measured = row.measured.map_or(String::new(), short);
        let met = row.met.map_or("", |met| if met { "met" } else { "**missed**" });
        let _ = writeln!(
            out,
            "| {} | {} | {measured} | {} | {met} |",
            row.what,
            row.cells.join(" | "),
            row.reach
        );
    }
    out
}
