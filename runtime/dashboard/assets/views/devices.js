// Devices: what each engine and the learner spent its time on, in lanes on a canvas. Drag, + and − zoom, arrows move.
import { chartBox } from "../charts.js";
import { colour, duration, el, table } from "../dom.js";

export const title = "Devices";

const LANE = 26, GAP = 8, TOP = 18, AXIS = 24, FULL = 255, DRAG = 6;
const STEPS = [0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

const bytes = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

/** States whose colours alone are hard to tell from another's for some are hatched: from where to where in a tile. */
const HATCHES = {
  down: [0, 6, 6, 0], waiting_for_tools: [0, 6, 6, 0], waiting_for_weights: [0, 0, 6, 6], applying_weights: [3, 0, 3, 6], starting: [0, 3, 6, 3],
};

function inkOf(brush, state) {
  const ink = colour(state), hatch = HATCHES[state];
  if (!hatch) return ink;
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  pen.fillStyle = ink;
  pen.fillRect(0, 0, 6, 6);
  pen.strokeStyle = colour("card");
  pen.beginPath();
  for (const shift of [-6, 0, 6]) {
    pen.moveTo(hatch[0] + shift, hatch[1]);
    pen.lineTo(hatch[2] + shift, hatch[3]);
  }
  pen.stroke();
  return brush.createPattern(tile, "repeat");
}

export function mount(root, context) {
  const button = (text, label, click) => el("button", { type: "button", "aria-label": label, title: label, click }, text);
  const where = el("output", { class: "where" });
  const canvas = el("canvas", { role: "img", tabindex: 0, "aria-label": "lanes of the devices over time; the table below has the shares" });
  const legend = el("ul", { class: "legend" });
  const lanesAt = el("section", { class: "card" });
  const below = el("div", {});
  const empty = el("p", { class: "note", hidden: true }, "Nothing was reported yet: engines and learner report with their heartbeats.");
  let answer = null, shares = [], band = null, gpuBoxes = [], drag = null, cursor = null;
  let [from, to] = ["from", "to"].map((name) => Number(context.params.get(name)) || null); // null: from the start, up to now

  lanesAt.append(
    el("div", { class: "tools" }, button("−", "zoom out", () => zoom(2)), button("+", "zoom in", () => zoom(0.5)),
      button("◀", "earlier", () => move(-0.5)), button("▶", "later", () => move(0.5)),
      button("last minute", "the last minute", () => look(Math.max(0, answer.total_s - 60), null)),
      button("all", "all of it", () => look(null, null)), where),
    legend, canvas);
  root.append(empty, lanesAt, below);

  function look(start, end) {
    [from, to] = [start, end];
    context.setParams({ from: start, to: end });
    update();
  }
  function zoom(factor) {
    const middle = cursor?.at ?? (answer.start_s + answer.end_s) / 2;
    const half = Math.max(0.005, ((answer.end_s - answer.start_s) * factor) / 2);
    const start = Math.max(0, middle - half), end = Math.min(answer.total_s, middle + half);
    look(start || null, end >= answer.total_s ? null : end);
  }
  function move(share) {
    const width = answer.end_s - answer.start_s;
    const start = Math.min(Math.max(0, answer.start_s + share * width), Math.max(0, answer.total_s - width));
    look(start || null, start + width >= answer.total_s ? null : start + width);
  }

  // --- drawing ---

  const label = () => (canvas.clientWidth < 520 ? 64 : 104);
  const across = (at) => label() + ((at - answer.start_s) / (answer.end_s - answer.start_s)) * (canvas.clientWidth - label());
  const timeAt = (x) => answer.start_s + (Math.max(0, x - label()) / (canvas.clientWidth - label())) * (answer.end_s - answer.start_s);
  const topOf = (n) => TOP + n * (LANE + GAP);

  function draw() {
    if (!answer?.lanes.length) return;
    const width = canvas.clientWidth, height = topOf(answer.lanes.length) + AXIS, scale = devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
    const brush = canvas.getContext("2d");
    brush.scale(scale, scale);
    brush.font = "12px system-ui";
    drawAxis(brush, width, topOf(answer.lanes.length) - GAP);
    const inks = Object.fromEntries(answer.states.map(([state]) => [state, inkOf(brush, state)]));
    answer.lanes.forEach((lane, n) => {
      brush.fillStyle = colour("ink");
      brush.textAlign = "right";
      brush.textBaseline = "middle";
      brush.fillText(lane.name, label() - 8, topOf(n) + LANE / 2, label() - 10);
      drawLane(brush, shares[n], topOf(n), inks);
    });
    if (drag && Math.abs(drag.to - drag.from) > DRAG) {
      brush.fillStyle = `color-mix(in srgb, ${colour("c0")} 20%, transparent)`;
      brush.fillRect(Math.min(drag.from, drag.to), 0, Math.abs(drag.to - drag.from), height - AXIS);
    } else if (cursor) {
      brush.fillStyle = colour("ink");
      brush.fillRect(across(cursor.at), 0, 1, height - AXIS);
    }
  }

  function drawLane(brush, lane, top, inks) {
    const num = Object.values(lane)[0]?.length ?? 0, left = label(), step = (canvas.clientWidth - left) / num;
    const bottoms = new Float64Array(num).fill(top + LANE);
    for (const [state] of answer.states) {
      const column = lane[state];
      if (!column) continue;
      brush.fillStyle = inks[state];
      for (let n = 0; n < num; n++) {
        if (!column[n]) continue;
        let last = n; // neighbours that are alike are one rectangle
        while (last + 1 < num && column[last + 1] === column[n] && bottoms[last + 1] === bottoms[n]) last++;
        const high = (LANE * column[n]) / FULL;
        brush.fillRect(left + n * step, bottoms[n] - high, (last - n + 1) * step + 0.25, high);
        for (; n < last; n++) bottoms[n] -= high;
        bottoms[n] -= high;
      }
    }
  }

  function drawAxis(brush, width, bottom) {
    const span = answer.end_s - answer.start_s;
    const step = STEPS.find((each) => span / each <= Math.max(3, width / 130)) ?? 86400 * Math.ceil(span / 86400 / 8);
    brush.strokeStyle = colour("grid");
    brush.fillStyle = colour("muted");
    brush.textAlign = "center";
    brush.textBaseline = "alphabetic";
    for (let n = Math.ceil(answer.start_s / step); n * step <= answer.end_s; n++) {
      const x = across(n * step);
      brush.strokeRect(x, TOP - 6, 0, bottom - TOP + 10);
      brush.fillText(step < 1 ? `${+(n * step).toFixed(3)} s` : duration(n * step), Math.min(x, width - 22), bottom + 18);
    }
    brush.fillStyle = colour("c0");
    for (const at of answer.steps_s) brush.fillRect(across(at), 2, 1, 7);
    brush.fillStyle = colour("down");
    for (const loss of answer.losses.filter((each) => each.at_s >= answer.start_s && each.at_s <= answer.end_s)) {
      brush.fillText("✖", across(loss.at_s), 11);
      const n = answer.lanes.findIndex((lane) => lane.name === loss.name);
      if (n >= 0) brush.fillRect(across(loss.at_s) - 1, topOf(n) - 2, 2, LANE + 4);
    }
  }

  /** What stands at the cursor, in words. */
  function read() {
    const lane = cursor && shares[cursor.lane];
    if (!lane) { where.textContent = ""; return; }
    const column = Math.min(Object.values(lane)[0].length - 1, Math.floor(((cursor.at - answer.start_s) / (answer.end_s - answer.start_s)) * Object.values(lane)[0].length));
    const parts = answer.states.filter(([state]) => lane[state]?.[column])
      .map(([state, text]) => [lane[state][column], text]).sort((a, b) => b[0] - a[0]);
    where.textContent = `${answer.lanes[cursor.lane].name} at ${duration(cursor.at)}: ${
      parts.map(([share, text]) => `${text} ${Math.round((100 * share) / FULL)} %`).join(", ") || "not reported"}`;
  }

  function point(x, y) {
    const lane = Math.min(answer.lanes.length - 1, Math.max(0, Math.floor((y - TOP + GAP / 2) / (LANE + GAP))));
    cursor = { at: timeAt(x), lane };
    read();
    draw();
  }

  canvas.addEventListener("pointerdown", (event) => { drag = { from: event.offsetX, to: event.offsetX }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => { if (drag) drag.to = event.offsetX; if (answer) point(event.offsetX, event.offsetY); });
  canvas.addEventListener("pointerup", () => {
    const [low, high] = drag ? [drag.from, drag.to].sort((a, b) => a - b) : [0, 0];
    drag = null;
    if (high - low > DRAG) look(timeAt(low) || null, timeAt(high) >= answer.total_s ? null : timeAt(high));
  });
  canvas.addEventListener("pointercancel", () => { drag = null; });
  canvas.addEventListener("pointerleave", () => { if (!drag) { cursor = null; read(); draw(); } });
  canvas.addEventListener("dblclick", () => look(null, null));
  canvas.addEventListener("keydown", (event) => {
    const span = answer ? answer.end_s - answer.start_s : 1;
    const act = {
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), Escape: () => look(null, null),
      ArrowLeft: () => point(across((cursor?.at ?? answer.end_s) - span / 100), topOf(cursor?.lane ?? 0)),
      ArrowRight: () => point(across(Math.min(answer.end_s, (cursor?.at ?? answer.start_s) + span / 100)), topOf(cursor?.lane ?? 0)),
      ArrowUp: () => point(across(cursor?.at ?? answer.start_s), topOf(Math.max(0, (cursor?.lane ?? 0) - 1))),
      ArrowDown: () => point(across(cursor?.at ?? answer.start_s), topOf((cursor?.lane ?? -1) + 1)),
    }[event.key];
    if (!act || !answer?.lanes.length) return;
    event.preventDefault();
    act();
  });

  // --- what stands below ---

  function drawBelow() {
    const present = answer.states.filter(([state]) => answer.lanes.some((lane) => lane.shares[state]));
    legend.replaceChildren(...present.map(([state, text]) => el("li", { class: `state ${state}` }, text)));
    const rows = answer.lanes.map((lane) => [lane.name, ...present.map(([state]) => `${lane.percentages[state].toFixed(1)} %`),
      lane.occupancy === null ? "–" : `${lane.occupancy.toFixed(1)} %`]);
    const heads = [["lane"], ...present.map(([, text]) => [text, "n"]), ["slots used while working", "n"]];
    below.replaceChildren();
    if (band) band.destroy();
    band = null;
    if (answer.band) {
      const x = answer.band.p50.map((_, n) => answer.start_s + ((n + 0.5) / answer.band.p50.length) * (answer.end_s - answer.start_s));
      band = chartBox({ title: `Slots in use, over ${answer.band.num_engines} engines`, x_label: "seconds since the start", y_label: "%", from_zero: true,
        note: `Of each moment the engine that one in ten is below, the middle one, and the one that one in ten is above. Above: the learner, the mean of all ${
          answer.band.num_engines} engines, and those that did least.`,
        lines: [["90 % below", "p90"], ["median", "p50"], ["10 % below", "p10"]].map(([label, key], n) => ({ label, x, y: answer.band[key], colour: n })) });
      below.append(el("h2", {}, "All engines"), band.element);
    }
    below.append(el("h2", {}, "Shares of the time shown"), table(heads, rows, { "aria-label": "shares of the time" }),
      el("p", { class: "note" }, `${duration(answer.start_s)} to ${duration(answer.end_s)}; marks above the lanes are ends of steps, ✖ an actor that was lost.`));
    gpuBoxes.forEach((box) => box.destroy());
    gpuBoxes = answer.gpus.map(chartBox);
    if (gpuBoxes.length) below.append(el("h2", {}, "What NVML says"), ...gpuBoxes.map((box) => box.element));
    if (answer.profiles.length) {
      below.append(el("h2", {}, "Profiles"), el("ul", { class: "profiles" }, ...answer.profiles.map((name) => el("li", {},
        el("button", { type: "button", click: () => download(name) }, name)))),
      el("p", { class: "note" }, "Traces are for ui.perfetto.dev, snapshots for pytorch.org/memory_viz."));
    }
    [...gpuBoxes].forEach((box, n) => box.set(answer.gpus[n]));
  }

  async function download(name) {
    const { body } = await context.fetchJson("devices/profile", { name });
    const href = URL.createObjectURL(new Blob([Uint8Array.from(atob(body), (one) => one.charCodeAt(0))]));
    el("a", { href, download: name.split("/").pop() }).click();
    URL.revokeObjectURL(href);
  }

  async function update() {
    const columns = Math.min(1200, Math.max(100, Math.round((canvas.clientWidth || 800) / 1.5)));
    answer = await context.fetchJson("devices", { start_s: from ?? 0, end_s: to, columns });
    shares = answer.lanes.map((lane) => Object.fromEntries(Object.entries(lane.shares).map(([state, text]) => [state, bytes(text)])));
    empty.hidden = answer.lanes.length > 0;
    lanesAt.hidden = below.hidden = !empty.hidden;
    drawBelow();
    draw();
    read();
  }

  const resized = new ResizeObserver(draw);
  resized.observe(lanesAt);
  window.addEventListener("themechange", draw);
  return {
    update,
    unmount() {
      resized.disconnect();
      window.removeEventListener("themechange", draw);
      band?.destroy();
      gpuBoxes.forEach((box) => box.destroy());
    },
  };
}
