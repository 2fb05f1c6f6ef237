// One cell: its checks, layouts, numbers and the command that runs it again.
const UNITS = [[/_us$/, (v) => duration(v)], [/bytes$/, (v) => bytes(v)], [/_ms$/, (v) => duration(v * 1e3)]];
const write = (key, v) => (UNITS.find(([r]) => r.test(key)) || [null, (x) => (Number.isInteger(x) ? String(x) : digits(x, 4))])[1](v);
function value(row, path, key, v) {
  if (v === null || v === undefined) return "not recorded";
  if (typeof v === "number") return num(write(key, v), source(row, path));
  if (Array.isArray(v) && v.every((x) => typeof x === "number")) return v.flatMap((x, i) => [i ? " x " : "", num(String(x), source(row, `${path}.${i}`))]);
  return typeof v === "object" ? JSON.stringify(v) : String(v);
}
const leaves = (object, path) => Object.entries(object).flatMap(([k, v]) => (v && typeof v === "object" && !Array.isArray(v) ? leaves(v, [...path, k]) : [[[...path, k], v]]));
const pairs2 = (row, path, object) => el("dl", { cls: "kv" }, leaves(object, []).flatMap(([keys, v]) =>
  [el("dt", {}, keys.join(" ")), el("dd", {}, value(row, [path, ...keys].join("."), keys[keys.length - 1], v))]));
const part = (title, ...body) => el("section", {}, el("h3", {}, title), ...body);
function detail(rows) {
  const box = $("detail");
  const close = el("button", { type: "button", on: { click: () => box.close() } }, "Close");
  if (rows.length > 1) {
    const sorted = rows.slice().sort((a, b) => a.state - b.state || a.i - b.i);
    const shown = sorted.slice(0, 400);
    const table = el("table", {}, el("thead", {}, el("tr", {}, ["state", "impl", "env", "experts", "other", "median", ""].map((t) => el("th", {}, t)))),
      el("tbody", {}, shown.map((r) => el("tr", {}, el("td", {}, glyph(r.state), STATES[r.state].name), ["impl", "env", "experts"].map((a) => el("td", {}, String(axis(r, a) ?? ""))),
        el("td", {}, others(r)), el("td", {}, median(r) || absent(r, "time")), el("td", {}, el("button", { type: "button", on: { click: () => show(box, r, () => detail(rows)) } }, "open"))))));
    const first = rows[0];
    box.replaceChildren(el("header", {}, el("h2", {}, `${axis(first, "path")} · ${axis(first, "model")} · ${axis(first, "hw")} · TP${axis(first, "tp_size")}`), close), el("div", { cls: "scroll", style: "margin-top:14px" }, table),
      sorted.length > shown.length ? el("p", { cls: "none" }, `The first ${shown.length} of ${sorted.length}; filter to see the others.`) : "");
  } else show(box, rows[0], null, close);
  if (!box.open) box.showModal();
  box.scrollTop = 0;
}
const SHOWN = ["path", "model", "hw", "tp_size", "experts", "impl", "env"];
const others = (row) => D.axes.filter((a) => !SHOWN.includes(a) && axis(row, a) !== null && axis(row, a) !== undefined).map((a) => `${a}=${axis(row, a)}`).join(" ");
function show(box, row, back, close) {
  const state = STATES[row.state];
  const parts = [el("header", {}, el("h2", {}, glyph(row.state), ` ${name(row)} · ${axis(row, "hw")} · ${axis(row, "impl")}`),
    el("span", { cls: "opts" }, back ? el("button", { type: "button", on: { click: back } }, "Back") : null, close || el("button", { type: "button", on: { click: () => box.close() } }, "Close"))),
  el("p", {}, el("b", {}, state.name), `: ${state.what}. `, field(row, "reason") || "")];
  if (row.repro) {
    parts.push(part("Run it again", el("div", { cls: "repro" }, el("pre", {}, row.repro), el("button", { type: "button", cls: "copy", on: { click: () => copy(row.repro) } }, "Copy"))));
  }
  if (!row.fields) { box.replaceChildren(...parts); return; }
  const checks = Object.entries(field(row, "checks") || {});
  parts.push(part(`Checks`, checks.length ? el("ul", { cls: "checks" }, checks.map(([k, v]) => { const c = String(v).match(/^(pass|fail|skip)/); const cls = c ? c[1] : "skip";
    return el("li", {}, el("span", { cls: `glyph ${cls}` }, { pass: "✓", fail: "✕", skip: "○" }[cls]), el("span", {}, `${k}${v === "pass" ? "" : `: ${v}`}`)); })) : el("p", { cls: "none" }, "No check ran.")));
  const layouts = Object.entries(field(row, "layouts") || {});
  if (layouts.length) {
    const shape = (k, l, f) => (l[f] ? value(row, `layouts.${k}.${f}`, f, l[f]) : "");
    parts.push(part("Layouts", el("div", { cls: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ["tensor", "layout", "logical", "padded", "padding"].map((t) => el("th", {}, t)))),
      el("tbody", {}, layouts.map(([k, l]) => el("tr", {}, el("td", {}, k), el("td", {}, `${l.name}${l.params && Object.keys(l.params).length ? ` ${JSON.stringify(l.params)}` : ""}`), el("td", {}, shape(k, l, "logical")), el("td", {}, shape(k, l, "padded")),
        el("td", {}, l.pad_bytes === undefined || l.pad_bytes === null ? "" : value(row, `layouts.${k}.pad_bytes`, "pad_bytes", l.pad_bytes)))))))));
  }
  parts.push(part("Time", row.time ? pairs2(row, "time", Object.fromEntries(Object.entries(row.time).filter(([k]) => k !== "samples"))) : el("p", { cls: "none" }, reason(row, "time")), row.time && row.time.samples ? el("p", { cls: "none" }, num(String(row.time.samples), `length:${source(row, "time.samples_us")}`), " samples") : null));
  for (const [key, title] of [["memory", "Memory"], ["bound", "Bound (computed, no time)"], ["codegen", "Code"]]) {
    const v = field(row, key);
    parts.push(part(title, v ? pairs2(row, key, v) : el("p", { cls: "none" }, reason(row, key))));
  }
  for (const [key, title] of [["decisions", "Decisions"], ["digests", "Digests"], ["provenance", "Where it ran"]]) {
    const v = field(row, key);
    if (v && Object.keys(v).length) parts.push(part(title, pairs2(row, key, v)));
  }
  parts.push(part("Cell", el("dl", { cls: "kv" }, D.axes.filter((a) => axis(row, a) !== null).flatMap((a) => [el("dt", {}, a), el("dd", {}, typeof axis(row, a) === "number" ? num(String(axis(row, a)), source(row, `cell.${a}`)) : String(axis(row, a)))])),
    el("p", { cls: "none" }, `rows.jsonl of ${D.runs[row.run]}, row `, String(row.line + 1))));
  box.replaceChildren(...parts);
  box.scrollTop = 0;
}
function reason(row, what) {
  const code = absent(row, what);
  return `Not measured: ${code}${D.absent[code] ? ` (${D.absent[code]})` : ""}`;
}
$("detail").addEventListener("click", (e) => { if (e.target === $("detail")) $("detail").close(); });
