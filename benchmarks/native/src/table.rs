//! Rows of the result, and how they are printed.

use std::fmt::Write;

use crate::sides::SIDES;

/// The limit by which a row is judged.
#[derive(Clone, Copy, Debug)]
pub enum Reach {
    /// At most this multiple of the best other side's figure.
    Best(f64),
    /// At most this multiple of the best figure of Dynamo's three indexes.
    Dynamo(f64),
    /// At most this multiple of the figure of `ChainIndex`.
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
    /// A figure that is better when it is smaller, in the order of `SIDES`; None if a side has no figure.
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

    /// Creates a row that is not judged.
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

    /// Returns the row with a limit by which it is judged.
    pub fn judged(self, measured: f64, limit: f64, at_least: bool, words: &str) -> Self {
        let sign = if at_least { "at least" } else { "at most" };
        Self {
            measured: Some(measured),
            reach: format!("{sign} {limit} {words}"),
            met: Some(if at_least { measured >= limit } else { measured <= limit }),
            ..self
        }
    }

    /// Returns the row with a reason why it is not judged.
    pub fn unjudged(self, reason: String) -> Self {
        Self { reach: reason, ..self }
    }

    /// Whether the row is judged, and its limit was not reached.
    pub fn is_missed(&self) -> bool {
        self.met == Some(false)
    }
}

/// Formats a number with three significant digits.
pub fn short(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        1.0.. => format!("{value:.2}"),
        0.0 => "0".to_owned(),
        _ => format!("{value:.3}"),
    }
}

/// Formats a table as a JSON object. All texts are ASCII, so Rust's quoted form is valid JSON.
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

/// Formats a table in Markdown.
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
