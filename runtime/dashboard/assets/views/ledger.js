// Ledger: where every sample and every token went, and a box for questions in SQL.
import { duration, el, number, table } from "../dom.js";

export const title = "Ledger";

const EXAMPLES = [
  ["reward and length by step", "SELECT version, avg(reward), avg(num_tokens) FROM samples WHERE state = 'trained' GROUP BY version"],
  ["why samples failed", "SELECT cause, kind, num_samples, example FROM reason_counts"],
  ["grant to admission to training", "SELECT version, avg(admitted_at - granted_at), avg(ended_at - admitted_at) FROM groups WHERE state = 'trained' GROUP BY version"],
  ["the log", "SELECT sequence, kind, entry_json(body) FROM entries ORDER BY sequence DESC LIMIT 50"],
];
const COLOURS = ["c2", "c4", "c3", "c1"];
const REST = 20; // Reading a long ledger takes a while: the view rests so many times as long.
const whole = (value) => value.toLocaleString("en");

export function mount(root, context) {
  const sums = el("div", {}), answer = el("div", { class: "answer", "aria-live": "polite" });
  const sql = el("textarea", { id: "sql", rows: 4, maxlength: 4000, spellcheck: "false", "aria-label": "SQL",
    keydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(); } });
  const button = el("button", { type: "button", class: "primary", click: () => run() }, "ask");
  const tables = el("details", { class: "card", toggle: () => drawTables() }, el("summary", {}, "tables and columns"));
  root.append(sums, el("h2", {}, "Ask the ledger"),
    el("section", { class: "card sql" }, el("p", { class: "note" },
      "SELECT in SQLite's words. It can change nothing, ends after some seconds and shows a thousand rows; Ctrl+Enter asks."),
    sql, el("div", { class: "strips" }, button, ...EXAMPLES.map(([label, text]) => (
      el("button", { type: "button", click: () => { sql.value = text; run(); } }, label)))), answer),
    tables);
  sql.value = context.params.get("sql") ?? "SELECT * FROM balance";
  let ask = new AbortController(), next = 0, later = 0, areTablesDrawn = false;

  async function run() {
    ask.abort();
    ask = new AbortController();
    const { signal } = ask;
    context.setParams({ sql: sql.value });
    button.disabled = true;
    answer.replaceChildren(el("p", { class: "note" }, "asking …"));
    try {
      const found = await context.fetchJson("ledger/sql", { sql: sql.value }, { signal });
      answer.replaceChildren(
        table(found.names.map((name, n) => [name, found.is_number[n] ? "n" : ""]),
          found.rows.map((row) => row.map((cell) => cell ?? el("span", { class: "note" }, "NULL"))), { "aria-label": "answer" }),
        el("p", { class: "note" }, `${whole(found.rows.length)} row${found.rows.length === 1 ? "" : "s"} in ${duration(found.took_s)}`),
        found.cut ? el("p", { class: "note" }, found.cut) : "");
    } catch (error) {
      if (error.name === "AbortError") return;
      answer.replaceChildren(el("p", { class: "refused", role: "alert" }, error.message));
    } finally {
      if (!signal.aborted) button.disabled = false;
    }
  }

  function bar(parts, sum) {
    return el("div", { class: "stack", role: "img", "aria-label": parts.map(([name, value]) => `${name} ${whole(value)}`).join(", ") },
      ...parts.filter(([, value]) => value > 0).map(([name, value], n) => {
        const part = el("span", { class: parts[n][2], title: `${name}: ${whole(value)}` });
        part.style.flexGrow = value / sum;
        return part;
      }));
  }

  function draw(found) {
    const total = found.balance.reduce((sum, one) => sum + one.num_samples, 0);
    const share = (value, sum) => (sum ? `${number((100 * value) / sum)} %` : "–");
    const parts = found.tokens.map((one, n) => [one.name, one.num_tokens, `fill ${COLOURS[n]}`]);
    const balance = table([["state", ""], ["cause", ""], ["samples", "n"], ["share", "n"], ["tokens", "n"]],
      found.balance.map((one) => [one.state, one.cause, whole(one.num_samples), share(one.num_samples, total), whole(one.num_tokens)]),
      { "aria-label": "balance" });
    const seconds = found.waste.reduce((sum, one) => sum + one.device_s, 0);
    const waste = table([["cause", ""], ["tokens", "n"], ["of all generated", "n"], ["device time", "n"]],
      found.waste.map((one) => [`${one.state}: ${one.cause}${one.is_estimate ? " (estimate)" : ""}`, whole(one.num_tokens),
        share(one.num_tokens, found.num_generated), duration(one.device_s)]), { "aria-label": "waste by cause" });
    const reasons = table([["cause", ""], ["samples", "n"], ["kind", ""], ["one of them", ""]],
      found.reasons.map((one) => [one.cause, whole(one.num_samples), one.kind, one.example]), { "aria-label": "reasons of failures" });
    sums.replaceChildren(
      el("div", { class: "charts" },
        el("section", { class: "card" }, el("h3", {}, `${whole(total)} samples`), total ? balance
          : el("p", { class: "note" }, "Nothing stands in the ledger: the run's Buffer has not started, or the folder is not whole.")),
        el("section", { class: "card" }, el("h3", {}, `${whole(found.num_generated)} tokens that the model made`), bar(parts, found.num_generated),
          el("p", { class: "keys" }, ...parts.map(([name, value, kind]) => (
            el("span", { class: `key ${kind}` }, name, el("b", {}, `${whole(value)} (${share(value, found.num_generated)})`))))),
          el("h3", { class: "next" }, found.waste.length ? `Waste by cause: ${duration(seconds)} of device time` : "Nothing was wasted"),
          found.waste.length ? waste : "")),
      ...(found.reasons.length ? [el("h2", {}, "Why samples failed"), el("section", { class: "card" }, reasons)] : []));
  }

  async function drawTables() {
    if (areTablesDrawn) return;
    areTablesDrawn = true;
    const found = await context.fetchJson("ledger/tables");
    tables.append(...found.tables.map((one) => el("details", {}, el("summary", {}, el("code", {}, one.name)), el("p", { class: "note" }, one.meaning),
      table([["column", ""], ["type", ""], ["meaning", ""]], one.columns.map((column) => (
        [el("code", {}, column.name), column.kind, column.meaning])), { "aria-label": one.name }))));
  }

  async function update(files) {
    clearTimeout(later);
    if (files && performance.now() < next) {
      later = setTimeout(() => update(files).catch((error) => context.complain(error.message)), next - performance.now());
      return;
    }
    const found = await context.fetchJson("ledger/balance");
    next = performance.now() + 1000 * REST * found.took_s;
    draw(found);
  }

  return { update, unmount() { clearTimeout(later); ask.abort(); } };
}
