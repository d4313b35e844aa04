// Explain: what binds the run, by penstock explain: causes with their evidence, alarms, the bound, slow steps, knobs.
import { el, length, number, table } from "../dom.js";

export const title = "Explain";

const percent = (share) => `${Math.round(100 * share)} %`;

function evidence(list) {
  return el("ul", { class: "evidence" }, ...list.map((each) => (
    el("li", {}, `${each.what}: `, el("b", {}, each.unit === "s" ? length(each.value) : `${+each.value.toPrecision(3)} ${each.unit}`.trim()), ` (${each.source})`))));
}

function path(name, step) {
  const rows = step.stages.map((stage) => [stage.name, `${length(stage.seconds)}`, `${length(stage.in_step_s)}`, stage.actor,
    stage.is_recorded ? "" : "not recorded, at most so long"]);
  const head = el("p", {}, `${name}: step ${step.version}, ${length(step.step_s)}`,
    rows.length ? `; what came last was sample ${step.sample}` : "; no sample of it was traced");
  return el("section", { class: "card" }, head, rows.length
    ? table([["stage"], ["took", "n"], ["of the step", "n"], ["where"], [""]], rows, { "aria-label": name }) : "");
}

export function mount(root, context) {
  const found = el("div", {});
  const again = el("button", { type: "button", click: () => update() }, "look again");
  const note = el("p", { class: "note", role: "status" });
  root.append(el("div", { class: "tools top" }, again, note), found);

  async function update() {
    note.textContent = "reading traces …";
    again.disabled = true;
    try {
      draw(await context.fetchJson("explain"));
      note.textContent = "";
    } catch (error) {
      note.textContent = "";
      throw error;
    } finally {
      again.disabled = false;
    }
  }

  function draw(told) {
    const parts = [el("p", { class: "headline" }, told.headline)];
    if (told.alarms.length) {
      parts.push(el("h2", {}, "Alarms"), el("p", { class: "note" }, "Look at these first: a quicker run would only learn the wrong thing sooner."),
        ...told.alarms.map((alarm) => el("section", { class: "card alarm" }, el("h3", {}, alarm.name), el("p", {}, alarm.text), evidence(alarm.evidence))));
    }
    if (told.facts) parts.push(el("h2", {}, "What costs time"), el("p", { class: "note" }, `Steps ${told.facts.first_step} to ${told.facts.last_step}, ${length(told.facts.step_s)} each.`));
    parts.push(...told.bindings.map((binding) => el("section", { class: `card cause ${binding.binds ? "binds" : ""}` },
      el("h3", {}, binding.cause, binding.binds ? el("span", { class: "badge warn" }, "binds") : ""),
      binding.cost_s ? el("p", { class: "note" }, `${percent(binding.share)} of a step, ${binding.who}`) : el("p", { class: "note" }, binding.who),
      binding.cost_s ? el("progress", { max: 1, value: Math.min(1, binding.share), "aria-label": `share of a step: ${binding.cause}` }) : "",
      el("p", {}, binding.text), evidence(binding.evidence))));
    if (told.bound) {
      const bound = told.bound;
      parts.push(el("h2", {}, "The bound"), el("section", { class: "card" }, el("p", {},
        el("code", {}, bound.formula), ` with generation ${length(bound.generation_s)}, training ${length(bound.training_s)}, weights ${length(bound.exposed_s)}: `,
        el("b", {}, `${number(bound.least_s)}${bound.most_s === null ? "" : ` to ${number(bound.most_s)}`} s`), `; measured `, el("b", {}, `${length(bound.measured_s)}`), "."),
        el("p", { class: "note" }, `Active: ${bound.active}${bound.slack_s ? `; the other has ${length(bound.slack_s)} of slack` : ""}.`)));
    }
    if (told.knobs.length) {
      parts.push(el("h2", {}, "Knobs to turn next"), table([["key"], ["change"], ["steps shorter by at most", "n"], ["a step then takes at least", "n"]],
        told.knobs.map((knob) => [el("code", {}, knob.key), knob.change, `${Math.round(knob.gain)} %`, `${length(knob.step_s)}`]), { "aria-label": "knobs" }));
    }
    if (told.typical) parts.push(el("h2", {}, "Where a step's time goes"), path("A typical step", told.typical), ...told.slowest.map((step) => path("A slow step", step)));
    if (told.missing.length) parts.push(el("h2", {}, "Not known"), el("ul", {}, ...told.missing.map((text) => el("li", {}, text))));
    found.replaceChildren(...parts);
  }

  return { update, unmount() {} };
}
