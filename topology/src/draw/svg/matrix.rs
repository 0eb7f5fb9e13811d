//! The rail matrix as a coloured table: a row per location, a column per rail, the number of the tier in each cell.

use super::super::matrix::tier_of;
use super::MARGIN;
use super::canvas::{Canvas, Rect, WIDTH, fit};
use crate::rails::{Nearness, RailMatrix, gigabits};

const ROW: u32 = 26;
const FIRST_COLUMN: u32 = 76;
const WIDEST_COLUMN: u32 = 92;
const NARROWEST_COLUMN: u32 = 26;

const KEY: [(&str, &str); 7] = [
    ("near0", "same PCI switch"),
    ("near1", "same root complex"),
    ("near2", "same NUMA node"),
    ("near3", "node unknown"),
    ("near4", "other node"),
    ("near5", "as given"),
    ("held", "held back: slow"),
];

/// Draws the table; returns the position of its end.
pub(super) fn draw(canvas: &mut Canvas, matrix: &RailMatrix, top: u32) -> u32 {
    canvas.text(
        MARGIN,
        top,
        "heading",
        "Rails: for memory here (row), the tier of each NIC (column); ● is where it begins",
    );
    let room = WIDTH - 2 * MARGIN - FIRST_COLUMN;
    let column = (room / matrix.rails.len().max(1) as u32).clamp(NARROWEST_COLUMN, WIDEST_COLUMN);
    let per_table = (room / column).max(1) as usize;
    let mut y = top + 24;
    for rails in matrix.rails.chunks(per_table) {
        for (index, rail) in rails.iter().enumerate() {
            let middle = MARGIN + FIRST_COLUMN + index as u32 * column + column / 2;
            canvas.text(middle, y, "head", &fit(&rail.name, (column / 7) as usize));
            let speed = rail.speed_mbps.map_or("?".to_owned(), gigabits);
            canvas.text(middle, y + 14, "subhead", &fit(&speed, (column / 5) as usize));
        }
        y += 22;
        for row in &matrix.rows {
            canvas.text(MARGIN + FIRST_COLUMN - 8, y + 17, "right", &row.location.to_string());
            for (index, rail) in rails.iter().enumerate() {
                let x = MARGIN + FIRST_COLUMN + index as u32 * column;
                let cell = Rect { x, y, width: column - 3, height: ROW - 3 };
                let Some(place) = tier_of(row, &rail.name) else {
                    canvas.rect(&cell, "none", &format!("{}: {} is not in the matrix", row.location, rail.name));
                    continue;
                };
                let tier = &row.tiers[place];
                let class = if tier.slow { "held" } else { class_of(tier.nearness) };
                canvas.rect(&cell, class, &format!("{} → {}: {}", row.location, rail.name, tier.reason));
                let begins = place == 0 && tier.rails.first() == Some(&rail.name);
                let mark = if begins { format!("{} ●", place + 1) } else { (place + 1).to_string() };
                let ink = if class == "near0" { "light" } else { "cell" };
                canvas.text(x + (column - 3) / 2, y + 16, ink, &mark);
            }
            y += ROW;
        }
        y += 18;
    }
    key(canvas, matrix, y)
}

const fn class_of(nearness: Nearness) -> &'static str {
    match nearness {
        Nearness::SameSwitch => "near0",
        Nearness::SameRootComplex => "near1",
        Nearness::SameNode => "near2",
        Nearness::NodeUnknown => "near3",
        Nearness::OtherNode => "near4",
        Nearness::Given => "near5",
    }
}

/// Draws the key of the colours that occur.
fn key(canvas: &mut Canvas, matrix: &RailMatrix, y: u32) -> u32 {
    let tiers = || matrix.rows.iter().flat_map(|row| &row.tiers);
    let occurs =
        |class: &str| tiers().any(|tier| if tier.slow { class == "held" } else { class == class_of(tier.nearness) });
    let mut x = MARGIN;
    for (class, meaning) in KEY.iter().filter(|(class, _)| occurs(class)) {
        canvas.rect(&Rect { x, y, width: 16, height: 14 }, class, "");
        canvas.text(x + 22, y + 11, "small", meaning);
        x += 40 + 7 * meaning.chars().count() as u32;
    }
    y + 14
}
