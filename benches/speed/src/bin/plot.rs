//! Draws `benches/data` as `docs/plots`.

#![allow(clippy::unwrap_used)]

use std::error::Error;
use std::path::Path;

use plotters::coord::CoordTranslate;
use plotters::prelude::*;
use twobox_speed::report::{kept, root};

type Done = Result<(), Box<dyn Error>>;

const TWOBOX: RGBColor = RGBColor(0, 90, 160);
const SQLITE: RGBColor = RGBColor(200, 110, 0);
const FONT: &str = "sans-serif";

fn main() -> Done {
    let folder = root().join("docs/plots");
    std::fs::create_dir_all(&folder)?;
    callers(&folder.join("callers.svg"))?;
    soak(&folder.join("soak.svg"))?;
    by_hand(
        &folder.join("by-hand.svg"),
        "durable",
        "Durable commits: time for each order, by hand on redb = 1",
    )?;
    by_hand(
        &folder.join("by-hand-no-syncs.svg"),
        "none",
        "Without syncs: time for each order, by hand on redb = 1",
    )
}

/// How many times as long as by hand on redb, for each phase and size.
fn by_hand(path: &Path, syncs: &str, title: &str) -> Done {
    let lines = kept("life.csv");
    let lines: Vec<&Vec<String>> =
        lines.iter().filter(|line| line[0] == syncs && line[3] != "life").collect();
    let cells: Vec<&[&Vec<String>]> = lines.chunks(3).collect();
    let bars: Vec<(String, f64, f64)> = cells
        .iter()
        .map(|cell| {
            let [size, batch, phase] = [&cell[0][1], &cell[0][2], &cell[0][3]];
            let size = match size.as_str() {
                "100" => "100 B",
                "1024" => "1 KiB",
                _ => "64 KiB",
            };
            // The contenders stand in one order: twobox, by hand, SQLite.
            Ok((
                format!("{phase}, {batch} a commit, {size}"),
                cell[0][6].parse()?,
                cell[2][6].parse()?,
            ))
        })
        .collect::<Result<_, std::num::ParseFloatError>>()?;
    let area = SVGBackend::new(path, (900, 500)).into_drawing_area();
    area.fill(&WHITE)?;
    let most = bars.iter().fold(1.0_f64, |most, (_, a, b)| most.max(*a).max(*b)) * 1.1;
    let rows = bars.len() as f64;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, (FONT, 18))
        .margin(12)
        .x_label_area_size(35)
        .y_label_area_size(190)
        .build_cartesian_2d(0.0..most, 0.0..rows)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .x_desc("shorter is faster")
        .label_style((FONT, 13))
        .draw()?;
    for (colour, name, above, of) in
        [(TWOBOX, "twobox on redb", 0.52, 0), (SQLITE, "by hand on SQLite", 0.14, 1)]
    {
        let series = bars.iter().enumerate().map(|(at, (_, twobox, sqlite))| {
            let (bottom, value) =
                (rows - 1.0 - at as f64 + above, if of == 0 { *twobox } else { *sqlite });
            Rectangle::new([(0.0, bottom), (value, bottom + 0.36)], colour.filled())
        });
        chart
            .draw_series(series)?
            .label(name)
            .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
    }
    chart.draw_series(LineSeries::new([(1.0, 0.0), (1.0, rows)], BLACK.stroke_width(1)))?;
    let anchor = plotters::style::text_anchor::Pos::new(
        plotters::style::text_anchor::HPos::Right,
        plotters::style::text_anchor::VPos::Center,
    );
    for (at, (name, ..)) in bars.iter().enumerate() {
        let (x, y) = chart.backend_coord(&(0.0, rows - 0.5 - at as f64));
        area.draw(&Text::new(name.clone(), (x - 8, y), TextStyle::from((FONT, 13)).pos(anchor)))?;
    }
    legend(&mut chart, SeriesLabelPosition::LowerRight)?;
    Ok(area.present()?)
}

/// How many times as many orders a second as one caller, for so many callers.
fn callers(path: &Path) -> Done {
    let area = SVGBackend::new(path, (700, 420)).into_drawing_area();
    area.fill(&WHITE)?;
    let points = |name: &str,
                  syncs: &str,
                  column: usize|
     -> Result<Vec<(f64, f64)>, std::num::ParseFloatError> {
        let lines = kept(name);
        let lines = lines.iter().filter(|line| line[0] == syncs && line[2] == "threads");
        lines.map(|line| Ok((line[1].parse()?, line[column].parse()?))).collect()
    };
    let mut chart = ChartBuilder::on(&area)
        .caption("Many callers on one redb store, 100 B", (FONT, 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(45)
        .build_cartesian_2d((1.0..70.0).log_scale().base(2.0), (0.5..70.0).log_scale().base(2.0))?;
    let number = |value: &f64| format!("{value}");
    chart
        .configure_mesh()
        .x_desc("callers")
        .x_label_formatter(&number)
        .y_label_formatter(&number)
        .light_line_style(TRANSPARENT)
        .label_style((FONT, 13))
        .draw()?;
    for (colour, label, name, syncs, column) in [
        (RGBColor(110, 110, 110), "orders for each commit", "callers.csv", "durable", 5),
        (
            RGBColor(0, 130, 80),
            "orders a second, syncs of 4 ms, one caller = 1",
            "callers-slow-syncs.csv",
            "durable",
            4,
        ),
        (TWOBOX, "the same, syncs of 0.3 ms", "callers.csv", "durable", 4),
        (SQLITE, "the same, no syncs", "callers.csv", "none", 4),
    ] {
        let line = points(name, syncs, column)?;
        chart.draw_series(line.iter().map(|point| Circle::new(*point, 3, colour.filled())))?;
        let series = chart.draw_series(LineSeries::new(line, colour.stroke_width(2)))?;
        series
            .label(label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    legend(&mut chart, SeriesLabelPosition::UpperLeft)?;
    Ok(area.present()?)
}

/// How large the file and the process are while orders come and go.
fn soak(path: &Path) -> Done {
    let area = SVGBackend::new(path, (700, 320)).into_drawing_area();
    area.fill(&WHITE)?;
    let lines = kept("soak.csv");
    let points = |column: usize, unit: f64| -> Result<Vec<(f64, f64)>, std::num::ParseFloatError> {
        lines
            .iter()
            .map(|line| Ok((line[0].parse::<f64>()? / 1e3, line[column].parse::<f64>()? / unit)))
            .collect()
    };
    let (file, memory) = (points(1, 1e6)?, points(2, 1e6)?);
    let (last, most) = file
        .iter()
        .chain(&memory)
        .fold((0.0_f64, 0.0_f64), |(x, y), point| (x.max(point.0), y.max(point.1)));
    let mut chart = ChartBuilder::on(&area)
        .caption("Orders placed, delivered, received and purged, on one file", (FONT, 18))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(45)
        .build_cartesian_2d(0.0..last, 0.0..most * 1.2)?;
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("thousand orders")
        .y_desc("MB")
        .light_line_style(TRANSPARENT)
        .label_style((FONT, 13))
        .draw()?;
    for (colour, label, line) in [(TWOBOX, "file", file), (SQLITE, "memory of the process", memory)]
    {
        let series = chart.draw_series(LineSeries::new(line, colour.stroke_width(2)))?;
        series
            .label(label)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
    }
    legend(&mut chart, SeriesLabelPosition::LowerRight)?;
    Ok(area.present()?)
}

/// Says which series is which, in a corner of the plot.
fn legend<'a, C: CoordTranslate>(
    chart: &mut ChartContext<'a, SVGBackend<'a>, C>,
    corner: SeriesLabelPosition,
) -> Done {
    let mut labels = chart.configure_series_labels();
    let labels = labels.position(corner).background_style(WHITE.filled());
    Ok(labels.border_style(BLACK).label_font((FONT, 13)).draw()?)
}
