// Values under the pointer or the arrow keys, in all charts over steps at once; a page that is loaded again keeps its folds.
"use strict";

const charts = [...document.querySelectorAll("svg[data-of]")].map(svg => {
  const lines = [...svg.querySelectorAll("path[data-at]")].map(({ dataset: { name, at, steps, values } }) => (
    { name, at: at.split(" ").map(Number), steps: steps.split("|"), values: values.split("|") }));
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor");
  cursor.setAttribute("y2", svg.querySelector(".curves").getAttribute("height"));
  return { svg, lines, cursor, plot: svg.querySelector(".plot"), remark: svg.closest("figure").querySelector(".remark") };
});

// Show the values nearest to a place [1/1000 of the plot] of all charts over the same; none for null.
function show(of, place) {
  for (const { svg, lines, cursor, plot, remark } of charts.filter(({ svg }) => svg.dataset.of === of)) {
    remark.dataset.came ??= remark.innerHTML;
    cursor.remove();
    if (place === null) { remark.innerHTML = remark.dataset.came; continue; }
    const nearest = lines.map(({ at }) => at.reduce((best, x, i) => (Math.abs(x - place) < Math.abs(at[best] - place) ? i : best), 0));
    const { at, steps } = lines[0], x = `${at[nearest[0]] / 10}%`;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    plot.append(cursor);
    const values = lines.map(({ name, values }, i) => `${name} ${values[nearest[i]]}`.trim()).join(", ");
    remark.textContent = `${of} ${steps[nearest[0]]}: ${values}`;
  }
}

for (const { svg, lines: [{ at }], cursor, plot, remark } of charts) {
  const { of } = svg.dataset;
  svg.tabIndex = 0;
  remark.setAttribute("aria-live", "polite");
  svg.addEventListener("pointermove", event => {
    const { left, width } = plot.querySelector(".curves").getBoundingClientRect();
    show(of, 1000 * (event.clientX - left) / width);
  });
  for (const leaving of ["pointerleave", "blur"]) svg.addEventListener(leaving, () => show(of, null));
  svg.addEventListener("keydown", ({ key }) => {
    const here = cursor.isConnected ? at.indexOf(10 * parseFloat(cursor.getAttribute("x1"))) : -1, last = at.length - 1;
    const next = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: last }[key];
    if (next !== undefined) show(of, at[Math.max(0, Math.min(last, next))]);
  });
}

if (location.protocol.startsWith("http")) {
  const folds = [...document.querySelectorAll("details")], open = JSON.parse(sessionStorage.getItem("folds") || "[]");
  folds.forEach((fold, i) => { fold.open ||= Boolean(open[i]); });
  addEventListener("pagehide", () => sessionStorage.setItem("folds", JSON.stringify(folds.map(fold => fold.open))));
}
