"use strict";
// Draws the charts of a report from the JSON beside each of them. It asks no network, uses no library, and puts text
// into the page as text only: names come from scenarios, rows and models.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const HEIGHT = 224, LEFT = 54, RIGHT = 12, TOP = 20, BOTTOM = 34;
  const NUM_COLOURS = 8, NUM_ROWS = 12; // of colours; of words at marks, one above the other
  const DRAG = 8; // pixels from which on a drag is meant as one
  const plots = [];
  const zooms = new Map(); // x label → [low, high]; without an entry all of it is shown
  let smoothing = 1; // steps

  function add(parent, name, attributes = {}, text = "") {
    const isSvg = name === "svg" || parent.namespaceURI === SVG;
    const element = isSvg ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.textContent = text;
    parent.append(element);
    return element;
  }

  /** Round numbers between low and high, about so many. */
  function ticks(low, high, wanted) {
    const raw = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(raw));
    const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n++) found.push(n * step);
    return found;
  }

  /** Four significant digits: 0.1235, 12.35k, 1.2e-5. */
  function number(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
    if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
    return size && size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(+value.toPrecision(4));
  }

  /** At each place the mean of the last `width` values up to it; null where there is none. */
  function trailingMean(values, width) {
    let sum = 0, count = 0;
    const take = (value, sign) => {
      if (value === null || value === undefined) return;
      sum += sign * value;
      count += sign;
    };
    return values.map((value, end) => {
      take(value, 1);
      take(values[end - width], -1);
      return count ? sum / count : null;
    });
  }

  /** For each stretch a row in which it lies over no other; -1 where all rows are taken. */
  function rowsOf(stretches) {
    const rows = Array.from({ length: NUM_ROWS }, () => []);
    return stretches.map(([from, to]) => {
      const row = rows.findIndex((others) => others.every(([left, right]) => to <= left || right <= from));
      rows[row]?.push([from, to]);
      return row;
    });
  }

  /** The place of the x nearest to a value, of ascending ones. */
  function nearest(x, value) {
    let low = 0, high = x.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (x[middle] <= value) low = middle; else high = middle;
    }
    return value - x[low] <= x[high] - value ? low : high;
  }

  class Plot {
    constructor(box) {
      this.chart = JSON.parse(box.querySelector("script").textContent);
      this.lines = this.chart.lines.map(
        (line, place) => ({ ...line, place, colour: `c${(line.colour ?? place) % NUM_COLOURS}` }),
      );
      this.hasWholeX = this.lines.every((line) => line.x.every(Number.isInteger));
      this.hidden = new Set();
      this.isLog = false;
      this.at = null;
      const names = this.lines.map((line) => line.label).join(", ");
      this.svg = add(box.querySelector(".plot"), "svg", {
        class: "chart", height: HEIGHT, tabindex: 0, role: "img", "aria-label": `${this.chart.title}: ${names}`,
      });
      this.legend = add(box.querySelector(".plot"), "div", { class: "keys" });
      this.where = add(this.legend, "span", { class: "where" });
      this.values = this.lines.map((line) => this.key(line));
      const isPositive = this.lines.every((line) => line.y.every((value) => value === null || value > 0));
      if (isPositive && !this.chart.are_bars) this.toggle("log", "log", false, (isOn) => { this.isLog = isOn; });
      this.listen();
      new ResizeObserver(() => this.draw()).observe(this.svg);
    }

    /** A button of the legend that is on or off. */
    toggle(style, label, isOn, change) {
      const button = add(this.legend, "button", { type: "button", class: style, "aria-pressed": isOn });
      add(button, "span", {}, label);
      button.addEventListener("click", () => {
        isOn = !isOn;
        button.setAttribute("aria-pressed", isOn);
        change(isOn);
        this.draw();
      });
      return button;
    }

    /** The button that shows or hides a line; returns the place of the line's value in it. */
    key(line) {
      const change = (isOn) => { if (isOn) this.hidden.delete(line.place); else this.hidden.add(line.place); };
      return add(this.toggle(`key ${line.colour}`, line.label, true, change), "b");
    }

    listen() {
      const group = this.chart.x_label;
      const at = (event) => event.clientX - this.svg.getBoundingClientRect().left;
      let from = null; // where a drag began, in pixels
      this.svg.addEventListener("pointerdown", (event) => { from = at(event); });
      this.svg.addEventListener("pointermove", (event) => {
        point(group, this.valueAt(at(event)));
        if (from !== null) this.select(from, at(event));
      });
      this.svg.addEventListener("pointerleave", () => { from = null; this.select(0, 0); point(group, null); });
      this.svg.addEventListener("pointerup", (event) => {
        const [low, high] = [from ?? at(event), at(event)].sort((one, other) => one - other);
        from = null;
        this.select(0, 0);
        if (high - low > DRAG) zoom(group, [this.valueAt(low), this.valueAt(high)]);
      });
      this.svg.addEventListener("dblclick", () => zoom(group, null));
      this.svg.addEventListener("keydown", (event) => {
        const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (event.key === "Escape") zoom(group, null);
        if (!move) return;
        event.preventDefault();
        const x = this.lines[0].x;
        const now = this.at === null ? x.length - 1 : nearest(x, this.at) + move;
        point(group, x[Math.min(x.length - 1, Math.max(0, now))]);
      });
    }

    shown() { return this.lines.filter((line) => !this.hidden.has(line.place)); }
    across(x) { return LEFT + ((x - this.x[0]) / (this.x[1] - this.x[0])) * (this.width - LEFT - RIGHT); }
    valueAt(left) { return this.x[0] + ((left - LEFT) / (this.width - LEFT - RIGHT)) * (this.x[1] - this.x[0]); }
    scaled(y) { return this.isLog ? Math.log10(y) : y; }
    down(y) {
      const share = (this.scaled(y) - this.y[0]) / (this.y[1] - this.y[0]);
      return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM);
    }

    /** What the axes show: all x, or those zoomed to, and the y of the lines there. */
    measure() {
      const margin = this.chart.are_bars ? 0.6 : 0;
      const first = Math.min(...this.lines.map((line) => line.x[0]));
      const last = Math.max(...this.lines.map((line) => line.x.at(-1)));
      this.x = zooms.get(this.chart.x_label) ?? [first - margin, last + margin];
      if (this.x[0] === this.x[1]) this.x = [first - 0.5, last + 0.5];
      let low = this.chart.from_zero && !this.isLog ? 0 : Infinity, high = -Infinity;
      for (const line of this.shown()) {
        line.means = smoothing > 1 && line.is_smoothed !== false ? trailingMean(line.y, smoothing) : null;
        line.x.forEach((x, n) => {
          if (line.y[n] === null || x < this.x[0] || x > this.x[1]) return;
          const spread = this.isLog ? 0 : line.spread?.[n] ?? 0;
          const mean = line.means?.[n] ?? line.y[n];
          low = Math.min(low, this.scaled(Math.min(mean, line.y[n] - spread)));
          high = Math.max(high, this.scaled(Math.max(mean, line.y[n] + spread)));
        });
      }
      if (high < low) [low, high] = [0, 1];
      const room = (high - low) * 0.06 || Math.abs(high) * 0.05 || 0.5;
      this.y = [low === 0 && this.chart.from_zero ? 0 : low - room, high + room];
    }

    draw() {
      this.width = this.svg.clientWidth;
      if (!this.width) return; // folded away; drawn when it is opened
      this.measure();
      this.svg.replaceChildren();
      this.axes();
      const clip = add(this.svg, "svg", { x: LEFT, y: 0, width: this.width - LEFT - RIGHT, height: HEIGHT });
      const inner = add(clip, "g", { transform: `translate(${-LEFT} 0)` });
      for (const line of this.shown()) {
        if (this.chart.are_bars) this.bars(inner, line); else this.line(inner, line);
      }
      const marks = this.chart.marks?.filter(({ x }) => x >= this.x[0] && x <= this.x[1]) ?? [];
      const placed = marks.map((mark) => ({ mark, x: this.across(mark.x), isLate: this.across(mark.x) > this.width / 2 }));
      const rows = rowsOf(placed.map(({ mark, x, isLate }) => {
        const width = 6 * mark.label.length + 8;
        return isLate ? [x - width, x] : [x, x + width];
      }));
      for (const [n, { mark, x, isLate }] of placed.entries()) {
        const line = add(inner, "line", { class: "mark", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM });
        add(line, "title", {}, mark.label);
        if (rows[n] < 0) continue; // told by its title
        const place = { x: isLate ? x - 4 : x + 4, y: TOP + 9 + 11 * rows[n], "text-anchor": isLate ? "end" : "start" };
        add(inner, "text", { class: "mark", ...place }, mark.label);
      }
      this.cursor = add(this.svg, "g", { class: "cursor" });
      this.selection = add(this.svg, "rect", { class: "selection", y: TOP, height: HEIGHT - TOP - BOTTOM, width: 0 });
      this.point(this.at);
    }

    axes() {
      const bottom = HEIGHT - BOTTOM;
      const powers = this.isLog && this.y[1] - this.y[0] > 2;
      const [low, high] = this.isLog && !powers ? this.y.map((exponent) => 10 ** exponent) : this.y;
      for (const tick of ticks(low, high, 4).filter((tick) => !powers || Number.isInteger(tick))) {
        const value = powers ? 10 ** tick : tick;
        const y = this.down(value);
        add(this.svg, "line", { class: "grid", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y });
        add(this.svg, "text", { x: LEFT - 6, y: y + 3, "text-anchor": "end" }, number(value));
      }
      for (const tick of ticks(this.x[0], this.x[1], Math.min(8, this.width / 70))) {
        if (this.hasWholeX && !Number.isInteger(tick)) continue;
        add(this.svg, "text", { x: this.across(tick), y: bottom + 14, "text-anchor": "middle" }, number(tick));
      }
      const middle = (LEFT + this.width - RIGHT) / 2;
      add(this.svg, "text", { x: middle, y: HEIGHT - 4, "text-anchor": "middle" }, this.chart.x_label);
      add(this.svg, "text", { x: LEFT, y: 11 }, this.chart.y_label);
    }

    bars(parent, line) {
      const width = Math.min(60, 0.72 * (this.across(1) - this.across(0)));
      line.x.forEach((x, n) => {
        const top = this.down(line.y[n]);
        const box = { x: this.across(x) - width / 2, y: top, width, height: HEIGHT - BOTTOM - top };
        add(parent, "rect", { class: `bar ${line.colour}`, ...box });
      });
    }

    line(parent, line) {
      if (line.spread?.length) {
        const edge = (sign) => line.y.map((y, n) => (y === null ? null : y + sign * (line.spread[n] ?? 0)));
        const there = this.path(line, edge(1)), back = this.path(line, edge(-1), true);
        if (!this.isLog) add(parent, "path", { class: `band ${line.colour}`, d: `${there}${back.replace("M", "L")}Z` });
      }
      const style = `line ${line.colour} ${line.style ?? ""}`;
      add(parent, "path", { class: line.means ? `${style} faint` : style, d: this.path(line, line.y) });
      if (line.means) add(parent, "path", { class: style, d: this.path(line, line.means) });
      const isGap = (n) => (line.y[n] ?? null) === null;
      line.x.forEach((x, n) => {
        const isAlone = isGap(n - 1) && isGap(n + 1);
        if (!isGap(n) && (isAlone || line.style === "points")) this.dot(parent, line, x, line.y[n]);
      });
    }

    dot(parent, line, x, y) {
      add(parent, "circle", { class: `dot ${line.colour}`, cx: this.across(x), cy: this.down(y), r: 3 });
    }

    path(line, y, isBackwards = false) {
      const points = line.x.map((x, n) => [x, y[n]]);
      let d = "", before = null;
      for (const [x, value] of isBackwards ? points.reverse() : points) {
        if (value !== null) {
          const [left, top] = [this.across(x).toFixed(1), this.down(value).toFixed(1)];
          d += before === null ? `M${left} ${top}` : line.style === "steps" ? `H${left}V${top}` : `L${left} ${top}`;
        }
        before = value;
      }
      return d;
    }

    /** Move the crosshair to the own x that is nearest to this one, and read off every line there. */
    point(at) {
      this.at = at;
      if (!this.cursor) return;
      this.cursor.replaceChildren();
      const all = this.shown().map((line) => line.x[nearest(line.x, at ?? Infinity)]);
      const off = (x) => Math.abs(x - at);
      const x = at === null || !all.length ? null : all.reduce((best, one) => (off(one) < off(best) ? one : best));
      this.where.textContent = x === null ? "" : `${this.chart.x_label} ${number(x)}`;
      if (x !== null) {
        const left = this.across(x);
        add(this.cursor, "line", { x1: left, x2: left, y1: TOP, y2: HEIGHT - BOTTOM });
      }
      for (const line of this.lines) {
        const n = nearest(line.x, x ?? Infinity);
        const y = x === null || line.x[n] === x ? line.y[n] : null;
        this.values[line.place].textContent = number(y);
        if (x !== null && y !== null && !this.hidden.has(line.place)) this.dot(this.cursor, line, x, y);
      }
    }

    select(from, to) {
      this.selection?.setAttribute("x", Math.min(from, to));
      this.selection?.setAttribute("width", Math.abs(to - from));
    }
  }

  const sharing = (group) => plots.filter((plot) => plot.chart.x_label === group);

  function point(group, x) { for (const plot of sharing(group)) plot.point(x); }

  function zoom(group, range) {
    if (range === null) zooms.delete(group); else zooms.set(group, range);
    for (const plot of sharing(group)) plot.draw();
  }

  for (const box of document.querySelectorAll(".has-chart")) plots.push(new Plot(box));
  const slider = document.querySelector("#smoothing");
  const smooth = () => {
    smoothing = Number(slider.value);
    document.querySelector("#smoothed").textContent = smoothing > 1 ? `mean of ${smoothing} steps` : "off";
    for (const plot of plots) plot.draw();
  };
  slider?.addEventListener("input", smooth);
  if (slider) smooth();
})();
