// The matrix: a line per path and model, a column per target and TP; the worst state stands for several.
const order = { by: "path", down: false };
function matrix() {
  const lines = new Map();
  const columns = new Map();
  for (const row of visible) {
    const line = JSON.stringify([axis(row, "path"), axis(row, "model")]);
    const column = JSON.stringify([axis(row, "hw"), axis(row, "tp_size")]);
    columns.set(column, JSON.parse(column));
    if (!lines.has(line)) lines.set(line, { path: axis(row, "path"), model: axis(row, "model"), cells: new Map() });
    const cells = lines.get(line).cells;
    if (!cells.has(column)) cells.set(column, []);
    cells.get(column).push(row);
  }
  const heads = [...columns.entries()].sort(([, a], [, b]) => compare(a[0], b[0]) || compare(a[1], b[1]));
  const worst = (rows) => (rows ? Math.min(...rows.map((r) => r.state)) : 99);
  const key = { path: (l) => l.path, model: (l) => l.model }[order.by] || ((l) => worst(l.cells.get(order.by)));
  const sorted = [...lines.values()].sort((a, b) => (order.down ? -1 : 1) * compare(key(a), key(b)) || compare(a.path, b.path) || compare(a.model, b.model));
  const sorter = (by, text, props) => el("th", { ...props, "aria-sort": order.by === by ? (order.down ? "descending" : "ascending") : null },
    el("button", { type: "button", title: "sort", on: { click: () => { order.down = order.by === by && !order.down; order.by = by; matrix(); } } },
      text, order.by === by ? (order.down ? " ▾" : " ▴") : ""));
  const targets = [];
  for (const [, [hw]] of heads) {
    if (targets.length && targets[targets.length - 1][0] === hw) targets[targets.length - 1][1] += 1; else targets.push([hw, 1]);
  }
  const first = new Set(heads.filter(([, [hw]], i) => !i || heads[i - 1][1][0] !== hw).map(([k]) => k));
  const head = el("thead", {},
    el("tr", {}, sorter("path", "path", { rowspan: 2, cls: "row" }), sorter("model", "model", { rowspan: 2, cls: "row" }), targets.map(([hw, n]) => el("th", { colspan: n }, String(hw)))),
    el("tr", {}, heads.map(([k, [, tp]]) => sorter(k, `TP${tp}`, {}))));
  const again = (i) => (i && sorted[i - 1].path === sorted[i].path ? " again" : "");
  const body = el("tbody", {}, sorted.map((line, i) => el("tr", {},
    el("th", { cls: `row${again(i)}`, scope: "row" }, el("div", { cls: "clip", title: String(line.path) }, String(line.path), el("small", {}, String(line.model)))),
    el("th", { cls: "row", scope: "row" }, el("div", { cls: "clip", title: String(line.model) }, String(line.model))),
    heads.map(([k]) => square(line, k, first.has(k))))));
  $("grid").replaceChildren(head, body);
  const empty = $("matrix").querySelector(".none");
  empty.hidden = sorted.length > 0;
  empty.textContent = ROWS.length ? "No cell meets the filter." : "The run has no cells.";
}
function square(line, column, first) {
  const rows = line.cells.get(column);
  if (!rows) return el("td", { cls: first ? "first" : null, title: "not in this run's grid" }, "");
  const state = Math.min(...rows.map((r) => r.state));
  const same = rows.filter((r) => r.state === state).length;
  const of = { path: line.path, model: line.model, hw: axis(rows[0], "hw"), tp_size: axis(rows[0], "tp_size") };
  const tally1 = (n, extra) => num(String(n), `count:${new URLSearchParams({ ...of, ...extra })}`);
  const here = tally1(same, { state: STATES[state].name });
  const label = rows.length === 1 ? [STATES[state].name, grown(rows[0])] : same === rows.length ? here : [here, "/", tally1(rows.length, {})];
  const tally = STATES.map((s, i) => [s.name, rows.filter((r) => r.state === i).length]).filter(([, n]) => n).map(([s, n]) => `${s} ${n}`).join(", ");
  return el("td", { cls: first ? "first" : null }, el("button", { type: "button", cls: `s-${STATES[state].name}`, title: `${name(rows[0])}: ${tally}`,
    "aria-label": `${name(rows[0])}: ${tally}`, on: { click: () => detail(rows) } }, glyph(state), el("b", {}, label)));
}
lazily("matrix", matrix);
