// Learning: the report's charts, live; several runs share them, each with its own colour.
import { chartBox } from "../charts.js";
import { el } from "../dom.js";

export const title = "Learning";

export function mount(root, context) {
  const boxes = new Map(); // title of a chart → what draws it
  const note = el("p", { class: "note" }, "reading …");
  const parts = el("div", {});
  root.append(note, parts);

  /** The charts of all runs by their titles: a line for each line of each run. */
  function merged(answers) {
    const groups = new Map();
    answers.forEach((answer, run) => answer.groups.forEach((group) => group.charts.forEach((chart) => {
      const charts = groups.get(group.title) ?? new Map();
      groups.set(group.title, charts);
      const lines = chart.lines.map((line, n) => (answers.length === 1 ? { ...line, colour: line.colour ?? n } : {
        ...line, label: `${context.runs[run].name}: ${line.label}`, colour: run, dash: n,
      }));
      const marks = answers.length === 1 ? chart.marks ?? [] : (chart.marks ?? []).map(
        (mark) => ({ ...mark, label: `${context.runs[run].name}: ${mark.label}` }));
      const there = charts.get(chart.title);
      if (there) {
        there.lines.push(...lines);
        there.marks.push(...marks);
      } else charts.set(chart.title, { ...chart, lines, marks });
    })));
    return groups;
  }

  async function update() {
    const answers = await Promise.all(context.runs.map((_, run) => context.fetchJson("learning", {}, { ofRun: run })));
    const groups = merged(answers);
    note.textContent = groups.size ? "" : "Nothing was reported yet: the first step brings the first charts.";
    note.hidden = groups.size > 0;
    for (const [name, charts] of groups) {
      const id = `part-${name.toLowerCase().replaceAll(/\W+/g, "-")}`;
      if (!parts.querySelector(`#${id}`)) parts.append(el("h2", {}, name), el("div", { class: "charts", id }));
      for (const chart of charts.values()) {
        if (boxes.has(chart.title)) continue;
        const box = chartBox(chart);
        boxes.set(chart.title, box);
        parts.querySelector(`#${id}`).append(box.element);
      }
      for (const chart of charts.values()) boxes.get(chart.title).set(chart);
    }
  }

  return { update, unmount() { for (const box of boxes.values()) box.destroy(); } };
}
