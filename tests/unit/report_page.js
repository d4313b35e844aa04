"use strict";
// A page of report.html small enough for node: runs the report's script on charts, plays what a reader does, and says
// what the page then shows. In: {script, charts, smoothing, does: [[what, chart, …]]}; out: one view after each deed.

class Element {
  constructor(name, namespaceURI = "") {
    Object.assign(this, { name, namespaceURI, children: [], attributes: {}, listeners: {}, text: "", clientWidth: 466 });
  }

  setAttribute(key, value) { this.attributes[key] = String(value); }
  append(child) { this.children.push(child); }
  replaceChildren() { this.children = []; }
  addEventListener(kind, hear) { this.listeners[kind] = hear; }
  getBoundingClientRect() { return { left: 100 }; }
  get textContent() { return this.text + this.children.map((child) => child.textContent).join(""); }
  set textContent(text) { this.text = text; this.children = []; }
  set innerHTML(html) { throw new Error(`markup was written: ${html}`); }
  all(test) { return this.children.flatMap((child) => [...(test(child) ? [child] : []), ...child.all(test)]); }
  with(style) { return this.all((one) => (one.attributes.class ?? "").split(" ").includes(style)); }
  named(name) { return this.all((one) => one.name === name); }
}

const { script, charts, smoothing, does } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const boxes = charts.map((chart) => {
  const parts = { script: { textContent: chart }, ".plot": new Element("div") };
  return { plot: parts[".plot"], querySelector: (selector) => parts[selector] };
});
const slider = Object.assign(new Element("input"), { value: String(smoothing) });
const told = new Element("output");
globalThis.ResizeObserver = class { constructor(call) { this.observe = () => call(); } };
globalThis.document = {
  createElement: (name) => new Element(name),
  createElementNS: (namespace, name) => new Element(name, namespace),
  querySelectorAll: () => boxes,
  querySelector: (selector) => ({ "#smoothing": slider, "#smoothed": told })[selector],
};
(0, eval)(script);

const svg = (box) => box.plot.with("chart")[0];
const view = () => boxes.map((box) => ({
  labels: box.plot.with("key").map((key) => key.children[0].textContent),
  values: box.plot.with("key").map((key) => key.children[1].textContent),
  where: box.plot.with("where")[0].textContent,
  lines: svg(box).with("line").map((path) => path.attributes.d),
  faint: svg(box).with("faint").length,
  bands: svg(box).with("band").length,
  bars: svg(box).with("bar").length,
  dots: svg(box).with("dot").length,
  axis: svg(box).named("text").map((text) => text.textContent),
  buttons: box.plot.named("button").length,
  marks: svg(box).with("mark").filter((one) => one.name === "text").map((one) => [
    one.text, Number(one.attributes.x), Number(one.attributes.y), one.attributes["text-anchor"]]),
}));
const deeds = {
  look: () => {},
  hear: (chart, kind, event = {}) => svg(boxes[chart]).listeners[kind]({ preventDefault() {}, ...event }),
  at: (chart, kind, left) => svg(boxes[chart]).listeners[kind]({ clientX: 100 + left }),
  click: (chart, button) => boxes[chart].plot.named("button")[button].listeners.click(),
  smooth: (_, steps) => { slider.value = String(steps); slider.listeners.input(); },
};
console.log(JSON.stringify(does.map(([what, ...rest]) => { deeds[what](...rest); return view(); })));
