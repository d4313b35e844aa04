// Samples: a table of all samples that is read page by page, reward against length, groups without spread; and the page
// of one sample (../sample.js) while the address names one.
//
// A page of rows is asked for by the place where the nearest known page ends and how many rows lie between (keyset).
import { colour, el, number } from "../dom.js";
import { samplePage, took } from "../sample.js";

export const title = "Samples";

const PAGE = 100, ROW = 30, MAX_HEIGHT = 8e6, AHEAD = 4, MAX_PAGES = 60;
const DEBOUNCE_MS = 150, SLOW_MS = 20000, POLL_MS = 200, REST = 10;
const COLUMNS = [
  ["sample", "group"], ["fate", ""], ["step", "step"], ["reward", "reward"], ["tokens", "tokens"], ["age", "age"],
  ["time", "seconds"], ["engine", ""], ["text", ""],
];
const LACKS = { step: "were trained", reward: "have a reward", age: "were trained", seconds: "have come to their end" };
const RANGES = [
  ["step", "first_step", "last_step", "1"], ["reward", "min_reward", "max_reward", "any"],
  ["tokens", "min_tokens", "max_tokens", "1"], ["age", "min_age", "max_age", "1"],
];
const KINDS = [["", "all"], ["training", "training"], ["evaluation", "evaluation"]];
const FILTERS = ["text", "state", "cause", "engine", "kind", "group", "is_flat", ...RANGES.flatMap((r) => [r[1], r[2]])];
const whole = (value) => value.toLocaleString("en");

export function mount(root, context) {
  const list = el("div", {}), page = samplePage(context);
  root.append(list, page.element);

  // --- what is asked for: it stands in the address ---------------------------------------------------------------
  const filters = () => Object.fromEntries(FILTERS.map((name) => [name, context.params.get(name)]).filter(([, v]) => v));
  const sort = () => context.params.get("sort") ?? "group";
  const isAscending = () => context.params.get("up") === "1";
  const asked = () => ({ ...filters(), sort: sort() });

  function choose(changes) {
    clearTimeout(soon);
    context.setParams({ ...typed, ...changes });
    typed = {};
    drawFilters();
    begin();
  }

  // --- filters ---------------------------------------------------------------------------------------------------
  const fate = el("select", { change: () => {
    const [state = "", cause = ""] = fate.value ? JSON.parse(fate.value) : [];
    choose({ state: state || null, cause: cause || null });
  } });
  const engine = el("select", { change: () => choose({ engine: engine.value || null }) });
  const kind = el("select", { change: () => choose({ kind: kind.value || null }) },
    ...KINDS.map(([value, text]) => el("option", { value }, text)));
  const flat = el("input", { type: "checkbox", id: "only-flat", change: () => choose({ is_flat: flat.checked ? "true" : null }) });
  const inputs = new Map();
  let soon = 0, typed = {}; // what was typed and is not asked for yet
  function input(name, attributes) {
    const box = el("input", { ...attributes, input: () => {
      clearTimeout(soon);
      if (box.checkValidity()) typed[name] = box.value || null;
      soon = setTimeout(() => choose({}), DEBOUNCE_MS);
    } });
    inputs.set(name, box);
    return box;
  }
  const field = (label, ...boxes) => el("label", { class: "field" }, el("span", {}, label), ...boxes);
  const bar = el("div", { class: "filters", role: "search" },
    field("fate", fate),
    ...RANGES.map(([label, low, high, step]) => el("fieldset", { class: "field" }, el("legend", {}, label),
      input(low, { type: "number", step, placeholder: "from", "aria-label": `${label} from` }),
      input(high, { type: "number", step, placeholder: "to", "aria-label": `${label} to` }))),
    field("engine", engine), field("kind", kind),
    field("group", input("group", { size: 6, pattern: "e?[0-9]*", placeholder: "12, e4" })),
    field("text", input("text", { type: "search", placeholder: "in those kept as text" })),
    el("label", { class: "check" }, flat, " groups without spread"),
    el("button", { type: "button", click: () => choose(Object.fromEntries(FILTERS.map((name) => [name, null]))) }, "clear"),
  );

  function drawFilters() {
    const given = filters();
    for (const [name, box] of inputs) if (document.activeElement !== box) box.value = given[name] ?? "";
    fate.value = given.state ? JSON.stringify([given.state, given.cause ?? ""]) : "";
    engine.value = given.engine ?? "";
    kind.value = given.kind ?? "";
    flat.checked = given.is_flat === "true";
    for (const button of heads.querySelectorAll("[data-sort]")) {
      const is = button.dataset.sort === sort();
      button.parentElement.setAttribute("aria-sort", !is ? "none" : isAscending() ? "ascending" : "descending");
    }
  }

  function drawChoices(found) {
    const states = new Map();
    for (const one of found.fates) states.set(one.state, [...(states.get(one.state) ?? []), one]);
    const option = (state, cause, text) => el("option", { value: JSON.stringify([state, cause]) }, text);
    fate.replaceChildren(el("option", { value: "" }, "all"), ...[...states].flatMap(([state, each]) => [
      option(state, "", `${state} (${whole(each.reduce((sum, one) => sum + one.num_samples, 0))})`),
      ...each.filter((one) => one.cause).map((one) => (
        option(state, one.cause, `– ${state}: ${one.cause} (${whole(one.num_samples)})`))),
    ]));
    engine.replaceChildren(el("option", { value: "" }, "all"), ...found.engines.map((name) => el("option", { value: name }, name)));
    const most = Math.max(1, ...found.flat.map((one) => one.num_groups));
    flatCard.replaceChildren(el("h3", {}, "Groups without spread"),
      el("p", { class: "note" }, found.num_flat_groups
        ? `In ${whole(found.num_flat_groups)} groups every sample has the same reward, so they teach nothing:`
        : "In every group with rewards these differ."),
      ...found.flat.map((one) => {
        const share = el("span", { class: "share" });
        share.style.width = `${(70 * one.num_groups) / most}%`;
        return el("div", { class: "bar-row" }, el("span", { class: "n" }, `all ${number(one.reward)}`), share, whole(one.num_groups));
      }),
      found.num_flat_groups ? el("button", { type: "button", click: () => choose({ is_flat: "true" }) }, "show them") : null);
  }

  // --- the table -------------------------------------------------------------------------------------------------
  const told = el("p", { class: "note", role: "status" });
  const heads = el("div", { class: "row head", role: "row" }, ...COLUMNS.map(([label, by]) => (
    el("div", { role: "columnheader", class: by && by !== "group" ? "n" : null }, by
      ? el("button", { type: "button", "data-sort": by, click: () => (
        choose({ sort: by === "group" ? null : by, up: sort() === by && !isAscending() ? "1" : null })) }, label)
      : label))));
  const sizer = el("div", { class: "sizer" });
  const rows = el("div", { class: "rows", role: "rowgroup" });
  const scroller = el("div", { class: "grid", role: "grid", tabindex: 0, "aria-label": "samples" },
    el("div", { role: "rowgroup", class: "heads" }, heads), sizer, rows);
  const progress = el("progress", { max: 1, "aria-label": "index of samples" });
  const making = el("section", { class: "card" }, el("h3", {}, "An index of all samples"), progress, el("p", { class: "note" }));
  const flatCard = el("section", { class: "card" });
  const chart = scatter((range) => choose(range));
  const ready = el("div", { hidden: "" }, bar, told, scroller, el("div", { class: "charts" }, chart.element, flatCard));
  list.append(making, ready);

  let pages = new Map(), total = null, current = -1, drawing = 0, isPressed = false, ask = new AbortController();
  const shownRows = () => Math.max(1, Math.floor((scroller.clientHeight - ROW) / ROW));
  const height = () => (total ?? 0) * ROW;
  const top = () => (height() <= MAX_HEIGHT ? scroller.scrollTop / ROW
    : (scroller.scrollTop / (sizer.offsetHeight + ROW - scroller.clientHeight)) * (total - shownRows()));
  const rowAt = (n) => pages.get(Math.floor(n / PAGE))?.rows?.[n % PAGE];

  /** Ask anew: the filter or the order is another one. */
  function begin() {
    scroller.scrollTop = 0;
    current = -1;
    total = null;
    refill(true);
  }

  /** Ask again for what is seen; old rows stay until the new ones are there. */
  async function refill(withCharts) {
    ask.abort();
    ask = new AbortController();
    const { signal } = ask, stale = pages;
    pages = new Map();
    if (stale.get(0)?.rows && !withCharts) pages.set(0, { ...stale.get(0), isStale: true });
    try {
      const first = fetchPage(0, signal);
      const counted = context.fetchJson("samples/count", asked(), { signal });
      counted.catch(() => {}); // it is awaited below, if the page comes
      await first;
      if (total === null) total = pages.get(0).rows.length + (pages.get(0).after ? PAGE : 0);
      draw();
      total = (await counted).num_samples;
      draw();
      if (withCharts) chart.set(await context.fetchJson("samples/bins", asked(), { signal }));
      context.complain("");
    } catch (error) {
      complain(error);
    }
  }

  function complain(error) {
    if (error.name !== "AbortError") context.complain(error.message);
  }

  async function fetchPage(n, signal) {
    if (pages.has(n) && !pages.get(n).isStale) return;
    const before = [...pages].filter(([m, one]) => m < n && one.after).map(([m]) => m).sort((a, b) => b - a)[0];
    const place = before === undefined ? { skip: n * PAGE } : { after: pages.get(before).after, skip: (n - before - 1) * PAGE };
    const mine = pages;
    if (!mine.has(n)) mine.set(n, {});
    try {
      const found = await context.fetchJson("samples/table",
        { ...asked(), is_ascending: isAscending(), limit: PAGE, ...place }, { signal });
      mine.set(n, found);
      if (mine.size > MAX_PAGES) mine.delete([...mine.keys()].find((m) => m !== n));
      if (mine === pages) draw();
    } catch (error) {
      if (!mine.get(n)?.rows) mine.delete(n);
      throw error;
    }
  }

  function draw() {
    cancelAnimationFrame(drawing);
    if (!isPressed) drawing = requestAnimationFrame(drawNow);
  }

  /** While a row is pressed it stays: a click on a row that was drawn anew in between would be nobody's. */
  function press(event) {
    isPressed = event.type === "pointerdown";
    draw();
  }

  function drawNow() {
    const num = total ?? 0, at = Math.max(0, Math.min(top(), num - shownRows() / 2)), first = Math.floor(at);
    sizer.style.height = `${Math.min(height(), MAX_HEIGHT)}px`;
    scroller.setAttribute("aria-rowcount", num + 1);
    const last = Math.min(num, first + shownRows() + AHEAD);
    rows.style.transform = `translateY(${scroller.scrollTop - (at - first) * ROW}px)`;
    rows.replaceChildren(...Array.from({ length: Math.max(0, last - first) }, (_, n) => line(first + n, rowAt(first + n))));
    if (current >= 0) scroller.setAttribute("aria-activedescendant", `row-${current}`);
    for (let n = Math.floor(first / PAGE); n <= Math.floor(Math.max(0, last - 1) / PAGE) && num; n++) {
      if (!pages.has(n)) fetchPage(n, ask.signal).catch(complain);
    }
    const order = LACKS[sort()] ? ` In this order are those that ${LACKS[sort()]}.` : "";
    told.textContent = total === null ? "…" : `${whole(num)} of ${whole(state.num_samples)} samples.${order}`;
  }

  function line(n, row) {
    const given = { class: `row${n === current ? " current" : ""}`, role: "row", "aria-rowindex": n + 2, id: `row-${n}` };
    if (!row) return el("div", given, el("div", { role: "gridcell" }, "…"));
    const cells = [el("a", { href: link(row.name), tabindex: -1 }, row.name),
      el("span", { class: `fate ${row.state.replaceAll(" ", "-")}` }, row.fate), number(row.step), number(row.reward),
      whole(row.num_tokens), number(row.age), took(row.seconds), row.engine, row.text];
    return el("div", given, ...cells.map((cell, c) => (
      el("div", { role: "gridcell", class: c > 1 && c < 7 ? "n" : c === 8 ? "text" : null, title: c === 8 ? row.text : null }, cell))));
  }

  function link(name) {
    const params = new URLSearchParams(context.params);
    params.set("sample", name);
    return `#/samples?${params}`;
  }

  scroller.addEventListener("scroll", draw);
  rows.addEventListener("pointerdown", press);
  for (const released of ["pointerup", "pointercancel"]) window.addEventListener(released, press);
  scroller.addEventListener("click", (event) => {
    const row = event.target.closest(".rows .row");
    if (row && !event.target.closest("a") && !getSelection().toString()) row.querySelector("a")?.click();
  });
  scroller.addEventListener("keydown", (event) => {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: shownRows() - 1, PageUp: 1 - shownRows(), Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Enter" && event.target === scroller) rows.querySelector(".current a")?.click();
    if (by === undefined || !total) return;
    event.preventDefault();
    current = Math.max(0, Math.min(total - 1, current + by));
    const seen = shownRows(), at = Math.floor(top());
    if (current < at || current >= at + seen) {
      const to = Math.max(0, Math.min(total - seen, current < at ? current : current - seen + 1));
      scroller.scrollTop = height() <= MAX_HEIGHT ? to * ROW
        : (to / (total - seen)) * (sizer.offsetHeight + ROW - scroller.clientHeight);
    }
    draw();
  });
  const resized = new ResizeObserver(draw);
  resized.observe(scroller);

  // --- as the run goes on ----------------------------------------------------------------------------------------
  let state = { is_ready: false, num_samples: 0 }, lastSlow = -Infinity, isGone = false, next = 0, later = 0;

  /** Have the server work on the index until it is complete. */
  async function index() {
    for (;;) {
      state = await context.fetchJson("samples/index");
      making.hidden = state.is_ready;
      ready.hidden = !state.is_ready;
      if (isGone || (state.is_ready && !state.doing)) return;
      progress.value = state.share;
      progress.hidden = state.is_waiting;
      making.lastChild.textContent = state.is_waiting ? state.doing : `${state.doing}: ${Math.floor(100 * state.share)} %, ${whole(state.num_samples)} samples. `
        + `This is done once for a run; what it makes lies in ${state.file} and may be deleted.`;
      if (state.is_waiting) return;
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  /** Ask again, at most a small share of the time: counting a million rows is work for the run's machine. */
  async function refillLater() {
    clearTimeout(later);
    const wait = next - performance.now();
    if (wait > 0) {
      later = setTimeout(refillLater, wait);
      return;
    }
    const began = performance.now();
    await refill(false);
    next = performance.now() + REST * (performance.now() - began);
  }

  async function update(files) {
    const sample = context.params.get("sample");
    list.hidden = Boolean(sample);
    page.element.hidden = !sample;
    if (sample) return page.show(sample, files !== null);
    await index();
    if (isGone || state.is_waiting) return;
    const isFirst = total === null;
    if (performance.now() - lastSlow > SLOW_MS) {
      lastSlow = performance.now();
      drawChoices(await context.fetchJson("samples/choices"));
      drawFilters();
    }
    if (isFirst) begin();
    else if (files && scroller.scrollTop === 0) refillLater();
    else draw();
  }

  function unmount() {
    isGone = true;
    clearTimeout(later);
    ask.abort();
    for (const released of ["pointerup", "pointercancel"]) window.removeEventListener(released, press);
    resized.disconnect();
    chart.destroy();
    page.destroy();
  }

  return { update, unmount };
}

/** Reward against length: points of few samples, cells of many. A click on a cell filters by it. */
function scatter(choose) {
  const canvas = el("canvas", { role: "img", class: "scatter", "aria-label": "Reward against length, not read yet" });
  const note = el("p", { class: "note" });
  const element = el("section", { class: "card" }, el("h3", {}, "Reward against length"), canvas, note);
  const LEFT = 44, BOTTOM = 30, TOP = 8, RIGHT = 8;
  let bins = null;

  function scales() {
    const width = canvas.clientWidth - LEFT - RIGHT, high = canvas.clientHeight - TOP - BOTTOM;
    const range = bins.highest - bins.lowest, margin = bins.cell_reward ? (range ? 0 : 0.5) : 0.05 * (range || 1);
    const low = bins.lowest - margin, span = range + 2 * margin;
    const most = Math.max(1, bins.most_tokens + 1);
    return { width, high, low, span, most, x: (v) => LEFT + (v / most) * width, y: (v) => TOP + high - ((v - low) / span) * high };
  }

  function draw() {
    const ratio = devicePixelRatio || 1;
    if (!bins || !canvas.clientWidth) return;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = canvas.clientHeight * ratio;
    const pen = canvas.getContext("2d"), { width, high, low, span, most, x, y } = scales();
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui";
    pen.strokeStyle = colour("grid");
    pen.fillStyle = colour("muted");
    for (let n = 0; n <= 4; n++) {
      pen.beginPath();
      pen.moveTo(LEFT, TOP + (high * n) / 4);
      pen.lineTo(LEFT + width, TOP + (high * n) / 4);
      pen.stroke();
      pen.textAlign = "right";
      pen.fillText(number(+(low + span * (1 - n / 4)).toPrecision(3)), LEFT - 6, TOP + (high * n) / 4 + 4);
      pen.textAlign = n === 4 ? "right" : "center";
      pen.fillText(number(Math.round((most * n) / 4)), LEFT + (width * n) / 4, TOP + high + 14);
    }
    pen.textAlign = "center";
    pen.fillText("tokens", LEFT + width / 2, TOP + high + 27);
    pen.fillStyle = colour("c0");
    const full = Math.log1p(Math.max(1, ...bins.cells.map((cell) => cell[2])));
    for (const [tokens, reward, count] of bins.cells) {
      if (!bins.cell_tokens) {
        pen.globalAlpha = 0.45;
        pen.beginPath();
        pen.arc(x(tokens), y(reward), 2.5, 0, 7);
        pen.fill();
      } else {
        pen.globalAlpha = 0.12 + (0.88 * Math.log1p(count)) / full;
        const tall = (bins.cell_reward / span) * high;
        pen.fillRect(x(tokens), y(reward) - tall, (bins.cell_tokens / most) * width - 0.5, tall - 0.5);
      }
    }
  }

  function clicked(event) {
    if (!bins?.cell_tokens) return;
    const { low, span, most, width, high } = scales(), box = canvas.getBoundingClientRect();
    const tokens = ((event.clientX - box.left - LEFT) / width) * most;
    const reward = low + (1 - (event.clientY - box.top - TOP) / high) * span;
    const cell = bins.cells.find(([t, r]) => tokens >= t && tokens < t + bins.cell_tokens && reward >= r && reward <= r + bins.cell_reward);
    if (cell) {
      choose({ min_tokens: Math.ceil(cell[0]), max_tokens: Math.floor(cell[0] + bins.cell_tokens),
        min_reward: +cell[1].toFixed(6), max_reward: +(cell[1] + bins.cell_reward).toFixed(6) });
    }
  }

  canvas.addEventListener("click", clicked);
  const resized = new ResizeObserver(draw);
  resized.observe(canvas);
  addEventListener("themechange", draw);
  return {
    element,
    set(found) {
      bins = found;
      const about = `${whole(bins.num_samples)} samples, rewards from ${number(bins.lowest)} to ${number(bins.highest)}, up to `
        + `${whole(bins.most_tokens)} tokens`;
      canvas.setAttribute("aria-label", about);
      note.textContent = !bins.num_samples ? "No sample of these has a reward." : about
        + (bins.every > 1 ? `; one in ${whole(bins.every)} is counted.` : ".") + (bins.cell_tokens ? " A click filters by a cell." : "");
      draw();
    },
    destroy() { resized.disconnect(); removeEventListener("themechange", draw); },
  };
}
