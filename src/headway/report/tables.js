// Tables that sort by the column whose heading is pressed: downwards first where it holds numbers, then upwards, then
// as the page came.

const FACTORS = {
  "": 1, "%": 0.01, us: 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600, B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40,
  PiB: 2 ** 50,
};
["", "k", "M", "G", "T", "P", "E", "Z", "Y"].forEach((prefix, i) => {
  FACTORS[`${prefix}FLOP`] = FACTORS[`${prefix}FLOP/s`] = 1e3 ** i;
});

// The number of a cell in the unit of its kind, such as seconds; NaN where it is none.
function magnitude(text) {
  const number = /([-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?) ?([A-Za-z%/]*)/g;
  const parts = [...text.matchAll(number)];
  if (!parts.length || text.replace(number, "").trim()) return NaN;
  return parts.reduce((sum, [, digits, unit]) => sum + Number(digits.replaceAll(",", "")) * (FACTORS[unit] ?? NaN), 0);
}

function sortTable(table, column, direction) {
  const body = table.tBodies[0], rows = [...body.rows];
  rows.forEach((row, i) => { row.dataset.place ??= i; });
  const text = row => row.cells[column].textContent.trim();
  const isOfNumbers = isNumbers(rows.map(text));
  rows.sort((a, b) => {
    const [x, y] = isOfNumbers ? [magnitude(text(a)), magnitude(text(b))] : [text(a), text(b)];
    const order = isOfNumbers ? x - y : x.localeCompare(y, "en", { numeric: true });
    if (direction === "none") return a.dataset.place - b.dataset.place;
    if (isOfNumbers && (Number.isNaN(x) || Number.isNaN(y))) return Number.isNaN(x) - Number.isNaN(y); // at the end
    return (direction === "ascending" ? order : -order) || a.dataset.place - b.dataset.place;
  });
  body.append(...rows);
}

// Whether more cells of a column are numbers than words.
function isNumbers(cells) {
  const full = cells.filter(cell => cell && cell !== "-");
  return 2 * full.filter(cell => !Number.isNaN(magnitude(cell))).length > full.length;
}

for (const table of document.querySelectorAll("table")) {
  if (table.tBodies[0]?.rows.length < 3) continue;
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    if (!heading.textContent.trim()) return;
    const button = document.createElement("button");
    button.append(...heading.childNodes);
    heading.append(button);
    button.addEventListener("click", () => {
      const cells = [...table.tBodies[0].rows].map(row => row.cells[column].textContent.trim());
      const turns = isNumbers(cells) ? ["descending", "ascending", "none"] : ["ascending", "descending", "none"];
      const next = turns[(turns.indexOf(heading.getAttribute("aria-sort") ?? "none") + 1) % 3];
      for (const other of headings) other.removeAttribute("aria-sort");
      if (next !== "none") heading.setAttribute("aria-sort", next);
      sortTable(table, column, next);
    });
  });
}
