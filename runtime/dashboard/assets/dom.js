// Elements and figures. Text comes into the page as text only: of prompts, answers, rewards, names and errors. Controls
// in it are spelled out, as everywhere (runtime/safe_text.py): those of bidirectional text make it read otherwise.
const UNSAFE = /(?![\n\t])[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

/** Text without controls, but for line feeds and tabs. */
export const safe = (text) => String(text).replace(UNSAFE, (found) => {
  const code = found.codePointAt(0);
  return code < 0x100 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
});

/** An element: el("td", {class: "n", title: "…"}, "12", child). Attributes that are null are left out; an attribute
 * that is a function is a listener, by its event's name. */
export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(key, value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined).map((child) => (
    child instanceof Node ? child : safe(child))));
  return element;
}

/** A table: heads are [label, "n" for numbers or ""], rows are lists of texts or elements. */
export function table(heads, rows, attributes = {}) {
  const row = (name, cells) => el("tr", {}, ...cells.map((cell, n) => (
    el(name, { class: heads[n][1] || null, scope: name === "th" ? "col" : null }, cell))));
  const head = el("thead", {}, row("th", heads.map(([label]) => label)));
  return el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": attributes["aria-label"] ?? "table" },
    el("table", {}, head, el("tbody", {}, ...rows.map((cells) => row("td", cells)))));
}

/** Four significant digits: 0.1235, 12.35k, 1.2e-5. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(4)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
  return size && size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(+value.toPrecision(4));
}

/** A length of time in ms or s, to three digits. */
export const length = (seconds) => (seconds < 0.1 ? `${+(1000 * seconds).toPrecision(3)} ms` : `${+seconds.toPrecision(3)} s`);

/** Seconds as people say them: 5.2 s, 3 min 5 s, 2 h 10 min. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 60) return `${+seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${+(minutes / 1440).toPrecision(3)} d`;
}

/** The value of a colour of the palette, such as "c0" or "working". */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
