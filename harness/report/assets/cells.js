// The list of cells: sorts by any column, draws lines as one scrolls.
const HAS = {
  time: ROWS.some((r) => r.time), memory: ROWS.some((r) => field(r, "memory")),
};
const scaleOf = (rows) => decades(rows.flatMap((r) => (r.time ? [r.time.q1_us ?? r.time.median_us, r.time.q3_us ?? r.time.median_us] : [])), round);
const COLUMNS = [
  { id: "state", label: "state", key: (r) => r.state, draw: (r) => [glyph(r.state), STATES[r.state].name, grown(r)] },
  ...[["path", "path"], ["model", "model"], ["hw", "target"], ["tp_size", "TP"], ["experts", "experts"], ["impl", "impl"], ["env", "env"]].map(([a, label]) => ({
    id: a, label, key: (r) => axis(r, a), cls: a === "tp_size" || a === "experts" ? "r" : "",
    draw: (r) => (a === "impl" ? el("span", { cls: "name" }, el("span", { cls: `i-${known(axis(r, a))}` }, legendMark(axis(r, a))), String(axis(r, a)))
      : a === "path" || a === "model" ? el("div", { cls: "clip", title: String(axis(r, a)) }, String(axis(r, a) ?? ""), a === "path" && caseOf(r) ? el("span", { cls: "dim" }, ` ${caseOf(r)}`) : "") : String(axis(r, a) ?? "")),
  })),
  HAS.time && { id: "median", label: "median", cls: "r", key: (r) => (r.time ? r.time.median_us : null), draw: (r) => median(r) },
  HAS.time && { id: "strip", label: "", draw: (r, scale) => (r.time ? el("div", { style: "width:150px" }, strip(scale, timeMarks(r, scale))) : null) },
  HAS.time && { id: "fraction", label: "of copy", cls: "r", key: (r) => (r.time ? r.time.copy_fraction : null), draw: fraction },
  HAS.memory && { id: "memory", label: "extra memory", cls: "r", key: (r) => { const m = field(r, "memory"); return m ? m.peak_extra_bytes : null; }, draw: memory },
  { id: "why", label: "why not", key: (r) => why(r), cls: "wrap", draw: (r) => { const text = why(r); return el("span", { title: text }, text.length > 120 ? `${text.slice(0, 119)}…` : text); } },
].filter(Boolean);
function grown(row) {
  const d = field(row, "decisions");
  return d && STATES[row.state].name === "padded" && d.bytes_ratio ? [" ", numbered(row, "decisions.bytes_ratio", d.bytes_ratio, (v) => `${digits(v)}x`)] : null;
}
function why(row) {
  const status = field(row, "status");
  if (status === null) return "the run ended before this cell";
  if (status !== "ok") return String(field(row, "reason") || absent(row, "time"));
  return row.time ? "" : `not timed: ${absent(row, "time")}`;
}
const listOrder = { by: "state", down: false };
let drawn = 0;
let ordered = [];
let listScale = null;
function list() {
  const column = COLUMNS.find((c) => c.id === listOrder.by) || COLUMNS[0];
  ordered = visible.map((row) => [column.key(row), row]).sort(([a, x], [b, y]) => {
    const blank = (v) => v === null || v === undefined || v === "";
    if (blank(a) || blank(b)) return blank(a) - blank(b) || x.i - y.i;
    return (listOrder.down ? -1 : 1) * compare(a, b) || x.i - y.i;
  }).map(([, row]) => row);
  listScale = scaleOf(visible);
  const head = el("thead", {}, el("tr", {}, COLUMNS.map((c) => (c.key ? el("th", { cls: c.cls, "aria-sort": c.id === column.id ? (listOrder.down ? "descending" : "ascending") : null },
    el("button", { type: "button", "data-sort": c.id, on: { click: () => { listOrder.down = listOrder.by === c.id && !listOrder.down; listOrder.by = c.id; list(); } } },
      c.label, c.id === column.id ? (listOrder.down ? " ▾" : " ▴") : "")) : el("th", {}, listScale ? el("div", { style: "width:150px" }, ruler(listScale, 3)) : "")))));
  drawn = 0;
  $("list").replaceChildren(head, el("tbody", {}));
  grow();
}
function grow(step = 40) {
  const body = $("list").tBodies[0];
  if (!body) return;
  const next = ordered.slice(drawn, drawn + step).map((row) => el("tr", { tabindex: 0, "data-i": row.i, on: {
    click: () => detail([row]), keydown: (e) => { if (e.key === "Enter") detail([row]); } } },
    COLUMNS.map((c) => el("td", { cls: c.cls }, c.draw(row, listScale)))));
  body.append(...next);
  drawn += next.length;
  $("more").replaceChildren(drawn < ordered.length ? el("button", { type: "button", on: { click: () => grow(200) } }, `Show more: ${ordered.length - drawn} cells are left`)
    : ordered.length ? "" : "No cell meets the filter.");
}
lazily("cells", list);
window.addEventListener("beforeprint", () => grow(400));
