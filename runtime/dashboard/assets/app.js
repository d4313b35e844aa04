// The frame of the dashboard: token, address, tabs, theme, and the stream that says what has changed.
//
// A view is a module views/<name>.js with `title` and `mount(root, context)`, which returns {update(files), unmount()}.
// `update` is called when one of its files has changed, at most once a second, never while it is still at work, and then
// not before nine times as long as it took: however large a run is, its page costs a tenth of a core at most. A person
// who goes to another address waits for none of that.
import { controls } from "./controls.js";
import { el } from "./dom.js";

const TOKEN = "penstock-token", THEME = "penstock-theme";
const UPDATE_MS = 1000, QUICK_MS = 250, REST = 9, RETRY_MS = [500, 1000, 2000, 5000, 10000];
const at = (id) => document.getElementById(id);

class Refused extends Error {}

let overview = null;
let shown = null; // {name, run, view, isBusy, waiting: files or null, isAsked: by a person, rest: a timer or 0}

// --- asking ---------------------------------------------------------------------------------------------------------

/** The link carries the token once; then it is of this tab alone, and the address can be shown to others. */
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return;
  sessionStorage.setItem(TOKEN, given);
  history.replaceState(null, "", `${location.pathname}#/`);
}

async function ask(path, { query = {}, body = null, signal = null } = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const url = `/api/${path}?${new URLSearchParams(given.map(([key, value]) => [key, String(value)]))}`;
  const headers = { Authorization: `Bearer ${sessionStorage.getItem(TOKEN) ?? ""}` };
  const init = body === null ? { headers, signal } : { headers, signal, method: "POST", body: JSON.stringify(body) };
  const answer = await fetch(url, init);
  if (!answer.ok) throw new Refused((await answer.json()).error);
  return answer;
}

function complain(text) {
  at("trouble").textContent = text;
  at("trouble").hidden = !text;
}

// --- address --------------------------------------------------------------------------------------------------------

/** #/samples?run=1&step=4 → {name, params} */
function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { name: path, params: new URLSearchParams(query) };
}

function go(name, params = {}, { replaces = false } = {}) {
  const given = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== null && value !== ""));
  const hash = `#/${name}${given.size ? `?${given}` : ""}`;
  if (hash === location.hash) return;
  if (replaces) history.replaceState(null, "", hash); else location.hash = hash;
}

/** What a view is given. */
function contextOf(name, run) {
  return {
    run, // its number
    get runs() { return overview.runs; },
    get params() { return place().params; },
    /** Keep what the person has chosen in the address, without a new step in the history; null takes one away. */
    setParams(changes) {
      const params = { ...Object.fromEntries(place().params), ...changes };
      go(name, params, { replaces: true });
    },
    /** To another view, or to other parameters of this one. */
    navigate(to, params = {}) { go(to, run ? { run, ...params } : params); },
    /** GET /api/<path>: its JSON. It throws what the server says against it, to show to the person. */
    async fetchJson(path, query = {}, { signal = null, ofRun = run } = {}) {
      return (await ask(path, { query: { run: ofRun, ...query }, signal })).json();
    },
    async post(path, body) { return (await ask(path, { query: { run }, body })).json(); },
    complain,
  };
}

async function show() {
  const { name: wanted, params } = place();
  const views = overview.views;
  const name = views.some((view) => view.name === wanted) ? wanted : views[0].name;
  if (name !== wanted) return go(name, Object.fromEntries(params), { replaces: true }), show();
  const run = Math.min(overview.runs.length - 1, Math.max(0, Math.trunc(Number(params.get("run"))) || 0));
  drawHead(run, name);
  if (shown?.name === name && shown.run === run) return update(null);
  shown?.view?.unmount();
  const root = at("view");
  root.replaceChildren();
  root.setAttribute("aria-busy", "true");
  complain("");
  const mine = { name, run, view: null, isBusy: true, waiting: null, isAsked: false, rest: 0 };
  shown = mine;
  const module = await import(`./views/${name}.js`);
  if (shown !== mine) return;
  document.title = `${module.title} – ${overview.runs[run].name}`;
  mine.view = module.mount(root, contextOf(name, run));
  mine.isBusy = false;
  update(null);
}

/** Have the view look again; files: which have changed, null: a person went to another address of it. */
async function update(files) {
  const mine = shown;
  mine.isAsked ||= files === null;
  if (files) mine.waiting = [...(mine.waiting ?? []), ...files];
  if (mine.isBusy || (mine.rest && !mine.isAsked)) return;
  clearTimeout(mine.rest);
  const changed = mine.waiting;
  Object.assign(mine, { isBusy: true, isAsked: false, waiting: null, rest: 0 });
  const began = performance.now();
  try {
    await mine.view.update(changed);
    if (shown === mine) complain("");
  } catch (error) {
    if (shown === mine) complain(error.message);
    if (!(error instanceof Refused || error instanceof TypeError)) throw error;
  } finally {
    if (shown === mine) at("view").setAttribute("aria-busy", "false");
    mine.isBusy = false;
    mine.rest = setTimeout(() => {
      mine.rest = 0;
      if (shown === mine && mine.waiting) update([]);
    }, Math.max(UPDATE_MS - (performance.now() - began), REST * (performance.now() - began - QUICK_MS), 0));
    if (shown === mine && mine.isAsked) update(null);
  }
}

// --- head -----------------------------------------------------------------------------------------------------------

/** Draw a part of the head anew where it says something else: what stays keeps focus, an open list, and a click. */
function drawNew(id, says, make) {
  const key = JSON.stringify(says);
  if (at(id).dataset.says === key) return;
  at(id).dataset.says = key;
  at(id).replaceChildren(...make());
}

function drawHead(run, name) {
  const heads = overview.runs, head = heads[run];
  const names = heads.map((each) => each.name);
  drawNew("runs", [names, run, name], () => [names.length === 1 ? el("span", { class: "name" }, head.name)
    : el("select", { "aria-label": "run", change: (event) => go(name, { run: event.target.value }) },
      ...names.map((each, n) => el("option", { value: n, selected: n === run }, each)))]);
  const steps = head.num_steps ? `step ${head.version} of ${head.num_steps}` : `step ${head.version}`;
  const reward = head.reward === null ? null : `reward ${head.reward.toFixed(3)}`;
  at("head").replaceChildren(
    el("span", { class: `badge ${head.state}` }, head.state),
    ...[steps, reward, head.policy, head.model].filter(Boolean).map((text) => el("span", {}, text)),
    head.num_steps ? el("progress", { max: head.num_steps, value: head.version, "aria-label": "steps" }) : "",
    head.story ? el("p", { class: "story" }, head.story) : "",
  );
  if (head.state !== "running") at("controls").replaceChildren();
  else if (at("controls").dataset.run !== String(run) || !at("controls").firstChild) {
    at("controls").dataset.run = run;
    at("controls").replaceChildren(controls(async (command) => (
      (await ask("command", { query: { run }, body: { command } })).json())));
  }
  drawNew("tabs", [overview.views, run, name], () => overview.views.map((view) => el("a", {
    role: "tab", href: `#/${view.name}${run ? `?run=${run}` : ""}`, "aria-selected": view.name === name,
    tabindex: view.name === name ? 0 : -1, "aria-controls": "view",
  }, view.title)));
}

function moveAlongTabs(event) {
  const tabs = [...at("tabs").children];
  const now = tabs.indexOf(document.activeElement);
  const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: tabs.length - 1 }[event.key];
  if (to === undefined || now < 0) return;
  event.preventDefault();
  const name = overview.views[(to + tabs.length) % tabs.length].name;
  go(name, shown.run ? { run: shown.run } : {});
  show().then(() => at("tabs").querySelector("[aria-selected=true]").focus());
}

// --- theme ----------------------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (localStorage.getItem(THEME) ?? (dark.matches ? "dark" : "light")) === "dark";

function drawTheme() {
  const chosen = localStorage.getItem(THEME);
  if (chosen) document.documentElement.dataset.theme = chosen;
  at("theme").textContent = isDark() ? "☀" : "☾";
  window.dispatchEvent(new Event("themechange"));
}

// --- what changes ---------------------------------------------------------------------------------------------------

async function heard(change) {
  if (change.files.some((file) => overview.head_files.includes(file))) {
    overview = await (await ask("overview")).json();
    drawHead(shown.run, shown.name);
  }
  const mine = overview.views.find((view) => view.name === shown.name).files;
  const files = change.files.filter((file) => mine.includes(file));
  if (files.length) update(files);
}

async function listen() {
  for (let failures = 0; ; failures++) {
    try {
      const reader = (await ask("changes")).body.pipeThrough(new TextDecoderStream()).getReader();
      at("live").textContent = "live";
      at("live").className = "on";
      if (failures) show();
      failures = 0;
      for (let rest = "", part = await reader.read(); !part.done; part = await reader.read()) {
        const lines = (rest + part.value).split("\n");
        rest = lines.pop();
        for (const line of lines) if (line.startsWith("data: ")) await heard(JSON.parse(line.slice(6)));
      }
    } catch (error) {
      if (!(error instanceof TypeError || error instanceof Refused)) throw error;
    }
    at("live").textContent = "the server is gone: start penstock dashboard again";
    at("live").className = "off";
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
  }
}

async function begin() {
  takeToken();
  drawTheme();
  dark.addEventListener("change", drawTheme);
  at("theme").addEventListener("click", () => {
    localStorage.setItem(THEME, isDark() ? "light" : "dark");
    drawTheme();
  });
  try {
    overview = await (await ask("overview")).json();
  } catch (error) {
    complain(error.message);
    return;
  }
  at("tabs").addEventListener("keydown", moveAlongTabs);
  window.addEventListener("hashchange", show);
  await show();
  listen();
}

begin();
