//! The drawing as SVG: nodes with their cores and PCI trees side by side, below them the rail matrix, the key and the
//! notes.
//!
//! One self-contained SVG without scripts. Every core, device and cell of the matrix has a title, which browsers show
//! as a tooltip.

mod canvas;
mod matrix;
mod panel;

use super::{nodes, printable, summary};
use crate::model::Machine;
use crate::plan::ShardPlan;
use crate::rails::RailMatrix;
use canvas::{Canvas, WIDTH};

/// Space around everything and between blocks, in pixels.
const MARGIN: u32 = 24;
/// Most panels side by side.
const PANELS_PER_ROW: usize = 2;
/// Most notes that are written out; further ones are counted.
const MAX_NOTES: usize = 8;

/// Draws the machine, the placement of shards and the rail matrix as SVG.
#[must_use]
pub fn svg(machine: &Machine, plan: &ShardPlan, rails: &RailMatrix) -> String {
    let mut canvas = Canvas::new();
    canvas.text(MARGIN, 40, "title", "Machine, shards and rails");
    let mut y = 62;
    let physical_cores = machine.physical_cores().len();
    for line in summary(machine, plan, physical_cores).lines() {
        canvas.text(MARGIN, y, "small", line);
        y += 18;
    }
    y = panels(&mut canvas, machine, plan, rails, y + 6);
    y = panel::key(&mut canvas, y);
    if !rails.rails.is_empty() {
        y = matrix::draw(&mut canvas, rails, y + MARGIN);
    }
    let notes: Vec<&String> = plan.notes.iter().chain(&rails.notes).chain(&machine.notes).collect();
    if !notes.is_empty() {
        y += MARGIN;
        canvas.text(MARGIN, y, "heading", "Notes");
        for note in notes.iter().take(MAX_NOTES) {
            y = canvas.paragraph(MARGIN, y + 20, WIDTH - 2 * MARGIN, "small", &printable(note));
        }
        if notes.len() > MAX_NOTES {
            y += 20;
            canvas.text(MARGIN, y, "small", &format!("and {} more", notes.len() - MAX_NOTES));
        }
    }
    canvas.finish(y + MARGIN)
}

/// Draws the nodes in rows; returns the position of the next block.
fn panels(canvas: &mut Canvas, machine: &Machine, plan: &ShardPlan, rails: &RailMatrix, top: u32) -> u32 {
    let nodes = nodes(machine);
    let mut y = top;
    for row in nodes.chunks(PANELS_PER_ROW) {
        let count = row.len() as u32;
        let width = (WIDTH - 2 * MARGIN - (count - 1) * MARGIN / 2) / count;
        let drawn: Vec<panel::Panel> =
            row.iter().map(|&node| panel::build(machine, plan, rails, node, width)).collect();
        let height = drawn.iter().map(|panel| panel.height).max().unwrap_or(0);
        for (index, panel) in drawn.into_iter().enumerate() {
            panel.place(canvas, MARGIN + index as u32 * (width + MARGIN / 2), y, width, height);
        }
        y += height + MARGIN / 2;
    }
    y
}
