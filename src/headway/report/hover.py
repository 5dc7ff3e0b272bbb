"""The page's one script: the step and the values of a chart's lines under the pointer, or by the arrow keys.

It reads what `headway.report.charts` wrote beside each line, asks nothing of the network, and a page without it says
all that it says. In a long series it stops at the points that are drawn, which are records: the smallest and the
largest value of each bucket.
"""

SCRIPT = """
const charts = new Map();
for (const line of document.querySelectorAll("g[data-v]")) {
  let at = 0;
  const xs = line.dataset.x.split(" ").map(more => (at += Number(more)));
  const known = charts.get(line.ownerSVGElement) ?? [];
  charts.set(line.ownerSVGElement, [...known, { name: line.dataset.name, xs, values: line.dataset.v.split("|") }]);
}
for (const [svg, lines] of charts) {
  const { of, unit, from, to, left, right } = svg.querySelector("g[data-v]").dataset;
  const places = [...new Set(lines.flatMap(line => line.xs))].sort((a, b) => a - b);
  const nearest = (xs, x) => xs.reduce((best, one, i) => (Math.abs(one - x) < Math.abs(xs[best] - x) ? i : best), 0);
  const written = x => Number((x * unit).toPrecision(12)).toLocaleString("en");
  const said = document.createElement("p");
  said.className = "said";
  said.setAttribute("aria-live", "polite");
  svg.parentNode.after(said);
  const cursor = svg.appendChild(document.createElementNS(svg.namespaceURI, "path"));
  cursor.setAttribute("stroke", "var(--soft)");
  let place = -1;
  const show = number => {
    place = Math.max(0, Math.min(places.length - 1, number));
    const x = places[place];
    const parts = lines.filter(({ xs }) => x >= xs[0] && x <= xs[xs.length - 1]).map(({ name, xs, values }) => {
      const i = nearest(xs, x);
      return `${name} ${values[i]}${xs[i] === x ? "" : ` (at ${written(xs[i])})`}`.trim();
    });
    said.textContent = `${of} ${written(x)}: ${parts.join(", ")}`;
    const drawn = Number(left) + (right - left) * (to > from ? (x - from) / (to - from) : 0);
    cursor.setAttribute("d", `M${drawn} 12V180`);
  };
  const follow = event => {
    const box = svg.getBoundingClientRect(), drawn = (event.clientX - box.left) / box.width * 640;
    const share = (drawn - left) / (right - left);
    show(nearest(places, Number(from) + share * (to - from)));
  };
  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerdown", follow);
  svg.tabIndex = 0;
  svg.addEventListener("keydown", event => {
    const next = { ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: places.length - 1 }[event.key];
    if (next !== undefined) { event.preventDefault(); show(next); }
  });
}
"""
