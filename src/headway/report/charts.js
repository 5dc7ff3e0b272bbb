// Charts over steps that can be read, zoomed and smoothed, by pointer and by keyboard; over steps, tokens or time.
//
// It reads the numbers that headway.report.charts wrote beside each line, asks nothing of the network, and a page
// without it says all that it says. In a long series it has the smallest, the largest and the mean value of each bucket.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const WIDE = 1000; // of the curves, which are stretched over the plot
const MANY = 20; // times the smallest value, from which on an axis is logarithmic
const CHARACTER = 7.2, APART = 10; // width of a digit, and room between two labels [pixels]
const FEWEST = 20; // values of a line that is smoothed
const DRAG = 6; // a pointer that moved by less has not chosen a range [pixels]

// Values with their units, as the functions of these names in headway.report.charts write them.
const forms = {
  plain: value => {
    const [digits, power] = value.toExponential(3).split("e").map(Number);
    if (power >= -4 && power < 4) return String(Number(value.toPrecision(4)));
    return `${digits}e${power < 0 ? "-" : "+"}${String(Math.abs(power)).padStart(2, "0")}`;
  },
  share: value => `${(100 * value).toFixed(1)} %`,
  count: value => Math.round(value).toLocaleString("en"),
  duration: seconds => {
    if (seconds < 0.9995e-3) return seconds ? `${(1e6 * seconds).toFixed(0)} us` : "0 s";
    if (seconds < 0.9995) return `${(1e3 * seconds).toFixed(0)} ms`;
    if (seconds < 59.995) return `${seconds.toFixed(2)} s`;
    const rounded = Math.round(seconds), hours = Math.floor(rounded / 3600);
    if (!hours) return `${Math.floor(rounded / 60)} min ${rounded % 60} s`;
    return `${hours} h ${Math.floor((rounded % 3600) / 60)} min`;
  },
};

// Multiples of 1, 2 or 5 times a power of ten within a range.
function ticks(low, high, count = 5) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= raw * (1 - 1e-9));
  const first = Math.ceil(low / step - 1e-6), last = Math.floor(high / step + 1e-6);
  const digits = Math.min(100, Math.max(0, 1 - Math.floor(Math.log10(step))));
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toFixed(digits)) + 0);
}

// 1, 2 and 5 times powers of ten; the powers alone where these are many.
function ratioTicks(low, high) {
  const lowest = Math.log10(low), highest = Math.log10(high), marks = [];
  for (let power = Math.floor(lowest); power <= Math.ceil(highest); power++) {
    for (const factor of highest - lowest <= 3 ? [1, 2, 5] : [1]) marks.push(Number(`${factor}e${power}`));
  }
  return marks.filter(tick => low <= tick && tick <= high);
}

// Ticks of an axis of values that read differently: fewer where units of little detail would repeat themselves.
function distinctTicks(low, high, write, byRatio) {
  const tried = byRatio ? [ratioTicks(low, high)] : [5, 4, 3, 2, 1].map(count => ticks(low, high, count));
  const marks = tried.find(some => some.length && new Set(some.map(write)).size === some.length) ?? tried[0];
  return marks.filter((tick, i) => marks.findIndex(other => write(other) === write(tick)) === i);
}

// The exponential moving average, each value the mean of those up to it with weights that fall by `weight` a value.
function smoothed(values, weight) {
  let sum = 0, weights = 0;
  return values.map(value => {
    if (!Number.isFinite(value)) return value;
    sum = weight * sum + value;
    weights = weight * weights + 1;
    return sum / weights;
  });
}

// What stands beside x in a table of ascending xs, on a straight line between two rows.
function interpolated(xs, ys, x) {
  let low = 0, high = xs.length - 1;
  if (x <= xs[low]) return ys[low];
  if (x >= xs[high]) return ys[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle; else high = middle;
  }
  return ys[low] + (ys[high] - ys[low]) * (x - xs[low]) / (xs[high] - xs[low]);
}

const digitsOf = value => Number(value.toPrecision(12)).toLocaleString("en", { maximumFractionDigits: 10 });
const element = (name, attributes = {}, text = "") => {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
};
const decoded = (steps, values, unit) => {
  let place = 0;
  const xs = steps.split(" ").map(more => Number(((place += Number(more)) * unit).toPrecision(12)));
  return { xs, ys: values.split(" ").map(value => (value === "-" ? NaN : Number(value))) };
};
const linesOf = svg => [...svg.querySelectorAll("g[data-y]")].map(group => {
  const { name, unit, x, y, meanX, meanY } = group.dataset, points = decoded(x, y, Number(unit));
  return { name, colour: group.getAttribute("stroke"), points, means: meanX ? decoded(meanX, meanY, Number(unit)) : points };
});

// Axes of a run: tokens and seconds of training by its steps.
const numbers = JSON.parse(document.getElementById("headway-report")?.textContent ?? "{}");
const axes = (numbers.runs ?? [numbers]).map(run => run.axes ?? {});
const isKnown = axis => axes.length && axes.every(of => of[axis]?.length === of.step?.length && of[axis].length > 1);
const OVER = {
  step: { name: "step", scale: () => 1 },
  tokens: { name: "tokens", scale: () => 1 },
  seconds: {
    name: "time of training",
    scale: most => (most < 300 ? 1 : most < 18000 ? 60 : 3600),
    unit: scale => ({ 1: "s", 60: "min", 3600: "h" })[scale],
  },
};

const view = { over: "step", weight: 0 }; // of all charts
const ofSteps = { range: null, at: null }; // zoom and cursor of the charts over steps, which move together
const charts = [];

class Chart {
  constructor(svg) {
    const { of, form, ratio, marks } = svg.dataset;
    Object.assign(this, { svg, of, write: forms[form], mayBeRatio: ratio === "1", lines: linesOf(svg) });
    this.plot = svg.querySelector(".plot");
    this.drawn = [...this.plot.childNodes]; // as the page came
    const { paddingLeft, paddingRight } = getComputedStyle(svg);
    [this.left, this.right] = [paddingLeft, paddingRight].map(parseFloat);
    this.height = Number(svg.querySelector(".curves").getAttribute("height"));
    this.isOfSteps = of === "step";
    this.zoom = this.isOfSteps ? ofSteps : { range: null, at: null };
    this.marks = marks ? marks.split("|").map(mark => {
      const [step, kind, ...name] = mark.split(" ");
      return { step: Number(step), kind, name: name.join(" ") };
    }) : [];
    this.places = [...new Set(this.lines.flatMap(({ points: { xs, ys } }) => xs.filter((_, i) => Number.isFinite(ys[i]))))];
    this.places.sort((a, b) => a - b);
    const xs = this.lines.flatMap(line => line.points.xs);
    this.whole = [Math.min(...xs), Math.max(...xs)];
    this.cursor = element("line", { class: "cursor", y2: this.height });
    this.chosen = element("rect", { class: "chosen", height: this.height });
    this.readout = document.createElement("p");
    this.readout.className = "readout";
    this.readout.setAttribute("aria-live", "polite");
    svg.parentNode.after(this.readout);
    this.listen();
  }

  get width() {
    return this.svg.getBoundingClientRect().width - this.left - this.right;
  }

  get over() {
    return this.isOfSteps ? view.over : "step";
  }

  // Where a step of a line stands on the axis that is chosen: a step of another run has had another number of tokens.
  place(x, line = 0) {
    const of = axes[Math.min(line, axes.length - 1)];
    return this.over === "step" ? x : interpolated(of.step, of[this.over], x);
  }

  // Both ends of what is shown, on the axis that is chosen.
  get ends() {
    const [from, to] = this.zoom.range ?? this.whole, ends = this.lines.map((_, i) => [this.place(from, i), this.place(to, i)]);
    return [Math.min(...ends.map(end => end[0])), Math.max(...ends.map(end => end[1]))];
  }

  draw() {
    const isAsItCame = this.over === "step" && !view.weight && !this.zoom.range;
    this.plot.replaceChildren(...(isAsItCame ? this.drawn : this.parts()));
    this.point();
  }

  parts() {
    const [from, to] = this.ends, span = to > from ? to - from : 1;
    const lines = this.lines.map(({ colour, points, means }, i) => {
      const at = ({ xs, ys }) => xs.map((x, n) => [this.place(x, i), ys[n]]);
      const raw = at(points), mean = { xs: means.xs, ys: smoothed(means.ys, view.weight) };
      return { colour, raw, smooth: view.weight && means.xs.length >= FEWEST ? at(mean) : null };
    });
    const shown = lines.flatMap(line => line.raw).filter(([x, y]) => Number.isFinite(y) && x >= from && x <= to).map(([, y]) => y);
    const { yOf, ticks: drawn } = this.values(shown.length ? shown : [0, 1]);
    // Curves, each with one point more on both sides of what is shown.
    const curves = element("svg", {
      class: "curves", viewBox: `0 0 ${WIDE} ${this.height}`, preserveAspectRatio: "none", width: "100%", height: this.height,
    });
    lines.forEach(({ colour, raw, smooth }, i) => {
      const line = element("g", { stroke: colour });
      const paths = smooth ? [[raw, "faint"], [smooth, ""]] : [[raw, ""]];
      for (const [points, name] of paths) {
        const first = points.findIndex(([x]) => x >= from), last = points.findLastIndex(([x]) => x <= to);
        let d = "", isOpen = false, isAlone = false;
        points.slice(Math.max(0, first - 1), last + 2).forEach(([x, y]) => {
          const isDrawn = Number.isFinite(yOf(y));
          if (isDrawn) {
            d += `${isOpen ? "L" : "M"}${(WIDE * (x - from) / span).toFixed(1)} ${yOf(y).toFixed(1)}`;
            isAlone = !isOpen;
          } else if (isAlone) { d += "h0"; isAlone = false; }
          isOpen = isDrawn;
        });
        line.append(element("path", { d: d + (isAlone ? "h0" : ""), class: name, ...(i ? { "stroke-dasharray": "7 3" } : {}) }));
      }
      curves.append(line);
    });
    const named = this.drawn.filter(node => node.nodeName === "g"); // names of the lines
    return [...drawn, ...this.axis(from, to), ...this.markLines(from, to, span), curves, ...named];
  }

  // The axis of values: where each stands, and what is drawn of it.
  values(shown) {
    let low = Math.min(...shown), high = Math.max(...shown);
    const byRatio = this.mayBeRatio && low > 0 && low < high / MANY;
    if (!(high > low)) [low, high] = [Math.min(low, 0), Math.max(high, 0) || 1];
    const up = value => (byRatio ? (value > 0 ? Math.log10(value) : NaN) : value);
    const yOf = value => this.height - this.height * (up(value) - up(low)) / (up(high) - up(low));
    const drawn = distinctTicks(low, high, this.write, byRatio).flatMap(tick => [
      element("line", { x2: "100%", y1: yOf(tick), y2: yOf(tick), stroke: "var(--grid)" }),
      element("text", { x: 0, dx: -6, y: yOf(tick) + 4, "text-anchor": "end" }, this.write(tick)),
    ]);
    if (byRatio) drawn.push(element("text", { x: 0, dx: -14, y: this.height + 34, "text-anchor": "end" }, "logarithmic"));
    return { yOf, ticks: drawn };
  }

  // The axis below the plot, with as many ticks as there is room for.
  axis(from, to) {
    const { name, scale, unit } = this.isOfSteps ? OVER[this.over] : { name: this.of, scale: () => 1 };
    const by = scale(Math.max(Math.abs(from), Math.abs(to))), write = value => {
      const isLarge = this.over === "tokens" && Math.abs(value) >= 1e4;
      return isLarge ? value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 6 }) : digitsOf(value);
    };
    const span = to > from ? to - from : 1, width = Math.max(100, this.width);
    let labels = [];
    for (let count = 1; count <= 8; count++) {
      const placed = ticks(from / by, to / by, count).map(tick => [(tick * by - from) / span, write(tick)]);
      const rooms = placed.map(([at, label]) => [at * width - CHARACTER / 2 * label.length, at * width + CHARACTER / 2 * label.length]);
      if (rooms.every(([left], i) => !i || rooms[i - 1][1] + APART <= left)) labels = placed;
    }
    const drawn = labels.map(([at, label]) => {
      const isCut = at * width + CHARACTER / 2 * label.length > width + this.right;
      const place = isCut ? { x: "100%", dx: this.right, "text-anchor": "end" } : { x: `${100 * at}%`, "text-anchor": "middle" };
      return element("text", { ...place, y: this.height + 16 }, label);
    });
    const isNamed = this.lines.some(line => line.name);
    const place = isNamed ? { x: 0 } : { x: "50%", "text-anchor": "middle" };
    return [
      element("line", { x2: "100%", y1: this.height, y2: this.height, stroke: "var(--ink)" }), ...drawn,
      element("text", { ...place, y: this.height + 34 }, unit ? `${name} [${unit(by)}]` : name),
    ];
  }

  markLines(from, to, span) {
    let taken = -Infinity; // up to where names stand [pixels]
    return this.marks.map(mark => ({ ...mark, at: (this.place(mark.step) - from) / span })).filter(({ at }) => at >= 0 && at <= 1)
      .flatMap(({ kind, name, at }) => {
        const x = `${100 * at}%`, isFar = at > 0.7, room = CHARACTER * name.length, begin = at * this.width - (isFar ? room : 0);
        const line = element("line", { class: kind, x1: x, x2: x, y2: kind === "evaluation" ? 7 : this.height });
        if (!name || begin < taken + APART) return [line];
        taken = begin + room;
        return [line, element("text", { x, y: -5, "text-anchor": isFar ? "end" : "start" }, name)];
      });
  }

  // Show the cursor and the values at its step.
  point() {
    const step = this.zoom.at, [from, to] = this.ends;
    if (step === null || !this.isRead) return;
    const share = to > from ? (this.place(step) - from) / (to - from) : 0;
    this.cursor.setAttribute("x1", `${100 * share}%`);
    this.cursor.setAttribute("x2", `${100 * share}%`);
    this.plot.append(this.cursor);
    const inside = this.lines.filter(({ points: { xs } }) => step >= xs[0] && step <= xs[xs.length - 1]);
    const parts = inside.map(({ name, points: { xs, ys }, means }) => {
      const finite = xs.map((x, i) => i).filter(i => Number.isFinite(ys[i]));
      const i = finite.reduce((best, n) => (Math.abs(xs[n] - step) < Math.abs(xs[best] - step) ? n : best), finite[0]);
      const isSmooth = view.weight && means.xs.length >= FEWEST;
      const smooth = isSmooth ? `, smoothed ${this.write(interpolated(means.xs, smoothed(means.ys, view.weight), step))}` : "";
      return `${name} ${this.write(ys[i])}${xs[i] === step ? "" : ` (at ${digitsOf(xs[i])})`}${smooth}`.trim();
    });
    const at = this.place(step), written = this.over === "seconds" ? forms.duration(at) : `${this.over} ${digitsOf(Math.round(at))}`;
    const where = this.over === "step" ? `${this.of} ${digitsOf(step)}` : `${written} (step ${digitsOf(step)})`;
    this.readout.textContent = `${where}: ${parts.join(", ")}`;
  }

  // The step whose values stand nearest to a place of the window.
  stepAt(clientX) {
    const [from, to] = this.ends, x = from + this.shareAt(clientX) * (to - from);
    return this.places.reduce((best, step) => (Math.abs(this.place(step) - x) < Math.abs(this.place(best) - x) ? step : best));
  }

  shareAt(clientX) {
    const share = (clientX - this.svg.getBoundingClientRect().left - this.left) / this.width;
    return Math.max(0, Math.min(1, share));
  }

  // Show a range of steps, of all charts that move together.
  show(range) {
    const [first, last] = this.whole;
    this.zoom.range = range && (range[0] > first || range[1] < last) && range[1] > range[0] ? range : null;
    for (const chart of charts) if (chart.zoom === this.zoom) chart.draw();
  }

  // Zoom by a factor around the cursor, or around the middle.
  zoomBy(factor) {
    const [from, to] = this.zoom.range ?? this.whole, at = this.zoom.at ?? (from + to) / 2;
    const middle = Math.max(from, Math.min(to, at)), [first, last] = this.whole;
    const left = Math.max(first, middle - factor * (middle - from)), right = Math.min(last, middle + factor * (to - middle));
    const between = this.places.filter(step => step >= left && step <= right).length;
    if (factor > 1 || between > 1) this.show([left, right]);
  }

  readAt(step) {
    this.isRead = true;
    this.zoom.at = step;
    const range = this.zoom.range;
    if (range && (step < range[0] || step > range[1])) {
      const moved = step < range[0] ? step - range[0] : step - range[1]; // the range follows the cursor
      this.show([range[0] + moved, range[1] + moved]);
    }
    this.point();
  }

  listen() {
    let begun = null; // where a range begins that the pointer chooses [pixels]
    this.svg.addEventListener("pointerdown", event => {
      begun = event.clientX;
      this.readAt(this.stepAt(event.clientX));
    });
    this.svg.addEventListener("pointermove", event => {
      this.readAt(this.stepAt(event.clientX));
      if (begun === null || Math.abs(event.clientX - begun) < DRAG) return;
      this.svg.setPointerCapture(event.pointerId);
      const [left, right] = [begun, event.clientX].map(x => 100 * this.shareAt(x)).sort((a, b) => a - b);
      this.chosen.setAttribute("x", `${left}%`);
      this.chosen.setAttribute("width", `${right - left}%`);
      this.plot.append(this.chosen);
    });
    const end = event => {
      const from = begun;
      begun = null;
      this.chosen.remove();
      if (event.type === "pointerup" && from !== null && Math.abs(event.clientX - from) >= DRAG) {
        this.show([from, event.clientX].map(x => this.stepAt(x)).sort((a, b) => a - b));
      }
    };
    this.svg.addEventListener("pointerup", end);
    this.svg.addEventListener("pointercancel", end);
    this.svg.addEventListener("dblclick", () => this.show(null));
    this.svg.tabIndex = 0;
    this.svg.addEventListener("keydown", event => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const at = this.places.findIndex(step => step >= (this.zoom.at ?? -Infinity)), last = this.places.length - 1;
      const number = { ArrowLeft: at - 1, ArrowRight: this.isRead ? at + 1 : 0, Home: 0, End: last }[event.key];
      const zoom = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
      if (number !== undefined) this.readAt(this.places[Math.max(0, Math.min(last, number))]);
      else if (zoom) this.zoomBy(zoom);
      else if (event.key === "0") this.show(null);
      else return;
      event.preventDefault();
    });
  }
}

// Choices for all charts, above the first of them.
function addControls(charts) {
  const controls = document.createElement("div");
  controls.className = "controls";
  controls.setAttribute("role", "group");
  controls.setAttribute("aria-label", "How the charts are drawn");
  const choice = (text, options, chosen, choose) => {
    const label = document.createElement("label"), select = document.createElement("select");
    for (const [value, name] of options) select.add(new Option(name, value));
    select.value = chosen;
    select.addEventListener("change", () => { choose(select.value); for (const chart of charts) chart.draw(); });
    label.append(`${text} `, select);
    controls.append(label, " ");
  };
  const known = charts.some(chart => chart.isOfSteps) ? ["tokens", "seconds"].filter(isKnown) : [];
  if (known.length) choice("over", ["step", ...known].map(axis => [axis, OVER[axis].name]), view.over, over => { view.over = over; });
  const weights = [[0, "none"], [0.6, "0.6"], [0.9, "0.9"], [0.97, "0.97"], [0.99, "0.99"]];
  choice("smoothing", weights, view.weight, weight => { view.weight = Number(weight); });
  const leading = charts.find(chart => chart.isOfSteps) ?? charts[0];
  const acts = { "zoom in": () => leading.zoomBy(0.5), "zoom out": () => leading.zoomBy(2), all: () => leading.show(null) };
  for (const [text, act] of Object.entries(acts)) {
    const button = document.createElement("button");
    button.textContent = text;
    button.addEventListener("click", act);
    controls.append(button, " ");
  }
  const hint = document.createElement("span");
  hint.className = "note";
  hint.textContent = "Or drag across a chart; in one that has the focus, the keys are + - 0 and the arrows.";
  controls.append(hint);
  charts[0].svg.closest(".charts").before(controls);
}

// A page that is served is loaded anew every few seconds, and is read on as it was.
const isServed = location.protocol.startsWith("http");
const stored = JSON.parse((isServed && sessionStorage.getItem("charts")) || "{}");
Object.assign(view, stored.view);
if (view.over !== "step" && !isKnown(view.over)) view.over = "step";
Object.assign(ofSteps, stored.ofSteps);
if (isServed) addEventListener("pagehide", () => sessionStorage.setItem("charts", JSON.stringify({ view, ofSteps })));

for (const svg of document.querySelectorAll("svg[data-of]")) charts.push(new Chart(svg));
if (charts.length) {
  addControls(charts);
  for (const chart of charts) chart.draw();
}
