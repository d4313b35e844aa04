// One sample: what it was asked and wrote, its tokens one by one, its group, and its life as a swimlane.
import { duration, el, number, table } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const LINE = 26, LABEL = 168, NUM_COLOURS = 8;
const STRIPS = [
  ["logprob", "log-prob of the engine", "darker: less likely; full at e⁻⁵"],
  ["version", "weight version", "a colour for each version"],
  ["age", "age when trained", "darker: older, in versions"],
  ["mask", "mask", "grey: not made by the model, no loss"],
  ["teacher", "teacher − engine", "blue: the teacher finds it likelier; red: less likely"],
  ["learner", "learner − engine", "blue: the learner found it likelier before the step; red: less likely; full at 0.5"],
  ["ratio", "ratio", "blue: above 1; red: below; full at a factor of 1.65"],
  ["advantage", "advantage", "blue: made likelier; red: less likely; full at 2"],
];
/** What a strip draws of token n, null where there is nothing: above 0 is blue, below red, 1 and more is full. */
const LEANINGS = {
  teacher: (found, n) => apart(found.teacher_logprobs[n], found.logprobs[n], 3),
  learner: (found, n) => apart(found.learner_logprobs[n], found.logprobs[n], 0.5),
  ratio: (found, n) => (found.ratios[n] ? Math.log(found.ratios[n]) / 0.5 : null),
  advantage: (found, n) => apart(found.advantages[n], 0, 2),
};
const apart = (one, other, full) => (Number.isFinite(one) && Number.isFinite(other) ? (one - other) / full : null);
const whole = (value) => value.toLocaleString("en");
/** Seconds, or milliseconds of less than one: 0.86 ms, 5.2 s, 3 min 5 s. */
export const took = (seconds) => (seconds && seconds < 1 ? `${number(1000 * seconds)} ms` : duration(seconds));
const signed = (value) => (value === null || value === undefined ? "–" : `${value > 0 ? "+" : ""}${number(value)}`);

function svg(name, attributes = {}, text = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

/** {element, show(name, isAgain), destroy()} */
export function samplePage(context) {
  const element = el("article", { class: "sample", hidden: "" });
  let shown = "", life = null, strip = "logprob";

  let wide = 0; // as it was drawn last
  const resized = new ResizeObserver(() => { if (life && element.clientWidth && element.clientWidth !== wide) drawLife(); });
  resized.observe(element);
  const lanes = el("div", { class: "lanes" });

  function link(name) {
    const params = new URLSearchParams(context.params);
    if (name) params.set("sample", name); else params.delete("sample");
    return `#/samples?${params}`;
  }

  async function show(name, isAgain) {
    if (shown === name && isAgain && element.dataset.state !== "in the system") return;
    if (shown !== name) {
      element.replaceChildren(el("p", { class: "note" }, "reading …"));
      life = null;
    }
    shown = name;
    const found = context.fetchJson("samples/life", { sample: name });
    found.catch(() => {}); // it is awaited below, if the sample is known
    let sample;
    try {
      sample = await context.fetchJson("samples/sample", { sample: name });
    } catch (error) {
      element.replaceChildren(el("a", { href: link("") }, "← all samples"));
      throw error;
    }
    if (shown !== name) return;
    element.dataset.state = sample.state;
    const at = sample.group.findIndex((one) => one.name === name), mates = sample.group;
    element.replaceChildren(
      el("nav", { class: "crumbs", "aria-label": "samples" }, el("a", { href: link("") }, "← all samples"),
        at > 0 ? el("a", { href: link(mates[at - 1].name) }, `‹ ${mates[at - 1].name}`) : null,
        at >= 0 && at < mates.length - 1 ? el("a", { href: link(mates[at + 1].name) }, `${mates[at + 1].name} ›`) : null),
      el("h2", {}, `Sample ${name} `, el("span", { class: `fate ${sample.state.replaceAll(" ", "-")}` }, sample.fate)),
      ...death(sample), tiles(sample), ...images(sample), ...talk(sample), ...tokens(sample),
      ...sample.missing.map((text) => el("p", { class: "note" }, text)),
      el("h3", {}, "Its life"), lanes, ...group(sample),
    );
    lanes.replaceChildren(el("p", { class: "note" }, "looking for its spans …"));
    life = await found;
    if (shown === name) drawLife();
  }

  /** Drawn pixel by pixel: nothing of an image file reaches the browser. */
  function images(sample) {
    return sample.images.map(({ width, height, pixels }, index) => {
      const canvas = el("canvas", { width, height, role: "img", "aria-label": `image ${index + 1} of the prompt` });
      const bytes = Uint8ClampedArray.from(atob(pixels), (character) => character.charCodeAt(0));
      canvas.getContext("2d").putImageData(new ImageData(bytes, width, height), 0, 0);
      return canvas;
    });
  }

  function death(sample) {
    if (!sample.cause && !sample.reason) return [];
    return [el("section", { class: "card death" }, el("h3", {}, `Cause: ${sample.cause || "none yet"}`),
      sample.reason ? el("pre", {}, sample.reason) : el("p", { class: "note" }, "Nothing went wrong with it: it ended for what it is."))];
  }

  function tiles(sample) {
    const parts = Object.entries(sample.components).map(([name, value]) => `${name} ${number(value)}`).join(", ");
    const versions = sample.oldest_version === sample.newest_version ? number(sample.oldest_version)
      : `${sample.oldest_version}–${sample.newest_version}`;
    const facts = [
      ["reward", number(sample.reward), parts],
      ["against its group", sample.mean === null || sample.reward === null ? "–" : signed(sample.reward - sample.mean),
        sample.mean === null ? "" : `mean ${number(sample.mean)}, deviation ${number(sample.deviation)}`],
      ["tokens", whole(sample.num_tokens), sample.outcome],
      ["weights", versions, sample.age === null ? "" : `${sample.age} versions old when trained`],
      ["step", number(sample.step), sample.row === null ? "" : `row ${sample.row} of the dataset`],
      ["engine", sample.engine || "–", [sample.attempt ? `issued ${sample.attempt + 1} times` : "", sample.counted].filter(Boolean).join(", ")],
    ];
    return el("div", { class: "tiles" }, ...facts.map(([label, value, detail]) => el("div", { class: "tile" },
      el("div", { class: "label" }, label), el("div", { class: "value" }, value), el("div", { class: "detail" }, detail))));
  }

  function talk(sample) {
    const said = [["prompt", sample.prompt], ["response", sample.response], ["label", sample.label]];
    return said.filter(([, text]) => text).map(([name, text]) => (
      el("section", { class: `card said ${name}` }, el("h3", {}, name), el("pre", {}, text))));
  }

  // --- tokens ----------------------------------------------------------------------------------------------------

  function tokens(sample) {
    const found = sample.tokens;
    if (!found) return [];
    const detail = el("p", { class: "note token-detail", role: "status" }, "Point at a token, or move along them with the arrow keys.");
    const body = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "tokens" });
    const key = el("span", { class: "note" });
    const has = { teacher: found.teacher_logprobs.length, age: sample.step !== null };
    has.learner = has.ratio = has.advantage = found.learner_logprobs.length;
    const kinds = STRIPS.filter(([name]) => has[name] ?? true);
    const buttons = el("div", { class: "strips", role: "group", "aria-label": "what the colours show" }, ...kinds.map(([name, label]) => (
      el("button", { type: "button", "data-strip": name, click: () => { strip = name; draw(); } }, label))), key);
    const starts = new Set(found.starts.slice(1));

    function shade(n) {
      const mix = (name, share) => `color-mix(in srgb, var(--${name}) ${Math.round(60 * Math.min(1, Math.max(0, share)))}%, transparent)`;
      const logprob = found.logprobs[n];
      if (strip === "version") return mix(`c${found.versions[n] % NUM_COLOURS}`, 0.6);
      if (strip === "age") return mix("c1", (sample.step - 1 - found.versions[n]) / 4);
      if (strip === "mask") return found.is_made[n] ? "transparent" : mix("muted", 0.7);
      if (strip in LEANINGS) {
        const leaning = LEANINGS[strip](found, n);
        return leaning === null ? "transparent" : mix(leaning > 0 ? "c0" : "c3", Math.abs(leaning));
      }
      return logprob === null ? "transparent" : mix("c3", -logprob / 5);
    }

    function draw() {
      if (!kinds.some(([name]) => name === strip)) strip = "logprob";
      for (const button of buttons.querySelectorAll("button")) button.setAttribute("aria-pressed", button.dataset.strip === strip);
      key.textContent = kinds.find(([name]) => name === strip)[2];
      body.replaceChildren(...found.texts.flatMap((text, n) => {
        const token = el("span", { class: "token", "data-n": n }, text.replaceAll("\n", "⏎\n"));
        token.style.background = shade(n);
        return starts.has(found.first + n) ? [el("hr", { title: "next part" }), token] : [token];
      }));
    }

    let at = -1;
    function tell(n) {
      body.querySelector(".at")?.classList.remove("at");
      at = n;
      const token = body.querySelector(`[data-n="${n}"]`);
      const said = (name, values) => (values[n] === null || values[n] === undefined ? null : `${name} ${number(values[n])}`);
      token.classList.add("at");
      token.scrollIntoView({ block: "nearest" });
      detail.textContent = [`token ${whole(found.first + n)}`, `log-prob ${number(found.logprobs[n])}`,
        said("teacher", found.teacher_logprobs), said("learner", found.learner_logprobs), said("ratio", found.ratios),
        said("advantage", found.advantages), `weights of version ${found.versions[n]}`,
        found.is_made[n] ? null : "not made by the model"].filter(Boolean).join(" · ");
    }
    body.addEventListener("pointerover", (event) => { if (event.target.dataset.n) tell(Number(event.target.dataset.n)); });
    body.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      tell(Math.max(0, Math.min(found.texts.length - 1, at + by)));
    });
    draw();
    const last = found.first + found.texts.length;
    const more = last < found.num_tokens ? el("button", { type: "button", click: async () => {
      const next = await context.fetchJson("samples/sample", { sample: sample.name, first_token: last });
      const box = el("div", {}, ...tokens(next));
      section.replaceWith(...box.children);
    } }, `tokens from ${whole(last)}`) : null;
    const section = el("section", { class: "card" }, el("h3", {}, `Tokens ${whole(found.first)} to ${whole(last - 1)} of ${whole(found.num_tokens)}`),
      buttons, body, detail, more, el("p", { class: "note" }, `From ${found.source}.`));
    return [section];
  }

  // --- group and life --------------------------------------------------------------------------------------------

  function group(sample) {
    const rows = sample.group.map((one) => [
      one.name === sample.name ? el("b", {}, one.name) : el("a", { href: link(one.name) }, one.name), one.fate, number(one.reward),
      sample.mean === null || one.reward === null ? "–" : signed(one.reward - sample.mean),
      !sample.deviation || one.reward === null ? "–" : signed((one.reward - sample.mean) / sample.deviation), whole(one.num_tokens)]);
    if (rows.length < 2) return [];
    const heads = [["sample", ""], ["fate", ""], ["reward", "n"], ["− mean", "n"], ["÷ deviation", "n"], ["tokens", "n"]];
    return [el("h3", {}, "Its group"), table(heads, rows, { "aria-label": "samples of the group" })];
  }

  function drawLife() {
    wide = element.clientWidth;
    const stages = life.stages, broad = Math.max(320, lanes.clientWidth || element.clientWidth);
    if (!stages.length) return lanes.replaceChildren(el("p", { class: "note" }, life.missing || "Nothing of it is recorded yet."));
    const span = Math.max(1e-9, ...stages.map((one) => one.start_s + one.duration_s));
    const label = Math.min(LABEL, broad * 0.4), x = (s) => label + (s / span) * (broad - label - 70);
    const tall = LINE * stages.length + 22;
    const drawing = svg("svg", { width: broad, height: tall, role: "img", "aria-label": `life of ${took(life.duration_s)}` });
    for (let n = 0; n <= 4; n++) {
      const at = x((span * n) / 4);
      drawing.append(svg("line", { x1: at, x2: at, y1: 0, y2: tall - 18, class: "tick" }),
        svg("text", { x: at, y: tall - 4, class: "tick", "text-anchor": "middle" }, took((span * n) / 4)));
    }
    stages.forEach((stage, n) => {
      const y = n * LINE, from = x(stage.start_s), wide = Math.max(2, x(stage.start_s + stage.duration_s) - from);
      const name = `${stage.name} · ${stage.actor}`, most = Math.floor(label / 6.6);
      drawing.append(svg("text", { x: 0, y: y + 17, class: "stage" }, name.length > most ? `${name.slice(0, most - 1)}…` : name));
      bar(drawing, stage, from, y + 5, wide);
      drawing.append(svg("text", { x: from + wide + 5, y: y + 17, class: "tick" }, `${stage.is_recorded ? "" : "≤ "}${took(stage.duration_s)}`));
      // From where an attempt was left to where the next one begins.
      const before = stages.findLastIndex((one, m) => m < n && one.attempt !== null && one.attempt < stage.attempt);
      if (stage.name === "issue" && stage.attempt && before >= 0) {
        const left = x(stages[before].start_s + stages[before].duration_s), down = before * LINE + 18;
        drawing.append(svg("path", { d: `M${left},${down} C${left},${y} ${from},${down} ${from},${y + 5}`, class: "again" }),
          svg("text", { x: from + wide + 64, y: y + 17, class: "again" }, `attempt ${stage.attempt}`));
      }
    });
    const heads = [["stage", ""], ["at", "n"], ["took", "n"], ["what is known", ""]];
    const rows = stages.map((one) => [`${one.name} · ${one.actor}${one.attempt ? ` · attempt ${one.attempt}` : ""}`, `+${took(one.start_s)}`,
      `${one.is_recorded ? "" : "≤ "}${took(one.duration_s)}`, one.facts + (one.is_recorded ? "" : " not recorded; at most so long")]);
    const versions = [...new Set(stages.flatMap((one) => one.versions.map(([version]) => version)))].sort((a, b) => a - b);
    lanes.replaceChildren(el("div", { class: "scroll" }, drawing),
      el("p", { class: "keys" }, ...versions.map((version) => el("span", { class: `key c${version % NUM_COLOURS}` }, `version ${version}`))),
      ...(life.missing ? [el("p", { class: "note" }, life.missing)] : []),
      el("details", { open: lanes.querySelector("details")?.open }, el("summary", {}, "as a table"), table(heads, rows, { "aria-label": "stages" })));
  }

  /** A stage; of a generation what each version of the weights has made of it. */
  function bar(drawing, stage, from, y, wide) {
    const kind = stage.is_recorded ? "" : " unrecorded";
    const made = stage.versions.reduce((sum, [, count]) => sum + count, 0);
    if (!made) drawing.append(svg("rect", { x: from, y, width: wide, height: LINE - 10, rx: 3, class: `stage-${stage.name}${kind}` }));
    let at = from;
    for (const [version, count] of stage.versions) {
      const part = svg("rect", { x: at, y, width: (wide * count) / made, height: LINE - 10, class: `made c${version % NUM_COLOURS}${kind}` });
      part.append(svg("title", {}, `version ${version}: ${whole(count)} ${count === 1 ? "token" : "tokens"}`));
      drawing.append(part);
      at += (wide * count) / made;
    }
  }

  return { element, show, destroy() { resized.disconnect(); shown = ""; } };
}
