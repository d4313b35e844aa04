// A chart as the report describes it ({title, note, lines, x_label, y_label, from_zero, are_bars}), drawn by uPlot.
// Charts with one x_label share the crosshair; drag zooms, double click shows all again.
import { colour, el, number } from "./dom.js";

const HEIGHT = 220, NUM_COLOURS = 8, NUM_ROWS = 12;
const DASHES = [[], [6, 4], [2, 3], [10, 4, 2, 4]];
const { uPlot } = window;

/** All x of all lines, ascending, and each line's values there; spreads become two more lines. */
function aligned(lines) {
  const x = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  const place = new Map(x.map((value, n) => [value, n]));
  const spread = (line, values) => {
    const column = new Array(x.length).fill(undefined);
    line.x.forEach((value, n) => { column[place.get(value)] = values[n]; });
    return column;
  };
  const columns = lines.map((line) => spread(line, line.y));
  const edges = lines.filter((line) => line.spread?.length).flatMap((line) => [1, -1].map((sign) => (
    spread(line, line.y.map((y, n) => (y === null || line.spread[n] === null ? null : y + sign * line.spread[n]))))));
  return [x, ...columns, ...edges];
}

function seriesOf(line) {
  const ink = colour(`c${(line.colour ?? 0) % NUM_COLOURS}`);
  const dash = line.style === "dashed" ? [5, 4] : DASHES[(line.dash ?? 0) % DASHES.length];
  return {
    label: line.label, stroke: ink, width: 1.7, dash, spanGaps: true,
    points: { show: line.style === "points" ? true : undefined, size: 6, fill: ink },
    paths: line.style === "steps" ? uPlot.paths.stepped({ align: 1 }) : undefined,
  };
}

/** {element, set(chart), destroy()} */
export function chartBox(first) {
  const legend = el("div", { class: "keys" });
  const where = el("span", { class: "where" });
  const plotAt = el("div", { class: "plot", role: "img", tabindex: 0 });
  const note = el("p", { class: "note" });
  const element = el("section", { class: "card" }, el("h3", {}, first.title), plotAt, legend, note);
  const hidden = new Set();
  let chart = first, plot = null, key = "";

  function options() {
    const ink = colour("muted"), grid = { stroke: colour("grid"), width: 1 };
    const axis = { stroke: ink, grid, ticks: grid, font: "11px system-ui", labelFont: "11px system-ui", labelSize: 18 };
    const whole = chart.lines.every((line) => line.x.every(Number.isInteger));
    const edges = chart.lines.filter((line) => line.spread?.length);
    const bars = chart.are_bars ? { paths: uPlot.paths.bars({ size: [0.7, 60] }), width: 0, points: { show: false } } : {};
    const tint = (line) => `color-mix(in srgb, ${colour(`c${(line.colour ?? 0) % NUM_COLOURS}`)} 14%, transparent)`;
    return {
      width: Math.max(200, plotAt.clientWidth), height: HEIGHT, legend: { show: false },
      cursor: { sync: { key: chart.x_label }, points: { size: 6 }, drag: { x: true, y: false } },
      scales: {
        x: { time: false, range: chart.are_bars ? (_, low, high) => [low - 0.6, high + 0.6] : (_, low, high) => (
          low === high ? [low - 0.5, high + 0.5] : [low, high]) },
        y: { range: (_, low, high) => uPlot.rangeNum(chart.from_zero ? Math.min(0, low ?? 0) : low ?? 0, high ?? 1, 0.1, true) },
      },
      axes: [
        { ...axis, label: chart.x_label, size: 30, incrs: whole ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5] : undefined,
          values: (_, ticks) => ticks.map((tick) => number(tick)) },
        { ...axis, label: chart.y_label || undefined, size: 52, values: (_, ticks) => ticks.map((tick) => number(tick)) },
      ],
      series: [{}, ...chart.lines.map((line) => ({ ...seriesOf(line), ...bars, fill: chart.are_bars ? seriesOf(line).stroke : undefined,
        show: !hidden.has(line.label) })), ...edges.flatMap(() => [0, 1].map(() => ({ width: 0, points: { show: false } })))],
      bands: edges.map((line, n) => ({ series: [chart.lines.length + 1 + 2 * n, chart.lines.length + 2 + 2 * n], fill: tint(line) })),
      hooks: { setCursor: [read], draw: [drawMarks] },
    };
  }

  /** What an operator changed, as a line across with its words, each in a row where it lies over no others. */
  function drawMarks(drawn) {
    const { ctx: brush, bbox: box } = drawn, scale = devicePixelRatio || 1;
    brush.save();
    brush.fillStyle = colour("muted");
    brush.font = `${11 * scale}px system-ui`;
    const rows = Array.from({ length: NUM_ROWS }, () => []);
    for (const mark of chart.marks ?? []) {
      const x = drawn.valToPos(mark.x, "x", true);
      if (x < box.left || x > box.left + box.width) continue;
      const isRight = x > box.left + box.width / 2, width = brush.measureText(mark.label).width + 8 * scale;
      const [from, to] = isRight ? [x - width, x] : [x, x + width];
      const row = rows.findIndex((others) => others.every(([left, right]) => to <= left || right <= from));
      rows[row]?.push([from, to]);
      brush.textAlign = isRight ? "right" : "left";
      brush.fillRect(x, box.top, scale, box.height);
      if (row >= 0) brush.fillText(mark.label, x + (isRight ? -4 : 4) * scale, box.top + (10 + 12 * row) * scale);
    }
    brush.restore();
  }

  /** The values at the crosshair, the newest without one. */
  function read() {
    const x = plot?.data[0] ?? [], at = plot?.cursor.idx ?? null;
    where.textContent = at === null || x[at] === undefined ? "" : `${chart.x_label} ${number(x[at])}`;
    chart.lines.forEach((line, n) => {
      const column = plot?.data[n + 1] ?? [];
      const value = at === null ? line.y.findLast((y) => y !== null) : column[at];
      legend.children[n].querySelector("b").textContent = number(value);
    });
  }

  function drawLegend() {
    legend.replaceChildren(...chart.lines.map((line) => el("button", {
      type: "button", class: `key c${(line.colour ?? 0) % NUM_COLOURS} dash${(line.dash ?? 0) % DASHES.length}`, "aria-pressed": !hidden.has(line.label),
      click: () => {
        if (!hidden.delete(line.label)) hidden.add(line.label);
        rebuild();
      },
    }, line.label, el("b"))), where);
  }

  function rebuild() {
    plot?.destroy();
    plot = null;
    drawLegend();
    plot = new uPlot(options(), aligned(chart.lines), plotAt);
    read();
  }

  function set(next) {
    chart = next;
    note.textContent = chart.note;
    plotAt.setAttribute("aria-label", `${chart.title}: ${chart.lines.map((line) => line.label).join(", ")}`);
    const now = JSON.stringify(chart.lines.map((line) => [line.label, line.style, line.colour]));
    if (now !== key || !plot) {
      key = now;
      rebuild();
    } else {
      const isZoomed = plot.scales.x.min > plot.data[0][0] || plot.scales.x.max < plot.data[0].at(-1);
      plot.setData(aligned(chart.lines), !isZoomed);
      read();
    }
  }

  plotAt.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !plot) return;
    event.preventDefault();
    const n = Math.min(plot.data[0].length - 1, Math.max(0, (plot.cursor.idx ?? plot.data[0].length) + move));
    plot.setCursor({ left: plot.valToPos(plot.data[0][n], "x"), top: 0 });
  });
  const resized = new ResizeObserver(() => { if (plot) plot.setSize({ width: Math.max(200, plotAt.clientWidth), height: HEIGHT }); });
  resized.observe(plotAt);
  const redraw = () => { if (plot) rebuild(); };
  window.addEventListener("themechange", redraw);
  return {
    element, set,
    destroy() { resized.disconnect(); window.removeEventListener("themechange", redraw); plot?.destroy(); },
  };
}
