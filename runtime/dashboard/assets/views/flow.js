// Flow: the seven actors as a ring, what goes from one to the next, where it is held up, who waits for whom.
import { duration, el, number, table } from "../dom.js";

export const title = "Flow";

const SVG = "http://www.w3.org/2000/svg";
const ACTIVITIES = ["working", "waiting_for_samples", "waiting_for_demand", "waiting_for_weights", "waiting_for_tools", "applying_weights",
  "publishing", "checkpointing", "asleep", "starting", "down", "absent"];
const said = (text) => text.replaceAll("_", " ");
const MANY = "engines";

function card(node) {
  const all = Object.values(node.states).reduce((sum, count) => sum + count, node.num_down);
  const states = Object.entries(node.num_down ? { ...node.states, down: node.num_down } : node.states);
  const pill = ([state, count]) => el("span", { class: `state ${ACTIVITIES.includes(state) ? state : "other"}` },
    node.name === MANY ? `${count} ${said(state)}` : said(state));
  return el("section", { class: `node ${node.num_down ? "is-down" : ""} ${node.pressure ? "is-held" : ""}`, "data-node": node.name },
    el("h3", {}, node.name === MANY && all ? `${all} ${all === 1 ? "engine" : "engines"}` : node.title,
      node.num_restarts ? el("span", { class: "badge warn", title: "replaced so often" }, `↻ ${node.num_restarts}`) : ""),
    el("div", { class: "states" }, ...(states.length ? states.map(pill) : [el("span", { class: "state other" }, "not recorded")])),
    el("dl", {}, ...node.figures.flatMap((figure) => [
      el("dt", {}, figure.label), el("dd", {}, figure.unit === "%" ? `${Math.round(figure.value)} %` : `${number(figure.value)} ${figure.unit}`.trim())])),
    node.pressure ? el("p", { class: "held" }, `▮ ${node.pressure}`) : "");
}

/** Grants go back between the rows, from the Buffer to the PromptSource. */
function wayBack(start, end) {
  const x1 = start.left + 40, x2 = (end.left + end.right) / 2, y = start.top - 20;
  return { d: `M${x1} ${start.top}V${y}H${x2}V${end.bottom}`, x: x2, y: (y + end.bottom) / 2 - 4, isBeside: false };
}

/** A path from the side of one box to the side of the other, and where its label stands. */
function route(start, end) {
  const middle = (box) => [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
  const [sx, sy] = middle(start), [ex, ey] = middle(end);
  const isBeside = Math.abs(ex - sx) > Math.abs(ey - sy) * 1.2 && (start.right < end.left || end.right < start.left);
  const points = isBeside
    ? ex > sx ? [start.right, sy, end.left, ey] : [start.left, sy, end.right, ey]
    : ey > sy ? [sx, start.bottom, ex, end.top] : [sx, start.top, ex, end.bottom];
  const [x1, y1, x2, y2] = points;
  const bend = isBeside ? `C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2}` : `C${x1} ${(y1 + y2) / 2} ${x2} ${(y1 + y2) / 2}`;
  return { d: `M${x1} ${y1}${bend} ${x2} ${y2}`, x: (x1 + x2) / 2, y: (y1 + y2) / 2, isBeside };
}

function draw(name, attributes, text = "") {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return element;
}

export function mount(root, context) {
  const ring = el("div", { class: "ring" });
  const arrows = draw("svg", { class: "arrows", "aria-hidden": "true" });
  const below = el("div", {});
  root.append(ring, below);
  let flow = null;

  function drawArrows() {
    if (!flow) return;
    const outer = ring.getBoundingClientRect();
    const boxes = Object.fromEntries([...ring.querySelectorAll(".node")].map((node) => {
      const box = node.getBoundingClientRect();
      return [node.dataset.node, { left: box.left - outer.left, right: box.right - outer.left, top: box.top - outer.top, bottom: box.bottom - outer.top }];
    }));
    const head = draw("marker", { id: "arrowhead", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" });
    head.append(draw("path", { d: "M0 0L8 4L0 8z", class: "head" }));
    arrows.replaceChildren(head);
    const isNarrow = outer.width < 700;
    for (const edge of flow.edges) {
      if (isNarrow && (edge.what.value === null)) continue; // the ring is a list there: only what goes down it
      const [start, end] = [boxes[edge.start], boxes[edge.end]];
      const { d, x, y, isBeside } = edge.what.label === "grants" ? wayBack(start, end) : route(start, end);
      const moves = edge.what.value > 0 && context.runs[context.run].state === "running";
      arrows.append(draw("path", { d, class: `arrow ${moves ? "moves" : ""}`, "marker-end": "url(#arrowhead)" }));
      const words = edge.what.value === null ? [edge.what.label] : [edge.what.label, `${number(edge.what.value)} ${edge.what.unit}`];
      if (isBeside) {
        words.forEach((text, n) => arrows.append(draw("text", { x, y: y + (n ? 16 : -8), "text-anchor": "middle", class: n ? "rate" : "" }, text)));
      } else {
        const isRight = !isNarrow && x > outer.width / 2;
        arrows.append(draw("text", { x: x + (isRight ? -8 : 8), y: y + 4, "text-anchor": isRight ? "end" : "start" }, words.join("  ")));
      }
    }
  }

  function balance() {
    const { issued, in_system: inside, ended } = flow.balance;
    const trained = ended.filter((count) => count.state === "trained").reduce((sum, count) => sum + count.num_samples, 0);
    const lost = ended.filter((count) => !["trained", "evaluated"].includes(count.state));
    return el("section", { class: "node plain", "data-node": "balance" }, el("h3", {}, "Balance"), el("dl", {},
      ...[["issued", issued], ["in the system", inside], ["trained", trained],
        ...lost.slice(0, 5).map((count) => [said(count.cause || count.state), count.num_samples])]
        .flatMap(([label, count]) => [el("dt", {}, label), el("dd", {}, count.toLocaleString("en"))])));
  }

  async function update() {
    flow = await context.fetchJson("flow");
    ring.replaceChildren(arrows, ...flow.nodes.map(card), flow.balance ? balance() : "");
    drawArrows();
    const rows = flow.actors.map((actor) => [
      actor.name, el("span", { class: actor.is_down ? "bad" : "" }, actor.is_down ? "down" : said(actor.state)),
      actor.num_restarts, number(actor.running), number(actor.queued), number(actor.tokens_per_s),
      actor.cpu === null ? "–" : `${(100 * actor.cpu).toFixed(0)} %`,
      actor.memory_bytes === null ? "–" : `${(actor.memory_bytes / 2 ** 20).toFixed(0)} MiB`, duration(actor.silent_s),
    ]);
    const left = flow.num_actors - flow.actors.length;
    below.replaceChildren(
      ...(flow.at_s === null ? [el("p", { class: "note" }, "What the actors said was not recorded in this run; rates are of its steps.")] : []),
      el("h2", {}, "Who waits for whom"),
      flow.waits ? el("pre", { class: "card" }, flow.waits) : el("p", { class: "note" }, "Nobody has waited for too long."),
      el("h2", {}, "Faults"),
      flow.losses.length ? table([["at", "n"], ["actor"], ["what happened"]],
        flow.losses.toReversed().map((loss) => [duration(loss.at_s), loss.name, loss.story]), { "aria-label": "faults" })
        : el("p", { class: "note" }, "No actor was lost."),
      ...(rows.length ? [el("h2", {}, "Actors"), table([["actor"], ["does"], ["replaced", "n"], ["running", "n"], ["queued", "n"],
        ["tokens/s", "n"], ["CPU", "n"], ["memory", "n"], ["silent for", "n"]], rows, { "aria-label": "actors" })] : []),
      left > 0 ? el("p", { class: "note" }, `and ${left} more`) : "");
  }

  const resized = new ResizeObserver(drawArrows);
  resized.observe(ring);
  return { update, unmount() { resized.disconnect(); } };
}
